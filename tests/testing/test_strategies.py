"""Invariant: what the strategies draw is valid, stays in its bounds, reaches every corner that they promise, and can be
made again from its ``repr``.
"""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.inputs import MultimodalInputs
from mmgraph.modality import Modality
from mmgraph.planning import build_plan
from mmgraph.testing import (
    BatchCase,
    Chunk,
    ItemCase,
    MapCase,
    MaskCase,
    RangesCase,
    RequestCase,
    SourceRange,
    reference,
    strategies,
)


def drawn(strategy: st.SearchStrategy[Any], examples: int = 400) -> list[Any]:
    """What a test with so many examples would see, the same every time."""
    found = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found


@cache
def some_batches() -> list[BatchCase]:
    return drawn(strategies.batches(), 600)


@cache
def some_ranges() -> list[RangesCase]:
    return drawn(strategies.range_cases())


def media(case: BatchCase) -> list[tuple[RequestCase, ItemCase]]:
    return [(r, item) for r in case.requests for item in r.items or () if item is not None and item.spans]


def in_chunk(request: RequestCase, item: ItemCase, *, before: bool, after: bool) -> bool:
    """Whether a span of the item begins before the chunk, ends after it, or both."""
    if request.chunk is None or request.chunk.length <= 0:
        return False
    first, last = request.chunk.prefix, request.chunk.prefix + request.chunk.length - 1
    return any(
        start <= last and end >= first and (start < first) == before and (end > last) == after
        for start, end in item.spans
    )


def twins(case: BatchCase, *, same_modality: bool, same_request: bool) -> bool:
    pairs = [(a, b) for a in media(case) for b in media(case) if a[1] is not b[1]]
    return any(
        one.hash is not None
        and one.hash == other.hash
        and (one.modality == other.modality) == same_modality
        and (r is s) == same_request
        for (r, one), (s, other) in pairs
    )


BATCH_CORNERS: dict[str, Callable[[BatchCase], bool]] = {
    "no requests": lambda case: not case.requests,
    "text only": lambda case: bool(case.requests) and all(r.items is None for r in case.requests),
    "chunk of no rows": lambda case: any(r.chunk is not None and r.chunk.length == 0 for r in case.requests),
    "negative length": lambda case: any(r.chunk is not None and r.chunk.length < 0 for r in case.requests),
    "one-row chunk": lambda case: any(r.chunk is not None and r.chunk.length == 1 for r in case.requests),
    "a whole span": lambda case: any(in_chunk(r, i, before=False, after=False) for r, i in media(case)),
    "span begins before": lambda case: any(in_chunk(r, i, before=True, after=False) for r, i in media(case)),
    "span ends after": lambda case: any(in_chunk(r, i, before=False, after=True) for r, i in media(case)),
    "chunk inside a span": lambda case: any(in_chunk(r, i, before=True, after=True) for r, i in media(case)),
    "span cached as a prefix": lambda case: any(
        r.chunk is not None and i.spans[-1][1] < r.chunk.prefix for r, i in media(case)
    ),
    "several spans": lambda case: any(len(i.spans) > 1 for _, i in media(case)),
    "item without spans": lambda case: any(
        i is not None and not i.spans for r in case.requests for i in r.items or ()
    ),
    "none among items": lambda case: any(None in (r.items or ()) for r in case.requests),
    "none among requests": lambda case: any(r.items is None and r.same_as is None for r in case.requests),
    "twins in one request": lambda case: twins(case, same_modality=True, same_request=True),
    "twins in two requests": lambda case: twins(case, same_modality=True, same_request=False),
    "one hash in two modalities": lambda case: twins(case, same_modality=False, same_request=True),
    "shared media": lambda case: any(r.same_as is not None for r in case.requests),
    "decoding with media": lambda case: any(r.chunk is None and r.items for r in case.requests),
    "decoding without": lambda case: any(r.chunk is None and r.items is None for r in case.requests),
    "precomputed": lambda case: any(i.precomputed for _, i in media(case)),
    "precomputed without feature": lambda case: any(not i.has_feature for _, i in media(case)),
    "precomputed twin that comes later": lambda case: any(
        not a.precomputed
        and b.precomputed
        and a.hash is not None
        and (a.hash, a.modality) == (b.hash, b.modality)
        for n, (_, a) in enumerate(media(case))
        for _, b in media(case)[n + 1 :]
    ),
    "aliases": lambda case: bool(reference.plan(case.build().ctx).aliases),
    "an alias that comes first": lambda case: any(
        twins and canonical.encoded is not None
        for canonical, twins in reference.plan(case.build().ctx).aliases.items()
    ),
    "misses in two modalities": lambda case: len(reference.plan(case.build().ctx).misses) > 1,
    "negative id": lambda case: any(i < 0 for i in case.ids),
    "id beyond the vocabulary": lambda case: any(i >= case.vocabulary for i in case.ids),
    "id beyond 32 bits": lambda case: any(abs(i) > 2**31 for i in case.ids),
    "int32 ids": lambda case: case.id_dtype == torch.int32,
    "another row dtype": lambda case: any(kind != case.dtype for kind in case.row_dtypes),
    "deepstack beside none": lambda case: 0 < len(case.deepstack) < 3 and case.levels > 1,
}


