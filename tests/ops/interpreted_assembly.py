"""Runs the assembly kernels that came with lists, places and ranges, and the gradients', under Triton's interpreter.

Started by test_triton_interpreted.py with TRITON_INTERPRET=1, which must be set before Triton is imported. Everything
is compared with the reference, or with a loop written out here, bit for bit where rows are moved.
"""

import itertools
import os

import numpy as np
import pytest
import torch
from interpreting import allow_new_numpy, expect, patch_once

from mmgraph import ops
from mmgraph.ops.assembly import backward as plain_backward
from mmgraph.ops.assembly import backward_cuda, gather
from mmgraph.ops.assembly import cuda as kernels
from mmgraph.ops.assembly import reference as plain

assert os.environ.get("TRITON_INTERPRET") == "1"

NONE = gather.Parts([], [], [])
kernels._BYTES_PER_PROGRAM = 64  # so that narrow rows are cut into several pieces, the last of them a part


def _draw_ranges(rng, rows, pool_rows, count):
    starts = np.sort(rng.choice(rows, size=min(count, rows), replace=False))
    ends = np.minimum(starts + rng.integers(0, 4, starts.shape[0]), np.append(starts[1:], rows) - 1)
    sources = np.array([rng.integers(0, pool_rows - (e - s)) for s, e in zip(starts, ends, strict=True)])
    return starts, ends, sources.astype(np.int64).reshape(-1)


def lists():
    """Rows from a list of parts of several dtypes, strides and sizes, ranges that cross parts among them."""
    rng = np.random.default_rng(0)
    g = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
    for kinds, width, table_dtype in itertools.product((1, 4), (5, 72), (torch.float32, torch.float16)):
        parts = []
        for index, rows in enumerate((3, 0, 1, 9, 4)):
            whole = torch.randn(rows, width + 3, generator=g).to(dtypes[index % kinds])
            parts.append(whole[:, 2 : 2 + width] if index % 2 else whole[:, :width].contiguous())
        parts[2] = parts[2].t().contiguous().t()
        table = torch.randn(9, width, generator=g).to(table_dtype)
        ids = torch.randint(-4, 13, (23,), generator=g)
        for count in (0, 3, 8):
            row_map = ops.RowMap.from_ranges(23, *_draw_ranges(rng, 23, 17, count), pool_rows=17)
            entries = torch.from_numpy(row_map.host.copy())
            expected = plain.assemble(ids, table, torch.cat([p.double() for p in parts]), entries, False)
            checked = gather.checked_parts("test", table, parts, row_map)
            assert torch.equal(gather.gather(ids, table, checked, row_map, False), expected)
            whole = torch.full((23, width + 1), 9.0, dtype=table_dtype)
            gather.gather(ids.int(), table, checked, row_map, False, whole[:, :width])
            assert torch.equal(whole[:, :width], expected)
            assert bool((whole[:, width] == 9).all())
            one = torch.randn(17, width, generator=g).to(dtypes[0])
            expected = plain.assemble(ids, table, one, entries, False)
            assert torch.equal(
                gather.gather(ids, table, gather.Parts([one], [17], [one.dtype]), row_map, False), expected
            )
    empty = ops.RowMap.from_ranges(3, [], [], [], pool_rows=0)
    table = torch.randn(4, 8)
    ids = torch.tensor([0, 3, 9])
    assert torch.equal(gather.gather(ids, table, NONE, empty, False), table[[0, 3, 3]])
    ops.check_errors()
    expect(r"row 2 had id 9 \(1 such", lambda: gather.gather(ids, table, NONE, empty, True))
    expect("outside the vocabulary", lambda: gather.gather(ids, table[:0], NONE, empty, False))


def ranges():
    """Entries from ranges, with padding, and the check of wrong ones."""
    rng = np.random.default_rng(1)
    for rows, count in itertools.product((0, 1, 7, 1024, 1500), (0, 1, 2, 5, 1200)):
        if count > rows:
            continue
        row_map = ops.RowMap.from_ranges(rows, *_draw_ranges(rng, rows, 5000, count), pool_rows=5000)
        for capacity in (row_map.ranges.shape[0], row_map.ranges.shape[0] + 3):
            padded = torch.from_numpy(row_map.padded_ranges(capacity))
            got = kernels.expand_ranges(padded, rows)
            assert got.dtype == torch.int32
            assert np.array_equal(got.numpy(), row_map.host)
            assert torch.equal(plain.expand_ranges(padded, rows), got)
    ops.check_errors()
    unused = 2**31 - 1
    for right in ([[0, 1, unused - 1]], [[0, 1, 5], [unused, 0, -1], [unused, 0, 0]]):
        tensor = torch.tensor(right, dtype=torch.int32)
        assert torch.equal(kernels.expand_ranges(tensor, 10), plain.expand_ranges(tensor, 10))
    ops.check_errors()
    for wrong in (
        [[0, 3, 0], [3, 4, 0]],
        [[2, 1, 0]],
        [[0, 10, 0]],
        [[5, 6, 0], [1, 2, 0]],
        [[-1, 2, 0]],
        [[unused] * 3, [1, 2, 0]],
        [[unused, 0, 0], [1, 2, 0]],
        [[0, 0, 0], [unused, -5, 0], [1, 2, 0]],
        [[1, 2, -1]],
        [[0, 0, 0], [1, 2, -unused - 1]],
        [[1, 2, unused]],
        [[0, 9, unused - 8]],
    ):
        tensor = torch.tensor(wrong, dtype=torch.int32)
        row = len(wrong) - 1
        expect(rf"must ascend.*range {row} begins", lambda tensor=tensor: kernels.expand_ranges(tensor, 10))
        with pytest.raises(ops.DataError, match=f"range {row}[ ,]"):
            plain.expand_ranges(tensor, 10)


