"""Where the rows of a batch's ranges lie: what is asked, what is answered, and the answer where each item has a tensor.

Promises: no row is moved or joined but to another device; only rows that are used are named.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.items import MultimodalDataItem
from mmgraph.ops import RowMap
from mmgraph.planning import EncodePlan
from mmgraph.staging import FeatureMover

Used = Mapping[MultimodalDataItem, tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of some ranges of a plan lie.

    Attributes:
        parts: Matrices that hold the rows; as one, one after another.
        row_map: For each row of the batch its row in the parts, or none.
        used: Where each item has a part of its own, the first and last of its rows that the part holds.
    """

    parts: list[torch.Tensor]
    row_map: RowMap
    used: Used = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Rows that are to be laid out.

    Attributes:
        plan: A plan whose items are all there.
        chosen: Which of its ranges.
        num_rows: Rows of the batch.
        columns: First column and last + 1 of main and deepstack rows side by side: from 0 the main rows, from further
            on the deepstack rows.
        device: Where the rows must be.
        mover: Brings rows that are elsewhere.
        known: The layout of the same ranges for other columns, whose map serves again.
    """

    plan: EncodePlan
    chosen: npt.NDArray[np.bool_]
    num_rows: int
    columns: tuple[int, int]
    device: torch.device
    mover: FeatureMover
    known: Layout | None = None

    @property
    def is_deep(self) -> bool:
        """Whether these are deepstack rows."""
        return self.columns[0] > 0

    @property
    def items(self) -> list[MultimodalDataItem]:
        """The canonical item of each chosen range."""
        return list(itertools.compress(self.plan.range_items, self.chosen.tolist()))

    def row_map(self, sources: npt.NDArray[np.int64], rows: int) -> RowMap:
        """Make the map of the chosen ranges from their first rows among so many."""
        plan, chosen = self.plan, self.chosen
        return RowMap.from_ranges(
            self.num_rows, plan.dst_start[chosen], plan.dst_end[chosen], sources, pool_rows=rows
        )


def listed_layout(wanted: Wanted, rows_of: Callable[[MultimodalDataItem], torch.Tensor]) -> Layout:
    """Lay out ranges over a tensor for each item.

    Args:
        wanted: The ranges.
        rows_of: Gives an item's rows.
    """
    known = wanted.known
    used = _used_rows(wanted) if known is None else known.used
    parts = []
    for item, (low, high) in used.items():
        rows = rows_of(item)
        parts.append(rows if high - low + 1 == rows.shape[0] else rows[low : high + 1])
    moved = wanted.mover.move(parts, wanted.device)
    if known is not None:
        return Layout(moved, known.row_map, used)
    places: dict[MultimodalDataItem, int] = {}
    total = 0
    for item, (low, high) in used.items():
        places[item] = total - low
        total += high - low + 1
    shifts = np.array([places[item] for item in wanted.items], dtype=np.int64)
    return Layout(moved, wanted.row_map(wanted.plan.src_start[wanted.chosen] + shifts, total), used)


def _used_rows(wanted: Wanted) -> Used:
    """Give, for each item in first-touch order, the first and last of its rows that the ranges touch."""
    plan, chosen = wanted.plan, wanted.chosen
    firsts = plan.src_start[chosen]
    lasts = firsts + (plan.dst_end[chosen] - plan.dst_start[chosen])
    used: dict[MultimodalDataItem, tuple[int, int]] = {}
    for item, first, last in zip(wanted.items, firsts.tolist(), lasts.tolist(), strict=True):
        low, high = used.get(item, (first, last))
        used[item] = min(low, first), max(high, last)
    return used
