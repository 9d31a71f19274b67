"""The call of a manager: from arguments to results, by a graph or by the function.

The quick way asks each thing once and enqueues two launches, the staging and the graph. Whatever isn't as at the
capture goes the slow way, which finds the same answers with their reasons.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .buckets import Bucket
from .calls import Source
from .compiling import run_without_recompiling
from .cuda import CAPTURE_LOCK
from .errors import BucketError, CallError, CaptureError, MissError
from .filling import Filler
from .leases import Lease
from .replaying import sizes_in_order
from .resolving import Resolution
from .spec import BucketSize, Offsets, Rows
from .store import Stored, Variant

__all__ = ["COPY", "LEASE", "Into", "Server", "Staged", "Want", "in_stage"]

COPY, LEASE = "copy", "lease"


@dataclass(frozen=True)
class Into:
    """The caller's own tensors for the results."""

    out: Any


Want = str | Into

# How many stages this thread is in, of any managers.
_STAGES = threading.local()

# Misses that another graph may cure.
_LACKING = ("not captured", "not precompiled", "not exact")


def in_stage() -> bool:
    """Whether this thread is within a stage of some manager."""
    return getattr(_STAGES, "depth", 0) > 0


class Server:
    """Serves the calls of one manager."""

    def __init__(self, core: Filler) -> None:
        self.core = core
        self._plain = not core.options.nvtx
        self._names = set(core.grid.names)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], variant: Hashable, want: Want) -> Any:
        """One call; see `CaptureManager`."""
        core = self.core
        leaves = core.bind(args, kwargs)
        with core.lock:
            if core.staged is not None:
                core.refuse_busy("a call")
            state = self._variant(variant)
            if state is not None:
                read = state.reader.read(leaves)
                if read is not None:
                    stored = core.quick(state, leaves, read[0])
                    if stored is not None:
                        if want is COPY and self._plain and stored.replayer.is_current():
                            return self._copied(stored, leaves, *read)
                        return self._replay(stored, leaves, read[0], want, read[1])
        return self._slowly(leaves, variant, want)

    def _copied(
        self, stored: Stored, leaves: Sequence[Any], sizes: list[int], sources: Sequence[Source | None]
    ) -> Any:
        """What `_replay` does, for copies alone."""
        core, replayer, graph = self.core, stored.replayer, stored.graph
        results = replayer.results(sizes)
        replayer.run(graph, leaves, sources, sizes, results)
        core.calls += 1
        graph.count(sizes)
        core.store.touch(graph, stored.generation)  # type: ignore[union-attr]
        return core.build(replayer.values(graph, results))

    def stage(self, sizes: Mapping[str, int], variant: Hashable) -> Staged:
        """The static inputs for a call of these sizes; the lock is held until the replay.

        Raises:
            MissError: no graph holds them.
            BucketError: sizes are missing, unknown or negative.
        """
        core = self.core
        core.refuse_busy("stage")
        state = self._variant(variant)
        if sizes.keys() != self._names:
            raise BucketError(f"stage takes a size for each of {list(core.grid.names)}, got {dict(sizes)}")
        found = core.resolve_sizes(state, dict(sizes), variant)
        if found.stored is None:
            raise MissError(
                f"no graph holds these sizes ({found.reason}), so there is nothing to write into", found.reason
            )
        staged = Staged(self, found.stored, sizes_in_order(core.grid.names, sizes))
        core.staged, core.busy = staged, "a stage"
        _STAGES.depth = getattr(_STAGES, "depth", 0) + 1
        return staged

    def _variant(self, name: Hashable) -> Variant | None:
        core = self.core
        try:
            return core.store.variants.get(name) if core.store is not None else None
        except TypeError:
            raise CallError(f"variant must be hashable, such as a string, got {name!r}") from None

    def end_stage(self, staged: Staged) -> None:
        """Marks what was written into the static inputs, for calls on other streams."""
        replayer = staged.stored.replayer
        replayer.leave(replayer.enter())
        self.core.staged, self.core.busy = None, ""
        _STAGES.depth -= 1

    def replay_staged(self, stored: Stored, sizes: list[int], want: Want) -> Any:
        """Replays on what lies in the static inputs."""
        return self._replay(stored, None, sizes, want)

    def _slowly(self, leaves: list[Any], variant: Hashable, want: Want) -> Any:
        core, options = self.core, self.core.options
        with core.lock:
            found = core.resolve(leaves, variant)
            if found.stored is not None:
                return self._replay(found.stored, leaves, sizes_in_order(core.grid.names, found.sizes), want)
            if found.kind == "stale weights" and options.on_stale == "error":
                raise core.stale_error()
            wanted = self._to_capture(found, variant)
        if wanted:
            with CAPTURE_LOCK, core.lock:
                core.invalidate()  # a capture's guard starts anew: what isn't noticed before it never is
                found = core.resolve(leaves, variant)  # another thread may have been here meanwhile
                if found.kind == "stale weights" and options.on_stale == "error":
                    raise core.stale_error()
                wanted = self._to_capture(found, variant) if found.stored is None else ()
                if wanted:
                    core.capture_on_demand(leaves, wanted, variant, replace=found.kind == "stale weights")
                    found = core.resolve(leaves, variant)
                if found.stored is not None:
                    return self._replay(
                        found.stored, leaves, sizes_in_order(core.grid.names, found.sizes), want
                    )
        with core.lock:
            core.calls += 1
            core.misses[found.kind] += 1
            inside = found.kind == "inside another capture"
            asked = found.kind == "stale weights" and options.on_stale == "eager"
            if options.on_miss == "error" and not (inside or asked):
                raise MissError(
                    f"no graph serves this call: {found.reason}; widen the grid or precompile what is missing, or "
                    "create the manager with on_miss='eager' to run the function",
                    found.reason,
                )
            for position in core.written:
                leaves[position] = leaves[position].clone()
        return self._eagerly(leaves, want)

    def _to_capture(self, found: Resolution, variant: Hashable) -> tuple[Bucket, ...]:
        """The buckets to capture before this call can be served."""
        core = self.core
        if found.kind == "stale weights" and core.options.on_stale == "recapture" and not in_stage():
            state = core.store.variants[variant] if core.store is not None else None
            own = [found.bucket] if core.options.on_miss == "capture" and found.bucket is not None else []
            return tuple({*own, *(state.graphs if state is not None else ())})
        if core.options.on_miss != "capture" or core.closed or found.kind not in _LACKING:
            return ()
        if in_stage():  # a capture waits for others, which may wait for the stage
            return ()
        bucket = core.lacks(found.sizes, variant)
        return (bucket,) if bucket is not None else ()

    def _eagerly(self, leaves: list[Any], want: Want) -> Any:
        """Outside the lock: a function on its own needs none of the manager's storage."""
        core = self.core
        arguments = core.signature.arguments(leaves)
        with torch.no_grad():
            # Once graphs were captured nothing compiles any more, in whatever part of the function.
            serving = core.device is not None
            result = run_without_recompiling(core.fn, arguments) if serving else core.fn(**arguments)
            if isinstance(want, Into):
                return self._copied_into(result, want.out)
        return Lease(result, None, None) if want is LEASE else result

    def _replay(
        self,
        stored: Stored,
        leaves: Sequence[Any] | None,
        sizes: list[int],
        want: Want,
        sources: Sequence[Source | None] | None = None,
    ) -> Any:
        core, generation = self.core, stored.generation
        with _current(generation.device), self._range(stored):
            if want is COPY:
                results = stored.replayer.results(sizes)
            elif want is LEASE:
                generation.desk.take(stored.replayer.stream(), poison=core.options.debug)
                results = stored.replayer.leased(sizes)
            else:
                results = self._checked(stored, sizes, want)
            odd: list[tuple[torch.Tensor, torch.Tensor]] = []
            if isinstance(want, Into):
                results, odd = _contiguous(results)
            if leaves is None:
                stored.replayer.run_staged(stored.graph, sizes, results)
            else:
                stored.replayer.run(stored.graph, leaves, sources, sizes, results)
            if isinstance(want, Into):
                results = _finished(results, odd)
            core.calls += 1
            stored.graph.count(sizes)
            if core.store is not None:
                core.store.touch(stored.graph, generation)
            value = core.build(stored.replayer.values(stored.graph, results))
            if want is LEASE:
                return generation.desk.hand_out(value, stored.replayer.stream())
        return value

    def _range(self, stored: Stored) -> AbstractContextManager[Any]:
        if not self.core.options.nvtx:
            return nullcontext()
        sizes = ", ".join(f"{name}={size}" for name, size in stored.graph.bucket.items())
        return torch.profiler.record_function(f"mmgraph replay {sizes}")

    def _checked(self, stored: Stored, sizes: list[int], want: Want) -> list[torch.Tensor | None]:
        """The caller's tensors for the results."""
        core = self.core
        if not isinstance(want, Into):
            raise CallError(f"results are copied, leased or written into tensors, got {want!r}")
        try:
            flat = core.signature.output_tree.flatten_up_to(want.out)
        except ValueError as error:
            raise CallError(f"out does not have the structure of the outputs: {error}") from None
        found: list[torch.Tensor | None] = []
        for path, plan, value in zip(core.signature.output_paths, stored.graph.plans, flat, strict=True):
            if plan.layout is None:
                found.append(None)
                continue
            shape = plan.layout.full_shape(dict(zip(core.grid.names, sizes, strict=True)))
            expected = f"{plan.layout.dtype} {list(shape)} on {plan.layout.device}"
            if not isinstance(value, torch.Tensor):
                raise CallError(f"{path} of out must be a tensor {expected}, got {type(value).__name__}")
            if value.dtype != plan.layout.dtype or value.device != plan.layout.device or value.shape != shape:
                raise CallError(
                    f"{path} of out must be {expected}, got {value.dtype} {list(value.shape)} on {value.device}"
                )
            if value.requires_grad:
                raise CallError(f"{path} of out needs a gradient, and a replay records none: detach it")
            found.append(value)
        return found

    def _copied_into(self, result: Any, out: Any) -> Any:
        tree = self.core.signature.output_tree
        try:
            pairs = zip(tree.flatten_up_to(result), tree.flatten_up_to(out), strict=True)
        except ValueError as error:
            raise CallError(f"out does not have the structure of the outputs: {error}") from None
        values = []
        for path, (value, target) in zip(self.core.signature.output_paths, pairs, strict=True):
            if isinstance(value, torch.Tensor):
                fits = isinstance(target, torch.Tensor) and not target.requires_grad
                if not fits or target.shape != value.shape or target.dtype != value.dtype:
                    raise CallError(
                        f"{path} of out must be {value.dtype} {list(value.shape)} without a gradient, got "
                        f"{target!r:.80}"
                    )
                value = target.copy_(value)
            values.append(value)
        return pytree.tree_unflatten(values, tree)


