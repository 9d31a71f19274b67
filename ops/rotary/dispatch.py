"""The rotary ops' implementations: check, allocate, and let a backend fill; and their gradient.

What is here is the same on every device. A backend is two functions that fill tensors: ``reference`` in plain PyTorch,
``cuda`` with one launch each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mmgraph.ops import rotary_checks as checks
from mmgraph.ops.checks import refuse_gradients
from mmgraph.ops.registration import mark_written

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """What is done to each head: an RMS norm where there is a weight, then a rotation where there are tables.

    Attributes:
        cos: ``[T, head_dim / 2]`` or ``[T, head_dim]``, or None.
        sin: As ``cos``.
        q_norm: ``[head_dim]``, or None.
        k_norm: ``[head_dim]``, or None.
        interleaved: Pairs are ``(2j, 2j + 1)``, else ``(j, j + head_dim / 2)``.
        eps: Added to the mean square.
    """

    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    interleaved: bool
    eps: float

    @property
    def has_norm(self) -> bool:
        """Whether q or k is normalised."""
        return self.q_norm is not None or self.k_norm is not None


@dataclass(frozen=True, slots=True)
class Backend:
    """How tensors are filled on one kind of device.

    Attributes:
        forward: ``(qkv, rotation, q, k, v)``: fills q ``[T, heads, head_dim]`` and k ``[T, kv_heads, head_dim]``,
            which may be qkv's own memory, and v where it isn't None. T is positive.
        backward: ``(dq, dk, dv, qkv, rotation, dqkv, need_norms)``: fills ``dqkv`` and returns the gradients of both
            norms' weights where they are there and needed, else None. qkv is there where a norm is. T is positive.
    """

    forward: Callable[[Tensor, Rotation, Tensor, Tensor, Tensor | None], None]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor | None, Rotation, Tensor, bool], tuple[Tensor | None, Tensor | None]
    ]


@dataclass(frozen=True, slots=True)
class Implementations:
    """One backend's implementations, by the op that they implement."""

    rope: Callable[..., tuple[Tensor, Tensor]]
    copy: Callable[..., tuple[Tensor, Tensor, Tensor]]
    autograd: Callable[..., tuple[Tensor, Tensor, Tensor]]
    in_place: Callable[..., None]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def implementations(backend: Backend) -> Implementations:
    """The ops, with ``backend`` filling their outputs."""

    def whole(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``packed_qkv_rope_autograd``: v is copied, so that its gradient needs no launch of its own."""
        checks.check_rope("packed_qkv_rope", qkv, *arguments)
        rotation, num_heads, num_kv_heads, head_dim = _read(arguments)
        tokens = qkv.shape[0]
        q = qkv.new_empty((tokens, num_heads, head_dim))
        k = qkv.new_empty((tokens, num_kv_heads, head_dim))
        v = qkv.new_empty((tokens, num_kv_heads, head_dim))
        if tokens:
            backend.forward(qkv, rotation, q, k, v)
        return q, k, v

    def copy(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``packed_qkv_rope_copy``: the same, and a gradient is refused."""
        _refuse_gradients("packed_qkv_rope_copy", qkv, arguments)
        return whole(qkv, *arguments)

    def rope(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """``packed_qkv_rope``: v stays where it is."""
        _refuse_gradients("packed_qkv_rope", qkv, arguments)
        checks.check_rope("packed_qkv_rope", qkv, *arguments)
        rotation, num_heads, num_kv_heads, head_dim = _read(arguments)
        tokens = qkv.shape[0]
        q = qkv.new_empty((tokens, num_heads, head_dim))
        k = qkv.new_empty((tokens, num_kv_heads, head_dim))
        if tokens:
            backend.forward(qkv, rotation, q, k, None)
        return q, k

    def in_place(qkv: Tensor, *arguments: Any) -> None:
        """``packed_qkv_rope_``: q and k are overwritten where they lie."""
        checks.check_rope_in_place(qkv, *arguments)
        rotation, num_heads, num_kv_heads, head_dim = _read(arguments)
        checks.check_memory(
            qkv,
            cos=rotation.cos,
            sin=rotation.sin,
            q_norm=rotation.q_norm,
            k_norm=rotation.k_norm,
        )
        if qkv.shape[0]:
            q, k, _ = parts(qkv, num_heads, num_kv_heads, head_dim)
            backend.forward(qkv, rotation, q, k, None)
            mark_written(qkv)

    def backward(
        dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``packed_qkv_rope_backward``: the whole of the packed gradient at once."""
        *rest, need_norms = arguments
        rotation = Rotation(*rest)
        tokens, heads, width = dq.shape
        dqkv = dq.new_empty((tokens, (heads + 2 * dk.shape[1]) * width))
        found: tuple[Tensor | None, Tensor | None] = (None, None)
        if tokens:
            found = backend.backward(dq, dk, dv, qkv, rotation, dqkv, need_norms)
        norms = []
        for weight, grad in zip((rotation.q_norm, rotation.k_norm), found, strict=True):
            if weight is None or not need_norms:
                norms.append(dq.new_empty((0,)))
            else:
                norms.append(weight.new_zeros(weight.shape) if grad is None else grad)
        return dqkv, norms[0], norms[1]

    return Implementations(rope, copy, whole, in_place, backward)


def _read(arguments: tuple[Any, ...]) -> tuple[Rotation, int, int, int]:
    """An op's arguments after qkv, which are checked: the rotation, heads, kv heads and head width."""
    cos, sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, interleaved, eps = arguments
    return Rotation(cos, sin, q_norm, k_norm, interleaved, eps), num_heads, num_kv_heads, head_dim


def _refuse_gradients(name: str, qkv: Tensor, arguments: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        tensors = [one for one in (qkv, *arguments[:4]) if one is not None]
        refuse_gradients(f"mmgraph::{name}", "call mmgraph.ops.packed_qkv_rope.", *tensors)


def parts(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the packed rows: q ``[T, heads, head_dim]``, k and v ``[T, kv_heads, head_dim]``.

    The number of rows is left to PyTorch: with a traced number of rows, what Inductor returns for a view of a view
    loses the place where the outer one begins (torch 2.11 and 2.13).
    """
    end_of_q = num_heads * head_dim
    return (
        qkv.narrow(1, 0, end_of_q).view(-1, num_heads, head_dim),
        qkv.narrow(1, end_of_q, num_kv_heads * head_dim).view(-1, num_kv_heads, head_dim),
        v_part(qkv, num_heads, num_kv_heads, head_dim),
    )


def v_part(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """The last of ``parts`` alone; a view costs about a microsecond on the host."""
    start = (num_heads + num_kv_heads) * head_dim
    return qkv.narrow(1, start, num_kv_heads * head_dim).view(-1, num_kv_heads, head_dim)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep what the backward needs: the tables, and the projection only where it was normalised."""
    qkv, cos, sin, q_norm, k_norm, *_, interleaved, eps = inputs
    for name, needed in zip(("cos", "sin"), ctx.needs_input_grad[1:3], strict=True):
        if needed:
            raise checks.table_gradient("mmgraph::packed_qkv_rope_autograd", name)
    normed = q_norm is not None or k_norm is not None
    ctx.save_for_backward(qkv if normed else None, cos, sin, q_norm, k_norm)
    ctx.interleaved, ctx.eps = interleaved, eps


def differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    """One gradient per input of ``packed_qkv_rope_autograd``."""
    _, _, _, need_q_norm, need_k_norm = ctx.needs_input_grad[:5]
    dqkv, dq_norm, dk_norm = torch.ops.mmgraph.packed_qkv_rope_backward(
        dq, dk, dv, *ctx.saved_tensors, ctx.interleaved, ctx.eps, need_q_norm or need_k_norm
    )
    return (
        dqkv if ctx.needs_input_grad[0] else None,
        None,
        None,
        dq_norm if need_q_norm else None,
        dk_norm if need_k_norm else None,
        *(None,) * 5,
    )
