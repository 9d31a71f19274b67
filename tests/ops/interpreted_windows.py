"""Runs the window kernel under Triton's interpreter, on the CPU, against the reference; fails on any difference.

Started by test_triton_interpreted.py with a part's number and TRITON_INTERPRET=1, which must be set before Triton is
imported.
"""

import itertools
import os
import random
import sys
from contextlib import ExitStack
from unittest import mock

import torch
from interpreting import (
    allow_new_numpy,
    assert_near,
    between_nans,
    doubtful_offsets,
    guarded_outputs,
    is_whole,
    is_wrong,
    offsets_of,
    packed,
    patch_once,
    recorded,
)

from mmgraph import ops
from mmgraph.ops.attention import reference, triton_backend, windows
from mmgraph.ops.attention.windows import WindowBlocks

assert os.environ.get("TRITON_INTERPRET") == "1"

NAN, INF = float("nan"), float("inf")
# Those of the table, and others that measurements may ask for; heads per program that don't divide the heads.
FORMS = (
    WindowBlocks(64, True, 1, 4, 4, 2),
    WindowBlocks(64, True, 2, 2, 2, 3),
    WindowBlocks(64, True, 4, 1, 3, 1),
    WindowBlocks(32, True, 1, 4, 1, 1),
    WindowBlocks(16, True, 1, 1, 16, 1),
)
# A program per sequence: for sequences of at most 64 rows.
ALONE = (
    WindowBlocks(64, False, 1, 4, 4, 2),
    WindowBlocks(64, False, 2, 2, 3, 3),
    WindowBlocks(32, False, 1, 4, 1, 1),
    WindowBlocks(64, False, 4, 1, 1, 1),
)
# heads, kv_heads, width, v_width: split widths, odd ones, grouped heads, v of another width.
SHAPES = ((2, 2, 16, 16), (3, 1, 72, 72), (4, 2, 80, 24), (5, 5, 5, 40), (1, 1, 64, 130), (6, 3, 37, 7))


def run(q, k, v, cu, longest, scale, causal, with_lse, blocks):
    """Outputs, in guarded memory."""
    aligned = triton_backend._aligned(q, k, v)
    with guarded_outputs() as rooms:
        out, lse = windows.forward(q, k, v, cu, longest, scale, causal, with_lse, aligned, blocks)
    assert len(rooms) == 1 + with_lse
    assert all(is_whole(room) for room, _ in rooms)
    return out, lse


def equals_the_reference(lengths, tail, shape, dtype, longest, scale, causal, with_lse, blocks, seed=0):
    tokens = sum(lengths) + tail
    g = torch.Generator().manual_seed(seed)
    q, k, v, qkv = packed(g, tokens, *shape, dtype)
    qkv[tokens - tail :] = NAN
    cu = offsets_of(lengths)
    out, lse = run(q, k, v, cu, longest, scale, causal, with_lse, blocks)
    assert_near(out, q, k, v, cu, longest, scale, causal)
    assert float(out[tokens - tail :].abs().sum()) == 0.0
    assert (lse is not None) == with_lse
    if with_lse:
        expected = reference.forward(q, k, v, cu, longest, scale, causal, True)[1]
        torch.testing.assert_close(lse, expected, atol=2e-5, rtol=2e-5)
    ops.check_errors()


def special_batches():
    few = SHAPES[0]
    cases = (
        # lengths, tail, longest
        ([64] * 3, 0, 64),  # windows, aligned with the tiles
        ([64] * 2, 130, 64),  # whole tiles of tail
        ([16, 64, 32, 0, 64, 5, 64], 9, 64),  # not aligned, tokens no multiple of a tile
        ([0, 0, 64, 0, 0, 64, 0], 0, 64),  # empty ones at the seams of tiles
        ([1, 2, 3, 4, 5, 6, 7, 8] * 4, 3, 8),
        ([1] * 130, 0, 1),
        ([100, 3, 90, 100], 1, 100),  # longer than a tile: two passes over the keys
        ([200], 0, 200),
        ([0, 0], 40, 8),
        ([3, 61, 64], 0, 1000),  # a longest length that none has
    )
    for index, ((lengths, tail, longest), causal) in enumerate(itertools.product(cases, (False, True))):
        other = ALONE[index % 4] if max(lengths) <= 64 else FORMS[(index + 2) % 5]
        for blocks in (FORMS[index % 5], other):  # of each case, causal or not, four of the forms
            # Enough for several tiles; a program for each of so many sequences shows no more than for some.
            held = lengths if blocks.packed else lengths[:20]
            equals_the_reference(held, tail, few, torch.float16, longest, 0.25, causal, True, blocks, index)


def many_sequences():
    """More sequences than one step of the search looks at; some steps more, with fewer places a step."""
    padding = [64, 3] + [0] * 3000 + [20]  # a batch padded with empty sequences, a late one behind them
    several = [0, 1, 0, 2, 0, 0, 1] * 40  # a second step; the padding has a dozen
    for lengths, blocks in (
        (padding, FORMS[0]),
        (several, FORMS[1]),
        (several, FORMS[2]),
        (several[:100], ALONE[1]),
    ):
        equals_the_reference(lengths, 5, SHAPES[0], torch.float16, 64, 0.25, False, True, blocks)
    draw = random.Random(0)
    for probes, chunk in ((4, 2), (2, 4), (16, 16)):
        lengths = [draw.choice((0, 0, 0, 1, 2, 3, 20, 64)) for _ in range(draw.randrange(20, 70))]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(windows, "_PROBES", probes))
            stack.enter_context(mock.patch.object(windows, "_CHUNK", chunk))
            for blocks in (FORMS[0], FORMS[4]):
                equals_the_reference(lengths, 3, SHAPES[0], torch.float32, 64, 0.25, True, True, blocks)


