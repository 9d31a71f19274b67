"""Runs the Triton kernels under Triton's interpreter, on the CPU, against the reference; fails on any difference.

Started by test_triton_interpreted.py with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import itertools
import os

import pytest
import torch
from interpreting import (
    allow_new_numpy,
    assert_near,
    between_nans,
    doubtful_offsets,
    expect,
    guarded,
    guarded_outputs,
    is_whole,
    is_wrong,
    offsets_of,
    packed,
    patch_once,
    recorded,
)

from mmgraph import ops
from mmgraph.ops.assembly import cuda as kernels
from mmgraph.ops.assembly import reference as plain
from mmgraph.ops.attention import reference, triton_backend
from mmgraph.ops.attention.zero_tail import zero_tail

assert os.environ.get("TRITON_INTERPRET") == "1"


def assembly():
    g = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.float64)
    for table_dtype, pool_dtype, width, pool_rows in itertools.product(dtypes, dtypes, (5, 64), (0, 4)):
        rows = 11
        table = torch.randn(width, 9, generator=g).t().to(table_dtype)  # its columns aren't adjacent
        pool = torch.randn(pool_rows, width + 3, generator=g).to(pool_dtype)[:, 1 : 1 + width]
        ids = torch.randint(-4, 13, (rows,), generator=g)
        row_map = torch.randint(-1, pool_rows, (rows,), generator=g, dtype=torch.int32)
        expected = plain.assemble(ids, table, pool, row_map, False)
        assert torch.equal(kernels.assemble(ids, table, pool, row_map, False), expected)
        whole = torch.full((rows, width + 1), 9.0, dtype=table_dtype)
        kernels.assemble_out(ids.int(), table, pool, row_map, False, out=whole[:, :width])
        assert torch.equal(whole[:, :width], expected)
        assert bool((whole[:, width] == 9).all())
        turned = torch.empty(width, rows, dtype=table_dtype).t()
        kernels.assemble_out(ids, table, pool, row_map, False, out=turned)
        assert torch.equal(turned, expected)
        hidden = expected.clone()
        for level in range(2):
            deep = torch.randn(pool_rows, 2 * width, generator=g).to(pool_dtype)
            added = kernels.deepstack_add(hidden, deep, row_map, level)
            assert torch.equal(added, plain.deepstack_add(hidden, deep, row_map, level))
        mask = row_map >= 0
        features = torch.randn(int(mask.sum()), width, generator=g).to(pool_dtype)
        merged = kernels.merge(hidden, mask, features, None)
        assert torch.equal(merged, plain.merge(hidden, mask, features, None))
    ops.check_errors()


def recorded_errors():
    table, pool = torch.randn(4, 8), torch.randn(3, 8)
    ids = torch.tensor([0, 1, 7])
    text = torch.full((3,), -1, dtype=torch.int32)
    for wrong in (3, -2, 2**31 - 1):
        row_map = torch.tensor([-1, wrong, 2], dtype=torch.int32)
        expect(rf"row 1 had {wrong} \(1 such", lambda m=row_map: kernels.assemble(ids, table, pool, m, False))
        got = kernels.assemble(ids, table, pool, row_map, False)
        assert torch.equal(got, torch.stack([table[0], torch.zeros(8), pool[2]]))
        with pytest.raises(ops.DeviceError):
            ops.check_errors()
        expect(rf"row 1 had {wrong}", lambda m=row_map: kernels.deepstack_add(table[:3], pool, m, 0))
    kernels.assemble(ids, table, pool, text, False)
    ops.check_errors()
    expect(r"row 2 had id 7 \(1 such", lambda: kernels.assemble(ids, table, pool, text, True))
    expect("outside the vocabulary", lambda: kernels.assemble(ids, table[:0], pool, text, False))
    mask = torch.tensor([True, True, False, True])
    expect("3 placeholders but there were 2", lambda: kernels.merge(table, mask, pool[:2], None))
    expect("3 placeholders but there were 1", lambda: kernels.merge(table, mask, pool[:1], None))
    expect(
        "1 placeholders but there were 2",
        lambda: kernels.merge(table, mask & torch.tensor([False, False, False, True]), pool[:2], None),
    )


def attention():
    blocks = triton_backend.Blocks(16, 16, 4, 1)
    cases = [
        # heads, kv_heads, width, v_width, lengths, tail, longest
        (2, 2, 16, 16, [20, 1], 40, 20),
        (4, 2, 72, 72, [5, 0, 40], 7, 40),
        (2, 1, 80, 24, [17, 32], 0, 50),
        (1, 1, 5, 130, [33], 3, 33),
        (2, 2, 16, 16, [20, 1, 0, 3, 2, 2, 2, 2, 2, 2], 40, 400),  # found by bisection
        (2, 1, 16, 16, [0, 0, 1, 0] * 6, 0, 160),
        (1, 1, 16, 16, [0, 0], 20, 16),
    ]
    for case, causal, dtype in itertools.product(cases, (False, True), (torch.float32, torch.float16)):
        heads, kv_heads, width, v_width, lengths, tail, longest = case
        tokens = sum(lengths) + tail
        g = torch.Generator().manual_seed(tokens)
        q, k, v, qkv = packed(g, tokens, heads, kv_heads, width, v_width, dtype)
        qkv[tokens - tail :] = float("nan")
        cu = offsets_of(lengths)
        # Each case with both scales: the negative one where a causal call is in float16, or neither.
        scale = -0.2 if causal == (dtype == torch.float16) else width**-0.5
        got, lse = triton_backend.forward(q, k, v, cu, longest, scale, causal, True, blocks)
        expected, expected_lse = reference.forward(q, k, v, cu, longest, scale, causal, True)
        torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)
        assert_near(got, q, k, v, cu, longest, scale, causal)
        assert float(got[tokens - tail :].abs().sum()) == 0.0
        filled = torch.full_like(expected, 7.0)
        zero_tail(filled, cu, longest)
        assert bool((filled[: tokens - tail] == 7).all())
        assert float(filled[tokens - tail :].abs().sum()) == 0.0
    ops.check_errors()


def wrong_offsets():
    q, blocks = torch.randn(8, 1, 16), triton_backend.Blocks(16, 16, 4, 1)
    for cu, longest in (([0, 9], 9), ([0, 5, 3], 5), ([0, 8], 4), ([-1, 4], 5)):
        offsets = torch.tensor(cu, dtype=torch.int32)
        expect(
            "cu_seqlens doesn't fit",
            lambda o=offsets, n=longest: triton_backend.forward(q, q, q, o, n, 1.0, False, False, blocks),
        )
        expect("cu_seqlens doesn't fit", lambda o=offsets, n=longest: zero_tail(q.clone(), o, n))


def offsets_never_lead_outside():
    tokens, batch, blocks = 40, 5, triton_backend.Blocks(16, 16, 4, 1)
    q = between_nans(torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(1)))
    # The bisected grid is taken for the larger longest length. Each offsets have one of the kinds, in an order in which
    # each wrong value, each place of one, and random offsets, sorted or not, meet both grids.
    kinds = ((False, 16, True), (True, 40, True), (True, 16, False), (False, 40, False))
    for index, offsets in enumerate(doubtful_offsets(tokens, batch)):
        with_lse, longest, causal = kinds[(index + index // 2) % 4]
        cu = torch.tensor(offsets, dtype=torch.int32)
        with guarded_outputs() as rooms:
            out, _ = triton_backend.forward(q, q, q, cu, longest, 0.25, causal, with_lse, blocks)
        assert len(rooms) == 1 + with_lse
        assert all(is_whole(room) for room, _ in rooms), offsets
        assert not bool(out.isnan().any()), offsets
        assert recorded() == is_wrong(offsets, tokens, longest), (offsets, longest)
        beside, filled = guarded(q, q)
        zero_tail(filled, cu, tokens)
        assert is_whole(beside), offsets
        assert recorded() == is_wrong(offsets, tokens, tokens), offsets


def rows_in_front_are_zero():
    q = torch.randn(40, 2, 16)
    for offsets, longest in itertools.product(([3, 8], [19, 30, 30, 33], [35, 40], [200, 210]), (16, 400)):
        cu = torch.tensor(offsets, dtype=torch.int32)
        first, last = min(offsets[0], 40), min(offsets[-1], 40)
        inner = [x - offsets[0] for x in offsets] if first < 40 else [0]
        part = q[first:last]
        expected = reference.forward(part, part, part, torch.tensor(inner).int(), 16, 0.25, False, True)
        blocks = triton_backend.Blocks(16, 16, 4, 1)
        out, lse = triton_backend.forward(q, q, q, cu, longest, 0.25, False, True, blocks)
        torch.testing.assert_close(out[first:last], expected[0])
        torch.testing.assert_close(lse[:, first:last], expected[1])
        filled = q.clone()
        zero_tail(filled, cu, longest)
        assert torch.equal(filled[first:last], part)
        for uncovered in (slice(first), slice(last, None)):
            assert float(out[uncovered].abs().sum()) == float(filled[uncovered].abs().sum()) == 0.0
            assert bool((lse[:, uncovered] == float("-inf")).all())
        assert recorded()


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    assembly()
    recorded_errors()
    attention()
    wrong_offsets()
    offsets_never_lead_outside()
    rows_in_front_are_zero()
    print("same")
