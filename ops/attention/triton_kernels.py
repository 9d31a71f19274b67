"""Triton kernel of attention: a varlen forward, which also clears the rows that no sequence covers.

Widths are padded to a power of two inside the kernel, never in memory. Splitting them (72 and 80 as 64 + 16)
would save products, and must not be done with the assembler that Triton 3.6 brings (ptxas 12.8): for tiles 16
or 32 columns wide it makes some of the tensor cores' descriptors from a register that holds something else, and
keys are read from other places, other ones each time. Token and sequence counts and strides are run-time
arguments; offsets into a tensor are 64-bit. Key blocks that lie whole inside the sequence are read without
masks; only the last ones are masked. Offsets that can't be right are clamped into the tensors, so that nothing
outside is touched, and recorded in the error flag. Triton's language isn't Python's types, so this file isn't
type-checked; a constant's ``if`` stands alone, because only then is it decided at compile time.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from mmgraph.ops.recording import record


@triton.jit
def _load(
    ptr,
    stride,
    rows,
    limit,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The rows; zero are columns from WIDTH on and, with MASKED, rows from limit on."""
    columns = tl.arange(0, PADDED)
    ptrs = ptr + rows[:, None] * stride + columns[None, :]
    if ALIGNED:  # a hint on the strides doesn't reach the loads; without it they are two bytes each
        ptrs = tl.multiple_of(ptrs, [1, 16])
    if MASKED and PADDED > WIDTH:
        return tl.load(ptrs, mask=(rows < limit)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=(rows < limit)[:, None], other=0.0)
    elif PADDED > WIDTH:
        return tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _step(
    acc,
    total,
    top,
    q,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    first,
    first_query,
    length,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys, which the pointers are at, into the output, sum and maximum of the base-2 softmax."""
    rows = tl.arange(0, BLOCK_N)
    limit = length - first
    k = _load(k_ptr, k_stride, rows, limit, D, DP, MASKED, ALIGNED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SCALE_FIRST:
        scores = scores * scale
        factor = 1.0
    else:
        factor = scale
    if MASKED:
        visible = (rows < limit)[None, :]
        if CAUSAL:
            queries = first_query + tl.arange(0, BLOCK_M)
            visible = visible & (queries[:, None] >= first + rows[None, :])
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.math.exp2(scores * factor - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    v = _load(v_ptr, v_stride, rows, limit, DV, DVP, MASKED, ALIGNED)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_top


@triton.jit
def _store(ptr, stride, rows, limit, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    ptrs = ptr + rows[:, None] * stride + columns[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _clear(
    out_ptr,
    lse_ptr,
    begin,
    stop,
    step,
    STRIDE: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Zeros, and log-sum-exps of minus infinity, in every block of rows that a step from begin reaches below stop."""
    offsets = tl.arange(0, BLOCK_M)
    for first in range(begin, stop, step):
        _store(
            out_ptr + first * STRIDE,
            STRIDE,
            offsets,
            stop - first,
            tl.zeros([BLOCK_M, DVP], tl.float32),
            DV,
            DVP,
        )
        if WITH_LSE:
            none = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tl.store(lse_ptr + first + offsets, none, mask=offsets < stop - first)


@triton.jit
def _load_offset(cu_ptr, index, tokens):
    """An offset, brought into the tokens."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + index), 0), tokens)


@triton.jit
def _check_sequence(cu_ptr, flag_ptr, sequence, tokens, max_seqlen, FAULT: tl.constexpr):
    low = tl.load(cu_ptr + sequence)
    high = tl.load(cu_ptr + sequence + 1)
    wrong = (low < 0) | (high < low) | (high > tokens) | (high - low > max_seqlen)
    if wrong | ((sequence == 0) & (low != 0)):
        record(flag_ptr, FAULT, sequence, high.to(tl.int64) - low)


@triton.jit
def _find_sequence(cu_ptr, batch, block, tokens, BLOCK_M: tl.constexpr):
    """The sequence that owns a block: sequence s owns those from ``cu[s] // BLOCK_M + s`` on.

    ``batch`` stands for the tail; whatever the offsets are, the last block finds it.
    """
    low = 0
    high = batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        inside = _load_offset(cu_ptr, middle, tokens) // BLOCK_M + middle <= block
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit(do_not_specialize=["tokens", "batch", "blocks", "max_seqlen", "scale"])
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_ptr,
    flag_ptr,
    tokens,
    batch,
    blocks,
    max_seqlen,
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
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    FLAT: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    FAULT: tl.constexpr,
):
    """One block of query rows of one head of one sequence, or a piece of the tail."""
    pid = tl.program_id(0)
    if FLAT:
        head = pid // blocks
        block = pid % blocks
        is_last = block == blocks - 1
        if pid < batch:  # by place, not by content: wrong offsets may leave a sequence without a block
            _check_sequence(cu_ptr, flag_ptr, pid, tokens, max_seqlen, FAULT)
        sequence = _find_sequence(cu_ptr, batch, block, tokens, BLOCK_M)
        block = block - (_load_offset(cu_ptr, sequence, tokens) // BLOCK_M + sequence)
        tail_step = tokens + BLOCK_M
    else:
        if HEADS_FIRST:
            head = pid % HEADS
            block = (pid // HEADS) % blocks
        else:
            head = (pid // blocks) % HEADS
            block = pid % blocks
        is_last = block == blocks - 1
        sequence = pid // (HEADS * blocks)
        tail_step = blocks * BLOCK_M
    OUT_STRIDE: tl.constexpr = HEADS * DV
    out_ptr += head * DV
    if sequence == batch:
        lse_head = lse_ptr + head.to(tl.int64) * tokens
        stop = tokens.to(tl.int64)
        begin = _load_offset(cu_ptr, batch, tokens).to(tl.int64) + block * BLOCK_M
        _clear(out_ptr, lse_head, begin, stop, tail_step, OUT_STRIDE, DV, DVP, BLOCK_M, WITH_LSE)
        if is_last:  # rows in front of a first offset that isn't 0: none, unless the offsets are wrong
            front = _load_offset(cu_ptr, 0, tokens).to(tl.int64)
            _clear(out_ptr, lse_head, 0, front, BLOCK_M, OUT_STRIDE, DV, DVP, BLOCK_M, WITH_LSE)
        return
    if not FLAT:
        if (head == 0) & (block == 0):
            _check_sequence(cu_ptr, flag_ptr, sequence, tokens, max_seqlen, FAULT)
    start = _load_offset(cu_ptr, sequence, tokens)
    length = _load_offset(cu_ptr, sequence + 1, tokens) - start
    first_query = block * BLOCK_M
    if (first_query < 0) | (first_query >= length):  # below 0: blocks in front of a first offset that isn't 0
        return

    origin = start.to(tl.int64)
    first_row = origin + first_query
    kv_head = (head // GROUP).to(tl.int64)
    q_ptr += first_row * q_stride + head.to(tl.int64) * q_head_stride
    k_ptr += origin * k_stride + kv_head * k_head_stride
    v_ptr += origin * v_stride + kv_head * v_head_stride

    rows = tl.arange(0, BLOCK_M)
    limit = length - first_query
    q = _load(q_ptr, q_stride, rows, limit, D, DP, True, ALIGNED)
    acc = tl.zeros([BLOCK_M, DVP], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)

    if CAUSAL:
        last = tl.minimum(first_query + BLOCK_M, length)
        whole = first_query // BLOCK_N * BLOCK_N
    else:
        last = length
        whole = length // BLOCK_N * BLOCK_N
    for first in range(0, whole, BLOCK_N):
        acc, total, top = _step(
            acc, total, top, q, k_ptr, v_ptr, k_stride, v_stride, first, first_query, length, scale,
            D, DP, DV, DVP, BLOCK_M, BLOCK_N, CAUSAL, False, ALIGNED, SCALE_FIRST, PRECISION,
        )  # fmt: skip
        k_ptr += BLOCK_N * k_stride
        v_ptr += BLOCK_N * v_stride
    # Not pipelined: a second pipelined loop makes the assembler run the first one's products one after another.
    if CAUSAL:
        for first in tl.range(whole, last, BLOCK_N, num_stages=1):
            acc, total, top = _step(
                acc, total, top, q, k_ptr, v_ptr, k_stride, v_stride, first, first_query, length, scale,
                D, DP, DV, DVP, BLOCK_M, BLOCK_N, CAUSAL, True, ALIGNED, SCALE_FIRST, PRECISION,
            )  # fmt: skip
            k_ptr += BLOCK_N * k_stride
            v_ptr += BLOCK_N * v_stride
    elif whole < last:
        acc, total, top = _step(
            acc, total, top, q, k_ptr, v_ptr, k_stride, v_stride, whole, first_query, length, scale,
            D, DP, DV, DVP, BLOCK_M, BLOCK_N, CAUSAL, True, ALIGNED, SCALE_FIRST, PRECISION,
        )  # fmt: skip

    _store(out_ptr + first_row * OUT_STRIDE, OUT_STRIDE, rows, limit, acc / total[:, None], DV, DVP)
    if WITH_LSE:
        sums = (top + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + head.to(tl.int64) * tokens + first_row + rows, sums, mask=rows < limit)
