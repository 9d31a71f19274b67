"""What differs between the supported versions of PyTorch, or is private to it, and this room needs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["cuda_begin_raw_capture", "cuda_drop_pool", "cuda_memset", "storage_use_count"]


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects hold this storage, `storage` itself among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def cuda_begin_raw_capture(stream: torch.cuda.Stream) -> None:
    """Starts a bare capture on a stream, without PyTorch's bookkeeping.

    Raises:
        RuntimeError: the driver refused.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
    status = driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), ctypes.c_int(relaxed))
    if status != 0:
        raise RuntimeError(f"cuStreamBeginCapture failed with CUresult {status}")


def cuda_memset(address: int, byte: int, count: int, stream: torch.cuda.Stream) -> None:
    """Sets bytes of device memory that no tensor holds, in the order of a stream.

    Raises:
        RuntimeError: the driver refused.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemsetD8Async(
        ctypes.c_uint64(address),
        ctypes.c_ubyte(byte),
        ctypes.c_size_t(count),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if status != 0:
        raise RuntimeError(f"cuMemsetD8Async failed with CUresult {status}")


def cuda_drop_pool(device: torch.device, pool: Any) -> None:
    """Tells the allocator that a capture into `pool`, which never ended, is over and that its graph is gone."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)
