"""Lanes: what captures of one manager on a device run on and in, apart from everybody else's.

A lane is a stream that nobody else gets, and a memory pool for the workspaces that libraries keep for that stream.
cuBLAS's workspace belongs to a stream and a thread's handle, is looked up by both, and a captured graph has its address
built in. On one of PyTorch's pooled streams, of which there are 32 for all, another user's eager products would write
into the same workspace while a graph replays; memory from the common pool would be somebody else's once PyTorch drops
the workspace, which `torch.compile(mode="reduce-overhead")` does, and so does the reset of any graph of that stream
(pytorch 193402). In a lane the workspace may be dropped and made again: its memory stays the lane's.

Lanes live as long as the process and are used again: a stream costs little, and its workspace is about 34 MiB.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ._compat import cuda_allocating_in, cuda_new_stream
from .memory import pool_bytes, used_bytes

__all__ = ["Lane", "give_back_lane", "take_lane"]

_LOCK = threading.Lock()
_FREE: dict[torch.device, list[Lane]] = {}


class Lane:
    """A stream of its own on a device, with its libraries' workspaces.

    Attributes:
        stream: to warm up and capture on, after `settle_workspaces`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settled = 0
        with torch.cuda.device(device):
            self.stream = torch.cuda.ExternalStream(cuda_new_stream(), device=device)
            self._workspaces: Any = torch.cuda.graph_pool_handle()
            with cuda_allocating_in(device, self._workspaces, keep=True):
                pass

    def settle_workspaces(self) -> None:
        """Makes the workspaces of this thread's library handles, in the lane's memory, where there are none yet.

        To be called by the thread that captures (handles belong to threads), before the stream's first use by it and
        right before each capture. Where workspaces were dropped since, a run of the function may have made others
        elsewhere, which can't be seen: then the stream is another one from now on.
        """
        if used_bytes(self._workspaces) < self._settled:
            with torch.cuda.device(self.device):
                self.stream = torch.cuda.ExternalStream(cuda_new_stream(), device=self.device)
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(self.stream),
            cuda_allocating_in(self.device, self._workspaces, keep=False),
        ):
            square = torch.zeros(16, 16, device=self.device, dtype=torch.bfloat16)
            torch.mm(square, square)
            torch.addmm(square[0], square, square)  # takes the other library, cuBLASLt
            del square
        self.stream.synchronize()
        self._settled = used_bytes(self._workspaces)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the workspaces hold."""
        return pool_bytes(self._workspaces)


def take_lane(device: torch.device) -> Lane:
    """A lane that is nobody's at the moment."""
    with _LOCK:
        free = _FREE.setdefault(device, [])
        if free:
            return free.pop()
    return Lane(device)


def give_back_lane(lane: Lane) -> None:
    """Leaves a lane to the next; all that replayed on it must have ended."""
    with _LOCK:
        _FREE.setdefault(lane.device, []).append(lane)
