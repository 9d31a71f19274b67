"""What a forward batch has to encode and where the rows go.

Promises: plain host data, no torch and no launch; every position of the chunk that an item covers is in exactly
one range, every source row is inside its item; items of one modality and hash are encoded once. The cost grows
with the requests and with the spans that their chunks touch: spans are found by bisection in each request's
sorted index.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mmgraph.errors import AliasError, ContextError, InputsError
from mmgraph.inputs import (
    MultimodalDataItem,
    MultimodalForwardContext,
    MultimodalInputs,
    SpanIndex,
    checked_inputs,
    describe_item,
)
from mmgraph.modality import Modality
from mmgraph.plan_records import LazyRanges, Progress
from mmgraph.plan_records import ScatterRange as ScatterRange

_modality_of = operator.attrgetter("_modality")  # past the property, which takes twice as long


@dataclass(frozen=True)
class EncodePlan:
    """The plan of one forward batch; false where there is nothing to scatter.

    Attributes:
        misses_by_modality: The canonical items to encode, each once, in first-touch order.
        scatter_ranges: Where rows go, ascending and disjoint.
        aliases_by_canonical: For each canonical item that has any, the other items that get its rows.
        range_requests: For each range, the index of its request, where known.
        unfinished: The requests' items that reach beyond their chunks, and where the next chunks begin.
        continued: The requests' items that began before their chunks, and where these begin.
    """

    misses_by_modality: dict[Modality, list[MultimodalDataItem]] = field(default_factory=dict)
    scatter_ranges: Sequence[ScatterRange] = ()
    aliases_by_canonical: dict[MultimodalDataItem, list[MultimodalDataItem]] = field(default_factory=dict)
    range_requests: Sequence[int] = ()
    unfinished: Sequence[Progress] = ()
    continued: Sequence[Progress] = ()

    def __bool__(self) -> bool:
        return bool(self.scatter_ranges)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or one in another process, holds no rows.
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    @cached_property
    def items(self) -> tuple[MultimodalDataItem, ...]:
        """The canonical items of the ranges, each once, in first-touch order."""
        return tuple(dict.fromkeys(self.range_items))

    @cached_property
    def range_items(self) -> Sequence[MultimodalDataItem]:
        """The canonical item of each range."""
        return [entry.item for entry in self.scatter_ranges]

    @cached_property
    def dst_start(self) -> npt.NDArray[np.int64]:
        """First covered row of each range."""
        return np.array([entry.flat_dst_start for entry in self.scatter_ranges], dtype=np.int64)

    @cached_property
    def dst_end(self) -> npt.NDArray[np.int64]:
        """Last covered row of each range, inclusive."""
        return np.array([entry.flat_dst_end for entry in self.scatter_ranges], dtype=np.int64)

    @cached_property
    def src_start(self) -> npt.NDArray[np.int64]:
        """First row used of each range's item."""
        return np.array([entry.item_src_start for entry in self.scatter_ranges], dtype=np.int64)

    def request_of(self, item: MultimodalDataItem) -> int | None:
        """Give the first request that uses an item's rows, where known."""
        requests = self.requests_of(item)
        return requests[0] if requests else None

    def requests_of(self, item: MultimodalDataItem) -> list[int]:
        """Give all requests that use an item's rows, ascending, each once."""
        used = zip(self.range_items, self.range_requests, strict=bool(self.range_requests))
        return list(dict.fromkeys(request for own, request in used if own is item))

    def without_requests(self, requests: Collection[int]) -> "EncodePlan":
        """Give the plan that scatters nothing to the requests named; what they alone needed isn't encoded."""
        kept = [
            (entry, request)
            for entry, request in zip(self.scatter_ranges, self.range_requests, strict=True)
            if request not in requests
        ]
        items = {entry.item for entry, _ in kept}
        misses = {
            modality: [item for item in missing if item in items]
            for modality, missing in self.misses_by_modality.items()
        }
        return EncodePlan(
            misses_by_modality={modality: missing for modality, missing in misses.items() if missing},
            scatter_ranges=tuple(entry for entry, _ in kept),
            aliases_by_canonical={
                item: twins for item, twins in self.aliases_by_canonical.items() if item in items
            },
            range_requests=tuple(request for _, request in kept),
            unfinished=[step for step in self.unfinished if step.request not in requests],
            continued=[step for step in self.continued if step.request not in requests],
        )


