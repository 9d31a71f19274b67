"""The call of a manager: from arguments to results, by a graph or by the function.

The quick way asks each thing once and launches the graph. Whatever isn't as at the capture goes the slow way, which
finds the same answers with their reasons.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._compat import cuda_current_device
from .buckets import Bucket
from .calls import Source
from .compiling import run_without_recompiling
from .cuda import CAPTURE_LOCK
from .errors import BucketError, CallError, MissError
from .filling import Filler
from .into import Into, contiguous, copied_into, finished, fitting
from .leases import Lease
from .replaying import sizes_in_order
from .resolving import Resolution
from .staged import COPY, LEASE, STAGES, Staged, in_stage
from .store import Stored, Variant

__all__ = ["Server", "Want"]


Want = str | Into

# Misses that another graph may cure.
_LACKING = ("not captured", "not precompiled", "not exact")


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
            BucketError: sizes are missing or unknown.
            CallError: a size is negative, or not a Python int.
            StaleWeights: weights were replaced.
        """
        core = self.core
        core.refuse_busy("stage")
        state = self._variant(variant)
        if sizes.keys() != self._names:
            raise BucketError(f"stage takes a size for each of {list(core.grid.names)}, got {dict(sizes)}")
        found = core.resolve_sizes(state, dict(sizes), variant)
        if found.kind == "stale weights":
            raise core.stale_error()
        if found.stored is None:
            raise MissError(
                f"no graph holds these sizes ({found.reason}), so there is nothing to write into", found.reason
            )
        staged = Staged(self, found.stored, sizes_in_order(core.grid.names, sizes))
        core.staged, core.busy = staged, "a stage"
        STAGES.depth = getattr(STAGES, "depth", 0) + 1
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
        STAGES.depth -= 1

    def replay_staged(self, stored: Stored, sizes: list[int], want: Want) -> Any:
        """Replays on what lies in the static inputs."""
        return self._replay(stored, None, sizes, want)

    def _slowly(self, leaves: list[Any], variant: Hashable, want: Want) -> Any:
        core, options = self.core, self.core.options
        with core.lock:
            found = core.resolve(leaves, variant)
            if found.stored is not None:
                return self._replay(found.stored, leaves, sizes_in_order(core.grid.names, found.sizes), want)
            if found.kind == "stale weights" and self._is_error(variant):
                raise core.stale_error()
            wanted = self._to_capture(found, variant)
        if wanted:
            with CAPTURE_LOCK, core.lock:
                core.invalidate()  # a capture's guard starts anew: what isn't noticed before it never is
                found = core.resolve(leaves, variant)  # another thread may have been here meanwhile
                if found.kind == "stale weights" and self._is_error(variant):
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

    def _is_error(self, variant: Hashable) -> bool:
        """Whether replaced weights are an error.

        Also where they are a variant's, which would be captured in the state that the function happens to be in.
        """
        on_stale = self.core.options.on_stale
        return on_stale == "error" or (on_stale == "recapture" and variant is not None)

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
                return copied_into(core.signature, result, want.out)
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
                results = self._targets(stored, sizes, want)
            odd: list[tuple[torch.Tensor, torch.Tensor]] = []
            if isinstance(want, Into):
                results, odd = contiguous(results)
            if leaves is None:
                stored.replayer.run_staged(stored.graph, sizes, results)
            else:
                stored.replayer.run(stored.graph, leaves, sources, sizes, results)
            if isinstance(want, Into):
                results = finished(results, odd)
            core.calls += 1
            stored.graph.count(sizes)
            if core.store is not None:
                core.store.touch(stored.graph, generation)
            value = core.build(stored.replayer.values(stored.graph, results))
            if want is LEASE:
                return generation.desk.hand_out(value, stored.replayer.stream())
        return value

    def _targets(self, stored: Stored, sizes: list[int], want: Want) -> list[torch.Tensor | None]:
        """The caller's tensors for the results."""
        if not isinstance(want, Into):
            raise CallError(f"results are copied, leased or written into tensors, got {want!r}")
        return fitting(self.core.signature, stored.graph.plans, sizes, want.out)

    def _range(self, stored: Stored) -> AbstractContextManager[Any]:
        if not self.core.options.nvtx:
            return nullcontext()
        sizes = ", ".join(f"{name}={size}" for name, size in stored.graph.bucket.items())
        return torch.profiler.record_function(f"mmgraph replay {sizes}")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device current where another one is."""
    if device.type != "cuda" or device.index is None or cuda_current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
