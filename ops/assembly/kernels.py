"""Triton kernels of the assembly ops: one launch for any number of ranges, one program per output row.

Row counts are never compile-time constants; row offsets are 64-bit. A program reads its map entry and its id together,
then moves one row in 16-byte pieces. Triton's language isn't Python's types, so this file isn't type-checked; a
constant's ``if`` stands alone, because only then is it decided at compile time.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from mmgraph.ops.recording import record


@triton.jit
def _copy_row(src_ptr, dst_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.static_range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        values = tl.load(src_ptr + columns, mask=mask)
        tl.store(dst_ptr + columns, values.to(dst_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_row(dst_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.static_range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], dtype=dst_ptr.dtype.element_ty)
        tl.store(dst_ptr + columns, zeros, mask=columns < WIDTH)


@triton.jit(do_not_specialize=["vocab", "pool_rows"])
def assemble_kernel(
    ids_ptr,
    table_ptr,
    pool_ptr,
    map_ptr,
    out_ptr,
    flag_ptr,
    vocab,
    pool_rows,
    table_stride,
    pool_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRICT: tl.constexpr,
    ROW_FAULT: tl.constexpr,
    ID_FAULT: tl.constexpr,
):
    """One row from the pool or the table."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(map_ptr + row).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64)  # with the map's entry, not after it: one latency less
    dst_ptr = out_ptr + row * out_stride
    if (source >= 0) & (source < pool_rows):
        _copy_row(pool_ptr + source * pool_stride, dst_ptr, WIDTH, BLOCK)
    elif source == -1:
        if STRICT:
            if (token < 0) | (token >= vocab):
                record(flag_ptr, ID_FAULT, row, token)
        if vocab > 0:
            token = tl.minimum(tl.maximum(token, 0), vocab - 1)
            _copy_row(table_ptr + token * table_stride, dst_ptr, WIDTH, BLOCK)
        else:
            if not STRICT:
                record(flag_ptr, ID_FAULT, row, token)
            _zero_row(dst_ptr, WIDTH, BLOCK)
    else:
        record(flag_ptr, ROW_FAULT, row, source)
        _zero_row(dst_ptr, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["num_rows", "num_features"])
def merge_kernel(
    embeds_ptr,
    mask_ptr,
    count_ptr,
    features_ptr,
    out_ptr,
    flag_ptr,
    num_rows,
    num_features,
    embeds_stride,
    features_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    """One row from the features or from embeds; the last one compares the counts."""
    row = tl.program_id(0).to(tl.int64)
    masked = tl.load(mask_ptr + row).to(tl.int32)
    source = tl.load(count_ptr + row).to(tl.int64) - 1  # placeholders up to this row, less one
    dst_ptr = out_ptr + row * WIDTH
    if masked != 0:
        if source < num_features:
            _copy_row(features_ptr + source * features_stride, dst_ptr, WIDTH, BLOCK)
        else:
            _zero_row(dst_ptr, WIDTH, BLOCK)
    else:
        _copy_row(embeds_ptr + row * embeds_stride, dst_ptr, WIDTH, BLOCK)
    if row == num_rows - 1:
        if source + 1 != num_features:
            record(flag_ptr, FAULT, source + 1, num_features.to(tl.int64))


@triton.jit(do_not_specialize=["pool_rows"])
def deepstack_kernel(
    hidden_ptr,
    pool_ptr,
    map_ptr,
    out_ptr,
    flag_ptr,
    pool_rows,
    hidden_stride,
    pool_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    """One row of hidden, with the pool's row added where there is one."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(map_ptr + row).to(tl.int64)
    src_ptr = hidden_ptr + row * hidden_stride
    dst_ptr = out_ptr + row * WIDTH
    if (source >= 0) & (source < pool_rows):
        add_ptr = pool_ptr + source * pool_stride
        for start in tl.static_range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < WIDTH
            base = tl.load(src_ptr + columns, mask=mask)
            # Cast first, as the dense buffer would have been; one addition rounds the same in any wider type.
            extra = tl.load(add_ptr + columns, mask=mask).to(base.dtype)
            tl.store(dst_ptr + columns, base + extra, mask=mask)
    else:
        if source != -1:
            record(flag_ptr, FAULT, row, source)
        _copy_row(src_ptr, dst_ptr, WIDTH, BLOCK)
