"""Assembly straight from where rows lie: a pool, or a list of tensors that is never joined; one launch, no row map.

For eager calls with a ``RowMap``, in whose index a program finds its range, and with it the tensor of a list, which it
reads by its address. Addresses can't be traced, so this is no op of its own: with fake tensors,
transforms, traces or subclasses, and on a CPU, the parts are joined and the op runs.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from mmgraph.ops import checks
from mmgraph.ops.assembly.cuda import adjacent, row_stride, shape_of
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.errors import ArgumentError
from mmgraph.ops.launching import launch, on_device
from mmgraph.ops.registration import kernel_module, overload
from mmgraph.ops.row_map import INDEX_STRIDE, RowMap
from mmgraph.ops.slot_ring import on_loan

Tensor = torch.Tensor

_KINDS = 4  # dtypes that one launch can read: the kernel's
_WIDEST = 16  # bytes of a load
_BEYOND = 2**62
_ID_FAULT = int(Fault.ASSEMBLE_ID)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_is_neg = torch.Tensor.is_neg

_backward = overload("assemble_embeddings_backward")


class Parts(NamedTuple):
    """Matrices that are read as one, with what the host has to know of them.

    Attributes:
        tensors: The matrices ``[n_i, H]``.
        rows: The ``n_i``.
        kinds: Their dtypes, each once.
    """

    tensors: list[Tensor]
    rows: list[int]
    kinds: list[torch.dtype]


def can_gather(input_ids: Tensor, table: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether all is real memory on a GPU that addresses may be taken of."""
    return (
        table.is_cuda
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and type(input_ids) in _PLAIN
        and type(table) in _PLAIN
        and _PLAIN.issuperset(map(type, tensors))
        # A tensor that is lazily negated holds the other sign in memory; PyTorch's dispatcher resolves it for an op.
        and not (table.is_neg() or input_ids.is_neg() or any(map(_is_neg, tensors)))
    )


