"""Encoders: what they are given, what they must return, and what an item keeps of it.

Promises: everything that can be checked is checked before the first encoder runs; an item is changed only once
all its rows have passed their checks, and then owns memory of its own; where an encoder fails, its items keep
their features.
"""

from collections.abc import Mapping, Sequence
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


def check_rows(item: MultimodalDataItem, width: int | None, levels: int) -> None:
    """Check the rows that an item keeps.

    Args:
        item: An item.
        width: The text embedding's width, where known.
        levels: Deepstack levels that it must have rows for.

    Raises:
        RowsError: There are none, or of the wrong type, number or width.
    """
    tokens = item.num_tokens
    deep_width = None if width is None else levels * width
    if not _fit(item.encoded, tokens, width):
        raise _rows_error(item, "encoded", item.encoded, width)
    if levels and not _fit(item.encoded_deepstack, tokens, deep_width):
        raise _rows_error(item, "encoded_deepstack", item.encoded_deepstack, deep_width)


def _fit(rows: Any, tokens: int, width: int | None) -> bool:
    if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
        return False
    shape = rows.shape
    return len(shape) == 2 and shape[0] == tokens and (width is None or shape[1] == width)


def _rows_error(item: MultimodalDataItem, name: str, rows: Any, width: int | None) -> RowsError:
    came = f"{list(rows.shape)} of {rows.dtype}" if isinstance(rows, torch.Tensor) else type(rows).__name__
    return RowsError(
        f"{describe_item(item)}: {name} must be a floating-point tensor of shape "
        f"[{item.num_tokens}, {'width' if width is None else width}], got {came}; "
        "encode the item first, or correct the rows or the offsets"
    )


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
                rows = self._rows(items, self.spec.fn(list(items)))
                deep: torch.Tensor | None = None
                if self.spec.deepstack:
                    rows, deep = self._separate(rows, items)
                elif self.width is not None and rows.shape[1] != self.width:
                    raise self._output_error(items, f"rows of width {self.width}", f"width {rows.shape[1]}")
                counts = [item.num_tokens for item in items]
                parts = _own(rows, counts)
                deep_parts = [None] * len(items) if deep is None else _own(deep, counts)
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

    def _rows(self, items: Sequence[MultimodalDataItem], output: Any) -> torch.Tensor:
        tensors = list(output) if isinstance(output, list | tuple) else [output]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or not tensor.is_floating_point():
                came = (
                    f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
                )
                raise self._output_error(items, "a floating-point tensor of rows", str(came))
        flat = [tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1]) for tensor in tensors]
        if len({tensor.shape[1] for tensor in flat}) != 1:
            raise self._output_error(items, "rows of one width", str([list(tensor.shape) for tensor in flat]))
        rows = flat[0] if len(flat) == 1 else torch.cat(flat)
        counts = [item.num_tokens for item in items]
        if rows.shape[0] != sum(counts):
            raise self._output_error(items, f"{sum(counts)} rows, per item {counts}", f"{rows.shape[0]} rows")
        return rows

    def _separate(
        self, rows: torch.Tensor, items: Sequence[MultimodalDataItem]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        levels = deepstack_levels(self.model)
        pair = self.model.separate_deepstack_embeds(rows)
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise self._output_error(
                items, "main and deep rows from separate_deepstack_embeds", type(pair).__name__
            )
        main, deep = pair
        shapes = [list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in pair]
        width = self.width
        if width is None and isinstance(main, torch.Tensor) and main.dim() == 2:
            width = main.shape[1]
        expected = [[rows.shape[0], width], [rows.shape[0], (width or 0) * levels]]
        if shapes != expected:
            raise self._output_error(
                items, f"main and deep rows of shapes {expected} ({levels} deepstack levels)", f"{shapes}"
            )
        return main, deep

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


def _own(rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Cut rows into pieces with memory of their own: a view would keep the whole batch's output alive."""
    if len(counts) == 1 or rows.requires_grad:
        return [part.clone(memory_format=torch.contiguous_format) for part in rows.split(counts)]
    parts = [rows.new_empty((count, rows.shape[1])) for count in counts]
    torch.split_with_sizes_copy(rows, counts, dim=0, out=parts)  # one launch for all
    return parts
