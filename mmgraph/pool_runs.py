"""Which pages of a pool are free, and which runs of them an allocation gets.

Promises: an allocation succeeds exactly when enough pages are free, however scattered they lie; it gets one run where
one is long enough (the shortest such run), else the fewest runs that do; a freed run joins its free neighbours. Imports
no torch; not for two threads at once.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Pages that lie one after another.

    Attributes:
        start: The first page.
        pages: How many, at least one.
    """

    start: int
    pages: int

    @property
    def end(self) -> int:
        """The page behind the last one."""
        return self.start + self.pages


class PageRuns:
    """The free pages of a pool, as runs.

    Args:
        pages: How many pages there are; all are free at first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = pages
        self._starts: list[int] = []  # ascending, of the free runs
        self._lengths: dict[int, int] = {}  # by start
        self._sizes: list[tuple[int, int]] = []  # (pages, start), ascending
        if pages:
            self._insert(Run(0, pages))

    @property
    def largest(self) -> int:
        """Pages of the longest free run."""
        return self._sizes[-1][0] if self._sizes else 0

    def __iter__(self) -> Iterator[Run]:
        """The free runs, by start."""
        return (Run(start, self._lengths[start]) for start in self._starts)

    def take(self, counts: Sequence[int]) -> list[tuple[Run, ...]] | None:
        """Allocate pages for several items at once, all or nothing.

        Where one run holds them all, they lie in it one after another, in order. Else each gets runs of its own,
        those with the most pages first, so that as few items as possible are split.

        Args:
            counts: Pages of each item, each at least one.

        Returns:
            Each item's runs, by start; None where fewer pages are free than wanted.
        """
        total = sum(counts)
        if total > self.free_pages:
            return None
        if total <= self.largest and counts:
            start = self._take_one(total).start
            ends = itertools.accumulate(counts, initial=start)
            return [(Run(first, count),) for first, count in zip(ends, counts, strict=False)]
        taken: list[tuple[Run, ...]] = [()] * len(counts)
        for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
            taken[index] = tuple(sorted(self._take_some(counts[index])))
        return taken

    def free(self, runs: Iterable[Run]) -> None:
        """Give back runs that were taken, whole or in parts."""
        for run in runs:
            self.free_pages += run.pages
            start, end = run.start, run.end
            index = bisect_left(self._starts, start)
            if index < len(self._starts) and self._starts[index] == end:
                end += self._remove(end)
            if index:
                before = self._starts[index - 1]
                if before + self._lengths[before] == start:
                    start = before
                    self._remove(before)
            self._insert(Run(start, end - start))

    def _take_some(self, pages: int) -> Iterator[Run]:
        """Take whole runs, longest first, until the rest fits into one."""
        while pages > self.largest:
            run = self._take_one(self.largest)
            pages -= run.pages
            yield run
        if pages:
            yield self._take_one(pages)

    def _take_one(self, pages: int) -> Run:
        """Take the front of the shortest run that is long enough; there is one."""
        length, start = self._sizes[bisect_left(self._sizes, (pages, -1))]
        self._remove(start)
        if length > pages:
            self._insert(Run(start + pages, length - pages))
        self.free_pages -= pages
        return Run(start, pages)

    def _insert(self, run: Run) -> None:
        insort(self._starts, run.start)
        insort(self._sizes, (run.pages, run.start))
        self._lengths[run.start] = run.pages

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._sizes[bisect_left(self._sizes, (length, start))]
        return length
