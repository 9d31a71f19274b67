"""Launches of Triton kernels that the host calls often, past Triton's own inspection of their arguments.

``kernel[grid](...)`` binds and inspects every argument again at each call. What it finds out is which compiled variant
fits: by the constants, and for the others by dtype, by divisibility by 16, and by being 1; on AMD's GPUs also by
whether a tensor's memory passes 2 GiB. Here that is asked in one tuple, and the variant found before is launched
directly: with addresses in place of tensors, which spares a question to the driver for each, and without the hooks of
a profiler where none is set (both together 6 of 15 us, H200, Triton 3.6).
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mmgraph.ops.errors import DuringCaptureError

Tensor = torch.Tensor

# GPUs of data centres have as much for a program, others 99 KiB.
ROOMY_SHARED_BYTES = 160 * 1024

_LARGEST = 0x7FFFFFFF
_ON_AMD = torch.version.hip is not None

# What a variant's launcher is called with before the kernel's arguments, in the releases of Triton that there are.
_FIRST = ("gridX", "gridY", "gridZ", "stream", "function")
_SECOND = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


class _Kept(NamedTuple):
    """A compiled variant, and how to launch it past its own ``variant[grid]``: None where that isn't known."""

    variant: Any
    run: Callable[..., Any] | None
    function: Any
    metadata: Any
    knobs: Any


_variants: dict[tuple[Any, ...], _Kept] = {}


@lru_cache(maxsize=64)
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program may have."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device current, without a call to the driver where it already is; nothing on other devices."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@lru_cache(maxsize=4096)
def _kinds(strides: tuple[int, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """What Triton compiles numbers for."""
    return tuple((x % 16 == 0, x == 1, x > _LARGEST) for x in strides)


def _keep(variant: Any) -> _Kept:
    """The record of a variant that was just launched in Triton's own way, so that it is loaded."""
    run = getattr(variant, "run", None)
    function, metadata = (getattr(variant, name, None) for name in ("function", "packed_metadata"))
    if _ON_AMD or function is None or metadata is None or _names_of(run) not in (_FIRST, _FIRST + _SECOND):
        return _Kept(variant, None, None, None, None)
    from triton import knobs

    return _Kept(variant, run, function, metadata, knobs)


def _names_of(run: Any) -> tuple[str, ...]:
    """The names of a launcher's arguments before the kernel's; none where it doesn't say."""
    try:
        return tuple(name for name in inspect.signature(run).parameters if name != "args")
    except (TypeError, ValueError):  # no function, or one written in C
        return ()


def _is_hooked(knobs: Any) -> bool:
    """Whether a profiler wants to know of launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    counts: tuple[int | float, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    num_stages: int = 3,
) -> None:
    """Launch a kernel on the current stream of the tensors' device, which is the current one.

    Args:
        kernel: Its arguments are tensors, counts, strides and constants, in this order.
        programs: Size of the grid, of one dimension.
        tensors: Pointers.
        counts: Numbers that the kernel isn't specialised on (``do_not_specialize``), below 2^31.
        strides: Numbers that it is specialised on.
        constants: Compile-time constants.
        num_warps: Warps of a program.
        num_stages: Stages of pipelined loops.

    Raises:
        DuringCaptureError: The variant that fits isn't compiled yet, and a graph is being captured.
    """
    device = tensors[0].get_device()
    addresses = [x.data_ptr() for x in tensors]
    key = (
        kernel,
        device,
        constants,
        num_warps,
        num_stages,
        tuple([x.dtype for x in tensors]),
        tuple([x % 16 == 0 for x in addresses]),
        _kinds(strides),
        tuple([x.untyped_storage().nbytes() > _LARGEST for x in tensors]) if _ON_AMD else (),
    )
    rest = (*counts, *strides, *constants)
    kept = _variants.get(key)
    if kept is not None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        variant, run, function, metadata, knobs = kept
        if run is None or _is_hooked(knobs):
            variant[(programs, 1, 1)](*tensors, *rest, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *rest)
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            f"the kernel {getattr(kernel, '__name__', kernel)} must be compiled for this kind of call, which "
            "can't happen "
            "while a graph is being captured. Run the function once on these shapes and layouts before capturing it."
        )
    # Said, because Triton 3.10 changes the default of fusing a product and a sum.
    variant = kernel[(programs,)](
        *tensors, *rest, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True
    )
    if variant is not None:  # the interpreter has none
        _variants[key] = _keep(variant)
