"""Invariant: a list of tensors is as its concatenation, in place is as out of place, and places and ranges are exact.

On a CPU, where the reference runs; the kernels are compared with it in interpreted_assembly.py and in tests/gpu.
"""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.ops.assembly import gather as gathering

UNUSED = 2**31 - 1
IDS = torch.tensor([0, 9, 2, -3, 1])
TABLE = torch.arange(12.0).reshape(4, 3)
PARTS = [torch.full((2, 3), 10.0), torch.full((0, 3), 0.0), torch.full((3, 3), 20.0, dtype=torch.float64)]
MAP = ops.RowMap.from_ranges(5, [1], [3], [1], pool_rows=5)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
with warnings.catch_warnings():  # both are called prototypes
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
    JAGGED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)


def test_a_list_is_as_its_concatenation():
    expected = torch.stack([TABLE[0], PARTS[0][1], PARTS[0][0] * 2, PARTS[0][0] * 2, TABLE[1]])
    assert torch.equal(ops.assemble_embeddings(IDS, TABLE, PARTS, MAP), expected)
    assert torch.equal(ops.assemble_embeddings(IDS, TABLE, tuple(PARTS), MAP), expected)
    out = torch.empty(5, 3)
    ops.assemble_embeddings_out(IDS, TABLE, PARTS, MAP, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "dtypes", [*itertools.product(FLOAT8, (torch.float16, torch.float64)), FLOAT8, FLOAT8[:1] * 2]
)
def test_parts_of_8_bits_are_cast_once(table_dtype, dtypes):
    g = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(size, 3, generator=g) * 9).to(dtype) for size, dtype in zip((2, 3), dtypes, strict=True)
    ]
    table = TABLE.to(table_dtype)
    direct = torch.cat([part.to(table_dtype) for part in parts])
    expected = torch.stack([table[0], *direct[1:4], table[1]])
    assert torch.equal(ops.assemble_embeddings(IDS, table, parts, MAP), expected)


def test_a_list_with_8_bits_has_its_gradient():
    parts = [PARTS[0].to(FLOAT8[0]).requires_grad_(), torch.zeros(3, 3, dtype=torch.bfloat16).requires_grad_()]
    ops.assemble_embeddings(IDS, TABLE, parts, MAP).sum().backward()
    assert [part.grad.dtype for part in parts] == [FLOAT8[0], torch.bfloat16]
    assert [part.grad.float().sum(1).tolist() for part in parts] == [[0, 3], [3, 3, 0]]


@pytest.fixture
def seeming_cuda(monkeypatch):
    """Tensors say that they lie on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (*FLOAT8,), (FLOAT8[1], torch.float64), FLOAT8[:1]])
def test_the_gradient_past_the_op_takes_parts_of_8_bits(seeming_cuda, monkeypatch, dtypes):
    def on_cpu(input_ids, table, parts, row_map, strict):
        entries = torch.from_numpy(row_map.host.copy())
        return torch.ops.mmgraph.assemble_embeddings(
            input_ids, table, torch.cat([one.double() for one in parts.tensors]), entries, strict
        )

    monkeypatch.setattr(gathering, "gather", on_cpu)
    parts = [torch.ones(5, 3).to(dtype).requires_grad_() for dtype in dtypes]
    table = TABLE.clone().requires_grad_()
    out = ops.assemble_embeddings(IDS, table, parts, MAP)
    assert "Gather" in out.grad_fn.name()
    out.sum().backward()
    assert [part.grad.dtype for part in parts] == list(dtypes)
    assert parts[0].grad.float().sum(1).tolist() == [0, 3, 3, 3, 0]
    assert table.grad.sum(1).tolist() == [3, 3, 0, 0]


def test_lazily_negated_tensors_take_the_op(seeming_cuda):
    """Their memory holds the other sign, which only PyTorch's dispatcher knows."""
    assert gathering.can_gather(IDS, TABLE, PARTS)
    assert not gathering.can_gather(IDS, TABLE, [*PARTS, torch._neg_view(PARTS[0])])
    assert not gathering.can_gather(IDS, torch._neg_view(TABLE), PARTS)
    assert not gathering.can_gather(torch._neg_view(IDS), TABLE, PARTS)


