"""The data model: the media of one request, and the forward batch that requests meet in.

Promises: what a request's items cover of its prompt is checked once, indexed for the plan, and indexed anew when items
or offsets are replaced; padding never changes a prompt's length. Imports no torch.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mmgraph.errors import InputsError
from mmgraph.fixed_list import FixedList
from mmgraph.items import FeatureHandle, MultimodalDataItem, checked_spans, describe_item
from mmgraph.modality import Modality

__all__ = [
    "FeatureHandle",
    "Modality",
    "MultimodalDataItem",
    "MultimodalForwardContext",
    "MultimodalInputs",
    "SpanIndex",
    "describe_item",
    "pad_input_tokens",
]


@dataclass(frozen=True, slots=True)
class SpanIndex:
    """The spans of one request, ascending and disjoint, as parallel lists.

    Attributes:
        starts: First prompt position of each span.
        ends: Last prompt position of each span.
        sources: The item's row at the span's first position.
        items: Whose span it is.
    """

    starts: list[int]
    ends: list[int]
    sources: list[int]
    items: list[MultimodalDataItem]


class MultimodalInputs:
    """The media of one request.

    Args:
        mm_items: Items in any order; None and items without offsets are passed over everywhere. Read like
            a list; to change it, assign a new one.
    """

    __slots__ = ("__weakref__", "_epoch", "_index", "_items")

    def __init__(self, mm_items: Iterable[MultimodalDataItem | None] = ()) -> None:
        self.mm_items = mm_items

    def __repr__(self) -> str:
        return f"MultimodalInputs(mm_items={list(self._items)!r})"

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"_items": self._items, "_index": None, "_epoch": None}

    @property
    def mm_items(self) -> FixedList[MultimodalDataItem | None]:
        """The items."""
        return self._items

    @mm_items.setter
    def mm_items(self, value: Iterable[MultimodalDataItem | None]) -> None:
        self._items: FixedList[MultimodalDataItem | None] = FixedList(
            _listed(value), "inputs.mm_items = [item, ...]"
        )
        self._index: SpanIndex | None = None
        self._epoch: object = None

    def has_items(self) -> bool:
        """Tell whether any item takes part: one that isn't None and has offsets."""
        return any(item is not None and item.offsets for item in self._items)

    def span_index(self) -> SpanIndex:
        """Give the spans of all items, sorted; made at first use and again after items or offsets were
        assigned.

        Raises:
            InputsError: An entry isn't an item, or offsets are malformed or overlap. The error names the item.
        """
        epoch = MultimodalDataItem.offsets_epoch
        if self._index is None or self._epoch is not epoch:
            index = _build_index(self._items)
            self._index, self._epoch = index, epoch
        return self._index


@dataclass(frozen=True, slots=True)
class MultimodalForwardContext:
    """What a forward batch holds of each request. A plain record: the plan checks it.

    Attributes:
        mm_inputs: One entry per request, None for text only; prefill requests first, then those that decode.
        extend_prefix_lens: For each prefill request, how many prompt positions lie before this chunk.
        extend_seq_lens: For each prefill request, how many rows of ``input_ids`` are its; zero or less adds
            none.
    """

    mm_inputs: Sequence[MultimodalInputs | None] | None = ()
    extend_prefix_lens: Sequence[int] | None = ()
    extend_seq_lens: Sequence[int] | None = ()

    def has_inputs(self) -> bool:
        """Tell whether any request has media."""
        return any(inputs is not None and inputs.has_items() for inputs in self._inputs())

    def has_extend_inputs(self) -> bool:
        """Tell whether any prefill request has media."""
        prefills = 0 if self.extend_seq_lens is None else len(self.extend_seq_lens)
        return any(inputs is not None and inputs.has_items() for inputs in self._inputs()[:prefills])

    def _inputs(self) -> Sequence[MultimodalInputs | None]:
        return () if self.mm_inputs is None else self.mm_inputs


def pad_input_tokens(ids: list[int], inputs: MultimodalInputs | None) -> list[int]:
    """Put each item's pad value at its offsets.

    Args:
        ids: The whole prompt.
        inputs: The request's media; items with no pad value or no offsets are passed over.

    Returns:
        A new list of the same length; ``ids`` itself where nothing changes.

    Raises:
        InputsError: Offsets that are malformed, outside the prompt, empty, overlapping or out of order, or a
            pad value that isn't an integer. The error names the item, and ``ids`` is as before.
    """
    if inputs is None:
        return ids
    padded = [item if item is not None and item.pad_value is not None else None for item in inputs.mm_items]
    index = _build_index(padded)
    if index.ends and index.ends[-1] >= len(ids):
        item = index.items[-1]
        raise InputsError(
            f"{describe_item(item, inputs.mm_items.index(item))}: span {(index.starts[-1], index.ends[-1])} "
            f"ends outside the prompt of {len(ids)} tokens; offsets are inclusive positions in the whole prompt"
        )
    out: list[int] | None = None
    for start, end, item in zip(index.starts, index.ends, index.items, strict=True):
        run = [_pad_of(item)] * (end - start + 1)
        if list(ids[start : end + 1]) != run:
            out = list(ids) if out is None else out
            out[start : end + 1] = run
    return ids if out is None else out


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        return list(value)
    raise InputsError(
        f"mm_items must be a list of MultimodalDataItem or None, got {type(value).__name__}; write "
        "MultimodalInputs(mm_items=[item, ...])"
    )


def _build_index(items: Sequence[MultimodalDataItem | None]) -> SpanIndex:
    entries: list[tuple[int, int, int, int]] = []
    for position, item in enumerate(items):
        if item is None:
            continue
        if not isinstance(item, MultimodalDataItem):
            raise InputsError(
                f"{describe_item(item, position)}: mm_items must hold MultimodalDataItem or None; "
                "write MultimodalInputs(mm_items=[MultimodalDataItem(...)])"
            )
        source = 0
        item._indexed = True
        for start, end in checked_spans(item, position):
            entries.append((start, end, source, position))
            source += end - start + 1
    entries.sort()
    for before, entry in itertools.pairwise(entries):
        if entry[0] <= before[1]:
            raise InputsError(
                f"{describe_item(items[entry[3]], entry[3])}: span {entry[:2]} overlaps span {before[:2]} of "
                f"{describe_item(items[before[3]], before[3])}; a prompt position belongs to at most one item"
            )
    return SpanIndex(
        starts=[entry[0] for entry in entries],
        ends=[entry[1] for entry in entries],
        sources=[entry[2] for entry in entries],
        items=[cast(MultimodalDataItem, items[entry[3]]) for entry in entries],
    )


def _pad_of(item: MultimodalDataItem) -> int:
    value = item.pad_value
    try:
        return operator.index(cast(int, value))
    except TypeError:
        raise InputsError(
            f"{describe_item(item)}: the pad value must be an integer, None or 'auto', got {value!r}"
        ) from None