@pytest.mark.parametrize("name", BATCH_CORNERS)
def test_batches_reach_their_corners(name: str) -> None:
    assert sum(map(BATCH_CORNERS[name], some_batches())) >= 3


RANGE_CORNERS: dict[str, Callable[[RangesCase], bool]] = {
    "no rows": lambda case: not case.ids,
    "no sources": lambda case: not case.sources,
    "no ranges": lambda case: not case.ranges and any(case.sources),
    "empty source": lambda case: 0 in case.sources,
    "one row": lambda case: len(case.ids) == 1 and bool(case.ranges),
    "first row": lambda case: any(r.dst_start == 0 for r in case.ranges),
    "last row": lambda case: any(r.dst_end == len(case.ids) - 1 for r in case.ranges),
    "adjacent": lambda case: any(a.dst_end + 1 == b.dst_start for a in case.ranges for b in case.ranges),
    "every row covered": lambda case: (
        bool(case.ids)
        and {row for r in case.ranges for row in range(r.dst_start, r.dst_end + 1)} == set(range(len(case.ids)))
    ),
    "overlap": lambda case: any(
        a is not b and a.dst_start <= b.dst_start <= a.dst_end for a in case.ranges for b in case.ranges
    ),
    "descending": lambda case: any(
        a.dst_start > b.dst_end for a, b in zip(case.ranges, case.ranges[1:], strict=False)
    ),
    "source row used twice": lambda case: any(
        a is not b and (a.source, a.src_start) == (b.source, b.src_start)
        for a in case.ranges
        for b in case.ranges
    ),
    "source's last row": lambda case: any(
        r.src_start + r.dst_end - r.dst_start == case.sources[r.source] - 1 for r in case.ranges
    ),
    "middle of a source": lambda case: any(
        r.src_start > 0 and r.src_start + r.dst_end - r.dst_start < case.sources[r.source] - 1
        for r in case.ranges
    ),
    "long range": lambda case: any(r.dst_end - r.dst_start >= 5 for r in case.ranges),
    "other dtype": lambda case: any(kind != case.dtype for kind in case.source_dtypes),
    "strided": lambda case: case.strided,
    "negative id": lambda case: any(i < 0 for i in case.ids),
    "id beyond 32 bits": lambda case: any(abs(i) > 2**31 for i in case.ids),
}


@pytest.mark.parametrize("name", RANGE_CORNERS)
def test_ranges_reach_their_corners(name: str) -> None:
    assert sum(map(RANGE_CORNERS[name], some_ranges())) >= 3


