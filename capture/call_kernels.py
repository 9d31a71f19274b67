"""The Triton kernels of a graph's own nodes: they fetch a call's record, stage, fill padding, and publish by it.

What is known at the capture comes by value, as tuples of 64-bit integers, one for each leaf: a program picks its own
by comparing its number with the ends of the leaves' programs, so nothing is read from memory to find it, and one body
does the work for all. What differs from call to call is read from the record. Memory is named by its address. Of the
leaves only their number is a compile-time constant, so one variant fits every bucket.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def fetch_kernel(
    slots_at, count_at, read_at, record_at, SLOTS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """Copy the next slot, which lies in host memory, into the record. One program of one warp.

    The host is told last, and never writes within half a ring of what it knows to be read.
    """
    count_ptr = count_at.to(tl.int64).to(tl.pointer_type(tl.int64))
    number = tl.load(count_ptr)
    lanes = tl.arange(0, LANES)
    slot = slots_at.to(tl.int64).to(tl.pointer_type(tl.int64)) + (number % SLOTS) * (WIDTH + 1)
    values = tl.load(slot + lanes, mask=lanes < WIDTH, volatile=True)
    written = tl.load(slot + WIDTH, volatile=True)
    # Of another call: nothing comes from anywhere, nor goes anywhere.
    values = tl.where(written == number, values, 0)
    tl.store(record_at.to(tl.int64).to(tl.pointer_type(tl.int64)) + lanes, values, mask=lanes < WIDTH)
    tl.debug_barrier()
    tl.store(count_ptr, number + 1)
    tl.store(
        read_at.to(tl.int64).to(tl.pointer_type(tl.int64)), tl.where(written == number, number + 1, 1 << 62)
    )


@triton.jit
def copy_block(
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
def stage_kernel(record_at, leaves, ends, LEAVES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Copy blocks of one input from where the record says it lies into its static buffer.

    A leaf is the buffer's address, and where the record has the source's address, bytes of a run, runs, and bytes
    from run to run in source and buffer. ``ends``: programs up to each leaf's last.
    """
    program = tl.program_id(0).to(tl.int64)
    dst, at = leaves[0][0], leaves[0][1]
    first = program * 0
    last = ends[0] + first
    for i in tl.static_range(1, LEAVES):
        behind = program >= ends[i - 1]
        dst = tl.where(behind, leaves[i][0], dst)
        at = tl.where(behind, leaves[i][1], at)
        first = tl.where(behind, ends[i - 1], first)
        last = tl.where(behind, ends[i], last)
    numbers = record_at.to(tl.int64).to(tl.pointer_type(tl.int64)) + at
    src, inner, runs = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    src_pitch, dst_pitch = tl.load(numbers + 3), tl.load(numbers + 4)
    blocks = tl.cdiv(inner * runs, BLOCK_BYTES)
    bits = src | dst | inner | src_pitch | dst_pitch
    for block in range(program - first, blocks, last - first):
        if bits % 16 == 0:
            copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int64, 2, BLOCK_BYTES)
        elif bits % 4 == 0:
            copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int32, 1, BLOCK_BYTES)
        else:
            copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int8, 1, BLOCK_BYTES)


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
    real = tl.maximum(tl.load(counts_at.to(tl.int64).to(tl.pointer_type(tl.int64)) + count), 0)
    if fill < 0:
        if real + 1 < rows:
            if row_bytes == 8:
                _fill_offsets(view, real, rows, rank, programs, tl.int64, BLOCK_BYTES)
            else:
                _fill_offsets(view, real, rows, rank, programs, tl.int32, BLOCK_BYTES)
    else:
        real = real // per
        if real < rows:
            words_ptr = fills_at.to(tl.int64).to(tl.pointer_type(tl.int64)) + fill * 2
            even, odd = tl.load(words_ptr), tl.load(words_ptr + 1)
            first, slab = real * row_bytes, rows * row_bytes
            bits = view | row_bytes
            if bits % 8 == 0:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int64, BLOCK_BYTES)
            elif bits % 4 == 0:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int32, BLOCK_BYTES)
            else:
                _fill_rows(view, first, slab, outer, even, odd, rank, programs, tl.int8, BLOCK_BYTES)


@triton.jit
def publish_kernel(record_at, leaves, ends, LEAVES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Copy blocks of the real rows of one output to the address that the record has for it.

    A leaf is the source's address, bytes of a row in a run, rows, how many of its size make one row, where the record
    has that size (or -1), rows more than the size, runs, and where the record has the target's address. ``ends``:
    programs up to each leaf's last.
    """
    program = tl.program_id(0).to(tl.int64)
    src, inner, room, per = leaves[0][0], leaves[0][1], leaves[0][2], leaves[0][3]
    count, more, runs, target_at = leaves[0][4], leaves[0][5], leaves[0][6], leaves[0][7]
    first = program * 0
    last = ends[0] + first
    for i in tl.static_range(1, LEAVES):
        behind = program >= ends[i - 1]
        src = tl.where(behind, leaves[i][0], src)
        inner = tl.where(behind, leaves[i][1], inner)
        room = tl.where(behind, leaves[i][2], room)
        per = tl.where(behind, leaves[i][3], per)
        count = tl.where(behind, leaves[i][4], count)
        more = tl.where(behind, leaves[i][5], more)
        runs = tl.where(behind, leaves[i][6], runs)
        target_at = tl.where(behind, leaves[i][7], target_at)
        first = tl.where(behind, ends[i - 1], first)
        last = tl.where(behind, ends[i], last)
    record_ptr = record_at.to(tl.int64).to(tl.pointer_type(tl.int64))
    target = tl.load(record_ptr + target_at)
    rows = room
    if count >= 0:
        rows = tl.minimum(tl.load(record_ptr + count) // per + more, room)
    real = rows * inner
    blocks = tl.where(target != 0, tl.cdiv(real * runs, BLOCK_BYTES), 0)
    bits = src | target | inner | real | (room * inner)
    for block in range(program - first, blocks, last - first):
        if bits % 16 == 0:
            copy_block(src, target, real, runs, room * inner, real, block, tl.int64, 2, BLOCK_BYTES)
        elif bits % 4 == 0:
            copy_block(src, target, real, runs, room * inner, real, block, tl.int32, 1, BLOCK_BYTES)
        else:
            copy_block(src, target, real, runs, room * inner, real, block, tl.int8, 1, BLOCK_BYTES)
