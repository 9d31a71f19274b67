"""torch.compile and capture: one compilation whose kernels every bucket is captured from.

Nothing is compiled while serving. `CompiledFunction` compiles in the warm-up of the first bucket and is run for
captures alone; a call that no graph serves runs the function itself. A function that the user has compiled runs
what it has compiled already, and eagerly where it would compile anew.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ._compat import (
    compiler_backend,
    compiler_callback,
    compiler_stance,
    graph_break_reasons,
    without_duck_shapes,
)
from .errors import SpecError

__all__ = [
    "CompiledFunction",
    "eagerly",
    "is_compiled",
    "mark",
    "own_graphs",
    "refuse_own_graphs",
    "run_without_recompiling",
]


class CompiledFunction:
    """A function compiled once for all sizes of its inputs, for use in captures.

    Sizes are dynamic from the first call on, and so are Python ints. Two sizes that are equal in the first call (as
    many tokens as the hidden width) are not taken for one. Sizes 0 and 1 are compiled apart, as PyTorch does with
    every dynamic size. Inductor makes no CUDA graphs of its own.

    Args:
        fn: the function, bound method or module.
        backend: the name of a backend of torch.compile, or one.
        options: of Inductor.

    Raises:
        SpecError: the function is compiled already, or the options ask for Inductor's own CUDA graphs.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: str | Callable[[Any, Any], Any] = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if is_compiled(fn):
            raise SpecError(
                "compile=True with a function that is compiled already: give the function itself, or leave compile out"
            )
        options = {"triton.cudagraphs": False, **(options or {})}
        if options["triton.cudagraphs"]:
            raise SpecError(
                "options ask for Inductor's own CUDA graphs (triton.cudagraphs), which can't lie inside a captured "
                "graph: leave that option out"
            )
        self._fn = fn
        self._backend = backend
        self._options = options
        self._compiled: Callable[..., Any] | None = None
        # In a counter, since state snapshots put plain attributes back.
        self._counts: collections.Counter[str] = collections.Counter()
        self._reasons: collections.Counter[str] = collections.Counter()

    @property
    def compilations(self) -> int:
        """Graphs that the backend has compiled."""
        return self._counts["compilations"]

    @property
    def compiling_calls(self) -> int:
        """Calls in which something was compiled: 1 where one compilation serves all buckets."""
        return self._counts["compiling_calls"]

    @property
    def graphs_per_call(self) -> int:
        """Compiled graphs that the last call ran: 0 where it ran eagerly, more than 1 with graph breaks."""
        return self._counts["graphs_per_call"]

    @property
    def graph_breaks(self) -> int:
        """Breaks between the compiled graphs of the last call; the captured graph holds what lies between too."""
        return max(0, self.graphs_per_call - 1)

    @property
    def graph_break_reasons(self) -> tuple[str, ...]:
        """Why Dynamo broke graphs, as far as it says."""
        return tuple(self._reasons)

    def __call__(self, **kwargs: Any) -> Any:
        """Runs the function, compiled; under a dispatch mode, which Dynamo doesn't compile for, as it is."""
        if is_in_torch_dispatch_mode():
            # Dynamo would leave the function's code uncompiled for good.
            return self._fn(**kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._fn, backend=self._counting_backend(), dynamic=True)
        compiled, reasons = self.compilations, graph_break_reasons()
        self._counts["graphs_per_call"] = 0
        with without_duck_shapes():
            result = self._compiled(**kwargs)
        self._counts["compiling_calls"] += self.compilations > compiled
        self._reasons += collections.Counter(graph_break_reasons()) - collections.Counter(reasons)
        return result

    def _counting_backend(self) -> Callable[[Any, Any], Any]:
        backend = self._backend
        compile_graph = compiler_backend(backend, self._options) if isinstance(backend, str) else backend
        counts = self._counts

        def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
            run = compile_graph(graph, inputs)
            counts["compilations"] += 1  # after it, since Dynamo may start over with another graph

            @functools.wraps(run)
            def counted(*args: Any) -> Any:
                counts["graphs_per_call"] += 1
                return run(*args)

            return counted

        return counting


