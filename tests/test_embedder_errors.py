"""Invariant: what is wrong is found before anything is encoded where it can be, named, and repaired by a good call."""

from collections.abc import Callable

import pytest
import torch
from mm_batches import HIDDEN, Encoder, one_request, simple_item

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.errors import (
    ContextError,
    EncoderFailedError,
    EncoderOutputError,
    EncoderSpecError,
    LookupInputError,
    MissingEncoderError,
    MissingFeatureError,
    MultimodalError,
    OptionError,
    RowsError,
)
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

TABLE = torch.randn(7, HIDDEN)
IDS = torch.zeros(8, dtype=torch.int64)


def image_and_audio() -> tuple[MultimodalDataItem, MultimodalDataItem, MultimodalForwardContext]:
    image, audio = simple_item([(0, 1)], hash=0xA1), simple_item([(2, 4)], Modality.AUDIO, hash=0xA2)
    return (
        image,
        audio,
        MultimodalForwardContext([MultimodalInputs([image]), MultimodalInputs([audio])], [0, 0], [2, 6]),
    )


def check_good_call(ctx: MultimodalForwardContext, *items: MultimodalDataItem) -> None:
    encoders = {modality: EncoderSpec(Encoder()) for modality in Modality}
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, ctx, encoders)
    assert embeds is not None
    for item in items:
        assert item.encoded is not None
        assert item.feature is None


def test_a_missing_encoder_shows_before_another_runs() -> None:
    image, audio, ctx = image_and_audio()
    encoder = Encoder()
    for encoders in ({Modality.IMAGE: encoder}, None):
        with pytest.raises(MissingEncoderError, match=r"encoders\[Modality\.(AUDIO|IMAGE)\] = EncoderSpec"):
            MultimodalEmbedder().apply(IDS, TABLE, ctx, encoders)
    with pytest.raises(
        MissingEncoderError, match=r"request 1, AUDIO item \(hash 0xa2.*just \['IMAGE'\]"
    ) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.IMAGE: encoder})
    assert caught.value.request == 1
    assert encoder.calls == []
    assert image.encoded is None
    check_good_call(ctx, image, audio)


def test_a_missing_feature_shows_before_an_encoder_runs() -> None:
    image, audio, ctx = image_and_audio()
    feature, audio.feature = audio.feature, None
    encoder = Encoder()
    with pytest.raises(
        MissingFeatureError, match=r"request 1, AUDIO item \(hash 0xa2.*has no feature"
    ) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.IMAGE: encoder, Modality.AUDIO: encoder})
    assert caught.value.request == 1
    assert encoder.calls == []
    audio.feature = feature
    check_good_call(ctx, image, audio)


def test_an_encoder_may_declare_that_it_needs_no_feature() -> None:
    item = simple_item([(0, 1)], feature=None)
    encoders = {Modality.IMAGE: EncoderSpec(lambda items: torch.ones(2, HIDDEN), needs_feature=False)}
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request([item], 8), encoders)
    assert torch.equal(embeds[:2], torch.ones(2, HIDDEN))


@pytest.mark.parametrize("seen", ["canonical", "alias"])
def test_an_encoded_modality_needs_no_encoder(seen: str) -> None:
    rows = torch.randn(2, HIDDEN)
    first, second = simple_item([(0, 1)], hash=3), simple_item([(3, 4)], hash=3)
    (first if seen == "canonical" else second).encoded = rows
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request([first, second], 8), {})
    assert torch.equal(embeds[[0, 1, 3, 4]], torch.cat([rows, rows]))