def test_disjoint_ranges_ascend_and_lie_inside() -> None:
    for case in drawn(strategies.range_cases(overlaps=False, max_rows=6, max_source_rows=4)):
        assert len(case.ids) <= 6
        assert all(count <= 4 for count in case.sources)
        last = -1
        for entry in case.ranges:
            assert last < entry.dst_start <= entry.dst_end < len(case.ids)
            assert entry.src_start >= 0
            assert entry.src_start + entry.dst_end - entry.dst_start < case.sources[entry.source]
            last = entry.dst_end


def test_ids_outside_are_only_where_they_may_be() -> None:
    seen_outside = False
    for case in drawn(strategies.range_cases(outside_ids=False)):
        covered = {row for r in case.ranges for row in range(r.dst_start, r.dst_end + 1)}
        for row, token in enumerate(case.ids):
            inside = 0 <= token < case.vocabulary
            assert inside or row in covered
            seen_outside |= not inside
    assert seen_outside
    for case in drawn(strategies.map_cases(outside_ids=False)):
        assert all(
            0 <= token < case.vocabulary
            for token, place in zip(case.ids, case.row_map, strict=True)
            if place < 0
        )


def test_maps_and_masks_reach_their_corners() -> None:
    maps = drawn(strategies.map_cases(max_rows=5, max_pool_rows=3))
    assert all(len(case.ids) == len(case.row_map) <= 5 and case.pool <= 3 for case in maps)
    assert all(-1 <= place < case.pool for case in maps for place in case.row_map)
    assert any(case.pool == 0 and case.ids for case in maps)
    assert any(len(set(case.row_map)) < len(case.row_map) and min(case.row_map) >= 0 for case in maps)
    assert any(not case.ids for case in maps)
    masks = drawn(strategies.mask_cases(max_rows=5))
    assert all(len(case.mask) <= 5 for case in masks)
    assert any(case.mask and all(case.mask) for case in masks)
    assert any(case.mask and not any(case.mask) for case in masks)
    assert any(not case.mask for case in masks)
    assert any(case.mask[:2] == (False, True) for case in masks)


@pytest.mark.parametrize("prompt", [1, 4])
def test_splits_reach_every_way_to_cut(prompt: int) -> None:
    without_empty = set(drawn(strategies.splits(prompt, empty=False), 600))
    assert len(without_empty) == 2 ** (prompt - 1)
    for chunks in [*without_empty, *drawn(strategies.splits(prompt)), *strategies.single_cuts(prompt)]:
        position = 0
        for chunk in chunks:
            assert chunk.prefix == position
            position += chunk.length
        assert position == prompt
    assert any(chunk.length == 0 for chunks in drawn(strategies.splits(prompt)) for chunk in chunks)
    single = list(strategies.single_cuts(prompt))
    assert [chunks[0].length for chunks in single[:-1]] == list(range(prompt + 1))
    assert single[-1] == tuple(Chunk(position, 1) for position in range(prompt))


def test_chunks_lie_inside_their_prompt() -> None:
    found = drawn(strategies.chunks(5))
    assert {chunk.prefix for chunk in found} == set(range(6))
    assert {chunk.length for chunk in found} == set(range(-1, 6))
    assert all(chunk.prefix + chunk.length <= 5 for chunk in found)


@pytest.mark.parametrize("precomputed", [True, False])
def test_prompts_are_whole_and_twins_never_differ_in_rows(precomputed: bool) -> None:
    found = drawn(strategies.prompts(6, precomputed=precomputed), 100)
    assert all(case.requests[0].chunk == Chunk(0, 6) and len(case.ids) == 6 for case in found)
    assert any(i.precomputed for case in found for _, i in media(case)) == precomputed
    assert any(i.hash is not None for case in found for _, i in media(case)) == (not precomputed)


def test_items_stay_in_their_bounds() -> None:
    for items in drawn(strategies.items(7, max_spans=3, max_span=2, modalities=["video"], precomputed=False)):
        spans = sorted(span for item in items if item is not None for span in item.spans)
        assert len(spans) <= 3
        assert all(end - start < 2 and end < 7 for start, end in spans)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
        assert all(item is None or (item.modality == "video" and not item.precomputed) for item in items)


