"""The encode phase of a whole plan: check, encode each modality, share, clean up.

Promises: whatever fails, items that were encoded have shared their rows and dropped their features, and the others
are as they were. Not for two threads at once on the same items: the embedder has a lock for that.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.encoding import ModalityEncoder, find_problems
from mmgraph.errors import MultimodalError
from mmgraph.items import FeatureHandle, MultimodalDataItem
from mmgraph.keeping import Keeper
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.prefetch import Prefetcher
from mmgraph.staging import settled
from mmgraph.timing import PhaseRecorder

_log = logging.getLogger(__name__)


def encode_plan(
    plan: EncodePlan,
    specs: Mapping[Modality, EncoderSpec],
    model: Any,
    width: int | None,
    device: torch.device,
    features: Prefetcher,
    keeper: Keeper,
    recorder: PhaseRecorder,
    *,
    isolate: bool,
) -> dict[MultimodalDataItem, MultimodalError]:
    """Encode a plan's misses, give aliases their rows and drop what is used up.

    Args:
        plan: The plan.
        specs: The encoders.
        model: Takes deepstack rows apart.
        width: The text embedding's width, where known.
        device: Where features go, unless a spec says otherwise.
        features: Reads them and brings them there.
        keeper: Finds and keeps rows.
        recorder: Is told of times and counts.
        isolate: Set failing items aside; where an encoder fails on a batch, call it again for each item, to find which.

    Returns:
        The error of each canonical item that can't be used; without ``isolate`` there is none.

    Raises:
        MultimodalError: Without ``isolate``, the first failure. What was encoded before it is kept and shared.
    """
    failures = keeper.open(plan, specs, model, width)
    for item, error in find_problems(plan, specs, model, keeper).items():
        failures.setdefault(item, error)
    _raise_unless(isolate, failures)
    wanted = {
        modality: [item for item in missing if not keeper.has(item) and item not in failures]
        for modality, missing in plan.misses_by_modality.items()
    }
    failures |= keeper.reserve(plan, [item for items in wanted.values() for item in items], isolate=isolate)
    recorder.count_misses({modality: len(items) for modality, items in wanted.items() if items})
    consumed: list[tuple[MultimodalDataItem, FeatureHandle]] = []
    try:
        for modality, missing in wanted.items():
            items = [item for item in missing if item not in failures]
            if not items:
                continue
            encoder = ModalityEncoder(
                plan,
                modality,
                specs[modality],
                model=model,
                width=width,
                device=settled(device),
                features=features,
                keeper=keeper,
                recorder=recorder,
            )
            with recorder.phase("move"):
                unread = encoder.load(items)
            consumed += encoder.consumed
            _raise_unless(isolate, unread)
            failures |= unread
            failures |= _encode_items(encoder, [item for item in items if item not in unread], isolate=isolate)
    finally:
        keeper.cancel()
        with recorder.phase("share"):
            recorder.count(aliases=keeper.share(plan))
        with recorder.phase("cleanup"):
            _clean_up(plan, failures, consumed, features, keeper, recorder)
    return failures


def _raise_unless(isolate: bool, failures: dict[MultimodalDataItem, MultimodalError]) -> None:
    if failures and not isolate:
        raise next(iter(failures.values()))


def _encode_items(
    encoder: ModalityEncoder, items: list[MultimodalDataItem], *, isolate: bool
) -> dict[MultimodalDataItem, MultimodalError]:
    if not items:
        return {}
    try:
        encoder.encode(items)
    except MultimodalError as error:
        if not isolate:
            raise
        if len(items) == 1:
            return {items[0]: error}
    else:
        return {}
    failures: dict[MultimodalDataItem, MultimodalError] = {}
    for item in items:
        failures |= _encode_items(encoder, [item], isolate=True)
    return failures


def _clean_up(
    plan: EncodePlan,
    failures: Collection[MultimodalDataItem],
    consumed: list[tuple[MultimodalDataItem, FeatureHandle]],
    features: Prefetcher,
    keeper: Keeper,
    recorder: PhaseRecorder,
) -> None:
    """Drop the features of encoded items and give up their handles; items that failed keep theirs."""
    canonical = {twin: item for item, twins in plan.aliases_by_canonical.items() for twin in twins}
    used_up = [handle for item, handle in consumed if keeper.has(canonical.get(item, item))]
    for item in plan.items:
        if not keeper.has(item) or item in failures:
            continue
        for finished in (item, *plan.aliases_by_canonical.get(item, ())):
            if finished.feature is None:
                continue
            keeper.done(finished)
            if keeper.keeps_features:
                features.retain(finished)
                continue
            raw, handles = features.drop(finished)
            used_up += handles
            recorder.count(features_released=int(raw))
    for handle in used_up:
        try:
            handle.release()
        except Exception:
            _log.warning("releasing a feature's handle failed; its rows are unharmed", exc_info=True)
        else:
            recorder.count(handles_released=1)
