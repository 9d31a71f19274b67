"""What a manager has captured: generations and variants, and the bounds on graphs and bytes that they keep to.

Graphs go by generations, since memory does: a pool is freed with the last graph that was captured into it. Where a
bound on bytes needs room, the generation whose use lies furthest back goes as a whole; where a bound on the number of
graphs does, the graph whose use lies furthest back. Neither touches what another graph reads.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .buckets import Bucket, BucketGrid
from .calls import CallReader
from .errors import MemoryBoundError
from .generation import Generation
from .graph import BucketGraph, GraphKey, Past
from .guard import WeightGuard
from .layout import LeafLayout
from .metrics import ReplayTimer
from .policies import Candidate
from .replaying import Replayer
from .spec import Signature

__all__ = ["GraphStore", "Stored", "Variant"]


_UNDECIDED = object()


@dataclass(frozen=True, eq=False)
class Stored:
    """A captured graph and what replays it."""

    graph: BucketGraph
    generation: Generation
    replayer: Replayer


@dataclass(eq=False)
class Variant:
    """What one variant's graphs were captured under, and how its calls find them.

    Attributes:
        layouts: of the input leaves.
        constants: of the inputs that are part of the graphs, by position.
        autocast: the state of autocast.
        training: modules and whether they were in training mode.
        guard: notices replaced weights.
        reader: reads calls.
        graphs: by bucket.
        seen: what its captures saw the function read from outside, by memory.
    """

    layouts: tuple[LeafLayout | None, ...]
    constants: Mapping[int, Any]
    autocast: tuple[bool, torch.dtype | None]
    training: tuple[tuple[torch.nn.Module, bool], ...]
    guard: WeightGuard | None
    reader: CallReader
    graphs: dict[Bucket, Stored] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    _found: dict[tuple[int, ...], Stored | None] = field(default_factory=dict)
    _candidates: tuple[Candidate, ...] | None = None

    def smallest(self, grid: BucketGrid, steps: Sequence[Sequence[int]], sizes: Sequence[int]) -> Stored | None:
        """The smallest captured bucket that holds a call; each kind of call is decided once.

        Args:
            grid: the grid.
            steps: for each size the values that buckets have of it, ascending.
            sizes: the call's, in the grid's order, bounded as `within` says.
        """
        kind = tuple(map(bisect.bisect_left, steps, sizes))
        known = self._found.get(kind, _UNDECIDED)
        if known is not _UNDECIDED:
            return known  # type: ignore[return-value]
        named = dict(zip(grid.names, sizes, strict=True))
        bucket = grid.choose(named)
        stored = self.graphs.get(bucket) if bucket is not None else None
        if stored is None:
            larger = [s for b, s in self.graphs.items() if grid.holds(b, named)]
            order = {b: i for i, b in enumerate(grid.buckets)}
            stored = min(
                larger, key=lambda s: (s.graph.elements, order.get(s.graph.bucket, len(order))), default=None
            )
        if len(self._found) >= 65536:
            self._found.clear()
        self._found[kind] = stored
        return stored

    def candidates(self, grid: BucketGrid) -> tuple[Candidate, ...]:
        """The captured buckets and their costs in the grid's order, for a policy."""
        if self._candidates is None:
            self._candidates = tuple(
                Candidate(b, s.graph.elements, s.graph.replay_seconds, s.graph.eager_seconds)
                for b in grid.buckets
                if (s := self.graphs.get(b)) is not None
            )
        return self._candidates

    def changed(self) -> None:
        """Forgets what was decided, after graphs came or went."""
        self._found.clear()
        self._candidates = None


