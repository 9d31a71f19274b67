"""What a manager did, as a table or as JSON.

Per bucket hits, padding, bytes and replay time, and every kind of miss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from .graph import BucketGraph
from .metrics import HistogramSnapshot

if TYPE_CHECKING:
    from .core import Core

__all__ = ["BucketReport", "CallExplanation", "Report", "report_of"]


@dataclass(frozen=True)
class CallExplanation:
    """What a call with these arguments would do.

    Attributes:
        hit: whether a graph would be replayed.
        sizes: the call's named sizes.
        bucket: the bucket's sizes, or None.
        reason: for a miss, why; else empty.
        padding: for a hit, the share of each size that is padding, 0 to 1.
    """

    hit: bool
    sizes: Mapping[str, int]
    bucket: Mapping[str, int] | None
    reason: str
    padding: Mapping[str, float]


@dataclass(frozen=True)
class BucketReport:
    """One captured bucket.

    Attributes:
        bucket: its sizes.
        variant: the variant's name as text, or None.
        hits: how many calls it served.
        padding: of each size, the share of all rows replayed so far that was padding, 0 to 1; 0 before the
            first hit.
        static_bytes: the bytes of its views into the shared static buffers.
        pool_bytes: what the shared pool grew by when it was captured.
        executable_bytes: what free device memory lost to the executable graph, beside the pool; the driver takes
            memory in large pieces, so that many graphs show 0.
        capture_seconds: warm-up and capture.
        replay_seconds: the least wall time of a few replays right after the capture, each waited for.
        eager_seconds: the least wall time of the function at the bucket's sizes, likewise.
        nodes: recorded operations, on a CPU; None for device graphs.
    """

    bucket: Mapping[str, int]
    variant: str | None
    hits: int
    padding: Mapping[str, float]
    static_bytes: int
    pool_bytes: int
    executable_bytes: int
    capture_seconds: float
    replay_seconds: float
    eager_seconds: float
    nodes: int | None


def bucket_report(graph: BucketGraph, without: Collection[str]) -> BucketReport:
    """The account of one captured bucket; sizes in `without` aren't padded and have no share."""
    padding = {
        name: (1 - graph.real.get(name, 0) / (graph.hits * size)) if graph.hits and size else 0.0
        for name, size in graph.bucket.items()
        if name not in without
    }
    tensors = [tensor for tensor in (*graph.inputs, *graph.outputs) if tensor is not None]
    variant = graph.key.variant
    return BucketReport(
        bucket=dict(graph.bucket),
        variant=None if variant is None else str(variant),
        hits=graph.hits,
        padding=padding,
        static_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        pool_bytes=graph.pool_bytes,
        executable_bytes=graph.executable_bytes,
        capture_seconds=graph.capture_seconds,
        replay_seconds=graph.replay_seconds,
        eager_seconds=graph.eager_seconds,
        nodes=getattr(graph.graph, "num_operations", None),
    )


def report_of(core: Core) -> Report:
    """A manager's counters now. Its lock is held."""
    store, grid = core.store, core.grid
    generations = store.generations if store is not None else []
    graphs = [graph for generation in generations for graph in generation.graphs.values()]
    order = {bucket: index for index, bucket in enumerate(grid.buckets)}
    graphs.sort(key=lambda g: (str(g.key.variant or ""), order.get(g.bucket, len(order))))
    counted = [name for name in grid.names if name not in grid.within]
    backend = "none"
    if generations:
        backend = "cuda graphs" if generations[0].on_cuda else "cpu recorder"
    return Report(
        device=str(core.device) if generations else None,
        backend=backend,
        calls=core.calls,
        hits=core.calls - sum(core.misses.values()),
        misses=dict(core.misses),
        buckets=tuple(bucket_report(graph, grid.within) for graph in graphs),
        dropped=tuple((dict(d.bucket), d.reason) for d in grid.dropped),
        real_rows={name: core.past.real[name] + sum(g.real.get(name, 0) for g in graphs) for name in counted},
        padded_rows={
            name: core.past.padded[name] + sum(g.hits * g.bucket[name] - g.real.get(name, 0) for g in graphs)
            for name in counted
        },
        watched=sum(v.guard.num_watched for v in store.variants.values() if v.guard is not None)
        if store
        else 0,
        evicted=core.past.evicted,
        compilations=core.compiled.compilations if core.compiled is not None else 0,
        graph_breaks=core.compiled.graph_breaks if core.compiled is not None else 0,
        generations=len(generations),
        static_bytes=sum(g.static_bytes for g in generations),
        pool_bytes=sum(g.pool_bytes for g in generations),
        executable_bytes=sum(g.executable_bytes for g in generations),
        workspace_bytes=sum(g.workspace_bytes for g in generations),
        replay_time=core.timer.snapshot() if core.timer is not None and core.options.time_every else None,
    )


