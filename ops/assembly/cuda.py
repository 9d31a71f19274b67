"""Launches of the assembly kernels: the CUDA implementations.

Nothing here synchronises. Rows may be strided; a tensor whose columns aren't adjacent is copied first.
"""

import torch

from mmgraph.ops import checks
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import on_device
from mmgraph.ops.overlap import check_no_overlap
from mmgraph.ops.registration import kernel_module, mark_written

Tensor = torch.Tensor

# Measured at width 4096 in bfloat16 on an H200: within 3% of the best of 1024 to 4096 columns and 1 to 8 warps.
_LARGEST_BLOCK = 2048
_BYTES_PER_WARP = 1024


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _shape(width: int, item_size: int) -> tuple[int, int]:
    """Columns at a time, and warps, for a row of this width."""
    block = min(_LARGEST_BLOCK, 1 << (width - 1).bit_length())
    return block, max(1, min(8, block * item_size // _BYTES_PER_WARP))


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
    table, pool = _rows(table), _rows(pool)
    block, warps = _shape(width, out.element_size())
    with on_device(out.device):
        kernel_module("assembly.kernels").assemble_kernel[(rows,)](
            input_ids.contiguous(),
            table,
            pool,
            row_map.contiguous(),
            out,
            flag,
            table.shape[0],
            pool.shape[0],
            table.stride(0),
            pool.stride(0),
            out.stride(0),
            width,
            block,
            strict,
            int(Fault.ASSEMBLE_ROW),
            int(Fault.ASSEMBLE_ID),
            num_warps=warps,
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
    embeds, features = _rows(embeds), _rows(features)
    block, warps = _shape(width, out.element_size())
    with on_device(out.device):
        kernel_module("assembly.kernels").merge_kernel[(rows,)](
            embeds,
            mask.contiguous(),
            torch.cumsum(mask, 0, dtype=torch.int32),
            features,
            out,
            flag,
            rows,
            features.shape[0],
            embeds.stride(0),
            features.stride(0),
            width,
            block,
            int(Fault.MERGE_COUNT),
            num_warps=warps,
        )
    return out


def deepstack_add(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> Tensor:
    """The CUDA implementation of ``deepstack_add``."""
    checks.check_deepstack(hidden, pool, row_map, level)
    rows, width = hidden.shape
    out = hidden.new_empty((rows, width))
    flag = flag_for(out.device)
    if rows == 0:
        return out
    hidden, part = _rows(hidden), _rows(pool[:, level * width : (level + 1) * width])
    block, warps = _shape(width, out.element_size())
    with on_device(out.device):
        kernel_module("assembly.kernels").deepstack_kernel[(rows,)](
            hidden,
            part,
            row_map.contiguous(),
            out,
            flag,
            part.shape[0],
            hidden.stride(0),
            part.stride(0),
            width,
            block,
            int(Fault.DEEPSTACK_ROW),
            num_warps=warps,
        )
    return out
