"""`CaptureManager`: one graph per bucket, behind a call that pads, replays and slices; on a miss, the function.

On CUDA tensors the buckets are CUDA graphs in shared pools; on CPU tensors the recorder stands in their place with the
same contract. Staging, replay and hand-out of one call are one critical section, so any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .buckets import Bucket, BucketGrid
from .cuda import CAPTURE_LOCK
from .errors import CallError, CaptureError, SpecError
from .filling import Filler, check_buckets
from .into import Into
from .leases import Lease
from .options import Check, OnMiss, OnStale, Options, as_names, as_watched, hashable
from .policies import BucketPolicy, policy_of
from .report import CallExplanation, Report, report_of
from .serving import Server, Want
from .signatures import check_parameters
from .spec import Signature
from .staged import COPY, LEASE, Staged, in_stage
from .suspending import ALL, resume, suspend

__all__ = ["CaptureManager"]


class CaptureManager:
    """Captures a function once per bucket and replays the graph that fits a call.

    The result of a call equals running the function on its inputs padded to the bucket and cutting the padding
    off, whatever ran between. Results are copies: no later call changes them. A call that no bucket holds runs
    the function on the inputs as they are, and is counted as a miss.

    Args:
        fn: a function, bound method or module. It is called with the declared names as keywords, under no_grad.
            It must not wait for the device, read values from tensors, or make tensors from Python data.
        inputs: argument name to a pytree of specs (`rows`, `offsets`, `bucket_size`, `static`, `constant`). No input
            can be named `variant`.
        outputs: a pytree of specs with the structure of what `fn` returns; None where it returns None.
        buckets: the grid of named sizes.
        warmup: runs before each capture, so that lazily compiled and tuned kernels are settled; at least 2.
        check: how replaced weights are noticed: "epoch" compares, on each call, a process-wide count of replacements
            and a rotating slice of the watched tensors; "always" compares all of them.
        watch: modules and tensors to watch beside what `fn` reaches and reads; a mapping gives them names.
        on_stale: where weights were replaced: "error" raises `StaleWeights`, "recapture" captures the buckets again, on
            the call's own rows (an error for a named variant, whose state may not be the present one), "eager" runs
            the function.
        on_miss: where no graph serves a call: "eager" runs the function, "error" raises `MissError`, "capture"
            captures the bucket first, where the grid has one.
        policy: which of the buckets that hold a call serves it: "smallest", "exact" (only one of just its sizes),
            "cost_aware" (the quickest as measured, or the function where that is quicker), or a `BucketPolicy`.
        compile: run Inductor once over dynamic sizes, and capture every bucket from what it made. Misses run the
            function as it is.
        verify: compare each graph with the function right after its capture.
        prove_padding: prove of each graph, with three kinds of garbage, that no padding reaches a real row.
        ignore: names of Python values that the function may set though a replay doesn't, such as "Counter.steps".
        max_graphs: the most graphs at a time; a capture on demand evicts the one used least recently.
        max_bytes: the most bytes of device memory for all that is captured; a capture evicts the generation used least
            recently, or fails with `MemoryBoundError` as its cause.
        debug: fill the memory of leases with NaN when it is given to the next call.
        nvtx: mark each replay for a profiler.
        time_every: time one replay of so many, by events that nobody waits for; 0 for none.

    Raises:
        SpecError: specs that do not fit the grid, or an unknown option.

    Example:
        >>> import torch
        >>> from mmgraph.capture import BucketGrid, CaptureManager, rows
        >>> weight = torch.ones(4, 2)
        >>> grid = BucketGrid(tokens=(8, 16))
        >>> spec = rows("tokens")
        >>> graphs = CaptureManager(lambda x: x @ weight, inputs={"x": spec}, outputs=spec, buckets=grid)
        >>> _ = graphs.precompile(example={"x": torch.randn(3, 4)}, progress=False)
        >>> graphs(x=torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    #: State snapshots do not look inside: static buffers are nobody's state.
    holds_captured_graphs = True

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        inputs: Mapping[str, Any],
        outputs: Any,
        buckets: BucketGrid,
        warmup: int = 2,
        check: Check = "epoch",
        watch: Mapping[str, object] | Sequence[object] = (),
        on_stale: OnStale = "error",
        on_miss: OnMiss = "eager",
        policy: str | BucketPolicy = "smallest",
        compile: bool = False,
        verify: bool = False,
        prove_padding: bool = False,
        ignore: Collection[str] = (),
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        debug: bool = False,
        nvtx: bool = False,
        time_every: int = 0,
    ) -> None:
        if not callable(fn):
            raise SpecError(f"fn must be callable, got {fn!r}")
        if not isinstance(buckets, BucketGrid):
            raise SpecError(f"buckets must be a BucketGrid, got {buckets!r}")
        check_parameters(fn, inputs)
        options = Options(
            warmup,
            check,
            on_stale,
            on_miss,
            compile,
            verify,
            prove_padding,
            as_names(ignore),
            max_graphs,
            max_bytes,
            debug,
            nvtx,
            time_every,
        )
        signature = Signature(inputs, outputs, buckets)
        self._core = Filler(fn, signature, options, policy_of(policy), as_watched(watch))
        self._server = Server(self._core)
        # A replay cannot be traced into a compiled graph: torch.compile runs the call as it is.
        self._untraced = torch.compiler.disable(self._server.call)

    def precompile(
        self,
        example: Mapping[str, Any],
        *,
        progress: bool = True,
        buckets: Sequence[Bucket] | None = None,
        variant: Hashable = None,
    ) -> CaptureManager:
        """Captures every bucket, largest first.

        Called again, it drops what was captured of the variant, so that memory is not needed twice, and captures all of
        it anew. The state that the function changes (buffers, caches, random generators) is afterwards what it was
        before. Calls from other threads wait until it is done: what they changed meanwhile would be put back.

        Args:
            example: one real call's arguments, of any sizes: dtypes, trailing shapes, the device and constants
                come from it. Warm-up and capture run on its rows, repeated to the bucket's size; integers,
                which may point at other rows, give way to their fill in buckets that don't hold the whole
                example. So a fill must be a value that the function can take, as it must for padding.
            progress: show a progress bar.
            buckets: only these of the grid's buckets.
            variant: a name for the state that the function is in now (an adapter, a mode). Calls that name it replay
                these graphs; other variants keep theirs, and share their memory.

        Returns:
            The manager itself.

        Raises:
            CallError: the example does not fit the declaration.
            OutputError: the function returns something other than declared.
            CaptureFailedError: a bucket could not be captured; those that this call captured before it are kept
                and work.
        """
        if not isinstance(example, Mapping):
            raise CallError(f"example must map the declared names to one call's arguments, got {example!r}")
        self._refuse_stage("precompile")
        core = self._core
        hashable(variant)
        leaves = core.bind((), example)
        core.refuse(leaves)
        chosen = check_buckets(core.grid, buckets, core.options.max_graphs)
        # The capture lock comes first, as everywhere, so that a function which calls another manager cannot
        # deadlock with it.
        with CAPTURE_LOCK, core.lock:
            core.closed = False
            core.capture(leaves, chosen, variant, progress=progress)
        return self

    def __call__(self, /, *args: Any, variant: Hashable = None, **kwargs: Any) -> Any:
        """The function's result for these arguments: from a graph where a bucket holds them, else run eagerly.

        Args:
            *args: the declared inputs by position, in the order declared.
            variant: which variant's graphs.
            **kwargs: the declared inputs by name.

        Raises:
            CallError: a missing or unknown argument, or one of a wrong kind, dtype, device or shape.
            CallGradientError: an input needs a gradient and gradients are recorded.
            StaleWeights: weights were replaced, with `on_stale="error"`.
            MissError: no graph serves the call, with `on_miss="error"`.
        """
        return self._call(args, kwargs, variant, COPY)

    def lease(self, /, *args: Any, variant: Hashable = None, **kwargs: Any) -> Lease:
        """As a call, but its results lie in memory that the next lease is given: nothing is allocated.

        On a miss the lease holds what the function returned, and never gets stale.
        """
        lease: Lease = self._call(args, kwargs, variant, LEASE)
        return lease

    def into(self, out: Any, /, *args: Any, variant: Hashable = None, **kwargs: Any) -> Any:
        """As a call whose results are written into the caller's tensors.

        Args:
            out: tensors with the structure, shapes and dtypes of the results; None for what isn't a tensor.
            *args: the declared inputs by position.
            variant: which variant's graphs.
            **kwargs: the declared inputs by name.

        Returns:
            The results, in which the tensors are those of `out`.

        Raises:
            CallError: also for a tensor of `out` that doesn't fit, or that needs a gradient.
        """
        return self._call(args, kwargs, variant, Into(out))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], variant: Hashable, want: Want) -> Any:
        # What `torch.compiler.disable` wraps around a call costs more than asking whether it is needed.
        if torch.compiler.is_compiling():
            return self._untraced(args, kwargs, variant, want)
        return self._server.call(args, kwargs, variant, want)

    @contextmanager
    def stage(
        self, sizes: Mapping[str, int] | None = None, /, *, variant: Hashable = None, **named: int
    ) -> Iterator[Staged]:
        """For callers who write straight into the static inputs, and so save the copy.

        Within the block `staged.inputs` holds views of the static inputs, cut to the call's own sizes, to be filled on
        the current stream; `staged.replay()` gives the results. Other calls wait until the block ends.

        Args:
            sizes: a size for every name of the grid; or give them by name.
            variant: which variant's graphs.
            **named: sizes by name.

        Raises:
            MissError: no graph holds these sizes: there is nothing to write into.
        """
        core = self._core
        with core.lock:
            staged = self._server.stage({**(sizes or {}), **named}, variant)
            try:
                yield staged
            finally:
                self._server.end_stage(staged)

    def explain_call(self, /, *args: Any, variant: Hashable = None, **kwargs: Any) -> CallExplanation:
        """Which bucket a call with these arguments would replay, or why it would run eagerly. Counts nothing."""
        core = self._core
        hashable(variant)
        leaves = core.bind(args, kwargs)
        with core.lock:
            found = core.resolve(leaves, variant)
        padding = {}
        if found.stored is not None and found.bucket is not None:
            padding = {
                name: 1 - found.sizes[name] / size if size else 0.0
                for name, size in found.bucket.items()
                if name not in core.grid.within
            }
        return CallExplanation(found.stored is not None, found.sizes, found.bucket, found.reason, padding)

    def report(self) -> Report:
        """Hits, misses, padding, bytes and times so far."""
        with self._core.lock:
            return report_of(self._core)

    def predict_bytes(
        self, example: Mapping[str, Any], *, buckets: Sequence[Bucket] | None = None
    ) -> int | None:
        """The bytes of static buffers and pool that these buckets' graphs would take, without capturing any.

        The function runs three times at each size, in a pool of its own. Workspaces and executable graphs come on top.

        Args:
            example: as for `precompile`.
            buckets: as for `precompile`.

        Returns:
            The bytes; None where they can't be told: two rehearsals took different memory.
        """
        if not isinstance(example, Mapping):
            raise CallError(f"example must map the declared names to one call's arguments, got {example!r}")
        self._refuse_stage("predict_bytes")
        core = self._core
        leaves = core.bind((), example)
        core.refuse(leaves)
        chosen = check_buckets(core.grid, buckets, core.options.max_graphs)
        with CAPTURE_LOCK, core.lock:
            return core.predict(leaves, chosen)

    def invalidate(self) -> None:
        """Has the next call compare all weights, whatever `check` says. For replacements that nothing shows."""
        with self._core.lock:
            self._core.invalidate()

    def evict(self, bucket: Bucket, *, variant: Hashable = None) -> bool:
        """Drops one graph; others aren't touched. Calls that need it miss.

        Returns:
            Whether there was one.
        """
        hashable(variant)
        if not isinstance(bucket, Mapping):
            raise CallError(f"bucket must be a Bucket or a mapping of sizes, got {bucket!r}")
        with self._core.lock:
            return self._core.evict(Bucket(bucket), variant)

    def suspend(self) -> None:
        """Gives back the memory of graphs, pools and buffers, until `resume`. Calls meanwhile miss.

        What `resume` needs for an example waits in host memory.
        """
        self._refuse_stage("suspend")
        with CAPTURE_LOCK, self._core.lock:
            suspend(self._core)

    def resume(self, *, progress: bool = False, variant: Hashable = ALL) -> None:
        """Captures again what `suspend` dropped.

        Args:
            progress: show a progress bar.
            variant: which one, where several were suspended: each is captured in the state that the function is in.

        Raises:
            SpecError: nothing is suspended, or it isn't clear which variant.
            CaptureFailedError: as from `precompile`.
        """
        self._refuse_stage("resume")
        with CAPTURE_LOCK, self._core.lock:
            resume(self._core, progress, variant)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CaptureError(
            "a CaptureManager holds graphs of this process and can't be copied or pickled: make another one around the "
            "copied function, and keep it out of what is pickled"
        )

    def _refuse_stage(self, what: str) -> None:
        # A capture waits for all others, and these may wait for the stage.
        if in_stage():
            raise CaptureError(f"{what} can't be called within a stage block: call it before or after")

    def __repr__(self) -> str:
        core = self._core
        count = core.store.count if core.store is not None else 0
        name = getattr(core.fn, "__qualname__", type(core.fn).__name__)
        return f"CaptureManager({name}: {count} graphs, {len(core.grid)} buckets)"

    def poison(self) -> None:
        """Fills the memory of all graphs' intermediates with NaN: for tests, since no result may change by it.

        On a CPU there is nothing to do, since the recorder does it before every replay.
        """
        with self._core.lock:
            self._core.poison()

    def close(self) -> None:
        """Drops every graph and buffer; later calls run eagerly."""
        with self._core.lock:
            self._core.close()
