"""The state of a manager, and what changes it without a call or a capture. Whoever uses it holds its lock."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from .buckets import Bucket, BucketGrid
from .calls import flat_binder, tree_builder
from .compiling import CompiledFunction, refuse_own_graphs
from .errors import CallError, CallGradientError, CaptureError, StaleWeights
from .graph import Past
from .layout import sizes_of_leaves
from .metrics import ReplayTimer
from .options import Options
from .policies import BucketPolicy, Smallest
from .spec import Rows, Signature
from .store import GraphStore

__all__ = ["Core"]

# Graphs with collective operations that live on while the process ends keep NCCL from ending.
_LIVE: weakref.WeakSet[Core] = weakref.WeakSet()


@functools.cache
def _close_all_at_exit() -> None:
    def close_all() -> None:
        for core in list(_LIVE):
            with contextlib.suppress(Exception):  # the others' turn, whatever state the device is in
                core.close()

    atexit.register(close_all)


class Core:
    """The state of a manager."""

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        options: Options,
        policy: BucketPolicy,
        watch: Any,
    ) -> None:
        self.fn = fn
        self.signature = signature
        self.options = options
        self.policy = policy
        self.watch = watch
        self.lock = threading.RLock()
        self.device: torch.device | None = None
        self.calls = 0
        self.misses: Counter[str] = Counter()
        self.written: set[int] = set()  # positions of inputs that captures have shown the function to write
        refuse_own_graphs(fn)
        self.compiled = CompiledFunction(fn) if options.compile else None
        self.timer: ReplayTimer | None = None
        self.suspended: dict[Hashable, tuple[list[Any], tuple[Bucket, ...]]] = {}
        self.store: GraphStore | None = None
        self.past = Past()
        self.busy = ""  # what this thread is in the midst of, and must not be disturbed at
        self.staged: object = None
        self.closed = False  # then nothing is captured on demand any more
        self.failed: dict[tuple[Hashable, Bucket], str] = {}  # what captures on demand have come to
        self.stale_names: tuple[str, ...] = ()  # of the last call that found any
        self.flat = flat_binder(signature)
        self.build = tree_builder(signature.output_tree)
        grid = self.grid
        self.steps = tuple(sorted({bucket[name] for bucket in grid}) for name in grid.names)
        self.is_smallest = isinstance(policy, Smallest)
        self._within = tuple(
            (grid.names.index(inner), grid.names.index(outer)) for inner, outer in grid.within.items()
        )

    @property
    def grid(self) -> BucketGrid:
        """The grid of sizes."""
        return self.signature.grid

    def refuse_busy(self, what: str) -> None:
        """Raises CaptureError where this thread is in the midst of a capture or a stage."""
        if self.busy:
            raise CaptureError(
                f"{what} can't be done within {self.busy} of the same manager: do it before or after"
            )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's leaves."""
        if self.flat is not None and not args and len(kwargs) == len(self.signature.names):
            try:
                return self.flat(kwargs)
            except KeyError:
                pass
        return self.signature.bind(args, kwargs)

    def bounded(self, sizes: list[int]) -> list[int]:
        """Sizes in the grid's order, where those within others are at most these."""
        if not self._within:
            return sizes
        bounded = sizes.copy()
        for inner, outer in self._within:
            if bounded[inner] > bounded[outer]:
                bounded[inner] = bounded[outer]
        return bounded

    def order(self, bucket: Bucket) -> tuple[int, ...]:
        """How buckets are sorted."""
        return tuple(bucket[name] for name in self.grid.names)

    def refuse(self, leaves: Sequence[Any]) -> None:
        """Raises for arguments that no call may have."""
        self.refuse_gradients(leaves)
        self.check_divisible(sizes_of_leaves(self.signature.inputs, leaves))

    def stale_error(self) -> StaleWeights:
        """The error for the replaced weights that the last call found."""
        names = self.stale_names
        return StaleWeights(
            f"weights were replaced since the capture: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}; the "
            "graphs would go on with the old memory. Call precompile(...) again, write new values in place with copy_, "
            "or create the manager with on_stale='recapture'",
            names,
        )

    def invalidate(self) -> None:
        """Has every guard compare all at the next call."""
        for state in self.store.variants.values() if self.store is not None else ():
            if state.guard is not None:
                state.guard.invalidate()

    def evict(self, bucket: Bucket, name: Hashable) -> bool:
        """Drops one graph; whether there was one."""
        self.refuse_busy("evict")
        state = self.store.variants.get(name) if self.store is not None else None
        if self.store is None or state is None or bucket not in state.graphs:
            return False
        self.store.drop([state.graphs[bucket].graph.key])
        self.store.prune()
        return True

    def poison(self) -> None:
        """Fills all pools with NaN."""
        for generation in self.store.generations if self.store is not None else ():
            generation.poison()

    def close(self) -> None:
        """Drops everything."""
        self.refuse_busy("close")
        self.closed = True
        self.suspended.clear()
        self.failed.clear()
        if self.store is not None:
            self.store.clear()
            self.store = None

    def store_on(self, device: torch.device) -> GraphStore:
        """The store of graphs on a device; graphs on another one are dropped."""
        if self.store is not None and self.device != device:
            self.store.clear()
            self.store = None
        if self.store is None:
            self.device = device
            _LIVE.add(self)
            _close_all_at_exit()
            self.timer = ReplayTimer(device, self.options.time_every)
            self.store = GraphStore(
                self.signature, self.options.max_graphs, self.options.max_bytes, self.timer, self.past
            )
        return self.store

    def check_divisible(self, sizes: Mapping[str, int]) -> None:
        """Raises CallError for a size that the rows of an output don't divide."""
        for path, spec in zip(self.signature.output_paths, self.signature.outputs, strict=True):
            if isinstance(spec, Rows) and spec.dim in sizes and sizes[spec.dim] % spec.per:
                raise CallError(
                    f"{spec.dim}={sizes[spec.dim]} is not a multiple of {spec.per}, "
                    f"which {path} needs for its rows (one per {spec.per})"
                )

    def refuse_gradients(self, leaves: Sequence[Any]) -> None:
        """Raises CallGradientError for an input that needs a gradient, where gradients are recorded."""
        if not torch.is_grad_enabled():
            return
        for leaf, value in zip(self.signature.inputs, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise CallGradientError(
                    f"{leaf.path} needs a gradient, and a replay records none: pass {leaf.path}.detach(), or call "
                    "under torch.no_grad() or torch.inference_mode(); for training call the function itself"
                )
