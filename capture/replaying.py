"""One call on a captured graph: its record, the replay, its outputs.

All of it is enqueued on the caller's stream. Replays of a generation share memory, so each waits for the event behind
the one before it; on one stream that is free. The owner of the generation holds its lock meanwhile.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ._compat import cuda_current_device, cuda_raw_stream
from .calls import Source
from .copying import Piece, copy_pieces, pieces_of
from .generation import Generation
from .graph import BucketGraph
from .layout import LeafLayout
from .metrics import ReplayTimer
from .publishing import NUMBERS
from .spec import Offsets, Rows

__all__ = ["Replayer", "sizes_in_order"]

Tensor = torch.Tensor
Maker = Callable[[Sequence[int]], Tensor]


class Replayer:
    """Replays a generation's graphs.

    Args:
        generation: whose graphs.
        timer: samples replay times.
    """

    def __init__(self, generation: Generation, timer: ReplayTimer) -> None:
        self._generation = generation
        self._timer = timer
        self._ring, self._done = generation.ring, generation.done
        self._on_cuda = generation.on_cuda
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._index = -1
        if self._on_cuda:
            index = generation.device.index
            self._index = torch.cuda.current_device() if index is None else index
        #: Of each tensor leaf: its position, the axis of its rows, and whether it has any.
        self._leaves = [
            (
                position,
                layout.spec.axis if isinstance(layout.spec, Rows) else 0,
                isinstance(layout.spec, (Rows, Offsets)),
            )
            for position, layout in enumerate(generation.layouts)
            if layout is not None
        ]
        self._bases = [generation.inputs.flat(position).data_ptr() for position, _, _ in self._leaves]
        self._makers = [_result_maker(plan.layout, generation) for plan in generation.output_plans or ()]
        self._lease_makers: list[Maker | None] | None = None
        self._only = self._makers[0] if len(self._makers) == 1 else None

    def is_current(self) -> bool:
        """Whether the generation's device is the current one."""
        return not self._on_cuda or cuda_current_device() == self._index

    def enter(self) -> torch.cuda.Stream | None:
        """Makes the current stream wait for the replay before; gives it. None on a CPU."""
        if not self._on_cuda or self._done is None:
            return None
        raw = cuda_raw_stream(self._index)
        stream = self._streams.get(raw)
        if stream is None or raw != self._generation.last_raw:
            stream = self.stream()
            self._done.wait(stream)
            # Until the end is marked, other streams have nothing to wait for that covers this call.
            self._generation.last_raw = raw
        return stream

    def stream(self) -> torch.cuda.Stream | None:
        """The current stream; asked for once, where it is one of PyTorch's. None on a CPU."""
        if not self._on_cuda:
            return None
        raw = cuda_raw_stream(self._index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = torch.cuda.current_stream(self._generation.device)
            # A stream from elsewhere may be destroyed, and its handle be another's: it isn't kept.
            if stream.stream_id != raw or raw == 0:
                self._streams[raw] = stream
        return stream

    def leased(self, sizes: Sequence[int]) -> list[Tensor | None]:
        """Contiguous memory for a call's outputs, the same for every call."""
        if self._lease_makers is None:
            flat = self._generation.lease_memory()
            self._lease_makers = [
                _result_maker(plan.layout, self._generation, memory)
                for plan, memory in zip(self._generation.output_plans or (), flat, strict=True)
            ]
        return [make(sizes) if make is not None else None for make in self._lease_makers]

    def leave(self, stream: torch.cuda.Stream | None) -> None:
        """Marks the end of a replay on the stream that `enter` gave."""
        if stream is not None and self._done is not None:
            self._done.record(stream)

    def results(self, sizes: Sequence[int]) -> list[Tensor | None]:
        """Memory for a call's outputs, on the current stream."""
        if self._only is not None:
            return [self._only(sizes)]
        return [make(sizes) if make is not None else None for make in self._makers]

    def run(
        self,
        graph: BucketGraph,
        leaves: Sequence[Any],
        sources: Sequence[Source | None] | None,
        sizes: Sequence[int],
        results: Sequence[Tensor | None],
    ) -> None:
        """Stages a call, replays, and has its outputs written to `results`, which are contiguous.

        Args:
            graph: which.
            leaves: the call's.
            sources: where they lie, as a reader says; None for what it doesn't say.
            sizes: the call's, in the grid's order.
            results: where outputs go.
        """
        stream = self.enter()
        try:
            numbers = [*sizes, *[0 if result is None else result.data_ptr() for result in results]]
            if sources is None or None in sources:
                numbers += self._staged(graph, leaves, sources)
            else:
                for address, nbytes in sources:  # type: ignore[misc]
                    numbers += (address, nbytes, 1, 0, 0)
            self._replay(graph, stream, numbers)
        finally:
            if stream is not None:
                self._done.record(stream)  # type: ignore[union-attr]
        if not self._on_cuda:
            self._cut(graph, results)

    def run_staged(self, graph: BucketGraph, sizes: Sequence[int], results: Sequence[Tensor | None]) -> None:
        """Replays on what the caller has written into the static inputs himself."""
        stream = self.enter()
        try:
            numbers = [*sizes, *[0 if result is None else result.data_ptr() for result in results]]
            self._replay(graph, stream, [*numbers, *self._generation.no_inputs])
        finally:
            self.leave(stream)
        if not self._on_cuda:
            self._cut(graph, results)

    def values(self, graph: BucketGraph, results: Sequence[Tensor | None]) -> Sequence[Any]:
        """The call's output leaves: results, and copies of what isn't a tensor."""
        if None not in self._makers:
            return results
        return [
            copy.deepcopy(plan.value) if plan.layout is None else result
            for plan, result in zip(graph.plans, results, strict=True)
        ]

    def _replay(self, graph: BucketGraph, stream: torch.cuda.Stream | None, numbers: list[int]) -> None:
        if self._ring is None:
            self._stage_now(numbers)
        timer = self._timer
        timer.start(stream)
        self._generation.replay(graph.graph, numbers)
        timer.stop(stream)

    def _staged(
        self, graph: BucketGraph, leaves: Sequence[Any], sources: Sequence[Source | None] | None
    ) -> list[int]:
        """What the record says of the inputs, after copying those that it can't describe."""
        numbers: list[int] = []
        for number, (position, axis, sized) in enumerate(self._leaves):
            source = sources[number] if sources is not None else None
            if source is not None:
                numbers += (*source, 1, 0, 0)
                continue
            value, view = leaves[position], graph.inputs[position]
            piece = pieces_of(value, view, axis) if sized and view is not None and value.numel() else None
            if piece is not None:
                numbers += (piece[0], *piece[2:])
                continue
            numbers += (0,) * NUMBERS
            if view is not None and value.numel():
                with torch.no_grad():
                    (view.narrow(axis, 0, value.shape[axis]) if sized else view).copy_(value)
        return numbers

    def _stage_now(self, numbers: Sequence[int]) -> None:
        """On a CPU: copies the inputs by the host, as the first node of a GPU's graph does."""
        of_inputs = numbers[len(numbers) - len(self._generation.no_inputs) :]
        pieces: list[Piece] = []
        for index, base in enumerate(self._bases):
            src, inner, runs, src_pitch, dst_pitch = of_inputs[NUMBERS * index : NUMBERS * (index + 1)]
            pieces.append((src, base, inner, runs, src_pitch, dst_pitch))
        copy_pieces(pieces)

    def _cut(self, graph: BucketGraph, results: Sequence[Tensor | None]) -> None:
        """Copies the real rows out of the static outputs, on a CPU."""
        with torch.inference_mode():  # which may write both to ordinary tensors and to inference tensors
            for plan, source, result in zip(graph.plans, graph.outputs, results, strict=True):
                if plan.layout is None or source is None or result is None:
                    continue
                spec = plan.layout.spec
                if isinstance(spec, (Rows, Offsets)):
                    axis = spec.axis if isinstance(spec, Rows) else 0
                    source = source.narrow(axis, 0, result.shape[axis])
                result.copy_(source)


def _result_maker(
    layout: LeafLayout | None, generation: Generation, memory: Tensor | None = None
) -> Maker | None:
    """What gives the tensor for an output of given sizes: new, or at the beginning of given memory."""
    if layout is None:
        return None
    if memory is None:
        with torch.inference_mode(False):
            template = torch.empty(0, dtype=layout.dtype, device=layout.device)
        new = template.new_empty
    else:
        whole = memory

        def new(shape: tuple[int, ...]) -> Tensor:  # type: ignore[misc]
            return whole[: math.prod(shape)].view(shape)

    spec, shape, names = layout.spec, layout.shape, generation.names
    if isinstance(spec, Offsets):
        index = names.index(spec.dim)
        return lambda sizes: new((sizes[index] + 1,))
    if not isinstance(spec, Rows):
        return lambda sizes: new(shape)
    index, per, axis = names.index(spec.dim), spec.per, spec.axis
    front, back = shape[:axis], shape[axis:]
    return lambda sizes: new((*front, sizes[index] // per, *back))


def sizes_in_order(names: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Named sizes in the grid's order."""
    return [sizes[name] for name in names]
