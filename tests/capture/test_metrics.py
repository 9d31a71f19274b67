"""Invariant: what is sampled and shown is what happened; no replay waits for it and no capture breaks by it."""

import bisect
import builtins
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mmgraph.capture import Bucket, CallError, CaptureError, MissingPackageError, SpecError, metrics
from mmgraph.capture.metrics import Histogram, HistogramSnapshot, ReplayTimer
from mmgraph.capture.prometheus import prometheus_collector

times = st.floats(1e-6, 30.0)


def histogram_of(values: list[float]) -> HistogramSnapshot:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram.snapshot()


@given(st.lists(times | st.sampled_from([2e-5, 5e-5, 1.0, 10.0])), st.floats(0, 1))
def test_counts_are_cumulative_and_quantiles_lie_in_the_value_s_own_bounds(
    values: list[float], q: float
) -> None:
    got = histogram_of(values)
    assert got.counts == tuple(sum(value <= bound for value in values) for bound in got.bounds)
    assert got.total == len(values)
    assert got.sum == pytest.approx(sum(values))
    if not values:
        assert math.isnan(got.quantile(q))
        return
    # The value of this rank, and the two bounds that it lies between.
    value = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    index = bisect.bisect_left(got.bounds, value)
    edges = (0.0, *got.bounds, got.bounds[-1])
    assert edges[index] <= got.quantile(q) * (1 + 1e-12)
    assert got.quantile(q) <= edges[index + 1] * (1 + 1e-12)


def test_bounds_run_from_20_microseconds_to_10_seconds() -> None:
    bounds = Histogram().snapshot().bounds
    assert (bounds[0], bounds[-1]) == (20e-6, 10.0)
    assert all(1.9 < high / low < 2.6 for low, high in itertools.pairwise(bounds))


def test_quantiles_are_linear_between_bounds() -> None:
    snapshot = HistogramSnapshot((1.0, 2.0, 5.0), (0, 4, 4), 8, 30.0)
    assert [snapshot.quantile(q) for q in (0, 0.25, 0.5, 0.75, 1)] == [1.0, 1.5, 2.0, 5.0, 5.0]


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_a_quantile_s_share_is_from_0_to_1(q: float) -> None:
    with pytest.raises(CallError, match="from 0 to 1"):
        histogram_of([1.0]).quantile(q)


