"""How one bucket is captured.

Example values, warm-up, checks of what the function returns, and the capture itself.
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
from .errors import CaptureError, NotCapturableError, OutputError
from .graph import BucketGraph, OutputPlan, Replayable, median_replay_seconds
from .layout import LeafLayout, SharedBuffers, example_for_bucket, sizes_of_leaves
from .memory import poison_pool, pool_bytes
from .outputs import output_layout, refuse_tensors
from .recorder import OutsideMemory, Recording
from .spec import BucketSize, Constant, Signature
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
        example: one call's leaves.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        layouts: Sequence[LeafLayout | None],
        buckets: Sequence[Bucket],
        device: torch.device,
        warmup: int,
        example: Sequence[Any],
    ) -> None:
        self.device = device
        self.layouts = tuple(layouts)
        self._fn = fn
        self._signature = signature
        self._buckets = tuple(buckets)
        self._warmup = warmup
        self._example = tuple(example)
        self._snapshot: StateSnapshot | None = None
        self._outside = OutsideMemory()
        #: Positions of the inputs that the function writes: on a miss it gets copies, as on a hit.
        self.written: set[int] = set()
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
        """Puts the user's state back before every run of the function and at the end, also after an error."""
        constants = [
            value
            for leaf, value in zip(self._signature.inputs, self._example, strict=True)
            if isinstance(leaf.spec, Constant)
        ]
        self._snapshot = StateSnapshot(self._fn, self.device, constants, self._inputs.storages)
        try:
            yield
        finally:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)
            self._snapshot.restore(everything=True)
            self._snapshot, self._example = None, ()

    def settle(self) -> None:
        """Waits until no replay is under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def on_owner_stream(self, work: Callable[[], None]) -> None:
        """Runs `work` on the owner stream, which waits for the caller's stream and is waited for.

        Graphs share library workspaces with all that was captured on the same stream, so they are replayed
        there and nowhere else. Two events made once and bare switches cost the host less than the context
        managers do.
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

    def capture(self, bucket: Bucket) -> BucketGraph:
        """Warms up and captures one bucket.

        Every run, and the capture, begins with the state and the inputs that the first began with: a function that
        counts its calls, or moves on in a cache, must not be driven past its end.

        Raises:
            OutputError: the function returns something other than declared.
            Exception: whatever the function or the capture raised; the process is as it was before.
        """
        start = time.perf_counter()
        rows, values = self._example_at(bucket)
        views = tuple(row[0] if row is not None else None for row in rows)

        snapshot = self._snapshot
        if snapshot is None:
            raise CaptureError("internal: a capture outside state_preserved")

        def begin() -> None:
            snapshot.restore()
            for row in rows:
                if row is not None:
                    row[0].copy_(row[1])

        with self._on_capture_stream(), torch.no_grad(), _without_autocast_cache():
            # One run under watch, which torch.compile sits out, then those that settle kernels.
            begin()
            try:
                with snapshot.watching():
                    flat = self._run(values)
            except NotCapturableError:
                raise
            except Exception:
                # Either the function fails, and does so again, or it can't be watched (torch.cond, flex_attention and
                # others compile themselves, and refuse to under a watch).
                begin()
                with snapshot.watching(declared=False):
                    flat = self._run(values)
            self._note_written(rows)
            self._prepare_outputs(flat, bucket)
            for _ in range(self._warmup):
                begin()
                flat = self._run(values)
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

            begin()
            before = self.pool_bytes
            graph = self._graph_of(work, [view for view in (*views, *outputs) if view is not None])
            grown = self.pool_bytes - before
            replay_seconds = median_replay_seconds(graph, self._stream, begin)
        return BucketGraph(
            bucket=bucket,
            inputs=views,
            outputs=outputs,
            plans=tuple(plans),
            graph=graph,
            capture_seconds=time.perf_counter() - start,
            replay_seconds=replay_seconds,
            pool_bytes=grown,
        )

    def _example_at(self, bucket: Bucket) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], list[Any]]:
        """For each leaf its static view and the example's rows for it, or None; and the function's argument."""
        grid = self._signature.grid
        fits = grid.holds(bucket, sizes_of_leaves(self._signature.inputs, self._example))
        rows: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        values: list[Any] = []
        for position, (leaf, layout) in enumerate(zip(self._signature.inputs, self.layouts, strict=True)):
            given = self._example[position]
            if layout is None:
                rows.append(None)
                values.append(bucket[leaf.spec.dim] if isinstance(leaf.spec, BucketSize) else given)
                continue
            view = self._inputs.view(position, bucket)
            rows.append((view, example_for_bucket(layout, given, bucket, grid.within, fits=fits)))
            values.append(view)
        return rows, values

    def _note_written(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Finds the inputs that the function wrote, by comparing bits with what it was given."""
        for position, row in enumerate(rows):
            if row is not None and not _same_bits(*row):
                self.written.add(position)

    def _graph_of(self, work: Callable[[], None], keep: list[torch.Tensor]) -> Replayable:
        if self._stream is None or self._pool is None:
            return Recording(work, keep, self._outside)
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
            layouts.append(output_layout(path, spec, value, bucket, self.device))
        buffers = SharedBuffers(layouts, self._buckets)
        self._outputs = buffers
        self._output_plans = tuple(OutputPlan(layout) for layout in layouts)

    def _check_outputs(self, flat: Sequence[Any], bucket: Bucket) -> None:
        paths, specs = self._signature.output_paths, self._signature.outputs
        for plan, path, spec, value in zip(self._output_plans or (), paths, specs, flat, strict=True):
            if plan.layout is None:
                refuse_tensors(path, spec, value)
                continue
            expected = plan.layout.full_shape(bucket)
            if (
                not isinstance(value, torch.Tensor)
                or tuple(value.shape) != expected
                or value.dtype != plan.layout.dtype
            ):
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise OutputError(f"{path} at {bucket} must be {plan.layout.dtype} {list(expected)}, got {got}")


def _same_bits(view: torch.Tensor, given: torch.Tensor) -> bool:
    expected = given.resolve_conj().resolve_neg().expand(view.shape).contiguous()
    return torch.equal(view.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast keeps cast weights for reuse; those made inside a capture live in its pool and must not leak."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
