"""Results without an allocation: a lease on static output memory, which says so once it has been given away.

A lease is good until the next call that leases from the same memory. `get` raises from then on. A stream other than the
one that the next lease is made on may still read: leaving the lease's `with` block, or `release`, marks where it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from .errors import StaleLeaseError
from .recorder import poison as fill_with_nan

__all__ = ["Lease", "LeaseDesk"]


class Lease:
    """The results of one call, in memory that the manager goes on to use.

    Example:
        >>> import torch
        >>> from mmgraph.capture import BucketGrid, CaptureManager, rows
        >>> grid, spec = BucketGrid(n=(4,)), rows("n")
        >>> graphs = CaptureManager(lambda x: x * 2, inputs={"x": spec}, outputs=spec, buckets=grid)
        >>> _ = graphs.precompile(example={"x": torch.zeros(3)}, progress=False)
        >>> with graphs.lease(x=torch.ones(2)) as result:
        ...     print(result.tolist())
        [2.0, 2.0]
    """

    def __init__(self, value: Any, desk: LeaseDesk | None, stream: torch.cuda.Stream | None) -> None:
        self._value = value
        self._desk = desk
        self._stream = stream

    @property
    def stale(self) -> bool:
        """Whether the memory has been given to a later call, or was given back."""
        return self._desk is not None and self._desk.holder is not self

    def get(self) -> Any:
        """The results, with the structure of the declared outputs. They are not to be kept.

        Raises:
            StaleLeaseError: a later lease has the memory now, or this one was released.
        """
        if self.stale:
            raise StaleLeaseError(
                "this lease is over: its memory was released, or went to a later call of lease(...); read results "
                "before the next lease, or call the manager itself, whose results are copies"
            )
        return self._value

    def release(self) -> None:
        """Gives the memory back: what the current stream still reads is waited for. Doing it twice is nothing."""
        if self._desk is not None:
            self._desk.give_back(self)

    def __enter__(self) -> Any:
        return self.get()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def reading_stream(self) -> torch.cuda.Stream | None:
        """The stream that the lease was made on, which its reader is supposed to read on."""
        return self._stream


class LeaseDesk:
    """Whose turn it is on one piece of static output memory.

    Args:
        device: where the memory is.
        memory: gives the memory, for a taker who wants it poisoned.
    """

    def __init__(self, device: torch.device, memory: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._device = device
        self._memory = memory
        self._read: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None
        self._marked = False
        # Leases are released by whoever reads them, while others take.
        self._lock = threading.Lock()
        self.holder: Lease | None = None

    def hand_out(self, value: Any, stream: torch.cuda.Stream | None) -> Lease:
        """A lease on results that a stream, the current one, is about to have."""
        with self._lock:
            self.holder = Lease(value, self, stream)
            return self.holder

    def give_back(self, lease: Lease) -> None:
        """Ends a lease, after what the current stream has been told to read."""
        with self._lock:
            if self.holder is lease:
                if self._read is not None:
                    current = torch.cuda.current_stream(self._device)
                    own = lease.reading_stream()
                    if own is not None and own != current:  # it may have been read on both
                        current.wait_stream(own)
                    self._read.record(current)
                    self._marked = True
                self.holder = None

    def take(self, current: torch.cuda.Stream | None, *, poison: bool = False) -> None:
        """Ends the lease that there is; the current stream then waits for its reader."""
        with self._lock:
            holder, self.holder = self.holder, None
            if self._read is not None and current is not None:
                stream = holder.reading_stream() if holder is not None else None
                if stream is not None and stream != current:
                    self._read.record(stream)
                    self._marked = True
                if self._marked:
                    self._read.wait(current)
                    self._marked = False
        if poison:
            for memory in self._memory():
                fill_with_nan(memory)

    def close(self) -> None:
        """Ends the lease that there is, for good, once what was told to read it has."""
        with self._lock:
            if self._read is not None and self._marked:
                self._read.synchronize()
            self.holder = None
