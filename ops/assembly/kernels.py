"""Triton kernels of the assembly ops: one launch for any number of ranges; a few programs for each row.

Row counts are never compile-time constants; row offsets are 64-bit. A program reads its map entry and its id together,
picks the row that it takes by its address, and moves a piece of it in 16-byte loads that are all in flight at once.
Triton's language isn't Python's types, so this file isn't type-checked; a constant's ``if`` stands alone, because only
then is it decided at compile time.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from mmgraph.ops.recording import record


@triton.jit
def _columns(PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The row of this program, which of its pieces, and the columns."""
    program = tl.program_id(0)
    part = program % PARTS
    return (program // PARTS).to(tl.int64), part, part * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _put(dst_ptr, values, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a piece of a row."""
    values = values.to(dst_ptr.dtype.element_ty)
    if WIDTH % BLOCK == 0:
        tl.store(dst_ptr + columns, values)
    else:
        tl.store(dst_ptr + columns, values, mask=columns < WIDTH)


@triton.jit
def _text(ids_ptr, row, vocab):
    """A row's id, and the nearest one of the vocabulary."""
    token = tl.load(ids_ptr + row).to(tl.int64)
    return token, tl.minimum(tl.maximum(token, 0), tl.maximum(vocab - 1, 0).to(tl.int64))


@triton.jit
def _put_chosen(
    covered,
    uncovered,
    cover_ptr,
    text_ptr,
    dst_ptr,
    columns,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a piece of the covering row, of the text row, or of neither: then zeros.

    Where both have one dtype the address is chosen and loaded from once, with no branch before the load.
    """
    inside = columns < WIDTH
    if cover_ptr.dtype.element_ty == text_ptr.dtype.element_ty:
        src_ptr = tl.where(covered, cover_ptr, text_ptr)
        values = tl.load(src_ptr + columns, mask=inside & (covered | uncovered), other=0)
        _put(dst_ptr, values, columns, WIDTH, BLOCK)
    else:
        if covered:
            _put(dst_ptr, tl.load(cover_ptr + columns, mask=inside), columns, WIDTH, BLOCK)
        else:
            values = tl.load(text_ptr + columns, mask=inside & uncovered, other=0)
            _put(dst_ptr, values, columns, WIDTH, BLOCK)


@triton.jit
def _record_id(flag_ptr, row, token, vocab, STRICT: tl.constexpr, FAULT: tl.constexpr):
    """Record an id outside the vocabulary where that is an error: with STRICT, or where there is no vocabulary."""
    if STRICT:
        if (token < 0) | (token >= vocab):
            record(flag_ptr, FAULT, row, token)
    else:
        if vocab == 0:
            record(flag_ptr, FAULT, row, token)


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
    PARTS: tl.constexpr,
    STRICT: tl.constexpr,
    ROW_FAULT: tl.constexpr,
    ID_FAULT: tl.constexpr,
):
    """A piece of one row, from the pool or the table."""
    row, part, columns = _columns(PARTS, BLOCK)
    source = tl.load(map_ptr + row).to(tl.int64)
    token, nearest = _text(ids_ptr, row, vocab)
    covered = (source >= 0) & (source < pool_rows)
    cover_ptr = pool_ptr + source * pool_stride
    text_ptr = table_ptr + nearest * table_stride
    uncovered = (source == -1) & (vocab > 0)
    _put_chosen(covered, uncovered, cover_ptr, text_ptr, out_ptr + row * out_stride, columns, WIDTH, BLOCK)
    if part == 0:
        if source == -1:
            _record_id(flag_ptr, row, token, vocab, STRICT, ID_FAULT)
        elif covered == 0:
            record(flag_ptr, ROW_FAULT, row, source)


@triton.jit
def _last_begun(firsts_ptr, start, place, FIELDS: tl.constexpr):
    """The last record that begins at or before a place, from one that does; behind the last is one that never does."""
    following = tl.load(firsts_ptr + (start + 1) * FIELDS)
    while following <= place:
        start += 1
        following = tl.load(firsts_ptr + (start + 1) * FIELDS)
    return start


@triton.jit(do_not_specialize=["vocab", "count"])
def ranged_kernel(
    ids_ptr,
    table_ptr,
    pool_ptr,
    ranges_ptr,
    out_ptr,
    flag_ptr,
    vocab,
    count,
    table_stride,
    pool_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    STRICT: tl.constexpr,
    ID_FAULT: tl.constexpr,
):
    """A piece of one row, from the pool or the table, by a ``RowMap``'s index of ``count`` ranges."""
    row, part, columns = _columns(PARTS, BLOCK)
    token, nearest = _text(ids_ptr, row, vocab)
    hint = tl.load(ranges_ptr + count * 3 + row // STRIDE)
    range_ptr = ranges_ptr + _last_begun(ranges_ptr, hint, row, 3) * 3
    begin = tl.load(range_ptr)
    covered = (row >= begin) & (row <= tl.load(range_ptr + 1))
    source = tl.load(range_ptr + 2) + (row - begin)
    uncovered = (covered == 0) & (vocab > 0)
    cover_ptr = pool_ptr + source * pool_stride
    text_ptr = table_ptr + nearest * table_stride
    _put_chosen(covered, uncovered, cover_ptr, text_ptr, out_ptr + row * out_stride, columns, WIDTH, BLOCK)
    if part == 0:
        if covered == 0:
            _record_id(flag_ptr, row, token, vocab, STRICT, ID_FAULT)


@triton.jit
def _put_from(
    dst_ptr,
    address,
    typed_ptr,
    columns,
    inside,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Store a piece of the row at an address, of another pointer's type."""
    cover_ptr = tl.multiple_of(address.to(typed_ptr.dtype), ALIGNMENT)
    _put(dst_ptr, tl.load(cover_ptr + columns, mask=inside), columns, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["vocab", "count", "parts"])
def gather_kernel(
    ids_ptr,
    table_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    lists_ptr,
    out_ptr,
    flag_ptr,
    vocab,
    count,
    parts,
    table_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STRICT: tl.constexpr,
    ID_FAULT: tl.constexpr,
):
    """A piece of one row, from the tensor of a list that holds it, or from the table.

    ``lists_ptr`` holds numbers of 64 bits: of each tensor its first row in the whole, its address, the bytes from row
    to row and which of up to four dtypes; then of each range the tensor that its first row is of; then the index of
    ranges. ``first_ptr`` to ``fourth_ptr`` are read for their types alone.
    """
    row, part, columns = _columns(PARTS, BLOCK)
    token, nearest = _text(ids_ptr, row, vocab)
    text_ptr = table_ptr + nearest * table_stride
    dst_ptr = out_ptr + row * out_stride
    ranges_ptr = lists_ptr + parts * 4 + count
    hint = tl.load(ranges_ptr + count * 3 + row // STRIDE)
    which = _last_begun(ranges_ptr, hint, row, 3)
    range_ptr = ranges_ptr + which * 3
    begin = tl.load(range_ptr)
    covered = (row >= begin) & (row <= tl.load(range_ptr + 1))
    source = tl.load(range_ptr + 2) + (row - begin)
    owner = tl.load(lists_ptr + parts * 4 + which)
    part_ptr = lists_ptr + _last_begun(lists_ptr, owner, source, 4) * 4
    address = tl.load(part_ptr + 1) + (source - tl.load(part_ptr)) * tl.load(part_ptr + 2)
    uncovered = (covered == 0) & (vocab > 0)
    if KINDS == 1:
        cover_ptr = tl.multiple_of(address.to(first_ptr.dtype), ALIGNMENT)
        _put_chosen(covered, uncovered, cover_ptr, text_ptr, dst_ptr, columns, WIDTH, BLOCK)
    else:
        inside = columns < WIDTH
        kind = tl.load(part_ptr + 3)
        if covered == 0:
            values = tl.load(text_ptr + columns, mask=inside & uncovered, other=0)
            _put(dst_ptr, values, columns, WIDTH, BLOCK)
        elif kind == 0:
            _put_from(dst_ptr, address, first_ptr, columns, inside, WIDTH, BLOCK, ALIGNMENT)
        elif kind == 1:
            _put_from(dst_ptr, address, second_ptr, columns, inside, WIDTH, BLOCK, ALIGNMENT)
        elif kind == 2:
            _put_from(dst_ptr, address, third_ptr, columns, inside, WIDTH, BLOCK, ALIGNMENT)
        else:
            _put_from(dst_ptr, address, fourth_ptr, columns, inside, WIDTH, BLOCK, ALIGNMENT)
    if part == 0:
        if covered == 0:
            _record_id(flag_ptr, row, token, vocab, STRICT, ID_FAULT)


@triton.jit(do_not_specialize=["rows", "count"])
def expand_kernel(
    ranges_ptr,
    map_ptr,
    flag_ptr,
    rows,
    count,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    """Entries of a row map from ranges ``[count, 3]``: first row, last row, first pool row; and a check of the ranges.

    Ranges ascend; those that begin beyond every row are padding. Entries are of 32 bits, so pool rows must be too.
    """
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if count > 0:
        low = tl.zeros([BLOCK], dtype=tl.int32)
        high = low + count
        step = count
        while step > 1:  # as often as the longest search needs
            middle = (low + high) // 2
            begins = tl.load(ranges_ptr + middle * 3) <= entries
            low = tl.where(begins, middle, low)
            high = tl.where(begins, high, tl.maximum(middle, low + 1))
            step = (step + 1) // 2
        begin = tl.load(ranges_ptr + low * 3)
        covered = (entries >= begin) & (entries <= tl.load(ranges_ptr + low * 3 + 1))
        source = tl.load(ranges_ptr + low * 3 + 2) + (entries - begin)
        tl.store(map_ptr + entries, tl.where(covered, source, -1).to(tl.int32), mask=entries < rows)
        here = entries < count
        first = tl.load(ranges_ptr + entries * 3, mask=here, other=0)
        last = tl.load(ranges_ptr + entries * 3 + 1, mask=here, other=0)
        source = tl.load(ranges_ptr + entries * 3 + 2, mask=here, other=0)
        follows = here & (entries > 0)
        before = tl.load(ranges_ptr + entries * 3 - 2, mask=follows, other=-1)
        # An unused one may end anywhere, but its beginning is behind every used one.
        before = tl.maximum(before, tl.load(ranges_ptr + entries * 3 - 3, mask=follows, other=-1))
        wrong = (first <= before) | (last < first) | (last >= rows)
        # The difference doesn't overflow where the rest holds.
        wrong = wrong | (source < 0) | (source > 0x7FFFFFFF - (last - first))
        wrong = wrong & here & (first < rows)
        wrong = wrong | (here & (first >= rows) & (first < 0x7FFFFFFF))
        if tl.max(wrong.to(tl.int32), 0) > 0:
            worst = tl.min(tl.where(wrong, entries, 0x7FFFFFFF), 0)
            record(flag_ptr, FAULT, worst, tl.load(ranges_ptr + worst * 3).to(tl.int64))
    else:
        tl.store(map_ptr + entries, tl.full([BLOCK], -1, tl.int32), mask=entries < rows)


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
    PARTS: tl.constexpr,
    FAULT: tl.constexpr,
):
    """A piece of one row, from the features or from embeds; the last row compares the counts."""
    row, part, columns = _columns(PARTS, BLOCK)
    masked = tl.load(mask_ptr + row) != 0
    source = tl.load(count_ptr + row).to(tl.int64) - 1  # placeholders up to this row, less one
    covered = masked & (source < num_features)
    _put_chosen(
        covered,
        masked == 0,
        features_ptr + source * features_stride,
        embeds_ptr + row * embeds_stride,
        out_ptr + row * WIDTH,
        columns,
        WIDTH,
        BLOCK,
    )
    if part == 0:
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
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FAULT: tl.constexpr,
):
    """A piece of one row of hidden, with the pool's row added where there is one; in place, other rows are left."""
    row, part, columns = _columns(PARTS, BLOCK)
    source = tl.load(map_ptr + row).to(tl.int64)
    covered = (source >= 0) & (source < pool_rows)
    inside = columns < WIDTH
    if IN_PLACE:
        inside = inside & covered
    base = tl.load(hidden_ptr + row * hidden_stride + columns, mask=inside)
    # Cast first, as the dense buffer would have been; one addition rounds the same in any wider type.
    extra = tl.load(pool_ptr + source * pool_stride + columns, mask=inside & covered, other=0).to(base.dtype)
    dst_ptr = out_ptr + row * out_stride
    if IN_PLACE:
        tl.store(dst_ptr + columns, base + extra, mask=inside)
    else:
        _put(dst_ptr, tl.where(covered, base + extra, base), columns, WIDTH, BLOCK)
    if part == 0:
        if (covered == 0) & (source != -1):
            record(flag_ptr, FAULT, row, source)


@triton.jit(do_not_specialize=["out_rows"])
def store_kernel(
    rows_ptr,
    places_ptr,
    out_ptr,
    flag_ptr,
    out_rows,
    rows_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FAULT: tl.constexpr,
):
    """A piece of one row, to where its entry says; -1: nowhere."""
    row, part, columns = _columns(PARTS, BLOCK)
    place = tl.load(places_ptr + row).to(tl.int64)
    there = (place >= 0) & (place < out_rows)
    inside = (columns < WIDTH) & there
    values = tl.load(rows_ptr + row * rows_stride + columns, mask=inside)
    tl.store(out_ptr + place * out_stride + columns, values.to(out_ptr.dtype.element_ty), mask=inside)
    if part == 0:
        if (there == 0) & (place != -1):
            record(flag_ptr, FAULT, row, place)
