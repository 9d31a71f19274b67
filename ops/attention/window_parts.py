"""What the window kernel is made of: a tile's sequences and each row's bounds, one block of keys, loads and stores.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from mmgraph.ops.attention.triton_kernels import _load, _load_offset

_FAR = tl.constexpr(2147483647)


@triton.jit
def _first_from(cu_ptr, low, batch, value, tokens, PROBES: tl.constexpr):
    """The first of the sequences ``low .. batch`` whose offset is at least a value; ``batch`` where none is."""
    high = batch + 1
    while low < high:
        step = (high - low + PROBES - 1) // PROBES
        places = low + tl.arange(0, PROBES) * step + step - 1  # the last of each piece
        offsets = _load_offset(cu_ptr, tl.minimum(places, batch), tokens)
        below = tl.sum(((offsets < value) & (places < high)).to(tl.int32), 0)
        low += below * step
        high = tl.minimum(high, low + step - 1)
    return tl.minimum(low, batch)


@triton.jit
def _find_tile(cu_ptr, batch, low, high, tokens, PROBES: tl.constexpr):
    """The first sequences whose offsets are at least ``low`` and at least ``high``; ``batch`` where none is."""
    if batch < PROBES:
        places = tl.arange(0, PROBES)
        offsets = _load_offset(cu_ptr, tl.minimum(places, batch), tokens)
        inside = places <= batch
        # Both counts in one sum: neither passes PROBES.
        both = ((offsets < low) & inside).to(tl.int32) + ((offsets < high) & inside).to(tl.int32) * 65536
        count = tl.sum(both, 0)
        first = tl.minimum(count % 65536, batch)
        stop = tl.minimum(count // 65536, batch)
    else:
        first = _first_from(cu_ptr, batch * 0, batch, low, tokens, PROBES)
        stop = _first_from(cu_ptr, first, batch, high, tokens, PROBES)
    return first, stop


@triton.jit
def _bounds(cu_ptr, sequence, batch, tokens, rows, last_row, stop, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """For each row the start and the end of its sequence, from the offsets of this sequence and the next ones."""
    start = tl.full([BLOCK], -1, tl.int32)
    end = tl.full([BLOCK], _FAR, tl.int32)
    more = sequence <= batch
    while more:
        places = sequence + tl.arange(0, CHUNK)
        offsets = _load_offset(cu_ptr, tl.minimum(places, batch), tokens)
        inside = offsets[None, :] <= rows[:, None]
        start = tl.maximum(start, tl.max(tl.where(inside, offsets[None, :], -1), 1))
        end = tl.minimum(end, tl.min(tl.where(inside, _FAR, offsets[None, :]), 1))
        highest = tl.max(offsets, 0)
        sequence += CHUNK
        more = (highest <= last_row) & (highest < stop) & (sequence <= batch)
    return start, end


@triton.jit
def _row_bounds(
    cu_ptr, sequence, batch, tokens, begin, rows, size, stop, several, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Start and end of each row's sequence, counted from begin; the whole run where it is one sequence."""
    start = tl.zeros([ROWS], tl.int32)
    end = tl.zeros([ROWS], tl.int32) + size
    if several:
        last = begin + tl.minimum(tl.max(rows, 0), size - 1)
        start, end = _bounds(cu_ptr, sequence, batch, tokens, begin + rows, last, stop, ROWS, CHUNK)
        start -= begin
        end -= begin
    return start, end


@triton.jit
def _nothing(ROWS: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr):
    """Output, sum and maximum before any key."""
    acc1 = tl.zeros([ROWS, DV1], tl.float32)
    acc2 = acc1
    if DV2 > 0:
        acc2 = tl.zeros([ROWS, DV2], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return acc1, acc2, total, top


@triton.jit
def _attend(
    acc1,
    acc2,
    total,
    top,
    q1,
    q2,
    k1,
    k2,
    v1,
    v2,
    rows,
    keys,
    start,
    end,
    scale,
    D2: tl.constexpr,
    DV2: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys into the output, sum and maximum of the base-2 softmax."""
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    if SCALE_FIRST:
        scores = scores * scale
        factor = 1.0
    else:
        factor = scale
    visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    weights = tl.math.exp2(scores * factor - base[:, None])
    shrink = tl.math.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v1.dtype)
    acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision=PRECISION)
    if DV2 > 0:
        acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision=PRECISION)
    return acc1, acc2, total, new_top


@triton.jit
def _not_numbers(acc1, acc2, DV2: tl.constexpr):
    """For each row, 1 where its output holds a NaN."""
    found = tl.max((acc1 != acc1).to(tl.int32), 1)
    if DV2 > 0:
        found = tl.maximum(found, tl.max((acc2 != acc2).to(tl.int32), 1))
    return found


@triton.jit
def _load_parts(
    ptr, stride, rows, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, ALIGNED: tl.constexpr
):
    """Both parts of a width of some rows; the first one twice where there is no second."""
    if D2 > 0:
        first = _load(ptr, stride, rows, limit, D1, D1, True, ALIGNED)
        second = _load(ptr + D1, stride, rows, limit, D - D1, D2, True, ALIGNED)
    else:
        first = _load(ptr, stride, rows, limit, D, D1, True, ALIGNED)
        second = first
    return first, second


@triton.jit
def _store_part(ptr, stride, rows, mine, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + rows[:, None] * stride + columns[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mine[:, None] & (columns < END)[None, :])


@triton.jit
def _store_rows(
    out_ptr,
    lse_ptr,
    rows,
    mine,
    acc1,
    acc2,
    total,
    top,
    STRIDE: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """The rows' outputs and log-sum-exps; those of a sum of zero are zeros and minus infinity."""
    share = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    if DV2 > 0:
        _store_part(out_ptr, STRIDE, rows, mine, acc1 * share, 0, DV1, DV)
        _store_part(out_ptr, STRIDE, rows, mine, acc2 * share, DV1, DV2, DV)
    else:
        _store_part(out_ptr, STRIDE, rows, mine, acc1 * share, 0, DV1, DV)
    if WITH_LSE:
        sums = (top + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + rows, sums, mask=mine)


@triton.jit
def _clear_rows(
    out_ptr,
    lse_ptr,
    first,
    stop,
    STRIDE: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Zeros, and log-sum-exps of minus infinity, in at most BLOCK rows from first (64 bits wide), below stop."""
    rows = tl.arange(0, BLOCK)
    acc1, acc2, total, top = _nothing(BLOCK, DV1, DV2)
    out_ptr += first * STRIDE
    lse_ptr += first
    mine = rows < stop - first
    _store_rows(out_ptr, lse_ptr, rows, mine, acc1, acc2, total, top, STRIDE, DV, DV1, DV2, WITH_LSE)
