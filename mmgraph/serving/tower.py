"""The vision tower, split where a graph can begin: host metadata outside, all that launches kernels inside.

`VisionTower.forward_blocks` runs transformers' own weights and modules; only attention goes through
`mmgraph.ops.varlen_attention`, which takes all images of a batch in one call, and the patch projection is the
matrix product that its convolution (kernel equal to stride) is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from mmgraph.capture import BucketGrid, CaptureManager, bucket_size, offsets, rows
from mmgraph.ops import varlen_attention
from mmgraph.serving.positions import tower_rotary
from mmgraph.towers.grids import Grid, GridCache, GridLayout, PositionTable
from mmgraph.towers.upload import upload_together


class TowerOutput(TypedDict):
    """Rows of the language model's width: the merged patches, and one tensor for each deepstack level."""

    main: Tensor
    deep: list[Tensor]


class VisionTower:
    """The vision half of a Qwen3-VL, for any number of images at once.

    Args:
        visual: transformers' ``Qwen3VLVisionModel``. Its weights are used where they are, never copied.
        backend: The attention backend by name, or None for the library's choice.
    """

    def __init__(self, visual: Any, *, backend: str | None = None) -> None:
        self.visual = visual
        self.backend = backend
        self.merge: int = visual.config.spatial_merge_size
        self.unit = self.merge**2
        self.levels = len(visual.deepstack_visual_indexes)
        self.width: int = visual.config.out_hidden_size
        table = PositionTable(
            visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
        )
        self._grids = GridCache(GridLayout(merge=self.merge, table=table))
        self._inv_freq = visual.rotary_pos_emb.inv_freq.detach().to("cpu", torch.float32).numpy().copy()

    def prepare(self, patches: Tensor, grids: Sequence[Grid]) -> dict[str, Any]:
        """The inputs of `forward_blocks`: host metadata of the grids, moved beside the patches.

        Args:
            patches: ``[tokens, channels * frames * patch * patch]``, any floating dtype, on the tower's device.
            grids: The images' grids, in order; their patches must add up to ``tokens``.

        Raises:
            GridError: The grids aren't positive, or not whole merge blocks.
            ValueError: The grids don't add up to the patches.
        """
        host = self._grids.batch(grids)
        if host.patches != patches.shape[0] or not host.grids:
            raise ValueError(
                f"the grids {list(grids)} hold {host.patches} patches, and {patches.shape[0]} came: "
                "give one grid per image"
            )
        cos, sin = tower_rotary(host.positions, inv_freq=self._inv_freq)
        found = host.arrays()
        arrays = {
            "table_rows": found["taps"],
            "table_weights": found["tap_weights"],
            "cos": cos,
            "sin": sin,
            "cu_seqlens": host.cu_seqlens,
        }
        return {
            "patches": patches.to(self.visual.pos_embed.weight.dtype),
            **upload_together(arrays, patches.device),
            "max_seqlen": host.max_seqlen,
        }

    def forward_blocks(
        self,
        patches: Tensor,
        table_rows: Tensor,
        table_weights: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> TowerOutput:
        """Patch projection, blocks and mergers. Nothing in it waits for the device.

        Args:
            patches: ``[tokens, patch_dim]`` in the tower's dtype.
            table_rows: int32 ``[tokens, 4]``.
            table_weights: float32 ``[tokens, 4]``.
            cos: float32 ``[tokens, head_dim // 2]``.
            sin: float32 ``[tokens, head_dim // 2]``.
            cu_seqlens: int32 ``[frames + 1]``.
            max_seqlen: At least the longest frame.

        Returns:
            ``main`` ``[tokens / 4, width]`` and ``deep``, a list with a tensor of that shape for each level.
        """
        visual = self.visual
        projection = visual.patch_embed.proj
        hidden = functional.linear(patches, projection.weight.flatten(1), projection.bias)
        mixed = (visual.pos_embed(table_rows) * table_weights[:, :, None]).sum(1)
        hidden = hidden + mixed.to(hidden.dtype)
        deep: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            hidden = hidden + self._attention(block.attn, block.norm1(hidden), cos, sin, cu_seqlens, max_seqlen)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[list(visual.deepstack_visual_indexes).index(index)]
                deep.append(merger(hidden))
        return {"main": visual.merger(hidden), "deep": deep}

    def _attention(
        self, attn: Any, hidden: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        tokens = hidden.shape[0]
        q, k, v = attn.qkv(hidden).view(tokens, 3, attn.num_heads, attn.head_dim).unbind(1)
        mixed = varlen_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            cu_seqlens,
            max_seqlen,
            scale=attn.scaling,
            backend=self.backend,
        )
        result: Tensor = attn.proj(mixed.reshape(tokens, -1))
        return result

    def manager(self, grid: BucketGrid) -> CaptureManager:
        """A capture manager around `forward_blocks`.

        Args:
            grid: Buckets of ``tokens`` (multiples of the merge unit), ``batch`` (frames) and ``seqlen``.
        """
        return CaptureManager(
            self.forward_blocks,
            inputs={
                "patches": rows("tokens"),
                "table_rows": rows("tokens"),
                "table_weights": rows("tokens"),
                "cos": rows("tokens"),
                "sin": rows("tokens"),
                "cu_seqlens": offsets("batch", of="tokens"),
                "max_seqlen": bucket_size("seqlen"),
            },
            outputs={
                "main": rows("tokens", per=self.unit),
                "deep": [rows("tokens", per=self.unit) for _ in range(self.levels)],
            },
            buckets=grid,
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` in the dtype of the tables.

    Args:
        x: ``[tokens, heads, head_dim]``.
        cos: ``[tokens, head_dim // 2]``.
        sin: ``[tokens, head_dim // 2]``.

    Returns:
        A new tensor of ``x``'s shape and dtype.
    """
    first, second = x.to(torch.promote_types(cos.dtype, x.dtype)).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
