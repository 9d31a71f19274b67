"""``RowCache``: an external cache of encoder rows in a pool's place; ``RowStore``: one in memory.

Promises of the store: it keeps within its bytes, evicts the least recently used of what isn't pinned, and hands out
rows that the current stream may read. All methods may be called from any thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

from mmgraph.errors import PoolArgumentError, PoolCaptureError, PoolCopyError, PoolStateError
from mmgraph.pool_checks import checked_key, named, other_rows_error
from mmgraph.pool_streams import Clock, Mark, clock_for

Key = Hashable


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """An item's rows, as an encoder gave them.

    Attributes:
        main: Floating point ``[rows, width]``.
        deepstack: Floating point ``[rows, levels * width]`` on the same device, where the item has such rows.
    """

    main: torch.Tensor
    deepstack: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are there."""
        return (self.main,) if self.deepstack is None else (self.main, self.deepstack)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(tensor.nbytes for tensor in self.tensors)


@runtime_checkable
class RowCache(Protocol):
    """What a cache of rows outside of a pool must do, from any thread.

    An item is pinned and fetched when a batch is planned, put once it was encoded, and unpinned after the batch's rows
    were assembled. What a cache hands out is read on the stream that is current then, and never written to.
    """

    def get(self, key: Key) -> Rows | None:
        """Give the rows stored under a key, for the current stream to read; None where there are none."""

    def put(self, key: Key, rows: Rows) -> None:
        """Store rows that are ready on the current stream; a cache may decline to keep them."""

    def pin(self, key: Key) -> bool:
        """Keep what is stored under a key until as many calls of ``unpin``; False where nothing is stored."""

    def unpin(self, key: Key) -> None:
        """Take back one pin."""


@dataclass(frozen=True, slots=True)
class RowStoreStats:
    """What a store holds and has done.

    Attributes:
        hits: Calls of ``get`` that found rows.
        misses: Calls of ``get`` and ``pin`` that didn't.
        evictions: Items that made room for others.
        stores: Items that were kept.
        declined: Items that weren't kept, since there was no room that could be made.
        items: Items that are stored now.
        nbytes: Bytes of their rows.
        pinned_bytes: Bytes of those that are pinned.
    """

    hits: int
    misses: int
    evictions: int
    stores: int
    declined: int
    items: int
    nbytes: int
    pinned_bytes: int


@dataclass(eq=False, slots=True)
class _Stored:
    rows: Rows
    clock: Clock
    ready: Mark
    pins: int = 0


