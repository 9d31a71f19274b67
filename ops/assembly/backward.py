"""Gradients of the assembly ops, as ops of their own: plain PyTorch, which is readable and serves the CPU.

Each is a sum of output-gradient rows per table or pool row. Rows that take no part go to an index one past the end,
which the summation skips.
"""

from typing import Any

import torch

Tensor = torch.Tensor


def _sum_rows(grad: Tensor, index: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """``out[r]`` = sum of ``grad[i]`` over ``index[i] == r``; entries equal to ``rows`` are skipped."""
    work = torch.promote_types(grad.dtype, dtype)
    if rows == 0 or grad.shape[0] == 0 or grad.shape[1] == 0:
        return grad.new_zeros((rows, grad.shape[1]), dtype=dtype)
    summed: Tensor = torch.ops.aten.embedding_dense_backward(
        grad.to(work).contiguous(), index, rows, rows, False
    )
    return summed.to(dtype)


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
    sources = row_map.long()
    if need_table:
        ids = torch.where(sources == -1, input_ids.long().clamp(0, max(vocab - 1, 0)), vocab)
        grad_table = _sum_rows(grad, ids, vocab, table_dtype)
    else:
        grad_table = grad.new_empty((0, width), dtype=table_dtype)
    if need_pool:
        grad_pool = _sum_rows(grad, _inside(sources, pool_rows), pool_rows, pool_dtype)
    else:
        grad_pool = grad.new_empty((0, width), dtype=pool_dtype)
    return grad_table, grad_pool


def _inside(sources: Tensor, rows: int) -> Tensor:
    return torch.where((sources >= 0) & (sources < rows), sources, rows)


def merge_backward(
    grad: Tensor, mask: Tensor, num_features: int, features_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of embeds ``[T, H]``, zero in masked rows, and of features ``[n, H]``."""
    grad_embeds = torch.where(mask[:, None], 0, grad).contiguous()
    position = torch.cumsum(mask, 0, dtype=torch.int64) - 1
    sources = _inside(torch.where(mask, position, -1), num_features)
    return grad_embeds, _sum_rows(grad, sources, num_features, features_dtype)


def deepstack_backward(
    grad: Tensor, row_map: Tensor, level: int, pool_rows: int, pool_width: int, pool_dtype: torch.dtype
) -> Tensor:
    """Gradient of the pool ``[pool_rows, levels * H]``: zero outside the level's slice."""
    width = grad.shape[1]
    out = grad.new_zeros((pool_rows, pool_width), dtype=pool_dtype)
    sources = _inside(row_map.long(), pool_rows)
    out[:, level * width : (level + 1) * width] = _sum_rows(grad, sources, pool_rows, pool_dtype)
    return out


def setup_assemble(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep ids and map, and what table and pool were."""
    input_ids, table, pool, row_map, _ = inputs
    ctx.save_for_backward(input_ids, row_map)
    ctx.vocab, ctx.pool_rows = table.shape[0], pool.shape[0]
    ctx.table_dtype, ctx.pool_dtype = table.dtype, pool.dtype


def differentiate_assemble(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """One gradient per input of ``assemble_embeddings_autograd``."""
    input_ids, row_map = ctx.saved_tensors
    need_table, need_pool = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    grad_table, grad_pool = torch.ops.mmgraph.assemble_embeddings_backward(
        grad,
        input_ids,
        row_map,
        ctx.vocab,
        ctx.pool_rows,
        ctx.table_dtype,
        ctx.pool_dtype,
        need_table,
        need_pool,
    )
    return None, grad_table if need_table else None, grad_pool if need_pool else None, None, None


def setup_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the mask, and what the features were."""
    _, mask, features, _ = inputs
    ctx.save_for_backward(mask)
    ctx.num_features, ctx.features_dtype = features.shape[0], features.dtype


def differentiate_merge(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """One gradient per input of ``merge_embeddings_autograd``."""
    (mask,) = ctx.saved_tensors
    grad_embeds, grad_features = torch.ops.mmgraph.merge_embeddings_backward(
        grad, mask, ctx.num_features, ctx.features_dtype
    )
    return grad_embeds, None, grad_features, None


def setup_deepstack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the map, and what the pool was."""
    _, pool, row_map, level = inputs
    ctx.save_for_backward(row_map)
    ctx.level = level
    ctx.pool_rows, ctx.pool_width, ctx.pool_dtype = pool.shape[0], pool.shape[1], pool.dtype


def differentiate_deepstack(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """One gradient per input of ``deepstack_add_autograd``."""
    (row_map,) = ctx.saved_tensors
    grad_pool = None
    if ctx.needs_input_grad[1]:
        grad_pool = torch.ops.mmgraph.deepstack_add_backward(
            grad, row_map, ctx.level, ctx.pool_rows, ctx.pool_width, ctx.pool_dtype
        )
    return grad, grad_pool, None, None