def mark(view: torch.Tensor, sized_axis: int | None) -> None:
    """Says of an input that its size may change between buckets along one axis alone.

    Args:
        view: a bucket's view of a static buffer; each is marked anew.
        sized_axis: the axis, or None.
    """
    static = [axis for axis in range(view.dim()) if axis != sized_axis]
    torch._dynamo.mark_static(view, static)  # type: ignore[no-untyped-call, unused-ignore]


def is_compiled(fn: object) -> bool:
    """Whether torch.compile has made or changed it: its result, a method of that, or a module after `.compile()`."""
    return next(_compiled_parts(fn, inside=False), None) is not None


def own_graphs(fn: object) -> str | None:
    """Says how a function, or a module in it, asks for CUDA graphs of torch.compile's own; None if it doesn't."""
    for compiled in _compiled_parts(fn, inside=True):
        config = getattr(compiled, "get_compiler_config", lambda: None)()
        if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
            return 'a mode such as "reduce-overhead" or "max-autotune", or the option triton.cudagraphs'
        if getattr(compiler_callback(compiled), "compiler_name", None) == "cudagraphs":
            return 'the backend "cudagraphs"'
    return None


def refuse_own_graphs(fn: object) -> None:
    """Refuses a function that captures itself.

    Raises:
        SpecError: torch.compile was told to make CUDA graphs of its own for it.
    """
    found = own_graphs(fn)
    if found is not None:
        raise SpecError(
            f"the function is compiled with {found}: it makes CUDA graphs of its own, which can't lie inside a "
            'captured graph; compile it with the default mode or with mode="max-autotune-no-cudagraphs"'
        )


def _compiled_parts(fn: object, *, inside: bool) -> Iterator[object]:
    """What torch.compile made of a function: itself, or what it calls; with `inside` its submodules too."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        for module in torch.nn.Module.modules(fn) if inside else (fn,):
            if "get_compiler_config" in vars(module):
                yield module
            compiled = vars(module).get("_compiled_call_impl")
            if compiled is not None:
                yield compiled
        return
    function = fn.__func__ if isinstance(fn, types.MethodType) else fn
    if isinstance(function, types.FunctionType) and "get_compiler_config" in vars(function):
        yield function
    if inside and isinstance(fn, types.MethodType):
        owner = fn.__self__
        held = [owner, *getattr(owner, "__dict__", {}).values()]
        for module in held:
            if isinstance(module, torch.nn.Module):
                yield from _compiled_parts(module, inside=True)


class _Stances:
    """What the threads of this process ask of torch.compile, whose stance is the whole process's.

    The strictest request holds until the last is withdrawn; then what was set before holds again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: collections.Counter[str] = collections.Counter()
        self._outer: Any = None

    @contextlib.contextmanager
    def asked(self, stance: str) -> Iterator[None]:
        with self._lock:
            self._asked[stance] += 1
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._asked[stance] -= 1
                self._apply()

    def _apply(self) -> None:
        wanted = next((s for s in ("force_eager", "eager_on_recompile") if self._asked[s]), None)
        if self._outer is None:
            if wanted is not None:
                self._outer = torch.compiler.set_stance(wanted)  # type: ignore[no-untyped-call, unused-ignore]
        elif wanted is not None:
            torch.compiler.set_stance(wanted)  # type: ignore[no-untyped-call, unused-ignore]
        else:
            outer, self._outer = self._outer, None
            outer.__exit__(None, None, None)


_STANCES = _Stances()


def eagerly() -> contextlib.AbstractContextManager[None]:
    """While open, compiled functions run as what they were compiled from, in this process.

    Under a dispatch mode they would do so too, and Dynamo would leave their code uncompiled for good.
    """
    return _STANCES.asked("force_eager")


def run_without_recompiling(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function that the user has compiled, in whole or in part: compiled where it fits, else eagerly.

    While it runs, nothing is compiled in any thread. A stance that the user has set stays.
    """
    if "torch._dynamo" not in sys.modules:  # so that nothing is compiled; and it takes seconds to import
        return fn(**kwargs)
    if compiler_stance() not in ("default", "eager_on_recompile"):
        return fn(**kwargs)
    with _STANCES.asked("eager_on_recompile"):
        return fn(**kwargs)
