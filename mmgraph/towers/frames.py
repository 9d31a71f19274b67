"""The arrays of one frame of patches: coordinates, windows, and entries of a learned position table.

Everything here follows from a frame's height and width in patches, and each function makes whole arrays at once; what
is made is read-only, so that many batches can share it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmgraph.errors import OptionError

__all__ = ["FrameArrays", "PositionTable", "frame_arrays", "merge_order"]

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

# The largest table whose last entry an int32 counts.
_LARGEST_SIDE = 46340


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A learned square table of positions, and how it is resampled to a frame.

    Attributes:
        side: Entries along a side.
        mode: "bilinear" mixes 4 entries for each patch, "bicubic" 16 (Keys' kernel with a = -0.75).
        align_corners: Whether the frame's corner patches lie on the table's corners; else the outer edges meet.
        padding: What lies beyond the table: "border", its outermost entries again; "zeros", nothing.
        raster: Whether taps come in raster order of the patches; else in merge order, as the patches do.

    Raises:
        OptionError: The side is no integer from 1 to 46340, or an option is none of its choices.
    """

    side: int
    mode: Literal["bilinear", "bicubic"] = "bilinear"
    align_corners: bool = False
    padding: Literal["border", "zeros"] = "border"
    raster: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.side, bool) or not isinstance(self.side, int) or not 0 < self.side <= _LARGEST_SIDE:
            raise OptionError(f"side must be an integer from 1 to {_LARGEST_SIDE}, got {self.side!r}")
        if self.mode not in ("bilinear", "bicubic"):
            raise OptionError(f"mode must be 'bilinear' or 'bicubic', got {self.mode!r}")
        if self.padding not in ("border", "zeros"):
            raise OptionError(f"padding must be 'border' or 'zeros', got {self.padding!r}")

    @property
    def taps(self) -> int:
        """How many entries of the table a patch mixes."""
        return 4 if self.mode == "bilinear" else 16


@dataclass(frozen=True, slots=True, eq=False)
class FrameArrays:
    """What is known of a frame; all arrays are read-only.

    Attributes:
        positions: int32 ``[patches, 2]``, row and column of each patch, in merge order or in window order.
        taps: int32 ``[patches, taps]``, entries of the flattened table; None without a table.
        tap_weights: float32 ``[patches, taps]``; None without a table.
        order: int32 ``[units]``, the merged unit, in raster order, that each place in window order holds; None without
            windows.
        back: int32 ``[units]``, the inverse: the place in window order of each unit.
        window_lengths: int32 ``[windows]``, patches of each window; none is empty.
    """

    positions: Int32s
    taps: Int32s | None = None
    tap_weights: Floats | None = None
    order: Int32s | None = None
    back: Int32s | None = None
    window_lengths: Int32s | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.every())

    def every(self) -> list[npt.NDArray[Any]]:
        """The arrays that are there."""
        fields = (self.positions, self.taps, self.tap_weights, self.order, self.back, self.window_lengths)
        return [array for array in fields if array is not None]


def frame_arrays(
    height: int,
    width: int,
    *,
    merge: int,
    table: PositionTable | None = None,
    window: int | None = None,
    windowed: bool = False,
) -> FrameArrays:
    """Make the arrays of a frame.

    Args:
        height: Rows of patches, a positive multiple of ``merge``.
        width: Columns of patches, likewise.
        merge: Side of a merge block in patches.
        table: The learned table, where there is one.
        window: Side of a window in merged units, where there are windows.
        windowed: Whether positions come in window order, where there are windows.

    Returns:
        The arrays that were asked for.
    """
    positions = _in_merge_order(np.moveaxis(np.indices((height, width), dtype=np.int32), 0, -1), merge)
    taps = weights = order = back = lengths = None
    if table is not None:
        taps, weights = _table_entries(height, width, merge, table)
    if window is not None:
        order, back, lengths = _windows(height // merge, width // merge, window, merge)
        if windowed:
            positions = positions.reshape(-1, merge**2, 2)[order].reshape(-1, 2)
    arrays = FrameArrays(positions, taps, weights, order, back, lengths)
    for array in arrays.every():
        array.setflags(write=False)
    return arrays


def merge_order(height: int, width: int, merge: int) -> Int32s:
    """Where each patch of a frame in merge order lies in raster order.

    Merge order goes through a frame by blocks of ``merge`` by ``merge`` patches, in raster order of the blocks and,
    inside, of the patches.

    Args:
        height: Rows of patches, a multiple of ``merge``.
        width: Columns of patches, likewise.
        merge: Side of a block.

    Returns:
        int32 ``[height * width]``: ``raster[merge_order(...)]`` is in merge order.
    """
    return _in_merge_order(np.arange(height * width, dtype=np.int32).reshape(height, width), merge)


def _in_merge_order(raster: npt.NDArray[Any], merge: int) -> npt.NDArray[Any]:
    """``[height, width, ...]`` as ``[height * width, ...]`` in merge order, in memory of its own."""
    height, width, *rest = raster.shape
    blocks = raster.reshape(height // merge, merge, width // merge, merge, *rest)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(height * width, *rest)


def _windows(height: int, width: int, window: int, merge: int) -> tuple[Int32s, Int32s, Int32s]:
    """Order, inverse and lengths of a frame of merged units; windows at the right and lower edge are smaller."""
    across = -(-width // window)
    of_row, of_column = np.arange(height) // window, np.arange(width) // window
    owner = (of_row[:, None] * across + of_column).reshape(-1)
    order = np.argsort(owner, kind="stable").astype(np.int32)
    back = np.empty_like(order)
    back[order] = np.arange(len(order), dtype=np.int32)
    return order, back, (np.bincount(owner) * merge**2).astype(np.int32)


def _table_entries(height: int, width: int, merge: int, table: PositionTable) -> tuple[Int32s, Floats]:
    """Entries of the flattened table that each patch mixes, and their weights: products of those of both axes."""
    row_taps, row_weights = _axis_entries(height, table)
    column_taps, column_weights = _axis_entries(width, table)
    taps = row_taps[:, None, :, None] * np.int32(table.side) + column_taps[None, :, None, :]
    weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
    order = 1 if table.raster else merge
    shape = (height, width, table.taps)
    return _in_merge_order(taps.reshape(shape), order), _in_merge_order(weights.reshape(shape), order)


def _axis_entries(size: int, table: PositionTable) -> tuple[Int32s, Floats]:
    """Entries and weights along one axis, int32 and float32 ``[size, 2 or 4]``.

    All in float32 and in this order of operations, so that a weight is the same to the bit as one that PyTorch computes
    with float32 tensors, operation by operation.
    """
    index = np.arange(size, dtype=np.float32)
    if table.align_corners:
        source = index * (table.side - 1) / max(size - 1, 1)
    else:
        source = (index + 0.5) * table.side / size - 0.5
    low = np.floor(source)
    reach = np.arange(0, 2) if table.mode == "bilinear" else np.arange(-1, 3)
    wanted = low.astype(np.int32)[:, None] + reach.astype(np.int32)
    distance = np.abs((source - low)[:, None] - reach.astype(np.float32))
    if table.mode == "bilinear":
        weights = np.maximum(1 - distance, 0)
    else:
        near = (1.25 * distance - 2.25) * distance * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weights = np.where(distance <= 1, near, far)
    if table.padding == "zeros":
        weights = weights * ((wanted >= 0) & (wanted < table.side))
    return wanted.clip(0, table.side - 1), weights
