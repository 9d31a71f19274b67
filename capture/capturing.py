"""How one bucket is captured:

example values, warm-up, checks of what the function returns, and the capture itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .buckets import Bucket
from .cuda import DeviceGraph, DevicePool
from .errors import OutputError
from .graph import BucketGraph, OutputPlan, Replayable, median_replay_seconds
from .layout import LeafLayout, SharedBuffers, example_for_bucket, sizes_of_leaves
from .memory import poison_pool, pool_bytes
from .recorder import Recording
from .spec import BucketSize, Constant, InputLeaf, Offsets, Rows, Signature, Spec, Static
from .state import StateSnapshot

__all__ = ["Capturer", "autocast_state"]

# Set while this thread warms up or captures: a manager that is called meanwhile runs its function, which so
# becomes part of the outer graph.
_CAPTURING = threading.local()


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for a device, and to which dtype."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled, torch.get_autocast_dtype(device.type) if enabled else None


class Capturer:
    """Captures buckets of one function on one device, into shared static buffers and one pool.

    Args:
        fn: the function.
        signature: its declared inputs and outputs.
        layouts: of the input leaves.
        buckets: every bucket that may be captured; the buffers are as large as the largest of them needs.
        device: cpu or cuda.
        warmup: runs before each capture.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        layouts: Sequence[LeafLayout | None],
        buckets: Sequence[Bucket],
        device: torch.device,
        warmup: int,
    ) -> None:
        self.device = device
        self.layouts = tuple(layouts)
        self._fn = fn
        self._signature = signature
        self._buckets = tuple(buckets)
        self._warmup = warmup
        self.autocast = autocast_state(device)
        self._inputs = SharedBuffers(layouts, buckets)
        self._outputs: SharedBuffers | None = None
        self._output_plans: tuple[OutputPlan, ...] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = DevicePool() if device.type == "cuda" else None
        if device.type == "cuda":
            self._entered, self._left = torch.cuda.Event(), torch.cuda.Event()

    @property
    def backend(self) -> str:
        """What replays: "cuda graphs" or "cpu recorder"."""
        return "cuda graphs" if self._stream is not None else "cpu recorder"

    @property
    def static_bytes(self) -> int:
        """Bytes of the shared static buffers."""
        return self._inputs.nbytes + (self._outputs.nbytes if self._outputs is not None else 0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that the graphs share; 0 on a CPU, where recordings keep their own tensors."""
        return pool_bytes(self._pool.handle) if self._pool is not None else 0

    def poison(self) -> None:
        """Fills the graphs' shared pool with NaN, in the order of replays."""
        if self._pool is not None and self._stream is not None:
            poison_pool(self._pool.handle, self._stream)

    def inside_another_capture(self) -> bool:
        """Whether the caller is being warmed up or captured at this moment, by a manager or on its own."""
        if getattr(_CAPTURING, "depth", 0):
            return True
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def state_preserved(self) -> Iterator[None]:
        """Puts the user's state back at the end, also after an error."""
        snapshot = StateSnapshot(self._fn, self.device)
        try:
            yield
        finally:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)
            snapshot.restore()

    def on_owner_stream(self, work: Callable[[], None]) -> None:
        """Runs `work` on the owner stream, which waits for the caller's stream and is waited for.

        Graphs share library workspaces with all that was captured on the same stream, so they are replayed there and
        nowhere else. Two events made once and bare switches: the context managers cost the host about 20 us a call.
        """
        if self._stream is None:
            work()
            return
        caller = torch.cuda.current_stream()
        if caller.device != self.device:
            with torch.cuda.device(self.device):
                self.on_owner_stream(work)
            return
        self._entered.record(caller)
        self._stream.wait_event(self._entered)
        torch.cuda.set_stream(self._stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(caller)
            self._left.record(self._stream)
            caller.wait_event(self._left)

    def capture(self, bucket: Bucket, example: Sequence[Any]) -> BucketGraph:
        """Warms up and captures one bucket.

        Raises:
            OutputError: the function returns something other than declared.
            Exception: whatever the function or the capture raised; the process is as it was before.
        """
        start = time.perf_counter()
        fits = self._signature.grid.holds(bucket, sizes_of_leaves(self._signature.inputs, example))
        views: list[torch.Tensor | None] = []
        values: list[Any] = []
        for position, (leaf, layout) in enumerate(zip(self._signature.inputs, self.layouts, strict=True)):
            value, view = self._leaf_at(bucket, position, leaf, layout, example[position], fits)
            values.append(value)
            views.append(view)

        with self._on_capture_stream(), torch.no_grad(), _without_autocast_cache():
            flat: list[Any] = []
            for _ in range(self._warmup):
                flat = self._run(values)
                self._prepare_outputs(flat, bucket)
            self._check_outputs(flat, bucket)
            del flat
            plans = list(self._output_plans or ())
            buffers = self._outputs
            outputs = tuple(
                buffers.view(position, bucket) if buffers is not None and plan.layout is not None else None
                for position, plan in enumerate(plans)
            )

            def work() -> None:
                for position, (result, target) in enumerate(zip(self._run(values), outputs, strict=True)):
                    if target is not None:
                        target.copy_(result)
                    else:
                        plans[position] = OutputPlan(None, result)

            before = self.pool_bytes
            graph = self._graph_of(work, [view for view in (*views, *outputs) if view is not None])
            grown = self.pool_bytes - before
            replay_seconds = median_replay_seconds(graph, self._stream)
        return BucketGraph(
            bucket=bucket,
            inputs=tuple(views),
            outputs=outputs,
            plans=tuple(plans),
            graph=graph,
            capture_seconds=time.perf_counter() - start,
            replay_seconds=replay_seconds,
            pool_bytes=grown,
        )

    def _leaf_at(
        self,
        bucket: Bucket,
        position: int,
        leaf: InputLeaf,
        layout: LeafLayout | None,
        example: Any,
        fits: bool,
    ) -> tuple[Any, torch.Tensor | None]:
        if isinstance(leaf.spec, BucketSize):
            return bucket[leaf.spec.dim], None
        if layout is None:
            return example, None
        view = self._inputs.view(position, bucket)
        with torch.no_grad():
            values = example_for_bucket(layout, example, bucket, self._signature.grid.within, fits=fits)
            view.copy_(values)
        return view, view

    def _graph_of(self, work: Callable[[], None], keep: list[torch.Tensor]) -> Replayable:
        if self._stream is None or self._pool is None:
            return Recording(work, keep)
        # What warm-up left in the allocator's cache may be needed for the graph's pool.
        torch.cuda.empty_cache()
        return DeviceGraph(work, self._stream, self._pool)

    @contextlib.contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        _CAPTURING.depth = getattr(_CAPTURING, "depth", 0) + 1
        try:
            with self._on_stream():
                yield
        finally:
            _CAPTURING.depth -= 1

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self.device)

    def _run(self, values: Sequence[Any]) -> list[Any]:
        """The function's flat outputs."""
        result = self._fn(**self._signature.arguments(values))
        tree = self._signature.output_tree
        try:
            return tree.flatten_up_to(result)
        except ValueError as error:
            raise OutputError(
                f"the function's output, a {type(result).__name__}, does not have the declared structure ({error}): "
                "declare outputs with the structure that it returns"
            ) from None

    def _prepare_outputs(self, flat: Sequence[Any], bucket: Bucket) -> None:
        """Makes the static output buffers, once, from what the function returns for the first bucket."""
        if self._output_plans is not None:
            return
        layouts: list[LeafLayout | None] = []
        for path, spec, value in zip(self._signature.output_paths, self._signature.outputs, flat, strict=True):
            layouts.append(_output_layout(path, spec, value, bucket, self.device))
        buffers = SharedBuffers(layouts, self._buckets)
        self._outputs = buffers
        self._output_plans = tuple(OutputPlan(layout) for layout in layouts)

    def _check_outputs(self, flat: Sequence[Any], bucket: Bucket) -> None:
        for plan, path, value in zip(self._output_plans or (), self._signature.output_paths, flat, strict=True):
            if plan.layout is None:
                continue
            expected = plan.layout.full_shape(bucket)
            if (
                not isinstance(value, torch.Tensor)
                or tuple(value.shape) != expected
                or value.dtype != plan.layout.dtype
            ):
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise OutputError(f"{path} at {bucket} must be {plan.layout.dtype} {list(expected)}, got {got}")


