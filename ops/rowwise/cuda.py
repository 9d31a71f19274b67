"""Launches of the row-wise kernels: the CUDA implementations.

Nothing here synchronises. Rows may be strided; a tensor whose columns aren't adjacent is copied first.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import launch, on_device
from mmgraph.ops.registration import kernel_module
from mmgraph.ops.rowwise.dispatch import Backend, Norm

Tensor = torch.Tensor

# The widest row that a norm holds in registers: 16 elements a thread with 16 warps. A wider one is read in such pieces.
_WIDEST_ROW = 8192
# Elements of a program where rows are narrow, and of a warp: two 16-byte pieces a thread in half precision.
_NARROW_TILE = 1024
_PER_WARP = 512
# Elements that a program takes of each operand where rows are cut: 16 bytes a thread of each, in half precision.
_PIECE = 1024
_PIECE_PER_WARP = 256
# Offsets are read in pieces of up to this many elements.
_WIDEST_LOAD = 16
_MIX_INDEX = int(Fault.MIX_INDEX)


class Tile(NamedTuple):
    """What a program of a norm holds: columns, rows, and its warps."""

    block: int
    rows: int
    warps: int


class Cut(NamedTuple):
    """How a row is cut: columns of a program, programs for each row, warps."""

    block: int
    parts: int
    warps: int


@lru_cache(maxsize=1024)
def tile_of(width: int) -> Tile:
    """The tile for rows of this width; narrower than the row where that isn't held in registers."""
    block = min(_WIDEST_ROW, 1 << (width - 1).bit_length())
    rows = max(1, _NARROW_TILE // block)
    return Tile(block, rows, block * rows // _PER_WARP)


@lru_cache(maxsize=1024)
def cut_of(width: int) -> Cut:
    """The cut of rows of this width."""
    block = min(_PIECE, 1 << (width - 1).bit_length())
    return Cut(block, -(-width // block), max(1, block // _PIECE_PER_WARP))


def _row_stride(tensor: Tensor) -> int:
    """Elements from row to row; where there is one row, and it says less than a row, the width.

    A single row's stride may be anything, and each power of two that divides strides compiles a kernel. That of a part
    of a buffer is right for a single row too.
    """
    rows, width = tensor.shape
    stride = tensor.stride(0)
    return stride if rows > 1 or stride >= width else width


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor as its values are read, or a copy whose columns are adjacent in memory."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _common(*strides: int) -> int:
    """The largest power of two, up to the widest load, that divides every stride."""
    return math.gcd(_WIDEST_LOAD, *strides)


def norm(x: Tensor, delta: Tensor | None, how: Norm, total: Tensor | None, out: Tensor) -> None:
    """Fill ``out``, and ``total`` where there is a ``delta``: one launch."""
    x = adjacent(x)
    added = x if delta is None else adjacent(delta)
    tokens, width = out.shape
    tile = tile_of(width)
    strides = _row_stride(x), _row_stride(added)
    # What isn't there is never looked at.
    weight, bias = (x if one is None else one.resolve_neg().contiguous() for one in (how.weight, how.bias))
    tensors = (x, added, weight, bias, out if total is None else total, out)
    flags = (delta is not None, how.kind == "layer", how.weight is not None, how.bias is not None)
    rest = (*flags, float(how.eps), x.dtype == torch.float64, _common(*strides))
    kernels = kernel_module("rowwise.kernels")
    with on_device(x.device):
        if tile.block < width:
            launch(
                kernels.wide_norm_kernel,
                tokens,
                tensors,
                (),
                strides,
                (width, tile.block, *rest),
                num_warps=tile.warps,
            )
        else:
            launch(
                kernels.norm_kernel,
                -(-tokens // tile.rows),
                tensors,
                (tokens,),
                strides,
                (width, tile.block, tile.rows, *rest),
                num_warps=tile.warps,
            )


def activate(x: Tensor, kind: str, gated: bool, out: Tensor) -> None:
    """Fill ``out``: one launch."""
    x = adjacent(x)
    tokens, width = out.shape
    cut = cut_of(width)
    stride = _row_stride(x)
    with on_device(x.device):
        launch(
            kernel_module("rowwise.kernels").activation_kernel,
            tokens * cut.parts,
            (x, out),
            (),
            (stride,),
            (width, cut.block, cut.parts, kind, gated, x.dtype == torch.float64, _common(stride)),
            num_warps=cut.warps,
        )


def mix(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None, out: Tensor) -> None:
    """Fill ``out``: one launch; indices outside the table go to the error flag."""
    flag = flag_for(out.device)
    table = adjacent(table)
    added = out if base is None else adjacent(base)
    tokens, width = out.shape
    cut = cut_of(width)
    strides = _row_stride(table), _row_stride(added)
    with on_device(out.device):
        launch(
            kernel_module("rowwise.kernels").mix_kernel,
            tokens * cut.parts,
            (table, indices.resolve_neg().contiguous(), weights.resolve_neg().contiguous(), added, out, flag),
            (table.shape[0],),
            strides,
            (
                width,
                cut.block,
                cut.parts,
                indices.shape[1],
                base is not None,
                table.dtype == torch.float64,
                added.dtype == torch.float64,
                _common(strides[0]),
                _common(strides[1]),
                _MIX_INDEX,
            ),
            num_warps=cut.warps,
        )


BACKEND = Backend(norm, activate, mix)
