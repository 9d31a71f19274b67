"""Rotary tables of a tower: cosines and sines by row and column number, made once, looked up by each call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["RotaryTables"]

#: Rows and columns that the tables hold: at 14 pixels a patch, images up to 57,000 pixels on a side.
LENGTH = 4096


class RotaryTables:
    """Cosine and sine of ``position * frequency``.

    Args:
        inv_freq: Frequencies of one axis, ``[head_dim / 4]``, as the model has them.
        scaling: Factor on both.
        length: Positions to hold.
    """

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0, length: int = LENGTH) -> None:
        self.length = length
        self._inv_freq, self._scaling = inv_freq.detach().float(), scaling
        self.cos, self.sin = self._tables(length)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.inference_mode(False):
            numbers = torch.arange(length, device=self._inv_freq.device).float()
            angles = numbers[:, None] * self._inv_freq
            return angles.cos() * self._scaling, angles.sin() * self._scaling

    def __call__(self, positions: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each patch, rows before columns.

        Args:
            positions: int32 or int64 ``[patches, 2]``, row and column.
            side: More than the largest of them.

        Returns:
            Two float32 tensors ``[patches, head_dim / 2]``.
        """
        cos, sin = (self.cos, self.sin) if side <= self.length else self._tables(side)
        return functional.embedding(positions, cos).flatten(1), functional.embedding(positions, sin).flatten(1)
