"""Hypothesis strategies for what meets where multimodal rows are put in their places.

Promises: they draw shapes, flags, dtypes and a seed, never tensors; sizes are bounded by arguments; examples shrink to
few rows, small numbers and plain dtypes; an option that is none of its choices is an `OptionError` of the call itself.
Those of chunks and of whole batches lie in modules of their own and are given here too. Where a signature shows
``draw``, that is hypothesis's own argument, not the caller's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.testing.batch_strategies import batches, items, prompts
from mmgraph.testing.cases import MapCase, MaskCase, RangesCase
from mmgraph.testing.chunking import chunks, single_cuts, splits
from mmgraph.testing.drawing import FLOATING, often_least, often_most, picks, seeds, seldom_least, token_ids
from mmgraph.testing.options import bounded, check_dtypes
from mmgraph.testing.origins import SourceRange

__all__ = [
    "batches",
    "chunks",
    "items",
    "map_cases",
    "mask_cases",
    "masks",
    "prompts",
    "range_cases",
    "ranges",
    "row_maps",
    "seeds",
    "single_cuts",
    "splits",
    "token_ids",
]


def _check_sources(options: dict[str, Any]) -> None:
    sources = options["sources"]
    if not isinstance(sources, Sequence) or not all(type(rows) is int and rows >= 0 for rows in sources):
        raise OptionError(f"sources must be a list of integers, 0 or more, such as [3, 0], got {sources!r}")


@bounded({"max_rows": 0})
def masks(max_rows: int = 8) -> st.SearchStrategy[tuple[bool, ...]]:
    """Draw which rows are placeholders: any number of rows, none, some or all of them.

    Args:
        max_rows: The most rows.
    """
    return st.lists(st.booleans(), max_size=max_rows).map(tuple)


@bounded({"rows": 0, "pool": 0})
def row_maps(rows: int, pool: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the pool's row for each output row, or -1; pool rows may be used often or never.

    Args:
        rows: Output rows.
        pool: The pool's rows.
    """
    return st.lists(st.integers(-1, pool - 1), min_size=rows, max_size=rows).map(tuple)


@bounded({"rows": 0, "max_ranges": 0}, _check_sources)
@st.composite
def ranges(
    draw: st.DrawFn, rows: int, sources: Sequence[int], *, overlapping: bool = False, max_ranges: int = 4
) -> tuple[SourceRange, ...]:
    """Draw where rows of sources go.

    Args:
        rows: Output rows.
        sources: Rows of each source; one with none is never drawn from.
        overlapping: Ranges may overlap and come in any order, so that the later must win; else they are disjoint and
            ascend, as a plan's do. Source rows may be used by several either way.
        max_ranges: The most ranges.
    """
    usable = [source for source, count in enumerate(sources) if count > 0]

    found: list[SourceRange] = []
    first = 0
    count = draw(seldom_least(0, max_ranges)) if usable else 0
    if overlapping and count > 0:
        count = min(count + 1, max_ranges)  # one alone overlaps nothing
    for _ in range(count):
        if first >= rows:
            break
        start = draw(st.integers(0, rows - 1) if overlapping else often_least(first, rows - 1))
        source = draw(picks(*usable))
        src_start = draw(often_least(0, sources[source] - 1))
        length = draw(often_most(1, min(rows - start, sources[source] - src_start)))
        found.append(SourceRange(start, start + length - 1, source, src_start))
        first = 0 if overlapping else start + length
    return tuple(found)


