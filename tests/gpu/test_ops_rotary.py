"""Invariant: on CUDA rotary positions equal the formula in float64, in every form, and never synchronise."""

import itertools

import pytest
import torch
from rotary import TABLE_KINDS, Heads, assert_rounded_once, exact, packed, table

from mmgraph import ops

pytestmark = pytest.mark.cuda

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Widths of real towers, one pair, a width that fills no power of two, heads over several blocks.
SHAPES = (
    Heads(16, 16, 72),
    Heads(16, 16, 80),
    Heads(16, 16, 64),
    Heads(32, 8, 128),
    Heads(28, 4, 128),
    Heads(1, 1, 2),
    Heads(6, 3, 10),
    Heads(40, 40, 256),
    Heads(3, 1, 96),
)


def on_gpu(x):
    """A copy on the GPU with the same strides."""
    if x is None:
        return None
    if 0 in x.stride():
        return x[:1].to("cuda").expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


def case(
    seed, tokens, heads, dtype, layout="plain", width=None, table_dtype=torch.float32, kind="plain", which=""
):
    """qkv, cos, sin and the norms' weights on the CPU; ``width`` 0 means no tables."""
    g = torch.Generator().manual_seed(seed)
    qkv = packed(g, tokens, heads, dtype, layout)
    cos = sin = None
    if width != 0:
        cos, sin = (table(g, tokens, width or heads.width // 2, table_dtype, kind) for _ in range(2))
    norms = [torch.randn(heads.width, generator=g).to(dtype) if name in which else None for name in "qk"]
    return [qkv, cos, sin, *norms]


def call(function, tensors, heads, **options):
    qkv, cos, sin, q_norm, k_norm = tensors
    return function(qkv, cos, sin, *heads.counts(), q_norm=q_norm, k_norm=k_norm, **options)


def check_every_form(tensors, heads, interleaved):
    qkv, cos, sin, q_norm, k_norm = tensors
    if qkv.dtype != torch.float64:  # the math is in float32
        cos, sin = (x if x is None else x.float() for x in (cos, sin))
    expected = exact(qkv, cos, sin, heads, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm)
    moved = [on_gpu(x) for x in tensors]
    got = call(ops.packed_qkv_rope, moved, heads, interleaved=interleaved)
    assert torch.equal(moved[0].cpu(), qkv)
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert a.is_contiguous()
        assert_rounded_once(a.cpu(), b)
    assert torch.equal(got[2].cpu().double(), expected[2])
    copies = call(ops.packed_qkv_rope, moved, heads, interleaved=interleaved, copy_v=True)
    # Another variant of the kernel each: sums may be in another order, products fused with other sums.
    for a, b in zip(copies[:2], expected[:2], strict=True):
        assert a.is_contiguous()
        assert_rounded_once(a.cpu(), b)
    assert copies[2].is_contiguous()
    assert torch.equal(copies[2], got[2])
    if moved[0].stride(1) == 1:
        views = call(ops.packed_qkv_rope_, moved, heads, interleaved=interleaved)
        for a, b in zip(views[:2], expected[:2], strict=True):
            assert_rounded_once(a.cpu(), b)
        assert torch.equal(views[2], copies[2])
        assert views[0].untyped_storage().data_ptr() == moved[0].untyped_storage().data_ptr()


def some(combinations, place, of):
    """Every ``of``-th of the combinations, other ones at each place: each is a kernel to compile, for half a second."""
    return [one for index, one in enumerate(combinations) if index % of == place % of]


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda place: str(SHAPES[place]))
@pytest.mark.parametrize("dtype", range(len(DTYPES)), ids=lambda place: str(DTYPES[place]))
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_the_formula_for_all_dtypes_and_shapes(shape, dtype, interleaved):
    heads = SHAPES[shape]
    widths = heads.width // 2, heads.width, 0
    kinds = [(which, width) for which in ("", "qk") for width in widths if which or width]
    for which, width in some(kinds, shape + dtype + 2 * interleaved, 3):
        tensors = case(1, 33, heads, DTYPES[dtype], width=width, which=which)
        check_every_form(tensors, heads, interleaved)


@pytest.mark.parametrize("layout", ["plain", "gaps", "apart"])
@pytest.mark.parametrize("kind", TABLE_KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_the_formula_for_all_layouts(layout, kind, interleaved):
    heads = Heads(4, 2, 72)
    place = len(layout) + len(kind) + 2 * interleaved
    for index, (table_dtype, which) in some(enumerate(itertools.product(DTYPES, ("", "q", "k"))), place, 4):
        width = 72 if index % 2 else 36
        tensors = case(2, 19, heads, torch.bfloat16, layout, width, table_dtype, kind, which)
        check_every_form(tensors, heads, interleaved)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3000])
