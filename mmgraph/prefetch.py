"""Features on their way before they are needed.

Promises: a copy that was begun early is used only for the feature that it was made of, unchanged; an item whose
prefetch fails is as it was, and its error comes when it is encoded; copies die with their item, and together hold no
more bytes of a device than the bound. Any thread may prefetch while another encodes. On a CPU there is nothing to
copy, and nothing is done.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.errors import ContextError, MultimodalError, OptionError
from mmgraph.features import is_handle, leaves_of, load_feature, mark_used, rebuilt
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.isolation import plan_without_failures
from mmgraph.items import FeatureHandle, MultimodalDataItem
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.staging import FeatureMover, StartedCopies, is_staged, settled

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """What became of features, over a life.

    Attributes:
        moved: Tensors copied to another device.
        bytes_moved: Their bytes.
        started: Items whose copies were begun early.
        hits: Items whose early copies were used.
        dropped: Items whose early copies were given up.
        misses: Items brought to a CUDA device without such copies.
        failed: Items or requests whose prefetch failed.
        refused: Items not prefetched, since the bound would have been passed.
    """

    moved: int = 0
    bytes_moved: int = 0
    started: int = 0
    hits: int = 0
    dropped: int = 0
    misses: int = 0
    failed: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Early:
    """Copies of one item's feature.

    Attributes:
        sources: What was copied.
        versions: The version of each then; None for one that has no counter.
        device: Where to.
        nbytes: Bytes there.
        copies: On their way.
    """

    sources: list[torch.Tensor]
    versions: list[int | None]
    device: torch.device
    nbytes: int
    copies: StartedCopies

    def is_of(self, feature: Any, device: torch.device) -> bool:
        """Tell whether these are copies of a feature as it is now."""
        leaves = _staged_leaves(feature, device)
        return (
            self.device == device
            and len(leaves) == len(self.sources)
            and all(leaf is source for leaf, source in zip(leaves, self.sources, strict=True))
            and [_version(leaf) for leaf in leaves] == self.versions
        )


def _is_encoded(item: MultimodalDataItem) -> bool:
    return item.encoded is not None


class Prefetcher:
    """Reads items' features and brings them to devices, early where asked.

    Args:
        mover: Copies tensors.
        limit_bytes: The most bytes that early copies may hold; beyond it further ones are refused. The copies that
            were begun first are those needed first, so none of them is given up for a later one.

    Raises:
        OptionError: A negative bound.
    """

    def __init__(
        self,
        mover: FeatureMover,
        limit_bytes: int,
        stored: Callable[[MultimodalDataItem], bool] = _is_encoded,
    ) -> None:
        if limit_bytes < 0:
            raise OptionError(f"prefetch_bytes must not be negative, got {limit_bytes}; 0 prefetches nothing")
        self.limit_bytes = limit_bytes
        self._mover = mover
        self._stored = stored
        self._early: weakref.WeakKeyDictionary[MultimodalDataItem, _Early] = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[MultimodalDataItem, FeatureHandle] = (
            weakref.WeakKeyDictionary()
        )
        self._retained: weakref.WeakKeyDictionary[MultimodalDataItem, FeatureHandle] = (
            weakref.WeakKeyDictionary()
        )
        self._counts = FeatureCounts()
        self._reserved = 0  # bytes of copies that are being begun
        self._lock = threading.RLock()
        self._loading = threading.Lock()

    @property
    def counts(self) -> FeatureCounts:
        """What became of features so far."""
        with self._lock:
            waiting = len(list(self._early))
            return replace(self._counts, dropped=self._counts.started - self._counts.hits - waiting)

    def load(self, item: MultimodalDataItem) -> FeatureHandle | None:
        """Turn an item's feature into tensors, where it lies; see `mmgraph.features.load_feature`."""
        with self._loading:
            return load_feature(item)

    def drop(self, item: MultimodalDataItem) -> tuple[bool, list[FeatureHandle]]:
        """Drop the feature of an item that is encoded, and its copies.

        Memory of a feature that lay on a CUDA device isn't given to others before what the current stream of that
        device has been given by now: the encoder may still read it, and it may have been allocated on another stream.

        Returns:
            Whether a feature was dropped that is no handle; and the handles to be released: one that nobody has
            consumed, and one that a prefetch has.
        """
        with self._loading:  # a prefetch in another thread may be reading it
            feature, item.feature = item.feature, None
            earlier = self._handles.pop(item, None)
        with self._lock:
            self._early.pop(item, None)
        mark_used(feature)
        unused = feature if is_handle(feature) else None
        return unused is None, [handle for handle in (unused, earlier) if handle is not None]

    def retain(self, item: MultimodalDataItem) -> None:
        """Drop the copies of an encoded item that keeps its feature; an unread handle is released with the item."""
        with self._lock:
            self._early.pop(item, None)
            if is_handle(item.feature) and self._retained.get(item) is not item.feature:
                self._retained[item] = item.feature
                weakref.finalize(item, _release, item.feature).atexit = False

    def prefetch_batch(
        self,
        batch: MultimodalForwardContext | EncodePlan,
        specs: Mapping[Modality, EncoderSpec],
        device: torch.device,
    ) -> int:
        """Begin to copy the features that a batch will have to encode.

        Args:
            batch: What is to come, or its plan.
            specs: Say where a modality's features go, where they say anything.
            device: Where they go else.

        Returns:
            How many items' copies were begun.

        Raises:
            MultimodalError: The batch as a whole can't be planned.
        """
        if not isinstance(batch, EncodePlan | MultimodalForwardContext):
            raise ContextError(
                f"prefetch needs a MultimodalForwardContext or a plan, got {type(batch).__name__}"
            )
        device_of = {
            modality: torch.device(specs[modality].device or device) if modality in specs else device
            for modality in Modality
        }
        if all(place.type != "cuda" for place in device_of.values()):
            return 0
        if isinstance(batch, EncodePlan):
            plan = batch
        else:
            failed: dict[int, MultimodalError] = {}
            plan = plan_without_failures(batch, sys.maxsize, failed)  # the rows need not be there yet
            self._count(failed=len(failed))
        started = 0
        for modality, missing in plan.misses_by_modality.items():
            place = settled(device_of[modality])
            for item in missing if place.type == "cuda" else ():
                if not self._stored(item):
                    twins = (item, *plan.aliases_by_canonical.get(item, ()))
                    started += self._start_first([twin for twin in twins if twin.feature is not None], place)
        return started

    def bring(self, items: Sequence[MultimodalDataItem], device: torch.device) -> list[Any]:
        """Bring items' loaded features to a device for the current stream, by their early copies where they have any.

        Early copies are used up, also where the encoder fails then: it may have written to them.

        Args:
            items: Items that were loaded.
            device: Where to.

        Returns:
            Their features there.
        """
        device = settled(device)
        features = [item.feature for item in items]
        ready: list[list[torch.Tensor]] = []  # of each item, its early copies
        rest: list[torch.Tensor] = []  # of all items, what is still to be moved
        missed = 0
        for item, feature in zip(items, features, strict=True):
            with self._lock:
                early = self._early.pop(item, None)
            if early is not None and early.is_of(feature, device):
                ready.append(early.copies.ready())
                rest += [leaf for leaf in leaves_of(feature) if not is_staged(leaf, device)]
            else:
                ready.append([])
                rest += leaves_of(feature)
                missed += device.type == "cuda" and bool(_staged_leaves(feature, device))
        moved = self._mover.move(rest, device)
        copied = [source for source, copy in zip(rest, moved, strict=True) if copy is not source]
        self._count(
            moved=len(copied),
            bytes_moved=sum(_nbytes(source) for source in copied),
            hits=sum(map(bool, ready)),
            misses=missed,
        )
        others = iter(moved)
        brought: list[Any] = []
        for feature, copies in zip(features, ready, strict=True):
            early_ones = iter(copies)
            merged = [
                next(early_ones if copies and is_staged(leaf, device) else others)
                for leaf in leaves_of(feature)
            ]
            brought.append(rebuilt(feature, iter(merged)))
        return brought

    def _start_first(self, twins: Sequence[MultimodalDataItem], device: torch.device) -> bool:
        """Begin the copies of the first of twins whose feature can be read; tell whether any were."""
        for twin in twins:
            try:
                return self._start(twin, device)
            except Exception:
                self._count(failed=1)
                _log.debug("prefetching a feature failed; its error comes when it is encoded", exc_info=True)
        return False

    def _start(self, item: MultimodalDataItem, device: torch.device) -> bool:
        with self._loading, torch.inference_mode(False):
            if self._stored(item):  # another thread was quicker
                return False
            handle = load_feature(item)
            if handle is not None:
                self._handles[item] = handle
            feature = item.feature
        sources = _staged_leaves(feature, device)
        nbytes = sum(source.nbytes for source in sources)
        with self._lock:
            early = self._early.get(item)
            if not sources or (early is not None and early.is_of(feature, device)):
                return False
            self._early.pop(item, None)
            held = sum(other.nbytes for other in list(self._early.values()))
            if held + self._reserved + nbytes > self.limit_bytes:
                self._count(refused=1)
                return False
            self._reserved += nbytes
        try:
            versions = [_version(source) for source in sources]
            copies = self._mover.start(sources, device)
        finally:
            with self._lock:
                self._reserved -= nbytes
        with self._lock:
            self._count(started=1, moved=len(sources), bytes_moved=nbytes)
            if not self._stored(item):  # else nobody would take or drop them
                self._early[item] = _Early(sources, versions, device, nbytes, copies)
        return True

    def _count(self, **amounts: int) -> None:
        with self._lock:
            before = self._counts
            self._counts = replace(before, **{name: getattr(before, name) + n for name, n in amounts.items()})


def _staged_leaves(feature: Any, device: torch.device) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(feature) if is_staged(leaf, device)]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout == torch.strided else 0


def _release(handle: FeatureHandle) -> None:
    try:
        handle.release()
    except Exception:
        _log.warning("releasing a feature's handle failed", exc_info=True)
