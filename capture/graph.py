"""One captured bucket: what replays it, its static views, and what it cost."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from .buckets import Bucket
from .layout import LeafLayout

__all__ = ["BucketGraph", "GraphKey", "OutputPlan", "Past", "Replayable", "least_replay_seconds"]


class GraphKey(NamedTuple):
    """What a graph is looked up by."""

    variant: Hashable
    bucket: Bucket


class Replayable(Protocol):
    """What a device graph and a CPU recording have in common."""

    def replay(self) -> None:
        """Runs the captured work again on the same storage."""

    def reset(self) -> None:
        """Lets go of the captured work."""


@dataclass(frozen=True)
class OutputPlan:
    """How one output leaf is handed out: as a tensor of a layout, or as the value that the capture returned."""

    layout: LeafLayout | None
    value: Any = None


@dataclass
class BucketGraph:
    """A captured bucket. Counters are the manager's to change, under its lock.

    Attributes:
        key: its variant and bucket.
        inputs: its views into the shared static inputs; None for leaves that aren't tensors.
        outputs: on a CPU its views into the shared static outputs; on a GPU the graph copies out by itself.
        plans: how outputs are handed out.
        graph: what is replayed.
        capture_seconds: warm-up and capture.
        replay_seconds: least wall time of a few replays right after the capture.
        eager_seconds: least wall time of the warm-up runs at the bucket's sizes.
        pool_bytes: what the pool grew by.
        executable_bytes: what the driver took for the executable graph, as far as it shows in free memory.
        elements: of all its static views: how large it is.
        hits: replays for calls.
        clock: of the last use, for eviction.
        sums: rows of these calls, in the order of the bucket's sizes.
    """

    key: GraphKey
    inputs: tuple[torch.Tensor | None, ...]
    outputs: tuple[torch.Tensor | None, ...]
    plans: tuple[OutputPlan, ...]
    graph: Replayable
    capture_seconds: float
    replay_seconds: float
    eager_seconds: float
    pool_bytes: int
    executable_bytes: int
    elements: int
    hits: int = 0
    clock: int = 0
    sums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [0] * len(self.bucket)

    @property
    def bucket(self) -> Bucket:
        """The bucket's sizes."""
        return self.key.bucket

    @property
    def real(self) -> dict[str, int]:
        """Rows of the calls served, by size."""
        return dict(zip(self.bucket, self.sums, strict=True))

    def count(self, sizes: Sequence[int]) -> None:
        """Notes one replay for a call of these sizes."""
        self.hits += 1
        self.sums = list(map(operator.add, self.sums, sizes))


@dataclass
class Past:
    """What graphs that are gone had counted."""

    real: Counter[str] = field(default_factory=Counter)
    padded: Counter[str] = field(default_factory=Counter)
    evicted: int = 0

    def take(self, graph: BucketGraph) -> None:
        """Adds a graph that is about to go."""
        for name, size in graph.bucket.items():
            real = graph.real.get(name, 0)
            self.real[name] += real
            self.padded[name] += graph.hits * size - real


def least_replay_seconds(
    replay: Callable[[], None],
    stream: torch.cuda.Stream | None,
    begin: Callable[[], None],
    repeats: int = 3,
) -> float:
    """The least wall time of a few replays, each waited for; `begin` runs before each."""
    times = []
    for _ in range(repeats):
        begin()
        if stream is not None:
            stream.synchronize()
        start = time.perf_counter()
        replay()
        if stream is not None:
            stream.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
