"""cuDNN's handles: each serves one call at a time, and is never destroyed.

Destroying one would free device memory and so break another thread's capture.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

import torch


class Handle:
    """A cuDNN handle, and the stream that it is on."""

    __slots__ = ("number", "stream")

    def __init__(self, number: int) -> None:
        self.number = number
        self.stream: int | None = None


class Handles:
    """The handles that no call is using, by device.

    Args:
        make: Makes a handle on the current device and returns its number.
    """

    def __init__(self, make: Callable[[], int]) -> None:
        self._make = make
        self._changed = threading.Condition(threading.Lock())
        self._idle: defaultdict[int, list[Handle]] = defaultdict(list)
        self._made: Counter[int] = Counter()

    def take(self, device: int) -> Handle:
        """A handle of the current device that no other call is using; ``give`` it back afterwards."""
        with self._changed:
            unused = self._idle[device]
            # Making one allocates, which a capture forbids; another thread gives one back soon.
            while not unused and self._made[device] and torch.cuda.is_current_stream_capturing():
                self._changed.wait()
            if unused:
                return unused.pop()
            self._made[device] += 1
        try:
            return Handle(self._make())
        except BaseException:
            with self._changed:
                self._made[device] -= 1
                self._changed.notify_all()  # there may be none to wait for
            raise

    def give(self, device: int, handle: Handle) -> None:
        """Let other calls use a handle."""
        with self._changed:
            self._idle[device].append(handle)
            self._changed.notify()
