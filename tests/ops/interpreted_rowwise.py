"""Runs the row-wise kernels under Triton's interpreter, on the CPU, against the reference; fails on any difference.

Started by test_triton_interpreted.py with TRITON_INTERPRET=1, which must be set before Triton is imported. Sums of
norms are in another order than the reference's, exponentials another library's: a value may be the next one of its
dtype there, and where it is then multiplied and rounded again, the third one. Everything else is equal to the bit.
"""

import itertools
import os

import torch
from interpreting import allow_new_numpy, expect, guarded, is_whole, round_to_nearest
from rowwise import ACTIVATIONS, DTYPES, LAYOUTS, assert_steps_at_most, rows, vector

from mmgraph import ops
from mmgraph.ops.rowwise import cuda as kernels
from mmgraph.ops.rowwise import reference
from mmgraph.ops.rowwise.dispatch import Norm

assert os.environ.get("TRITON_INTERPRET") == "1"

# What is lost inside, at values of some units: sums of float32, and 1 + erf and 1 + tanh where they are near zero.
SLACK = {torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float32: 1e-5, torch.float64: 2e-14}


def filled(fill, shape, dtype):
    """What a backend fills, in memory whose surroundings stay as they are."""
    room, out = guarded(torch.empty(shape, dtype=dtype))
    fill(out)
    assert is_whole(room)
    return out.clone()


def norms(g):
    """Narrow rows several to a program, one wide row, and a row that is read in pieces."""
    for index, (width, kind, dtype) in enumerate(
        itertools.product((1, 72, 1152, 2500), ("layer", "rms"), DTYPES)
    ):
        tokens = (1, 3, 17)[index % 3] if width < 100 else 2
        layout, other = LAYOUTS[index % 4], LAYOUTS[(index // 4) % 4]
        x, delta = rows(g, tokens, width, dtype, layout), rows(g, tokens, width, dtype, other)
        weighted, biased = (index + index // 4) % 2, (index // 2 + index // 8) % 2
        how = Norm(
            vector(g, width, dtype) if weighted else None,
            vector(g, width, dtype) if biased and kind == "layer" else None,
            1e-3 if index % 2 else 1e-6,
            kind,
        )
        total = guarded(torch.empty(x.shape, dtype=dtype))
        got = filled(
            lambda out, x=x, delta=delta, how=how, total=total: kernels.norm(x, delta, how, total[1], out),
            x.shape,
            dtype,
        )
        expected, normed = reference.added_and_normed(x, delta, how)
        assert is_whole(total[0])
        assert torch.equal(total[1], expected)
        assert_steps_at_most(3 if kind == "rms" else 1, got, normed, SLACK[dtype])
        # It is rarely that a sum in another order is rounded to another value; of one column, PyTorch gives noise.
        if dtype.itemsize == 2 and (width > 1 or kind == "rms"):
            assert int((got != normed).sum()) <= max(1, got.numel() // 50)
        alone = filled(lambda out, x=expected, how=how: kernels.norm(x, None, how, None, out), x.shape, dtype)
        assert torch.equal(alone, got)


def activations(g):
    for index, (kind, dtype) in enumerate(itertools.product(ACTIVATIONS, DTYPES)):
        width, tokens = ((5, 3), (72, 2), (1100, 1))[index % 3]
        x = rows(g, tokens, 2 * width, dtype, LAYOUTS[index % 3], scale=3.0)
        x[0, :4] = torch.tensor([0.0, -0.0, 90.0, -90.0])
        for gated in (False, True):
            shape = (tokens, width if gated else 2 * width)
            got = filled(
                lambda out, x=x, kind=kind, gated=gated: kernels.activate(x, kind, gated, out), shape, dtype
            )
            expected = reference.gated(x, kind) if gated else reference.activated(x, kind)
            if kind == "relu":
                assert torch.equal(got, expected)
            else:
                assert_steps_at_most(3 if gated else 1, got, expected, SLACK[dtype])
    x = torch.full((1, 8), torch.nan)
    for kind in ACTIVATIONS:
        out = torch.zeros(1, 8)
        kernels.activate(x, kind, False, out)
        assert bool(out.isnan().all())


def mixtures(g):
    tables, bases = (torch.float32, torch.bfloat16, torch.float64), (None, torch.bfloat16, torch.float32)
    for index, (table_dtype, base_dtype, taps) in enumerate(itertools.product(tables, bases, (0, 1, 4))):
        width, tokens, count = (5, 72, 1100)[index % 3], 3, 9
        table = rows(g, count, width, table_dtype, LAYOUTS[index % 3])
        indices = torch.randint(0, count, (tokens, 2 * taps), generator=g)[:, ::2]
        indices = indices.int() if index % 2 else indices
        weights = torch.rand(tokens, taps, generator=g)
        if table_dtype == torch.float64 and index % 2:
            weights = weights.double()
        base = None if base_dtype is None else rows(g, tokens, width, base_dtype, LAYOUTS[(index + 1) % 4])
        expected = reference.mixed(table, indices, weights, base)
        got = filled(
            lambda out, a=(table, indices, weights, base): kernels.mix(*a, out), expected.shape, expected.dtype
        )
        assert torch.equal(got, expected)
    ops.check_errors()


def wrong_indices():
    """They are recorded, the first of each row, and add nothing, whatever lies there; nothing outside is read."""
    table = torch.randn(4, 1100)
    table[0] = torch.nan
    weights = torch.ones(3, 3)
    out = torch.empty(3, 1100)

    def mix(indices):
        kernels.mix(table, torch.tensor(indices), weights, None, out)

    expect(
        r"token 1 had 4 \(1 such tokens\)",
        lambda: mix([[1, 2, 3], [2, 4, -7], [1, 1, 1]]),
    )
    assert torch.equal(out[0], table[1] + table[2] + table[3])
    assert torch.equal(out[1], table[2])
    expect(r"had -1 \(3 such tokens\)", lambda: mix([[-1] * 3] * 3))
    assert not bool(out.any())
    expect("outside the table", lambda: mix([[2**62, 1, 1], [1, 1, 1], [1, 1, 1]]))
    expect(
        r"had 0 \(3 such",
        lambda: kernels.mix(table[:0], torch.zeros(3, 3, dtype=torch.int32), weights, None, out),
    )
    assert not bool(out.any())


if __name__ == "__main__":
    allow_new_numpy()
    round_to_nearest()
    kernels._WIDEST_ROW = 2048  # so that the widest rows here are read in pieces
    generator = torch.Generator().manual_seed(0)
    norms(generator)
    activations(generator)
    mixtures(generator)
    wrong_indices()
    print("same")
