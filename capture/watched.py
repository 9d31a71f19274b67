"""What is watched of one weight, and many of them compared at once.

`Watched` says exactly whether a weight is what it was. `Slice` gives the same answer for many in a fraction of
the time, as long as it is yes: it compares in C the objects that are bound, their addresses and their metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _compat
from .bindings import Binding

__all__ = ["Facts", "Slice", "Watched", "facts_of"]

# Said to mypy to be no more than that: it holds the type that it would narrow to for impossible.
_wraps: Callable[[object], bool] = is_traceable_wrapper_subclass

# With and without gradients, in inference mode, under autocast: to PyTorch's check these all differ.
_CHECKS_KEPT = 4


@dataclass(frozen=True)
class Facts:
    """What a graph bakes in of a tensor: equal facts mean the same memory, read in the same way.

    Attributes:
        metadata: its type if that is one that wraps tensors, data type, device, layout, sizes and strides.
        memory: the same, and the address, of itself, or of each tensor that it wraps. Nothing where it has no
            memory that PyTorch tells of: fake, sparse, on "meta".
    """

    metadata: tuple[object, ...]
    memory: tuple[tuple[tuple[object, ...], int], ...]

    @property
    def tell_memory(self) -> bool:
        """Whether another tensor with equal facts is on the same memory."""
        return bool(self.memory) and all(address for _, address in self.memory)


def facts_of(value: object) -> Facts | None:
    """The facts of a tensor, None of anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    with _compat.no_torch_function():
        # A tensor without elements has no address and needs none.
        memory = ((_metadata(leaf), leaf.data_ptr() if leaf.numel() else -1) for leaf in _leaves(value))
        return Facts(_metadata(value), tuple(memory))


@dataclass(frozen=True, eq=False)
class Watched:
    """One thing that is watched: a place and what was bound there, or a tensor that has no place.

    Attributes:
        name: what an error calls it.
        binding: the place, if there is one.
        value: what was bound there, or the tensor.
        table: whether it is a module's table of weights, whose entries are watched themselves.
        facts: of `value`, as they were.
    """

    name: str
    binding: Binding | None
    value: object
    table: bool = False
    facts: Facts | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", facts_of(self.value))

    def now(self) -> object:
        """What is bound there now, or the tensor."""
        return self.value if self.binding is None else self.binding.now()

    def is_as_it_was(self) -> bool:
        """Whether the place leads to the same memory, read in the same way."""
        now = self.now()
        if self.facts is not None:
            return (now is self.value or self.facts.tell_memory) and facts_of(now) == self.facts
        return now is self.value or self.table or _same_contents(now, self.value)


class Slice:
    """Some of what is watched, compared at once.

    Args:
        watched: those, each as it was.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self.watched = watched
        self._tables: list[dict[Any, Any]] = []
        self._keys: list[object] = []
        self._values: list[object] = []
        self._elsewhere: list[tuple[Binding, object]] = []
        self._one_by_one: list[Watched] = []
        leaves: dict[int, torch.Tensor] = {}
        for each in watched:
            if each.binding is not None:
                self._compare_object(each.binding, each.value)
            if isinstance(each.value, torch.Tensor):
                if not self._compare_wrapped(each.value):
                    self._one_by_one.append(each)
                else:
                    leaves.update((id(leaf), leaf) for leaf in _leaves(each.value))
        self._leaves = list(leaves.values())
        self._with_memory = [leaf for leaf in self._leaves if leaf.numel()]
        with _compat.no_torch_function():
            self._addresses = [leaf.data_ptr() for leaf in self._with_memory]
        self._indices = list(range(len(self._with_memory)))
        self._checks: list[Callable[..., bool]] = []
        self._learn()

    def is_as_it_was(self) -> bool:
        """Whether all are, and the very same objects are bound, too."""
        if not all(map(operator.is_, map(dict.get, self._tables, self._keys), self._values)):
            return False
        if not _compat.same_addresses(self._with_memory, self._addresses, self._indices):
            return False
        # Loops, since most slices have none of these and a generator costs more than that.
        for binding, value in self._elsewhere:
            if binding.now() is not value:
                return False
        for each in self._one_by_one:
            if not each.is_as_it_was():
                return False
        if not self._leaves:
            return True
        for check in self._checks:
            if check(*self._leaves):
                return True
        # Another mode than PyTorch's check was made in looks to it like other tensors: look closely, and make
        # one for this mode, too.
        if not all(each.is_as_it_was() for each in self.watched):
            return False
        self._learn()
        return True

    def _learn(self) -> None:
        if self._leaves:
            self._checks = [_compat.metadata_check(self._leaves), *self._checks[: _CHECKS_KEPT - 1]]

    def _compare_object(self, binding: Binding, value: object) -> None:
        if isinstance(binding.holder, dict):
            self._tables.append(binding.holder)
            self._keys.append(binding.key)
            self._values.append(value)
        else:
            self._elsewhere.append((binding, value))

    def _compare_wrapped(self, tensor: torch.Tensor) -> bool:
        """Compares the objects that a tensor wraps, if any, and says whether its leaves tell all about it."""
        if not _wraps(tensor):
            return bool(_leaves(tensor))
        attributes = getattr(tensor, "__dict__", {})
        names = _inner_names(tensor)
        if not all(isinstance(attributes.get(name), torch.Tensor) for name in names):
            return False
        for name in names:
            self._tables.append(attributes)
            self._keys.append(name)
            self._values.append(attributes[name])
        return all(self._compare_wrapped(attributes[name]) for name in names)


def _inner_names(wrapper: Any) -> list[str]:
    return list(wrapper.__tensor_flatten__()[0])


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that a tensor is or wraps."""
    if _wraps(tensor):
        inner = (getattr(tensor, name, None) for name in _inner_names(tensor))
        return [leaf for each in inner if isinstance(each, torch.Tensor) for leaf in _leaves(each)]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return []  # fake, or one whose own code says what it is
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
            return []
        tensor.data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # not yet made, or a view of functorch's
        return []
    return [tensor]


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = type(tensor) if _wraps(tensor) else None
    try:
        strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
        # What is no plain number (of a nested or fake tensor) is not to be compared: that may run code.
        lengths = tuple(length if type(length) is int else None for length in (*tensor.shape, *strides))
        return (kind, tensor.dtype, tensor.device, tensor.layout, lengths, tensor.is_conj(), tensor.is_neg())
    except (NotImplementedError, RuntimeError, ValueError):
        return (kind,)


def _same_contents(now: object, old: object) -> bool:
    """Whether a plain container was bound anew with the same objects in it."""
    if type(now) is dict and type(old) is dict:
        return now.keys() == old.keys() and all(now[key] is old[key] for key in now)
    for kind in (list, tuple):
        if type(now) is kind and type(old) is kind:
            return len(now) == len(old) and all(map(operator.is_, now, old))
    return False
