"""Launches of the assembly kernels: the CUDA implementations.

Nothing here synchronises. Rows may be strided; a tensor whose columns aren't adjacent is copied first.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from mmgraph.ops import checks
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import launch, on_device
from mmgraph.ops.overlap import check_no_overlap
from mmgraph.ops.registration import kernel_module, mark_written

Tensor = torch.Tensor

# What a program moves, and each of its warps. Widths of 1024 to 8192 in bfloat16 on an H200: within 2% of the best of 1
# to 8 KiB a program with 1 to 4 rows. Hints to the L2 cache (loads that stay, or stores that leave first) take up to 4%
# off the kernel and put as much or more on the next one, which reads the rows: it then waits for the writing back.
_BYTES_PER_PROGRAM = 4096
_BYTES_PER_WARP = 1024
_LARGEST_BLOCK = 4096
# Numbers, since an enumeration's members take their time to become some.
_ASSEMBLE_ROW, _ASSEMBLE_ID = int(Fault.ASSEMBLE_ROW), int(Fault.ASSEMBLE_ID)
_MERGE_COUNT, _DEEPSTACK_ROW = int(Fault.MERGE_COUNT), int(Fault.DEEPSTACK_ROW)
_STORE_ROW, _RANGES = int(Fault.STORE_ROW), int(Fault.RANGES)


class Shape(NamedTuple):
    """How a row is cut: columns of a program, programs for each row, warps."""

    block: int
    parts: int
    warps: int


@lru_cache(maxsize=1024)
def shape_of(width: int, item_size: int) -> Shape:
    """The cut of rows of this width."""
    pieces = max(1, width * item_size // _BYTES_PER_PROGRAM)
    block = min(_LARGEST_BLOCK, 1 << (-(-width // pieces) - 1).bit_length())
    warps = max(1, min(8, block * item_size // _BYTES_PER_WARP))
    return Shape(block, -(-width // block), warps)


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose columns are adjacent in memory."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def row_stride(tensor: Tensor) -> int:
    """Elements from row to row; of a single row's, which is anything, the width: another would compile a kernel."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]


def assemble(input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool) -> Tensor:
    """The CUDA implementation of ``assemble_embeddings``."""
    checks.check_assemble(input_ids, table, pool, row_map)
    out = table.new_empty((input_ids.shape[0], table.shape[1]))
    _launch_assemble(input_ids, table, pool, row_map, strict, out)
    return out


def assemble_out(
    input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool, *, out: Tensor
) -> None:
    """The CUDA implementation of ``assemble_embeddings_out``."""
    checks.check_assemble_out(input_ids, table, pool, row_map, out)
    check_no_overlap(
        "assemble_embeddings_out", "out", out, table=table, pool=pool, input_ids=input_ids, row_map=row_map
    )
    if out.stride(1) == 1:
        _launch_assemble(input_ids, table, pool, row_map, strict, out)
        mark_written(out)
    else:
        out.copy_(assemble(input_ids, table, pool, row_map, strict))


def _launch_assemble(
    input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool, out: Tensor
) -> None:
    rows, width = out.shape
    flag = flag_for(out.device)
    if rows == 0 or width == 0:
        return
    table, pool = adjacent(table), adjacent(pool)
    shape = shape_of(width, out.element_size())
    with on_device(out.device):
        launch(
            kernel_module("assembly.kernels").assemble_kernel,
            rows * shape.parts,
            (input_ids.contiguous(), table, pool, row_map.contiguous(), out, flag),
            (table.shape[0], pool.shape[0]),
            (row_stride(table), row_stride(pool), row_stride(out)),
            (
                width,
                shape.block,
                shape.parts,
                strict,
                _ASSEMBLE_ROW,
                _ASSEMBLE_ID,
            ),
            num_warps=shape.warps,
        )


