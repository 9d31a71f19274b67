"""Phase times and counts of the embedder, kept out of its logic.

Promises: a recorder that is off does nothing and never synchronises; one that is on waits for the device at
both ends of each phase, so that a phase's time is its own. Ranges for profilers cost nothing while nobody listens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mmgraph.modality import Modality
from mmgraph.ranges import RangeKind, phase_range

_NOTHING = nullcontext()

PHASES = ("plan", "move", "encode", "share", "assemble", "cleanup")


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """What one modality's encoder was given.

    Attributes:
        items: How many items.
        tokens: The rows that they have together.
        tokens_per_item: The rows of each, in the order of the call.
    """

    items: int
    tokens: int
    tokens_per_item: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbedTiming:
    """What one call of the embedder took and did.

    Attributes:
        seconds: Time of each phase that ran: plan, move, encode, share, assemble, cleanup.
        ranges: Ranges of the plan.
        misses: Items to encode, by modality.
        rows: Rows of the batch that come from items.
        aliases: Items that got another's rows.
        features_released: Raw features dropped.
        handles_released: Handles given up after use, or unused.
        encoders: What each encoder was given.
    """

    seconds: dict[str, float]
    ranges: int = 0
    misses: dict[Modality, int] = field(default_factory=dict)
    rows: int = 0
    aliases: int = 0
    features_released: int = 0
    handles_released: int = 0
    encoders: dict[Modality, EncoderCounts] = field(default_factory=dict)

    def line(self) -> str:
        """Give it all in one line, for a log."""
        times = " ".join(f"{name}={self.seconds[name] * 1e3:.3f}ms" for name in PHASES if name in self.seconds)
        misses = " ".join(f"misses.{modality.value}={count}" for modality, count in self.misses.items())
        encoders = " ".join(
            f"encoder.{modality.value}={counts.items} items, {counts.tokens} tokens {list(counts.tokens_per_item)}"
            for modality, counts in self.encoders.items()
        )
        counts = (
            f"ranges={self.ranges} rows={self.rows} aliases={self.aliases} "
            f"features_released={self.features_released} handles_released={self.handles_released}"
        )
        return " ".join(part for part in (times, counts, misses, encoders) if part)


class PhaseRecorder:
    """Collects times and counts of one call, and marks its phases for profilers.

    Args:
        enabled: Off: nothing is measured and the device is left alone.
        synchronize: Waits for the device.
        ranges: As in `mmgraph.ranges.phase_range`.
    """

    def __init__(self, enabled: bool, synchronize: Callable[[], None], ranges: RangeKind | None = None) -> None:
        self.enabled = enabled
        self._synchronize = synchronize
        self._ranges = ranges
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._misses: dict[Modality, int] = {}
        self._encoders: dict[Modality, EncoderCounts] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of a block to a phase, inside its range."""
        named = phase_range(name, self._ranges)
        if named is None and not self.enabled:
            return _NOTHING
        return self._observed(name, named)

    @contextmanager
    def _observed(self, name: str, named: AbstractContextManager[Any] | None) -> Iterator[None]:
        with named or _NOTHING:
            if not self.enabled:
                yield
                return
            self._synchronize()
            begin = time.perf_counter()
            try:
                yield
                self._synchronize()
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def count(self, **amounts: int) -> None:
        """Add to counts, by their names in `EmbedTiming`."""
        for name, amount in amounts.items():
            self._counts[name] = self._counts.get(name, 0) + amount

    def count_misses(self, misses: dict[Modality, int]) -> None:
        """Note the items to encode."""
        self._misses = misses

    def count_encoder(self, modality: Modality, tokens_per_item: list[int]) -> None:
        """Note what an encoder was given and encoded."""
        before = self._encoders.get(modality)
        tokens = ((*before.tokens_per_item,) if before else ()) + tuple(tokens_per_item)
        self._encoders[modality] = EncoderCounts(len(tokens), sum(tokens), tokens)

    def result(self) -> EmbedTiming:
        """Give what was collected."""
        return EmbedTiming(
            seconds=dict(self._seconds),
            misses=dict(self._misses),
            encoders=dict(self._encoders),
            **self._counts,
        )
