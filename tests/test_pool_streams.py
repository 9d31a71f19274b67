"""Invariant: whatever order streams run in, a read finds the rows it was promised, and no write meets a reader.

The streams are pretended: work is queued, and run in any order that the streams and the pool's waits allow. So that the
search is known to be strong enough, each wait is taken away in turn, and a wrong read must be found.
"""

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_device import PretendedDevice

import mmgraph.pool_book
from mmgraph.errors import PoolCaptureError, PoolFullError
from mmgraph.pool import EncoderPool, PoolLease
from mmgraph.pool_book import Entry, PoolBook
from mmgraph.pool_lease import Hold
from mmgraph.pool_places import Places

STREAMS = ("a", "b", "c")
POISON = float("nan")


class WrongReadError(Exception):
    pass


def lagging_pool(rows: int, device: PretendedDevice) -> EncoderPool:
    """Make a pool on a pretended device, whose first work sets the rows to zero, one by one."""
    pool = EncoderPool(rows, 2, dtype=torch.float32, page_rows=1)
    for row in range(rows):
        device.launch(pool.tensor[row].zero_)
    pool._clock = device
    pool._book = PoolBook(rows, 1, device.record(device.stream()))
    return pool


class World:
    """A pool on a pretended device; every filling has a value of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.device = PretendedDevice(self.rng)
        self.keys = range(self.rng.randint(1, 5))
        self.lag = self.rng.choice([0, 1, 4, 16])
        self.pool = lagging_pool(self.rng.randint(3, 6), self.device)
        self.pool._write = self._write_later
        self.leases: list[PoolLease] = []
        self.values: dict[Entry, float] = {}
        self.fillings = 0

    def run(self, steps: int) -> None:
        actions = [self.open, self.use, self.use, self.read, self.read, self.close, self.forget, self.lose]
        for _ in range(steps):
            self.device.current = self.rng.choice(STREAMS)
            self.rng.choice(actions)()
            for _ in range(self.rng.randint(0, self.lag)):
                self.device.step()
        while self.leases:
            self.close()
        self.device.drain()

    def open(self) -> None:
        if len(self.leases) < 3:
            self.leases.append(self.pool.lease())

    def use(self) -> None:
        """Pin keys, and reserve and fill those that miss."""
        if not self.leases:
            return
        lease = self.rng.choice(self.leases)
        held = lease._hold.entries
        keys = [key for key in self.rng.choices(self.keys, k=2) if key not in held]
        missing = {key: 1 + key % 3 for key in dict.fromkeys(keys) if not lease.pin(key, 1 + key % 3)}
        try:
            lease.reserve(missing)
        except PoolFullError:
            return
        self.fill(lease, list(missing))

    def fill(self, lease: PoolLease, keys: list[int]) -> None:
        how = self.rng.choice(["fill", "view", "view and move", "fail"])
        if not keys:
            return
        parts = []
        for key in keys:
            entry = lease._hold.entries[key]
            self.fillings += 1
            self.values[entry] = float(self.fillings)
            parts.append(torch.full((entry.rows, 2), self.values[entry]))
        rows = torch.cat(parts)
        view = None if how == "fill" else lease.view(keys)
        if view is None:
            lease.fill(keys, rows)
            return
        self._write_later(view, (rows,))
        if how == "fail":
            for key in keys:
                del self.values[lease._hold.entries[key]]
            self.leases.remove(lease)
            lease.release()
            return
        if how == "view and move":
            self.device.current = self.rng.choice(STREAMS)
        lease.commit(keys)

    def read(self) -> None:
        if self.leases:
            lease = self.rng.choice(self.leases)
            for key, entry in lease._hold.entries.items():
                places, expected = lease.places(key), self.values[entry]
                self.device.launch(lambda places=places, expected=expected: self._check(places, expected))

    def close(self) -> None:
        if self.leases:
            self.leases.pop(self.rng.randrange(len(self.leases))).release()

    def lose(self) -> None:
        if self.leases:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                self.leases.pop(self.rng.randrange(len(self.leases)))

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.pool.clear()
        self.pool.drop(self.rng.choice(self.keys))

    def _write_later(self, places: Places | torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        """Queue a write that takes its time: poison first, the rows one by one."""
        (rows,) = parts
        if isinstance(places, Places):
            target, index = self.pool.tensor, torch.from_numpy(places.index())
        else:
            target, index = places, torch.arange(len(rows))

        def write(source: torch.Tensor, row: int) -> None:
            target[index[row]] = source[row]

        for source in (torch.full_like(rows, POISON), rows):
            for row in range(len(rows)):
                self.device.launch(lambda source=source, row=row: write(source, row))

    def _check(self, places: Places, expected: float) -> None:
        got = self.pool.tensor[torch.from_numpy(places.index())]
        if not bool((got == expected).all()):
            raise WrongReadError(f"{got.tolist()} in place of {expected}")


@settings(max_examples=1000)
@given(st.integers(0, 2**32 - 1))
def test_reads_are_right_in_any_order(seed: int) -> None:
    world = World(seed)
    world.run(40)
    world.pool.clear()
    stats = world.pool.stats()
    assert (stats.rows_free, stats.rows_used, stats.rows_padding) == (world.pool.rows, 0, 0)
    assert stats.waits == world.device.waits


def search(seeds: int) -> None:
    for seed in range(seeds):
        World(seed).run(40)


def without_readers(patch: pytest.MonkeyPatch) -> None:
    unpin = PoolBook.unpin
    patch.setattr(
        PoolBook, "unpin", lambda book, entry, marks: unpin(book, entry, {} if entry.ready else marks)
    )


def without_one_of_two_readers(patch: pytest.MonkeyPatch) -> None:
    unpin = PoolBook.unpin

    def last_only(book: PoolBook, entry: Entry, marks: dict[object, object]) -> None:
        entry.readers.clear()
        unpin(book, entry, marks)

    patch.setattr(PoolBook, "unpin", last_only)


def without_the_end_of_the_filling(patch: pytest.MonkeyPatch) -> None:
    free = PoolBook._free

    def readers_only(book: PoolBook, entry: Entry) -> None:
        if entry.ready is not None and entry.readers:
            entry.ready = next(iter(entry.readers.values()))
        free(book, entry)

    patch.setattr(PoolBook, "_free", readers_only)


def without_waits_for_the_filling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolLease, "_follow", lambda lease, entries: None)


def without_waits_before_filling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolBook, "ends", lambda book, entries: [])


def without_what_a_failed_encoder_wrote(patch: pytest.MonkeyPatch) -> None:
    unpin = PoolBook.unpin

    def forgetful(book: PoolBook, entry: Entry, marks: dict[object, object]) -> None:
        if entry.ready is None:
            entry.writers.clear()
        unpin(book, entry, marks)

    patch.setattr(PoolBook, "unpin", forgetful)


def without_the_stream_of_the_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolLease, "_join_writers", lambda lease, call, entries, stream: None)


def without_other_streams_of_a_reader(patch: pytest.MonkeyPatch) -> None:
    streams = Hold.streams

    def writers_only(hold: Hold) -> set[object]:
        return streams(Hold(hold.entries))

    patch.setattr(Hold, "streams", writers_only)


def with_the_oldest_mark(patch: pytest.MonkeyPatch) -> None:
    def oldest(marks: object) -> list[object]:
        last: dict[object, object] = {}
        for mark in sorted(marks, key=lambda mark: mark.number):
            last.setdefault(mark.stream, mark)
        return list(last.values())

    patch.setattr(mmgraph.pool_book, "newest", oldest)


def without_the_making_of_the_pool(patch: pytest.MonkeyPatch) -> None:
    make = PoolBook.__init__

    def early(book: PoolBook, pages: int, page_rows: int, made: object) -> None:
        make(book, pages, page_rows, made)
        book._ends = [()] * pages

    patch.setattr(PoolBook, "__init__", early)


MUTATIONS = [
    without_the_making_of_the_pool,
    without_readers,
    without_one_of_two_readers,
    without_the_end_of_the_filling,
    without_waits_for_the_filling,
    without_waits_before_filling,
    without_what_a_failed_encoder_wrote,
    without_the_stream_of_the_view,
    without_other_streams_of_a_reader,
    with_the_oldest_mark,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_search_finds_a_missing_wait(mutation: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(WrongReadError):
            search(2000)


def pretended(rows: int = 6) -> tuple[EncoderPool, PretendedDevice]:
    device = PretendedDevice(random.Random(0))
    return lagging_pool(rows, device), device


def store(pool: EncoderPool, *keys: str) -> None:
    with pool.lease() as lease:
        lease.reserve(dict.fromkeys(keys, 1))
        lease.fill(keys, torch.zeros(len(keys), 2))


def test_one_stream_never_waits() -> None:
    pool, device = pretended(2)
    for key in "abcabcddeeff":
        with pool.lease() as lease:
            if not lease.pin(key, 1):
                lease.reserve({key: 1})
                lease.fill([key], torch.zeros(1, 2))
            lease.places(key)
    assert pool.stats().evictions > 3
    assert pool.stats().waits == device.waits == 0


def test_a_hit_waits_once_for_each_filling_and_places_on_each_stream() -> None:
    pool, device = pretended()
    store(pool, "k", "l")
    store(pool, "m")
    device.current = "b"
    with pool.lease() as lease:
        waits = []
        for key in "klm":
            assert lease.pin(key, 1)
            waits.append(device.waits)
        assert waits == [1, 1, 2]
        lease.places("k")
        assert device.waits == 2
        device.current = "c"
        lease.places("k")
        lease.places("l")
        assert device.waits == 3
        device.current = "a"
        lease.places("k")
        assert device.waits == 3
    assert pool.stats().waits == 3


def test_a_reuse_of_many_pages_waits_once_for_each_stream() -> None:
    pool, device = pretended(6)
    for index, key in enumerate("klmnop"):
        device.current = "ab"[index % 2]
        store(pool, key)
    before = device.waits
    device.current = "c"
    store(pool, *"uvwxyz")
    assert device.waits == before + 2


def test_pages_are_waited_for_by_what_used_them_last_alone() -> None:
    pool, device = pretended(2)
    device.current = "b"
    store(pool, "k")
    assert device.waits == 1  # for the pool's making
    store(pool, "l")
    assert device.waits == 2
    device.current = "c"
    store(pool, "m")  # in place of the first
    assert device.waits == 3
    store(pool, "n")
    store(pool, "o")
    assert device.waits == 4


CALLS = {
    "pin": lambda lease: lease.pin("k", 1),
    "reserve": lambda lease: lease.reserve({"n": 1}),
    "fill": lambda lease: lease.fill(["reserved"], torch.zeros(1, 2)),
    "view": lambda lease: lease.view(["reserved"]),
    "commit": lambda lease: lease.commit(["viewed"]),
    "places": lambda lease: lease.places("l"),
    "release": lambda lease: lease.release(),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_inside_a_capture_are_errors_and_work_after_it(name: str) -> None:
    pool, device = pretended()
    store(pool, "k", "l")
    lease = pool.lease()
    lease.pin("l", 1)
    lease.reserve({"reserved": 1, "viewed": 1})
    lease.view(["viewed"])
    device.captured.add("a")
    before = pool.stats()
    with pytest.raises(
        PoolCaptureError, match=f"{name} can't run inside a CUDA-graph capture.*before or after"
    ):
        CALLS[name](lease)
    assert pool.stats() == before
    pool.drop("k")
    pool.clear()
    device.captured.clear()
    if name != "pin":
        CALLS[name](lease)
    lease.release()
    assert pool.stats().rows_pinned == 0


def test_a_capture_of_another_stream_that_must_be_marked_is_refused() -> None:
    pool, device = pretended()
    lease = pool.lease()
    lease.reserve({"k": 1})
    lease.view(["k"])
    device.captured.add("a")
    device.current = "b"
    for call in (lambda: lease.commit(["k"]), lambda: lease.fill(["k"], torch.zeros(1, 2)), lease.release):
        with pytest.raises(PoolCaptureError):
            call()
    device.captured.clear()
    lease.commit(["k"])
    assert "k" in pool
    lease.release()


def test_a_lease_that_is_lost_in_a_capture_is_released_after_it() -> None:
    pool, device = pretended()
    lease = pool.lease()
    lease.reserve({"k": 2})
    lease.view(["k"])
    device.captured.add("a")
    with pytest.warns(ResourceWarning, match="held 1 items was lost without release"):
        del lease
    assert pool.stats().rows_pinned == 2
    device.captured.clear()
    assert pool.stats().rows_free == pool.rows
    device.current = "b"
    store(pool, *"klmnop")
    assert device.waits == 1  # for what the lost encoder may have written


def test_a_pool_can_not_be_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendedDevice(random.Random(0))
    monkeypatch.setattr("mmgraph.pool.clock_for", lambda _: device)
    device.captured.add("a")
    with pytest.raises(PoolCaptureError, match="an EncoderPool can't be made inside a capture; make it before"):
        EncoderPool(6, 2, page_rows=1)
    device.captured.clear()
    store(EncoderPool(6, 2, page_rows=1), "k")