def build_plan(ctx: MultimodalForwardContext, num_tokens: int, *, skip: Collection[int] = ()) -> EncodePlan:
    """Plan a forward batch.

    Args:
        ctx: The batch.
        num_tokens: Rows of the flat ``input_ids``: those of the prefill requests in order, then decode rows.
        skip: Requests to leave as text, by index.

    Returns:
        The plan. An item already encoded is the canonical one of its twins, wherever in the batch it comes.

    Raises:
        ContextError: Not a context, or lengths that aren't integers, aren't equally many, are more than the
            requests or the rows, or a negative prefix.
        InputsError: Malformed or overlapping offsets.
        AliasError: Twins with different token counts.
    """
    mm_inputs, prefix_lens, seq_lens = _checked_lists(ctx, num_tokens, skip)
    canonical_of: dict[Any, MultimodalDataItem] = {}
    twins_of: dict[Any, dict[MultimodalDataItem, None]] = {}  # as ordered sets
    starts: list[int] = []
    ends: list[int] = []
    sources: list[int] = []
    requests: list[int] = []
    owners: list[MultimodalDataItem] = []
    unfinished: list[Progress] = []
    continued: list[Progress] = []
    shifts: list[int] = []
    counts: list[int] = []
    base = 0
    for request, seq_len in enumerate(seq_lens):
        if seq_len <= 0:
            continue
        inputs = mm_inputs[request]
        if inputs is not None and request not in skip:
            index = _index_of(inputs, request)
            first = prefix_lens[request]
            last = first + seq_len - 1
            low = bisect_left(index.ends, first)
            high = bisect_right(index.starts, last, low)
            if low < high:
                at = len(starts)
                starts += index.starts[low:high]
                ends += index.ends[low:high]
                sources += index.sources[low:high]
                # Spans ascend and are disjoint, so only the first can begin and only the last can end outside.
                if starts[at] < first:
                    if index.whole:
                        continued.append(Progress(request, index.items[low], first))
                    sources[at] += first - starts[at]
                    starts[at] = first
                if ends[-1] > last:
                    ends[-1] = last
                    if index.whole:
                        unfinished.append(Progress(request, index.items[high - 1], last + 1))
                shifts.append(base - first)
                counts.append(high - low)
                requests += [request] * (high - low)
                own = index.items[low:high]
                owners += own
                if not index.whole:
                    for item in dict.fromkeys(own):
                        if item.offsets[-1][1] > last:
                            unfinished.append(Progress(request, item, last + 1))
                        if item.offsets[0][0] < first:
                            continued.append(Progress(request, item, first))
        base += seq_len
    keys = [item.share_key or item for item in owners]
    canonicals = list(map(canonical_of.setdefault, keys, owners))
    if canonicals != owners:
        for key, item, request in zip(keys, owners, requests, strict=True):
            if canonical_of[key] is not item:
                _add_twin(canonical_of, twins_of, key, item, request)
        canonicals = list(map(canonical_of.__getitem__, keys))
    shift = np.repeat(np.array(shifts, dtype=np.int64), counts)
    dst_start = np.array(starts, dtype=np.int64) + shift
    dst_end = np.array(ends, dtype=np.int64) + shift
    src_start = np.array(sources, dtype=np.int64)
    plan = EncodePlan(
        misses_by_modality=_by_modality([item for item in canonical_of.values() if item.encoded is None]),
        scatter_ranges=LazyRanges(dst_start, dst_end, canonicals, src_start),
        aliases_by_canonical={canonical_of[key]: list(twins) for key, twins in twins_of.items()},
        range_requests=requests,
        unfinished=unfinished,
        continued=continued,
    )
    # Already at hand.
    plan.__dict__.update(dst_start=dst_start, dst_end=dst_end, src_start=src_start, range_items=canonicals)
    return plan


