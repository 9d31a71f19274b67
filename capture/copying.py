"""Copies described by addresses: what a call's record says of an input that isn't one run of memory.

`pieces_of` describes the copy of a tensor into the first rows of a static view, or says that one piece can't. A graph's
own nodes do it on a GPU (`publishing.py`), `copy_pieces` on a CPU. The caller keeps the memory alive until it is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["Piece", "copy_pieces", "pieces_of"]

Tensor = torch.Tensor

#: Address of the source and of the destination, bytes of a run, runs, bytes from run to run in the source and in the
#: destination. No bytes or no runs: nothing to copy.
Piece = tuple[int, int, int, int, int, int]


def copy_pieces(pieces: Sequence[Piece]) -> None:
    """Copies pieces of memory that the host reaches; source and destination of a piece don't overlap."""
    for src, dst, inner, runs, src_pitch, dst_pitch in pieces:
        if inner:
            for run in range(runs):
                ctypes.memmove(dst + run * dst_pitch, src + run * src_pitch, inner)


def pieces_of(src: Tensor, dst: Tensor, rows_axis: int) -> Piece | None:
    """The copy of a tensor into the first rows of a static view.

    Args:
        src: of the view's dtype and device, and of its sizes but for fewer, or as many, rows.
        dst: the view, contiguous.
        rows_axis: the axis of the rows.

    Returns:
        The piece, or None where one piece can't describe the copy: another dtype, device or size, a subclass,
        conjugated or negated views, expanded axes, or strides of more than two levels. Then `copy_` can.
    """
    if not _is_plain(src) or src.dtype != dst.dtype or src.device != dst.device or src.dim() != dst.dim():
        return None
    for axis, (size, room) in enumerate(zip(src.shape, dst.shape, strict=True)):
        if size != room and not (axis == rows_axis and size < room):
            return None
    form = _two_levels(src.shape, src.stride(), dst.stride(), dst.element_size())
    if form is None:
        return None
    return (src.data_ptr(), dst.data_ptr(), *form)


def _two_levels(
    shape: Sequence[int], strides: Sequence[int], own_strides: Sequence[int], item: int
) -> tuple[int, int, int, int] | None:
    """Runs of adjacent elements at one pitch, if that is how the elements lie in both tensors.

    Axes of size 1 are left out, and axes merged that are as one in both: at most a run and a pitch may be left.
    """
    levels: list[tuple[int, int, int]] = []  # from the innermost
    for size, stride, own_stride in zip(reversed(shape), reversed(strides), reversed(own_strides), strict=True):
        if size == 0:
            return (0, 0, 0, 0)
        if size == 1:
            continue
        if levels:
            inner_size, inner, own_inner = levels[-1]
            if (stride, own_stride) == (inner_size * inner, inner_size * own_inner):
                levels[-1] = (inner_size * size, inner, own_inner)
                continue
        levels.append((size, stride, own_stride))
    if not levels or levels[0][1:] != (1, 1):
        levels.insert(0, (1, 1, 1))  # single elements apart from each other
    if len(levels) > 2:
        return None
    inner_bytes = levels[0][0] * item
    if len(levels) == 1:
        return (inner_bytes, 1, inner_bytes, inner_bytes)
    runs, pitch, own_pitch = levels[1]
    if pitch * item < inner_bytes:
        return None  # expanded, or rows that overlap
    return (inner_bytes, runs, pitch * item, own_pitch * item)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but its memory and strides."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
