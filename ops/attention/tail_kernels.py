"""Triton kernels that close an output: zeros in the rows that no sequence covers, and the repair of the last sequences.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from mmgraph.ops.attention.triton_kernels import _check_sequence, _load, _load_offset, _step, _store


@triton.jit
def _zero_rows(
    out_ptr,
    cu_ptr,
    flag_ptr,
    tokens,
    batch,
    max_seqlen,
    PROGRAMS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
    FAULT: tl.constexpr,
):
    """Rows from the last offset on, and before the first, become zeros; with CHECK, wrong offsets are recorded."""
    pid = tl.program_id(0)
    zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    end = _load_offset(cu_ptr, batch, tokens).to(tl.int64)
    stop = tokens.to(tl.int64) * ROW
    for first in range(end * ROW + pid * BLOCK, stop, PROGRAMS * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, zeros, mask=columns < stop)
    front = _load_offset(cu_ptr, 0, tokens).to(tl.int64) * ROW
    for first in range(pid * BLOCK, front, PROGRAMS * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, zeros, mask=columns < front)
    if CHECK:
        for sequence in range(pid, batch, PROGRAMS):
            _check_sequence(cu_ptr, flag_ptr, sequence, tokens, max_seqlen, FAULT)


@triton.jit(do_not_specialize=["tokens", "batch", "max_seqlen"])
def zero_tail_kernel(
    out_ptr,
    cu_ptr,
    flag_ptr,
    tokens,
    batch,
    max_seqlen,
    PROGRAMS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
    FAULT: tl.constexpr,
):
    """Rows from the last offset on, and before the first, become zeros; with CHECK, wrong offsets are recorded."""
    _zero_rows(out_ptr, cu_ptr, flag_ptr, tokens, batch, max_seqlen, PROGRAMS, ROW, BLOCK, CHECK, FAULT)


@triton.jit
def _attend_block(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    first_query,
    length,
    scale,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One block of queries of one sequence, whose first row the pointers are at."""
    rows = tl.arange(0, BLOCK)
    limit = length - first_query
    q_ptr += first_query.to(tl.int64) * q_stride
    q = _load(q_ptr, q_stride, rows, limit, D, DP, True, True)
    acc = tl.zeros([BLOCK, DVP], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    last = length
    if CAUSAL:
        last = tl.minimum(first_query + BLOCK, length)
    for first in tl.range(0, last, BLOCK, num_stages=1):
        acc, total, top = _step(
            acc, total, top, q, k_ptr, v_ptr, k_stride, v_stride, first, first_query, length, scale,
            D, DP, DV, DVP, BLOCK, BLOCK, CAUSAL, True, True, False, "tf32",
        )  # fmt: skip
        k_ptr += BLOCK * k_stride
        v_ptr += BLOCK * v_stride
    _store(out_ptr + first_query.to(tl.int64) * STRIDE, STRIDE, rows, limit, acc / total[:, None], DV, DVP)


@triton.jit(do_not_specialize=["tokens", "batch", "max_seqlen", "scale"])
def close_tail_kernel(
    out_ptr,
    cu_ptr,
    flag_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    batch,
    max_seqlen,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERHANG: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAULT: tl.constexpr,
):
    """As ``zero_tail_kernel``; and sequences that end less than OVERHANG rows before a tail that isn't finite, anew."""
    STRIDE: tl.constexpr = HEADS * DV
    _zero_rows(out_ptr, cu_ptr, flag_ptr, tokens, batch, max_seqlen, HEADS * PARTS, STRIDE, BLOCK, True, FAULT)
    pid = tl.program_id(0)
    head = pid % HEADS
    part = pid // HEADS
    kv_head = (head // GROUP).to(tl.int64)
    v_ptr += kv_head * v_head_stride
    covered = _load_offset(cu_ptr, batch, tokens)
    rows = tl.arange(0, ROWS)
    wrong = covered * 0
    tail_ptr = v_ptr + covered.to(tl.int64) * v_stride
    for first in tl.range(covered, tl.minimum(covered + OVERHANG, tokens), ROWS, num_stages=1):
        values = _load(tail_ptr, v_stride, rows, tokens - first, DV, DVP, True, True)
        tail_ptr += ROWS * v_stride
        values = values.to(tl.float32)
        difference = values - values  # zero, for what is finite
        wrong = tl.maximum(wrong, tl.max(tl.max((difference != 0.0).to(tl.int32), 1), 0))
    if wrong > 0:
        k_ptr += kv_head * k_head_stride
        q_ptr += head.to(tl.int64) * q_head_stride
        out_ptr += head * DV
        low = covered * 0
        high = batch
        while low < high:  # the first sequence that ends behind covered - OVERHANG
            middle = (low + high) // 2
            before = _load_offset(cu_ptr, middle + 1, tokens) <= covered - OVERHANG
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        turn = low * 0
        for sequence in range(low, batch):
            begin = _load_offset(cu_ptr, sequence, tokens)
            length = _load_offset(cu_ptr, sequence + 1, tokens) - begin
            origin = begin.to(tl.int64)
            for first in range(0, length, ROWS):
                if turn % PARTS == part:
                    _attend_block(
                        q_ptr + origin * q_stride,
                        k_ptr + origin * k_stride,
                        v_ptr + origin * v_stride,
                        out_ptr + origin * STRIDE,
                        q_stride,
                        k_stride,
                        v_stride,
                        begin * 0 + first,
                        length,
                        scale,
                        STRIDE,
                        D,
                        DP,
                        DV,
                        DVP,
                        ROWS,
                        CAUSAL,
                    )
                turn += 1
