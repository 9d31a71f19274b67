"""The small draws that every strategy shares: sizes, seeds and token ids."""

from collections.abc import Collection
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.testing.options import bounded

T = TypeVar("T")

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that strategies draw where they aren't told; the first is what examples shrink to."""

# Cut to 32 bits, the long ones are 1 and 0: inside a vocabulary, and not what clamping gives.
_OUTSIDE = {torch.int32: (-1, -200, 1_000_000, 2**31 - 2), torch.int64: (-1, 1 - 2**33, 2**31 - 2, 2**33)}


# Each of these is one choice, which hypothesis shrinks better than a choice of branches; and each is kept, since
# hypothesis takes longer to look a new strategy over than to draw from it.


@cache
def often_most(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw an integer, the highest often; shrinks to the lowest."""
    return st.integers(low, high + (high - low) // 3 + 1).map(lambda value: min(value, high))


@cache
def often_least(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw an integer, the lowest often."""
    extra = (high - low) // 3 + 1
    return st.integers(low, high + extra).map(lambda value: max(low, value - extra))


@cache
def seldom_least(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw an integer, the lowest seldom, since hypothesis tends to it by itself; shrinks to the lowest."""
    return picks(low, *3 * tuple(range(low + 1, high + 1)))


@cache
def seeds() -> st.SearchStrategy[int]:
    """Draw a seed of tensor contents."""
    return st.integers(0, 9)


@lru_cache(maxsize=None, typed=True)  # False isn't 0
def picks(*choices: T) -> st.SearchStrategy[T]:
    """Draw one of the choices; shrinks to the first."""
    return st.sampled_from(choices)


def _check_id_dtype(options: dict[str, Any]) -> None:
    if options["id_dtype"] not in _OUTSIDE:
        raise OptionError(f"id_dtype must be torch.int32 or torch.int64, got {options['id_dtype']!r}")


@bounded({"rows": 0, "vocabulary": 1}, _check_id_dtype)
@st.composite
def token_ids(
    draw: st.DrawFn,
    rows: int,
    vocabulary: int,
    *,
    id_dtype: torch.dtype = torch.int64,
    outside: bool = True,
    covered: Collection[int] = (),
) -> tuple[int, ...]:
    """Draw token ids.

    Args:
        rows: How many.
        vocabulary: Rows of the table.
        id_dtype: torch.int32 or torch.int64: how large they may be.
        outside: Some may be negative, just beyond the vocabulary, or huge.
        covered: Rows whose ids may be outside in any case.
    """
    inside = range(vocabulary)
    anything = picks(*inside, *inside, vocabulary, *_OUTSIDE[id_dtype])
    return tuple(draw(anything if outside or row in covered else picks(*inside)) for row in range(rows))
