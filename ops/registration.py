"""One library, one way in: an op is defined with its schema and fake kernel, then implemented, then differentiated.

``torch.library.Library`` with explicit schemas is used rather than ``torch.library.custom_op`` because a call through
it costs about a third (4.5 us against 12.1 us, H200, torch 2.11), and because the schema says ``SymInt`` for every
integer that varies, without which each value recompiles the caller's graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from mmgraph.ops.errors import GradientError

NAMESPACE = "mmgraph"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Inputs reach the kernels with the strides that the caller gave them: a packed qkv view stays a view, and what the
# fake kernel saw is what the real one gets.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An op's name, the rest of its schema, and its fake kernel.

    Attributes:
        name: The name without its namespace.
        signature: Arguments and returns, as in ``"(Tensor x, SymInt n) -> Tensor"``.
        fake: Gives outputs of the right shape, dtype, device and strides from fake inputs.
    """

    name: str
    signature: str
    fake: Callable[..., Any]


def define(spec: OpSpec) -> None:
    """Define the op and register its fake kernel."""
    LIBRARY.define(spec.name + spec.signature, tags=_TAGS)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", spec.fake, lib=LIBRARY)


def implement(name: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
    """Give a defined op its CPU implementation, the reference, and its CUDA implementation."""
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give a defined op its gradient.

    Args:
        name: The op.
        backward: From context and output gradients to one gradient (or None) per input; calls only ops.
        setup_context: Saves what ``backward`` needs: ``setup_context(ctx, inputs, output)``.
    """
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def once_differentiable(name: str) -> None:
    """Let a backward op raise where a gradient of the gradient is asked for; PyTorch would give a wrong one."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise GradientError(
            f"{NAMESPACE}::{name} has no gradient of its own: these ops can be differentiated once. Drop "
            "create_graph, or detach what the second derivative doesn't need."
        )

    differentiate(name, refuse, lambda ctx, inputs, output: None)


def mark_written(tensor: torch.Tensor) -> None:
    """Tell autograd that an op wrote into a caller's tensor; what a kernel writes through a pointer shows nowhere else.

    A backward that saved the tensor's old values then raises, in place of computing with the new ones.
    """
    if not tensor.is_inference():  # has no version
        torch.autograd.graph.increment_version(tensor)


def overload(name: str) -> Callable[..., Any]:
    """The callable of an op that is defined: ``torch.ops.mmgraph.<name>.default``."""
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    found: Callable[..., Any] = packet.default
    return found


@lru_cache(maxsize=8)
def kernel_module(name: str) -> Any:
    """A module of Triton kernels, imported at its first launch: triton is slow to import and may not be installed.

    Args:
        name: Its name below ``mmgraph.ops``, as in ``"assembly.kernels"``.
    """
    return import_module(f"mmgraph.ops.{name}")
