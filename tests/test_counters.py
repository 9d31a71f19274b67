"""Invariant: an embedder's counters say what all its calls did, failed ones too, and never show half a call."""

import copy
import dataclasses
import threading

import pytest
import torch
from mm_batches import HIDDEN, Encoder, simple_item

from mmgraph.counters import EmbedCounters
from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.errors import EncoderFailedError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

TABLE = torch.randn(3, HIDDEN)
IDS = torch.zeros(12, dtype=torch.int64)


def batch() -> tuple[MultimodalForwardContext, dict[Modality, EncoderSpec]]:
    """Two images, one of them with a twin, and a sound; five ranges."""
    first = [simple_item([(0, 1), (3, 3)], hash=1), simple_item([(4, 5)], Modality.AUDIO)]
    second = [simple_item([(0, 2)], hash=1), simple_item([(3, 4)], hash=2)]
    ctx = MultimodalForwardContext([MultimodalInputs(first), MultimodalInputs(second)], [0, 0], [6, 6])
    return ctx, {modality: EncoderSpec(Encoder()) for modality in Modality}


ONE = EmbedCounters(
    calls=1, items_encoded={Modality.IMAGE: 2, Modality.AUDIO: 1}, rows_encoded=7, aliases=1, ranges=5
)


def test_calls_add_up() -> None:
    embedder = MultimodalEmbedder()
    assert embedder.counters() == EmbedCounters()
    embedder.apply(IDS, TABLE, *batch())
    first = embedder.counters()
    assert first == ONE
    ctx, encoders = batch()
    embedder.apply(IDS, TABLE, ctx, encoders)
    embedder.apply(IDS, TABLE, ctx, encoders)  # all is encoded
    embedder.apply(IDS, TABLE, None, encoders)
    embedder.apply(IDS, TABLE, ctx, encoders, is_decode_or_idle=True)
    assert first == ONE, "a reading changed later"
    assert embedder.counters() == dataclasses.replace(
        ONE,
        calls=3,
        items_encoded={Modality.IMAGE: 4, Modality.AUDIO: 2},
        rows_encoded=14,
        aliases=3,
        ranges=15,
    )


def test_the_phases_alone_count_as_one_call() -> None:
    embedder = MultimodalEmbedder(timing=True)
    ctx, encoders = batch()
    plan = embedder.plan(ctx, 12)
    assert embedder.counters() == EmbedCounters()
    embedder.encode(plan, encoders, device="cpu")
    assert embedder.counters() == dataclasses.replace(ONE, calls=0, ranges=0)
    embedder.assemble(plan, IDS, TABLE, encoders)
    assert embedder.counters() == ONE


def test_failures_count_too() -> None:
    def broken(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise RuntimeError("boom")

    embedder = MultimodalEmbedder()
    ctx, encoders = batch()
    encoders[Modality.AUDIO] = EncoderSpec(broken)
    with pytest.raises(EncoderFailedError):
        embedder.apply(IDS, TABLE, ctx, encoders)
    expected = EmbedCounters(calls=1, items_encoded={Modality.IMAGE: 2}, rows_encoded=5, aliases=1)
    assert embedder.counters() == expected
    result = embedder.apply_result(IDS, TABLE, ctx, encoders, on_error="isolate")
    assert list(result.failed) == [0]
    after = embedder.counters()
    assert (after.calls, after.failures_isolated, after.ranges) == (2, 1, 2)


def test_threads_lose_no_call() -> None:
    embedder = MultimodalEmbedder()
    torn: list[EmbedCounters] = []

    def work() -> None:
        for _ in range(25):
            embedder.apply(IDS, TABLE, *batch())
            reading = embedder.counters()
            if reading.rows_encoded * 5 != reading.ranges * 7 or reading.ranges != 5 * reading.calls:
                torn.append(reading)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert embedder.counters().calls == 100
    assert embedder.counters().items_encoded == {Modality.IMAGE: 200, Modality.AUDIO: 100}


def test_a_copy_begins_at_zero_with_the_same_options() -> None:
    embedder = MultimodalEmbedder(ranges="profiler", pinned_bytes=1 << 20, prefetch_bytes=5)
    embedder.apply(IDS, TABLE, *batch())
    again = copy.copy(embedder)
    assert again.counters() == EmbedCounters()
    assert again.__getstate__() == embedder.__getstate__()
    assert again._features.limit_bytes == 5
    assert again._mover._buffer_bytes == 1 << 20
