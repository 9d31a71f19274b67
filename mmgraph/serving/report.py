"""What ``mmgraph run`` found, as one frozen record: for the table, for JSON, and for the exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmgraph.capture import Report
from mmgraph.serving.compare import Difference, TokenCheck
from mmgraph.serving.hub_compare import Comparison

MAIN_SIZE = {"tower": "tokens", "prefill": "tokens", "decode": "batch"}
"""The size of each captured function that its padding share is counted in."""


@dataclass(frozen=True)
class PhaseTime:
    """Median seconds of a phase over the timed passes; a pass serves the whole batch."""

    name: str
    eager: float
    captured: float


@dataclass(frozen=True)
class GraphUse:
    """What one captured function did.

    Attributes:
        name: ``tower``, ``prefill`` or ``decode``.
        precompile_seconds: Warm-up and capture of all its buckets.
        passes: Captured passes that the counts are from, the untimed one among them.
        padding: Share of the replayed rows that was padding.
        report: The capture manager's own report.
    """

    name: str
    precompile_seconds: float
    passes: int
    padding: float
    report: Report

    @classmethod
    def from_report(cls, name: str, report: Report, *, seconds: float, passes: int) -> GraphUse:
        """Count the padding over all buckets, each weighted by the rows that it replayed."""
        size = MAIN_SIZE[name]
        rows = sum(b.hits * b.bucket[size] for b in report.buckets)
        padded = sum(b.hits * b.bucket[size] * b.padding.get(size, 0.0) for b in report.buckets)
        return cls(name, seconds, passes, padded / rows if rows else 0.0, report)

    @property
    def missed(self) -> int:
        """Calls that ran eagerly."""
        return sum(self.report.misses.values())


@dataclass(frozen=True)
class Memory:
    """Bytes; the last two are None on a CPU.

    Attributes:
        weights: The model's weights.
        cache: Keys and values.
        static: The captured functions' static buffers.
        pool: What the graph pools grew by.
        peak_eager: The most that torch had allocated during an eager pass.
        peak_captured: The same during a captured pass.
    """

    weights: int
    cache: int
    static: int
    pool: int
    peak_eager: int | None
    peak_captured: int | None


@dataclass(frozen=True)
class RunReport:
    """Everything that a run found.

    Attributes:
        environment: Versions, device, dtype, attention backend.
        model: What the model is.
        requests: Each request: kind, tokens, images, prefill chunks.
        settings: Seed, budget, decode steps, passes.
        images_used: Images in all prompts.
        images_encoded: Images that went through the tower in a pass.
        phases: Times.
        graphs: What the captured functions did.
        memory: Bytes.
        tolerance_rule: How the tolerance is set, in words.
        differences: Eager against captured.
        tokens: The greedy tokens, compared.
        token_ids: The eager pass's tokens of each request.
        notes: What a reader must know to read the numbers rightly.
        compare: The same requests by transformers' own calls in several ways, where that was asked for.
    """

    environment: Mapping[str, Any]
    model: Mapping[str, Any]
    requests: list[Mapping[str, Any]]
    settings: Mapping[str, Any]
    images_used: int
    images_encoded: int
    phases: list[PhaseTime]
    graphs: list[GraphUse]
    memory: Memory
    tolerance_rule: str
    differences: list[Difference]
    tokens: TokenCheck
    token_ids: list[list[int]]
    notes: list[str]
    compare: Comparison | None = None

    @property
    def agrees(self) -> bool:
        """Whether eager and captured agree within the tolerance, tokens too."""
        return self.tokens.ok and all(d.ok for d in self.differences)

    @property
    def ok(self) -> bool:
        """Whether they agree and, where that was asked for, mmgraph agrees with transformers."""
        return self.agrees and (self.compare is None or self.compare.ok)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        found: dict[str, Any] = asdict(self)
        found["ok"] = self.ok
        found["compare"] = None if self.compare is None else self.compare.to_dict()
        found["tokens"]["equal"] = self.tokens.equal
        for entry, difference in zip(found["differences"], self.differences, strict=True):
            entry["ok"] = difference.ok
            # JSON has no NaN: null says that the values weren't finite.
            entry |= {k: None for k, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
        return found
