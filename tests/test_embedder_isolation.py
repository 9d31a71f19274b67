"""Invariant: set aside, a failing request harms no other: their rows are as without it, and it can be tried again."""

import pytest
import torch
from mm_batches import HIDDEN, Encoder, Handle, simple_item

from mmgraph.embedder import EmbedResult, EncoderSpec, MultimodalEmbedder
from mmgraph.errors import (
    AliasError,
    ContextError,
    EncoderFailedError,
    EncoderOutputError,
    FeatureError,
    InputsError,
    MissingEncoderError,
    MissingFeatureError,
    MultimodalError,
    RowsError,
)
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

TABLE = torch.randn(7, HIDDEN)
IDS = torch.zeros(12, dtype=torch.int64)


class Picky(Encoder):
    """Refuses, or cuts short, items that say so."""

    def __call__(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        rows = super().__call__(items)
        if any(item.model_specific_data.get("raise") for item in items):
            raise RuntimeError("boom")
        return rows[:-1] if any(item.model_specific_data.get("short") for item in items) else rows


def run(items: list[MultimodalDataItem], encoders: dict | None = None) -> EmbedResult:
    """Three requests of four rows, each with one item."""
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)
    if encoders is None:
        encoders = {modality: EncoderSpec(Picky()) for modality in Modality}
    return MultimodalEmbedder().apply_result(IDS, TABLE, ctx, encoders, on_error="isolate")


def good(variant: int, modality: Modality = Modality.IMAGE, **fields: object) -> MultimodalDataItem:
    return simple_item([(1, 2)], modality, variant=variant, hash=variant, **fields)


def consumed_handle() -> Handle:
    handle = Handle(torch.zeros(2, HIDDEN))
    handle.consume()
    return handle


BAD = {
    "offsets": (lambda: MultimodalDataItem("image", [(2, 1)]), InputsError),
    "twin": (lambda: simple_item([(1, 1)], hash=1), AliasError),
    "encoder raises": (lambda: good(9, model_specific_data={"raise": True}), EncoderFailedError),
    "too few rows": (lambda: good(9, model_specific_data={"short": True}), EncoderOutputError),
    "no feature": (lambda: good(9, feature=None), MissingFeatureError),
    "rows": (lambda: good(9, encoded=torch.zeros(1, HIDDEN)), RowsError),
    "handle": (lambda: good(9, feature=consumed_handle()), FeatureError),
    "array": (lambda: good(9, feature=__import__("numpy").array([object()])), FeatureError),
}


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("kind", BAD)
def test_the_others_are_as_without_it(kind: str, place: int) -> None:
    make, error = BAD[kind]
    items = [good(1), good(2)]
    items.insert(place, bad := make())
    features = {item: item.feature for item in items}
    result = run(items)
    assert list(result.failed) == [place]
    assert type(result.failed[place]) is error
    assert result.failed[place].request == place
    assert f"request {place}" in str(result.failed[place])
    expected = TABLE[0].repeat(12, 1)
    for request, item in enumerate(items):
        if item is not bad:
            expected[4 * request + 1 : 4 * request + 3] = -features[item]
            assert item.feature is None
    assert torch.equal(result.embeds, expected)
    assert result.kwargs == {}
    if bad.encoded is None:
        assert bad.feature is features[bad]


def test_a_missing_encoder_fails_only_those_who_need_it() -> None:
    encoder = Encoder()
    result = run([good(1), good(2, Modality.AUDIO), good(3)], {Modality.IMAGE: encoder})
    assert [type(error) for error in result.failed.values()] == [MissingEncoderError]
    assert list(result.failed) == [1]
    assert len(encoder.calls) == 1


def test_twins_of_a_failure_fail_with_it_and_work_again_later() -> None:
    items = [good(1, model_specific_data={"raise": True}), good(1), good(2)]
    result = run(items)
    assert list(result.failed) == [0, 1]
    assert items[1].feature is not None
    items[0].model_specific_data.clear()
    again = run(items)
    assert again.failed == {}
    assert torch.equal(again.embeds[1:3], again.embeds[5:7])
    assert torch.equal(again.embeds[8:], result.embeds[8:])


NO_FEATURE = {
    "none": lambda: None,
    "broken handle": consumed_handle,
    "array": lambda: __import__("numpy").array([object()]),
}