@bounded({"max_rows": 0, "max_sources": 0, "max_source_rows": 0}, check_dtypes)
@st.composite
def range_cases(
    draw: st.DrawFn,
    *,
    max_rows: int = 8,
    max_sources: int = 3,
    max_source_rows: int = 8,
    overlaps: bool = True,
    outside_ids: bool = True,
    strided: bool = True,
    dtypes: Sequence[torch.dtype] = FLOATING,
) -> RangesCase:
    """Draw calls of ``fn(input_ids, table, sources, ranges)``.

    Args:
        max_rows: The most output rows; there may be none.
        max_sources: The most sources; each may be empty.
        max_source_rows: The most rows of a source.
        overlaps: Half of the cases have ranges that overlap.
        outside_ids: Ids of text rows may be negative or beyond the vocabulary. Those of covered rows always may.
        strided: Table and sources may be columns of wider matrices.
        dtypes: Of tables and sources, drawn apart.
    """
    rows = draw(seldom_least(0, max_rows))
    kinds = st.tuples(seldom_least(0, max_source_rows), picks(*dtypes))
    sources = [draw(kinds) for _ in range(draw(seldom_least(0, max_sources)))]
    counts = [count for count, _ in sources]
    overlapping = overlaps and draw(st.booleans())
    places = draw(ranges(rows, counts, overlapping=overlapping))
    covered = {row for entry in places for row in range(entry.dst_start, entry.dst_end + 1)}
    vocabulary = draw(st.integers(1, 5))
    id_dtype = draw(picks(torch.int64, torch.int32))
    return RangesCase(
        ids=draw(token_ids(rows, vocabulary, id_dtype=id_dtype, outside=outside_ids, covered=covered)),
        vocabulary=vocabulary,
        width=draw(st.integers(1, 4)),
        sources=tuple(counts),
        ranges=places,
        dtype=draw(picks(*dtypes)),
        source_dtypes=tuple(dtype for _, dtype in sources),
        id_dtype=id_dtype,
        strided=strided and draw(st.booleans()),
        seed=draw(seeds()),
    )


@bounded({"max_rows": 0, "max_pool_rows": 0}, check_dtypes)
@st.composite
def map_cases(
    draw: st.DrawFn,
    *,
    max_rows: int = 8,
    max_pool_rows: int = 6,
    outside_ids: bool = True,
    strided: bool = True,
    dtypes: Sequence[torch.dtype] = FLOATING,
) -> MapCase:
    """Draw calls of ``fn(input_ids, table, pool, row_map)``.

    Args:
        max_rows: The most output rows; there may be none.
        max_pool_rows: The most rows of the pool; it may be empty.
        outside_ids: As for `range_cases`.
        strided: Table and pool may be columns of wider matrices.
        dtypes: Of tables and pools, drawn apart.
    """
    rows = draw(seldom_least(0, max_rows))
    pool = draw(seldom_least(0, max_pool_rows))
    row_map = draw(row_maps(rows, pool))
    covered = {row for row, place in enumerate(row_map) if place >= 0}
    vocabulary = draw(st.integers(1, 5))
    id_dtype = draw(picks(torch.int64, torch.int32))
    return MapCase(
        ids=draw(token_ids(rows, vocabulary, id_dtype=id_dtype, outside=outside_ids, covered=covered)),
        vocabulary=vocabulary,
        width=draw(st.integers(1, 4)),
        pool=pool,
        row_map=row_map,
        dtype=draw(picks(*dtypes)),
        pool_dtype=draw(picks(*dtypes)),
        id_dtype=id_dtype,
        strided=strided and draw(st.booleans()),
        seed=draw(seeds()),
    )


@bounded({"max_rows": 0}, check_dtypes)
def mask_cases(
    *, max_rows: int = 8, strided: bool = True, dtypes: Sequence[torch.dtype] = FLOATING
) -> st.SearchStrategy[MaskCase]:
    """Draw calls of ``fn(embeds, mask, features)``.

    Args:
        max_rows: The most output rows; there may be none, and all or none may be placeholders.
        strided: Embeddings and features may be columns of wider matrices.
        dtypes: Of embeddings and features, drawn apart.
    """
    return st.builds(
        MaskCase,
        mask=masks(max_rows),
        width=st.integers(1, 4),
        dtype=picks(*dtypes),
        feature_dtype=picks(*dtypes),
        strided=st.booleans() if strided else st.just(False),
        seed=seeds(),
    )
