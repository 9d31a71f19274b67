"""What an embedder is made of, and what it tells of itself: options, counters, prefetch, requests that are given up.

Promises: any thread may call; an embedder is copied and pickled by its options.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from mmgraph.counters import CallTotals, EmbedCounters
from mmgraph.encoder_spec import Encoders, settled_specs
from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.planning import EncodePlan
from mmgraph.pool import EncoderPool
from mmgraph.prefetch import Prefetcher
from mmgraph.ranges import RangeKind, checked_kind
from mmgraph.row_cache import RowCache
from mmgraph.row_home import RowHome
from mmgraph.staging import FeatureMover
from mmgraph.text_rows import TextEmbedding, TextRows
from mmgraph.timing import EmbedTiming, PhaseRecorder

_log = logging.getLogger("mmgraph.embedder")


class EmbedderBase:
    """The parts of a `mmgraph.MultimodalEmbedder`; its arguments are described there."""

    def __init__(
        self,
        *,
        strict: bool = False,
        timing: bool = False,
        ranges: RangeKind | None = None,
        pinned_bytes: int = 64 << 20,
        prefetch_bytes: int = 1 << 30,
        pool: EncoderPool | RowCache | None = None,
        keep_features: bool = False,
    ) -> None:
        self.strict = strict
        self.timing = timing
        self.last_timing: EmbedTiming | None = None
        self._options = {
            "ranges": checked_kind(ranges),
            "pinned_bytes": pinned_bytes,
            "prefetch_bytes": prefetch_bytes,
            "pool": pool,
            "keep_features": keep_features,
        }
        self._ranges = ranges
        self._mover = FeatureMover(buffer_bytes=pinned_bytes)
        self._home = RowHome(pool, keep_features, self._mover)
        self._features = Prefetcher(self._mover, prefetch_bytes, self._home.stored)
        self._totals = CallTotals()
        self._encoding = threading.RLock()  # an encoder may call the embedder

    def __getstate__(self) -> dict[str, Any]:
        return {"strict": self.strict, "timing": self.timing, **self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EmbedderBase.__init__(self, **state)

    def prefetch(
        self,
        batch: MultimodalForwardContext | EncodePlan,
        encoders: Encoders | None = None,
        *,
        device: torch.device | str,
    ) -> int:
        """Begin to copy the features that a batch to come will have to encode, while another is computed.

        Handles and arrays are read now, and the copies go on the side stream; whichever batch an item comes in uses
        its copies, if its feature is still the same and unchanged, else it is copied anew. Changes are seen by torch's
        version counter, so not those made past torch, such as through an array, nor those of a tensor that was made
        in inference mode. Copies of an item that never comes go with the item. May be called from any thread.

        Args:
            batch: What is to come, or its plan. Its lengths say which items it touches; its rows need not be there.
            encoders: As in `apply`; only their ``device`` is read.
            device: Where features go, unless an encoder's spec says otherwise. Only on CUDA is there anything to do.

        Returns:
            How many items' copies were begun. An item or request for which that fails is left as it was, and its
            error comes when it is embedded.

        Raises:
            MultimodalError: What was given is no batch, or its lists don't fit each other.
        """
        with PhaseRecorder(False, lambda: None, self._ranges).phase("prefetch"):
            return self._features.prefetch_batch(batch, settled_specs(encoders), torch.device(device))

    def has_rows(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows are there now, on it or in the pool: ``cached`` for `mmgraph.fit_to_budget`."""
        return self._home.stored(item)

    def forget(self, inputs: MultimodalInputs | None) -> None:
        """Let the rows of a request that is given up be evicted, which later chunks of it would need.

        A request whose items are gone needs no call.

        Args:
            inputs: The request's media.
        """
        items = () if inputs is None else inputs.mm_items
        self._home.unfinished.forget(item for item in items if item is not None)

    def counters(self) -> EmbedCounters:
        """Give what was done since the embedder was made; always counted, from all threads together."""
        return self._totals.reading(self._features.counts, self._mover.waits)

    def _text_rows(self, input_ids: torch.Tensor, embedding: TextEmbedding) -> TextRows:
        return TextRows(input_ids, embedding, strict=self.strict)

    def _recorder(self, device: torch.device) -> PhaseRecorder:
        on_cuda = self.timing and device.type == "cuda"
        synchronize: Callable[[], None] = (
            (lambda: torch.cuda.synchronize(device)) if on_cuda else (lambda: None)
        )
        return PhaseRecorder(self.timing, synchronize, self._ranges)

    def _keep_timing(self, recorder: PhaseRecorder) -> EmbedTiming:
        timing = recorder.result()
        if recorder.enabled:
            self.last_timing = timing
            _log.info("%s", timing.line())
        return timing
