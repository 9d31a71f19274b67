"""The assembly calls that users make; they pick the op with or without a gradient and nothing else."""

from collections.abc import Callable, Sequence
from typing import cast

import torch

from mmgraph.ops import checks
from mmgraph.ops.assembly import cuda
from mmgraph.ops.assembly.gather import (
    Gather,
    can_gather,
    check_texts,
    checked_parts,
    gather,
    joined,
)
from mmgraph.ops.errors import ArgumentError
from mmgraph.ops.overlap import check_no_overlap
from mmgraph.ops.registration import mark_written, overload
from mmgraph.ops.row_map import RowMap

_Op = Callable[..., torch.Tensor]

_assemble: _Op = overload("assemble_embeddings")
_assemble_autograd: _Op = overload("assemble_embeddings_autograd")
_assemble_out = overload("assemble_embeddings_out")
_merge: _Op = overload("merge_embeddings")
_merge_autograd: _Op = overload("merge_embeddings_autograd")
_deepstack: _Op = overload("deepstack_add")
_deepstack_autograd: _Op = overload("deepstack_add_autograd")
_deepstack_in_place = overload("deepstack_add_")
_store = overload("store_rows")
_expand: _Op = overload("expand_ranges")


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


def _parts_of(op: str, pool: torch.Tensor | Sequence[torch.Tensor], row_map: object) -> list[torch.Tensor]:
    """The pool as a list, for a call with a RowMap."""
    if isinstance(pool, torch.Tensor) or not isinstance(pool, (list, tuple)):
        checks.check_tensors(op, pool=pool)
        return [cast(torch.Tensor, pool)]
    if not isinstance(row_map, RowMap):
        raise ArgumentError(
            f"{op}: a list of tensors needs a RowMap, whose ranges the host knows; with a tensor as row_map give the "
            "pool as one tensor."
        )
    if torch.compiler.is_compiling():
        raise ArgumentError(
            f"{op}: a list of tensors can't be traced, since each new length would compile anew: give the pool as one "
            "tensor, such as an EncoderPool's, and the row map as row_map.to(device)."
        )
    return list(pool)


def assemble_embeddings(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor | Sequence[torch.Tensor],
    row_map: RowMap | torch.Tensor,
    *,
    strict: bool = False,
) -> torch.Tensor:
    """Text embeddings with other rows in their places: row i is ``pool[row_map[i]]``, or the table's where that is -1.

    Covered rows never look at the table, so their ids may be anything; the ids of the others are clamped into the
    vocabulary. Differentiable in ``table`` and ``pool``. Traceable and capturable when ``row_map`` is a tensor. With a
    ``RowMap`` the pool may be a list of tensors, taken as one after another and read where they lie: on CUDA still one
    launch, and no concatenation.

    Args:
        input_ids: int32 or int64 ``[T]``.
        table: The text embedding's weight, floating point ``[V, H]``.
        pool: Rows to put in, floating point ``[R, H]``, cast to the table's dtype on the way. R may be 0. Or a list of
            such matrices, dense and of any dtypes; R is then the sum of their rows.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        strict: Ids outside the vocabulary in rows that aren't covered are errors.

    Returns:
        A new tensor ``[T, H]`` in the table's dtype.

    Raises:
        ArgumentError: A shape, dtype or device doesn't fit.
        DataError: On CPU, a value of ``row_map`` (or, with ``strict``, an id) is out of range. On CUDA such rows come
            out as zeros (ids: clamped) and ``check_errors`` raises it.
        DuringCaptureError: A ``RowMap`` while a graph is being captured.
    """
    if strict is not False:
        checks.check_flag("assemble_embeddings", "strict", strict)
    if isinstance(row_map, RowMap) or not isinstance(pool, torch.Tensor):
        parts = _parts_of("assemble_embeddings", pool, row_map)
        checks.check_tensors("assemble_embeddings", input_ids=input_ids, table=table)
        if isinstance(row_map, RowMap) and can_gather(input_ids, table, parts):
            check_texts("assemble_embeddings", input_ids, table, row_map)
            checked = checked_parts("assemble_embeddings", table, parts, row_map)
            checks.refuse_forward_mode("assemble_embeddings", table, *parts)
            if checks.needs_gradient(table, *parts):
                made: torch.Tensor = Gather.apply(input_ids, table, row_map, checked, strict, *parts)
                return made
            return gather(input_ids, table, checked, row_map, strict)
        pool = _joined("assemble_embeddings", input_ids, table, pool, parts, row_map)
    checks.check_tensors("assemble_embeddings", input_ids=input_ids, table=table, pool=pool)
    checks.refuse_forward_mode("assemble_embeddings", table, pool)
    index = _map_tensor(row_map, pool)
    if checks.needs_gradient(table, pool):
        return _assemble_autograd(input_ids, table, pool, index, strict)
    if can_gather(input_ids, table, (pool, index)):
        return cuda.assemble(
            input_ids, table, pool, index, strict
        )  # past the dispatcher, which is a third of the host's time
    return _assemble(input_ids, table, pool, index, strict)


