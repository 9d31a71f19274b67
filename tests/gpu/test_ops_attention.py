"""Invariant: on CUDA every attention backend keeps one contract, over one table of cases.

The result is that of dense float64 attention per sequence, uncovered rows are zero whatever they held, nothing
synchronises, and a graph replays new values and new boundaries.
"""

import random

import pytest
import torch

from mmgraph import ops
from mmgraph.ops.attention.registry import backend_names

pytestmark = pytest.mark.cuda

BACKENDS = tuple(backend_names())
HALF = (torch.bfloat16, torch.float16)

# name: heads, kv_heads, width, v_width, lengths, tail, longest, packed
CASES = {
    "width 16": (4, 4, 16, 16, [70, 33], 0, 70, False),
    "width 64, ragged, tail": (4, 4, 64, 64, [129, 1, 64, 300], 77, 300, True),
    "width 72, packed": (4, 4, 72, 72, [200, 64, 65], 5, 200, True),
    "width 80, windows": (16, 16, 80, 80, [64] * 9 + [16, 32], 40, 64, True),
    "width 80, grouped, packed": (8, 2, 80, 80, [100, 257], 3, 257, True),
    "width 128, grouped": (8, 1, 128, 128, [511, 130], 0, 512, False),
    "width 256": (2, 2, 256, 256, [150, 90], 20, 150, False),
    "v narrower": (4, 2, 72, 40, [90, 31], 4, 90, False),
    "v wider": (2, 2, 40, 96, [90, 31], 4, 90, False),
    "odd width": (2, 2, 37, 37, [50, 70], 4, 70, True),
    "empty sequences": (2, 2, 64, 64, [0, 5, 0, 0, 130, 0], 9, 130, False),
    "only empty sequences": (2, 2, 64, 64, [0, 0], 9, 8, False),
    "single rows, grouped": (4, 2, 64, 64, [1, 0, 1, 1], 3, 1, False),
    "no sequence": (2, 2, 64, 64, [], 9, 8, False),
    "no row": (2, 2, 64, 64, [0], 0, 0, False),
    "one long among many short": (2, 2, 64, 64, [3] * 60 + [1500], 100, 1500, True),
    "longest much too large": (2, 2, 64, 64, [40, 20], 10, 8192, False),
}


@pytest.fixture(autouse=True)
def nothing_recorded():
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


def offsets(lengths):
    sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(sums, dtype=torch.int32, device="cuda")


def make(name, dtype, seed=0):
    heads, kv_heads, width, v_width, lengths, tail, _, packed = CASES[name]
    tokens = sum(lengths) + tail
    g = torch.Generator(device="cuda").manual_seed(seed)
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    qkv = torch.randn(tokens, sum(sizes), generator=g, device="cuda").to(dtype)
    qkv[tokens - tail :] = float("nan")
    q, k, v = qkv.split(sizes, dim=1)
    q, k, v = q.unflatten(1, (-1, width)), k.unflatten(1, (-1, width)), v.unflatten(1, (-1, v_width))
    return (q, k, v) if packed else (q.contiguous(), k.contiguous(), v.contiguous())


def dense(q, k, v, lengths, causal, scale=None):
    """Each sequence alone by PyTorch's plain attention, in the tensors' own dtype."""
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    scale = q.shape[2] ** -0.5 if scale is None else scale
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        qs, ks, vs = (x[rows].transpose(0, 1) for x in (q, k, v))
        ks, vs = ks.repeat_interleave(group, 0), vs.repeat_interleave(group, 0)
        scores = qs @ ks.transpose(1, 2) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        out[rows] = (torch.softmax(scores, -1) @ vs).transpose(0, 1)
        start += length
    return out


