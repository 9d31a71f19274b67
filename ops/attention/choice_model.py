"""A backend's time by a formula, whose coefficients are fitted to measured times (``bench/fit_choices.py``).

Attention kernels cut each sequence into tiles of queries, and go over its keys in blocks. What such a call takes is a
start, and then the larger (smoothly) of two things: all of the work at the rate at which the whole GPU does it, or the
time until the last program is done. With few tiles the second one rules: one program's way through the longest
sequence, and as many more turns as the tiles exceed the programs that run at once. Between measured shapes
times jump where a length passes a multiple of a tile and where the tiles pass a turn, which interpolation can't see.

A call's lengths are on the device; what is known is their sum, their number and the longest. So they are taken for
equal, evenly spread, or a few long ones among short ones, by how far the longest is from the mean.
"""

import math
from dataclasses import dataclass

from mmgraph.ops.attention.windows import FULL_PER_HEAD, LONGEST

EQUAL = 1.03  # the longest over the mean up to which lengths count as equal
SMOOTH = 4.0  # of the larger of two times: the power of the mean


@dataclass(frozen=True, slots=True)
class Cost:
    """What a backend's kernels take, in one kind of call; coefficients are microseconds per unit.

    Attributes:
        queries: Queries of a tile.
        keys: Keys at a time.
        programs: Programs that run at once on a multiprocessor.
        work: Per pair of query and key, with tiles filled up, over all heads.
        rows: Per row of a tile, over all heads.
        chain: Per key that one program goes over.
        sequences: Per sequence and head.
        start: Of a call.
        elements: Per row and head.
    """

    queries: int
    keys: int
    programs: int
    work: float
    rows: float
    chain: float
    sequences: float
    start: float
    elements: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What the host knows of a call's size.

    Attributes:
        tokens: Rows.
        batch: Sequences.
        longest: The longest sequence, at most ``tokens``.
        heads: Query heads.
        causal: Whether a row sees itself and earlier ones only.
    """

    tokens: int
    batch: int
    longest: int
    heads: int
    causal: bool


def lengths_like(tokens: int, batch: int, longest: int) -> tuple[tuple[float, float, bool], ...]:
    """Lengths that such a call may have: how many sequences of which length, and whether it is exactly that."""
    mean = tokens / batch
    longest = min(max(longest, math.ceil(mean)), tokens)
    ratio = longest / mean
    if ratio <= EQUAL or batch == 1:
        return ((batch, longest, True),)
    if ratio <= 2:  # evenly spread around the mean
        apart = (ratio - 1) * mean * 2 / 3
        return ((batch / 3, mean - apart, False), (batch / 3, mean, False), (batch / 3, mean + apart, False))
    long = max(1.0, batch / (2 * ratio))  # half of the rows are in long ones
    length = min(longest, 0.9 * tokens / long)
    return ((long, length, False), (batch - long, (tokens - long * length) / (batch - long), False))


def _filled(length: float, tile: int, exact: bool) -> float:
    """The length with its last tile filled up; where it isn't known exactly, by half a tile on average."""
    if exact:
        return math.ceil(length / tile) * tile
    return max(length + tile / 2, tile)


def window_form(shape: Shape) -> str:
    """How the Triton backend's windows are served, for which times differ: "whole", "even" or "packed".

    Whole ones have a program per sequence and head. Others share programs: equal lengths that divide a tile never
    straddle two tiles, and others do, which takes much longer.
    """
    if shape.tokens >= FULL_PER_HEAD * shape.batch:
        return "whole"
    is_even = shape.longest * shape.batch <= EQUAL * shape.tokens
    return "even" if is_even and LONGEST % shape.longest == 0 else "packed"


def features(
    queries: int, keys: int, programs: int, shape: Shape, processors: int
) -> tuple[float, float, float, float, float]:
    """What the coefficients ``work``, ``rows``, ``chain``, ``sequences`` and ``elements`` are multiplied with."""
    pairs = rows = 0.0
    for count, length, exact in lengths_like(shape.tokens, shape.batch, shape.longest):
        tall, wide = _filled(length, queries, exact), _filled(length, keys, exact)
        seen = tall * wide
        if shape.causal:
            seen = seen / 2 + tall * keys / 2
        pairs += count * seen
        rows += count * tall
    turns = max(1, math.ceil(rows / queries * shape.heads / (processors * programs) - 1e-6))
    way = _filled(min(shape.longest, shape.tokens), keys, True) + (turns - 1) * pairs / rows
    heads = shape.heads
    return pairs * heads, rows * heads, way, shape.batch * heads, shape.tokens * heads


def microseconds(cost: Cost, shape: Shape, processors: int) -> float:
    """The time of a call of at least one row on a GPU with so many multiprocessors."""
    pairs, rows, way, sequences, elements = features(cost.queries, cost.keys, cost.programs, shape, processors)
    work = cost.work * pairs + cost.rows * rows + cost.sequences * sequences + cost.elements * elements
    larger: float = (work**SMOOTH + (cost.chain * way) ** SMOOTH) ** (1 / SMOOTH)
    return cost.start + larger
