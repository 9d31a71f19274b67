"""What follows the blocks: patches of a merge block become one row of the language model's width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mmgraph.towers.blocks import GatedMlp, Norm, PlainMlp, Stream
from mmgraph.towers.linears import apply_activation
from mmgraph.towers.rewrites import Rewrites

__all__ = ["DownsamplingMerger", "Merger", "NormedMerger", "ShuffledMerger"]


class Merger(Protocol):
    """Ends a tower."""

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """What transformers calls the last hidden state, and the merged rows."""


@dataclass(frozen=True, eq=False)
class NormedMerger:
    """Norm of each patch, then two layers over the merge block.

    Attributes:
        norm: Of a patch.
        mlp: Takes merge blocks.
        unit: Patches of a merge block.
    """

    norm: Norm
    mlp: PlainMlp
    unit: int

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """See `Merger`."""
        normed = stream.normed(self.norm)
        blocks = normed.view(normed.shape[0] // self.unit, -1)
        return stream.hidden, self.mlp(blocks, stream.rewrites)


@dataclass(frozen=True, eq=False)
class ShuffledMerger:
    """Norm of a whole merge block, then two layers: a deepstack level.

    Attributes:
        norm: Of a merge block.
        mlp: Takes merge blocks.
        unit: Patches of a merge block.
    """

    norm: Norm
    mlp: PlainMlp
    unit: int

    def __call__(self, hidden: Tensor, rewrites: Rewrites) -> Tensor:
        """Rows of settled hidden states ``[patches, width]``."""
        blocks = hidden.view(hidden.shape[0] // self.unit, -1)
        normed = self.norm(blocks, fused=rewrites.fused_norms)
        return self.mlp(normed, rewrites)


@dataclass(frozen=True, eq=False)
class DownsamplingMerger:
    """A norm, a convolution over the merge block, and a gated MLP behind a projection with a norm of its own.

    Attributes:
        norm: Of a patch.
        downsample: A convolution whose stride is its kernel, the side of a merge block.
        proj: Linear.
        middle: The norm behind it, with GELU.
        mlp: Gated.
        unit: Patches of a merge block.
    """

    norm: Norm
    downsample: Any
    proj: nn.Module
    middle: Norm
    mlp: GatedMlp
    unit: int

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """See `Merger`."""
        normed, rewrites = stream.normed(self.norm), stream.rewrites
        side = int(self.unit**0.5)
        blocks = normed.view(-1, side, side, normed.shape[-1]).permute(0, 3, 1, 2)
        last = self.downsample(blocks).view(blocks.shape[0], -1)
        middle = self.middle(self.proj(last), fused=rewrites.fused_norms)
        middle = apply_activation(middle, "gelu", fused=rewrites.fused_activations)
        return last, self.mlp(middle, rewrites)
