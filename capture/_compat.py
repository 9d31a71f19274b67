"""What differs between the supported versions of PyTorch, or is private to it, and this room needs."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = [
    "compiler_backend",
    "compiler_callback",
    "compiler_stance",
    "cuda_allocating_in",
    "cuda_begin_raw_capture",
    "cuda_current_device",
    "cuda_drop_pool",
    "cuda_is_capturing",
    "cuda_memset",
    "cuda_new_stream",
    "cuda_pool_segments",
    "cuda_raw_stream",
    "graph_break_reasons",
    "metadata_check",
    "no_torch_function",
    "same_addresses",
    "storage_use_count",
    "without_duck_shapes",
]

# Builds without CUDA lack it.
_equal_addresses: Callable[..., bool] | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


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


@contextlib.contextmanager
def cuda_allocating_in(device: torch.device, pool: Any, *, keep: bool) -> Iterator[None]:
    """Has this thread's allocations come from a pool, given by a handle alone.

    `torch.cuda.MemPool` would do as well, but ends the process when it is dropped while somebody captures.

    Args:
        device: of the pool.
        pool: from `torch.cuda.graph_pool_handle`.
        keep: whether the pool keeps its memory for good afterwards; else it is given up once it is unused.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, pool)
        if not keep:
            torch._C._cuda_releasePool(index, pool)


def cuda_new_stream() -> int:
    """The handle of a new stream on the current device that no pool of PyTorch's hands out. It is never destroyed.

    Raises:
        RuntimeError: the driver refused.
    """
    driver, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    torch.cuda.mem_get_info()  # so that the device's context is current for this thread
    status = driver.cuStreamCreate(
        ctypes.byref(stream), ctypes.c_uint(1)
    )  # 1: it doesn't wait for the default stream
    if status != 0 or stream.value is None:
        raise RuntimeError(f"cuStreamCreate failed with CUresult {status}")
    return stream.value


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


class _OwnNumber(int):
    """A number that is no other's object, unlike Python's small numbers."""


def _reference_counts(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


def cuda_pool_segments(pool: Any) -> list[dict[str, Any]]:
    """What `torch.cuda.memory_snapshot` says of one pool, without its damage. Waits for nothing.

    PyTorch 2.11 takes a reference from each number that it is asked with. Python's numbers above 256 are counted: from
    the 257th pool on, the pool's own number would be freed under whoever holds it, and some later line of Python would
    end the process. So it is asked with numbers that only this function holds, and what it took is given back.

    Args:
        pool: from `torch.cuda.graph_pool_handle`.
    """
    numbers = [_OwnNumber(part) for part in pool]
    asked, spare = tuple(numbers), [list(numbers) for _ in range(4)]
    before = _reference_counts(numbers)
    try:
        return list(torch.cuda.memory.memory_snapshot(mempool_id=asked, include_traces=False))
    finally:  # it takes them before it fails, too
        missing = [was - now for was, now in zip(before, _reference_counts(numbers), strict=True)]
        for number, count in zip(numbers, missing, strict=True):
            for _ in range(count):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
        del spare


def cuda_drop_pool(device: torch.device, pool: Any) -> None:
    """Tells the allocator that a capture into `pool`, which never ended, is over and that its graph is gone."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)


def no_torch_function() -> contextlib.AbstractContextManager[object]:
    """Inside, tensors' attributes and methods run no `__torch_function__`, of a subclass or of a mode."""
    return torch._C.DisableTorchFunction()


def same_addresses(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    """Whether each tensor's data lies where it lay.

    Args:
        tensors: tensors with memory of their own.
        addresses: their `data_ptr`s, as they were.
        indices: which of them to look at, as PyTorch wants it: all of them, in order.
    """
    if _equal_addresses is not None:
        return bool(_equal_addresses(tensors, addresses, indices))
    with no_torch_function():
        return list(map(torch.Tensor.data_ptr, tensors)) == addresses


def metadata_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A fast check that tensors have the type, dtype, device, sizes and strides that these have now.

    It answers no, too, where only the mode of gradients or inference, or `requires_grad`, differs from now.

    Args:
        tensors: different tensors, each with memory of its own.

    Returns:
        A function of the same number of tensors.
    """
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    return guards.check


def compiler_backend(name: str, options: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """A backend of torch.compile by name; Inductor takes options.

    Raises:
        Exception: there is no such backend.
    """
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx

        def inductor(graph: Any, inputs: Any) -> Any:
            return compile_fx(graph, inputs, config_patches=options)

        return inductor
    from torch._dynamo.backends.registry import lookup_backend

    backend: Callable[[Any, Any], Any] = lookup_backend(name)
    return backend


def compiler_callback(compiled: Any) -> Any:
    """The backend that torch.compile was given for a module or function that it returned, or None."""
    from torch._dynamo.eval_frame import innermost_backend

    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        function = getattr(compiled, "__func__", compiled)
        variables = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(variables, getattr(function, "__closure__", None) or (), strict=False))
        context = cells["self"].cell_contents if "self" in cells else None
    callback = getattr(context, "callback", None)
    return innermost_backend(callback) if callable(callback) else None


def compiler_stance() -> str:
    """What the process has told torch.compile to do: "default" or one of `torch.compiler.set_stance`'s."""
    from torch._dynamo import eval_frame

    return str(eval_frame._stance.stance)


def graph_break_reasons() -> dict[str, int]:
    """How often Dynamo has broken graphs in this process, by reason."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def without_duck_shapes() -> contextlib.AbstractContextManager[None]:
    """While open, sizes that are equal in a first call are not taken to be equal in every call."""
    from torch.fx.experimental import _config

    config: Any = _config
    patch: contextlib.AbstractContextManager[None] = config.patch(use_duck_shape=False)
    return patch


def _without_cuda(*_: Any) -> Any:
    raise RuntimeError("this build of PyTorch has no CUDA: install one that has, or use tensors on a CPU")


# Asked on every call: what torch.cuda wraps around these costs more than they do.
cuda_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _without_cuda)
cuda_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _without_cuda)
cuda_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _without_cuda)
