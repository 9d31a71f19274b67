"""Invariant: rows that were stored are found again, unchanged and in place, for as long as a lease holds them."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmgraph
from mmgraph.errors import (
    MultimodalError,
    PoolArgumentError,
    PoolCopyError,
    PoolError,
    PoolFullError,
    PoolStateError,
)
from mmgraph.pool import EncoderPool, PoolLease


def fresh(rows: int, width: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def store(pool: EncoderPool, key: object, rows: torch.Tensor) -> None:
    with pool.lease() as lease:
        lease.reserve({key: len(rows)})
        lease.fill([key], rows)


def rows_at(pool: EncoderPool, lease: PoolLease, key: object) -> torch.Tensor:
    return pool.tensor[torch.from_numpy(lease.places(key).index())]


def small(pages: int = 4, page_rows: int = 2, width: int = 4) -> EncoderPool:
    return EncoderPool(pages * page_rows, width, dtype=torch.float32, page_rows=page_rows)


def scatter(pool: EncoderPool) -> None:
    """Leave every other page free, and the others to a key each, held by a lease that nobody releases."""
    pages = pool.rows // pool.page_rows
    with pool.lease() as lease:
        lease.reserve(dict.fromkeys(range(pages), pool.page_rows))
        lease.fill(range(pages), torch.zeros(pool.rows, pool.width))
        assert [int(lease.places(page).starts[0]) for page in range(pages)] == list(
            range(0, pool.rows, pool.page_rows)
        )
    for page in range(0, pages, 2):
        pool.drop(page)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("inference", [True, False])
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_stored_bit_for_bit(dtype: torch.dtype, inference: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    pool = EncoderPool(40 * page_rows, width, dtype=dtype, page_rows=page_rows)
    address = pool.tensor.data_ptr()
    if rng.random() < 0.5:
        scatter(pool)
    sizes = {f"k{index}": int(rng.integers(1, 3 * page_rows)) for index in range(rng.integers(1, 5))}
    total = sum(sizes.values())
    cut = int(rng.integers(1, width + 1))
    columns = [cut] if cut == width or rng.random() < 0.3 else [cut, width - cut]
    parts = [fresh(2 * total, w, seed=seed % 999)[::2] for w in columns]  # not contiguous
    with torch.inference_mode(inference):
        pool.tensor.fill_(2.0)
        with pool.lease() as lease:
            lease.reserve(sizes)
            lease.fill(list(sizes), *parts)
            expected = torch.full((total, width), 2.0)
            expected[:, : sum(columns)] = torch.cat(parts, 1)
            for key, mine in zip(sizes, expected.to(dtype).split(list(sizes.values())), strict=True):
                assert lease.places(key).rows == sizes[key]
                assert torch.equal(rows_at(pool, lease, key).float(), mine.float())
        untouched = torch.ones(pool.rows, dtype=torch.bool)
        with pool.lease() as lease:
            for key, rows in sizes.items():
                assert lease.pin(key, rows)
                untouched[torch.from_numpy(lease.places(key).index())] = False
        assert bool((pool.tensor.float()[untouched] == 2.0).all())
    assert pool.tensor.data_ptr() == address
    assert not pool.tensor.is_inference()
    assert not pool.tensor.requires_grad


def test_a_hit_finds_the_rows_and_a_miss_says_so() -> None:
    pool, rows = small(), fresh(3)
    store(pool, "k", rows)
    with pool.lease() as lease:
        assert lease.pin("k", 3)
        assert lease.pin("k", 3)
        assert not lease.pin("other", 3)
        assert torch.equal(rows_at(pool, lease, "k"), rows)
    stats = pool.stats()
    assert (stats.hits, stats.misses, stats.stores, stats.items) == (2, 1, 1, 1)
    assert ("k" in pool, "other" in pool, len(pool), pool.keys()) == (True, False, 1, ["k"])
    assert stats.rows_pinned == 0  # one release for two pins


def test_an_item_is_found_once_it_is_filled_and_not_before() -> None:
    pool = small()
    with pool.lease() as lease, pool.lease() as other:
        lease.reserve({"k": 2})
        assert "k" not in pool
        assert not other.pin("k", 2)
        lease.fill(["k"], fresh(2))
        assert other.pin("k", 2)


def test_rows_that_do_not_fit_one_run_are_split() -> None:
    pool = small(8)
    scatter(pool)
    rows = fresh(7)
    with pool.lease() as lease:
        lease.reserve({"k": 7})
        assert lease.view(["k"]) is None
        lease.fill(["k"], rows)
        places = lease.places("k")
        assert places.starts.tolist() == [0, 4, 8, 12]
        assert places.counts.tolist() == [2, 2, 2, 1]
        assert places.index().tolist() == [0, 1, 4, 5, 8, 9, 12]
        assert (places.starts.dtype, places.index().dtype) == (np.int64, np.int64)
        assert torch.equal(rows_at(pool, lease, "k"), rows)
    assert pool.stats().runs_per_item == (4 + 4 * 1) / 5


def test_places_can_not_be_changed() -> None:
    pool = small()
    with pool.lease() as lease:
        lease.reserve({"k": 2})
        lease.fill(["k"], fresh(2))
        with pytest.raises(ValueError, match="read-only"):
            lease.places("k").starts[0] = 1


@pytest.mark.parametrize("inference", [True, False])
def test_an_encoder_writes_to_a_view_itself(inference: bool) -> None:
    pool = small(width=6)
    with pool.lease() as lease:
        lease.reserve({"a": 4, "b": 3})
        with torch.inference_mode(inference):
            view = lease.view(["a", "b"])
        assert view.shape == (7, 6)
        assert view.data_ptr() == pool.tensor.data_ptr()
        view.copy_(fresh(7, 6))
        with torch.inference_mode():
            view[:1].copy_(fresh(1, 6))
        assert "a" not in pool
        lease.commit(["a", "b"])
        assert torch.equal(rows_at(pool, lease, "b"), fresh(7, 6)[4:])
    assert pool.keys() == ["a", "b"]


@pytest.mark.parametrize("inference", [True, False])
def test_an_encoder_that_records_gradients_can_not_write_to_a_view(inference: bool) -> None:
    pool = small()
    weight = torch.ones(4, requires_grad=True)
    with pool.lease() as lease:
        lease.reserve({"k": 2})
        with torch.inference_mode(inference):
            view = lease.view(["k"])
        with pytest.raises(RuntimeError, match=r"(no_grad|inference) ?mode"):
            view.copy_(weight * 2)
        view.copy_((weight * 2).detach())
        lease.commit(["k"])
    assert not pool.tensor.requires_grad


def test_there_is_no_view_over_gaps_or_out_of_order() -> None:
    pool = small()
    with pool.lease() as lease:
        lease.reserve({"a": 3, "b": 2, "c": 2})
        assert lease.view(["a", "b"]) is None  # a's last page has a row to spare
        assert lease.view(["c", "b"]) is None
        assert lease.view(["b", "c"]).shape == (4, 4)
        assert lease.view(["a"]).shape == (3, 4)


def test_what_was_used_least_recently_goes_first_and_no_more_than_needed() -> None:
    pool = small(4)
    for key in "abcd":
        store(pool, key, fresh(2))
    with pool.lease() as lease:
        lease.pin("a", 2)
    assert pool.keys() == ["b", "c", "d", "a"]
    with pool.lease() as lease:
        lease.reserve({"e": 3})
    assert pool.keys() == ["d", "a"]
    assert pool.stats().evictions == 2


def test_a_release_is_a_use() -> None:
    pool = small(4)
    for key in "abc":
        store(pool, key, fresh(2))
    held = pool.lease()
    held.pin("a", 2)
    with pool.lease() as lease:
        lease.pin("b", 2)
    assert pool.keys() == ["c", "a", "b"]
    held.release()
    assert pool.keys() == ["c", "b", "a"]
    with pool.lease() as lease:
        lease.reserve({"e": 6})
    assert pool.keys() == ["a"]


def test_what_is_held_is_not_evicted() -> None:
    pool, rows = small(4), fresh(2)
    store(pool, "held", rows)
    store(pool, "idle", fresh(2))
    with pool.lease() as holder, pool.lease() as lease:
        holder.pin("held", 2)
        lease.reserve({"new": 6})
        assert pool.keys() == ["held"]
        lease.fill(["new"], fresh(6))
        assert torch.equal(rows_at(pool, holder, "held"), rows)


def test_a_full_pool_says_what_is_wanted_and_what_there_is() -> None:
    pool = small(6)
    store(pool, "held", fresh(4))
    store(pool, "idle", fresh(2))
    with pool.lease() as holder, pool.lease() as lease:
        holder.pin("held", 4)
        before = pool.stats()
        with pytest.raises(PoolFullError) as caught:
            lease.reserve({"a": 3, "b": 5})
        assert str(caught.value) == (
            "8 rows for 2 items are wanted, 10 in whole pages of 2; of the pool's 12 rows 6 are free, 2 can be "
            "evicted and 4 are pinned; release the leases that hold the rest, encode fewer items at once, or make the "
            "pool larger"
        )
        assert pool.stats() == before
        assert pool.keys() == ["idle", "held"]
        lease.reserve({"a": 3, "b": 4})
        assert pool.keys() == ["held"]
        assert pool.stats().rows_free == 0
    with pool.lease() as lease, pytest.raises(PoolFullError, match=r"make the pool larger \(rows, max_bytes\)"):
        lease.reserve({"a": 13})


def test_reservations_that_are_not_filled_are_freed() -> None:
    pool = small()

    def fails_half_way() -> None:
        with pool.lease() as lease:
            lease.reserve({"a": 3, "b": 1})
            lease.fill(["b"], fresh(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_half_way()
    assert pool.keys() == ["b"]
    assert pool.stats().rows_used == 2


def test_two_leases_that_encode_one_key_share_the_first() -> None:
    pool = small()
    first, second = pool.lease(), pool.lease()
    for lease in (first, second):
        assert not lease.pin("k", 3)
        lease.reserve({"k": 3})
    assert pool.stats().rows_free == 0
    first.fill(["k"], fresh(3, seed=1))
    second.fill(["k"], fresh(3, seed=2))
    assert pool.stats().rows_free == 4  # those of the second
    assert np.array_equal(first.places("k").index(), second.places("k").index())
    first.release()
    with pool.lease() as greedy, pytest.raises(PoolFullError):  # the second holds it still
        greedy.reserve({"x": 5})
    assert torch.equal(rows_at(pool, second, "k"), fresh(3, seed=1))
    second.release()
    assert (pool.stats().stores, pool.stats().rows_pinned) == (1, 0)


def test_a_key_that_another_stored_with_other_rows_is_an_error() -> None:
    pool = small()
    with pool.lease() as lease:
        lease.reserve({"k": 3})
        store(pool, "k", fresh(2))
        with pytest.raises(
            PoolArgumentError, match="fill: the key 'k' is stored with 2 rows and wanted with 3"
        ):
            lease.fill(["k"], fresh(3))
        pool.drop("k")
        lease.fill(["k"], fresh(3))
    with pool.lease() as lease:
        with pytest.raises(PoolArgumentError, match="pin: the key 'k' is stored with 3 rows and wanted with 4"):
            lease.pin("k", 4)
        assert lease.pin("k", 3)
        with pytest.raises(PoolArgumentError, match="stored with 3 rows and wanted with 4"):
            lease.pin("k", 4)


def test_a_key_that_another_stores_with_other_rows_meanwhile_is_an_error() -> None:
    pool = small()
    lease = pool.lease()
    lease.reserve({"k": 3, "l": 1})
    lease.view(["k"])
    store(pool, "k", fresh(2, seed=5))
    with pytest.raises(PoolArgumentError, match="commit: the key 'k' is stored with 2 rows and wanted with 3"):
        lease.commit(["k"])
    assert "l" not in pool
    lease.release()
    assert pool.keys() == ["k"]
    assert pool.stats().rows_used == 2


def test_dropped_items_miss_at_once_and_keep_their_rows_for_who_holds_them() -> None:
    pool, rows = small(), fresh(3)
    store(pool, "k", rows)
    store(pool, "idle", fresh(2))
    with pool.lease() as holder:
        holder.pin("k", 3)
        pool.drop("k")
        pool.drop("idle")
        pool.drop("unknown")
        assert pool.keys() == []
        assert pool.stats().rows_used == 4
        with pool.lease() as lease:
            assert not lease.pin("k", 3)
            lease.reserve({"k": 2})  # with other rows: the old is forgotten
            lease.fill(["k"], fresh(2, seed=1))
        assert torch.equal(rows_at(pool, holder, "k"), rows)
        assert len(holder.places("k").index()) == 3
    assert pool.keys() == ["k"]
    assert (pool.stats().rows_used, pool.stats().stale) == (2, 2)


def test_clear_drops_everything() -> None:
    pool = small()
    for key in "abc":
        store(pool, key, fresh(2))
    with pool.lease() as lease:
        lease.pin("b", 2)
        pool.clear()
        assert len(pool) == 0
        assert pool.stats().rows_used == 2
    assert pool.stats().rows_free == pool.rows
    assert pool.stats().stale == 3


class Item:
    pass


def test_a_finalizer_may_drop_whatever_the_pool_is_doing() -> None:
    pool = small()

    class Nosy:
        """Its comparison, inside the pool, collects an item whose finalizer drops a key."""

        def __init__(self) -> None:
            self.item: Item | None = Item()
            weakref.finalize(self.item, pool.drop, "k")

        def __hash__(self) -> int:
            return hash("nosy")

        def __eq__(self, other: object) -> bool:
            self.item = None
            return self is other

    store(pool, "k", fresh(1))
    nosy = Nosy()
    store(pool, nosy, fresh(1))
    with pool.lease() as lease:
        lease.pin(Nosy(), 1)
        assert "k" not in pool
    assert len(pool) == 1


def test_a_lease_that_is_lost_gives_its_pages_back() -> None:
    pool = small()
    store(pool, "k", fresh(2))
    lease = pool.lease()
    lease.pin("k", 2)
    lease.reserve({"l": 3})
    assert pool.stats().rows_pinned == 6
    with pytest.warns(ResourceWarning, match="held 2 items was lost without release"):
        del lease
    assert pool.stats().rows_pinned == 0
    assert pool.keys() == ["k"]


def test_a_lease_without_anything_or_released_is_lost_silently() -> None:
    pool = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = pool.lease()
        del lease
        store(pool, "k", fresh(2))
        gc.collect()
    assert not pool._orphans


def test_release_is_idempotent_and_ends_everything_else() -> None:
    pool = small()
    store(pool, "k", fresh(2))
    lease, other = pool.lease(), pool.lease()
    lease.pin("k", 2)
    other.pin("k", 2)
    lease.release()
    lease.release()
    assert pool.stats().rows_pinned == 2
    calls = {
        "pin": lambda: lease.pin("k", 2),
        "reserve": lambda: lease.reserve({"l": 1}),
        "fill": lambda: lease.fill(["k"], fresh(2)),
        "view": lambda: lease.view(["k"]),
        "commit": lambda: lease.commit(["k"]),
        "places": lambda: lease.places("k"),
        "with": lambda: lease.__enter__(),
    }
    for name, call in calls.items():
        with pytest.raises(PoolStateError, match=f"^{name}: this lease is released; ask the pool for another"):
            call()
    other.release()


BAD_PARTS = {
    "no parts": ((), "at least one part is needed"),
    "too few rows": ((torch.zeros(2, 4),), r"\[3, w\] on cpu.*got torch.float32 \[2, 4\] on cpu"),
    "one dimension": ((torch.zeros(3),), r"got torch.float32 \[3\]"),
    "integers": ((torch.zeros(3, 4, dtype=torch.int64),), r"got torch.int64 \[3, 4\]"),
    "no tensor": ((np.zeros((3, 4)),), "got ndarray"),
    "too wide": ((torch.zeros(3, 3), torch.zeros(3, 2)), r"at most 4 columns; got widths \[3, 2\]"),
    "a gradient": ((torch.zeros(3, 4, requires_grad=True),), "have no gradient.*detach"),
    "elsewhere": ((torch.zeros(3, 4, device="meta"),), r"\[3, w\] on cpu.*on meta"),
    "sparse": ((torch.zeros(3, 4).to_sparse(),), "dense"),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_do_not_fit_are_errors_and_change_nothing(name: str) -> None:
    parts, words = BAD_PARTS[name]
    pool = small()
    with pool.lease() as lease:
        lease.reserve({"k": 3})
        before = pool.stats()
        with pytest.raises(PoolArgumentError, match=words):
            lease.fill(["k"], *parts)
        assert pool.stats() == before
        assert not pool.tensor.any()
        lease.fill(["k"], fresh(3))
        assert torch.equal(rows_at(pool, lease, "k"), fresh(3))


def test_a_copy_that_fails_leaves_a_reservation_that_can_be_filled() -> None:
    pool = small()
    write = pool._write

    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for the cast")

    with pool.lease() as lease:
        lease.reserve({"k": 3})
        pool._write = failing
        with pytest.raises(torch.OutOfMemoryError):
            lease.fill(["k"], fresh(3))
        with pytest.raises(PoolStateError, match="commit: the key 'k' has no view"):
            lease.commit(["k"])
        assert "k" not in pool
        pool._write = write
        lease.fill(["k"], fresh(3))
    assert "k" in pool


def test_calls_out_of_turn_are_errors_and_change_nothing() -> None:
    pool = small()
    store(pool, "stored", fresh(1))
    with pool.lease() as lease:
        lease.reserve({"k": 1, "l": 1})
        lease.pin("stored", 1)
        before = pool.stats()
        for call, words in (
            (
                lambda: lease.pin("k", 1),
                "pin: this lease has reserved the key 'k' and not filled it; call fill",
            ),
            (lambda: lease.reserve({"m": 1, "k": 1}), "reserve: this lease holds the key 'k' already"),
            (lambda: lease.reserve({"stored": 1}), "holds the key 'stored' already"),
            (lambda: lease.places("k"), "places: this lease hasn't filled the key 'k'"),
            (lambda: lease.places("m"), "places: this lease doesn't hold the key 'm'"),
            (lambda: lease.fill(["m"], fresh(1)), "fill: this lease hasn't reserved the key 'm'"),
            (
                lambda: lease.fill(["stored"], fresh(1)),
                "fill: this lease has no need to fill the key 'stored'",
            ),
            (lambda: lease.view(["m"]), "view: this lease hasn't reserved"),
            (lambda: lease.commit(["k"]), "commit: the key 'k' has no view to write to; call view first"),
        ):
            with pytest.raises(PoolStateError, match=words):
                call()
            assert pool.stats() == before
        lease.fill(["k", "l"], fresh(2))
    assert set(pool.keys()) == {"stored", "k", "l"}


def test_arguments_of_the_wrong_kind_are_errors_and_change_nothing() -> None:
    pool = small()
    with pool.lease() as lease:
        lease.reserve({"k": 2})
        before = pool.stats()
        for call, words in (
            (lambda: lease.pin("m", 0), "rows of the key 'm' must be an integer of at least 1, got 0"),
            (lambda: lease.pin("m", True), "got True"),
            (lambda: lease.reserve({"m": 1, "n": 2.0}), r"rows of the key 'n' .* got 2\.0"),
            (lambda: lease.reserve(["m"]), "must map keys to rows, got list"),
            (lambda: lease.pin([1], 1), "a key must be hashable, got list"),
            (lambda: lease.places([1]), "a key must be hashable"),
            (lambda: lease.fill([[1]], fresh(1)), "a key must be hashable"),
            (lambda: lease.fill([], fresh(1)), r"at least one key, got \[\]"),
            (lambda: lease.fill("k", fresh(2)), "must be a list of at least one key, got 'k'"),
            (lambda: lease.fill(["k", "k"], fresh(4)), "keys must differ, got 2 with 1 different"),
            (lambda: lease.pin("x" * 999, 0), r"x\.\.\. must be"),
            (lambda: pool.drop([1]), "a key must be hashable"),
            (lambda: [1] in pool, "a key must be hashable"),
        ):
            with pytest.raises(PoolArgumentError, match=words):
                call()
            assert pool.stats() == before


def test_bounds() -> None:
    assert EncoderPool(100, 8).rows == 96
    assert EncoderPool(100, 8, page_rows=1).rows == 100
    pool = EncoderPool(1000, 8, max_bytes=1000, page_rows=4)
    assert (pool.rows, pool.width, pool.page_rows, pool.nbytes) == (60, 8, 4, 960)
    assert EncoderPool(10, 8, max_bytes=10**9, page_rows=2).rows == 10
    assert (pool.dtype, pool.device, pool.tensor.shape) == (torch.bfloat16, torch.device("cpu"), (60, 8))
    assert repr(pool) == "EncoderPool(60, 8, dtype=torch.bfloat16, device='cpu')"
    assert not pool.tensor.any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"rows": 1.5}, r"rows must be an integer of at least 1, got 1\.5"),
        ({"width": True}, "width must be an integer"),
        ({"page_rows": 0}, "page_rows must be"),
        ({"max_bytes": 0}, "max_bytes must be"),
        ({"rows": 15}, "rows=15 and max_bytes=None allow 15 rows of 8 bytes, and a page has 16"),
        ({"max_bytes": 127}, "rows=64 and max_bytes=127 allow 15 rows of 8 bytes"),
        ({"rows": 2**31}, r"fewer than 2\*\*31 rows"),
        ({"dtype": torch.int32}, "dtype must be a floating-point torch dtype, got torch.int32"),
        ({"dtype": "bfloat16"}, "dtype must be a floating-point torch dtype"),
        ({"device": "meta"}, "device must be a CPU or a CUDA device, got meta"),
    ],
)
def test_a_pool_that_can_not_be_made(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PoolArgumentError, match=words):
        EncoderPool(**{"rows": 64, "width": 4, **arguments})


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_pools_and_leases_can_not_be_copied(again: object) -> None:
    pool = small()
    with pytest.raises(
        PoolCopyError, match=r"an EncoderPool can't be copied or pickled.*make one in each process"
    ):
        again(pool)
    with pool.lease() as lease, pytest.raises(PoolCopyError, match="a PoolLease can't be copied or pickled"):
        again(lease)


def test_inference_mode_and_default_devices_have_no_say() -> None:
    with torch.inference_mode(), torch.device("meta"):
        pool = small()
        store(pool, "k", torch.ones(3, 4, device="cpu"))
    assert not pool.tensor.is_inference()
    assert pool.device.type == "cpu"
    pool.tensor.zero_()


def test_errors_are_one_family() -> None:
    assert issubclass(PoolError, MultimodalError)
    assert {PoolFullError, PoolArgumentError, PoolStateError, PoolCopyError} <= set(PoolError.__subclasses__())
    assert mmgraph.EncoderPool is EncoderPool
