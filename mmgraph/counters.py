"""Counts over an embedder's life.

Promises: always on; a call adds its counts in one step, so that a reading never shows half a call; any thread may
call and read.
"""

import threading
from dataclasses import dataclass, field

from mmgraph.modality import Modality
from mmgraph.prefetch import FeatureCounts
from mmgraph.timing import EmbedTiming


@dataclass(frozen=True, slots=True)
class EmbedCounters:
    """What an embedder has done since it was made.

    Attributes:
        calls: Batches: calls of ``apply`` and ``apply_result`` with a context, and of ``assemble`` with a plan;
            those that raised, too.
        items_encoded: Items that an encoder gave rows for, by modality.
        rows_encoded: Their rows.
        aliases: Items that got another's rows.
        ranges: Ranges of items' rows that were placed.
        features_moved: Tensors of features that were copied to another device, early or not.
        bytes_moved: Their bytes.
        prefetch_started: Items whose copies were begun early.
        prefetch_hits: Items whose early copies were used.
        prefetch_misses: Items brought to a CUDA device without early copies.
        prefetch_dropped: Items whose early copies were given up: the item went, or its feature was changed.
        prefetch_failed: Items or requests that couldn't be prefetched; their error comes when they are embedded.
        prefetch_refused: Items not prefetched, since the bound would have been passed.
        staging_waits: How often the host waited for a pinned buffer.
        failures_isolated: Requests that were set aside.
    """

    calls: int = 0
    items_encoded: dict[Modality, int] = field(default_factory=dict)
    rows_encoded: int = 0
    aliases: int = 0
    ranges: int = 0
    features_moved: int = 0
    bytes_moved: int = 0
    prefetch_started: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    prefetch_dropped: int = 0
    prefetch_failed: int = 0
    prefetch_refused: int = 0
    staging_waits: int = 0
    failures_isolated: int = 0


class CallTotals:
    """Adds up what calls did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[Modality, int] = {}
        self._sums = dict.fromkeys(("calls", "rows_encoded", "aliases", "ranges", "failures_isolated"), 0)

    def add(self, call: EmbedTiming, *, calls: int = 0, isolated: int = 0) -> None:
        """Add one call.

        Args:
            call: Its counts.
            calls: 1 where it placed rows, or should have; 0 for a phase before that.
            isolated: Requests that it set aside.
        """
        with self._lock:
            for modality, encoder in call.encoders.items():
                self._items[modality] = self._items.get(modality, 0) + encoder.items
                self._sums["rows_encoded"] += encoder.tokens
            self._sums["aliases"] += call.aliases
            self._sums["failures_isolated"] += isolated
            self._sums["calls"] += calls
            self._sums["ranges"] += call.ranges

    def reading(self, features: FeatureCounts, waits: int) -> EmbedCounters:
        """Give the sums as they are, beside what is counted elsewhere.

        Args:
            features: What became of features.
            waits: How often the host waited for a pinned buffer.
        """
        with self._lock:
            return EmbedCounters(
                items_encoded=dict(self._items),
                **self._sums,
                features_moved=features.moved,
                bytes_moved=features.bytes_moved,
                prefetch_started=features.started,
                prefetch_hits=features.hits,
                prefetch_misses=features.misses,
                prefetch_dropped=features.dropped,
                prefetch_failed=features.failed,
                prefetch_refused=features.refused,
                staging_waits=waits,
            )
