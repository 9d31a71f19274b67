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
    MultimodalError,
    PoolError,
)
from mmgraph.items import FeatureHandle, MultimodalDataItem, describe_item
from mmgraph.keeping import Keeper
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.prefetch import Prefetcher
from mmgraph.rows import joined_output, separated_rows
from mmgraph.staging import settled
from mmgraph.timing import PhaseRecorder


def find_problems(
    plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, keeper: Keeper
) -> dict[MultimodalDataItem, MultimodalError]:
    """Find what keeps canonical items from being encoded, before anything is.

    Args:
        plan: The plan.
        specs: The encoders.
        model: Takes deepstack rows apart.
        keeper: Knows whose rows are there.

    Returns:
        The error of each item that has one.

    Raises:
        EncoderSpecError: The model lacks what a deepstack encoder of the plan needs.
    """
    problems: dict[MultimodalDataItem, MultimodalError] = {}
    modalities = {item.modality for item in plan.items}
    if any(m in specs and specs[m].deepstack for m in modalities):
        deepstack_levels(model)
    for modality, missing in plan.misses_by_modality.items():
        spec = specs.get(modality)
        for item in missing:
            if keeper.has(item):  # by another plan, since this one was made, or in a pool
                continue
            if spec is None:
                request = plan.request_of(item)
                problems[item] = MissingEncoderError(
                    f"{describe_item(item, request=request)} has to be encoded and encoders has no "
                    f"{modality.name} encoder, just {[m.name for m in specs]}; add "
                    f"encoders[Modality.{modality.name}] = EncoderSpec(fn)",
                    request=request,
                )
            elif spec.needs_feature and all(twin.feature is None for twin in _with_twins(plan, item)):
                problems[item] = keeper.no_feature(plan, item)
    return problems


def _with_twins(plan: EncodePlan, item: MultimodalDataItem) -> tuple[MultimodalDataItem, ...]:
    return item, *plan.aliases_by_canonical.get(item, ())


class ModalityEncoder:
    """Encodes one modality's items of a plan, each by its own feature or, where that can't be read, by a twin's.

    Args:
        plan: Names the requests in errors.
        modality: Which.
        spec: The encoder.
        model: Takes deepstack rows apart.
        width: The text embedding's width, where known.
        device: Where features go.
        features: Reads them and brings them there.
        keeper: Keeps the rows.
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
        features: Prefetcher,
        keeper: Keeper,
        recorder: PhaseRecorder,
    ) -> None:
        self.plan = plan
        self.modality = modality
        self.spec = spec
        self.model = model
        self.width = width
        self.device = settled(torch.device(spec.device)) if spec.device is not None else device
        self.features = features
        self.keeper = keeper
        self.recorder = recorder
        self.consumed: list[tuple[MultimodalDataItem, FeatureHandle]] = []
        self._sources: dict[MultimodalDataItem, MultimodalDataItem] = {}

    def load(self, items: Sequence[MultimodalDataItem]) -> dict[MultimodalDataItem, MultimodalError]:
        """Read handles and arrays of items, or else of their twins; give the errors of those where that fails."""
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in items:
            try:
                self._sources[item] = self._load_one(item)
            except MultimodalError as error:
                failures[item] = error
        return failures

    def _load_one(self, item: MultimodalDataItem) -> MultimodalDataItem:
        """Give the first of an item and its twins whose feature can be read."""
        request = self.plan.request_of(item)
        failure: MultimodalError | None = None
        for twin in _with_twins(self.plan, item):
            if twin.feature is None and self.spec.needs_feature:
                continue
            try:
                handle = self.features.load(twin)
            except MultimodalError as error:
                if failure is None:
                    failure = type(error)(f"request {request}: {error}", request=request)
                    failure.__cause__ = error.__cause__
            else:
                if handle is not None:
                    self.consumed.append((twin, handle))
                return twin
        raise failure if failure is not None else self.keeper.no_feature(self.plan, item)

    def encode(self, items: Sequence[MultimodalDataItem]) -> None:
        """Encode items in one call of the encoder and keep the rows on them.

        Raises:
            FeatureError: The features can't be brought to the device.
            EncoderFailedError: The encoder raised.
            EncoderOutputError: It returned something that isn't the items' rows.
        """
        sources = [self._sources.get(item, item) for item in items]
        kept = [source.feature for source in sources]
        try:
            with self.recorder.phase("move"):
                self._move(items, sources)
            with self.recorder.phase("encode"):
                out = self._out(items)
                place = None if out is None else _place(out)
                output = self.spec.fn(list(sources), **({"out": out} if self.spec.takes_out else {}))
                counts = [item.num_tokens for item in items]
                refusal = partial(self._output_error, items)
                rows = joined_output(output, counts, refusal)
                deep: torch.Tensor | None = None
                if self.spec.deepstack:
                    rows, deep = separated_rows(self.model, rows, self.width, refusal)
                elif self.width is not None and rows.shape[1] != self.width:
                    raise refusal(f"rows of width {self.width}", f"width {rows.shape[1]}")
        except MultimodalError:
            raise
        except Exception as error:
            raise EncoderFailedError(
                f"the {self.modality.name} encoder failed on {self._named(items)}: {type(error).__name__}: {error}; "
                "the items keep their features, so a call can be tried again",
                request=self._sole_request(items),
            ) from error
        finally:
            for source, feature in zip(sources, kept, strict=True):
                source.feature = feature
        with self.recorder.phase("encode"):
            try:
                self.keeper.keep(items, rows, deep, written=place is not None and _place(rows) == place)
            except PoolError as error:
                raise type(error)(
                    f"rows of {self._named(items)} can't be stored: {error}", request=self._sole_request(items)
                ) from error
        self.recorder.count_encoder(self.modality, counts)

    def _out(self, items: Sequence[MultimodalDataItem]) -> torch.Tensor | None:
        return self.keeper.room(items, self.width) if self.spec.takes_out else None

    def _move(self, items: Sequence[MultimodalDataItem], sources: Sequence[MultimodalDataItem]) -> None:
        try:
            moved = self.features.bring(sources, self.device)
        except Exception as error:
            raise FeatureError(
                f"the features of {self._named(items)} can't be brought to {self.device}: "
                f"{type(error).__name__}: {error}",
                request=self._sole_request(items),
            ) from error
        for source, feature in zip(sources, moved, strict=True):
            source.feature = feature

    def _output_error(
        self, items: Sequence[MultimodalDataItem], expected: str, came: str
    ) -> EncoderOutputError:
        return EncoderOutputError(
            f"the {self.modality.name} encoder must give {expected}, got {came}, for {self._named(items)}; correct the "
            "encoder or the items' offsets, whose spans include both ends",
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


def _place(rows: torch.Tensor) -> tuple[Any, ...]:
    """Name the memory that rows lie in."""
    return rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device
