"""The one place where arguments of the ops are checked: called by the fake kernels and by the real ones.

What shapes, dtypes and devices can show is checked on any tensor, fake or real. What only values can show is checked
where the values are on the host; kernels record it in the error flag otherwise.
"""

from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch

from mmgraph.ops.errors import ArgumentError, CountMismatchError, DataError, GradientError

Result = TypeVar("Result")

_LARGEST_INT = 2**63 - 1
UNUSED_RANGE = 2**31 - 1
_LARGEST_ROW = 2**31 - 2  # a row map's entries are of 32 bits, and the largest is padding
_ID_DTYPES = (torch.int64, torch.int32)
ATTENTION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_tensors(op: str, **arguments: Any) -> None:
    """Raise ArgumentError unless every argument is a tensor; the name and type of the first other one are given."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            remedy = (
                "make it with torch.as_tensor" if isinstance(value, (list, tuple, np.ndarray)) else "pass one"
            )
            raise ArgumentError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}; {remedy}.")


def refuse_forward_mode(op: str, *tensors: torch.Tensor) -> None:
    """Raise GradientError for a tensor with a forward-mode tangent, for which the ops would give zeros.

    While a graph is traced, tensors don't say whether they have one; inside a jvp every call is refused then.
    """
    if has_tangent(*tensors):
        raise GradientError(f"{op} has no forward-mode derivative: use reverse mode, or call it outside jvp.")


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent, or may have one: traced tensors inside a jvp don't say."""
    if torch.autograd.forward_ad._current_level < 0:
        return False
    return torch.compiler.is_compiling() or any(map(_has_tangent, tensors))


def _has_tangent(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_batchedtensor(tensor):  # has no rule for being unpacked
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def refuse_traced_transforms(op: str, remedy: str) -> None:
    """Raise GradientError for an op without a gradient inside torch.func's transforms while a graph is traced.

    Its tensors don't say there that they need a gradient, which would then be zero or that of something else.
    """
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise GradientError(
            f"{op} has no gradient and was called inside a transform of torch.func that is being compiled, where it "
            f"can't be seen whether one is needed: {remedy}"
        )


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether the op with a gradient must be called.

    While a graph is traced with gradients on, always: under torch.func's transforms the tensors that are traced
    don't say that they need one, and the op without a gradient would give zeros.
    """
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or any(tensor.requires_grad for tensor in tensors)


def refuse_gradients(op: str, remedy: str, *tensors: torch.Tensor) -> None:
    """Raise GradientError if gradient mode is on and one of the tensors needs a gradient."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise GradientError(
            f"{op} has no gradient but was given a tensor that requires one: {remedy} (What was traced or exported "
            "without gradients must run without: under torch.no_grad(). Under torch.vmap, loop, or detach.)"
        )


