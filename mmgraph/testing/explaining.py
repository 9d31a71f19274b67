"""Says what a wrong result holds: which input's row, its old row, zeros, or a row cast the wrong way.

Promises: the first wrong row is named with what it should hold and what it holds; a case is given as Python code that
makes it again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmgraph.testing.cases import ScatterCase
from mmgraph.testing.origins import Origin


class ScatterMismatch(AssertionError):
    """A function doesn't put rows in their places.

    Args:
        message: What is wrong, and the smallest case found.
        case: That case.
        rows: The wrong rows of its result, where values are wrong.
    """

    def __init__(self, message: str, *, case: Any = None, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.case = case
        self.rows = tuple(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class WrongRow:
    """One row of a result that isn't what it must be.

    Attributes:
        row: Its index.
        expected: The row that it must take.
        found: The row that it holds, where it is one.
        words: What it holds, for a message.
    """

    row: int
    expected: Origin
    found: Origin | None
    words: str


def wrong_rows(case: ScatterCase, out: torch.Tensor) -> list[WrongRow]:
    """Compare a result with a case, bit for bit.

    Args:
        case: The case.
        out: ``[T, H]`` on the CPU, in the case's dtype.

    Returns:
        The rows that are wrong.
    """
    candidates = _candidates(case)
    unchanged = _unchanged(case)
    wrong = []
    for row, expected in enumerate(case.origins()):
        if torch.equal(out[row], candidates[expected]):
            continue
        found = next((origin for origin, values in candidates.items() if torch.equal(out[row], values)), None)
        if found is not None and found == unchanged[row]:
            words = f"{found}, its own: nothing was put there"
        elif found is not None:
            words = str(found)
        else:
            words = _unknown(out[row], candidates[expected])
        wrong.append(WrongRow(row, expected, found, words))
    return wrong


def describe_wrong(case: ScatterCase, wrong: Sequence[WrongRow]) -> str:
    """Put wrong rows into words: how many there are, and the first one."""
    first = wrong[0]
    ids: Sequence[int] | None = getattr(case, "ids", None)
    clamped = ""
    if ids is not None and first.expected.kind == "text" and ids[first.row] != first.expected.row:
        clamped = f" (its id {ids[first.row]}, clamped into the vocabulary)"
    shown = ", ".join(str(entry.row) for entry in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
    return (
        f"{len(wrong)} of {len(case.origins())} rows are wrong: {shown}.\n"
        f"Row {first.row} should hold {first.expected}{clamped}; it holds {first.words}."
    )


def pattern_of(case: ScatterCase, wrong: Sequence[WrongRow]) -> str:
    """Say whether wrong rows look shifted by one, or are one end of a range; empty where neither is so."""
    origins = case.origins()
    copied = [
        entry for entry in wrong if entry.found is not None and entry.found.kind not in ("text", "embeds")
    ]
    counts: dict[str, int] = {}
    for step, word in ((1, "after"), (-1, "before")):
        words = f"sources look shifted by one: rows hold the source row {word} the right one"
        counts[words] = sum(
            entry.found == dataclasses.replace(entry.expected, row=entry.expected.row + step)
            for entry in copied
        )
    for step, word in ((-1, "late"), (1, "early")):
        counts[f"rows look shifted by one: source rows lie one row too {word}"] = sum(
            0 <= entry.row + step < len(origins) and entry.found == origins[entry.row + step]
            for entry in copied
        )
    places = {entry.row for entry in wrong}
    last = "last row of a range is missing, as where an inclusive end is taken for an exclusive one"
    for step, words in ((-1, last), (1, "first row of a range is missing")):
        beside = [(entry, entry.row + step) for entry in wrong if 0 <= entry.row + step < len(origins)]
        counts[words] = sum(
            place not in places
            and origins[place] == dataclasses.replace(entry.expected, row=entry.expected.row + step)
            for entry, place in beside
            if entry.expected.kind not in ("text", "embeds")
        )
    likeliest = max(counts, key=lambda words: counts[words])
    return likeliest if counts[likeliest] > 0 and 2 * counts[likeliest] >= len(wrong) else ""


def code_of(case: Any, fn: Callable[..., Any] | None, device: str) -> str:
    """Write a case as Python code that makes it and calls the function."""
    called = getattr(fn, "__name__", "")
    called = called if called.isidentifier() else "fn"
    values = [
        f"    {entry.name}={getattr(case, entry.name)!r},"
        for entry in dataclasses.fields(case)
        if getattr(case, entry.name) != entry.default
    ]
    names = [type(case).__name__, *(["SourceRange"] if getattr(case, "ranges", ()) else [])]
    place = "" if device == "cpu" else repr(device)
    return "\n".join(
        [
            "import torch",
            f"from mmgraph.testing import {', '.join(names)}",
            "",
            f"case = {type(case).__name__}(",
            *values,
            ")",
            f"out = {called}(*case.arguments({place}))",
        ]
    )


def _candidates(case: ScatterCase) -> dict[Origin, torch.Tensor]:
    """All rows of the inputs, cast as the result must be."""
    return {
        Origin(kind, row, index): values  # type: ignore[arg-type]
        for kind, tensors in case.inputs(case.arguments()).items()
        for index, tensor in enumerate(tensors)
        for row, values in enumerate(tensor.to(case.dtype))
    }


def _unchanged(case: ScatterCase) -> list[Origin]:
    """What each row would hold had nothing been put there."""
    nothing: dict[str, Any] = {}
    for field in dataclasses.fields(case):  # type: ignore[arg-type]
        if field.name == "ranges":
            nothing = {"ranges": ()}
        elif field.name == "row_map":
            nothing = {"row_map": (-1,) * len(case.origins())}
        elif field.name == "mask":
            nothing = {"mask": (False,) * len(case.origins())}
    return dataclasses.replace(case, **nothing).origins()  # type: ignore[type-var]


def _unknown(got: torch.Tensor, expected: torch.Tensor) -> str:
    if not bool(got.any()):
        return "zeros"
    if bool(got.isnan().any()):
        return "NaN, as memory that was never written may"
    if torch.allclose(got[:1].double(), expected[:1].double(), rtol=0.02):
        column = int((got != expected).nonzero()[0])
        return (
            f"that row changed: column {column} is {got[column].item()!r} and not {expected[column].item()!r}, as "
            "after a cast through another dtype or some arithmetic"
        )
    return f"{got.tolist()}, which is no input's row; perhaps memory that was never written"
