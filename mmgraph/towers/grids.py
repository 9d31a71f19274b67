"""What the host tells a packed vision tower of its items, from their grids alone: lengths, positions, windows, entries
of a learned table.

Promises: a batch's arrays equal what transformers computes from the same grids, bit for bit, in int32 and float32; they
belong to the caller. What follows from a frame's size is made once and kept, within a bound in bytes; a batch costs a
loop over its items and a few joins. Any thread may ask.
"""

import collections
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmgraph.errors import OptionError
from mmgraph.towers.frames import Floats, FrameArrays, Int32s, PositionTable, frame_arrays
from mmgraph.towers.grid_lists import Grid, Grids, checked_grids, grids_of

__all__ = [
    "Grid",
    "GridCache",
    "GridCacheStats",
    "GridLayout",
    "GridMetadata",
    "Grids",
    "PositionTable",
    "grids_of",
]


@dataclass(frozen=True, slots=True)
class GridLayout:
    """What a tower wants to know of its grids.

    Attributes:
        merge: Side of a merge block in patches; rows and columns of a grid are multiples of it, and patches come block
            by block.
        table: The learned position table, where there is one.
        window: Side of an attention window in merged units, where there are windows.
        windowed: Whether positions come in window order, where there are windows: the order in which the blocks see
            the rows. Else they come in merge order. Table entries always come in the order of the patches.
        temporal: Whether positions begin with the frame's number.
        clips: Whether attention spans all frames of an item, rather than each of its own.

    Raises:
        OptionError: ``merge`` or ``window`` is no positive integer.
    """

    merge: int = 1
    table: PositionTable | None = None
    window: int | None = None
    windowed: bool = True
    temporal: bool = False
    clips: bool = False

    def __post_init__(self) -> None:
        for name, value in (("merge", self.merge), ("window", self.window)):
            if name == "window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class GridMetadata:
    """The metadata of a batch, in arrays of its own.

    Attributes:
        grids: The items' grids, in order.
        cu_seqlens: int32 ``[sequences + 1]``, where each frame (or clip) begins, and the end of the last.
        max_seqlen: Patches of the longest; 0 where there is none.
        positions: int32 ``[patches, 2]``, row and column of each patch, or ``[patches, 3]`` with the frame's number in
            front; in merge order or in window order, as the layout says.
        taps: int32 ``[patches, taps]``, the entries of the flattened table that a patch mixes; None without a table.
        tap_weights: float32 ``[patches, taps]``, their weights.
        order: int32 ``[units]``, the merged unit that each place in window order holds; None without windows.
        back: int32 ``[units]``, its inverse: ``x[order][back]`` is ``x``.
        cu_windows: int32 ``[windows + 1]``, where each window begins in patches; none is empty.
        max_window: Patches of the largest window; 0 where there is none.
    """

    grids: tuple[Grid, ...]
    cu_seqlens: Int32s
    max_seqlen: int
    positions: Int32s
    taps: Int32s | None = None
    tap_weights: Floats | None = None
    order: Int32s | None = None
    back: Int32s | None = None
    cu_windows: Int32s | None = None
    max_window: int = 0

    @property
    def patches(self) -> int:
        """Patches of all items."""
        return len(self.positions)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are there, by the names of the attributes."""
        every = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in every.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, slots=True)
class GridCacheStats:
    """What a cache holds and has done.

    Attributes:
        hits: Items whose frame was there.
        misses: Frames that were made.
        evictions: Frames that made room for others.
        frames: Frames that are kept now.
        nbytes: Bytes of their arrays.
    """

    hits: int
    misses: int
    evictions: int
    frames: int
    nbytes: int


class GridCache:
    """Makes the metadata of batches, and keeps what follows from the size of a frame.

    All frames of a video, and all items with frames of that size, share one kept frame. Copies and pickles of a cache
    have its options and nothing kept.

    Args:
        layout: What the tower wants to know.
        max_bytes: A bound on the bytes of the kept arrays. The frames least recently used give way; one that is
            larger than the bound isn't kept.

    Raises:
        OptionError: ``max_bytes`` isn't an integer of at least 0.
    """

    def __init__(self, layout: GridLayout, max_bytes: int = 64 << 20) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise OptionError(f"max_bytes must be an integer of at least 0, got {max_bytes!r}")
        self.layout = layout
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[int, int], FrameArrays] = collections.OrderedDict()
        # In a counter, since a capture puts back the plain attributes of what its function can reach.
        self._counts: collections.Counter[str] = collections.Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.layout, self.max_bytes))

    @property
    def stats(self) -> GridCacheStats:
        """What the cache holds and has done."""
        with self._lock:
            counts = self._counts
            return GridCacheStats(
                hits=counts["hits"],
                misses=counts["misses"],
                evictions=counts["evictions"],
                frames=len(self._kept),
                nbytes=counts["nbytes"],
            )

    def windows(self, grid: Grid) -> int:
        """Count the windows of an item; 0 without windows.

        Args:
            grid: Its grid, as `grids_of` gives it.
        """
        if self.layout.window is None:
            return 0
        side = self.layout.merge * self.layout.window
        return grid[0] * -(-grid[1] // side) * -(-grid[2] // side)

    def batch(self, grids: Grids) -> GridMetadata:
        """Make the metadata of a batch.

        Args:
            grids: The items' grids, in the order of their patches; none is legal.

        Returns:
            Arrays that the caller may write to.

        Raises:
            GridError: As `grids_of`, or rows or columns of a grid aren't multiples of the merge block's side.
        """
        layout = self.layout
        items = checked_grids(grids, merge=layout.merge)
        frames, lengths = self._frames(items)
        cu_seqlens = _offsets([t * h * w for t, h, w in items] if layout.clips else lengths)
        taps = weights = order = back = cu_windows = None
        if layout.table is not None:
            taps = _joined([frame.taps for frame in frames], np.int32, layout.table.taps)
            weights = _joined([frame.tap_weights for frame in frames], np.float32, layout.table.taps)
        if layout.window is not None:
            order = _joined([frame.order for frame in frames], np.int32)
            back = _joined([frame.back for frame in frames], np.int32)
            units = np.array(lengths, dtype=np.int32) // layout.merge**2
            before = np.repeat(np.cumsum(units, dtype=np.int32) - units, units)
            order += before
            back += before
            cu_windows = _offsets(_joined([frame.window_lengths for frame in frames], np.int32))
        return GridMetadata(
            grids=items,
            cu_seqlens=cu_seqlens,
            max_seqlen=_longest(cu_seqlens),
            positions=self._positions(items, frames, lengths),
            taps=taps,
            tap_weights=weights,
            order=order,
            back=back,
            cu_windows=cu_windows,
            max_window=0 if cu_windows is None else _longest(cu_windows),
        )

    def clear(self) -> None:
        """Let go of all kept frames."""
        with self._lock:
            self._kept.clear()
            self._counts["nbytes"] = 0

    def _positions(self, items: tuple[Grid, ...], frames: list[FrameArrays], lengths: list[int]) -> Int32s:
        places = _joined([frame.positions for frame in frames], np.int32, 2)
        if not self.layout.temporal:
            return places
        numbers = np.array([number for grid in items for number in range(grid[0])], dtype=np.int32)
        return np.concatenate([np.repeat(numbers, lengths)[:, None], places], axis=1)

    def _frames(self, items: tuple[Grid, ...]) -> tuple[list[FrameArrays], list[int]]:
        """Every frame of a batch, and how many patches it has."""
        of_size = self._of_size(items)
        frames: list[FrameArrays] = []
        lengths: list[int] = []
        for count, height, width in items:
            frames += [of_size[height, width]] * count
            lengths += [height * width] * count
        return frames, lengths

    def _of_size(self, items: tuple[Grid, ...]) -> dict[tuple[int, int], FrameArrays]:
        """Find or make the frame of each size, and count."""
        layout = self.layout
        wanted = dict.fromkeys((height, width) for _, height, width in items)
        found: dict[tuple[int, int], FrameArrays] = {}
        with self._lock:
            for size in wanted:
                frame = self._kept.get(size)
                if frame is not None:
                    self._kept.move_to_end(size)
                    found[size] = frame
        # Outside of the lock: two threads may make the same frame, and then the first one stays.
        made = {
            size: frame_arrays(
                *size, merge=layout.merge, table=layout.table, window=layout.window, windowed=layout.windowed
            )
            for size in wanted
            if size not in found
        }
        with self._lock:
            self._counts["hits"] += len(items) - len(made)
            self._counts["misses"] += len(made)
            for size, frame in made.items():
                self._keep(size, frame)
        return found | made

    def _keep(self, size: tuple[int, int], frame: FrameArrays) -> None:
        if size in self._kept or frame.nbytes > self.max_bytes:
            return
        self._kept[size] = frame
        self._counts["nbytes"] += frame.nbytes
        while self._counts["nbytes"] > self.max_bytes:
            _, gone = self._kept.popitem(last=False)
            self._counts["nbytes"] -= gone.nbytes
            self._counts["evictions"] += 1


def _offsets(lengths: list[int] | Int32s) -> Int32s:
    """Where each piece begins, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _longest(offsets: Int32s) -> int:
    return int((offsets[1:] - offsets[:-1]).max(initial=0))


def _joined(pieces: Sequence[npt.NDArray[Any] | None], dtype: Any, *trailing: int) -> npt.NDArray[Any]:
    """Join arrays, all of which are there, in memory of its own; none at all make an empty array."""
    if not pieces:
        return np.empty((0, *trailing), dtype=dtype)
    return np.concatenate(cast("Sequence[npt.NDArray[Any]]", pieces))
