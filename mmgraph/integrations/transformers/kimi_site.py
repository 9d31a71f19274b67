"""Kimi K2.5's vision tower and projector: transformers' own modules, given what the host knows of the grids.

The tower takes positions, offsets, entries of its learned table and the order of merge blocks as keywords, and then
loops over no image. They come from mmgraph's cache by grid, in one copy, so that the whole can be captured.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmgraph.capture import BucketGrid, CapturedEncoder, bucket_size, offsets, rows
from mmgraph.errors import UnsupportedModelError
from mmgraph.integrations.transformers.attention import TowerAttention
from mmgraph.integrations.transformers.fixed_parts import known_tower
from mmgraph.integrations.transformers.fixed_site import arguments_of
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.integrations.transformers.runners import TowerRunner, Unserved
from mmgraph.integrations.transformers.sites import Options
from mmgraph.integrations.transformers.unchanged import Unchanged
from mmgraph.towers.frames import merge_order
from mmgraph.towers.grids import GridCache, GridLayout, PositionTable, grids_of
from mmgraph.towers.items import PatchItem, joined, joined_patches
from mmgraph.towers.upload import upload_together

__all__ = ["KimiSite", "KimiTower"]

_TAKES = frozenset({"pixel_values", "image_grid_thw"})


class KimiTower:
    """An encoder adapter around the tower and the projector of ``Kimi_K25Model``, for images.

    Args:
        model: The model.
        attention: Gives the tower its attention while `forward` runs.

    Raises:
        UnsupportedModelError: It isn't built as known.
    """

    def __init__(self, model: Any, attention: TowerAttention) -> None:
        self.attention = attention
        self.tower = known_tower(model, "vision_tower", "Kimi_K25VisionModel")
        self.projector = part(model, "mm_projector")
        self.projection = part(self.tower, "patch_embed.proj")
        height, width = part(self.tower, "merge_kernel_size")
        table = part(self.tower, "patch_embed.pos_emb")
        if (
            height != width
            or part(table, "position_embeddings").shape[0] != part(table, "position_embeddings").shape[1]
        ):
            raise UnsupportedModelError(
                f"{type(model).__name__} has merge blocks of {height} by {width} patches and a position table of "
                f"{list(table.position_embeddings.shape[:2])}; mmgraph knows it with square ones"
            )
        self.merge = int(height)
        self._cache = GridCache(
            GridLayout(
                clips=True,
                table=PositionTable(
                    side=int(part(table, "num_grid_per_side")),
                    mode=part(table, "interpolation_mode"),
                    align_corners=bool(table.interpolation_align_corners),
                ),
            )
        )

    @property
    def unit(self) -> int:
        """Patches of a merge block."""
        return self.merge**2

    @property
    def inputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s inputs."""
        return {
            "patches": rows("tokens"),
            "positions": rows("tokens"),
            "taps": rows("tokens"),
            "tap_weights": rows("tokens"),
            "blocks": rows("tokens", per=self.unit),
            "cu_seqlens": offsets("batch", of="tokens"),
            "max_seqlen": bucket_size("seqlen"),
        }

    @property
    def outputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s outputs."""
        return {"rows": rows("tokens", per=self.unit), "last": rows("tokens")}

    def sizes(self, item: PatchItem) -> dict[str, int]:
        """An image's patches."""
        count = len(item.patches)
        return {"tokens": count, "batch": 1, "seqlen": count}

    def prepare(self, items: Sequence[PatchItem], bucket: Mapping[str, int] | None) -> dict[str, Any]:
        """The inputs of `forward` for some images."""
        weight = self.projection.weight
        host = self._cache.batch([item.grid for item in items])
        starts = host.cu_seqlens[:-1]
        blocks = [
            _blocks(*item.grid[1:], self.merge) + start for item, start in zip(items, starts, strict=True)
        ]
        arrays: dict[str, npt.NDArray[Any]] = {**host.arrays(), "blocks": np.concatenate(blocks)}
        patches = joined_patches(items, weight.device, weight.dtype)
        return {"patches": patches, **upload_together(arrays, weight.device), "max_seqlen": host.max_seqlen}

    def forward(
        self,
        patches: Tensor,
        positions: Tensor,
        taps: Tensor,
        tap_weights: Tensor,
        blocks: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> dict[str, Tensor]:
        """Patches to rows.

        Args:
            patches: ``[tokens, channels * patch * patch]`` in the tower's dtype.
            positions: int32 ``[tokens, 2]``, row and column.
            taps: int32 ``[tokens, taps]``, rows of the position table.
            tap_weights: float32 ``[tokens, taps]``.
            blocks: int32 ``[tokens / unit, unit]``, the patches of each merge block.
            cu_seqlens: int32 ``[images + 1]``.
            max_seqlen: At least the longest image.
        """
        with self.attention.ours():
            record = self.tower(
                patches.unflatten(1, self.projection.weight.shape[1:]),
                grid_thw=None,
                position_ids=positions,
                interp_indices=taps,
                interp_weights=tap_weights,
                # Images add nothing of time, which is the first row of that table.
                frame_index=torch.zeros_like(positions[:, 0]),
                temporal_merge_index=blocks.unsqueeze(1),
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                return_dict=True,
            )
        return {"rows": self.projector(record.pooler_output).squeeze(1), "last": record.last_hidden_state}

    def split(self, outputs: Mapping[str, Tensor], items: Sequence[PatchItem]) -> list[tuple[Tensor, Tensor]]:
        """Each image's rows, and its part of the last hidden state."""
        counts = [len(item.patches) for item in items]
        merged = outputs["rows"].split([count // self.unit for count in counts])
        return list(zip(merged, outputs["last"].split(counts), strict=True))

    def grid(self, max_tokens: int, *, smallest: int = 256, steps: int = 4) -> BucketGrid:
        """Buckets in geometric steps to ``max_tokens`` patches, with room for an image of each 256 patches."""
        count = max(0, math.ceil(steps * math.log2(max(1.0, max_tokens / smallest))))
        sizes = {min(max_tokens, smallest * 2 ** (step / steps)) for step in range(count + 1)} | {max_tokens}
        multiple = self.unit * 16
        return BucketGrid(
            tokens=tuple(sorted({math.ceil(size / multiple) * multiple for size in sizes})),
            derived={"batch": lambda b: b["tokens"] // 256 + 8, "seqlen": lambda b: b["tokens"]},
        )


@lru_cache(maxsize=256)
def _blocks(height: int, width: int, merge: int) -> npt.NDArray[np.int32]:
    """The patches of each merge block of an image whose patches lie in raster order: ``[blocks, merge * merge]``."""
    made = merge_order(height, width, merge).reshape(-1, merge**2)
    made.setflags(write=False)
    return made


class KimiSite:
    """Replaces the image features of ``Kimi_K25Model``, which its videos go through too.

    Args:
        name: The model's dotted name.
        model: The model.
        options: What was asked for.

    Raises:
        UnsupportedModelError: The model isn't built as known.
    """

    def __init__(self, name: str, model: Any, options: Options) -> None:
        self.family, self.model = type(model).__name__, model
        self.name = f"{name}.vision_tower" if name else "vision_tower"
        tower = known_tower(model, "vision_tower", "Kimi_K25VisionModel")
        self.runner = TowerRunner(self.name, tower, (tower, part(model, "mm_projector")), options)
        self.runner.unchanged = Unchanged(self.runner.modules, owner=model)
        self.tower = KimiTower(model, self.runner.attention)
        self._original: Callable[..., Any] = model.get_image_features
        self._signature = inspect.signature(self._original)
        self.encoder: CapturedEncoder | None = None

    def install(self, patches: Patches) -> None:
        """See `Site`."""
        tower, merge = self.tower, self.tower.merge
        weight = tower.projection.weight
        example = PatchItem(torch.zeros_like(weight[:1].flatten(1)).repeat(merge**2, 1), (1, merge, merge))
        self.runner.capture_with(tower, tower.grid(self.runner.options.max_tokens), example, weight.device)
        self.encoder = self.runner.encoder
        patches.replace(self.model, "get_image_features", self.get_image_features)

    def close(self) -> None:
        """See `Site`."""
        self.runner.close()
        self.encoder = None

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own method; what the fast way hasn't got runs that."""
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        try:
            return self._served(arguments_of(self._signature, args, kwargs))
        except Unserved as reason:
            why = str(reason)
        return self.runner.as_it_was(why, self._original, *args, **kwargs)

    def _served(self, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        self.runner.check(given, self.model.config, _TAKES)
        pixels, grid_thw = given["pixel_values"], given.get("image_grid_thw")
        if grid_thw is None or (torch.is_grad_enabled() and pixels.requires_grad):
            raise Unserved("it was given no grids" if grid_thw is None else "pixel_values need gradients")
        grids = grids_of(grid_thw, allow_sync=True)
        counts = [math.prod(grid) for grid in grids]
        if not grids or any(grid[0] != 1 for grid in grids):
            raise Unserved("there are no images, or videos")
        side = self.tower.merge
        if sum(counts) != len(pixels) or any(grid[1] % side or grid[2] % side for grid in grids):
            raise Unserved("its patches, grids and merge blocks don't fit")
        patches = pixels.flatten(1).split(counts)
        items = [PatchItem(one, grid) for one, grid in zip(patches, grids, strict=True)]
        found = self.runner.run(self.tower, items)
        return BaseModelOutputWithPooling(
            last_hidden_state=joined([last for _, last in found]),
            pooler_output=tuple(each for each, _ in found),
        )
