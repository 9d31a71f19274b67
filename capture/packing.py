"""Which items go together into which bucket, so that the buckets that are replayed cost least.

Up to seven items the packing is the cheapest of all. Beyond, every partition into runs of neighbours is weighed, in
several orders of the items, and then the packs with the most waste are packed anew, again in the best of all ways. So
no packing costs more than one bucket for each item, or one for all. The work grows with items times buckets.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buckets import Bucket
from .errors import BucketError
from .spec import Offsets, Rows, Signature

__all__ = ["Pack", "Packer", "summed_sizes"]

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

# How many plans a packer remembers.
_REMEMBERED = 1024

# Items of which every partition is weighed: 3^7 / 2 sums, a few tenths of a millisecond.
_EXACT = 7

# Buckets that first-fit fills. With one of them 64 items of mixed sizes cost 2% more, with four 0.2% less.
_FILLED = 2

# How often the most wasteful packs are packed anew, how many items these have, and of how many items at most: it helps
# where a few packs are all there is, and hardly ever among many.
_ROUNDS = 2
_AGAIN = 6
_FEW = 32


@dataclass(frozen=True)
class Pack:
    """Items that share one replay.

    Attributes:
        items: their positions, ascending.
        bucket: the cheapest that holds them; None for an item that none holds, which is then alone.
        cost: of one replay of the bucket, as given; 0 where there is none.
    """

    items: tuple[int, ...]
    bucket: Bucket | None
    cost: float


def summed_sizes(signature: Signature) -> frozenset[str]:
    """The sizes that add up over the items of a pack: those that rows or offsets have.

    Of the others, which are given by `bucket_size` alone, a pack has the largest of its items'.
    """
    return frozenset(leaf.spec.dim for leaf in signature.inputs if isinstance(leaf.spec, (Rows, Offsets)))


class Packer:
    """Packs items into some buckets.

    Args:
        buckets: the buckets, all of the same names, in the grid's order.
        costs: of one replay of each, zero or more. Where a bucket is given as cheaper than one that it holds, it is
            taken to cost as much: measured times are that inexact.
        summed: names of sizes that add up over a pack's items; of others the largest counts.
        within: as of `BucketGrid`: sizes that count as at most another.
        overhead: what each pack costs beside its replay, in the costs' unit. Of packings that cost the same, the one
            with fewer packs is taken.

    Raises:
        BucketError: no buckets, a cost or an overhead that isn't a finite number of zero or more.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        costs: Sequence[float],
        *,
        summed: Collection[str],
        within: Mapping[str, str] | None = None,
        overhead: float = 0.0,
    ) -> None:
        if not buckets or len(buckets) != len(costs):
            raise BucketError(
                f"packing needs buckets and one cost for each, got {len(buckets)} and {len(costs)}"
            )
        given = {f"the cost of {bucket}": cost for bucket, cost in zip(buckets, costs, strict=True)}
        for what, cost in {**given, "overhead": overhead}.items():
            if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost < math.inf:
                raise BucketError(f"{what} must be a finite number of zero or more, got {cost!r}")
        self.names: tuple[str, ...] = tuple(buckets[0])
        self.buckets = tuple(buckets)
        self._given = tuple(map(float, costs))
        self._caps: _Ints = np.array([[bucket[name] for name in self.names] for bucket in buckets], np.int64)
        self._summed = np.array([name in summed for name in self.names])
        self._within = {
            self.names.index(inner): self.names.index(outer) for inner, outer in (within or {}).items()
        }
        inside = (self._caps[None] <= self._caps[:, None]).all(-1)  # [i, j]: bucket i holds bucket j
        raised = np.where(inside, np.array(self._given), 0.0).max(1)
        # A hair's breadth a pack, so that of equals the one with fewer packs is cheaper.
        self._costs: _Floats = raised + (overhead + (raised.max() + overhead or 1.0) * 1e-9)
        self._largest: _Ints = np.maximum(self._caps.max(0), 1)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[tuple[Pack, dict[str, int]], ...]] = {}
        self._levels = [np.unique(caps, return_inverse=True) for caps in self._caps.T]

    def pack(self, sizes: Sequence[Sequence[int]]) -> tuple[Pack, ...]:
        """The packs, in the order of their first items; each item is in exactly one.

        Args:
            sizes: for each item its sizes, integers of zero or more in the order of `names`.
        """
        if not sizes:
            return ()
        every: _Ints = np.array(sizes, np.int64)
        best = self._cheapest(every)
        packs = [Pack((int(i),), None, 0.0) for i in np.flatnonzero(best < 0)]
        held = np.flatnonzero(best >= 0)
        if len(held) == 1:
            packs.append(self._pack(held, int(best[held[0]])))
        elif len(held):
            groups = self._search(every[held])
            chosen = self._cheapest(self._totals(every[held], groups)).tolist()
            packs += [self._pack(held[sorted(group)], b) for group, b in zip(groups, chosen, strict=True)]
        return tuple(sorted(packs, key=lambda pack: pack.items))

    def total(self, sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The sizes of a pack of items of these sizes, of which there is at least one."""
        return tuple(self._totals(np.array(sizes, np.int64), [range(len(sizes))])[0].tolist())

    def planned(self, sizes: tuple[tuple[int, ...], ...]) -> tuple[tuple[Pack, dict[str, int]], ...]:
        """As `pack`, with each pack's sizes by name; remembered, since calls with equal items are usual.

        Nobody writes to what is given.
        """
        known = self._known.get(sizes)
        if known is None:
            known = tuple(
                (pack, dict(zip(self.names, self.total([sizes[i] for i in pack.items]), strict=True)))
                for pack in self.pack(sizes)
            )
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[sizes] = known
        return known

    def _pack(self, items: _Ints, bucket: int) -> Pack:
        return Pack(tuple(items.tolist()), self.buckets[bucket], self._given[bucket])

    def _totals(self, sizes: _Ints, groups: Sequence[Sequence[int]]) -> _Ints:
        """The sizes of each group, `[groups, names]`; none is empty."""
        order = list(itertools.chain.from_iterable(groups))
        begins = list(itertools.accumulate(map(len, groups[:-1]), initial=0))
        lined = sizes[order]
        sums, most = np.add.reduceat(lined, begins), np.maximum.reduceat(lined, begins)
        result: _Ints = np.where(self._summed, sums, most)
        return result

    def _holds(self, totals: _Ints) -> NDArray[np.bool_]:
        """Which packs, `[packs, names]`, which buckets hold: `[packs, buckets]`."""
        fits: Any = totals[:, None, :] <= self._caps
        for inner, outer in self._within.items():
            fits[..., inner] |= totals[:, None, outer] <= self._caps[:, inner]
        result: NDArray[np.bool_] = fits.all(-1)
        return result

    def _least(self, totals: _Ints) -> _Floats:
        """What each pack costs, infinite where no bucket holds it."""
        costs: _Floats = np.where(self._holds(totals), self._costs, math.inf).min(1)
        return costs

    def _cheapest(self, totals: _Ints) -> _Ints:
        """The cheapest bucket of each pack, the first of equals; -1 where none holds it."""
        costs = np.where(self._holds(totals), self._costs, math.inf)
        best: _Ints = costs.argmin(1)
        best[np.isinf(costs.min(1))] = -1
        return best

    def _search(self, sizes: _Ints) -> list[list[int]]:
        """Groups of items, each of which some bucket holds."""
        if len(sizes) <= _EXACT:
            return self._exactly(sizes)
        groups = self._in_runs(sizes, self._orders(sizes))
        for _ in range(_ROUNDS if len(sizes) <= _FEW else 0):
            costs = self._least(self._totals(sizes, groups))
            again = self._most_wasteful(sizes, groups, costs)
            if len(again) < 2:
                break
            items = [item for index in again for item in groups[index]]
            anew = [[items[i] for i in group] for group in self._exactly(sizes[items])]
            if self._least(self._totals(sizes, anew)).sum() >= costs[again].sum():
                break
            groups = [group for index, group in enumerate(groups) if index not in again] + anew
        return groups

    def _exactly(self, sizes: _Ints) -> list[list[int]]:
        """The cheapest of all partitions of a few items."""
        count = len(sizes)
        members = _subsets(count)
        totals = np.where(self._summed, members @ sizes, (members[:, :, None] * sizes).max(1))
        cost = self._least(totals).tolist()
        least, last = [0.0] * len(cost), [0] * len(cost)
        for whole in range(1, len(cost)):
            first = whole & -whole  # the pack with the first item is one of these; the rest is known
            others = part = whole ^ first
            best = math.inf
            while True:
                found = cost[part | first] + least[others ^ part]
                if found < best:
                    best, last[whole] = found, part | first
                if not part:
                    break
                part = (part - 1) & others
            least[whole] = best
        groups, left = [], len(cost) - 1
        while left:
            groups.append([item for item in range(count) if last[left] >> item & 1])
            left ^= last[left]
        return groups

    def _in_runs(self, sizes: _Ints, orders: Sequence[_Ints]) -> list[list[int]]:
        """The cheapest partition into runs of neighbours in one of the orders."""
        count, rows = len(sizes), np.arange(len(orders))
        starts = np.stack([self._starts(sizes[order]) for order in orders], 1)  # [items, orders, buckets]
        ends = np.arange(1, count + 1)[:, None, None]
        # A bucket's run is as long as it can be: what stands before is only cheaper for it.
        costs = np.where(starts < ends, self._costs, math.inf)
        least = np.zeros((count + 1, len(orders)))
        places, flat = starts * len(orders) + rows[:, None], least.reshape(-1)
        for end in range(count):
            (costs[end] + flat[places[end]]).min(1, out=least[end + 1])
        row = int(least[count].argmin())
        order, groups, end = orders[row].tolist(), [], count
        while end:
            bucket = (costs[end - 1, row] + flat[places[end - 1, row]]).argmin()
            start = int(starts[end - 1, row, bucket])
            groups.append(order[start:end])
            end = start
        return groups

    def _starts(self, sizes: _Ints) -> _Ints:
        """For each item and bucket where the longest run that ends with the item and fits begins; behind it: none."""
        count = len(sizes)
        begins: _Ints = np.zeros((count, len(self.buckets)), np.int64)
        sums = np.zeros((count + 1, len(self.names)), np.int64)
        sizes.cumsum(0, out=sums[1:])
        after = np.arange(1, count + 1)[:, None]
        for name, (levels, which) in enumerate(self._levels):
            if self._summed[name]:
                begin = np.searchsorted(sums[:, name], sums[1:, name, None] - levels)
            else:
                begin = np.maximum.accumulate(np.where(sizes[:, name, None] > levels, after, 0))
                if name in self._within:
                    outer = sums[:, self._within[name]]
                    begin = np.minimum(begin, np.searchsorted(outer, outer[1:, None] - levels))
            np.maximum(begins, begin[:, which], out=begins)
        return begins

    def _orders(self, sizes: _Ints) -> list[_Ints]:
        """Orders in which neighbours go well together."""
        falling = np.argsort(-self._share(sizes), kind="stable")
        half = (len(falling) + 1) // 2
        between = np.empty_like(falling)  # the largest, the smallest, the second largest, ...
        between[0::2], between[1::2] = falling[:half], falling[: half - 1 : -1]
        # Falling order, and that of the sizes that don't add up, were never better than the best of these by 0.1%.
        orders = [between, *self._filled(sizes)]
        return list({order.tobytes(): order for order in orders}.values())

    def _filled(self, sizes: _Ints) -> list[_Ints]:
        """Orders in which some bucket is filled as well as may be, time and again."""
        fits = self._holds(sizes)
        room = (self._caps / np.maximum(sizes.sum(0), 1))[:, self._summed].min(1, initial=1.0)
        rate = self._costs / np.maximum(room, 1e-9)  # for the share of all items that it holds
        kinds = list(zip(room.tolist(), fits.sum(0).tolist(), strict=True))
        dense = list({kinds[b]: b for b in rate.argsort(kind="stable")[::-1].tolist()}.values())[::-1]
        orders = []
        for first in dense[:_FILLED]:
            order: list[int] = []
            left = np.ones(len(sizes), bool)
            for bucket in (first, *dense):  # the others take what is too large for the first
                taken = left & fits[:, bucket]
                if taken.any():
                    order += self._first_fit(sizes, bucket, np.flatnonzero(taken))
                    left ^= taken
            orders.append(np.array(order))
        return orders

    def _first_fit(self, sizes: _Ints, bucket: int, items: _Ints) -> list[int]:
        """The order in which first-fit-decreasing fills one bucket with items, time and again."""
        caps, loads = self._caps[bucket, self._summed], sizes[:, self._summed]
        if not len(caps):
            return list(map(int, items))
        scarce = int((loads[items].sum(0) / np.maximum(caps, 1)).argmax())
        order = items[np.argsort(-loads[items, scarce], kind="stable")].tolist()
        rows, least, room = loads.tolist(), loads.min(0).tolist(), caps.tolist()
        keys = [-rows[item][scarce] for item in order]
        filled = []
        # Bin by bin: each takes, from the largest on, whatever still fits, as first-fit would have given it.
        while order:
            left, at = room, 0
            while all(map(int.__le__, least, left)):
                at = max(at, bisect_left(keys, -left[scarce]))
                while at < len(order) and not all(map(int.__le__, rows[order[at]], left)):
                    at += 1
                if at == len(order):
                    break
                left = list(map(int.__sub__, left, rows[order[at]]))
                filled.append(order.pop(at))
                del keys[at]
        return filled

    def _share(self, sizes: _Ints) -> _Floats:
        """How much of the largest bucket each takes, by its scarcest size."""
        share: _Floats = (sizes / self._largest).max(1)
        return share

    def _most_wasteful(self, sizes: _Ints, groups: Sequence[Sequence[int]], costs: _Floats) -> list[int]:
        """The groups that hold least for their cost, as many as together have few items."""
        share = self._share(sizes).tolist()
        worth = [
            sum(share[i] for i in group) / cost for group, cost in zip(groups, costs.tolist(), strict=True)
        ]
        chosen, items = [], 0
        for index in sorted(range(len(groups)), key=worth.__getitem__):
            if items + len(groups[index]) <= _AGAIN:
                chosen.append(index)
                items += len(groups[index])
        return chosen


@functools.cache
def _subsets(count: int) -> _Ints:
    """All subsets of so many items, `[2^count, count]` of 0 and 1."""
    return np.arange(1 << count)[:, None] >> np.arange(count) & 1