def test_lazily_negated_tensors_keep_their_sign():
    parts = [torch._neg_view(part) for part in PARTS]
    expected = -ops.assemble_embeddings(IDS, TABLE, PARTS, MAP)
    assert torch.equal(ops.assemble_embeddings(IDS, torch._neg_view(TABLE), parts, MAP), expected)
    out = torch.empty(5, 3)
    ops.assemble_embeddings_out(torch._neg_view(-IDS), torch._neg_view(TABLE), parts, MAP, out=out)
    assert torch.equal(out, expected)
    for pool, row_map in ((PARTS, MAP), (torch.cat(PARTS), MAP), (torch.cat(PARTS), MAP.to("cpu"))):
        with pytest.raises(ops.ArgumentError, match="out must not be lazily negated"):
            ops.assemble_embeddings_out(IDS, TABLE, pool, row_map, out=torch._neg_view(out))


@pytest.mark.parametrize(
    ("sparse", "layout"),
    [(torch.eye(3).to_sparse(), "sparse_coo"), (torch.eye(3).to_sparse_csr(), "sparse_csr")],
)
@pytest.mark.parametrize("first", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)])
def test_addresses_of_sparse_tensors_are_refused(sparse, layout, first):
    parts = gathering.checked_parts("test", TABLE, [first, sparse], MAP)
    with pytest.raises(ops.ArgumentError, match=rf"pool\[1\] must be a dense tensor.*{layout}"):
        gathering._lists(parts, MAP.index(), 2)


@pytest.mark.parametrize("table", [TABLE[0], TABLE.long(), TABLE[None]])
def test_a_table_that_is_no_matrix_is_refused_beside_a_list(table):
    none = ops.RowMap.from_ranges(5, [], [], [], pool_rows=0)
    for pool, row_map in (([], none), (PARTS, MAP)):
        with pytest.raises(ops.ArgumentError, match="table must be a floating-point matrix"):
            ops.assemble_embeddings(IDS, table, pool, row_map)
        with pytest.raises(ops.ArgumentError, match="table must be a floating-point matrix"):
            ops.assemble_embeddings_out(IDS, table, pool, row_map, out=torch.empty(5, 3))


def test_an_empty_list_is_all_text():
    none = ops.RowMap.from_ranges(5, [], [], [], pool_rows=0)
    expected = TABLE[[0, 3, 2, 0, 1]]
    assert torch.equal(ops.assemble_embeddings(IDS, TABLE, [], none), expected)
    out = torch.empty(5, 3)
    ops.assemble_embeddings_out(IDS, TABLE, [], none, out=out)
    assert torch.equal(out, expected)


def test_a_list_has_its_gradient():
    parts = [part.clone().double().requires_grad_() for part in PARTS]
    table = TABLE.double().requires_grad_()
    ops.assemble_embeddings(IDS, table, parts, MAP).sum().backward()
    assert [part.grad.sum(1).tolist() for part in parts] == [[0, 3], [], [3, 3, 0]]
    assert table.grad.sum(1).tolist() == [3, 3, 0, 0]


@pytest.mark.parametrize(
    ("pool", "row_map", "words"),
    [
        (PARTS, torch.full((5,), -1, dtype=torch.int32), "a list of tensors needs a RowMap"),
        ([*PARTS, None], MAP, r"pool\[3\] must be a torch.Tensor, got NoneType"),
        ([PARTS[0], torch.zeros(3, 4)], MAP, r"pool\[1\] must be floating-point rows \[n, 3\].*\[3, 4\]"),
        ([PARTS[0], torch.zeros(9)], MAP, r"pool\[1\] must be floating-point rows"),
        ([torch.zeros(5, 3, dtype=torch.int64)], MAP, r"pool\[0\] must be floating-point rows.*int64"),
        (PARTS[:2], MAP, "built for a pool of 5 rows, but the pool has 2"),
        ("rows", MAP, "pool must be a torch.Tensor, got str"),
        (
            [PARTS[0], torch.eye(3).to_sparse()],
            MAP,
            r"pool\[1\] must be a dense tensor, got one of layout torch.sparse_coo",
        ),
        ([PARTS[0], torch.eye(3).to_sparse_csr()], MAP, r"pool\[1\] must be a dense.*sparse_csr"),
        ([torch.ones(5, 3).to_sparse()], MAP, r"pool\[0\] must be a dense.*sparse_coo"),
        ([NESTED], MAP, r"pool\[0\] must be a dense tensor, got a nested tensor"),
        ([PARTS[0], NESTED], MAP, r"pool\[1\] must be a dense tensor, got a nested tensor"),
        (
            [PARTS[0], NESTED, PARTS[1].to_sparse()],
            MAP,
            r"pool\[1\] must be a dense tensor, got a nested tensor",
        ),
        ([JAGGED], MAP, r"pool\[0\] must be a dense tensor, got a nested tensor"),
        ([PARTS[0], JAGGED], MAP, r"pool\[1\] must be"),
    ],
)
def test_wrong_lists_are_refused(pool, row_map, words):
    with pytest.raises(ops.ArgumentError, match=words):
        ops.assemble_embeddings(IDS, TABLE, pool, row_map)
    with pytest.raises(ops.ArgumentError, match=words):
        ops.assemble_embeddings_out(IDS, TABLE, pool, row_map, out=torch.empty(5, 3))


