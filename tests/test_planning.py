"""Invariant: a plan covers each item position of the chunk once, from one canonical item per modality and hash."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import one_request, random_batch, simple_item

from mmgraph.errors import AliasError, ContextError, InputsError, MultimodalError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.planning import EncodePlan, ScatterRange, build_plan


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32 - 1))
def test_ranges_cover_what_the_walk_covers(seed: int) -> None:
    batch = random_batch(seed)
    plan = build_plan(batch.ctx, batch.input_ids.shape[0])
    chosen = batch.canonicals()
    expected = []
    for row, item, place in batch.touched():
        key = (item.modality, item.hash) if item.hash is not None else id(item)
        expected.append((row, chosen[key], place))
    covered = [
        (entry.flat_dst_start + step, entry.item, entry.item_src_start + step)
        for entry in plan.scatter_ranges
        for step in range(entry.flat_dst_end - entry.flat_dst_start + 1)
    ]
    assert covered == expected
    assert len({row for row, _, _ in covered}) == len(covered)
    assert all(entry.item_src_end < entry.item.num_tokens for entry in plan.scatter_ranges)
    assert all(
        entry.item_src_end - entry.item_src_start == entry.flat_dst_end - entry.flat_dst_start
        for entry in plan.scatter_ranges
    )
    assert plan.items == tuple(chosen.values())
    assert bool(plan) == bool(expected)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32 - 1))
def test_each_touched_item_is_canonical_or_alias_once(seed: int) -> None:
    batch = random_batch(seed)
    plan = build_plan(batch.ctx, batch.input_ids.shape[0])
    touched = list(dict.fromkeys(item for _, item, _ in batch.touched()))
    aliases = [twin for twins in plan.aliases_by_canonical.values() for twin in twins]
    assert sorted(map(id, [*plan.items, *aliases])) == sorted(map(id, touched))
    for canonical, twins in plan.aliases_by_canonical.items():
        assert twins
        assert all((twin.modality, twin.hash) == (canonical.modality, canonical.hash) for twin in twins)
    misses = [item for items in plan.misses_by_modality.values() for item in items]
    assert sorted(map(id, misses)) == sorted(id(item) for item in plan.items if item.encoded is None)
    assert all(items for items in plan.misses_by_modality.values())
    assert all(
        item.modality is modality for modality, items in plan.misses_by_modality.items() for item in items
    )


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_arrays_are_the_ranges(seed: int) -> None:
    batch = random_batch(seed)
    plan = build_plan(batch.ctx, batch.input_ids.shape[0])
    again = dataclasses.replace(plan)  # derives the arrays from the ranges
    for name in ("dst_start", "dst_end", "src_start"):
        assert getattr(plan, name).dtype == np.int64
        assert np.array_equal(getattr(plan, name), getattr(again, name))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_planning_changes_nothing(seed: int) -> None:
    batch = random_batch(seed)
    before = {
        item: (item.feature, item.encoded, item.offsets, item.hash, item.pad_value) for item in batch.contents
    }
    first = build_plan(batch.ctx, batch.input_ids.shape[0])
    second = build_plan(batch.ctx, batch.input_ids.shape[0])
    assert first == second
    assert all(
        (item.feature, item.encoded, item.offsets, item.hash, item.pad_value) == values
        for item, values in before.items()
    )


def test_source_rows_count_through_spans_that_the_chunk_does_not_touch() -> None:
    item = simple_item([(2, 4), (8, 9), (12, 15)])
    ctx = MultimodalForwardContext([MultimodalInputs([item])], [9], [5])
    assert build_plan(ctx, 5).scatter_ranges == [
        ScatterRange(0, 0, item, 4, 4),
        ScatterRange(3, 4, item, 5, 6),
    ]


def test_text_requests_advance_the_base_and_empty_ones_do_not() -> None:
    item = simple_item([(0, 1)])
    ctx = MultimodalForwardContext(
        [
            None,
            MultimodalInputs([simple_item([(0, 3)])]),
            MultimodalInputs([simple_item([(0, 3)])]),
            MultimodalInputs([item]),
        ],
        [4, 0, 0, 0],
        [3, 0, -7, 2],
    )
    plan = build_plan(ctx, 6)
    assert plan.scatter_ranges == [ScatterRange(3, 4, item, 0, 1)]
    assert list(plan.range_requests) == [3]


def test_an_encoded_twin_that_comes_later_is_canonical() -> None:
    first, second, twin, fourth = (simple_item([(0, 2)], hash=7) for _ in range(4))
    twin.encoded = twin.feature
    inputs = [MultimodalInputs([item]) for item in (first, second, twin, fourth)]
    plan = build_plan(MultimodalForwardContext(inputs, [0] * 4, [3] * 4), 12)
    assert plan.misses_by_modality == {}
    assert plan.aliases_by_canonical == {twin: [first, second, fourth]}
    assert {entry.item for entry in plan.scatter_ranges} == {twin}


def test_an_encoded_twin_outside_the_chunk_is_no_canonical() -> None:
    far, near = simple_item([(10, 12)], hash=7), simple_item([(0, 2)], hash=7)
    far.encoded = far.feature
    plan = build_plan(one_request([far, near], 5), 5)
    assert plan.misses_by_modality == {Modality.IMAGE: [near]}
    assert plan.aliases_by_canonical == {}


def test_one_hash_in_two_modalities_is_two_items() -> None:
    image, audio = simple_item([(0, 1)], hash=3), simple_item([(2, 3)], Modality.AUDIO, hash=3)
    plan = build_plan(one_request([image, audio], 4), 4)
    assert plan.misses_by_modality == {Modality.IMAGE: [image], Modality.AUDIO: [audio]}
    assert plan.aliases_by_canonical == {}


def test_no_hash_is_never_shared_but_one_item_in_two_requests_is_itself() -> None:
    alone, other = simple_item([(0, 1)]), simple_item([(0, 1)])
    inputs = [MultimodalInputs([alone]), MultimodalInputs([other]), MultimodalInputs([alone])]
    plan = build_plan(MultimodalForwardContext(inputs, [0] * 3, [2] * 3), 6)
    assert plan.misses_by_modality == {Modality.IMAGE: [alone, other]}
    assert plan.aliases_by_canonical == {}
    assert plan.requests_of(alone) == [0, 2]


@pytest.mark.parametrize("same_request", [True, False])
def test_twins_of_different_sizes_are_refused_and_both_are_named(same_request: bool) -> None:
    small, large = simple_item([(0, 1)], hash=0xABC), simple_item([(2, 4)], hash=0xABC)
    if same_request:
        ctx = one_request([small, large], 5)
    else:
        ctx = MultimodalForwardContext([MultimodalInputs([small]), MultimodalInputs([large])], [0, 0], [5, 5])
    with pytest.raises(AliasError, match=r"0xabc.*\(2, 4\).*3 tokens.*\(0, 1\).*has 2") as caught:
        build_plan(ctx, 10)
    assert caught.value.request == (0 if same_request else 1)
    large.hash = 5
    assert len(build_plan(ctx, 10).scatter_ranges) == 2


@pytest.mark.parametrize(
    ("prefixes", "lengths", "message"),
    [
        ([0], [4, 4], "got 1 and 2"),
        ([0, 0], [4], "got 2 and 1"),
        ([0, 0, 0], [1, 1, 1], "got 2 for 3 prefill requests"),
        ([0, 0], [6, 5], "sum to 11 rows, more than the 10 rows"),
        ([0, -1], [4, 4], r"extend_prefix_lens\[1\] must not be negative, got -1"),
        ([0, 0], [4, 2.0], "extend_seq_lens must be a list of integers"),
        ([0, "1"], [4, 4], "extend_prefix_lens must be a list of integers"),
    ],
)
def test_wrong_lengths_are_refused(prefixes: list[int], lengths: list[int], message: str) -> None:
    inputs = [MultimodalInputs([simple_item([(0, 1)])]), None]
    with pytest.raises(ContextError, match=message):
        build_plan(MultimodalForwardContext(inputs, prefixes, lengths), 10)
    assert len(build_plan(MultimodalForwardContext(inputs, [0, 0], [4, 6]), 10).scatter_ranges) == 1


def test_negative_lengths_do_not_hide_a_sum_that_is_too_large() -> None:
    with pytest.raises(ContextError, match="sum to 11"):
        build_plan(MultimodalForwardContext([None, None], [0, 0], [11, -5]), 10)


def test_lengths_may_be_arrays() -> None:
    item = simple_item([(0, 1)])
    ctx = MultimodalForwardContext([MultimodalInputs([item])], np.array([0]), np.array([4], dtype=np.int32))
    assert len(build_plan(ctx, 4).scatter_ranges) == 1


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([(3, 2)], r"span \(3, 2\) is empty"),
        ([(-1, 2)], r"span \(-1, 2\) must lie in"),
        ([(0, 2**40)], "must lie in positions 0 to"),
        ([(0, 3), (3, 5)], r"span \(3, 5\) begins at or before position 3"),
        ([(5, 6), (1, 2)], r"span \(1, 2\) begins at or before position 6"),
        ([(0.0, 2.0)], r"got \(0.0, 2.0\)"),
        ([(0, True)], "got"),
        ([(0, 1, 2)], r"got \(0, 1, 2\)"),
        ((3, 9), r"such as \[\(3, 9\)\]; got 3"),
        (4, "got 4"),
        (["ab"], "got 'ab'"),
    ],
)
def test_malformed_offsets_are_refused_and_the_item_named(offsets: object, message: str) -> None:
    good, bad = simple_item([(10, 11)]), MultimodalDataItem("image", offsets, hash=0x77)
    ctx = MultimodalForwardContext([None, MultimodalInputs([good, bad])], [0, 0], [0, 12])
    with pytest.raises(InputsError, match=message) as caught:
        build_plan(ctx, 12)
    assert "request 1" in str(caught.value)
    assert "item 1, IMAGE item (hash 0x77" in str(caught.value)
    assert caught.value.request == 1
    bad.offsets = [(0, 1)]
    assert len(build_plan(ctx, 12).scatter_ranges) == 2


def test_overlapping_items_are_refused_even_outside_the_chunk() -> None:
    first, second = simple_item([(4, 8)], hash=1), simple_item([(0, 1), (7, 9)], hash=2)
    ctx = one_request([first, second], 3)
    with pytest.raises(
        InputsError, match=r"item 1, IMAGE.*span \(7, 9\) overlaps span \(4, 8\) of item 0, IMAGE"
    ):
        build_plan(ctx, 3)
    first.offsets = [(4, 6)]
    assert build_plan(ctx, 3).scatter_ranges == [ScatterRange(0, 1, second, 0, 1)]


def test_wrong_kinds_of_inputs_are_refused() -> None:
    with pytest.raises(ContextError, match=r"mm_inputs\[0\] must be MultimodalInputs or None, got list"):
        build_plan(MultimodalForwardContext([[simple_item([(0, 1)])]], [0], [2]), 2)
    with pytest.raises(InputsError, match="item 0, an object of type dict: mm_items must hold"):
        build_plan(one_request([{}], 2), 2)


def test_replaced_items_and_offsets_are_seen() -> None:
    item, other = simple_item([(0, 1)]), simple_item([(5, 6)])
    inputs = MultimodalInputs([item])
    ctx = MultimodalForwardContext([inputs], [0], [8])
    assert [entry.flat_dst_start for entry in build_plan(ctx, 8).scatter_ranges] == [0]
    inputs.mm_items = [item, other]
    assert [entry.flat_dst_start for entry in build_plan(ctx, 8).scatter_ranges] == [0, 5]
    item.offsets = [(3, 4)]
    assert [entry.flat_dst_start for entry in build_plan(ctx, 8).scatter_ranges] == [3, 5]
    item.hash = other.hash = 9
    assert build_plan(ctx, 8).aliases_by_canonical == {item: [other]}


def test_without_requests_drops_their_ranges_and_what_they_alone_needed() -> None:
    shared, twin, lone = (
        simple_item([(0, 1)], hash=1),
        simple_item([(0, 1)], hash=1),
        simple_item([(2, 3)], hash=2),
    )
    inputs = [MultimodalInputs([shared, lone]), MultimodalInputs([twin])]
    plan = build_plan(MultimodalForwardContext(inputs, [0, 0], [4, 4]), 8).without_requests({0})
    assert list(plan.scatter_ranges) == [ScatterRange(4, 5, shared, 0, 1)]
    assert plan.misses_by_modality == {Modality.IMAGE: [shared]}
    assert plan.aliases_by_canonical == {shared: [twin]}


def test_an_empty_plan_is_false() -> None:
    assert not EncodePlan()
    assert not build_plan(MultimodalForwardContext(None, None, None), 3)


class _Counted(list):  # type: ignore[type-arg]
    reads = 0

    def __getitem__(self, index: object) -> object:
        got = super().__getitem__(index)  # type: ignore[index]
        _Counted.reads += len(got) if isinstance(index, slice) else 1
        return got


@pytest.mark.parametrize("before", [4, 4000])
def test_only_spans_near_the_chunk_are_read(before: int) -> None:
    items = [simple_item([(10 * k, 10 * k + 5)], feature=0) for k in range(2 * before)]
    inputs = MultimodalInputs(items)
    index = inputs.span_index()
    inputs._index = dataclasses.replace(
        index, **{name: _Counted(getattr(index, name)) for name in ("starts", "ends", "sources", "items")}
    )
    _Counted.reads = 0
    plan = build_plan(MultimodalForwardContext([inputs], [10 * before], [30]), 30)
    assert len(plan.scatter_ranges) == 3
    assert _Counted.reads <= 4 * 3 + 2 * 14  # the spans that are touched, and two bisections


def test_planning_imports_no_torch() -> None:
    code = "import sys, mmgraph, mmgraph.planning; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_are_multimodal_errors() -> None:
    assert all(issubclass(error, MultimodalError) for error in (AliasError, ContextError, InputsError))