def joined(table: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one pool, in a dtype that holds the values of each; no copy where there is one alone."""
    if len(tensors) == 1:
        return tensors[0]
    if not tensors:
        return table.new_empty((0, table.shape[1]))
    check_dense("assemble_embeddings", tensors)
    if len({one.dtype for one in tensors}) > 1:
        dtype = _common_dtype([one.dtype for one in tensors])
        tensors = [one.to(dtype) for one in tensors]
    return torch.cat(list(tensors))


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """A dtype that holds the values of all; PyTorch promotes none of 8 bits, whose values float32 holds."""
    return reduce(torch.promote_types, [torch.float32 if one.itemsize == 1 else one for one in dtypes])


def checked_parts(op: str, table: Tensor, tensors: list[Any], row_map: RowMap) -> Parts:
    """Check that tensors are matrices as wide as the table on its device, with the map's rows.

    Attributes of hundreds of tensors take their time, so each is read once, in C.
    """
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        (one,) = tensors
        if (
            one.layout is torch.strided
            and not one.is_nested
            and one.dim() == 2
            and one.shape[1] == table.shape[1]
            and one.is_floating_point()
            and one.device == table.device
            and row_map.pool_rows <= one.shape[0]
        ):
            return Parts(tensors, [one.shape[0]], [one.dtype])
        check_dense(op, tensors)
    types = set(map(type, tensors))
    if not all(issubclass(kind, torch.Tensor) for kind in types):
        index = next(i for i, one in enumerate(tensors) if not isinstance(one, torch.Tensor))
        raise ArgumentError(f"{op}: pool[{index}] must be a torch.Tensor, got {type(tensors[index]).__name__}.")
    try:
        shapes = list(map(torch.Tensor.size, tensors))
    except RuntimeError:  # a nested tensor has no sizes
        check_dense(op, tensors)
        raise
    kinds = list(dict.fromkeys([one.dtype for one in tensors]))
    width, device = table.shape[1], table.get_device()
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == width]
    if (
        len(rows) != len(tensors)
        or not all(kind.is_floating_point for kind in kinds)
        or not {device}.issuperset(map(torch.Tensor.get_device, tensors))
    ):
        _diagnose(op, table, tensors)
    if row_map.pool_rows > sum(rows):
        raise ArgumentError(
            f"{op}: row_map was built for a pool of {row_map.pool_rows} rows, but the pool has {sum(rows)}."
        )
    return Parts(tensors, rows, kinds)


def check_dense(op: str, tensors: Sequence[Tensor]) -> None:
    """Check that no tensor is sparse or nested; where addresses are taken, asked only once that has failed."""
    for index, one in enumerate(tensors):
        if one.layout is not torch.strided or one.is_nested:
            kind = "a nested tensor" if one.is_nested else f"one of layout {one.layout}"
            raise ArgumentError(f"{op}: pool[{index}] must be a dense tensor, got {kind}; make it dense.")


def _diagnose(op: str, table: Tensor, tensors: list[Tensor]) -> None:
    for index, one in enumerate(tensors):
        good = one.dim() == 2 and one.shape[1] == table.shape[1] and one.is_floating_point()
        if not good or one.device != table.device:
            raise ArgumentError(
                f"{op}: pool[{index}] must be floating-point rows [n, {table.shape[1]}] on {table.device}, got "
                f"{one.dtype} {list(one.shape)} on {one.device}."
            )


def check_texts(op: str, input_ids: Tensor, table: Tensor, row_map: RowMap) -> None:
    """Check ids ``[T]``, table ``[V, H]`` and the map's rows."""
    checks.check_texts(op, input_ids, table)
    if row_map.num_rows != input_ids.shape[0]:
        raise ArgumentError(
            f"{op}: row_map must have one entry per row, {input_ids.shape[0]}, got {row_map.num_rows}."
        )


def gather(
    input_ids: Tensor,
    table: Tensor,
    parts: Parts,
    row_map: RowMap,
    strict: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Assemble on CUDA what has been checked.

    Args:
        input_ids: int32 or int64 ``[T]``.
        table: ``[V, H]``.
        parts: Matrices, of up to four dtypes; of more, they are joined.
        row_map: Of T rows, over the parts' rows one after another.
        strict: As for ``assemble_embeddings``.
        out: ``[T, H]`` with adjacent columns, or None for a new tensor.

    Returns:
        The output.
    """
    if out is None:
        out = table.new_empty((input_ids.shape[0], table.shape[1]))
    rows, width = out.shape
    flag = flag_for(out.device)
    if rows == 0 or width == 0:
        return out
    table, input_ids = adjacent(table), input_ids.contiguous()
    tensors = parts.tensors
    listed = len(tensors) > 1 and len(parts.kinds) <= _KINDS
    index = row_map.index()
    count = max(1, row_map.ranges.shape[0]) + 1  # and one behind them
    lists, alignment, kept = _lists(parts, index, count) if listed else (index, 0, [])
    shape = shape_of(width, out.element_size())
    common = (width, shape.block, shape.parts, INDEX_STRIDE)
    kernels = kernel_module("assembly.kernels")
    with on_device(out.device), on_loan(lists, out.device, "assemble_embeddings with a RowMap") as ranges:
        if not listed:
            pool = adjacent(joined(table, tensors) if tensors else table)
            launch(
                kernels.ranged_kernel,
                rows * shape.parts,
                (input_ids, table, pool, ranges, out, flag),
                (table.shape[0], count),
                (row_stride(table), row_stride(pool), row_stride(out)),
                (*common, strict, _ID_FAULT),
                num_warps=shape.warps,
            )
            return out
        samples = kept[:1] if len(parts.kinds) == 1 else []
        samples += [next(one for one in kept if one.dtype == kind) for kind in parts.kinds[len(samples) :]]
        samples += [samples[0]] * (_KINDS - len(samples))
        launch(
            kernels.gather_kernel,
            rows * shape.parts,
            (input_ids, table, *samples, ranges, out, flag),
            (table.shape[0], count, len(tensors) + 1),
            (row_stride(table), row_stride(out)),
            (*common, len(parts.kinds), alignment, strict, _ID_FAULT),
            num_warps=shape.warps,
        )
    return out


def _lists(
    parts: Parts, index: npt.NDArray[np.int32], ranges: int
) -> tuple[npt.NDArray[np.int64], int, list[Tensor]]:
    """What the kernel reads of tensors and ranges; what all addresses divide by; the tensors, copied if need be."""
    tensors, kinds = parts.tensors, parts.kinds
    try:
        alike = len(kinds) == 1 and all(map(torch.Tensor.is_contiguous, tensors))
        tensors = tensors if alike else [adjacent(one) for one in tensors]
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has no strides, and no address
        check_dense("assemble_embeddings", tensors)
        raise
    size = 4 * (len(tensors) + 1)
    made = np.empty(size + ranges + index.shape[0], dtype=np.int64)
    table = made[:size].reshape(-1, 4)
    table[-1] = (_BEYOND, 0, 0, 0)
    if alike:
        steps = tensors[0].shape[1] * tensors[0].element_size()
        table[:, 2] = steps
        table[:, 3] = 0
    else:
        table[:-1, 2] = [row_stride(one) * one.element_size() for one in tensors]
        table[:-1, 3] = [kinds.index(one.dtype) for one in tensors]
        steps = int(np.bitwise_or.reduce(table[:-1, 2]))
    firsts = list(itertools.accumulate(parts.rows[:-1], initial=0))
    table[:-1, 0] = firsts
    table[:-1, 1] = addresses
    # The owner of each range's first row, the last of the tensors that begin there: others of them have no rows.
    made[size : size + ranges] = np.searchsorted(table[:-1, 0], index[2 : 3 * ranges : 3], side="right") - 1
    made[size + ranges :] = index
    return made, _alignment(int(np.bitwise_or.reduce(table[:-1, 1])) | steps), tensors


def _alignment(bits: int) -> int:
    """The largest power of two, up to the widest load, that divides all numbers whose bits these are."""
    return min(_WIDEST, bits & -bits) if bits else _WIDEST


class Gather(torch.autograd.Function):
    """``gather`` with its gradient: to the table and to each part."""

    @staticmethod
    def forward(
        ctx: Any,
        input_ids: Tensor,
        table: Tensor,
        row_map: RowMap,
        parts: Parts,
        strict: bool,
        *tensors: Tensor,
    ) -> Tensor:
        """Assemble, and keep the ids and what the parts were."""
        ctx.save_for_backward(input_ids)
        ctx.row_map, ctx.rows = row_map, parts.rows
        ctx.vocab, ctx.table_dtype = table.shape[0], table.dtype
        ctx.dtypes = [one.dtype for one in tensors]
        return gather(input_ids, table, Parts(list(tensors), parts.rows, parts.kinds), row_map, strict)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """One gradient per input; the parts' are views of one buffer where they share a dtype."""
        (input_ids,) = ctx.saved_tensors
        need_table, needs = ctx.needs_input_grad[1], ctx.needs_input_grad[5:]
        dtype = _common_dtype(dict.fromkeys(ctx.dtypes)) if ctx.dtypes else ctx.table_dtype
        grad_table, grad_pool = _backward(
            grad,
            input_ids,
            ctx.row_map.to(grad.device),
            ctx.vocab,
            sum(ctx.rows),
            ctx.table_dtype,
            dtype,
            need_table,
            any(needs),
        )
        pieces = grad_pool.split(ctx.rows) if any(needs) else [grad_pool] * len(needs)
        grads = [
            piece.to(one) if need else None for piece, need, one in zip(pieces, needs, ctx.dtypes, strict=True)
        ]
        return None, grad_table if need_table else None, None, None, None, *grads
