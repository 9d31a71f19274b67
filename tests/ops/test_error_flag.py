"""Invariant: what a kernel records is raised once, by name, and then forgotten."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mmgraph import ops
from mmgraph.ops import error_flag
from mmgraph.ops.error_flag import FIELDS, Fault

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_flags(monkeypatch):
    monkeypatch.setattr(error_flag, "_flags", {})


@pytest.mark.parametrize("fault", list(Fault))
def test_a_recorded_fault_is_raised_once_and_cleared(fault):
    flag = error_flag.flag_for(CPU)
    flag[fault * FIELDS : (fault + 1) * FIELDS] = torch.tensor([3, 41, 77])
    with pytest.raises(ops.DeviceError) as caught:
        ops.check_errors()
    for part in ("cpu", "41", "77"):
        assert part in str(caught.value)
    ops.check_errors()
    ops.check_errors("cpu")
    assert error_flag.flag_for(CPU) is flag  # its address stays


def test_several_faults_are_raised_together():
    error_flag.flag_for(CPU)[:] = 1
    with pytest.raises(ops.DeviceError) as caught:
        ops.check_errors(CPU)
    for op in ("assemble_embeddings", "merge_embeddings", "deepstack_add", "varlen_attention"):
        assert op in str(caught.value)


def test_a_flag_made_in_inference_mode_can_be_cleared_outside():
    with torch.inference_mode():
        flag = error_flag.flag_for(CPU)
    assert not flag.is_inference()
    flag[0] = 1
    with torch.inference_mode(), pytest.raises(ops.DeviceError):
        ops.check_errors()
    ops.check_errors()


def test_a_flag_is_made_where_no_pool_or_mode_of_the_caller_reaches(monkeypatch):
    """PyTorch sends a thread's allocations to the pool of a graph, and traces what a thread calls."""
    made_by = []
    zeros = torch.zeros

    def spy(*arguments, **keywords):
        made_by.append(threading.get_ident())
        return zeros(*arguments, **keywords)

    monkeypatch.setattr(torch, "zeros", spy)
    with FakeTensorMode():
        flag = error_flag.flag_for(CPU)
        assert error_flag.flag_for(CPU) is flag
    assert len(made_by) == 1
    assert made_by[0] != threading.get_ident()
    assert not isinstance(flag, FakeTensor)


def test_a_fault_recorded_between_reading_and_clearing_is_for_the_next_call(monkeypatch):
    flag = error_flag.flag_for(CPU)
    flag[0:3] = torch.tensor([2, 41, 77])
    read = torch.Tensor.tolist

    def read_and_go_on(tensor):
        values = read(tensor)
        flag[0] += 1  # as a kernel on another stream would: not the first of its kind, it leaves no row
        flag[9:12] = torch.tensor([1, 5, 6])  # the first of its kind
        return values

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", read_and_go_on)
        with pytest.raises(ops.DeviceError, match=r"row 41 had 77 \(2 such") as caught:
            ops.check_errors()
    assert "merge_embeddings" not in str(caught.value)
    with pytest.raises(ops.DeviceError, match=r"row 41 had 77 \(1 such rows(.|\n)*held 5 placeholders"):
        ops.check_errors()
    ops.check_errors()
    flag[0:3] += torch.tensor([1, 0, 0])
    with pytest.raises(ops.DeviceError, match="1 such"):
        ops.check_errors()


def test_a_device_without_a_flag_has_nothing_to_tell():
    ops.check_errors("cpu")
    ops.prepare_device("cpu")
    assert list(error_flag._flags) == [CPU]


def test_a_capture_needs_the_flag_made_before(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ops.DuringCaptureError, match="prepare_device"):
        error_flag.flag_for(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ops.DuringCaptureError, match="after the replay"):
        ops.check_errors()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ops.DuringCaptureError, match="pass the tensor"):
        ops.RowMap.from_ranges(2, [0], [0], [0], pool_rows=1).to("cuda:0")
