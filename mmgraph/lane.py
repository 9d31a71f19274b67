"""One device's way in: what staging asks of a device, and how CUDA does it.

Promises: staging reaches streams, events and device memory through a `Lane` alone, so that its order of steps can be
run against a simulated device as well. A lane has one side stream; what it allocates belongs to that stream, and may
be used by another only after `Lane.hand_over`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class Event(Protocol):
    """A point in the side stream's work."""

    def query(self) -> bool:
        """Tell whether the work before it has ended."""

    def synchronize(self) -> None:
        """Let the host wait until it has."""


class Lane(Protocol):
    """A device as staging sees it. All work goes to the side stream and none waits for the device."""

    def entered(self) -> AbstractContextManager[Any]:
        """Make the side stream current for a block; `allocate` and `copy` are called inside."""

    def follow(self, sources: Sequence[torch.Tensor]) -> None:
        """Let the side stream wait for what the streams that are current now do to sources on devices."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Give uint8 ``[nbytes]`` on the host that the device can read."""

    def reads(self, source: torch.Tensor) -> bool:
        """Tell whether the device can read a tensor's memory where it is."""

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """Give a tensor on the device of a source's shape and dtype, and of its strides where it is dense."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy from memory that the device can read; the caller keeps the source until it has ended."""

    def mark(self) -> Event:
        """Give the point that the side stream's work has reached."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream use tensors of the side stream: it waits for the event, and their memory, once
        freed, is not handed out again before that stream has come to where it is then."""


class CudaLane:
    """The lane of one CUDA device.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)

    def entered(self) -> AbstractContextManager[Any]:
        """See `Lane`."""
        return torch.cuda.stream(self.side)

    def follow(self, sources: Sequence[torch.Tensor]) -> None:
        """See `Lane`."""
        for origin in {source.device for source in sources if source.is_cuda}:
            self.side.wait_stream(torch.cuda.current_stream(origin))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Lane`."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def reads(self, source: torch.Tensor) -> bool:
        """See `Lane`."""
        return source.is_cuda or source.is_pinned()

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """See `Lane`."""
        return torch.empty_like(source, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Lane`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        """See `Lane`."""
        event = torch.cuda.Event()
        event.record(self.side)
        return event

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """See `Lane`."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(cast(torch.cuda.Event, event))
        for tensor in tensors:
            tensor.record_stream(compute)
