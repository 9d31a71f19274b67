"""Invariant: one compiled graph, whole, serves every size: no break, no recompile, the eager result."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from mmgraph import ops
from mmgraph.ops import checks

SIZES = (6, 9, 17, 33, 64, 100)


def case(name, tokens):
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 12, (tokens,), generator=g)
    pool_rows = tokens // 2 + 2
    row_map = torch.randint(-1, pool_rows, (tokens,), generator=g, dtype=torch.int32)
    pool, deep = torch.randn(pool_rows, 8, generator=g), torch.randn(pool_rows, 24, generator=g)
    hidden = torch.randn(tokens, 8, generator=g)
    mask = torch.arange(tokens) % 3 == 0
    features = torch.randn(int(mask.sum()), 8, generator=g)
    qkv = torch.randn(tokens, 4 * 8, generator=g)
    cu = torch.tensor([0, tokens // 3, tokens // 3, tokens - 1], dtype=torch.int32)
    return {
        "assemble": (ids, pool, row_map),
        "assemble_out": (ids, pool, row_map, torch.empty(tokens, 8)),
        "merge": (hidden, mask, features),
        "deepstack": (hidden, deep, row_map),
        "attention": (qkv, cu, tokens),
        "attention_named": (qkv, cu, tokens),
        "rope": (qkv, torch.randn(8, generator=g)),
        "rope_in_place": (qkv, torch.randn(8, generator=g)),
    }[name]


TABLE = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))


def assemble(ids, pool, row_map):
    return ops.assemble_embeddings(ids, TABLE, pool * 2, row_map) + 1


def assemble_out(ids, pool, row_map, out):
    ops.assemble_embeddings_out(ids, TABLE, pool * 2, row_map, out=out)
    return out + 1


def merge(hidden, mask, features):
    return ops.merge_embeddings(hidden + 1, mask, features * 2) - 1


def deepstack(hidden, deep, row_map):
    for level in range(3):
        hidden = ops.deepstack_add(hidden.relu(), deep, row_map, level)
    return hidden * 2


def attention(qkv, cu, tokens, backend=None):
    q, k, v = (x.unflatten(1, (-1, 8)) for x in (qkv * 2).split([16, 8, 8], dim=1))
    return ops.varlen_attention(q, k, v, cu, tokens, causal=True, backend=backend).flatten(1) + 1


def attention_named(qkv, cu, tokens):
    return attention(qkv, cu, tokens, backend="reference")


def angles(qkv):
    return torch.arange(qkv.shape[0])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])


def rope(qkv, weight):
    tables = torch.polar(torch.ones(()), angles(qkv))
    q, k, v = ops.packed_qkv_rope(qkv * 2, tables, None, 2, 1, 8, interleaved=True, q_norm=weight)
    return torch.cat([q.relu(), k, v + 1], dim=1)


def rope_in_place(qkv, weight):
    tables = angles(qkv)
    q, k, v = ops.packed_qkv_rope_(qkv, tables.cos(), tables.sin(), 2, 1, 8, k_norm=weight)
    return torch.cat([q, k, v], dim=1) + qkv.sum()


FUNCTIONS = {
    "assemble": assemble,
    "assemble_out": assemble_out,
    "merge": merge,
    "deepstack": deepstack,
    "attention": attention,
    "attention_named": attention_named,
    "rope": rope,
    "rope_in_place": rope_in_place,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_serves_every_size(name):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, tokens in enumerate(SIZES):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(*case(name, tokens)), function(*case(name, tokens)))


@pytest.mark.parametrize("name", ["assemble", "deepstack", "attention", "merge", "rope"])
def test_one_graph_serves_every_size_with_gradients(name):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(call, tokens):
        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in case(name, tokens)]
        wanting = [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
        call(*inputs).square().sum().backward()
        return [x.grad for x in wanting]

    for index, tokens in enumerate(SIZES):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            for a, b in zip(run(compiled, tokens), run(function, tokens), strict=True):
                torch.testing.assert_close(a, b)


def test_inductor_keeps_the_values_of_strided_inputs():
    torch._dynamo.reset()

    def whole(qkv, cu, tokens, ids, pool, row_map):
        return attention(qkv, cu, tokens).sum() + assemble(ids, pool, row_map).t()

    compiled = torch.compile(whole, fullgraph=True, dynamic=True)
    for index, tokens in enumerate(SIZES[:5]):
        arguments = (*case("attention", tokens), *case("assemble", tokens))
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(*arguments), whole(*arguments))


def test_ops_see_the_strides_that_the_caller_gave(monkeypatch):
    """Also where the default for custom ops, which users may set, lets the compiler choose a layout."""
    torch._dynamo.reset()
    seen = []
    check = checks.check_attention

    def spy(q, k, v, cu, longest):
        if not isinstance(q, FakeTensor):
            seen.append([x.stride() for x in (q, k, v)])
        check(q, k, v, cu, longest)

    monkeypatch.setattr(checks, "check_attention", spy)

    def head_major(q, kv, cu, longest):
        k, v = (kv + 1).unbind(1)
        # Eager, the sum has the first input's strides; the compiler, left alone, would take the others'.
        return ops.varlen_attention(q.transpose(0, 1) * k + v, k, v, cu, longest)

    q, kv = torch.randn(4, 9, 8), torch.randn(9, 2, 4, 8)
    cu = torch.tensor([0, 5, 9], dtype=torch.int32)
    with torch._functorch.config.patch(custom_op_default_layout_constraint="flexible_layout"):
        compiled = torch.compile(head_major, fullgraph=True)
        got = compiled(q, kv, cu, 5)
    assert seen == [[(8, 72, 1), (64, 8, 1), (64, 8, 1)]]
    torch.testing.assert_close(got, head_major(q, kv, cu, 5))
    assert seen[1] == seen[0]


def test_tracing_a_row_map_is_refused_with_the_remedy():
    torch._dynamo.reset()
    ids, pool, _ = case("assemble", 9)
    row_map = ops.RowMap.from_ranges(9, [1], [2], [0], pool_rows=pool.shape[0])
    compiled = torch.compile(assemble, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"call row_map\.to\(device\) outside"):
        compiled(ids, pool, row_map)
    torch._dynamo.reset()
    assert torch.equal(compiled(ids, pool, row_map.to("cpu")), assemble(ids, pool, row_map))
