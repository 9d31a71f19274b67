"""Runs the flashinfer_cudnn backend on the CPU: its kernel under Triton's interpreter, cuDNN played in PyTorch.

The player sees what cuDNN would: a plan's key, and addresses. Started by test_triton_interpreted.py with
TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import ctypes
import os
import random
from unittest import mock

import pytest
import torch
from interpreting import allow_new_numpy, patch_once

from mmgraph import ops
from mmgraph.ops.attention import cudnn_backend, cudnn_plans, reference
from mmgraph.ops.attention.cudnn_kernels import prepare_kernel
from mmgraph.ops.error_flag import Fault, flag_for

assert os.environ.get("TRITON_INTERPRET") == "1"

HEADS, WIDTH = 3, 8
STRIDES = (72, 40, 2**31 + 8)


def prepare(cu, tokens, max_seqlen, padded_batch, padded_seqlen, wide):
    """The output, the five rows of offsets and the lengths that the kernel leaves."""
    out = torch.full((tokens, HEADS, WIDTH), 7.0)
    pitch = padded_batch // 8 * 8 + 8
    table = torch.full((6 * pitch,), -1, dtype=torch.int64)
    prepare_kernel[(2,)](
        out,
        cu,
        flag_for(out.device),
        table,
        tokens,
        cu.shape[0] - 1,
        max_seqlen,
        padded_batch,
        padded_seqlen,
        pitch,
        *STRIDES,
        HEADS,
        WIDTH,
        2,
        16,
        4,
        wide,
        int(Fault.ATTENTION_OFFSETS),
    )
    rows = table.view(6, pitch)
    offsets = rows[:5] if wide else rows[:5].contiguous().view(torch.int32)
    lengths = rows[5].contiguous().view(torch.int32)
    untouched = offsets[:, padded_batch + 1 :], lengths[padded_batch:]
    assert all(bool((x == -1).all()) for x in untouched)
    return out, offsets[:, : padded_batch + 1].tolist(), lengths[:padded_batch].tolist()


def right_offsets():
    draw = random.Random(0)
    for padded_batch in (8, 16, 20):
        for batch in (0, 1, padded_batch - 1, padded_batch):
            lengths = [draw.choice((0, 1, 5, 17)) for _ in range(batch)]
            covered, tokens = sum(lengths), sum(lengths) + draw.choice((0, 6))
            starts = [sum(lengths[:i]) for i in range(batch + 1)]
            cu = torch.tensor(starts, dtype=torch.int32)
            out, offsets, found = prepare(cu, tokens, 17, padded_batch, 32, True)
            starts += [covered] * (padded_batch - batch)
            for row, stride in zip(offsets, (*STRIDES, HEADS * WIDTH, HEADS), strict=True):
                assert row == [start * stride for start in starts]
            assert found == lengths + [0] * (padded_batch - batch)
            assert bool((out[:covered] == 7).all())
            assert bool((out[covered:] == 0).all())
    ops.check_errors()
    _, offsets, _ = prepare(torch.tensor([0, 4, 9], dtype=torch.int32), 9, 5, 8, 32, False)
    assert offsets[0] == [0, 4 * 72] + [9 * 72] * 7
    ops.check_errors()


def wrong_offsets():
    tokens, longest = 20, 8
    for starts in ([0, 9, 5, 20], [-7, 3, 2**31 - 1, 4], [0, 0, 40, 41], [3, 4, 5, 6], [0, 20, 20, 20]):
        cu = torch.tensor(starts, dtype=torch.int32)
        _, offsets, lengths = prepare(cu, tokens, 5, 8, longest, True)
        for start, length in zip(offsets[4], [*lengths, 0], strict=True):
            assert 0 <= length <= longest
            assert 0 <= start // HEADS <= start // HEADS + length <= tokens
        with pytest.raises(ops.DeviceError, match="cu_seqlens doesn't fit"):
            ops.check_errors()


def memory(address, count, dtype):
    size = torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype=dtype)


def play_cudnn(key, device, addresses, workspace):
    """What a plan of that key does: each slot of the padded batch alone, through its offsets and the key's strides."""
    q, k, v, out, lengths, other_lengths, *starts = addresses
    assert lengths == other_lengths
    assert workspace % 256 == starts[0] % 256
    assert all((address - starts[0]) % 64 == 0 for address in (lengths, *starts[:4]))
    memory(workspace, WORKSPACE, torch.uint8).fill_(255)
    stats = starts.pop(4) if key.with_lse else None
    lengths = memory(lengths, key.batch, torch.int32).tolist()
    starts = [memory(address, key.batch + 1, torch.int64).tolist() for address in starts]
    shapes = {
        "q": (key.heads, key.width, key.q_stride, key.q_head_stride),
        "k": (key.kv_heads, key.width, key.k_stride, key.k_head_stride),
        "v": (key.kv_heads, key.v_width, key.v_stride, key.v_head_stride),
        "out": (key.heads, key.v_width, key.heads * key.v_width, key.v_width),
        "stats": (key.heads, 1, key.heads, 1),
    }

    def rows(name, address, start, length, dtype=key.dtype):
        heads, width, stride, head_stride = shapes[name]
        size = torch.empty((), dtype=dtype).element_size()
        span = (length - 1) * stride + (heads - 1) * head_stride + width
        flat = memory(address + start * size, span, dtype)
        return flat.as_strided((length, heads, width), (stride, head_stride, 1))

    for slot, length in enumerate(lengths):
        assert 0 <= length <= key.max_seqlen
        if length:
            places = [offsets[slot] for offsets in starts]
            inputs = [
                rows(name, address, place, length)
                for name, address, place in zip("qkv", (q, k, v), places, strict=False)
            ]
            cu = torch.tensor([0, length], dtype=torch.int32)
            result, lse = reference.forward(*inputs, cu, length, key.scale, key.causal, True)
            rows("out", out, places[3], length).copy_(result)
            if stats is not None:
                rows("stats", stats, places[4], length, torch.float32)[:, :, 0].copy_(lse.t())


