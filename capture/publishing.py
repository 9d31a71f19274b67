"""The nodes of a graph that move a call's data: inputs come from, and outputs go to, where the call's record says.

On a GPU these are part of the graph, so a call needs no launch to stage its inputs or to copy its results out, and no
buffer of the largest bucket's size lies between the function's output and the caller's. On a CPU the host copies: the
recorder leaves whole outputs in static buffers, and the host cuts the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .launching import launch_constant

if TYPE_CHECKING:
    from .generation import Generation

__all__ = ["NUMBERS", "PublishLeaf", "publish", "stage"]

#: What the record has of an input: the source's address, bytes of a run, runs, and bytes from run to run in each.
NUMBERS = 5

_BLOCK_BYTES = 8192
# Programs of one leaf: enough to fill a GPU several times; each goes on to further blocks.
_MOST_PROGRAMS = 1024
_MOST_LEAVES = 16


@dataclass(frozen=True)
class PublishLeaf:
    """One output at a bucket.

    Attributes:
        source: what the function returned, contiguous.
        axis: along which its rows lie.
        per: how many of the size make one row.
        count: where the record has the size; -1 for an output of one shape.
        offsets: whether it holds one row more than the size.
        target: where the record has the address to copy to; an address of 0 means nowhere.
    """

    source: torch.Tensor
    axis: int
    per: int
    count: int
    offsets: bool
    target: int

    def numbers(self) -> tuple[int, ...]:
        """What the kernel knows of it."""
        shape, width = self.source.shape, self.source.element_size()
        rows = shape[self.axis] if shape else 1
        inner = math.prod(shape[self.axis + 1 :]) * width
        runs = math.prod(shape[: self.axis])
        if self.count < 0:
            rows, inner, runs = 1, self.source.numel() * width, 1
        return (
            self.source.data_ptr(),
            inner,
            rows,
            self.per,
            self.count,
            int(self.offsets),
            runs,
            self.target,
        )


def stage(generation: Generation, views: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Copies a call's inputs into static views, as the record says; on a GPU alone, in its order.

    Args:
        generation: whose record.
        views: the static views at the bucket, each with where the record has its numbers.
    """
    leaves = [(view.data_ptr(), at, view.numel() * view.element_size()) for view, at in views if view.numel()]
    for start in range(0, len(leaves), _MOST_LEAVES):
        some = leaves[start : start + _MOST_LEAVES]
        _launch("stage_kernel", generation.record, [(dst, at) for dst, at, _ in some], [n for *_, n in some])


def publish(generation: Generation, flat: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
    """Copies what the function returned out: on a GPU as the record says, on a CPU into static outputs."""
    if not generation.on_cuda:
        for result, target in zip(flat, outputs, strict=True):
            if target is not None:
                target.copy_(result)
        return
    leaves = [leaf for leaf in generation.publish_leaves(flat) if leaf.source.numel()]
    for start in range(0, len(leaves), _MOST_LEAVES):
        some = leaves[start : start + _MOST_LEAVES]
        sizes = [leaf.source.numel() * leaf.source.element_size() for leaf in some]
        _launch("publish_kernel", generation.record, [leaf.numbers() for leaf in some], sizes)


def _launch(kernel: str, record: torch.Tensor, leaves: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
    """Launches a kernel over leaves of given bytes."""
    from . import call_kernels

    ends, programs = [], 0
    for nbytes in sizes:
        programs += min(-(-nbytes // _BLOCK_BYTES), _MOST_PROGRAMS)
        ends.append(programs)
    launch_constant(
        getattr(call_kernels, kernel),
        programs,
        (record.data_ptr(), tuple(leaves), tuple(ends)),
        {"LEAVES": len(leaves), "BLOCK_BYTES": _BLOCK_BYTES},
        record.device,
    )
