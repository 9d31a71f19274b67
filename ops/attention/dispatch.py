"""The attention ops' implementations: check, choose on real integers, run; and their gradient.

The choice is made inside the op, at run time, so that one compiled graph serves every shape.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmgraph.ops import checks
from mmgraph.ops.attention import flash_backward, measured, reference, settings
from mmgraph.ops.attention.order import rank
from mmgraph.ops.attention.registry import AttentionBackend, Traits, require_backend
from mmgraph.ops.attention.zero_tail import triton_package, zero_tail
from mmgraph.ops.errors import ArgumentError, OpError, UnusableBackend
from mmgraph.ops.launching import on_device
from mmgraph.ops.schemas import lse_dtype

Tensor = torch.Tensor

_log = logging.getLogger("mmgraph.ops.attention")


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
    if scale is None:
        scale = q.shape[2] ** -0.5
    elif not math.isfinite(scale):
        raise ArgumentError(f"varlen_attention: scale must be a finite number, got {scale}.")
    if q.shape[0] == 0 or max_seqlen == 0 or cu_seqlens.shape[0] < 2:
        return _without_rows(q, v, cu_seqlens, max_seqlen, with_lse)
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return backend.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
    return backend.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)


def _without_rows(
    q: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The result where no sequence has a row; offsets that say otherwise are recorded."""
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = None
    if with_lse:
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=lse_dtype(q.dtype))
    if q.is_cuda and q.shape[0] and cu_seqlens.shape[0] > 1 and triton_package() is not None:
        with on_device(q.device):
            zero_tail(out, cu_seqlens.contiguous(), max_seqlen)
    return out, lse


def _serve(
    name: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The call on the backend by argument, by what is asked for outside of it, or by the choice."""
    traits = _traits(q, v, causal, with_lse)
    # No sequence is longer than all rows. Cut here, so that who chooses, measures, says that it is ready and runs sees
    # one length.
    max_seqlen = min(max_seqlen, q.shape[0])
    arguments = (q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse)
    origin = ""
    if name is None:
        name, origin = settings.asked_for()
    if name is None:
        return _serve_by_rank(rank(traits, q.shape[0], cu_seqlens.shape[0] - 1, max_seqlen), arguments)
    if name == settings.MEASURE:
        backend = measured.choose(
            traits, q.shape[0], cu_seqlens.shape[0] - 1, max_seqlen, lambda one: _run(one, *arguments)
        )
    else:
        try:
            backend = require_backend(name, traits)
        except OpError as error:
            raise settings.with_origin(error, name, origin) from error
    return _run(backend, *arguments)


def _serve_by_rank(
    ranked: Sequence[AttentionBackend], arguments: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """The call on the first backend that can serve it now.

    A capture forbids what some do at a first call (they say by ``ready``), and cuDNN may know only when it is asked for
    a plan that it has none.
    """
    refusal: UnusableBackend | None = None
    for backend in ranked:
        if backend.ready is not None and arguments[0].is_cuda and torch.cuda.is_current_stream_capturing():
            scale = arguments[0].shape[2] ** -0.5 if arguments[5] is None else arguments[5]
            if not backend.ready(*arguments[:5], scale, *arguments[6:]):
                _log.warning(
                    "varlen_attention: %s isn't ready inside this capture; the next one serves", backend.name
                )
                continue
        try:
            return _run(backend, *arguments)
        except UnusableBackend as error:
            _log.warning("varlen_attention: %s refused a call, the next one serves: %s", backend.name, error)
            refusal = error
    raise refusal or UnusableBackend("no attention backend can serve this call.")


def attention_by(op: str, name: str | None) -> Callable[..., Tensor]:
    """The implementation of an op without a gradient.

    Args:
        op: The op's name, for messages.
        name: The backend, ``"measure"``, or None for ``mmgraph::varlen_attention``, where the backend is chosen here.
    """

    label = f"mmgraph::{op}"

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None, causal: bool
    ) -> Tensor:
        checks.refuse_gradients(label, "call mmgraph.ops.varlen_attention.", q, k, v)
        checks.check_attention(q, k, v, cu_seqlens, max_seqlen)
        if q.is_cpu:
            checks.check_offsets(cu_seqlens, q.shape[0], max_seqlen)
        return _serve(name, q, k, v, cu_seqlens, max_seqlen, scale, causal, False)[0]

    return run


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
    out, lse = _serve(backend or None, q, k, v, cu_seqlens, max_seqlen, scale, causal, True)
    if lse is None:
        raise RuntimeError("an attention backend claims a gradient but returned no log-sum-exps.")
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
    if flash_backward.serves(_traits(q, v, causal, True)):
        with on_device(q.device):
            return flash_backward.backward(grad, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, causal)
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
