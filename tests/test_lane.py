"""Invariant: a CUDA lane asks torch for what staging was promised: order between streams, marks, copies without a wait.

Streams and events only write down what they are told here; what it does on a device is tested in ``tests/gpu``.
"""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mmgraph.lane import CudaLane
from mmgraph.staging import FeatureMover

CPU = torch.device("cpu")


class Book:
    """What was asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[Any, ...]] = []
        book = self

        class Event:
            def record(self, stream: "Stream") -> None:
                book.lines.append(("record", stream.name))

            def query(self) -> bool:
                return False

        class Stream:
            def __init__(self, device: object, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                book.lines.append(("wait", self.name))

            def wait_stream(self, other: "Stream") -> None:
                book.lines.append(("follow", self.name, other.name))

        @contextmanager
        def entered(stream: Stream) -> Any:
            book.lines.append(("enter", stream.name))
            yield
            book.lines.append(("leave", stream.name))

        copy = torch.Tensor.copy_

        def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                book.lines.append(("copy",))
            return copy(target, source)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, f"current of {device}"))
        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.lines.append(("mark", stream.name))
        )
        monkeypatch.setattr(
            CudaLane, "host_memory", lambda lane, nbytes: torch.empty(nbytes, dtype=torch.uint8)
        )


def test_a_move_is_ordered_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(monkeypatch)
    mover = FeatureMover(lane=lambda device: CudaLane(CPU))
    sources = [torch.randn(3, 4), torch.randn(2)]
    moved = mover.move(sources, torch.device("cuda", 0))
    assert all(torch.equal(copy, source) for copy, source in zip(moved, sources, strict=True))
    assert book.lines == [
        ("enter", "side"),
        ("copy",),
        ("copy",),
        ("record", "side"),
        ("leave", "side"),
        ("wait", "current of cpu"),
        ("mark", "current of cpu"),
        ("mark", "current of cpu"),
    ]


def test_a_source_on_a_device_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Resident:
        is_cuda = True
        device = torch.device("cuda", 3)

    book = Book(monkeypatch)
    CudaLane(CPU).follow([Resident(), Resident(), torch.ones(1)])
    assert book.lines == [("follow", "side", "current of cuda:3")]


def test_what_the_device_reads() -> None:
    lane = object.__new__(CudaLane)
    assert not lane.reads(torch.ones(2))
