"""The data model: the media of one request, and the forward batch that requests meet in.

Promises: what a request's items cover of its prompt is checked once, indexed for the plan, and indexed anew when items
or offsets are replaced; padding never changes a prompt's length. Imports no torch.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mmgraph.errors import ContextError, InputsError
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


_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SpanIndex:
    """The spans of one request, ascending and disjoint, as parallel lists.

    Attributes:
        starts: First prompt position of each span.
        ends: Last prompt position of each span.
        sources: The item's row at the span's first position.
        items: Whose span it is.
        whole: Every item has one span.
    """

    starts: list[int]
    ends: list[int]
    sources: list[int]
    items: list[MultimodalDataItem]
    whole: bool


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
        """Tell whether any item takes part: one that isn't None and has offsets.

        Raises:
            InputsError: An entry isn't an item.
        """
        items = (_checked_item(item, position) for position, item in enumerate(self._items))
        return any(item is not None and item.offsets for item in items)

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
        return _have_items(self._inputs())

    def has_extend_inputs(self) -> bool:
        """Tell whether any prefill request has media."""
        prefills = 0 if self.extend_seq_lens is None else len(self.extend_seq_lens)
        return _have_items(self._inputs()[:prefills])

    def _inputs(self) -> Sequence[MultimodalInputs | None]:
        return () if self.mm_inputs is None else self.mm_inputs


def pad_input_tokens(ids: Sequence[int], inputs: MultimodalInputs | None) -> list[int]:
    """Put each item's pad value at its offsets.

    Args:
        ids: The whole prompt: a list of integers; an array, tensor or tuple of them is made one.
        inputs: The request's media; items with no pad value or no offsets are passed over.

    Returns:
        A new list of the same length; ``ids`` itself where nothing changes.

    Raises:
        InputsError: Offsets that are malformed, outside the prompt, empty, overlapping or out of order, or a
            pad value that isn't an integer of 64 bits, not negative: the error names the item, and ``ids`` is as
            before. Or ids or inputs that are something else.
    """
    listed = _checked_ids(ids)
    if inputs is None:
        return listed
    if not isinstance(inputs, MultimodalInputs):
        raise InputsError(
            f"inputs must be MultimodalInputs or None, got {type(inputs).__name__}; write "
            "pad_input_tokens(ids, MultimodalInputs(mm_items=[...]))"
        )
    items = [_checked_item(item, position) for position, item in enumerate(inputs.mm_items)]
    padded = [item if item is not None and item.pad_value is not None else None for item in items]
    index = _build_index(padded)
    if index.ends and index.ends[-1] >= len(listed):
        item = index.items[-1]
        raise InputsError(
            f"{describe_item(item, inputs.mm_items.index(item))}: span {(index.starts[-1], index.ends[-1])} "
            f"ends outside the prompt of {len(listed)} tokens; offsets are inclusive positions in the whole prompt"
        )
    out: list[int] | None = None
    for start, end, item in zip(index.starts, index.ends, index.items, strict=True):
        run = [_pad_of(item)] * (end - start + 1)
        if listed[start : end + 1] != run:
            out = list(listed) if out is None else out
            out[start : end + 1] = run
    return listed if out is None else out


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        return list(value)
    raise InputsError(
        f"mm_items must be a list of MultimodalDataItem or None, got {type(value).__name__}; write "
        "MultimodalInputs(mm_items=[item, ...])"
    )


def checked_inputs(inputs: Any, request: int) -> MultimodalInputs | None:
    """Give one request's media.

    Raises:
        ContextError: It is something else.
    """
    if inputs is None or isinstance(inputs, MultimodalInputs):
        return inputs
    raise ContextError(
        f"mm_inputs[{request}] must be MultimodalInputs or None, got {type(inputs).__name__}; "
        "write MultimodalInputs(mm_items=[...])",
        request=request,
    )


def _have_items(entries: Sequence[Any]) -> bool:
    checked = (checked_inputs(inputs, request) for request, inputs in enumerate(entries))
    return any(inputs is not None and inputs.has_items() for inputs in checked)


def _checked_item(item: Any, position: int) -> MultimodalDataItem | None:
    if item is None or isinstance(item, MultimodalDataItem):
        return item
    raise InputsError(
        f"{describe_item(item, position)}: mm_items must hold MultimodalDataItem or None; "
        "write MultimodalInputs(mm_items=[MultimodalDataItem(...)])"
    )


def _build_index(items: Sequence[MultimodalDataItem | None]) -> SpanIndex:
    entries: list[tuple[int, int, int, int]] = []
    for position, item in enumerate(items):
        if _checked_item(item, position) is None:
            continue
        item = cast(MultimodalDataItem, item)
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
    owners = [cast(MultimodalDataItem, items[entry[3]]) for entry in entries]
    return SpanIndex(
        starts=[entry[0] for entry in entries],
        ends=[entry[1] for entry in entries],
        sources=[entry[2] for entry in entries],
        items=owners,
        whole=len(set(owners)) == len(owners),
    )


def _pad_of(item: MultimodalDataItem) -> int:
    value = item.pad_value
    try:
        number = operator.index(cast(int, value))
    except TypeError:
        raise InputsError(
            f"{describe_item(item)}: the pad value must be an integer, None or 'auto', got {value!r}"
        ) from None
    if not 0 <= number <= _LARGEST_ID:
        raise InputsError(
            f"{describe_item(item)}: the pad value must be a token id, 0 to {_LARGEST_ID}, got {number}; 'auto' makes "
            "one"
        )
    return number


def _checked_ids(ids: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    nested = isinstance(listed, list | tuple) and listed and not hasattr(listed[0], "__index__")
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or nested:
        came = f"{type(ids).__name__} of {type(listed[0]).__name__}" if nested else type(ids).__name__
        raise InputsError(
            f"ids must be one prompt's token ids, a list of integers, got {came}; pad each prompt on its own"
        )
    return listed if isinstance(listed, list) else list(listed)
