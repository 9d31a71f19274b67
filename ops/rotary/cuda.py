"""Launches of the rotary kernels: the CUDA implementations.

Nothing here synchronises. Rows may be strided; what the kernels can't read in place is copied first.
"""

import math

import torch

from mmgraph.ops.launching import launch, on_device
from mmgraph.ops.registration import kernel_module
from mmgraph.ops.rotary.dispatch import Backend, Rotation

Tensor = torch.Tensor

# Elements of q, and as many of k, that a program holds at a time; and what a warp takes of both together. The forward
# is faster with more warps (at width 72 by a tenth, H200), the backward, which holds more values, isn't.
_LARGEST_TILE = 2048
_FORWARD_PER_WARP = 512
_BACKWARD_PER_WARP = 1024
# Programs of a backward that sums the gradients of weights: enough for many waves, and few rows to add up at the end.
_SUMMING_PROGRAMS = 2048
# Offsets are read in pieces of up to this many elements.
_WIDEST_PIECE = 16


def _shape(heads: int, half: int, per_warp: int) -> tuple[int, int]:
    """Heads at a time, and warps, for this many heads of ``2 * half``."""
    width = 2 * _power_of_two(half)
    block = min(_power_of_two(heads), max(1, _LARGEST_TILE // width))
    return block, max(1, min(8, 2 * block * width // per_warp))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is adjacent in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tables(rotation: Rotation, stand_in: Tensor) -> tuple[Tensor, Tensor, int]:
    """Both tables, with columns 1 or 2 apart, and how far; the stand-in where there are none."""
    cos, sin = rotation.cos, rotation.sin
    if cos is None or sin is None:
        return stand_in, stand_in, 1
    step = cos.stride(1)
    if step != sin.stride(1) or step not in (1, 2):
        return cos.contiguous(), sin.contiguous(), 1
    return cos, sin, step


def _weight(weight: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if weight is None else weight.contiguous()


def _common(*strides: int) -> int:
    """The largest power of two, up to the widest piece, that divides every stride."""
    return math.gcd(_WIDEST_PIECE, *strides)


def _layout(rotation: Rotation, half: int, step: int) -> tuple[int | bool, ...]:
    """The kernels' constants from INTERLEAVED to K_NORM."""
    cos = rotation.cos
    full = cos is not None and cos.shape[1] == 2 * half
    q_norm, k_norm = rotation.q_norm is not None, rotation.k_norm is not None
    return rotation.interleaved, cos is not None, full, step, q_norm, k_norm


def forward(qkv: Tensor, rotation: Rotation, q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Fill q and k, which may be qkv's own memory, and v where it is given: one launch."""
    qkv = _rows(qkv)
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    cos, sin, step = _tables(rotation, qkv)
    block, warps = _shape(heads, width // 2, _FORWARD_PER_WARP)
    with on_device(qkv.device):
        launch(
            kernel_module("rotary.kernels").forward_kernel,
            tokens,
            (
                qkv,
                cos,
                sin,
                _weight(rotation.q_norm, qkv),
                _weight(rotation.k_norm, qkv),
                q,
                k,
                qkv if v is None else v,
            ),
            (),
            (qkv.stride(0), cos.stride(0), sin.stride(0), q.stride(0), k.stride(0)),
            (
                heads,
                kv_heads,
                width // 2,
                _power_of_two(width // 2),
                block,
                min(_LARGEST_TILE, _power_of_two(kv_heads * width)),
                *_layout(rotation, width // 2, step),
                v is not None,
                rotation.eps,
                qkv.dtype == torch.float64,
                _common(qkv.stride(0)),
                _common(q.stride(0), k.stride(0)),
                _common(cos.stride(0), sin.stride(0)),
            ),
            num_warps=warps,
        )


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, rotation: Rotation, dqkv: Tensor, need_norms: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Fill ``dqkv`` in one launch; where weights need gradients it also leaves partial sums, added up after it."""
    dq, dk, dv = _rows(dq), _rows(dk), _rows(dv)
    tokens, heads, width = dq.shape
    values = dqkv if qkv is None else _rows(qkv)
    cos, sin, step = _tables(rotation, dqkv)
    block, warps = _shape(heads, width // 2, _BACKWARD_PER_WARP)
    summing = need_norms and rotation.has_norm
    programs = min(tokens, _SUMMING_PROGRAMS) if summing else tokens
    sums = dqkv
    if summing:
        math_dtype = torch.float64 if dqkv.dtype == torch.float64 else torch.float32
        sums = dqkv.new_empty((2, programs, width), dtype=math_dtype)
    strides = (dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1))
    with on_device(dqkv.device):
        launch(
            kernel_module("rotary.backward_kernels").backward_kernel,
            programs,
            (
                dq,
                dk,
                dv,
                values,
                cos,
                sin,
                _weight(rotation.q_norm, dqkv),
                _weight(rotation.k_norm, dqkv),
                dqkv,
                sums,
            ),
            (tokens,),
            (*strides, values.stride(0), cos.stride(0), sin.stride(0)),
            (
                heads,
                dk.shape[1],
                width // 2,
                _power_of_two(width // 2),
                block,
                *_layout(rotation, width // 2, step),
                summing,
                rotation.eps,
                dqkv.dtype == torch.float64,
                _common(values.stride(0)),
                _common(*strides),
                _common(cos.stride(0), sin.stride(0)),
            ),
            num_warps=warps,
        )
    if not summing:
        return None, None
    # One reduction for both; the row of a weight that isn't there was never written, and is dropped.
    weights = (rotation.q_norm, rotation.k_norm)
    q_sum, k_sum = (
        None if weight is None else part.to(weight.dtype, copy=True)  # outputs of an op share no memory
        for weight, part in zip(weights, sums.sum(1).unbind(0), strict=True)
    )
    return q_sum, k_sum


BACKEND = Backend(forward, backward)
