"""Launches of Triton kernels that the host calls often, past Triton's own inspection of their arguments.

``kernel[grid](...)`` binds and inspects every argument again at each call. What it finds out is which compiled variant
fits: by the constants, and for the others by dtype, by divisibility by 16, and by being 1; on AMD's GPUs also by
whether a tensor's memory passes 2 GiB. Here that is asked in one tuple, and the variant found before is launched
directly.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from mmgraph.ops.errors import DuringCaptureError

Tensor = torch.Tensor

# GPUs of data centres have as much for a program, others 99 KiB.
ROOMY_SHARED_BYTES = 160 * 1024

_LARGEST = 0x7FFFFFFF
_ON_AMD = torch.version.hip is not None

_variants: dict[tuple[Any, ...], Any] = {}


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
    key = (
        kernel,
        device,
        constants,
        num_warps,
        num_stages,
        tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
        tuple([(x % 16 == 0, x == 1, x > _LARGEST) for x in strides]),
        tuple([x.untyped_storage().nbytes() > _LARGEST for x in tensors]) if _ON_AMD else (),
    )
    arguments = (*tensors, *counts, *strides, *constants)
    variant = _variants.get(key)
    if variant is not None:
        variant[(programs, 1, 1)](*arguments, stream=torch._C._cuda_getCurrentRawStream(device))
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            f"the kernel {getattr(kernel, '__name__', kernel)} must be compiled for this kind of call, which "
            "can't happen "
            "while a graph is being captured. Run the function once on these shapes and layouts before capturing it."
        )
    # Said, because Triton 3.10 changes the default of fusing a product and a sum.
    variant = kernel[(programs,)](*arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
    if variant is not None:  # the interpreter has none
        _variants[key] = variant
