"""Whether a tower is still built as it was when its fast way was made: the same modules, where they were, unhooked.

The fast way calls parts of the model by itself. A module that was put in another's place, a hook on a part, or weights
that were moved or cast would go unseen. A look at all of a tower of 27 layers takes some tens of microseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Unchanged"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Unchanged:
    """Remembers modules as they are.

    Args:
        roots: Modules, with all that they hold.
        owner: The module that they are parts of, whose places they must keep; None where it doesn't matter.
    """

    def __init__(self, roots: Sequence[nn.Module], owner: nn.Module | None = None) -> None:
        modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._roots = tuple(roots)
        places = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        if owner is not None:
            kept = {id(m) for m in roots}
            places += [
                (owner._modules, name, child) for name, child in owner._modules.items() if id(child) in kept
            ]
        self._tables = [table for table, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._children = [child for _, _, child in places]
        # transformers' own hooks, which record what is asked for, are there or come later, and change nothing.
        # A root's own hooks run around whatever its forward is.
        parts = [module for module in modules if not any(module is root for root in roots)]
        self._hooks: list[Any] = [getattr(module, name) for module in parts for name in _HOOKS]
        self._attributes = [vars(module) for module in parts]
        self._dtype, self._device = self._place()

    def _place(self) -> tuple[torch.dtype, torch.device]:
        parameter = next(p for root in self._roots for p in root.parameters())
        return parameter.dtype, parameter.device

    def why_not(self) -> str | None:
        """What has changed, or None."""
        if not all(map(operator.is_, map(dict.get, self._tables, self._names), self._children)):
            return "its modules were replaced since: restore(model) and accelerate again"
        if any(self._hooks) and any(map(_foreign, self._hooks)):
            return "a part of it has forward hooks"
        if any("forward" in attributes for attributes in self._attributes):
            return "a part of it has a forward of its own"
        dtype, device = self._place()
        if dtype != self._dtype or device != self._device:
            return (
                f"its weights were {self._dtype} on {self._device} and are {dtype} on {device}: restore(model) and "
                "accelerate again"
            )
        return None


def _foreign(hooks: Any) -> bool:
    """Whether hooks are anybody's but transformers'."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.utils.output_capturing")
        for hook in hooks.values()
    )
