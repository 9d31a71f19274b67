"""Triton kernel of the rotary ops: one launch for q and k together; and what it shares with the backward's.

A program takes a token, loads its tables once and goes over the heads. Token counts and strides are run-time
arguments; which power of two divides the strides is a constant, without which loads would be two bytes each. Row
offsets are 64-bit. In place, a program has loaded all of a head before it stores any of it, and no program touches
another's heads. Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def load_pairs(ptr, starts, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second elements of the pairs of some heads, each [heads, PADDED]; zero outside."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PADDED)
        mask = inside[:, None] & (columns < 2 * HALF)[None, :]
        whole = tl.load(ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(whole, (whole.shape[0], PADDED, 2)))
        return first, second
    else:
        columns = tl.arange(0, PADDED)
        mask = inside[:, None] & (columns < HALF)[None, :]
        ptrs = ptr + starts[:, None] + columns[None, :]
        return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + HALF, mask=mask, other=0.0)


@triton.jit
def store_pairs(
    ptr, starts, inside, first, second, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The opposite of ``load_pairs``, rounding to the target's dtype."""
    first = first.to(ptr.dtype.element_ty)
    second = second.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PADDED)
        mask = inside[:, None] & (columns < 2 * HALF)[None, :]
        whole = tl.reshape(tl.join(first, second), (first.shape[0], 2 * PADDED))
        tl.store(ptr + starts[:, None] + columns[None, :], whole, mask=mask)
    else:
        columns = tl.arange(0, PADDED)
        mask = inside[:, None] & (columns < HALF)[None, :]
        ptrs = ptr + starts[:, None] + columns[None, :]
        tl.store(ptrs, first, mask=mask)
        tl.store(ptrs + HALF, second, mask=mask)


@triton.jit
def load_row(
    ptr,
    THERE: tl.constexpr,
    STEP: tl.constexpr,
    FULL: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MATH: tl.constexpr,
):
    """A table's (or weight's) values for the first and for the second elements, each [1, PADDED]; zeros if it isn't."""
    columns = tl.arange(0, PADDED)
    mask = columns < HALF
    if not THERE:
        first = tl.zeros([PADDED], dtype=MATH)
        second = first
    elif FULL:
        if INTERLEAVED:
            first = tl.load(ptr + 2 * columns * STEP, mask=mask, other=0.0)
            second = tl.load(ptr + (2 * columns + 1) * STEP, mask=mask, other=0.0)
        else:
            first = tl.load(ptr + columns * STEP, mask=mask, other=0.0)
            second = tl.load(ptr + (columns + HALF) * STEP, mask=mask, other=0.0)
    else:
        first = tl.load(ptr + columns * STEP, mask=mask, other=0.0)
        second = first
    return first.to(MATH)[None, :], second.to(MATH)[None, :]


@triton.jit
def inverse_rms(first, second, inside, HALF: tl.constexpr, EPS: tl.constexpr):
    """[heads, 1]; zero for heads that aren't there, which without an eps would be infinite."""
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
    return tl.where(inside, tl.rsqrt(mean + EPS), 0.0)[:, None]


@triton.jit
def _turn(
    first,
    second,
    inside,
    w1,
    w2,
    c1,
    s1,
    c2,
    s2,
    NORM: tl.constexpr,
    TABLES: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    MATH: tl.constexpr,
):
    """Norm, then rotation."""
    first = first.to(MATH)
    second = second.to(MATH)
    if NORM:
        inverse = inverse_rms(first, second, inside, HALF, EPS)
        first = first * inverse * w1
        second = second * inverse * w2
    if TABLES:
        return first * c1 - second * s1, second * c2 + first * s2
    else:
        return first, second


@triton.jit(do_not_specialize=["qkv_stride", "q_stride", "k_stride", "cos_stride", "sin_stride"])
def forward_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    COPY_V: tl.constexpr,
    EPS: tl.constexpr,
    DOUBLE: tl.constexpr,
    IN_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """One token: q and k heads by blocks, loaded together; v is copied where it is asked for."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    in_ptr = qkv_ptr + tl.multiple_of(row * qkv_stride, IN_ALIGN)
    q_row = q_ptr + tl.multiple_of(row * q_stride, OUT_ALIGN)
    k_row = k_ptr + tl.multiple_of(row * k_stride, OUT_ALIGN)
    cos_row = cos_ptr + tl.multiple_of(row * cos_stride, TABLE_ALIGN)
    sin_row = sin_ptr + tl.multiple_of(row * sin_stride, TABLE_ALIGN)
    c1, c2 = load_row(cos_row, TABLES, STEP, FULL, HALF, PADDED, INTERLEAVED, MATH)
    s1, s2 = load_row(sin_row, TABLES, STEP, FULL, HALF, PADDED, INTERLEAVED, MATH)
    wq1, wq2 = load_row(q_norm_ptr, Q_NORM, 1, True, HALF, PADDED, INTERLEAVED, MATH)
    wk1, wk2 = load_row(k_norm_ptr, K_NORM, 1, True, HALF, PADDED, INTERLEAVED, MATH)
    if COPY_V:
        v_row = v_ptr + row * (KV_HEADS * D)
        for start in tl.static_range(0, KV_HEADS * D, V_BLOCK):
            columns = start + tl.arange(0, V_BLOCK)
            mask = columns < KV_HEADS * D
            tl.store(v_row + columns, tl.load(in_ptr + (HEADS + KV_HEADS) * D + columns, mask=mask), mask=mask)
    for start in tl.static_range(0, HEADS, BLOCK):
        heads = start + tl.arange(0, BLOCK)
        is_q = heads < HEADS
        is_k = heads < KV_HEADS
        q1, q2 = load_pairs(in_ptr, heads * D, is_q, HALF, PADDED, INTERLEAVED)
        if start < KV_HEADS:
            k1, k2 = load_pairs(in_ptr + HEADS * D, heads * D, is_k, HALF, PADDED, INTERLEAVED)
        q1, q2 = _turn(q1, q2, is_q, wq1, wq2, c1, s1, c2, s2, Q_NORM, TABLES, HALF, EPS, MATH)
        store_pairs(q_row, heads * D, is_q, q1, q2, HALF, PADDED, INTERLEAVED)
        if start < KV_HEADS:
            k1, k2 = _turn(k1, k2, is_k, wk1, wk2, c1, s1, c2, s2, K_NORM, TABLES, HALF, EPS, MATH)
            store_pairs(k_row, heads * D, is_k, k1, k2, HALF, PADDED, INTERLEAVED)