def test_batches_are_valid_and_their_items_are_their_own() -> None:
    for case in some_batches()[:200]:
        one, other = case.build(), case.build()
        build_plan(one.ctx, one.input_ids.shape[0])
        assert one.input_ids.tolist() == list(case.ids)
        assert not set(one.rows) & set(other.rows)
        for item, again in zip(one.rows, other.rows, strict=True):
            assert torch.equal(one.rows[item], other.rows[again])
            assert item.num_tokens == one.rows[item].shape[0]


def test_twins_have_one_contents() -> None:
    met = 0
    for case in some_batches():
        rows = {}
        for item, contents in case.build().rows.items():
            if item.share_key is not None and item.encoded is None and item.num_tokens:
                met += item.share_key in rows
                assert torch.equal(rows.setdefault(item.share_key, contents), contents)
    assert met > 10


def test_a_request_may_share_the_very_media_of_another() -> None:
    item = ItemCase("image", ((0, 1),))
    case = BatchCase(
        requests=(RequestCase((item,), Chunk(0, 2)), RequestCase(None, Chunk(0, 2), same_as=0)),
        ids=(0, 0, 0, 0),
        vocabulary=1,
        width=2,
    )
    first, second = case.build().ctx.mm_inputs
    assert isinstance(first, MultimodalInputs)
    assert first is second


@pytest.mark.parametrize(
    "strategy",
    [strategies.range_cases(), strategies.map_cases(), strategies.mask_cases(), strategies.batches()],
)
def test_a_case_can_be_made_again_from_its_repr(strategy: st.SearchStrategy[Any]) -> None:
    for case in drawn(strategy, 50):
        assert eval(repr(case)) == case


def test_rows_of_a_case_can_be_told_apart() -> None:
    for case in [*some_ranges(), *drawn(strategies.mask_cases()), *drawn(strategies.map_cases())]:
        assert isinstance(case, RangesCase | MaskCase | MapCase)
        rows = [
            tuple(row.to(case.dtype).tolist())
            for tensors in case.inputs(case.arguments()).values()
            for tensor in tensors
            for row in tensor
        ]
        assert len(set(rows)) == len(rows)
        assert all(any(row) for row in rows)


