"""Invariant: on CUDA the row-wise ops are as near to float64 as what models write, in one launch, and never wait."""

import itertools

import pytest
import torch
from rowwise import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    assert_near,
    exact_activation,
    exact_mix,
    exact_norm,
    rows,
    vector,
)

from mmgraph import ops

pytestmark = pytest.mark.cuda

WIDTHS = (1, 72, 1152, 1280, 3420, 9000)


def on_gpu(x):
    """A copy on the GPU with the same strides."""
    if x is None:
        return None
    if 0 in x.stride():
        return x[:1].to("cuda").expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(kind, dtype):
    for index, (width, tokens) in enumerate(itertools.product(WIDTHS, (1, 37))):
        g = generator(index)
        x, delta = rows(g, tokens, width, dtype, LAYOUTS[index % 4]), rows(g, tokens, width, dtype)
        weight = vector(g, width, dtype) if index % 3 else None
        bias = vector(g, width, dtype) if kind == "layer" and index % 2 else None
        moved = [on_gpu(one) for one in (x, delta, weight, bias)]
        total, out = ops.add_norm(*moved, eps=1e-6, kind=kind)
        expected, own = ops.add_norm(x, delta, weight, bias, eps=1e-6, kind=kind)
        assert torch.equal(total.cpu(), expected)
        assert total.is_contiguous()
        assert out.is_contiguous()
        exact = exact_norm(expected, weight, bias, 1e-6, kind)
        assert_near(out.cpu(), exact, own, steps=8 if dtype.itemsize > 2 else 1)
        alone = ops.norm(total, *moved[2:], eps=1e-6, kind=kind)  # another variant of the kernel
        assert_near(alone.cpu(), exact, own, steps=8 if dtype.itemsize > 2 else 1)
        assert torch.equal(moved[0].cpu(), x)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(kind, dtype):
    for index, (width, tokens) in enumerate(itertools.product((1, 72, 3420, 4304), (1, 37))):
        x = rows(generator(index), tokens, 2 * width, dtype, LAYOUTS[index % 4], scale=3.0)
        moved = on_gpu(x)
        steps = 8 if dtype.itemsize > 2 else 1
        plain = ops.activation(moved, kind=kind).cpu()
        assert_near(plain, exact_activation(x, kind), ops.activation(x, kind=kind), steps)
        gated = ops.gated_activation(moved, activation=kind).cpu()
        exact = exact_activation(x[:, :width], kind) * x[:, width:].double()
        assert_near(gated, exact, ops.gated_activation(x, activation=kind), steps)
    far = torch.tensor([[0.0, -0.0, 1e4, -1e4]], dtype=dtype, device="cuda")
    assert ops.activation(far, kind=kind).tolist() == [[0.0, 0.0, far[0, 2].item(), 0.0]]
    assert bool(ops.activation(far * torch.nan, kind=kind).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures(dtype):
    for index, (width, taps) in enumerate(itertools.product((1, 72, 1152), (0, 1, 4, 16))):
        g = generator(index)
        table = rows(g, 30, width, dtype, LAYOUTS[index % 4])
        base = rows(g, 37, width, DTYPES[index % 4], LAYOUTS[index % 3]) if index % 5 else None
        indices = torch.randint(0, 30, (37, taps), generator=g, dtype=(torch.int32, torch.int64)[index % 2])
        weights = torch.rand(37, taps, generator=g)
        out = ops.mix_rows(*map(on_gpu, (table, indices, weights)), base=on_gpu(base)).cpu()
        own = ops.mix_rows(table, indices, weights, base=base)
        assert out.dtype == own.dtype
        assert_near(out, exact_mix(table, indices, weights, base), own, steps=8)
    ops.check_errors()


def test_an_index_outside_the_table_is_recorded_and_adds_nothing():
    table = torch.randn(4, 1152, device="cuda", dtype=torch.bfloat16)
    indices = torch.tensor([[0, 1], [2, 4], [-1, 2**40]], device="cuda")
    out = ops.mix_rows(table, indices, torch.ones(3, 2, device="cuda"))
    assert torch.equal(out[0], table[0] + table[1])
    assert torch.equal(out[1], table[2])
    assert not bool(out[2].any())
    with pytest.raises(
        ops.DeviceError, match=r"mix_rows: an index was outside the table: .* \(2 such tokens\)"
    ):
        ops.check_errors()
    ops.mix_rows(table, indices[:1], torch.ones(1, 2, device="cuda"))
    ops.check_errors()
    leaf = table.clone().requires_grad_()
    with_gradient = ops.mix_rows(leaf, indices, torch.ones(3, 2, device="cuda"))
    assert torch.equal(with_gradient[0], out[0])
    assert bool(with_gradient[1:].isnan().all())


def work(x, delta, weight, table, indices, shares):
    total, normed = ops.add_norm(x, delta, weight, weight, eps=1e-6, kind="layer")
    gated = ops.gated_activation(torch.cat([normed, total], dim=1), activation="silu")
    mixed = ops.mix_rows(table, indices, shares, base=ops.activation(gated, kind="quick_gelu"))
    return total, normed, gated, mixed, ops.norm(mixed, weight, eps=1e-6, kind="rms")


def given(tokens, width=1152, seed=0):
    g = generator(seed)
    made = (
        rows(g, tokens, width, torch.bfloat16),
        rows(g, tokens, width, torch.bfloat16, "gaps"),
        vector(g, width, torch.bfloat16),
        rows(g, 50, width, torch.bfloat16),
        torch.randint(0, 50, (tokens, 4), generator=g),
        torch.rand(tokens, 4, generator=g),
    )
    return [on_gpu(x) for x in made]


def test_each_is_one_launch():
    x, delta, weight, table, indices, shares = given(100)
    weight = weight.contiguous()
    calls = {
        "norm_kernel": lambda: ops.add_norm(x, delta, weight, eps=1e-6, kind="rms"),
        "activation_kernel": lambda: ops.gated_activation(x, activation="silu"),
        "mix_kernel": lambda: ops.mix_rows(table, indices, shares, base=x),
    }
    for name, call in calls.items():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        on_device = (e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        assert [kernel for kernel in on_device if "Buffer" not in kernel] == [name]


def test_nothing_synchronises_and_a_graph_replays_new_values():
    static = given(64)
    with torch.inference_mode():
        work(*static)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work(*static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work(*static)
        for seed in range(1, 4):
            for x, fresh in zip(static, given(64, seed=seed), strict=True):
                x.copy_(fresh)
            expected = work(*static)
            graph.replay()
            for a, b in zip(captured, expected, strict=True):
                assert torch.equal(a, b)


def test_token_counts_compile_nothing(monkeypatch):
    import triton

    work(*given(5))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"])
    )
    for tokens in (1, 2, 16, 17, 160, 4096, 5000):
        work(*given(tokens))
    assert compiled == []


def test_one_compiled_graph_serves_every_size():
    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, dynamic=True)
    for index, tokens in enumerate((5, 16, 33, 1000)):
        tensors = given(tokens, width=72, seed=tokens)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=index > 0):
            got, expected = compiled(*tensors), work(*tensors)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def test_offsets_pass_two_to_the_31():
    tokens, width = 1_900_000, 1152  # 2.19e9 elements, 4.4 GB in bfloat16
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, width, device="cuda").bfloat16()
    assert x.numel() > 2**31
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    last = x[-3:].clone()
    with torch.inference_mode():
        total, out = ops.add_norm(x, x, weight, eps=1e-6, kind="rms")
        few = ops.add_norm(last, last, weight, eps=1e-6, kind="rms")
        assert torch.equal(total[-3:], few[0])
        assert torch.equal(out[-3:], few[1])
        assert not bool(out[:-3].any())
        del total, out
        gated = ops.gated_activation(x, activation="silu")
        assert torch.equal(gated[-3:], ops.gated_activation(last, activation="silu"))
        del gated
        places = torch.full((tokens, 1), tokens - 1, dtype=torch.int32, device="cuda")
        mixed = ops.mix_rows(x, places, torch.ones(tokens, 1, device="cuda"), base=x)
        assert torch.equal(mixed[-3:], last + last[-1])
        assert torch.equal(mixed[:1000], last[-1:].expand(1000, width))


def test_every_device_works_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        moved = [x.to(f"cuda:{index}") for x in given(9)]
        for a, b in zip(work(*moved), work(*given(9)), strict=True):
            assert a.device.index == index
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_passes(layout):
    g = generator(0)
    x, weight = on_gpu(rows(g, 5, 4, torch.bfloat16, layout)), on_gpu(vector(g, 4, torch.bfloat16))
    namespace = torch.ops.mmgraph
    indices = torch.zeros(5, 2, dtype=torch.int64, device="cuda")
    torch.library.opcheck(namespace.add_norm.default, (x, x.clone(), weight, weight, 1e-6, "layer"))
    torch.library.opcheck(namespace.norm.default, (x, weight, None, 1e-6, "rms"))
    torch.library.opcheck(namespace.activation.default, (x, "gelu"))
    torch.library.opcheck(namespace.gated_activation.default, (x, "silu"))
    torch.library.opcheck(namespace.mix_rows.default, (x, indices, torch.ones(5, 2, device="cuda"), x.clone()))
