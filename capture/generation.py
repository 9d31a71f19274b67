"""A generation: graphs that share one pool, one set of static buffers, and one record that each call fills.

The record is a small device tensor: the call's sizes, the addresses that its outputs go to, and where its inputs lie. A
graph's first nodes fetch it from the host's ring, copy the inputs into the static buffers, and fill the padding behind
them; the last one copies the real rows of the outputs to where the record says. So a call is one launch.

Buffers never move and never grow: what doesn't fit becomes another generation, with buffers of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .buckets import Bucket
from .cuda import DevicePool
from .graph import BucketGraph, GraphKey, OutputPlan, Replayable
from .lanes import Lane, give_back_lane, take_lane
from .layout import LeafLayout, SharedBuffers
from .leases import LeaseDesk
from .memory import poison_pool, pool_bytes
from .padding import PadLeaf, fill_padding, fill_pattern
from .publishing import NUMBERS, PublishLeaf, stage
from .recorder import OutsideMemory
from .ring import CallRing
from .spec import Offsets, Rows, Signature

__all__ = ["Generation"]

Pattern = tuple[int, int]


class Generation:
    """The shared memory of a set of graphs on one device.

    Args:
        signature: the declared inputs and outputs.
        layouts: of the input leaves.
        buckets: every bucket that may be captured here; the buffers are as large as the largest of them needs.
        device: cpu or cuda.
    """

    def __init__(
        self,
        signature: Signature,
        layouts: Sequence[LeafLayout | None],
        buckets: Sequence[Bucket],
        device: torch.device,
    ) -> None:
        self.signature = signature
        self.layouts = tuple(layouts)
        self.buckets = tuple(buckets)
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.names = signature.grid.names
        self.inputs = SharedBuffers(layouts, buckets)
        self.output_plans: tuple[OutputPlan, ...] | None = None
        self.outputs: SharedBuffers | None = None
        self.graphs: dict[GraphKey, BucketGraph] = {}
        self.leased: SharedBuffers | None = None
        self.desk = LeaseDesk(device, lambda: self.leased.storages if self.leased is not None else [])
        self.outside = OutsideMemory()
        self.clock = 0  # of the last use, for eviction
        self.latest: BucketGraph | None = None  # the graph whose inputs lie in the buffers
        outputs = len(signature.outputs)
        with torch.inference_mode(False):
            self._inputs_at = len(self.names) + outputs
            staged = [layout is not None for layout in self.layouts].count(True)
            width = self._inputs_at + NUMBERS * staged
            self.record = torch.zeros(width, dtype=torch.int64, device=device)
            self.fills = torch.zeros(max(1, len(self.layouts)), 2, dtype=torch.int64, device=device)
        self.lane: Lane | None = take_lane(device) if self.on_cuda else None
        self.pool = DevicePool() if self.on_cuda else None
        self.ring = CallRing(width, self.record) if self.on_cuda else None
        self.no_inputs = [0] * (NUMBERS * staged)
        self.last_raw = -1  # the stream that `done` was last recorded on, if it is known
        self.done: torch.cuda.Event | None = torch.cuda.Event() if self.on_cuda else None
        self.set_fills(self.clean_fills())
        self._let_go: Callable[[], object] | None = None
        if self.lane is not None and self.done is not None:
            # Also where the generation is dropped while replays are under way: what they read lives until they end.
            kept = (self.inputs, self.record, self.fills, self.ring)
            self._let_go = weakref.finalize(self, _let_go, self.lane, self.done, kept)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of captures."""
        return self.lane.stream if self.lane is not None else None

    @property
    def static_bytes(self) -> int:
        """Bytes of the shared static buffers."""
        extra = sum(t.numel() * t.element_size() for t in (self.record, self.fills))
        buffers = (self.inputs, self.outputs, self.leased)
        return extra + sum(buffer.nbytes for buffer in buffers if buffer is not None)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool; 0 on a CPU, where recordings keep their own tensors."""
        return pool_bytes(self.pool.handle) if self.pool is not None else 0

    @property
    def executable_bytes(self) -> int:
        """Bytes of device memory that the driver took for the executable graphs, as far as measured."""
        return sum(graph.executable_bytes for graph in self.graphs.values())

    @property
    def largest_executable(self) -> int:
        """The bytes of the largest executable graph so far: what another is expected to take."""
        return max((graph.executable_bytes for graph in self.graphs.values()), default=0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the libraries' workspaces."""
        return self.lane.nbytes if self.lane is not None else 0

    @property
    def nbytes(self) -> int:
        """All of these together."""
        return self.static_bytes + self.pool_bytes + self.executable_bytes + self.workspace_bytes

    def holds(self, bucket: Bucket) -> bool:
        """Whether the buffers are large enough for a bucket."""
        return all(b is None or b.holds(bucket) for b in (self.inputs, self.outputs, self.leased))

    def views(self, bucket: Bucket) -> tuple[torch.Tensor | None, ...]:
        """The static inputs at a bucket."""
        return tuple(
            self.inputs.view(position, bucket) if layout is not None else None
            for position, layout in enumerate(self.layouts)
        )

    def output_views(self, bucket: Bucket) -> tuple[torch.Tensor | None, ...]:
        """The static outputs at a bucket, whose buffers are made when they are first asked for."""
        plans = self.output_plans or ()
        if self.outputs is None:
            self.outputs = SharedBuffers([plan.layout for plan in plans], self.buckets)
        return tuple(
            self.outputs.view(position, bucket) if plan.layout is not None else None
            for position, plan in enumerate(plans)
        )

    def lease_memory(self) -> list[torch.Tensor | None]:
        """The memory of leases: for each output as much as the largest bucket needs."""
        plans = self.output_plans or ()
        if self.leased is None:
            self.leased = SharedBuffers([plan.layout for plan in plans], self.buckets)
        return [
            self.leased.flat(position) if plan.layout is not None else None
            for position, plan in enumerate(plans)
        ]

    def clean_fills(self) -> list[Pattern]:
        """The declared fill of each leaf, as the bits that padding gets."""
        return [
            fill_pattern(layout.spec.fill, layout.dtype)
            if layout is not None and isinstance(layout.spec, Rows)
            else (0, 0)
            for layout in self.layouts
        ]

    def set_fills(self, fills: Sequence[Pattern]) -> None:
        """Sets what the graphs put into padding."""
        host = torch.tensor(list(fills) or [(0, 0)], dtype=torch.int64, device="cpu")
        self.fills.copy_(host)

    def pad_leaves(self, bucket: Bucket) -> list[PadLeaf]:
        """What the first node of a bucket's graph fills."""
        leaves = []
        for position, layout in enumerate(self.layouts):
            if layout is None or not isinstance(layout.spec, (Rows, Offsets)):
                continue
            spec = layout.spec
            offsets = isinstance(spec, Offsets)
            view = self.inputs.view(position, bucket)
            if view.numel():
                leaves.append(
                    PadLeaf(
                        view,
                        0 if isinstance(spec, Offsets) else spec.axis,
                        1 if isinstance(spec, Offsets) else spec.per,
                        self.names.index(spec.dim),
                        position,
                        offsets,
                    )
                )
        return leaves

    def open(self, bucket: Bucket) -> None:
        """The first nodes of a bucket's graph: the record, the inputs, the padding."""
        if self.ring is not None:
            self.ring.fetch()
            self.stage(bucket)
        self.pad(bucket)

    def stage(self, bucket: Bucket) -> None:
        """Copies a call's inputs into the static ones at a bucket, as the record says, on a GPU."""
        staged = [view for view in self.views(bucket) if view is not None]
        stage(self, [(view, self._inputs_at + NUMBERS * i) for i, view in enumerate(staged)])

    def pad(self, bucket: Bucket) -> None:
        """Fills the padding of a bucket's static inputs, as the record says."""
        leaves = self.pad_leaves(bucket)
        if leaves:
            fill_padding(leaves, self.record, self.fills)

    def replay(self, graph: Replayable, numbers: Sequence[int]) -> None:
        """Replays a graph for a call of these numbers, on the current stream."""
        ring = self.ring
        if ring is None:
            self.set_record(numbers)
            graph.replay()
            return
        try:
            ring.write(numbers)
            graph.replay()
            ring.launched()
        except BaseException:  # an interrupt between two of these
            with contextlib.suppress(Exception):
                ring.resync()
            raise

    def set_record(self, numbers: Sequence[int]) -> None:
        """Writes a record without a graph, and waits for it."""
        self.record.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def publish_leaves(self, flat: Sequence[Any]) -> list[PublishLeaf]:
        """What the last node of a graph copies out: tensors that the function returned, in their order."""
        leaves = []
        for position, (plan, value) in enumerate(zip(self.output_plans or (), flat, strict=True)):
            if plan.layout is None:
                continue
            spec = plan.layout.spec
            count = self.names.index(spec.dim) if isinstance(spec, (Rows, Offsets)) else -1
            leaves.append(
                PublishLeaf(
                    value.resolve_conj().resolve_neg().contiguous(),
                    spec.axis if isinstance(spec, Rows) else 0,
                    spec.per if isinstance(spec, Rows) else 1,
                    count,
                    isinstance(spec, Offsets),
                    len(self.names) + position,
                )
            )
        return leaves

    def numbers(self, sizes: Mapping[str, int]) -> list[int]:
        """The record of a call whose inputs lie in the static buffers already, and whose outputs go nowhere."""
        outputs = len(self.signature.outputs)
        return [*(sizes[name] for name in self.names), *([0] * outputs), *self.no_inputs]

    def poison(self) -> None:
        """Fills the graphs' pool with NaN, after the last replay."""
        if self.pool is None or self.done is None:
            return
        stream = torch.cuda.current_stream(self.device)
        self.done.wait(stream)
        poison_pool(self.pool.handle, stream)
        self.done.record(stream)
        self.last_raw = -1

    def settle(self) -> None:
        """Waits until no replay is under way."""
        if self.done is not None:
            self.done.synchronize()

    def drop(self, keys: Sequence[GraphKey] | None = None) -> None:
        """Drops graphs (all of them where none are named). Memory of the pool is freed with its last graph."""
        chosen = list(self.graphs) if keys is None else [key for key in keys if key in self.graphs]
        if not chosen:
            return
        self.settle()
        for key in chosen:
            self.graphs.pop(key).graph.reset()

    def release(self) -> None:
        """Drops everything. The generation can't be used again."""
        self.settle()
        self.drop()
        self.desk.close()
        if self._let_go is not None:
            self._let_go()
        self.lane = None
        self.pool = None


def _let_go(lane: Lane, done: torch.cuda.Event, kept: tuple[object, ...]) -> None:
    """Leaves a lane to others once the last replay on it has ended."""
    with contextlib.suppress(Exception):  # of a device that has failed
        done.synchronize()
    give_back_lane(lane)
