"""Encoders: what they are given, what they must return, and what an item keeps of it.

Promises: everything that can be checked is checked before the first encoder runs; an item is changed only once
all its rows have passed their checks, and then owns memory of its own; where an encoder fails, its items keep
their features.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.errors import (
    EncoderFailedError,
    EncoderOutputError,
    FeatureError,
    MissingEncoderError,
    MissingFeatureError,
    MultimodalError,
    RowsError,
)
from mmgraph.items import FeatureHandle, MultimodalDataItem, describe_item
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.rows import check_rows, cut_rows, joined_output, separated_rows
from mmgraph.staging import FeatureMover, load_feature, settled
from mmgraph.timing import PhaseRecorder


def find_problems(
    plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
) -> dict[MultimodalDataItem, MultimodalError]:
    """Find what keeps canonical items from being encoded or used, before anything is encoded.

    Args:
        plan: The plan.
        specs: The encoders.
        model: Takes deepstack rows apart.
        width: The text embedding's width, where known.

    Returns:
        The error of each item that has one.

    Raises:
        EncoderSpecError: The model lacks what a deepstack encoder of the plan needs.
    """
    problems: dict[MultimodalDataItem, MultimodalError] = {}
    modalities = {item.modality for item in plan.items}
    levels = deepstack_levels(model) if any(m in specs and specs[m].deepstack for m in modalities) else 0
    for modality, missing in plan.misses_by_modality.items():
        spec = specs.get(modality)
        for item in missing:
            if item.encoded is not None:  # by another plan, since this one was made
                continue
            request = plan.request_of(item) if spec is None or item.feature is None else None
            if spec is None:
                problems[item] = MissingEncoderError(
                    f"{describe_item(item, request=request)} has to be encoded and encoders has no "
                    f"{modality.name} encoder, just {[m.name for m in specs]}; add "
                    f"encoders[Modality.{modality.name}] = EncoderSpec(fn)",
                    request=request,
                )
            elif item.feature is None and spec.needs_feature:
                problems[item] = MissingFeatureError(
                    f"{describe_item(item, request=request)} has to be encoded and has no feature; give it one, or its "
                    "rows as encoded, or declare EncoderSpec(needs_feature=False)",
                    request=request,
                )
    for item in plan.items:
        if item.encoded is not None:
            spec = specs.get(item.modality)
            try:
                check_rows(item, width, levels if spec is not None and spec.deepstack else 0)
            except RowsError as error:
                request = plan.request_of(item)
                problems[item] = RowsError(f"request {request}: {error}", request=request)
    return problems


class ModalityEncoder:
    """Encodes one modality's items of a plan.

    Args:
        plan: Names the requests in errors.
        modality: Which.
        spec: The encoder.
        model: Takes deepstack rows apart.
        width: The text embedding's width, where known.
        device: Where features go.
        mover: Brings them there.
        recorder: Is told of times and counts.
    """

    def __init__(
        self,
        plan: EncodePlan,
        modality: Modality,
        spec: EncoderSpec,
        *,
        model: Any,
        width: int | None,
        device: torch.device,
        mover: FeatureMover,
        recorder: PhaseRecorder,
    ) -> None:
        self.plan = plan
        self.modality = modality
        self.spec = spec
        self.model = model
        self.width = width
        self.device = settled(torch.device(spec.device)) if spec.device is not None else device
        self.mover = mover
        self.recorder = recorder
        self.consumed: list[tuple[MultimodalDataItem, FeatureHandle]] = []

    def load(self, items: Sequence[MultimodalDataItem]) -> dict[MultimodalDataItem, MultimodalError]:
        """Read handles and arrays of items; give the errors of those where that fails."""
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in items:
            try:
                handle = load_feature(item)
            except MultimodalError as error:
                request = self.plan.request_of(item)
                failures[item] = type(error)(f"request {request}: {error}", request=request)
                failures[item].__cause__ = error.__cause__
            else:
                if handle is not None:
                    self.consumed.append((item, handle))
        return failures

    def encode(self, items: Sequence[MultimodalDataItem]) -> None:
        """Encode items in one call of the encoder and keep the rows on them.

        Raises:
            FeatureError: The features can't be brought to the device.
            EncoderFailedError: The encoder raised.
            EncoderOutputError: It returned something that isn't the items' rows.
        """
        kept = [item.feature for item in items]
        try:
            with self.recorder.phase("move"):
                self._move(items)
            with self.recorder.phase("encode"):
                output = self.spec.fn(list(items))
                counts = [item.num_tokens for item in items]
                refusal = partial(self._output_error, items)
                rows = joined_output(output, counts, refusal)
                deep: torch.Tensor | None = None
                if self.spec.deepstack:
                    rows, deep = separated_rows(self.model, rows, self.width, refusal)
                elif self.width is not None and rows.shape[1] != self.width:
                    raise refusal(f"rows of width {self.width}", f"width {rows.shape[1]}")
                parts = cut_rows(rows, counts)
                deep_parts = [None] * len(items) if deep is None else cut_rows(deep, counts)
        except MultimodalError:
            raise
        except Exception as error:
            raise EncoderFailedError(
                f"the {self.modality.name} encoder failed on {self._named(items)}: {type(error).__name__}: {error}; "
                "the items keep their features, so a call can be tried again",
                request=self._sole_request(items),
            ) from error
        finally:
            for item, feature in zip(items, kept, strict=True):
                item.feature = feature
        for item, part, deep_part in zip(items, parts, deep_parts, strict=True):
            item.encoded, item.encoded_deepstack = part, deep_part
        self.recorder.count_encoder(self.modality, counts)

    def _move(self, items: Sequence[MultimodalDataItem]) -> None:
        try:
            moved = self.mover.move_features([item.feature for item in items], self.device)
        except Exception as error:
            raise FeatureError(
                f"the features of {self._named(items)} can't be brought to {self.device}: "
                f"{type(error).__name__}: {error}",
                request=self._sole_request(items),
            ) from error
        for item, feature in zip(items, moved, strict=True):
            item.feature = feature

    def _output_error(
        self, items: Sequence[MultimodalDataItem], expected: str, came: str
    ) -> EncoderOutputError:
        return EncoderOutputError(
            f"the {self.modality.name} encoder must give {expected}, got {came}, for {self._named(items)}; correct the "
            "encoder or the items' offsets",
            request=self._sole_request(items),
        )

    def _named(self, items: Sequence[MultimodalDataItem]) -> str:
        shown = "; ".join(
            f"{describe_item(item, request=self.plan.request_of(item))} of {item.num_tokens} tokens"
            for item in items[:8]
        )
        return f"{len(items)} items: {shown}{'; ...' if len(items) > 8 else ''}"

    def _sole_request(self, items: Sequence[MultimodalDataItem]) -> int | None:
        requests = {self.plan.request_of(item) for item in items}
        return requests.pop() if len(requests) == 1 else None
