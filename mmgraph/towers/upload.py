"""The host arrays of one batch, brought to a device together.

Promises: on CUDA all arrays go through one piece of pinned memory and one copy on the current stream, and neither waits
for the device unless all pinned buffers are still being copied from; the tensors are parts of one block of the current
stream's memory, each aligned to 256 bytes. Elsewhere arrays become tensors where they lie, as far as that can be.
"""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.lane import Event
from mmgraph.ops.errors import DuringCaptureError
from mmgraph.pinned import ALIGNMENT, PinnedRing
from mmgraph.staging import settled

__all__ = ["CurrentStream", "TogetherUploader", "upload_together"]

_BUFFERS = 4
_BUFFER_BYTES = 16 << 20


class StreamWay(Protocol):
    """A device as an uploader sees it: one stream that all work goes to. `mmgraph.lane.Lane` has these too."""

    def entered(self) -> AbstractContextManager[Any]:
        """Make the stream's device current for a block; `allocate` and `copy` are called inside."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Give uint8 ``[nbytes]`` on the host that the device can read."""

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """Give a tensor on the device of a source's shape and dtype."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy from memory that the device can read."""

    def mark(self) -> Event:
        """Give the point that the stream's work has reached."""


class CurrentStream:
    """The stream of a CUDA device that is current when something is asked for.

    Small arrays gain nothing from a side stream: what reads them would wait for it at once.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def entered(self) -> AbstractContextManager[Any]:
        """See `StreamWay`."""
        return torch.cuda.device(self.device)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `StreamWay`."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """See `StreamWay`."""
        return torch.empty(source.shape, dtype=source.dtype, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `StreamWay`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        """See `StreamWay`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


class TogetherUploader:
    """Uploads batches to one device, through a ring of pinned buffers.

    Args:
        way: The way to the device.
        buffers: Pinned buffers; none is made before it is used.
        buffer_bytes: The bound of each, a power of two. A larger batch gets pinned memory of its own, which PyTorch
            keeps until the copy has ended.

    Raises:
        OptionError: Fewer than two buffers, or a bound that isn't a power of two of at least 256.
    """

    def __init__(self, way: StreamWay, *, buffers: int = _BUFFERS, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._way = way
        self._ring = PinnedRing(way.host_memory, buffers=buffers, largest=buffer_bytes)

    @property
    def waits(self) -> int:
        """How often the host has waited for a pinned buffer."""
        return self._ring.waits

    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device; see `upload_together`."""
        kinds = {array.dtype: torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays.values()}
        total = sum(_padded(array.nbytes) for array in arrays.values())
        if total == 0:
            total = ALIGNMENT
        # A normal tensor can be used in and out of inference mode.
        with torch.inference_mode(False), torch.no_grad(), self._way.entered():
            if total > self._ring.largest:
                block = self._send(self._way.host_memory(total), arrays)
            else:
                buffer = self._ring.take(total)
                try:
                    block = self._send(buffer.write(total), arrays)
                finally:
                    self._ring.give_back(buffer, self._way.mark())
            seen = {dtype: block.view(kind) for dtype, kind in kinds.items()}
            tensors, start = {}, 0
            for name, array in arrays.items():
                first = start // array.itemsize
                tensors[name] = seen[array.dtype][first : first + array.size].view(array.shape)
                start += _padded(array.nbytes)
        return tensors

    def _send(self, room: torch.Tensor, arrays: Mapping[str, npt.NDArray[Any]]) -> torch.Tensor:
        """Write arrays into pinned memory, each at a multiple of the alignment, and begin the copy of all of it."""
        memory, start = room.numpy(), 0
        for array in arrays.values():
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            start += _padded(array.nbytes)
        block = self._way.allocate(room)
        self._way.copy(block, room)
        return block


# By device and stream: a buffer is given back with one event, which tells of one stream alone.
_uploaders: dict[tuple[torch.device, int], TogetherUploader] = {}
_making = threading.Lock()


def upload_together(
    arrays: Mapping[str, npt.NDArray[Any]], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Bring the arrays of a batch to a device; on CUDA in one copy on the current stream, without a stall.

    Args:
        arrays: Of dtypes that tensors have, and of any shapes. On a CPU they share their memory with the tensors,
            unless they are read-only or don't lie in one piece: don't write to them any more.
        device: Where to.

    Returns:
        A tensor for each name, of the array's shape and dtype. On CUDA all of them are parts of one block, which lives
        as long as any of them.

    Raises:
        DuringCaptureError: The current stream is being captured: the graph would copy from a buffer that is reused.
        FeatureError: The device is "cuda", and there is none.
        TypeError: Tensors don't have an array's dtype.
    """
    device = torch.device(device)
    if device.type != "cuda":
        with torch.inference_mode(False):  # else what is kept couldn't be used with gradients
            return {name: torch.from_numpy(_own(array)).to(device) for name, array in arrays.items()}
    device = settled(device)
    if torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            "upload_together can't run inside a capture: the graph would copy from a buffer that is reused. "
            "Upload before the capture and pass the tensors."
        )
    where = (device, torch.cuda.current_stream(device).cuda_stream)
    uploader = _uploaders.get(where)
    if uploader is None:
        with _making:
            uploader = _uploaders.setdefault(where, TogetherUploader(CurrentStream(device)))
    return uploader.upload(arrays)


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array in one piece of writable memory: itself, where it can be."""
    flags = array.flags
    # An array of one element is in one piece whatever its strides are, and PyTorch takes none that are negative.
    if flags.c_contiguous and flags.writeable and min(array.strides, default=0) >= 0:
        return array
    return array.copy(order="C")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
