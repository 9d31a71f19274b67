"""What a call would cost run eagerly, estimated from times measured at a few sizes.

An estimate promises no saving that the measurements don't show: it grows with every size, is at least the time of
every measured point that the call contains and at most that of every measured point that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["CostSurface"]

# How many lines end in one point. The lines that matter start at points that cost little less; the rest would only
# lengthen the setting up, which looks at every point under every line.
_LINES_PER_POINT = 16

# Cells whose lines are remembered; more than any grid in use has.
_CELLS = 4096

_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """The straight line from one measured point to another that holds it; a single point where they are the same."""

    start: _Sizes
    end: _Sizes
    low: float
    rise: float
    steps: tuple[tuple[int, int, int], ...]  # of each size that differs: position, start, length

    def at(self, sizes: _Sizes) -> float:
        """The time at the first point of the line that holds these sizes; `end` must hold them."""
        share = 0.0
        for position, start, length in self.steps:
            reached = (sizes[position] - start) / length
            if reached > share:
                share = reached
        return self.low + self.rise * share


class CostSurface:
    """An upper estimate of the cost at any sizes, from costs at some.

    Of two measured points L and U, where U holds L, the line between them gives for sizes s that U holds

        cost(L) + (cost(U) - cost(L)) * t,    t = max(0, max over all sizes i of (s_i - L_i) / (U_i - L_i)):

    at t lies the first point of the line that holds the call, and a larger call is not cheaper. The estimate is
    the least over all lines and over the single points that hold s. Lines that run below a measurement, or through
    the sizes of a third point, are left out, so that with one size what remains is the linear interpolation
    between neighbours. Below all measured points it is the cost of the cheapest point that holds s. Where a larger
    point was measured cheaper than one that it holds (noise), it is raised to that one's cost.

    Args:
        points: sizes, the same names in each, and the cost in seconds.
    """

    def __init__(self, points: Iterable[tuple[Mapping[str, int], float]]) -> None:
        given = list(points)
        self._names: tuple[str, ...] = tuple(given[0][0]) if given else ()
        costs: dict[_Sizes, float] = {}
        for sizes, cost in given:
            point = tuple(sizes[name] for name in self._names)
            costs[point] = max(cost, costs.get(point, cost))
        raised = {p: max(cost for q, cost in costs.items() if _holds(p, q)) for p in costs}
        self._lines = [line for point in raised for line in _lines_to(point, raised)]
        self._levels = [sorted({point[i] for point in raised}) for i in range(len(self._names))]
        self._cells: dict[_Sizes, list[tuple[float, _Line]]] = {}

    def estimate(self, sizes: Mapping[str, int]) -> float | None:
        """The cost at these sizes, in seconds, or None where no measured point holds them.

        Args:
            sizes: a value for every name of the points; others are ignored.
        """
        point = tuple(sizes[name] for name in self._names)
        # The same lines lie over all calls between two neighbouring levels of every size. They are found once, since
        # this runs on every call.
        cell = tuple(map(bisect_left, self._levels, point))
        lines = self._cells.get(cell)
        if lines is None:
            if len(self._cells) >= _CELLS:
                self._cells.clear()
            lines = self._cells[cell] = self._lines_over(cell)
        best: float | None = None
        for least, line in lines:
            if best is not None and least >= best:
                break
            cost = line.at(point)
            if best is None or cost < best:
                best = cost
        return best

    def _lines_over(self, cell: _Sizes) -> list[tuple[float, _Line]]:
        """The lines that can be the least somewhere in a cell, each after its own least there, in its order."""
        if any(index == len(levels) for index, levels in zip(cell, self._levels, strict=True)):
            return []
        largest = tuple(levels[index] for index, levels in zip(cell, self._levels, strict=True))
        least = tuple(
            levels[index - 1] if index else 0 for index, levels in zip(cell, self._levels, strict=True)
        )
        over = [(line, line.at(largest)) for line in self._lines if _holds(line.end, largest)]
        bound = min((most for _, most in over), default=0.0)
        found = [(low, line) for line, most in over if (low := line.at(least)) < bound or most == bound]
        return sorted(found, key=lambda pair: pair[0])


def _holds(large: _Sizes, small: _Sizes) -> bool:
    return all(a >= b for a, b in zip(large, small, strict=True))


def _between(start: _Sizes, point: _Sizes, end: _Sizes) -> bool:
    """Whether a point lies on the line between two others."""
    if point == start or not _holds(point, start) or not _holds(end, point):
        return False
    done, whole = sum(point) - sum(start), sum(end) - sum(start)
    return all((p - a) * whole == (b - a) * done for a, p, b in zip(start, point, end, strict=True))


def _lines_to(end: _Sizes, costs: Mapping[_Sizes, float]) -> list[_Line]:
    """The point itself, and the lines to it that run below no measured point and through none."""
    below = sorted((p for p in costs if p != end and _holds(end, p)), key=lambda p: (costs[p], sum(p)))
    lines = [_Line(end, end, costs[end], 0.0, ())]
    first = max(0, len(below) - _LINES_PER_POINT)
    for index, start in enumerate(below[first:], first + 1):
        steps = tuple((i, a, b - a) for i, (a, b) in enumerate(zip(start, end, strict=True)) if a < b)
        if any(_between(start, point, end) for point in below):
            continue
        line = _Line(start, end, costs[start], costs[end] - costs[start], steps)
        # No line runs below its start's cost, so that only what costs more can lie above it.
        if all(line.at(point) >= costs[point] for point in below[index:]):
            lines.append(line)
    return lines
