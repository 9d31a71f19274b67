"""Every schema and fake kernel of ``mmgraph``'s ops.

Outputs are fresh and contiguous whatever the inputs' strides, for every backend. ``SymInt`` marks each integer that
changes from batch to batch. An op whose name ends in ``_autograd`` (and ``varlen_attention_lse``) is the one with a
gradient; its twin without the suffix has none and is cheaper to call.
"""

from typing import Any

import torch

from mmgraph.ops import checks, rotary_checks, rowwise_checks
from mmgraph.ops.registration import OpSpec, define

Tensor = torch.Tensor


def _fake_assemble(input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool) -> Tensor:
    checks.check_assemble(input_ids, table, pool, row_map)
    return table.new_empty((input_ids.shape[0], table.shape[1]))


def _fake_assemble_out(
    input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool, *, out: Tensor
) -> None:
    checks.check_assemble_out(input_ids, table, pool, row_map, out)


def _fake_assemble_backward(
    grad: Tensor,
    input_ids: Tensor,
    row_map: Tensor,
    vocab: Any,
    pool_rows: Any,
    table_dtype: torch.dtype,
    pool_dtype: torch.dtype,
    need_table: bool,
    need_pool: bool,
) -> tuple[Tensor, Tensor]:
    width = grad.shape[1]
    return (
        grad.new_empty((vocab if need_table else 0, width), dtype=table_dtype),
        grad.new_empty((pool_rows if need_pool else 0, width), dtype=pool_dtype),
    )


def _fake_merge(embeds: Tensor, mask: Tensor, features: Tensor, num_placeholders: Any) -> Tensor:
    checks.check_merge(embeds, mask, features)
    return embeds.new_empty(embeds.shape)


def _fake_merge_backward(
    grad: Tensor, mask: Tensor, num_features: Any, features_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty((num_features, grad.shape[1]), dtype=features_dtype)


def _fake_deepstack(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> Tensor:
    checks.check_deepstack("deepstack_add", hidden, pool, row_map, level)
    return hidden.new_empty(hidden.shape)


def _fake_deepstack_in_place(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> None:
    checks.check_deepstack_in_place(hidden, pool, row_map, level)


def _fake_store(rows: Tensor, places: Tensor, *, out: Tensor) -> None:
    checks.check_store(rows, places, out)


def _fake_expand(ranges: Tensor, num_rows: Any) -> Tensor:
    checks.check_ranges(ranges, num_rows)
    return ranges.new_empty((num_rows,))


def _fake_deepstack_backward(
    grad: Tensor, row_map: Tensor, level: int, pool_rows: Any, pool_width: int, pool_dtype: torch.dtype
) -> Tensor:
    return grad.new_empty((pool_rows, pool_width), dtype=pool_dtype)


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: Any, scale: float | None, causal: bool
) -> Tensor:
    checks.check_attention(q, k, v, cu_seqlens, max_seqlen)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which log-sum-exps of a given input dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fake_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    scale: float | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out = _fake_attention(q, k, v, cu_seqlens, max_seqlen, scale, causal)
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))