def test_a_list_can_not_be_traced_and_says_so():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids, parts: ops.assemble_embeddings(ids, TABLE, parts, MAP), backend="eager"
    )
    with pytest.raises(Exception, match="can't be traced"):
        torch.compile(compiled, fullgraph=True, backend="eager")(IDS, PARTS)


def test_what_the_kernel_reads_of_a_list():
    """Firsts, addresses, bytes from row to row and kinds, then ranges; and the alignment that all share."""
    whole = torch.zeros(9, 8)
    tensors = [whole[:2, :4], torch.zeros(0, 4), torch.zeros(4, 3, dtype=torch.float64).t(), whole[2:, 2:6]]
    row_map = ops.RowMap.from_ranges(30, [0, 9], [4, 11], [2, 0], pool_rows=12)
    parts = gathering.checked_parts("test", torch.zeros(1, 4), tensors, row_map)
    assert parts.rows == [2, 0, 3, 7]
    index = row_map.index()
    assert index.tolist() == [0, 4, 2, 9, 11, 0, *[UNUSED] * 3, 0]
    lists, alignment, kept = gathering._lists(parts, index, 3)
    table = lists[:20].reshape(5, 4)
    assert table[:4, 0].tolist() == [0, 2, 2, 5]
    assert table[4, 0] > 2**61
    assert table[:4, 1].tolist() == [one.data_ptr() for one in kept]
    assert table[[0, 2, 3], 2].tolist() == [32, 32, 32]
    assert table[:4, 3].tolist() == [0, 0, 1, 0]
    assert lists[20:22].tolist() == [2, 0]
    assert lists[23:].tolist() == index.tolist()
    assert torch.equal(kept[2], tensors[2])
    assert kept[2].is_contiguous()
    assert alignment == 8
    even = gathering.checked_parts("test", torch.zeros(1, 8), [whole[:4], whole[4:]], row_map=MAP)
    assert gathering._lists(even, MAP.index(), 2)[1] == 16


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
def test_the_index_names_a_range_from_which_the_rows_is_found_forwards(rows):
    starts = np.arange(0, rows, 7)
    row_map = ops.RowMap.from_ranges(rows, starts, np.minimum(starts + 2, rows - 1), starts * 0, pool_rows=3)
    index, count = row_map.index(), len(starts)
    assert index[3 * count : 3 * count + 3].tolist() == [UNUSED] * 3
    hints = index[3 * count + 3 :].tolist()
    assert hints == [int((starts <= row).sum()) - 1 for row in range(0, rows, 64)]


