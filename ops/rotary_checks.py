"""The one place where arguments of the rotary ops are checked: by the Python calls, the fake kernels and the real ones.

Everything that can be wrong shows in shapes, dtypes, devices and strides, so nothing waits for the device.
"""

import math
from typing import Any

import torch

from mmgraph.ops.checks import check_flag, kind_of
from mmgraph.ops.errors import ArgumentError, GradientError
from mmgraph.ops.overlap import check_no_overlap

Tensor = torch.Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_types(op: str, qkv: Any, **optional: Any) -> None:
    """Raise ArgumentError unless ``qkv`` is a tensor and every other argument a tensor or None."""
    if not isinstance(qkv, Tensor):
        raise ArgumentError(f"{op}: qkv must be a torch.Tensor, got {type(qkv).__name__}; pass the projection.")
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            raise ArgumentError(
                f"{op}: {name} must be a torch.Tensor or None, got {type(value).__name__}; "
                "make it with torch.as_tensor."
            )


def check_counts(op: str, **counts: Any) -> None:
    """Raise ArgumentError unless every count is a Python int (or a traced one)."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise ArgumentError(
                f"{op}: {name} must be a Python int, got {kind_of(value)}; convert it with int(...)."
            )


def check_options(op: str, eps: Any, **flags: Any) -> None:
    """Raise ArgumentError unless ``eps`` is a number (or a traced one) and every flag True or False."""
    if type(eps) is not float:
        if isinstance(eps, bool) or not isinstance(eps, (float, int, torch.SymFloat, torch.SymInt)):
            remedy = (
                "reading it would synchronise with the device" if isinstance(eps, Tensor) else "pass a float"
            )
            raise ArgumentError(f"{op}: eps must be a Python number, got {kind_of(eps)}; {remedy}.")
        if isinstance(eps, int) and not 0 <= eps < 2**63:
            raise ArgumentError(f"{op}: eps must be zero or positive and finite, got an integer out of range.")
    for name, value in flags.items():
        if value is not True and value is not False:
            check_flag(op, name, value)


def check_work(op: str, *work: Any) -> None:
    """Raise ArgumentError where there is nothing to do: every one of ``work`` is None or false."""
    if all(one is None or one is False for one in work):
        raise ArgumentError(
            f"{op}: there is nothing to do without tables and without norms; pass cos and sin, pass q_norm or k_norm, "
            "split qkv with qkv.split(...), or ask packed_qkv_rope for a copied split with copy_v=True."
        )


def check_tables_need_no_gradient(op: str, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise GradientError if gradient mode is on and a table needs a gradient, which would be dropped."""
    if not torch.is_grad_enabled():
        return
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and table.requires_grad:
            raise table_gradient(op, name)


def table_gradient(op: str, name: str) -> GradientError:
    """The error for a table that requires a gradient."""
    return GradientError(
        f"{op}: tables have no gradient but {name} requires one: pass {name}.detach(), or rotate with PyTorch's own "
        "operations where the tables are learned."
    )