def merge(embeds: Tensor, mask: Tensor, features: Tensor, num_placeholders: int | None) -> Tensor:
    """The CUDA implementation of ``merge_embeddings``; what only the mask's values show goes to the error flag."""
    checks.check_merge(embeds, mask, features)
    if num_placeholders is not None:
        checks.check_count(num_placeholders, features.shape[0])
    rows, width = embeds.shape
    if rows == 0:
        checks.check_count(0, features.shape[0])
    out = embeds.new_empty((rows, width))
    flag = flag_for(out.device)
    if rows == 0 or width == 0:
        return out
    embeds, features = adjacent(embeds), adjacent(features)
    shape = shape_of(width, out.element_size())
    with on_device(out.device):
        launch(
            kernel_module("assembly.kernels").merge_kernel,
            rows * shape.parts,
            (embeds, mask.contiguous(), torch.cumsum(mask, 0, dtype=torch.int32), features, out, flag),
            (rows, features.shape[0]),
            (row_stride(embeds), row_stride(features)),
            (width, shape.block, shape.parts, _MERGE_COUNT),
            num_warps=shape.warps,
        )
    return out


def deepstack_add(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> Tensor:
    """The CUDA implementation of ``deepstack_add``."""
    checks.check_deepstack("deepstack_add", hidden, pool, row_map, level)
    out = hidden.new_empty(hidden.shape)
    _launch_deepstack(adjacent(hidden), pool, row_map, level, out, in_place=False)
    return out


def deepstack_add_in_place(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> None:
    """The CUDA implementation of ``deepstack_add_``; it touches the covered rows alone."""
    checks.check_deepstack_in_place(hidden, pool, row_map, level)
    check_no_overlap("deepstack_add_", "hidden", hidden, pool=pool, row_map=row_map)
    if hidden.stride(1) == 1:
        _launch_deepstack(hidden, pool, row_map, level, hidden, in_place=True)
        mark_written(hidden)
    else:
        hidden.copy_(deepstack_add(hidden, pool, row_map, level))


def _launch_deepstack(
    hidden: Tensor, pool: Tensor, row_map: Tensor, level: int, out: Tensor, *, in_place: bool
) -> None:
    rows, width = hidden.shape
    flag = flag_for(out.device)
    if rows == 0:
        return
    part = adjacent(pool[:, level * width : (level + 1) * width])
    shape = shape_of(width, out.element_size())
    with on_device(out.device):
        launch(
            kernel_module("assembly.kernels").deepstack_kernel,
            rows * shape.parts,
            (hidden, part, row_map.contiguous(), out, flag),
            (part.shape[0],),
            (row_stride(hidden), row_stride(part), row_stride(out)),
            (width, shape.block, shape.parts, in_place, _DEEPSTACK_ROW),
            num_warps=shape.warps,
        )


def store_rows(rows: Tensor, places: Tensor, *, out: Tensor) -> None:
    """The CUDA implementation of ``store_rows``."""
    checks.check_store(rows, places, out)
    check_no_overlap("store_rows", "out", out, rows=rows, places=places)
    if out.stride(1) != 1:
        raise checks.not_adjacent("store_rows", "out", out)
    count, width = rows.shape
    flag = flag_for(out.device)
    if count == 0 or width == 0:
        return
    rows = adjacent(rows)
    shape = shape_of(width, out.element_size())
    with on_device(out.device):
        launch(
            kernel_module("assembly.kernels").store_kernel,
            count * shape.parts,
            (rows, places.contiguous(), out, flag),
            (out.shape[0],),
            (row_stride(rows), row_stride(out)),
            (width, shape.block, shape.parts, _STORE_ROW),
            num_warps=shape.warps,
        )
    mark_written(out)


_EXPANDED = 1024


def expand_ranges(ranges: Tensor, num_rows: int) -> Tensor:
    """The CUDA implementation of ``expand_ranges``."""
    checks.check_ranges(ranges, num_rows)
    count = ranges.shape[0]
    out = ranges.new_empty((num_rows,))
    flag = flag_for(out.device)
    blocks = -(-max(num_rows, count) // _EXPANDED)
    if blocks:
        with on_device(out.device):
            launch(
                kernel_module("assembly.kernels").expand_kernel,
                blocks,
                (ranges.contiguous(), out, flag),
                (num_rows, count),
                (),
                (_EXPANDED, _RANGES),
                num_warps=4,
            )
    return out
