"""The embedder's rows in an `EncoderPool`, or in a cache that stands in its place.

Promises: rows are found by modality and hash, across requests, chunks and batches; what a batch uses is held from its
plan to the launch that reads it; an item that was evicted is encoded anew from its feature, or is an error that names
it. An item that is never shared has a key of its own, which is dropped with it.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.errors import (
    EvictedError,
    MissingFeatureError,
    MultimodalError,
    PoolArgumentError,
    PoolFullError,
    RowsError,
)
from mmgraph.items import MultimodalDataItem, describe_item
from mmgraph.keeping import (
    Layout,
    checked_items,
    levels_of,
    listed_layout,
    no_feature_error,
    request_error,
)
from mmgraph.modality import Modality
from mmgraph.ops import RowMap
from mmgraph.planning import EncodePlan
from mmgraph.pool import EncoderPool
from mmgraph.pool_lease import PoolLease
from mmgraph.row_cache import RowCache, Rows
from mmgraph.rows import cut_rows
from mmgraph.staging import FeatureMover


class _Unshared:
    """The key of an item that is never shared."""

    __slots__ = ("__weakref__",)


_unshared: weakref.WeakKeyDictionary[MultimodalDataItem, _Unshared] = weakref.WeakKeyDictionary()


def key_of(item: MultimodalDataItem) -> Hashable:
    """Give the key of an item's rows in a pool or cache: its modality and hash; without a hash one of its own."""
    if item.share_key is not None:
        return item.share_key
    return _unshared.setdefault(item, _Unshared())


class _StoredKeeper:
    """What the keepers of a pool and of a cache share.

    Args:
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items whose features were dropped when they were encoded.
    """

    def __init__(self, keeps_features: bool, spent: "weakref.WeakSet[MultimodalDataItem]") -> None:
        self.keeps_features = keeps_features
        self._spent = spent

    def has(self, item: MultimodalDataItem) -> bool:
        raise NotImplementedError

    def no_feature(self, plan: EncodePlan, item: MultimodalDataItem) -> MissingFeatureError:
        """Make the error of an item without a feature; one that was encoded before has been evicted."""
        if item not in self._spent:
            return no_feature_error(plan, item)
        request = plan.request_of(item)
        return EvictedError(
            f"{describe_item(item, request=request)} was encoded before, its rows were evicted since, and its feature "
            "was dropped then; give the item its feature again, make an embedder with keep_features=True, or a "
            "larger pool",
            request=request,
        )

    def share(self, plan: EncodePlan) -> int:
        """Count the twins of items that are there: they have the items' keys."""
        return sum(len(twins) for item, twins in plan.aliases_by_canonical.items() if self.has(item))

    def dropped(self, item: MultimodalDataItem) -> None:
        """Remember an item whose feature was dropped."""
        self._spent.add(item)

    def check(self, plan: EncodePlan, item: MultimodalDataItem, width: int, levels: int) -> None:
        """Raise RowsError unless an item's rows are there; what fits was checked when they were found or kept."""
        if not self.has(item):
            request = plan.request_of(item)
            raise RowsError(
                f"{describe_item(item, request=request)} has no rows in the pool that this batch holds; encode the "
                "plan first",
                request=request,
            )