def _output_layout(
    path: str, spec: Spec | None, value: Any, bucket: Bucket, device: torch.device
) -> LeafLayout | None:
    if spec is None:
        if value is not None:
            raise OutputError(f"{path} is declared as None, got {type(value).__name__}: declare its spec")
        return None
    if isinstance(spec, Constant):
        if isinstance(value, torch.Tensor):
            raise OutputError(
                f"{path} is declared constant but is a tensor: declare rows or static, so that it is copied out"
            )
        return None
    if not isinstance(value, torch.Tensor):
        raise OutputError(
            f"{path} must be a tensor, got {type(value).__name__}: declare constant() for other values"
        )
    if value.device != device:
        raise OutputError(f"{path} is on {value.device}, the inputs are on {device}")
    shape = tuple(value.shape)
    if isinstance(spec, Rows):
        rows = bucket[spec.dim] // spec.per
        if len(shape) <= spec.axis or shape[spec.axis] != rows:
            raise OutputError(
                f"{path} must have {rows} rows along axis {spec.axis} at {bucket} (one per {spec.per} of "
                f"{spec.dim!r}), got shape {list(shape)}"
            )
        shape = shape[: spec.axis] + shape[spec.axis + 1 :]
    elif isinstance(spec, Offsets):
        shape = ()
    elif not isinstance(spec, Static):
        raise OutputError(f"{path} has a spec that outputs cannot have: {spec!r}")
    return LeafLayout(path, spec, value.dtype, device, shape)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast keeps cast weights for reuse; those made inside a capture live in its pool and must not leak."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