@given(st.integers(0, 5), st.integers(0, 30))
def test_on_a_cpu_every_nth_replay_is_a_sample(every: int, replays: int) -> None:
    timer = ReplayTimer(torch.device("cpu"), every)
    for _ in range(replays):
        timer.start()
        timer.stop()
    assert timer.snapshot().total == (replays // every if every else 0)


def test_a_replay_that_failed_is_no_sample() -> None:
    timer = ReplayTimer(torch.device("cpu"), 1)
    timer.start()
    timer.start()
    timer.stop()
    timer.stop()
    assert timer.snapshot().total == 1


def test_timers_may_share_a_histogram() -> None:
    histogram = Histogram()
    for _ in range(2):
        timer = ReplayTimer(torch.device("cpu"), 1, histogram)
        timer.start()
        timer.stop()
    assert histogram.snapshot().total == 2


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_samples_are_every_nth(every: object) -> None:
    with pytest.raises(SpecError, match="every"):
        ReplayTimer(torch.device("cpu"), every)  # type: ignore[arg-type]


class FakeDevice:
    """Streams that run when told, events, and a driver that knows the thread's capture mode. Nothing can wait."""

    def __init__(self) -> None:
        self.queue: list[FakeEvent] = []
        self.events = 0
        self.queries = 0
        self.clock = 0.0
        self.capturing = False
        self.mode = 0  # global

    def run(self, count: int | None = None) -> None:
        """The device gets on: a second for each event."""
        for event in self.queue[:count]:
            self.clock += 1.0
            event.done_at = self.clock
        del self.queue[:count]

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.done_at: float | None = None
        device.events += 1

    def record(self, stream: object) -> None:
        assert stream == "caller's stream"
        assert self not in self.device.queue or not self.device.capturing
        if self in self.device.queue:
            self.device.queue.remove(self)
        self.done_at = None
        self.device.queue.append(self)

    def query(self) -> bool:
        assert self.device.mode == 2, "a query in this mode breaks another thread's capture"
        assert not self.device.capturing
        self.device.queries += 1
        return self.done_at is not None

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.done_at is not None
        assert end.done_at is not None
        assert self.device.mode == 2
        return (end.done_at - self.done_at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(metrics, "_driver", lambda: fake)
    return fake


def replay(timer: ReplayTimer, count: int = 1, *, fails: bool = False) -> None:
    stream: Any = "caller's stream"
    for _ in range(count):
        timer.start(stream)
        if not fails:
            timer.stop(stream)


def test_events_are_read_once_they_are_done_and_never_waited_for(device: FakeDevice) -> None:
    timer = ReplayTimer(torch.device("cuda"), 3)
    replay(timer, 7)
    assert len(device.queue) == 4
    assert timer.snapshot().total == 0
    device.run(3)  # the first pair, and half of the second
    got = timer.snapshot()
    assert (got.total, got.sum) == (1, 1.0)
    device.run()
    replay(timer, 2)  # read at the next sample, too
    assert timer.histogram.snapshot().total == 2
    assert device.mode == 0


def test_a_device_far_behind_loses_samples_and_no_more_events_are_made(device: FakeDevice) -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    made = device.events
    replay(timer, 1000)
    device.run()
    assert 0 < timer.snapshot().total == made // 2
    replay(timer, 3)
    device.run()
    assert timer.snapshot().total == made // 2 + 3
    assert device.events == made


def test_within_a_capture_nothing_is_queried_or_recorded(device: FakeDevice) -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    replay(timer)
    device.run()
    device.capturing = True
    replay(timer, 3)
    assert (timer.snapshot().total, device.queries, device.queue) == (0, 0, [])
    device.capturing = False
    assert timer.snapshot().total == 1


def test_events_of_failed_replays_are_used_again(device: FakeDevice) -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    replay(timer, 100, fails=True)
    replay(timer, 2)
    device.run()
    got = timer.snapshot()
    assert (got.total, got.sum) == (2, 2.0)


def test_a_timer_that_is_off_makes_no_events(device: FakeDevice) -> None:
    timer = ReplayTimer(torch.device("cuda"), 0)
    replay(timer, 10)
    assert (device.events, timer.snapshot().total) == (0, 0)


@dataclasses.dataclass
class FakeBucket:
    bucket: Mapping[str, int]
    variant: str | None
    hits: int


@dataclasses.dataclass
class FakeReport:
    calls: int = 0
    hits: int = 0
    misses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    buckets: tuple[FakeBucket, ...] = ()
    real_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    padded_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    static_bytes: int = 0
    pool_bytes: int = 0
    executable_bytes: int = 0
    workspace_bytes: int = 0
    replay_time: HistogramSnapshot | None = None


class FakeManager:
    def __init__(self, report: FakeReport) -> None:
        self.made = 0
        self.now = report

    def report(self) -> FakeReport:
        self.made += 1
        return self.now


def registered(**managers: Any) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(prometheus_collector(managers))
    return registry


def scrape(registry: CollectorRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name to label values (the manager's first) to value, by way of the text that Prometheus reads."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            others = sorted(name for name in sample.labels if name != "manager")
            labels = tuple(sample.labels[name] for name in ("manager", *others))
            found.setdefault(sample.name, {})[labels] = sample.value
    return {name.removeprefix("mmgraph_capture_"): samples for name, samples in found.items()}


counts = st.integers(0, 1000)
by_size = st.dictionaries(st.sampled_from(["tokens", "batch"]), counts)
reports = st.builds(
    FakeReport,
    calls=counts,
    misses=st.dictionaries(st.sampled_from(["beyond the grid", "not exact", "a", "b: 1", "b: 2"]), counts),
    buckets=st.lists(
        st.builds(
            FakeBucket,
            bucket=st.builds(Bucket, tokens=st.integers(1, 5), batch=st.integers(1, 2)),
            variant=st.sampled_from([None, "half", 'a "b"\\']),
            hits=counts,
        ),
        unique_by=lambda b: (b.bucket, b.variant),
    ).map(tuple),
    real_rows=by_size,
    padded_rows=by_size,
    static_bytes=counts,
    pool_bytes=counts,
    executable_bytes=counts,
    workspace_bytes=counts,
    replay_time=st.none() | st.lists(times).map(histogram_of),
)


@given(reports, reports)
def test_a_scrape_shows_what_the_reports_say(first: FakeReport, second: FakeReport) -> None:
    kept = {"first": FakeManager(first), "second": FakeManager(second)}
    got = scrape(registered(**kept))
    for name, report in (("first", first), ("second", second)):
        own = {
            metric: {labels: value for labels, value in samples.items() if labels[0] == name}
            for metric, samples in got.items()
        }
        assert own["calls_total"] == {(name,): report.calls}
        assert own.get("hits_total", {}) == {
            (name, ",".join(f"{n}={size}" for n, size in b.bucket.items()), b.variant or ""): b.hits
            for b in report.buckets
        }
        assert sum(own.get("misses_total", {}).values()) == sum(report.misses.values())
        assert {labels[1] for labels in own.get("misses_total", {})} == {
            reason.split(":")[0] for reason in report.misses
        }
        for metric in ("real_rows", "padded_rows"):
            assert own.get(f"{metric}_total", {}) == {
                (name, size): count for size, count in getattr(report, metric).items()
            }
        assert own["graphs"] == {(name,): len(report.buckets)}
        for metric in ("static_bytes", "pool_bytes", "executable_bytes", "workspace_bytes"):
            assert own[metric] == {(name,): getattr(report, metric)}
        times = report.replay_time
        if times is None:
            assert not own.get("replay_seconds_bucket")
            continue
        shown = {float(bound): value for (_, bound), value in own["replay_seconds_bucket"].items()}
        assert shown == {**dict(zip(times.bounds, times.counts, strict=True)), math.inf: times.total}
        assert own["replay_seconds_count"] == {(name,): times.total}
        assert own["replay_seconds_sum"] == {(name,): pytest.approx(times.sum)}


def test_reports_are_read_at_scrapes_only() -> None:
    manager = FakeManager(FakeReport(calls=1))
    registry = registered(vision=manager)
    assert manager.made == 0
    assert scrape(registry)["calls_total"] == {("vision",): 1}
    manager.now = FakeReport(calls=5)
    assert scrape(registry)["calls_total"] == {("vision",): 5}
    assert manager.made == 2


def test_reasons_that_differ_from_call_to_call_do_not_grow_the_labels() -> None:
    misses = {f"{n} rows are too many": 1 for n in range(1000)}
    manager = FakeManager(FakeReport(misses=misses))
    registry = registered(vision=manager)
    before = scrape(registry)["misses_total"]
    assert len(before) < 50
    assert sum(before.values()) == 1000
    manager.now = FakeReport(misses={**misses, "new": 3, "0 rows are too many": 2})
    after = scrape(registry)["misses_total"]
    assert before.keys() == after.keys()
    assert all(after[labels] >= count for labels, count in before.items())
    assert sum(after.values()) == 1004


def test_a_collector_keeps_no_manager_alive() -> None:
    kept, gone = FakeManager(FakeReport(calls=1)), FakeManager(FakeReport(calls=2))
    registry = registered(kept=kept, gone=gone)
    assert scrape(registry)["calls_total"].keys() == {("kept",), ("gone",)}
    del gone
    assert scrape(registry)["calls_total"] == {("kept",): 1}


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name="prometheus_client")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=r"pip install \"mmgraph\[metrics\]\"") as caught:
        prometheus_collector({})
    assert isinstance(caught.value, CaptureError)
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "prometheus_client"
