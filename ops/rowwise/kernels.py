"""Triton kernels of the row-wise ops: one launch each, and one reading of each input.

Token counts and strides are run-time arguments; which power of two divides the strides is a constant, without which
loads would be two bytes each. Row offsets are 64-bit. Math is in float32 (float64 for float64), and values are rounded
where the reference rounds them. Triton's language isn't Python's types, so this file isn't type-checked; a constant's
``if`` stands alone, because only then is it decided at compile time.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from mmgraph.ops.recording import record


@triton.jit
def _total(x_ptrs, delta_ptrs, mask, ADD: tl.constexpr, MATH: tl.constexpr):
    """x, or x + delta as its dtype rounds it; zero outside."""
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptrs, mask=mask, other=0.0)
        x = (x.to(MATH) + delta.to(MATH)).to(x.dtype)
    return x


@triton.jit
def _store_normed(
    out_ptrs,
    centred,
    inverse,
    weight_ptrs,
    bias_ptrs,
    inside,
    mask,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MATH: tl.constexpr,
):
    """Scale by the statistics, the weight and the bias, and store; "rms" is rounded before the weight too."""
    dtype: tl.constexpr = out_ptrs.dtype.element_ty
    y = centred * inverse
    if not LAYER:
        y = y.to(dtype).to(MATH)
    if WEIGHT:
        y = y * tl.load(weight_ptrs, mask=inside, other=0.0).to(MATH)
    if BIAS:
        y = y + tl.load(bias_ptrs, mask=inside, other=0.0).to(MATH)
    tl.store(out_ptrs, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens", "x_stride", "delta_stride"])
def norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    tokens,
    x_stride,
    delta_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EPS: tl.constexpr,
    DOUBLE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Some whole rows, which stay in registers between the sums and the store."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    mask = (rows < tokens)[:, None] & inside
    out_places = (rows * WIDTH)[:, None] + columns
    x_ptrs = x_ptr + tl.multiple_of(rows * x_stride, (ALIGN,))[:, None] + columns
    delta_ptrs = delta_ptr + tl.multiple_of(rows * delta_stride, (ALIGN,))[:, None] + columns
    total = _total(x_ptrs, delta_ptrs, mask, ADD, MATH)
    if ADD:
        tl.store(total_ptr + out_places, total, mask=mask)
    values = total.to(MATH)
    if LAYER:
        mean = tl.sum(values, axis=1)[:, None] / WIDTH
        values = tl.where(inside, values - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(values * values, axis=1)[:, None] / WIDTH + EPS)
    _store_normed(
        out_ptr + out_places,
        values,
        inverse,
        weight_ptr + columns,
        bias_ptr + columns,
        inside,
        mask,
        LAYER,
        WEIGHT,
        BIAS,
        MATH,
    )


@triton.jit(do_not_specialize=["x_stride", "delta_stride"])
def wide_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    x_stride,
    delta_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EPS: tl.constexpr,
    DOUBLE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A row that registers don't hold, read again for each sum; by then it lies in a cache."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGN)
    delta_row = delta_ptr + tl.multiple_of(row * delta_stride, ALIGN)
    lanes = tl.arange(0, BLOCK)
    mean = 0.0
    if LAYER:
        sums = tl.zeros([BLOCK], dtype=MATH)
        for start in range(0, WIDTH, BLOCK):
            columns = start + lanes
            sums += _total(x_row + columns, delta_row + columns, columns < WIDTH, ADD, MATH).to(MATH)
        mean = tl.sum(sums, axis=0) / WIDTH
    squares = tl.zeros([BLOCK], dtype=MATH)
    for start in range(0, WIDTH, BLOCK):
        columns = start + lanes
        inside = columns < WIDTH
        values = _total(x_row + columns, delta_row + columns, inside, ADD, MATH).to(MATH)
        if LAYER:
            values = tl.where(inside, values - mean, 0.0)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + EPS)
    for start in range(0, WIDTH, BLOCK):
        columns = start + lanes
        inside = columns < WIDTH
        total = _total(x_row + columns, delta_row + columns, inside, ADD, MATH)
        if ADD:
            tl.store(total_ptr + row * WIDTH + columns, total, mask=inside)
        values = total.to(MATH)
        if LAYER:
            values = values - mean
        _store_normed(
            out_ptr + row * WIDTH + columns,
            values,
            inverse,
            weight_ptr + columns,
            bias_ptr + columns,
            inside,
            inside,
            LAYER,
            WEIGHT,
            BIAS,
            MATH,
        )


@triton.jit
def _activated(x, KIND: tl.constexpr, MATH: tl.constexpr):
    """The activation, rounded to the dtype of x."""
    dtype: tl.constexpr = x.dtype
    v = x.to(MATH)
    if KIND == "silu":
        y = v / (1.0 + tl.exp(-v))
    elif KIND == "gelu":
        y = v * 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u), which loses no digits where tanh comes near -1.
        inner = 0.7978845608028654 * (v + 0.044715 * (v * v * v))
        y = v / (1.0 + tl.exp(-2.0 * inner))
    elif KIND == "quick_gelu":
        # Three operations of the models, each of which rounds.
        scaled = (1.702 * v).to(dtype).to(MATH)
        y = v * (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(MATH)
    else:
        tl.static_assert(KIND == "relu", "unknown activation")
        y = tl.where(v <= 0.0, 0.0, v)  # NaN stays
    return y.to(dtype)


@triton.jit(do_not_specialize=["x_stride"])
def activation_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    DOUBLE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A piece of a row; WIDTH is that of the result."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    columns = (program % PARTS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGN)
    x = tl.load(x_row + columns, mask=mask, other=0.0)
    if GATED:
        up = tl.load(x_row + WIDTH + columns, mask=mask, other=0.0)
        y = (_activated(x, KIND, MATH).to(MATH) * up.to(MATH)).to(x.dtype)
    else:
        y = _activated(x, KIND, MATH)
    tl.store(out_ptr + row * WIDTH + columns, y, mask=mask)


@triton.jit(do_not_specialize=["table_rows", "table_stride", "base_stride"])
def mix_kernel(
    table_ptr,
    indices_ptr,
    weights_ptr,
    base_ptr,
    out_ptr,
    flag_ptr,
    table_rows,
    table_stride,
    base_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    ADD: tl.constexpr,
    DOUBLE: tl.constexpr,
    BASE_DOUBLE: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    BASE_ALIGN: tl.constexpr,
    FAULT: tl.constexpr,
):
    """A piece of a row of the result, tap after tap; a tap outside the table is recorded and adds nothing."""
    MATH: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    part = program % PARTS
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros([BLOCK], dtype=MATH)
    wrong = row < 0
    worst = row
    for tap in tl.static_range(TAPS):
        index = tl.load(indices_ptr + row * TAPS + tap).to(tl.int64)
        share = tl.load(weights_ptr + row * TAPS + tap).to(MATH)
        inside = (index >= 0) & (index < table_rows)
        # Masked, not multiplied by zero: what lies there may be NaN, or nothing at all.
        values = tl.load(
            table_ptr + tl.multiple_of(index * table_stride, TABLE_ALIGN) + columns,
            mask=mask & inside,
            other=0.0,
        )
        total = tl.where(inside, total + values.to(MATH) * share, total)
        worst = tl.where(inside | wrong, worst, index)
        wrong = wrong | (inside == 0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ADD:
        SUM: tl.constexpr = tl.float64 if BASE_DOUBLE else tl.float32
        base_row = base_ptr + tl.multiple_of(row * base_stride, BASE_ALIGN)
        base = tl.load(base_row + columns, mask=mask, other=0.0)
        y = (base.to(SUM) + total.to(dtype).to(SUM)).to(dtype)
    else:
        y = total.to(dtype)
    tl.store(out_ptr + row * WIDTH + columns, y, mask=mask)
    # Behind all loads, which then are in flight together.
    if part == 0:
        if wrong:
            record(flag_ptr, FAULT, row, worst)
