"""The contract of a captured graph on a CPU: record a run's operations, run them again on the same storage.

It exists so that the bugs of graph capture show in tests without a GPU. A replay runs the recorded operations
on the tensors of the recorded run: Python is not run again, sizes do not change, a parameter that was replaced
is not noticed. Before each replay every intermediate is filled with NaN (integers with a large value), so that
an operation which reads what no recorded operation wrote shows at once; so is memory that the function took
from outside and that nobody else holds any more, since on a GPU it would be somebody else's by then. Memory
that torch borrows from an array is left alone.

Refused, with the operation's name: scalars and arrays read from tensors, shapes that depend on data, tensors
made from Python data or arrays, and in-place changes of a tensor's shape or storage. It does not test compiled
code: compiled functions are run eagerly while recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._compat import storage_use_count
from .errors import NotCapturableError

__all__ = ["OutsideMemory", "Recording", "poison"]

logger = logging.getLogger(__name__)

_READS = {
    "item": "a scalar is read from a tensor",
    "tolist": "values are read from a tensor",
    "numpy": "an array is made from a tensor",
    "__array__": "an array is made from a tensor",
    "__bool__": "a branch is taken on a tensor's value",
    "__int__": "a scalar is read from a tensor",
    "__float__": "a scalar is read from a tensor",
    "__complex__": "a scalar is read from a tensor",
    "__index__": "a scalar is read from a tensor",
    "cpu": "a tensor is copied to the host",
    "__repr__": "a tensor is printed",
    "__format__": "a tensor is printed",
}
_READ_REMEDY = (
    "on a GPU it would wait for the device; keep the value on the device, or compute it before and pass it in"
)
_MADE_REMEDY = "a replay would see the values of the capture; make it before, or use torch.full or torch.arange"


@dataclass(frozen=True)
class _Step:
    """One recorded operation.

    `fresh` are the outputs with storage of their own, by position among all outputs.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with NaN, or with a value that no sane index has where it holds integers."""
    with torch.inference_mode():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


class Recording:
    """A function's recorded run, with the interface of a captured device graph.

    Args:
        fn: called once, without arguments, to be recorded.
        keep: tensors that the owner fills before each replay (static inputs and outputs): they are not
            poisoned.

    Raises:
        NotCapturableError: the function does something that a replay cannot repeat.
    """

    def __init__(
        self, fn: Callable[[], object], keep: list[torch.Tensor], outside: OutsideMemory | None = None
    ) -> None:
        tape = _Tape(keep)
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), _FunctionRules(), tape:
                fn()
        except Exception as error:
            if "HigherOrderOperator" not in str(error) and not type(error).__module__.startswith(
                "torch._dynamo"
            ):
                raise
            raise NotCapturableError(
                "the function runs an operation that takes functions, or compiles itself (torch.cond, flex_attention), "
                "which can't be recorded on a CPU: capture it on a GPU, or use a plain form on a CPU"
            ) from error
        self._steps = tape.steps
        self._intermediates = tape.intermediates
        self._outside = outside if outside is not None else OutsideMemory()
        self._counts = tape.own_references()
        self._outside.add(tape.outside, self._counts)
        tape.release()

    @property
    def num_operations(self) -> int:
        """How many operations a replay runs."""
        return len(self._steps)

    def replay(self) -> None:
        """Runs the recorded operations again, after poisoning what they must not read."""
        for tensor in self._intermediates:
            poison(tensor)
        self._outside.poison_dead(self._counts)
        # Inference mode may write both to ordinary tensors and to inference tensors that the function took from
        # outside.
        with torch.inference_mode():
            for step in self._steps:
                outputs = step.op(*step.args, **step.kwargs)
                if step.fresh:
                    flat = pytree.tree_leaves(outputs)
                    for position, recorded in step.fresh:
                        recorded.copy_(flat[position])

    def reset(self) -> None:
        """Drops everything recorded."""
        self._steps = []
        self._intermediates = []
        self._outside.remove(self._counts)
        self._counts = {}


class OutsideMemory:
    """Storages that recordings took from outside, with the references that the recordings themselves hold.

    The recordings of one manager share it: what another bucket's recording holds, nobody else need hold.
    """

    def __init__(self) -> None:
        self._holders: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, holders: dict[int, torch.Tensor], counts: dict[int, int]) -> None:
        """Takes in a recording's outside tensors and how many references it holds to each."""
        for key, holder in holders.items():
            self._holders.setdefault(key, holder)
            self._counts[key] = self._counts.get(key, 0) + counts[key]

    def remove(self, counts: dict[int, int]) -> None:
        """Forgets a recording's references."""
        for key, count in counts.items():
            self._counts[key] -= count
            if self._counts[key] <= 0:
                del self._counts[key], self._holders[key]

    def poison_dead(self, keys: Iterable[int]) -> None:
        """Fills those of the storages with NaN that nobody but recordings holds any more."""
        for key in keys:
            holder = self._holders[key]
            storage = holder.untyped_storage()
            # Memory that torch only borrows (an array's) may have an owner that torch doesn't count. Two
            # references are the holder here and the storage object that asks.
            if storage.resizable() and storage_use_count(storage) <= self._counts[key] + 2:
                poison(holder)


