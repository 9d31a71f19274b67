"""Invariant: any number of threads may use a pool, each by its own leases; each sees whole items, and none is lost."""

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from mmgraph.errors import PoolFullError
from mmgraph.pool import EncoderPool
from mmgraph.row_cache import Rows, RowStore

THREADS = 6
WIDTH = 5


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def size(key: int) -> int:
    return 1 + key * 7 % 11


def contents(key: int) -> torch.Tensor:
    return torch.full((size(key), WIDTH), float(key + 1))


@pytest.mark.parametrize("attempt", range(3))
def test_threads_see_whole_items(attempt: int) -> None:
    pool = EncoderPool(96, WIDTH, dtype=torch.float32, page_rows=2)
    full: list[int] = []

    def work(index: int) -> None:
        rng = random.Random(100 * attempt + index)
        for _ in range(120):
            keys = rng.sample(range(12), 3)
            with pool.lease() as lease:
                missing = [key for key in keys if not lease.pin(key, size(key))]
                try:
                    lease.reserve({key: size(key) for key in missing})
                except PoolFullError:
                    full.append(index)
                    continue
                if missing:
                    rows = torch.cat([contents(key) for key in missing])
                    view = lease.view(missing) if rng.random() < 0.5 else None
                    if view is None:
                        lease.fill(missing, rows)
                    else:
                        view.copy_(rows)
                        lease.commit(missing)
                for key in keys:
                    got = pool.tensor[torch.from_numpy(lease.places(key).index())]
                    assert torch.equal(got, contents(key))
                if rng.random() < 0.2:
                    pool.drop(rng.choice(keys))
                if rng.random() < 0.05:
                    pool.clear()
                stats = pool.stats()
                assert stats.rows_used + stats.rows_free == pool.rows
                assert stats.rows_pinned <= stats.rows_used
                assert len(pool.keys()) <= 12

    in_threads(work)
    stats = pool.stats()
    assert stats.rows_pinned == 0
    assert stats.hits > 0
    assert stats.evictions + stats.stale > 0
    assert stats.stores == stats.evictions + stats.stale + stats.items
    pool.clear()
    assert pool.stats().rows_free == pool.stats().largest_run == pool.rows
    assert len(full) < 120 * THREADS / 2


def test_threads_that_miss_one_key_at_once_end_with_one_item() -> None:
    for _ in range(20):
        pool = EncoderPool(THREADS * 12, WIDTH, dtype=torch.float32, page_rows=4)
        barrier = threading.Barrier(THREADS)

        def work(_: int, pool: EncoderPool = pool, barrier: threading.Barrier = barrier) -> None:
            with pool.lease() as lease:
                assert not lease.pin(3, size(3))
                barrier.wait()
                lease.reserve({3: size(3)})
                lease.fill([3], contents(3))
                got = pool.tensor[torch.from_numpy(lease.places(3).index())]
                assert torch.equal(got, contents(3))

        in_threads(work)
        stats = pool.stats()
        assert (stats.stores, stats.items, stats.rows_pinned) == (1, 1, 0)
        assert stats.rows_used == 12


def test_a_row_store_in_threads() -> None:
    store = RowStore(4 * 11 * WIDTH * 4)

    def work(index: int) -> None:
        rng = random.Random(index)
        for _ in range(300):
            key = rng.randrange(12)
            pinned = store.pin(key)
            rows = store.get(key)
            assert rows is not None or not pinned
            if rows is None:
                store.put(key, Rows(contents(key)))
            else:
                assert torch.equal(rows.main, contents(key))
            assert store.stats().nbytes <= store.max_bytes
            if pinned:
                store.unpin(key)

    in_threads(work)
    stats = store.stats()
    assert stats.pinned_bytes == 0
    assert stats.stores == stats.evictions + stats.items
    assert stats.hits + stats.misses >= 300 * THREADS  # pins that find nothing are misses too
