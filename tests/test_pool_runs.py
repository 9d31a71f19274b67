"""Invariant: page runs never overlap, none is lost, and an allocation succeeds exactly when enough pages are free."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.pool_runs import PageRuns, Run


class Bitmap:
    """The plain model: a page is free or it isn't."""

    def __init__(self, pages: int) -> None:
        self.used = np.zeros(pages, dtype=np.bool_)

    def take(self, run: Run) -> None:
        assert 0 <= run.start < run.end <= len(self.used)
        assert not self.used[run.start : run.end].any()
        self.used[run.start : run.end] = True

    def free(self, run: Run) -> None:
        assert self.used[run.start : run.end].all()
        self.used[run.start : run.end] = False

    def runs(self) -> list[Run]:
        found, start = [], 0
        for used, group in itertools.groupby(self.used.tolist()):
            pages = len(list(group))
            if not used:
                found.append(Run(start, pages))
            start += pages
        return found


def fewest(pages: int, free: list[Run]) -> int:
    """How many runs it takes, longest first."""
    lengths = sorted((run.pages for run in free), reverse=True)
    return next(count for count in range(1, len(lengths) + 1) if sum(lengths[:count]) >= pages)


@given(st.integers(1, 60), st.data())
def test_against_a_bitmap(pages: int, data: st.DataObject) -> None:
    runs, model = PageRuns(pages), Bitmap(pages)
    held: list[tuple[Run, ...]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            gone = held.pop(data.draw(st.integers(0, len(held) - 1)))
            runs.free(gone)
            for run in gone:
                model.free(run)
        else:
            counts = data.draw(st.lists(st.integers(1, max(1, pages // 3)), min_size=1, max_size=4))
            before = model.runs()
            taken = runs.take(counts)
            assert (taken is not None) == (sum(counts) <= sum(run.pages for run in before))
            if taken is not None:
                for count, mine in zip(counts, taken, strict=True):
                    assert sum(run.pages for run in mine) == count
                    assert list(mine) == sorted(mine)
                    for run in mine:
                        model.take(run)
                check_choice(counts, taken, before)
                held += taken
        assert list(runs) == model.runs()
        assert runs.free_pages == int((~model.used).sum())
        assert runs.largest == max((run.pages for run in model.runs()), default=0)
    for gone in held:
        runs.free(gone)
    assert list(runs) == [Run(0, pages)]


def check_choice(counts: list[int], taken: list[tuple[Run, ...]], before: list[Run]) -> None:
    fitting = [run.pages for run in before if run.pages >= sum(counts)]
    if fitting:  # one after another at the front of the shortest run that holds them all
        whole = next(run for run in before if run.start == taken[0][0].start)
        assert whole.pages == min(fitting)
        ends = itertools.accumulate(counts, initial=whole.start)
        assert taken == [(Run(start, count),) for start, count in zip(ends, counts, strict=False)]
    elif len(counts) == 1:
        assert len(taken[0]) == fewest(counts[0], before)
    else:
        most = counts.index(max(counts))
        assert len(taken[most]) == fewest(counts[most], before)


def scattered(pages: int) -> PageRuns:
    """Every other page is free."""
    runs = PageRuns(pages)
    runs.take([pages])
    runs.free(Run(page, 1) for page in range(0, pages, 2))
    return runs


def test_the_worst_fragmentation_hinders_nothing() -> None:
    runs = scattered(64)
    assert runs.largest == 1
    assert runs.take([33]) is None
    assert runs.take([20, 12]) is not None
    assert runs.free_pages == 0
    assert runs.take([1]) is None


def test_items_with_the_most_pages_are_split_last() -> None:
    runs = PageRuns(12)
    runs.take([12])
    runs.free([Run(0, 3), Run(6, 4)])
    assert runs.take([2, 2, 3]) == [(Run(6, 2),), (Run(8, 2),), (Run(0, 3),)]


def test_nothing_for_nobody() -> None:
    runs = PageRuns(3)
    assert runs.take([]) == []
    assert list(runs) == [Run(0, 3)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freed_runs_join_their_neighbours(order: tuple[int, ...]) -> None:
    runs = PageRuns(6)
    taken = runs.take([1, 2, 3])
    assert taken is not None
    for index in order:
        runs.free(taken[index])
    assert list(runs) == [Run(0, 6)]