@pytest.mark.parametrize(
    ("rows", "came"),
    [
        (torch.zeros(1, HIDDEN), r"got \[1, 5\]"),
        (torch.zeros(3, HIDDEN), r"got \[3, 5\]"),
        (torch.zeros(2, HIDDEN - 1), r"got \[2, 4\]"),
        (torch.zeros(2, HIDDEN, dtype=torch.int64), r"got \[2, 5\] of torch.int64"),
        (torch.zeros(1, 2, HIDDEN), r"got \[1, 2, 5\]"),
        (torch.zeros(2, HIDDEN, device="meta"), r"got \[2, 5\] of torch.float32 on meta"),
        ([[0.0] * HIDDEN] * 2, "got list"),
    ],
)
def test_precomputed_rows_must_fit(rows: object, came: str) -> None:
    image, audio, ctx = image_and_audio()
    image.encoded = rows
    encoder = Encoder()
    with pytest.raises(RowsError, match=rf"request 0: IMAGE.*encoded must be .*\[2, 5\], {came}") as caught:
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.AUDIO: encoder})
    assert caught.value.request == 0
    assert encoder.calls == []
    image.encoded = None
    check_good_call(ctx, image, audio)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda items: torch.zeros(4, HIDDEN), r"5 rows, per item \[2, 3\], got 4 rows"),
        (lambda items: torch.zeros(6, HIDDEN), r"5 rows, per item \[2, 3\], got 6 rows"),
        (lambda items: torch.zeros(1, HIDDEN), "got 1 rows"),
        (lambda items: torch.zeros(HIDDEN, 5 - 1), "rows of width 5, got width 4"),
        (lambda items: torch.zeros(0, HIDDEN), "got 0 rows"),
        (lambda items: torch.tensor(1.0), r"tensor of rows, dense and with data, got torch.float32 \[\]"),
        (lambda items: torch.zeros(5, HIDDEN, dtype=torch.int32), "got torch.int32"),
        (lambda items: None, "NoneType"),
        (lambda items: [torch.zeros(2, HIDDEN), torch.zeros(3, 1)], "rows of one width"),
        (lambda items: {"rows": torch.zeros(5, HIDDEN)}, "dict"),
        (lambda items: torch.zeros(5, HIDDEN, device="meta"), r"got torch.float32 \[5, 5\] on meta"),
        (lambda items: torch.zeros(5, HIDDEN).to_sparse(), "of layout torch.sparse_coo"),
    ],
)
def test_wrong_encoder_outputs_are_refused(output: Callable[[object], object], message: str) -> None:
    first, second = simple_item([(0, 1)], hash=1), simple_item([(3, 5)], hash=2)
    features = first.feature, second.feature
    ctx = one_request([first, second], 8)
    with pytest.raises(EncoderOutputError, match=message) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.IMAGE: output})
    assert "hash 0x1, offsets [(0, 1)]) of 2 tokens" in str(caught.value)
    assert caught.value.request == 0
    assert (first.feature, second.feature) == features
    assert first.encoded is second.encoded is None
    check_good_call(ctx, first, second)


@pytest.mark.parametrize(
    "output",
    [
        lambda rows: rows.reshape(1, 5, HIDDEN),
        lambda rows: rows.reshape(5, 1, 1, HIDDEN),
        lambda rows: [rows[:2], rows[2:]],
        lambda rows: (rows[None, :2], rows[None, 2:]),
    ],
)
def test_encoder_outputs_are_flattened_to_rows(output: Callable[[torch.Tensor], object]) -> None:
    first, second = simple_item([(0, 1)], hash=1), simple_item([(3, 5)], hash=2)
    rows = torch.cat([first.feature, second.feature])
    encoders = {Modality.IMAGE: lambda items: output(rows)}
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request([first, second], 8), encoders)
    assert torch.equal(embeds[[0, 1, 3, 4, 5]], rows)


def test_an_encoder_that_raises_leaves_its_items_and_keeps_the_others() -> None:
    image, audio, ctx = image_and_audio()
    feature = audio.feature

    def broken(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise KeyError("boom")

    encoder = Encoder()
    with pytest.raises(
        EncoderFailedError, match=r"AUDIO encoder failed on 1 items: request 1.*KeyError: 'boom'"
    ) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.IMAGE: encoder, Modality.AUDIO: broken})
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.request == 1
    assert audio.feature is feature
    assert audio.encoded is None
    assert image.encoded is not None
    assert image.feature is None
    check_good_call(ctx, audio)
    assert len(encoder.calls) == 1