@settings(max_examples=200)
@given(data=st.data())
def test_ranges_and_entries_are_the_same_map(data):
    rows, pool_rows = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 20))
    drawn = []
    for _ in range(data.draw(st.integers(0, 6)) if rows else 0):
        length = data.draw(st.integers(1, min(rows, pool_rows)))
        first = data.draw(st.integers(0, rows - length))
        drawn.append((first, first + length - 1, data.draw(st.integers(0, pool_rows - length))))
    row_map = (
        ops.RowMap.from_ranges(
            rows, *(np.array(x, dtype=np.int64) for x in zip(*drawn, strict=True)), pool_rows=pool_rows
        )
        if drawn
        else ops.RowMap.from_ranges(rows, [], [], [], pool_rows=pool_rows)
    )
    expected = [-1] * rows
    for first, last, source in drawn:
        expected[first : last + 1] = range(source, source + last - first + 1)
    assert row_map.host.tolist() == expected
    assert row_map.to("cpu").tolist() == expected
    ranges = row_map.ranges.tolist()
    assert all(one[1] < two[0] for one, two in itertools.pairwise(ranges))
    padded = torch.from_numpy(row_map.padded_ranges(len(ranges) + 2))
    assert padded[-2:, 0].tolist() == [UNUSED, UNUSED]
    assert ops.expand_ranges(padded, rows).tolist() == expected


def test_ranges_and_buffers_of_them_are_frozen_and_bounded():
    with pytest.raises(ValueError, match="read-only"):
        MAP.ranges[0, 0] = 2
    with pytest.raises(ops.ArgumentError, match="a buffer of 0 ranges can't hold this map's 1"):
        MAP.padded_ranges(0)


@pytest.mark.parametrize(
    ("ranges", "rows", "error", "words"),
    [
        (torch.zeros(3, dtype=torch.int32), 5, ops.ArgumentError, r"int32 \[n, 3\]"),
        (torch.zeros(1, 3), 5, ops.ArgumentError, r"int32 \[n, 3\].*float32"),
        (torch.zeros(1, 3, dtype=torch.int32), -1, ops.ArgumentError, "num_rows must be between 0"),
        (torch.tensor([[0, 5, 0]], dtype=torch.int32), 5, ops.DataError, "range 0 is rows 0 to 5"),
        (torch.tensor([[2, 1, 0]], dtype=torch.int32), 5, ops.DataError, "range 0 is rows 2 to 1"),
        (torch.tensor([[0, 2, 0], [2, 3, 0]], dtype=torch.int32), 5, ops.DataError, "range 1 is rows 2 to 3"),
        (
            torch.tensor([[UNUSED] * 3, [2, 3, 0]], dtype=torch.int32),
            5,
            ops.DataError,
            "range 1 is rows 2 to 3",
        ),
        (
            torch.tensor([[UNUSED, 0, 0], [2, 3, 0]], dtype=torch.int32),
            5,
            ops.DataError,
            "Unused ranges go last",
        ),
        (
            torch.tensor([[1, 2, -1]], dtype=torch.int32),
            5,
            ops.DataError,
            "range 0, rows 1 to 2, takes the pool's -1",
        ),
        (torch.tensor([[1, 2, UNUSED]], dtype=torch.int32), 5, ops.DataError, f"{UNUSED} to {UNUSED + 1}"),
    ],
)
def test_wrong_ranges_are_refused(ranges, rows, error, words):
    with pytest.raises(error, match=words):
        ops.expand_ranges(ranges, rows)


def test_pool_rows_may_be_any_of_32_bits():
    ranges = torch.tensor([[1, 2, UNUSED - 1], [3, 3, 0], [UNUSED] * 3], dtype=torch.int32)
    assert ops.expand_ranges(ranges, 5).tolist() == [-1, UNUSED - 1, UNUSED, 0, -1]


def test_rows_go_to_their_places_and_nowhere_else():
    out = torch.full((4, 5), 7.0, dtype=torch.float16)
    rows = torch.tensor([[1.0, 2, 3], [4, 5, 6], [8, 9, 10]])
    ops.store_rows(rows, torch.tensor([3, -1, 0], dtype=torch.int32), out=out[:, 1:4])
    assert out.tolist() == [[7, 8, 9, 10, 7], [7] * 5, [7] * 5, [7, 1, 2, 3, 7]]


