"""The row-wise calls that users make: they call the op, or PyTorch's own operations where a derivative is needed."""

from collections.abc import Callable
from typing import Literal

import torch

from mmgraph.ops import rowwise_checks as checks
from mmgraph.ops.checks import has_tangent, needs_gradient
from mmgraph.ops.registration import overload
from mmgraph.ops.rowwise import reference
from mmgraph.ops.rowwise.dispatch import Norm

Tensor = torch.Tensor
NormKind = Literal["layer", "rms"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]

_add_norm: Callable[..., tuple[Tensor, Tensor]] = overload("add_norm")
_norm: Callable[..., Tensor] = overload("norm")
_activation: Callable[..., Tensor] = overload("activation")
_gated_activation: Callable[..., Tensor] = overload("gated_activation")
_mix_rows: Callable[..., Tensor] = overload("mix_rows")


def _differentiated(*tensors: Tensor | None) -> bool:
    """Whether a derivative is asked for, which PyTorch's own operations have, in either mode and of any order."""
    given = [one for one in tensors if one is not None]
    return needs_gradient(*given) or has_tangent(*given)


def add_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: NormKind,
) -> tuple[Tensor, Tensor]:
    """A residual addition and the norm after it, in one launch: ``x + delta``, and its rows normalised.

    The norm is of the sum as its dtype rounds it. "layer" is ``torch.nn.functional.layer_norm``: float32 statistics
    and affine map, rounded once. "rms" is ``x / sqrt(mean(x^2) + eps)`` in float32, rounded, then times the weight,
    rounded, as the towers of Qwen2.5-VL do it. In float64 everything is in float64.

    Where an input needs a gradient (under torch.compile: with gradients on) the same is done by PyTorch's own
    operations, in several launches, and the derivatives are theirs. Traceable and capturable; nothing synchronises.

    Args:
        x: bfloat16, float16, float32 or float64 ``[tokens, width]``. Rows may lie apart; where the columns aren't
            adjacent it is copied first.
        delta: As ``x``, in its shape and dtype.
        weight: ``[width]`` in the dtype of ``x``, or None.
        bias: ``[width]`` in the dtype of ``x``, or None; only with the kind "layer".
        eps: Added to the variance, or to the mean square.
        kind: "layer" or "rms".

    Returns:
        The sum and the normalised sum, both new, contiguous, ``[tokens, width]`` in the dtype of ``x``.

    Raises:
        ArgumentError: A type, shape, dtype, device or the kind doesn't fit.
    """
    op = "add_norm"
    checks.check_types(op, {"x": x, "delta": delta}, {"weight": weight, "bias": bias})
    checks.check_eps(op, eps)
    checks.check_choice(op, "kind", kind, checks.NORMS)
    if not _differentiated(x, delta, weight, bias):
        return _add_norm(x, delta, weight, bias, eps, kind)
    checks.check_norm(op, x, delta, weight, bias, eps, kind)
    total, out = reference.added_and_normed(x, delta, Norm(weight, bias, eps, kind))
    return total, out.contiguous()


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, eps: float, kind: NormKind) -> Tensor:
    """The norm of ``add_norm`` without an addition.

    Args:
        x: As for ``add_norm``.
        weight: ``[width]`` in the dtype of ``x``, or None.
        bias: ``[width]`` in the dtype of ``x``, or None; only with the kind "layer".
        eps: Added to the variance, or to the mean square.
        kind: "layer" or "rms".

    Returns:
        A new contiguous tensor ``[tokens, width]`` in the dtype of ``x``.

    Raises:
        ArgumentError: A type, shape, dtype, device or the kind doesn't fit.
    """
    op = "norm"
    checks.check_types(op, {"x": x}, {"weight": weight, "bias": bias})
    checks.check_eps(op, eps)
    checks.check_choice(op, "kind", kind, checks.NORMS)
    if not _differentiated(x, weight, bias):
        return _norm(x, weight, bias, eps, kind)
    checks.check_norm(op, x, None, weight, bias, eps, kind)
    return reference.normed(x, Norm(weight, bias, eps, kind)).contiguous()


