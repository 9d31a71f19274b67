"""Triton kernels whose arguments are tuples of 64-bit integers, compiled beforehand.

They stand in graphs, where nothing can be compiled. The kernels of this room are specialised on nothing but how many
integers there are, so a variant is compiled once, from stand-ins, and then launched with whatever values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import NotCapturableError

__all__ = ["STAND_IN", "CompiledKernel", "launch_constant", "variant_of"]

#: Compiles to a 64-bit integer that nothing is known of: beyond 32 bits, and no multiple of 16.
STAND_IN = 2**33 + 1

_variants: dict[tuple[Any, ...], CompiledKernel] = {}


class CompiledKernel:
    """A kernel compiled for one number of integers and loaded on one device.

    Args:
        kernel: the kernel.
        stand_ins: arguments of the structure that every launch has.
        constants: the kernel's compile-time constants, which come last.
        device: where it runs.
        num_warps: warps of a program.
    """

    def __init__(
        self,
        kernel: Any,
        stand_ins: tuple[Any, ...],
        constants: tuple[int, ...],
        device: torch.device,
        num_warps: int,
    ) -> None:
        self._kernel, self._constants = kernel, constants
        self._variant: Any = None
        if device.type != "cuda":  # Triton's interpreter, which compiles nothing
            return
        from triton.runtime import driver

        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream_of = driver.active.get_current_stream
        with torch.cuda.device(self._index):
            self._variant = kernel.warmup(*stand_ins, *constants, grid=(1,), num_warps=num_warps)
            _ = self._variant.run  # loads it

    def launch(self, programs: int, *args: Any) -> None:
        """Enqueues the kernel on the current stream of its device.

        Args:
            programs: size of the grid, at least 1.
            args: integers, and tuples of them, of the stand-ins' structure.
        """
        if self._variant is None:
            self._kernel[(programs,)](*args, *self._constants)
            return
        with torch.cuda.device(self._index):
            stream = self._stream_of(self._index)
            self._variant[(programs, 1, 1)](*args, *self._constants, stream=stream)


def variant_of(
    kernel: Any,
    stand_ins: tuple[Any, ...],
    constants: tuple[int, ...],
    device: torch.device,
    num_warps: int = 4,
) -> CompiledKernel:
    """The variant of a kernel, compiled if this is its first use on the device.

    Args:
        kernel: the kernel.
        stand_ins: arguments of the structure that every launch has, `STAND_IN` for each integer.
        constants: the kernel's compile-time constants.
        device: where it runs.
        num_warps: warps of a program.

    Raises:
        NotCapturableError: it isn't compiled yet, and the current stream is being captured.
    """
    key = (kernel, stand_ins, constants, device, num_warps)
    found = _variants.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotCapturableError(
                f"expected {getattr(kernel, '__name__', kernel)} to be compiled before a capture uses it, but this is "
                f"its first use with so many pieces of memory on {device}, and nothing can be compiled while a graph "
                "is being captured: run the function once outside a capture, on the same inputs"
            )
        found = _variants[key] = CompiledKernel(kernel, stand_ins, constants, device, num_warps)
    return found


def launch_constant(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: Mapping[str, int], device: torch.device
) -> None:
    """Launches a kernel whose arguments' structure is found anew: for launches that become part of a graph.

    Args:
        kernel: the kernel.
        programs: size of the grid, at least 1.
        args: integers and tuples of them, by value.
        constants: the kernel's compile-time constants, in its order.
        device: where it runs, on the current stream.

    Raises:
        NotCapturableError: no launch of this structure came before, and the current stream is being captured.
    """
    variant_of(kernel, _stand_ins(args), tuple(constants.values()), device).launch(programs, *args)


def _stand_ins(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_stand_ins(arg) if isinstance(arg, tuple) else STAND_IN for arg in args)
