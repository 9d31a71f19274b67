"""The shared backward in half precision: PyTorch's FlashAttention 2 backward, for the log-sum-exps of any backend."""

from functools import lru_cache

import torch

from mmgraph.ops.attention import flash_shared
from mmgraph.ops.attention.registry import Traits
from mmgraph.ops.attention.zero_tail import triton_package, zero_tail

Tensor = torch.Tensor


@lru_cache(maxsize=1024)
def serves(traits: Traits) -> bool:
    """Whether it takes tensors of these traits."""
    return (
        flash_shared.why_not_nvidia(traits) is None
        and flash_shared.why_not_half(traits) is None
        and triton_package() is not None
        and torch.backends.cuda.is_flash_attention_available()
    )


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
    """Gradients of q, k and v; zeros where no sequence covers.

    The offsets must be right: wrong ones lead the kernels outside the tensors.
    """
    flash_shared.check_pytorchs_kernels()
    head_dim, v_dim = q.shape[2], v.shape[2]
    width = flash_shared.padded_width(head_dim, v_dim)
    sign = (scale > 0) - (scale < 0)
    q, scale = flash_shared.positive_scale(q, scale)
    wide_q, wide_k, wide_v, wide_out, wide_grad = (flash_shared.widen(x, width) for x in (q, k, v, out, grad))
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
