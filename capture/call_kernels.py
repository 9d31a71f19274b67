"""The Triton kernels that stand first and last in every graph, and read what a call wrote into its record.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from .copy_kernels import _copy_block


@triton.jit
def fetch_kernel(
    slots_at, count_at, read_at, record_at, SLOTS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """Copy the next slot, which lies in host memory, into the record. One program of one warp.

    The host is told last, and never writes within half a ring of what it knows to be read.
    """
    count_ptr = count_at.to(tl.pointer_type(tl.int64))
    number = tl.load(count_ptr)
    lanes = tl.arange(0, LANES)
    slot = slots_at.to(tl.pointer_type(tl.int64)) + (number % SLOTS) * (WIDTH + 1)
    values = tl.load(slot + lanes, mask=lanes < WIDTH, volatile=True)
    written = tl.load(slot + WIDTH, volatile=True)
    tl.store(record_at.to(tl.pointer_type(tl.int64)) + lanes, values, mask=lanes < WIDTH)
    tl.debug_barrier()
    tl.store(count_ptr, number + 1)
    tl.store(read_at.to(tl.pointer_type(tl.int64)), tl.where(written == number, number + 1, -1))


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
    numbers = record_at.to(tl.pointer_type(tl.int64)) + at
    src, inner, runs = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    src_pitch, dst_pitch = tl.load(numbers + 3), tl.load(numbers + 4)
    blocks = tl.cdiv(inner * runs, BLOCK_BYTES)
    bits = src | dst | inner | src_pitch | dst_pitch
    for block in range(program - first, blocks, last - first):
        if bits % 16 == 0:
            _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int64, 2, BLOCK_BYTES)
        elif bits % 4 == 0:
            _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int32, 1, BLOCK_BYTES)
        else:
            _copy_block(src, dst, inner, runs, src_pitch, dst_pitch, block, tl.int8, 1, BLOCK_BYTES)


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
    record_ptr = record_at.to(tl.pointer_type(tl.int64))
    target = tl.load(record_ptr + target_at)
    rows = room
    if count >= 0:
        rows = tl.minimum(tl.load(record_ptr + count) // per + more, room)
    real = rows * inner
    blocks = tl.where(target != 0, tl.cdiv(real * runs, BLOCK_BYTES), 0)
    bits = src | target | inner | real | (room * inner)
    for block in range(program - first, blocks, last - first):
        if bits % 16 == 0:
            _copy_block(src, target, real, runs, room * inner, real, block, tl.int64, 2, BLOCK_BYTES)
        elif bits % 4 == 0:
            _copy_block(src, target, real, runs, room * inner, real, block, tl.int32, 1, BLOCK_BYTES)
        else:
            _copy_block(src, target, real, runs, room * inner, real, block, tl.int8, 1, BLOCK_BYTES)