class GraphStore:
    """All graphs of a manager.

    Args:
        signature: the declared inputs and outputs.
        max_graphs: the most graphs at a time; None for any number.
        max_bytes: the most bytes of device memory for pools, static buffers, executable graphs and workspaces together.
        timer: samples replay times.
        past: takes the counts of graphs that go.
    """

    def __init__(
        self,
        signature: Signature,
        max_graphs: int | None,
        max_bytes: int | None,
        timer: ReplayTimer,
        past: Past,
    ) -> None:
        self._signature = signature
        self._past = past
        self._timer = timer
        self.max_graphs, self.max_bytes = max_graphs, max_bytes
        self.generations: list[Generation] = []
        self.variants: dict[Hashable, Variant] = {}
        self._replayers: dict[int, Replayer] = {}
        self.clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all generations."""
        return sum(generation.nbytes for generation in self.generations)

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return sum(len(generation.graphs) for generation in self.generations)

    def generation_for(
        self, layouts: Sequence[LeafLayout | None], buckets: Sequence[Bucket], device: torch.device
    ) -> Generation:
        """The newest generation that can take these buckets, or a new one."""
        for generation in reversed(self.generations):
            same = generation.layouts == tuple(layouts) and generation.device == device
            if same and generation.graphs and all(generation.holds(bucket) for bucket in buckets):
                return generation
        workspaces = max((generation.workspace_bytes for generation in self.generations), default=0)
        needed = static_bytes(layouts, buckets) + workspaces
        if self.max_bytes is not None and needed > self.max_bytes:
            raise MemoryBoundError(
                f"the static inputs and workspaces of these buckets alone take {needed} bytes, and max_bytes is "
                f"{self.max_bytes}: capture smaller buckets, or raise max_bytes"
            )
        if self.max_bytes is not None:
            self._evict_for_bytes(needed, None)
        generation = Generation(self._signature, layouts, buckets, device)
        self.generations.append(generation)
        return generation

    def add(self, variant: Variant, graph: BucketGraph, generation: Generation) -> None:
        """Takes in a captured graph, in the place of an older one of the same key.

        Raises:
            MemoryBoundError: all together is more than the bound; the new graph is dropped, and where its memory
                doesn't come back by that, its generation.
        """
        stored = variant.graphs.get(graph.bucket)
        if stored is not None:
            self._drop(stored.generation, [graph.key], release=stored.generation is not generation)
        generation.graphs[graph.key] = graph
        self.touch(graph, generation)
        replayer = self._replayers.get(id(generation))
        if replayer is None:
            replayer = self._replayers[id(generation)] = Replayer(generation, self._timer)
        variant.graphs[graph.bucket] = Stored(graph, generation, replayer)
        variant.changed()
        if self.max_bytes is not None and self.nbytes > self.max_bytes:
            self._evict_for_bytes(0, generation)
            if self.nbytes > self.max_bytes:
                taken = self.nbytes
                self._drop(generation, [graph.key], release=False)
                if self.nbytes > self.max_bytes:
                    self._drop(generation, list(generation.graphs))
                raise MemoryBoundError(
                    f"with {graph.bucket} the graphs take {taken} bytes, and max_bytes is {self.max_bytes}: it was "
                    "dropped; capture fewer or smaller buckets, or raise max_bytes"
                )

    def touch(self, graph: BucketGraph, generation: Generation) -> None:
        """Notes a use."""
        self.clock += 1
        graph.clock = generation.clock = self.clock
        generation.latest = graph

    def admit(self, nbytes: int, into: Generation) -> None:
        """Makes room for a graph that is about to be captured.

        Args:
            nbytes: what it is expected to add.
            into: the generation that it goes into, which stays.

        Raises:
            MemoryBoundError: there is no room, whatever else goes.
        """
        if self.max_bytes is not None:
            alone = into.static_bytes + into.workspace_bytes + nbytes <= self.max_bytes
            if into.nbytes + nbytes <= self.max_bytes:  # else it would be in vain
                self._evict_for_bytes(nbytes, into)
            if self.nbytes + nbytes > self.max_bytes:
                raise MemoryBoundError(
                    f"the graph needs about {nbytes} bytes beside the {self.nbytes} that are taken, and max_bytes is "
                    f"{self.max_bytes}: capture fewer or smaller buckets, or raise max_bytes",
                    alone,
                )
        while self.max_graphs is not None and self.count >= self.max_graphs:
            oldest = min(
                (graph for generation in self.generations for graph in generation.graphs.values()),
                key=lambda graph: graph.clock,
            )
            self._past.evicted += 1
            self.drop([oldest.key], keep=into)

    def drop(self, keys: Sequence[GraphKey], *, keep: Generation | None = None) -> None:
        """Drops graphs, and generations that have none left, but for the one that is about to get another."""
        for generation in list(self.generations):
            found = [key for key in keys if key in generation.graphs]
            if found:
                self._drop(generation, found, release=generation is not keep)

    def drop_variant(self, name: Hashable) -> None:
        """Drops all graphs of a variant, and what is known of it."""
        variant = self.variants.pop(name, None)
        if variant is None:
            return
        if variant.guard is not None:
            variant.guard.close()
        for generation in list(self.generations):
            self._drop(generation, [key for key in generation.graphs if key.variant == name])

    def prune(self) -> None:
        """Drops generations without a graph, and variants, whose conditions hold for nothing any more."""
        for name in [name for name, variant in self.variants.items() if not variant.graphs]:
            self.drop_variant(name)
        for generation in [g for g in self.generations if not g.graphs]:
            self._drop(generation, [])

    def clear(self) -> None:
        """Drops everything."""
        for name in list(self.variants):
            self.drop_variant(name)
        self.prune()

    def _drop(self, generation: Generation, keys: Sequence[GraphKey], *, release: bool = True) -> None:
        for key in keys:
            if key in generation.graphs:
                self._past.take(generation.graphs[key])
        generation.drop(keys)
        for key in keys:
            variant = self.variants.get(key.variant)
            if variant is not None and key.bucket in variant.graphs:
                if variant.graphs[key.bucket].generation is generation:
                    del variant.graphs[key.bucket]
                variant.changed()
        if release and not generation.graphs and generation in self.generations:
            self.generations.remove(generation)
            self._replayers.pop(id(generation), None)
            generation.release()

    def _evict_for_bytes(self, needed: int, keep: Generation | None) -> None:
        while self.max_bytes is not None and self.nbytes + needed > self.max_bytes:
            others = [g for g in self.generations if g is not keep and g.graphs]
            if not others:
                return
            oldest = min(others, key=lambda g: g.clock)
            self._past.evicted += len(oldest.graphs)
            self._drop(oldest, list(oldest.graphs))


def static_bytes(layouts: Sequence[LeafLayout | None], buckets: Sequence[Bucket]) -> int:
    """Bytes of the static inputs that these buckets need."""
    return sum(
        max(layout.numel(bucket) for bucket in buckets) * layout.dtype.itemsize
        for layout in layouts
        if layout is not None
    )
