"""The fill of padding, from sizes that lie on the device.

`fill_padding` is a captured graph's first node: it reads the call's sizes from device memory, and writes what lies
behind them in each static view, and nothing else. A call that fills its bucket costs a launch that reads its counts.
`fill_padding_reference` is the same in torch operations; it is what runs on a CPU, where the recorder records it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import SpecError
from .launching import launch_constant

__all__ = ["PadLeaf", "fill_padding", "fill_padding_reference", "fill_pattern"]

Tensor = torch.Tensor

_SIZES = (2, 4, 8, 16)
_MOST = _SIZES[-1]
_BLOCK_BYTES = 8192
# Of all a leaf's padding; a program takes every so manyth block of what there is in a call.
_MOST_PROGRAMS = 256
_NO_LEAF = (0, 0, 0, 1, 1, 0, 0)
_BEHIND_ALL = 1 << 62
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PadLeaf:
    """A static view whose padding is filled.

    Attributes:
        view: contiguous, at its bucket's size.
        axis: the axis of its rows.
        per: how many of the count make a row.
        count: the index of its size in the counts.
        fill: the row of its pattern in the fills; of no meaning for offsets.
        offsets: whether it holds cumulative offsets, int32 or int64 of one axis: then the entries behind the
            count's own hold that one's value.
    """

    view: Tensor
    axis: int
    per: int
    count: int
    fill: int
    offsets: bool


def fill_pattern(value: float, dtype: torch.dtype) -> tuple[int, int]:
    """What 16 bytes of rows that hold a value look like.

    Args:
        value: the value of each element; it is converted as `Tensor.fill_` does.
        dtype: the elements' dtype, of 16 bytes at most.

    Returns:
        Two signed 64-bit integers, the first for the lower addresses.

    Raises:
        SpecError: the dtype can't hold the value, or no single value.
    """
    try:
        element = torch.empty(1, dtype=dtype, device="cpu").fill_(value)
        octets = element.view(torch.uint8)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise SpecError(f"expected a fill that {dtype} can hold, got {value!r}: {error}") from error
    words = octets.repeat(16 // octets.numel()).view(torch.int64).tolist()
    return int(words[0]), int(words[1])


def fill_padding(leaves: Sequence[PadLeaf], counts: Tensor, fills: Tensor) -> None:
    """Fills the padding of static views, in one launch on a GPU for up to 16 of them.

    Of rows, those from `counts[count] // per` on get the pattern; of offsets, the entries from `counts[count] + 1` on
    get the value of entry `counts[count]`. A count beyond the view means no padding.

    Args:
        leaves: the views.
        counts: int64 `[sizes]`, contiguous, on the views' device.
        fills: int64 `[patterns, 2]`, contiguous, on the views' device; see `fill_pattern`.

    Raises:
        SpecError: a view that isn't contiguous, offsets that aren't int32 or int64 of one axis, or tables of another
            shape, dtype or device.
        NotCapturableError: a graph is being captured, and this wasn't run before with as many views.
    """
    leaves = [leaf for leaf in leaves if leaf.view.numel()]
    if not leaves:
        return
    _check(leaves, counts, fills)
    if counts.device.type == "cuda":
        _launch(leaves, counts, fills)
    else:
        fill_padding_reference(leaves, counts, fills)


def _launch(leaves: Sequence[PadLeaf], counts: Tensor, fills: Tensor) -> None:
    from .call_kernels import fill_kernel

    for start in range(0, len(leaves), _MOST):
        part = leaves[start : start + _MOST]
        size = next(size for size in _SIZES if size >= len(part))
        programs = 0
        ends = []
        for leaf in part:
            programs += min(-(-leaf.view.nbytes // _BLOCK_BYTES), _MOST_PROGRAMS)
            ends.append(programs)
        spare = size - len(part)
        numbers = (*map(_numbers, part), *(_NO_LEAF,) * spare)
        args = (numbers, (*ends, *(_BEHIND_ALL,) * spare), counts.data_ptr(), fills.data_ptr())
        constants = {"LEAVES": size, "BLOCK_BYTES": _BLOCK_BYTES}
        launch_constant(fill_kernel, programs, args, constants, counts.device)


def _numbers(leaf: PadLeaf) -> tuple[int, ...]:
    """A leaf as the kernel takes it."""
    view, axis = leaf.view, leaf.axis
    outer, row = math.prod(view.shape[:axis]), math.prod(view.shape[axis + 1 :])
    fill = -1 if leaf.offsets else leaf.fill
    return (view.data_ptr(), outer, view.shape[axis], row * view.element_size(), leaf.per, leaf.count, fill)


def fill_padding_reference(leaves: Sequence[PadLeaf], counts: Tensor, fills: Tensor) -> None:
    """`fill_padding` in torch operations of fixed shapes, which any device runs and the recorder records.

    Args:
        leaves: the views.
        counts: int64 `[sizes]`.
        fills: int64 `[patterns, 2]`.
    """
    for leaf in leaves:
        if not leaf.view.numel():
            continue
        size = leaf.view.shape[leaf.axis]
        places = torch.arange(size, dtype=torch.int64, device=leaf.view.device)
        real = counts[leaf.count].clamp(min=0)
        if leaf.offsets:
            last = leaf.view.index_select(0, real.clamp(max=size - 1).reshape(1))
            leaf.view.copy_(torch.where(places > real, last, leaf.view))
            continue
        # As integers: any dtype's bits are kept, and dtypes that torch.where doesn't know are filled too.
        elements = leaf.view.unsqueeze(-1)
        width = _INTEGERS[min(leaf.view.element_size(), 8)]
        elements = elements.view(width)
        pattern = fills[leaf.fill].view(width)[: elements.shape[-1]]
        after = leaf.view.dim() - leaf.axis  # axes behind the rows', the elements' own parts among them
        padding = (places >= torch.div(real, leaf.per, rounding_mode="floor")).reshape(-1, *[1] * after)
        elements.copy_(torch.where(padding, pattern, elements))


def _check(leaves: Sequence[PadLeaf], counts: Tensor, fills: Tensor) -> None:
    for name, table, shape in (("counts", counts, (counts.numel(),)), ("fills", fills, (fills.shape[0], 2))):
        if table.dtype != torch.int64 or tuple(table.shape) != shape or not table.is_contiguous():
            raise SpecError(
                f"expected {name} to be contiguous int64 of shape {list(shape)}, got {table.dtype} "
                f"{list(table.shape)} with strides {table.stride()}"
            )
    for leaf in leaves:
        view = leaf.view
        if not view.is_contiguous() or not view.device == counts.device == fills.device:
            raise SpecError(
                f"expected contiguous views on the device of counts and fills, {counts.device} and {fills.device}, "
                f"got {tuple(view.shape)} with strides {view.stride()} on {view.device}"
            )
        if not 0 <= leaf.axis < view.dim() or leaf.per < 1 or not 0 <= leaf.count < counts.shape[0]:
            raise SpecError(
                f"expected an axis of {view.dim()}, per of at least 1 and one of {counts.shape[0]} counts, got axis "
                f"{leaf.axis}, per {leaf.per}, count {leaf.count}"
            )
        if leaf.offsets:
            if view.dtype not in (torch.int32, torch.int64) or view.dim() != 1:
                raise SpecError(
                    f"expected offsets of int32 or int64 and one axis, got {view.dtype} {view.shape}"
                )
        elif not 0 <= leaf.fill < fills.shape[0]:
            raise SpecError(f"expected one of {fills.shape[0]} fills, got {leaf.fill}")