def _fake_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_rope(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    rotary_checks.check_rope(
        "packed_qkv_rope", qkv, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, interleaved, eps
    )
    tokens = qkv.shape[0]
    return (
        qkv.new_empty((tokens, num_heads, head_dim)),
        qkv.new_empty((tokens, num_kv_heads, head_dim)),
    )


def _fake_rope_copy(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = _fake_rope(qkv, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, interleaved, eps)
    return q, k, k.new_empty(k.shape)


def _fake_rope_in_place(qkv: Tensor, *arguments: Any) -> None:
    rotary_checks.check_rope_in_place(qkv, *arguments)


def _fake_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    interleaved: bool,
    eps: float,
    need_norms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, width = dq.shape
    dq_norm, dk_norm = (
        norm.new_empty((width,)) if norm is not None and need_norms else dq.new_empty((0,))
        for norm in (q_norm, k_norm)
    )
    return dq.new_empty((tokens, (heads + 2 * dk.shape[1]) * width)), dq_norm, dk_norm


def _fake_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    rowwise_checks.check_norm("add_norm", x, delta, weight, bias, eps, kind)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    rowwise_checks.check_norm("norm", x, None, weight, bias, eps, kind)
    return x.new_empty(x.shape)


def _fake_activation(x: Tensor, kind: str) -> Tensor:
    rowwise_checks.check_activation("activation", "kind", x, kind, gated=False)
    return x.new_empty(x.shape)


def _fake_gated_activation(x: Tensor, kind: str) -> Tensor:
    rowwise_checks.check_activation("gated_activation", "activation", x, kind, gated=True)
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _fake_mix(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
    rowwise_checks.check_mix(table, indices, weights, base)
    return (table if base is None else base).new_empty((indices.shape[0], table.shape[1]))


_ASSEMBLE = "(Tensor input_ids, Tensor table, Tensor pool, Tensor row_map, bool strict) -> Tensor"
_MERGE = "(Tensor embeds, Tensor mask, Tensor features, SymInt? num_placeholders) -> Tensor"
_DEEPSTACK = "(Tensor hidden, Tensor pool, Tensor row_map, int level) -> Tensor"
_ATTENTION_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float? scale, bool causal"
)
_ATTENTION = f"({_ATTENTION_ARGUMENTS}) -> Tensor"

_ROPE_TABLES = "Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm"
_ROPE_MODEL = "int num_heads, int num_kv_heads, int head_dim, bool interleaved, float eps"
_NORM = "Tensor? weight, Tensor? bias, float eps, str kind"
_ROPE = f"(Tensor qkv, {_ROPE_TABLES}, {_ROPE_MODEL})"

_SPECS = (
    OpSpec("assemble_embeddings", _ASSEMBLE, _fake_assemble),
    OpSpec("assemble_embeddings_autograd", _ASSEMBLE, _fake_assemble),
    OpSpec(
        "assemble_embeddings_out",
        "(Tensor input_ids, Tensor table, Tensor pool, Tensor row_map, bool strict, *, Tensor(a!) out) -> ()",
        _fake_assemble_out,
    ),
    OpSpec(
        "assemble_embeddings_backward",
        "(Tensor grad, Tensor input_ids, Tensor row_map, SymInt vocab, SymInt pool_rows, ScalarType table_dtype, "
        "ScalarType pool_dtype, bool need_table, bool need_pool) -> (Tensor, Tensor)",
        _fake_assemble_backward,
    ),
    OpSpec("merge_embeddings", _MERGE, _fake_merge),
    OpSpec("merge_embeddings_autograd", _MERGE, _fake_merge),
    OpSpec(
        "merge_embeddings_backward",
        "(Tensor grad, Tensor mask, SymInt num_features, ScalarType features_dtype) -> (Tensor, Tensor)",
        _fake_merge_backward,
    ),
    OpSpec("deepstack_add", _DEEPSTACK, _fake_deepstack),
    OpSpec("deepstack_add_autograd", _DEEPSTACK, _fake_deepstack),
    OpSpec(
        "deepstack_add_",
        "(Tensor(a!) hidden, Tensor pool, Tensor row_map, int level) -> ()",
        _fake_deepstack_in_place,
    ),
    OpSpec("store_rows", "(Tensor rows, Tensor places, *, Tensor(a!) out) -> ()", _fake_store),
    OpSpec("expand_ranges", "(Tensor ranges, SymInt num_rows) -> Tensor", _fake_expand),
    OpSpec(
        "deepstack_add_backward",
        "(Tensor grad, Tensor row_map, int level, SymInt pool_rows, int pool_width, ScalarType pool_dtype) -> Tensor",
        _fake_deepstack_backward,
    ),
    OpSpec("varlen_attention", _ATTENTION, _fake_attention),
    OpSpec(
        "varlen_attention_lse",
        f"({_ATTENTION_ARGUMENTS}, str backend) -> (Tensor, Tensor)",
        _fake_attention_lse,
    ),
    OpSpec(
        "varlen_attention_backward",
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, SymInt max_seqlen, "
        "float? scale, bool causal) -> (Tensor, Tensor, Tensor)",
        _fake_attention_backward,
    ),
    OpSpec("packed_qkv_rope", f"{_ROPE} -> (Tensor, Tensor)", _fake_rope),
    OpSpec("packed_qkv_rope_copy", f"{_ROPE} -> (Tensor, Tensor, Tensor)", _fake_rope_copy),
    OpSpec("packed_qkv_rope_autograd", f"{_ROPE} -> (Tensor, Tensor, Tensor)", _fake_rope_copy),
    OpSpec("packed_qkv_rope_", f"(Tensor(a!) qkv, {_ROPE_TABLES}, {_ROPE_MODEL}) -> ()", _fake_rope_in_place),
    OpSpec(
        "packed_qkv_rope_backward",
        f"(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, {_ROPE_TABLES}, bool interleaved, float eps, bool need_norms) "
        "-> (Tensor, Tensor, Tensor)",
        _fake_rope_backward,
    ),
    OpSpec("add_norm", f"(Tensor x, Tensor delta, {_NORM}) -> (Tensor, Tensor)", _fake_add_norm),
    OpSpec("norm", f"(Tensor x, {_NORM}) -> Tensor", _fake_norm),
    OpSpec("activation", "(Tensor x, str kind) -> Tensor", _fake_activation),
    OpSpec("gated_activation", "(Tensor x, str kind) -> Tensor", _fake_gated_activation),
    OpSpec("mix_rows", "(Tensor table, Tensor indices, Tensor weights, Tensor? base) -> Tensor", _fake_mix),
)


def attention_backend_spec(name: str) -> OpSpec:
    """The spec of one backend's own op, ``attn_<name>``."""
    return OpSpec(f"attn_{name}", _ATTENTION, _fake_attention)


for _spec in _SPECS:
    define(_spec)
