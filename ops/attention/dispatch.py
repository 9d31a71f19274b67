"""The attention ops' implementations: check, choose on real integers, run; and their gradient.

The choice is made inside the op, at run time, so that one compiled graph serves every shape.
"""

from collections.abc import Callable
from typing import Any

import torch

from mmgraph.ops import checks
from mmgraph.ops.attention import fa2, reference
from mmgraph.ops.attention.order import choose
from mmgraph.ops.attention.registry import AttentionBackend, Traits, require_backend
from mmgraph.ops.schemas import lse_dtype

Tensor = torch.Tensor


def _traits(q: Tensor, v: Tensor, causal: bool, gradient: bool) -> Traits:
    _, heads, head_dim = q.shape
    _, kv_heads, v_dim = v.shape
    return Traits(q.device, q.dtype, head_dim, v_dim, heads, kv_heads, causal, gradient)


def _run(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    if q.shape[0] == 0 or max_seqlen == 0 or cu_seqlens.shape[0] < 2:  # no sequence has a token
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
        lse = None
        if with_lse:
            lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=lse_dtype(q.dtype))
        return out, lse
    if scale is None:
        scale = q.shape[2] ** -0.5
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return backend.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
    return backend.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None, causal: bool
) -> Tensor:
    """``mmgraph::varlen_attention``: the backend is chosen here."""
    checks.refuse_gradients("mmgraph::varlen_attention", "call mmgraph.ops.varlen_attention.", q, k, v)
    checks.check_attention(q, k, v, cu_seqlens, max_seqlen)
    if q.is_cpu:
        checks.check_offsets(cu_seqlens, q.shape[0], max_seqlen)
    backend = choose(_traits(q, v, causal, False), max_seqlen)
    return _run(backend, q, k, v, cu_seqlens, max_seqlen, scale, causal, False)[0]


def attention_by(name: str) -> Callable[..., Tensor]:
    """The implementation of one backend's own op, ``mmgraph::attn_<name>``."""

    def named(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None, causal: bool
    ) -> Tensor:
        checks.refuse_gradients(f"mmgraph::attn_{name}", "call mmgraph.ops.varlen_attention.", q, k, v)
        checks.check_attention(q, k, v, cu_seqlens, max_seqlen)
        if q.is_cpu:
            checks.check_offsets(cu_seqlens, q.shape[0], max_seqlen)
        backend = require_backend(name, _traits(q, v, causal, False))
        return _run(backend, q, k, v, cu_seqlens, max_seqlen, scale, causal, False)[0]

    return named


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``mmgraph::varlen_attention_lse``: output and log-sum-exps; an empty name leaves the choice to the op."""
    checks.check_attention(q, k, v, cu_seqlens, max_seqlen)
    if q.is_cpu:
        checks.check_offsets(cu_seqlens, q.shape[0], max_seqlen)
    traits = _traits(q, v, causal, True)
    if backend:
        record = require_backend(backend, traits)
    else:
        record = choose(traits, max_seqlen)
    out, lse = _run(record, q, k, v, cu_seqlens, max_seqlen, scale, causal, True)
    if lse is None:
        raise RuntimeError(f"attention backend {record.name!r} claims a gradient but returned no log-sum-exps.")
    return out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmgraph::varlen_attention_backward``: shared by all backends, since log-sum-exps are all that it needs."""
    if q.shape[0] == 0 or max_seqlen == 0 or cu_seqlens.shape[0] < 2:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if scale is None:
        scale = q.shape[2] ** -0.5
    if fa2.BACKEND.why_not(_traits(q, v, causal, True)) is None:
        with torch.cuda.device(q.device):
            return fa2.backward(grad, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, causal)
    return reference.backward(grad, q, k, v, lse, cu_seqlens, scale, causal)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward needs; the log-sum-exps carry no gradient of their own."""
    q, k, v, cu_seqlens, max_seqlen, scale, causal, _ = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
    ctx.max_seqlen, ctx.scale, ctx.causal = max_seqlen, scale, causal


def differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient per input of ``varlen_attention_lse``."""
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    dq, dk, dv = torch.ops.mmgraph.varlen_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.causal
    )
    return dq, dk, dv, None, None, None, None, None
