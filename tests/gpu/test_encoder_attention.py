"""Invariant: on CUDA an encoder's attention by any backend is plain PyTorch's, eager, compiled and replayed."""

import copy

import pytest
import torch
from encoder_reference import POSITIONS, length_arguments, plain_attention, positions
from tower_block import CountingBackend, assert_right

from mmgraph import MultimodalEncoderAttention, ops
from mmgraph.capture import BucketGrid, CaptureManager, bucket_size, offsets, rows
from mmgraph.errors import EncoderAttentionError
from mmgraph.ops.attention.registry import backend_names

pytestmark = pytest.mark.cuda

DEVICE, DTYPE = "cuda", torch.bfloat16
DIM, HEADS, WIDTH = 288, 4, 72
LENGTHS = (70, 1, 0, 200)


@pytest.fixture(autouse=True)
def no_error_is_left():
    yield
    ops.check_errors()


def usable(backend):
    reports = ops.explain_backends(device=DEVICE, dtype=DTYPE, head_dim=WIDTH, heads=HEADS, kv_heads=2)
    return backend is None or {report.name: report.usable for report in reports}[backend]


def make(made, **options):
    torch.manual_seed(0)
    return MultimodalEncoderAttention(
        DIM, HEADS, num_kv_heads=2, device=DEVICE, dtype=DTYPE, **made.options, **options
    )


def case(kind, lengths, tail=0, seed=0):
    g = torch.Generator().manual_seed(seed + sum(lengths))
    tokens = sum(lengths) + tail
    x = torch.randn(tokens, DIM, generator=g).to(DEVICE, DTYPE)
    return x, positions(kind, tokens, WIDTH, g, DEVICE)


def assert_equals_plain(got, module, x, lengths, kind, tail=0, seed=0):
    """Positions are drawn anew for each reference, since a function's change from call to call."""
    found = []
    for dtype in (DTYPE, torch.float64):
        found.append(plain_attention(module, x, list(lengths), case(kind, lengths, tail, seed)[1].place, dtype))
    assert_right(got, *found)


@pytest.mark.parametrize("backend", [*backend_names(), None])
@pytest.mark.parametrize("kind", POSITIONS)
def test_every_backend_equals_plain_attention(backend, kind):
    x, made = case(kind, LENGTHS, tail=9)
    module = make(made, backend=backend)
    arguments = length_arguments("plain", module, list(LENGTHS), DEVICE) | made.call
    with torch.no_grad():
        if not usable(backend):
            with pytest.raises(ops.UnusableBackend, match="can't serve this call"):
                module(x, **arguments)
            return
        assert_equals_plain(module(x, **arguments), module, x, LENGTHS, kind, tail=9)


@pytest.mark.parametrize("form", ["no maximum", "int64", "packed", "packed without maximum"])
@pytest.mark.parametrize("on_host", [False, True])
def test_every_form_of_lengths_is_the_same_call(form, on_host):
    x, made = case("half", LENGTHS)
    module = make(made)
    with torch.no_grad():
        device = "cpu" if on_host else DEVICE
        got = module(x, **length_arguments(form, module, list(LENGTHS), device), **made.call)
        assert_equals_plain(got, module, x, LENGTHS, "half")


@pytest.mark.parametrize("backend", ["flashinfer_cudnn", "triton"])
def test_packed_offsets_serve_a_named_backend(backend):
    x, made = case("half", LENGTHS)
    module = make(made, backend=backend)
    with torch.no_grad():
        if not usable(backend):
            with pytest.raises(ops.UnusableBackend):
                module(x)
            return
        got = module(x, **length_arguments("packed", module, list(LENGTHS), DEVICE), **made.call)
        assert_equals_plain(got, module, x, LENGTHS, "half")


