"""Places that tensors are bound to, each of which can be put back.

Attributes, entries, variables, and the contents of lists.
"""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["UNSET", "Contents", "Place", "Table", "is_place", "storage_key"]

_HOLDS_TENSORS = (list, tuple, dict, set, frozenset, collections.deque)


class _Unset:
    """What is found where nothing is bound."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


def is_place(value: Any) -> bool:
    """Whether a tensor is bound there, a container that may hold one, or nothing, where one may come yet."""
    return value is None or issubclass(type(value), (torch.Tensor, *_HOLDS_TENSORS))


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors on one memory have in common."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # no storage of its own: sparse, nested, not yet made
        return id(tensor)


@dataclass(frozen=True, eq=False)
class Place:
    """One name or key, and what was bound there."""

    name: str
    holder: Any
    key: Any
    old: Any

    def changed(self) -> bool:
        """Whether another object is bound there."""
        return self.now() is not self.old

    def moved_on(self, read: set[int]) -> str | None:
        """The place's name, where tensors that the function read gave way to others."""
        old, new = _tensors(self.old), _tensors(self.now())
        same = len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
        if new and not same and any(storage_key(tensor) in read for tensor in old):
            return self.name
        return None

    def put_back(self) -> bool:
        """Binds the old object again, unless neither it nor the new one has to do with tensors."""
        new = self.now()
        if new is self.old or not (self.old is not None or _tensors(new)):
            return False
        self.bind_old()
        return True

    def bind_old(self) -> None:
        """Binds the old object again, or nothing where nothing was bound."""
        if self.old is UNSET:
            self._unbind()
        elif isinstance(self.key, types.MemberDescriptorType):
            self.key.__set__(self.holder, self.old)
        elif isinstance(self.holder, dict):
            dict.__setitem__(self.holder, self.key, self.old)
        else:
            setattr(self.holder, self.key, self.old)

    def now(self) -> Any:
        """What is bound there, or UNSET."""
        try:
            if isinstance(self.key, types.MemberDescriptorType):
                return self.key.__get__(self.holder)
            if isinstance(self.holder, dict):
                return dict.get(self.holder, self.key, UNSET)
            if isinstance(self.holder, types.CellType):
                return self.holder.cell_contents
            return vars(self.holder).get(self.key, UNSET)
        except (ValueError, AttributeError):  # emptied since
            return UNSET

    def _unbind(self) -> None:
        if self.now() is UNSET:
            return
        if isinstance(self.key, types.MemberDescriptorType):
            self.key.__delete__(self.holder)
        elif isinstance(self.holder, dict):
            dict.__delitem__(self.holder, self.key)
        else:
            delattr(self.holder, self.key)


@dataclass(frozen=True, eq=False)
class Table:
    """A dictionary and the keys that it had: keys that come with a tensor are taken out again."""

    table: dict[Any, Any]
    keys: frozenset[Any]

    def changed(self) -> bool:
        """Whether it has other keys."""
        return dict.keys(self.table) != self.keys

    def moved_on(self, read: set[int]) -> str | None:
        """Never: what is new was no state before."""
        return None

    def put_back(self) -> bool:
        """Takes out new keys that hold tensors."""
        if not self.changed():
            return False
        new = [k for k, v in dict.items(self.table) if k not in self.keys and _tensors(v)]
        for key in new:
            dict.__delitem__(self.table, key)
        return bool(new)


@dataclass(frozen=True, eq=False)
class Contents:
    """A list or deque and what it held, object by object."""

    holder: Any
    base: type
    old: tuple[Any, ...]

    def changed(self) -> bool:
        """Whether it holds other objects."""
        now = self._now()
        return len(now) != len(self.old) or any(a is not b for a, b in zip(now, self.old, strict=True))

    def moved_on(self, read: set[int]) -> str | None:
        """Its kind, where a tensor that the function read is no longer where it was."""
        now = self._now()
        for position, tensor in enumerate(self.old):
            gone = position >= len(now) or now[position] is not tensor
            if gone and issubclass(type(tensor), torch.Tensor) and storage_key(tensor) in read:
                return f"item {position} of a {self.base.__name__}"
        return None

    def _now(self) -> tuple[Any, ...]:
        return tuple(self.base.__iter__(self.holder))  # type: ignore[attr-defined]

    def put_back(self) -> bool:
        """Makes it hold what it held, unless neither that nor what it holds now has to do with tensors."""
        if not self.changed() or not (_tensors(list(self.old)) or _tensors(list(self._now()))):
            return False
        self.base.clear(self.holder)  # type: ignore[attr-defined]
        self.base.extend(self.holder, self.old)  # type: ignore[attr-defined]
        return True


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is or holds, in plain containers."""
    if issubclass(type(value), torch.Tensor):
        return [value]
    if not issubclass(type(value), _HOLDS_TENSORS):
        return []
    if issubclass(type(value), (set, frozenset)):
        value = list(value)
    return [leaf for leaf in pytree.tree_leaves(value) if issubclass(type(leaf), torch.Tensor)]
