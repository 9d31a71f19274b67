"""A pool's bookkeeping: what is stored where, who holds it, what goes first, and what a reuse of pages waits for.

Promises: a stored item is never moved, and never evicted while it is held; nothing is evicted for a request that can't
be met; each page remembers the marks that end its last use until it is used again. Host data alone, without torch;
callers bring the lock.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from mmgraph.errors import PoolFullError
from mmgraph.pool_places import Places, places_of
from mmgraph.pool_runs import PageRuns, Run
from mmgraph.pool_streams import Mark, newest

Key = Hashable


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool holds and has done.

    Attributes:
        hits: Look-ups that found their item.
        misses: Look-ups that didn't.
        evictions: Items that made room for others.
        stores: Items that were filled and kept.
        stale: Items that were forgotten by ``drop`` and ``clear``.
        items: Items that can be found now.
        rows_used: Rows in pages that aren't free.
        rows_pinned: Those of them that a lease holds, so that they can't be evicted.
        rows_free: Rows in free pages.
        rows_padding: Used rows at the ends of items' last pages, which hold nothing.
        largest_run: Rows of the longest free run.
        runs_per_item: Mean over the items that can be found; 0 where there are none.
        waits: Times that a stream was made to wait for another.
    """

    hits: int
    misses: int
    evictions: int
    stores: int
    stale: int
    items: int
    rows_used: int
    rows_pinned: int
    rows_free: int
    rows_padding: int
    largest_run: int
    runs_per_item: float
    waits: int


@dataclass(eq=False, slots=True)
class Entry:
    """An item's pages: reserved until ``ready`` is there, then filled."""

    key: Key
    rows: int
    runs: tuple[Run, ...]
    places: Places
    holders: int = 1
    found: bool = False  # look-ups give it
    ready: Mark | None = None  # ends its filling
    readers: dict[Hashable, Mark] = field(default_factory=dict)  # by stream: the last release of a holder
    writers: set[Hashable] = field(default_factory=set)  # streams that may write before it is ready
    viewed: bool = False  # an encoder writes there itself
    columns: tuple[int, ...] = ()  # widths of the parts that were filled, side by side

    @property
    def pages(self) -> int:
        """How many pages it has."""
        return sum(run.pages for run in self.runs)


