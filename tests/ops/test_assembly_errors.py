"""Invariant: each wrong argument of the assembly ops has its own clear error, and the next good call works."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from mmgraph import ops

IDS = torch.tensor([0, 1, 2])
TABLE = torch.arange(8.0).reshape(4, 2)
POOL = torch.arange(6.0).reshape(3, 2) + 100
MAP = torch.tensor([-1, 2, -1], dtype=torch.int32)


def good():
    got = ops.assemble_embeddings(IDS, TABLE, POOL, MAP)
    assert got.tolist() == [[0.0, 1.0], [104.0, 105.0], [4.0, 5.0]]
    merged = ops.merge_embeddings(TABLE, torch.tensor([False, True, False, True]), POOL[:2])
    assert merged.tolist() == [[0.0, 1.0], [100.0, 101.0], [4.0, 5.0], [102.0, 103.0]]
    assert ops.deepstack_add(TABLE[:3], POOL, MAP, 0)[1].tolist() == [106.0, 108.0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"input_ids": IDS[None]}, ops.ArgumentError, "input_ids must be a one-dimensional"),
        ({"input_ids": IDS.float()}, ops.ArgumentError, "int32 or int64"),
        ({"table": TABLE.long()}, ops.ArgumentError, "table must be a floating-point matrix"),
        ({"table": TABLE[0]}, ops.ArgumentError, "table must be a floating-point matrix"),
        ({"pool": POOL[0]}, ops.ArgumentError, "pool must be a floating-point matrix"),
        ({"pool": POOL.reshape(2, 3)}, ops.ArgumentError, "as wide as table rows, 2, got 3"),
        ({"row_map": MAP.long()}, ops.ArgumentError, "row_map must be a one-dimensional int32"),
        ({"row_map": MAP[:2]}, ops.ArgumentError, "one entry per row, 3, got 2"),
        ({"row_map": MAP.numpy()}, ops.ArgumentError, "RowMap or an int32 tensor, got ndarray"),
        (
            {"input_ids": IDS.tolist()},
            ops.ArgumentError,
            r"input_ids must be a torch\.Tensor, got list; make it with",
        ),
        (
            {"table": TABLE.numpy()},
            ops.ArgumentError,
            r"table must be a torch\.Tensor, got ndarray; make it with",
        ),
        ({"table": torch.nn.Embedding(4, 2)}, ops.ArgumentError, r"table must be a .*got Embedding; pass one"),
        ({"pool": None}, ops.ArgumentError, r"pool must be a torch\.Tensor, got NoneType; pass one"),
        ({"row_map": MAP + 1}, ops.DataError, "row 1 has 3"),
        ({"row_map": MAP - 1}, ops.DataError, "row 0 has -2"),
        ({"pool": POOL.to("meta")}, ops.ArgumentError, "pool on meta"),
        (
            {"input_ids": torch.tensor([0, 9, 4]), "strict": True},
            ops.DataError,
            r"row 2 has id 4, outside the vocabulary of 4.*\(1 such",
        ),
        ({"table": TABLE[:0]}, ops.DataError, "outside the vocabulary of 0"),
    ],
)
def test_assemble_refuses(change, error, words):
    arguments = {"input_ids": IDS, "table": TABLE, "pool": POOL, "row_map": MAP} | change
    strict = arguments.pop("strict", False)
    with pytest.raises(error, match=words):
        ops.assemble_embeddings(**arguments, strict=strict)
    out = torch.full((3, 2), 7.0)
    with pytest.raises(error, match=words):
        ops.assemble_embeddings_out(**arguments, strict=strict, out=out)
    assert bool((out == 7).all())
    good()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.empty(4, 2), r"shape \[3, 2\], got \[4, 2\]"),
        (torch.empty(3, 2, dtype=torch.float64), "table's dtype"),
        ([[0.0, 0.0]] * 3, r"out must be a torch\.Tensor, got list"),
        (TABLE[:3], "overlaps table"),
        (POOL, "overlaps pool"),
        (
            torch.empty(1, 2).expand(3, 2),
            r"a place of their own in memory, got shape \[3, 2\] with strides \[0, 1\]",
        ),
        (torch.empty(3, 1).expand(3, 2), "a place of their own"),
        (torch.empty(1, 1).expand(3, 2), "a place of their own"),
        (torch.empty(9).as_strided((3, 2), (1, 1)), "a place of their own"),
    ],
)
def test_the_out_form_refuses_buffers_that_do_not_fit(out, words):
    with pytest.raises(ops.ArgumentError, match=words):
        ops.assemble_embeddings_out(IDS, TABLE, POOL, MAP, out=out)
    good()


def test_the_out_form_refuses_columns_beside_an_inputs_and_says_so():
    room = torch.zeros(5, 4)
    arguments = {"input_ids": IDS, "table": room[:, 2:], "pool": POOL, "row_map": MAP}
    with pytest.raises(ops.ArgumentError, match="overlaps table in memory, counted from the first element"):
        ops.assemble_embeddings_out(**arguments, out=room[:3, :2])
    good()


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, 3).t(),
        torch.empty(6, 4)[::2, 1:3],
        torch.empty(9).as_strided((3, 2), (1, 3)),
        torch.empty(3, 3)[:, :2],
    ],
)
def test_the_out_form_takes_strided_buffers(out):
    ops.assemble_embeddings_out(IDS, TABLE, POOL, MAP, out=out)
    assert torch.equal(out, ops.assemble_embeddings(IDS, TABLE, POOL, MAP))
    one = torch.empty(1, 1).expand(1, 1)
    ops.assemble_embeddings_out(IDS[:1], TABLE[:, :1], POOL[:, :1], MAP[:1], out=one)
    ops.assemble_embeddings_out(IDS[:0], TABLE, POOL, MAP[:0], out=torch.empty(1, 2).expand(0, 2))


def test_the_out_form_refuses_gradients_and_works_without():
    table = TABLE.clone().requires_grad_()
    out = torch.empty(3, 2)
    with pytest.raises(ops.GradientError, match="use assemble_embeddings"):
        ops.assemble_embeddings_out(IDS, table, POOL, MAP, out=out)
    with torch.no_grad():
        ops.assemble_embeddings_out(IDS, table, POOL, MAP, out=out)
    assert torch.equal(out, ops.assemble_embeddings(IDS, TABLE, POOL, MAP))


def test_the_gradient_free_op_refuses_to_drop_a_gradient():
    table = TABLE.clone().requires_grad_()
    with pytest.raises(ops.GradientError, match=r"mmgraph\.ops\.assemble_embeddings"):
        torch.ops.mmgraph.assemble_embeddings(IDS, table, POOL, MAP, False)
    with pytest.raises(ops.GradientError, match=r"mmgraph\.ops\.merge_embeddings"):
        torch.ops.mmgraph.merge_embeddings(table, torch.tensor([True, False, False, False]), POOL[:1], None)
    with pytest.raises(ops.GradientError, match=r"mmgraph\.ops\.deepstack_add"):
        torch.ops.mmgraph.deepstack_add(table[:3], POOL, MAP, 0)
    good()


MASK = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    ("embeds", "mask", "features", "count", "error", "words"),
    [
        (TABLE, MASK, POOL[:1], None, ops.CountMismatchError, "2 placeholders but 1 feature"),
        (TABLE, MASK, POOL, None, ops.CountMismatchError, "2 placeholders but 3 feature"),
        (TABLE, MASK, POOL[:0], None, ops.CountMismatchError, "2 placeholders but 0 feature"),
        (TABLE, MASK, POOL[:2], 3, ops.CountMismatchError, "3 placeholders but 2 feature"),
        (TABLE, MASK, POOL, 3, ops.CountMismatchError, "2 placeholders but 3 feature"),
        (TABLE, MASK, POOL[:2].reshape(1, 4), None, ops.ArgumentError, "as wide as embeds rows, 2, got 4"),
        (TABLE, MASK, POOL[:2].reshape(4, 1), None, ops.ArgumentError, "as wide as embeds rows, 2, got 1"),
        (TABLE, MASK[:3], POOL[:2], None, ops.ArgumentError, "one entry per row, 4, got 3"),
        (TABLE, MASK.int(), POOL[:2], None, ops.ArgumentError, "bool tensor"),
        (TABLE.tolist(), MASK, POOL[:2], None, ops.ArgumentError, "embeds must be a .* got list"),
        (TABLE, MASK.tolist(), POOL[:2], None, ops.ArgumentError, "mask must be a .* got list"),
        (TABLE, MASK, tuple(POOL[:2]), None, ops.ArgumentError, "features must be a .* got tuple; make it"),
        (TABLE, MASK, POOL[:2].long(), None, ops.ArgumentError, "features must be a floating-point"),
        (TABLE[:0], MASK[:0], POOL[:1], None, ops.CountMismatchError, "0 placeholders but 1 feature"),
    ],
)
def test_merge_refuses(embeds, mask, features, count, error, words):
    with pytest.raises(error, match=words):
        ops.merge_embeddings(embeds, mask, features, num_placeholders=count)
    good()


@pytest.mark.parametrize(
    ("pool", "row_map", "level", "error", "words"),
    [
        (POOL, MAP, 1, ops.ArgumentError, "level must be between 0 and 0, got 1"),
        (POOL, MAP, -1, ops.ArgumentError, "level must be between"),
        (POOL.reshape(2, 3), MAP, 0, ops.ArgumentError, "multiple of hidden width 2, got 3"),
        (POOL, MAP[:1], 0, ops.ArgumentError, "one entry per row"),
        (POOL, MAP + 1, 0, ops.DataError, "deepstack_add: row_map values"),
        (POOL.tolist(), MAP, 0, ops.ArgumentError, "deepstack_add: pool must be a .* got list"),
        (POOL, MAP.tolist(), 0, ops.ArgumentError, "RowMap or an int32 tensor, got list"),
    ],
)
def test_deepstack_refuses(pool, row_map, level, error, words):
    with pytest.raises(error, match=words):
        ops.deepstack_add(TABLE[:3], pool, row_map, level)
    good()


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (([0], [3], [0]), "destination range must lie inside the 3 output rows; range 0 is rows 0 to 3"),
        (([-1], [0], [0]), "destination range must lie inside"),
        (([2], [1], [0]), "must not be empty"),
        (([0, 1], [0, 2], [0, 4]), "source range must lie inside the 5 pool rows; range 1 is rows 4 to 5"),
        (([0], [0], [-1]), "source range must lie inside"),
        (([0, 1], [0], [0]), "one entry per range, got 2, 1 and 1"),
        (([0.5], [1], [0]), "dst_start must be a one-dimensional integer"),
        (([[0]], [[1]], [[0]]), "dst_start must be a one-dimensional integer"),
        (([0, [1, 2]], [1], [0]), "dst_start must be a one-dimensional integer"),
        (([0], [True], [0]), "dst_end must be a one-dimensional integer"),
        (([0], [1], None), "src_start must be a one-dimensional integer"),
        (([0], [1], torch.ones(1, requires_grad=True)), "src_start must be a one-dimensional integer"),
        # What overflows 64 bits where it is added or subtracted.
        (
            ([0], [2], [HUGE]),
            f"source range must lie inside the 5 pool rows; range 0 is rows {HUGE} to {HUGE + 2}",
        ),
        (([HUGE, 1], [-HUGE - 1, 2], [0, 2]), f"must not be empty.*range 0 is rows {HUGE} to {-HUGE - 1}"),
        (([1], [-HUGE - 1], [0]), "must not be empty"),
        (([-HUGE - 1], [2], [0]), "destination range must lie inside"),
        (([-HUGE - 1], [HUGE], [-HUGE - 1]), "destination range must lie inside"),
        (([0], [1], [-HUGE - 1]), "source range must lie inside"),
        ((np.array([2**64 - 1], dtype=np.uint64), [1], [0]), "destination range must lie inside"),
    ],
)
def test_a_row_map_refuses_ranges_out_of_bounds(ranges, words):
    with pytest.raises(ops.ArgumentError, match=words):
        ops.RowMap.from_ranges(3, *ranges, pool_rows=5)
    assert ops.RowMap.from_ranges(3, [1], [2], [3], pool_rows=5).host.tolist() == [-1, 3, 4]


@pytest.mark.parametrize("pool_rows", [0, 1, 5])
@pytest.mark.parametrize("source", [HUGE, HUGE - 1, HUGE - 5])
def test_a_range_longer_than_the_pool_is_outside_it_from_any_source(pool_rows, source):
    with pytest.raises(
        ops.ArgumentError, match=f"must lie inside the {pool_rows} pool rows; range 0 is rows {source}"
    ):
        ops.RowMap.from_ranges(10, [0], [5], [source], pool_rows=pool_rows)


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (None, "NoneType"),
        ("6", "str"),
        (6.0, "float"),
        (8.5, "float"),
        (True, "bool"),
        (np.True_, "bool"),
        (torch.tensor(6), "Tensor"),
    ],
)
def test_a_row_map_refuses_counts_that_are_no_integers(count, kind):
    for name, make in (
        ("num_rows", lambda: ops.RowMap.from_ranges(count, [0], [0], [0], pool_rows=6)),
        ("pool_rows", lambda: ops.RowMap.from_ranges(6, [0], [0], [0], pool_rows=count)),
        ("num_rows", lambda: ops.RowMap(count, 6, RANGES)),
        ("pool_rows", lambda: ops.RowMap(6, count, RANGES)),
    ):
        with pytest.raises(ops.ArgumentError, match=rf"{name} must be an integer, got (numpy\.)?{kind}"):
            make()


def test_a_row_map_makes_pythons_integers_of_numpys():
    for row_map in (
        ops.RowMap.from_ranges(np.int64(3), [1], [1], [0], pool_rows=np.uint8(5)),
        ops.RowMap(np.int64(3), np.uint8(5), RANGES),
    ):
        assert type(row_map.num_rows) is type(row_map.pool_rows) is int
        assert (row_map.num_rows, row_map.pool_rows) == (3, 5)


RANGES = np.array([[0, 1, 2], [2, 2, 0]], dtype=np.int32)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (RANGES.astype(np.int64), r"int32 array \[ranges, 3\].*got int64 \[2, 3\]"),
        (RANGES[0], r"int32 array \[ranges, 3\].*got int32 \[3\]"),
        (RANGES[:, :2], r"got int32 \[2, 2\]"),
        (RANGES.tolist(), "got list"),
        (RANGES[::-1], "must begin behind the one before.*range 1 is rows 0 to 1"),
        (
            np.array([[0, 1, 2], [1, 2, 0]], dtype=np.int32),
            "must begin behind the one before.*range 1 is rows 1 to 2",
        ),
        (np.array([[0, 3, 0]], dtype=np.int32), "must lie inside the 3 output rows"),
        (np.array([[-1, 0, 0]], dtype=np.int32), "must lie inside the 3 output rows"),
        (np.array([[1, 0, 0]], dtype=np.int32), "must not be empty"),
        (np.array([[0, 1, 4]], dtype=np.int32), "must lie inside the 5 pool rows; range 0 is rows 4 to 5"),
        (np.array([[0, 1, -1]], dtype=np.int32), "must lie inside the 5 pool rows"),
    ],
)
def test_the_constructor_refuses_ranges_that_are_not_as_they_are_kept(ranges, words):
    with pytest.raises(ops.ArgumentError, match=words):
        ops.RowMap(3, 5, ranges)


def test_the_constructor_keeps_a_copy_and_nothing_that_was_made_of_another_map():
    given = RANGES.copy()
    row_map = ops.RowMap(3, 5, given)
    given[0] = 9
    assert row_map.host.tolist() == [2, 3, 0]
    assert row_map.index().tolist()[:6] == RANGES.reshape(-1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        row_map.ranges[0, 0] = 1
    longer = dataclasses.replace(row_map, num_rows=70)
    assert longer.host.tolist() == [2, 3, 0] + [-1] * 67
    assert longer.index().shape == (3 * 3 + 2,)
    other = dataclasses.replace(row_map, ranges=RANGES[1:])
    assert other.host.tolist() == [-1, -1, 0]
    with pytest.raises(ops.ArgumentError, match="must lie inside the 2 output rows"):
        dataclasses.replace(row_map, num_rows=2)
    assert ops.RowMap(3, 0, RANGES[:0]).host.tolist() == [-1] * 3
    with pytest.raises(TypeError):
        ops.RowMap(3, 5, RANGES, [row_map.host])  # entries are never given


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, *(lambda m, n=n: pickle.loads(pickle.dumps(m, n)) for n in range(2, 6))]
)
def test_a_row_map_that_was_pickled_or_copied_is_the_same_and_frozen(again):
    for row_map in (ops.RowMap.from_ranges(3, [1], [2], [3], pool_rows=5), ops.RowMap(3, 5, RANGES)):
        expected, index = row_map.host.tolist(), row_map.index().tolist()
        got = again(row_map)
        assert type(got) is ops.RowMap
        assert (got.num_rows, got.pool_rows) == (3, 5)
        with pytest.raises(ValueError, match="read-only"):
            got.ranges[0, 0] = 2
        with pytest.raises(ValueError, match="read-only"):
            got.host[0] = 2
        assert got.host.tolist() == expected
        assert got.index().tolist() == index


@pytest.mark.parametrize("flag", ["no", 0, None, np.True_, torch.tensor(True)])
@pytest.mark.parametrize("pool", [POOL, [POOL]])
def test_strict_must_be_true_or_false(flag, pool):
    row_map = MAP if isinstance(pool, torch.Tensor) else ops.RowMap.from_ranges(3, [1], [1], [2], pool_rows=3)
    with pytest.raises(ops.ArgumentError, match="assemble_embeddings: strict must be True or False, got"):
        ops.assemble_embeddings(IDS, TABLE, pool, row_map, strict=flag)
    with pytest.raises(ops.ArgumentError, match="assemble_embeddings_out: strict must be True or False, got"):
        ops.assemble_embeddings_out(IDS, TABLE, pool, row_map, out=torch.empty(3, 2), strict=flag)
    good()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(1.0, "float"), (True, "bool"), ("1", "str"), (None, "NoneType"), (torch.tensor(1), "Tensor; reading it")],
)
def test_levels_and_rows_must_be_integers(number, kind):
    pool = torch.zeros(3, 4)
    for name, call in (
        ("deepstack_add: level", lambda: ops.deepstack_add(TABLE[:3], pool, MAP, number)),
        ("deepstack_add_: level", lambda: ops.deepstack_add_(TABLE[:3].clone(), pool, MAP, number)),
        (
            "expand_ranges: num_rows",
            lambda: ops.expand_ranges(torch.zeros(0, 3, dtype=torch.int32), number),
        ),
    ):
        with pytest.raises(ops.ArgumentError, match=f"{name} must be a Python int, got {kind}"):
            call()
    assert torch.equal(ops.deepstack_add(TABLE[:3], pool, MAP, np.int64(1)), TABLE[:3])
    assert ops.expand_ranges(torch.zeros(0, 3, dtype=torch.int32), np.int32(2)).tolist() == [-1, -1]


def test_a_row_map_is_frozen_and_knows_its_pool():
    row_map = ops.RowMap.from_ranges(3, np.array([1]), np.array([1]), np.array([4]), pool_rows=5)
    with pytest.raises(ValueError, match="read-only"):
        row_map.host[0] = 1
    with pytest.raises(AttributeError):
        row_map.pool_rows = 9
    device = row_map.to("cpu")
    device[0] = 4  # a copy of its own
    assert row_map.host.tolist() == [-1, 4, -1]
    with pytest.raises(ops.ArgumentError, match="built for a pool of 5 rows, but the pool has 3"):
        ops.assemble_embeddings(IDS, TABLE, POOL, row_map)
    with pytest.raises(ops.ArgumentError, match="between 0 and"):
        ops.RowMap.from_ranges(-1, [], [], [], pool_rows=5)
    good()