def any_batches():
    draw = random.Random(1)
    kinds = ((0, 1), (64,), (1, 2, 3, 5, 8), (0, 7, 16, 32, 64), (40, 90), (1, 64))
    for index in range(12):
        lengths = [draw.choice(draw.choice(kinds)) for _ in range(draw.randrange(1, 12))]
        tail = draw.choice((0, 1, 30, 70))
        if sum(lengths) + tail:
            equals_the_reference(
                lengths,
                tail,
                SHAPES[index % 6],
                draw.choice((torch.float16, torch.float32)),  # the interpreter's products are wrong in bfloat16
                max(lengths) + draw.choice((0, 3)),
                draw.choice((0.3, 0.05, -0.2, 0.0)),
                draw.choice((False, True)),
                draw.choice((False, True)),
                draw.choice((None, *FORMS, *ALONE) if max(lengths) <= 64 else FORMS),
                index,
            )


def values_that_are_no_numbers_stay_in_their_sequence():
    """In one sequence's rows; its neighbours in the tile, before and behind, are as without them."""
    draw = random.Random(2)
    batches = ([20, 5, 30, 9, 64, 3], [3] * 21, [90, 5, 40, 0, 64], [0, 10, 0, 0, 10, 30])
    for index in range(10):
        lengths = batches[index % 4]
        shape, blocks = SHAPES[index % 3], FORMS[index % 5]
        if max(lengths) <= 64 and index % 2:
            lengths, blocks = lengths[:6], ALONE[index % 4]  # each has a program of its own: neighbours will do
        causal = bool(index // 4 % 2)
        tokens, cu = sum(lengths), offsets_of(lengths)
        q, k, v, _ = packed(torch.Generator().manual_seed(index), tokens, *shape, torch.float16)
        clean = run(q, k, v, cu, max(lengths), 0.25, causal, True, blocks)
        sequence = draw.choice([s for s, length in enumerate(lengths) if length])
        begin, end = int(cu[sequence]), int(cu[sequence + 1])
        name, value = "vkvq"[index // 3 % 4], draw.choice((NAN, INF, -INF))
        spoilt = {"q": q, "k": k, "v": v}[name]
        row, head = draw.randrange(begin, end), draw.randrange(spoilt.shape[1])
        column = spoilt.shape[2] - 1 if index % 2 else 0  # in the rest of a width that is cut, too
        spoilt[row, head, column] = value
        out, lse = run(q, k, v, cu, max(lengths), 0.25, causal, True, blocks)
        others = torch.ones(tokens, dtype=torch.bool)
        others[begin:end] = False
        assert bool(out[others].isfinite().all()), (lengths, name)
        torch.testing.assert_close(out[others], clean[0][others], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[:, others], clean[1][:, others])
        if name == "v":
            group = slice(head * shape[0] // shape[1], (head + 1) * shape[0] // shape[1])
            assert not bool(out[row:end, group, column].isfinite().any())
    ops.check_errors()


def offsets_never_lead_outside():
    tokens, batch = 150, 5
    q = between_nans(torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(1)).half())
    kinds = ((False, 64, True), (True, 30, False))
    for index, offsets in enumerate(doubtful_offsets(tokens, batch)):
        # In an order in which each wrong value, each place of one, and random offsets meet both kinds of forms.
        is_alone, kind = divmod((index + index // 2) % 4, 2)
        with_lse, longest, causal = kinds[kind]
        cu = torch.tensor(offsets, dtype=torch.int32)
        if is_alone:
            # A sequence that is longer than any window is cut there, and rows that none covers are left as they are.
            run(q, q, q, cu, longest, 0.25, causal, with_lse, ALONE[index % 4])
        else:
            # The search in several steps too, which leaves the offsets' order to chance.
            with mock.patch.object(windows, "_PROBES", 2 if index % 3 == 0 else 256):
                out, _ = run(q, q, q, cu, longest, 0.25, causal, with_lse, FORMS[index % 5])
            assert not bool(out.isnan().any()), offsets
        assert recorded() == is_wrong(offsets, tokens, longest), (offsets, longest)


def rows_in_front_are_zero():
    """Of a first offset that isn't 0, which is wrong and recorded."""
    q = torch.randn(140, 2, 16)
    offsets_in_front = ([3, 8], [70, 100, 100, 130], [135, 140], [200, 210])
    for index, blocks in enumerate((*FORMS, *ALONE)):  # each form twice, each of the offsets with several
        for offsets in (offsets_in_front[index % 4], offsets_in_front[(index + 1) % 4]):
            in_front_of(q, offsets, blocks)


def in_front_of(q, offsets, blocks):
    cu = torch.tensor(offsets, dtype=torch.int32)
    first, last = min(offsets[0], 140), min(offsets[-1], 140)
    out, lse = run(q, q, q, cu, 64, 0.25, False, True, blocks)
    inner = [min(x, 140) - first for x in offsets]
    part = q[first:last]
    if first < last:
        expected = reference.forward(part, part, part, torch.tensor(inner).int(), 64, 0.25, False, True)
        torch.testing.assert_close(out[first:last], expected[0])
        torch.testing.assert_close(lse[:, first:last], expected[1])
    for uncovered in (slice(first), slice(last, None)):
        assert float(out[uncovered].abs().sum()) == 0.0
        assert bool((lse[:, uncovered] == -INF).all())
    assert recorded()


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    parts = (
        (special_batches, many_sequences),
        (any_batches,),
        (values_that_are_no_numbers_stay_in_their_sequence, offsets_never_lead_outside, rows_in_front_are_zero),
    )
    for check in parts[int(sys.argv[1])]:
        check()
    print("same")