def activation(x: Tensor, *, kind: Activation) -> Tensor:
    """An activation, elementwise, in one launch.

    "silu", "gelu" (with erf), "gelu_tanh" and "relu" are PyTorch's, in float32 inside and rounded once; "quick_gelu" is
    ``x * sigmoid(1.702 * x)``, each of its operations rounded, as models write it. Where ``x`` needs a gradient it is
    done by PyTorch's own operations.

    Args:
        x: bfloat16, float16, float32 or float64 ``[tokens, width]``. Rows may lie apart.
        kind: The activation's name.

    Returns:
        A new contiguous tensor in the shape and dtype of ``x``.

    Raises:
        ArgumentError: The type, shape or dtype doesn't fit, or no activation has that name.
    """
    op = "activation"
    checks.check_types(op, {"x": x}, {})
    checks.check_choice(op, "kind", kind, checks.ACTIVATIONS)
    if not _differentiated(x):
        return _activation(x, kind)
    checks.check_activation(op, "kind", x, kind, gated=False)
    return reference.activated(x, kind).contiguous()


def gated_activation(x: Tensor, *, activation: Activation) -> Tensor:
    """A gated MLP's elementwise part, in one launch: the first half of the columns, activated, times the second half.

    The activated gate is rounded to the dtype before the product, as where a model computes the two one after the
    other. Where ``x`` needs a gradient it is done by PyTorch's own operations.

    Args:
        x: bfloat16, float16, float32 or float64 ``[tokens, 2 * width]``: gate, then up. Rows may lie apart.
        activation: The activation's name, as for ``activation``.

    Returns:
        A new contiguous tensor ``[tokens, width]`` in the dtype of ``x``.

    Raises:
        ArgumentError: The type, shape or dtype doesn't fit, or no activation has that name.
    """
    op = "gated_activation"
    checks.check_types(op, {"x": x}, {})
    checks.check_choice(op, "activation", activation, checks.ACTIVATIONS)
    if not _differentiated(x):
        return _gated_activation(x, activation)
    checks.check_activation(op, "activation", x, activation, gated=True)
    return reference.gated(x, activation).contiguous()


def mix_rows(table: Tensor, indices: Tensor, weights: Tensor, *, base: Tensor | None = None) -> Tensor:
    """Weighted sums of a table's rows, as interpolated positions are, in one launch: nothing is gathered before.

    Row t is the sum over taps k of ``table[indices[t, k]] * weights[t, k]``, in float32 (float64 for a float64 table)
    and in the order of the taps, rounded once. With ``base`` that is ``base + sum.to(base.dtype)``. Where a tensor
    needs a gradient it is done by PyTorch's own operations.

    Args:
        table: bfloat16, float16, float32 or float64 ``[rows, width]``.
        indices: int32 or int64 ``[tokens, taps]``. Each count of taps compiles a kernel of its own.
        weights: float32 ``[tokens, taps]``; float64 too, with a float64 table.
        base: Any of these dtypes, ``[tokens, width]``, or None.

    Returns:
        A new contiguous tensor ``[tokens, width]`` in the dtype of ``base``, or without one of ``table``.

    Raises:
        ArgumentError: A type, shape, dtype or device doesn't fit.
        DataError: On CPU, an index is outside the table. On CUDA such a tap adds nothing and ``check_errors`` raises
            it. In a compiled function with gradients on, and on CUDA where a gradient is needed, the row is NaN.
    """
    op = "mix_rows"
    checks.check_types(op, {"table": table, "indices": indices, "weights": weights}, {"base": base})
    if not _differentiated(table, weights, base):
        return _mix_rows(table, indices, weights, base)
    checks.check_mix(table, indices, weights, base)
    if _can_look(indices):
        checks.check_index_values(indices, table.shape[0])
    return reference.mixed(table, indices, weights, base).contiguous()


def _can_look(indices: Tensor) -> bool:
    """Whether the values are there and on the host; those of a trace, and of torch.vmap, aren't."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return indices.device.type == "cpu"
