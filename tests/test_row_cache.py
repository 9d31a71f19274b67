"""Invariant: a row store gives back what was put, within its bytes, and never lets go of what is pinned."""

import copy
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_device import PretendedDevice

from mmgraph.errors import PoolArgumentError, PoolCaptureError, PoolCopyError, PoolStateError
from mmgraph.row_cache import RowCache, Rows, RowStore

ROW = 4 * 4  # bytes of a row of four float32


def rows_of(count: int, value: float = 0.0) -> Rows:
    return Rows(torch.full((count, 4), float(value)))


def test_a_store_is_a_cache() -> None:
    assert isinstance(RowStore(1), RowCache)


def test_rows_come_back_as_they_were() -> None:
    store, rows = RowStore(1000), Rows(torch.randn(3, 4), torch.randn(3, 8))
    store.put("k", rows)
    found = store.get("k")
    assert found.main is rows.main
    assert found.deepstack is rows.deepstack
    assert store.get("other") is None
    assert not store.pin("other")
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.stores, stats.items, stats.nbytes) == (1, 2, 1, 1, 3 * 12 * 4)
    assert ("k" in store, "other" in store, len(store)) == (True, False, 1)


def test_a_view_is_copied_and_what_is_whole_is_not() -> None:
    store, batch = RowStore(10_000), torch.randn(100, 4)
    store.put("view", Rows(batch[3:5]))
    kept = store.get("view").main
    assert torch.equal(kept, batch[3:5])
    assert kept.untyped_storage().nbytes() == 2 * ROW


def test_the_least_recently_used_goes_first() -> None:
    store = RowStore(3 * ROW)
    for key in "abc":
        store.put(key, rows_of(1))
    store.get("a")
    store.pin("b")
    store.unpin("b")
    assert store.keys() == ["c", "a", "b"]
    store.put("c", rows_of(1))  # again: a use
    store.put("d", rows_of(2))
    assert store.keys() == ["c", "d"]
    assert store.stats().evictions == 2


def test_what_is_pinned_stays_and_rows_without_room_are_declined() -> None:
    store = RowStore(3 * ROW)
    for key in "abc":
        store.put(key, rows_of(1))
    assert store.pin("a")
    assert store.pin("a")
    store.unpin("a")
    store.put("d", rows_of(3))
    assert store.keys() == ["b", "c", "a"]  # nothing made room in vain
    assert (store.stats().declined, store.stats().pinned_bytes) == (1, ROW)
    store.put("d", rows_of(2))
    assert store.keys() == ["a", "d"]
    store.unpin("a")
    store.put("e", rows_of(3))
    assert store.keys() == ["e"]
    assert store.stats().pinned_bytes == 0


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "pin", "unpin"]), st.integers(0, 4)), max_size=60))
def test_against_a_plain_model(calls: list[tuple[str, int]]) -> None:
    store, bound = RowStore(6 * ROW), 6
    model: dict[int, int] = {}  # rows by key, least recently used first
    pins = dict.fromkeys(range(5), 0)
    for call, key in calls:
        count, known = 1 + key % 3, key in model
        if known and (call != "unpin" or pins[key]):
            model[key] = model.pop(key)
        if call == "put":
            if not known and sum(rows for other, rows in model.items() if pins[other]) + count <= bound:
                while sum(model.values()) + count > bound:
                    del model[next(other for other in model if not pins[other])]
                model[key] = count
            store.put(key, rows_of(count, key))
        elif call == "get":
            found = store.get(key)
            assert (found is not None) == known
            assert found is None or torch.equal(found.main, rows_of(count, key).main)
        elif call == "pin":
            assert store.pin(key) == known
            pins[key] += known
        elif pins[key]:
            store.unpin(key)
            pins[key] -= 1
        else:
            with pytest.raises(PoolStateError):
                store.unpin(key)
        assert store.keys() == list(model)
        assert store.stats().nbytes == sum(model.values()) * ROW
        assert store.stats().pinned_bytes == sum(rows for other, rows in model.items() if pins[other]) * ROW


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(2, 4), "rows must be a Rows record, got Tensor"),
        (Rows(torch.zeros(4)), r"\[rows, width\].*got torch.float32 \[4\]"),
        (Rows(torch.zeros(0, 4)), "at least one row"),
        (Rows(torch.zeros(2, 4, dtype=torch.int32)), "floating-point.*torch.int32"),
        (Rows(torch.zeros(2, 4, device="meta")), "on a CPU or a CUDA device; got .* on meta"),
        (Rows(torch.zeros(2, 4, requires_grad=True)), "have no gradient.*detach"),
        (Rows(torch.zeros(2, 4), [1]), "got list"),
        (Rows(torch.zeros(2, 4), torch.zeros(3, 4)), r"as many rows and one device, got \['\[2, 4\] on cpu'"),
    ],
)
def test_rows_of_the_wrong_kind_are_errors_and_change_nothing(rows: object, words: str) -> None:
    store = RowStore(1000)
    store.put("a", rows_of(1))
    before = store.stats()
    with pytest.raises(PoolArgumentError, match=words):
        store.put("k", rows)
    assert store.stats() == before


def test_other_rows_under_a_key_are_an_error() -> None:
    store = RowStore(1000)
    store.put("k", rows_of(2))
    with pytest.raises(PoolArgumentError, match="put: the key 'k' is stored with 2 rows and wanted with 3"):
        store.put("k", rows_of(3))
    assert len(store.get("k").main) == 2


def test_calls_that_are_wrong_are_errors() -> None:
    store = RowStore(1000)
    store.put("k", rows_of(1))
    for key in ("k", "other"):
        with pytest.raises(PoolStateError, match=f"unpin: the key '{key}' isn't pinned; call unpin once"):
            store.unpin(key)
    for call in (
        store.get,
        store.pin,
        store.unpin,
        lambda key: store.put(key, rows_of(1)),
        lambda key: key in store,
    ):
        with pytest.raises(PoolArgumentError, match="a key must be hashable, got list"):
            call([1])
    for bound in (0, -1, 1.5, True, None):
        with pytest.raises(PoolArgumentError, match="max_bytes must be an integer of at least 1"):
            RowStore(bound)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_can_not_be_copied(again: object) -> None:
    with pytest.raises(PoolCopyError, match="a RowStore can't be copied or pickled"):
        again(RowStore(1))


def test_a_stream_waits_for_rows_that_another_put_and_a_capture_can_not() -> None:
    store, device = RowStore(1000), PretendedDevice(random.Random(0))
    store._clocks[torch.device("cpu")] = device
    store.put("k", rows_of(1))
    store.get("k")
    assert device.waits == 0
    device.current = "b"
    store.get("k")
    assert device.waits == 1
    device.captured.add("b")
    before = store.stats()
    for call in (lambda: store.get("k"), lambda: store.put("l", rows_of(1))):
        with pytest.raises(PoolCaptureError, match="can't run inside a CUDA-graph capture"):
            call()
    assert store.stats() == before
    device.captured.clear()
    assert store.get("k") is not None
