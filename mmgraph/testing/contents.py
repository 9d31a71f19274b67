"""Contents of test tensors, made from positions, so that a row which turns up in the wrong place is recognised.

Promises: the first column of row k is the integer ``first + k``, exact in every floating dtype up to 256; the other
columns have fractions that a cast through a narrower dtype would change. Same arguments, same contents.
"""

from collections.abc import Iterator

import torch

_LARGEST_HALF = 60_000.0
_GAIN = 2.0**17
# Exact in every floating dtype, no row's code, and nothing that is written by mistake, as zeros are.
_AROUND = 0.5


def coded_rows(
    first: int,
    count: int,
    width: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strided: bool = False,
) -> torch.Tensor:
    """Make rows that can be told apart.

    Args:
        first: The first row's code, in column 0; later rows count away from zero.
        count: Rows.
        width: Columns, at least 1. With two or more the last is large: beyond float16's range after a wrong cast.
        seed: Of the columns after the first.
        dtype: Of the rows.
        device: Where they go.
        strided: Give columns of a wider matrix, rows apart in memory; the columns around hold 0.5.

    Returns:
        ``[count, width]``.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + 977 * (first + 512))
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if width > 1:
        rows[:, -1] *= _GAIN
    rows[:, 0] = torch.arange(count) + first if first >= 0 else first - torch.arange(count)
    if dtype == torch.float16:
        rows = rows.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    if not strided:
        return rows.to(device, dtype)
    wide = torch.full((count, width + 2), _AROUND).to(device, dtype)
    view = wide[:, 1 : 1 + width]
    view.copy_(rows)
    return view


def coded_sources(
    counts: Iterator[tuple[int, torch.dtype]],
    width: int,
    *,
    seed: int,
    device: torch.device | str,
    strided: bool,
) -> list[torch.Tensor]:
    """Make sources of the given rows and dtypes, with codes that go on from one to the next, from 1."""
    sources = []
    first = 1
    for count, dtype in counts:
        sources.append(coded_rows(first, count, width, seed=seed, dtype=dtype, device=device, strided=strided))
        first += count
    return sources
