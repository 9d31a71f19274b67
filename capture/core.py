"""What a manager does under its lock: find the graph of a call, or say why there is none, and capture."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bindings import WeightBindings, top_modules
from .buckets import Bucket, BucketGrid
from .calls import CallReader, flat_binder, tree_builder
from .capturing import CaptureOptions, Capturer, autocast_state, is_capturing
from .compiling import CompiledFunction, mark, refuse_own_graphs
from .constants import frozen_constant, same_constant
from .errors import (
    CallError,
    CallGradientError,
    CaptureError,
    CaptureFailedError,
    MemoryBoundError,
    SpecError,
    StaleWeights,
)
from .generation import Generation
from .graph import Past
from .guard import WeightGuard
from .layout import check_leaf, layout_of_example, sizes_of_leaves
from .metrics import ReplayTimer
from .options import Options
from .places import storage_key
from .policies import BucketPolicy, Candidate, Smallest, check_choice
from .progress import progress_bar
from .spec import Constant, Rows, Signature
from .store import GraphStore, Stored, Variant

__all__ = ["Core", "Resolution", "check_buckets"]

logger = logging.getLogger(__name__)

# Graphs with collective operations that live on while the process ends keep NCCL from ending.
_LIVE: weakref.WeakSet[Core] = weakref.WeakSet()


@functools.cache
def _close_all_at_exit() -> None:
    def close_all() -> None:
        for core in list(_LIVE):
            core.close()

    atexit.register(close_all)


@dataclass(frozen=True)
class Resolution:
    """What a call gets.

    Attributes:
        sizes: its named sizes.
        bucket: the bucket that it would have, or None.
        stored: for a hit, the graph.
        reason: for a miss, why; its kind stands before the first colon.
    """

    sizes: Mapping[str, int]
    bucket: Bucket | None
    stored: Stored | None
    reason: str = ""

    @property
    def kind(self) -> str:
        """What the miss is counted as."""
        return self.reason.partition(":")[0]


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
        self.closed = False  # then nothing is captured on demand any more
        self.failed: dict[tuple[Hashable, Bucket], str] = {}  # what captures on demand have come to
        self.stale_names: tuple[str, ...] = ()  # of the last call that found any
        self.flat = flat_binder(signature)
        self.build = tree_builder(signature.output_tree)
        grid = self.grid
        self._steps = tuple(sorted({bucket[name] for bucket in grid}) for name in grid.names)
        self._is_smallest = isinstance(policy, Smallest)
        self._within = tuple(
            (grid.names.index(inner), grid.names.index(outer)) for inner, outer in grid.within.items()
        )

    @property
    def grid(self) -> BucketGrid:
        """The grid of sizes."""
        return self.signature.grid

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's leaves."""
        if self.flat is not None and not args and len(kwargs) == len(self.signature.names):
            try:
                return self.flat(kwargs)
            except KeyError:
                pass
        return self.signature.bind(args, kwargs)

    def quick(self, state: Variant, leaves: Sequence[Any], sizes: list[int]) -> Stored | None:
        """The graph of a call, where all is as it was at the capture; None for `resolve` to look closer."""
        if not self._is_smallest:
            return None
        for position, value in state.constants.items():
            if not same_constant(value, leaves[position]):
                return None
        stored = state.smallest(self.grid, self._steps, self.bounded(sizes))
        if stored is None or self._why_not_now(state) is not None:
            return None
        return stored

    def resolve(self, leaves: Sequence[Any], name: Hashable) -> Resolution:
        """What a call gets. Raises where the arguments are wrong."""
        self._refuse_gradients(leaves)
        sizes = sizes_of_leaves(self.signature.inputs, leaves)
        state = self.store.variants.get(name) if self.store is not None else None
        if state is not None:
            for layout, value in zip(state.layouts, leaves, strict=True):
                if layout is not None:
                    check_leaf(layout, value)
        self._check_divisible(sizes)
        if name in self.suspended:
            return Resolution(sizes, None, None, "suspended: resume() captures its graphs again")
        if state is None:
            known = list(self.store.variants) if self.store is not None else []
            if known:
                return Resolution(sizes, None, None, f"not precompiled: variant {name!r}, only {known}")
            return Resolution(sizes, None, None, "not precompiled")
        for position, value in state.constants.items():
            if not same_constant(value, leaves[position]):
                path = self.signature.inputs[position].path
                return Resolution(sizes, None, None, f"constant changed: {path}")
        return self._resolve_bucket(state, name, sizes)

    def resolve_sizes(self, state: Variant | None, sizes: dict[str, int], name: Hashable) -> Resolution:
        """What a call of these sizes would get whose other arguments are as declared."""
        for size_name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise CallError(f"size {size_name!r} must be a Python int of zero or more, got {size!r}")
        self._check_divisible(sizes)
        if state is None:
            return Resolution(sizes, None, None, f"not precompiled: variant {name!r}")
        for leaf in self.signature.inputs:
            if isinstance(leaf.spec, Rows) and sizes[leaf.spec.dim] % leaf.spec.per:
                raise CallError(
                    f"{leaf.spec.dim}={sizes[leaf.spec.dim]} is not a multiple of {leaf.spec.per}, which "
                    f"{leaf.path} needs"
                )
        return self._resolve_bucket(state, name, sizes)

    def _resolve_bucket(self, state: Variant, name: Hashable, sizes: Mapping[str, int]) -> Resolution:
        bucket = self.grid.choose(sizes)
        if bucket is None:
            return Resolution(sizes, None, None, f"beyond the grid: {self.grid.why_none(sizes)}")
        holding = [c for c in state.candidates(self.grid) if self.grid.holds(c.bucket, sizes)]
        if not holding:
            # What would stand in a graph's way stands in the way of capturing another beside it.
            missing = self._failed(name, bucket) or f"not captured: {bucket}"
            return Resolution(sizes, bucket, None, self._why_not_now(state) or missing)
        stored = None
        if self._is_smallest:
            stored = state.smallest(self.grid, self._steps, self.bounded([sizes[n] for n in self.grid.names]))
        if stored is None:
            in_order = self.bounded([sizes[n] for n in self.grid.names])
            bounded = dict(zip(self.grid.names, in_order, strict=True))
            choice = self.policy.choose(bounded, holding, state.candidates(self.grid))
            check_choice(choice, holding, self.policy)
            if choice.bucket is None:
                return Resolution(sizes, bucket, None, choice.reason)
            stored = state.graphs[choice.bucket]
        reason = self._why_not_now(state)
        if reason is not None:
            return Resolution(sizes, stored.graph.bucket, None, reason)
        return Resolution(sizes, stored.graph.bucket, stored)

    def bounded(self, sizes: list[int]) -> list[int]:
        """Sizes in the grid's order, where those within others are at most these."""
        if not self._within:
            return sizes
        bounded = sizes.copy()
        for inner, outer in self._within:
            if bounded[inner] > bounded[outer]:
                bounded[inner] = bounded[outer]
        return bounded

    def _failed(self, name: Hashable, bucket: Bucket) -> str | None:
        """Why a bucket is not to be captured on demand again."""
        error = self.failed.get((name, bucket))
        return None if error is None else f"capture failed: {error}"

    def _why_not_now(self, state: Variant) -> str | None:
        """Why no graph of a variant can serve a call at this moment, or None."""
        device = self.device
        if device is None:
            raise CaptureError("internal: graphs without a device")
        if is_capturing(device.type == "cuda"):
            return "inside another capture: the function becomes part of it"
        now = autocast_state(device)
        if now != state.autocast:
            return f"autocast differs: captured under {state.autocast}, called under {now}"
        for module, training in state.training:
            if module.training is not training:
                mode = "train" if training else "eval"
                return f"training mode differs: {type(module).__name__} was captured in {mode}() mode"
        if state.guard is not None:
            stale = state.guard.stale()
            if stale:
                self.stale_names = stale
                return f"stale weights: {', '.join(stale[:5])}{' ...' if len(stale) > 5 else ''}"
        return None

    def capture(
        self,
        leaves: list[Any],
        buckets: Sequence[Bucket],
        name: Hashable,
        *,
        progress: bool = False,
        replace: bool = True,
    ) -> None:
        """Captures buckets of a variant, largest first. The capture lock and the manager's are held.

        Args:
            leaves: one call's.
            buckets: which.
            name: of the variant.
            progress: show a bar.
            replace: drop all that the variant has, so that memory isn't needed twice.

        Raises:
            CaptureFailedError: a bucket could not be captured; those before it are kept and work.
        """
        device = self._device_of(leaves)
        layouts = tuple(
            layout_of_example(leaf, value, device)
            for leaf, value in zip(self.signature.inputs, leaves, strict=True)
        )
        constants = {
            position: frozen_constant(leaf.path, value)
            for position, (leaf, value) in enumerate(zip(self.signature.inputs, leaves, strict=True))
            if isinstance(leaf.spec, Constant)
        }
        store = self._store_on(device)
        seen = dict(store.variants[name].seen) if name in store.variants and not replace else {}
        if replace:
            store.drop_variant(name)
            self.failed = {key: error for key, error in self.failed.items() if key[0] != name}
        self.suspended.pop(name, None)
        order = sorted(buckets, key=self.order, reverse=True)
        with torch.no_grad():
            generation = store.generation_for(layouts, buckets, device)
            state = store.variants.get(name)
            if state is None:
                state = Variant(
                    layouts, constants, autocast_state(device), (), None, CallReader(self.signature, layouts)
                )
                store.variants[name] = state
            capturer = Capturer(
                self.compiled or self.fn,
                generation,
                CaptureOptions(
                    self.options.warmup,
                    self.options.verify,
                    self.options.prove_padding,
                    self.options.ignore,
                    (lambda nbytes: store.admit(nbytes, generation)),
                    self.options.max_bytes is not None,
                ),
                leaves,
                mark if self.compiled is not None else None,
            )
            done = 0
            try:
                with capturer.state_preserved(), progress_bar(progress, len(order)) as advance:
                    for bucket in order:
                        try:
                            store.add(state, capturer.capture(bucket, name), generation)
                            done += 1
                        except Exception as error:
                            raise CaptureFailedError(
                                f"{bucket} could not be captured ({type(error).__name__}: {error}); {done} of "
                                f"{len(order)} buckets are captured and usable, calls that need others run eagerly",
                                bucket,
                            ) from error
                        advance(bucket)
            finally:
                self.written |= capturer.written
                state.seen = seen | {storage_key(tensor): tensor for tensor in capturer.seen}
                self._guard(state, name, generation)
                store.prune()

    def capture_on_demand(
        self, leaves: list[Any], buckets: Sequence[Bucket], name: Hashable, *, replace: bool
    ) -> None:
        """Captures buckets for a call that came; where memory is bound, in place of older ones.

        A bucket that can't be captured isn't tried again, but run eagerly, until `precompile` or `close`.
        """
        pending = tuple(buckets)
        while pending:
            try:
                self.capture(leaves, pending, name, replace=replace)
                return
            except CaptureFailedError as error:
                replace = False
                bucket = error.bucket
                others = [key for g in self.store.generations for key in g.graphs] if self.store else []
                if isinstance(error.__cause__, MemoryBoundError) and others and len(pending) == 1:
                    # What it was to share a pool with stands in its way.
                    self.store.drop(others)  # type: ignore[union-attr]
                    continue
                if not isinstance(bucket, Bucket):
                    raise
                self.failed[name, bucket] = f"{error.__cause__ or error}"
                logger.warning("%s; calls that need it run eagerly", error)
                state = self.store.variants.get(name) if self.store is not None else None
                done = state.graphs if state is not None else {}
                pending = tuple(b for b in pending if b != bucket and b not in done)

    def lacks(self, sizes: Mapping[str, int], name: Hashable) -> Bucket | None:
        """The bucket to capture for a call of these sizes, if the policy would take it and it isn't there."""
        bucket = self.grid.choose(sizes)
        state = self.store.variants.get(name) if self.store is not None else None
        if bucket is None or (name, bucket) in self.failed or (state is not None and bucket in state.graphs):
            return None
        alone = (Candidate(bucket, 0, None, None),)
        in_order = self.bounded([sizes[n] for n in self.grid.names])
        choice = self.policy.choose(dict(zip(self.grid.names, in_order, strict=True)), alone, alone)
        return choice.bucket

    def order(self, bucket: Bucket) -> tuple[int, ...]:
        """How buckets are sorted."""
        return tuple(bucket[name] for name in self.grid.names)

    def predict(self, leaves: list[Any], buckets: Sequence[Bucket]) -> int | None:
        """Bytes of static buffers and pool for these buckets; the locks are held."""
        device = self._device_of(leaves)
        layouts = tuple(
            layout_of_example(leaf, value, device)
            for leaf, value in zip(self.signature.inputs, leaves, strict=True)
        )
        generation = Generation(self.signature, layouts, buckets, device)
        try:
            capturer = Capturer(self.compiled or self.fn, generation, CaptureOptions(), leaves)
            order = sorted(buckets, key=self.order, reverse=True)
            with capturer.state_preserved():
                pool = capturer.rehearse(order)
            return None if pool is None else pool + generation.static_bytes
        finally:
            generation.release()

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
        self.closed = True
        self.suspended.clear()
        self.failed.clear()
        if self.store is not None:
            self.store.clear()
            self.store = None

    def refuse(self, leaves: Sequence[Any]) -> None:
        """Raises for arguments that no call may have."""
        self._refuse_gradients(leaves)
        self._check_divisible(sizes_of_leaves(self.signature.inputs, leaves))

    def _store_on(self, device: torch.device) -> GraphStore:
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

    def _guard(self, state: Variant, name: Hashable, generation: Generation) -> None:
        """Watches what the function reaches and read, as it is now: nothing was stale before these captures."""
        if state.guard is not None:
            state.guard.close()
        state.guard = WeightGuard(
            self.fn,
            watch=self.watch,
            seen=list(state.seen.values()),
            ignore=[*generation.inputs.storages, generation.record, generation.fills],
            mode=self.options.check,
        )
        if name is not None:  # a variant may be a mode, and its callers say which they want
            return
        tops = top_modules(WeightBindings(self.fn).modules)
        state.training = tuple((module, module.training) for module in tops)

    def _device_of(self, leaves: Sequence[Any]) -> torch.device:
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if device is None:
            raise CallError(
                "the example has no tensor, so there is no device to capture on: give at least one tensor input"
            )
        if device.type not in ("cpu", "cuda"):
            raise CallError(f"graphs are captured on cuda, or recorded on cpu, got inputs on {device}")
        return device

    def _check_divisible(self, sizes: Mapping[str, int]) -> None:
        for path, spec in zip(self.signature.output_paths, self.signature.outputs, strict=True):
            if isinstance(spec, Rows) and spec.dim in sizes and sizes[spec.dim] % spec.per:
                raise CallError(
                    f"{spec.dim}={sizes[spec.dim]} is not a multiple of {spec.per}, "
                    f"which {path} needs for its rows (one per {spec.per})"
                )

    def _refuse_gradients(self, leaves: Sequence[Any]) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf, value in zip(self.signature.inputs, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise CallGradientError(
                    f"{leaf.path} needs a gradient, and a replay records none: pass {leaf.path}.detach(), or call "
                    "under torch.no_grad() or torch.inference_mode(); for training call the function itself"
                )


def check_buckets(grid: BucketGrid, buckets: Sequence[Bucket] | None, most: int | None) -> tuple[Bucket, ...]:
    """The buckets to capture: those given, or all.

    Raises:
        SpecError: none, others than the grid's, or more than there may be graphs.
    """
    chosen = grid.buckets if buckets is None else tuple(buckets)
    if not chosen or any(bucket not in grid.buckets for bucket in chosen):
        raise SpecError(f"buckets must be some of the grid's {len(grid)} buckets, got {buckets}")
    if most is not None and len(chosen) > most:
        raise SpecError(
            f"max_graphs is {most}, and {len(chosen)} buckets are to be captured: name fewer with buckets=, or raise it"
        )
    return chosen
