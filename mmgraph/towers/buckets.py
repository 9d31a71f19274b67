"""Buckets of packed towers for those who know nothing of their traffic, and an item to capture with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from mmgraph.capture import BucketGrid
from mmgraph.towers.items import PatchItem
from mmgraph.towers.packed import PackedTower

__all__ = ["example_item", "packed_grid", "room_in"]


def example_item(tower: PackedTower, side: int = 16) -> PatchItem:
    """A square image to capture with. Replays are timed on it, so that its frames are of a usual size.

    Args:
        tower: Says how large a patch is.
        side: Patches on a side, rounded up to whole merge blocks.
    """
    merge = tower.parts.layout.merge
    side = -(-side // merge) * merge
    width = tower.parts.projection.weight[0].numel()
    patches = torch.zeros(side * side, width, device=tower.device, dtype=tower.dtype)
    return PatchItem(patches, (1, side, side))


def packed_grid(max_tokens: int, tower: PackedTower, *, smallest: int = 256, steps: int = 4) -> BucketGrid:
    """Buckets of a packed tower where nobody says anything of its traffic.

    Args:
        max_tokens: Patches of the largest.
        tower: Says what a merge block is.
        smallest: Patches of the smallest.
        steps: Sizes to a doubling.

    Returns:
        Tokens in geometric steps; a bucket has room for one frame of all its tokens, for frames of 256 patches, and for
        the windows of images that fill three quarters of theirs. Items that need more room than that for their tokens
        go into a larger bucket.
    """
    multiple = tower.unit * 4
    count = max(0, math.ceil(steps * math.log2(max(1.0, max_tokens / smallest))))
    sizes = {min(max_tokens, smallest * 2 ** (step / steps)) for step in range(count + 1)} | {max_tokens}
    return BucketGrid(
        tokens=tuple(sorted({math.ceil(size / multiple) * multiple for size in sizes})),
        side=(tower.parts.rotary.length,),
        derived=room_in(tower),
    )


def room_in(tower: PackedTower) -> dict[str, Callable[[Mapping[str, int]], int]]:
    """The sizes of a bucket that follow from its tokens; see `packed_grid`."""
    derived: dict[str, Callable[[Mapping[str, int]], int]] = {
        "batch": lambda b: b["tokens"] // 256 + 8,
        "seqlen": lambda b: b["tokens"],
    }
    if tower.parts.window:
        # Room for every window there could be (of one merge block each) would make attention choose and launch as if
        # windows were short: 13% of the tower's time at 5824 patches of Qwen2.5-VL on an H200.
        full = tower.parts.window
        derived["windows"] = lambda b: b["tokens"] * 4 // (3 * full) + b["tokens"] // 256 + 8
    return derived
