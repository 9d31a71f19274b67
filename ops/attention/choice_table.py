"""The measured costs of the backends on one architecture, by kind of call.

A file ``choices/sm90.json`` (one per architecture, by the major and minor compute capability) holds the times that
``bench/choices.py`` measured over a grid of shapes and over drawn ones, and the coefficients that
``bench/fit_choices.py`` fitted to them, which alone are read here. A kind of call is a class of widths, causal or
not, grouped or not. One that wasn't measured is that of the nearest one: causal and widths as they are, then
ungrouped, then the next smaller class of widths.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmgraph.ops.attention.choice_model import Cost
from mmgraph.ops.errors import DataError

FOLDER = Path(__file__).with_name("choices")
WINDOW_FORMS = ("whole", "even", "packed")
# Classes of widths, by the largest in each: kernels have one size of tile for all widths of a class.
WIDTHS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Kind:
    """What separates whole sets of costs.

    Attributes:
        width: The largest width of its class.
        causal: Whether a row sees itself and earlier ones only.
        grouped: Whether several query heads share a key head.
    """

    width: int
    causal: bool
    grouped: bool


@dataclass(frozen=True, slots=True)
class Costs:
    """The backends' costs in one kind of call.

    Attributes:
        of_any: Backend to its cost.
        of_windows: For each of ``window_form``'s answers the same where no sequence is longer than a window, for
            backends with other kernels there.
    """

    of_any: dict[str, Cost]
    of_windows: dict[str, dict[str, Cost]]


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on an architecture.

    Attributes:
        processors: Multiprocessors of the GPU that it was measured on.
        kinds: Kind of call to the backends' costs.
    """

    processors: int
    kinds: dict[Kind, Costs]


def kind_of(head_dim: int, v_dim: int, causal: bool, grouped: bool) -> Kind:
    """The kind of call with these widths."""
    largest = max(head_dim, v_dim)
    width = next((width for width in WIDTHS if largest <= width), WIDTHS[-1])
    return Kind(width, causal, grouped)


@lru_cache(maxsize=8)
def load(major: int, minor: int) -> Table | None:
    """The table of an architecture; None where it wasn't measured."""
    path = FOLDER / f"sm{major}{minor}.json"
    if not path.exists():
        return None
    try:
        return parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no table of measured costs ({type(error).__name__}: {error}): install mmgraph anew, or make it "
            "with bench/choices.py and bench/fit_choices.py."
        ) from error


def parse(data: dict[str, Any]) -> Table:
    """The table in a file's content.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It isn't such a content.
    """
    model = data["model"]
    kinds: dict[Kind, Costs] = {}
    for one in model["costs"]:
        counts = [*one["tile"], one["programs"], model["processors"]]
        if len(counts) != 4 or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"a tile's size, programs and processors are counts, got {counts}")
        coefficients = [float(value) for value in one["microseconds"]]
        if len(coefficients) != 6 or not all(0 <= value < math.inf for value in coefficients):
            raise ValueError(f"there are six coefficients, none below zero, got {coefficients}")
        costs = kinds.setdefault(Kind(one["width"], one["causal"], one["grouped"]), Costs({}, {}))
        form = one["windows"]
        if form not in (None, *WINDOW_FORMS):
            raise ValueError(f"windows are one of {', '.join(WINDOW_FORMS)}, or null, got {form!r}")
        place = costs.of_any if form is None else costs.of_windows.setdefault(form, {})
        place[one["backend"]] = Cost(*counts[:3], *coefficients)
    return Table(model["processors"], kinds)


def nearest_kind(kinds: Collection[Kind], kind: Kind) -> Kind | None:
    """The kind itself if it was measured, else the one that stands for it."""
    smaller = [width for width in reversed(WIDTHS) if width <= kind.width]
    larger = [width for width in WIDTHS if width > kind.width]
    for causal in (kind.causal, not kind.causal):
        for width in (*smaller, *larger):
            for grouped in (kind.grouped, False, True):
                candidate = Kind(width, causal, grouped)
                if candidate in kinds:
                    return candidate
    return None
