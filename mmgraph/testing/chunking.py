"""Ways to cut a prompt into chunks: any one part, any split, and every single cut.

Promises: the chunks of a split follow each other and cover the prompt once. The argument ``draw`` is hypothesis's own,
not the caller's.
"""

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from mmgraph.testing.batches import Chunk
from mmgraph.testing.drawing import picks
from mmgraph.testing.options import bounded


@bounded({"prompt": 0})
@st.composite
def chunks(draw: st.DrawFn, prompt: int) -> Chunk:
    """Draw a part of a prompt: any prefix, and a length that ends inside the prompt, is zero or is negative.

    Args:
        prompt: The prompt's positions.
    """
    prefix = draw(picks(0, 0, 0, *range(1, prompt + 1)))
    rest = prompt - prefix
    return Chunk(prefix, draw(picks(0, *range(1, rest + 1), *range(1, min(rest, 2) + 1), rest, rest, rest, -1)))


@bounded({"prompt": 0})
def splits(prompt: int, *, empty: bool = True) -> st.SearchStrategy[tuple[Chunk, ...]]:
    """Draw a way to cut a whole prompt into chunks, out of all.

    Args:
        prompt: The prompt's positions.
        empty: Chunks of length zero may lie between the others.
    """
    cuts = st.lists(st.integers(0, prompt), max_size=prompt + 2, unique=not empty).map(sorted)
    inside = cuts.map(lambda places: [place for place in places if empty or 0 < place < prompt])
    return inside.map(lambda places: _cut(prompt, places))


@bounded({"prompt": 0})
def single_cuts(prompt: int) -> Iterator[tuple[Chunk, ...]]:
    """Give every way to cut a prompt once, at its ends too, and the cut into single rows last. No strategy.

    Args:
        prompt: The prompt's positions.
    """
    for place in range(prompt + 1):
        yield _cut(prompt, [place])
    yield _cut(prompt, list(range(1, prompt)))


def _cut(prompt: int, places: Sequence[int]) -> tuple[Chunk, ...]:
    starts, ends = [0, *places], [*places, prompt]
    return tuple(Chunk(start, end - start) for start, end in zip(starts, ends, strict=True))
