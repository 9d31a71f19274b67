"""Invariant: the row-wise ops trace whole, one graph serves every size, and the kernels compile with wide accesses."""

import re
from collections import Counter

import pytest
import torch

from mmgraph import ops
from mmgraph.ops.rowwise import cuda
from mmgraph.ops.rowwise.dispatch import Norm


def block(x, delta, weight, table, indices, shares):
    """What a tower does between products."""
    total, normed = ops.add_norm(x, delta, weight, weight, eps=1e-6, kind="layer")
    gated = ops.gated_activation(torch.cat([normed, total], dim=1), activation="silu")
    mixed = ops.mix_rows(table, indices, shares, base=ops.activation(gated, kind="quick_gelu"))
    return total + 1, ops.norm(mixed, weight, eps=1e-6, kind="rms") * 2


@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_serves_every_size(grad):
    torch._dynamo.reset()
    targets = set()

    def backend(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    weight, table = torch.randn(6), torch.randn(7, 6)
    for index, tokens in enumerate((5, 9, 16, 33)):
        g = torch.Generator().manual_seed(tokens)
        x, delta = torch.randn(tokens, 6, generator=g), torch.randn(6, tokens, generator=g).t()  # columns apart
        indices = torch.randint(0, 7, (tokens, 4), generator=g)
        given = (x, delta, weight, table, indices, torch.rand(tokens, 4, generator=g))
        leaves = [x.requires_grad_(grad) for x in given if x.is_floating_point()]
        with torch.set_grad_enabled(grad), torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = compiled(*given)
        expected = block(*given)
        if grad:
            got, expected = (torch.autograd.grad([x.sum() for x in out], leaves) for out in (got, expected))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
    ours = {name for name in targets if name.startswith("mmgraph.")}
    every = ("add_norm", "norm", "activation", "gated_activation", "mix_rows")
    assert ours == (set() if grad else {f"mmgraph.{name}.default" for name in every})


def test_a_wrong_argument_is_named_while_tracing():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.activation(x, kind="silu"), fullgraph=True, backend="eager")
    with torch.no_grad():
        with pytest.raises(Exception, match=r"must be a matrix \[tokens, width\]"):
            compiled(torch.randn(3))
        torch._dynamo.reset()
        x = torch.randn(3, 4)
        assert torch.equal(compiled(x), torch.nn.functional.silu(x))


TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}


def machine_code(kernel, programs, tensors, counts, strides, constants, num_warps):
    """What a launch with these arguments would run on an H200, aligned as a new tensor is."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    types = [*(TYPES[x.dtype] for x in tensors), *("i32" for _ in (*counts, *strides))]
    signature = dict(zip(names, types + ["constexpr"] * len(constants), strict=True))
    values = {(len(types) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
    source = ASTSource(kernel, signature, values, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]


def launched(monkeypatch, run):
    """The arguments of the one launch of a run on the CPU."""
    calls = []
    monkeypatch.setattr(cuda, "launch", lambda *given, num_warps: calls.append((*given, num_warps)))
    run()
    (one,) = calls
    return one


def bf16(*shape, gap=8):
    return torch.zeros(*shape[:-1], shape[-1] + gap, dtype=torch.bfloat16)[..., : shape[-1]]


INDICES = torch.zeros(3, 4, dtype=torch.int64)
LAUNCHES = {
    "layer": lambda w: cuda.norm(
        bf16(3, w), bf16(3, w), Norm(bf16(w), bf16(w), 1e-6, "layer"), bf16(3, w), bf16(3, w)
    ),
    "rms": lambda w: cuda.norm(bf16(3, w), None, Norm(bf16(w), None, 1e-6, "rms"), None, bf16(3, w)),
    "gated": lambda w: cuda.activate(bf16(3, 2 * w), "gelu_tanh", True, bf16(3, w)),
    "mix": lambda w: cuda.mix(bf16(5, w), INDICES, torch.zeros(3, 4), bf16(3, w), bf16(3, w)),
}


@pytest.mark.parametrize(
    ("name", "width"), [("layer", 1152), ("rms", 72), ("layer", 8256), ("gated", 4304), ("mix", 1152)]
)
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(name, width, monkeypatch):
    code = machine_code(*launched(monkeypatch, lambda: LAUNCHES[name](width)))
    accesses = Counter(re.findall(r"((?:ld|st)\.global)\.(\S+)", code))
    assert accesses[("ld.global", "v4.b32")] >= 1
    assert accesses[("st.global", "v4.b32")] >= 1
    kinds = {kind for _, kind in accesses}
    allowed = {"v4.b32"}
    if name == "mix":
        allowed |= {"b64", "b32"}  # indices and the flag; weights
    if width == 72:
        allowed |= {"b32"}  # its weight, spread over the threads of eight rows
    assert kinds <= allowed, accesses


@pytest.mark.parametrize("kind", ["gelu", "quick_gelu"])
def test_activations_compile_in_double_precision(kind, monkeypatch):
    x = torch.zeros(2, 64, dtype=torch.float64)
    code = machine_code(*launched(monkeypatch, lambda: cuda.activate(x, kind, False, torch.zeros_like(x))))
    assert "fma.rn.f64" in code


def test_norms_compile_in_double_precision(monkeypatch):
    x = torch.zeros(3, 72, dtype=torch.float64)
    how = Norm(x[0], x[0], 1e-6, "layer")
    code = machine_code(*launched(monkeypatch, lambda: cuda.norm(x, x, how, x.clone(), x.clone())))
    assert "fma.rn.f64" in code


def test_tiles_hold_rows_and_cuts_cover_them():
    for width in (*range(1, 300), 1152, 1280, 3420, 4304, 8192, 8193, 20000):
        tile, cut = cuda.tile_of(width), cuda.cut_of(width)
        assert tile.block >= min(width, 8192)
        assert 1 <= tile.warps <= 16
        assert tile.block * tile.rows >= 1024
        assert tile.rows == 1 or width < 1024
        assert cut.block * cut.parts >= width > cut.block * (cut.parts - 1)
        assert 1 <= cut.warps <= 4
