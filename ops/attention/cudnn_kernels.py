"""The Triton kernel of the flashinfer_cudnn backend: what cuDNN needs to know of the sequences, made on the device.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from mmgraph.ops.attention.tail_kernels import zero_tail_kernel


@triton.jit
def _store_offsets(table_ptr, row, pitch, index, inside, values, WIDE: tl.constexpr):
    """One row of the table: element offsets, of 64 or of 32 bits in the same room."""
    place = table_ptr + row * pitch
    if WIDE:
        tl.store(place + index, values, mask=inside)
    else:
        narrow = place.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(narrow + index, values.to(tl.int32), mask=inside)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "batch",
        "max_seqlen",
        "padded_batch",
        "padded_seqlen",
        "pitch",
        "q_stride",
        "k_stride",
        "v_stride",
    ]
)
def prepare_kernel(
    out_ptr,
    cu_ptr,
    flag_ptr,
    table_ptr,
    tokens,
    batch,
    max_seqlen,
    padded_batch,
    padded_seqlen,
    pitch,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
    FAULT: tl.constexpr,
):
    """Zero the rows that no sequence covers, record wrong offsets, and fill the table.

    The table has six rows of ``pitch`` 64-bit places: where each sequence starts in q, k, v, the output and the
    log-sum-exps, in elements, and how long it is (32-bit). Slots behind the last sequence repeat the last offset
    and have length 0. Whatever the offsets are, no slot reaches outside the tokens.
    """
    ROW: tl.constexpr = HEADS * WIDTH
    zero_tail_kernel(out_ptr, cu_ptr, flag_ptr, tokens, batch, max_seqlen, PROGRAMS, ROW, BLOCK, True, FAULT)
    lengths_ptr = (table_ptr + 5 * pitch).to(tl.pointer_type(tl.int32), bitcast=True)
    for first in range(tl.program_id(0) * SLOTS, padded_batch + 1, PROGRAMS * SLOTS):
        index = first + tl.arange(0, SLOTS)
        inside = index <= padded_batch
        start = tl.load(cu_ptr + tl.minimum(index, batch))
        end = tl.load(cu_ptr + tl.minimum(index + 1, batch))
        start = tl.minimum(tl.maximum(start, 0), tokens)
        end = tl.minimum(tl.maximum(end, 0), tokens)
        length = tl.minimum(tl.maximum(end - start, 0), padded_seqlen)
        row = start.to(tl.int64)
        _store_offsets(table_ptr, 0, pitch, index, inside, row * q_stride, WIDE)
        _store_offsets(table_ptr, 1, pitch, index, inside, row * k_stride, WIDE)
        _store_offsets(table_ptr, 2, pitch, index, inside, row * v_stride, WIDE)
        _store_offsets(table_ptr, 3, pitch, index, inside, row * ROW, WIDE)
        _store_offsets(table_ptr, 4, pitch, index, inside, row * HEADS, WIDE)
        tl.store(lengths_ptr + index, length, mask=index < padded_batch)
