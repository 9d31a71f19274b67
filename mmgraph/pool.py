"""``EncoderPool``: one static tensor that keeps encoder rows across requests and chunks.

Promises: the tensor is made once and never moves, so that a captured graph can read it; it stays within its bound; an
item's rows stay where they are while a lease holds them; rows are reused only behind the work that wrote and read them,
by waits between streams, never of the host. All methods may be called from any thread.
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import torch

import mmgraph.ops
from mmgraph.errors import PoolArgumentError, PoolCaptureError, PoolCopyError
from mmgraph.pool_book import Key, PoolBook, PoolStats
from mmgraph.pool_checks import check_bounds, checked_key
from mmgraph.pool_lease import Hold, PoolLease
from mmgraph.pool_places import Places
from mmgraph.pool_streams import Mark, clock_for, newest
from mmgraph.staging import settled, upload

__all__ = ["EncoderPool", "Places", "PoolLease", "PoolStats"]


class EncoderPool:
    """A static ``[rows, width]`` tensor, its allocator, and the items that lie in it.

    Items are named by hashable keys. They are handed out by leases, which hold them; what no lease holds is evicted,
    least recently used first, when its room is wanted.

    Args:
        rows: Rows of the tensor, rounded down to whole pages.
        width: Its columns: the main rows' width, and that of deepstack rows beside them.
        dtype: A floating-point dtype; rows are cast to it when they are stored.
        device: A CPU or a CUDA device.
        page_rows: Rows of a page, the unit of allocation. Smaller pages waste fewer rows at items' ends; larger ones
            make for less bookkeeping.
        max_bytes: A bound on the tensor's bytes; where it allows fewer rows than ``rows``, it decides.

    Attributes:
        page_rows: Rows of a page.

    Raises:
        PoolArgumentError: An argument is of the wrong kind, or the bounds leave no page.
        PoolCaptureError: A CUDA graph is being captured, whose memory the tensor would be taken from.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        page_rows: int = 16,
        max_bytes: int | None = None,
    ) -> None:
        pages = check_bounds(rows, width, dtype, page_rows, max_bytes) // page_rows
        place = torch.device(device)
        if place.type not in ("cpu", "cuda"):
            raise PoolArgumentError(f"device must be a CPU or a CUDA device, got {place}")
        place = settled(place)
        self._clock = clock_for(place)
        if self._clock.capturing():
            raise PoolCaptureError("an EncoderPool can't be made inside a capture; make it before")
        with torch.inference_mode(False):
            self._tensor = torch.zeros(pages * page_rows, width, dtype=dtype, device=place)
        self.page_rows = page_rows
        self._lock = threading.Lock()
        self._book = PoolBook(pages, page_rows, self._clock.record(self._clock.stream()))
        # What finalizers leave: they run wherever Python collects garbage, also while this thread has the lock.
        self._dropped: deque[Key] = deque()
        self._orphans: deque[Hold] = deque()

    @property
    def tensor(self) -> torch.Tensor:
        """The rows, ``[rows, width]``: zeros at first, without gradients, at an address that never changes."""
        return self._tensor

    @property
    def rows(self) -> int:
        """Rows of the tensor."""
        return self.tensor.shape[0]

    @property
    def width(self) -> int:
        """Columns of the tensor."""
        return self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.tensor.device

    def lease(self) -> PoolLease:
        """Begin a batch's hold on the pool, to be released (``with``) once what reads the rows is launched."""
        return PoolLease(self)

    def stats(self) -> PoolStats:
        """Count what the pool holds and has done."""
        with self._opened() as book:
            return book.stats()

    def __contains__(self, key: object) -> bool:
        with self._opened() as book:
            return book.find(checked_key(key)) is not None

    def __len__(self) -> int:
        with self._opened() as book:
            return len(book)

    def keys(self) -> list[Key]:
        """Give the keys of the items that can be found, least recently used first."""
        with self._opened() as book:
            return book.keys()

    def drop(self, key: Key) -> None:
        """Forget an item, so that look-ups miss it from now on; a key that isn't stored is passed over.

        Its pages are freed at once, or when the last lease that holds it is released. May be called from a finalizer.

        Args:
            key: The item's.

        Raises:
            PoolArgumentError: The key can't be hashed.
        """
        self._dropped.append(checked_key(key))
        # Whoever has the lock now is either another thread, or this one, which is collecting garbage. Everyone looks
        # at what was dropped before anything else.
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Forget all items, each as by ``drop``."""
        with self._opened() as book:
            for key in book.keys():  # noqa: SIM118 - a book is no mapping
                book.drop(key)

    def __repr__(self) -> str:
        return f"EncoderPool({self.rows}, {self.width}, dtype={self.dtype}, device={str(self.device)!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PoolCopyError(
            "an EncoderPool can't be copied or pickled: its tensor stands for one address; make one in each process"
        )

    def _opened(self) -> "_Opened":
        return _Opened(self)

    def _settle(self) -> None:
        """Do what finalizers left to do; the lock is taken already."""
        while self._dropped:
            self._book.drop(self._dropped.popleft())
        for _ in range(len(self._orphans)):
            hold = self._orphans.popleft()
            try:
                if not any(self._clock.capturing(stream) for stream in (None, *hold.streams())):
                    self._let_go(hold, hold.streams())
            finally:
                if hold.entries:  # until a capture is over
                    self._orphans.append(hold)

    def _let_go(self, hold: Hold, streams: Iterable[Any]) -> None:
        """Mark the end of a hold's use of the pool, and release what it held; the lock is taken already."""
        marks = {stream: self._clock.record(stream) for stream in streams}
        for entry in hold.entries.values():
            self._book.unpin(entry, marks)
        hold.entries.clear()

    def _wait(self, marks: Iterable[Mark]) -> None:
        """Let the current stream wait for marks of other streams."""
        stream = self._clock.stream()
        others = [mark for mark in newest(marks) if mark.stream != stream]
        for mark in others:
            self._clock.wait(mark)
        if others:
            with self._lock:
                self._book.waits += len(others)

    def _write(self, places: Places, parts: tuple[torch.Tensor, ...]) -> None:
        """Launch the copies of rows to their places."""
        target, index = self.tensor, None
        if len(places.starts) == 1:
            target = target.narrow(0, int(places.starts[0]), places.rows)
        else:
            index = upload(places.index().astype(np.int32), self.device)
        column = 0
        for part in parts:
            out = target.narrow(1, column, part.shape[1])
            column += part.shape[1]
            if index is None:
                out.copy_(part)
            else:
                mmgraph.ops.store_rows(part, index, out=out)


class _Opened:
    """The book under the lock, with what finalizers left done first."""

    __slots__ = ("_pool",)

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool

    def __enter__(self) -> PoolBook:
        pool = self._pool
        pool._lock.acquire()
        try:
            if pool._dropped or pool._orphans:
                pool._settle()
        except BaseException:
            pool._lock.release()
            raise
        return pool._book

    def __exit__(self, *_: object) -> None:
        self._pool._lock.release()
