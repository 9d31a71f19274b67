"""Rows that no sequence covers: cleared in the output, and kept out of the result, without a synchronisation."""

import math
from functools import lru_cache
from typing import Any

import torch

from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import launch
from mmgraph.ops.packages import import_package
from mmgraph.ops.registration import kernel_module

Tensor = torch.Tensor

_PROGRAMS = 128
_BLOCK = 2048
_OVERHANG = 256  # rows behind a sequence's end that a kernel may read: the largest block of keys of any
_LOG2_E = math.log2(math.e)
_FAULT = int(Fault.ATTENTION_OFFSETS)


def zero_tail(out: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None) -> None:
    """Zero the rows from ``cu_seqlens[-1]`` on, in place and on the device.

    Args:
        out: Contiguous ``[tokens, heads, width]``.
        cu_seqlens: int32 ``[batch + 1]``, contiguous.
        max_seqlen: If given, offsets that can't be right for it are recorded in the error flag.
    """
    tokens, heads, width = out.shape
    launch(
        kernel_module("attention.tail_kernels").zero_tail_kernel,
        _PROGRAMS,
        (out, cu_seqlens, flag_for(out.device)),
        (tokens, cu_seqlens.shape[0] - 1, 0 if max_seqlen is None else max_seqlen),
        (),
        (_PROGRAMS, heads * width, _BLOCK, max_seqlen is not None, _FAULT),
        num_warps=4,
    )


def close_tail(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> None:
    """``zero_tail`` for kernels that read rows behind a sequence's end with a weight of zero.

    Where the rows behind the last sequence hold infinities or NaN, zero times these is NaN, in the rows of the last
    sequences. So these are looked at, and then (only then) those sequences are computed anew: slowly, and rightly.

    Args:
        out: Contiguous ``[tokens, heads, v_dim]``.
        q: ``[tokens, heads, width]`` as the kernels got it, columns adjacent, rows aligned to 16 bytes; k and v too, of
            which v may be wider than out.
        k: ``[tokens, kv_heads, width]``.
        v: ``[tokens, kv_heads, width]``.
        cu_seqlens: int32 ``[batch + 1]``, contiguous.
        max_seqlen: The longest length; offsets that can't be right for it are recorded in the error flag.
        scale: Above zero.
        causal: Whether a row sees itself and earlier ones only.
    """
    tokens, heads, v_dim = out.shape
    width = q.shape[2]
    parts = max(1, _PROGRAMS // heads)
    launch(
        kernel_module("attention.tail_kernels").close_tail_kernel,
        heads * parts,
        (out, cu_seqlens, flag_for(out.device), q, k, v),
        (tokens, cu_seqlens.shape[0] - 1, max_seqlen, scale * _LOG2_E),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (
            parts,
            heads,
            heads // k.shape[1],
            width,
            padded_power(width),
            v_dim,
            padded_power(v_dim),
            _BLOCK,
            _OVERHANG,
            64,
            causal,
            _FAULT,
        ),
        num_warps=4,
        num_stages=1,
    )


def padded_power(width: int) -> int:
    """The power of two, at least 16, that tiles of Triton kernels have for a width."""
    return max(16, 1 << (width - 1).bit_length())


@lru_cache(maxsize=1)
def triton_package() -> Any:
    """The triton package, or None where it isn't installed.

    Raises:
        BrokenBackend: It is installed and can't be imported.
    """

    def load() -> Any:
        import triton

        return triton

    return import_package("triton", load)
