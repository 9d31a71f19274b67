"""The fa2 backend: FlashAttention 2, from the flash-attn package where installed, else PyTorch's own copy.

Both take half precision on NVIDIA GPUs of compute capability 8.0 or more, widths up to 256 that are multiples of 8, and
one width for q, k and v: other widths are padded with zeros here and cut off again, the scale always that of the true
width. The package's kernels are called through its extension module, which saves the host the wrappers around it.
"""

from functools import lru_cache
from typing import Any

import torch

from mmgraph.ops.attention import flash_shared, torch_varlen
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.packages import import_package

Tensor = torch.Tensor


@lru_cache(maxsize=1)
def _package() -> Any:
    def load() -> Any:
        from flash_attn import flash_attn_interface

        return flash_attn_interface.flash_attn_gpu.varlen_fwd

    return import_package("flash_attn.flash_attn_interface", load)


def source() -> str:
    """Where the kernels come from: ``"flash-attn"`` or ``"torch"``.

    Raises:
        BrokenBackend: flash-attn is installed and can't be imported.
    """
    return "torch" if _package() is None else "flash-attn"


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
    """FlashAttention 2 per sequence; zeros where no sequence covers. The offsets must be right (see flash_shared)."""
    package = _package()
    if package is None:
        return torch_varlen.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
    v_dim = v.shape[2]
    q, k, v, cu_seqlens, scale = flash_shared.prepare(q, k, v, cu_seqlens, scale)
    # With a longest length of 1 and grouped heads the kernels take every row for a sequence of its own.
    longest = max(max_seqlen, 2)
    out, lse = package(
        q,
        k,
        v,
        None,  # out
        cu_seqlens,
        cu_seqlens,
        None,  # seqused_k
        None,  # leftpad_k
        None,  # block_table
        None,  # alibi_slopes
        longest,
        longest,
        0.0,  # dropout
        scale,
        False,  # zero_tensors
        causal,
        -1,
        0 if causal else -1,
        0.0,  # softcap
        False,  # return_softmax
        None,  # generator
    )[:2]
    return flash_shared.finish(out, lse if with_lse else None, v_dim, cu_seqlens, max_seqlen)


def _why_not(traits: Traits) -> str | None:
    reason = flash_shared.why_not_nvidia(traits) or flash_shared.why_not_half(traits)
    reason = reason or flash_shared.why_not_clear()
    if reason is not None:
        return reason
    if _package() is None and not torch.backends.cuda.is_flash_attention_available():
        return "flash-attn isn't installed and this PyTorch was built without its own copy"
    return None


BACKEND = AttentionBackend("fa2", forward, _why_not, supports_gradient=True)
