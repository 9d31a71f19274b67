"""The torch backend: the varlen attention inside PyTorch, its own copy of FlashAttention 2.

The same kernels that ``torch.nn.attention.varlen.varlen_attn`` calls, without its wrappers. Where the user switched
PyTorch to other kernels (``torch.nn.attention.activate_flash_attention_impl``), it refuses: the contract isn't theirs.
"""

import torch

from mmgraph.ops.attention import flash_shared
from mmgraph.ops.attention.registry import AttentionBackend, Traits

Tensor = torch.Tensor


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
    """PyTorch's attention per sequence; zeros where no sequence covers. Offsets must be right (see flash_shared)."""
    flash_shared.check_pytorchs_kernels()
    v_dim = v.shape[2]
    q, k, v, cu_seqlens, scale = flash_shared.prepare(q, k, v, cu_seqlens, scale)
    # With a longest length of 1 and grouped heads the kernels take every row for a sequence of its own.
    longest = max(max_seqlen, 2)
    out, lse = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        causal,
        False,
        scale=scale,
    )[:2]
    return flash_shared.finish(out, lse if with_lse else None, v_dim, cu_seqlens, max_seqlen)


def _why_not(traits: Traits) -> str | None:
    reason = flash_shared.why_not_nvidia(traits) or flash_shared.why_not_half(traits)
    reason = reason or flash_shared.why_not_clear()
    if reason is not None:
        return reason
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without FlashAttention"
    return None


BACKEND = AttentionBackend("torch", forward, _why_not, supports_gradient=True)