def test_equals_the_formula_for_all_counts(tokens):
    check_every_form(case(3, tokens, Heads(16, 16, 72), torch.bfloat16, which="qk"), Heads(16, 16, 72), False)


@pytest.mark.parametrize("wide", [False, True])
def test_complex_tables(wide):
    heads = Heads(4, 2, 80)
    qkv, cos, sin, *_ = case(4, 21, heads, torch.bfloat16)
    freqs = torch.complex(cos, sin).to(torch.complex128 if wide else torch.complex64).cuda()
    for form in (freqs, freqs.conj()):
        got = ops.packed_qkv_rope(qkv.cuda(), form, None, *heads.counts(), interleaved=True)
        expected = exact(qkv, cos, -sin if form.is_conj() else sin, heads, interleaved=True)
        for a, b in zip(got[:2], expected[:2], strict=True):
            assert_rounded_once(a.cpu(), b)
        views = ops.packed_qkv_rope_(qkv.cuda(), form, None, *heads.counts(), interleaved=True)
        assert torch.equal(views[0], got[0])
        assert torch.equal(views[1], got[1])


def test_rows_that_start_anywhere():
    """Bases and row strides that no power of two divides, and in place nothing beside the rows is touched."""
    heads = Heads(3, 1, 72)
    for start, gap, dtype in itertools.product((0, 1, 2, 4), (0, 1, 2, 6), (torch.bfloat16, torch.float32)):
        room = torch.full((9, start + heads.columns + gap), 9.0, dtype=dtype, device="cuda")
        qkv = room[1:-1, start : start + heads.columns]
        values, cos, sin, *_ = case(5, 7, heads, dtype)
        qkv.copy_(values)
        expected = call(ops.packed_qkv_rope, [values, cos, sin, None, None], heads)
        got = call(ops.packed_qkv_rope, [qkv, cos.cuda(), sin.cuda(), None, None], heads)
        views = call(ops.packed_qkv_rope_, [qkv, cos.cuda(), sin.cuda(), None, None], heads)
        for a, b, c in zip(got, views, expected, strict=True):
            tolerance = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(b.cpu(), c, rtol=tolerance, atol=tolerance)
            assert a is got[2] or torch.equal(a, b)
        qkv.fill_(9)
        assert bool((room == 9).all())


def gradients(device, tensors, heads, directions, **options):
    moved = [None if x is None else on_gpu(x) if device == "cuda" else x.detach().clone() for x in tensors]
    wanting = [x.requires_grad_() for i, x in enumerate(moved) if x is not None and i not in (1, 2)]
    outs = call(ops.packed_qkv_rope, moved, heads, **options)
    return torch.autograd.grad(outs, wanting, [d.to(device) for d in directions])


