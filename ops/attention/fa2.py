"""The fa2 backend: FlashAttention 2, from the flash-attn package where installed, else PyTorch's own copy.

Both take half precision on NVIDIA GPUs of compute capability 8.0 or more, widths up to 256 that are multiples of 8, and
one width for q, k and v: other widths are padded with zeros here and cut off again, the scale always that of the true
width. Both leave rows behind the last sequence unwritten; ``zero_tail`` clears them without a synchronisation.

The kernels use the offsets as they are given, forward and backward, and check none: offsets that decrease, don't start
at 0 or end behind the tokens make them read and write outside their tensors. ``zero_tail`` records such offsets, but
only afterwards. Clamping them before would take one more launch on every call, some microseconds of the host's time, to
guard against a mistake that callers can rule out where they make the offsets.
"""

from functools import lru_cache
from typing import Any

import torch

from mmgraph.ops.attention.registry import AttentionBackend, Traits, import_package
from mmgraph.ops.attention.triton_backend import triton_package, zero_tail

Tensor = torch.Tensor

LARGEST_WIDTH = 256
DTYPES = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def _package() -> Any:
    def load() -> Any:
        from flash_attn import flash_attn_interface

        return flash_attn_interface._flash_attn_varlen_forward

    return import_package("flash_attn", load)


def source() -> str:
    """Where the kernels come from: ``"flash-attn"`` or ``"torch"``.

    Raises:
        BrokenBackend: flash-attn is installed and can't be imported.
    """
    return "torch" if _package() is None else "flash-attn"


def padded_width(head_dim: int, v_dim: int) -> int:
    """The one width that the kernels get."""
    return -(-max(head_dim, v_dim) // 8) * 8


def widen(tensor: Tensor, width: int) -> Tensor:
    """The tensor with that width, and 16-byte aligned rows: itself where it is so already."""
    if tensor.shape[2] != width:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[2]))
    strides = tensor.stride()
    aligned = strides[2] == 1 and strides[1] % 8 == 0 and strides[0] % 8 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale that is positive, which the kernels need: with another they give NaN."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention 2 per sequence; zeros where no sequence covers.

    The offsets must be right: wrong ones lead the kernels outside the tensors, and are recorded only afterwards.
    """
    head_dim, v_dim = q.shape[2], v.shape[2]
    width = padded_width(head_dim, v_dim)
    q, scale = positive_scale(q, scale)
    q, k, v = widen(q, width), widen(k, width), widen(v, width)
    cu_seqlens = cu_seqlens.contiguous()
    # With a longest length of 1 and grouped heads the kernels take every row for a sequence of its own.
    max_seqlen = max(max_seqlen, 2)
    package = _package()
    if package is None:
        out, lse = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = package(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            0.0,
            scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
        )[:2]
    out = out[:, :, :v_dim].contiguous()  # itself, unless it was padded or has the strides of a head-major q
    zero_tail(out, cu_seqlens, max_seqlen)
    if not with_lse:
        return out, None
    rows = torch.arange(out.shape[0], device=out.device)
    return out, torch.where(rows < cu_seqlens[-1], lse, float("-inf"))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's FlashAttention 2 backward, for the log-sum-exps of any backend; zeros where no sequence covers.

    The offsets must be right, as for ``forward``.
    """
    head_dim, v_dim = q.shape[2], v.shape[2]
    width = padded_width(head_dim, v_dim)
    sign = (scale > 0) - (scale < 0)
    q, scale = positive_scale(q, scale)
    wide_q, wide_k, wide_v, wide_out, wide_grad = (widen(x, width) for x in (q, k, v, out, grad))
    cu_seqlens = cu_seqlens.contiguous()
    max_seqlen = max(max_seqlen, 2)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        wide_grad,
        wide_q,
        wide_k,
        wide_v,
        wide_out,
        lse.contiguous(),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        causal,
        seed,
        torch.empty(0, device=q.device),
        scale=scale,
    )
    if sign < 1:
        dq = dq * sign
    result = (dq[:, :, :head_dim].contiguous(), dk[:, :, :head_dim].contiguous(), dv[:, :, :v_dim].contiguous())
    for one in result:
        zero_tail(one, cu_seqlens)
    return result


def supports_shape(dtype: torch.dtype, head_dim: int, v_dim: int) -> bool:
    """Whether the kernels take this dtype and these widths."""
    return dtype in DTYPES and padded_width(head_dim, v_dim) <= LARGEST_WIDTH


def _why_not(traits: Traits) -> str | None:
    if traits.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {traits.device.type}"
    if torch.cuda.get_device_capability(traits.device) < (8, 0):
        return "it needs compute capability 8.0 or more"
    if traits.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {traits.dtype}"
    if not supports_shape(traits.dtype, traits.head_dim, traits.v_dim):
        return f"it takes widths up to {LARGEST_WIDTH}, not {max(traits.head_dim, traits.v_dim)}"
    if triton_package() is None:
        return "it clears the rows behind the last sequence with a Triton kernel, and triton isn't installed"
    if _package() is None and not torch.backends.cuda.is_flash_attention_available():
        return "flash-attn isn't installed and this PyTorch was built without its own copy"
    return None


BACKEND = AttentionBackend("fa2", forward, _why_not, supports_gradient=True)
