"""Measured times of the backends on one architecture, and what they say of a shape that wasn't measured.

A file ``choices/sm90.json`` (one per architecture, by the major and minor compute capability) holds times over a
grid of shapes; ``bench/choices.py`` makes it. A kind of call is a class of widths, causal or not, grouped or not;
within a kind there are three axes, all logarithmic: the mean length of a sequence, how much longer the longest one
is, and the rows times heads. Between measured points the logarithm of a time is interpolated; beyond the grid the
nearest edge holds, and the nearest measured point where the largest shapes weren't measured. A kind that wasn't
measured is that of the nearest one: causal and widths as they are, then ungrouped, then the next smaller class of
widths.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from mmgraph.ops.errors import DataError

FOLDER = Path(__file__).with_name("choices")
# Classes of widths, by the largest in each: kernels have one size of tile for all widths of a class.
WIDTHS = (32, 64, 96, 128, 192, 256)
_SLACK = 1 / 64  # of logarithms that were rounded


@dataclass(frozen=True, slots=True)
class Kind:
    """What separates whole grids.

    Attributes:
        width: The largest width of its class.
        causal: Whether a row sees itself and earlier ones only.
        grouped: Whether several query heads share a key head.
    """

    width: int
    causal: bool
    grouped: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """Times of one kind of call.

    Attributes:
        axes: For each of the three axes the measured places, base-2 logarithms that increase.
        times: Backend to logarithms of its times, in the order of the product of the axes; None was not measured.
    """

    axes: tuple[tuple[float, ...], ...]
    times: dict[str, tuple[float | None, ...]]


def kind_of(head_dim: int, v_dim: int, causal: bool, grouped: bool) -> Kind:
    """The kind of call with these widths."""
    largest = max(head_dim, v_dim)
    width = next((width for width in WIDTHS if largest <= width), WIDTHS[-1])
    return Kind(width, causal, grouped)


def place_of(tokens: int, batch: int, max_seqlen: int, heads: int) -> tuple[float, float, float]:
    """Where a shape lies on the three axes."""
    rows = max(tokens, 1)
    mean = rows / min(max(batch, 1), rows)
    longest = max(min(max_seqlen, rows), mean)
    return math.log2(mean), math.log2(longest / mean), math.log2(rows * heads)


@lru_cache(maxsize=8)
def load(major: int, minor: int) -> dict[Kind, Grid]:
    """The grids of an architecture; none where it wasn't measured."""
    path = FOLDER / f"sm{major}{minor}.json"
    if not path.exists():
        return {}
    try:
        return parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no table of measured times ({type(error).__name__}: {error}): install mmgraph anew, or make it "
            "with bench/choices.py."
        ) from error


def parse(data: dict[str, Any]) -> dict[Kind, Grid]:
    """The grids of a file's content; times there are microseconds.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It isn't such a content.
    """
    found = {}
    for one in data["kinds"]:
        axes = tuple(tuple(float(x) for x in axis) for axis in one["axes"])
        if len(axes) != 3 or not all(a < b for axis in axes for a, b in pairwise(axis)):
            raise ValueError(f"axes must be three that increase, got {axes}")
        points = math.prod(len(axis) for axis in axes)
        for name, column in one["microseconds"].items():
            known = [time for time in column if time is not None]
            if len(column) != points or not all(0 < time < math.inf for time in known):
                raise ValueError(f"{name} must have {points} times above zero, or none, got {len(column)}")
        times = {
            name: tuple(None if time is None else math.log2(time) for time in column)
            for name, column in one["microseconds"].items()
        }
        found[Kind(one["width"], one["causal"], one["grouped"])] = Grid(axes, times)
    return found


def nearest_kind(grids: dict[Kind, Grid], kind: Kind) -> Kind | None:
    """The kind itself if it was measured, else the one that stands for it."""
    smaller = [width for width in reversed(WIDTHS) if width <= kind.width]
    larger = [width for width in WIDTHS if width > kind.width]
    for causal in (kind.causal, not kind.causal):
        for width in (*smaller, *larger):
            for grouped in (kind.grouped, False, True):
                candidate = Kind(width, causal, grouped)
                if candidate in grids:
                    return candidate
    return None


def estimate(
    grid: Grid, place: tuple[float, ...], names: Iterable[str], edge: float | None = None
) -> dict[str, float]:
    """The base-2 logarithms of backends' microseconds at a place.

    Args:
        grid: Times of the kind of call.
        place: Where the shape lies on the axes.
        names: Backends to compare.
        edge: Base-2 logarithm of a longest length at which a backend changes kernels: points beyond it say nothing
        about
            a place before it, and the other way about.

    Only points that all of them have count, so that none is compared at easier ones than the others. Where there is
    none around the place (the largest shapes aren't measured), the nearest one that there is stands for it. A
    backend that has no point at all is left out.
    """
    columns = {
        name: column
        for name in names
        if (column := grid.times.get(name)) and any(time is not None for time in column)
    }
    corners = [_around(axis, value) for axis, value in zip(grid.axes, place, strict=True)]
    totals, weight = dict.fromkeys(columns, 0.0), 0.0
    for corner in product(*corners):
        share, index = 1.0, 0
        for (position, part), axis in zip(corner, grid.axes, strict=True):
            share *= part
            index = index * len(axis) + position
        if edge is not None and _is_beyond(grid.axes, index, edge) != (place[0] + place[1] > edge + _SLACK):
            continue
        values = {name: column[index] for name, column in columns.items()}
        if share > 0 and all(value is not None for value in values.values()):
            weight += share
            for name, value in values.items():
                totals[name] += share * (value or 0.0)
    if weight:
        return {name: total / weight for name, total in totals.items()}
    return _nearest(grid, place, columns, edge)


def _is_beyond(axes: tuple[tuple[float, ...], ...], index: int, edge: float) -> bool:
    """Whether the longest sequence at a point is longer than the edge."""
    means, ratios, rows = axes
    mean, ratio = divmod(index // len(rows), len(ratios))
    return means[mean] + ratios[ratio] > edge + _SLACK


def _nearest(
    grid: Grid,
    place: tuple[float, ...],
    columns: dict[str, tuple[float | None, ...]],
    edge: float | None,
) -> dict[str, float]:
    """The values at the nearest point that all columns have; of the largest set of columns that share one."""
    best: tuple[int, float, int] | None = None
    for index, point in enumerate(product(*grid.axes)):
        if edge is not None and _is_beyond(grid.axes, index, edge) != (place[0] + place[1] > edge + _SLACK):
            continue
        known = sum(column[index] is not None for column in columns.values())
        distance = sum((a - b) ** 2 for a, b in zip(point, place, strict=True))
        if known and (best is None or (-known, distance) < best[:2]):
            best = (-known, distance, index)
    if best is None:
        return {} if edge is None else _nearest(grid, place, columns, None)
    return {name: value for name, column in columns.items() if (value := column[best[2]]) is not None}


def _around(axis: tuple[float, ...], value: float) -> tuple[tuple[int, float], ...]:
    """The measured places around a value, with the share of each."""
    if value <= axis[0]:
        return ((0, 1.0),)
    for place in range(1, len(axis)):
        if value <= axis[place]:
            share = (value - axis[place - 1]) / (axis[place] - axis[place - 1])
            return ((place - 1, 1.0 - share), (place, share))
    return ((len(axis) - 1, 1.0),)
