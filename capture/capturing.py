"""How one bucket is captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from .buckets import Bucket
from .checking import prove_graph, verify_graph
from .cuda import DeviceGraph
from .graph import BucketGraph, GraphKey, OutputPlan, Replayable, least_replay_seconds
from .memory import free_bytes
from .modes import without_autocast_cache
from .publishing import publish
from .recorder import Recording
from .warming import Warmer

__all__ = ["Capturer"]


class Capturer(Warmer):
    """Captures buckets of one function into a generation."""

    def capture(self, bucket: Bucket, variant: Hashable = None) -> BucketGraph:
        """Warms up and captures one bucket.

        Every run, and the capture, begins with the state and the inputs that the first began with: a function that
        counts its calls, or moves on in a cache, must not be driven past its end.

        Raises:
            OutputError: the function returns something other than declared.
            Exception: whatever the function or the capture raised; the process is as it was before.
        """
        start = time.perf_counter()
        generation = self.generation
        rows, values = self.views_and_values(bucket)
        views = tuple(row[0] if row is not None else None for row in rows)
        begin = self.beginning(rows)
        if generation.lane is not None:
            generation.lane.settle_workspaces()
        with self.on_capture_stream(), torch.no_grad(), without_autocast_cache():
            numbers = generation.numbers(bucket)
            generation.set_record(numbers)
            flat = self.watched_run(values, begin)
            self.note_written(rows)
            self.refuse_python_state(bucket)
            self.prepare_outputs(flat, bucket)
            eager_seconds = self.warm_up(values, begin, bucket)
            outputs = generation.output_views(bucket) if not generation.on_cuda else ()
            plans = list(generation.output_plans or ())

            def work() -> None:
                generation.open(bucket)
                results = self.run(values)
                for position, (plan, result) in enumerate(zip(plans, results, strict=True)):
                    if plan.layout is None:
                        plans[position] = OutputPlan(None, result)
                publish(generation, results, outputs)

            if self.options.admit is not None:
                needed = self.rehearse_one(values, begin) if self.options.rehearse else 0
                self.options.admit(max(0, needed - generation.pool_bytes) + generation.largest_executable)
            begin()
            self.make_ready()
            free, grown = free_bytes(self.device), generation.pool_bytes
            graph = self._graph_of(work, [view for view in (*views, *outputs) if view is not None])
            grown = generation.pool_bytes - grown
            executable = max(0, free - free_bytes(self.device) - grown)
            try:
                replay_seconds = least_replay_seconds(
                    lambda: generation.replay(graph, numbers), self.current_stream(), begin
                )
                captured = BucketGraph(
                    key=GraphKey(variant, bucket),
                    inputs=views,
                    outputs=outputs,
                    plans=tuple(plans),
                    graph=graph,
                    capture_seconds=time.perf_counter() - start,
                    replay_seconds=replay_seconds,
                    eager_seconds=eager_seconds,
                    pool_bytes=grown,
                    executable_bytes=executable,
                    elements=sum(view.numel() for view in (*views, *outputs) if view is not None),
                )
                if self.options.verify:
                    verify_graph(self, captured, lambda: self.run(values), begin)
                if self.options.prove_padding:
                    prove_graph(self, captured, lambda: self.run(values), self.restore)
            except BaseException:
                self.settle()
                graph.reset()
                raise
        return captured

    def _graph_of(self, work: Callable[[], None], keep: list[torch.Tensor]) -> Replayable:
        generation = self.generation
        if generation.lane is None or generation.pool is None:
            own = [*keep, generation.record, generation.fills]
            return Recording(work, own, generation.outside)
        return DeviceGraph(work, generation.lane.stream, generation.pool)
