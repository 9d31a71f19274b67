"""Triton kernel of attention over short sequences (windows), one or several of them to a program.

Packed, a program takes the sequences that start in its tile, ``BLOCK`` consecutive rows of the whole batch: they
lie one after another, so it reads one run of rows. Twenty sequences of 3 rows are one block of queries and keys,
with a mask that keeps the sequences apart; empty ones cost nothing but their place in the offsets, and the grid
doesn't depend on the number of sequences. Where most sequences fill a block, a program has one of them: nothing is
to be searched, and no block is cut by a tile's border.

Such a program is short and waits for memory most of its time. So the search for its sequences looks at all offsets (or
a quarter thousand places among them) at once instead of halving them, and the rows of queries, keys and values are
asked for together, and those of the next heads while one is computed.

Widths are cut into a power of two and a rest (72 and 80 as 64 + 16): padded to 128 they would fill the shared memory
that the next heads need. Narrow tiles are safe for the instructions of single warps only, with the assembler that
Triton 3.6 brings (see triton_kernels), so the host gives such widths two warps; four would be a warp group.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from mmgraph.ops.attention.triton_kernels import _check_sequence, _load_offset
from mmgraph.ops.attention.window_parts import (
    _attend,
    _clear_rows,
    _find_tile,
    _load_parts,
    _not_numbers,
    _nothing,
    _row_bounds,
    _store_rows,
)


@triton.jit
def _long_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_ptr,
    tokens,
    batch,
    first_sequence,
    stop_sequence,
    begin,
    size,
    stop,
    q_stride,
    k_stride,
    v_stride,
    scale,
    part,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of a tile whose sequences take more than a block of rows, or hold values that aren't numbers.

    First a pass over all the keys that a block's rows see. A value that isn't a number reaches rows of other sequences
    there, as weight zero times NaN; where that may have been, each sequence has a pass of its own, and keeps its rows.
    """
    several = stop_sequence - first_sequence > 1
    for first in tl.range(part * ROWS, size, PARTS * ROWS, num_stages=1):
        rows = first + tl.arange(0, ROWS)
        q1, q2 = _load_parts(q_ptr, q_stride, rows, size, D, D1, D2, ALIGNED)
        start, end = _row_bounds(
            cu_ptr, first_sequence, batch, tokens, begin, rows, size, stop, several, ROWS, CHUNK
        )
        low_key = tl.min(start, 0)
        high_key = tl.minimum(tl.max(tl.where(rows < size, end, 0), 0), size)
        if CAUSAL:
            high_key = tl.minimum(high_key, first + ROWS)
        sequence = first_sequence - 1
        low_row = first * 0
        high_row = size
        more = size > 0
        while more:
            acc1, acc2, total, top = _nothing(ROWS, DV1, DV2)
            for key in tl.range(low_key, high_key, BLOCK, num_stages=1):
                keys = key + tl.arange(0, BLOCK)
                k1, k2 = _load_parts(k_ptr, k_stride, keys, high_key, D, D1, D2, ALIGNED)
                v1, v2 = _load_parts(v_ptr, v_stride, keys, high_key, DV, DV1, DV2, ALIGNED)
                acc1, acc2, total, top = _attend(
                    acc1, acc2, total, top, q1, q2, k1, k2, v1, v2, rows, keys, start, end, scale,
                    D2, DV2, CAUSAL, SCALE_FIRST, PRECISION,
                )  # fmt: skip
            more = several
            if sequence < first_sequence:
                more = more & (tl.max(_not_numbers(acc1, acc2, DV2), 0) > 0)
            mine = (rows >= low_row) & (rows < high_row)
            _store_rows(out_ptr, lse_ptr, rows, mine, acc1, acc2, total, top, STRIDE, DV, DV1, DV2, WITH_LSE)
            sequence += 1
            more = more & (sequence < stop_sequence)
            if more:
                low_row = tl.maximum(_load_offset(cu_ptr, sequence, tokens) - begin, 0)
                high_row = tl.minimum(_load_offset(cu_ptr, sequence + 1, tokens) - begin, size)
                low_key = low_row
                high_key = high_row