@dataclass(frozen=True)
class Report:
    """A manager's counters at one moment.

    Attributes:
        device: where the graphs live, or None where there are none.
        backend: "cuda graphs", "cpu recorder" or "none".
        calls, hits: all calls, and those that replayed a graph.
        misses: reason to count; their sum is calls - hits.
        buckets: the captured ones, smallest first.
        dropped: grid points without a graph, with the reason.
        real_rows, padded_rows: by size, sums over all hits.
        watched: tensors that are checked for replacement.
        evicted: graphs that made room for others.
        compilations: graphs that Inductor compiled, with `compile=True`.
        graph_breaks: breaks between the compiled parts of a call, with `compile=True`.
        generations: pools with their graphs.
        static_bytes: of all shared static buffers; not the sum over buckets, which share them.
        pool_bytes: of the pools that the graphs share; 0 on a CPU.
        executable_bytes: of executable graphs, as far as measured.
        workspace_bytes: of the libraries' workspaces for captures.
        replay_time: sampled device times of replays, where `time_every` asks for them.
    """

    device: str | None
    backend: str
    calls: int
    hits: int
    misses: Mapping[str, int]
    buckets: tuple[BucketReport, ...]
    dropped: tuple[tuple[Mapping[str, int], str], ...]
    real_rows: Mapping[str, int]
    padded_rows: Mapping[str, int]
    watched: int
    evicted: int
    compilations: int
    graph_breaks: int
    generations: int
    static_bytes: int
    pool_bytes: int
    executable_bytes: int
    workspace_bytes: int
    replay_time: HistogramSnapshot | None

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for `json.dumps`."""
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        missed = ", ".join(f"{count} {reason}" for reason, count in self.misses.items()) or "none"
        table = Table(
            title=f"{self.backend}: {self.calls} calls, {self.hits} hits, misses: {missed}",
            caption=f"static buffers {_bytes(self.static_bytes)}, pool {_bytes(self.pool_bytes)}, "
            f"executables {_bytes(self.executable_bytes)}, workspaces {_bytes(self.workspace_bytes)}, "
            f"{len(self.dropped)} grid points dropped, {self.evicted} graphs evicted",
        )
        for column in (
            "bucket",
            "hits",
            "padding",
            "static",
            "pool +",
            "executable",
            "capture",
            "replay",
            "eager",
        ):
            table.add_column(column, justify="left" if column == "bucket" else "right")
        for row in self.buckets:
            table.add_row(
                ("" if row.variant is None else f"{row.variant}: ")
                + ", ".join(f"{name}={size}" for name, size in row.bucket.items()),
                str(row.hits),
                ", ".join(f"{name} {share:.0%}" for name, share in row.padding.items()) if row.hits else "",
                _bytes(row.static_bytes),
                _bytes(row.pool_bytes),
                _bytes(row.executable_bytes),
                f"{row.capture_seconds:.2f} s",
                f"{row.replay_seconds * 1e3:.3f} ms",
                f"{row.eager_seconds * 1e3:.3f} ms",
            )
        yield table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
