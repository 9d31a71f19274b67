"""Finds the smallest case that a check refuses, with hypothesis.

Promises: nothing is printed or stored; with ``derandomize`` the same cases come every time; a failure that doesn't come
again on the same case is told, not lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from mmgraph.errors import OptionError

Case = TypeVar("Case")

_PHASES = (Phase.generate, Phase.shrink)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a check found.

    Attributes:
        case: The case.
        words: What is wrong.
        rows: Which rows are wrong, where some are.
        cause: The exception, where one was raised.
        flaky: It did not come again on the same case.
        hint: What the wrong rows look like, where that can be told.
    """

    case: Any
    words: str
    rows: tuple[int, ...] = ()
    cause: Exception | None = None
    flaky: bool = False
    hint: str = ""

    def notes(self) -> str:
        """Put hint and flakiness into lines for a message, each led by a line break."""
        lines = f"\n{self.hint}" if self.hint else ""
        if self.flaky:
            lines += (
                "\nIt did not fail again on the same case: its result depends on something else, such as a race, "
                "memory that was never written, or state kept between calls."
            )
        return lines


class _Refused(Exception):
    """Tells hypothesis that a case fails; always raised at one place, so that cases shrink across kinds."""


def find_failure(
    strategy: st.SearchStrategy[Case],
    check: Callable[[Case], Failure | None],
    *,
    examples: int,
    derandomize: bool,
) -> Failure | None:
    """Try cases and shrink the first that fails.

    Args:
        strategy: The cases.
        check: Says what is wrong with one, or None.
        examples: How many to try.
        derandomize: Try the same ones every time.

    Returns:
        The failure of the smallest case found, or None.

    Raises:
        OptionError: ``examples`` isn't a positive integer.
    """
    if not isinstance(examples, int) or examples < 1:
        raise OptionError(f"examples must be a positive integer, such as 200, got {examples!r}")
    failures: list[Failure] = []

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=_PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def tried(case: Case) -> None:
        failure = check(case)
        if failure is not None:
            failures.append(failure)
            raise _Refused

    flaky = False
    try:
        tried()
    except _Refused:
        pass
    except Flaky:
        flaky = True
    else:
        return None
    return replace(failures[-1], flaky=flaky)  # the smallest case is run once more at the end
