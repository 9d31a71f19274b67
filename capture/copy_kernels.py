"""Triton kernels of the capture room: many pieces of memory copied in one launch, and padding filled.

Pieces, leaves and their programs' ends come by value, as tuples of 64-bit integers: a program picks its own by
comparing its number with the ends, so that nothing is read from memory to find it, and one body does the work for all.
No number is a compile-time constant, so one variant fits every call with as many. Memory is named by its address.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _copy_block(
    src,
    dst,
    inner,
    runs,
    src_pitch,
    dst_pitch,
    block,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Copy a block of a piece, in units of LANES elements; each unit lies within one run."""
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8 * LANES
    UNITS: tl.constexpr = BLOCK_BYTES // BYTES
    width = tl.maximum(inner // BYTES, 1)  # of a run, in units
    start = block * UNITS
    run = start // width
    within = start - run * width + tl.arange(0, UNITS)
    if width < UNITS:
        steps = (within.to(tl.uint32) // width.to(tl.uint32)).to(tl.int64)  # 64-bit division is slow
    else:
        steps = (within >= width).to(tl.int64)
    within = within - steps * width
    run = run + steps
    lane_bytes = (tl.arange(0, LANES) * (BYTES // LANES)).to(tl.int64)[None, :]
    src_bytes = (src + run * src_pitch + within * BYTES)[:, None] + lane_bytes
    dst_bytes = (dst + run * dst_pitch + within * BYTES)[:, None] + lane_bytes
    src_ptrs = tl.max_contiguous(tl.multiple_of(src_bytes.to(tl.pointer_type(ELEMENT)), (1, BYTES)), (1, LANES))
    dst_ptrs = tl.max_contiguous(tl.multiple_of(dst_bytes.to(tl.pointer_type(ELEMENT)), (1, BYTES)), (1, LANES))
    inside = ((start + tl.arange(0, UNITS)) < runs * (inner // BYTES))[:, None]
    tl.store(dst_ptrs, tl.load(src_ptrs, mask=inside), mask=inside)


@triton.jit
def copy_kernel(
    pieces,
    ends,
    counts_at,
    counts,
    PIECES: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Copy a block of one piece; program 0 also writes the counts, unless their address is 0.

    A piece is the addresses of source and destination, bytes of a run, runs, and bytes from run to run in each.
    ``ends``: programs up to each piece's last.
    """
    program = tl.program_id(0).to(tl.int64)
    src, dst, inner = pieces[0][0], pieces[0][1], pieces[0][2]
    runs, src_pitch, dst_pitch = pieces[0][3], pieces[0][4], pieces[0][5]
    block = program
    for i in tl.static_range(1, PIECES):
        behind = program >= ends[i - 1]
        src = tl.where(behind, pieces[i][0], src)
        dst = tl.where(behind, pieces[i][1], dst)
        inner = tl.where(behind, pieces[i][2], inner)
        runs = tl.where(behind, pieces[i][3], runs)
        src_pitch = tl.where(behind, pieces[i][4], src_pitch)
        dst_pitch = tl.where(behind, pieces[i][5], dst_pitch)
        block = tl.where(behind, program - ends[i - 1], block)
    bits = src | dst | inner | src_pitch | dst_pitch
    if bits % 16 == 0:
        _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int64, 2, BLOCK_BYTES)
    elif bits % 4 == 0:
        _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int32, 1, BLOCK_BYTES)
    else:
        _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int8, 1, BLOCK_BYTES)
    if (program == 0) & (counts_at != 0):
        counts_ptr = counts_at.to(tl.pointer_type(tl.int64))
        for i in tl.static_range(COUNTS):
            tl.store(counts_ptr + i, counts[i])


@triton.jit
def _fill_rows(
    view,
    first,
    slab,
    outer,
    even,
    odd,
    rank,
    programs,
    ELEMENT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Fill each slab of a view from byte ``first`` on, a program every ``programs``-th block, in units of ELEMENT.

    ``even`` and ``odd`` are the pattern's two words; which part of them falls on a unit depends on its place in the
    view.
    """
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    UNITS: tl.constexpr = BLOCK_BYTES // BYTES
    units = (slab - first) // BYTES
    blocks = (units + UNITS - 1) // UNITS
    for block in range(rank, outer * blocks, programs):
        index = block // blocks
        unit = (block - index * blocks) * UNITS + tl.arange(0, UNITS)
        place = index * slab + first + unit * BYTES
        word = tl.where(place % 16 < 8, even, odd)
        values = (word >> (place % 8 * 8)).to(ELEMENT)
        tl.store((view + place).to(tl.pointer_type(ELEMENT)), values, mask=unit < units)


@triton.jit
def _fill_offsets(view, last, entries, rank, programs, ELEMENT: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Fill the entries behind ``last`` with its value. It is never written, so that programs don't race."""
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    UNITS: tl.constexpr = BLOCK_BYTES // BYTES
    value = tl.load((view + last * BYTES).to(tl.pointer_type(ELEMENT)))
    blocks = (entries - last - 1 + UNITS - 1) // UNITS
    for block in range(rank, blocks, programs):
        entry = last + 1 + block * UNITS + tl.arange(0, UNITS)
        ptrs = (view + entry * BYTES).to(tl.pointer_type(ELEMENT))
        tl.store(ptrs, tl.zeros([UNITS], ELEMENT) + value, mask=entry < entries)


@triton.jit
def fill_kernel(
    leaves,
    ends,
    counts_at,
    fills_at,
    LEAVES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Fill the padding of one leaf; where there is none, nothing but its count is read.

    A leaf is the address of its view, the product of the sizes before the axis, the axis's size, bytes of a row (of an
    entry), how many of the count make a row, the count's place, and the pattern's: -1 for offsets. ``ends``: programs
    up to each leaf's last.
    """
    program = tl.program_id(0).to(tl.int64)
    begin = program * 0
    end = ends[0]
    view, outer, rows, row_bytes = leaves[0][0], leaves[0][1], leaves[0][2], leaves[0][3]
    per, count, fill = leaves[0][4], leaves[0][5], leaves[0][6]
    for i in tl.static_range(1, LEAVES):
        behind = program >= ends[i - 1]
        begin = tl.where(behind, ends[i - 1], begin)
        end = tl.where(behind, ends[i], end)
        view = tl.where(behind, leaves[i][0], view)
        outer = tl.where(behind, leaves[i][1], outer)
        rows = tl.where(behind, leaves[i][2], rows)
        row_bytes = tl.where(behind, leaves[i][3], row_bytes)
        per = tl.where(behind, leaves[i][4], per)
        count = tl.where(behind, leaves[i][5], count)
        fill = tl.where(behind, leaves[i][6], fill)
    rank = program - begin
    programs = end - begin
    real = tl.maximum(tl.load(counts_at.to(tl.pointer_type(tl.int64)) + count), 0)
    if fill < 0:
        if real + 1 < rows:
            if row_bytes == 8:
                _fill_offsets(view, real, rows, rank, programs, tl.int64, BLOCK_BYTES)
            else:
                _fill_offsets(view, real, rows, rank, programs, tl.int32, BLOCK_BYTES)
    else:
        real = real // per
        if real < rows:
            words_ptr = fills_at.to(tl.pointer_type(tl.int64)) + fill * 2
            even, odd = tl.load(words_ptr), tl.load(words_ptr + 1)
            first, slab = real * row_bytes, rows * row_bytes
            bits = view | row_bytes
            if bits % 8 == 0:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int64, BLOCK_BYTES)
            elif bits % 4 == 0:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int32, BLOCK_BYTES)
            else:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int8, BLOCK_BYTES)
