"""What a function can reach without being given it: tensors, generators, and places that it may bind anew.

The walk runs no code of the objects that it meets: no property, no ``__getattr__``, no iterator of a subclass.
What can't be read that way is passed over.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .places import Contents, Place, Table, is_place
from .plain import PlainTable, is_plain

__all__ = ["Reach"]

logger = logging.getLogger(__name__)

# Enough for an engine object that holds a model that holds its caches; the bounds keep a stray reference to
# half of the process cheap. Breadth first, so that what is near counts before what is far.
_MAX_DEPTH = 6
_MAX_OBJECTS = 200_000
_LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type, torch.dtype, torch.device)
_MODULE_TABLES = ("_buffers", "_parameters", "_modules")
# Whose Python values are their own affair: locks, loggers, compiled code, caches of kernels. Only objects that
# exist to carry anybody's attributes are looked at.
_LIBRARIES = frozenset({"torch", "torchgen", "functorch", "triton", "numpy", *sys.stdlib_module_names})
_BAGS = frozenset({"types.SimpleNamespace", "argparse.Namespace"})


class Reach:
    """One walk from a function through closures, defaults, named globals, attributes and containers.

    Parameters are left out of `tensors`, since they are the bulk of a model and a forward pass seldom writes
    them; their places are watched like others.

    Attributes:
        tensors: what the function can reach, each once.
        generators: likewise.
        plain: where plain Python values are bound.
    """

    def __init__(self, root: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self.plain: list[Place | PlainTable] = []
        self._watched: list[Place | Table | Contents] = []
        self._changed: list[Place | Table | Contents] = []
        self._classes: set[type] = set()
        seen: set[int] = set()
        kept: list[object] = []  # so that no id is used again during the walk
        queue: collections.deque[tuple[Any, int]] = collections.deque([(root, 0)])
        while queue and len(seen) < _MAX_OBJECTS:
            node, depth = queue.popleft()
            kind = type(node)
            if issubclass(kind, _LEAVES) or id(node) in seen:
                continue
            seen.add(id(node))
            kept.append(node)
            if issubclass(kind, torch.Tensor):
                if not issubclass(kind, torch.nn.Parameter):
                    self.tensors.append(node)
                if is_traceable_wrapper_subclass(node):
                    queue.extend((getattr(node, name), depth + 1) for name in node.__tensor_flatten__()[0])
            elif issubclass(kind, torch.Generator):
                self.generators.append(node)
            elif depth < _MAX_DEPTH and not any("holds_captured_graphs" in vars(k) for k in kind.__mro__):
                try:
                    queue.extend((child, depth + 1) for child in self._children(node, kind))
                except Exception as error:  # one strange object must not stop a capture
                    logger.debug("passed over an object of type %s: %s", kind, error)
        if queue:
            logger.warning(
                "the function reaches more than %d objects; state beyond them is not compared", _MAX_OBJECTS
            )

    def rebound(self, read: set[int]) -> str | None:
        """Notes what is bound otherwise than at the walk, and names a place where state was bound anew.

        Args:
            read: keys of the storages that the function read: a place whose old tensor it didn't read holds no
                state.
        """
        self._changed = [entry for entry in self._watched if entry.changed()]
        return next((name for entry in self._changed if (name := entry.moved_on(read)) is not None), None)

    def rebind(self, *, everything: bool = False) -> bool:
        """Puts back what was bound at the walk, where it changed when last looked at, or everywhere.

        Returns:
            Whether anything was put back.
        """
        # A sum, so that all are put back and not the first alone.
        return sum(entry.put_back() for entry in (self._watched if everything else self._changed)) > 0

    def _children(self, node: Any, kind: type) -> Iterator[Any]:
        if issubclass(kind, torch.nn.Module):
            yield from self._of_module(node)
        elif issubclass(kind, dict):
            yield from self._of_table("a dictionary's entry", node)
        elif issubclass(kind, (list, collections.deque)):
            base: Any = list if issubclass(kind, list) else collections.deque
            contents = tuple(base.__iter__(node))
            if not contents or any(map(is_place, contents)):
                self._watched.append(Contents(node, base, contents))
            yield from contents
        elif issubclass(kind, (tuple, set, frozenset)):
            plain: Any = next(b for b in (tuple, set, frozenset) if issubclass(kind, b))
            yield from tuple(plain.__iter__(node))
        elif issubclass(kind, functools.partial):
            yield from (node.func, node.args, node.keywords)
        elif issubclass(kind, types.MethodType):
            yield from (node.__self__, node.__func__)
        elif issubclass(kind, types.FunctionType):
            yield from self._of_function(node)
        else:
            yield from self._of_object(node, kind)

    def _of_module(self, node: torch.nn.Module) -> Iterator[Any]:
        # All its submodules at once: a model nests deeper than the bound on depth.
        for name, module in torch.nn.Module.named_modules(node):
            where = type(module).__name__ + (f" {name!r}" if name else "")
            attributes = object.__getattribute__(module, "__dict__")
            for table in (attributes.get("_buffers"), attributes.get("_parameters")):
                if isinstance(table, dict):
                    yield from self._of_table(where, table)
            if isinstance(module, torch.jit.ScriptModule):  # whose buffers lie outside Python
                yield from (buffer for _, buffer in module.named_buffers(recurse=False))
            yield from self._of_table(where, attributes, skip=_MODULE_TABLES)
            if not type(module).__module__.startswith("torch._"):
                self.plain.append(PlainTable.of_attributes(where, attributes))
            self._note_class(type(module))
            yield type(module).forward

    def _of_function(self, node: types.FunctionType) -> Iterator[Any]:
        own = not _is_library(node.__globals__.get("__name__"))
        for variable, cell in zip(node.__code__.co_freevars, node.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that its function has not filled yet
                continue
            self._watch("a variable of an enclosing function", cell, "cell_contents", content)
            if own:
                self._note(
                    f"the variable {variable!r} of an enclosing function", cell, "cell_contents", content
                )
            yield content
        yield from (node.__defaults__ or ())
        yield from (node.__kwdefaults__ or {}).values()
        names = set(_global_names(node.__code__))
        if own:
            self.plain.append(PlainTable.of_globals(node.__globals__, names))
        for name in names & node.__globals__.keys():
            value = node.__globals__[name]
            self._watch(f"the global {name!r}", node.__globals__, name, value)
            if isinstance(value, (types.ModuleType, type)):
                # What the code may mean by value.attribute.
                for attribute in names & vars(value).keys():
                    found = vars(value)[attribute]
                    if isinstance(found, torch.Tensor):
                        self._watch(f"{name}.{attribute}", value, attribute, found)
                        yield found
                    elif not _is_library(
                        value.__name__ if isinstance(value, types.ModuleType) else value.__module__
                    ):
                        self._note(f"{name}.{attribute}", value, attribute, found)
            yield value
        wrapped = vars(node).get("__wrapped__")
        if wrapped is not None:
            yield wrapped

    def _of_object(self, node: Any, kind: type) -> Iterator[Any]:
        own = not _is_library(kind.__module__) or f"{kind.__module__}.{kind.__qualname__}" in _BAGS
        with contextlib.suppress(AttributeError):
            attributes = object.__getattribute__(node, "__dict__")
            if type(attributes) is dict:
                yield from self._of_table(kind.__name__, attributes)
                if own:
                    self.plain.append(PlainTable.of_attributes(kind.__name__, attributes))
        if own:
            self._note_class(kind)
        for base in kind.__mro__:
            for name, member in list(vars(base).items()):
                if isinstance(member, types.MemberDescriptorType) and base.__module__ != "builtins":
                    with contextlib.suppress(AttributeError):
                        value = member.__get__(node)
                        self._watch(f"{kind.__name__}.{name}", node, member, value)
                        if own:
                            self._note(f"{kind.__name__}.{name}", node, member, value)
                        yield value
                elif isinstance(
                    member, (torch.Tensor, types.FunctionType, dict, list, tuple, collections.deque)
                ):
                    # Class attributes, and what methods name.
                    yield member

    def _of_table(self, where: str, table: dict[Any, Any], skip: tuple[str, ...] = ()) -> Iterator[Any]:
        # dict's own methods: a subclass may do anything in its own.
        entries = [(key, value) for key, value in dict.items(table) if key not in skip]
        attributes = "entry" not in where
        if attributes or not entries or any(is_place(value) for _, value in entries):
            self._watched.append(Table(table, frozenset(dict.keys(table))))
        for key, value in entries:
            self._watch(f"{where}.{key}" if attributes else f"{where} [{key!r}]", table, key, value)
            yield value

    def _watch(self, name: str, holder: Any, key: Any, value: Any) -> None:
        if is_place(value):
            self._watched.append(Place(name, holder, key, value))

    def _note(self, name: str, holder: Any, key: Any, value: Any) -> None:
        if is_plain(value):
            self.plain.append(Place(name, holder, key, value))

    def _note_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base in self._classes or _is_library(base.__module__):
                continue
            self._classes.add(base)
            for name, value in list(vars(base).items()):
                if not name.startswith("__"):
                    self._note(f"{base.__name__}.{name}", base, name, value)


def _is_library(module: Any) -> bool:
    # This room's own, too: its hooks lie in modules that it guards, and its counts are nobody's state.
    return (
        not isinstance(module, str)
        or module.partition(".")[0] in _LIBRARIES
        or module.rpartition(".")[0] == __package__
    )


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