def _joined(
    op: str,
    input_ids: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor | Sequence[torch.Tensor],
    parts: list[torch.Tensor],
    row_map: RowMap | torch.Tensor,
) -> torch.Tensor:
    """The pool as one tensor."""
    if isinstance(pool, torch.Tensor):
        return pool
    if isinstance(row_map, RowMap):
        check_texts(op, input_ids, table, row_map)
        checked_parts(op, table, parts, row_map)
    return joined(table, parts)


def assemble_embeddings_out(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor | Sequence[torch.Tensor],
    row_map: RowMap | torch.Tensor,
    *,
    out: torch.Tensor,
    strict: bool = False,
) -> None:
    """As ``assemble_embeddings``, into a buffer that the caller owns.

    Args:
        input_ids: int32 or int64 ``[T]``.
        table: Floating point ``[V, H]``.
        pool: Floating point ``[R, H]``, or with a ``RowMap`` a list of such matrices.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        out: ``[T, H]`` in the table's dtype; its range in memory (from the first element to the last)
            overlaps no input's, and it isn't expanded.
        strict: As for ``assemble_embeddings``.

    Raises:
        ArgumentError: A shape, dtype, device or overlap doesn't fit.
        GradientError: An input or ``out`` needs a gradient, which this form doesn't have.
        DataError: As for ``assemble_embeddings``; on CPU ``out`` is then untouched.
        DuringCaptureError: A ``RowMap`` while a graph is being captured.
    """
    op = "assemble_embeddings_out"
    if strict is not False:
        checks.check_flag(op, "strict", strict)
    parts = _parts_of(op, pool, row_map)
    checks.check_tensors(op, input_ids=input_ids, table=table, out=out)
    gathering = isinstance(row_map, RowMap) and can_gather(input_ids, table, [*parts, out])
    if not isinstance(pool, torch.Tensor) and not gathering:
        pool = _joined(op, input_ids, table, pool, parts, row_map)
        parts = [pool]
    checks.check_tensors(op, pool=parts[0] if parts else table)
    checks.refuse_forward_mode(op, table, *parts, out)
    # Inside the op, tensors of torch.func's transforms no longer say that they need a gradient.
    remedy = "use assemble_embeddings, or call it under torch.no_grad()."
    checks.refuse_traced_transforms(op, remedy)
    checks.refuse_gradients(op, remedy, table, *parts, out)
    if isinstance(row_map, RowMap) and gathering:
        check_texts(op, input_ids, table, row_map)
        checked = checked_parts(op, table, parts, row_map)
        checks.check_out(op, input_ids, table, out)
        check_no_overlap(op, "out", out, table=table, input_ids=input_ids)
        for part in parts:
            check_no_overlap(op, "out", out, pool=part)
        if out.stride(1) == 1:
            gather(input_ids, table, checked, row_map, strict, out)
            mark_written(out)
        else:
            out.copy_(gather(input_ids, table, checked, row_map, strict))
        return
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ArgumentError(f"{op}: out must not be lazily negated (Tensor.is_neg); give it memory of its own.")
    _assemble_out(input_ids, table, parts[0], _map_tensor(row_map, parts[0]), strict, out=out)


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
    if type(level) is not int:
        checks.check_integer("deepstack_add", "level", level)
    checks.refuse_forward_mode("deepstack_add", hidden, pool)
    index = _map_tensor(row_map, pool)
    if checks.needs_gradient(hidden, pool):
        return _deepstack_autograd(hidden, pool, index, level)
    return _deepstack(hidden, pool, index, level)


