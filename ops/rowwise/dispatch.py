"""The row-wise ops' implementations: check, allocate, and let a backend fill.

What is here is the same on every device. A backend is three functions that fill tensors: ``reference`` in plain
PyTorch, ``cuda`` with one launch each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mmgraph.ops import rowwise_checks as checks

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """How a row is normalised.

    Attributes:
        weight: ``[width]`` in the rows' dtype, or None.
        bias: As ``weight``; None with the kind "rms".
        eps: Added to the variance, or to the mean square.
        kind: "layer" or "rms".
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: str


@dataclass(frozen=True, slots=True)
class Backend:
    """How tensors are filled on one kind of device. There is at least one token, and outputs are contiguous.

    Attributes:
        norm: ``(x, delta, norm, total, out)``: fills ``total`` with ``x + delta`` where both aren't None, and ``out``
            with the normalised ``total`` (``x``).
        activate: ``(x, kind, gated, out)``: fills ``out``; ``x`` is twice as wide where it is gated.
        mix: ``(table, indices, weights, base, out)``: fills ``out``.
    """

    norm: Callable[[Tensor, Tensor | None, Norm, Tensor | None, Tensor], None]
    activate: Callable[[Tensor, str, bool, Tensor], None]
    mix: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]


@dataclass(frozen=True, slots=True)
class Implementations:
    """One backend's implementations, by the op that they implement."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., Tensor]
    activation: Callable[..., Tensor]
    gated_activation: Callable[..., Tensor]
    mix_rows: Callable[..., Tensor]


def implementations(backend: Backend) -> Implementations:
    """The ops, with ``backend`` filling their outputs."""

    def add_norm(
        x: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        checks.check_norm("add_norm", x, delta, weight, bias, eps, kind)
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        if x.shape[0]:
            backend.norm(x, delta, Norm(weight, bias, eps, kind), total, out)
        return total, out

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
        checks.check_norm("norm", x, None, weight, bias, eps, kind)
        out = x.new_empty(x.shape)
        if x.shape[0]:
            backend.norm(x, None, Norm(weight, bias, eps, kind), None, out)
        return out

    def activation(x: Tensor, kind: str) -> Tensor:
        checks.check_activation("activation", "kind", x, kind, gated=False)
        out = x.new_empty(x.shape)
        if out.numel():
            backend.activate(x, kind, False, out)
        return out

    def gated_activation(x: Tensor, kind: str) -> Tensor:
        checks.check_activation("gated_activation", "activation", x, kind, gated=True)
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        if out.numel():
            backend.activate(x, kind, True, out)
        return out

    def mix_rows(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
        checks.check_mix(table, indices, weights, base)
        out = mixed_like(table, indices, base)
        if out.numel():
            backend.mix(table, indices, weights, base, out)
        return out

    return Implementations(add_norm, norm, activation, gated_activation, mix_rows)


def mixed_like(table: Tensor, indices: Tensor, base: Tensor | None) -> Tensor:
    """The empty result of ``mix_rows``, ``[tokens, width]`` in the dtype of base, or without one of the table."""
    return (table if base is None else base).new_empty((indices.shape[0], table.shape[1]))