def test_a_maximum_on_the_device_is_refused():
    x, made = case("none", LENGTHS)
    module = make(made)
    cu = length_arguments("plain", module, list(LENGTHS), DEVICE)["cu_seqlens"]
    with pytest.raises(EncoderAttentionError, match="got a tensor on cuda:0: reading it would synchronise"):
        module(x, cu, torch.tensor(200, device=DEVICE))


@pytest.mark.parametrize("kind", ["half", "complex", "function"])
def test_an_eager_call_does_not_wait_for_the_device(kind):
    x, made = case(kind, LENGTHS)
    module = make(made)
    arguments = length_arguments("packed", module, list(LENGTHS), DEVICE) | made.call
    with torch.no_grad():
        module(x, **arguments)  # compiles kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(x, **arguments)
            module(x, **made.call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", [*backend_names(), None])
def test_gradients_are_those_in_float64(backend):
    x, made = case("half", LENGTHS)
    module = make(made, backend=backend)
    exact = copy.deepcopy(module).double()
    arguments = length_arguments("plain", module, list(LENGTHS), DEVICE) | made.call
    if not usable(backend):
        with pytest.raises(ops.UnusableBackend):
            module(x, **arguments)
        return

    def gradients(one, call):
        leaf = x.detach().to(one.qkv.weight.dtype).requires_grad_()
        return torch.autograd.grad(call(one, leaf).double().square().sum(), [leaf, *one.parameters()])

    got = gradients(module, lambda one, leaf: one(leaf, **arguments))
    low = gradients(module, lambda one, leaf: plain_attention(one, leaf, list(LENGTHS), made.place, DTYPE))
    expected = gradients(exact, lambda one, leaf: plain_attention(one, leaf, list(LENGTHS), made.place))
    for found in zip(got, low, expected, strict=True):
        assert_right(*found)


GRID = BucketGrid(tokens=(128, 512), batch=(4, 8), seqlen=(64, 512))


@pytest.mark.parametrize("kind", ["half", "complex"])
@pytest.mark.parametrize("backend", [*backend_names(), None])
def test_replays_follow_changed_lengths(backend, kind):
    made = case(kind, (1,))[1]
    if not usable(backend):
        return  # what it says then is tested above
    module = make(made, backend=backend)
    tables = (rows("tokens"), rows("tokens")) if kind == "half" else rows("tokens")
    specs = {
        "x": rows("tokens"),
        "cu_seqlens": offsets("batch", of="tokens"),
        "max_seqlen": bucket_size("seqlen"),
    }
    graphs = CaptureManager(
        module,
        inputs=specs | {"position_embeddings": tables},
        outputs=rows("tokens"),
        buckets=GRID,
        on_miss="error",
    )
    try:
        for index, lengths in enumerate([(50, 30), (30, 50), (64, 0, 1, 63), (512,), (3,), (200, 100, 9)]):
            x, made = case(kind, lengths, seed=index)
            call = {"x": x} | length_arguments("plain", module, list(lengths), DEVICE) | made.call
            with torch.no_grad():
                if index == 0:
                    graphs.precompile(call, progress=False)
                assert_equals_plain(graphs(**call), module, x, lengths, kind, seed=index)
        assert graphs.report().hits == 6
    finally:
        graphs.close()


def test_inductor_makes_one_graph_that_trains():
    torch._dynamo.reset()
    module, counting = make(case("half", (1,))[1]), CountingBackend()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counting)
    for index, lengths in enumerate([(70, 1, 30, 5), (64,) * 8, (200, 100)]):
        x, made = case("half", lengths)
        arguments = length_arguments("plain", module, list(lengths), DEVICE) | made.call
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            out = compiled(x.requires_grad_(), **arguments)
            out.square().sum().backward()
        assert_equals_plain(out.detach(), module, x.detach(), lengths, "half")
        eager = torch.autograd.grad(module(x, **arguments).square().sum(), x)[0]
        torch.testing.assert_close(x.grad, eager, rtol=0.05, atol=0.05 * float(eager.abs().max()))
    assert counting.graphs == 1
