"""Invariant: on CUDA a tower block with any attention backend is one compiled graph for every size, also captured.

It computes what eager computes: compiled, trained, replayed by PyTorch's own CUDA graphs, exported, and compiled ahead.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.export import Dim
from tower_block import (
    SIZES,
    CountingBackend,
    LongestByShape,
    LongestByValue,
    Size,
    TowerBlock,
    assert_right,
    exact_block,
    exactly,
    gradients,
    inputs,
)

from mmgraph import ops
from mmgraph.ops import error_flag
from mmgraph.ops.attention.registry import backend_names

pytestmark = pytest.mark.cuda

DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, WIDTH = 4, 80
BACKENDS = (*backend_names(), None)
NAN = float("nan")


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    ops.check_errors()


def make_block(backend):
    torch.manual_seed(0)
    return TowerBlock(HEADS, WIDTH, backend=backend).to(DEVICE, DTYPE)


def make_inputs(size, block, **options):
    return inputs(size, block, device=DEVICE, dtype=DTYPE, **options)


def refused(backend, run):
    """Whether this device can't use the backend; then ``run`` must say so."""
    reports = ops.explain_backends(device=DEVICE, dtype=DTYPE, head_dim=WIDTH, heads=HEADS)
    if backend is None or {report.name: report.usable for report in reports}[backend]:
        return False
    with pytest.raises(ops.UnusableBackend, match="can't serve this call"):
        run()
    return True


def assert_forward_is_right(run, block, exact, size, convert=lambda arguments: arguments, seed=0):
    arguments = make_inputs(size, block, padding=NAN, seed=seed)
    results = run(*convert(arguments)), block(*arguments), exact(*exactly(arguments))
    covered = sum(size.lengths)
    assert_right(*(out[:covered] for out in results))
    assert bool(results[0][covered:].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_dynamic_graph_serves_ten_sizes(backend):
    block, counting = make_block(backend), CountingBackend()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    with torch.no_grad():
        if refused(backend, lambda: compiled(*make_inputs(SIZES[0], block))):
            return
        exact = exact_block(block)
        for index, size in enumerate(SIZES):
            with torch._dynamo.config.patch(error_on_recompile=index > 0):
                assert_forward_is_right(compiled, block, exact, size)
    assert len(SIZES) == 10
    assert counting.graphs == 1


def test_two_graphs_serve_ten_sizes_when_nothing_is_said_of_them():
    block, counting = make_block(None), CountingBackend()
    compiled, exact = torch.compile(block, fullgraph=True, backend=counting), exact_block(block)
    with torch.inference_mode():
        for index, size in enumerate(SIZES):
            with torch._dynamo.config.patch(error_on_recompile=index > 1):
                assert_forward_is_right(compiled, block, exact, size)
    assert counting.graphs == 2


@pytest.mark.parametrize(
    ("backend", "compiler"), [(None, "inductor"), *((name, "aot_eager") for name in backend_names())]
)
def test_one_dynamic_graph_trains(backend, compiler):
    block, counting = make_block(backend), CountingBackend(compiler)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    if refused(backend, lambda: compiled(*make_inputs(SIZES[0], block))):
        return
    exact = exact_block(block)
    for index, size in enumerate(SIZES):
        arguments = make_inputs(size, block)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = gradients(block, compiled, arguments)
        eager, expected = gradients(block, block, arguments), gradients(exact, exact, exactly(arguments))
        for name, grad in got.items():
            assert_right(grad, eager[name], expected[name])
    assert counting.graphs == 1


# Sizes of one class: 256 tokens, 4 sequences, none longer than 128.
BOUNDARIES = ((64, 64, 64, 64), (128, 0, 28, 90), (1, 2, 3, 4), (100, 28, 128, 0), (0, 0, 0, 0))


def of_the_class(lengths):
    return Size(lengths, tail=256 - sum(lengths), above=128 - max(lengths))


@pytest.mark.parametrize(
    ("backend", "options"),
    [(None, {"mode": "reduce-overhead"}), *((name, {"backend": "cudagraphs"}) for name in BACKENDS)],
)
def test_pytorchs_cuda_graphs_follow_new_boundaries(backend, options, monkeypatch):
    """Also where the op's first call of all is in the warm-up, whose allocations go to the graphs' pool."""
    flags = {}
    monkeypatch.setattr(error_flag, "_flags", flags)
    block = make_block(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, **options)
    with torch.no_grad():
        if refused(backend, lambda: compiled(*make_inputs(SIZES[0], block))):
            return
        exact = exact_block(block)
        for round_ in range(2):  # warm-up, recording and replays; then replays
            for index, lengths in enumerate(BOUNDARIES):
                with torch._dynamo.config.patch(error_on_recompile=bool(round_ or index)):
                    torch.compiler.cudagraph_mark_step_begin()
                    seed = round_ * len(BOUNDARIES) + index
                    assert_forward_is_right(compiled, block, exact, of_the_class(lengths), seed=seed)
    ops.check_errors()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
    # The graphs go first, then the flag that they write to.
    torch._dynamo.reset()
    torch.cuda.synchronize()
    flags.clear()


def test_an_exported_program_runs_at_other_sizes(tmp_path):
    block, rows = make_block(None), {0: Dim.DYNAMIC}
    dynamic = (rows, rows, rows, rows, Dim.DYNAMIC)
    with torch.no_grad():
        program = torch.export.export(block, make_inputs(SIZES[0], block), dynamic_shapes=dynamic)
        torch.export.save(program, tmp_path / "block.pt2")
        run, exact = torch.export.load(tmp_path / "block.pt2").module(), exact_block(block)
        for size in SIZES:
            assert_forward_is_right(run, block, exact, size)


def by_value(arguments):
    return (*arguments[:4], torch.tensor(arguments[4]))  # on the host, also for a model on the GPU


def by_shape(arguments):
    return (*arguments[:4], torch.empty(arguments[4], 0, device=DEVICE))


@pytest.mark.parametrize(
    ("wrapper", "convert", "longest"),
    [(LongestByValue, by_value, None), (LongestByShape, by_shape, {0: Dim.DYNAMIC})],
    ids=["value", "shape"],
)
def test_aotinductor_runs_at_other_sizes(wrapper, convert, longest, tmp_path):
    block, rows = make_block(None), {0: Dim.DYNAMIC}
    with torch.no_grad():
        example = convert(make_inputs(SIZES[0], block))
        program = torch.export.export(wrapper(block), example, dynamic_shapes=(rows, rows, rows, rows, longest))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        run, exact = torch._inductor.aoti_load_package(package), exact_block(block)
        for size in SIZES:
            assert_forward_is_right(run, block, exact, size, convert)
