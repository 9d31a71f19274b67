"""Leaves the user's state as it was: what warm-up and capture run, they may change, and this puts it back.

Snapshots cover the random generators and every tensor that the function can reach without being asked: buffers
of modules, tensors in attributes, closures, defaults and the globals that the code names. Parameters are left
out (a forward pass does not write them, and they are the bulk of a model).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["StateSnapshot", "reachable_tensors"]

# Enough for an engine object that holds a model that holds its caches; a bound keeps a stray reference to half
# of the process cheap.
_MAX_DEPTH = 6
_MAX_OBJECTS = 200_000
_MODULE_TABLES = frozenset({"_buffers", "_modules", "_parameters"})
_CONTAINERS = (list, tuple, set, frozenset)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type, torch.dtype, torch.device)


def reachable_tensors(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Every tensor, parameters excepted, that `fn` can reach on its own, each once."""
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(fn, 0)]
    while stack and len(seen) < _MAX_OBJECTS:
        node, depth = stack.pop()
        if isinstance(node, _LEAVES) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, torch.nn.Parameter):
            continue
        if isinstance(node, torch.Tensor):
            yield node
            continue
        if depth < _MAX_DEPTH and not getattr(type(node), "holds_captured_graphs", False):
            stack.extend((child, depth + 1) for child in _children(node))


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, torch.nn.Module):
        # All its submodules at once: a model nests deeper than the bound on depth.
        for module in node.modules():
            yield from module._buffers.values()
            yield from (value for name, value in vars(module).items() if name not in _MODULE_TABLES)
    elif isinstance(node, dict):
        yield from list(node.values())
    elif isinstance(node, _CONTAINERS):
        yield from node
    elif isinstance(node, functools.partial):
        yield from (node.func, node.args, node.keywords)
    elif isinstance(node, types.MethodType):
        yield from (node.__self__, node.__func__)
    elif isinstance(node, types.FunctionType):
        for cell in node.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell that its function has not filled yet
                continue
        yield from (node.__defaults__ or ())
        yield from (node.__kwdefaults__ or {}).values()
        yield from (node.__globals__[name] for name in node.__code__.co_names if name in node.__globals__)
        if hasattr(node, "__wrapped__"):
            yield node.__wrapped__
    else:
        yield from list(getattr(node, "__dict__", {}).values())


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a function could have written it in place:

    plain memory in which each element has a place of its own.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return False
    return all(stride != 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class StateSnapshot:
    """The random generators' states and the reachable tensors' values, as they are now.

    Args:
        fn: the function whose reach counts.
        device: the device that it runs on; its generator is kept beside the CPU's.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self._device = device
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        done: set[tuple[int, int]] = set()
        with torch.no_grad():
            for tensor in reachable_tensors(fn):
                if not _is_writable(tensor):
                    continue
                key = (tensor.data_ptr(), tensor.numel())
                if key not in done:
                    done.add(key)
                    self._saved.append((tensor.detach(), self._copy(tensor)))

    @staticmethod
    def _copy(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return tensor.detach().clone()
        except torch.cuda.OutOfMemoryError:
            # A cache that fills the device: its copy waits in host memory instead.
            return tensor.detach().cpu()

    def restore(self) -> None:
        """Puts generators and tensors back."""
        # Inference mode, since some of the tensors may be inference tensors, which nothing else may write.
        with torch.inference_mode():
            for tensor, saved in self._saved:
                tensor.copy_(saved)
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)
