"""Invariant: a slot of the ring isn't written before the event of its last use has passed, and none is ever lost.

With events that pass when they are told to, and buffers that lie on the CPU.
"""

import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from mmgraph import ops
from mmgraph.ops import slot_ring

GPU = torch.device("cuda", 0)
SLOTS = slot_ring._SLOTS


class Event:
    """An event that has passed once it is told so, or waited for."""

    asked: ClassVar[list["Event"]] = []
    waited: ClassVar[list["Event"]] = []

    def __init__(self):
        self.passed = True
        self.streams = []

    def record(self, stream):
        self.passed = False
        self.streams.append(stream)

    def query(self):
        self.asked.append(self)
        return self.passed

    def synchronize(self):
        self.waited.append(self)
        self.passed = True


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """Plays the driver; its stream can be changed, and it can run out of memory or capture."""
    state = SimpleNamespace(stream=(1, 0, 1), capturing=False, full=False)
    empty = torch.empty

    def allocate(*shape, device="cpu", pin_memory=False, **keywords):
        if state.full:
            raise torch.OutOfMemoryError("no more")
        return empty(*shape, **keywords)

    monkeypatch.setattr(Event, "asked", [])
    monkeypatch.setattr(Event, "waited", [])
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream {state.stream[0]}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr(slot_ring, "on_device", lambda device: torch.inference_mode(False))
    monkeypatch.setattr(slot_ring, "_rings", {})
    return state


def test_a_slot_is_used_again_once_its_event_has_passed_and_not_before():
    ring = slot_ring.SlotRing(GPU)
    first = ring.take(10)
    ring.give_back(first)
    second = ring.take(10)
    assert second is not first
    first.event.passed = True
    assert ring.take(10) is first
    assert Event.waited == []


def test_the_oldest_is_tried_first():
    ring = slot_ring.SlotRing(GPU)
    slots = [ring.take(10) for _ in range(3)]
    for index in (1, 2, 0):
        ring.give_back(slots[index])
    slots[2].event.passed = slots[0].event.passed = True
    assert ring.take(10) is slots[2]  # given back before the other that has passed
    assert Event.asked == [slots[1].event, slots[2].event]


def test_with_all_slots_in_flight_the_oldest_is_waited_for():
    ring = slot_ring.SlotRing(GPU)
    slots = [ring.take(10) for _ in range(SLOTS)]
    assert len(set(map(id, slots))) == SLOTS
    for slot in reversed(slots):
        ring.give_back(slot)
    for expected in (slots[-1], slots[-2]):
        assert ring.take(10) is expected
        assert Event.waited.pop() is expected.event
        assert Event.waited == []


def test_slots_that_are_all_being_filled_are_not_waited_for():
    ring = slot_ring.SlotRing(GPU)
    slots = [ring.take(10) for _ in range(SLOTS + 2)]
    assert len(set(map(id, slots))) == SLOTS + 2
    assert Event.waited == []


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 4096), (4096, 4096), (4097, 16384), (16384, 16384), (16385, 65536)]
)
def test_sizes_round_up_to_powers_of_four_and_have_slots_of_their_own(size, rounded):
    ring = slot_ring.SlotRing(GPU)
    slot = ring.take(size)
    assert slot.size == slot.pinned.numel() == slot.copy.numel() == rounded
    ring.give_back(slot)
    slot.event.passed = True
    for other in (1, 5000, 20000, 70000):
        taken = ring.take(other)
        assert (taken is slot) == (taken.size == rounded)


def test_a_loan_holds_the_values_and_ends_on_the_stream_that_is_current_then(driver):
    for dtype, kind in ((np.int32, torch.int32), (np.int64, torch.int64)):
        values = np.arange(7, dtype=dtype) - 3
        with slot_ring.on_loan(values, GPU, "a test") as lent:
            assert lent.dtype == kind
            assert lent[:7].tolist() == values.tolist()
            other = slot_ring.ring_of(GPU, "a test").take(1)
            assert other.copy.data_ptr() != lent.data_ptr()
            driver.stream = (2, 0, 1)
        (slot,) = slot_ring.ring_of(GPU, "a test")._slots[4096]
        assert slot.copy.data_ptr() == lent.data_ptr()
        assert slot.event.streams[-1] == "stream 2"
        assert not slot.event.passed
        slot_ring._rings.clear()
        driver.stream = (1, 0, 1)


def test_an_upload_is_a_tensor_of_its_own():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    first = slot_ring.upload(values, GPU, "a test")
    ring = slot_ring.ring_of(GPU, "a test")
    ring._slots[4096][0].event.passed = True
    slot_ring.upload(values + 100, GPU, "a test")
    assert len(ring._slots[4096]) == 1
    assert first.tolist() == values.tolist()


def test_a_loan_whose_block_or_copy_fails_gives_its_slot_back(monkeypatch):
    def fail(*arguments, **keywords):
        raise RuntimeError("the driver says no")

    values = np.arange(4, dtype=np.int32)
    with pytest.raises(ZeroDivisionError), slot_ring.on_loan(values, GPU, "a test"):
        _ = 1 / 0
    ring = slot_ring.ring_of(GPU, "a test")
    (slot,) = ring._slots[4096]
    slot.event.passed = True
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fail)
        with pytest.raises(RuntimeError, match="says no"):
            slot_ring.on_loan(values, GPU, "a test").__enter__()
    assert list(ring._slots[4096]) == [slot]
    assert not slot.event.passed
    slot.event.passed = True
    with slot_ring.on_loan(values, GPU, "a test") as lent:
        assert lent.data_ptr() == slot.copy.data_ptr()


def test_a_slot_that_could_not_be_made_does_not_count(driver):
    ring = slot_ring.SlotRing(GPU)
    ring.give_back(ring.take(1))
    driver.full = True
    for _ in range(SLOTS):
        with pytest.raises(torch.OutOfMemoryError):
            ring.take(1)
    driver.full = False
    for _ in range(SLOTS - 1):
        ring.take(1)
    assert Event.waited == []


def test_a_capture_is_refused_before_a_slot_is_taken(driver):
    driver.capturing = True
    values = np.zeros(1, dtype=np.int32)
    with pytest.raises(ops.DuringCaptureError, match="a test can't run inside a capture"):
        slot_ring.on_loan(values, GPU, "a test")
    assert slot_ring._rings == {}


def test_threads_never_share_a_slot_and_lose_none():
    """Each writes its number into what it is lent and finds it there; events pass or are waited for."""
    wrong, held, lock = [], set(), threading.Lock()
    barrier = threading.Barrier(6)

    def work(number):
        barrier.wait()
        for turn in range(150):
            values = np.full(8, 1000 * number + turn, dtype=np.int64)
            with slot_ring.on_loan(values, GPU, "a test") as lent:
                with lock:
                    if lent.data_ptr() in held:
                        wrong.append("shared")
                    held.add(lent.data_ptr())
                if lent[:8].tolist() != values.tolist():
                    wrong.append("overwritten")
                with lock:
                    held.discard(lent.data_ptr())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    ring = slot_ring.ring_of(GPU, "a test")
    assert len(ring._slots[4096]) == ring._made[4096]
    assert 1 <= ring._made[4096] <= SLOTS
