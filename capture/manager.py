"""`CaptureManager`: one graph per bucket, behind a call that pads, replays and slices; on a miss, the function.

On CUDA tensors the buckets are CUDA graphs in one shared pool; on CPU tensors the recorder stands in their
place with the same contract. Staging, replay and copy-out of one call are one critical section, so any thread
may call.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .buckets import Bucket, BucketGrid
from .capturing import Capturer, autocast_state
from .constants import frozen_constant, same_constant
from .cuda import CAPTURE_LOCK
from .errors import CallError, CallGradientError, CaptureError, CaptureFailedError, SpecError
from .graph import BucketGraph, allocate_outputs, copy_out, stage
from .layout import LeafLayout, check_leaf, layout_of_example, sizes_of_leaves
from .progress import progress_bar
from .report import CallExplanation, Report, bucket_report
from .spec import Constant, Rows, Signature

__all__ = ["CaptureManager"]


class CaptureManager:
    """Captures a function once per bucket and replays the graph that fits a call.

    The result of a call equals running the function on its inputs padded to the bucket and cutting the padding
    off, whatever ran between. Results are copies: no later call changes them. A call that no bucket holds runs
    the function on the inputs as they are, and is counted as a miss.

    Args:
        fn: a function, bound method or module. It is called with the declared names as keywords, under no_grad.
            It must not wait for the device, read values from tensors, or make tensors from Python data.
        inputs: argument name to a pytree of specs (`rows`, `offsets`, `bucket_size`, `static`, `constant`).
        outputs: a pytree of specs with the structure of what `fn` returns; None where it returns None.
        buckets: the grid of named sizes.
        warmup: runs before each capture, so that lazily compiled and tuned kernels are settled; at least 2.

    Raises:
        SpecError: specs that do not fit the grid.

    Example:
        >>> import torch
        >>> from mmgraph.capture import BucketGrid, CaptureManager, rows
        >>> weight = torch.ones(4, 2)
        >>> grid = BucketGrid(tokens=(8, 16))
        >>> spec = rows("tokens")
        >>> graphs = CaptureManager(lambda x: x @ weight, inputs={"x": spec}, outputs=spec, buckets=grid)
        >>> _ = graphs.precompile(example={"x": torch.randn(3, 4)}, progress=False)
        >>> graphs(x=torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    #: State snapshots do not look inside: static buffers are nobody's state.
    holds_captured_graphs = True

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        inputs: Mapping[str, Any],
        outputs: Any,
        buckets: BucketGrid,
        warmup: int = 2,
    ) -> None:
        if not callable(fn):
            raise SpecError(f"fn must be callable, got {fn!r}")
        if not isinstance(buckets, BucketGrid):
            raise SpecError(f"buckets must be a BucketGrid, got {buckets!r}")
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 2:
            raise SpecError(f"warmup must be an integer of at least 2, got {warmup!r}")
        _check_parameters(fn, inputs)
        self._fn = fn
        self._signature = Signature(inputs, outputs, buckets)
        self._grid = self._signature.grid
        self._warmup = warmup
        self._lock = threading.RLock()
        # A replay cannot be traced into a compiled graph: torch.compile runs the call as it is.
        self._entry = torch.compiler.disable(self._call)
        self._calls = 0
        self._misses: Counter[str] = Counter()
        self._layouts: tuple[LeafLayout | None, ...] | None = None
        self._constants: dict[int, Any] = {}
        self._graphs: dict[Bucket, BucketGraph] = {}
        self._capturer: Capturer | None = None
        self._written: set[int] = set()  # positions of inputs that captures have shown the function to write

    def precompile(
        self, example: Mapping[str, Any], *, progress: bool = True, buckets: list[Bucket] | None = None
    ) -> CaptureManager:
        """Captures every bucket, largest first.

        Called again, it drops what was captured, so that memory is not needed twice, and captures all of it
        anew. The state that the function changes (buffers, caches, random generators) is afterwards what it was
        before.
        Calls from other threads wait until it is done: what they changed meanwhile would be put back.

        Args:
            example: one real call's arguments, of any sizes: dtypes, trailing shapes, the device and constants
                come from it. Warm-up and capture run on its rows, repeated to the bucket's size; integers,
                which may point at other rows, give way to their fill in buckets that don't hold the whole
                example. So a fill must be a value that the function can take, as it must for padding.
            progress: show a progress bar.
            buckets: only these of the grid's buckets.

        Returns:
            The manager itself.

        Raises:
            CallError: the example does not fit the declaration.
            OutputError: the function returns something other than declared.
            CaptureFailedError: a bucket could not be captured; those that this call captured before it are kept
                and work.
        """
        if not isinstance(example, Mapping):
            raise CallError(f"example must map the declared names to one call's arguments, got {example!r}")
        leaves = self._signature.bind((), example)
        self._refuse_gradients(leaves)
        sizes = sizes_of_leaves(self._signature.inputs, leaves)
        device = self._device_of(leaves)
        layouts = tuple(
            layout_of_example(leaf, value, device)
            for leaf, value in zip(self._signature.inputs, leaves, strict=True)
        )
        self._check_divisible(sizes)
        chosen = self._grid.buckets if buckets is None else tuple(buckets)
        if not chosen or any(bucket not in self._grid.buckets for bucket in chosen):
            raise SpecError(f"buckets must be some of the grid's {len(self._grid)} buckets, got {buckets}")
        # The capture lock comes first, as everywhere, so that a function which calls another manager cannot
        # deadlock with it.
        with CAPTURE_LOCK, self._lock, torch.no_grad():
            self._drop_graphs()
            self._layouts = layouts
            self._constants = {
                position: frozen_constant(leaf.path, value)
                for position, (leaf, value) in enumerate(zip(self._signature.inputs, leaves, strict=True))
                if isinstance(leaf.spec, Constant)
            }
            self._capturer = Capturer(self._fn, self._signature, layouts, chosen, device, self._warmup, leaves)
            order = sorted(chosen, key=lambda b: tuple(b[name] for name in self._grid.names), reverse=True)
            with self._capturer.state_preserved(), progress_bar(progress, len(order)) as advance:
                for bucket in order:
                    try:
                        self._graphs[bucket] = self._capturer.capture(bucket)
                    except Exception as error:
                        raise CaptureFailedError(
                            f"{bucket} could not be captured ({type(error).__name__}: {error}); "
                            f"{len(self._graphs)} of {len(order)} buckets are captured and usable, calls that need "
                            "others run eagerly",
                            bucket,
                        ) from error
                    finally:
                        self._written |= self._capturer.written
                    advance(bucket)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result for these arguments: from a graph where a bucket holds them, else run eagerly.

        Args:
            *args: the declared inputs by position, in the order declared.
            **kwargs: the declared inputs by name.

        Raises:
            CallError: a missing or unknown argument, or one of a wrong kind, dtype, device or shape.
            CallGradientError: an input needs a gradient and gradients are recorded.
        """
        return self._entry(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._signature.bind(args, kwargs)
        with self._lock:
            sizes, bucket, reason = self._resolve(leaves)
            if bucket is not None and not reason:
                return self._replay(self._graphs[bucket], leaves, sizes)
            self._calls += 1
            self._misses[reason.partition(":")[0]] += 1
            for position in self._written:
                leaves[position] = leaves[position].clone()
        # Outside the lock: a function on its own needs none of the manager's storage.
        with torch.no_grad():
            return self._fn(**self._signature.arguments(leaves))

    def explain_call(self, *args: Any, **kwargs: Any) -> CallExplanation:
        """Which bucket a call with these arguments would replay, or why it would run eagerly.

        Counts nothing.
        """
        leaves = self._signature.bind(args, kwargs)
        with self._lock:
            sizes, bucket, reason = self._resolve(leaves)
        padding = {}
        if bucket is not None and not reason:
            padding = {
                name: 1 - sizes[name] / bucket[name] if bucket[name] else 0.0
                for name in bucket
                if name not in self._grid.within
            }
        return CallExplanation(not reason, sizes, bucket, reason, padding)

    def report(self) -> Report:
        """Hits, misses, padding, bytes and times so far."""
        with self._lock:
            rows = tuple(
                bucket_report(self._graphs[b], self._grid.within)
                for b in self._grid.buckets
                if b in self._graphs
            )
            capturer = self._capturer
            return Report(
                device=str(capturer.device) if capturer else None,
                backend=capturer.backend if capturer else "none",
                calls=self._calls,
                hits=self._calls - sum(self._misses.values()),
                misses=dict(self._misses),
                buckets=rows,
                dropped=tuple((dict(d.bucket), d.reason) for d in self._grid.dropped),
                static_bytes=capturer.static_bytes if capturer else 0,
                pool_bytes=capturer.pool_bytes if capturer else 0,
            )

    def poison(self) -> None:
        """Fills the memory of all graphs' intermediates with NaN: for tests, since no result may change by it.

        On a CPU there is nothing to do, since the recorder does it before every replay.
        """
        with self._lock:
            if self._capturer is not None:
                self._capturer.poison()

    def close(self) -> None:
        """Drops every graph and buffer; later calls run eagerly."""
        with self._lock:
            self._drop_graphs()

    def _resolve(self, leaves: list[Any]) -> tuple[dict[str, int], Bucket | None, str]:
        """The call's sizes, its bucket, and why it misses (empty for a hit).

        Raises where the arguments are wrong.
        """
        self._refuse_gradients(leaves)
        sizes = sizes_of_leaves(self._signature.inputs, leaves)
        layouts = self._layouts
        for layout, value in zip(layouts or (), leaves, strict=layouts is not None):
            if layout is not None:
                check_leaf(layout, value)
        self._check_divisible(sizes)
        if layouts is None:
            return sizes, None, "not precompiled"
        for position, value in self._constants.items():
            path = self._signature.inputs[position].path
            if not same_constant(value, leaves[position]):
                return sizes, None, f"constant changed: {path}"
        bucket = self._grid.choose(sizes)
        if bucket is None:
            return sizes, None, f"beyond the grid: {self._grid.why_none(sizes)}"
        if bucket not in self._graphs:
            larger = (b for b in self._grid.buckets if b in self._graphs and self._grid.holds(b, sizes))
            found = min(larger, key=lambda b: self._graphs[b].elements, default=None)
            if found is None:
                return sizes, bucket, f"not captured: {bucket}"
            bucket = found
        capturer = self._require_capturer()
        if capturer.inside_another_capture():
            return sizes, bucket, "inside another capture: the function becomes part of it"
        if (now := autocast_state(capturer.device)) != capturer.autocast:
            return sizes, bucket, f"autocast differs: captured under {capturer.autocast}, called under {now}"
        return sizes, bucket, ""

    def _replay(self, graph: BucketGraph, leaves: list[Any], sizes: Mapping[str, int]) -> Any:
        capturer = self._require_capturer()
        # From the caller's stream, so that freeing and reusing a result needs no mark on another stream.
        results = allocate_outputs(graph, sizes)

        def work() -> None:
            stage(graph, capturer.layouts, leaves, sizes)
            graph.graph.replay()
            copy_out(graph, sizes, results)

        with torch.no_grad():
            capturer.on_owner_stream(work)
        self._calls += 1
        graph.count(sizes)
        values = [
            copy.deepcopy(plan.value) if plan.layout is None else result
            for plan, result in zip(graph.plans, results, strict=True)
        ]
        return pytree.tree_unflatten(values, self._signature.output_tree)

    def _require_capturer(self) -> Capturer:
        if self._capturer is None:
            raise CaptureError("internal: graphs without what captured them")
        return self._capturer

    def _drop_graphs(self) -> None:
        if self._capturer is not None:
            self._capturer.settle()
        for graph in self._graphs.values():
            graph.graph.reset()
        self._graphs.clear()
        self._layouts = None
        self._capturer = None
        self._constants = {}

    def _device_of(self, leaves: list[Any]) -> torch.device:
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if device is None:
            raise CallError(
                "the example has no tensor, so there is no device to capture on: give at least one tensor input"
            )
        if device.type not in ("cpu", "cuda"):
            raise CallError(f"graphs are captured on cuda, or recorded on cpu, got inputs on {device}")
        return device

    def _check_divisible(self, sizes: Mapping[str, int]) -> None:
        for path, spec in zip(self._signature.output_paths, self._signature.outputs, strict=True):
            if isinstance(spec, Rows) and spec.dim in sizes and sizes[spec.dim] % spec.per:
                raise CallError(
                    f"{spec.dim}={sizes[spec.dim]} is not a multiple of {spec.per}, "
                    f"which {path} needs for its rows (one per {spec.per})"
                )

    def _refuse_gradients(self, leaves: list[Any]) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf, value in zip(self._signature.inputs, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise CallGradientError(
                    f"{leaf.path} needs a gradient, and a replay records none: pass {leaf.path}.detach(), or call "
                    "under torch.no_grad() or torch.inference_mode(); for training call the function itself"
                )


def _check_parameters(fn: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Raises SpecError for a declared name that the function does not take, where its parameters can be read."""
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters
    except Exception:  # a builtin, which has none to read, or an object whose own code fails
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in inputs if name not in named]
    if unknown:
        raise SpecError(
            f"the function has no parameter {unknown[0]!r}: inputs are passed by name, and its parameters are {named}"
        )
