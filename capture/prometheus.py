"""A manager's report as Prometheus metrics, read when it is asked for: no cost on the path of calls."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import MissingPackageError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from .manager import CaptureManager
    from .report import Report

__all__ = ["prometheus_collector"]

# Miss reasons of one manager that get a label of their own; those of a policy that words each anew share "other".
_REASONS = 32


def prometheus_collector(managers: Mapping[str, CaptureManager]) -> Collector:
    """A collector that shows managers to Prometheus: `REGISTRY.register(prometheus_collector({"vision": graphs}))`.

    It reads each manager's report when it is scraped and costs nothing otherwise. It keeps no manager alive; one
    that is gone has no metrics any more. They are named `mmgraph_capture_...`.

    Args:
        managers: the value of the label `manager`, and whose report it is.

    Raises:
        MissingPackageError: prometheus_client is not installed.
    """
    try:
        from prometheus_client.registry import Collector
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise MissingPackageError("prometheus_client", "metrics") from error

    alive = {name: weakref.ref(manager) for name, manager in managers.items()}

    class CaptureCollector(Collector):
        def describe(self) -> Iterator[Any]:
            """The names, so that registering reads no report."""
            yield from _Families().all

        def collect(self) -> Iterator[Any]:
            families = _Families()
            for name, reference in alive.items():
                manager = reference()
                if manager is not None:
                    families.add(name, manager.report())
                del manager
            yield from families.all

    return CaptureCollector()


class _Families:
    """One scrape's metrics."""

    def __init__(self) -> None:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(f"mmgraph_capture_{name}", text, labels=("manager", *labels))

        def gauge(name: str, text: str) -> Any:
            return GaugeMetricFamily(f"mmgraph_capture_{name}", text, labels=("manager",))

        self.calls = counter("calls", "Calls of the manager.")
        self.hits = counter("hits", "Calls that replayed a graph.", "bucket", "variant")
        self.misses = counter("misses", "Calls that replayed none.", "reason")
        self.real_rows = counter("real_rows", "Rows that replays were given.", "size")
        self.padded_rows = counter("padded_rows", "Rows of padding that replays computed besides.", "size")
        self.gauges = {
            "graphs": gauge("graphs", "Captured graphs."),
            "static_bytes": gauge("static_bytes", "Bytes of static buffers."),
            "pool_bytes": gauge("pool_bytes", "Bytes of the memory pools of graphs."),
            "executable_bytes": gauge("executable_bytes", "Device bytes of instantiated graphs."),
            "workspace_bytes": gauge("workspace_bytes", "Bytes of the libraries' workspaces."),
        }
        self.replay_time = HistogramMetricFamily(
            "mmgraph_capture_replay_seconds", "Times of sampled replays.", labels=("manager",)
        )
        counters = (self.calls, self.hits, self.misses, self.real_rows, self.padded_rows)
        self.all = (*counters, *self.gauges.values(), self.replay_time)

    def add(self, name: str, report: Report) -> None:
        from prometheus_client.utils import floatToGoString

        self.calls.add_metric((name,), report.calls)
        hits: Counter[tuple[str, str]] = Counter()
        for row in report.buckets:
            hits[",".join(f"{n}={size}" for n, size in row.bucket.items()), row.variant or ""] += row.hits
        for labels, count in hits.items():
            self.hits.add_metric((name, *labels), count)
        for reason, count in _by_label(report.misses).items():
            self.misses.add_metric((name, reason), count)
        for family, rows in ((self.real_rows, report.real_rows), (self.padded_rows, report.padded_rows)):
            for size, count in rows.items():
                family.add_metric((name, size), count)
        self.gauges["graphs"].add_metric((name,), len(report.buckets))
        for field in ("static_bytes", "pool_bytes", "executable_bytes", "workspace_bytes"):
            self.gauges[field].add_metric((name,), getattr(report, field))
        if (times := report.replay_time) is not None:
            counts = zip(map(floatToGoString, times.bounds), times.counts, strict=True)
            self.replay_time.add_metric((name,), [*counts, ("+Inf", times.total)], times.sum)


def _by_label(misses: Mapping[str, int]) -> dict[str, int]:
    """Misses by the reason's text before its first ":"; beyond the first few reasons all are "other".

    Reasons keep the order in which they first occurred, so that none changes its label from scrape to scrape.
    """
    counts: dict[str, int] = {}
    for reason, count in misses.items():
        label = reason.partition(":")[0].strip()
        if label not in counts and len(counts) >= _REASONS:
            label = "other"
        counts[label] = counts.get(label, 0) + count
    return counts
