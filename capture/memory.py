"""What a graph pool holds, and how to fill it with NaN so that a read of unwritten memory shows."""

from __future__ import annotations

from typing import Any

import torch

from ._compat import cuda_memset

__all__ = ["poison_pool", "pool_bytes"]

# As bytes: NaN in every floating-point type, -1 in every integer type.
_ALL_ONES = 0xFF


def _segments(handle: Any) -> list[dict[str, Any]]:
    return list(torch.cuda.memory.memory_snapshot(mempool_id=handle, include_traces=False))


def pool_bytes(handle: Any) -> int:
    """Bytes of device memory that a graph pool holds, in use or not. Waits for nothing."""
    return sum(int(segment["total_size"]) for segment in _segments(handle))


def poison_pool(handle: Any, stream: torch.cuda.Stream) -> int:
    """Fills the pool's memory with NaN (integers with -1), except where a living tensor has it.

    A captured graph's intermediates lie there between replays. A replay writes each before it reads it, so
    nothing may change.

    Args:
        handle: the pool.
        stream: the stream to write on; later replays must be ordered after it.

    Returns:
        The number of bytes written.
    """
    written = 0
    for segment in _segments(handle):
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                cuda_memset(int(block["address"]), _ALL_ONES, int(block["size"]), stream)
                written += int(block["size"])
    return written
