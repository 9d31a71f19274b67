"""Positions, computed on the host in numpy: what the tower and the language layers need beside the rows.

Each function equals what transformers computes with device tensors for the same grids, and needs only integers
that the host has already, so that nothing on the device is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmgraph.towers.grids import Grid

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def tower_rotary(positions: npt.NDArray[np.int32], *, inv_freq: Floats) -> tuple[Floats, Floats]:
    """Cosine and sine of the tower's blocks: the row's frequencies, then the column's.

    Args:
        positions: int32 ``[patches, 2]``, row and column of each patch.
        inv_freq: float32 ``[head_dim // 4]``, the rotary frequencies of one axis.

    Returns:
        Two float32 arrays ``[patches, head_dim // 2]``.
    """
    # Few rows and columns differ, so that their cosines are looked up.
    angles = np.arange(positions.max(initial=-1) + 1, dtype=np.float32)[:, None] * inv_freq
    shape = (len(positions), 2 * len(inv_freq))
    return np.cos(angles)[positions].reshape(shape), np.sin(angles)[positions].reshape(shape)


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
