"""How much of a batch fits a budget of encoding, for a scheduler that decides before anything is encoded.

Promises: plain host data, no torch and no launch; what the batch that comes out has to encode is within the budget, but
for one item that is larger than all of it and then goes alone; a request is cut just before an item, never inside one.
The cost is a plan and one more walk over its ranges.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from mmgraph.errors import OptionError
from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan, build_plan


@dataclass(frozen=True, slots=True)
class BudgetedBatch:
    """What of a batch can go now.

    Attributes:
        ctx: The batch, with the lengths below.
        extend_seq_lens: The rows that each prefill request may have now; 0 where it has to wait.
        num_tokens: The rows of ``input_ids`` then, those that decode included.
        items: What has to be encoded, each once, in first-touch order.
        encode_tokens: The rows of these.
        cuts: For each request that was cut, the item that it was cut before.
    """

    ctx: MultimodalForwardContext
    extend_seq_lens: tuple[int, ...]
    num_tokens: int
    items: tuple[MultimodalDataItem, ...]
    encode_tokens: int
    cuts: dict[int, MultimodalDataItem]

    @property
    def encode_items(self) -> int:
        """How many items have to be encoded."""
        return len(self.items)


def fit_to_budget(
    ctx: MultimodalForwardContext,
    num_tokens: int,
    *,
    encode_tokens: int | None = None,
    encode_items: int | None = None,
    cached: Callable[[MultimodalDataItem], bool] | None = None,
) -> BudgetedBatch:
    """Cut a batch so that what it has to encode fits a budget.

    Requests are served in order, items in the order of their prompt; what an item needs is its whole row count, once
    for all its twins. Items that are encoded or cached need nothing, nor do twins of an item that is taken. A twin that
    is encoded spares the budget if it comes before the others, or where nothing can cut its request before it.

    A request is cut just before the first item that doesn't fit. Later requests go on and may use what is left, so
    put those that wait longest first: what comes first has the whole budget. An item of more rows than the whole budget
    is taken if nothing was taken before it, and nothing is taken after it. A budget of zero takes nothing at all.

    Args:
        ctx: The batch as it would be without a budget.
        num_tokens: Its rows: those of the prefill requests, then decode rows.
        encode_tokens: The most rows that encoders may make; None: any number.
        encode_items: The most items that they may be given; None: any number.
        cached: Tells of an item that isn't encoded whether its rows can be had without an encoder.

    Returns:
        The batch that can go now.

    Raises:
        OptionError: A budget that isn't a number of at least zero.
        MultimodalError: The batch can't be planned; as `mmgraph.planning.build_plan`.
    """
    budget = _Budget(encode_tokens, encode_items)
    plan = build_plan(ctx, num_tokens)
    touches = _touches(ctx, plan)
    done = _sure(plan, touches, cached)
    lengths = _listed(ctx.extend_seq_lens)
    cuts: dict[int, MultimodalDataItem] = {}
    taken: dict[MultimodalDataItem, MultimodalDataItem] = {}  # by canonical
    for touch in touches:
        if touch.request in cuts:
            continue
        if touch.item.encoded is not None:
            taken.pop(touch.canonical, None)  # its twin stays in, so nothing has to be encoded for it
            done.add(touch.canonical)
        elif touch.canonical not in done:
            if not _cached(touch.item, cached):
                if not budget.take(touch.item):
                    cuts[touch.request] = touch.item
                    num_tokens -= lengths[touch.request] - touch.rows_before
                    lengths[touch.request] = touch.rows_before
                    continue
                taken[touch.canonical] = touch.item
            done.add(touch.canonical)
    return BudgetedBatch(
        ctx=replace(ctx, extend_seq_lens=lengths),
        extend_seq_lens=tuple(lengths),
        num_tokens=num_tokens,
        items=tuple(taken.values()),
        encode_tokens=sum(item.num_tokens for item in taken.values()),
        cuts=cuts,
    )


def limit_plan(
    plan: EncodePlan, *, encode_tokens: int | None = None, encode_items: int | None = None
) -> EncodePlan:
    """Give a plan of the same ranges that encodes only its first misses, as many as fit a budget.

    ``embedder.encode`` it and come back with the same plan for the next ones: those that are encoded are passed over.
    Where a plan without misses comes back, all are encoded, and ``embedder.assemble`` can place the rows.

    Args:
        plan: A plan.
        encode_tokens: The most rows that encoders may make; None: any number. An item of more than that goes alone.
        encode_items: The most items that they may be given; None: any number.

    Returns:
        The plan with the first of its misses, in first-touch order.

    Raises:
        OptionError: A budget that isn't a number of at least one.
    """
    budget = _Budget(encode_tokens, encode_items, least=1)
    kept = vars(plan).get("_kept")  # rows that the plan holds in a pool
    missing = {
        item
        for items in plan.misses_by_modality.values()
        for item in items
        if item.encoded is None and not (kept is not None and kept[1].has(item))
    }
    now: dict[Modality, list[MultimodalDataItem]] = {}
    for item in plan.items:
        if item in missing:
            if not budget.take(item):
                break
            now.setdefault(item.modality, []).append(item)
    limited = replace(plan, misses_by_modality=now)
    if kept is not None:
        vars(limited)["_kept"] = kept  # they hold one batch's rows together
    return limited


class _Budget:
    """What is left of a budget, and what was taken from it."""

    def __init__(self, tokens: int | None, items: int | None, least: int = 0) -> None:
        for name, amount in (("encode_tokens", tokens), ("encode_items", items)):
            if amount is not None and (type(amount) is not int or amount < least):
                raise OptionError(
                    f"{name} must be an int of at least {least}, or None for no bound, got {amount!r}"
                )
        self.items: list[MultimodalDataItem] = []
        self.tokens = 0
        self._most_tokens = tokens
        self._most_items = items

    def take(self, item: MultimodalDataItem) -> bool:
        """Take what an item needs, if it is there; the first item may need more rows than there are."""
        tokens = item.num_tokens
        if self._most_items is not None and len(self.items) >= self._most_items:
            return False
        over = self._most_tokens is not None and self.tokens + tokens > self._most_tokens
        if over and (self.items or not self._most_tokens):
            return False
        self.items.append(item)
        self.tokens += tokens
        return True


class _Touch(NamedTuple):
    """A range of a plan, as its request sees it.

    Attributes:
        request: Whose.
        rows_before: The request's rows before it.
        item: The request's own item.
        canonical: The item whose rows the plan would use.
    """

    request: int
    rows_before: int
    item: MultimodalDataItem
    canonical: MultimodalDataItem


def _touches(ctx: MultimodalForwardContext, plan: EncodePlan) -> list[_Touch]:
    lengths = [max(length, 0) for length in _listed(ctx.extend_seq_lens)]
    bases = [0, *accumulate(lengths)]
    prefixes = _listed(ctx.extend_prefix_lens)
    touches: list[_Touch] = []
    for entry, request in zip(plan.scatter_ranges, plan.range_requests, strict=True):
        rows_before = entry.flat_dst_start - bases[request]
        item = entry.item
        if item in plan.aliases_by_canonical:
            item = _item_at(ctx, request, prefixes[request] + rows_before)
        touches.append(_Touch(request, rows_before, item, entry.item))
    return touches


def _item_at(ctx: MultimodalForwardContext, request: int, position: int) -> MultimodalDataItem:
    inputs: Any = ctx.mm_inputs[request] if ctx.mm_inputs is not None else None
    index = inputs.span_index()
    found: MultimodalDataItem = index.items[bisect_left(index.ends, position)]
    return found


def _sure(
    plan: EncodePlan, touches: list[_Touch], cached: Callable[[MultimodalDataItem], bool] | None
) -> set[MultimodalDataItem]:
    """Give the canonical items whose rows are there wherever requests are cut: a twin is encoded, and before it in its
    request nothing has to be."""
    sure: set[MultimodalDataItem] = set()
    if all(canonical.encoded is None for canonical in plan.aliases_by_canonical):
        return sure
    open_ended: set[int] = set()  # requests that could be cut here or earlier
    for touch in touches:
        if touch.request in open_ended or touch.canonical in sure:
            continue
        if touch.item.encoded is not None:
            sure.add(touch.canonical)
        elif not _cached(touch.item, cached):
            open_ended.add(touch.request)
    return sure


def _cached(item: MultimodalDataItem, cached: Callable[[MultimodalDataItem], bool] | None) -> bool:
    return cached is not None and cached(item)


def _listed(lengths: Any) -> list[int]:
    if lengths is None:
        return []
    return [int(length) for length in (lengths.tolist() if hasattr(lengths, "tolist") else lengths)]