def real_tables(
    op: str, cos: Tensor | None, sin: Tensor | None, head_dim: int, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The tables as the ops take them: a complex one becomes views of its real and imaginary parts.

    Raises:
        ArgumentError: A complex table with ``sin``, without ``interleaved`` or of another width.
    """
    if sin is not None and sin.is_complex():
        raise ArgumentError(f"{op}: a complex table is passed as cos, got {_kind(sin)} as sin; leave sin None.")
    if cos is None or not cos.is_complex():
        return cos, sin
    if sin is not None:
        raise ArgumentError(
            f"{op}: a complex table holds cosine and sine, so sin must be None, got {_kind(sin)}; "
            "or pass the table's parts, table.real and table.imag."
        )
    if not interleaved:
        raise ArgumentError(
            f"{op}: a complex table rotates adjacent pairs: pass interleaved=True, or, where halves are meant, "
            "table.real and table.imag as cos and sin."
        )
    if cos.dim() != 2 or cos.shape[1] * 2 != head_dim:
        raise ArgumentError(
            f"{op}: a complex table must have shape [tokens, {head_dim // 2}], one entry per pair, got {_kind(cos)}."
        )
    real, imaginary = torch.view_as_real(cos.resolve_conj()).unbind(-1)
    return real, imaginary


def check_rope(
    op: str,
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: bool,
    eps: float,
) -> None:
    """Check qkv ``[T, (heads + 2 * kv_heads) * head_dim]``, both tables, the norms' weights and eps."""
    if head_dim <= 0 or head_dim % 2:
        raise ArgumentError(
            f"{op}: head_dim must be positive and even, since pairs are rotated; got {head_dim}."
        )
    if num_heads <= 0 or num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ArgumentError(
            f"{op}: num_heads must be a positive multiple of num_kv_heads, got {num_heads} and {num_kv_heads}."
        )
    if qkv.dim() != 2 or qkv.dtype not in _DTYPES:
        raise ArgumentError(
            f"{op}: qkv must be a matrix [tokens, width] in bfloat16, float16, float32 or float64, got {_kind(qkv)}; "
            f"{'convert it' if qkv.dim() == 2 else 'flatten a batch first'}."
        )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[1] != width:
        raise ArgumentError(
            f"{op}: qkv must be (num_heads + 2 * num_kv_heads) * head_dim = ({num_heads} + 2 * {num_kv_heads}) * "
            f"{head_dim} = {width} wide, got {qkv.shape[1]}; the order is q heads, k heads, v heads."
        )
    if (cos is None) != (sin is None):
        given, missing = ("cos", "sin") if sin is None else ("sin", "cos")
        raise ArgumentError(
            f"{op}: {given} was given without {missing}; pass both, or neither for no rotation."
        )
    if cos is not None and sin is not None:
        _check_tables(op, qkv, cos, sin, head_dim)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _check_norm(op, qkv, name, weight, head_dim)
    if not 0 <= eps < math.inf:
        raise ArgumentError(f"{op}: eps must be zero or positive and finite, got {eps}.")


def _check_tables(op: str, qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    tokens, half = qkv.shape[0], head_dim // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or not table.is_floating_point():
            raise ArgumentError(
                f"{op}: {name} must be a floating-point matrix [tokens, {half}] or [tokens, {head_dim}], got "
                f"{_kind(table)}; drop dimensions of one, and gather the rows of the tokens' positions first."
            )
        if table.device != qkv.device:
            raise ArgumentError(
                f"{op}: all tensors must be on one device; qkv is on {qkv.device} and {name} on {table.device}."
            )
    if cos.shape[0] != tokens or sin.shape[0] != tokens:
        raise ArgumentError(
            f"{op}: cos and sin must have one row per token, {tokens}, got {cos.shape[0]} and {sin.shape[0]}."
        )
    if cos.shape[1] != sin.shape[1] or (cos.shape[1] != half and cos.shape[1] != head_dim):
        raise ArgumentError(
            f"{op}: cos and sin must both be half of head_dim, {half}, or head_dim, {head_dim}, wide, got "
            f"{cos.shape[1]} and {sin.shape[1]}."
        )


def _check_norm(op: str, qkv: Tensor, name: str, weight: Tensor, head_dim: int) -> None:
    if weight.dim() != 1 or weight.shape[0] != head_dim or not weight.is_floating_point():
        raise ArgumentError(
            f"{op}: {name} must be a floating-point vector [{head_dim}], shared by all heads, got {_kind(weight)}."
        )
    if weight.device != qkv.device:
        raise ArgumentError(
            f"{op}: all tensors must be on one device; qkv is on {qkv.device} and {name} on {weight.device}."
        )


def check_rope_in_place(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *rest: Any,
) -> None:
    """Check what ``check_rope`` does, that columns are adjacent and that nothing needs a gradient."""
    op = "packed_qkv_rope_"
    check_rope(op, qkv, cos, sin, q_norm, k_norm, *rest)
    check_work(op, cos, q_norm, k_norm)
    if qkv.stride(1) != 1:
        raise ArgumentError(
            f"{op}: columns of qkv must be adjacent in memory, got strides {list(qkv.stride())}; use packed_qkv_rope, "
            "or make the projection contiguous."
        )
    check_in_place_needs_no_gradient(qkv, cos, sin, q_norm, k_norm)


def check_in_place_needs_no_gradient(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None
) -> None:
    """Raise GradientError if gradient mode is on and an input needs a gradient.

    Asked in the Python call too: inside the op, tensors of torch.func's transforms no longer say so.
    """
    op = "packed_qkv_rope_"
    check_tables_need_no_gradient(op, cos, sin)
    if not torch.is_grad_enabled():
        return
    for name, tensor in (("qkv", qkv), ("q_norm", q_norm), ("k_norm", k_norm)):
        if tensor is not None and tensor.requires_grad:
            raise GradientError(
                f"{op} has no gradient but {name} requires one: use packed_qkv_rope, or call it under torch.no_grad()."
            )


def check_memory(qkv: Tensor, **others: Tensor | None) -> None:
    """Raise ArgumentError if ``qkv``, to be overwritten, covers one place twice, or memory of another tensor.

    Only real tensors can show it.
    """
    check_no_overlap(
        "packed_qkv_rope_", "qkv", qkv, **{name: one for name, one in others.items() if one is not None}
    )
