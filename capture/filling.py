"""What is captured: at `precompile`, for a call that came, or again after weights were replaced."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .bindings import WeightBindings, top_modules
from .buckets import Bucket, BucketGrid
from .calls import CallReader
from .capturing import Capturer
from .compiling import mark
from .constants import frozen_constant
from .errors import CallError, CaptureFailedError, MemoryBoundError, SpecError
from .generation import Generation
from .guard import WeightGuard
from .layout import layout_of_example
from .modes import autocast_state
from .places import storage_key
from .progress import progress_bar
from .resolving import Resolver
from .spec import Constant
from .store import Variant
from .warming import CaptureOptions

__all__ = ["Filler", "check_buckets"]

logger = logging.getLogger(__name__)


class Filler(Resolver):
    """A manager's state, the answers to calls, and captures."""

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
        self.refuse_busy("a capture")
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
        store = self.store_on(device)
        seen = dict(store.variants[name].seen) if name in store.variants and not replace else {}
        if replace:
            store.drop_variant(name)
            self.failed = {key: error for key, error in self.failed.items() if key[0] != name}
        self.suspended.pop(name, None)
        order = sorted(buckets, key=self.order, reverse=True)
        with torch.no_grad():
            try:
                generation = store.generation_for(layouts, buckets, device)
            except MemoryBoundError as error:
                raise CaptureFailedError(f"{order[0]} could not be captured: {error}", order[0]) from error
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
            self.busy = "a capture"
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
                self.busy = ""
                self.written |= capturer.written
                state.seen = seen | {storage_key(tensor): tensor for tensor in capturer.seen}
                try:
                    self._guard(state, name, generation)
                except BaseException:  # graphs that nobody guards must not serve
                    store.drop_variant(name)
                    raise
                finally:
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
                bound = error.__cause__
                if isinstance(bound, MemoryBoundError) and bound.fits_alone and others and len(pending) == 1:
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

    def predict(self, leaves: list[Any], buckets: Sequence[Bucket]) -> int | None:
        """Bytes of static buffers and pool for these buckets; the locks are held."""
        self.refuse_busy("a prediction")
        device = self._device_of(leaves)
        layouts = tuple(
            layout_of_example(leaf, value, device)
            for leaf, value in zip(self.signature.inputs, leaves, strict=True)
        )
        generation = Generation(self.signature, layouts, buckets, device)
        try:
            capturer = Capturer(
                self.compiled or self.fn,
                generation,
                CaptureOptions(ignore=self.options.ignore),
                leaves,
                mark if self.compiled is not None else None,
            )
            order = sorted(buckets, key=self.order, reverse=True)
            with capturer.state_preserved():
                pool = capturer.rehearse(order)
                if not generation.on_cuda:
                    generation.output_views(order[0])  # which a CPU's recordings write
            return None if pool is None else pool + generation.static_bytes
        finally:
            generation.release()

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


def check_buckets(grid: BucketGrid, buckets: Sequence[Bucket] | None, most: int | None) -> tuple[Bucket, ...]:
    """The buckets to capture: those given, or all.

    Raises:
        SpecError: none, others than the grid's, or more than there may be graphs.
    """
    if buckets is not None and (isinstance(buckets, Mapping) or not isinstance(buckets, Iterable)):
        raise SpecError(f"buckets must be some of the grid's {len(grid)} buckets, got {buckets}")
    chosen = grid.buckets if buckets is None else tuple(buckets)
    if not chosen or any(bucket not in grid.buckets for bucket in chosen):
        raise SpecError(f"buckets must be some of the grid's {len(grid)} buckets, got {buckets}")
    if most is not None and len(chosen) > most:
        raise SpecError(
            f"max_graphs is {most}, and {len(chosen)} buckets are to be captured: name fewer with buckets=, or raise it"
        )
    return chosen