class _FunctionRules(TorchFunctionMode):
    """Refuses what never reaches the dispatcher on a CPU but would fail, or be frozen, in a capture."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            raise NotCapturableError(
                f"{_READS[name]} (Tensor.{name}), which a replay cannot do: {_READ_REMEDY}"
            )
        if name == "__set__" and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotCapturableError(
                "a tensor's storage is replaced (tensor.data = ...): write its values with copy_ instead"
            )
        if name == "__setitem__" and isinstance(args[-1], (bool, int, float)):
            # x[i] = 1.0 wraps the number in a tensor on its way: a constant of the program, not data.
            args = (*args[:-1], torch.full((), args[-1], dtype=args[0].dtype, device=args[0].device))
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Writes down each operation, with its arguments as they are at that moment."""

    def __init__(self, keep: list[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.intermediates: list[torch.Tensor] = []
        self._kept = {_key(tensor) for tensor in keep}
        self._own: set[int] = set()
        self.outside: dict[int, torch.Tensor] = {}
        self._live: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args, kwargs)
        # Aliases of the arguments as they are now: when a parameter's data is replaced later, the recorded run
        # keeps the old one, as a captured graph does.
        given = pytree.tree_leaves((args, kwargs))
        read = {_key(tensor) for tensor in given if isinstance(tensor, torch.Tensor)}
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                key = _key(tensor)
                if key not in self._own and key not in self._kept and key not in self.outside:
                    self.outside[key] = tensor.detach()
        frozen_args, frozen_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        outputs = func(*args, **kwargs)
        fresh = []
        for position, out in enumerate(pytree.tree_leaves(outputs)):
            if isinstance(out, torch.Tensor) and _key(out) not in read:
                held = out.detach()
                self._live.append(out)
                if _key(out) not in self._own:
                    self._own.add(_key(out))
                    self.intermediates.append(held)
                fresh.append((position, held))
        if fresh and _is_uninitialised(func):
            return outputs  # only memory: a replay must not rely on what lies in it
        if fresh or func._schema.is_mutable:
            self.steps.append(_Step(func, frozen_args, frozen_kwargs, tuple(fresh)))
        return outputs

    def own_references(self) -> dict[int, int]:
        """How many references the recorded steps hold to each outside storage."""
        counts = dict.fromkeys(self.outside, 0)
        seen: set[int] = set()
        for step in self.steps:
            for leaf in pytree.tree_leaves((step.args, step.kwargs, [tensor for _, tensor in step.fresh])):
                if isinstance(leaf, torch.Tensor) and _key(leaf) in counts and id(leaf) not in seen:
                    seen.add(id(leaf))
                    counts[_key(leaf)] += 1
        return counts

    def release(self) -> None:
        """Lets go of what only the recording of the run needed."""
        self._live.clear()
        self.outside = {}


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def _is_uninitialised(func: Any) -> bool:
    return func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _UNINITIALISED


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises for an operation that a replay cannot repeat."""
    name, tags = str(func), func.tags
    if torch.Tag.data_dependent_output in tags:
        raise NotCapturableError(
            f"{name} reads a scalar from a tensor, which a replay cannot do: {_READ_REMEDY}"
        )
    if torch.Tag.inplace_view in tags:
        raise NotCapturableError(
            f"{name} changes a tensor's shape in place, which a replay cannot repeat: use the form that "
            "returns a view"
        )
    if "aten::lift_fresh" in func._schema.name:
        raise NotCapturableError(f"a tensor is made from Python data or an array ({name}): {_MADE_REMEDY}")
    base = func._schema.name.removeprefix("aten::")
    if base.startswith(("index", "_index_put", "_unsafe_index")) and _has_mask(args):
        values = args[2] if len(args) > 2 else kwargs.get("values")
        if (
            base.startswith(("index_put", "_index_put"))
            and isinstance(values, torch.Tensor)
            and values.numel() == 1
        ):
            return  # a fill by mask, which has a fixed shape
        raise NotCapturableError(
            f"{name} is indexed by a boolean mask, so its shape depends on data: use torch.where, or integer "
            "positions computed before"
        )
    fixed = base.startswith(("index", "_unsafe_index")) or kwargs.get("output_size") is not None
    if torch.Tag.dynamic_output_shape in tags and not fixed:
        raise NotCapturableError(
            f"{name} gives an output whose shape depends on data, which a replay cannot repeat: compute it before "
            "and pass the result in, or use a form of fixed size"
        )


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )
