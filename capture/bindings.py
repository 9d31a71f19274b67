"""Where weights are bound: the places by which a function reaches its modules and the tensors that it reads.

Of a module, that is each entry of its tables of parameters, buffers and submodules, and of those below it. Of
a tensor, each place that it is bound at. And of either, the places on the way to it from the function, by the
shortest way: attributes, entries, items, variables.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .places import UNSET, Place
from .reach import Reach

__all__ = ["Binding", "ModuleEntry", "WeightBindings", "module_entries", "modules_below", "top_modules"]

_PASSED_OVER = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type)


@dataclass(frozen=True, eq=False)
class Binding(Place):
    """A place on the way to a weight, an item of a list among others."""

    def now(self) -> Any:
        """What is bound there, or UNSET."""
        if not isinstance(self.holder, (list, collections.deque)):
            return super().now()
        base: Any = list if isinstance(self.holder, list) else collections.deque
        return base.__getitem__(self.holder, self.key) if self.key < base.__len__(self.holder) else UNSET


@dataclass(frozen=True, eq=False)
class ModuleEntry(Binding):
    """An entry of a module's table. It is read through the module, since modules make tables anew at times."""

    attributes: dict[str, Any]
    table: str

    def now(self) -> Any:
        """What the module has there, or UNSET."""
        table = self.attributes.get(self.table)
        return dict.get(table, self.key, UNSET) if isinstance(table, dict) else UNSET


class WeightBindings(Reach):
    """The walk, noting where each thing was found.

    Args:
        root: the function, and whatever else to start from.

    Attributes:
        modules: those that the walk came to otherwise than as submodules.
    """

    def __init__(self, root: object) -> None:
        self.modules: list[torch.nn.Module] = []
        self._found: dict[int, list[Binding]] = {}
        self._from: dict[int, object] = {}
        super().__init__(root)

    def places_of(self, value: object) -> list[Binding]:
        """The places that a module or a tensor is bound at."""
        return self._found.get(id(value), [])

    def way_to(self, value: object) -> Iterator[Binding]:
        """The places on the way to what holds a module or a tensor, the nearest to it first."""
        passed = {id(value)}
        while (value := self._from.get(id(value))) is not None and id(value) not in passed:
            passed.add(id(value))
            yield from self.places_of(value)[:1]

    def bound_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are bound somewhere, parameters among them."""
        for places in self._found.values():
            if issubclass(type(places[0].old), torch.Tensor):
                yield places[0].old

    def _children(self, node: Any, kind: type) -> Iterator[Any]:
        if issubclass(kind, (list, collections.deque)):
            base: Any = list if issubclass(kind, list) else collections.deque
            for position, item in enumerate(tuple(base.__iter__(node))):
                self._watch(f"item {position} of a {base.__name__}", node, position, item)
        for child in super()._children(node, kind):
            self._from.setdefault(id(child), node)
            yield child

    def _of_module(self, node: torch.nn.Module) -> Iterator[Any]:
        self.modules.append(node)
        yield from super()._of_module(node)

    def _watch(self, name: str, holder: Any, key: Any, value: Any) -> None:
        # Whatever it is: only at the end of the walk is it known what leads to weights.
        if not issubclass(type(value), _PASSED_OVER):
            self._found.setdefault(id(value), []).append(Binding(name, holder, key, value))


def modules_below(roots: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Each module at or below some, once: the first of them that has it, its kind and name in there, and it."""
    passed: set[int] = set()
    for root in roots:
        for name, module in torch.nn.Module.named_modules(root):
            if id(module) not in passed:
                passed.add(id(module))
                yield root, type(module).__name__ + (f" {name!r}" if name else ""), module


def top_modules(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of some modules that lie below no other."""
    below = {
        id(module) for root in modules for module in torch.nn.Module.named_modules(root) if module is not root
    }
    return [module for module in modules if id(module) not in below]


def module_entries(where: str, module: torch.nn.Module) -> Iterator[tuple[Binding, bool]]:
    """The entries of a module's tables, and the tables that have any, for which the second item is true."""
    attributes = object.__getattribute__(module, "__dict__")
    for name in ("_parameters", "_buffers", "_modules"):
        table = attributes.get(name)
        if isinstance(table, dict) and table:
            yield Binding(f"{where}.{name}", attributes, name, table), True
            for key, value in dict.items(table):
                yield ModuleEntry(f"{where}.{key}", table, key, value, attributes, name), False
