"""Small host arrays to a CUDA device, without a stall: pinned buffers, and their copies on the device, used again.

A slot isn't written before the event that ends its last use has passed; one in use is passed over, and waited for only
when there are as many as there may be. Slots have sizes of powers of four, and are copied whole: a launch of a copy
costs the host more than the bytes.
"""

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.ops.errors import DuringCaptureError
from mmgraph.ops.launching import on_device

_SLOTS = 16  # of a size, on a device
_SMALLEST = 4096

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
}


class _Slot:
    """A pinned buffer, its copy on the device, and the event that ends the last use of both."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            # First used on the stream that it is allocated on; others come after that use's event.
            self.copy = torch.empty(size, dtype=torch.uint8, device=device)
        self.size = size
        self.arrays = {dtype: self.pinned.view(kind).numpy() for dtype, kind in _DTYPES.items()}
        self.tensors = {dtype: self.copy.view(kind) for dtype, kind in _DTYPES.items()}
        self.event = torch.cuda.Event()


class SlotRing:
    """The slots of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, deque[_Slot]] = {}
        self._made: dict[int, int] = {}
        self._lock = threading.Lock()
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def take(self, size: int) -> _Slot:
        """Take a slot for work on the current stream.

        Args:
            size: Bytes that it must hold.
        """
        rounded = _SMALLEST
        while rounded < size:
            rounded *= 4
        return self._take(rounded)

    def give_back(self, slot: _Slot) -> None:
        """Give a slot back: what the current stream has been given by now is its last use."""
        slot.event.record(self._current_stream())
        with self._lock:
            self._slots[slot.size].append(slot)  # newest last, so that the oldest is tried first

    def _current_stream(self) -> torch.cuda.Stream:
        key = torch._C._cuda_getCurrentStream(self._device.index)
        stream = self._streams.get(key)
        if stream is None:  # making the object takes longer than the copy's launch
            stream = self._streams[key] = torch.cuda.current_stream(self._device)
        return stream

    def _take(self, size: int) -> _Slot:
        with self._lock:
            slots = self._slots.setdefault(size, deque())
            for index, slot in enumerate(slots):
                if slot.event.query():
                    del slots[index]
                    return slot
            # None there: all are being filled, by other threads.
            if self._made.get(size, 0) < _SLOTS or not slots:
                slot = _Slot(size, self._device)
                self._made[size] = self._made.get(size, 0) + 1
                return slot
            slot = slots.popleft()
        slot.event.synchronize()
        return slot


_rings: dict[torch.device, SlotRing] = {}
_rings_lock = threading.Lock()


def ring_of(device: torch.device, what: str) -> SlotRing:
    """The ring of a CUDA device.

    Args:
        device: A CUDA device.
        what: Names the call in an error.

    Raises:
        DuringCaptureError: The current stream is being captured: the copy would be repeated from a reused buffer.
    """
    if torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            f"{what} can't run inside a capture: the graph would copy from a buffer that is reused. "
            "Copy it before the capture and pass the tensor."
        )
    ring = _rings.get(device)
    if ring is None:
        if device == torch.device("cuda"):  # no index given
            return ring_of(torch.device("cuda", torch.cuda.current_device()), what)
        with _rings_lock:
            ring = _rings.setdefault(device, SlotRing(device))
    return ring


class on_loan:
    """Lends the device a copy of an array for work that the block enqueues on the current stream of the device.

    A class, because a generator's context costs the host as much as a launch. The block is given a tensor that begins
    with the values.

    Args:
        values: int32 or int64, of one dimension and not empty.
        device: Any; where it isn't CUDA the copy is a plain one.
        what: Names the call in an error.

    Raises:
        DuringCaptureError: The current stream is being captured.
    """

    __slots__ = ("_device", "_ring", "_slot", "_values")

    def __init__(self, values: npt.NDArray[Any], device: torch.device, what: str) -> None:
        self._values = values
        self._device = device
        self._ring = ring_of(device, what) if device.type == "cuda" else None

    def __enter__(self) -> torch.Tensor:
        values = self._values
        if self._ring is None:
            return torch.from_numpy(values.copy()).to(self._device)
        slot = self._slot = self._ring.take(values.nbytes)
        try:
            slot.arrays[values.dtype][: values.shape[0]] = values
            slot.copy.copy_(slot.pinned, non_blocking=True)
            return slot.tensors[values.dtype]
        except BaseException:  # the block isn't entered, so isn't left
            self._ring.give_back(slot)
            raise

    def __exit__(self, *error: object) -> None:
        if self._ring is not None:
            self._ring.give_back(self._slot)


def upload(values: npt.NDArray[Any], device: torch.device, what: str) -> torch.Tensor:
    """Copy an int32 or int64 array to a device; on CUDA enqueued on the current stream, without a stall.

    Args:
        values: Of any shape.
        device: Where to.
        what: Names the call in an error.

    Returns:
        A tensor of its own, of the same shape.

    Raises:
        DuringCaptureError: The current stream is being captured.
    """
    if device.type != "cuda":
        return torch.from_numpy(values.copy()).to(device)
    if values.size == 0:
        return torch.empty(values.shape, dtype=_DTYPES[values.dtype], device=device)
    with on_device(device), on_loan(values.reshape(-1), device, what) as tensor:
        return tensor[: values.size].clone().view(values.shape)
