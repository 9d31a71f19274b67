"""What a manager did, as a table or as JSON.

Per bucket hits, padding, bytes and replay time, and every kind of miss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from .graph import BucketGraph

__all__ = ["BucketReport", "CallExplanation", "Report", "bucket_report"]


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
        hits: how many calls it served.
        padding: of each size, the share of all rows replayed so far that was padding, 0 to 1; 0 before the
            first hit.
        static_bytes: the bytes of its views into the shared static buffers.
        pool_bytes: what the shared pool grew by when it was captured.
        capture_seconds: warm-up and capture.
        replay_seconds: the median of a few replays right after the capture.
        nodes: recorded operations, on a CPU; None for device graphs.
    """

    bucket: Mapping[str, int]
    hits: int
    padding: Mapping[str, float]
    static_bytes: int
    pool_bytes: int
    capture_seconds: float
    replay_seconds: float
    nodes: int | None


def bucket_report(graph: BucketGraph, without: Collection[str]) -> BucketReport:
    """The account of one captured bucket; sizes in `without` aren't padded and have no share."""
    padding = {
        name: (1 - graph.real.get(name, 0) / (graph.hits * size)) if graph.hits and size else 0.0
        for name, size in graph.bucket.items()
        if name not in without
    }
    tensors = [tensor for tensor in (*graph.inputs, *graph.outputs) if tensor is not None]
    return BucketReport(
        bucket=dict(graph.bucket),
        hits=graph.hits,
        padding=padding,
        static_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        pool_bytes=graph.pool_bytes,
        capture_seconds=graph.capture_seconds,
        replay_seconds=graph.replay_seconds,
        nodes=getattr(graph.graph, "num_operations", None),
    )


@dataclass(frozen=True)
class Report:
    """A manager's counters at one moment.

    Attributes:
        device: where the graphs live, or None before `precompile`.
        backend: "cuda graphs", "cpu recorder" or "none".
        calls, hits: all calls, and those that replayed a graph.
        misses: reason to count; their sum is calls - hits.
        buckets: the captured ones, smallest first.
        dropped: grid points without a graph, with the reason.
        static_bytes: of all shared static buffers; not the sum over buckets, which share them.
        pool_bytes: of the pool that all graphs share; 0 on a CPU.
    """

    device: str | None
    backend: str
    calls: int
    hits: int
    misses: Mapping[str, int]
    buckets: tuple[BucketReport, ...]
    dropped: tuple[tuple[Mapping[str, int], str], ...]
    static_bytes: int
    pool_bytes: int

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
            f"{len(self.dropped)} grid points dropped",
        )
        for column in ("bucket", "hits", "padding", "static", "pool +", "capture", "replay"):
            table.add_column(column, justify="left" if column == "bucket" else "right")
        for row in self.buckets:
            table.add_row(
                ", ".join(f"{name}={size}" for name, size in row.bucket.items()),
                str(row.hits),
                ", ".join(f"{name} {share:.0%}" for name, share in row.padding.items()) if row.hits else "",
                _bytes(row.static_bytes),
                _bytes(row.pool_bytes),
                f"{row.capture_seconds:.2f} s",
                f"{row.replay_seconds * 1e3:.3f} ms",
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
