"""Invariant: one compilation serves every bucket, and nothing is compiled while calls are served."""

import functools
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mmgraph.capture import SpecError
from mmgraph.capture.compiling import (
    CompiledFunction,
    eagerly,
    is_compiled,
    mark,
    own_graphs,
    refuse_own_graphs,
    run_without_recompiling,
)
from mmgraph.capture.state import StateSnapshot

HIDDEN = 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(run: list[str]) -> Callable[[Any, Any], Any]:
    def backend(graph: Any, given_: Any) -> Any:
        run.append("compiled")

        def counted(*args: Any) -> Any:
            run.append("ran")
            return graph(*args)

        return counted

    return backend


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor, starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x * longest, starts[1:] - starts[:-1]


def inputs(tokens: int, batch: int, longest: int) -> dict[str, Any]:
    """One bucket's marked views of buffers."""
    x, starts = torch.randn(64, HIDDEN)[:tokens], torch.arange(64, dtype=torch.int32)[: batch + 1]
    mark(x, 0)
    mark(starts, 0)
    return {"x": x, "starts": starts, "longest": longest}


SIZES = st.tuples(st.integers(2, 33), st.integers(2, 33), st.integers(2, 40))


@settings(max_examples=6)
@given(
    first=st.sampled_from([(HIDDEN, HIDDEN - 1, HIDDEN), (9, 8, 9), (16, 4, 8)]),
    rest=st.lists(SIZES, min_size=2, max_size=3),
)
def test_one_compilation_for_all_sizes_whichever_are_equal_at_first(
    first: tuple[int, int, int], rest: list[tuple[int, int, int]]
) -> None:
    torch._dynamo.reset()
    model = Model(1)
    compiled = CompiledFunction(model, backend="eager")
    with torch.no_grad():
        for sizes in (first, *rest):
            given_ = inputs(*sizes)
            for got, expected in zip(compiled(**given_), model(**given_), strict=True):
                torch.testing.assert_close(got, expected)
            assert compiled.graphs_per_call == 1
    assert (compiled.compilations, compiled.compiling_calls, compiled.graph_breaks) == (1, 1, 0)


