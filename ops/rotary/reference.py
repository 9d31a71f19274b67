"""Rotary positions in plain PyTorch: the readable definition of what the kernels do, and the CPU implementation.

The math is in float32 (float64 for float64), and what is stored is rounded once, at the end.
"""

import torch

from mmgraph.ops.rotary.dispatch import Backend, Rotation, parts

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _split(heads: Tensor, interleaved: bool) -> Pair:
    """The first and the second elements of the last dimension's pairs."""
    if interleaved:
        return heads[..., 0::2], heads[..., 1::2]
    half = heads.shape[-1] // 2
    return heads[..., :half], heads[..., half:]


def _join(pair: Pair, interleaved: bool) -> Tensor:
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def _tables(table: Tensor, head_dim: int, interleaved: bool, dtype: torch.dtype) -> Pair:
    """The table's values for the first and for the second elements, ``[T, 1, head_dim / 2]``."""
    table = table.to(dtype)[:, None]
    return _split(table, interleaved) if table.shape[-1] == head_dim else (table, table)


def _rotate(heads: Tensor, rotation: Rotation, transposed: bool = False) -> Tensor:
    """``heads * cos + rotate(heads) * sin`` on ``[T, heads, head_dim]``, or the transposed map."""
    if rotation.cos is None or rotation.sin is None:
        return heads
    first, second = _split(heads, rotation.interleaved)
    cos = _tables(rotation.cos, heads.shape[-1], rotation.interleaved, heads.dtype)
    sin = _tables(rotation.sin, heads.shape[-1], rotation.interleaved, heads.dtype)
    if transposed:
        turned = first * cos[0] + second * sin[1], second * cos[1] - first * sin[0]
    else:
        turned = first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]
    return _join(turned, rotation.interleaved)


def _inverse_rms(heads: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)


def _forward_part(heads: Tensor, weight: Tensor | None, rotation: Rotation) -> Tensor:
    wide = heads.to(_math_dtype(heads.dtype))
    if weight is not None:
        wide = wide * _inverse_rms(wide, rotation.eps) * weight.to(wide.dtype)
    return _rotate(wide, rotation)


def forward(qkv: Tensor, rotation: Rotation, q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Fill q and k, which may be qkv's own memory, and v where it is given."""
    packed_q, packed_k, packed_v = parts(qkv, q.shape[1], k.shape[1], q.shape[2])
    q.copy_(_forward_part(packed_q, rotation.q_norm, rotation))
    k.copy_(_forward_part(packed_k, rotation.k_norm, rotation))
    if v is not None:
        v.copy_(packed_v)


def _backward_part(
    grad: Tensor, heads: Tensor | None, weight: Tensor | None, rotation: Rotation
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the heads and, where there is one, of the norm's weight."""
    grad = _rotate(grad.to(_math_dtype(grad.dtype)), rotation, transposed=True)
    if weight is None or heads is None:
        return grad, None
    wide = heads.to(grad.dtype)
    inverse = _inverse_rms(wide, rotation.eps)
    normed = wide * inverse
    weighted = grad * weight.to(grad.dtype)
    grad_heads = inverse * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_heads, (grad * normed).sum((0, 1)).to(weight.dtype)


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, rotation: Rotation, dqkv: Tensor, need_norms: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Fill ``dqkv``; return the gradients of the norms' weights."""
    sizes = dq.shape[1], dk.shape[1], dq.shape[2]
    packed_q, packed_k, _ = (None, None, None) if qkv is None else parts(qkv, *sizes)
    part_q, part_k, part_v = parts(dqkv, *sizes)
    grad_q, grad_q_norm = _backward_part(dq, packed_q, rotation.q_norm, rotation)
    grad_k, grad_k_norm = _backward_part(dk, packed_k, rotation.k_norm, rotation)
    part_q.copy_(grad_q)
    part_k.copy_(grad_k)
    part_v.copy_(dv)
    return grad_q_norm, grad_k_norm


BACKEND = Backend(forward, backward)
