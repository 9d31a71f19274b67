"""``Places``: which rows of a pool an item has.

Promises: a record of int64 arrays that are read-only; rows are in the item's order. Imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmgraph.pool_runs import Run


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where an item's rows lie in the pool: runs of rows, in the item's order.

    Attributes:
        starts: int64 ``[runs]``, the first row of each run.
        counts: int64 ``[runs]``, how many rows it has, each at least one.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return int(self.counts.sum())

    def index(self) -> npt.NDArray[np.int64]:
        """Give each row's place, int64 ``[rows]``."""
        before = np.cumsum(self.counts) - self.counts
        return np.repeat(self.starts - before, self.counts) + np.arange(self.rows, dtype=np.int64)


def places_of(runs: Sequence[Run], rows: int, page_rows: int) -> Places:
    """Turn runs of pages into runs of rows; rows of the last page that are too many are left out."""
    starts = np.array([run.start for run in runs], dtype=np.int64) * page_rows
    counts = np.array([run.pages for run in runs], dtype=np.int64) * page_rows
    counts[-1] -= counts.sum() - rows
    return _frozen(starts, counts)


def joined(parts: Iterable[Places]) -> Places:
    """Put places one after another, in as few runs as possible."""
    parts = list(parts)
    starts = np.concatenate([part.starts for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = starts[1:] != (starts + counts)[:-1]
    return _frozen(starts[first], np.add.reduceat(counts, np.flatnonzero(first)))


def _frozen(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Places:
    starts.setflags(write=False)
    counts.setflags(write=False)
    return Places(starts, counts)