def places():
    """Rows to their places, in a part of a buffer, cast on the way."""
    g = torch.Generator().manual_seed(2)
    for row_dtype, out_dtype, width in itertools.product(
        (torch.float32, torch.float64), (torch.float32, torch.float16), (5, 72)
    ):
        buffer = torch.randn(11, width + 4, generator=g).to(out_dtype)
        expected = buffer.clone()
        rows = torch.randn(6, width, generator=g).to(row_dtype)
        where = torch.tensor([3, -1, 0, 10, 7, 2], dtype=torch.int32)
        kernels.store_rows(rows, where, out=buffer[:, 2 : 2 + width])
        plain.store_rows(rows, where, out=expected[:, 2 : 2 + width])
        assert torch.equal(buffer, expected)
    ops.check_errors()
    for wrong in (11, -2):
        where[1] = wrong
        expect(rf"row 1 had {wrong}", lambda: kernels.store_rows(rows, where, out=buffer[:, :width]))


def in_place():
    """Deepstack rows added in place leave every other row alone, also one that holds NaN."""
    g = torch.Generator().manual_seed(3)
    for hidden_dtype, width in itertools.product((torch.float32, torch.float16), (5, 72)):
        whole = torch.randn(9, width + 2, generator=g).to(hidden_dtype)
        whole[4] = float("nan")
        pool = torch.randn(4, 3 * width, generator=g)
        row_map = torch.tensor([-1, 0, 3, 3, -1, 1, -1, 2, -1], dtype=torch.int32)
        expected = plain.deepstack_add(whole[:, :width], pool, row_map, 2)
        tail = whole[:, width:].clone()
        kernels.deepstack_add_in_place(whole[:, :width], pool, row_map, 2)
        torch.testing.assert_close(whole[:, :width], expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(whole[:, width:], tail, rtol=0, atol=0, equal_nan=True)
        turned = expected.nan_to_num().t().contiguous().t()
        again = plain.deepstack_add(turned, pool, row_map, 1)
        kernels.deepstack_add_in_place(turned, pool, row_map, 1)
        assert torch.equal(turned, again)


def gradients():
    """Sums over rows that share a destination, short and longer than several chunks; float64, so that order is moot."""
    g = torch.Generator().manual_seed(4)
    for rows, vocab, pool_rows in ((1, 3, 2), (200, 2, 3), (90, 90, 60), (64, 1, 1), (128, 1, 0)):
        for covered in (0.5, 1.0):
            ids = torch.randint(-2, vocab + 2, (rows,), generator=g)
            row_map = torch.randint(-1, max(pool_rows, 1), (rows,), generator=g, dtype=torch.int32)
            row_map[torch.rand(rows, generator=g) > covered] = -1
            if pool_rows == 0:
                row_map.fill_(-1)
            grad = torch.randint(-9, 9, (rows, 18), generator=g).double()
            for need_table, need_pool in ((True, True), (covered == 1.0, covered != 1.0)):
                arguments = (
                    ids,
                    row_map,
                    vocab,
                    pool_rows,
                    torch.float64,
                    torch.float32,
                    need_table,
                    need_pool,
                )
                for one, other in zip(
                    backward_cuda.assemble_backward(grad, *arguments),
                    plain_backward.assemble_backward(grad, *arguments),
                    strict=True,
                ):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)
            got = backward_cuda.deepstack_backward(grad, row_map, 1, pool_rows, 54, torch.float64)
            assert torch.equal(
                got, plain_backward.deepstack_backward(grad, row_map, 1, pool_rows, 54, torch.float64)
            )
            mask = row_map >= 0
            for features in (int(mask.sum()), 0, 2) if covered == 1.0 else (int(mask.sum()),):
                for one, other in zip(
                    backward_cuda.merge_backward(grad, mask, features, torch.float32),
                    plain_backward.merge_backward(grad, mask, features, torch.float32),
                    strict=True,
                ):
                    assert torch.equal(one, other)
    grad = torch.randn(150, 16, generator=g).half()
    ids, none = torch.zeros(150, dtype=torch.int64), torch.full((150,), -1, dtype=torch.int32)
    got, _ = backward_cuda.assemble_backward(grad, ids, none, 3, 0, torch.float16, torch.float16, True, False)
    torch.testing.assert_close(got[0], grad.double().sum(0).half(), rtol=2e-3, atol=2e-3)
    again, _ = backward_cuda.assemble_backward(grad, ids, none, 3, 0, torch.float16, torch.float16, True, False)
    assert torch.equal(got, again)


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    lists()
    ranges()
    places()
    in_place()
    gradients()
    print("same")