class Staged:
    """Static inputs for one call of given sizes."""

    def __init__(self, server: Server, stored: Stored, sizes: list[int]) -> None:
        self._server, self.stored, self._sizes = server, stored, sizes
        stored.replayer.enter()

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """Argument name to a pytree of views of the static inputs, cut to the call's sizes.

        What isn't a tensor is the call's size, or None for a constant.
        """
        core, stored = self._server.core, self.stored
        generation = stored.generation
        named = dict(zip(core.grid.names, self._sizes, strict=True))
        leaves: list[Any] = []
        for leaf, layout, view in zip(
            core.signature.inputs, generation.layouts, stored.graph.inputs, strict=True
        ):
            if layout is None or view is None:
                leaves.append(named[leaf.spec.dim] if isinstance(leaf.spec, BucketSize) else None)
                continue
            if isinstance(leaf.spec, (Rows, Offsets)):
                axis = leaf.spec.axis if isinstance(leaf.spec, Rows) else 0
                view = view.narrow(axis, 0, layout.length(named))
            leaves.append(view)
        return core.signature.arguments(leaves)

    def _check(self) -> None:
        if self._server.core.staged is not self:
            raise CaptureError("this stage is over, and its inputs are another call's: replay within its block")

    def replay(self) -> Any:
        """The results, as copies.

        Raises:
            CaptureError: the block has ended.
        """
        self._check()
        return self._server.replay_staged(self.stored, self._sizes, COPY)

    def lease(self) -> Lease:
        """The results, as a lease."""
        self._check()
        lease: Lease = self._server.replay_staged(self.stored, self._sizes, LEASE)
        return lease

    def into(self, out: Any) -> Any:
        """The results, in the caller's tensors."""
        self._check()
        return self._server.replay_staged(self.stored, self._sizes, Into(out))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device current where another one is."""
    if device.type != "cuda" or device.index is None or torch._C._cuda_getDevice() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _contiguous(
    results: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tensors that a graph can write, and those of the caller's that are copied from them."""
    written: list[torch.Tensor | None] = []
    odd = []
    for result in results:
        plain = result is None or (
            type(result) in (torch.Tensor, torch.nn.Parameter)
            and result.is_contiguous()
            and not result.is_neg()
            and not result.is_conj()
        )
        if plain or result is None:
            written.append(result)
        else:
            fresh = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            written.append(fresh)
            odd.append((fresh, result))
    return written, odd


def _finished(
    written: Sequence[torch.Tensor | None], odd: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor | None]:
    """The caller's tensors after the replay; autograd is told that they changed."""
    results: list[torch.Tensor | None] = []
    targets = {id(fresh): target for fresh, target in odd}
    for tensor in written:
        target = targets.get(id(tensor))
        if tensor is not None and target is not None:
            with torch.no_grad():
                target.copy_(tensor)
            results.append(target)
            continue
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        results.append(tensor)
    return results