WORKSPACE = 1000
CASES = (
    # heads, kv_heads, width, v_width, lengths, tail, packed
    (4, 4, 16, 16, [7, 3], 0, False),
    (4, 2, 8, 8, [9, 1, 0, 12], 5, True),
    (2, 1, 24, 40, [0, 5], 3, True),
    (2, 2, 13, 5, [6, 4], 2, True),
    (2, 2, 8, 8, [2] * 8, 0, True),
    (2, 2, 8, 8, [1] * 70, 1, False),
    (2, 2, 8, 8, [0, 0], 3, False),
)


def calls_equal_the_reference():
    plan = cudnn_plans.Plan
    for index, (heads, kv_heads, width, v_width, lengths, tail, packed) in enumerate(CASES):
        tokens = sum(lengths) + tail
        sizes = [heads * width, kv_heads * width, kv_heads * v_width]
        g = torch.Generator().manual_seed(index)
        qkv = torch.randn(tokens, sum(sizes), generator=g).bfloat16()
        qkv[tokens - tail :] = float("nan")
        parts = [
            x.unflatten(1, (-1, w)) for x, w in zip(qkv.split(sizes, 1), (width, width, v_width), strict=True)
        ]
        q, k, v = parts if packed else [x.contiguous() for x in parts]
        cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        for causal, with_lse, scale in ((False, True, 0.3), (True, False, 0.3), (True, True, -0.2)):
            with (
                mock.patch.object(cudnn_plans, "find_plan", lambda key: plan(key, WORKSPACE)),
                mock.patch.object(cudnn_plans, "run", lambda plan, *rest: play_cudnn(plan.graph, *rest)),
                mock.patch.object(cudnn_plans, "version", return_value=91900),
            ):
                out, lse = cudnn_backend.forward(q, k, v, cu, max(lengths) + 1, scale, causal, with_lse)
            expected, sums = reference.forward(q, k, v, cu, max(lengths) + 1, scale, causal, True)
            assert out.is_contiguous()
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
            assert (lse is None) == (not with_lse)
            if with_lse:
                assert lse.is_contiguous()
                torch.testing.assert_close(lse, sums, atol=1e-2, rtol=1e-2)
    ops.check_errors()


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    right_offsets()
    wrong_offsets()
    calls_equal_the_reference()
    print("same")
