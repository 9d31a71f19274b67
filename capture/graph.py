"""One captured bucket: its views into the shared static buffers, the replayable work, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .buckets import Bucket
from .layout import LeafLayout
from .spec import Offsets, Rows

__all__ = [
    "BucketGraph",
    "OutputPlan",
    "Replayable",
    "allocate_outputs",
    "copy_out",
    "median_replay_seconds",
    "stage",
]


class Replayable(Protocol):
    """What a device graph and a CPU recording have in common."""

    def replay(self) -> None:
        """Runs the captured work again on the same storage."""

    def reset(self) -> None:
        """Lets go of the captured work."""


@dataclass(frozen=True)
class OutputPlan:
    """How one output leaf is handed out: from its static buffer, or as the value that the capture returned."""

    layout: LeafLayout | None
    value: Any = None


@dataclass
class BucketGraph:
    """A captured bucket. Counters are the manager's to change, under its lock."""

    bucket: Bucket
    inputs: tuple[torch.Tensor | None, ...]
    outputs: tuple[torch.Tensor | None, ...]
    plans: tuple[OutputPlan, ...]
    graph: Replayable
    capture_seconds: float
    replay_seconds: float
    pool_bytes: int
    hits: int = 0
    real: dict[str, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Elements of all static views: how large the bucket is."""
        return sum(tensor.numel() for tensor in (*self.inputs, *self.outputs) if tensor is not None)

    def count(self, sizes: Mapping[str, int]) -> None:
        """Notes one replay for a call of these sizes."""
        self.hits += 1
        for name, size in sizes.items():
            self.real[name] = self.real.get(name, 0) + size


def stage(
    graph: BucketGraph, layouts: Sequence[LeafLayout | None], leaves: Sequence[Any], sizes: Mapping[str, int]
) -> None:
    """Copies a call's values into the static inputs and fills the padding behind them, every time.

    Nothing waits for the device: the last offset is spread over the padding entries on the device itself.
    Copies of one dtype, and fills with zero, go out together: by themselves they cost the host 5 to 7 us each.
    """
    copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    zeros: list[torch.Tensor] = []
    for layout, target, value in zip(layouts, graph.inputs, leaves, strict=True):
        if layout is None or target is None:
            continue
        targets, sources = copies.setdefault(layout.dtype, ([], []))
        spec = layout.spec
        if isinstance(spec, Rows):
            have, room = layout.length(sizes), layout.length(graph.bucket)
            if have < room:
                padding = target.narrow(spec.axis, have, room - have)
                target = target.narrow(spec.axis, 0, have)
                if spec.fill == 0:
                    zeros.append(padding)
                else:
                    padding.fill_(spec.fill)
        elif isinstance(spec, Offsets):
            have, room = value.shape[0], target.shape[0]
            if have < room:
                target[have:].copy_(value[-1:].expand(room - have))
                target = target[:have]
        targets.append(target)
        sources.append(value)
    for targets, sources in copies.values():
        torch._foreach_copy_(targets, sources)
    if zeros:
        torch._foreach_zero_(zeros)


def allocate_outputs(graph: BucketGraph, sizes: Mapping[str, int]) -> list[torch.Tensor | None]:
    """Memory for a call's outputs, on the current stream."""
    return [
        None
        if plan.layout is None
        else torch.empty(plan.layout.full_shape(sizes), dtype=plan.layout.dtype, device=plan.layout.device)
        for plan in graph.plans
    ]


def copy_out(graph: BucketGraph, sizes: Mapping[str, int], results: Sequence[torch.Tensor | None]) -> None:
    """Copies the outputs, cut to the call's sizes, into the caller's memory, which no later replay changes."""
    for plan, source, result in zip(graph.plans, graph.outputs, results, strict=True):
        if plan.layout is None or source is None or result is None:
            continue
        spec = plan.layout.spec
        if isinstance(spec, Rows):
            source = source.narrow(spec.axis, 0, result.shape[spec.axis])
        elif isinstance(spec, Offsets):
            source = source[: result.shape[0]]
        result.copy_(source)


def median_replay_seconds(
    graph: Replayable, stream: torch.cuda.Stream | None, begin: Callable[[], None], repeats: int = 3
) -> float:
    """The median time of a few replays, on the device's clock where there is one; `begin` runs before each."""
    times = []
    for _ in range(repeats):
        begin()
        if stream is None:
            start = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - start)
        else:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
    return sorted(times)[len(times) // 2]