def worst(a, b):
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def assert_right(got, q, k, v, lengths, causal, scale=None):
    covered = sum(lengths)
    assert torch.equal(got[covered:], torch.zeros_like(got[covered:]))
    inputs = [x[:covered] for x in (q, k, v)]
    exact = dense(*(x.double() for x in inputs), lengths, causal, scale)
    own = worst(dense(*inputs, lengths, causal, scale), exact)
    # In wide types the plain form's error is at times luckily small, so there some units more are allowed.
    units = 1 if got.dtype in HALF else 16
    limit = 2 * own + units * torch.finfo(got.dtype).eps * (float(exact.abs().max()) if covered else 0.0)
    assert worst(got[:covered], exact) <= limit


def usable(name, q, v):
    return {
        r.name: r.usable
        for r in ops.explain_backends(
            device="cuda", dtype=q.dtype, head_dim=q.shape[2], v_dim=v.shape[2], heads=q.shape[1]
        )
    }[name]


def test_the_backends_of_this_gpu_are_usable():
    assert all(report.usable for report in ops.explain_backends(device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_conformance(case, causal, backend):
    lengths, longest = CASES[case][4], CASES[case][6]
    q, k, v = make(case, torch.bfloat16)
    got = ops.varlen_attention(q, k, v, offsets(lengths), longest, causal=causal, backend=backend)
    assert got.is_contiguous()
    assert got.shape == (q.shape[0], q.shape[1], v.shape[2])
    assert_right(got, q, k, v, lengths, causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 72, 80, 96, 112, 128])
def test_a_full_device_of_ragged_sequences_is_right_and_the_same_each_time(width, causal, backend):
    # Small cases leave most of the device idle, and products that were not waited for were done in time there.
    draw = random.Random(width)
    lengths = [draw.randint(1, 400) for _ in range(64)]
    g = torch.Generator(device="cuda").manual_seed(width)
    qkv = torch.randn(sum(lengths), 3, 16, width, generator=g, device="cuda").to(torch.bfloat16)
    q, k, v = qkv.unbind(1)
    results = [
        ops.varlen_attention(q, k, v, offsets(lengths), 400, causal=causal, backend=backend) for _ in range(4)
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert_right(results[0], q, k, v, lengths, causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["width 72, packed", "width 256", "v narrower"])
def test_other_dtypes(case, dtype, backend):
    lengths, longest = CASES[case][4], CASES[case][6]
    q, k, v = make(case, dtype)
    arguments = (q, k, v, offsets(lengths), longest)
    if usable(backend, q, v):
        got = ops.varlen_attention(*arguments, scale=0.21, backend=backend)
        assert_right(got, q, k, v, lengths, False, 0.21)
    else:
        with pytest.raises(ops.UnusableBackend, match="reference: usable"):
            ops.varlen_attention(*arguments, backend=backend)
    assert_right(ops.varlen_attention(*arguments), q, k, v, lengths, False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale, backend):
    lengths = CASES["width 16"][4]
    q, k, v = make("width 16", torch.bfloat16)
    got = ops.varlen_attention(q, k, v, offsets(lengths), 70, scale=scale, backend=backend)
    assert_right(got, q, k, v, lengths, False, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_major_and_misaligned_inputs(backend):
    lengths = [60, 40]
    g = torch.Generator(device="cuda").manual_seed(1)
    q, k, v = (torch.randn(4, 100, 64, generator=g, device="cuda").bfloat16().transpose(0, 1) for _ in range(3))
    assert_right(ops.varlen_attention(q, k, v, offsets(lengths), 60, backend=backend), q, k, v, lengths, False)
    flat = torch.randn(100 * 3 * 4 * 65, generator=g, device="cuda").bfloat16()
    odd = flat[1 : 1 + 100 * 2 * 65].view(100, 2, 65)[:, :, :64]  # no row starts at 16 bytes
    got = ops.varlen_attention(odd, odd, odd, offsets(lengths), 60, backend=backend)
    assert_right(got, odd, odd, odd, lengths, False)


GRADIENT_CASES = (
    "width 72, packed",
    "width 80, grouped, packed",
    "v narrower",
    "empty sequences",
    "no sequence",
)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients(case, causal, backend):
    lengths, longest = CASES[case][4], CASES[case][6]
    covered = sum(lengths)

    def run(call, dtype, rows):
        inputs = [x[:rows].detach().to(dtype).requires_grad_() for x in make(case, torch.bfloat16)]
        out = call(*inputs)
        g = torch.Generator(device="cuda").manual_seed(7)
        weight = torch.randn(out.shape, generator=g, device="cuda").to(dtype)
        weight[covered:] = float("nan")
        out.backward(weight)
        return [x.grad for x in inputs]

    tokens = make(case, torch.bfloat16)[0].shape[0]
    cu = offsets(lengths)
    got = run(
        lambda q, k, v: ops.varlen_attention(q, k, v, cu, longest, causal=causal, backend=backend),
        torch.bfloat16,
        tokens,
    )
    if not covered:
        assert all(torch.equal(x, torch.zeros_like(x)) for x in got)
        return
    exact = run(lambda q, k, v: dense(q, k, v, lengths, causal), torch.float64, covered)
    own = run(lambda q, k, v: dense(q, k, v, lengths, causal), torch.bfloat16, covered)
    for a, e, o in zip(got, exact, own, strict=True):
        assert torch.equal(a[covered:], torch.zeros_like(a[covered:]))
        limit = 2 * worst(o, e) + torch.finfo(torch.bfloat16).eps * float(e.abs().max())
        assert worst(a[:covered], e) <= limit


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("case", ["width 72, packed", "v narrower"])
def test_gradients_of_scales_that_are_not_positive(case, scale, causal, backend):
    lengths, longest = CASES[case][4], CASES[case][6]
    covered, cu = sum(lengths), offsets(lengths)

    def run(call, dtype):
        inputs = [x[:covered].detach().to(dtype).requires_grad_() for x in make(case, torch.bfloat16)]
        out = call(*inputs)
        g = torch.Generator(device="cuda").manual_seed(7)
        out.backward(torch.randn(out.shape, generator=g, device="cuda").to(dtype))
        return [x.grad for x in inputs]

    got = run(
        lambda q, k, v: ops.varlen_attention(q, k, v, cu, longest, scale=scale, causal=causal, backend=backend),
        torch.bfloat16,
    )
    exact = run(lambda q, k, v: dense(q, k, v, lengths, causal, scale), torch.float64)
    own = run(lambda q, k, v: dense(q, k, v, lengths, causal, scale), torch.bfloat16)
    for a, e, o in zip(got, exact, own, strict=True):
        limit = 2 * worst(o, e) + torch.finfo(torch.bfloat16).eps * float(e.abs().max())
        assert worst(a, e) <= limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_precision_gradients(backend):
    q, k, v = make("v narrower", torch.float32)
    if not usable(backend, q, v):
        backend = "reference"
    lengths, longest = CASES["v narrower"][4], CASES["v narrower"][6]
    results = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        ops.varlen_attention(*inputs, offsets(lengths), longest, backend=name).square().sum().backward()
        results.append([x.grad.double() for x in inputs])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_nothing_synchronises(backend):
    q, k, v = make("width 72, packed", torch.bfloat16)
    lengths, longest = CASES["width 72, packed"][4], CASES["width 72, packed"][6]
    cu = offsets(lengths)
    wanting = [x.detach().requires_grad_() for x in (q, k, v)]

    def work():
        out = ops.varlen_attention(q, k, v, cu, longest, backend=backend)
        ops.varlen_attention(*wanting, cu, longest, backend=backend).sum().backward()
        return out

    expected = work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_replays_new_values_and_new_boundaries(causal, backend):
    tokens, longest = 512, 256
    qkv = torch.randn(tokens, 3 * 4 * 80, device="cuda").bfloat16()
    cu = torch.zeros(6, dtype=torch.int32, device="cuda")

    def work():
        q, k, v = (x.unflatten(1, (4, 80)) for x in qkv.chunk(3, dim=1))
        return ops.varlen_attention(q, k, v, cu, longest, causal=causal, backend=backend)

    with torch.inference_mode():
        cu.copy_(offsets([100, 100, 100, 100, 112]))
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        for lengths in ([256, 1, 0, 5, 250], [64, 64, 64, 64, 64], [0, 0, 0, 0, 0], [7, 200, 200, 0, 0]):
            qkv.normal_()
            cu.copy_(offsets(lengths))
            captured.fill_(float("nan"))
            graph.replay()
            q, k, v = (x.unflatten(1, (4, 80)) for x in qkv.chunk(3, dim=1))
            assert_right(captured, q, k, v, lengths, causal)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_one_compiled_graph_serves_every_size(backend):
    torch._dynamo.reset()

    def function(qkv, cu, longest):
        q, k, v = (x.unflatten(1, (2, 64)) for x in (qkv * 2).chunk(3, dim=1))
        return ops.varlen_attention(q, k, v, cu, longest, backend=backend).flatten(1) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for index, tokens in enumerate((40, 70, 130, 256, 1000, 3000)):
        qkv = torch.randn(tokens, 3 * 2 * 64, device="cuda").bfloat16()
        cu = offsets([tokens // 3, 0, tokens // 2][: 2 + index % 2])
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = compiled(qkv, cu, tokens)
        torch.testing.assert_close(got, function(qkv, cu, tokens), atol=2e-2, rtol=2e-2)


def test_counts_compile_no_kernel_anew(monkeypatch):
    import triton

    def run(tokens, batch, longest):
        q = torch.randn(tokens, 2, 64, device="cuda").bfloat16()
        cu = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
        ops.varlen_attention(q, q, q, cu, longest, backend="triton")

    for longest in (64, 128, 512):  # each has its own block sizes or order
        run(700, 3, longest)
    run(700, 30, 4096)  # the bisected grid
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"])
    )
    for tokens, batch, longest in (
        (640, 1, 64),
        (641, 16, 33),
        (1024, 2, 513),
        (2048, 1, 2048),
        (999, 40, 4095),
    ):
        run(tokens, batch, longest)
    assert compiled == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_passes(backend):
    q, k, v = make("v narrower", torch.bfloat16)
    lengths, longest = CASES["v narrower"][4], CASES["v narrower"][6]
    covered = sum(lengths)
    q, k, v = q[:covered], k[:covered], v[:covered]
    cu = offsets(lengths)
    namespace = torch.ops.mmgraph
    named = getattr(namespace, f"attn_{backend}").default
    torch.library.opcheck(named, (q, k, v, cu, longest, None, True))
    torch.library.opcheck(namespace.varlen_attention.default, (q, k, v, cu, longest, 0.2, False))
    out, lse = namespace.varlen_attention_lse(q, k, v, cu, longest, None, True, backend)
    # Atomic sums make the flash backward differ from run to run, so gradients are compared in test_gradients.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    wanting = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        namespace.varlen_attention_lse.default, (*wanting, cu, longest, None, True, backend), test_utils=checks
    )
    backward = (torch.randn_like(out), q, k, v, out, lse, cu, longest, None, True)
    torch.library.opcheck(namespace.varlen_attention_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_major_layouts_match_the_fake(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = (torch.randn(4, 60, 64, device="cuda").bfloat16().transpose(0, 1) for _ in range(3))
    cu = offsets([60])
    op = torch.ops.mmgraph.varlen_attention_lse.default
    real = op(q, k, v, cu, 60, None, False, backend)
    grads = torch.ops.mmgraph.varlen_attention_backward(
        torch.ones_like(real[0]), q, k, v, *real, cu, 60, None, False
    )
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = op(*fakes, mode.from_tensor(cu), 60, None, False, backend)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert all(x.is_contiguous() for x in grads)


@pytest.mark.parametrize("backend", ["triton", "fa2"])
def test_wrong_offsets_are_recorded(backend):
    q = torch.randn(64, 2, 64, device="cuda").bfloat16()
    ops.varlen_attention(q, q, q, offsets([40]), 16, backend=backend)  # longer than the caller says
    with pytest.raises(ops.DeviceError, match="sequence 0 has 40 rows"):
        ops.check_errors()
    assert_right(ops.varlen_attention(q, q, q, offsets([40]), 40, backend=backend), q, q, q, [40], False)


@pytest.mark.parametrize("longest", [64, 4000])  # the rectangular grid and the bisected one
@pytest.mark.parametrize("lead", [5, 200, 2**31 - 100])
def test_triton_stays_inside_for_a_first_offset_that_is_not_zero(lead, longest):
    cu = torch.tensor([lead + 5 * i for i in range(7)], dtype=torch.int32, device="cuda")
    room = torch.full((3 * 64, 2, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    q = room[64:128].normal_()
    out = ops.varlen_attention(q, q, q, cu, longest, backend="triton")
    with pytest.raises(ops.DeviceError, match=r"sequence \d has 5 rows"):
        ops.check_errors()
    assert bool(out.isfinite().all())
    covered = slice(min(lead, 64), min(lead + 30, 64))
    rows = torch.arange(64, device="cuda")
    beside = (rows < covered.start) | (rows >= covered.stop)
    assert torch.equal(out[beside], torch.zeros_like(out[beside]))
    inside = q[covered]
    assert_right(out[covered], inside, inside, inside, [5] * (inside.shape[0] // 5), False)


def test_every_device_works_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        ops.prepare_device(device)
        q = torch.randn(64, 2, 64, device=device).bfloat16()
        cu = torch.tensor([0, 64], dtype=torch.int32, device=device)
        results = [ops.varlen_attention(q, q, q, cu, 64, backend=name) for name in BACKENDS]
        for got in results:
            assert got.device == device
            torch.testing.assert_close(got, results[-1], atol=2e-2, rtol=2e-2)


LARGE = tuple(name for name in BACKENDS if name != "reference")  # its masks are quadratic in all rows


@pytest.mark.parametrize("backend", LARGE)
def test_offsets_pass_two_to_the_31(backend):
    length, batch, heads, width = 1000, 360, 16, 128
    qkv = torch.randn(length * batch, 3 * heads * width, device="cuda", dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    q, k, v = (x.unflatten(1, (heads, width)) for x in qkv.chunk(3, dim=1))
    got = ops.varlen_attention(q, k, v, offsets([length] * batch), length, backend=backend)
    for rows in (slice(0, length), slice(-length, None)):
        assert_right(got[rows], q[rows], k[rows], v[rows], [length], False)


@pytest.mark.parametrize("with_windows", [False, True])
def test_window_offsets_pass_two_to_the_31(with_windows):
    longest = 64 if with_windows else 8
    length, heads, width = longest, 16, 128
    batch = 2**31 // (3 * heads * width * length) + 8
    qkv = torch.randn(length * batch, 3 * heads * width, device="cuda", dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    q, k, v = (x.unflatten(1, (heads, width)) for x in qkv.chunk(3, dim=1))
    cu = torch.arange(0, length * batch + 1, length, dtype=torch.int32, device="cuda")
    got = ops.varlen_attention(q, k, v, cu, longest, backend="triton")
    for rows in (slice(0, length), slice(-length, None)):
        assert_right(got[rows], q[rows], k[rows], v[rows], [length], False)


WINDOWS = {
    "aligned": [64] * 200,
    "cut at the edges": ([64] * 9 + [16]) * 20,
    "short": [3, 1, 8, 5] * 100,
    "any": [1 + (i * 37) % 64 for i in range(300)],
    "mostly empty": [64] * 5 + [0] * 3000,
    "all kinds of gaps": [0, 64, 0, 0, 1, 33, 0, 64, 64, 0, 17] * 30,
}


@pytest.mark.parametrize("width", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case, causal, width):
    lengths, tail = WINDOWS[case], 37
    covered = sum(lengths)
    g = torch.Generator(device="cuda").manual_seed(width)
    qkv = torch.randn(covered + tail, 10, width, generator=g, device="cuda").bfloat16()
    qkv[covered:] = float("nan")
    q, k, v = qkv.split([6, 2, 2], dim=1)
    cu = offsets(lengths)
    got = ops.varlen_attention(q, k, v, cu, 64, causal=causal, backend="triton")
    assert torch.equal(got[covered:], torch.zeros_like(got[covered:]))
    # The kernel for longer sequences gives the other opinion.
    other = ops.varlen_attention(q, k, v, cu, 65, causal=causal, backend="triton")
    torch.testing.assert_close(got, other, atol=2e-2, rtol=2e-2)
    few = sum(lengths[:12])
    assert_right(got[:few], q[:few], k[:few], v[:few], lengths[:12], causal)
    assert all(
        torch.equal(got, ops.varlen_attention(q, k, v, cu, 64, causal=causal, backend="triton"))
        for _ in range(2)
    )


@pytest.mark.parametrize("lengths", [[5, 9, 3, 40, 64, 2], [64, 64, 64], [100, 30, 200]])
def test_what_is_not_a_number_stays_in_its_sequence(lengths):
    longest = max(lengths)
    q, k, v = torch.randn(sum(lengths), 3, 4, 80, device="cuda").bfloat16().unbind(1)
    clean = ops.varlen_attention(q, k, v, offsets(lengths), longest, backend="triton")
    rows = slice(lengths[0], lengths[0] + lengths[1])
    k[rows.start], v[rows.start + 1] = float("nan"), float("inf")
    got = ops.varlen_attention(q, k, v, offsets(lengths), longest, backend="triton")
    assert not got[rows].isfinite().all()
    # In other blocks of keys than without it, where sequences share a program: the sums round in another order.
    torch.testing.assert_close(got[: rows.start], clean[: rows.start], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got[rows.stop :], clean[rows.stop :], atol=1e-2, rtol=1e-2)


SHAPES = ([4096] * 2, [64] * 300, [700, 30, 1, 0, 255], [16] * 100, [2000])


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("how", ["choice", "context", "measure"])
def test_the_unnamed_call_is_the_chosen_backend(how, lengths):
    q, k, v = torch.randn(sum(lengths), 3, 8, 80, device="cuda").bfloat16().unbind(1)
    arguments = (q, k, v, offsets(lengths), max(lengths))
    chosen = ops.select_backend(
        head_dim=80, heads=8, tokens=q.shape[0], batch=len(lengths), max_seqlen=max(lengths)
    )
    if how == "choice":
        assert torch.equal(ops.varlen_attention(*arguments), ops.varlen_attention(*arguments, backend=chosen))
    elif how == "context":
        with ops.attention_backend("torch"):
            got = ops.varlen_attention(*arguments)
        assert torch.equal(got, ops.varlen_attention(*arguments, backend="torch"))
    else:
        got = ops.varlen_attention(*arguments, backend="measure")
        named = [ops.varlen_attention(*arguments, backend=name) for name in LARGE]
        assert any(torch.equal(got, one) for one in named)


def test_a_measured_choice_is_captured_and_an_unmeasured_one_refused():
    q, k, v = torch.randn(333, 3, 5, 64, device="cuda").bfloat16().unbind(1)
    cu = offsets([300, 30])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ops.DuringCaptureError, match="once on that shape"), torch.cuda.graph(graph):
        ops.varlen_attention(q, k, v, cu, 300, backend="measure")
    torch.cuda.synchronize()
    expected = ops.varlen_attention(q, k, v, cu, 300, backend="measure")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.varlen_attention(q, k, v, cu, 300, backend="measure")
    graph.replay()
    assert torch.equal(got, expected)


def test_a_kernel_that_must_be_compiled_first_is_refused_inside_a_capture():
    q, k, v = (
        torch.randn(64, 3, 7, 40, device="cuda").bfloat16().unbind(1)
    )  # no other test has seven heads of 40
    cu = offsets([64])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ops.DuringCaptureError, match="'fa4'"), torch.cuda.graph(graph):
        ops.varlen_attention(q, k, v, cu, 64, backend="fa4")
    torch.cuda.synchronize()
    assert_right(ops.varlen_attention(q, k, v, cu, 64, backend="fa4"), q, k, v, [64], False)
