"""Invariant: rotary positions equal the formula in float64, rounded once, for any heads, layout, tables and norms."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rotary import TABLE_KINDS, Heads, assert_rounded_once, exact, packed, table

from mmgraph import ops
from mmgraph.ops import rotary_checks as checks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ANY_HEADS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)).map(
    lambda sizes: Heads(sizes[0] * sizes[1], sizes[1], 2 * sizes[2])
)


def norms(generator, heads, which, dtype):
    weights = [torch.randn(2 * heads.width, generator=generator).to(dtype)[::2] for _ in range(2)]
    return {f"{name}_norm": w if name in which else None for name, w in zip("qk", weights, strict=True)}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 5),
    heads=ANY_HEADS,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("plain", "gaps", "apart")),
    interleaved=st.booleans(),
    full=st.booleans(),
    table_dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    kinds=st.tuples(st.sampled_from(TABLE_KINDS), st.sampled_from(TABLE_KINDS)),
    which=st.sampled_from(("", "q", "k", "qk")),
    eps=st.sampled_from((1e-6, 1e-2)),
)
@example(
    0, 0, Heads(1, 1, 2), torch.float32, "plain", False, False, (torch.float32,) * 2, ("plain",) * 2, "qk", 1e-6
)
def test_every_form_equals_the_formula(
    seed, tokens, heads, dtype, layout, interleaved, full, table_dtypes, kinds, which, eps
):
    g = torch.Generator().manual_seed(seed)
    qkv = packed(g, tokens, heads, dtype, layout)
    width = heads.width if full else heads.width // 2
    cos, sin = (table(g, tokens, width, d, kind) for d, kind in zip(table_dtypes, kinds, strict=True))
    if dtype != torch.float64:  # math is in float32: what a wider table has beyond that isn't used
        cos, sin = cos.float(), sin.float()
    options = {"interleaved": interleaved, "eps": eps, **norms(g, heads, which, dtype)}
    before = qkv.clone()
    expected = exact(qkv, cos, sin, heads, **options)
    q, k, v = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts(), **options)
    for got, want in zip((q, k), expected[:2], strict=True):
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert_rounded_once(got, want)
    assert torch.equal(v.double(), expected[2])
    assert torch.equal(qkv, before)

    copies = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts(), copy_v=True, **options)
    if layout != "apart":
        views = ops.packed_qkv_rope_(qkv, cos, sin, *heads.counts(), **options)
        for a, b, part in zip((q, k, before), views, heads.split(qkv), strict=False):
            assert a is before or torch.equal(a, b)
            assert torch.equal(b.double(), part)
    for a, b in zip((q, k, expected[2]), copies, strict=True):
        assert torch.equal(a.double(), b.double())
        assert b.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["q", "k", "qk"])
def test_a_norm_works_without_tables(dtype, which):
    g = torch.Generator().manual_seed(3)
    heads = Heads(4, 2, 6)
    qkv = packed(g, 7, heads, dtype, "gaps")
    options = norms(g, heads, which, torch.float32)
    expected = exact(qkv, None, None, heads, **options)
    got = ops.packed_qkv_rope(qkv, None, None, *heads.counts(), **options)
    for a, b in zip(got, expected, strict=True):
        assert_rounded_once(a, b)
    for a, b in zip(ops.packed_qkv_rope_(qkv, None, None, *heads.counts(), **options), got, strict=True):
        assert torch.equal(a, b)


def test_a_copied_split_needs_nothing_else():
    heads = Heads(4, 2, 6)
    qkv = packed(torch.Generator().manual_seed(4), 5, heads, torch.bfloat16, "gaps")
    got = ops.packed_qkv_rope(qkv, None, None, *heads.counts(), copy_v=True)
    for a, b in zip(got, heads.split(qkv), strict=True):
        assert torch.equal(a.double(), b)
        assert a.is_contiguous()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 5),
    heads=ANY_HEADS,
    wide=st.booleans(),
    conj=st.booleans(),
)
def test_a_complex_table_multiplies_adjacent_pairs(seed, tokens, heads, wide, conj):
    g = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if wide else torch.complex64
    freqs = torch.randn(tokens, heads.width // 2, generator=g, dtype=torch.complex64).to(dtype)
    freqs = freqs.conj() if conj else freqs
    qkv = packed(g, tokens, heads, torch.float64 if wide else torch.float32)
    q, k, v = ops.packed_qkv_rope(qkv, freqs, None, *heads.counts(), interleaved=True)
    for got, part in zip((q, k), heads.split(qkv)[:2], strict=True):
        pairs = torch.view_as_complex(part.unflatten(2, (heads.width // 2, 2)).contiguous())
        turned = torch.view_as_real(pairs * freqs[:, None].to(torch.complex128)).flatten(2)
        assert_rounded_once(got, turned)
    assert torch.equal(v.double(), heads.split(qkv)[2])
    views = ops.packed_qkv_rope_(qkv, freqs, None, *heads.counts(), interleaved=True)
    assert torch.equal(views[0], q)
    assert torch.equal(views[1], k)


def test_a_complex_table_is_read_where_it_lies():
    freqs = torch.randn(3, 4, dtype=torch.complex64)
    cos, sin = checks.real_tables("op", freqs, None, 8, True)
    assert cos.data_ptr() == freqs.data_ptr()
    assert sin.data_ptr() == freqs.data_ptr() + 4
    assert cos.stride() == sin.stride() == (8, 2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_half_table_is_the_full_one_that_repeats_it(interleaved):
    g = torch.Generator().manual_seed(5)
    heads = Heads(2, 1, 8)
    qkv = packed(g, 6, heads, torch.bfloat16)
    halves = [table(g, 6, 4, torch.float32) for _ in range(2)]
    wide = [x.repeat_interleave(2, dim=1) if interleaved else torch.cat([x, x], dim=1) for x in halves]
    got = [ops.packed_qkv_rope(qkv, *t, *heads.counts(), interleaved=interleaved) for t in (halves, wide)]
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


def test_v_is_a_view_unless_a_copy_is_asked_for():
    heads = Heads(4, 2, 6)
    qkv = torch.randn(5, heads.columns)
    cos, sin = torch.randn(5, 3), torch.randn(5, 3)
    q, k, v = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts())
    memory = qkv.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() == memory for x in (q, k, v)] == [False, False, True]
    copies = ops.packed_qkv_rope(qkv, cos, sin, *heads.counts(), copy_v=True)
    assert all(x.untyped_storage().data_ptr() != memory for x in copies)
    views = ops.packed_qkv_rope_(qkv, cos, sin, *heads.counts())
    assert all(x.untyped_storage().data_ptr() == memory for x in views)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 5), heads=ANY_HEADS, interleaved=st.booleans())
def test_in_place_touches_q_and_k_alone(seed, tokens, heads, interleaved):
    g = torch.Generator().manual_seed(seed)
    room = torch.full((tokens + 2, heads.columns + 3), 9.0)
    room[1:-1, 2:-1] = torch.randn(tokens, heads.columns, generator=g)
    qkv = room[1:-1, 2:-1]
    v = heads.split(qkv)[2]
    cos, sin = (table(g, tokens, heads.width, torch.float32) for _ in range(2))
    expected = ops.packed_qkv_rope(qkv.clone(), cos, sin, *heads.counts(), interleaved=interleaved)
    ops.packed_qkv_rope_(qkv, cos, sin, *heads.counts(), interleaved=interleaved)
    assert torch.equal(torch.cat([x.flatten(1) for x in expected], dim=1), qkv)
    assert torch.equal(heads.split(qkv)[2], v)
    room[1:-1, 2:-1] = 9
    assert bool((room == 9).all())


def test_scores_of_rotated_rows_depend_on_the_distance_alone():
    heads, freqs = Heads(1, 1, 8), 0.5 ** torch.arange(4.0, dtype=torch.float64)
    row = torch.randn(1, heads.columns, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * freqs
    for interleaved in (False, True):
        q, k, _ = ops.packed_qkv_rope(
            row.expand(9, -1), angles.cos(), angles.sin(), *heads.counts(), interleaved=interleaved
        )
        scores = q[:, 0] @ k[:, 0].t()
        for distance in range(9):
            line = scores.diagonal(distance)
            torch.testing.assert_close(line, line[:1].expand_as(line))
        assert abs(float(scores[0, 0] - scores[0, 3])) > 1e-3
