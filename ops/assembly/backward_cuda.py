"""Launches of the gradients' kernels: the CUDA implementations, with no synchronisation.

A sort of the rows' destinations and two launches, whatever the duplicates. In PyTorch's own sum of embedding gradients
the rows that take no part queue at one index.
"""

import torch

from mmgraph.ops.assembly.cuda import adjacent, row_stride, shape_of
from mmgraph.ops.launching import launch, on_device
from mmgraph.ops.registration import kernel_module

Tensor = torch.Tensor

_LARGEST = 2**31 - 1
# Positions whose rows one program adds up at most; longer runs are cut, and their pieces added up at the end.
_CHUNK = 64
_KEYS = 1024


def assemble_backward(
    grad: Tensor,
    input_ids: Tensor,
    row_map: Tensor,
    vocab: int,
    pool_rows: int,
    table_dtype: torch.dtype,
    pool_dtype: torch.dtype,
    need_table: bool,
    need_pool: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of table ``[vocab, H]`` and pool ``[pool_rows, H]``; one that isn't needed has no rows."""
    width = grad.shape[1]
    table = grad.new_zeros((vocab if need_table else 0, width), dtype=table_dtype)
    pool = grad.new_zeros((pool_rows if need_pool else 0, width), dtype=pool_dtype)
    _sum_rows(grad, input_ids, row_map, pool, table, pool_rows, vocab, need_pool, need_table and vocab > 0)
    return table, pool


def deepstack_backward(
    grad: Tensor, row_map: Tensor, level: int, pool_rows: int, pool_width: int, pool_dtype: torch.dtype
) -> Tensor:
    """Gradient of the pool ``[pool_rows, levels * H]``: zero outside the level's slice."""
    width = grad.shape[1]
    pool = grad.new_zeros((pool_rows, pool_width), dtype=pool_dtype)
    part = pool[:, level * width : (level + 1) * width]
    _sum_rows(grad, row_map, row_map, part, part, pool_rows, 0, True, False)
    return pool


def merge_backward(
    grad: Tensor, mask: Tensor, num_features: int, features_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of embeds ``[T, H]``, zero in masked rows, and of features ``[n, H]``."""
    rows, width = grad.shape
    embeds = grad.new_empty((rows, width))
    features = grad.new_zeros((num_features, width), dtype=features_dtype)
    if rows == 0 or width == 0:
        return embeds, features
    grad = adjacent(grad)
    shape = shape_of(width, grad.element_size())
    with on_device(grad.device):
        launch(
            kernel_module("assembly.backward_kernels").unmerge_kernel,
            rows * shape.parts,
            (grad, mask.contiguous(), torch.cumsum(mask, 0, dtype=torch.int32), embeds, features),
            (num_features,),
            (row_stride(grad),),
            (width, shape.block, shape.parts),
            num_warps=shape.warps,
        )
    return embeds, features


def _sum_rows(
    grad: Tensor,
    input_ids: Tensor,
    row_map: Tensor,
    pool: Tensor,
    table: Tensor,
    pool_rows: int,
    vocab: int,
    need_pool: bool,
    need_table: bool,
) -> None:
    """Add the rows of the gradient up in pool and table, which are zeros."""
    rows, width = grad.shape
    if rows == 0 or width == 0 or not ((need_pool and pool_rows) or need_table):
        return
    kernels = kernel_module("assembly.backward_kernels")
    grad = adjacent(grad)
    small = pool_rows + (vocab if need_table else 0) < _LARGEST  # keys of 32 bits are sorted in half the time
    skipped = _LARGEST if small else 2**63 - 1
    keys = torch.empty(rows, dtype=torch.int32 if small else torch.int64, device=grad.device)
    work = torch.float64 if torch.float64 in (pool.dtype, table.dtype, grad.dtype) else torch.float32
    chunks = -(-rows // _CHUNK)
    shape = shape_of(width, 4)
    cut = (width, shape.block, shape.parts, skipped, _CHUNK)
    with on_device(grad.device):
        launch(
            kernels.keys_kernel,
            -(-rows // _KEYS),
            (input_ids.contiguous(), row_map.contiguous(), keys),
            (rows, vocab, pool_rows),
            (),
            (need_table, need_pool, skipped, _KEYS),
            num_warps=4,
        )
        keys, order = torch.sort(keys, stable=True)
        scratch = torch.empty((2 * chunks, width), dtype=work, device=grad.device)
        launch(
            kernels.sum_kernel,
            rows * shape.parts,
            (grad, keys, order, pool, table, scratch),
            (rows, pool_rows),
            (row_stride(grad), row_stride(pool), row_stride(table)),
            cut,
            num_warps=shape.warps,
        )
        if chunks > 1:
            launch(
                kernels.join_kernel,
                chunks * shape.parts,
                (keys, pool, table, scratch),
                (rows, pool_rows),
                (row_stride(pool), row_stride(table)),
                cut,
                num_warps=shape.warps,
            )