def test_examples_shrink_to_something_small() -> None:
    quick = settings(derandomize=True, database=None, max_examples=2000)
    case = find(
        strategies.range_cases(overlaps=False),
        lambda case: any(r.src_start == 1 for r in case.ranges),
        settings=quick,
    )
    assert case.ranges == (SourceRange(0, 0, 0, 1),)
    assert (case.ids, case.sources, case.dtype, case.seed) == ((0,), (2,), torch.float32, 0)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "masks": (lambda: strategies.masks(-1), "max_rows must be an integer, 0 or more, got -1"),
    "masks of half a row": (lambda: strategies.masks(2.5), "max_rows must be an integer, 0 or more, got 2.5"),
    "row maps": (lambda: strategies.row_maps(-1, 3), "rows must be .*, 0 or more, got -1"),
    "a pool": (lambda: strategies.row_maps(3, -1), "pool must be .*, 0 or more, got -1"),
    "ranges": (lambda: strategies.ranges(-1, [3]), "rows must be .*, 0 or more, got -1"),
    "sources": (
        lambda: strategies.ranges(4, [-3, 2]),
        r"sources must be .*, 0 or more, such as .*got \[-3, 2\]",
    ),
    "no list of sources": (lambda: strategies.ranges(4, 3), "sources must be a list of integers.*got 3"),
    "max_ranges": (lambda: strategies.ranges(4, [3], max_ranges=-1), "max_ranges must be .*got -1"),
    "range cases": (lambda: strategies.range_cases(max_rows=-1), "max_rows must be .*got -1"),
    "range cases' sources": (lambda: strategies.range_cases(max_sources=-1), "max_sources must be"),
    "range cases' source rows": (lambda: strategies.range_cases(max_source_rows=-1), "max_source_rows must be"),
    "range cases' dtypes": (
        lambda: strategies.range_cases(dtypes=[]),
        r"list of floating-point dtypes.*got \[\]",
    ),
    "map cases": (lambda: strategies.map_cases(max_pool_rows=-1), "max_pool_rows must be"),
    "map cases' rows": (lambda: strategies.map_cases(max_rows=-1), "max_rows must be"),
    "map cases' dtypes": (lambda: strategies.map_cases(dtypes=[torch.int8]), "list of floating-point dtypes"),
    "mask cases": (lambda: strategies.mask_cases(max_rows=True), "max_rows must be .*got True"),
    "mask cases' dtypes": (lambda: strategies.mask_cases(dtypes=()), "list of floating-point dtypes"),
    "batches": (lambda: strategies.batches(max_requests=-1), "max_requests must be .*, 0 or more, got -1"),
    "batches' prompts": (lambda: strategies.batches(max_prompt=0), "max_prompt must be .*, 1 or more, got 0"),
    "batches' decodes": (lambda: strategies.batches(max_decodes=-1), "max_decodes must be"),
    "batches' dtypes": (lambda: strategies.batches(dtypes=None), "list of floating-point dtypes.*got None"),
    "prompts": (lambda: strategies.prompts(-1), "prompt must be .*, 0 or more, got -1"),
    "prompts' dtypes": (lambda: strategies.prompts(3, dtypes=["float32"]), "list of floating-point dtypes"),
    "items": (lambda: strategies.items(-1), "prompt must be .*, 0 or more, got -1"),
    "span": (lambda: strategies.items(5, span=0), "span must be an integer, 1 or more, got 0"),
    "max_span": (lambda: strategies.items(5, max_span=0), "max_span must be .*, 1 or more, got 0"),
    "max_span None": (lambda: strategies.items(5, max_span=None), "max_span must be .*got None"),
    "max_spans": (lambda: strategies.items(5, max_spans=-1), "max_spans must be"),
    "modalities": (lambda: strategies.items(5, modalities=["x"]), r"names out of \['image', .*got \['x'\]"),
    "no modalities": (lambda: strategies.items(5, modalities=[]), r"modalities must be .*got \[\]"),
    "letters": (lambda: strategies.items(5, modalities="image"), "modalities must be .*got 'image'"),
    "members": (lambda: strategies.items(5, modalities=list(Modality)), "modalities must be"),
    "chunks": (lambda: strategies.chunks(-1), "prompt must be .*, 0 or more, got -1"),
    "splits": (lambda: strategies.splits(-1), "prompt must be .*, 0 or more, got -1"),
    "single cuts": (lambda: strategies.single_cuts(-1), "prompt must be .*, 0 or more, got -1"),
    "token ids": (lambda: strategies.token_ids(-1, 3), "rows must be .*, 0 or more, got -1"),
    "no vocabulary": (lambda: strategies.token_ids(3, 0), "vocabulary must be .*, 1 or more, got 0"),
    "id dtype": (
        lambda: strategies.token_ids(3, 2, id_dtype=torch.int16),
        r"id_dtype must be torch\.int32 or torch\.int64, got torch\.int16",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_are_none_of_their_choices_are_refused_at_the_call(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(OptionError, match=message):
        call()


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.masks(0),
        strategies.row_maps(0, 0),
        strategies.ranges(0, [], max_ranges=0),
        strategies.range_cases(max_rows=0, max_sources=0, max_source_rows=0),
        strategies.map_cases(max_rows=0, max_pool_rows=0),
        strategies.mask_cases(max_rows=0),
        strategies.batches(max_requests=0, max_prompt=1, max_decodes=0),
        strategies.prompts(0),
        strategies.items(0, max_spans=0, max_span=1, span=1, modalities=("audio",)),
        strategies.chunks(0),
        strategies.splits(0),
        strategies.token_ids(0, 1),
    ],
)
def test_the_least_options_are_drawn_from(strategy: st.SearchStrategy[Any]) -> None:
    assert drawn(strategy, 20)
