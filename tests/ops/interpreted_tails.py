"""Runs the kernel that closes an output under Triton's interpreter, on the CPU, against the reference.

The attention kernels in front of it are played: what they leave in rows that it must not touch is a sentinel, and in
rows that rows behind the last sequence reached it is NaN. Started by test_triton_interpreted.py with
TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import os
from unittest import mock

import torch
from interpreting import (
    allow_new_numpy,
    assert_near,
    between_nans,
    doubtful_offsets,
    guarded,
    is_whole,
    is_wrong,
    offsets_of,
    packed,
    patch_once,
    recorded,
)

from mmgraph import ops
from mmgraph.ops.attention import zero_tail
from mmgraph.ops.attention.zero_tail import close_tail

assert os.environ.get("TRITON_INTERPRET") == "1"

NAN, INF = float("nan"), float("inf")
REACH = 256
SENTINEL = 7.0


def make(lengths, tail, shape, dtype=torch.float16, seed=0):
    """q, k, v and offsets; the tail of q and k is NaN, that of v finite."""
    tokens = sum(lengths) + tail
    q, k, v, _ = packed(torch.Generator().manual_seed(seed), tokens, *shape, dtype)
    q[tokens - tail :] = k[tokens - tail :] = NAN
    return q, k, v, offsets_of(lengths)


def closed(q, k, v, cu, longest, scale, causal, v_dim):
    """An output of sentinels, in guarded memory, closed."""
    room, out = guarded(torch.empty(q.shape[0], q.shape[1], v_dim, dtype=q.dtype), SENTINEL)
    close_tail(out, q, k, v, cu, longest, scale, causal)
    assert is_whole(room)
    return out


def assert_anew(out, q, k, v, cu, longest, scale, causal, sequences, heads):
    """Those sequences equal the reference in those heads; everything else that is covered is as it was."""
    covered = int(cu[-1])
    assert float(out[covered:].abs().sum()) == 0.0
    anew = torch.zeros(out.shape[:2], dtype=torch.bool)
    for sequence in sequences:
        anew[cu[sequence] : cu[sequence + 1], heads] = True
    assert bool((out[:covered][~anew[:covered]] == SENTINEL).all())
    v = v[:, :, : out.shape[2]].clone()
    v[covered:] = 0
    group = q.shape[1] // k.shape[1]
    for sequence in sequences:
        rows = slice(int(cu[sequence]), int(cu[sequence + 1]))
        alone = offsets_of([rows.stop - rows.start])
        for head in heads:
            one = [x[rows, h : h + 1] for x, h in ((q, head), (k, head // group), (v, head // group))]
            assert_near(out[rows, head : head + 1], *one, alone, longest, scale, causal)


def a_finite_tail_leaves_all_rows_alone():
    for lengths, tail in (([5, 0, 40], 30), ([300], 0), ([0, 0], 9), ([64, 64], 300)):
        q, k, v, cu = make(lengths, tail, (4, 2, 16, 16))
        out = closed(q, k, v, cu, 300, 0.25, False, 16)
        assert_anew(out, q, k, v, cu, 300, 0.25, False, [], [])
    ops.check_errors()


def sequences_within_reach_are_computed_anew():
    cases = (
        # heads, kv_heads, width, v_width, v_dim, causal, dtype
        (2, 2, 16, 16, 16, False, torch.float16),
        (4, 2, 72, 72, 72, True, torch.float16),
        (4, 1, 40, 40, 37, False, torch.float32),
        (3, 3, 80, 80, 5, True, torch.float32),
    )
    lengths = [30, 90, 0, 100, 64, 3]  # the first one is 257 rows away
    for index, (heads, kv_heads, width, v_width, v_dim, causal, dtype) in enumerate(cases):
        for place, value in ((0, NAN), (40, INF), (REACH - 1, -INF)):
            q, k, v, cu = make(lengths, 270, (heads, kv_heads, width, v_width), dtype, index)
            v[int(cu[-1]) + place, :, index % v_dim] = value
            out = closed(q, k, v, cu, 100, 0.2, causal, v_dim)
            assert_anew(out, q, k, v, cu, 100, 0.2, causal, [1, 3, 4, 5], list(range(heads)))
    ops.check_errors()


def the_reach_is_exact():
    shape = (2, 2, 16, 16)
    for behind, place, reached in (
        (REACH - 1, 0, True),  # the rows from the first sequence's end to the tail
        (REACH, 0, False),
        (10, REACH - 1, True),
        (10, REACH, False),
    ):
        q, k, v, cu = make([20, behind], 300, shape)
        v[int(cu[-1]) + place, 0, 3] = NAN
        out = closed(q, k, v, cu, REACH, 0.25, False, 16)
        last = [1] if place < REACH else []
        assert_anew(out, q, k, v, cu, REACH, 0.25, False, ([0] if reached else []) + last, [0])
    ops.check_errors()


def only_heads_with_such_values_are():
    """The other heads' rows hold what the backend gave; and columns behind v's own width count for nothing."""
    lengths = [70, 0, 20]
    q, k, v, cu = make(lengths, 5, (6, 3, 24, 24))
    v[-1, 1, 0] = NAN
    v[-2, 2, 20:] = NAN
    out = closed(q, k, v, cu, 70, 0.3, True, 20)
    assert_anew(out, q, k, v, cu, 70, 0.3, True, [0, 2], [2, 3])
    ops.check_errors()


def offsets_never_lead_outside():
    tokens, batch = 150, 5
    values = torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(1)).half()
    q = between_nans(values)
    values[90:] = NAN
    v = between_nans(values)
    for index, offsets in enumerate(doubtful_offsets(tokens, batch)):
        longest = (64, 30)[index % 2]
        cu = torch.tensor(offsets, dtype=torch.int32)
        closed(q, q, v, cu, longest, 0.25, index % 3 == 0, 16)
        assert recorded() == is_wrong(offsets, tokens, longest), (offsets, longest)


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    with mock.patch.object(zero_tail, "_PROGRAMS", 6):
        a_finite_tail_leaves_all_rows_alone()
        sequences_within_reach_are_computed_anew()
        the_reach_is_exact()
        only_heads_with_such_values_are()
        offsets_never_lead_outside()
    print("same")
