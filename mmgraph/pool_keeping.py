"""The embedder's rows in an `EncoderPool`.

Promises: rows are found by modality and hash, across requests, chunks and batches, and only if they have the columns
that are asked for; what a batch uses is held from its plan to the launch that reads it; no row beyond an item's own is
read.
"""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.errors import MultimodalError, PoolArgumentError, PoolFullError, RowsError
from mmgraph.items import MultimodalDataItem, describe_item
from mmgraph.keeping import checked_items, levels_by_modality, request_error
from mmgraph.layouts import Layout, Wanted
from mmgraph.modality import Modality
from mmgraph.ops import RowMap
from mmgraph.planning import EncodePlan
from mmgraph.pool import EncoderPool
from mmgraph.pool_lease import PoolLease
from mmgraph.pool_places import Places
from mmgraph.staging import FeatureMover
from mmgraph.stored_rows import Spent, StoredKeeper, Unshared, own_rows

# By item without a hash: the pools that drop its key with it.
_dropping: weakref.WeakKeyDictionary[MultimodalDataItem, "weakref.WeakSet[EncoderPool]"] = (
    weakref.WeakKeyDictionary()
)


class PoolKeeper(StoredKeeper):
    """One batch's rows in a pool: a lease.

    Args:
        pool: The pool.
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items that were encoded, with the features that they keep, or None.
        mover: Brings precomputed rows to the pool's device.
    """

    def __init__(
        self,
        pool: EncoderPool,
        keeps_features: bool,
        spent: Spent,
        mover: FeatureMover,
    ) -> None:
        super().__init__(keeps_features, spent)
        self.pool = pool
        self.lease = PoolLease(pool, quiet=True)  # a plan may be given up
        self._mover = mover
        self._there: set[MultimodalDataItem] = set()
        self._reserved: set[Hashable] = set()

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Hold what is stored."""
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in plan.items:
            if item in self._there:
                continue
            if item.share_key is None and self.has_new_feature(item):
                self.pool.drop(self.key(item))
            try:
                if self.lease.pin(self.key(item), item.num_tokens):
                    self._there.add(item)
            except PoolArgumentError as error:
                failures[item] = request_error(plan, item, error)
        return failures

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Hold what is stored and fits; store rows that items bring along."""
        failures = self.find(plan)
        if width is None:
            return failures
        levels = levels_by_modality(specs, model, plan.items)
        most = max(levels.values(), default=0)
        if self.pool.width < width * (1 + most):
            raise PoolArgumentError(
                f"the pool is {self.pool.width} wide and rows are {width * (1 + most)}: {width} and as many for each "
                f"of {most} deepstack levels; make a wider pool"
            )
        for item in plan.items:
            if item in self._there and not self._fits(item, width, levels[item.modality]):
                self._misfits[item] = f"{list(self.lease.columns(self.key(item)))} columns wide"
                self.pool.drop(self.key(item))
                self.lease.give_up([self.key(item)])
                self._there.discard(item)
        for item in plan.items:
            source = None if item in self._there or item in failures else own_rows(plan, item)
            if source is None:
                continue
            unfit = checked_items(plan, [source], levels, width)
            wrong = {item: unfit[source]} if unfit else self.reserve(plan, [item], isolate=True)
            if not wrong:
                try:
                    self.keep(
                        [item], source.encoded, source.encoded_deepstack if levels[item.modality] else None
                    )
                except MultimodalError as error:
                    wrong = {item: request_error(plan, item, error)}
                    self.cancel()
            failures |= wrong
        return failures

    def _fits(self, item: MultimodalDataItem, width: int, levels: int) -> bool:
        columns = self.lease.columns(self.key(item))
        return columns[:1] == (width,) and (not levels or columns[1:] == (width * levels,))

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether the lease holds an item's rows."""
        return item in self._there

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Take room in the pool for all items, or with ``isolate`` for as many as find some, in order."""
        wanted = {self.key(item): item.num_tokens for item in items}
        if not wanted:
            return {}
        try:
            self.lease.reserve(wanted)
        except PoolFullError as error:
            requests = sorted({request for item in items for request in plan.requests_of(item)})
            full = PoolFullError(
                f"requests {requests}: {error}. Pinned are rows of batches under way and of unfinished requests",
                request=requests[0] if len(requests) == 1 else None,
            )
            if not isolate:
                raise full from error
            if len(items) == 1:
                return {items[0]: full}
        else:
            self._reserved.update(wanted)
            return {}
        failures: dict[MultimodalDataItem, MultimodalError] = {}
        for item in items:
            failures |= self.reserve(plan, [item], isolate=True)
        return failures

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> torch.Tensor | None:
        """Give the places themselves, where they lie one after another."""
        view = self.lease.view([self.key(item) for item in items])
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
        if any(part is not None and part.requires_grad for part in (rows, deep)):
            raise PoolArgumentError(
                f"rows of {len(items)} {items[0].modality.name} items need a gradient, and rows in a pool have none; "
                "call the embedder under torch.inference_mode() or torch.no_grad()"
            )
        keys = [self.key(item) for item in items]
        if written:
            self.lease.commit(keys, rows.shape[1])
        else:
            self.lease.fill(keys, *self._mover.move([rows] if deep is None else [rows, deep], self.pool.device))
        self._reserved.difference_update(keys)
        self._there.update(items)
        for item, key in zip(items, keys, strict=True):
            if isinstance(key, Unshared) and self.pool not in _dropping.setdefault(item, weakref.WeakSet()):
                _dropping[item].add(self.pool)
                weakref.finalize(item, _drop, weakref.ref(self.pool), key).atexit = False

    def cancel(self) -> None:
        """Give up room that nothing was kept in."""
        if self._reserved:
            self.lease.give_up(self._reserved)
            self._reserved.clear()

    def check(self, plan: EncodePlan, item: MultimodalDataItem, width: int, levels: int) -> None:
        """Raise RowsError unless an item's rows are there and have the columns that are asked for."""
        if not self.has(item):
            raise self.missing_error(plan, item)
        if not self._fits(item, width, levels):
            request = plan.request_of(item)
            raise RowsError(
                f"{describe_item(item, request=request)}: its rows in the pool are "
                f"{list(self.lease.columns(self.key(item)))} columns wide, main and deepstack, not {width} with "
                f"{levels} deepstack levels; encode the plan with the same encoders and width",
                request=request,
            )

    def layout(self, wanted: Wanted) -> Layout:
        """Lay out the pool itself: no row is moved."""
        parts = [self.pool.tensor[:, slice(*wanted.columns)]]
        if wanted.known is not None:
            return Layout(parts, wanted.known.row_map)
        plan, items = wanted.plan, wanted.items
        places = {item: self.lease.places(self.key(item)) for item in dict.fromkeys(items)}
        self._check_room(wanted, items, places)
        sources = plan.src_start[wanted.chosen]
        if all(len(place.starts) == 1 for place in places.values()):
            first = {item: int(place.starts[0]) for item, place in places.items()}
            shifts = np.array([first[item] for item in items], dtype=np.int64)
            return Layout(parts, wanted.row_map(sources + shifts, self.pool.rows))
        table = _cut_at_runs(wanted, items, places)
        row_map = RowMap.from_ranges(wanted.num_rows, *table, pool_rows=self.pool.rows)
        return Layout(parts, row_map)

    @staticmethod
    def _check_room(
        wanted: Wanted, items: Sequence[MultimodalDataItem], places: Mapping[MultimodalDataItem, Places]
    ) -> None:
        plan, chosen = wanted.plan, wanted.chosen
        rows = {item: place.rows for item, place in places.items()}
        last = plan.src_start[chosen] + (plan.dst_end[chosen] - plan.dst_start[chosen])
        beyond = last >= np.array([rows[item] for item in items], dtype=np.int64)
        if beyond.any():
            item = items[int(np.argmax(beyond))]
            raise RowsError(
                f"{describe_item(item)} has {rows[item]} rows in the pool and the plan uses more; plan again, since "
                "its offsets were changed",
                request=plan.request_of(item),
            )

    def hold(self, item: MultimodalDataItem) -> PoolLease | None:
        """Hold an item's rows with a lease of its own, which ends when it is lost, too."""
        lease = PoolLease(self.pool, quiet=True)
        return lease if lease.pin(self.key(item), item.num_tokens, count=False) else None

    def release(self) -> None:
        """Release the lease."""
        self.released = True
        self.lease.release()


def _drop(pool: "weakref.ref[EncoderPool]", key: Hashable) -> None:
    there = pool()
    if there is not None:
        there.drop(key)


def _cut_at_runs(
    wanted: Wanted, items: Sequence[MultimodalDataItem], places: Mapping[MultimodalDataItem, Places]
) -> npt.NDArray[np.int64]:
    """Cut ranges where their items' rows go on in another run; give first rows, last rows and places, ``[3, n]``."""
    plan, chosen = wanted.plan, wanted.chosen
    ranges = (plan.dst_start[chosen], plan.dst_end[chosen], plan.src_start[chosen])
    cut: list[tuple[int, int, int]] = []
    for begin, end, source, item in zip(*(column.tolist() for column in ranges), items, strict=True):
        for start, count in zip(places[item].starts.tolist(), places[item].counts.tolist(), strict=True):
            rows = min(count - source, end - begin + 1)
            if rows > 0:
                cut.append((begin, begin + rows - 1, start + source))
                begin += rows
            source = max(0, source - count)
    return np.array(cut, dtype=np.int64).reshape(-1, 3).T