class PoolKeeper(_StoredKeeper):
    """One batch's rows in a pool: a lease.

    Args:
        pool: The pool.
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items whose features were dropped when they were encoded.
        mover: Brings precomputed rows to the pool's device.
    """

    def __init__(
        self,
        pool: EncoderPool,
        keeps_features: bool,
        spent: "weakref.WeakSet[MultimodalDataItem]",
        mover: FeatureMover,
    ) -> None:
        super().__init__(keeps_features, spent)
        self.pool = pool
        self.lease = PoolLease(pool, quiet=True)  # a plan may be given up
        self._mover = mover
        self._there: set[MultimodalDataItem] = set()

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Hold what is stored."""
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in plan.items:
            try:
                if item not in self._there and self.lease.pin(key_of(item), item.num_tokens):
                    self._there.add(item)
            except PoolArgumentError as error:
                failures[item] = request_error(plan, item, error)
        return failures

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Hold what is stored; store rows that items bring along."""
        if width is not None:
            levels = max((levels_of(specs, model, item.modality) for item in plan.items), default=0)
            if self.pool.width < width * (1 + levels):
                raise PoolArgumentError(
                    f"the pool is {self.pool.width} wide and rows are {width * (1 + levels)}: {width} and as many for "
                    f"each of {levels} deepstack levels; make a wider pool"
                )
        failures = self.find(plan)
        own = [
            item
            for item in plan.items
            if item.encoded is not None and item not in self._there and item not in failures
        ]
        failures |= checked_items(plan, own, specs, model, width)
        for item in own:
            if item not in failures:
                failures |= self.reserve(plan, [item], isolate=True)
            if item not in failures:
                rows, deep = item.encoded, item.encoded_deepstack
                levels = levels_of(specs, model, item.modality)
                self.keep([item], rows, deep if levels else None)
        return failures

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether the lease holds an item's rows."""
        return item in self._there

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Take room in the pool for all items, or with ``isolate`` for as many as find some, in order."""
        wanted = {key_of(item): item.num_tokens for item in items}
        if not wanted:
            return {}
        try:
            self.lease.reserve(wanted)
        except PoolFullError as error:
            if not isolate:
                raise PoolFullError(str(error), request=self._sole(plan, items)) from error
            if len(items) == 1:
                return {items[0]: request_error(plan, items[0], error)}
        else:
            return {}
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in items:
            failures |= self.reserve(plan, [item], isolate=True)
        return failures

    @staticmethod
    def _sole(plan: EncodePlan, items: Sequence[MultimodalDataItem]) -> int | None:
        requests = {request for item in items for request in plan.requests_of(item)}
        return requests.pop() if len(requests) == 1 else None

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> torch.Tensor | None:
        """Give the places themselves, where they lie one after another."""
        view = self.lease.view([key_of(item) for item in items])
        return None if view is None or width is None else view[:, :width]

    def keep(
        self,
        items: Sequence[MultimodalDataItem],
        rows: torch.Tensor,
        deep: torch.Tensor | None,
        *,
        written: bool = False,
    ) -> None:
        """Copy rows to their places, one launch and one more for deepstack rows; none where they were written there."""
        keys = [key_of(item) for item in items]
        if written:
            self.lease.commit(keys)
        else:
            self.lease.fill(keys, *self._mover.move([rows] if deep is None else [rows, deep], self.pool.device))
        for item, key in zip(items, keys, strict=True):
            if isinstance(key, _Unshared):
                weakref.finalize(item, _drop, weakref.ref(self.pool), key).atexit = False
        self._there.update(items)

    def layout(
        self,
        plan: EncodePlan,
        chosen: npt.NDArray[np.bool_],
        num_rows: int,
        columns: tuple[int, int],
        device: torch.device,
        mover: FeatureMover,
        known: RowMap | None = None,
    ) -> Layout:
        """Lay out the pool itself: no row is moved."""
        if self.pool.device != device:
            raise PoolArgumentError(
                f"input_ids are on {device} and the pool on {self.pool.device}; they must be on one device"
            )
        parts = [self.pool.tensor[:, slice(*columns)]]
        if known is not None:
            return Layout(parts, known)
        items = list(itertools.compress(plan.range_items, chosen.tolist()))
        first = {item: self.lease.places(key_of(item)) for item in dict.fromkeys(items)}
        whole = {item: len(places.starts) == 1 for item, places in first.items()}
        dst_start, dst_end, src_start = plan.dst_start[chosen], plan.dst_end[chosen], plan.src_start[chosen]
        if all(whole.values()):
            begins = np.array([int(first[item].starts[0]) for item in items], dtype=np.int64)
            ranges = dst_start, dst_end, src_start + begins
        else:
            cut: list[tuple[int, int, int]] = []
            for begin, end, source, item in zip(
                dst_start.tolist(), dst_end.tolist(), src_start.tolist(), items, strict=True
            ):
                places = first[item]
                for start, count in zip(places.starts.tolist(), places.counts.tolist(), strict=True):
                    if begin > end:
                        break
                    if source < count:
                        rows = min(count - source, end - begin + 1)
                        cut.append((begin, begin + rows - 1, start + source))
                        begin, source = begin + rows, 0
                    else:
                        source -= count
            table = np.array(cut, dtype=np.int64).reshape(-1, 3)
            ranges = table[:, 0], table[:, 1], table[:, 2]
        row_map = RowMap.from_ranges(num_rows, *ranges, pool_rows=self.pool.rows)
        return Layout(parts, row_map)

    def hold(self, item: MultimodalDataItem) -> Callable[[], None] | None:
        """Hold an item's rows with a lease of its own."""
        lease = PoolLease(self.pool, quiet=True)
        lease.pin(key_of(item), item.num_tokens)
        return lease.release

    def release(self) -> None:
        """Release the lease."""
        self.lease.release()


