"""Invariant: a pool does what a plain model of it does, whatever sequence of calls it gets.

The model knows which items can be found, in which order they go, who holds what, and how many pages everything takes.
It has no addresses: that rows lie where nobody else's lie is seen in the tensor itself.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmgraph.errors import PoolFullError
from mmgraph.pool import EncoderPool, PoolLease

PAGES, PAGE_ROWS, WIDTH = 8, 2, 3
KEYS = st.integers(0, 5)
ROWS = st.integers(1, 7)


class Item:
    """A stored item or a reservation of the model."""

    def __init__(self, key: int, rows: int) -> None:
        self.key = key
        self.rows = rows
        self.pages = -(-rows // PAGE_ROWS)
        self.value: float | None = None
        self.holders = 1


class Model:
    def __init__(self) -> None:
        self.stored: dict[int, Item] = {}  # least recently used first
        self.held: list[dict[int, Item]] = []

    def touch(self, item: Item) -> None:
        if self.stored.get(item.key) is item:
            del self.stored[item.key]
            self.stored[item.key] = item

    def pages(self) -> int:
        alive = {id(item): item for lease in self.held for item in lease.values()}
        alive |= {id(item): item for item in self.stored.values()}
        return sum(item.pages for item in alive.values())

    def room(self, pages: int) -> bool:
        """Evict until the pages are free, if that can be."""
        idle = [item for item in self.stored.values() if not item.holders]
        free = PAGES - self.pages()
        if free + sum(item.pages for item in idle) < pages:
            return False
        while free < pages:
            free += idle[0].pages
            del self.stored[idle.pop(0).key]
        return True


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = EncoderPool(PAGES * PAGE_ROWS, WIDTH, dtype=torch.float32, page_rows=PAGE_ROWS)
        self.model = Model()
        self.leases: list[PoolLease] = []
        self.values = itertools.count(1)

    def choose(self, data: st.DataObject) -> tuple[PoolLease, dict[int, Item]]:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        return self.leases[index], self.model.held[index]

    @precondition(lambda self: len(self.leases) < 4)
    @rule()
    def open(self) -> None:
        self.leases.append(self.pool.lease())
        self.model.held.append({})

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), key=KEYS, rows=ROWS)
    def pin(self, data: st.DataObject, key: int, rows: int) -> None:
        lease, held = self.choose(data)
        if key in held:
            return
        item = self.model.stored.get(key)
        rows = item.rows if item is not None else rows
        assert lease.pin(key, rows) == (item is not None)
        if item is not None:
            held[key] = item
            item.holders += 1
            self.model.touch(item)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wanted=st.dictionaries(KEYS, ROWS, max_size=3))
    def reserve(self, data: st.DataObject, wanted: dict[int, int]) -> None:
        lease, held = self.choose(data)
        items = [Item(key, rows) for key, rows in wanted.items() if key not in held]
        call = {item.key: item.rows for item in items}
        if self.model.room(sum(item.pages for item in items)):
            lease.reserve(call)
            held.update((item.key, item) for item in items)
        else:
            with pytest.raises(PoolFullError):
                lease.reserve(call)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), by_view=st.booleans())
    def fill(self, data: st.DataObject, by_view: bool) -> None:
        lease, held = self.choose(data)
        stored = self.model.stored
        # Other counts under one key are errors, which have tests of their own.
        items = [item for item in held.values() if item.value is None]
        items = [item for item in items if item.key not in stored or stored[item.key].rows == item.rows]
        items = data.draw(st.permutations(items)) if items else []
        if not items:
            return
        keys = [item.key for item in items]
        for item in items:
            item.value = float(next(self.values))
        rows = torch.cat([torch.full((item.rows, WIDTH), item.value) for item in items])
        view = lease.view(keys) if by_view else None
        if view is None:
            lease.fill(keys, rows)
        else:
            view.copy_(rows)
            lease.commit(keys)
        for item in items:
            first = stored.get(item.key)
            if first is None:
                stored[item.key] = item
            else:
                held[item.key] = first
                first.holders += 1
                self.model.touch(first)

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        self.pool.drop(key)
        self.model.stored.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.model.stored.clear()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        self.leases.pop(index).release()
        for item in self.model.held.pop(index).values():
            item.holders -= 1
            self.model.touch(item)

    @invariant()
    def counts_agree(self) -> None:
        stats = self.pool.stats()
        assert self.pool.keys() == list(self.model.stored)
        assert stats.items == len(self.pool) == len(self.model.stored)
        used = self.model.pages() * PAGE_ROWS
        assert (stats.rows_used, stats.rows_free) == (used, self.pool.rows - used)
        idle = sum(item.pages for item in self.model.stored.values() if not item.holders)
        assert stats.rows_pinned == used - idle * PAGE_ROWS
        assert stats.largest_run <= stats.rows_free

    @invariant()
    def rows_are_where_they_were_put(self) -> None:
        owner = np.full(self.pool.rows // PAGE_ROWS, -1)
        for lease, held in zip(self.leases, self.model.held, strict=True):
            for key, item in held.items():
                if item.value is not None:
                    index = lease.places(key).index()
                    assert len(set(index.tolist())) == item.rows
                    assert bool((self.pool.tensor[torch.from_numpy(index)] == item.value).all())
                    pages = np.unique(index // PAGE_ROWS)
                    assert np.isin(owner[pages], [-1, item.value]).all()
                    owner[pages] = item.value

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.pool.clear()
        stats = self.pool.stats()
        assert (stats.rows_free, stats.largest_run, stats.rows_padding) == (self.pool.rows, self.pool.rows, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40)