class Products(torch.nn.Module):
    """Matrix products and views alone, for which Inductor calls no C++ compiler, which would take a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, 2 * HIDDEN))

    def forward(self, x: torch.Tensor, starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x)[:longest], starts[1:]


def test_inductor_compiles_once_too() -> None:
    model = Products()
    compiled = CompiledFunction(model)
    with torch.no_grad():
        for sizes in ((HIDDEN, HIDDEN - 1, HIDDEN), (16, 3, 5), (5, 4, 4), (HIDDEN, 2, 2)):
            given_ = inputs(*sizes)
            for got, expected in zip(compiled(**given_), model(**given_), strict=True):
                torch.testing.assert_close(got, expected)
            assert compiled.graphs_per_call == 1
    assert (compiled.compilations, compiled.compiling_calls) == (1, 1)


def test_the_other_axes_are_known_to_the_compiler() -> None:
    seen: list[list[tuple[Any, ...]]] = []

    def backend(graph: Any, given_: list[Any]) -> Any:
        traced = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        seen.append([tuple(map(type, value.shape)) for value in traced if isinstance(value, torch.Tensor)])
        return graph

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum() + z.sum()

    views = {name: torch.zeros(4, 4) for name in "xyz"}
    for view, axis in zip(views.values(), (0, 1, None), strict=True):
        mark(view, axis)
    CompiledFunction(function, backend=backend)(**views)
    assert seen == [[(torch.SymInt, int), (int, torch.SymInt), (int, int)]]


def test_breaks_are_counted_and_give_the_same_results() -> None:
    def in_a_line(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    model = Model(3)

    def in_a_loop(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    for function, graphs in ((in_a_line, 2), (in_a_loop, 3)):
        compiled = CompiledFunction(function, backend="eager")
        with torch.no_grad():
            for tokens in (16, 8, 4):
                x = inputs(tokens, 2, 2)["x"]
                torch.testing.assert_close(compiled(x=x), function(x))
                assert (compiled.graphs_per_call, compiled.graph_breaks) == (graphs, graphs - 1)
        assert compiled.compiling_calls == 1
        if function is in_a_line:
            assert len(compiled.graph_break_reasons) == 1


def test_the_watched_run_finds_no_state_in_a_compiled_function_and_does_not_keep_it_from_compiling() -> None:
    counter = torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + counter.add_(1)

    for make in (functools.partial(torch.compile, dynamic=True), CompiledFunction):
        run: list[str] = []
        compiled = make(function, backend=counting(run))
        snapshot = StateSnapshot(compiled, CPU, [], [])
        for size in (16, 8):
            x = torch.zeros(size)
            snapshot.restore()
            with snapshot.watching():
                assert compiled(x=x)[0] == 1
            assert snapshot.plain_changes() == []
            snapshot.restore()
            assert compiled(x=x)[0] == 1
        snapshot.restore(everything=True)
        assert counter == 0
        assert run == ["compiled", "ran", "ran"]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_the_function_runs_as_it_is_and_is_compiled_later() -> None:
    compiled = CompiledFunction(lambda x: x * 2 + 1, backend="eager")
    for turn in range(2):
        with _Mode():
            assert compiled(x=torch.ones(3)).tolist() == [3.0] * 3
        assert compiled.compilations == turn
        compiled(x=torch.ones(4))
        assert (compiled.compilations, compiled.graphs_per_call) == (1, 1)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Holder:
    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = model

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.compile(backend="eager")
    def compiled(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.compile(mode="reduce-overhead")
    def with_graphs(self, x: torch.Tensor) -> torch.Tensor:
        return x


def after_compile(**options: Any) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.compile(**options)
    return module


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: plain, False),
        (lambda: torch.nn.Linear(2, 2), False),
        (lambda: Holder().run, False),
        (lambda: functools.partial(plain), False),
        (lambda: unittest.mock.MagicMock(), False),
        (lambda: torch.compiler.disable(plain), False),
        (lambda: torch.compiler.disable(torch.nn.Linear(2, 2)), False),
        (lambda: torch.add, False),
        (lambda: torch.compile(plain), True),
        (lambda: torch.compile(torch.nn.Linear(2, 2)), True),
        (after_compile, True),
        (lambda: Holder().compiled, True),
        (lambda: functools.partial(torch.compile(plain)), True),
    ],
)
def test_what_is_compiled_is_told_from_what_is_not(make: Callable[[], Any], expected: bool) -> None:
    fn = make()
    assert is_compiled(fn) is expected
    if expected:
        with pytest.raises(SpecError, match="compiled already"):
            CompiledFunction(fn)


GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
    {"backend": "cudagraphs"},
]


def as_it_is(graph: Any, given_: Any) -> Any:
    return graph


NO_GRAPHS: list[dict[str, Any]] = [
    {},
    {"mode": "default"},
    {"mode": "max-autotune-no-cudagraphs"},
    {"options": {"triton.cudagraphs": False}},
    {"backend": "eager"},
    {"backend": as_it_is},
]


@pytest.mark.parametrize(
    "options",
    [*GRAPHS, *NO_GRAPHS],
    ids=lambda options: getattr(options.get("backend"), "__name__", None) or str(options),
)
def test_modes_with_cuda_graphs_of_their_own_are_refused(options: dict[str, Any]) -> None:
    for fn in (
        torch.compile(plain, **options),
        torch.compile(torch.nn.Linear(2, 2), **options),
        functools.partial(torch.compile(plain, **options)),
        after_compile(**options),
        torch.nn.Sequential(torch.nn.Linear(2, 2), after_compile(**options)),
        torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), **options)),
        Holder(torch.nn.Sequential(after_compile(**options))).run,
    ):
        assert bool(own_graphs(fn)) is (options in GRAPHS)
        if options in GRAPHS:
            with pytest.raises(SpecError, match="max-autotune-no-cudagraphs"):
                refuse_own_graphs(fn)
        else:
            refuse_own_graphs(fn)
    assert own_graphs(Holder().with_graphs)


def test_own_graphs_asked_for_with_our_compilation_are_refused() -> None:
    with pytest.raises(SpecError, match=r"triton\.cudagraphs"):
        CompiledFunction(plain, options={"triton.cudagraphs": True})


def test_a_miss_runs_what_is_compiled_and_compiles_nothing() -> None:
    run: list[str] = []
    inner = torch.compile(plain, backend=counting(run), dynamic=False)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    outer(torch.ones(4))
    assert run == ["compiled", "ran"]
    for fn in (inner, outer):
        run.clear()
        run_without_recompiling(fn, {"x": torch.ones(4)})
        assert run == ["ran"]
        run.clear()
        assert run_without_recompiling(fn, {"x": torch.ones(7)}).shape == (7,)
        assert run == []
    inner(torch.ones(5))
    assert run == ["compiled", "ran"]


def test_stances_of_several_threads_end_with_what_was_set_before() -> None:
    run: list[str] = []
    compiled = torch.compile(plain, backend=counting(run), dynamic=False)
    inside, leave = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert leave.wait(30)
        return x

    thread = threading.Thread(target=run_without_recompiling, args=(slow, {"x": torch.ones(1)}))
    thread.start()
    assert inside.wait(30)
    with eagerly():
        compiled(torch.ones(2))
        assert run == []
        leave.set()
        thread.join()
        compiled(torch.ones(2))
        assert run == []  # the other's end has not ended this
    compiled(torch.ones(2))
    assert run == ["compiled", "ran"]
    with pytest.raises(ZeroDivisionError), eagerly():
        raise ZeroDivisionError
    compiled(torch.ones(3))
    assert run == ["compiled", "ran"] * 2


def test_a_stance_of_the_users_stays() -> None:
    run: list[str] = []
    compiled = torch.compile(plain, backend=counting(run), dynamic=False)
    compiled(torch.ones(4))
    run.clear()
    with torch.compiler.set_stance("force_eager"):
        run_without_recompiling(compiled, {"x": torch.ones(4)})
        with eagerly():
            pass
        compiled(torch.ones(4))
        assert run == []


def test_equal_blocks_share_one_compilation() -> None:
    run: list[str] = []
    model, backend = Model(4), counting(run)
    for block in model.blocks:
        block.compile(backend=backend, dynamic=True)
    with torch.no_grad():
        for tokens in (16, 8, 4):
            model(torch.zeros(tokens, HIDDEN), torch.zeros(3), 2)
    assert run.count("compiled") == 1
    assert run.count("ran") == 12