@triton.jit(do_not_specialize=["tokens", "batch", "max_seqlen", "programs", "heads_each", "scale"])
def window_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_ptr,
    flag_ptr,
    tokens,
    batch,
    max_seqlen,
    programs,
    heads_each,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PROBES: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    FAULT: tl.constexpr,
):
    """One tile's or one sequence's rows, for some heads and one of PARTS parts of the queries."""
    pid = tl.program_id(0)
    zero = pid.to(tl.int64) * 0  # makes an index 64 bits wide
    turns = tl.cdiv(HEADS, heads_each)
    part = pid % PARTS
    first_head = pid // PARTS % turns * heads_each
    stop_head = tl.minimum(first_head + heads_each, HEADS)
    index = pid // (PARTS * turns)
    covered = _load_offset(cu_ptr, batch, tokens)
    front = tl.minimum(_load_offset(cu_ptr, 0, tokens), tokens)
    if PACKED:
        low = index * BLOCK
        first_sequence, stop_sequence = _find_tile(cu_ptr, batch, low, low + BLOCK, tokens, PROBES)
        clear_from = tl.maximum(low, covered)
        clear_to = tl.minimum(low + BLOCK, tokens)
        clear_step = BLOCK
        front = tl.minimum(front, clear_to)
    else:
        low = index * 0
        first_sequence = index
        stop_sequence = tl.minimum(index + 1, batch)
        clear_from = covered + (index + zero) * BLOCK  # for the last sequences it lies far behind the tokens
        clear_to = tokens + zero
        clear_step = (batch + 1 + zero) * BLOCK
        front = tl.where(index == 0, front, 0)
    begin = _load_offset(cu_ptr, first_sequence, tokens)
    stop = _load_offset(cu_ptr, stop_sequence, tokens)
    # Rows and keys count from begin on. Where offsets are right, this minimum is the first of the two.
    size = tl.minimum(stop - begin, BLOCK + tl.maximum(max_seqlen, 0))
    # A sequence alone fits in a block as large as any window; longer ones are wrong, and cut.
    MAY_BE_LONG: tl.constexpr = PACKED or BLOCK < WINDOW
    if not MAY_BE_LONG:
        size = tl.minimum(size, BLOCK)
    several = stop_sequence - first_sequence > 1
    ROWS: tl.constexpr = BLOCK // PARTS
    # Of tiles longer than a block, as their last sequence passes the border: about every second one where lengths don't
    # divide a block. In smaller steps, so that this way needs no more registers than the other.
    STEP: tl.constexpr = 32 if ROWS > 32 else ROWS
    STRIDE: tl.constexpr = HEADS * DV
    q_ptr += begin.to(tl.int64) * q_stride
    k_ptr += begin.to(tl.int64) * k_stride
    v_ptr += begin.to(tl.int64) * v_stride
    begin_ptr = out_ptr + begin.to(tl.int64) * STRIDE
    rest = size
    if (size > 0) & (size <= BLOCK):
        keys = tl.arange(0, BLOCK)
        rows = part * ROWS + tl.arange(0, ROWS)
        start = tl.zeros([ROWS], tl.int32)
        end = tl.zeros([ROWS], tl.int32) + size
        if PACKED:
            start, end = _row_bounds(
                cu_ptr, first_sequence, batch, tokens, begin, rows, size, stop, several, ROWS, CHUNK
            )
        wrong = tl.zeros([ROWS], tl.int32)
        # The copies of the next heads run while this one is computed.
        for head in tl.range(first_head, stop_head, num_stages=STAGES):
            kv_head = head // GROUP + zero
            q_head = q_ptr + (head + zero) * q_head_stride
            k_head = k_ptr + kv_head * k_head_stride
            v_head = v_ptr + kv_head * v_head_stride
            out_head = begin_ptr + head * DV
            lse_head = lse_ptr + (head + zero) * tokens + begin
            q1, q2 = _load_parts(q_head, q_stride, rows, size, D, D1, D2, ALIGNED)
            k1, k2 = _load_parts(k_head, k_stride, keys, size, D, D1, D2, ALIGNED)
            v1, v2 = _load_parts(v_head, v_stride, keys, size, DV, DV1, DV2, ALIGNED)
            acc1, acc2, total, top = _nothing(ROWS, DV1, DV2)
            acc1, acc2, total, top = _attend(
                acc1, acc2, total, top, q1, q2, k1, k2, v1, v2, rows, keys, start, end, scale,
                D2, DV2, CAUSAL, SCALE_FIRST, PRECISION,
            )  # fmt: skip
            _store_rows(
                out_head, lse_head, rows, rows < size, acc1, acc2, total, top, STRIDE, DV, DV1, DV2, WITH_LSE
            )
            if PACKED:
                wrong = tl.maximum(wrong, _not_numbers(acc1, acc2, DV2))
        rest = 0
        if PACKED and several:
            if tl.max(tl.where(rows < size, wrong, 0), 0) > 0:
                rest = size
    if MAY_BE_LONG and rest > 0:
        for head in tl.range(first_head, stop_head, num_stages=1):
            kv_head = head // GROUP + zero
            _long_tile(
                q_ptr + (head + zero) * q_head_stride,
                k_ptr + kv_head * k_head_stride,
                v_ptr + kv_head * v_head_stride,
                begin_ptr + head * DV,
                lse_ptr + (head + zero) * tokens + begin,
                cu_ptr, tokens, batch, first_sequence, stop_sequence, begin, rest, stop,
                q_stride, k_stride, v_stride, scale,
                part, PARTS, D, D1, D2, DV, DV1, DV2, STRIDE, STEP, STEP, CHUNK,
                CAUSAL, WITH_LSE, ALIGNED, SCALE_FIRST, PRECISION,
            )  # fmt: skip

    if part == 0:
        # Rows of no sequence; some in front of the first offset only where that isn't 0, which is wrong.
        for first in tl.range(clear_from, clear_to, clear_step, num_stages=1):
            last = tl.minimum(first + BLOCK, clear_to)
            for head in tl.range(first_head, stop_head, num_stages=1):
                _clear_rows(
                    out_ptr + head * DV, lse_ptr + (head + zero) * tokens, first + zero, last,
                    STRIDE, DV, DV1, DV2, BLOCK, WITH_LSE,
                )  # fmt: skip
        for first in tl.range(low, front, BLOCK, num_stages=1):
            last = tl.minimum(first + BLOCK, front)
            for head in tl.range(first_head, stop_head, num_stages=1):
                _clear_rows(
                    out_ptr + head * DV, lse_ptr + (head + zero) * tokens, first + zero, last,
                    STRIDE, DV, DV1, DV2, BLOCK, WITH_LSE,
                )  # fmt: skip
    for sequence in range(pid, batch, programs):
        _check_sequence(cu_ptr, flag_ptr, sequence, tokens, max_seqlen, FAULT)
