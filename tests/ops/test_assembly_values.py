"""Invariant: assembly equals, bit for bit, a plain loop over rows and ranges, for any dtypes, layout and ids."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmgraph import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def loop_assemble(ids, table, pool, row_map):
    rows = []
    for token, source in zip(ids.tolist(), row_map.tolist(), strict=True):
        if source >= 0:
            rows.append(pool[source].to(table.dtype))
        else:
            rows.append(table[min(max(token, 0), table.shape[0] - 1)])
    return torch.stack(rows) if rows else table.new_empty((0, table.shape[1]))


def strided(generator, rows, width, dtype, layout):
    """A matrix of random values that is contiguous, a slice of a wider one, or a transpose."""
    if layout == 0:
        return torch.randn(rows, width, generator=generator).to(dtype)
    if layout == 1:
        return torch.randn(rows, width + 3, generator=generator).to(dtype)[:, 2 : 2 + width]
    return torch.randn(width, rows, generator=generator).to(dtype).t()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 40),
    pool_rows=st.integers(0, 12),
    vocab=st.integers(1, 9),
    width=st.integers(1, 17),
    table_dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    long_ids=st.booleans(),
)
@example(0, 0, 0, 1, 1, torch.float32, torch.float32, (0, 0), True)
def test_assemble_equals_a_loop_over_rows(
    seed, rows, pool_rows, vocab, width, table_dtype, pool_dtype, layouts, long_ids
):
    g = torch.Generator().manual_seed(seed)
    table = strided(g, vocab, width, table_dtype, layouts[0])
    pool = strided(g, pool_rows, width, pool_dtype, layouts[1])
    ids = torch.randint(-3, vocab + 3, (rows,), generator=g)
    ids[::3] = 2_000_000_000
    ids = ids if long_ids else ids.to(torch.int32)
    row_map = torch.randint(-1, pool_rows, (rows,), generator=g, dtype=torch.int32)

    expected = loop_assemble(ids, table, pool, row_map)
    got = ops.assemble_embeddings(ids, table, pool, row_map)
    assert got.dtype == table_dtype
    assert torch.equal(got, expected)

    whole = torch.full((rows + 2, width), float("nan"), dtype=table_dtype)
    ops.assemble_embeddings_out(ids, table, pool, row_map, out=whole[:rows])
    assert torch.equal(whole[:rows], expected)
    assert bool(whole[rows:].isnan().all())


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 60), ranges=st.integers(0, 8))
def test_a_row_map_equals_ranges_applied_in_order_and_the_later_wins(seed, rows, ranges):
    rng = np.random.default_rng(seed)
    pool_rows = int(rng.integers(1, 80))
    start = rng.integers(0, rows, ranges)
    length = np.array([rng.integers(1, min(rows - s, pool_rows) + 1) for s in start], dtype=np.int64)
    source = np.array([rng.integers(0, pool_rows - n + 1) for n in length], dtype=np.int64)

    expected = [-1] * rows
    for s, n, f in zip(start.tolist(), length.tolist(), source.tolist(), strict=True):
        for i in range(n):
            expected[s + i] = f + i
    row_map = ops.RowMap.from_ranges(rows, start, start + length - 1, source, pool_rows=pool_rows)
    assert row_map.host.dtype == np.int32
    assert row_map.host.tolist() == expected

    g = torch.Generator().manual_seed(seed % 2**31)
    table, pool = torch.randn(5, 3, generator=g), torch.randn(pool_rows, 3, generator=g)
    ids = torch.randint(0, 5, (rows,), generator=g)
    got = ops.assemble_embeddings(ids, table, pool, row_map)
    assert torch.equal(got, loop_assemble(ids, table, pool, torch.tensor(expected, dtype=torch.int32)))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 30),
    width=st.integers(1, 9),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    layouts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    counted=st.booleans(),
)
def test_merge_equals_a_loop_over_the_mask(seed, rows, width, dtypes, layouts, counted):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, generator=g) < 0.5
    count = int(mask.sum())
    embeds = strided(g, rows, width, dtypes[0], layouts[0])
    features = strided(g, count, width, dtypes[1], layouts[1])
    expected = embeds.clone()
    for n, row in enumerate(mask.nonzero().flatten().tolist()):
        expected[row] = features[n].to(dtypes[0])
    got = ops.merge_embeddings(embeds, mask, features, num_placeholders=count if counted else None)
    assert torch.equal(got, expected)
    assert got.is_contiguous()


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 30),
    pool_rows=st.integers(0, 8),
    width=st.integers(1, 9),
    levels=st.integers(1, 4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
)
def test_deepstack_equals_adding_the_dense_buffers_slice(seed, rows, pool_rows, width, levels, dtypes):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g).to(dtypes[0])
    pool = torch.randn(pool_rows, levels * width, generator=g).to(dtypes[1])
    row_map = torch.randint(-1, pool_rows, (rows,), generator=g, dtype=torch.int32)
    dense = torch.zeros(rows, levels * width, dtype=dtypes[0])
    covered = row_map >= 0
    dense[covered] = pool[row_map[covered].long()].to(dtypes[0])
    for level in range(levels):
        expected = hidden + dense[:, level * width : (level + 1) * width]
        assert torch.equal(ops.deepstack_add(hidden, pool, row_map, level), expected)


def test_rows_that_are_covered_never_look_at_the_table():
    table = torch.full((0, 4), float("nan"))  # there is nothing to look up
    pool = torch.arange(8.0).reshape(2, 4)
    row_map = torch.tensor([1, 0, 1], dtype=torch.int32)
    got = ops.assemble_embeddings(torch.tensor([-5, 10**9, 0]), table, pool, row_map, strict=True)
    assert torch.equal(got, pool[[1, 0, 1]])


def test_outputs_share_no_memory_with_inputs():
    embeds, pool = torch.randn(3, 2), torch.randn(1, 2)
    nothing = torch.full((3,), -1, dtype=torch.int32)
    for got in (
        ops.merge_embeddings(embeds, torch.zeros(3, dtype=torch.bool), torch.empty(0, 2)),
        ops.deepstack_add(embeds, pool, nothing, 0),
    ):
        assert torch.equal(got, embeds)
        assert got.data_ptr() != embeds.data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_permuting_the_rows_permutes_the_result(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (20,), generator=g)
    row_map = torch.randint(-1, 6, (20,), generator=g, dtype=torch.int32)
    table, pool = torch.randn(7, 5, generator=g), torch.randn(6, 5, generator=g)
    order = torch.randperm(20, generator=g)
    whole = ops.assemble_embeddings(ids, table, pool, row_map)
    assert torch.equal(ops.assemble_embeddings(ids[order], table, pool, row_map[order]), whole[order])
    parts = [ops.assemble_embeddings(ids[s], table, pool, row_map[s]) for s in (slice(0, 7), slice(7, 20))]
    assert torch.equal(torch.cat(parts), whole)
