"""Many pieces of memory copied in one launch, with a few small integers written in the same launch.

A `Piece` says where memory lies, by address; `pieces_of` and `pieces_out` describe the copy of a tensor into the
first rows of a static view, and back out, or say that one piece can't describe it. Nothing here waits for the device,
and nothing compiles after `Copier.prepare`. The caller keeps the memory alive until the copy is enqueued, and sees to
it that it lies on the copier's device and that pieces don't overlap.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from .errors import CallError, SpecError
from .launching import STAND_IN, Variant, variant_of

__all__ = ["Copier", "Piece", "StaticView", "pieces_of", "pieces_out"]

Tensor = torch.Tensor

#: Address of the source and of the destination, bytes of a run, runs, bytes from run to run in the source and in the
#: destination. No bytes or no runs: nothing to copy.
Piece = tuple[int, int, int, int, int, int]

_NOTHING: Piece = (0, 0, 0, 0, 0, 0)

# What a program copies: in 16-byte accesses four loads for each of 128 threads, all in flight at once.
_BLOCK_SHIFT = 13
_BLOCK_BYTES = 1 << _BLOCK_SHIFT
_ROUND_UP = _BLOCK_BYTES - 1

# Pieces of the variants there are. All of them come by value: 32 take 1.8 of the 4 KiB that arguments may have.
_SIZES = (2, 4, 8, 16, 32)
_MOST = _SIZES[-1]
_BEHIND_ALL = 1 << 62


class Copier:
    """Copies up to many pieces of memory in one launch, and writes small integers in the same launch.

    Args:
        device: a CPU or CUDA device. On a CPU copies are done at once.
        counts: int64 `[num_counts]` on the device, contiguous: where a call's counts go. None: nowhere.
        num_counts: how many there are; 0 without `counts`.

    Raises:
        SpecError: `counts` is not such a tensor, or the device is of another kind.
    """

    def __init__(self, device: torch.device, counts: Tensor | None, num_counts: int) -> None:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise SpecError(
                f"expected a CPU or CUDA device, whose memory can be copied by address, got {device}"
            )
        if device.type == "cuda":
            device = torch.device(
                "cuda", device.index if device.index is not None else torch.cuda.current_device()
            )
        if counts is None and num_counts:
            raise SpecError(f"expected a tensor for {num_counts} counts, got None: make one, or num_counts 0")
        if counts is not None and not (
            counts.dtype == torch.int64
            and tuple(counts.shape) == (num_counts,)
            and counts.is_contiguous()
            and counts.device == device
        ):
            raise SpecError(
                f"expected counts to be a contiguous int64 tensor [{num_counts}] on {device}, got "
                f"{counts.dtype} {tuple(counts.shape)} on {counts.device}"
            )
        self._device = device
        self._counts = counts
        self._num_counts = num_counts
        self._counts_at = 0 if counts is None else counts.data_ptr()
        self._no_counts = (0,) * max(num_counts, 1)
        self._launches = device.type == "cuda"
        self._by_pieces: list[tuple[Variant, tuple[Piece, ...], tuple[int, ...]] | None] = [None] * (_MOST + 1)

    def prepare(self, pieces: int) -> None:
        """Compiles and loads what calls with up to so many pieces need, so that they never compile.

        Args:
            pieces: the most pieces of a call. On a CPU nothing is to be done.

        Raises:
            NotCapturableError: a graph is being captured, and something must be compiled.
        """
        if self._launches:
            for number in range(min(pieces, _MOST) + 1):
                self._prepared(number)

    def __call__(self, pieces: Sequence[Piece], counts: Sequence[int] = ()) -> None:
        """Enqueues the copies on the current stream of the device, and the write of the counts.

        Args:
            pieces: what to copy; they don't overlap. More than 32 take several launches.
            counts: none, or all of them.

        Raises:
            CallError: another number of counts than the copier was made for.
            NotCapturableError: a graph is being captured, and `prepare` wasn't called for as many pieces.
        """
        if counts:
            if len(counts) != self._num_counts:
                raise CallError(
                    f"expected {self._num_counts} counts, or none, got {len(counts)}: give them all"
                )
            counts_at = self._counts_at
        else:
            counts_at, counts = 0, self._no_counts
        if not self._launches:
            _copy_now(pieces, counts_at, counts)
            return
        number = len(pieces)
        if number > _MOST:
            for start in range(_MOST, number, _MOST):
                self(pieces[start : start + _MOST])
            pieces, number = pieces[:_MOST], _MOST
        total = 0
        ends = []
        for piece in pieces:
            total += (piece[2] * piece[3] + _ROUND_UP) >> _BLOCK_SHIFT
            ends.append(total)
        if total == 0:
            if counts_at == 0:
                return
            total = 1  # program 0, for the counts
        variant, no_pieces, no_ends = self._by_pieces[number] or self._prepared(number)
        variant.launch(total, (*pieces, *no_pieces), (*ends, *no_ends), counts_at, (*counts,))

    def _prepared(self, number: int) -> tuple[Variant, tuple[Piece, ...], tuple[int, ...]]:
        """The variant for so many pieces, and what stands for those that it has beyond."""
        known = self._by_pieces[number]
        if known is None:
            from .copy_kernels import copy_kernel

            size = next(size for size in _SIZES if size >= number)
            numbers = len(self._no_counts)
            stand_ins: tuple[Any, ...] = (
                ((STAND_IN,) * 6,) * size,
                (STAND_IN,) * size,
                STAND_IN,
                (STAND_IN,) * numbers,
            )
            variant = variant_of(copy_kernel, stand_ins, (size, numbers, _BLOCK_BYTES), self._device)
            spare = size - number
            known = self._by_pieces[number] = (variant, (_NOTHING,) * spare, (_BEHIND_ALL,) * spare)
        return known


def _copy_now(pieces: Sequence[Piece], counts_at: int, counts: Sequence[int]) -> None:
    """The contract of a launch, on memory that the host reaches."""
    for src, dst, inner, runs, src_pitch, dst_pitch in pieces:
        if inner:
            for run in range(runs):
                ctypes.memmove(dst + run * dst_pitch, src + run * src_pitch, inner)
    if counts_at:
        values = (ctypes.c_int64 * len(counts))(*counts)
        ctypes.memmove(counts_at, values, ctypes.sizeof(values))


class StaticView:
    """A static view, with what is known of it beforehand, so that a call's pieces take little work.

    Args:
        view: contiguous, at its bucket's size.
        axis: the axis along which tensors that are copied in, or out, may be shorter.

    Raises:
        SpecError: the view isn't contiguous, or has no such axis.
    """

    def __init__(self, view: Tensor, axis: int) -> None:
        if not _is_plain(view) or not view.is_contiguous():
            raise SpecError(
                f"expected a contiguous plain tensor as a static view, got {type(view).__name__} of shape "
                f"{tuple(view.shape)} and strides {view.stride()}: make it with torch.empty"
            )
        if not 0 <= axis < max(view.dim(), 1):
            raise SpecError(f"expected an axis of a tensor of {view.dim()} axes, got {axis}")
        self._view = view  # keeps the memory
        self._at = view.data_ptr()
        self._axis = axis
        self._dtype, self._device = view.dtype, view.device
        self._item = view.element_size()
        self._shape = tuple(view.shape)
        self._before, self._after = self._shape[:axis], self._shape[axis + 1 :]
        self._rows = self._shape[axis] if self._shape else 1
        # Said here, since the stride of an axis of size 1 may be anything. Contiguous tensors whose rows lie along
        # axis 0 have these too, however many rows.
        self._strides = tuple(
            math.prod(max(size, 1) for size in self._shape[i + 1 :]) for i in range(len(self._shape))
        )
        self._row_bytes = math.prod(self._shape[1:]) * self._item

    def piece_in(self, src: Tensor) -> Piece | None:
        """The copy of a tensor into the view's first rows; None where one piece can't describe it."""
        form = self._form(src)
        if form is None:
            return None
        inner, runs, pitch, own_pitch = form
        return (src.data_ptr(), self._at, inner, runs, pitch, own_pitch)

    def piece_out(self, dst: Tensor) -> Piece | None:
        """The copy of the view's first rows into a tensor; None where one piece can't describe it."""
        form = self._form(dst)
        if form is None:
            return None
        inner, runs, pitch, own_pitch = form
        return (self._at, dst.data_ptr(), inner, runs, own_pitch, pitch)

    def _form(self, other: Tensor) -> tuple[int, int, int, int] | None:
        """Bytes of a run, runs, and the pitch in the other tensor and in the view."""
        if not _is_plain(other) or other.dtype != self._dtype or other.device != self._device:
            return None
        shape, axis = other.shape, self._axis
        if not shape or not self._shape:
            return (self._item, 1, self._item, self._item) if shape == self._shape else None
        rows = shape[axis] if axis < len(shape) else -1
        if not 0 <= rows <= self._rows or shape != (*self._before, rows, *self._after):
            return None
        strides = other.stride()
        if axis == 0 and strides == self._strides:
            size = rows * self._row_bytes
            return (size, 1, size, size)
        return _two_levels(shape, strides, self._strides, self._item)


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
    return StaticView(dst, rows_axis).piece_in(src)


def pieces_out(src_static: Tensor, dst_result: Tensor, axis: int) -> Piece | None:
    """The copy of the first rows of a static view into a tensor; see `pieces_of`.

    Args:
        src_static: the view, contiguous.
        dst_result: as many rows as are wanted.
        axis: the axis of the rows.
    """
    return StaticView(src_static, axis).piece_out(dst_result)
