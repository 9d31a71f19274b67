"""What a call tells its graph, without a launch of its own: a ring of slots in pinned host memory.

The host writes a call's numbers into the next slot and launches the graph; the graph's first node reads the slot that
is next in the device's own count, over the bus, into the record that the other nodes read. So the host runs ahead of
the device as far as the ring allows, and a call is one launch. The device tells, in pinned memory too, how many slots
it has read; a host that is half a ring ahead waits.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import torch

from .errors import CaptureError
from .launching import STAND_IN, variant_of

__all__ = ["CallRing"]

_SLOTS = 2048  # more than the launches that a stream's queue takes


class CallRing:
    """The slots of one generation, on a CUDA device. Replays are launched in the order in which slots are written.

    Args:
        width: numbers of a call.
        record: int64 `[width]` on the device, which the first node fills.
    """

    def __init__(self, width: int, record: torch.Tensor) -> None:
        self._record = record
        self._width = width
        # Behind a call's numbers stands which call it is, so that host and device can't get out of step unnoticed.
        self._pitch = width + 1
        self._slots = torch.zeros(_SLOTS, self._pitch, dtype=torch.int64, device="cpu", pin_memory=True)
        self._read = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        with torch.inference_mode(False):
            self._count = torch.zeros(1, dtype=torch.int64, device=record.device)
        self._memory = memoryview(self._slots.numpy().data).cast("B")
        self._progress = self._read.numpy().data
        self._pack = struct.Struct(f"{self._pitch}q").pack_into
        self._sent = 0

    def write(self, numbers: Sequence[int]) -> None:
        """Writes the numbers that the next launch will read. Without a launch they are overwritten by the next ones.

        Raises:
            CaptureError: the device has read another call's numbers: a graph was replayed past the manager.
        """
        sent = self._sent
        if not 0 <= sent - self._progress[0] <= _SLOTS // 2:
            self._wait()
        self._pack(self._memory, sent % _SLOTS * self._pitch * 8, *numbers, sent)

    def launched(self) -> None:
        """Says that a graph, or `fetch`, was launched after `write`."""
        self._sent += 1

    def resync(self) -> None:
        """Counts as the device does, after a call that was broken off anywhere. Waits for the device."""
        torch.cuda.synchronize(self._record.device)
        self._sent = int(self._count.item())
        self._read.fill_(self._sent)

    def fetch(self) -> None:
        """Enqueues the node that reads the next slot: the first one of every graph."""
        from .call_kernels import fetch_kernel

        lanes = 1 << max(0, self._width - 1).bit_length()
        variant_of(
            fetch_kernel, (STAND_IN,) * 4, (_SLOTS, self._width, lanes), self._record.device, num_warps=1
        ).launch(
            1, self._slots.data_ptr(), self._count.data_ptr(), self._read.data_ptr(), self._record.data_ptr()
        )

    def _wait(self) -> None:
        stream = torch.cuda.current_stream(self._record.device)
        while self._sent - self._progress[0] > _SLOTS // 4:
            stream.query()  # raises where the device has failed and will read no more
            time.sleep(20e-6)
        if not 0 <= self._progress[0] <= self._sent:
            raise CaptureError(
                "the device has read the numbers of another call than the one that was launched, so results since "
                "then are wrong: some graph of this manager was replayed past it; call precompile(...) again"
            )
