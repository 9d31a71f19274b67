"""Runs the Triton kernels under Triton's interpreter, on the CPU, against the reference; fails on any difference.

Started by test_triton_interpreted.py with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import itertools
import os
from unittest import mock

import pytest
import torch

from mmgraph import ops
from mmgraph.ops.assembly import cuda as kernels
from mmgraph.ops.assembly import reference as plain
from mmgraph.ops.attention import reference, triton_backend

assert os.environ.get("TRITON_INTERPRET") == "1"


def allow_new_numpy():
    """Triton 3.6's interpreter takes ``int()`` of one-element arrays, which numpy 2.4 refuses; newer ones don't."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_mend


def expect(words, call):
    call()
    with pytest.raises(ops.DeviceError, match=words):
        ops.check_errors()
    ops.check_errors()


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
        qkv = torch.randn(tokens, (heads + kv_heads) * width + kv_heads * v_width, generator=g).to(dtype)
        qkv[tokens - tail :] = float("nan")
        q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * v_width], dim=1)
        q, k, v = q.unflatten(1, (-1, width)), k.unflatten(1, (-1, width)), v.unflatten(1, (-1, v_width))
        cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        for scale in (width**-0.5, -0.2):
            got, lse = triton_backend.forward(q, k, v, cu, longest, scale, causal, True, blocks)
            expected, expected_lse = reference.forward(q, k, v, cu, longest, scale, causal, True)
            torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)
            exact = reference.forward(*(x.double() for x in (q, k, v)), cu, longest, scale, causal, False)[0]
            own = float((expected - exact).abs().max())
            largest = float(v[: tokens - tail].abs().max()) if sum(lengths) else 0.0
            limit = 2 * own + (1 if dtype == torch.float16 else 8) * torch.finfo(dtype).eps * largest
            assert float((got - exact).abs().max()) <= limit
            assert float(got[tokens - tail :].abs().sum()) == 0.0
        filled = torch.full_like(expected, 7.0)
        triton_backend.zero_tail(filled, cu, longest)
        assert bool((filled[: tokens - tail] == 7).all())
        assert float(filled[tokens - tail :].abs().sum()) == 0.0
    ops.check_errors()


def wrong_offsets():
    q = torch.randn(8, 1, 16)
    for cu, longest in (([0, 9], 9), ([0, 5, 3], 5), ([0, 8], 4), ([-1, 4], 5)):
        offsets = torch.tensor(cu, dtype=torch.int32)
        expect(
            "cu_seqlens doesn't fit",
            lambda o=offsets, n=longest: triton_backend.forward(q, q, q, o, n, 1.0, False, False),
        )
        expect("cu_seqlens doesn't fit", lambda o=offsets, n=longest: triton_backend.zero_tail(q.clone(), o, n))


def guarded(made, values=7.0):
    """Room for a tensor with as much again, of nines, before and after it; and the tensor."""
    size = made.numel()
    room = torch.full((3 * size,), 9.0, dtype=made.dtype)
    inside = room[size : 2 * size].view(made.shape)
    inside.copy_(torch.as_tensor(values))
    return room, inside


def is_whole(room):
    size = room.shape[0] // 3
    return bool((room[:size] == 9).all() and (room[2 * size :] == 9).all())


def doubtful_offsets(tokens, batch):
    """Offsets that a caller may hand in by mistake, and some that are right."""
    largest, least = 2**31 - 1, -(2**31)
    yield [0] * batch + [tokens]
    yield [tokens + 136 + 5 * i for i in range(batch + 1)]
    yield [10**6 + 5 * i for i in range(batch + 1)]
    yield [3 + 4 * i for i in range(batch + 1)]
    yield [20] * batch + [tokens]
    yield [tokens - i for i in range(batch + 1)]
    yield [-5 * i for i in range(batch + 1)]
    yield [-7, *range(batch)]
    for value in (largest, least, -1, tokens, tokens + 1):
        yield [value] * (batch + 1)
        for place in range(batch + 1):
            offsets = [tokens * i // batch for i in range(batch + 1)]
            offsets[place] = value
            yield offsets
    g = torch.Generator().manual_seed(0)
    for reach in (tokens, 2 * tokens, largest):
        for _ in range(4):
            yield torch.randint(-reach, reach, (batch + 1,), generator=g).tolist()
            yield torch.randint(0, reach, (batch + 1,), generator=g).sort().values.tolist()


def is_wrong(offsets, tokens, longest):
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    return offsets[0] != 0 or min(lengths) < 0 or offsets[-1] > tokens or max(lengths) > longest


def recorded():
    try:
        ops.check_errors()
    except ops.DeviceError as error:
        return "cu_seqlens doesn't fit" in str(error)
    return False


def offsets_never_lead_outside():
    tokens, batch, blocks = 40, 5, triton_backend.Blocks(16, 16, 4, 1)
    # What lies beside q, k and v would show in the output; what lies beside the output would change.
    room = torch.full((3 * tokens, 2, 16), float("nan"))
    q = room[tokens : 2 * tokens]
    q.copy_(torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(1)))
    plain_empty = torch.Tensor.new_empty
    # The bisected grid is taken for the larger longest length.
    kinds = ((False, 16, True), (True, 16, False), (False, 40, False), (True, 40, True))
    for index, offsets in enumerate(doubtful_offsets(tokens, batch)):
        for with_lse, longest, causal in kinds[index % 2 :: 2]:
            cu = torch.tensor(offsets, dtype=torch.int32)
            rooms = []

            def new_empty(tensor, shape, rooms=rooms, **keywords):
                if "device" in keywords:  # the interpreter's own
                    return plain_empty(tensor, shape, **keywords)
                dtype = keywords.get("dtype", tensor.dtype)
                rooms.append(guarded(torch.empty(shape, dtype=dtype)))
                return rooms[-1][1]

            with mock.patch.object(torch.Tensor, "new_empty", new_empty):
                out, _ = triton_backend.forward(q, q, q, cu, longest, 0.25, causal, with_lse, blocks)
            assert len(rooms) == 1 + with_lse
            assert all(is_whole(room) for room, _ in rooms), offsets
            assert not bool(out.isnan().any()), offsets
            wrong = is_wrong(offsets, tokens, longest)
            assert recorded() == wrong, (offsets, longest)
            if longest == 40:
                beside, filled = guarded(q, q)
                triton_backend.zero_tail(filled, cu, longest)
                assert is_whole(beside), offsets
                assert recorded() == wrong, (offsets, longest)


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
        triton_backend.zero_tail(filled, cu, longest)
        assert torch.equal(filled[first:last], part)
        for uncovered in (slice(first), slice(last, None)):
            assert float(out[uncovered].abs().sum()) == float(filled[uncovered].abs().sum()) == 0.0
            assert bool((lse[:, uncovered] == float("-inf")).all())
        assert recorded()


if __name__ == "__main__":
    allow_new_numpy()
    assembly()
    recorded_errors()
    attention()
    wrong_offsets()
    offsets_never_lead_outside()
    rows_in_front_are_zero()
    print("same")
