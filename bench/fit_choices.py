"""Fits the coefficients that the choice of an attention backend reads to the times that bench/choices.py measured.

For each kind of call and backend: tiles and programs at once are tried from a short list, the six coefficients of
``mmgraph.ops.attention.choice_model`` are fitted in logarithms, robustly, and the best fit is kept. It needs no GPU.

    PYTHONPATH=. python bench/fit_choices.py mmgraph/ops/attention/choices/sm90.json
"""

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from choices import HEADS, WIDTH_OF, call_at, write

from mmgraph.ops.attention.choice_model import SMOOTH, Shape, features, window_form
from mmgraph.ops.attention.choice_table import kind_of, parse
from mmgraph.ops.attention.triton_backend import WINDOW

TILES = ((64, 64), (128, 64), (128, 128), (128, 176), (192, 128))
PROGRAMS = (1, 2, 3)
# Backends that have other kernels where no sequence is longer than a window.
OF_WINDOWS = ("triton",)
FEWEST = 8  # points that a fit needs
FEWEST_OF_WINDOWS = 4  # the grid has few of them
# Drawn shapes are more like those of use than a grid's, whose lengths are powers of two.
DRAWN_WEIGHT = 2.0
# Starting values, of the size that they have on an H200.
START = (1e-7, 1e-5, 5e-3, 1e-4, 8.0, 1e-5)
TOLERANCE = 0.1  # octaves; larger misses count in proportion, not squared


@dataclass(frozen=True)
class Point:
    """A measured time."""

    shape: Shape
    microseconds: float
    weight: float


@dataclass(frozen=True)
class Group:
    """What has coefficients of its own."""

    width: int
    causal: bool
    grouped: bool
    backend: str
    windows: str | None


def points_of(table: dict[str, Any]) -> dict[Group, list[Point]]:
    found: dict[Group, list[Point]] = {}

    def add(width: int, grouped: bool, shape: Shape, times: dict[str, float | None], weight: float) -> None:
        for name, time in times.items():
            if time is not None:
                windows = window_form(shape) if name in OF_WINDOWS and shape.longest <= WINDOW else None
                group = Group(width, shape.causal, grouped, name, windows)
                found.setdefault(group, []).append(Point(shape, time, weight))

    for kind in table["kinds"]:
        for place, (mean, ratio, rows) in enumerate(itertools.product(*kind["axes"])):
            times = {name: column[place] for name, column in kind["microseconds"].items()}
            call = None
            if any(time is not None for time in times.values()):
                call = call_at((mean, ratio, rows), WIDTH_OF[kind["width"]], kind["causal"], kind["grouped"])
            if call is not None:
                shape = Shape(call.tokens, len(call.lengths), call.longest, HEADS, kind["causal"])
                add(kind["width"], kind["grouped"], shape, times, 1.0)
    for one in table.get("drawn", []):
        shape = Shape(one["tokens"], one["batch"], one["longest"], one["heads"], one["causal"])
        kind_here = kind_of(one["width"], one["width"], one["causal"], one["heads"] != one["kv_heads"])
        add(kind_here.width, kind_here.grouped, shape, one["microseconds"], DRAWN_WEIGHT)
    return found


def fit(
    points: list[Point], tile: tuple[int, int], programs: int, processors: int
) -> tuple[list[float], float]:
    """The coefficients in the order of ``Cost``, and the mean miss that was minimised."""
    columns = [features(*tile, programs, point.shape, processors) for point in points]
    pairs, rows, way, sequences, elements = torch.tensor(columns, dtype=torch.float64).T
    measured = torch.tensor([point.microseconds for point in points], dtype=torch.float64).log2()
    weights = torch.tensor([point.weight for point in points], dtype=torch.float64)
    logs = torch.tensor(START, dtype=torch.float64).log().requires_grad_()

    def miss() -> Any:
        work, row, chain, sequence, start, element = logs.exp()
        all_work = work * pairs + row * rows + sequence * sequences + element * elements
        time = start + (all_work**SMOOTH + (chain * way) ** SMOOTH) ** (1 / SMOOTH)
        off = ((time.log2() - measured) ** 2 + TOLERANCE**2).sqrt()
        return (off * weights).sum() / weights.sum()

    solver = torch.optim.LBFGS([logs], lr=0.5, max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> float:
        solver.zero_grad()
        loss: torch.Tensor = miss() + 1e-4 * (logs**2).mean()
        loss.backward()
        return float(loss.detach())

    solver.step(closure)
    with torch.no_grad():
        return [float(f"{value:.5g}") for value in logs.exp().tolist()], float(miss())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "table", type=Path, help="the file that bench/choices.py wrote; it gets the coefficients"
    )
    parser.add_argument("--processors", type=int, default=132, help="multiprocessors of the GPU measured on")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of a hundred numbers
    table = json.loads(options.table.read_text())
    costs = []
    for group, points in points_of(table).items():
        if len(points) < (FEWEST if group.windows is None else FEWEST_OF_WINDOWS):
            continue
        tiles = TILES if group.windows is None else TILES[:1]
        tried = [
            (*fit(points, tile, programs, options.processors), tile, programs)
            for tile, programs in itertools.product(tiles, PROGRAMS)
        ]
        coefficients, miss, tile, programs = min(tried, key=lambda one: one[1])
        if not all(map(math.isfinite, coefficients)):
            raise SystemExit(f"no fit for {group}")
        costs.append({**vars(group), "tile": list(tile), "programs": programs, "microseconds": coefficients})
        print(
            f"{group}: {len(points)} points, off by {miss - TOLERANCE:.3f} octaves beyond {TOLERANCE}",
            flush=True,
        )
    table["model"] = {"processors": options.processors, "costs": costs}
    parse(table)
    write(options.table, table)


if __name__ == "__main__":
    main()
