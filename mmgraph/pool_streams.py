"""Streams and events as a pool sees them.

Promises: nothing here makes the host wait, and nothing asks a device whether it has got somewhere, which would break
another thread's capture. On a CPU there is one stream, in which everything has happened by the time it is recorded.
"""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A point in a stream's work.

    Attributes:
        stream: Which stream.
        event: What other streams wait for.
        number: Grows from mark to mark; of two marks in one stream the greater comes later, as long as marks are
            recorded by one thread at a time.
    """

    stream: Hashable
    event: Any
    number: int


class Clock(Protocol):
    """The streams of one device."""

    def capturing(self, stream: Hashable | None = None) -> bool:
        """Tell whether a graph is being captured from a stream, or from the current one."""

    def stream(self) -> Hashable:
        """Give the device's current stream."""

    def record(self, stream: Hashable) -> Mark:
        """Mark the end of the work that a stream has been given so far."""

    def wait(self, mark: Mark) -> None:
        """Let the work that the current stream is given from now on wait for a mark."""


class HostClock:
    """A CPU: one stream, in step with the host."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def capturing(self, stream: Hashable | None = None) -> bool:
        """Nothing can be captured here."""
        return False

    def stream(self) -> Hashable:
        """The only stream."""
        return "host"

    def record(self, stream: Hashable) -> Mark:
        """Mark a point that has passed."""
        return Mark(stream, None, next(self._numbers))

    def wait(self, mark: Mark) -> None:
        """Do nothing: what is marked has happened."""


class CudaClock:
    """A CUDA device's streams and events.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = itertools.count()
        # Making the object takes longer than anything else in a look-up.
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def capturing(self, stream: Hashable | None = None) -> bool:
        """Tell whether a graph is being captured from a stream, or from the current one of the device."""
        if stream is not None and isinstance(stream, torch.cuda.Stream):
            with torch.cuda.stream(stream):
                return torch.cuda.is_current_stream_capturing()
        if torch.cuda.current_device() == self._device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def stream(self) -> Hashable:
        """Give the device's current stream, as a ``torch.cuda.Stream``."""
        key = torch._C._cuda_getCurrentStream(self._device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self._device)
        return stream

    def record(self, stream: Hashable) -> Mark:
        """Record an event on a stream."""
        event: Any = torch.cuda.Event()
        event.record(stream)
        return Mark(stream, event, next(self._numbers))

    def wait(self, mark: Mark) -> None:
        """Let the device's current stream wait for an event."""
        mark.event.wait(self.stream())


def clock_for(device: torch.device) -> Clock:
    """Give the clock of a device, which must be a CPU or a CUDA device with its index."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def newest(marks: Iterable[Mark]) -> list[Mark]:
    """Keep each stream's last mark: who waits for it has waited for those before it."""
    last: dict[Hashable, Mark] = {}
    for mark in marks:
        if mark.stream not in last or last[mark.stream].number < mark.number:
            last[mark.stream] = mark
    return list(last.values())
