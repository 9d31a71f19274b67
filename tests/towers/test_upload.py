"""Invariant: arrays that go to a device together arrive as they were, aligned and in one copy, however late it is.

The device is simulated: work is done late, in any legal order; see ``simulated_cuda``.
"""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import HastyLane, SimulatedLane, World

from mmgraph.errors import OptionError
from mmgraph.ops.errors import DuringCaptureError
from mmgraph.pinned import ALIGNMENT
from mmgraph.towers import upload as module
from mmgraph.towers.upload import TogetherUploader, upload_together

DTYPES = (np.int32, np.float32, np.int64, np.uint8, np.bool_, np.float64, np.complex64, np.float16)


def drawn(rng, most=300):
    """Arrays of many dtypes, shapes and layouts, empty ones among them."""
    arrays = {}
    for number in range(int(rng.integers(0, 6))):
        sizes = [5] * int(rng.integers(0, 3)) + [most]
        shape = tuple(int(rng.integers(0, size)) for size in sizes)
        values = rng.integers(0, 100, shape).astype(DTYPES[int(rng.integers(len(DTYPES)))])
        form = int(rng.integers(4))
        values = [values, values[..., ::2], values[..., ::-1], values.T][form]
        values.setflags(write=bool(rng.integers(2)))
        arrays[f"array {number}"] = values
    return arrays


def same(tensor, array):
    return tensor.dtype == torch.from_numpy(np.empty(0, array.dtype)).dtype and np.array_equal(
        tensor.numpy(), array
    )


def serve(world, lane, seed, *, steps=15, **options):
    """Upload batch after batch; reads come when the stream has come to them."""
    uploader, rng, wrong = TogetherUploader(lane, **options), np.random.default_rng(seed), []
    kept = []  # the device's memory: who owns that is PyTorch's affair
    for step in range(steps):
        arrays = drawn(rng)
        wanted = {name: array.copy() for name, array in arrays.items()}
        tensors = uploader.upload(arrays)
        kept.append(tensors)
        assert list(tensors) == list(arrays)

        def read(tensors=tensors, wanted=wanted, step=step):
            wrong.extend((step, name) for name, tensor in tensors.items() if not same(tensor, wanted[name]))

        world.enqueue("side", read)
    world.drain()
    return uploader, wrong


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    eager=st.sampled_from([0.0, 0.3, 0.8]),
    bound=st.sampled_from([1 << 12, 1 << 16]),
)
def test_what_is_read_is_what_was_sent(seed, eager, bound):
    world = World(seed, eager=eager)
    uploader, wrong = serve(world, SimulatedLane(world), seed, buffers=2, buffer_bytes=bound)
    assert wrong == []
    assert world.host_waits == uploader.waits


def test_the_simulation_finds_a_buffer_that_is_written_again_too_early():
    for careless in (True, False):
        world = World(1, eager=0.0)
        lane = (HastyLane if careless else SimulatedLane)(world)
        _, wrong = serve(world, lane, 1, steps=40, buffers=2, buffer_bytes=1 << 14)
        assert bool(wrong) is careless


class CountingLane(SimulatedLane):
    """Knows its copies, and fails when told to."""

    def __init__(self, world):
        super().__init__(world)
        self.copies = []
        self.full = False

    def allocate(self, source):
        if self.full:
            raise torch.OutOfMemoryError("no more")
        return super().allocate(source)

    def copy(self, target, source):
        self.copies.append(source.numel())
        super().copy(target, source)