class PoolBook:
    """Items, reservations and free pages.

    Args:
        pages: Pages of the pool.
        page_rows: Rows of a page.
        made: Ends the making of the pool's memory, which the first use of each page waits for.
    """

    def __init__(self, pages: int, page_rows: int, made: Mark) -> None:
        self.page_rows = page_rows
        self.hits = self.misses = self.evictions = self.stores = self.stale = self.waits = 0
        self._runs = PageRuns(pages)
        self._items: OrderedDict[Key, Entry] = OrderedDict()  # what can be found, least recently used first
        self._idle: OrderedDict[Key, Entry] = OrderedDict()  # those that nobody holds, in the same order
        self._idle_pages = 0
        self._used_rows = 0  # rows that items need, without the ends of their last pages
        self._ends: list[tuple[Mark, ...]] = [(made,)] * pages  # what a reuse of each page waits for

    def __len__(self) -> int:
        return len(self._items)

    def keys(self) -> list[Key]:
        """Give the keys that can be found, least recently used first."""
        return list(self._items)

    def find(self, key: Key) -> Entry | None:
        """Look an item up; this is no use of it."""
        return self._items.get(key)

    def pin(self, entry: Entry) -> None:
        """Hold an item that can be found, and call it used."""
        if not entry.holders:
            del self._idle[entry.key]
            self._idle_pages -= entry.pages
        entry.holders += 1
        self._items.move_to_end(entry.key)

    def take(self, wanted: Mapping[Key, int]) -> list[Entry]:
        """Reserve pages for items, all or nothing, and evict what must make room.

        Raises:
            PoolFullError: They are more than what is free or idle; nothing is evicted then.
        """
        counts = [-(-rows // self.page_rows) for rows in wanted.values()]
        total = sum(counts)
        if total > self._runs.free_pages + self._idle_pages:
            raise self._full(wanted, total)
        while self._runs.free_pages < total:
            self._forget(next(iter(self._idle.values())))
            self.evictions += 1
        taken = self._runs.take(counts) or []
        self._used_rows += sum(wanted.values())
        return [
            Entry(key, rows, runs, places_of(runs, rows, self.page_rows))
            for (key, rows), runs in zip(wanted.items(), taken, strict=True)
        ]

    def ends(self, entries: Iterable[Entry]) -> list[Mark]:
        """Give what a first write to reserved pages has to wait for."""
        ends: set[tuple[Mark, ...]] = set()
        for entry in entries:
            for run in entry.runs:
                ends.update(self._ends[run.start : run.end])
        return newest(mark for marks in ends for mark in marks)

    def publish(self, entry: Entry, ready: Mark) -> Entry:
        """Let a reserved item that was filled be found.

        Where another was stored under its key meanwhile, that one stays and is held in its place; the pages that were
        filled in vain are freed.

        Returns:
            The item that is held now.
        """
        first = self._items.get(entry.key)
        if first is not None:
            self.pin(first)
            self.unpin(entry, dict.fromkeys(entry.writers, ready))
            return first
        entry.ready = ready
        entry.found = True
        self._items[entry.key] = entry
        self.stores += 1
        return entry

    def unpin(self, entry: Entry, marks: Mapping[Hashable, Mark]) -> None:
        """Hold an item no longer; what nobody holds becomes idle, or free if it can't be found.

        Args:
            entry: The item, or a reservation.
            marks: By stream, what ends the holder's use; for a reservation all its ``writers`` are among them.
        """
        if entry.ready is not None:
            entry.readers.update(marks)
        elif entry.writers:
            # Whoever wrote had waited for the marks before, so these are all that count now.
            self._set_ends(entry, tuple(newest(marks[stream] for stream in entry.writers)))
        entry.holders -= 1
        if entry.found:
            self._items.move_to_end(entry.key)
            if not entry.holders:
                self._idle[entry.key] = entry
                self._idle_pages += entry.pages
        elif not entry.holders:
            self._free(entry)

    def drop(self, key: Key) -> None:
        """Forget an item, if there is one: its pages are freed at once, or when its last holder lets go."""
        entry = self._items.get(key)
        if entry is not None:
            self._forget(entry)
            self.stale += 1

    def stats(self) -> PoolStats:
        """Count."""
        used = self._runs.pages - self._runs.free_pages
        runs = sum(len(entry.runs) for entry in self._items.values())
        return PoolStats(
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            stores=self.stores,
            stale=self.stale,
            items=len(self._items),
            rows_used=used * self.page_rows,
            rows_pinned=(used - self._idle_pages) * self.page_rows,
            rows_free=self._runs.free_pages * self.page_rows,
            rows_padding=used * self.page_rows - self._used_rows,
            largest_run=self._runs.largest * self.page_rows,
            runs_per_item=runs / len(self._items) if self._items else 0.0,
            waits=self.waits,
        )

    def _forget(self, entry: Entry) -> None:
        del self._items[entry.key]
        entry.found = False
        if not entry.holders:
            del self._idle[entry.key]
            self._idle_pages -= entry.pages
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        if entry.ready is not None:
            self._set_ends(entry, tuple(newest((entry.ready, *entry.readers.values()))))
        self._runs.free(entry.runs)
        self._used_rows -= entry.rows

    def _set_ends(self, entry: Entry, marks: tuple[Mark, ...]) -> None:
        for run in entry.runs:
            self._ends[run.start : run.end] = [marks] * run.pages

    def _full(self, wanted: Mapping[Key, int], total: int) -> PoolFullError:
        page = self.page_rows
        free, idle, pages = self._runs.free_pages, self._idle_pages, self._runs.pages
        if total > pages:
            remedy = "make the pool larger (rows, max_bytes)"
            remedy += ", or encode fewer items at once" if len(wanted) > 1 else ""
        else:
            remedy = (
                "release the leases that hold the rest, encode fewer items at once, or make the pool larger"
            )
        return PoolFullError(
            f"{sum(wanted.values())} rows for {len(wanted)} items are wanted, {total * page} in whole pages of {page}; "
            f"of the pool's {pages * page} rows {free * page} are free, {idle * page} can be evicted and "
            f"{(pages - free - idle) * page} are pinned; {remedy}"
        )
