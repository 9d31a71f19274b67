"""Invariant: deepstack rows lie at their items' positions and nowhere else, in the form that the spec names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import (
    HIDDEN,
    LEVELS,
    VOCABULARY,
    Encoder,
    Model,
    feature_for,
    one_request,
    random_batch,
    simple_item,
)

from mmgraph.embedder import DeepstackRows, EncoderSpec, MultimodalEmbedder
from mmgraph.errors import EncoderOutputError, EncoderSpecError, RowsError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import RowMap, deepstack_add

WIDE = HIDDEN * (1 + LEVELS)
TABLE = torch.randn(VOCABULARY, HIDDEN)


def deep_item(**fields: object) -> MultimodalDataItem:
    return MultimodalDataItem(
        "image", [(1, 2)], **{"feature": feature_for(Modality.IMAGE, 0, 2, WIDE), **fields}
    )


def call(
    item: MultimodalDataItem, model: object, encoder: object = None, **spec: object
) -> tuple[torch.Tensor, dict]:
    encoders = {Modality.IMAGE: EncoderSpec(encoder or Encoder(WIDE), deepstack=True, **spec)}
    ids = torch.zeros(4, dtype=torch.int64)
    return MultimodalEmbedder().apply(ids, TABLE, one_request([item], 4), encoders, model)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_sparse_adds_what_dense_adds(seed: int) -> None:
    dense_batch, sparse_batch = random_batch(seed), random_batch(seed)
    encoders = {
        modality: EncoderSpec(spec.fn, deepstack=spec.deepstack, deepstack_form="sparse")
        for modality, spec in sparse_batch.encoders.items()
    }
    embedder = MultimodalEmbedder()
    embeds, dense = embedder.apply(
        dense_batch.input_ids, dense_batch.embedding, dense_batch.ctx, dense_batch.encoders, Model()
    )
    again, sparse = embedder.apply(
        sparse_batch.input_ids, sparse_batch.embedding, sparse_batch.ctx, encoders, Model()
    )
    assert (embeds is None) == (again is None)
    assert bool(dense) == bool(sparse)
    if not dense:
        return
    assert torch.equal(embeds, again)
    rows = sparse["deepstack_rows"]
    assert isinstance(rows, DeepstackRows)
    assert rows.levels == LEVELS
    hidden = torch.randn(embeds.shape).to(embeds.dtype)
    buffer = dense["input_deepstack_embeds"]
    for level in range(LEVELS):
        expected = hidden + buffer[:, level * HIDDEN : (level + 1) * HIDDEN]
        assert torch.equal(deepstack_add(hidden, rows.pool, rows.row_map, level), expected)


def test_no_keyword_where_no_range_has_deepstack() -> None:
    encoders = {
        Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True),
        Modality.AUDIO: EncoderSpec(Encoder()),
    }
    item = simple_item([(0, 1)], Modality.AUDIO)
    ids = torch.zeros(4, dtype=torch.int64)
    embeds, kwargs = MultimodalEmbedder().apply(ids, TABLE, one_request([item], 4), encoders, Model())
    assert torch.equal(embeds[:2], item.encoded)
    assert kwargs == {}
    assert item.encoded_deepstack is None


def test_a_twin_has_deep_rows_of_its_own_later() -> None:
    first, twin = deep_item(hash=1), deep_item(hash=1)
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True)}
    ctx = MultimodalForwardContext([MultimodalInputs([first]), MultimodalInputs([twin])], [0, 0], [4, 4])
    _, both = MultimodalEmbedder().apply(torch.zeros(8, dtype=torch.int64), TABLE, ctx, encoders, Model())
    _, alone = call(twin, Model())
    assert torch.equal(alone["input_deepstack_embeds"], both["input_deepstack_embeds"][4:])
    assert alone["input_deepstack_embeds"][1:3].abs().sum() > 0


class Wrong:
    deepstack_visual_indexes = (1, 2)

    def __init__(self, give: object) -> None:
        self.separate_deepstack_embeds = give


@pytest.mark.parametrize(
    "give",
    [
        lambda rows: (rows, rows[:, :0]),
        lambda rows: (rows[:, :HIDDEN], rows[:, HIDDEN : 2 * HIDDEN]),
        lambda rows: (rows[:, :HIDDEN], None),
        lambda rows: (rows[:1, :HIDDEN], rows[:, HIDDEN:]),
        lambda rows: (rows[:, :HIDDEN], rows[:1, HIDDEN:]),
        lambda rows: (rows[:, : HIDDEN - 1], rows[:, HIDDEN:]),
        lambda rows: rows[:, :HIDDEN],
    ],
)
def test_wrong_separations_are_refused_and_a_retry_works(give: object) -> None:
    item = deep_item()
    feature = item.feature
    with pytest.raises(EncoderOutputError, match="request 0, IMAGE item") as caught:
        call(item, Wrong(give))
    assert caught.value.request == 0
    assert item.encoded is None
    assert item.encoded_deepstack is None
    assert item.feature is feature
    embeds, kwargs = call(item, Model())
    assert torch.equal(embeds[1:3], -feature[:, :HIDDEN])
    assert torch.equal(kwargs["input_deepstack_embeds"][1:3], -feature[:, HIDDEN:])


@pytest.mark.parametrize("model", [None, object(), Wrong(None)])
def test_a_model_without_deepstack_is_refused_before_encoding(model: object) -> None:
    item, encoder = deep_item(), Encoder(WIDE)
    with pytest.raises(EncoderSpecError, match="needs a multimodal_model with separate_deepstack_embeds"):
        call(item, model, encoder)
    assert encoder.calls == []
    call(item, Model(), encoder)
    assert encoder.calls == [[item]]


@pytest.mark.parametrize("on_error", ["raise", "isolate"])
@pytest.mark.parametrize(
    ("separate", "came"),
    [
        (lambda main, deep: (main.int(), deep.int()), r"torch.int32 \[2, 5\] and torch.int32 \[2, 10\]"),
        (lambda main, deep: (main, deep.int()), r"and torch.int32 \[2, 10\]"),
        (lambda main, deep: (main, deep.to("meta")), "on meta"),
        (lambda main, deep: (main.to("meta"), deep), "on meta and"),
    ],
)
def test_rows_taken_apart_wrongly_leave_items_as_they_were(separate, came: str, on_error: str) -> None:
    class Wrong(Model):
        def separate_deepstack_embeds(self, rows: torch.Tensor) -> object:
            return separate(*super().separate_deepstack_embeds(rows))

    item, other = deep_item(), simple_item([(0, 2)], Modality.AUDIO)
    feature = item.feature
    ctx = MultimodalForwardContext([MultimodalInputs([item]), MultimodalInputs([other])], [0, 0], [4, 4])
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True), Modality.AUDIO: Encoder()}
    ids = torch.zeros(8, dtype=torch.int64)
    if on_error == "raise":
        with pytest.raises(EncoderOutputError, match=came) as caught:
            MultimodalEmbedder().apply(ids, TABLE, ctx, encoders, Wrong())
        assert caught.value.request == 0
    else:
        result = MultimodalEmbedder().apply_result(ids, TABLE, ctx, encoders, Wrong(), on_error="isolate")
        assert [type(error) for error in result.failed.values()] == [EncoderOutputError]
        assert list(result.failed) == [0]
        assert torch.equal(result.embeds[4:7], other.encoded)
    assert item.feature is feature
    assert item.encoded is item.encoded_deepstack is None
    embeds, _ = MultimodalEmbedder().apply(ids, TABLE, ctx, encoders, Model())
    assert torch.equal(embeds[1:3], -feature[:, :HIDDEN])


def test_precomputed_rows_need_deep_rows() -> None:
    rows = torch.randn(2, HIDDEN)
    item = deep_item(encoded=rows, feature=None)
    with pytest.raises(RowsError, match=r"request 0: .*encoded_deepstack must be .* \[2, 10\], got NoneType"):
        call(item, Model())
    item.encoded_deepstack = torch.randn(2, HIDDEN * LEVELS)
    embeds, kwargs = call(item, Model())
    assert torch.equal(embeds[1:3], rows)
    assert torch.equal(kwargs["input_deepstack_embeds"][1:3], item.encoded_deepstack)
    assert not kwargs["input_deepstack_embeds"][[0, 3]].any()


@pytest.mark.parametrize("levels", [2, None])
def test_levels_must_be_a_list(levels: object) -> None:
    model, item, encoder = Model(), deep_item(), Encoder(WIDE)
    model.deepstack_visual_indexes = levels
    with pytest.raises(EncoderSpecError, match=rf"one entry for each level, got {levels} on Model"):
        call(item, model, encoder)
    assert encoder.calls == []
    call(item, Model(), encoder)


def test_unknown_and_mixed_forms_are_refused() -> None:
    with pytest.raises(EncoderSpecError, match="'dense' or 'sparse', got 'wide'"):
        EncoderSpec(Encoder(), deepstack=True, deepstack_form="wide")
    encoders = {
        Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True),
        Modality.VIDEO: EncoderSpec(Encoder(WIDE), deepstack=True, deepstack_form="sparse"),
    }
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(EncoderSpecError, match="must name one form"):
        MultimodalEmbedder().apply(ids, TABLE, one_request([deep_item()], 4), encoders, Model())


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize(("modality", "maps"), [(Modality.IMAGE, 1), (Modality.AUDIO, 2)])
def test_one_map_is_made_where_all_items_have_deep_rows(form, modality, maps, monkeypatch) -> None:
    made = []

    class Counted(RowMap):
        @classmethod
        def from_ranges(cls, *args, **fields):
            made.append(args)
            return RowMap.from_ranges(*args, **fields)

    monkeypatch.setattr("mmgraph.layouts.RowMap", Counted)
    items = [deep_item(), simple_item([(0, 2)], modality)]
    if modality is Modality.IMAGE:
        items[1] = MultimodalDataItem("image", [(0, 2)], feature=feature_for(modality, 1, 3, WIDE))
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0, 0], [4, 4])
    encoders = {
        Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True, deepstack_form=form),
        Modality.AUDIO: Encoder(),
    }
    MultimodalEmbedder().apply(torch.zeros(8, dtype=torch.int64), TABLE, ctx, encoders, Model())
    assert len(made) == maps
