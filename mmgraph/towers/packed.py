"""Towers that take the patches of all images in one row, each with its grid: capturable, and faster than their models.

`PackedTower` is an encoder adapter (`mmgraph.capture.CapturedEncoder`): host integers say what items need, host arrays
are cached by grid and uploaded in one copy, and `forward` launches kernels and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import bucket_size, offsets, rows
from mmgraph.ops import mix_rows
from mmgraph.towers.blocks import Block, Norm, Sequences, Stream, patch_rows
from mmgraph.towers.grids import Grid, GridCache, GridLayout
from mmgraph.towers.items import PatchItem, joined_patches, read_item
from mmgraph.towers.mergers import Merger, ShuffledMerger
from mmgraph.towers.rewrites import Rewrites
from mmgraph.towers.rotary import RotaryTables
from mmgraph.towers.upload import upload_together
from mmgraph.towers.uploaded import UploadCache

__all__ = ["PackedTower", "TowerParts", "item_tokens"]


@dataclass(frozen=True, eq=False)
class TowerParts:
    """What a family's tower is made of. Modules are the model's own.

    Attributes:
        module: The whole tower, whose weights are watched.
        projection: The patch projection.
        blocks: The blocks.
        rotary: Tables of cosines and sines.
        merger: What ends the tower.
        layout: Which host arrays it needs.
        after_projection: A norm behind the patch projection, or None.
        table: The module with the learned position table, or None.
        whole: Blocks whose rows attend to all of a frame, where the others see a window.
        deep: Deepstack mergers, by the block that they follow.
        last_per: Patches of a row of the last hidden state.
        window: Patches of a full window; 0 without windows.
    """

    module: Any
    projection: Any
    blocks: tuple[Block, ...]
    rotary: RotaryTables
    merger: Merger
    layout: GridLayout
    after_projection: Norm | None = None
    table: Any = None
    whole: frozenset[int] = frozenset()
    deep: Mapping[int, ShuffledMerger] = field(default_factory=dict)
    last_per: int = 1
    window: int = 0


class PackedTower:
    """An encoder adapter around a model's packed vision tower.

    Args:
        parts: What it is made of.
        rewrites: Which rewrites it runs with.
        read: Takes the patches and the grid from an item; by default from a `PatchItem` or a `MultimodalDataItem`.
        keep_last: Whether to give the last hidden state too, which the language model doesn't need.
        deep_beside: Whether deepstack levels stand beside the rows, in one tensor, as `EncoderSpec(deepstack=True)`
            wants it; else each is a tensor of its own.
    """

    def __init__(
        self,
        parts: TowerParts,
        *,
        rewrites: Rewrites | None = None,
        read: Callable[[Any], PatchItem] = read_item,
        keep_last: bool = False,
        deep_beside: bool = True,
    ) -> None:
        self.parts = parts
        self.rewrites = Rewrites() if rewrites is None else rewrites
        self.keep_last, self.deep_beside = keep_last, deep_beside
        self.unit = parts.layout.merge**2
        self._read = read
        self._cache = GridCache(parts.layout)
        self._uploaded = UploadCache()
        try:
            self.join()
        except BaseException:
            self.part()
            raise

    def join(self) -> None:
        """Joins weights as `Rewrites.aligned_widths` says."""
        if self.rewrites.aligned_widths:
            for block in self.parts.blocks:
                block.mlp.join()

    def part(self) -> None:
        """Gives the model's parameters memory of their own again."""
        for block in self.parts.blocks:
            block.mlp.part()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.parts.projection.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = self.parts.projection.weight.dtype
        return dtype

    @property
    def inputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s inputs."""
        declared: dict[str, Any] = {
            "patches": rows("tokens"),
            "positions": rows("tokens"),
            "cu_seqlens": offsets("batch", of="tokens"),
            "max_seqlen": bucket_size("seqlen"),
            "side": bucket_size("side"),
        }
        if self.parts.table is not None:
            declared |= {"taps": rows("tokens"), "tap_weights": rows("tokens")}
        if self.parts.window:
            declared |= {
                "order": rows("tokens", per=self.unit),
                "back": rows("tokens", per=self.unit),
                "cu_windows": offsets("windows", of="tokens"),
            }
        return declared

    @property
    def outputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s outputs."""
        merged = rows("tokens", per=self.unit)
        declared: dict[str, Any] = {"rows": merged}
        if not self.deep_beside:
            declared["deep"] = [merged for _ in self.parts.deep]
        if self.keep_last:
            declared["last"] = rows("tokens", per=self.parts.last_per)
        return declared

    def sizes(self, item: Any) -> dict[str, int]:
        """An item's patches, frames, longest frame and side, and its windows where the tower has some."""
        return self.grid_sizes(self._read(item).grid)

    def grid_sizes(self, grid: Grid) -> dict[str, int]:
        """As `sizes`, for a grid."""
        frames, height, width = grid
        sizes = {
            "tokens": frames * height * width,
            "batch": frames,
            "seqlen": height * width,
            "side": max(height, width),
        }
        if self.parts.window:
            sizes["windows"] = self._cache.windows(grid)
        return sizes

    def prepare(self, items: Sequence[Any], bucket: Mapping[str, int] | None) -> dict[str, Any]:
        """The inputs of `forward` for some items."""
        read = [self._read(item) for item in items]
        patches = joined_patches(read, self.device, self.dtype)
        return {"patches": patches, **self.metadata([item.grid for item in read])}

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """The inputs beside the patches: as they are on the device from an earlier call, or by one copy from the host.

        Nobody waits for it, and nobody may write to it.
        """
        return self._uploaded.get(tuple(grids), self.device, self._made)

    def _made(self, grids: tuple[Grid, ...]) -> dict[str, Any]:
        host = self._cache.batch(grids)
        side = max((max(grid[1:]) for grid in grids), default=1)
        return {**upload_together(host.arrays(), self.device), "max_seqlen": host.max_seqlen, "side": side}

    def forward(
        self,
        patches: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        side: int,
        taps: Tensor | None = None,
        tap_weights: Tensor | None = None,
        order: Tensor | None = None,
        back: Tensor | None = None,
        cu_windows: Tensor | None = None,
    ) -> dict[str, Any]:
        """Patches to rows. Nothing in it waits for the device.

        Args:
            patches: ``[tokens, channels * frames * patch * patch]`` in the tower's dtype.
            positions: int32 ``[tokens, 2]``, row and column of each patch; with windows, in the order of windows.
            cu_seqlens: int32 ``[frames + 1]``.
            max_seqlen: At least the longest frame.
            side: More than any row or column.
            taps: int32 ``[tokens, taps]``, rows of the position table.
            tap_weights: float32 ``[tokens, taps]``.
            order: int32 ``[tokens / unit]``, which merge block stands where.
            back: int32 ``[tokens / unit]``, its inverse.
            cu_windows: int32 ``[windows + 1]``.

        Returns:
            "rows" ``[tokens / unit, width]``, with the levels' rows beside them or in a list "deep" of their own, and
            "last".
        """
        parts = self.parts
        hidden = patch_rows(patches, parts.projection)
        if parts.after_projection is not None:
            hidden = parts.after_projection(hidden, fused=self.rewrites.fused_norms)
        if taps is not None and tap_weights is not None:
            hidden = mix_rows(parts.table.weight, taps, tap_weights, base=hidden)
        if order is not None:
            hidden = hidden.view(order.shape[0], -1).index_select(0, order).view(hidden.shape)
        cos, sin = parts.rotary(positions, side)
        frames = Sequences(cu_seqlens, max_seqlen)
        windows = frames if cu_windows is None else Sequences(cu_windows, min(parts.window, max_seqlen))
        stream, deep = Stream(hidden, self.rewrites), _Levels(self.rewrites)
        for index, block in enumerate(parts.blocks):
            within = frames if not parts.window or index in parts.whole else windows
            stream.run(block, cos, sin, within, deep.waiting(parts.deep.get(index - 1)))
        last_level = parts.deep.get(len(parts.blocks) - 1)
        if last_level is not None:
            deep.rows.append(last_level(stream.settled(), self.rewrites))
        last, merged = parts.merger(stream)
        if back is not None:
            merged = merged.index_select(0, back)
        result: dict[str, Any] = {"rows": merged}
        if not self.deep_beside:
            result["deep"] = deep.rows
        elif deep.rows:
            result["rows"] = torch.cat([merged, *deep.rows], dim=1)
        if self.keep_last:
            result["last"] = last
        return result

    def split(self, outputs: Mapping[str, Any], items: Sequence[Any]) -> Sequence[Any]:
        """Each item's rows."""
        counts = [item_tokens(self._read(item).grid) // self.unit for item in items]
        return list(outputs["rows"].split(counts))


class _Levels:
    """Deepstack rows, taken where the next block's first norm has settled the stream."""

    def __init__(self, rewrites: Rewrites) -> None:
        self.rows: list[Tensor] = []
        self._rewrites = rewrites

    def waiting(self, merger: ShuffledMerger | None) -> Callable[[Tensor], None] | None:
        """What takes a level's rows, or None."""
        if merger is None:
            return None
        return lambda hidden: self.rows.append(merger(hidden, self._rewrites))


def item_tokens(grid: Grid) -> int:
    """Patches of a grid."""
    return grid[0] * grid[1] * grid[2]
