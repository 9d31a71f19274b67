"""Invariant: a whole tower block compiles to one graph, for every size, and computes what eager computes."""

import pytest
import torch
from tower_block import (
    SIZES,
    CountingBackend,
    Size,
    TowerBlock,
    assert_right,
    exact_block,
    exactly,
    gradients,
    inputs,
)

BACKENDS = (None, "reference")
NAN = float("nan")


def compile_block(block, **options):
    torch._dynamo.reset()
    counting = CountingBackend(options.pop("backend", "inductor"))
    return torch.compile(block, fullgraph=True, backend=counting, **options), counting


def make_block(backend, dtype=torch.float32):
    torch.manual_seed(0)
    return TowerBlock(2, 8, backend=backend).to(dtype)


def assert_forward_is_right(compiled, block, exact, size):
    arguments = inputs(size, block, dtype=block.proj.weight.dtype, padding=NAN)
    results = compiled(*arguments), block(*arguments), exact(*exactly(arguments))
    covered = sum(size.lengths)
    assert_right(*(out[:covered] for out in results))
    assert bool(results[0][covered:].isnan().all())


# A compilation takes seconds: every mode with the defaults, and the other dtype and the named backend each with one.
@pytest.mark.parametrize(
    ("backend", "dtype", "mode"),
    [
        (None, torch.float32, torch.no_grad),
        (None, torch.float32, torch.inference_mode),
        (None, torch.float32, torch.enable_grad),
        (None, torch.bfloat16, torch.inference_mode),
        ("reference", torch.float32, torch.no_grad),
    ],
)
def test_one_dynamic_graph_serves_ten_sizes(backend, dtype, mode):
    block = make_block(backend, dtype)
    compiled, counting = compile_block(block, dynamic=True)
    exact = exact_block(block)
    with mode():
        for index, size in enumerate(SIZES):
            with torch._dynamo.config.patch(error_on_recompile=index > 0):
                assert_forward_is_right(compiled, block, exact, size)
    assert len(SIZES) == 10
    assert counting.graphs == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_graphs_serve_ten_sizes_when_nothing_is_said_of_them(backend):
    block = make_block(backend)
    compiled, counting = compile_block(block)
    exact = exact_block(block)
    with torch.no_grad():
        for index, size in enumerate(SIZES):
            with torch._dynamo.config.patch(error_on_recompile=index > 1):
                assert_forward_is_right(compiled, block, exact, size)
    assert counting.graphs == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_dynamic_graph_trains_on_ten_sizes(backend):
    block = make_block(backend)
    compiled, counting = compile_block(block, dynamic=True)
    exact = exact_block(block)
    for index, size in enumerate(SIZES):
        arguments = inputs(size, block)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = gradients(block, compiled, arguments)
        eager, expected = gradients(block, block, arguments), gradients(exact, exact, exactly(arguments))
        for name, grad in got.items():
            assert_right(grad, eager[name], expected[name])
    assert counting.graphs == 1


def test_the_smallest_sizes_are_right_too():
    """PyTorch makes a graph of its own for a size of 0 or 1, so they are not counted."""
    block = make_block(None)
    compiled, _ = compile_block(block, dynamic=True, backend="aot_eager")
    exact = exact_block(block)
    with torch.no_grad():
        for size in (
            SIZES[0],
            Size((1,)),
            Size((1, 1, 1)),
            Size((), tail=2),
            Size(()),
            Size((0,)),
            Size((0, 0), tail=3),
        ):
            assert_forward_is_right(compiled, block, exact, size)


def test_the_same_sizes_with_other_boundaries_are_other_results():
    block = make_block(None)
    compiled, counting = compile_block(block, dynamic=False, backend="aot_eager")
    one, other = Size((20, 10, 34)), Size((34, 25, 5))
    with torch.no_grad():
        for size in (one, other):
            arguments = inputs(size, block, seed=size is other)
            torch.testing.assert_close(compiled(*arguments), block(*arguments))
        moved = compiled(*arguments[:3], inputs(one, block)[3], arguments[4])
    assert counting.graphs == 1
    assert not torch.allclose(moved, block(*arguments))


def test_an_unknown_backend_is_named_while_tracing():
    compiled, _ = compile_block(make_block("fastest"), backend="aot_eager")
    with pytest.raises(Exception, match="no attention backend is named 'fastest'; choose one of"):
        compiled(*inputs(SIZES[0], make_block(None)))
