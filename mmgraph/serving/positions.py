"""Positions, computed on the host in numpy: what the tower and the language layers need beside the rows.

Each function equals what transformers computes with device tensors for the same grids, and needs only integers
that the host has already, so that nothing on the device is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one image."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TowerMetadata:
    """What the tower's blocks need for a batch of images, on the host.

    Attributes:
        table_rows: int64 ``[patches, 4]``, the rows of the learned position table that each patch mixes.
        table_weights: float32 ``[patches, 4]``, their weights.
        cos: float32 ``[patches, head_dim // 2]``.
        sin: float32 ``[patches, head_dim // 2]``.
        cu_seqlens: int32 ``[frames + 1]``; attention stays within a frame.
        max_seqlen: The patches of the largest frame.
    """

    table_rows: Ints
    table_weights: Floats
    cos: Floats
    sin: Floats
    cu_seqlens: npt.NDArray[np.int32]
    max_seqlen: int


def patch_coordinates(grid: Grid, merge: int) -> tuple[Ints, Ints]:
    """Row and column of every patch of an image, in the patches' order: merge block after merge block.

    Args:
        grid: Frames, rows, columns; rows and columns are multiples of ``merge``.
        merge: Side of a merge block.

    Returns:
        Two int64 arrays ``[frames * rows * columns]``.
    """
    frames, height, width = grid
    shape = (height // merge, merge, width // merge, merge)
    row, column = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    blocked = [a.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for a in (row, column)]
    return np.tile(blocked[0], frames), np.tile(blocked[1], frames)


def tower_metadata(grids: Sequence[Grid], *, side: int, merge: int, inv_freq: Floats) -> TowerMetadata:
    """Everything that the tower's blocks need beside the patches.

    Args:
        grids: The images' grids, in the order of their patches; at least one.
        side: Side of the square learned position table.
        merge: Side of a merge block.
        inv_freq: float32 ``[head_dim // 4]``, the rotary frequencies of one axis.
    """
    rows, columns, mixed, weights, lengths = [], [], [], [], []
    for grid in grids:
        row, column = patch_coordinates(grid, merge)
        rows.append(row)
        columns.append(column)
        taps_h, weights_h = _taps(row, grid[1], side)
        taps_w, weights_w = _taps(column, grid[2], side)
        mixed.append((taps_h[:, :, None] * side + taps_w[:, None, :]).reshape(-1, 4))
        weights.append((weights_h[:, :, None] * weights_w[:, None, :]).reshape(-1, 4))
        lengths += [grid[1] * grid[2]] * grid[0]
    row, column = np.concatenate(rows), np.concatenate(columns)
    angles = np.concatenate(
        [row[:, None].astype(np.float32) * inv_freq, column[:, None].astype(np.float32) * inv_freq], axis=1
    )
    return TowerMetadata(
        table_rows=np.concatenate(mixed),
        table_weights=np.concatenate(weights),
        cos=np.cos(angles),
        sin=np.sin(angles),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        max_seqlen=max(lengths),
    )


def prompt_positions(length: int, images: Sequence[tuple[int, Grid]], merge: int) -> Ints:
    """The three rows of rotary positions of a prompt: frame, row, column at an image, one index at text.

    After an image the text goes on one past the longer side of the image's merged grid.

    Args:
        length: Tokens in the prompt.
        images: For each image, in order, its first placeholder's place in the prompt, and its grid.
        merge: Side of a merge block.

    Returns:
        int64 ``[3, length]``.
    """
    pieces: list[Ints] = []
    place, position = 0, 0
    for start, (frames, height, width) in images:
        text = np.arange(start - place) + position
        pieces.append(np.broadcast_to(text, (3, len(text))))
        position += len(text)
        merged = (frames, height // merge, width // merge)
        axes = np.meshgrid(*(np.arange(n) for n in merged), indexing="ij")
        pieces.append(np.stack([a.reshape(-1) for a in axes]) + position)
        position += max(merged[1], merged[2])
        place = start + merged[0] * merged[1] * merged[2]
    text = np.arange(length - place) + position
    pieces.append(np.broadcast_to(text, (3, len(text))))
    return np.ascontiguousarray(np.concatenate(pieces, axis=1), dtype=np.int64)


def text_rotary(
    positions: Ints, *, inv_freq: Floats, sections: Sequence[int], scaling: float
) -> tuple[Floats, Floats]:
    """Cosine and sine of the language layers, interleaved over the three position rows.

    Args:
        positions: int64 ``[3, tokens]``.
        inv_freq: float32 ``[head_dim // 2]``.
        sections: How many frequencies belong to frame, row and column.
        scaling: Factor on both results.

    Returns:
        Two float32 arrays ``[tokens, head_dim // 2]``.
    """
    axis = np.zeros(len(inv_freq), dtype=np.int64)
    for number in (1, 2):
        axis[number : sections[number] * 3 : 3] = number
    angles = positions[axis].T.astype(np.float32) * inv_freq
    return np.cos(angles) * np.float32(scaling), np.sin(angles) * np.float32(scaling)


def _taps(index: Ints, size: int, side: int) -> tuple[Ints, Floats]:
    """The two table entries beside each index of an axis stretched over the whole table, and their weights."""
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source)
    taps = np.stack([low, low + 1], axis=1).astype(np.int64).clip(0, side - 1)
    share = source - low
    return taps, np.stack([1 - share, share], axis=1)
