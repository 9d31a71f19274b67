"""Invariant: an encoder's attention compiles to one graph for all sizes and replays for all boundaries, as in eager."""

import pytest
import torch
from encoder_reference import length_arguments, plain_attention, positions
from tower_block import CountingBackend, assert_right

from mmgraph import MultimodalEncoderAttention
from mmgraph.capture import BucketGrid, CaptureManager, bucket_size, offsets, rows

# The first one's sizes differ from each other and from the widths: what is equal there is taken for one size.
BATCHES = ((5, 9, 3, 2, 4, 6), (7, 7), (20, 1, 4, 2), (0, 30, 0))
WIDTH = 8


def make(made, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return MultimodalEncoderAttention(80, 10, num_kv_heads=5, dtype=dtype, **made.options, **options)


def case(kind, form, lengths, seed=0):
    """An input of these lengths, or, where a form has none, as many batch rows of the first one."""
    g = torch.Generator().manual_seed(seed + sum(lengths))
    shape = (len(lengths) + 1, lengths[0] + 13) if form == "none" else (sum(lengths),)
    x = torch.randn(*shape, 80, generator=g)
    tokens = x.numel() // 80
    made = positions(kind, tokens, WIDTH, g)
    return x, made, [shape[1]] * shape[0] if form == "none" else list(lengths)


@pytest.mark.parametrize(
    ("kind", "form", "gradients"),
    [
        ("half", "plain", True),
        ("full", "none", False),
        ("interleaved", "packed", False),
        ("complex", "plain", False),
        ("function", "plain", False),
    ],
)
def test_one_graph_serves_all_sizes(kind, form, gradients):
    module = make(case(kind, form, BATCHES[0])[1], scale=0.3 if gradients else None)
    counting = CountingBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counting)
    for index, lengths in enumerate(BATCHES):
        x, made, sequences = case(kind, form, lengths)
        module.position_function = made.options.get("position_function")
        arguments = length_arguments(form, module, sequences) | made.call
        leaves = [x.requires_grad_(gradients), *module.parameters()]
        with torch._dynamo.config.patch(error_on_recompile=index > 0), torch.set_grad_enabled(gradients):
            got = compiled(x, **arguments)
        eager, exact = module(x, **arguments), plain_attention(module, x, sequences, made.place)
        assert_right(got, eager, exact)
        if gradients:
            found = [torch.autograd.grad(out.square().sum(), leaves) for out in (got, eager)]
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert counting.graphs == 1


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("no maximum", "max_seqlen is missing while a graph is traced"),
        ("int64", "must be int32 on cpu while a graph is traced"),
        ("packed without maximum", "max_seqlen is missing"),
    ],
)
def test_what_would_be_read_or_converted_is_refused_while_tracing(form, words):
    x, made, lengths = case("none", form, BATCHES[0])
    module = make(made)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    arguments = length_arguments(form, module, lengths)
    with pytest.raises(Exception, match=words):
        compiled(x, **arguments)
    with torch.no_grad():
        assert torch.equal(module(x, **arguments), module(x, **length_arguments("plain", module, lengths)))


GRID = BucketGrid(tokens=(16, 48), batch=(2, 6), seqlen=(16, 48))


def manager_of(module, **specs):
    names = {
        "x": rows("tokens"),
        "cu_seqlens": offsets("batch", of="tokens"),
        "max_seqlen": bucket_size("seqlen"),
    }
    return CaptureManager(module, inputs=names | specs, outputs=rows("tokens"), buckets=GRID, on_miss="error")


@pytest.mark.parametrize("kind", ["half", "keywords", "complex", "function"])
def test_replays_follow_the_boundaries(kind):
    tables = {
        "keywords": {name: rows("tokens") for name in ("rotary_pos_emb_cos", "rotary_pos_emb_sin")},
        "complex": {"position_embeddings": rows("tokens")},
    }
    specs = tables.get(kind, {"position_embeddings": (rows("tokens"), rows("tokens"))})
    if kind == "function":
        specs = tables["complex"] | tables["keywords"]
    module = make(case(kind, "plain", (1,))[1])
    graphs = manager_of(module, **specs)
    for index, lengths in enumerate([(5, 9), (9, 5), (1, 3, 0, 7), (48,), (3, 4), (14,), (20, 20, 4, 4)]):
        x, made, sequences = case(kind, "plain", lengths, seed=index)
        module.position_function = made.options.get("position_function")
        call = {"x": x} | length_arguments("plain", module, sequences) | made.call
        if index == 0:
            graphs.precompile(call, progress=False)
        with torch.no_grad():
            got, eager = graphs(**call), module(**call)
            assert_right(got, eager, plain_attention(module, x, sequences, made.place))
    assert graphs.report().misses == {}
    assert graphs.report().hits == 7


def test_equal_sequences_replay_without_offsets():
    module = make(case("half", "none", (1,))[1])
    specs = {"x": rows("batch"), "position_embeddings": (rows("batch"), rows("batch"))}
    grid = BucketGrid(batch=(2, 8))
    graphs = CaptureManager(module, inputs=specs, outputs=rows("batch"), buckets=grid, on_miss="error")
    for count in (5, 2, 7):
        x, made, lengths = case("half", "none", (3,) * (count - 1))
        tables = tuple(table.view(count, 16, 4) for table in made.call["position_embeddings"])
        call = {"x": x, "position_embeddings": tables}
        if count == 5:
            graphs.precompile(call, progress=False)
        with torch.no_grad():
            assert_right(graphs(**call), module(**call), plain_attention(module, x, lengths, made.place))
    assert graphs.report().hits == 3


def test_a_missing_maximum_is_refused_when_captured_and_the_process_goes_on():
    module = make(case("none", "plain", (1,))[1])
    specs = {"x": rows("tokens"), "cu_seqlens": offsets("batch", of="tokens")}
    grid = BucketGrid(tokens=(16,), batch=(4,))
    graphs = CaptureManager(module, inputs=specs, outputs=rows("tokens"), buckets=grid)
    call = {"x": torch.randn(7, 80), "cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32)}
    with pytest.raises(Exception, match="max_seqlen is missing inside a capture"):
        graphs.precompile(call, progress=False)
    with torch.no_grad():
        assert torch.equal(module(**call), module(**call, max_seqlen=4))
