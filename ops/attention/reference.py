"""The reference backend: attention in plain PyTorch, math in fp32 (fp64 for fp64), on any device, with its backward.

On a CPU it walks over the sequences. Elsewhere it may not read the offsets, so it masks a dense score matrix from them
on the device, some query rows at a time: quadratic, and free of synchronisation. Rows that no sequence covers are left
out of every product, so that garbage in them, NaN included, reaches nothing.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.schemas import lse_dtype

Tensor = torch.Tensor

_SCORES_AT_ONCE = 1 << 26


class _Part(NamedTuple):
    """Query rows, the key rows they can see, and which of those they do see (None: all)."""

    queries: slice
    keys: slice
    visible: Tensor | None


def _parts(cu_seqlens: Tensor, tokens: int, heads: int, causal: bool) -> Iterator[_Part]:
    if cu_seqlens.device.type != "cpu":
        yield from _masked_parts(cu_seqlens, tokens, heads, causal)
        return
    for start, end in pairwise(cu_seqlens.tolist()):
        if end > start:
            rows = torch.arange(end - start)
            yield _Part(slice(start, end), slice(start, end), rows[:, None] >= rows if causal else None)


def _masked_parts(cu_seqlens: Tensor, tokens: int, heads: int, causal: bool) -> Iterator[_Part]:
    rows = torch.arange(tokens, device=cu_seqlens.device)
    owner = _owners(cu_seqlens, tokens)
    batch = cu_seqlens.shape[0] - 1
    step = max(1, _SCORES_AT_ONCE // max(1, heads * tokens))
    for first in range(0, tokens, step):
        some = slice(first, min(first + step, tokens))
        visible = (owner[some, None] == owner) & (owner < batch)
        if causal:
            visible &= rows[some, None] >= rows
        yield _Part(some, slice(0, tokens), visible)


def _owners(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """For each row the sequence that it belongs to, or ``batch`` where none covers it."""
    rows = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)


def _covered(tensor: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, with zeros in the rows that no sequence covers."""
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    return torch.where((rows < cu_seqlens[-1])[:, None, None], tensor, 0).to(dtype)


def _scores(q: Tensor, k: Tensor, part: _Part, scale: float) -> Tensor:
    """Scaled scores ``[kv_heads, group, queries, keys]``."""
    kv_heads, width = k.shape[1], k.shape[2]
    grouped = q[part.queries].reshape(-1, kv_heads, q.shape[1] // kv_heads, width)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k[part.keys]) * scale
    return scores if part.visible is None else scores.masked_fill(~part.visible, float("-inf"))


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
    """Attention per sequence; zeros, and minus infinity in the log-sum-exps, where no sequence covers."""
    with torch.autocast(q.device.type, enabled=False):  # it would compute in half precision
        return _forward(q, k, v, cu_seqlens, scale, causal, with_lse)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    tokens, heads, _ = q.shape
    v_dim = v.shape[2]
    work = lse_dtype(q.dtype)
    out = q.new_zeros((tokens, heads, v_dim))
    lse = q.new_full((heads, tokens), float("-inf"), dtype=work)
    qw, kw, vw = (_covered(x, cu_seqlens, work) for x in (q, k, v))
    for part in _parts(cu_seqlens, tokens, heads, causal):
        scores = _scores(qw, kw, part, scale)
        sums = torch.logsumexp(scores, dim=-1)
        # A row that sees nothing has a sum of minus infinity: exp(-inf - 0) is the zero that it should weigh.
        weights = torch.exp(scores - torch.where(sums == float("-inf"), 0, sums)[..., None])
        rows = torch.einsum("hgqk,khd->qhgd", weights, vw[part.keys])
        out[part.queries] = rows.reshape(-1, heads, v_dim).to(q.dtype)
        lse[:, part.queries] = sums.reshape(heads, -1)
    return out, lse if with_lse else None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the log-sum-exps of any backend; zeros where no sequence covers."""
    with torch.autocast(q.device.type, enabled=False):
        return _backward(grad, q, k, v, lse, cu_seqlens, scale, causal)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, width = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    group = heads // kv_heads
    work = lse_dtype(q.dtype)
    gw, qw, kw, vw = (_covered(x, cu_seqlens, work) for x in (grad, q, k, v))
    dq, dk, dv = (x.new_zeros(x.shape) for x in (qw, kw, vw))
    sums = torch.where(lse == float("-inf"), 0, lse).to(work).reshape(kv_heads, group, tokens)
    for part in _parts(cu_seqlens, tokens, heads, causal):
        grads = gw[part.queries].reshape(-1, kv_heads, group, v_dim)
        weights = torch.exp(_scores(qw, kw, part, scale) - sums[:, :, part.queries, None])
        dv[part.keys] += torch.einsum("hgqk,qhgd->khd", weights, grads)
        dweights = torch.einsum("qhgd,khd->hgqk", grads, vw[part.keys])
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
        dq[part.queries] = torch.einsum("hgqk,khd->qhgd", dscores, kw[part.keys]).reshape(-1, heads, width)
        grouped = qw[part.queries].reshape(-1, kv_heads, group, width)
        dk[part.keys] += torch.einsum("hgqk,qhgd->khd", dscores, grouped)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _why_not(traits: Traits) -> str | None:
    if traits.device.type not in ("cpu", "cuda"):
        return f"the ops run on CPU and CUDA devices, not on {traits.device.type}"
    return None


BACKEND = AttentionBackend("reference", forward, _why_not, supports_gradient=True)
