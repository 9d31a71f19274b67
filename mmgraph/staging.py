"""How features reach the encoder's device, and small index arrays the device.

Promises: on CUDA, features move on a side stream of the device, which waits for the stream that produced a
source that is resident on another device, and which the compute stream waits for; what was allocated on the side
stream is marked as used by the compute stream. Host memory that the device can't read goes through a ring of pinned
buffers; a source that it reads itself is kept until the copy has ended. Elsewhere none of this takes part. Any thread
may move.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from mmgraph.errors import FeatureError
from mmgraph.lane import CudaLane, Event, Lane
from mmgraph.pinned import ALIGNMENT, PinnedBuffer, PinnedRing, check_ring

_SMALLEST_PIECE = 1 << 16
"""Bytes; less room than this at the end of a buffer isn't worth a copy of its own."""


@dataclass(frozen=True, slots=True)
class StartedCopies:
    """Copies that were begun on a side stream.

    Attributes:
        tensors: Where they go, in the order of the sources; not to be read before `ready`.
        event: Passes when the last has ended.
        lane: Whose side stream it is.
    """

    tensors: list[torch.Tensor]
    event: Event
    lane: Lane

    def ready(self) -> list[torch.Tensor]:
        """Give the copies to the current stream, which waits for them; the host doesn't."""
        self.lane.hand_over(self.event, self.tensors)
        return self.tensors