def _by_modality(items: list[MultimodalDataItem]) -> dict[Modality, list[MultimodalDataItem]]:
    modalities = list(map(_modality_of, items))
    distinct = dict.fromkeys(modalities)
    if len(distinct) == 1:
        return {modalities[0]: items}
    return {
        modality: [item for item, own in zip(items, modalities, strict=True) if own is modality]
        for modality in distinct
    }


def _add_twin(
    canonical_of: dict[Any, MultimodalDataItem],
    twins_of: dict[Any, dict[MultimodalDataItem, None]],
    key: Any,
    item: MultimodalDataItem,
    request: int,
) -> None:
    canonical = canonical_of[key]
    twins = twins_of.setdefault(key, {})
    if item in twins:
        return
    if item.num_tokens != canonical.num_tokens:
        raise _alias_error(canonical, item, request)
    if canonical.encoded is None and item.encoded is not None:
        twins_of[key] = {canonical: None, **twins}
        canonical_of[key] = item
    else:
        twins[item] = None


def _index_of(inputs: Any, request: int) -> SpanIndex:
    if not isinstance(inputs, MultimodalInputs):
        checked_inputs(inputs, request)
    try:
        index: SpanIndex = inputs.span_index()
    except InputsError as error:
        raise InputsError(f"request {request}: {error}", request=request) from error
    return index


def _alias_error(canonical: MultimodalDataItem, twin: MultimodalDataItem, request: int) -> AliasError:
    return AliasError(
        f"{describe_item(twin, request=request)} has {twin.num_tokens} tokens, and {describe_item(canonical)}, "
        f"which has the same modality and hash, has {canonical.num_tokens}; twins share encoder rows, so give "
        "items of different contents or grids different hashes, or correct the offsets",
        request=request,
    )


def _checked_lists(
    ctx: MultimodalForwardContext, num_tokens: int, skip: Collection[int]
) -> tuple[Sequence[MultimodalInputs | None], list[int], list[int]]:
    if not isinstance(ctx, MultimodalForwardContext):
        raise ContextError(
            f"ctx must be a MultimodalForwardContext, got {type(ctx).__name__}; write "
            "MultimodalForwardContext(mm_inputs, extend_prefix_lens, extend_seq_lens)"
        )
    prefix_lens = _integers("extend_prefix_lens", ctx.extend_prefix_lens)
    seq_lens = _integers("extend_seq_lens", ctx.extend_seq_lens)
    mm_inputs = () if ctx.mm_inputs is None else ctx.mm_inputs
    if len(prefix_lens) != len(seq_lens):
        raise ContextError(
            "extend_prefix_lens and extend_seq_lens must have one entry for each prefill request, got "
            f"{len(prefix_lens)} and {len(seq_lens)}"
        )
    if len(seq_lens) > len(mm_inputs):
        raise ContextError(
            f"mm_inputs must have one entry for each request, got {len(mm_inputs)} for {len(seq_lens)} prefill "
            "requests; put None for a request without media"
        )
    total = sum(length for length in seq_lens if length > 0)
    if total > num_tokens:
        raise ContextError(
            f"extend_seq_lens {_shown(seq_lens)} sum to {total} rows, more than the {num_tokens} rows of "
            "input_ids; give each request's rows in this chunk, not its prompt's length"
        )
    if prefix_lens and min(prefix_lens) < 0:
        for request, (prefix, length) in enumerate(zip(prefix_lens, seq_lens, strict=True)):
            if prefix < 0 < length and request not in skip:
                raise ContextError(
                    f"extend_prefix_lens[{request}] must not be negative, got {prefix}", request=request
                )
    return mm_inputs, prefix_lens, seq_lens


def _integers(name: str, values: Any) -> list[int]:
    if values is None:
        return []
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return list(map(operator.index, listed))
    except TypeError:
        raise ContextError(f"{name} must be a list of integers, got {values!r}") from None


def _shown(values: list[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
