"""Triton kernels of the assembly ops' gradients: sums of rows that share a destination, in a fixed order.

Keys are sorted, so that equal ones lie together. A run of equal keys is cut where a chunk of positions ends; the pieces
of a run that is cut are summed apart, and then together, always in the same order: gradients are the same in every
run. A row that stands alone, as nearly all do, is copied. Triton's language isn't Python's types, so this file isn't
type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "vocab", "pool_rows"])
def keys_kernel(
    ids_ptr,
    map_ptr,
    keys_ptr,
    rows,
    vocab,
    pool_rows,
    NEED_TABLE: tl.constexpr,
    NEED_POOL: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where each row's gradient goes: pool rows first, then rows of the table; SKIPPED: nowhere."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < rows
    source = tl.load(map_ptr + entries, mask=inside, other=-2).to(tl.int64)
    keys = tl.full([BLOCK], SKIPPED, dtype=tl.int64)
    if NEED_POOL:
        keys = tl.where((source >= 0) & (source < pool_rows), source, keys)
    if NEED_TABLE:
        token = tl.load(ids_ptr + entries, mask=inside, other=0).to(tl.int64)
        nearest = tl.minimum(tl.maximum(token, 0), vocab - 1)
        keys = tl.where(source == -1, pool_rows + nearest, keys)
    tl.store(keys_ptr + entries, keys.to(keys_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _put_sum(values, key, first_ptr, second_ptr, first_rows, first_stride, second_stride, columns, inside):
    """Store a piece of a sum where its key says: rows of the first gradient, then those of the second."""
    if key < first_rows:
        first_row = first_ptr + key.to(tl.int64) * first_stride
        tl.store(first_row + columns, values.to(first_ptr.dtype.element_ty), mask=inside)
    else:
        second_row = second_ptr + (key - first_rows).to(tl.int64) * second_stride
        tl.store(second_row + columns, values.to(second_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "first_rows"])
def sum_kernel(
    grad_ptr,
    keys_ptr,
    order_ptr,
    first_ptr,
    second_ptr,
    scratch_ptr,
    rows,
    first_rows,
    grad_stride,
    first_stride,
    second_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SKIPPED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A piece of the sum that begins at one position, if one does: to its destination, or to scratch if it is cut."""
    program = tl.program_id(0)
    position = program // PARTS
    columns = (program % PARTS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    key = tl.load(keys_ptr + position)
    before = tl.load(keys_ptr + tl.maximum(position - 1, 0))
    is_first = (position == 0) | (before != key)
    if (key != SKIPPED) & (is_first | (position % CHUNK == 0)):
        row = tl.load(order_ptr + position)
        values = tl.load(grad_ptr + row * grad_stride + columns, mask=inside).to(scratch_ptr.dtype.element_ty)
        last = tl.minimum((position // CHUNK + 1) * CHUNK, rows)
        step = position + 1
        going = step < last
        if going:
            going = tl.load(keys_ptr + step) == key
        while going:
            row = tl.load(order_ptr + step)
            values += tl.load(grad_ptr + row * grad_stride + columns, mask=inside).to(values.dtype)
            step += 1
            going = step < last
            if going:
                going = tl.load(keys_ptr + step) == key
        goes_on = (step == last) & (step < rows)
        if goes_on:
            goes_on = tl.load(keys_ptr + step) == key
        if is_first & (goes_on == 0):
            _put_sum(
                values, key, first_ptr, second_ptr, first_rows, first_stride, second_stride, columns, inside
            )
        else:
            # A chunk has at most two cut pieces: one that comes in at its start, one that goes out at its end.
            slot = 2 * (position // CHUNK) + (position % CHUNK != 0).to(tl.int32)
            tl.store(scratch_ptr + slot.to(tl.int64) * WIDTH + columns, values, mask=inside)


@triton.jit(do_not_specialize=["rows", "first_rows"])
def join_kernel(
    keys_ptr,
    first_ptr,
    second_ptr,
    scratch_ptr,
    rows,
    first_rows,
    first_stride,
    second_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SKIPPED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sum of a run that begins in one chunk and goes on in the next ones, if one does."""
    program = tl.program_id(0)
    chunk = program // PARTS
    columns = (program % PARTS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = chunk * CHUNK
    following = start + CHUNK
    if following < rows:
        key = tl.load(keys_ptr + following)
        if (key != SKIPPED) & (tl.load(keys_ptr + following - 1) == key):
            whole = tl.load(keys_ptr + start) == key
            begins = whole == 0
            if whole:
                begins = (start == 0) | (tl.load(keys_ptr + tl.maximum(start - 1, 0)) != key)
            if begins:
                slot = (2 * chunk + (whole == 0).to(tl.int32)).to(tl.int64)
                values = tl.load(scratch_ptr + slot * WIDTH + columns, mask=inside)
                going = following < rows
                while going:
                    slot = (2 * (following // CHUNK)).to(tl.int64)
                    values += tl.load(scratch_ptr + slot * WIDTH + columns, mask=inside)
                    following += CHUNK
                    going = following < rows
                    if going:
                        going = tl.load(keys_ptr + following) == key
                _put_sum(
                    values, key, first_ptr, second_ptr, first_rows, first_stride, second_stride, columns, inside
                )


@triton.jit(do_not_specialize=["num_features"])
def unmerge_kernel(
    grad_ptr,
    mask_ptr,
    count_ptr,
    embeds_ptr,
    features_ptr,
    num_features,
    grad_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A piece of one gradient row: to embeds where there is no placeholder, else to its feature."""
    program = tl.program_id(0)
    part = program % PARTS
    row = (program // PARTS).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(grad_ptr + row * grad_stride + columns, mask=inside)
    masked = tl.load(mask_ptr + row) != 0
    place = tl.load(count_ptr + row).to(tl.int64) - 1
    kept = tl.where(masked, 0.0, values).to(embeds_ptr.dtype.element_ty)
    tl.store(embeds_ptr + row * WIDTH + columns, kept, mask=inside)
    feature = values.to(features_ptr.dtype.element_ty)
    tl.store(features_ptr + place * WIDTH + columns, feature, mask=inside & masked & (place < num_features))