class FeatureMover:
    """Moves tensors to devices; keeps one side stream and one ring of pinned buffers for each CUDA device.

    Each tensor gets device memory of its own rather than a part of one block: features of a batch are dropped at
    different times, and each copy begins as soon as its tensor is in the buffer.

    Args:
        buffers: Pinned buffers for each device.
        buffer_bytes: The bound of each, a power of two; larger features go through in pieces.
        lane: Makes the way to a device.

    Raises:
        OptionError: Fewer than two buffers, or a bound that isn't a power of two of at least 256.
    """

    def __init__(
        self,
        *,
        buffers: int = 2,
        buffer_bytes: int = 64 << 20,
        lane: Callable[[torch.device], Lane] = CudaLane,
    ) -> None:
        check_ring(buffers, buffer_bytes)
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes
        self._make_lane = lane
        self._entrances: dict[torch.device, _Entrance] = {}
        self._opening = threading.Lock()

    @property
    def waits(self) -> int:
        """How often the host has waited for a pinned buffer."""
        return sum(entrance.ring.waits for entrance in list(self._entrances.values()))

    def move(self, sources: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Bring tensors to a device; those that are there already are returned as they are.

        Args:
            sources: Tensors on any device, of any layout and dtype, pinned or not. One that needs a gradient, or
                isn't plain dense memory, is copied by torch on the current stream.
            device: Where to.

        Returns:
            Tensors that the current stream of the device may use.
        """
        device = settled(device)
        if device.type != "cuda":
            return [source.to(device) for source in sources]
        staged = [source for source in sources if is_staged(source, device)]
        moved = iter(self.start(staged, device).ready() if staged else ())
        return [
            next(moved) if is_staged(source, device) else source.to(device, non_blocking=True)
            for source in sources
        ]

    def start(self, sources: Sequence[torch.Tensor], device: torch.device) -> StartedCopies:
        """Begin to copy tensors to a CUDA device, without a wait for it unless all pinned buffers are in use.

        Args:
            sources: Tensors for which `is_staged` holds.
            device: A CUDA device, with its index.

        Returns:
            The copies.
        """
        return self._entrance(device).start(sources)

    def _entrance(self, device: torch.device) -> "_Entrance":
        with self._opening:
            entrance = self._entrances.get(device)
            if entrance is None:
                entrance = _Entrance(self._make_lane(device), self._buffers, self._buffer_bytes)
                self._entrances[device] = entrance
            return entrance


class _Entrance:
    """What one device has: a lane, a ring, and the sources that it still reads."""

    def __init__(self, lane: Lane, buffers: int, buffer_bytes: int) -> None:
        self.lane = lane
        self.ring = PinnedRing(lane.host_memory, buffers=buffers, largest=buffer_bytes)
        self._kept: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._keeping = threading.Lock()

    def start(self, sources: Sequence[torch.Tensor]) -> StartedCopies:
        # A normal tensor can be used in and out of inference mode, and has a version counter.
        with torch.inference_mode(False), torch.no_grad():
            plain = [source.detach().resolve_conj().resolve_neg() for source in sources]
            self.lane.follow(plain)
            with self.lane.entered():
                readable = [self.lane.reads(source) for source in plain]
                visit = _Visit(self.lane, self.ring)
                visit.ahead = sum(
                    _padded(source.nbytes) for source, direct in zip(plain, readable, strict=True) if not direct
                )
                try:
                    copies = [
                        visit.copy(source, direct) for source, direct in zip(plain, readable, strict=True)
                    ]
                finally:
                    event = visit.close()
                    self._keep(event, visit.direct)
        return StartedCopies(copies, event, self.lane)

    def _keep(self, event: Event, sources: list[torch.Tensor]) -> None:
        """Keep sources that the device reads itself: torch's allocator looks after its own pinned memory, and nobody
        after memory that was pinned otherwise."""
        with self._keeping:
            while self._kept and self._kept[0][0].query():
                self._kept.popleft()
            if sources:
                self._kept.append((event, sources))


class _Visit:
    """One thread's copies, inside the side stream.

    Attributes:
        direct: The sources that the device reads where they are.
        ahead: Bytes that are still to go through the ring, as far as known.
    """

    def __init__(self, lane: Lane, ring: PinnedRing) -> None:
        self.direct: list[torch.Tensor] = []
        self._lane = lane
        self._ring = ring
        self._buffer: PinnedBuffer | None = None
        self.ahead = 0

    def copy(self, source: torch.Tensor, readable: bool) -> torch.Tensor:
        """Begin the copy of one tensor, which the device can read or not; give where it goes."""
        target = self._lane.allocate(source)
        if not source.numel():
            return target
        dense = source.stride() == target.stride() or (source.is_contiguous() and target.is_contiguous())
        if readable and (dense or source.device.type != "cpu"):
            self.direct.append(source)
            self._lane.copy(target, source)
            return target
        if not dense and _padded(source.nbytes) <= self._ring.largest:
            room = self._room(source.nbytes, whole=True).view(source.dtype)
            room.as_strided(source.shape, target.stride()).copy_(source)
            self._lane.copy(_flat(target), room.view(torch.uint8))
            return target
        rest = _flat(source if dense else torch.empty_like(target, device="cpu").copy_(source))
        rest_target = _flat(target)
        while rest.numel():
            room = self._room(rest.numel(), whole=False)
            size = room.numel()
            self._lane.copy(rest_target[:size], room.copy_(rest[:size]))
            rest, rest_target = rest[size:], rest_target[size:]
        return target

    def close(self) -> Event:
        """Let go of the buffer; give the event after all copies."""
        event = self._lane.mark()
        if self._buffer is not None:
            self._ring.give_back(self._buffer, event)
            self._buffer = None
        return event

    def _room(self, nbytes: int, *, whole: bool) -> torch.Tensor:
        """Give at most so many bytes of a buffer, or exactly so many."""
        least = nbytes if whole else min(nbytes, _SMALLEST_PIECE)
        if self._buffer is not None and self._buffer.room < least:
            self.close()
        if self._buffer is None:
            self._buffer = self._ring.take(max(self.ahead, nbytes))
        room = self._buffer.write(min(nbytes, self._buffer.room))
        self.ahead -= _padded(room.numel())
        return room


def settled(device: torch.device) -> torch.device:
    """Name a CUDA device by its index.

    Raises:
        FeatureError: It is "cuda" without an index, and there is none.
    """
    if str(device) != "cuda":
        return device
    try:
        return torch.device("cuda", torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise FeatureError(
            f"features can't go to {device}: {error}; name a device that torch can use"
        ) from error


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small host array to a device, without a stall on CUDA."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def is_staged(source: torch.Tensor, device: torch.device) -> bool:
    """Tell whether a tensor goes to a device by the side stream: plain dense memory elsewhere, with no gradient to
    record."""
    return (
        source.device != device
        and type(source) in (torch.Tensor, torch.nn.Parameter)
        and source.device.type in ("cpu", "cuda")
        and source.layout == torch.strided
        and not source.is_quantized
        and not (source.requires_grad and torch.is_grad_enabled())
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """See dense memory as bytes, in the order in which it lies."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
