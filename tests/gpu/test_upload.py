"""Invariant: on CUDA the arrays of a batch arrive as they were, in one copy that nobody waits for, on any stream."""

import numpy as np
import pytest
import torch

from mmgraph.ops.errors import DuringCaptureError
from mmgraph.towers.grids import GridCache, GridLayout, PositionTable
from mmgraph.towers.upload import upload_together

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
LAYOUT = GridLayout(merge=2, table=PositionTable(48, align_corners=True), window=4, temporal=True)


def test_batches_arrive_without_a_wait():
    cache, rng = GridCache(LAYOUT), np.random.default_rng(0)
    batches = [
        cache.batch([(int(rng.integers(1, 3)), *map(int, 2 * rng.integers(1, 30, 2))) for _ in range(4)])
        for _ in range(200)
    ]
    upload_together(batches[0].arrays(), DEVICE)  # makes the ring's first buffer
    stream, sent = torch.cuda.Stream(DEVICE), []
    torch.cuda.synchronize(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(batches):
            with torch.cuda.stream(stream if number % 2 else torch.cuda.default_stream(DEVICE)):
                sent.append(upload_together(batch.arrays(), "cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(DEVICE)
    for batch, tensors in zip(batches, sent, strict=True):
        arrays = batch.arrays()
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert tensors[name].device == DEVICE
            assert tensors[name].data_ptr() % 256 == 0
            assert tensors[name].cpu().numpy().tobytes() == array.tobytes()


def test_a_buffer_is_not_written_while_the_device_is_late():
    """More than all buffers hold goes through while the stream stands still, so that the host has to wait."""
    sent, wanted = [], []
    torch.cuda._sleep(200_000_000)
    for number in range(40):
        array = np.full(1 << 20, number, dtype=np.int32)
        wanted.append(number)
        sent.append(upload_together({"a": array}, DEVICE)["a"])
    for tensor, number in zip(sent, wanted, strict=True):
        assert bool((tensor == number).all())


def test_a_batch_larger_than_a_buffer_arrives():
    array = np.arange(5 << 20, dtype=np.int32)
    assert np.array_equal(upload_together({"a": array}, DEVICE)["a"].cpu().numpy(), array)


def test_inside_a_capture_it_is_refused():
    values = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.add_(1)
        with pytest.raises(DuringCaptureError, match="Upload before the capture"):
            upload_together({"a": np.arange(5)}, DEVICE)
    graph.replay()
    assert values.tolist() == [1.0] * 4
    assert upload_together({"a": np.arange(5)}, DEVICE)["a"].tolist() == [0, 1, 2, 3, 4]
