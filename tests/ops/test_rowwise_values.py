"""Invariant: the row-wise ops equal what models write, to the bit, and the formula in float64, in any layout."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rowwise import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    assert_near,
    exact_activation,
    exact_mix,
    exact_norm,
    rows,
    vector,
)
from torch.nn import functional as F

from mmgraph import ops

SEEDS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, 5)
EACH_DTYPE = st.sampled_from(DTYPES)
EACH_LAYOUT = st.sampled_from(LAYOUTS)


def written_norm(x, weight, bias, eps, kind):
    """As models write it: torch.nn.LayerNorm, and the RMS norm of language models that towers took over."""
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    hidden = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return hidden.to(x.dtype) if weight is None else weight * hidden.to(x.dtype)


WRITTEN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


def is_new(out, *inputs):
    places = {x.untyped_storage().data_ptr() for x in inputs if x is not None and x.numel()}
    return out.is_contiguous() and (out.numel() == 0 or out.untyped_storage().data_ptr() not in places)


@settings(max_examples=80)
@given(
    seed=SEEDS,
    tokens=TOKENS,
    width=st.integers(1, 90),
    dtype=EACH_DTYPE,
    layouts=st.tuples(EACH_LAYOUT, EACH_LAYOUT),
    kind=st.sampled_from(("layer", "rms")),
    weighted=st.booleans(),
    biased=st.booleans(),
    eps=st.sampled_from((1e-6, 1e-2)),
)
@example(0, 3, 1152, torch.bfloat16, ("plain", "gaps"), "layer", True, True, 1e-6)
@example(0, 3, 1280, torch.bfloat16, ("plain", "gaps"), "rms", True, False, 1e-6)
def test_norms(seed, tokens, width, dtype, layouts, kind, weighted, biased, eps):
    g = torch.Generator().manual_seed(seed)
    x, delta = (rows(g, tokens, width, dtype, layout) for layout in layouts)
    weight = vector(g, width, dtype) if weighted else None
    bias = vector(g, width, dtype) if biased and kind == "layer" else None
    kept = [x.clone(), delta.clone()]
    total, out = ops.add_norm(x, delta, weight, bias, eps=eps, kind=kind)
    # Contiguous, since PyTorch adds up a row's columns in another order where they lie apart.
    written = written_norm((x + delta).contiguous(), weight, bias, eps, kind)
    assert torch.equal(total, x + delta)
    assert torch.equal(out, written)
    assert out.dtype == total.dtype == dtype
    assert is_new(total, x, delta)
    assert is_new(out, x, delta, total)
    if width > 2:  # of two numbers, and of one, the differences are all error
        assert_near(out, exact_norm(total, weight, bias, eps, kind), written)
    alone = ops.norm(total, weight, bias, eps=eps, kind=kind)
    assert torch.equal(alone, out)
    assert is_new(alone, total)
    assert torch.equal(x, kept[0])
    assert torch.equal(delta, kept[1])


def test_a_norm_is_of_the_sum_as_it_was_rounded():
    """A sum that the dtype holds as zero has no norm to show."""
    x = torch.tensor([[256.0, 1.0, 256.0]], dtype=torch.bfloat16)
    delta = torch.tensor([[-255.0, 0.0, 0.5]], dtype=torch.bfloat16)
    total, out = ops.add_norm(x, delta, None, eps=0.0, kind="layer")
    assert total.tolist() == [[1.0, 1.0, 256.0]]
    torch.testing.assert_close(
        out.float(), torch.tensor([[-math.sqrt(0.5)] * 2 + [math.sqrt(2)]]), rtol=4e-3, atol=0
    )


@settings(max_examples=60)
@given(
    seed=SEEDS,
    tokens=TOKENS,
    width=st.integers(0, 40),
    dtype=EACH_DTYPE,
    layout=EACH_LAYOUT,
    kind=st.sampled_from(ACTIVATIONS),
    scale=st.sampled_from((0.1, 3.0, 40.0)),
)
def test_activations(seed, tokens, width, dtype, layout, kind, scale):
    g = torch.Generator().manual_seed(seed)
    x = rows(g, tokens, 2 * width, dtype, layout, scale)
    before = x.clone()
    plain = ops.activation(x, kind=kind)
    assert plain.dtype == dtype
    assert is_new(plain, x)
    assert torch.equal(plain, WRITTEN[kind](x))
    assert_near(plain, exact_activation(x, kind), WRITTEN[kind](x))
    gate, up = x[:, :width], x[:, width:]
    gated = ops.gated_activation(x, activation=kind)
    assert gated.dtype == dtype
    assert is_new(gated, x)
    assert torch.equal(gated, WRITTEN[kind](gate) * up)
    assert_near(gated, exact_activation(gate, kind) * up.double(), WRITTEN[kind](gate) * up)
    assert torch.equal(x, before)


@settings(max_examples=80)
@given(
    seed=SEEDS,
    tokens=TOKENS,
    taps=st.integers(0, 5),
    count=st.integers(1, 7),
    width=st.integers(0, 40),
    dtypes=st.tuples(EACH_DTYPE, st.one_of(st.none(), EACH_DTYPE)),
    layouts=st.tuples(EACH_LAYOUT, EACH_LAYOUT),
    index_dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_mixtures(seed, tokens, taps, count, width, dtypes, layouts, index_dtype):
    g = torch.Generator().manual_seed(seed)
    table = rows(g, count, width, dtypes[0], layouts[0])
    base = None if dtypes[1] is None else rows(g, tokens, width, dtypes[1], layouts[1])
    indices = torch.randint(0, count, (taps, tokens), generator=g).to(index_dtype).t()
    weights = torch.rand(tokens, 2 * taps, generator=g)[:, ::2]
    out = ops.mix_rows(table, indices, weights, base=base)
    total = (table[indices] * weights[:, :, None]).sum(1)
    written = total.to(table.dtype) if base is None else base + total.to(base.dtype)
    assert out.dtype == (table if base is None else base).dtype
    assert out.shape == (tokens, width)
    assert is_new(out, table, weights, base)
    exact = exact_mix(table, indices, weights, base)
    # A sum in another order, and then rounded once or twice; a difference of large numbers loses more.
    assert_near(out, exact, written, steps=8)
    if taps == 1:
        assert torch.equal(out, written)


def test_a_sum_is_rounded_once_and_the_base_is_added_to_that():
    table = torch.tensor([[256.0], [0.75], [0.75]], dtype=torch.bfloat16)
    indices, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    assert ops.mix_rows(table, indices, weights).item() == 258.0  # 257.5; 256.75 would have been rounded to 256
    base = torch.full((1, 1), 2.0**-9)
    out = ops.mix_rows(table, indices, weights, base=base)
    assert out.item() == 257.5 + 2.0**-9  # in the dtype of base, the table's is not passed through


def test_float64_tables_take_weights_of_both_kinds():
    table = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    third = torch.full((1, 1), 1 / 3, dtype=torch.float64)
    index = torch.tensor([[2]])
    assert torch.equal(ops.mix_rows(table, index, third), table[2:] * third)
    assert torch.equal(ops.mix_rows(table, index, third.float()), table[2:] * third.float().double())


@pytest.mark.parametrize("width", [3420, 4304, 8200])
def test_wide_rows(width):
    g = torch.Generator().manual_seed(width)
    x, delta = rows(g, 2, width, torch.bfloat16), rows(g, 2, width, torch.bfloat16, "gaps")
    for kind in ("layer", "rms"):
        weight = vector(g, width, torch.bfloat16)
        total, out = ops.add_norm(x, delta, weight, eps=1e-6, kind=kind)
        assert torch.equal(out, written_norm(x + delta, weight, None, 1e-6, kind))
        assert_near(out, exact_norm(total, weight, None, 1e-6, kind), out)
    gate, up = x.chunk(2, 1)
    assert torch.equal(ops.gated_activation(x, activation="silu"), F.silu(gate) * up)
