"""Invariant: features come in every form, are dropped once encoded and kept where encoding failed; rows belong to their
item alone, so that dropping an item frees them.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
from mm_batches import HIDDEN, Encoder, Handle, image_encoder, one_request, simple_item

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.errors import EncoderFailedError, FeatureError
from mmgraph.inputs import (
    FeatureHandle,
    Modality,
    MultimodalDataItem,
    MultimodalForwardContext,
    MultimodalInputs,
)
from mmgraph.staging import FeatureMover, upload

TABLE = torch.zeros(3, HIDDEN)
ROWS = torch.randn(2, HIDDEN)


def embed(items: list[MultimodalDataItem], encoders: object = None, length: int = 20) -> torch.Tensor:
    ids = torch.zeros(length, dtype=torch.int64)
    return MultimodalEmbedder().apply(ids, TABLE, one_request(items, length), encoders or image_encoder())[0]


def read_only() -> np.ndarray:
    array = ROWS.numpy().copy()
    array.setflags(write=False)
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "feature",
    [
        ROWS.clone(),
        ROWS.numpy().copy(),
        read_only(),
        ROWS.numpy()[::-1].copy()[::-1],
        ROWS.numpy().astype(">f4"),
        ROWS.t().contiguous().t(),
        Handle(ROWS.clone()),
        ROWS.reshape(1, 2, HIDDEN),
        ROWS.clone().requires_grad_(),
    ],
)
def test_every_form_gives_the_same_rows(feature: object) -> None:
    item = simple_item([(3, 4)], feature=feature)
    assert torch.equal(embed([item])[3:5], -ROWS)
    assert item.feature is None


def test_features_may_be_nested_and_anything_else_reaches_the_encoder_as_it_is() -> None:
    seen = []

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        seen.extend(item.feature for item in items)
        return torch.ones(4, HIDDEN)

    items = [
        simple_item([(0, 1)], feature=[ROWS.numpy(), {"low": ROWS, "size": 7}, None]),
        simple_item([(2, 3)], feature="a file name"),
    ]
    embed(items, {Modality.IMAGE: encoder})
    assert torch.equal(seen[0][0], ROWS)
    assert torch.equal(seen[0][1]["low"], ROWS)
    assert seen[0][1]["size"] == 7
    assert seen[0][2] is None
    assert seen[1] == "a file name"


def test_handles_are_consumed_once_and_all_are_released() -> None:
    first, twin, done, far = (Handle(ROWS.clone()) for _ in range(4))
    items = [
        simple_item([(0, 1)], hash=1, feature=first),
        simple_item([(3, 4)], hash=1, feature=twin),
        simple_item([(6, 7)], hash=2, feature=done, encoded=ROWS.clone()),
        simple_item([(30, 31)], hash=3, feature=far),
    ]
    embed(items)
    assert isinstance(first, FeatureHandle)
    assert [(handle.consumed, handle.released) for handle in (first, twin, done, far)] == [
        (1, 1),
        (0, 1),
        (0, 1),
        (0, 0),
    ]
    assert [item.feature for item in items] == [None, None, None, far]


def test_a_failure_after_consuming_loses_nothing() -> None:
    handle, twin = Handle(ROWS.clone()), Handle(ROWS.clone())
    items = [simple_item([(0, 1)], hash=1, feature=handle), simple_item([(3, 4)], hash=1, feature=twin)]

    def broken(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise RuntimeError("boom")

    with pytest.raises(EncoderFailedError):
        embed(items, {Modality.IMAGE: broken})
    assert (handle.consumed, handle.released, twin.consumed, twin.released) == (1, 0, 0, 0)
    assert torch.equal(items[0].feature, ROWS)
    assert items[1].feature is twin
    assert torch.equal(embed(items)[3:5], -ROWS)
    assert twin.released == 1


def test_a_handle_that_fails_is_named_and_keeps_its_place() -> None:
    class Gone(Handle):
        def consume(self) -> torch.Tensor:
            raise FileNotFoundError("segment gone")

    gone, fine = Gone(ROWS), Handle(ROWS.clone())
    items = [simple_item([(0, 1)], hash=1, feature=fine), simple_item([(3, 4)], hash=2, feature=gone)]
    with pytest.raises(
        FeatureError, match=r"request 0: IMAGE item \(hash 0x2.*can't be consumed.*segment gone"
    ) as caught:
        embed(items)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert items[1].feature is gone
    items[1].feature = ROWS.clone()
    assert torch.equal(embed(items)[:2], -ROWS)


def test_a_release_that_fails_is_logged_and_harms_no_row(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Handle):
        def release(self) -> None:
            raise OSError("busy")

    assert torch.equal(embed([simple_item([(0, 1)], feature=Stuck(ROWS.clone()))])[:2], -ROWS)
    assert "releasing a feature's handle failed" in caplog.text


def test_rows_are_the_item_s_own_memory() -> None:
    items = [simple_item([(3 * k, 3 * k + 1)], variant=k) for k in range(4)]
    outputs = []

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        outputs.append(weakref.ref(rows := torch.cat([item.feature for item in items])))
        return rows

    embed(items, {Modality.IMAGE: encoder})
    assert len({item.encoded.untyped_storage().data_ptr() for item in items}) == 4
    assert all(item.encoded.untyped_storage().nbytes() == 2 * HIDDEN * 4 for item in items)
    assert outputs[0]() is None
    rows = weakref.ref(items.pop().encoded)
    gc.disable()
    try:
        assert rows() is None
    finally:
        gc.enable()


def test_an_encoder_may_reuse_its_output_buffer() -> None:
    buffer = torch.zeros(2, HIDDEN)

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        return buffer.copy_(items[0].feature)

    first, second = simple_item([(0, 1)], variant=1), simple_item([(0, 1)], variant=2)
    expected = first.feature.clone()
    embed([first], {Modality.IMAGE: encoder})
    embed([second], {Modality.IMAGE: encoder})
    assert torch.equal(first.encoded, expected)


def test_twins_share_memory_and_it_is_freed_with_the_last() -> None:
    first, twin = simple_item([(0, 1)], hash=1), simple_item([(3, 4)], hash=1)
    embed([first, twin])
    assert first.encoded is twin.encoded
    rows = weakref.ref(first.encoded)
    del first
    assert rows() is not None
    del twin
    assert rows() is None


def test_the_embedder_keeps_no_item_alive() -> None:
    item = simple_item([(0, 1)])
    embedder = MultimodalEmbedder(timing=True)
    embedder.apply(torch.zeros(4, dtype=torch.int64), TABLE, one_request([item], 4), image_encoder())
    gone = weakref.ref(item)
    del item
    gc.collect()
    assert gone() is None


def test_the_result_is_no_view_of_rows() -> None:
    item = simple_item([(0, 19)])
    embeds = embed([item])
    embeds.zero_()
    assert item.encoded.abs().sum() > 0


def test_rows_of_different_dtypes_meet_in_one_batch() -> None:
    table = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    items = [
        simple_item([(3 * k, 3 * k + 1)], encoded=torch.randn(2, HIDDEN, dtype=torch.float64).to(dtype))
        for k, dtype in enumerate(dtypes)
    ]
    embeds, _ = MultimodalEmbedder().apply(
        torch.zeros(12, dtype=torch.int64), table, one_request(items, 12), {}
    )
    for k, item in enumerate(items):
        assert torch.equal(embeds[3 * k : 3 * k + 2], item.encoded.to(torch.bfloat16))


def test_on_a_cpu_a_feature_that_is_there_already_is_not_copied() -> None:
    assert FeatureMover().move([ROWS], torch.device("cpu"))[0] is ROWS
    assert torch.equal(upload(np.arange(3), torch.device("cpu")), torch.arange(3))


def test_an_encoder_s_device_is_where_its_features_go() -> None:
    seen = []

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        seen.append(items[0].feature.device.type)
        return ROWS

    item = simple_item([(0, 1)])
    embed([item], {Modality.IMAGE: EncoderSpec(encoder, device="meta")})
    assert seen == ["meta"]


def test_a_failure_leaves_the_feature_where_it_lay() -> None:
    def broken(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise RuntimeError("boom")

    item = simple_item([(0, 1)], feature=ROWS)
    with pytest.raises(EncoderFailedError):
        embed([item], {Modality.IMAGE: EncoderSpec(broken, device="meta")})
    assert item.feature is ROWS


def test_a_feature_that_can_not_move_is_named() -> None:
    item = simple_item([(0, 1)], feature=ROWS)
    with pytest.raises(FeatureError, match=r"1 items: request 0, IMAGE item .* can't be brought to cuda:99"):
        embed([item], {Modality.IMAGE: EncoderSpec(Encoder(), device="cuda:99")})
    assert item.feature is ROWS
    assert torch.equal(embed([item])[:2], -ROWS)


def test_items_with_no_offsets_are_left_alone() -> None:
    idle = MultimodalDataItem("image", feature=ROWS, hash=1)
    inputs = MultimodalInputs([None, idle, simple_item([(0, 1)], hash=1)])
    ctx = MultimodalForwardContext([inputs], [0], [4])
    MultimodalEmbedder().apply(torch.zeros(4, dtype=torch.int64), TABLE, ctx, {Modality.IMAGE: Encoder()})
    assert idle.feature is ROWS
    assert idle.encoded is None