def test_wrong_encoders_are_refused() -> None:
    _, _, ctx = image_and_audio()
    with pytest.raises(EncoderSpecError, match="keyed by Modality, got 'image'"):
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {"image": Encoder()})
    with pytest.raises(EncoderSpecError, match="fn must be a function of a list of items, got 3"):
        MultimodalEmbedder().apply(IDS, TABLE, ctx, {Modality.IMAGE: 3})
    with pytest.raises(
        EncoderSpecError, match="must be a mapping of Modality to EncoderSpec or function, got list"
    ):
        MultimodalEmbedder().apply(IDS, TABLE, ctx, [Encoder()])
    with pytest.raises(OptionError, match="on_error must be 'raise' or 'isolate', got 'ignore'"):
        MultimodalEmbedder().apply_result(IDS, TABLE, ctx, {}, on_error="ignore")
    check_good_call(ctx)


@pytest.mark.parametrize("wrong", [7, [MultimodalInputs([simple_item([(0, 1)])])], MultimodalInputs(), {}])
def test_a_context_of_another_kind_is_refused(wrong: object) -> None:
    for call in (
        lambda: MultimodalEmbedder().apply(IDS, TABLE, wrong, {}),
        lambda: MultimodalEmbedder().apply_result(IDS, TABLE, wrong, {}, on_error="isolate"),
        lambda: MultimodalEmbedder().plan(wrong, 8),
    ):
        with pytest.raises(
            ContextError, match=f"must be a MultimodalForwardContext, got {type(wrong).__name__}"
        ):
            call()


@pytest.mark.parametrize("embedding", [TABLE, lambda ids: TABLE[ids]])
@pytest.mark.parametrize("strict", [True, False])
def test_assembly_needs_the_rows_of_its_plan(embedding: object, strict: bool) -> None:
    image, audio, ctx = image_and_audio()
    embedder, encoders = MultimodalEmbedder(strict=strict), dict.fromkeys(Modality, Encoder())
    plan = embedder.plan(ctx, 8)
    embedder.encode(plan, encoders, device="cpu")
    with pytest.raises(LookupInputError, match="rows that the plan was made for, at least 7, got 6"):
        embedder.assemble(plan, IDS[:6], embedding, encoders)
    embeds, _ = embedder.assemble(plan, IDS[:7], embedding, encoders)
    assert torch.equal(embeds[[0, 1, 4, 5, 6]], torch.cat([image.encoded, audio.encoded]))


def test_interrupts_pass_through_and_lose_nothing() -> None:
    image, audio, ctx = image_and_audio()

    def interrupted(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MultimodalEmbedder().apply_result(
            IDS, TABLE, ctx, dict.fromkeys(Modality, interrupted), on_error="isolate"
        )
    check_good_call(ctx, image, audio)


def test_phases_alone_do_what_apply_does() -> None:
    image, audio, ctx = image_and_audio()
    encoders = {modality: EncoderSpec(Encoder()) for modality in Modality}
    embedder = MultimodalEmbedder()
    plan = embedder.plan(ctx, 8)
    with pytest.raises(RowsError, match="encode the item first"):
        embedder.assemble(plan, IDS, TABLE, encoders)
    embedder.encode(plan, encoders, device="cpu")
    embedder.encode(plan, encoders, device="cpu")  # nothing left to do
    assert [len(spec.fn.calls) for spec in encoders.values()] == [1, 0, 1]
    embeds, kwargs = embedder.assemble(plan, IDS, TABLE, encoders)
    again, _ = embedder.apply(IDS, TABLE, ctx, encoders)
    assert torch.equal(embeds, again)
    assert kwargs == {}
    assert image.feature is audio.feature is None
    assert embedder.assemble(embedder.plan(MultimodalForwardContext([None], [0], [8]), 8), IDS, TABLE, {}) == (
        None,
        {},
    )


def test_every_error_has_the_base() -> None:
    for error in (
        EncoderFailedError,
        EncoderOutputError,
        EncoderSpecError,
        MissingEncoderError,
        MissingFeatureError,
        RowsError,
    ):
        assert issubclass(error, MultimodalError)
