"""The one place where arguments of the row-wise ops are checked: by the Python calls, the fakes and the real kernels.

Shapes, dtypes and devices show all that can be wrong, but for the indices of ``mix_rows``: those are read on a CPU, and
recorded in the error flag by the kernel.
"""

import math
from typing import Any

import torch

from mmgraph.ops.checks import kind_of
from mmgraph.ops.errors import ArgumentError, DataError

Tensor = torch.Tensor

NORMS = ("layer", "rms")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)
_NAMES_OF_DTYPES = "bfloat16, float16, float32 or float64"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_types(op: str, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Raise ArgumentError unless each required argument is a tensor, and each optional one a tensor or None."""
    for name, value in (*required.items(), *optional.items()):
        may_be_none = name in optional
        if isinstance(value, Tensor) or (may_be_none and value is None):
            continue
        raise ArgumentError(
            f"{op}: {name} must be a torch.Tensor{' or None' if may_be_none else ''}, got {kind_of(value)}; make it "
            "with torch.as_tensor, or pass the tensor that a module holds."
        )


def check_eps(op: str, eps: Any) -> None:
    """Raise ArgumentError unless ``eps`` is a number (or a traced one), zero or positive and finite."""
    if isinstance(eps, bool) or not isinstance(eps, (float, int, torch.SymFloat, torch.SymInt)):
        remedy = "reading it would synchronise with the device" if isinstance(eps, Tensor) else "pass a float"
        raise ArgumentError(f"{op}: eps must be a Python number, got {kind_of(eps)}; {remedy}.")
    if isinstance(eps, (float, int)) and not 0 <= eps < (math.inf if isinstance(eps, float) else 2**63):
        raise ArgumentError(
            f"{op}: eps must be zero or positive and finite, got {eps if isinstance(eps, float) else 'an integer'}; "
            "take the model's own, such as 1e-6."
        )


def check_choice(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentError unless a value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        came = repr(value) if isinstance(value, str) else kind_of(value)
        raise ArgumentError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {came}.")


def _check_rows(op: str, name: str, rows: Tensor) -> None:
    if rows.dim() != 2 or rows.dtype not in _DTYPES:
        remedy = "convert it" if rows.dim() == 2 else "flatten a batch first"
        raise ArgumentError(
            f"{op}: {name} must be a matrix [tokens, width] in {_NAMES_OF_DTYPES}, got {_kind(rows)}; {remedy}."
        )


def _check_device(op: str, first: str, device: torch.device, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ArgumentError(
                f"{op}: all tensors must be on one device; {first} is on {device} and {name} on {tensor.device}."
            )


def check_norm(
    op: str,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> None:
    """Check x and delta ``[T, W]``, weight and bias ``[W]``, all in one dtype, eps and the kind of norm."""
    check_choice(op, "kind", kind, NORMS)
    check_eps(op, eps)
    _check_rows(op, "x", x)
    if x.shape[1] == 0:
        raise ArgumentError(f"{op}: x must have columns to normalise, got {_kind(x)}.")
    if delta is not None and (delta.dtype != x.dtype or delta.shape != x.shape):
        raise ArgumentError(
            f"{op}: delta must have the shape and dtype of x, {_kind(x)}, got {_kind(delta)}; nothing is broadcast or "
            "converted."
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if vector.dim() != 1 or vector.shape[0] != x.shape[1] or vector.dtype != x.dtype:
            raise ArgumentError(
                f"{op}: {name} must be a vector [{x.shape[1]}] in the dtype of x, {x.dtype}, got {_kind(vector)}; "
                "convert the module and its input to one dtype."
            )
    if kind == "rms" and bias is not None:
        raise ArgumentError(f"{op}: a norm of kind 'rms' has no bias; pass None, or add it to the result.")
    _check_device(op, "x", x.device, delta=delta, weight=weight, bias=bias)


def check_activation(op: str, name: str, x: Tensor, kind: str, gated: bool) -> None:
    """Check x ``[T, W]``, of even width where it is gated, and the name of the activation."""
    check_choice(op, name, kind, ACTIVATIONS)
    _check_rows(op, "x", x)
    if gated and x.shape[1] % 2:
        raise ArgumentError(
            f"{op}: x must hold gate and up side by side, [tokens, 2 * width], got the odd width {x.shape[1]}."
        )


def check_mix(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None) -> None:
    """Check table ``[R, W]``, indices and weights ``[T, K]``, and base ``[T, W]``."""
    op = "mix_rows"
    if table.dim() != 2 or table.dtype not in _DTYPES:
        raise ArgumentError(
            f"{op}: table must be a matrix [rows, width] in {_NAMES_OF_DTYPES}, got {_kind(table)}."
        )
    if indices.dim() != 2 or indices.dtype not in _INDEX_DTYPES:
        raise ArgumentError(
            f"{op}: indices must be an int32 or int64 matrix [tokens, taps], got {_kind(indices)}; for one row a token "
            "add a dimension with indices[:, None]."
        )
    wide = table.dtype == torch.float64 and weights.dtype == torch.float64
    if weights.dtype != torch.float32 and not wide:
        raise ArgumentError(
            f"{op}: weights must be float32, in which the sum is formed (float64 only with a float64 table), got "
            f"{weights.dtype}; convert them with .float()."
        )
    if weights.shape != indices.shape:
        raise ArgumentError(
            f"{op}: weights must have the shape of indices, {list(indices.shape)}, one for each tap, got "
            f"{list(weights.shape)}."
        )
    if base is not None:
        _check_rows(op, "base", base)
        if base.shape[0] != indices.shape[0] or base.shape[1] != table.shape[1]:
            raise ArgumentError(
                f"{op}: base must have a row for each token and the table's width, [{indices.shape[0]}, "
                f"{table.shape[1]}], got {list(base.shape)}."
            )
    _check_device(op, "table", table.device, indices=indices, weights=weights, base=base)


def check_index_values(indices: Tensor, rows: int) -> None:
    """Raise DataError unless all indices are rows of the table; reads them, so for a CPU.

    Raises:
        DataError: An index is negative or not below ``rows``.
    """
    wrong = (indices < 0) | (indices >= rows)
    if bool(wrong.any()):
        token, tap = wrong.nonzero()[0].tolist()
        raise DataError(
            f"mix_rows: indices must be rows of the table, 0 to {rows - 1}, token {token} has "
            f"{int(indices[token, tap])} as tap {tap} ({int(wrong.any(1).sum())} such tokens). Correct it; for a tap "
            "that isn't used give an index of the table and the weight 0."
        )
