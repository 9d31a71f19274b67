"""Pinned buffers that features pass through on their way to a device.

Promises: bytes of a buffer are not written again before the event that ended the last copy from them has passed; the
host waits for such an event only where no buffer has room; a buffer has one writer at a time, and any thread may take
one. Buffers take no memory until they are used, and then powers of two up to the bound.
"""

import threading
from collections.abc import Callable

import torch

from mmgraph.errors import OptionError
from mmgraph.lane import Event

ALIGNMENT = 256
"""Each piece begins at a multiple of this many bytes, so that it can be seen as any dtype."""

SMALLEST_BUFFER = 1 << 20


class PinnedBuffer:
    """One buffer of a ring, with one writer at a time.

    Attributes:
        memory: uint8, on the host.
        used: Bytes from the front that copies may still read.
        event: Passes when the copies from it have ended; None: there are none.
    """

    __slots__ = ("event", "memory", "taken", "turn", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used = 0
        self.event: Event | None = None
        self.taken = False
        self.turn = 0

    @property
    def room(self) -> int:
        """Bytes that can still be written."""
        return self.memory.numel() - self.used

    def write(self, nbytes: int) -> torch.Tensor:
        """Give the next bytes, uint8 ``[nbytes]``, to be written and copied from; at most ``room``."""
        start = self.used
        self.used = min(-(-(start + nbytes) // ALIGNMENT) * ALIGNMENT, self.memory.numel())
        return self.memory[start : start + nbytes]

    def idle(self) -> bool:
        """Tell whether all copies from it have ended, and forget them if so."""
        if self.event is not None and not self.event.query():
            return False
        self.event, self.used = None, 0
        return True


class PinnedRing:
    """A few pinned buffers of one device, used in turn.

    Args:
        memory: Makes uint8 ``[nbytes]`` on the host that the device can read.
        buffers: How many; at least two, so that one is written while the other is copied from.
        largest: The bound of each in bytes; a power of two.

    Attributes:
        waits: How often the host had to wait for a copy to end.

    Raises:
        OptionError: As `check_ring`.
    """

    def __init__(
        self, memory: Callable[[int], torch.Tensor], *, buffers: int = 2, largest: int = 64 << 20
    ) -> None:
        check_ring(buffers, largest)
        self.largest = largest
        self.waits = 0
        self._memory = memory
        self._buffers = [PinnedBuffer(torch.empty(0, dtype=torch.uint8, device="cpu")) for _ in range(buffers)]
        self._turns = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> PinnedBuffer:
        """Take a buffer to write to; `give_back` it in any case. A thread holds one at a time.

        Args:
            nbytes: How much is to be written, at least one; what is beyond the bound needs another buffer.

        Returns:
            A buffer with room for ``min(nbytes, largest)``.
        """
        needed = min(nbytes, self.largest)
        buffer = self._choose(needed)
        try:
            if buffer.event is not None and buffer.room < needed:
                buffer.event.synchronize()
                buffer.event, buffer.used = None, 0
            if buffer.room < needed:
                size = min(_power_of_two(max(needed, SMALLEST_BUFFER)), self.largest)
                buffer.memory = self._memory(size)
        except BaseException:
            self.give_back(buffer, buffer.event)
            raise
        return buffer

    def give_back(self, buffer: PinnedBuffer, event: Event | None) -> None:
        """Let another writer have a buffer.

        Args:
            buffer: A buffer that was taken.
            event: Comes after all copies from it; None: there were none.
        """
        with self._changed:
            buffer.event = event
            buffer.taken = False
            self._turns += 1
            buffer.turn = self._turns
            self._changed.notify()

    def _choose(self, needed: int) -> PinnedBuffer:
        """Take a buffer with room, an idle one first; else an idle one, to be made larger; else the one whose
        copies began first, to be waited for."""
        with self._changed:
            while True:
                free = [buffer for buffer in self._buffers if not buffer.taken]
                if free:
                    break
                self._changed.wait()
            idle = [buffer for buffer in free if buffer.idle()]
            fit = [buffer for buffer in (*idle, *free) if buffer.room >= needed]
            if fit or idle:
                chosen = (fit or idle)[0]
            else:
                chosen = min(free, key=lambda buffer: buffer.turn)
                self.waits += 1
            chosen.taken = True
            return chosen


def check_ring(buffers: int, largest: int) -> None:
    """Check what a ring is to be made of.

    Raises:
        OptionError: Fewer than two buffers, or a bound that isn't a power of two of at least 256.
    """
    if buffers < 2:
        raise OptionError(
            f"a ring needs at least 2 buffers, to write one and copy from the other, got {buffers}"
        )
    if largest < ALIGNMENT or largest & (largest - 1):
        raise OptionError(
            f"the bound of a pinned buffer must be a power of two of at least {ALIGNMENT} bytes, got {largest}; "
            f"the next one is {_power_of_two(max(largest, ALIGNMENT))}"
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
