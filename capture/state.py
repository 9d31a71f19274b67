"""Leaves the user's state as it was: what warm-up and capture run, they may change, and this puts it back.

Writes are found in three ways. Operations that declare what they write are watched while the function first
runs, and what they are about to write is copied, wherever it lives. What writes without saying so (batch
normalisation's statistics, kernels launched by hand) is found by comparing the small tensors that the function
can reach before and after. And tensors that the function binds anew to an attribute, a list or a global are put
back where they were, as are plain values: numbers, strings and flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .compiling import eagerly
from .errors import NotCapturableError
from .places import UNSET, storage_key
from .plain import PlainKey, PlainState, same_plain
from .reach import Reach

__all__ = ["StateSnapshot"]

# Tensors up to this size are compared; statistics and counters are far smaller, caches (whose writes are
# declared) larger.
_COMPARED_BYTES = 16 << 20


class StateSnapshot:
    """The state that a function may change, as it is now.

    Args:
        fn: the function.
        device: the device that it runs on; its generator is kept beside the CPU's.
        others: whatever else it is given and may change, such as constant tensors.
        inputs: tensors that are the manager's own and nobody's state.
        ignore: names of places whose plain values the function may change at every run, such as "Counter.steps"
            or "steps".
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        device: torch.device,
        others: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        ignore: Collection[str] = (),
    ) -> None:
        self._device = device
        self._reach = Reach((fn, list(others)))
        self._plain = PlainState(self._reach.plain, ignore)
        # The bucket before, and for each plain value the last bucket whose first run set it, and to what.
        self._before: Callable[[], object] | None = None
        self._set_by: dict[PlainKey, tuple[Any, Callable[[], object]]] = {}
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._generators = [(generator, generator.get_state()) for generator in self._reach.generators]
        self._ignored = {storage_key(tensor) for tensor in inputs}
        self._outside: dict[int, torch.Tensor] = {}
        #: Keys of the `inputs` that operations were seen to write.
        self.own_written: set[int] = set()
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._compared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in self._reach.tensors:
            memory = _memory(tensor)
            if (
                memory is not None
                and memory.numel() <= _COMPARED_BYTES
                and storage_key(tensor) not in self._ignored
            ):
                self._compared.setdefault(storage_key(tensor), (memory, memory.clone()))

    @contextlib.contextmanager
    def watching(self, *, declared: bool = True) -> Iterator[None]:
        """Notes what the body writes.

        Args:
            declared: whether to watch operations; without it only the comparison finds writes.

        Raises:
            NotCapturableError: the body bound state anew: tensors that it read gave way to others.
        """
        watch = _Watch(self._about_to_write)
        try:
            with contextlib.ExitStack() as opened:
                if declared:
                    opened.enter_context(eagerly())
                    opened.enter_context(watch)
                yield
        finally:
            for key, (memory, saved) in self._compared.items():
                if key not in self._written and not torch.equal(memory, saved):
                    self._written[key] = (memory, saved)
            self._plain.look()
            for key, tensor in watch.outside.items():
                if key not in self._ignored:
                    self._outside.setdefault(key, tensor)
            moved = self._reach.rebound(watch.read)
        if moved is not None:
            raise NotCapturableError(
                f"the function sets {moved} to another tensor, and a replay runs no Python: it would go on with the "
                "tensor of the capture; write into the tensor that is there, with copy_ or an in-place operation"
            )

    def outside(self) -> list[torch.Tensor]:
        """The tensors that operations of the watched runs read and that none of them made, one for each storage."""
        return list(self._outside.values())

    def plain_changes(self) -> list[tuple[str, Any, Any]]:
        """What the watched run changed of the plain values: places, old and new values, without what is ignored.

        Compared is with the values at the last `restore`.
        """
        return [(change.name, change.old, change.new) for change in self._plain.changes().values()]

    def refuse_plain_changes(self, again: Callable[[], object]) -> None:
        """Tells plain values that only a first run sets from those that a replay would leave stale.

        To be called after each bucket's watched run and before the next `restore`. Where that run changed no plain
        value, which is the rule, nothing is run. Else `again` runs once more, from what the first run left in Python
        and with tensors as before: what it changes, every run changes.

        A value that is the same for every run of one bucket and another for another bucket (the last batch's size)
        is stale too, after a replay of the other. A cache that grows to the largest bucket's need is not. So where
        an earlier bucket left another value, its `again` runs and then this one's, which must find nothing to change.

        Args:
            again: sets the inputs to what they were before the watched run, and runs the function on them. It is kept
                for later buckets, so it should hold no tensors of its bucket alone.

        Raises:
            NotCapturableError: names the places, their values and the remedies.
        """
        before, self._before = self._before, again
        changed = self._plain.changes()
        if not changed:
            return
        try:
            self._run_on(again)
            self._plain.refuse("again at its second run")
            others = []
            for key, change in changed.items():
                value, run = self._set_by.get(key, (UNSET, before))
                if run is not None and run not in others and not same_plain(value, change.new):
                    others.append(run)
            for run in others:
                self._run_on(run)
            if others:
                self._run_on(again)
                self._plain.refuse("differently for another bucket")
            self._plain.settle()
            self._set_by |= {key: (change.new, again) for key, change in changed.items()}
        finally:
            self._reach.rebound(set())  # so that what these runs bound is put back too

    def _run_on(self, run: Callable[[], object]) -> None:
        """Runs with tensors and generators as they were and Python's values as the last run left them."""
        self._plain.mark()
        self._restore_values()
        try:
            run()
        except Exception as error:
            self._plain.look()
            try:
                # A count that goes past an end, most likely.
                self._plain.refuse("at every run, and its second run fails")
            except NotCapturableError as found:
                raise found from error
            raise
        self._plain.look()

    def restore(self, *, everything: bool = False) -> None:
        """Puts bindings, values and generators back; tensors that nobody wrote are not touched.

        Plain values are put back with the tensors, since a flag that says that a table is filled must not outlive
        what is in the table. Where no tensor was put back, what only a first run sets stays until the end, so that
        the capture doesn't repeat a first run's work.

        Args:
            everything: look at every binding, not only at those that the watched run changed.
        """
        bound = self._reach.rebind(everything=everything)
        self._plain.put_back(everything=everything or bound or bool(self._written))
        self._restore_values()

    def _restore_values(self) -> None:
        # Inference mode, since some of the tensors may be inference tensors, which nothing else may write.
        with torch.inference_mode():
            for memory, saved in self._written.values():
                memory.copy_(saved)
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)
        for generator, state in self._generators:
            generator.set_state(state)

    def _about_to_write(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._ignored:
            self.own_written.add(key)
        if key in self._ignored or key in self._written:
            return
        memory = _memory(tensor)
        if memory is not None:
            compared = self._compared.get(key)
            self._written[key] = compared or (memory, _copy(memory))


class _Watch(TorchDispatchMode):
    """Tells of each tensor that an operation is about to write and that no operation under it made."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._tell = tell
        # Keys alone: to hold the tensors would keep every intermediate of the run in memory. A key that is used
        # again is again that of a storage that an operation made.
        self._made: set[int] = set()
        self.read: set[int] = set()
        self.outside: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in self._made:
                        self._tell(leaf)
        given = {
            storage_key(leaf): leaf
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for key in given.keys() - self._made - self.outside.keys():
            self.outside[key] = given[key]
        outputs = func(*args, **kwargs)
        read = given.keys()
        self.read |= read
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in read:
                self._made.add(storage_key(leaf))
        return outputs


def _memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """All bytes of a tensor's storage, or None where it has none that a function could write."""
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # a fake or a wrapper: its memory is nowhere, or its inner tensors'
    try:
        storage = tensor.untyped_storage()
        # Wrapper subclasses and fake tensors have a storage of some size and no memory behind it.
        if storage.nbytes() == 0 or storage.data_ptr() == 0:
            return None
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    try:
        with torch.inference_mode(tensor.is_inference()):
            return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    except RuntimeError:  # a fake tensor's memory is nowhere
        return None


def _copy(memory: torch.Tensor) -> torch.Tensor:
    try:
        return memory.clone()
    except torch.cuda.OutOfMemoryError:
        # A cache that fills the device: its copy waits in host memory instead.
        return memory.cpu()
