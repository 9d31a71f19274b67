"""Results in the caller's own tensors: whether they fit, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import CallError
from .graph import OutputPlan
from .spec import Signature

__all__ = ["Into", "contiguous", "copied_into", "finished", "fitting"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Into:
    """The caller's own tensors for the results."""

    out: Any


def fitting(
    signature: Signature, plans: Sequence[OutputPlan], sizes: Sequence[int], out: Any
) -> list[Tensor | None]:
    """The caller's tensors for the results of a replay, each looked at; None for what isn't a tensor.

    Raises:
        CallError: one of them doesn't fit, or two share memory.
    """
    flat = _flat(signature, out)
    named = dict(zip(signature.grid.names, sizes, strict=True))
    found: list[Tensor | None] = []
    for path, plan, target in zip(signature.output_paths, plans, flat, strict=True):
        if plan.layout is None:
            found.append(None)
            continue
        layout = plan.layout
        found.append(_fits(path, layout.dtype, layout.full_shape(named), layout.device, target))
    _refuse_shared(signature, found)
    return found


def copied_into(signature: Signature, result: Any, out: Any) -> Any:
    """The function's own result, copied into the caller's tensors once all of them fit."""
    values = _flat(signature, result)
    found: list[Tensor | None] = []
    for path, value, target in zip(signature.output_paths, values, _flat(signature, out), strict=True):
        fits = isinstance(value, Tensor)
        found.append(_fits(path, value.dtype, tuple(value.shape), value.device, target) if fits else None)
    _refuse_shared(signature, found)
    filled = [
        value if target is None else target.copy_(value) for value, target in zip(values, found, strict=True)
    ]
    return pytree.tree_unflatten(filled, signature.output_tree)


def _flat(signature: Signature, out: Any) -> list[Any]:
    try:
        return signature.output_tree.flatten_up_to(out)
    except ValueError as error:
        raise CallError(f"out does not have the structure of the outputs: {error}") from None


def _fits(path: str, dtype: torch.dtype, shape: Sequence[int], device: torch.device, target: Any) -> Tensor:
    expected = f"{dtype} {list(shape)} on {device}"
    if not isinstance(target, Tensor):
        raise CallError(f"{path} of out must be a tensor {expected}, got {type(target).__name__}")
    if target.dtype != dtype or target.device != device or tuple(target.shape) != tuple(shape):
        got = f"{target.dtype} {list(target.shape)} on {target.device}"
        raise CallError(f"{path} of out must be {expected}, got {got}")
    if target.requires_grad:
        raise CallError(f"{path} of out needs a gradient, and a replay records none: detach it")
    if 0 in target.stride() and target.numel() > 1 and _expanded(target):
        raise CallError(
            f"{path} of out is expanded, so its elements share memory: pass a tensor with memory for each"
        )
    return target


def _expanded(target: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True))


def _refuse_shared(signature: Signature, found: Sequence[Tensor | None]) -> None:
    seen: dict[int, str] = {}
    for path, target in zip(signature.output_paths, found, strict=True):
        if target is None or target.numel() == 0:
            continue
        other = seen.setdefault(target.data_ptr(), path)
        if other is not path:
            raise CallError(f"{path} and {other} of out are the same memory: give each output its own tensor")


def contiguous(
    results: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tensors that a graph can write, and those of the caller's that are copied from them."""
    written: list[torch.Tensor | None] = []
    odd = []
    for result in results:
        plain = result is None or (
            type(result) in (torch.Tensor, torch.nn.Parameter)
            and result.is_contiguous()
            and not result.is_neg()
            and not result.is_conj()
        )
        if plain or result is None:
            written.append(result)
        else:
            fresh = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            written.append(fresh)
            odd.append((fresh, result))
    return written, odd


def finished(
    written: Sequence[torch.Tensor | None], odd: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor | None]:
    """The caller's tensors after the replay; autograd is told that they changed."""
    results: list[torch.Tensor | None] = []
    targets = {id(fresh): target for fresh, target in odd}
    for tensor in written:
        target = targets.get(id(tensor))
        if tensor is not None and target is not None:
            with torch.no_grad():
                target.copy_(tensor)
            results.append(target)
            continue
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        results.append(tensor)
    return results