def deepstack_add_(
    hidden: torch.Tensor, pool: torch.Tensor, row_map: RowMap | torch.Tensor, level: int
) -> torch.Tensor:
    """As ``deepstack_add``, in place: only the rows that the map covers are read and written.

    Args:
        hidden: Floating point ``[T, H]``, changed; it isn't expanded and overlaps no other argument in memory.
        pool: Floating point ``[R, levels * H]``.
        row_map: A ``RowMap``, or int32 ``[T]`` on the same device.
        level: Which part of the pool's width, from 0.

    Returns:
        ``hidden``.

    Raises:
        ArgumentError: A shape, dtype, device, overlap or level doesn't fit.
        GradientError: An argument needs a gradient, which this form doesn't have.
        DataError: As for ``deepstack_add``; on CPU ``hidden`` is then untouched.
    """
    op = "deepstack_add_"
    checks.check_tensors(op, hidden=hidden, pool=pool)
    if type(level) is not int:
        checks.check_integer(op, "level", level)
    checks.refuse_forward_mode(op, hidden, pool)
    remedy = "use deepstack_add, or call it under torch.no_grad()."
    checks.refuse_traced_transforms(op, remedy)
    checks.refuse_gradients(op, remedy, hidden, pool)
    _deepstack_in_place(hidden, pool, _map_tensor(row_map, pool), level)
    return hidden


def store_rows(rows: torch.Tensor, places: torch.Tensor, *, out: torch.Tensor) -> None:
    """Put rows at their places in a buffer, such as a pool: ``out[places[i]] = rows[i]``, cast on the way; one launch.

    Args:
        rows: Floating point ``[n, H]``.
        places: int32 ``[n]`` on the same device, each -1 for a row that isn't stored or a row of ``out``; a place that
            comes twice holds either row.
        out: Floating point ``[R, H]`` with adjacent columns, in memory of its own.

    Raises:
        ArgumentError: A shape, dtype, device or overlap doesn't fit.
        GradientError: An argument needs a gradient, which this form doesn't have.
        DataError: On CPU, a place is out of range, and ``out`` is untouched. On CUDA such rows aren't stored and
            ``check_errors`` raises it.
    """
    op = "store_rows"
    checks.check_tensors(op, rows=rows, places=places, out=out)
    checks.refuse_forward_mode(op, rows, out)
    remedy = "detach what is stored, or call it under torch.no_grad()."
    checks.refuse_traced_transforms(op, remedy)
    checks.refuse_gradients(op, remedy, rows, out)
    _store(rows, places, out=out)


def expand_ranges(ranges: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A row map from ranges on the device: for a captured prefill, whose graph reads a small buffer of ranges.

    Args:
        ranges: int32 ``[n, 3]``: first row, last row (inclusive) and first pool row of each; ascending and disjoint.
            Unused ones lie behind the others and begin at 2^31 - 1, as ``RowMap.padded_ranges`` gives them. The pool's
            size isn't known here: pool rows are between 0 and 2^31 - 1.
        num_rows: Rows of the map.

    Returns:
        int32 ``[num_rows]``: a pool row, or -1.

    Raises:
        ArgumentError: A shape or dtype doesn't fit, or ``num_rows`` is no integer.
        DataError: On CPU, ranges that don't ascend, overlap, end outside the rows, come after an unused one, or take
            pool rows outside 32 bits. On CUDA ``check_errors`` raises it; rows that no range claims wrongly are right.
    """
    checks.check_tensors("expand_ranges", ranges=ranges)
    if type(num_rows) is not int:
        checks.check_integer("expand_ranges", "num_rows", num_rows)
    return _expand(ranges, num_rows)
