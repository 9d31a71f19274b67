"""The encode phase of a whole plan: check, encode each modality, share, clean up.

Promises: whatever fails, items that were encoded have shared their rows and dropped their features, and the others
are as they were. Not for two threads at once on the same items: the embedder has a lock for that.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.encoding import ModalityEncoder, find_problems
from mmgraph.errors import MultimodalError, RowsError
from mmgraph.items import FeatureHandle, MultimodalDataItem
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.prefetch import Prefetcher
from mmgraph.rows import check_rows
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
        recorder: Is told of times and counts.
        isolate: Set failing items aside; where an encoder fails on a batch, call it again for each item, to find which.

    Returns:
        The error of each canonical item that can't be used; without ``isolate`` there is none.

    Raises:
        MultimodalError: Without ``isolate``, the first failure. What was encoded before it is kept and shared.
    """
    _adopt(plan, specs, model, width)
    failures = find_problems(plan, specs, model, width)
    _raise_unless(isolate, failures)
    recorder.count_misses({modality: len(items) for modality, items in plan.misses_by_modality.items()})
    consumed: list[tuple[MultimodalDataItem, FeatureHandle]] = []
    try:
        for modality, missing in plan.misses_by_modality.items():
            items = [item for item in missing if item.encoded is None and item not in failures]
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
                recorder=recorder,
            )
            with recorder.phase("move"):
                unread = encoder.load(items)
            consumed += encoder.consumed
            _raise_unless(isolate, unread)
            failures |= unread
            failures |= _encode_items(encoder, [item for item in items if item not in unread], isolate=isolate)
    finally:
        with recorder.phase("share"):
            _share(plan, recorder)
        with recorder.phase("cleanup"):
            _clean_up(plan, consumed, features, recorder)
    return failures


def _adopt(plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None) -> None:
    """Give canonical items the good rows of twins that another plan has encoded since this one was made."""
    for item, twins in plan.aliases_by_canonical.items():
        for twin in twins if item.encoded is None else ():
            if twin.encoded is None:
                continue
            spec = specs.get(item.modality)
            try:
                check_rows(twin, width, deepstack_levels(model) if spec is not None and spec.deepstack else 0)
            except RowsError:
                continue  # of no use to the item, and the twin is not what is encoded
            item.encoded, item.encoded_deepstack = twin.encoded, twin.encoded_deepstack
            break


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


def _share(plan: EncodePlan, recorder: PhaseRecorder) -> None:
    for canonical, twins in plan.aliases_by_canonical.items():
        if canonical.encoded is not None:
            for twin in twins:
                twin.encoded, twin.encoded_deepstack = canonical.encoded, canonical.encoded_deepstack
            recorder.count(aliases=len(twins))


def _clean_up(
    plan: EncodePlan,
    consumed: list[tuple[MultimodalDataItem, FeatureHandle]],
    features: Prefetcher,
    recorder: PhaseRecorder,
) -> None:
    """Drop the features of encoded items and give up their handles; items that failed keep theirs."""
    used_up = [handle for item, handle in consumed if item.encoded is not None]
    for item in plan.items:
        for finished in (item, *plan.aliases_by_canonical.get(item, ())):
            if finished.encoded is None or finished.feature is None:
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
