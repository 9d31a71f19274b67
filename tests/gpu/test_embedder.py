"""Invariant: on CUDA, wherever features and rows lie, the embedder gives what it gives on a CPU, bit for bit.

The encoder only negates, which is exact, so every difference would be a wrong row, a wrong cast or a race.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, Encoder, Model, one_request, random_batch, simple_item

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import DeviceError, check_errors
from mmgraph.staging import FeatureMover

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")


def place(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "pinned":
        return tensor.pin_memory()
    return tensor.cuda() if kind == "cuda" else tensor.clone()


@pytest.mark.parametrize("kind", ["pageable", "pinned", "cuda"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_the_cpu(kind: str, form: str, seed: int) -> None:
    def specs(batch: object) -> dict[Modality, EncoderSpec]:
        return {
            modality: EncoderSpec(spec.fn, deepstack=spec.deepstack, deepstack_form=form)
            for modality, spec in batch.encoders.items()
        }

    host, device = random_batch(seed), random_batch(seed, device="cuda")
    for item in device.contents:
        if isinstance(item.feature, torch.Tensor):
            item.feature = place(item.feature, kind)
        if item.encoded is not None and kind != "pageable":  # else the embedder moves the rows
            item.encoded = place(item.encoded, kind)
    embedder = MultimodalEmbedder()
    expected, expected_kwargs = embedder.apply(host.input_ids, host.embedding, host.ctx, specs(host), Model())
    embeds, kwargs = embedder.apply(device.input_ids, device.embedding, device.ctx, specs(device), Model())
    if expected is None:
        assert embeds is None
        return
    assert embeds.is_cuda
    assert torch.equal(embeds.cpu(), expected)
    assert kwargs.keys() == expected_kwargs.keys()
    for name, value in kwargs.items():
        if form == "dense":
            assert torch.equal(value.cpu(), expected_kwargs[name])
        else:
            assert torch.equal(value.pool.cpu(), expected_kwargs[name].pool)
            assert torch.equal(value.row_map.cpu(), expected_kwargs[name].row_map)
    for there, here in zip(device.contents, host.contents, strict=True):
        assert (there.encoded is None, there.feature is None) == (here.encoded is None, here.feature is None)
    check_errors()


def test_called_embeddings_equal_the_cpu() -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 0.5

    module = Scaled(9, HIDDEN)
    ids = torch.tensor([1, 10**6, 10**6, -200, 8, 99])
    results = []
    for device in ("cpu", "cuda"):
        item = simple_item([(1, 2)])
        result, _ = MultimodalEmbedder().apply(
            ids.to(device), module.to(device), one_request([item], 6), {Modality.IMAGE: Encoder()}
        )
        results.append(result.cpu())
    assert torch.equal(results[0], results[1])


def test_many_large_features_in_flight_are_not_overwritten() -> None:
    rows, width = 4096, 1024
    table = torch.zeros(4, width, device=CUDA)
    ids = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    embedder = MultimodalEmbedder()
    expected, got = [], []
    busy = torch.randn(4096, 4096, device=CUDA)
    for step in range(24):
        features = [torch.full((rows // 2, width), float(2 * step + half)) for half in range(2)]
        items = [
            MultimodalDataItem("image", [(half * rows // 2, (half + 1) * rows // 2 - 1)], feature=feature)
            for half, feature in enumerate(features)
        ]
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)  # keeps the compute stream behind the copies
        embeds, _ = embedder.apply(
            ids,
            table,
            one_request(items, rows),
            {Modality.IMAGE: lambda items: torch.cat([i.feature for i in items])},
        )
        expected.append([2.0 * step, 2.0 * step + 1])
        got.append(
            torch.stack(
                [
                    embeds[: rows // 2].amin(),
                    embeds[: rows // 2].amax(),
                    embeds[rows // 2 :].amin(),
                    embeds[rows // 2 :].amax(),
                ]
            )
        )
        del items, features, embeds
    for (low, high), values in zip(expected, got, strict=True):
        assert values.tolist() == [low, low, high, high]


def test_a_move_waits_for_no_host_and_uses_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = FeatureMover()
    streams = []
    original = torch.Tensor.record_stream
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: (streams.append(stream), original(tensor, stream))[1],
    )
    source = torch.randn(1 << 20)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        compute = torch.cuda.current_stream()
        moved = mover.move([source], CUDA)[0]
        doubled = moved * 2
    torch.cuda.synchronize()
    assert streams == [compute]
    [entrance] = mover._entrances.values()
    assert entrance.lane.side != compute
    assert mover.waits == 0
    assert torch.equal(doubled.cpu(), source * 2)


def test_no_synchronisation_in_a_whole_call() -> None:
    embedding = torch.nn.Embedding(50, HIDDEN, device=CUDA).requires_grad_(False)
    ids = torch.zeros(16, dtype=torch.int64, device=CUDA)
    embedder = MultimodalEmbedder()

    def call() -> torch.Tensor:
        items = [
            simple_item([(0, 3)], hash=1),
            simple_item([(5, 8)], hash=1),
            simple_item([(10, 11)], variant=2),
        ]
        ctx = MultimodalForwardContext([MultimodalInputs(items)], [0], [16])
        return embedder.apply(ids, embedding, ctx, {Modality.IMAGE: Encoder()})[0]

    first = call()  # makes streams, buffers and kernels
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(first, second)


def test_rows_kept_elsewhere_are_moved_and_stay_where_they_are() -> None:
    rows = torch.randn(4, HIDDEN)
    item = simple_item([(0, 3)], encoded=rows, feature=None)
    ids = torch.zeros(6, dtype=torch.int64, device=CUDA)
    embeds, _ = MultimodalEmbedder().apply(ids, torch.zeros(3, HIDDEN, device=CUDA), one_request([item], 6), {})
    assert torch.equal(embeds[:4].cpu(), rows)
    assert item.encoded is rows


def test_timing_synchronises_and_changes_nothing() -> None:
    embedder = MultimodalEmbedder(timing=True)
    ids = torch.zeros(6, dtype=torch.int64, device=CUDA)
    item = simple_item([(0, 3)])
    expected = -item.feature
    table = torch.zeros(3, HIDDEN, device=CUDA)
    embeds, _ = embedder.apply(ids, table, one_request([item], 6), {Modality.IMAGE: Encoder()})
    assert torch.equal(embeds[:4].cpu(), expected)
    assert embedder.last_timing.seconds["move"] > 0


def test_the_default_device_has_no_say() -> None:
    item = simple_item([(1, 2)])
    feature = item.feature
    table = torch.zeros(3, HIDDEN, device=CUDA)
    ids = torch.zeros(4, dtype=torch.int64, device=CUDA)
    with torch.device(CUDA):
        embeds, _ = MultimodalEmbedder().apply(ids, table, one_request([item], 4), {Modality.IMAGE: Encoder()})
    assert torch.equal(embeds[1:3].cpu(), -feature)


def test_strict_is_recorded_on_the_device() -> None:
    class Called(torch.nn.Embedding):
        pass

    ids = torch.tensor([0, 99, 99, 77], device=CUDA)
    for kind in (torch.nn.Embedding, Called):
        module = kind(9, HIDDEN, device=CUDA)
        item = simple_item([(1, 2)])
        embeds, _ = MultimodalEmbedder(strict=True).apply(
            ids, module, one_request([item], 4), {Modality.IMAGE: Encoder()}
        )
        assert torch.equal(embeds[3], module.weight[8])
        with pytest.raises(DeviceError, match=r"outside the vocabulary.*row 3 had id 77"):
            check_errors()
    check_errors()


def test_dropping_an_item_frees_its_rows() -> None:
    rows = 1 << 14
    width = 1 << 9
    table = torch.zeros(3, width, device=CUDA)
    items = [MultimodalDataItem("image", [(0, rows - 1)], feature=torch.zeros(rows, width)) for _ in range(4)]
    inputs = [MultimodalInputs([item]) for item in items]
    ids = torch.zeros(4 * rows, dtype=torch.int64, device=CUDA)
    ctx = MultimodalForwardContext(inputs, [0] * 4, [rows] * 4)
    MultimodalEmbedder().apply(
        ids, table, ctx, {Modality.IMAGE: lambda items: torch.cat([i.feature for i in items])}
    )
    del ctx, inputs
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    items.pop()
    assert before - torch.cuda.memory_allocated() == rows * width * 4
