"""Items of a packed tower: patches and a grid, from what callers have, joined without a copy where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmgraph.errors import TowerError
from mmgraph.towers.grids import Grid, grids_of

__all__ = ["PatchItem", "joined", "joined_patches", "read_item"]

_GRID_NAMES = ("grid", "grid_thw", "image_grid_thw", "video_grid_thw")


@dataclass(frozen=True, eq=False, slots=True)
class PatchItem:
    """One image or video.

    Attributes:
        patches: ``[frames * height * width, channels * frames * patch * patch]``, any floating dtype.
        grid: Frames, height and width in patches.
    """

    patches: Tensor
    grid: Grid


def read_item(item: Any) -> PatchItem:
    """The patches and the grid of an item.

    Args:
        item: A `PatchItem`, or a `MultimodalDataItem` whose feature are the patches and whose ``model_specific_data``
            holds the grid as "grid", "grid_thw", "image_grid_thw" or "video_grid_thw".

    Raises:
        TowerError: Neither, no grid, or patches that the grid doesn't hold.
    """
    if isinstance(item, PatchItem):
        return _checked(item)
    data = getattr(item, "model_specific_data", None)
    patches = getattr(item, "feature", None)
    names = sorted(data) if isinstance(data, dict) else []
    found = (
        next((data[name] for name in _GRID_NAMES if name in names), None) if isinstance(data, dict) else None
    )
    if found is None or not isinstance(patches, Tensor):
        raise TowerError(
            "a tower's item must be a PatchItem(patches, grid), or have a tensor as feature and its grid in "
            f"model_specific_data['grid'], got {type(item).__name__} with feature {type(patches).__name__} and data "
            f"{names}"
        )
    return _checked(PatchItem(patches, _one_grid(found)))


def _checked(item: PatchItem) -> PatchItem:
    patches, grid = item.patches, item.grid
    expected = grid[0] * grid[1] * grid[2]
    if patches.ndim != 2 or patches.shape[0] != expected:
        raise TowerError(
            f"patches of the grid {grid} must be [{expected}, values of a patch], got {list(patches.shape)}: give each "
            "item its own patches and grid"
        )
    return item


def _one_grid(found: Any) -> Grid:
    """A grid as it stands in an item's data: three integers, or a list, array or tensor of one such row."""
    if isinstance(found, (tuple, list)) and len(found) == 3 and all(type(n) is int for n in found):
        return (found[0], found[1], found[2])
    if hasattr(found, "reshape"):
        found = found.reshape(-1, found.shape[-1] if found.ndim else 1)
    grids = grids_of(found)
    if len(grids) != 1:
        raise TowerError(f"an item has one grid, got {len(grids)}: make an item of each image or video")
    return grids[0]


def joined_patches(items: Sequence[PatchItem], device: torch.device, dtype: torch.dtype) -> Tensor:
    """All patches in one tensor on the device, in the tower's dtype; where they lie there in a row, as they lie.

    Patches on the host are copied before this returns, so that the caller may write there again.

    Raises:
        TowerError: The items' patches differ in width.
    """
    if not items:
        raise TowerError("a tower needs at least one item: don't call it for none")
    patches = [item.patches for item in items]
    widths = {one.shape[1] for one in patches}
    if len(widths) > 1:
        raise TowerError(f"patches of a call must be equally wide, got widths {sorted(widths)}")
    first = patches[0]
    if len(patches) > 1:
        run = _in_a_row(patches)
        first = torch.cat([one.to(device, dtype) for one in patches]) if run is None else run
    return first.to(device, dtype)


def _in_a_row(patches: Sequence[Tensor]) -> Tensor | None:
    """The one tensor whose parts these are, in order, or None."""
    first = patches[0]
    if not first.is_contiguous() or any(one.is_neg() or one.is_conj() for one in patches):
        return None
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for one in patches:
        same = one.dtype == first.dtype and one.device == first.device and one.is_contiguous()
        if not same or one.untyped_storage().data_ptr() != storage or one.storage_offset() != place:
            return None
        place += one.numel()
    count = sum(one.shape[0] for one in patches)
    return first.as_strided((count, first.shape[1]), (first.shape[1], 1))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts one behind the other: as they lie where they lie in a row, else copied.

    Args:
        parts: At least one, ``[rows, width]`` each.
    """
    if len(parts) == 1:
        return parts[0]
    run = _in_a_row(parts)
    return torch.cat(list(parts)) if run is None else run
