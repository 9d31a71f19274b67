"""``RowMap``: which pool row each output row takes; built and checked on the host.

It is kept as ranges, ascending and disjoint: what overlaps is resolved here, in numpy, so that no kernel has to. The
device is sent ranges too, far fewer bytes than entries, and writes the entries itself where they are needed.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.ops.checks import UNUSED_RANGE, kind_of
from mmgraph.ops.errors import ArgumentError
from mmgraph.ops.launching import on_device
from mmgraph.ops.registration import overload
from mmgraph.ops.slot_ring import on_loan, upload

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """For each output row the pool row that it takes, or none: then the row is text.

    Made by ``from_ranges``, which takes ranges in any order. The constructor takes them as they are kept, checks that
    they are so, and copies them.

    Attributes:
        num_rows: Rows of the output.
        pool_rows: The number of pool rows that the ranges were checked against.
        ranges: int32 ``[ranges, 3]``, read-only: first row, last row (inclusive) and first pool row of each, ascending
            and disjoint.

    Raises:
        ArgumentError: The ranges have another shape or dtype, don't ascend, overlap, or have a row outside the output
            or the pool.
    """

    num_rows: int
    pool_rows: int
    ranges: npt.NDArray[np.int32]
    _entries: list[npt.NDArray[np.int32]] = field(default_factory=list, init=False, repr=False)
    _index: list[npt.NDArray[np.int32]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        num_rows, pool_rows = _counts(self.num_rows, self.pool_rows)
        given: Any = self.ranges
        if not isinstance(given, np.ndarray) or given.dtype != np.int32 or given.shape[1:] != (3,):
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else kind_of(given)
            raise ArgumentError(
                f"ranges must be an int32 array [ranges, 3] of first row, last row and first pool row, got {got}; make "
                "the map with RowMap.from_ranges."
            )
        ranges = given.copy()
        if ranges.shape[0]:
            first, last, source = ranges.astype(np.int64).T
            if _is_wrong(num_rows, pool_rows, first, last, source):
                _diagnose(num_rows, pool_rows, first, last, source)
            wrong = np.zeros(first.shape, dtype=np.bool_)
            wrong[1:] = first[1:] <= last[:-1]
            _check(first, last, wrong, "must begin behind the one before: RowMap.from_ranges takes others")
        _fill(self, num_rows, pool_rows, ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, since numpy's arrays come back writable; what was made of them is made again.
        return type(self), (self.num_rows, self.pool_rows, self.ranges)

    @classmethod
    def from_ranges(
        cls,
        num_rows: int,
        dst_start: npt.ArrayLike,
        dst_end: npt.ArrayLike,
        src_start: npt.ArrayLike,
        *,
        pool_rows: int,
    ) -> "RowMap":
        """Build the map from ranges in any order; where ranges overlap, the later one wins.

        Args:
            num_rows: Rows of the output.
            dst_start: First output row of each range, int ``[ranges]``.
            dst_end: Last output row of each range, inclusive, int ``[ranges]``.
            src_start: Pool row that the range's first row takes, int ``[ranges]``; the next rows follow it.
            pool_rows: Rows of the pool.

        Returns:
            The frozen map.

        Raises:
            ArgumentError: A count isn't an integer, an array isn't one of integers, lengths differ, a range is empty or
                reversed, or a row is outside the output or the pool.
        """
        num_rows, pool_rows = _counts(num_rows, pool_rows)
        first = _as_indices("dst_start", dst_start)
        last = _as_indices("dst_end", dst_end)
        source = _as_indices("src_start", src_start)
        if not first.shape == last.shape == source.shape:
            raise ArgumentError(
                "dst_start, dst_end and src_start must have one entry per range, got "
                f"{first.shape[0]}, {last.shape[0]} and {source.shape[0]}."
            )
        ranges = np.empty((first.shape[0], 3), dtype=np.int32)
        if first.shape[0]:
            if _is_wrong(num_rows, pool_rows, first, last, source):
                _diagnose(num_rows, pool_rows, first, last, source)
            if first.shape[0] > 1 and (first[1:] <= last[:-1]).any():
                first, last, source = _disjoint(num_rows, first, last, source)
                ranges = np.empty((first.shape[0], 3), dtype=np.int32)
            ranges[:, 0], ranges[:, 1], ranges[:, 2] = first, last, source
        made = object.__new__(cls)  # past the constructor, which would check again
        _fill(made, num_rows, pool_rows, ranges)
        return made

    @property
    def host(self) -> npt.NDArray[np.int32]:
        """The entries, int32 ``[num_rows]``, read-only: a pool row, or -1; made at first use."""
        if not self._entries:
            entries = _entries_of(self.num_rows, *self.ranges.astype(np.int64).T)
            entries.setflags(write=False)
            self._entries.append(entries)
        return self._entries[0]

    def index(self) -> npt.NDArray[np.int32]:
        """What a kernel finds a row's range by.

        Returns:
            int32, of one dimension: the ranges, and one that begins behind every row; then for each 64 rows the last
            range that begins at or before the first of them, or the first range of all.
        """
        if not self._index:
            made = self.ranges if self.ranges.shape[0] else _NO_RANGE
            count = made.shape[0]
            steps = -(-self.num_rows // INDEX_STRIDE)
            index = np.empty(3 * (count + 1) + steps, dtype=np.int32)
            index[: 3 * count] = made.reshape(-1)
            index[3 * count : 3 * count + 3] = UNUSED_RANGE
            hints = np.searchsorted(made[:, 0], np.arange(0, self.num_rows, INDEX_STRIDE), side="right")
            np.maximum(hints - 1, 0, out=index[3 * count + 3 :], casting="unsafe")
            self._index.append(index)
        return self._index[0]

    def to(self, device: torch.device | str) -> torch.Tensor:
        """The entries on a device, int32 ``[num_rows]``; on CUDA enqueued on the current stream, without a stall.

        Args:
            device: Where to.

        Returns:
            A tensor of its own.

        Raises:
            DuringCaptureError: The current stream is being captured: the copy would be repeated from a reused buffer.
        """
        target = torch.device(device)
        if target.type != "cuda" or not 0 < self.ranges.size <= self.num_rows:
            return upload(self.host, target, "RowMap.to(device)")
        with on_device(target), on_loan(self.ranges.reshape(-1), target, "RowMap.to(device)") as ranges:
            expanded: torch.Tensor = _expand(ranges[: self.ranges.size].view(-1, 3), self.num_rows)
        return expanded

    def padded_ranges(self, capacity: int) -> npt.NDArray[np.int32]:
        """The ranges with unused ones behind them, for a buffer of fixed size that ``expand_ranges`` reads.

        Args:
            capacity: Ranges that the buffer holds.

        Returns:
            int32 ``[capacity, 3]``.

        Raises:
            ArgumentError: There are more ranges than that.
        """
        count = self.ranges.shape[0]
        if count > capacity:
            raise ArgumentError(f"a buffer of {capacity} ranges can't hold this map's {count}; make it larger.")
        padded = np.full((capacity, 3), UNUSED_RANGE, dtype=np.int32)
        padded[:count] = self.ranges
        return padded


INDEX_STRIDE = 64
_NO_RANGE = np.array([[0, -1, 0]], dtype=np.int32)
_expand = overload("expand_ranges")


def _fill(row_map: RowMap, num_rows: int, pool_rows: int, ranges: npt.NDArray[np.int32]) -> None:
    """Set the attributes of a map that is being made, with an array of its own."""
    ranges.setflags(write=False)
    put = object.__setattr__  # the map is frozen
    put(row_map, "num_rows", num_rows)
    put(row_map, "pool_rows", pool_rows)
    put(row_map, "ranges", ranges)
    put(row_map, "_entries", [])
    put(row_map, "_index", [])


def _counts(num_rows: Any, pool_rows: Any) -> tuple[int, int]:
    if type(num_rows) is not int:
        num_rows = _as_count("num_rows", num_rows)
    if type(pool_rows) is not int:
        pool_rows = _as_count("pool_rows", pool_rows)
    if not 0 <= num_rows < 2**31 or not 0 <= pool_rows < 2**31:
        raise ArgumentError(
            f"num_rows and pool_rows must be between 0 and 2^31 - 1, got {num_rows} and {pool_rows}."
        )
    return num_rows, pool_rows


def _as_count(name: str, value: Any) -> int:
    # A tensor is an index too, and is read from the device for it.
    if not isinstance(value, (bool, np.bool_, torch.Tensor)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentError(f"{name} must be an integer, got {kind_of(value)}; convert it with int(...).")


def _as_indices(name: str, values: npt.ArrayLike) -> _Indices:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor that numpy can't read
        raise ArgumentError(f"{name} must be a one-dimensional integer array: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{name} must be a one-dimensional integer array, got {array.dtype} {list(array.shape)}."
        )
    return array.astype(np.int64, copy=False)


def _entries_of(num_rows: int, first: _Indices, last: _Indices, source: _Indices) -> npt.NDArray[np.int32]:
    """The entries of ranges in order: where they overlap, the later wins."""
    entries = np.full(num_rows, -1, dtype=np.int32)
    if first.shape[0]:
        lengths = last - first + 1
        ends = np.cumsum(lengths)
        step = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        # numpy keeps the last value where an index is repeated, which is the later range.
        entries[np.repeat(first, lengths) + step] = np.repeat(source, lengths) + step
    return entries


def _disjoint(
    num_rows: int, first: _Indices, last: _Indices, source: _Indices
) -> tuple[_Indices, _Indices, _Indices]:
    """The same rows as ascending, disjoint ranges."""
    order = np.argsort(first, kind="stable")
    in_order = first[order], last[order], source[order]
    if (in_order[0][1:] > in_order[1][:-1]).all():
        return in_order
    entries = _entries_of(num_rows, first, last, source).astype(np.int64)
    covered = entries >= 0
    follows = np.zeros(num_rows, dtype=np.bool_)  # the row before has the pool row before
    follows[1:] = covered[1:] & covered[:-1] & (entries[1:] == entries[:-1] + 1)
    ends_here = np.ones(num_rows, dtype=np.bool_)
    ends_here[:-1] = ~follows[1:]
    begins = np.flatnonzero(covered & ~follows)
    return begins, np.flatnonzero(covered & ends_here), entries[begins]


def _is_wrong(num_rows: int, pool_rows: int, first: _Indices, last: _Indices, source: _Indices) -> bool:
    """Whether one of the ranges, of which there are some, is wrong.

    By comparisons, and a difference that doesn't overflow once they hold.
    """
    return bool(
        first.min() < 0
        or (first > last).any()
        or last.max() >= num_rows
        or source.min() < 0
        or (source > (pool_rows - 1) - (last - first)).any()
    )


def _diagnose(num_rows: int, pool_rows: int, first: _Indices, last: _Indices, source: _Indices) -> None:
    """Raise the error of ranges of which one is wrong."""
    _check(first, last, last < first, "must not be empty: dst_end is inclusive and at least dst_start")
    _check(first, last, (first < 0) | (last >= num_rows), f"must lie inside the {num_rows} output rows")
    extent = last - first  # rows, less one; they are inside the output by now
    outside = (source < 0) | (source > (pool_rows - 1) - extent)
    if outside.any():
        index = int(np.argmax(outside))
        begin = int(source[index])
        raise ArgumentError(
            f"a source range must lie inside the {pool_rows} pool rows; range {index} is rows {begin} to "
            f"{begin + int(extent[index])}."
        )


def _check(first: _Indices, last: _Indices, wrong: npt.NDArray[np.bool_], rule: str) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ArgumentError(
            f"a destination range {rule}; range {index} is rows {first[index]} to {last[index]}."
        )