@pytest.mark.parametrize("dressed", [lambda rows: rows, Handle])
@pytest.mark.parametrize("kind", NO_FEATURE)
@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_a_twin_s_feature_serves_where_the_item_s_own_can_t_be_read(kind, dressed, on_error) -> None:
    items = [good(1, feature=NO_FEATURE[kind]()), good(1), good(2)]
    rows, handle = items[1].feature, items[0].feature
    items[1].feature = dressed(rows)
    taken = items[1].feature
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)
    encoder = Picky()
    result = MultimodalEmbedder().apply_result(IDS, TABLE, ctx, {Modality.IMAGE: encoder}, on_error=on_error)
    assert result.failed == {}
    assert encoder.calls == [[items[1], items[2]]]
    assert torch.equal(result.embeds[[1, 2, 5, 6]], torch.cat([-rows, -rows]))
    assert items[0].encoded is items[1].encoded
    assert [item.feature for item in items] == [None] * 3
    assert [spent.released for spent in (handle, taken) if isinstance(spent, Handle)] == [
        1 for spent in (handle, taken) if isinstance(spent, Handle)
    ]


def test_twins_without_any_feature_fail_together_and_keep_what_they_have() -> None:
    broken = consumed_handle()
    items = [good(1, feature=None), good(1, feature=broken), good(2)]
    result = run(items)
    assert {request: type(error) for request, error in result.failed.items()} == {
        0: FeatureError,
        1: FeatureError,
    }
    assert items[1].feature is broken
    items[0].feature = good(1).feature
    assert run(items).failed == {}


def test_all_fail() -> None:
    result = run([good(k, feature=None) for k in range(3)])
    assert result.embeds is None
    assert list(result.failed) == [0, 1, 2]
    result = run([MultimodalDataItem("image", [(3, 1)]) for _ in range(3)])
    assert result.embeds is None
    assert list(result.failed) == [0, 1, 2]


def test_without_failures_the_encoder_is_called_once() -> None:
    encoder = Picky()
    assert run([good(1), good(2), good(3)], {Modality.IMAGE: encoder}).failed == {}
    assert len(encoder.calls) == 1


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("embedding", [TABLE, lambda ids: TABLE[ids]])
@pytest.mark.parametrize("strict", [True, False])
def test_placeholders_of_a_failure_are_not_looked_up(kind: str, embedding: object, strict: bool) -> None:
    items = [good(1), BAD[kind][0](), good(2)]
    ids = IDS.clone()
    ids[[1, 2, 5, 6, 9, 10]] = 1_000_000
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)
    encoders = {modality: EncoderSpec(Picky()) for modality in Modality}
    embedder = MultimodalEmbedder(strict=strict)
    result = embedder.apply_result(ids, embedding, ctx, encoders, on_error="isolate")
    assert list(result.failed) == [1]
    assert torch.equal(result.embeds[1:3], items[0].encoded)
    assert torch.equal(result.embeds[9:11], items[2].encoded)


def test_a_request_without_items_of_its_own_can_fail_too() -> None:
    first, second = good(1), good(2)
    inputs = [MultimodalInputs([first]), MultimodalInputs([good(3)]), [good(4)], MultimodalInputs([second])]
    ctx = MultimodalForwardContext(inputs, [0, -2, 0, 0], [3] * 4)
    result = MultimodalEmbedder().apply_result(IDS, TABLE, ctx, {Modality.IMAGE: Encoder()}, on_error="isolate")
    assert {request: type(error) for request, error in result.failed.items()} == {
        1: ContextError,
        2: ContextError,
    }
    assert torch.equal(result.embeds[1:3], first.encoded)
    assert torch.equal(result.embeds[10:12], second.encoded)


def test_a_wrong_batch_is_raised_all_the_same() -> None:
    ctx = MultimodalForwardContext([MultimodalInputs([good(1)])], [0], [13])
    with pytest.raises(ContextError):
        MultimodalEmbedder().apply_result(IDS, TABLE, ctx, {Modality.IMAGE: Encoder()}, on_error="isolate")


@pytest.mark.parametrize("kind", BAD)
def test_raised_instead_it_names_the_request_and_a_good_call_works(kind: str) -> None:
    make, error = BAD[kind]
    items = [good(1), make(), good(2)]
    inputs = [MultimodalInputs([item]) for item in items]
    encoders = {modality: EncoderSpec(Picky()) for modality in Modality}
    with pytest.raises(error) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, MultimodalForwardContext(inputs, [0] * 3, [4] * 3), encoders)
    assert isinstance(caught.value, MultimodalError)
    assert "request 1" in str(caught.value)
    inputs[1] = None
    embeds, _ = MultimodalEmbedder().apply(
        IDS, TABLE, MultimodalForwardContext(inputs, [0] * 3, [4] * 3), encoders
    )
    assert torch.equal(embeds[1:3], items[0].encoded)
    assert torch.equal(embeds[9:11], items[2].encoded)
