"""Invariant: on CUDA, rows are reused only behind the work that wrote and read them, and the host waits for nothing.

Readers and writers are delayed on their streams by kernels that spin, so that a missing wait shows as a wrong row, and
a wait of the host as work that has ended too soon.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmgraph.ops
from mmgraph.errors import PoolArgumentError, PoolCaptureError, PoolFullError
from mmgraph.ops import RowMap
from mmgraph.pool import EncoderPool, PoolLease
from mmgraph.row_cache import Rows, RowStore

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")
WIDTH = 64
LONG = 100_000_000  # clock cycles, tens of milliseconds
SHORT = 200_000


def pool_of(rows: int, *, page_rows: int = 1, dtype: torch.dtype = torch.float32) -> EncoderPool:
    return EncoderPool(rows, WIDTH, dtype=dtype, device="cuda", page_rows=page_rows)


def filled(count: int, value: float) -> torch.Tensor:
    return torch.full((count, WIDTH), float(value), device=CUDA)


def store(pool: EncoderPool, key: object, rows: torch.Tensor) -> None:
    with pool.lease() as lease:
        lease.reserve({key: len(rows)})
        lease.fill([key], rows)


def read(pool: EncoderPool, lease: PoolLease, key: object, index: torch.Tensor) -> torch.Tensor:
    """Read on the current stream; the index is there before, since making one would wait for the host."""
    lease.places(key)
    return pool.tensor[index]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def delayed(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work of the block comes behind a long delay, and the host must be out of the block before that has passed."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        passed = torch.cuda.Event()
        passed.record()
    yield
    assert not passed.query(), "the host waited for the device"


def warm(pool: EncoderPool, *streams: torch.cuda.Stream) -> None:
    """Load kernels and make memory on streams, which may wait for the device; then forget everything."""
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            store(pool, "warm", filled(pool.rows, 0))
            pool.clear()
            assert not (pool.tensor[torch.arange(pool.rows, device=CUDA)] * 2).any()
            torch.cuda._sleep(SHORT)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_the_cpu(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    page_rows = rng.randint(1, 5)
    pools = [
        EncoderPool(64, WIDTH, dtype=dtype, device=device, page_rows=page_rows) for device in ("cpu", "cuda")
    ]
    assert pools[1].device == torch.device("cuda", torch.cuda.current_device())
    address = pools[1].tensor.data_ptr()
    for step in range(12):
        sizes = {(step, k): rng.randint(1, 12) for k in range(rng.randint(1, 3))}
        rows = torch.randn(sum(sizes.values()), WIDTH, generator=torch.Generator().manual_seed(seed + step))
        parts = [rows] if rng.random() < 0.5 else list(rows.split([48, 16], dim=1))
        dropped = (rng.randrange(step + 1), 0)
        for pool in pools:
            with pool.lease() as lease:
                lease.reserve(sizes)
                lease.fill(list(sizes), *(part.to(pool.device) for part in parts))
            pool.drop(dropped)
    assert torch.equal(pools[0].tensor, pools[1].tensor.cpu())
    assert pools[0].stats() == pools[1].stats()
    assert pools[1].tensor.data_ptr() == address
    mmgraph.ops.check_errors()


def test_a_fill_waits_for_delayed_readers_on_two_streams() -> None:
    pool = pool_of(8)
    first, second, writer = (torch.cuda.Stream() for _ in range(3))
    warm(pool, first, second, writer)
    old, new, index = filled(8, 1), filled(8, 2), torch.arange(8, device=CUDA)
    store(pool, "old", old)
    torch.cuda.synchronize()
    results = []
    with no_synchronisation(), delayed(first), delayed(second):
        for stream in (first, second):
            with torch.cuda.stream(stream), pool.lease() as lease:
                assert lease.pin("old", 8)
                results.append(read(pool, lease, "old", index))
        with torch.cuda.stream(writer):
            store(pool, "new", new)
    torch.cuda.synchronize()
    assert all(torch.equal(result, old) for result in results)
    assert torch.equal(pool.tensor, new)
    assert pool.stats().evictions == 1


def test_a_reader_waits_for_a_delayed_fill() -> None:
    pool = pool_of(8)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    warm(pool, writer, reader)
    new, index = filled(8, 2), torch.arange(8, device=CUDA)
    torch.cuda.synchronize()
    with no_synchronisation(), delayed(writer):
        with torch.cuda.stream(writer):
            store(pool, "new", new)
        with torch.cuda.stream(reader), pool.lease() as lease:
            assert lease.pin("new", 8)
            result = read(pool, lease, "new", index)
    torch.cuda.synchronize()
    assert torch.equal(result, new)


def test_a_fill_waits_for_what_a_failed_encoder_writes_to_its_view() -> None:
    pool = pool_of(8)
    failing, writer = torch.cuda.Stream(), torch.cuda.Stream()
    warm(pool, failing, writer)
    late, new = filled(8, 1), filled(8, 2)
    torch.cuda.synchronize()
    with no_synchronisation(), delayed(failing):
        lease = pool.lease()
        with torch.cuda.stream(failing):
            lease.reserve({"late": 8})
            lease.view(["late"]).copy_(late)
        with torch.cuda.stream(writer):
            lease.release()
            store(pool, "new", new)
    torch.cuda.synchronize()
    assert torch.equal(pool.tensor, new)


def test_rows_in_several_runs_are_stored_without_waiting() -> None:
    pool = pool_of(16)
    stream = torch.cuda.Stream()
    with pool.lease() as lease:
        lease.reserve(dict.fromkeys(range(16), 1))
        lease.fill(list(range(16)), filled(16, 0))
    for key in range(0, 16, 2):
        pool.drop(key)
    main, deep = torch.randn(8, 48, device=CUDA), torch.randn(8, 16, device=CUDA)

    def fill(key: str, main: torch.Tensor, deep: torch.Tensor) -> list[int]:
        with torch.cuda.stream(stream), pool.lease() as lease:
            lease.reserve({key: 8})
            assert lease.view([key]) is None
            lease.fill([key], main, deep)
            return lease.places(key).index().tolist()

    fill("warm", torch.zeros_like(main), torch.zeros_like(deep))  # compiles the kernel, and makes memory
    pool.drop("warm")
    torch.cuda.synchronize()
    with no_synchronisation(), delayed(stream):
        index = fill("k", main, deep)
    torch.cuda.synchronize()
    assert index == list(range(0, 16, 2))
    assert torch.equal(pool.tensor[::2], torch.cat([main, deep], 1))
    assert not pool.tensor[1::2].any()
    mmgraph.ops.check_errors()


@pytest.mark.parametrize("seed", range(8))
def test_random_streams_read_what_they_were_promised(seed: int) -> None:
    rng = random.Random(seed)
    pool = pool_of(24)
    streams = [torch.cuda.Stream() for _ in range(3)]
    values: dict[object, float] = {}
    wrong = []
    leases: list[PoolLease] = []
    for step in range(400):
        with torch.cuda.stream(rng.choice(streams)):
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.randrange(SHORT))
            if len(leases) > 2 or (leases and rng.random() < 0.2):
                leases.pop(rng.randrange(len(leases))).release()
            leases.append(pool.lease())
            lease = rng.choice(leases)
            key = rng.randrange(8)
            count = 1 + key
            if key not in lease._hold.entries and not lease.pin(key, count):
                try:
                    lease.reserve({key: count})
                except PoolFullError:
                    continue
                own = lease._hold.entries[key]
                values[own] = float(step)
                view = lease.view([key]) if rng.random() < 0.5 else None
                if view is None:
                    lease.fill([key], filled(count, float(step)))
                else:
                    torch.cuda._sleep(rng.randrange(SHORT))
                    view.fill_(float(step))
                    lease.commit([key])
            for key, entry in lease._hold.entries.items():
                mine = torch.zeros(24, dtype=torch.bool)
                mine[torch.from_numpy(lease.places(key).index())] = True
                mine = mine.pin_memory().to(CUDA, non_blocking=True)
                wrong.append((mine[:, None] & (pool.tensor != values[entry])).sum())
            if rng.random() < 0.1:
                pool.drop(rng.randrange(8))
    for lease in leases:
        lease.release()
    torch.cuda.synchronize()
    assert int(torch.stack(wrong).sum()) == 0
    stats = pool.stats()
    assert stats.evictions > 0
    assert stats.waits > 0
    assert stats.rows_pinned == 0


def test_a_captured_assembly_reads_what_is_in_the_pool_now() -> None:
    pool = pool_of(32, page_rows=4)
    tokens = 12
    table = torch.zeros(3, WIDTH, device=CUDA)
    ids = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
    row_map = torch.full((tokens,), -1, dtype=torch.int32, device=CUDA)
    with torch.inference_mode():
        out = mmgraph.ops.assemble_embeddings(ids, table, pool.tensor, row_map)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mmgraph.ops.assemble_embeddings(ids, table, pool.tensor, row_map)
        for step in range(20):
            rows = torch.randn(7, WIDTH, device=CUDA)
            with pool.lease() as lease:
                lease.reserve({step: 7})
                lease.fill([step], rows)
                places = lease.places(step)
                ends = places.counts.cumsum() + 2
                batch = RowMap.from_ranges(
                    tokens, ends - places.counts, ends - 1, places.starts, pool_rows=pool.rows
                )
                row_map.copy_(batch.to(CUDA))
                graph.replay()
            assert torch.equal(out[2:9], rows)
            assert not out[:2].any()
            assert not out[9:].any()
    assert pool.stats().evictions > 0


def test_calls_inside_a_capture_are_errors_and_harm_neither_pool_nor_capture() -> None:
    pool = pool_of(8)
    store(pool, "k", filled(2, 1))
    lease = pool.lease()
    lease.pin("k", 2)
    lease.reserve({"n": 2})
    before = pool.stats()
    static = torch.zeros(2, WIDTH, device=CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (
            lambda: lease.pin("k", 2),
            lambda: lease.reserve({"m": 1}),
            lambda: lease.fill(["n"], static),
            lambda: lease.view(["n"]),
            lambda: lease.places("k"),
            lambda: pool_of(8),
            lease.release,
        ):
            with pytest.raises(PoolCaptureError):
                call()
        out = static + 1
    graph.replay()
    assert bool((out == 1).all())
    assert pool.stats() == before
    lease.fill(["n"], filled(2, 3))
    lease.release()
    assert "n" in pool


def test_parts_elsewhere_are_refused() -> None:
    pool = pool_of(8)
    with pool.lease() as lease:
        lease.reserve({"k": 2})
        with pytest.raises(PoolArgumentError, match=r"on cuda:\d.*got torch.float32 \[2, 64\] on cpu"):
            lease.fill(["k"], torch.zeros(2, WIDTH))


def test_the_bound_is_what_is_allocated() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pool = EncoderPool(10**9, 512, device="cuda", max_bytes=3_000_000, page_rows=16)
    assert pool.nbytes <= 3_000_000 < pool.nbytes + 16 * 512 * 2
    assert torch.cuda.memory_allocated() - before == -(-pool.nbytes // 512) * 512


def test_a_row_store_hands_rows_from_stream_to_stream() -> None:
    cache = RowStore(8 * WIDTH * 4)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    source = filled(8, 3)
    torch.cuda.synchronize()
    for stream in (writer, reader):  # loads the kernel, and makes memory
        with torch.cuda.stream(stream):
            warmed = [source * 2 for _ in range(4)]
            torch.cuda._sleep(SHORT)
            del warmed
    torch.cuda.synchronize()
    with no_synchronisation(), delayed(writer):
        with torch.cuda.stream(writer):
            cache.put("k", Rows(source * 2))
        with torch.cuda.stream(reader):
            rows = cache.get("k").main
            torch.cuda._sleep(LONG)
            result = rows * 1
            del rows
        with torch.cuda.stream(writer):
            cache.put("l", Rows(source[:4] * 5))
            others = [source * 7 for _ in range(4)]  # none may lie where the evicted rows are still read
    torch.cuda.synchronize()
    assert torch.equal(result, filled(8, 6))
    assert cache.keys() == ["l"]
    assert len(others) == 4