@pytest.mark.parametrize(
    ("rows", "places", "out", "error", "words"),
    [
        (torch.zeros(2, 3), [0, 4], torch.zeros(4, 3), ops.DataError, "below the buffer's 4 rows, row 1 has 4"),
        (torch.zeros(2, 3), [0, -2], torch.zeros(4, 3), ops.DataError, "row 1 has -2"),
        (torch.zeros(2, 3), [0], torch.zeros(4, 3), ops.ArgumentError, "one entry for each of 2 rows"),
        (torch.zeros(2, 4), [0, 1], torch.zeros(4, 3), ops.ArgumentError, "as wide as out, 3, got 4"),
        (torch.zeros(2, 3), [0, 1], torch.zeros(3, 4).t(), ops.ArgumentError, "columns must be adjacent"),
        (torch.zeros(2, 3), [0, 1], torch.zeros(1, 3).expand(4, 3), ops.ArgumentError, "place of their own"),
        (torch.zeros(2, 3, requires_grad=True), [0, 1], torch.zeros(4, 3), ops.GradientError, "detach"),
    ],
)
def test_wrong_stores_are_refused_and_change_nothing(rows, places, out, error, words):
    before = out.clone()
    with pytest.raises(error, match=words):
        ops.store_rows(rows, torch.tensor(places, dtype=torch.int32), out=out)
    assert torch.equal(out, before)


def test_a_store_refuses_its_own_rows():
    out = torch.zeros(4, 3)
    with pytest.raises(ops.ArgumentError, match="out overlaps rows"):
        ops.store_rows(out[:2], torch.tensor([2, 3], dtype=torch.int32), out=out)


@pytest.mark.parametrize("layout", ["plain", "sliced", "transposed"])
def test_in_place_is_as_out_of_place_and_leaves_other_rows(layout):
    hidden = {
        "plain": torch.randn(5, 3),
        "sliced": torch.randn(5, 5)[:, 1:4],
        "transposed": torch.randn(3, 5).t(),
    }[layout]
    hidden[0] = float("nan")
    pool = torch.randn(4, 6, dtype=torch.float64)
    row_map = torch.tensor([-1, 3, -1, 0, 0], dtype=torch.int32)
    expected = ops.deepstack_add(hidden, pool, row_map, 1)
    assert ops.deepstack_add_(hidden, pool, row_map, 1) is hidden
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0, equal_nan=True)


def test_wrong_additions_in_place_change_nothing():
    hidden, pool = torch.randn(3, 2), torch.randn(4, 2)
    before = hidden.clone()
    good = torch.tensor([0, -1, 3], dtype=torch.int32)
    for arguments, error, words in (
        (
            (hidden, pool, torch.tensor([0, 4, 1], dtype=torch.int32), 0),
            ops.DataError,
            "deepstack_add_: row_map",
        ),
        ((hidden, pool, good, 1), ops.ArgumentError, "level must be between 0 and 0"),
        ((hidden, pool.clone().requires_grad_(), good, 0), ops.GradientError, "use deepstack_add"),
        ((hidden, hidden, good, 0), ops.ArgumentError, "overlaps pool"),
    ):
        with pytest.raises(error, match=words):
            ops.deepstack_add_(*arguments)
        assert torch.equal(hidden, before)


def test_compiled_once_for_all_sizes_they_equal_eager():
    torch._dynamo.reset()

    def prefill(ids, ranges, rows, places, pool):
        ops.store_rows(rows, places, out=pool)
        entries = ops.expand_ranges(ranges, ids.shape[0])
        hidden = ops.assemble_embeddings(ids, TABLE, pool[:, :3], entries) * 2
        ops.deepstack_add_(hidden, pool[:, 3:], entries, 0)
        return hidden.relu()

    compiled = torch.compile(prefill, fullgraph=True, dynamic=True)
    for index, size in enumerate((5, 8, 13)):
        g = torch.Generator().manual_seed(size)
        ids = torch.randint(0, 4, (size,), generator=g)
        row_map = ops.RowMap.from_ranges(size, [1, 4], [2, 4], [0, 5], pool_rows=6)
        ranges = torch.from_numpy(row_map.padded_ranges(size))
        rows, places = torch.randn(size, 6, generator=g), torch.full((size,), -1, dtype=torch.int32)
        places[:3] = torch.tensor([5, 0, 1], dtype=torch.int32)
        pools = torch.zeros(6, 6), torch.zeros(6, 6)
        expected = prefill(ids, ranges, rows, places, pools[0])
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=index > 0):
            assert torch.equal(compiled(ids, ranges, rows, places, pools[1]), expected)
        assert torch.equal(*pools)
