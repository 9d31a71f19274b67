"""Triton kernel of the rotary backward: one launch for the whole packed gradient.

A program takes a token, or, where weights of norms need gradients, every so many tokens, and leaves one partial sum:
no atomics, so that results repeat. Token counts and strides are run-time arguments, as in ``kernels``. Triton's
language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from mmgraph.ops.rotary.kernels import inverse_rms, load_pairs, load_row, store_pairs


@triton.jit
def _turn_back(
    g1,
    g2,
    x1,
    x2,
    sum1,
    sum2,
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
    """The gradient of ``_turn``: of the heads, and the sums for the norm's weight with this block's share added."""
    g1 = g1.to(MATH)
    g2 = g2.to(MATH)
    if TABLES:
        # The transposed map: with a full table it isn't the rotation by the negative angle.
        turned = g1 * c1 + g2 * s2
        g2 = g2 * c2 - g1 * s1
        g1 = turned
    if NORM:
        x1 = x1.to(MATH)
        x2 = x2.to(MATH)
        inverse = inverse_rms(x1, x2, inside, HALF, EPS)
        x1 = x1 * inverse
        x2 = x2 * inverse
        sum1 += g1 * x1
        sum2 += g2 * x2
        g1 = g1 * w1
        g2 = g2 * w2
        mean = ((tl.sum(g1 * x1, axis=1) + tl.sum(g2 * x2, axis=1)) / (2 * HALF))[:, None]
        g1 = inverse * (g1 - x1 * mean)
        g2 = inverse * (g2 - x2 * mean)
    return g1, g2, sum1, sum2


@triton.jit(
    do_not_specialize=[
        "tokens",
        "dq_stride",
        "dq_head",
        "dk_stride",
        "dk_head",
        "dv_stride",
        "dv_head",
        "qkv_stride",
        "cos_stride",
        "sin_stride",
    ]
)
def backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    sums_ptr,
    tokens,
    dq_stride,
    dq_head,
    dk_stride,
    dk_head,
    dv_stride,
    dv_head,
    qkv_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TABLES: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SUMS: tl.constexpr,
    EPS: tl.constexpr,
    DOUBLE: tl.constexpr,
    IN_ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Some tokens' packed gradient; with SUMS, also these tokens' share of the weights' gradients, in one row."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    D: tl.constexpr = 2 * HALF
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    wq1, wq2 = load_row(q_norm_ptr, Q_NORM, 1, True, HALF, PADDED, INTERLEAVED, MATH)
    wk1, wk2 = load_row(k_norm_ptr, K_NORM, 1, True, HALF, PADDED, INTERLEAVED, MATH)
    q_sum1 = tl.zeros([BLOCK, PADDED], dtype=MATH)
    q_sum2 = tl.zeros([BLOCK, PADDED], dtype=MATH)
    k_sum1 = tl.zeros([BLOCK, PADDED], dtype=MATH)
    k_sum2 = tl.zeros([BLOCK, PADDED], dtype=MATH)
    for row in range(program, tokens, programs):  # 64-bit, as its start is
        dq_row = dq_ptr + tl.multiple_of(row * dq_stride, GRAD_ALIGN)
        dk_row = dk_ptr + tl.multiple_of(row * dk_stride, GRAD_ALIGN)
        dv_row = dv_ptr + tl.multiple_of(row * dv_stride, GRAD_ALIGN)
        in_ptr = qkv_ptr + tl.multiple_of(row * qkv_stride, IN_ALIGN)
        out_row = out_ptr + row * ((HEADS + 2 * KV_HEADS) * D)
        cos_row = cos_ptr + tl.multiple_of(row * cos_stride, TABLE_ALIGN)
        sin_row = sin_ptr + tl.multiple_of(row * sin_stride, TABLE_ALIGN)
        c1, c2 = load_row(cos_row, TABLES, STEP, FULL, HALF, PADDED, INTERLEAVED, MATH)
        s1, s2 = load_row(sin_row, TABLES, STEP, FULL, HALF, PADDED, INTERLEAVED, MATH)
        for start in tl.static_range(0, HEADS, BLOCK):
            heads = start + tl.arange(0, BLOCK)
            is_q = heads < HEADS
            is_k = heads < KV_HEADS
            dq_starts = tl.multiple_of(heads.to(tl.int64) * dq_head, (GRAD_ALIGN,))
            q1, q2 = load_pairs(dq_row, dq_starts, is_q, HALF, PADDED, INTERLEAVED)
            x1, x2 = q1, q2
            if Q_NORM:
                x1, x2 = load_pairs(in_ptr, heads * D, is_q, HALF, PADDED, INTERLEAVED)
            if start < KV_HEADS:
                dk_starts = tl.multiple_of(heads.to(tl.int64) * dk_head, (GRAD_ALIGN,))
                dv_starts = tl.multiple_of(heads.to(tl.int64) * dv_head, (GRAD_ALIGN,))
                k1, k2 = load_pairs(dk_row, dk_starts, is_k, HALF, PADDED, INTERLEAVED)
                v1, v2 = load_pairs(dv_row, dv_starts, is_k, HALF, PADDED, INTERLEAVED)
                y1, y2 = k1, k2
                if K_NORM:
                    y1, y2 = load_pairs(in_ptr + HEADS * D, heads * D, is_k, HALF, PADDED, INTERLEAVED)
            q1, q2, q_sum1, q_sum2 = _turn_back(
                q1, q2, x1, x2, q_sum1, q_sum2, is_q, wq1, wq2, c1, s1, c2, s2, Q_NORM, TABLES, HALF, EPS, MATH
            )
            store_pairs(out_row, heads * D, is_q, q1, q2, HALF, PADDED, INTERLEAVED)
            if start < KV_HEADS:
                k1, k2, k_sum1, k_sum2 = _turn_back(
                    k1,
                    k2,
                    y1,
                    y2,
                    k_sum1,
                    k_sum2,
                    is_k,
                    wk1,
                    wk2,
                    c1,
                    s1,
                    c2,
                    s2,
                    K_NORM,
                    TABLES,
                    HALF,
                    EPS,
                    MATH,
                )
                k_out = out_row + HEADS * D
                store_pairs(k_out, heads * D, is_k, k1, k2, HALF, PADDED, INTERLEAVED)
                v_out = out_row + (HEADS + KV_HEADS) * D
                store_pairs(v_out, heads * D, is_k, v1, v2, HALF, PADDED, INTERLEAVED)
    if SUMS:
        columns = tl.arange(0, PADDED)
        mask = columns < HALF
        if INTERLEAVED:
            places = 2 * columns
            other = places + 1
        else:
            places = columns
            other = columns + HALF
        q_ptr = sums_ptr + program * D
        k_ptr = q_ptr + programs * D
        tl.store(q_ptr + places, tl.sum(q_sum1, axis=0), mask=mask)
        tl.store(q_ptr + other, tl.sum(q_sum2, axis=0), mask=mask)
        tl.store(k_ptr + places, tl.sum(k_sum1, axis=0), mask=mask)
        tl.store(k_ptr + other, tl.sum(k_sum2, axis=0), mask=mask)