def _drop(pool: "weakref.ref[EncoderPool]", key: Hashable) -> None:
    there = pool()
    if there is not None:
        there.drop(key)


class CacheKeeper(_StoredKeeper):
    """One batch's rows in an external cache: what is fetched and pinned, and what is put.

    Args:
        cache: The cache.
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items whose features were dropped when they were encoded.
    """

    def __init__(
        self, cache: RowCache, keeps_features: bool, spent: "weakref.WeakSet[MultimodalDataItem]"
    ) -> None:
        super().__init__(keeps_features, spent)
        self.cache = cache
        self._rows: dict[MultimodalDataItem, Rows] = {}
        self._pinned: list[Hashable] = []

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Pin and fetch what is stored."""
        for item in plan.items:
            key = key_of(item)
            if item not in self._rows and self.cache.pin(key):
                self._pinned.append(key)
                found = self.cache.get(key)
                if found is not None:
                    self._rows[item] = found
        return {}

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Fetch what is stored; take rows that items bring along."""
        failures = self.find(plan)
        for item in plan.items:
            found = self._rows.get(item)
            if found is None:
                if item.encoded is not None:
                    failures |= checked_items(plan, [item], specs, model, width)
                    self._rows[item] = Rows(item.encoded, item.encoded_deepstack)
                continue
            levels = levels_of(specs, model, item.modality)
            wrong = _misfit(found, item.num_tokens, width, levels)
            if wrong:
                failures[item] = request_error(
                    plan,
                    item,
                    RowsError(
                        f"{describe_item(item)}: the cache gave {wrong}; correct the cache or the item's hash"
                    ),
                )
        return failures

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows were fetched or encoded."""
        return item in self._rows

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Do nothing: a cache that has no room declines to keep rows."""
        return {}

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> None:
        """Give none: each item's rows have memory of their own."""

    def keep(
        self,
        items: Sequence[MultimodalDataItem],
        rows: torch.Tensor,
        deep: torch.Tensor | None,
        *,
        written: bool = False,
    ) -> None:
        """Put each item's rows, in memory of their own; the batch has them also where the cache declines."""
        counts = [item.num_tokens for item in items]
        deep_parts = [None] * len(items) if deep is None else cut_rows(deep, counts)
        for item, part, deep_part in zip(items, cut_rows(rows, counts), deep_parts, strict=True):
            self._rows[item] = Rows(part, deep_part)
            key = key_of(item)
            self.cache.put(key, self._rows[item])
            if self.cache.pin(key):
                self._pinned.append(key)

    def layout(
        self,
        plan: EncodePlan,
        chosen: npt.NDArray[np.bool_],
        num_rows: int,
        columns: tuple[int, int],
        device: torch.device,
        mover: FeatureMover,
        known: RowMap | None = None,
    ) -> Layout:
        """Lay out the tensors of the cache."""

        def rows_of(item: MultimodalDataItem) -> torch.Tensor:
            rows = self._rows[item]
            return rows.main if not columns[0] or rows.deepstack is None else rows.deepstack

        return listed_layout(plan, chosen, num_rows, rows_of, device, mover, known)

    def hold(self, item: MultimodalDataItem) -> Callable[[], None] | None:
        """Pin an item once more."""
        key = key_of(item)
        return (lambda: self.cache.unpin(key)) if self.cache.pin(key) else None

    def release(self) -> None:
        """Take the batch's pins back."""
        while self._pinned:
            self.cache.unpin(self._pinned.pop())
        self._rows.clear()


def _misfit(rows: Any, tokens: int, width: int | None, levels: int) -> str:
    """Say what is wrong with rows from a cache; nothing if they fit."""
    if not isinstance(rows, Rows):
        return f"{type(rows).__name__} in place of mmgraph.row_cache.Rows"
    main, deep = rows.main, rows.deepstack
    width = main.shape[-1] if width is None else width
    if list(main.shape) != [tokens, width]:
        return f"rows {list(main.shape)} for [{tokens}, {width}]"
    if levels and (deep is None or list(deep.shape) != [tokens, width * levels]):
        return f"deepstack rows {None if deep is None else list(deep.shape)} for [{tokens}, {width * levels}]"
    return ""
