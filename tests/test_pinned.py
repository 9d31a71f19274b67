"""Invariant: bytes of a pinned buffer have one writer, and are written again only after the copies from them."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.pinned import ALIGNMENT, PinnedRing


class Stream:
    """Its work ends in order."""

    def __init__(self) -> None:
        self.recorded = 0
        self.ended = 0


class Event:
    def __init__(self, stream: Stream) -> None:
        stream.recorded += 1
        self.number, self.stream, self.waited = stream.recorded, stream, 0

    def query(self) -> bool:
        return self.number <= self.stream.ended

    def synchronize(self) -> None:
        self.waited += 1
        self.stream.ended = max(self.stream.ended, self.number)


def memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def addresses(piece: torch.Tensor) -> range:
    return range(piece.data_ptr(), piece.data_ptr() + piece.numel())


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=60),
    lag=st.integers(0, 12),
    buffers=st.integers(2, 4),
)
def test_pieces_in_flight_never_overlap_and_are_aligned(sizes: list[int], lag: int, buffers: int) -> None:
    ring, stream = PinnedRing(memory, buffers=buffers, largest=4096), Stream()
    in_flight: list[tuple[range, Event]] = []
    for size in sizes:
        buffer = ring.take(size)
        start = buffer.used
        piece = addresses(buffer.write(min(size, buffer.room)))
        assert start % ALIGNMENT == 0
        assert len(piece) == min(size, 4096)
        for other, event in in_flight:
            assert event.query() or not (piece.start < other.stop and other.start < piece.stop)
        ring.give_back(buffer, event := Event(stream))
        in_flight.append((piece, event))
        stream.ended = max(stream.ended, stream.recorded - lag)
    if lag == 0:
        assert ring.waits == 0


def test_the_host_waits_for_the_buffer_whose_copies_began_first() -> None:
    ring = PinnedRing(memory, buffers=3, largest=1024)
    stream, events = Stream(), []
    for _ in range(3):
        buffer = ring.take(1024)
        buffer.write(1024)
        ring.give_back(buffer, Event(stream))
        events.append(buffer.event)
    ring.take(1024)
    assert [event.waited for event in events] == [1, 0, 0]
    assert ring.waits == 1


def test_room_behind_copies_in_flight_is_used_without_a_wait() -> None:
    ring, stream = PinnedRing(memory, largest=1024), Stream()
    for _ in range(8):
        buffer = ring.take(256)
        buffer.write(256)
        ring.give_back(buffer, Event(stream))
    assert ring.waits == 0


def test_a_buffer_that_can_not_grow_is_given_back() -> None:
    failing = True

    def sometimes(nbytes: int) -> torch.Tensor:
        if failing:
            raise RuntimeError("no pinned memory")
        return memory(nbytes)

    ring = PinnedRing(sometimes, largest=1024)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no pinned memory"):
            ring.take(10)
    failing = False
    for _ in range(2):
        assert ring.take(10).room == 1024


def test_a_thread_waits_for_its_turn() -> None:
    ring = PinnedRing(memory, largest=1024)
    taken = [ring.take(10), ring.take(10)]
    got = []
    thread = threading.Thread(target=lambda: got.append(ring.take(10)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    ring.give_back(taken[1], None)
    thread.join(60)
    assert got == [taken[1]]
    assert ring.waits == 0


@pytest.mark.parametrize("options", [{"buffers": 1}, {"largest": 1000}, {"largest": 128}, {"largest": -4}])
def test_wrong_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"got -?\d+"):
        PinnedRing(memory, **options)
