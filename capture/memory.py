"""What a graph pool holds, and how to fill it with NaN so that a read of unwritten memory shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._compat import cuda_allocating_in, cuda_memset, cuda_pool_segments

__all__ = ["free_bytes", "give_memory_back", "poison_pool", "pool_bytes", "rehearsal", "used_bytes"]

# As bytes: NaN in every floating-point type, -1 in every integer type.
_ALL_ONES = 0xFF


def pool_bytes(handle: Any) -> int:
    """Bytes of device memory that a graph pool holds, in use or not. Waits for nothing."""
    return sum(int(segment["total_size"]) for segment in cuda_pool_segments(handle))


@contextlib.contextmanager
def rehearsal(device: torch.device) -> Iterator[Callable[[], int]]:
    """Allocations of this thread go to a pool of their own; yields what says its bytes. On a CPU always 0."""
    if device.type != "cuda":
        yield lambda: 0
        return
    pool = torch.cuda.graph_pool_handle()
    with cuda_allocating_in(device, pool, keep=False):
        yield lambda: pool_bytes(pool)
    torch.cuda.synchronize(device)
    give_memory_back()


def give_memory_back() -> None:
    """Returns the allocator's unused memory to the device, unless somebody else is capturing at the moment."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that nobody has taken; 0 on a CPU. Of other processes' doing, too."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def used_bytes(handle: Any) -> int:
    """Bytes of a pool that somebody uses, or has only just freed. Waits for nothing."""
    blocks = (block for segment in cuda_pool_segments(handle) for block in segment["blocks"])
    return sum(int(block["size"]) for block in blocks if block["state"] != "inactive")


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
    for segment in cuda_pool_segments(handle):
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                cuda_memset(int(block["address"]), _ALL_ONES, int(block["size"]), stream)
                written += int(block["size"])
    return written
