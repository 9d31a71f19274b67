"""The records that a plan is made of.

Promises: plain host data; ranges are made when they are first looked at. Imports no torch.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmgraph.items import MultimodalDataItem


class ScatterRange(NamedTuple):
    """A run of rows that goes from an item to the flat batch; all ends are inclusive.

    Attributes:
        flat_dst_start: First row of ``input_ids`` that is covered.
        flat_dst_end: Last row that is covered.
        item: The canonical item whose rows are used.
        item_src_start: The item's row that goes to ``flat_dst_start``.
        item_src_end: The item's row that goes to ``flat_dst_end``.
    """

    flat_dst_start: int
    flat_dst_end: int
    item: MultimodalDataItem
    item_src_start: int
    item_src_end: int


class Progress(NamedTuple):
    """How far a request has come with an item.

    Attributes:
        request: The request's index.
        item: Its own item, which may be an alias.
        position: The prompt position at which its next, or this, chunk begins.
    """

    request: int
    item: MultimodalDataItem
    position: int


# Five fields straight into the tuple: the generated constructor is Python code and takes twice as long.
_make_range = partial(tuple.__new__, ScatterRange)


class LazyRanges(Sequence[ScatterRange]):
    """The ranges of a plan, made when they are first looked at: a batch is embedded from the columns alone.

    Args:
        dst_start: First covered row of each range.
        dst_end: Last covered row.
        items: The canonical items.
        src_start: First row used of each range's item.
    """

    __slots__ = ("_columns", "_made")

    def __init__(
        self,
        dst_start: npt.NDArray[np.int64],
        dst_end: npt.NDArray[np.int64],
        items: list[MultimodalDataItem],
        src_start: npt.NDArray[np.int64],
    ) -> None:
        self._columns = dst_start, dst_end, items, src_start
        self._made: list[ScatterRange] | None = None

    def _list(self) -> list[ScatterRange]:
        if self._made is None:
            dst_start, dst_end, items, src_start = self._columns
            src_end = src_start + (dst_end - dst_start)
            columns = dst_start.tolist(), dst_end.tolist(), items, src_start.tolist(), src_end.tolist()
            self._made = list(map(_make_range, zip(*columns, strict=True)))
        return self._made

    def __len__(self) -> int:
        return len(self._columns[2])

    def __getitem__(self, place: Any) -> Any:
        return self._list()[place]

    def __iter__(self) -> Iterator[ScatterRange]:
        return iter(self._list())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._list() == list(other)

    def __repr__(self) -> str:
        return repr(self._list())

    __hash__ = None  # type: ignore[assignment]
