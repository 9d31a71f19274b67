"""One encoder behind its adapter: which of its items share a replay, and how a pack of them is run.

Packs are made for the buckets that would be replayed at that moment. Whatever changes until a pack is run costs time at
most: the manager looks at every call again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .adapters import EncoderAdapter, check_adapter, checked_results, checked_sizes
from .buckets import Bucket, BucketGrid
from .compiling import run_without_recompiling
from .errors import AdapterError, MissError
from .layout import sizes_of_leaves
from .manager import CaptureManager
from .options import hashable
from .packing import Packer, summed_sizes
from .policies import Candidate
from .spec import Rows
from .store import Variant

__all__ = ["Cost", "EncoderPack", "Tower"]

#: What a replay of a bucket costs: as measured, or as a function says.
Cost = Literal["measured"] | Callable[[Bucket], float]

# Packers that are kept, one for each path; a call with a new path is no reason to keep its packer for ever.
_PACKERS = 64

# Misses that are no matter of sizes: the manager says what follows from them.
_OF_THE_MANAGER = ("stale weights", "autocast differs", "training mode differs", "inside another capture")


@dataclass(frozen=True)
class EncoderPack:
    """Items of a call that are run together.

    Attributes:
        items: their positions in the call, ascending.
        tower: which of several adapters; None where there is one.
        path: what the adapter's `path(item)` says of them, or None.
        sizes: of all of them together, as the adapter says.
        bucket: what is replayed; None where they run eagerly.
        reason: why they run eagerly, as the manager says it; empty for a replay.
    """

    items: tuple[int, ...]
    tower: Hashable
    path: Hashable
    sizes: Mapping[str, int]
    bucket: Bucket | None
    reason: str

    @property
    def kind(self) -> str:
        """What an eager run is counted as."""
        return self.reason.partition(":")[0]

    @property
    def padding(self) -> dict[str, float]:
        """Of a replay, the share of each size that is padding, 0 to 1."""
        return {
            name: max(0.0, 1 - self.sizes[name] / size) if size else 0.0
            for name, size in (self.bucket or {}).items()
        }


@dataclass(frozen=True)
class _Packing:
    """A packer, and what it was made for."""

    captured: tuple[Candidate, ...]
    lazily: bool
    failed: frozenset[Bucket]
    packer: Packer


class Tower:
    """An adapter and the manager of its graphs.

    Args:
        name: which of several, for messages and records.
        adapter: the adapter.
        grid: its buckets.
        cost: of a replay.
        overhead: of each pack beside its replay.
        options: of the manager.

    Raises:
        SpecError: the adapter lacks something, or specs, grid or options don't fit.
        BucketError: a cost that isn't one.
    """

    def __init__(
        self,
        name: Hashable,
        adapter: EncoderAdapter,
        grid: BucketGrid,
        cost: Cost,
        overhead: float,
        options: Mapping[str, Any],
    ) -> None:
        check_adapter(adapter)
        self.name, self.adapter = name, adapter
        self.manager = CaptureManager(
            adapter.forward, inputs=adapter.inputs, outputs=adapter.outputs, buckets=grid, **options
        )
        self._core = self.manager._core
        self._cost, self._overhead = cost, overhead
        self._summed = summed_sizes(self._core.signature)
        self._eager: Callable[[Sequence[Any]], Any] | None = getattr(adapter, "eager", None)
        self._path: Callable[[Any], Hashable] | None = getattr(adapter, "path", None)
        self._packings: dict[Hashable, _Packing] = {}
        self._packer_for(None, self._core.grid.buckets, ())  # a wrong cost is an error now

    def path(self, item: Any) -> Hashable:
        """The path of an item."""
        path = None if self._path is None else self._path(item)
        hashable(path)
        return path

    def plan(
        self, items: Sequence[Any], positions: Sequence[int], path: Hashable, *, closely: bool = False
    ) -> list[EncoderPack]:
        """The packs of items of one path.

        Args:
            items: the items.
            positions: where they stand in the call.
            path: their path.
            closely: look at weights and modes, too, as a call does.

        Raises:
            AdapterError: wrong sizes.
        """
        rows = tuple(self._sizes(item, position) for item, position in zip(items, positions, strict=True))
        packer, state, captured = self._packer(path)
        packs = []
        for pack, total in packer.planned(rows):
            sizes = dict(total)
            bucket, reason = pack.bucket, ""
            if closely or bucket is None or not captured or not self._core.is_smallest:
                bucket, reason = self._closely(path, sizes, bucket, closely)
            elif state is not None:
                bucket = self._smallest(state, sizes) or bucket
            where = tuple(positions[i] for i in pack.items)
            packs.append(EncoderPack(where, self.name, path, sizes, bucket, reason))
        return packs

    def run(self, pack: EncoderPack, items: Sequence[Any]) -> list[Any]:
        """The results of a pack's items."""
        where = self._where(pack.items)
        outputs = self._outputs(pack, items, where)
        return checked_results(self.adapter, outputs, items, where)

    def refuse_miss(self, pack: EncoderPack) -> None:
        """Raises MissError for a pack that no graph serves, where misses are errors."""
        if pack.bucket is None and self._core.options.on_miss == "error":
            raise MissError(
                f"no graph serves {self._where(pack.items)}: {pack.reason}; widen the grid or precompile what is "
                "missing, or create the encoder with on_miss='eager' to run the adapter eagerly",
                pack.reason,
            )

    def precompile(
        self,
        items: Sequence[Any],
        positions: Sequence[int],
        path: Hashable,
        buckets: Sequence[Bucket] | None,
        progress: bool,
    ) -> None:
        """Captures a path's buckets with some items as the example.

        Raises:
            AdapterError: the adapter prepares more than it says that the items have.
        """
        where = self._where(positions)
        rows = [self._sizes(item, position) for item, position in zip(items, positions, strict=True)]
        example = self._prepared(items, None, where)
        signature, names = self._core.signature, self._core.grid.names
        packer = self._packer(path)[0]
        prepared = sizes_of_leaves(signature.inputs, signature.bind((), example))
        bounded = self._core.bounded([prepared[name] for name in names])
        for name, came, said in zip(names, bounded, packer.total(rows), strict=True):
            if came > said and (said or name not in self._derived):
                how = "the sum" if name in self._summed else "the largest"
                raise AdapterError(
                    f"prepare made {name}={came} of {where}, and {how} of what sizes says is {said}: packs are planned "
                    "by sizes, so it must say what prepare makes"
                )
        self.manager.precompile(example, progress=progress, buckets=buckets, variant=path)

    @property
    def _derived(self) -> Mapping[str, Any]:
        return self._core.grid._derived

    def _where(self, positions: Sequence[int]) -> str:
        shown = ", ".join(map(str, positions[:8])) + (", ..." if len(positions) > 8 else "")
        tower = "" if self.name is None else f" of {self.name!r}"
        return f"{'item' if len(positions) == 1 else 'items'} {shown}{tower}"

    def _sizes(self, item: Any, position: int) -> tuple[int, ...]:
        grid = self._core.grid
        return checked_sizes(self.adapter, item, grid.names, self._derived, self._where((position,)))

    def _prepared(self, items: Sequence[Any], bucket: Bucket | None, where: str) -> Mapping[str, Any]:
        inputs = self.adapter.prepare(items, bucket)
        if not isinstance(inputs, Mapping):
            raise AdapterError(
                f"prepare must give a mapping of the inputs' names to values for {where}, got {type(inputs).__name__}"
            )
        return inputs

    def _outputs(self, pack: EncoderPack, items: Sequence[Any], where: str) -> Any:
        if pack.bucket is not None or self._eager is None:
            # A manager's miss runs forward, and is counted there.
            inputs = self._prepared(items, pack.bucket, where)
            return self.manager(**inputs, variant=pack.path)
        with torch.no_grad():
            if self._core.device is None:
                return self._eager(items)
            # As in a manager's miss nothing is compiled once there were graphs.
            return run_without_recompiling(functools.partial(self._eager, items), {})

    def _packer(self, path: Hashable) -> tuple[Packer, Variant | None, bool]:
        """The packer for the graphs that there are now, the path's state, and whether graphs could serve at all."""
        core = self._core
        with core.lock:
            state = core.store.variants.get(path) if core.store is not None else None
            captured = state.candidates(core.grid) if state is not None else ()
            lazily = core.options.on_miss == "capture" and not core.closed and path not in core.suspended
            failed = frozenset(b for name, b in core.failed if name == path) if lazily else frozenset()
        known = self._packings.get(path)
        if known is None or known.captured is not captured or (known.lazily, known.failed) != (lazily, failed):
            buckets = [candidate.bucket for candidate in captured]
            if lazily:
                # What a captured bucket holds is served by it, and never captured.
                buckets = [
                    bucket
                    for bucket in core.grid
                    if bucket in buckets
                    or not (bucket in failed or any(held.holds(bucket) for held in buckets))
                ]
            # Where there are none, items are packed as if there were: so eager runs are no larger than replays.
            packer = self._packer_for(state, buckets or core.grid.buckets, captured)
            known = _Packing(captured, lazily, failed, packer)
            if len(self._packings) >= _PACKERS:
                self._packings.clear()
            self._packings[path] = known
        return known.packer, state, bool(captured)

    def _packer_for(
        self, state: Variant | None, buckets: Sequence[Bucket], captured: Sequence[Candidate]
    ) -> Packer:
        costs: list[Any]
        if self._cost == "measured":
            seconds = {candidate.bucket: candidate.replay_seconds for candidate in captured}
            costs = [seconds.get(bucket) for bucket in buckets]
            if None in costs:  # seconds and elements don't compare
                costs = [self._elements(bucket, state) for bucket in buckets]
        else:
            costs = [self._cost(bucket) for bucket in buckets]
        grid = self._core.grid
        return Packer(buckets, costs, summed=self._summed, within=grid.within, overhead=self._overhead)

    def _elements(self, bucket: Bucket, state: Variant | None) -> int:
        """Elements of the inputs at a bucket's sizes; their rows, while it isn't known how wide they are."""
        if state is not None:
            return sum(layout.numel(bucket) for layout in state.layouts if layout is not None)
        specs = [leaf.spec for leaf in self._core.signature.inputs]
        return sum(bucket[spec.dim] // spec.per for spec in specs if isinstance(spec, Rows))

    def _smallest(self, state: Variant, sizes: Mapping[str, int]) -> Bucket | None:
        """The captured bucket that the manager's default policy takes."""
        core = self._core
        with core.lock:
            stored = state.smallest(core.grid, core.steps, core.bounded([sizes[n] for n in core.grid.names]))
        return None if stored is None else stored.graph.bucket

    def _closely(
        self, path: Hashable, sizes: dict[str, int], planned: Bucket | None, every: bool
    ) -> tuple[Bucket | None, str]:
        """What the manager says of a pack: its bucket, or why it runs eagerly."""
        core = self._core
        with core.lock:
            state = core.store.variants.get(path) if core.store is not None else None
            found = core.resolve_sizes(state, sizes, path)
            if found.stored is not None:
                return found.bucket, ""
            if found.kind in _OF_THE_MANAGER:
                return (None, found.reason) if every else (planned, "")
            first = self.manager._server._to_capture(found, path)
        return (first[0], "") if first else (None, found.reason)
