"""Modes of the calling thread that decide whether a graph may be made or replayed: captures, and autocast."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ._compat import cuda_is_capturing

__all__ = ["autocast_state", "capturing", "is_capturing", "without_autocast_cache"]

# Set while this thread warms up or captures: a manager that is called meanwhile runs its function, which so
# becomes part of the outer graph.
_CAPTURING = threading.local()


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for a device, and to which dtype."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled, torch.get_autocast_dtype(device.type) if enabled else None


def is_capturing(on_cuda: bool) -> bool:
    """Whether the caller is being warmed up or captured at this moment, by a manager or on its own."""
    if getattr(_CAPTURING, "depth", 0):
        return True
    return on_cuda and cuda_is_capturing()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Marks this thread as warming up or capturing."""
    _CAPTURING.depth = getattr(_CAPTURING, "depth", 0) + 1
    try:
        yield
    finally:
        _CAPTURING.depth -= 1


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Autocast keeps cast weights for reuse; those made inside a capture live in its pool and must not leak."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
