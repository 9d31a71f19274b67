"""What comes before a capture: example values, a watched run, runs that settle kernels, rehearsals."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .buckets import Bucket
from .errors import CaptureError, NotCapturableError, OutputError
from .generation import Generation
from .graph import OutputPlan
from .layout import LeafLayout, example_for_bucket, sizes_of_leaves
from .memory import give_memory_back, rehearsal
from .modes import capturing, without_autocast_cache
from .outputs import check_outputs, output_layout
from .places import storage_key
from .publishing import publish
from .spec import BucketSize, Constant, Offsets, Rows
from .state import StateSnapshot

__all__ = ["CaptureOptions", "Warmer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureOptions:
    """How a manager captures.

    Attributes:
        warmup: runs before each capture.
        verify: compare each graph with the function.
        prove_padding: prove of each graph that no padding reaches a real row.
        ignore: names of Python values that the function may set.
        admit: called right before a capture with the bytes that it is expected to add; it raises to prevent it.
        rehearse: find out these bytes by a run in a pool of its own.
    """

    warmup: int = 2
    verify: bool = False
    prove_padding: bool = False
    ignore: tuple[str, ...] = ()
    admit: Callable[[int], None] | None = None
    rehearse: bool = False


class Warmer:
    """Runs one function on one example, at the sizes of buckets; made for that example, and dropped after it.

    Args:
        fn: what is run.
        generation: where the graphs go.
        options: how to capture.
        example: one call's leaves.
        mark: called for each static view with its sized axis, or None, before the function first sees it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        generation: Generation,
        options: CaptureOptions,
        example: Sequence[Any],
        mark: Callable[[torch.Tensor, int | None], None] | None = None,
    ) -> None:
        self.device = generation.device
        self.generation = generation
        self.layouts = generation.layouts
        self.options = options
        self._fn = fn
        self._mark = mark
        self._signature = generation.signature
        self._example = tuple(example)
        self._snapshot: StateSnapshot | None = None
        #: Positions of the inputs that the function writes: on a miss it gets copies, as on a hit.
        self.written: set[int] = set()
        #: Tensors from outside that operations of the watched runs read.
        self.seen: list[torch.Tensor] = []

    @contextlib.contextmanager
    def state_preserved(self) -> Iterator[None]:
        """Puts the user's state back before every run of the function and at the end, also after an error."""
        constants = [
            value
            for leaf, value in zip(self._signature.inputs, self._example, strict=True)
            if isinstance(leaf.spec, Constant)
        ]
        generation = self.generation
        own = [*generation.inputs.storages, generation.record, generation.fills]
        self._snapshot = StateSnapshot(self._fn, self.device, constants, own, ignore=self.options.ignore)
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seen = self._snapshot.outside()
            self._snapshot.restore(everything=True)
            self._snapshot, self._example = None, ()

    def example_at(self, sizes: Bucket, *, fits: bool) -> list[torch.Tensor | None]:
        """The example's rows for each tensor leaf, repeated or cut to given sizes."""
        grid = self._signature.grid
        return [
            None if layout is None else example_for_bucket(layout, given, sizes, grid.within, fits=fits)
            for layout, given in zip(self.layouts, self._example, strict=True)
        ]

    def example_fits(self, bucket: Bucket) -> bool:
        """Whether a bucket holds the whole example."""
        return self._signature.grid.holds(bucket, sizes_of_leaves(self._signature.inputs, self._example))

    def restore(self) -> None:
        """Puts the user's state to where every run begins."""
        if self._snapshot is None:
            raise CaptureError("internal: a capture outside state_preserved")
        self._snapshot.restore()

    def beginning(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> Callable[[], None]:
        """What puts state and inputs to where every run begins."""

        def begin() -> None:
            self.restore()
            for row in rows:
                if row is not None:
                    row[0].copy_(row[1])

        return begin

    def watched_run(self, values: Sequence[Any], begin: Callable[[], None]) -> list[Any]:
        """One run under watch, which torch.compile sits out."""
        snapshot = self._snapshot
        if snapshot is None:
            raise CaptureError("internal: a capture outside state_preserved")
        begin()
        try:
            with snapshot.watching():
                return self.run(values)
        except NotCapturableError:
            raise
        except Exception:
            # Either the function fails, and does so again, or it can't be watched (torch.cond, flex_attention and
            # others compile themselves, and refuse to under a watch).
            begin()
            with snapshot.watching(declared=False):
                return self.run(values)

    def refuse_python_state(self, bucket: Bucket) -> None:
        """Raises where the function sets a Python value at every run, which a replay doesn't."""
        snapshot = self._snapshot
        if snapshot is None:
            raise CaptureError("internal: a capture outside state_preserved")

        def again() -> None:
            rows, values = self.views_and_values(bucket)
            for row in rows:
                if row is not None:
                    row[0].copy_(row[1])
            self.run(values)

        snapshot.refuse_plain_changes(again)

    def warm_up(self, values: Sequence[Any], begin: Callable[[], None], bucket: Bucket) -> float:
        """The runs that settle kernels; the least time of one."""
        generation = self.generation
        times = []
        flat: list[Any] = []
        for _ in range(self.options.warmup):
            begin()
            self.settle()
            start = time.perf_counter()
            flat = self.run(values)
            self.settle()
            times.append(time.perf_counter() - start)
        check_outputs(self.generation, flat, bucket)
        if generation.ring is not None:
            # The kernels of the graph's own nodes compile here, at the latest.
            generation.ring.write(generation.numbers(bucket))
            generation.ring.fetch()
            generation.ring.launched()
            generation.stage(bucket)
            generation.pad(bucket)
            publish(generation, flat, ())
            self.settle()
        return min(times)

    def rehearse(self, buckets: Sequence[Bucket]) -> int | None:
        """The bytes that a pool would have after these buckets, largest first; 0 on a CPU, None where runs disagree.

        The function runs in a pool of its own, which is dropped again: the allocator does there what it does in a
        capture.
        """
        self._rehearse_all(buckets)  # what is made at first use stays
        first, second = self._rehearse_all(buckets), self._rehearse_all(buckets)
        return first if first == second else None

    def _rehearse_all(self, buckets: Sequence[Bucket]) -> int:
        self.make_ready()
        with self.on_capture_stream(), torch.no_grad(), without_autocast_cache():
            prepared = [self.views_and_values(bucket) for bucket in buckets]
            with rehearsal(self.device) as taken:
                for bucket, (rows, values) in zip(buckets, prepared, strict=True):
                    self.beginning(rows)()
                    self.prepare_outputs(self.run(values), bucket)
                return taken()

    def rehearse_one(self, values: Sequence[Any], begin: Callable[[], None]) -> int:
        """The bytes that a pool takes for one run."""
        self.make_ready()
        begin()
        with rehearsal(self.device) as taken:
            self.run(values)
            return taken()

    def current_stream(self) -> torch.cuda.Stream | None:
        """The stream that runs are enqueued on; None on a CPU."""
        return torch.cuda.current_stream(self.device) if self.generation.on_cuda else None

    def settle(self) -> None:
        """Waits for the capture stream."""
        if self.generation.on_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def views_and_values(
        self, bucket: Bucket
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], list[Any]]:
        """For each leaf its static view and the example's rows for it, or None; and the function's argument."""
        examples = self.example_at(bucket, fits=self.example_fits(bucket))
        views = self.generation.views(bucket)
        rows: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        values: list[Any] = []
        for leaf, layout, given, view, example in zip(
            self._signature.inputs, self.layouts, self._example, views, examples, strict=True
        ):
            if layout is None or view is None or example is None:
                rows.append(None)
                values.append(bucket[leaf.spec.dim] if isinstance(leaf.spec, BucketSize) else given)
                continue
            if self._mark is not None:
                self._mark(view, _sized_axis(layout))
            rows.append((view, example))
            values.append(view)
        return rows, values

    def note_written(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Finds the inputs that the function wrote: by what operations declare, and by comparing bits."""
        declared = self._snapshot.own_written if self._snapshot is not None else set()
        for position, row in enumerate(rows):
            if row is not None and (storage_key(row[0]) in declared or not _same_bits(*row)):
                self.written.add(position)

    def make_ready(self) -> None:
        """Leaves the workspaces and the allocator as a capture wants them."""
        generation = self.generation
        if generation.lane is not None:
            if generation.pool is not None and not generation.graphs:
                # PyTorch takes no capture into a pool whose graphs are all gone, evicted for this one or failed.
                generation.pool.renew()
            generation.lane.settle_workspaces()
            # What warm-up left in the allocator's cache may be needed for the graph's pool.
            give_memory_back()

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs on the capture stream, alone on the device; managers called meanwhile run their functions."""
        with capturing(), self._on_stream():
            yield

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        stream = self.generation.stream
        if stream is None:
            yield
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield
        torch.cuda.synchronize(self.device)

    def run(self, values: Sequence[Any]) -> list[Any]:
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

    def prepare_outputs(self, flat: Sequence[Any], bucket: Bucket) -> None:
        """Says how outputs are handed out, once, from what the function returns for the first bucket."""
        if self.generation.output_plans is not None:
            return
        layouts: list[LeafLayout | None] = []
        for path, spec, value in zip(self._signature.output_paths, self._signature.outputs, flat, strict=True):
            layouts.append(output_layout(path, spec, value, bucket, self.device))
        self.generation.output_plans = tuple(OutputPlan(layout) for layout in layouts)


def _sized_axis(layout: LeafLayout) -> int | None:
    if isinstance(layout.spec, Rows):
        return layout.spec.axis
    return 0 if isinstance(layout.spec, Offsets) else None


def _same_bits(view: torch.Tensor, given: torch.Tensor) -> bool:
    expected = given.resolve_conj().resolve_neg().expand(view.shape).contiguous()
    return torch.equal(view.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))
