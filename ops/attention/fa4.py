"""The fa4 backend: FlashAttention 4 (``flash_attn.cute``), whose kernels are compiled at their first call.

Such a compilation takes seconds and loads a module, which must not happen while a graph is being captured; so a kind of
call that wasn't made before is refused inside a capture.

The flash-attn package (FlashAttention 2) brings a folder ``flash_attn/cute`` of its own, an early state of these
kernels. It isn't taken: what counts is that FlashAttention 4 was installed by its name.
"""

import threading
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from mmgraph.ops.attention import flash_shared
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.errors import DuringCaptureError
from mmgraph.ops.packages import import_package

Tensor = torch.Tensor

# Compute capabilities, by their first number, whose kernels take the shapes of ``_why_not``.
_MAJORS = (9, 10, 11)
_NEEDED = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "return_lse",
)

_DISTRIBUTIONS = ("flash-attn-4", "flash-attn-cute")

_MANY_SEQUENCES = 256  # above it the kernels get a table to look sequences up in

_called: set[tuple[Any, ...]] = set()
_compiling = threading.Lock()


def _is_distributed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@lru_cache(maxsize=1)
def _package() -> Any:
    def load() -> Any:
        import inspect

        from flash_attn.cute import interface

        function = interface._flash_attn_fwd
        missing = [name for name in _NEEDED if name not in inspect.signature(function).parameters]
        if missing:
            raise ImportError(f"its forward function takes no {', '.join(missing)}")
        return function

    return import_package("flash_attn.cute", load) if any(map(_is_distributed, _DISTRIBUTIONS)) else None


def _kind_of(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, with_lse: bool
) -> tuple[Any, ...]:
    """What the package compiles a kernel for; finer in the lengths than it is, so that no compilation is missed."""
    heads, kv_heads = q.shape[1], k.shape[1]
    width = flash_shared.padded_width(q.shape[2], v.shape[2])
    many = cu_seqlens.shape[0] - 1 > _MANY_SEQUENCES
    long = max_seqlen * (heads // kv_heads) > 128
    return (q.device, q.dtype, heads, kv_heads, width, causal, with_lse, many, long)


def ready(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> bool:
    """Whether such a call was made before, so that it compiles nothing."""
    return _kind_of(q, k, v, cu_seqlens, max_seqlen, causal, with_lse) in _called


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
    """FlashAttention 4 per sequence; zeros where no sequence covers. The offsets must be right (see flash_shared).

    Raises:
        DuringCaptureError: The call needs a kernel that isn't compiled yet, and a graph is being captured.
    """
    kind = _kind_of(q, k, v, cu_seqlens, max_seqlen, causal, with_lse)
    v_dim = v.shape[2]
    q, k, v, cu_seqlens, scale = flash_shared.prepare(q, k, v, cu_seqlens, scale)
    if kind in _called:
        out, lse = _call(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
    elif torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            "attention backend 'fa4' compiles a kernel at the first call of its kind, which can't happen while a "
            "graph is being captured. Call the function once with these widths, heads, dtype and batch before "
            "capturing it."
        )
    else:
        with _compiling:
            out, lse = _call(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
            _called.add(kind)
    overhang = (q, k, v, scale, causal)
    return flash_shared.finish(out, lse if with_lse else None, v_dim, cu_seqlens, max_seqlen, overhang)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    out, lse = _package()(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=causal,
        return_lse=with_lse,
    )[:2]
    return out, lse


def _why_not(traits: Traits) -> str | None:
    reason = flash_shared.why_not_nvidia(traits, _MAJORS) or flash_shared.why_not_half(traits)
    if reason is not None:
        return reason
    width = flash_shared.padded_width(traits.head_dim, traits.v_dim)
    if width > 128 and width != 256 and torch.cuda.get_device_capability(traits.device)[0] != 9:
        return f"its kernels for this GPU take widths up to 128, and 256, not {width}"
    if _package() is None:
        return "flash-attn-4 (flash_attn.cute) isn't installed"
    return flash_shared.why_not_clear()


BACKEND = AttentionBackend("fa4", forward, _why_not, supports_gradient=True, ready=ready)
