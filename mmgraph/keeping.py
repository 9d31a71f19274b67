"""Where encoder rows are kept from one batch to the next: what the embedder asks of it, and the items themselves.

Promises: a keeper is one batch's view of a place: what it has found or kept there stays until `release`. The items'
keeper, used where nothing else is asked for, writes rows on the items, in memory of their own.
"""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.errors import MissingFeatureError, MultimodalError, RowsError
from mmgraph.items import MultimodalDataItem, describe_item
from mmgraph.layouts import Layout, Wanted, listed_layout
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.rows import check_rows, cut_rows


class Keeper(Protocol):
    """One batch's rows in the place where rows are kept."""

    @property
    def keeps_features(self) -> bool:
        """Whether items keep their features once they are encoded."""

    @property
    def released(self) -> bool:
        """Whether `release` was called."""

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Find and hold rows that are there already; give the errors of items whose rows can't be theirs."""

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Find rows, and take those that items bring along; give the errors of items that can't be used."""

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether a canonical item's rows are there."""

    def no_feature(self, plan: EncodePlan, item: MultimodalDataItem) -> MissingFeatureError:
        """Make the error of an item that has to be encoded and has no feature."""

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Make room for items that will be encoded; with ``isolate`` give the errors of those that find none."""

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> torch.Tensor | None:
        """Give memory that the rows of items may be written to, one after another; None where there is none."""

    def keep(
        self,
        items: Sequence[MultimodalDataItem],
        rows: torch.Tensor,
        deep: torch.Tensor | None,
        *,
        written: bool = False,
    ) -> None:
        """Keep the rows of items, which lie one after another; ``written``: in the room that was given."""

    def cancel(self) -> None:
        """Give up room that nothing was kept in; called when encoding has ended, however it did."""

    def share(self, plan: EncodePlan) -> int:
        """Give the twins of items that are there their rows; tell how many that were."""

    def done(self, item: MultimodalDataItem) -> None:
        """Take note of an item that is encoded, before its feature is dropped or kept."""

    def layout(self, wanted: Wanted) -> Layout:
        """Lay out the rows of some ranges of a plan whose items are all there."""

    def check(self, plan: EncodePlan, item: MultimodalDataItem, width: int, levels: int) -> None:
        """Raise RowsError unless a canonical item's rows are there and fit."""

    def hold(self, item: MultimodalDataItem) -> Any:
        """Keep an item's rows beyond this batch; give what ends that (``release``), or None where nothing does."""

    def release(self) -> None:
        """End the batch's hold, after what reads the rows was launched."""


def request_error(plan: EncodePlan, item: MultimodalDataItem, error: MultimodalError) -> MultimodalError:
    """Give an item's error with the request that it concerns."""
    request = plan.request_of(item)
    named = type(error)(f"request {request}: {error}", request=request)
    named.__cause__ = error.__cause__
    return named


def no_feature_error(plan: EncodePlan, item: MultimodalDataItem) -> MissingFeatureError:
    """Make the error of an item that has to be encoded and has no feature."""
    request = plan.request_of(item)
    return MissingFeatureError(
        f"{describe_item(item, request=request)} has to be encoded and has no feature, nor has a twin in the batch; "
        "give it one, or its rows as encoded, or declare EncoderSpec(needs_feature=False)",
        request=request,
    )


def levels_of(specs: Mapping[Modality, EncoderSpec], model: Any, modality: Modality) -> int:
    """Give the deepstack levels that a modality's items have rows for."""
    spec = specs.get(modality)
    return deepstack_levels(model) if spec is not None and spec.deepstack else 0


def levels_by_modality(
    specs: Mapping[Modality, EncoderSpec], model: Any, items: Iterable[MultimodalDataItem]
) -> dict[Modality, int]:
    """Give the deepstack levels of each modality among items."""
    return {modality: levels_of(specs, model, modality) for modality in {item.modality for item in items}}


class ItemKeeper:
    """Rows on the items: ``encoded`` and ``encoded_deepstack``."""

    keeps_features = False
    released = False

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Do nothing: rows are on the items."""
        return {}

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Give canonical items the good rows of twins that another plan has encoded since this one was made."""
        levels = levels_by_modality(specs, model, plan.items)
        for item, twins in plan.aliases_by_canonical.items():
            for twin in twins if item.encoded is None else ():
                if twin.encoded is None:
                    continue
                try:
                    check_rows(twin, width, levels[item.modality])
                except RowsError:
                    continue  # of no use to the item, and the twin is not what is encoded
                item.encoded, item.encoded_deepstack = twin.encoded, twin.encoded_deepstack
                break
        return checked_items(plan, plan.items, levels, width)

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item is encoded."""
        return item.encoded is not None

    def no_feature(self, plan: EncodePlan, item: MultimodalDataItem) -> MissingFeatureError:
        """Make the error of an item that has to be encoded and has no feature."""
        return no_feature_error(plan, item)

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Do nothing: rows get memory when they are there."""
        return {}

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> None:
        """Give none: each item's rows have memory of their own."""

    def keep(
        self,
        items: Sequence[MultimodalDataItem],
        rows: torch.Tensor,
        deep: torch.Tensor | None,
        *,
        written: bool = False,
    ) -> None:
        """Write rows on their items, all or none."""
        counts = [item.num_tokens for item in items]
        parts = cut_rows(rows, counts)
        deep_parts = [None] * len(items) if deep is None else cut_rows(deep, counts)
        for item, part, deep_part in zip(items, parts, deep_parts, strict=True):
            item.encoded, item.encoded_deepstack = part, deep_part

    def cancel(self) -> None:
        """Do nothing: no room was taken."""

    def share(self, plan: EncodePlan) -> int:
        """Write an encoded item's rows on its twins."""
        count = 0
        for canonical, twins in plan.aliases_by_canonical.items():
            if canonical.encoded is not None:
                for twin in twins:
                    twin.encoded, twin.encoded_deepstack = canonical.encoded, canonical.encoded_deepstack
                count += len(twins)
        return count

    def done(self, item: MultimodalDataItem) -> None:
        """Do nothing: the rows are on the item."""

    def check(self, plan: EncodePlan, item: MultimodalDataItem, width: int, levels: int) -> None:
        """Raise RowsError unless an item's rows are there and fit."""
        try:
            check_rows(item, width, levels)
        except RowsError as error:
            raise request_error(plan, item, error) from error

    def layout(self, wanted: Wanted) -> Layout:
        """Lay out the items' tensors."""
        name = "encoded_deepstack" if wanted.is_deep else "encoded"
        return listed_layout(wanted, operator.attrgetter(name))

    def hold(self, item: MultimodalDataItem) -> None:
        """Do nothing: an item keeps its own rows."""

    def release(self) -> None:
        """Do nothing: an item keeps its own rows."""


def checked_items(
    plan: EncodePlan,
    items: Collection[MultimodalDataItem],
    levels: Mapping[Modality, int],
    width: int | None,
) -> dict[MultimodalDataItem, MultimodalError]:
    """Give the errors of items whose own rows don't fit, by the deepstack levels of their modalities."""
    problems: dict[MultimodalDataItem, MultimodalError] = {}
    for item in items:
        if item.encoded is not None:
            try:
                check_rows(item, width, levels[item.modality])
            except RowsError as error:
                problems[item] = request_error(plan, item, error)
    return problems
