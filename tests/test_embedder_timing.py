"""Invariant: times and counts are kept and logged when switched on, and only then; results are the same either way."""

import logging

import pytest
import torch
from mm_batches import HIDDEN, Encoder, Handle, simple_item

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder, VisionEmbedder
from mmgraph.errors import EncoderFailedError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.timing import PHASES, EncoderCounts, PhaseRecorder

TABLE = torch.randn(3, HIDDEN)
IDS = torch.zeros(12, dtype=torch.int64)


def batch() -> tuple[MultimodalForwardContext, dict[Modality, EncoderSpec]]:
    first = [
        simple_item([(0, 1), (3, 3)], hash=1),
        simple_item([(4, 5)], Modality.AUDIO, feature=Handle(torch.ones(2, HIDDEN))),
    ]
    second = [simple_item([(0, 2)], hash=1), simple_item([(3, 4)], hash=2)]
    ctx = MultimodalForwardContext([MultimodalInputs(first), MultimodalInputs(second)], [0, 0], [6, 6])
    return ctx, {modality: EncoderSpec(Encoder()) for modality in Modality}


def test_off_means_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    embedder = MultimodalEmbedder()
    with caplog.at_level(logging.DEBUG):
        embedder.apply(IDS, TABLE, *batch())
    assert embedder.last_timing is None
    assert caplog.text == ""


def test_on_means_every_phase_and_count(caplog: pytest.LogCaptureFixture) -> None:
    embedder = MultimodalEmbedder(timing=True)
    with caplog.at_level(logging.INFO, "mmgraph"):
        embeds, _ = embedder.apply(IDS, TABLE, *batch())
    assert torch.equal(embeds, MultimodalEmbedder().apply(IDS, TABLE, *batch())[0])
    timing = embedder.last_timing
    assert set(timing.seconds) == set(PHASES)
    assert all(seconds >= 0 for seconds in timing.seconds.values())
    assert timing.ranges == 5
    assert timing.rows == 10
    assert timing.misses == {Modality.IMAGE: 2, Modality.AUDIO: 1}
    assert timing.aliases == 1
    assert timing.features_released == 4
    assert timing.handles_released == 1
    assert timing.encoders == {
        Modality.IMAGE: EncoderCounts(2, 5, (3, 2)),
        Modality.AUDIO: EncoderCounts(1, 2, (2,)),
    }
    assert "ranges=5 rows=10" in caplog.text
    assert "encode=" in caplog.text
    assert "encoder.image=2 items, 5 tokens [3, 2]" in caplog.text


def test_each_phase_alone_is_timed() -> None:
    ctx, encoders = batch()
    embedder = MultimodalEmbedder(timing=True)
    plan = embedder.plan(ctx, 12)
    assert set(embedder.last_timing.seconds) == {"plan"}
    assert embedder.last_timing.ranges == 5
    embedder.encode(plan, encoders, device="cpu")
    assert set(embedder.last_timing.seconds) == {"move", "encode", "share", "cleanup"}
    embedder.assemble(plan, IDS, TABLE, encoders)
    assert set(embedder.last_timing.seconds) == {"assemble"}


def test_a_failure_is_timed_too() -> None:
    ctx, encoders = batch()

    def broken(items: list[MultimodalDataItem]) -> torch.Tensor:
        raise RuntimeError("boom")

    embedder = MultimodalEmbedder(timing=True)
    with pytest.raises(EncoderFailedError):
        embedder.apply(IDS, TABLE, ctx, encoders | {Modality.AUDIO: EncoderSpec(broken)})
    assert embedder.last_timing.encoders == {Modality.IMAGE: EncoderCounts(2, 5, (3, 2))}
    assert "assemble" in embedder.last_timing.seconds


def test_only_a_recorder_that_is_on_synchronises() -> None:
    calls = []
    for enabled in (False, True):
        recorder = PhaseRecorder(enabled, lambda enabled=enabled: calls.append(enabled))
        with recorder.phase("plan"), recorder.phase("encode"):
            pass
        assert bool(recorder.result().seconds) is enabled
    assert calls == [True] * 4


def test_the_old_name_is_an_alias() -> None:
    assert VisionEmbedder is MultimodalEmbedder