class RowStore:
    """A ``RowCache`` in this process's memory, on whatever device the rows are.

    Args:
        max_bytes: A bound on the bytes of all rows together.

    Raises:
        PoolArgumentError: It isn't a positive integer.
    """

    def __init__(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise PoolArgumentError(f"max_bytes must be an integer of at least 1, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._items: OrderedDict[Key, _Stored] = OrderedDict()  # least recently used first
        self._bytes = self._pinned_bytes = 0
        self._hits = self._misses = self._evictions = self._stores = self._declined = 0
        self._clocks: dict[torch.device, Clock] = {}

    def get(self, key: Key) -> Rows | None:
        """Give an item's rows and call it used.

        On CUDA the current stream of the rows' device waits for the stream that was current when they were put, and the
        memory isn't given to others before what the current stream has been given by the time they are let go.

        Args:
            key: The item's.

        Returns:
            The rows, shared with other callers and not to be written to; None where nothing is stored.

        Raises:
            PoolArgumentError: The key can't be hashed.
            PoolCaptureError: A CUDA graph is being captured from the current stream, which would have to wait.
        """
        checked_key(key)
        with self._lock:
            stored = self._items.get(key)
            if stored is None:
                self._misses += 1
                return None
            _refuse_capture("get", stored.clock)
            self._hits += 1
            self._items.move_to_end(key)
        stream: Any = stored.clock.stream()
        if stream != stored.ready.stream:
            stored.clock.wait(stored.ready)
        for tensor in stored.rows.tensors:
            if tensor.is_cuda:  # else eviction could hand its memory out while this stream reads it
                tensor.record_stream(stream)
        return stored.rows

    def put(self, key: Key, rows: Rows) -> None:
        """Store rows; where the key is stored already, that stays and is called used.

        Rows that can't get room by evicting what isn't pinned are not kept: ``stats().declined`` counts them, and
        nothing is evicted for them. A tensor that shares a larger memory is copied, since it would keep all of that.

        Args:
            key: The item's.
            rows: Its rows, ready on the current stream, not to be written to from now on.

        Raises:
            PoolArgumentError: They aren't rows, or need a gradient; or the key is stored with another number of rows.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        checked_key(key)
        _check(rows)
        with self._lock:
            clock = self._clock(rows.main.device)
            _refuse_capture("put", clock)
            first = self._items.get(key)
            if first is not None:
                if len(first.rows.main) != len(rows.main):
                    raise other_rows_error("put", key, len(first.rows.main), len(rows.main))
                self._items.move_to_end(key)
                return
            if self._pinned_bytes + rows.nbytes > self.max_bytes:
                self._declined += 1
                return
            owned = Rows(*(_owned(tensor) for tensor in rows.tensors))
            ready = clock.record(clock.stream())
            self._make_room(rows.nbytes)
            self._items[key] = _Stored(owned, clock, ready)
            self._bytes += rows.nbytes
            self._stores += 1

    def pin(self, key: Key) -> bool:
        """Keep an item until as many calls of ``unpin``.

        Args:
            key: The item's.

        Returns:
            Whether it is stored.

        Raises:
            PoolArgumentError: The key can't be hashed.
        """
        checked_key(key)
        with self._lock:
            stored = self._items.get(key)
            if stored is None:
                self._misses += 1
                return False
            if not stored.pins:
                self._pinned_bytes += stored.rows.nbytes
            stored.pins += 1
            self._items.move_to_end(key)
            return True

    def unpin(self, key: Key) -> None:
        """Take back one pin and call the item used.

        Args:
            key: The item's.

        Raises:
            PoolArgumentError: The key can't be hashed.
            PoolStateError: It isn't pinned.
        """
        checked_key(key)
        with self._lock:
            stored = self._items.get(key)
            if stored is None or not stored.pins:
                raise PoolStateError(
                    f"unpin: {named(key)} isn't pinned; call unpin once for each pin that was True"
                )
            stored.pins -= 1
            if not stored.pins:
                self._pinned_bytes -= stored.rows.nbytes
            self._items.move_to_end(key)

    def stats(self) -> RowStoreStats:
        """Count what the store holds and has done."""
        with self._lock:
            return RowStoreStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                stores=self._stores,
                declined=self._declined,
                items=len(self._items),
                nbytes=self._bytes,
                pinned_bytes=self._pinned_bytes,
            )

    def __contains__(self, key: object) -> bool:
        checked_key(key)
        with self._lock:
            return key in self._items

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def keys(self) -> list[Key]:
        """Give the keys that are stored, least recently used first."""
        with self._lock:
            return list(self._items)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PoolCopyError("a RowStore can't be copied or pickled; make one in each process")

    def _clock(self, device: torch.device) -> Clock:
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._clocks[device] = clock_for(device)
        return clock

    def _make_room(self, nbytes: int) -> None:
        while self._bytes + nbytes > self.max_bytes:
            key = next(key for key, stored in self._items.items() if not stored.pins)
            self._bytes -= self._items.pop(key).rows.nbytes
            self._evictions += 1


def _check(rows: Any) -> None:
    if not isinstance(rows, Rows):
        raise PoolArgumentError(f"put: rows must be a Rows record, got {type(rows).__name__}")
    for tensor in rows.tensors:
        fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.layout == torch.strided
        if (
            not fits
            or not tensor.is_floating_point()
            or not len(tensor)
            or tensor.device.type not in ("cpu", "cuda")
        ):
            came = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                came = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise PoolArgumentError(
                "put: rows must be dense floating-point tensors [rows, width] of at least one row, on a CPU or a CUDA "
                f"device; got {came}"
            )
        if tensor.requires_grad:
            raise PoolArgumentError(
                "put: stored rows have no gradient, and a tensor needs one; encode under torch.no_grad() or "
                "torch.inference_mode(), or detach it"
            )
    if len({(len(tensor), tensor.device) for tensor in rows.tensors}) != 1:
        both = [f"{list(tensor.shape)} on {tensor.device}" for tensor in rows.tensors]
        raise PoolArgumentError(f"put: main and deepstack must have as many rows and one device, got {both}")


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _refuse_capture(call: str, clock: Clock) -> None:
    if clock.capturing():
        raise PoolCaptureError(
            f"{call} can't run inside a CUDA-graph capture: a replay wouldn't wait; do it before"
        )
