"""What a function can reach without being given it: tensors, generators, and the places that tensors are bound to."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Reach"]

# Enough for an engine object that holds a model that holds its caches; the bounds keep a stray reference to
# half of the process cheap.
_MAX_DEPTH = 6
_MAX_OBJECTS = 200_000
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type, torch.dtype, torch.device)
_MISSING = object()


class Reach:
    """One walk from a function through closures, defaults, named globals, attributes and containers.

    Parameters are left out of `tensors`, since they are the bulk of a model and a forward pass seldom writes
    them; their places are watched like others.

    Attributes:
        tensors: what the function can reach, each once.
        generators: likewise.
    """

    def __init__(self, root: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self._places: list[tuple[str, Any, Any, Any]] = []  # name, holder, key, what was there
        self._tables: list[tuple[dict[Any, Any], frozenset[Any]]] = []  # dictionaries and the keys they had
        self._seen: set[int] = set()
        self._kept: list[object] = []  # so that no id is used again during the walk
        stack: list[tuple[Any, int]] = [(root, 0)]
        while stack and len(self._seen) < _MAX_OBJECTS:
            node, depth = stack.pop()
            if isinstance(node, _LEAVES) or id(node) in self._seen:
                continue
            self._seen.add(id(node))
            self._kept.append(node)
            if isinstance(node, torch.Tensor):
                if not isinstance(node, torch.nn.Parameter):
                    self.tensors.append(node)
            elif isinstance(node, torch.Generator):
                self.generators.append(node)
            elif depth < _MAX_DEPTH and not getattr(type(node), "holds_captured_graphs", False):
                stack.extend((child, depth + 1) for child in self._children(node))
        self._kept.clear()

    def rebound(self) -> list[str]:
        """Names of places where another tensor is now than was there at the walk."""
        changed = []
        for name, holder, key, old in self._places:
            new = _get(holder, key)
            if new is not old and isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                changed.append(name)
        return changed

    def rebind(self) -> None:
        """Puts back what was where a tensor was, or is now; places that are new lose their tensor."""
        for _, holder, key, old in self._places:
            new = _get(holder, key)
            if new is not old and (isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)):
                _set(holder, key, old)
        for table, keys in self._tables:
            for key in [
                key for key, value in dict.items(table) if isinstance(value, torch.Tensor) and key not in keys
            ]:
                dict.__delitem__(table, key)

    def _children(self, node: Any) -> Iterator[Any]:
        if isinstance(node, torch.nn.Module):
            # All its submodules at once: a model nests deeper than the bound on depth.
            for name, module in node.named_modules():
                where = type(module).__name__ + (f" {name!r}" if name else "")
                for table in (module._buffers, module._parameters):
                    yield from self._values(where, table)
                attributes = vars(module)
                yield from self._values(where, attributes, skip=("_buffers", "_parameters", "_modules"))
                yield type(module).forward
        elif isinstance(node, dict):
            yield from self._values("a dictionary's entry", node)
        elif isinstance(node, _CONTAINERS):
            if isinstance(node, list):
                self._places.extend(
                    (f"item {i} of a list", node, i, v) for i, v in enumerate(node) if _is_place(v)
                )
            yield from list(node)
        elif isinstance(node, functools.partial):
            yield from (node.func, node.args, node.keywords)
        elif isinstance(node, types.MethodType):
            yield from (node.__self__, node.__func__)
        elif isinstance(node, types.FunctionType):
            yield from self._of_function(node)
        else:
            yield from self._of_object(node)

    def _of_function(self, node: types.FunctionType) -> Iterator[Any]:
        for cell in node.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that its function has not filled yet
                continue
            if _is_place(content):
                self._places.append(("a variable of an enclosing function", cell, None, content))
            yield content
        yield from (node.__defaults__ or ())
        yield from (node.__kwdefaults__ or {}).values()
        for name in _global_names(node.__code__):
            if name in node.__globals__:
                value = node.__globals__[name]
                if _is_place(value):
                    self._places.append((f"the global {name!r}", node.__globals__, name, value))
                yield value
        if hasattr(node, "__wrapped__"):
            yield node.__wrapped__

    def _of_object(self, node: Any) -> Iterator[Any]:
        where = type(node).__name__
        attributes = getattr(node, "__dict__", None)
        if isinstance(attributes, dict):
            yield from self._values(where, attributes)
        for kind in type(node).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = vars(kind).get(name)
                if isinstance(member, types.MemberDescriptorType):
                    value = _get(node, member)
                    if _is_place(value):
                        self._places.append((f"{where}.{name}", node, member, value))
                    yield value
            # Class attributes, and what the methods name.
            for value in list(vars(kind).values()) if kind.__module__ != "builtins" else ():
                if isinstance(value, (torch.Tensor, types.FunctionType, dict, *_CONTAINERS)):
                    yield value

    def _values(self, where: str, table: dict[Any, Any], skip: tuple[str, ...] = ()) -> Iterator[Any]:
        # dict's own methods: a subclass may do anything in its own.
        self._tables.append((table, frozenset(dict.keys(table))))
        for key, value in list(dict.items(table)):
            if key in skip:
                continue
            if _is_place(value):
                self._places.append(
                    (f"{where}[{key!r}]" if "entry" in where else f"{where}.{key}", table, key, value)
                )
            yield value


def _is_place(value: Any) -> bool:
    """Whether a tensor is bound there, or may be at first use."""
    return value is None or isinstance(value, torch.Tensor)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _get(holder: Any, key: Any) -> Any:
    try:
        if isinstance(holder, types.CellType):
            return holder.cell_contents
        if isinstance(key, types.MemberDescriptorType):
            return key.__get__(holder)
        return dict.get(holder, key, _MISSING) if isinstance(holder, dict) else holder[key]
    except (ValueError, AttributeError, IndexError):  # emptied since
        return _MISSING


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(key, types.MemberDescriptorType):
        key.__set__(holder, value)
    elif isinstance(holder, dict):
        dict.__setitem__(holder, key, value)
    elif key < len(holder):
        holder[key] = value
