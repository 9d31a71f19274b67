"""Invariant: each phase is a named range where somebody listens; else no range is made and no clock is read."""

import time
from typing import Any

import pytest
import torch
from mm_batches import HIDDEN, Encoder, one_request, simple_item
from simulated_cuda import DEVICE, SimulatedLane, World

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.errors import EncoderFailedError, OptionError
from mmgraph.inputs import Modality
from mmgraph.prefetch import Prefetcher
from mmgraph.staging import FeatureMover
from mmgraph.timing import PHASES

TABLE = torch.zeros(3, HIDDEN)
IDS = torch.zeros(6, dtype=torch.int64)
NAMES = {f"mmgraph.embed.{phase}" for phase in PHASES}


def embed(embedder: MultimodalEmbedder, encoder: Any = None) -> None:
    embedder.apply(IDS, TABLE, one_request([simple_item([(1, 2)])], 6), {Modality.IMAGE: encoder or Encoder()})


class Ranges:
    """Stands for a kind of range, and remembers which were entered and left."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.closed: list[str] = []

    def __call__(self, name: str) -> "Ranges":
        self.name = name
        return self

    def __enter__(self) -> None:
        self.open.append(self.name)

    def __exit__(self, *error: object) -> None:
        self.closed.append(self.open.pop())


def test_the_profiler_sees_every_phase() -> None:
    embedder = MultimodalEmbedder()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        embed(embedder)
    found = {event.key for event in profile.key_averages() if event.key.startswith("mmgraph.")}
    assert found == NAMES


def test_where_nobody_listens_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: made.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: made.append(name))
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: (made.append("clock"), clock())[1])
    embedder = MultimodalEmbedder()
    embed(embedder)
    assert made == []


@pytest.mark.parametrize("kind", ["profiler", "nvtx"])
def test_ranges_that_were_asked_for_are_there_and_are_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, other = Ranges(), Ranges()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "record_function", ranges if kind == "profiler" else other)
    monkeypatch.setattr(torch.cuda.nvtx, "range", ranges if kind == "nvtx" else other)
    embedder = MultimodalEmbedder(ranges=kind)
    embed(embedder)
    assert set(ranges.closed) == NAMES
    assert other.closed == []

    def broken(items: object) -> torch.Tensor:
        raise RuntimeError("boom")

    with pytest.raises(EncoderFailedError):
        embed(embedder, broken)
    assert ranges.open == []


def test_a_prefetch_is_a_range_and_leaves_the_last_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr(torch.profiler, "record_function", ranges)
    embedder = MultimodalEmbedder(ranges="profiler", timing=True)
    embedder._mover = FeatureMover(lane=lambda device: SimulatedLane(World(0)))
    embedder._features = Prefetcher(embedder._mover, 1 << 20)
    embed(embedder)
    before = embedder.last_timing
    assert embedder.prefetch(one_request([simple_item([(1, 2)])], 6), device=DEVICE) == 1
    assert ranges.closed[-1] == "mmgraph.embed.prefetch"
    assert embedder.last_timing is before


def test_timing_and_ranges_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr(torch.profiler, "record_function", ranges)
    embedder = MultimodalEmbedder(ranges="profiler", timing=True)
    embed(embedder)
    assert set(ranges.closed) == NAMES
    assert set(embedder.last_timing.seconds) == set(PHASES)


def test_a_wrong_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="ranges must be None, 'profiler' or 'nvtx', got True"):
        MultimodalEmbedder(ranges=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="ranges='nvtx' needs CUDA"):
        MultimodalEmbedder(ranges="nvtx")
