"""What a call may not do to its arguments: write into them or around them, move them, or mark them for gradients.

Promises: the whole memory under each tensor is compared byte by byte, also where the tensor is only some columns of it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Before:
    """A tensor as it was before the call.

    Attributes:
        tensor: It itself.
        place: What a view is, beside its values.
        requires_grad: Whether it was marked for gradients.
        values: Its values, on the CPU.
        memory: All bytes of the memory under it, on the CPU.
    """

    tensor: torch.Tensor
    place: tuple[Any, ...]
    requires_grad: bool
    values: torch.Tensor
    memory: torch.Tensor


class Arguments:
    """The arguments of a call, as they are now.

    Args:
        named: Each argument with its name; lists have an entry for each of their members.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]) -> None:
        self._before = [
            (name, _seen(value) if isinstance(value, torch.Tensor) else copy.copy(value))
            for name, value in named
        ]

    def changed(self, named: Sequence[tuple[str, Any]]) -> str | None:
        """Say what a call has changed, or None.

        Args:
            named: The arguments after the call.
        """
        if len(named) != len(self._before):
            return "It changed its argument sources, a list, which must be left as it was."
        for (name, before), (_, now) in zip(self._before, named, strict=True):
            what = _change(before, now)
            if what is not None:
                return f"It changed {what}its argument {name}, which must be left as it was."
        return None

    def shared(self, out: torch.Tensor) -> str | None:
        """Say with what a result shares memory, or None.

        Args:
            out: The result, ``[T, H]``, dense.
        """
        if out.numel() == 0:
            return None
        ours = out.untyped_storage().data_ptr()
        for name, before in self._before:
            if isinstance(before, _Before) and before.tensor.numel() and before.place[-1] == ours:
                return f"Its result shares memory with its argument {name}: a change of one would change the other."
        offsets = {
            row * out.stride(0) + column * out.stride(1)
            for row in range(out.shape[0])
            for column in range(out.shape[1])
        }
        if len(offsets) < out.numel():
            return (
                f"Its result's elements share memory with each other, as after expand(): strides {list(out.stride())} "
                f"for shape {list(out.shape)}. A change of one would change the other."
            )
        return None


def _seen(tensor: torch.Tensor) -> _Before:
    return _Before(
        tensor,
        _place(tensor),
        tensor.requires_grad,
        tensor.detach().cpu().clone(),
        _memory(tensor).clone(),
    )


def _change(before: Any, now: Any) -> str | None:
    """Say what of an argument was changed, for a message; empty: the argument itself."""
    if not isinstance(before, _Before):
        return None if type(now) is type(before) and now == before else ""
    if now is not before.tensor or now.layout != torch.strided or _place(now) != before.place:
        return ""
    if now.requires_grad != before.requires_grad:
        return "requires_grad of "
    memory = _memory(now)
    if memory.equal(before.memory):
        return None
    if len(memory) != len(before.memory):
        return ""
    values = now.detach().cpu()
    return "the memory around " if _memory(values.clone()).equal(_memory(before.values)) else ""


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.untyped_storage().data_ptr(),
    )


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Give all bytes under a tensor, on the CPU."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()
