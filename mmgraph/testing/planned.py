"""What the plan of a forward batch must be, worked out position by position.

Promises: no code of the planner is used, and no arithmetic on spans: each position of each chunk is looked for in each
item of its request. Quadratic, for prompts of tens of positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext
from mmgraph.modality import Modality


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """One range of a plan; all ends are inclusive.

    Attributes:
        dst_start: First row of ``input_ids``.
        dst_end: Last row of ``input_ids``.
        item: The canonical item.
        src_start: The item's row that goes to ``dst_start``.
        src_end: The item's row that goes to ``dst_end``.
        request: Whose rows they are.
    """

    dst_start: int
    dst_end: int
    item: MultimodalDataItem
    src_start: int
    src_end: int
    request: int


@dataclass(frozen=True, slots=True)
class ExpectedPlan:
    """What the plan of a forward batch must be.

    Attributes:
        ranges: Ascending and disjoint; one for each span that a chunk touches.
        canonicals: The items whose rows are used, by the first touch of their key.
        aliases: For each canonical item that has any, its other touched twins, by first touch.
        misses: The canonical items without rows, by modality; modalities by first touch too.
    """

    ranges: tuple[ExpectedRange, ...]
    canonicals: tuple[MultimodalDataItem, ...]
    aliases: dict[MultimodalDataItem, list[MultimodalDataItem]]
    misses: dict[Modality, list[MultimodalDataItem]]


def plan(ctx: MultimodalForwardContext) -> ExpectedPlan:
    """Work out the plan of a batch whose lengths and offsets are good.

    Args:
        ctx: The batch. Whether items have rows is read now, so ask before the batch is embedded.

    Returns:
        What ``mmgraph.planning.build_plan`` must give.
    """
    walked = _walk(ctx)
    touched: list[MultimodalDataItem] = []
    for step in walked:
        if not any(step.item is item for item in touched):
            touched.append(step.item)
    groups: list[list[MultimodalDataItem]] = []
    for item in touched:
        for group in groups:
            if _are_twins(item, group[0]):
                group.append(item)
                break
        else:
            groups.append([item])
    canonical_of: dict[MultimodalDataItem, MultimodalDataItem] = {}
    canonicals: list[MultimodalDataItem] = []
    aliases: dict[MultimodalDataItem, list[MultimodalDataItem]] = {}
    misses: dict[Modality, list[MultimodalDataItem]] = {}
    for group in groups:
        encoded = [item for item in group if item.encoded is not None]
        chosen = encoded[0] if encoded else group[0]
        canonicals.append(chosen)
        canonical_of.update(dict.fromkeys(group, chosen))
        if len(group) > 1:
            aliases[chosen] = [item for item in group if item is not chosen]
        if not encoded:
            misses.setdefault(chosen.modality, []).append(chosen)
    return ExpectedPlan(_ranges(walked, canonical_of), tuple(canonicals), aliases, misses)


@dataclass(frozen=True, slots=True)
class _Step:
    """One covered row of the batch: whose it is, and which of the item's spans and rows."""

    row: int
    request: int
    item: MultimodalDataItem
    span: int
    place: int


def _walk(ctx: MultimodalForwardContext) -> list[_Step]:
    steps: list[_Step] = []
    base = 0
    for request, length in enumerate(ctx.extend_seq_lens or ()):
        inputs = (ctx.mm_inputs or ())[request]
        for offset in range(max(length, 0)):
            position = (ctx.extend_prefix_lens or ())[request] + offset
            for item in inputs.mm_items if inputs is not None else ():
                place = 0
                for span, (start, end) in enumerate(item.offsets if item is not None else ()):
                    if item is not None and start <= position <= end:
                        steps.append(_Step(base + offset, request, item, span, place + position - start))
                    place += end - start + 1
        base += max(length, 0)
    return steps


def _are_twins(item: MultimodalDataItem, other: MultimodalDataItem) -> bool:
    return item.hash is not None and item.modality is other.modality and item.hash == other.hash


def _ranges(
    walked: Sequence[_Step], canonical_of: Mapping[MultimodalDataItem, MultimodalDataItem]
) -> tuple[ExpectedRange, ...]:
    ranges: list[ExpectedRange] = []
    before: _Step | None = None
    for step in walked:
        item = canonical_of[step.item]
        goes_on = before is not None and (step.request, step.item, step.span) == (
            before.request,
            before.item,
            before.span,
        )
        if goes_on:
            last = ranges.pop()
            ranges.append(
                ExpectedRange(last.dst_start, step.row, item, last.src_start, step.place, step.request)
            )
        else:
            ranges.append(ExpectedRange(step.row, step.row, item, step.place, step.place, step.request))
        before = step
    return tuple(ranges)
