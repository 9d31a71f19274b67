"""Notices that weights were replaced: captured graphs read them by address, and would go on reading the old ones."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.utils.hooks import RemovableHandle

from . import epoch
from .bindings import Binding, WeightBindings, module_entries, modules_below, top_modules
from .places import storage_key
from .watched import Slice, Watched

__all__ = ["WeightGuard"]


class WeightGuard:
    """Watches the weights that a function reads, and tells which are no longer what they were.

    Watched are the parameters and buffers of every module that the function reaches, where the function reaches
    those modules, and the other tensors that it was seen to read, with the places that these are bound at. A
    weight that is given new values in place is what it was; so is one for which another tensor with the same
    memory, data type, sizes and strides is bound, and one that was put back.

    The guard holds the tensors. So their memory is used for nothing else while graphs read it, even if they are
    bound nowhere any more; where it is the tensor's own memory that is swapped (``tensor.data = ...``,
    ``module.to``, ``resize_``), the old memory is freed all the same.

    Args:
        fn: the function.
        watch: more modules and tensors to watch, or objects that lead to modules; with names, if a mapping.
        seen: tensors that the function was seen to read. Of what is no parameter or buffer only these are watched.
        ignore: tensors on whose memory nothing is watched, such as the graphs' own buffers.
        mode: ``"always"`` looks at everything on each call. ``"epoch"`` looks at everything when some module of
            the process was given a parameter, buffer or submodule, when a watched module has loaded a state, and
            after `invalidate`; on other calls it looks at a slice, each time the next one, so that it notices
            whatever it was within ``ceil(num_watched / slice_size)`` calls.
        slice_size: how many watched places a slice has.

    Raises:
        ValueError: another mode, or a slice size below 1.
    """

    holds_captured_graphs = True  # a walk from a function stops here

    def __init__(
        self,
        fn: object,
        *,
        watch: Mapping[str, object] | Iterable[object] = (),
        seen: Sequence[torch.Tensor] = (),
        ignore: Sequence[torch.Tensor] = (),
        mode: Literal["always", "epoch"] = "epoch",
        slice_size: int = 16,
    ) -> None:
        if mode not in ("always", "epoch"):
            raise ValueError(f"mode must be 'always' or 'epoch', not {mode!r}")
        if slice_size < 1:
            raise ValueError(f"slice_size must be at least 1, not {slice_size}")
        named = _named(watch)
        self._roots: tuple[object, ...] = (fn, tuple(value for _, value in named))
        self._labels = {id(value): name for name, value in named}
        tensors = [value for _, value in named if isinstance(value, torch.Tensor)]
        self._read = {id(tensor): tensor for tensor in (*seen, *tensors)}
        self._ignored = {storage_key(tensor) for tensor in ignore}
        self._kept_alive: dict[object, torch.Tensor] = {}
        self._slice_size = slice_size if mode == "epoch" else None
        self._hooks: list[RemovableHandle] = []
        self._slices: list[Slice] = []
        self._next, self._was_stale = 0, False
        epoch.install()
        self._epoch = epoch.count()
        self._look_around()

    @property
    def num_watched(self) -> int:
        """How many places, and tensors without one, are watched; tables of modules count, too."""
        return sum(len(each.watched) for each in self._slices)

    def stale(self) -> tuple[str, ...]:
        """Names what is no longer what it was.

        Returns:
            The names, each once; none if all is as it was, or if nothing was noticed yet.
        """
        now = epoch.count()
        if self._was_stale or now != self._epoch:
            return self._look_at_everything(now)
        if self._slices:
            self._next = (self._next + 1) % len(self._slices)
            if not self._slices[self._next].is_as_it_was():
                return self._look_at_everything(now)
        return ()

    def invalidate(self) -> None:
        """Has the next `stale`, of this guard and of others, look at everything."""
        epoch.advance()

    def close(self) -> None:
        """Lets go of everything; nothing is stale from now on."""
        self._remove_hooks()
        self._roots, self._slices, self._was_stale = (), [], False
        self._labels.clear()
        self._read.clear()
        self._kept_alive.clear()

    def _look_at_everything(self, now: int) -> tuple[str, ...]:
        changed = [part for part in self._slices if not part.is_as_it_was()]
        watched = [each for part in changed for each in part.watched]
        stale = tuple(dict.fromkeys(each.name for each in watched if not each.is_as_it_was()))
        self._was_stale = bool(stale)
        if stale:
            return stale
        # Something may be bound otherwise and mean the same: from now on that is what is watched.
        moved = [each for each in watched if each.now() is not each.value]
        for each in moved:
            value = each.now()
            if isinstance(value, torch.Tensor) and self._read.pop(id(each.value), None) is not None:
                self._read[id(value)] = value
        if moved:
            self._look_around()
        self._epoch = now
        return ()

    def _look_around(self) -> None:
        """Finds what there is to watch, and takes it for what it is now."""
        self._remove_hooks()
        walks = [WeightBindings(root) for root in self._roots]
        modules = list({id(module): module for walk in walks for module in walk.modules}.values())
        tops = top_modules(modules)
        found: dict[tuple[int, object], Watched] = {}
        for binding, table in itertools.chain(self._of_modules(tops + modules), self._of_walks(walks)):
            if not self._is_ignored(binding.old):
                key = (id(binding.holder), binding.key)
                found.setdefault(key, Watched(binding.name, binding, binding.old, table))
        watched = list(found.values())
        placed = {id(each.value) for each in watched}
        for tensor in self._read.values():
            if id(tensor) not in placed and not self._is_ignored(tensor):
                watched.append(Watched(self._labels.get(id(tensor)) or _describe(tensor), None, tensor))
        for each in watched:
            if isinstance(each.value, torch.Tensor):
                # The first that had this memory owns it; the others may be views of it made elsewhere.
                key_of_memory = each.facts if each.facts and each.facts.tell_memory else id(each.value)
                self._kept_alive.setdefault(key_of_memory, each.value)
        size = self._slice_size or max(len(watched), 1)
        self._slices = [Slice(watched[start : start + size]) for start in range(0, len(watched), size)]
        self._next = 0
        if self._slice_size is not None:
            for module in tops:
                with contextlib.suppress(AttributeError, RuntimeError):  # compiled by TorchScript
                    self._hooks.append(epoch.notice_loads(module))

    def _of_modules(self, roots: list[torch.nn.Module]) -> Iterator[tuple[Binding, bool]]:
        for root, where, module in modules_below(roots):
            label = self._labels.get(id(root), "")
            yield from module_entries(f"{label}: {where}" if label else where, module)

    def _of_walks(self, walks: list[WeightBindings]) -> Iterator[tuple[Binding, bool]]:
        memory = {storage_key(tensor) for tensor in self._read.values()}
        for walk in walks:
            read = [tensor for tensor in walk.bound_tensors() if storage_key(tensor) in memory]
            for value in (*walk.modules, *read):
                for binding in (*walk.places_of(value), *walk.way_to(value)):
                    yield binding, False

    def _is_ignored(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and storage_key(value) in self._ignored

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        shape = ", ".join(str(length) for length in tensor.shape)
    except (NotImplementedError, RuntimeError):  # not yet made
        shape = "?"
    return f"a tensor {dtype} [{shape}] that the function reads"


def _named(watch: Mapping[str, object] | Iterable[object]) -> list[tuple[str, object]]:
    if isinstance(watch, Mapping):
        return list(watch.items())
    return [("", value) for value in watch]