@pytest.mark.parametrize("heads", [Heads(16, 16, 72), Heads(32, 8, 128), Heads(3, 1, 10)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("which", ["", "q", "k", "qk"])
def test_gradients_equal_those_on_the_cpu_in_float64(heads, interleaved, which):
    """Over more tokens than there are programs that sum, so that each takes several."""
    for tokens, width in ((5000, heads.width), (7, heads.width // 2)):
        tensors = case(6, tokens, heads, torch.float64, width=width, table_dtype=torch.float64, which=which)
        g = torch.Generator().manual_seed(7)
        counts = (heads.q, heads.kv, heads.kv)
        directions = [torch.randn(n, tokens, heads.width, generator=g).double().transpose(0, 1) for n in counts]
        directions[2] = directions[2][:1, :1, :1].expand(tokens, heads.kv, heads.width)
        options = {"interleaved": interleaved, "eps": 1e-3}
        got = gradients("cuda", tensors, heads, directions, **options)
        expected = gradients("cpu", tensors, heads, directions, **options)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_lower_dtypes(dtype):
    heads, tokens = Heads(16, 4, 72), 300
    for which, layout in itertools.product(("", "qk"), ("plain", "gaps", "apart")):
        tensors = case(8, tokens, heads, dtype, layout, which=which)
        g = torch.Generator().manual_seed(9)
        directions = [torch.randn(tokens, n, 72, generator=g).to(dtype) for n in (16, 4, 4)]
        got = gradients("cuda", tensors, heads, directions)
        wide = [x if x is None else x.double() for x in tensors]
        expected = gradients("cpu", wide, heads, [d.double() for d in directions])
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(
                a.cpu().double(), b, rtol=eps, atol=eps / 2 * float(b.abs().max()) + 1e-3
            )


def test_gradients_repeat_to_the_bit():
    heads = Heads(16, 16, 72)
    tensors = case(10, 9000, heads, torch.bfloat16, which="qk")
    directions = [torch.randn(9000, 16, 72).bfloat16() for _ in range(3)]
    first = gradients("cuda", tensors, heads, directions)
    for _ in range(3):
        for a, b in zip(first, gradients("cuda", tensors, heads, directions), strict=True):
            assert torch.equal(a, b)


def test_forward_and_backward_are_one_launch_each():
    heads = Heads(16, 16, 72)
    moved = [on_gpu(x) for x in case(11, 100, heads, torch.bfloat16)]
    qkv, cos, sin, *_ = moved
    qkv.requires_grad_()

    def kernels(work):
        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        on_device = (e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return [name for name in on_device if "Buffer" not in name]  # the profiler's own

    outs = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts())
    directions = [torch.randn_like(x) for x in outs]
    assert kernels(lambda: ops.packed_qkv_rope(qkv, cos, sin, *heads.counts())) == ["forward_kernel"]
    assert kernels(lambda: torch.autograd.grad(outs, qkv, directions, retain_graph=True)) == ["backward_kernel"]
    with torch.no_grad():
        assert kernels(lambda: ops.packed_qkv_rope_(qkv, cos, sin, *heads.counts())) == ["forward_kernel"]


def test_a_change_in_place_is_seen_by_autograd():
    heads = Heads(4, 2, 72)
    qkv, cos, sin, *_ = (on_gpu(x) for x in case(19, 9, heads, torch.float32))
    y = qkv.requires_grad_().exp()
    loss = (y * y).sum()
    with torch.no_grad():
        ops.packed_qkv_rope_(y, cos, sin, *heads.counts())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_synchronises():
    heads = Heads(16, 4, 72)
    moved = [on_gpu(x) for x in case(12, 50, heads, torch.bfloat16, which="qk")]
    qkv, cos, sin, *norms = moved
    wanting = [x.requires_grad_() for x in (qkv, *norms)]
    freqs = torch.complex(cos, sin)

    def work():
        outs = call(ops.packed_qkv_rope, moved, heads)
        grads = torch.autograd.grad([x.float().square().sum() for x in outs], wanting)
        with torch.no_grad():
            copies = call(ops.packed_qkv_rope, moved, heads, copy_v=True)
            views = ops.packed_qkv_rope_(qkv.clone(), freqs, None, *heads.counts(), interleaved=True)
        return [*outs, *grads, *copies, *views]

    expected = work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def test_a_graph_replays_new_values():
    heads = Heads(16, 4, 72)
    static = [on_gpu(x) for x in case(13, 64, heads, torch.bfloat16, which="q")]

    def work():
        qkv, cos, sin, q_norm, _ = static
        out = call(ops.packed_qkv_rope, static, heads, copy_v=True)
        own = qkv * 2
        return *out, *ops.packed_qkv_rope_(own, cos, sin, *heads.counts(), q_norm=q_norm)

    with torch.inference_mode():
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        for seed in range(3):
            for x, fresh in zip(static, case(50 + seed, 64, heads, torch.bfloat16, which="q"), strict=True):
                if x is not None:
                    x.copy_(fresh)
            expected = work()
            graph.replay()
            for a, b in zip(captured, expected, strict=True):
                assert torch.equal(a, b)


def test_a_static_buffer_is_rotated_in_place_by_each_replay():
    heads = Heads(4, 4, 64)
    buffer, cos, sin, *_ = (on_gpu(x) for x in case(14, 32, heads, torch.float32))
    ops.packed_qkv_rope_(buffer.clone(), cos, sin, *heads.counts())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = ops.packed_qkv_rope_(buffer, cos, sin, *heads.counts())
    for _ in range(2):
        buffer.normal_()
        expected = ops.packed_qkv_rope(buffer.clone(), cos, sin, *heads.counts())
        graph.replay()
        for a, b in zip(views, expected, strict=True):
            assert torch.equal(a, b)


def test_token_counts_compile_nothing(monkeypatch):
    import triton

    heads = Heads(16, 4, 72)

    def run(tokens):
        moved = [on_gpu(x) for x in case(15, tokens, heads, torch.bfloat16, which="qk")]
        wanting = [x.requires_grad_() for x in (moved[0], *moved[3:])]
        outs = call(ops.packed_qkv_rope, moved, heads)
        torch.autograd.grad(outs, wanting, [torch.ones_like(x) for x in outs])
        with torch.no_grad():
            call(ops.packed_qkv_rope, moved, heads)
            call(ops.packed_qkv_rope_, moved, heads)

    run(5)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"])
    )
    for tokens in (1, 2, 16, 17, 160, 4096, 5000):
        run(tokens)
    assert compiled == []


def test_one_compiled_graph_serves_every_size():
    torch._dynamo.reset()
    heads = Heads(4, 2, 72)
    freqs = 0.9 ** torch.arange(36.0, device="cuda")

    def function(qkv, weight):
        angles = torch.arange(qkv.shape[0], device="cuda")[:, None] * freqs
        q, k, v = ops.packed_qkv_rope(qkv * 2, angles.cos(), angles.sin(), *heads.counts(), q_norm=weight)
        own = qkv + 1
        views = ops.packed_qkv_rope_(own, angles.cos(), angles.sin(), *heads.counts(), interleaved=True)
        return q.relu(), k + 1, v * 2, own, *views

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for index, tokens in enumerate((5, 16, 33, 64, 100, 1000)):
        qkv, *_, weight, _ = (on_gpu(x) for x in case(tokens, tokens, heads, torch.float32, which="q"))
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = compiled(qkv, weight)
        for a, b in zip(got, function(qkv, weight), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_compiled_graph_serves_every_size_with_gradients():
    torch._dynamo.reset()
    heads = Heads(4, 2, 72)
    cos, sin = torch.randn(2, 1000, 36, device="cuda").unbind(0)

    def function(qkv, weight):
        tokens = qkv.shape[0]
        outs = ops.packed_qkv_rope(qkv, cos[:tokens], sin[:tokens], *heads.counts(), k_norm=weight)
        return torch.cat(outs, dim=1) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for index, tokens in enumerate((5, 16, 33, 64, 100, 999)):
        qkv, *_, weight = (on_gpu(x) for x in case(tokens, tokens, heads, torch.float32, which="k"))
        wanting = [qkv.requires_grad_(), weight.requires_grad_()]
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            out = compiled(qkv, weight)
            direction = torch.randn_like(out)
            got = torch.autograd.grad(out, wanting, direction)
        for a, b in zip(got, torch.autograd.grad(function(qkv, weight), wanting, direction), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["plain", "gaps", "apart"])
def test_opcheck_passes(layout):
    heads = Heads(4, 2, 6)
    namespace = torch.ops.mmgraph
    for which, width in (("", 3), ("qk", 6), ("q", 0)):
        tensors = [on_gpu(x) for x in case(16, 5, heads, torch.bfloat16, layout, width, which=which)]
        rest = (*heads.counts(), True, 1e-6)
        torch.library.opcheck(namespace.packed_qkv_rope.default, (*tensors, *rest))
        torch.library.opcheck(namespace.packed_qkv_rope_copy.default, (*tensors, *rest))
        if layout != "apart":
            torch.library.opcheck(namespace.packed_qkv_rope_.default, (*tensors, *rest))
        qkv, cos, sin, *norms = [x if x is None else x.float() for x in tensors]
        wanting = [x if x is None else x.detach().requires_grad_() for x in (qkv, *norms)]
        torch.library.opcheck(
            namespace.packed_qkv_rope_autograd.default, (wanting[0], cos, sin, *wanting[1:], *rest)
        )
        grads = [torch.randn(n, 5, 6, device="cuda").transpose(0, 1) for n in (4, 2, 2)]
        kept = qkv if which else None
        arguments = (*grads, kept, cos, sin, *norms, True, 1e-6, True)
        torch.library.opcheck(namespace.packed_qkv_rope_backward.default, arguments)


def test_offsets_pass_two_to_the_31():
    heads = Heads(16, 16, 72)
    tokens, gap = 640_000, 64  # 2.25e9 elements, 4.5 GB in bfloat16
    room = torch.zeros(tokens, heads.columns + gap, dtype=torch.bfloat16, device="cuda")
    qkv = room[:, : heads.columns]
    qkv[-5:] = torch.randn(5, heads.columns, device="cuda").bfloat16()
    cos, sin = torch.randn(2, 1, 36, device="cuda").expand(2, tokens, 36)
    assert tokens * qkv.stride(0) > 2**31
    few = call(ops.packed_qkv_rope, [qkv[-5:].clone(), cos[-5:], sin[-5:], None, None], heads)
    with torch.inference_mode():
        q, k, v = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts(), copy_v=True)
        for got, expected in zip((q, k, v), few, strict=True):
            assert torch.equal(got[-5:], expected)
            assert float(got[:-5].abs().max()) == 0.0
        views = ops.packed_qkv_rope_(qkv, cos, sin, *heads.counts())
        for got, expected in zip(views, few, strict=True):
            assert torch.equal(got[-5:], expected)
            assert float(got[:-5].abs().max()) == 0.0
        del q, k, v
        grads = [torch.zeros_like(x) for x in views]
        for x, y in zip(grads, few, strict=True):
            x[-5:] = y
        kept = torch.zeros(tokens, heads.columns, dtype=torch.bfloat16, device="cuda")
        norm = torch.ones(72, device="cuda", dtype=torch.bfloat16)
        backward = torch.ops.mmgraph.packed_qkv_rope_backward
        dqkv, *_ = backward(*grads, kept, cos, sin, norm, None, False, 1.0, True)
        last, *_ = backward(
            *(x[-5:].contiguous() for x in grads),
            kept[-5:].clone(),
            cos[-5:],
            sin[-5:],
            norm,
            None,
            False,
            1.0,
            True,
        )
        assert dqkv.numel() > 2**31
        assert torch.equal(dqkv[-5:], last)
        assert float(dqkv[:-5].abs().max()) == 0.0


def test_wrong_devices_are_refused_and_the_next_call_works():
    heads = Heads(4, 2, 72)
    tensors = case(17, 9, heads, torch.bfloat16, which="q")
    moved = [on_gpu(x) for x in tensors]
    for place, name in ((1, "cos"), (2, "sin"), (3, "q_norm")):
        mixed = list(moved)
        mixed[place] = tensors[place]
        with pytest.raises(ops.ArgumentError, match=f"on one device; qkv is on cuda:0 and {name} on cpu"):
            call(ops.packed_qkv_rope, mixed, heads)
    check_every_form(tensors, heads, False)


def test_every_device_works_whichever_is_current():
    heads = Heads(4, 2, 72)
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        tensors = [x if x is None else x.to(device) for x in case(18, 9, heads, torch.float64)]
        got = call(ops.packed_qkv_rope, tensors, heads)
        assert got[0].device == device
        expected = call(ops.packed_qkv_rope, [x if x is None else x.cpu() for x in tensors], heads)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b)
