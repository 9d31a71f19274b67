"""``PoolLease``: one batch's hold on a pool, from the plan to the launch of what reads the rows.

Promises: an item can be found only once its filling was launched and marked; the stream that is current when places are
handed out may read the rows there; a lease that is lost releases what it held. After an error the lease and the pool
are as before, but for rows of this lease's own reservations.
"""

import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mmgraph.errors import PoolArgumentError, PoolCopyError, PoolStateError
from mmgraph.pool_book import Entry, Key
from mmgraph.pool_checks import (
    capture_error,
    check_parts,
    check_rows_wanted,
    checked_key,
    named,
    other_rows_error,
)
from mmgraph.pool_places import Places, joined
from mmgraph.pool_streams import Mark

if TYPE_CHECKING:
    from mmgraph.pool import EncoderPool


@dataclass(eq=False, slots=True)
class Hold:
    """What a lease holds, apart from the lease, so that it outlives one that is lost."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    readers: set[Hashable] = field(default_factory=set)  # streams that were given places
    quiet: bool = False  # may be lost without a warning

    def streams(self) -> set[Hashable]:
        """Give the streams that may use the pages."""
        unfilled = (entry.writers for entry in self.entries.values() if entry.ready is None)
        return self.readers.union(*unfilled)


class PoolLease:
    """One batch's hold on a pool; made by ``EncoderPool.lease``, released by ``release`` or at the end of ``with``.

    First ``pin`` what is stored, ``reserve`` room for the rest, encode, ``fill`` (or write to a ``view`` and
    ``commit``), then read at ``places``. Not to be used by two threads at once; different leases are.
    """

    def __init__(self, pool: "EncoderPool", *, quiet: bool = False) -> None:
        self._pool = pool
        self._hold = Hold(quiet=quiet)
        self._followed: set[tuple[Mark, Hashable]] = set()
        self._finalizer = weakref.finalize(self, _abandon, pool, self._hold)
        self._finalizer.atexit = False

    def __enter__(self) -> "PoolLease":
        self._open("with")
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PoolCopyError("a PoolLease can't be copied or pickled: what it holds is released once")

    def pin(self, key: Key, rows: int, *, count: bool = True) -> bool:
        """Look an item up, and hold it until the release if it is stored.

        On CUDA the pool's current stream then waits for the item's filling, if another stream does that.

        Args:
            key: The item's.
            rows: How many rows it must have.
            count: Whether this is a look-up for the statistics.

        Returns:
            Whether it is stored and held now.

        Raises:
            PoolArgumentError: It is stored with another number of rows; or an argument is of the wrong kind.
            PoolStateError: The lease is released, or has reserved this key and not filled it.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("pin")
        check_rows_wanted(key, rows)
        entry = self._hold.entries.get(checked_key(key))
        if entry is not None and entry.ready is None:
            raise PoolStateError(
                f"pin: this lease has reserved {named(key)} and not filled it; call fill first"
            )
        with self._pool._opened() as book:
            known = entry is not None
            entry = entry or book.find(key)
            if entry is None:
                book.misses += count
                return False
            if entry.rows != rows:
                raise other_rows_error("pin", key, entry.rows, rows)
            book.hits += count
            if not known:
                book.pin(entry)
                self._hold.entries[key] = entry
        self._follow([entry])
        return True

    def reserve(self, wanted: Mapping[Key, int]) -> None:
        """Take room for items that are to be filled, for all or none; evict what no lease holds, as needed.

        Args:
            wanted: Rows by key, at least one each.

        Raises:
            PoolFullError: They are more than what is free or can be evicted; nothing was evicted.
            PoolArgumentError: A key or a number of rows is of the wrong kind.
            PoolStateError: The lease is released, or holds one of the keys already.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("reserve")
        if not isinstance(wanted, Mapping):
            raise PoolArgumentError(f"reserve: wanted must map keys to rows, got {type(wanted).__name__}")
        wanted = dict(wanted)
        for key, rows in wanted.items():
            check_rows_wanted(key, rows)
            if key in self._hold.entries:
                raise PoolStateError(
                    f"reserve: this lease holds {named(key)} already; reserve only what pin misses"
                )
        with self._pool._opened() as book:
            for entry in book.take(wanted):
                self._hold.entries[entry.key] = entry

    def fill(self, keys: Sequence[Key], *parts: torch.Tensor) -> None:
        """Copy rows to the pages that were reserved for them; then the items can be found by others.

        One launch for each part. Where another lease has stored a key meanwhile, its item is held instead and the pages
        reserved here are freed, so ask for ``places`` afterwards.

        Args:
            keys: Keys that this lease has reserved.
            parts: Floating point ``[sum of the keys' rows, w]`` each, on the pool's device, the keys' rows one after
                another; they lie side by side by columns, are cast to the pool's dtype, and leave columns past them
                as they are.

        Raises:
            PoolArgumentError: Parts don't fit the keys or the pool, or need a gradient; or another lease has stored a
                key with another number of rows.
            PoolStateError: The lease is released, or hasn't reserved a key, or has filled it.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("fill")
        entries = self._reserved("fill", keys)
        check_parts(parts, sum(entry.rows for entry in entries), len(entries), self._pool)
        self._claim("fill", entries)
        self._pool._write(joined(entry.places for entry in entries), parts)
        self._publish("fill", entries, tuple(part.shape[1] for part in parts))

    def view(self, keys: Sequence[Key]) -> torch.Tensor | None:
        """Give the rows reserved for keys as one view of the pool, for an encoder that writes there itself.

        The stream that is current now may write there, until ``commit``.

        Args:
            keys: Keys that this lease has reserved, in the order of the rows.

        Returns:
            ``[sum of the keys' rows, width]``; None where the rows don't lie one after another without gaps, as behind
            an item that leaves its last page partly empty. Use ``fill`` then.

        Raises:
            PoolStateError: The lease is released, or hasn't reserved a key, or has filled it.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("view")
        entries = self._reserved("view", keys)
        places = joined(entry.places for entry in entries)
        if len(places.starts) > 1:
            return None
        self._claim("view", entries)
        for entry in entries:
            entry.viewed = True
        # Torch then refuses writes that record a gradient, which would make the whole pool part of a graph.
        with torch.no_grad():
            return self._pool.tensor.narrow(0, int(places.starts[0]), places.rows)

    def commit(self, keys: Sequence[Key], *columns: int) -> None:
        """Say that rows written to a ``view`` are complete, on the current stream; then others can find the items.

        Args:
            keys: Keys whose ``view`` was given.
            columns: Widths of the parts that were written, side by side; none: all columns are one part.

        Raises:
            PoolArgumentError: Another lease has stored a key with another number of rows.
            PoolStateError: The lease is released, or hasn't reserved a key, or has filled it, or gave no view.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("commit")
        entries = self._reserved("commit", keys)
        for entry in entries:
            if not entry.viewed:
                raise PoolStateError(
                    f"commit: {named(entry.key)} has no view to write to; call view first, or fill"
                )
        self._publish("commit", entries, columns or (self._pool.width,))

    def columns(self, key: Key) -> tuple[int, ...]:
        """Give the widths of the parts that an item was filled with, side by side.

        Args:
            key: A key that was pinned, or reserved and filled.

        Raises:
            PoolStateError: The lease doesn't hold the key.
        """
        entry = self._hold.entries.get(checked_key(key))
        if entry is None:
            raise PoolStateError(f"columns: this lease doesn't hold {named(key)}; pin it first")
        return entry.columns

    def give_up(self, keys: Iterable[Key]) -> None:
        """Let go of some keys, as `release` does of all; reservations that weren't filled are freed.

        Args:
            keys: Keys; those that the lease doesn't hold are passed over.

        Raises:
            PoolStateError: The lease is released.
            PoolCaptureError: A CUDA graph is being captured from one of the streams.
        """
        self._open("give_up")
        there = {key: self._hold.entries[key] for key in keys if key in self._hold.entries}
        if not there:
            return
        part = Hold(there, set(self._hold.readers))
        streams = {self._pool._clock.stream(), *part.streams()}
        if any(self._pool._clock.capturing(stream) for stream in streams):
            raise capture_error("give_up")
        with self._pool._opened():
            for key in there:
                del self._hold.entries[key]
            self._pool._let_go(part, streams)

    def places(self, key: Key) -> Places:
        """Say where an item's rows lie, for the current stream to read.

        On CUDA that stream waits for the item's filling, if another stream does that.

        Args:
            key: A key that was pinned, or reserved and filled.

        Returns:
            The runs of rows, in the item's order; right until the release.

        Raises:
            PoolStateError: The lease is released, or doesn't hold the key, or hasn't filled it.
            PoolCaptureError: A CUDA graph is being captured from the current stream.
        """
        self._open("places")
        entry = self._hold.entries.get(checked_key(key))
        if entry is None or entry.ready is None:
            what = "doesn't hold" if entry is None else "hasn't filled"
            raise PoolStateError(
                f"places: this lease {what} {named(key)}; pin it, or reserve and fill it, first"
            )
        self._hold.readers.add(self._pool._clock.stream())
        self._follow([entry])
        return entry.places

    def release(self) -> None:
        """Let go of everything; reservations that weren't filled are freed. A second call does nothing.

        On CUDA an event is recorded on the current stream of the pool's device, and on other streams that were current
        when places were handed out; rows are reused only after it. So launch what reads the rows before, on those
        streams or on one that they wait for.

        Raises:
            PoolCaptureError: A CUDA graph is being captured from one of the streams; release after it.
        """
        if not self._finalizer.alive:
            return
        if self._hold.entries:
            clock = self._pool._clock
            streams = {clock.stream(), *self._hold.streams()}
            if any(clock.capturing(stream) for stream in streams):
                raise capture_error("release")
            with self._pool._opened():
                self._pool._let_go(self._hold, streams)
        self._finalizer.detach()

    def _open(self, call: str) -> None:
        if not self._finalizer.alive:
            raise PoolStateError(f"{call}: this lease is released; ask the pool for another")
        if self._pool._clock.capturing():
            raise capture_error(call)

    def _reserved(self, call: str, keys: Sequence[Key]) -> list[Entry]:
        if isinstance(keys, str | bytes) or not isinstance(keys, Sequence) or not keys:
            raise PoolArgumentError(f"{call}: keys must be a list of at least one key, got {keys!r}")
        entries: dict[Key, Entry] = {}
        for key in keys:
            entry = self._hold.entries.get(checked_key(key))
            if entry is None or entry.ready is not None:
                what = "hasn't reserved" if entry is None else "has no need to fill"
                raise PoolStateError(f"{call}: this lease {what} {named(key)}; name keys that it has reserved")
            entries[key] = entry
        if len(entries) < len(keys):
            raise PoolArgumentError(f"{call}: keys must differ, got {len(keys)} with {len(entries)} different")
        return list(entries.values())

    def _claim(self, call: str, entries: Sequence[Entry]) -> None:
        """Let the current stream write to reserved pages, behind the work that used them last."""
        with self._pool._opened() as book:
            for entry in entries:
                first = book.find(entry.key)
                if first is not None and first.rows != entry.rows:
                    raise other_rows_error(call, entry.key, first.rows, entry.rows)
            marks = book.ends(entries)
            stream = self._pool._clock.stream()
        self._pool._wait(marks)
        self._join_writers(call, entries, stream)
        for entry in entries:
            entry.writers.add(stream)

    def _join_writers(self, call: str, entries: Sequence[Entry], stream: Hashable) -> None:
        """Let the current stream wait for other streams that were to write to reserved pages."""
        clock = self._pool._clock
        others = set[Hashable]().union(*(entry.writers for entry in entries)) - {stream}
        if any(clock.capturing(other) for other in others):
            raise capture_error(call)
        if others:
            with self._pool._opened():
                marks = [clock.record(other) for other in others]
            self._pool._wait(marks)

    def _publish(self, call: str, entries: Sequence[Entry], columns: tuple[int, ...]) -> None:
        """Mark the end of the filling, on the current stream, and let others find the items."""
        clock = self._pool._clock
        stream = clock.stream()
        self._join_writers(call, entries, stream)
        # The mark is recorded under the lock, as all are, so that marks of one stream are numbered as they follow.
        with self._pool._opened() as book:
            for entry in entries:
                first = book.find(entry.key)
                if first is not None and first.rows != entry.rows:
                    raise other_rows_error(call, entry.key, first.rows, entry.rows)
            ready = clock.record(stream)
            for entry in entries:
                entry.columns = columns
                self._hold.entries[entry.key] = book.publish(entry, ready)

    def _follow(self, entries: Iterable[Entry]) -> None:
        """Let the current stream wait for the filling of items, once for each filling."""
        stream = self._pool._clock.stream()
        marks = [entry.ready for entry in entries if entry.ready is not None and entry.ready.stream != stream]
        marks = [mark for mark in marks if (mark, stream) not in self._followed]
        if marks:
            self._pool._wait(marks)
            self._followed.update((mark, stream) for mark in marks)


def _abandon(pool: "EncoderPool", hold: Hold) -> None:
    """Hand a lost lease's hold to the pool, which sees to it at its next call; this may run anywhere."""
    if hold.entries:
        held = len(hold.entries)
        pool._orphans.append(hold)
        if hold.quiet:
            return
        warnings.warn(
            f"a PoolLease that held {held} items was lost without release(); use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )
