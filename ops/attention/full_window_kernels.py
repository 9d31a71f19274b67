"""Gluon kernel of attention over windows: a program per window and head, all of whose rows are copied at once.

Such a call moves memory most of its time. What it takes is many copies on their way, so each program is small: one
block of queries, keys and values in shared memory, once, four warps with 16 queries each, and the neighbours of a
window in memory (its other heads) beside it on the GPU, so that memory is read in long runs.

It is written in Gluon because Triton leaves no choice of the instructions here: with four warps it takes those of a
warp group, whose narrow tiles the assembler of Triton 3.6 gets wrong (see triton_kernels), and copies around registers
only inside pipelined loops. With two warps, which Triton can be led to, the same cut takes a tenth longer.

Widths are cut into a power of two and a rest (72 and 80 as 64 + 16). Gluon's language isn't Python's types, so this
file isn't type-checked.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mmgraph.ops.attention.triton_kernels import _check_sequence, _load_offset
from mmgraph.ops.compat import gluon_async_load

_load_async = gluon_async_load()


@gluon.constexpr_function
def _rows_layout(width, warps):
    """Threads over rows of a width, 16 bytes each."""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shared_layout(width):
    """Rows in shared memory, swizzled so that eight rows of a 16-byte column lie in different banks."""
    phase = max(1, 64 // width)
    return gl.SwizzledSharedLayout(8, phase, min(8 // phase, width // 8), [1, 0])


@gluon.jit
def _copy(
    smem, ptr, stride, size, ROWS: gl.constexpr, WIDTH: gl.constexpr, END: gl.constexpr, WARPS: gl.constexpr
):
    """Start the copy of rows into shared memory; zeros from row ``size`` and from column END on."""
    layout: gl.constexpr = _rows_layout(WIDTH, WARPS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptrs = gl.multiple_of(ptr + rows[:, None] * stride + columns[None, :], [1, 16])
    _load_async(smem, ptrs, mask=(rows < size)[:, None] & (columns < END)[None, :])


@gluon.jit
def _put(
    smem, ptr, size, values, ROWS: gl.constexpr, WIDTH: gl.constexpr, END: gl.constexpr, STRIDE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Write rows below ``size`` and columns below END, through shared memory that is free: 16 bytes a thread."""
    layout: gl.constexpr = _rows_layout(WIDTH, WARPS)
    smem.store(values.to(ptr.dtype.element_ty))
    _write(ptr, 0, size, smem.load(layout), ROWS, WIDTH, END, STRIDE, WARPS)


@gluon.jit
def _write(
    ptr, first, stop, values, ROWS: gl.constexpr, WIDTH: gl.constexpr, END: gl.constexpr, STRIDE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Write rows ``first .. first + ROWS`` below ``stop``, and columns below END."""
    layout: gl.constexpr = _rows_layout(WIDTH, WARPS)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = (rows < stop)[:, None] & (columns < END)[None, :]
    gl.store(ptr + rows.to(gl.int64)[:, None] * STRIDE + columns[None, :], values, mask=mask)


@gluon.jit
def _clear(
    out_ptr, lse_ptr, first, stop, step, DV: gl.constexpr, DV1: gl.constexpr, DV2: gl.constexpr,
    STRIDE: gl.constexpr, BLOCK: gl.constexpr, WITH_LSE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Zeros, and log-sum-exps of minus infinity, in BLOCK rows at each step from ``first`` on, below ``stop``."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    for row in range(first, stop, step):
        none1 = gl.zeros([BLOCK, DV1], dtype, layout=_rows_layout(DV1, WARPS))
        _write(out_ptr, row, stop, none1, BLOCK, DV1, DV, STRIDE, WARPS)
        if DV2 > 0:
            none2 = gl.zeros([BLOCK, DV2], dtype, layout=_rows_layout(DV2, WARPS))
            _write(out_ptr + DV1, row, stop, none2, BLOCK, DV2, DV - DV1, STRIDE, WARPS)
        if WITH_LSE:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            rows = row + gl.arange(0, BLOCK, layout=layout)
            gl.store(
                lse_ptr + rows, gl.full([BLOCK], float("-inf"), gl.float32, layout=layout), mask=rows < stop
            )


@gluon.jit(do_not_specialize=["tokens", "batch", "max_seqlen", "scale"])
def full_window_kernel(
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
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    D1: gl.constexpr,
    D2: gl.constexpr,
    DV: gl.constexpr,
    DV1: gl.constexpr,
    DV2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WITH_LSE: gl.constexpr,
    SCALE_FIRST: gl.constexpr,
    WARPS: gl.constexpr,
    FAULT: gl.constexpr,
):
    """One head of one sequence of at most BLOCK rows; one more place than sequences helps to clear the tail."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    STRIDE: gl.constexpr = HEADS * DV
    pid = gl.program_id(0)
    head = pid % HEADS  # all heads of a window side by side: they lie so in memory
    index = pid // HEADS
    begin = _load_offset(cu_ptr, gl.minimum(index, batch), tokens)
    stop = _load_offset(cu_ptr, gl.minimum(index + 1, batch), tokens)
    size = gl.minimum(stop - begin, BLOCK)
    far = head.to(gl.int64)
    row = begin.to(gl.int64)
    q_ptr += far * q_head_stride + row * q_stride
    k_ptr += (head // GROUP).to(gl.int64) * k_head_stride + row * k_stride
    v_ptr += (head // GROUP).to(gl.int64) * v_head_stride + row * v_stride
    out_ptr += head * DV
    lse_ptr += far * tokens
    q1s = gl.allocate_shared_memory(dtype, [BLOCK, D1], _shared_layout(D1))
    k1s = gl.allocate_shared_memory(dtype, [BLOCK, D1], _shared_layout(D1))
    v1s = gl.allocate_shared_memory(dtype, [BLOCK, DV1], _shared_layout(DV1))
    _copy(q1s, q_ptr, q_stride, size, BLOCK, D1, D, WARPS)
    _copy(k1s, k_ptr, k_stride, size, BLOCK, D1, D, WARPS)
    if D2 > 0:
        q2s = gl.allocate_shared_memory(dtype, [BLOCK, D2], _shared_layout(D2))
        k2s = gl.allocate_shared_memory(dtype, [BLOCK, D2], _shared_layout(D2))
        _copy(q2s, q_ptr + D1, q_stride, size, BLOCK, D2, D - D1, WARPS)
        _copy(k2s, k_ptr + D1, k_stride, size, BLOCK, D2, D - D1, WARPS)
    async_copy.commit_group()
    _copy(v1s, v_ptr, v_stride, size, BLOCK, DV1, DV, WARPS)
    if DV2 > 0:
        v2s = gl.allocate_shared_memory(dtype, [BLOCK, DV2], _shared_layout(DV2))
        _copy(v2s, v_ptr + DV1, v_stride, size, BLOCK, DV2, DV - DV1, WARPS)
    async_copy.commit_group()

    # While the copies run: rows of no sequence; some in front of the first offset only where that isn't 0, which is
    # wrong.
    covered = _load_offset(cu_ptr, batch, tokens)
    # 64 bits wide: for the last sequences it lies far behind the tokens.
    tail = covered + index.to(gl.int64) * BLOCK
    step = (batch + 1).to(gl.int64) * BLOCK
    _clear(out_ptr, lse_ptr, tail, tokens, step, DV, DV1, DV2, STRIDE, BLOCK, WITH_LSE, WARPS)
    if index == 0:
        _clear(out_ptr, lse_ptr, 0, begin, BLOCK, DV, DV1, DV2, STRIDE, BLOCK, WITH_LSE, WARPS)
    if pid < batch:
        _check_sequence(cu_ptr, flag_ptr, pid, tokens, max_seqlen, FAULT)

    if size > 0:
        async_copy.wait_group(1)
        scores = gl.zeros([BLOCK, BLOCK], gl.float32, layout=mma)
        scores = mma_v2(q1s.load(left), k1s.permute([1, 0]).load(right), scores)
        if D2 > 0:
            scores = mma_v2(q2s.load(left), k2s.permute([1, 0]).load(right), scores)
        factor = scale
        if SCALE_FIRST:
            scores = scores * scale
            factor = 1.0
        rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, mma))
        keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma))
        visible = (keys < size)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        top = gl.max(scores, 1) * factor
        base = gl.where(top == float("-inf"), 0.0, top)  # every score of the row is minus infinity
        weights = gl.exp2(scores * factor - base[:, None])
        total = gl.sum(weights, 1)
        share = gl.where(total == 0.0, 0.0, 1.0 / total)
        if WITH_LSE:
            sums = (top + gl.log2(total)) * 0.6931471805599453
            gl.store(lse_ptr + row + rows, sums, mask=rows < size)

        async_copy.wait_group(0)
        weights = gl.convert_layout(weights.to(dtype), left)
        own_ptr = out_ptr + row * STRIDE
        acc1 = mma_v2(weights, v1s.load(right), gl.zeros([BLOCK, DV1], gl.float32, layout=mma))
        _put(v1s, own_ptr, size, acc1 * share[:, None], BLOCK, DV1, DV, STRIDE, WARPS)
        if DV2 > 0:
            acc2 = mma_v2(weights, v2s.load(right), gl.zeros([BLOCK, DV2], gl.float32, layout=mma))
            _put(v2s, own_ptr + DV1, size, acc2 * share[:, None], BLOCK, DV2, DV - DV1, STRIDE, WARPS)
