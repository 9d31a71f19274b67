"""A tower's blocks: attention and MLP over packed rows, each addition in one pass with the norm behind it.

Records here name modules of the user's model and read their weights at each call, so that what changes in place is
seen. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmgraph.ops import add_norm, norm, packed_qkv_rope, varlen_attention
from mmgraph.towers.linears import Activation, JoinedGate, apply_activation, linear_activation
from mmgraph.towers.rewrites import Rewrites

__all__ = [
    "Attention",
    "Block",
    "GatedMlp",
    "Norm",
    "PlainMlp",
    "Sequences",
    "Stream",
    "patch_rows",
    "rotate_halves",
]


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalisation by a module's weights.

    Attributes:
        module: Has ``weight``, and ``bias`` for kind "layer".
        kind: "layer", or "rms".
        eps: Added under the root.
    """

    module: Any
    kind: Literal["layer", "rms"]
    eps: float

    def __call__(self, x: Tensor, *, fused: bool) -> Tensor:
        """The norm of rows ``[rows, width]``."""
        if not fused:
            result: Tensor = self.module(x)
            return result
        return norm(x, self.module.weight, getattr(self.module, "bias", None), eps=self.eps, kind=self.kind)

    def of_sum(self, x: Tensor, delta: Tensor, *, fused: bool) -> tuple[Tensor, Tensor]:
        """``x + delta`` and its norm."""
        if not fused:
            total = x + delta
            return total, self.module(total)
        bias = getattr(self.module, "bias", None)
        return add_norm(x, delta, self.module.weight, bias, eps=self.eps, kind=self.kind)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which rows attend to each other.

    Attributes:
        cu_seqlens: int32 ``[sequences + 1]`` on the device.
        max_seqlen: At least the longest.
    """

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, eq=False)
class Attention:
    """A packed projection, rotary positions by halves, attention within sequences, and the output projection.

    Attributes:
        qkv: Gives ``[rows, 3 * heads * head_dim]``.
        proj: Takes ``[rows, heads * head_dim]``.
        heads: Number of heads.
        head_dim: Width of a head.
        scale: Of the scores.
        backend: The attention backend by name, or None for the library's choice.
    """

    qkv: nn.Module
    proj: nn.Module
    heads: int
    head_dim: int
    scale: float
    backend: str | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, within: Sequences, rewrites: Rewrites) -> Tensor:
        """Rows ``[rows, width]`` to as many, with cos and sin ``[rows, head_dim / 2]``."""
        packed = self.qkv(x)
        if rewrites.fused_rotary:
            q, k, v = packed_qkv_rope(packed, cos, sin, self.heads, self.heads, self.head_dim)
        else:
            q, k, v = packed.view(packed.shape[0], 3, self.heads, self.head_dim).unbind(1)
            q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        mixed = varlen_attention(
            q, k, v, within.cu_seqlens, within.max_seqlen, scale=self.scale, backend=self.backend
        )
        result: Tensor = self.proj(mixed.reshape(x.shape[0], -1))
        return result


@dataclass(frozen=True, eq=False)
class PlainMlp:
    """Two layers with an activation between."""

    first: nn.Module
    second: nn.Module
    activation: Activation

    def __call__(self, x: Tensor, rewrites: Rewrites) -> Tensor:
        """Rows ``[rows, width]`` to as many."""
        fused = rewrites.fused_activations
        result: Tensor = self.second(linear_activation(x, self.first, self.activation, fused=fused))
        return result

    def join(self) -> bool:
        """There is nothing to join."""
        return False

    def part(self) -> None:
        """Nothing was joined."""


class GatedMlp:
    """``down(act(gate(x)) * up(x))``.

    Args:
        gate: A linear layer.
        up: Likewise.
        down: Likewise.
        activation: Of the gate.
    """

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module, activation: Activation) -> None:
        self.gate, self.up, self.down, self.activation = gate, up, down, activation
        self._joined: JoinedGate | None = None

    def __call__(self, x: Tensor, rewrites: Rewrites) -> Tensor:
        """Rows ``[rows, width]`` to as many."""
        joined = self._joined
        if joined is not None:
            if joined.whole:
                return joined(x, self.activation)
            self.part()  # weights were replaced: what was joined would be kept for nothing
        gated = apply_activation(self.gate(x), self.activation, fused=rewrites.fused_activations) * self.up(x)
        result: Tensor = self.down(gated)
        return result

    def join(self) -> bool:
        """Joins the weights where they are ordinary ones that need no gradient; says whether they are joined."""
        if self._joined is None or not self._joined.whole:
            parts: tuple[Any, Any, Any] = (self.gate, self.up, self.down)
            self._joined = JoinedGate(*parts) if JoinedGate.fits(*parts) else None
        return self._joined is not None

    def part(self) -> None:
        """Undoes `join`."""
        if self._joined is not None:
            self._joined.part()
            self._joined = None


@dataclass(frozen=True, eq=False)
class Block:
    """One block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Attributes:
        first: The norm before attention.
        attention: Attention.
        second: The norm before the MLP.
        mlp: The MLP.
    """

    first: Norm
    attention: Attention
    second: Norm
    mlp: PlainMlp | GatedMlp


@dataclass(eq=False)
class Stream:
    """The residual stream on its way through the blocks; what the last one adds waits for the next norm.

    Attributes:
        hidden: ``[rows, width]``, without `pending`.
        rewrites: Which are on.
        pending: What is still to be added, or None.
    """

    hidden: Tensor
    rewrites: Rewrites
    pending: Tensor | None = None

    def normed(self, by: Norm) -> Tensor:
        """Adds what is pending, and gives the norm of the sum."""
        fused = self.rewrites.fused_norms
        if self.pending is None:
            return by(self.hidden, fused=fused)
        self.hidden, result = by.of_sum(self.hidden, self.pending, fused=fused)
        self.pending = None
        return result

    def settled(self) -> Tensor:
        """The stream with everything added."""
        if self.pending is not None:
            self.hidden, self.pending = self.hidden + self.pending, None
        return self.hidden

    def run(
        self,
        block: Block,
        cos: Tensor,
        sin: Tensor,
        within: Sequences,
        seen: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Goes through a block.

        Args:
            block: Which.
            cos: ``[rows, head_dim / 2]``.
            sin: Likewise.
            within: Which rows attend to each other.
            seen: Is given what comes in, with everything added.
        """
        normed = self.normed(block.first)
        if seen is not None:
            seen(self.hidden)
        self.pending = block.attention(normed, cos, sin, within, self.rewrites)
        self.pending = block.mlp(self.normed(block.second), self.rewrites)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions by halves in float32, rounded once.

    Args:
        x: ``[rows, heads, head_dim]``.
        cos: ``[rows, head_dim / 2]``.
        sin: Likewise.
    """
    first, second = x.to(torch.promote_types(torch.float32, x.dtype)).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def patch_rows(patches: Tensor, projection: Any) -> Tensor:
    """The patch projection of flat patches: the product that a convolution with stride equal to kernel is."""
    return functional.linear(patches, projection.weight.flatten(1), projection.bias)
