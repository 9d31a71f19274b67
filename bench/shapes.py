"""Shapes of attention calls for the benchmarks: lengths of sequences, and tensors that view a packed projection."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """One attention call.

    Attributes:
        lengths: The sequences' lengths.
        heads: Query heads.
        kv_heads: Key and value heads.
        width: Width of a head.
        causal: Whether a row sees itself and earlier ones only.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    width: int
    causal: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def flops(self) -> float:
        """Floating-point operations of both products, of those that a causal mask leaves."""
        pairs = sum(n * (n + 1) / 2 if self.causal else n * n for n in self.lengths)
        return 4.0 * pairs * self.heads * self.width

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """q, k and v as views of one packed buffer of random numbers, and the offsets."""
        qkv = torch.randn(self.tokens, self.heads + 2 * self.kv_heads, self.width, device=device).to(dtype)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cu = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        return q, k, v, cu


def spread(tokens: int, batch: int, ratio: float, draw: random.Random) -> tuple[int, ...]:
    """Lengths of ``batch`` sequences that sum to ``tokens``, the longest about ``ratio`` times the mean.

    A ratio of 1 gives equal lengths; up to 2 they are spread evenly around the mean; above, one in ``2 * ratio`` has
    the longest length and the others share the rest.
    """
    mean = tokens / batch
    if ratio <= 1 or batch == 1:
        lengths = [mean] * batch
    elif ratio <= 2:
        low = mean * (2 - ratio)
        step = (mean * ratio - low) / (batch - 1)
        lengths = [low + step * i for i in range(batch)]
    else:
        long = max(1, round(batch / (2 * ratio)))
        longest = min(mean * ratio, 0.9 * tokens / long)  # of few sequences, none can be many times the mean
        rest = (tokens - long * longest) / (batch - long)
        lengths = [longest] * long + [rest] * (batch - long)
    draw.shuffle(lengths)
    ends = [round(x) for x in itertools.accumulate(lengths)]
    ends[-1] = tokens
    return tuple(b - a for a, b in itertools.pairwise([0, *ends]))


DRAWN_WIDTHS = (64, 72, 80, 96, 128)
SORTS = ("equal", "ragged", "windows", "one long")


def draw_call(draw: random.Random, most: int, widths: tuple[int, ...] = DRAWN_WIDTHS) -> Call:
    """A call of at most about ``most`` rows, of one of the widths."""
    sort = draw.choice(SORTS)
    width = draw.choice(widths)
    causal = width in (64, 128) and draw.random() < 0.4
    heads = draw.choice((8, 12, 16, 32))
    group = draw.choice((1, 1, 1, 4)) if width in (64, 128) else 1
    tokens = int(2 ** draw.uniform(min(9, most.bit_length() - 2), most.bit_length() - 1))
    if sort == "windows":
        lengths = tuple(draw.choice((64, 64, 64, 64, 16, 32, 48)) for _ in range(max(1, tokens // 64)))
    else:
        batch = max(1, int(2 ** draw.uniform(0, min(8, tokens.bit_length() - 6))))
        ratio = {"equal": 1.0, "ragged": draw.uniform(1.2, 2.0), "one long": draw.uniform(3.0, 10.0)}[sort]
        lengths = spread(tokens, batch, ratio, draw)
    return Call(lengths, heads, heads // group, width, causal)