def gradient_free(name: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """The function behind an op without a gradient: it refuses tensors that need one instead of dropping it."""

    def run(*arguments: Any) -> Result:
        if torch.is_grad_enabled():
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            refuse_gradients(f"mmgraph::{name}", f"call mmgraph.ops.{name}.", *tensors)
        return function(*arguments)

    return run


def _check_matrix(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ArgumentError(f"{op}: {name} must be a floating-point matrix, got {_kind(tensor)}.")


def _check_same_device(op: str, first: str, device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ArgumentError(
                f"{op}: all tensors must be on one device; {first} is on {device} and {name} on {tensor.device}."
            )


def _check_row_map(op: str, row_map: torch.Tensor, rows: Any) -> None:
    if row_map.dim() != 1 or row_map.dtype != torch.int32:
        raise ArgumentError(f"{op}: row_map must be a one-dimensional int32 tensor, got {_kind(row_map)}.")
    if row_map.shape[0] != rows:
        raise ArgumentError(f"{op}: row_map must have one entry per row, {rows}, got {row_map.shape[0]}.")


def check_assemble(
    input_ids: torch.Tensor, table: torch.Tensor, pool: torch.Tensor, row_map: torch.Tensor
) -> None:
    """Check ids ``[T]``, table ``[V, H]``, pool ``[R, H]`` and row map ``[T]``.

    One condition, because it runs on every call; what is wrong is found out when something is.
    """
    ids, tables, pools, entries = input_ids.shape, table.shape, pool.shape, row_map.shape
    device = table.device
    if (
        len(ids) == len(entries) == 1
        and len(tables) == len(pools) == 2
        and ids[0] == entries[0]
        and tables[1] == pools[1]
        and input_ids.dtype in _ID_DTYPES
        and row_map.dtype == torch.int32
        and table.is_floating_point()
        and pool.is_floating_point()
        and device == input_ids.device == pool.device == row_map.device
    ):
        return
    _diagnose_assemble(input_ids, table, pool, row_map)


def check_texts(op: str, input_ids: torch.Tensor, table: torch.Tensor) -> None:
    """Check ids ``[T]`` and table ``[V, H]``."""
    if input_ids.dim() != 1 or input_ids.dtype not in _ID_DTYPES:
        raise ArgumentError(
            f"{op}: input_ids must be a one-dimensional int32 or int64 tensor, got {_kind(input_ids)}; "
            "flatten a batch first."
        )
    _check_matrix(op, "table", table)
    _check_same_device(op, "table", table.device, input_ids=input_ids)


def _diagnose_assemble(
    input_ids: torch.Tensor, table: torch.Tensor, pool: torch.Tensor, row_map: torch.Tensor
) -> None:
    op = "assemble_embeddings"
    if input_ids.dim() != 1 or input_ids.dtype not in _ID_DTYPES:
        raise ArgumentError(
            f"{op}: input_ids must be a one-dimensional int32 or int64 tensor, got {_kind(input_ids)}; "
            "flatten a batch first."
        )
    _check_matrix(op, "table", table)
    _check_matrix(op, "pool", pool)
    if pool.shape[1] != table.shape[1]:
        raise ArgumentError(
            f"{op}: pool rows must be as wide as table rows, {table.shape[1]}, got {pool.shape[1]}; "
            "project the features first."
        )
    _check_row_map(op, row_map, input_ids.shape[0])
    _check_same_device(op, "table", table.device, input_ids=input_ids, pool=pool, row_map=row_map)


def check_assemble_out(
    input_ids: torch.Tensor, table: torch.Tensor, pool: torch.Tensor, row_map: torch.Tensor, out: torch.Tensor
) -> None:
    """Check the inputs as ``check_assemble`` does, and ``out`` ``[T, H]`` in the table's dtype; refuse gradients."""
    check_assemble(input_ids, table, pool, row_map)
    op = "assemble_embeddings_out"
    check_out(op, input_ids, table, out)
    refuse_gradients(op, "use assemble_embeddings, or call it under torch.no_grad().", table, pool, out)


def check_out(op: str, input_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Check out ``[T, H]`` in the table's dtype."""
    if out.dim() != 2 or out.shape[0] != input_ids.shape[0] or out.shape[1] != table.shape[1]:
        raise ArgumentError(
            f"{op}: out must have shape [{input_ids.shape[0]}, {table.shape[1]}], got {list(out.shape)}; "
            "slice a larger buffer to the call's rows."
        )
    if out.dtype != table.dtype:
        raise ArgumentError(f"{op}: out must have the table's dtype, {table.dtype}, got {out.dtype}.")
    _check_same_device(op, "table", table.device, out=out)


def check_deepstack(
    op: str, hidden: torch.Tensor, pool: torch.Tensor, row_map: torch.Tensor, level: int
) -> None:
    """Check hidden ``[T, H]``, pool ``[R, levels * H]``, row map ``[T]`` and the level."""
    _check_matrix(op, "hidden", hidden)
    _check_matrix(op, "pool", pool)
    width, total = hidden.shape[1], pool.shape[1]
    if width == 0 or total % width:
        raise ArgumentError(f"{op}: pool width must be a multiple of hidden width {width}, got {total}.")
    if not 0 <= level < total // width:
        raise ArgumentError(f"{op}: level must be between 0 and {total // width - 1}, got {level}.")
    _check_row_map(op, row_map, hidden.shape[0])
    _check_same_device(op, "hidden", hidden.device, pool=pool, row_map=row_map)


def check_deepstack_in_place(
    hidden: torch.Tensor, pool: torch.Tensor, row_map: torch.Tensor, level: int
) -> None:
    """Check as ``check_deepstack`` does; refuse gradients."""
    check_deepstack("deepstack_add_", hidden, pool, row_map, level)
    refuse_gradients("deepstack_add_", "use deepstack_add, or call it under torch.no_grad().", hidden, pool)


def check_store(rows: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Check rows ``[n, H]``, places int32 ``[n]`` and out ``[R, H]``; refuse gradients."""
    op = "store_rows"
    _check_matrix(op, "rows", rows)
    _check_matrix(op, "out", out)
    if rows.shape[1] != out.shape[1]:
        raise ArgumentError(f"{op}: rows must be as wide as out, {out.shape[1]}, got {rows.shape[1]}.")
    if places.dim() != 1 or places.dtype != torch.int32 or places.shape[0] != rows.shape[0]:
        raise ArgumentError(
            f"{op}: places must be int32 with one entry for each of {rows.shape[0]} rows, got {_kind(places)}."
        )
    _check_same_device(op, "out", out.device, rows=rows, places=places)
    refuse_gradients(op, "detach what is stored, or call it under torch.no_grad().", rows, out)


def not_adjacent(op: str, name: str, tensor: torch.Tensor) -> ArgumentError:
    """The error of a buffer that a kernel writes by rows and whose columns aren't adjacent."""
    return ArgumentError(
        f"{op}: {name}'s columns must be adjacent in memory, got strides {list(tensor.stride())}; give it rows."
    )


def check_ranges(ranges: torch.Tensor, num_rows: Any) -> None:
    """Check ranges int32 ``[n, 3]`` and the number of rows."""
    if ranges.dim() != 2 or ranges.shape[1] != 3 or ranges.dtype != torch.int32:
        raise ArgumentError(
            f"expand_ranges: ranges must be int32 [n, 3] (first row, last row, first pool row), got {_kind(ranges)}."
        )
    if isinstance(num_rows, int) and not 0 <= num_rows <= _LARGEST_ROW:
        raise ArgumentError(f"expand_ranges: num_rows must be between 0 and {_LARGEST_ROW}, got {num_rows}.")


def check_merge(embeds: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> None:
    """Check embeds ``[T, H]``, mask bool ``[T]`` and features ``[n, H]``."""
    op = "merge_embeddings"
    _check_matrix(op, "embeds", embeds)
    _check_matrix(op, "features", features)
    if mask.dim() != 1 or mask.dtype != torch.bool:
        raise ArgumentError(f"{op}: mask must be a one-dimensional bool tensor, got {_kind(mask)}.")
    if mask.shape[0] != embeds.shape[0]:
        raise ArgumentError(f"{op}: mask must have one entry per row, {embeds.shape[0]}, got {mask.shape[0]}.")
    if features.shape[1] != embeds.shape[1]:
        raise ArgumentError(
            f"{op}: feature rows must be as wide as embeds rows, {embeds.shape[1]}, got {features.shape[1]}; "
            "the same number of elements in another shape is not the same rows."
        )
    _check_same_device(op, "embeds", embeds.device, mask=mask, features=features)


def check_count(placeholders: int, features: int) -> None:
    """Raise CountMismatchError unless there is one feature row per placeholder."""
    if placeholders != features:
        raise CountMismatchError(
            f"merge_embeddings: {placeholders} placeholders but {features} feature rows; "
            "give exactly one feature row per placeholder."
        )


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any
) -> None:
    """Check q ``[T, heads, d]``, k ``[T, kv_heads, d]``, v ``[T, kv_heads, dv]``, offsets and longest length.

    One condition, because it runs on every call; what is wrong is found out when something is.
    """
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    dtype, device = q.dtype, q.device
    if (
        len(q_shape) == len(k_shape) == len(v_shape) == 3
        and dtype == k.dtype == v.dtype
        and dtype in ATTENTION_DTYPES
        and q_shape[0] == k_shape[0] == v_shape[0]
        and q_shape[2] == k_shape[2] > 0
        and k_shape[1] == v_shape[1] > 0 < q_shape[1]
        and q_shape[1] % k_shape[1] == 0 < v_shape[2]
        and cu_seqlens.dtype == torch.int32
        and cu_seqlens.dim() == 1
        and cu_seqlens.shape[0] > 0
        and device == k.device == v.device == cu_seqlens.device
        and (not isinstance(max_seqlen, int) or max_seqlen >= 0)
    ):
        return
    _diagnose_attention(q, k, v, cu_seqlens, max_seqlen)


def _diagnose_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any
) -> None:
    op = "varlen_attention"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ArgumentError(
            f"{op}: q, k and v must have shape [tokens, heads, width], got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}; flatten a batch first."
        )
    dtype = q.dtype
    if dtype not in ATTENTION_DTYPES or k.dtype != dtype or v.dtype != dtype:
        raise ArgumentError(
            f"{op}: q, k and v must have one floating-point dtype (bfloat16, float16, float32 or float64), got "
            f"{dtype}, {k.dtype} and {v.dtype}."
        )
    tokens, heads, width = q.shape
    kv_tokens, kv_heads, kv_width = k.shape
    if kv_tokens != tokens or v.shape[0] != tokens or v.shape[1] != kv_heads or kv_width != width:
        raise ArgumentError(
            f"{op}: q, k and v must agree in tokens, k and v in heads, q and k in width; got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}."
        )
    if width == 0 or heads == 0 or kv_heads == 0 or v.shape[2] == 0:
        raise ArgumentError(
            f"{op}: heads and widths must be positive, got q {list(q.shape)} and v {list(v.shape)}."
        )
    if heads % kv_heads:
        raise ArgumentError(f"{op}: heads ({heads}) must be a multiple of kv_heads ({kv_heads}).")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        remedy = "flatten it" if cu_seqlens.dtype == torch.int32 else "convert it with .int()"
        raise ArgumentError(
            f"{op}: cu_seqlens must be a one-dimensional int32 tensor of batch + 1 offsets, got {_kind(cu_seqlens)}; "
            f"{remedy}."
        )
    if cu_seqlens.shape[0] == 0:
        raise ArgumentError(f"{op}: cu_seqlens must have batch + 1 entries, got none; no sequence is [0].")
    if isinstance(max_seqlen, int) and max_seqlen < 0:
        raise ArgumentError(f"{op}: max_seqlen must not be negative, got {max_seqlen}.")
    device = q.device
    if k.device != device or v.device != device or cu_seqlens.device != device:
        raise ArgumentError(
            f"{op}: q, k, v and cu_seqlens must be on one device, got {device}, {k.device}, {v.device} and "
            f"{cu_seqlens.device}."
        )


def check_max_seqlen_type(max_seqlen: Any) -> None:
    """Raise ArgumentError unless ``max_seqlen`` is a Python int (or a traced one)."""
    if isinstance(max_seqlen, torch.Tensor):
        raise ArgumentError(
            "varlen_attention: max_seqlen must be a Python int, got a tensor: reading it would synchronise with the "
            "device. Keep the lengths on the host and pass their maximum."
        )
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise ArgumentError(
            f"varlen_attention: max_seqlen must be a Python int, got {kind_of(max_seqlen)}; convert it with int(...)."
        )
    if isinstance(max_seqlen, int) and max_seqlen > _LARGEST_INT:
        raise ArgumentError("varlen_attention: max_seqlen must be below 2^63, got a larger one.")


def kind_of(value: Any) -> str:
    """A value's type; with its module for numpy's, of which one is named bool."""
    kind = type(value)
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__


def check_flag(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless a value is True or False (or a traced one)."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise ArgumentError(f"{op}: {name} must be True or False, got {kind_of(value)}.")


def check_integer(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless a value is an integer (or a traced one); True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        remedy = "; reading it would synchronise with the device" if isinstance(value, torch.Tensor) else ""
        raise ArgumentError(f"{op}: {name} must be a Python int, got {kind_of(value)}{remedy}.")


def check_scalars(scale: Any, causal: Any) -> None:
    """Raise ArgumentError unless ``scale`` is a number or None (or a traced one), and ``causal`` True or False."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int, torch.SymFloat, torch.SymInt, NoneType)):
        remedy = "; reading it would synchronise with the device" if isinstance(scale, torch.Tensor) else ""
        raise ArgumentError(
            f"varlen_attention: scale must be a Python number or None, got {kind_of(scale)}{remedy}."
        )
    if isinstance(scale, int) and abs(scale) > _LARGEST_INT:
        raise ArgumentError(
            "varlen_attention: scale must be a finite number, got an integer of more than 64 bits."
        )
    check_flag("varlen_attention", "causal", causal)


def check_offsets(cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> list[int]:
    """The offsets of a CPU tensor as a list, after checking their content.

    Raises:
        DataError: They don't start at 0, decrease, pass the tokens, or one length passes ``max_seqlen``.
    """
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise DataError(f"varlen_attention: cu_seqlens must start at 0, got {offsets[0]}.")
    longest = 0
    for index in range(1, len(offsets)):
        length = offsets[index] - offsets[index - 1]
        if length < 0:
            raise DataError(
                f"varlen_attention: cu_seqlens must not decrease, got {offsets[index - 1]} then {offsets[index]} "
                f"at entry {index}."
            )
        longest = max(longest, length)
    if offsets[-1] > tokens:
        raise DataError(f"varlen_attention: cu_seqlens ends at {offsets[-1]} but there are {tokens} tokens.")
    if longest > max_seqlen:
        raise DataError(
            f"varlen_attention: the longest sequence has {longest} tokens but max_seqlen is {max_seqlen}; "
            "pass at least the longest length."
        )
    return offsets
