"""The assembly calls that users make; they pick the op with or without a gradient and nothing else."""

from collections.abc import Callable

import torch

from mmgraph.ops import checks
from mmgraph.ops.errors import ArgumentError
from mmgraph.ops.registration import overload
from mmgraph.ops.row_map import RowMap

_Op = Callable[..., torch.Tensor]

_assemble: _Op = overload("assemble_embeddings")
_assemble_autograd: _Op = overload("assemble_embeddings_autograd")
_assemble_out = overload("assemble_embeddings_out")
_merge: _Op = overload("merge_embeddings")
_merge_autograd: _Op = overload("merge_embeddings_autograd")
_deepstack: _Op = overload("deepstack_add")
_deepstack_autograd: _Op = overload("deepstack_add_autograd")


def _map_tensor(row_map: RowMap | torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    if isinstance(row_map, torch.Tensor):
        return row_map
    if not isinstance(row_map, RowMap):
        raise ArgumentError(f"row_map must be a RowMap or an int32 tensor, got {type(row_map).__name__}.")
    if torch.compiler.is_compiling():
        raise ArgumentError("a RowMap can't be traced: call row_map.to(device) outside and pass the tensor.")
    if row_map.pool_rows > pool.shape[0]:
        raise ArgumentError(
            f"row_map was built for a pool of {row_map.pool_rows} rows, but the pool has {pool.shape[0]}."
        )
    return row_map.to(pool.device)


def assemble_embeddings(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor,
    row_map: RowMap | torch.Tensor,
    *,
    strict: bool = False,
) -> torch.Tensor:
    """Text embeddings with other rows in their places: row i is ``pool[row_map[i]]``, or the table's where that is -1.

    Covered rows never look at the table, so their ids may be anything; the ids of the others are clamped into the
    vocabulary. Differentiable in ``table`` and ``pool``. Traceable and capturable when ``row_map`` is a tensor.

    Args:
        input_ids: int32 or int64 ``[T]``.
        table: The text embedding's weight, floating point ``[V, H]``.
        pool: Rows to put in, floating point ``[R, H]``, cast to the table's dtype on the way. R may be 0.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        strict: Ids outside the vocabulary in rows that aren't covered are errors.

    Returns:
        A new tensor ``[T, H]`` in the table's dtype.

    Raises:
        ArgumentError: A shape, dtype or device doesn't fit.
        DataError: On CPU, a value of ``row_map`` (or, with ``strict``, an id) is out of range. On CUDA such rows come
            out as zeros (ids: clamped) and ``check_errors`` raises it.
    """
    checks.check_tensors("assemble_embeddings", input_ids=input_ids, table=table, pool=pool)
    checks.refuse_forward_mode("assemble_embeddings", table, pool)
    index = _map_tensor(row_map, pool)
    if checks.needs_gradient(table, pool):
        return _assemble_autograd(input_ids, table, pool, index, strict)
    return _assemble(input_ids, table, pool, index, strict)


def assemble_embeddings_out(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor,
    row_map: RowMap | torch.Tensor,
    *,
    out: torch.Tensor,
    strict: bool = False,
) -> None:
    """As ``assemble_embeddings``, into a buffer that the caller owns.

    Args:
        input_ids: int32 or int64 ``[T]``.
        table: Floating point ``[V, H]``.
        pool: Floating point ``[R, H]``.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        out: ``[T, H]`` in the table's dtype; its range in memory (from the first element to the last)
            overlaps no input's, and it isn't expanded.
        strict: As for ``assemble_embeddings``.

    Raises:
        ArgumentError: A shape, dtype, device or overlap doesn't fit.
        GradientError: An input or ``out`` needs a gradient, which this form doesn't have.
        DataError: As for ``assemble_embeddings``; on CPU ``out`` is then untouched.
    """
    checks.check_tensors("assemble_embeddings_out", input_ids=input_ids, table=table, pool=pool, out=out)
    checks.refuse_forward_mode("assemble_embeddings_out", table, pool, out)
    # Inside the op, tensors of torch.func's transforms no longer say that they need a gradient.
    remedy = "use assemble_embeddings, or call it under torch.no_grad()."
    checks.refuse_traced_transforms("assemble_embeddings_out", remedy)
    checks.refuse_gradients("assemble_embeddings_out", remedy, table, pool, out)
    _assemble_out(input_ids, table, pool, _map_tensor(row_map, pool), strict, out=out)


def merge_embeddings(
    embeds: torch.Tensor, mask: torch.Tensor, features: torch.Tensor, *, num_placeholders: int | None = None
) -> torch.Tensor:
    """Embeddings with the masked rows replaced by the feature rows in order, the count checked.

    Differentiable in ``embeds`` and ``features``.

    Args:
        embeds: Floating point ``[T, H]``.
        mask: bool ``[T]``, true at placeholders.
        features: Floating point ``[n, H]``, cast to the dtype of ``embeds``.
        num_placeholders: The number of true entries where the caller knows it on the host; a mismatch is then found
            before any launch. Without it a mismatch on CUDA is found by ``check_errors``.

    Returns:
        A new tensor ``[T, H]`` in the dtype of ``embeds``.

    Raises:
        ArgumentError: A shape, dtype or device doesn't fit.
        CountMismatchError: Placeholders and feature rows differ in number.
    """
    checks.check_tensors("merge_embeddings", embeds=embeds, mask=mask, features=features)
    checks.refuse_forward_mode("merge_embeddings", embeds, features)
    if checks.needs_gradient(embeds, features):
        return _merge_autograd(embeds, mask, features, num_placeholders)
    return _merge(embeds, mask, features, num_placeholders)


def deepstack_add(
    hidden: torch.Tensor, pool: torch.Tensor, row_map: RowMap | torch.Tensor, level: int
) -> torch.Tensor:
    """Hidden states plus one level's rows at their positions; equal to adding a dense buffer's slice.

    Differentiable in ``hidden`` and ``pool``.

    Args:
        hidden: Floating point ``[T, H]``.
        pool: Floating point ``[R, levels * H]``; each level's part is cast to the dtype of ``hidden``, then added.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        level: Which part of the pool's width, from 0.

    Returns:
        A new tensor ``[T, H]`` in the dtype of ``hidden``.

    Raises:
        ArgumentError: A shape, dtype, device or level doesn't fit.
        DataError: On CPU, a value of ``row_map`` is out of range. On CUDA nothing is added to such rows and
            ``check_errors`` raises it.
    """
    checks.check_tensors("deepstack_add", hidden=hidden, pool=pool)
    checks.refuse_forward_mode("deepstack_add", hidden, pool)
    index = _map_tensor(row_map, pool)
    if checks.needs_gradient(hidden, pool):
        return _deepstack_autograd(hidden, pool, index, level)
    return _deepstack(hidden, pool, index, level)