def test_all_arrays_go_in_one_copy_and_are_aligned():
    lane = CountingLane(World(0))
    arrays = {"a": np.arange(5, dtype=np.int32), "b": np.ones((3, 2), np.float32), "c": np.zeros(0, np.int64)}
    tensors = TogetherUploader(lane).upload(arrays)
    assert lane.copies == [2 * ALIGNMENT]
    start = tensors["a"].untyped_storage().data_ptr()
    assert [tensors[name].data_ptr() - start for name in "ab"] == [0, ALIGNMENT]
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert tensors["c"].shape == (0,)
    large = {"a": np.arange(3000, dtype=np.int32)}
    uploader = TogetherUploader(lane, buffer_bytes=1024)  # more than a buffer holds: in one copy all the same
    tensors = uploader.upload(large)
    lane.world.drain()
    assert lane.copies[1:] == [12_032]
    assert same(tensors["a"], large["a"])
    assert TogetherUploader(lane).upload({}) == {}


def test_tensors_are_normal_ones_in_inference_mode_too():
    with torch.inference_mode():
        tensors = TogetherUploader(SimulatedLane(World(0))).upload({"a": np.arange(5)})
    assert not tensors["a"].is_inference()


def test_a_failure_leaves_the_ring_usable():
    lane = CountingLane(World(0, eager=1.0))
    uploader = TogetherUploader(lane, buffers=2, buffer_bytes=1024)
    lane.full = True
    for _ in range(5):
        with pytest.raises(torch.OutOfMemoryError):
            uploader.upload({"a": np.arange(100)})
    lane.full = False
    with pytest.raises(TypeError, match="can't convert"):
        uploader.upload({"a": np.array(["text"])})
    for _ in range(5):
        tensors = uploader.upload({"a": np.arange(100)})
        lane.world.drain()
        assert same(tensors["a"], np.arange(100))


def test_on_a_cpu_memory_is_shared_where_it_can_be():
    own, locked = np.arange(6), np.arange(6)
    locked.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of tensors on read-only memory
        tensors = upload_together({"own": own, "locked": locked, "reversed": own[::-1]}, "cpu")
        for seed in range(30):
            arrays = drawn(np.random.default_rng(seed), most=9)
            sent = upload_together(arrays, "cpu")
            assert list(sent) == list(arrays)
            assert all(same(sent[name], array) for name, array in arrays.items())
    assert tensors["own"].data_ptr() == own.ctypes.data
    assert tensors["locked"].data_ptr() != locked.ctypes.data
    assert tensors["reversed"].tolist() == [5, 4, 3, 2, 1, 0]
    tensors["locked"][0] = 9
    assert locked[0] == 0


def test_inside_a_capture_it_is_refused(monkeypatch):
    device = torch.device("cuda", 0)
    lane = CountingLane(World(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setitem(module._uploaders, (device, 7), TogetherUploader(lane))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DuringCaptureError, match="Upload before the capture"):
        upload_together({"a": np.arange(5)}, device)
    assert lane.copies == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert upload_together({"a": np.arange(5)}, device)["a"].shape == (5,)
    assert lane.copies == [ALIGNMENT]


def test_streams_have_buffers_of_their_own(monkeypatch):
    """A buffer is given back with one event, which tells of one stream's copies alone."""
    device, lanes = torch.device("cuda", 0), [CountingLane(World(0)) for _ in range(2)]
    made = iter(lanes)
    monkeypatch.setattr(module, "_uploaders", {})
    monkeypatch.setattr(module, "CurrentStream", lambda device: next(made))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for handle in (1, 2, 1, 2):
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device, h=handle: SimpleNamespace(cuda_stream=h)
        )
        upload_together({"a": np.arange(5)}, device)
    assert [len(lane.copies) for lane in lanes] == [2, 2]


def test_what_was_uploaded_in_inference_mode_serves_gradients():
    with torch.inference_mode():
        tensors = upload_together({"a": np.arange(5.0)}, "cpu")
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (weight * tensors["a"]).sum().backward()
    assert weight.grad.tolist() == list(range(5))


def test_wrong_rings_are_refused():
    with pytest.raises(OptionError, match="got 1"):
        TogetherUploader(SimulatedLane(World(0)), buffers=1)
    with pytest.raises(OptionError, match="got 1000"):
        TogetherUploader(SimulatedLane(World(0)), buffer_bytes=1000)
