"""Linear layers with what follows them: activations, and a gated MLP's two products as one of an aligned width.

Weights stay where their modules have them: what is joined becomes the memory of the modules' own parameters. A weight
that isn't a plain tensor (a quantised one, a module that isn't ``nn.Linear``) is left to its module.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmgraph.ops import activation as activate
from mmgraph.ops import gated_activation
from mmgraph.ops.rowwise.api import Activation
from mmgraph.ops.rowwise.reference import activated

__all__ = [
    "ACTIVATIONS",
    "ALIGNMENT",
    "Activation",
    "JoinedGate",
    "apply_activation",
    "is_plain",
    "linear_activation",
]

#: Widths of joined weights are multiples of it: what the GPU's products are cut into.
ALIGNMENT = 128

#: transformers' names of activations, and those of the ops.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def is_plain(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear`` itself with ordinary weights, called by nobody's hooks."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks) and "forward" not in vars(module)


def apply_activation(x: Tensor, name: Activation, *, fused: bool) -> Tensor:
    """An activation, in one launch if `fused`.

    Args:
        x: ``[tokens, width]``.
        name: "silu", "gelu", "gelu_tanh", "quick_gelu" or "relu".
        fused: By the op.
    """
    return activate(x, kind=name) if fused else activated(x, name)


def linear_activation(x: Tensor, linear: nn.Module, name: Activation, *, fused: bool) -> Tensor:
    """A linear layer and the activation behind it.

    On CUDA "gelu_tanh" is the last step of the product itself, before the sums are rounded.

    Args:
        x: ``[tokens, inputs]``.
        linear: The layer.
        name: The activation.
        fused: Whether to.
    """
    in_the_product = fused and name == "gelu_tanh" and x.is_cuda and not torch.is_grad_enabled()
    if in_the_product and x.dtype in (torch.bfloat16, torch.float16) and is_plain(linear):
        layer = cast(nn.Linear, linear)
        if layer.bias is not None:
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    result: Tensor = linear(x)
    return apply_activation(result, name, fused=fused)


class JoinedGate:
    """A gated MLP's weights in two tensors: gate and up one behind the other, and down, of an aligned width.

    What is added to the width is zero: the activation of zero times zero is zero, and adds nothing. The modules'
    parameters are views of these tensors from now on, until `part`.

    Args:
        gate: ``nn.Linear`` of ``[width, inputs]``.
        up: Likewise.
        down: ``nn.Linear`` of ``[outputs, width]``.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.width = gate.out_features
        self.aligned = -(-self.width // ALIGNMENT) * ALIGNMENT
        with torch.no_grad(), torch.inference_mode(False):
            inputs = gate.in_features
            self.both = gate.weight.new_zeros(2 * self.aligned, inputs)
            self.bias = None if gate.bias is None else gate.bias.new_zeros(2 * self.aligned)
            # A width that is aligned already stays where it is.
            apart = self.aligned != self.width
            self.lower = down.weight.new_zeros(down.out_features, self.aligned) if apart else None
            for index, module in enumerate((gate, up)):
                rows = slice(index * self.aligned, index * self.aligned + self.width)
                _move(module.weight, self.both[rows])
                if self.bias is not None:
                    _move(module.bias, self.bias[rows])
            if self.lower is not None:
                _move(down.weight, self.lower[:, : self.width])

    @staticmethod
    def fits(gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
        """Whether three modules can be joined."""
        modules = (gate, up, down)
        if not all(is_plain(module) for module in modules):
            return False
        linears: list[Any] = list(modules)
        same = {(m.weight.dtype, m.weight.device) for m in linears}
        biases = (gate.bias is None) == (up.bias is None)
        return len(same) == 1 and biases

    @property
    def whole(self) -> bool:
        """Whether the modules' parameters are still views of the joined tensors."""
        if not (is_plain(self.gate) and is_plain(self.up) and is_plain(self.down)):
            return False
        if self.bias is not None and not self._biases_are_ours(self.bias):
            return False
        size = self.both.element_size()
        start, pitch = self.both.data_ptr(), self.both.stride(0) * size
        return (
            self.gate.weight.data_ptr() == start
            and self.up.weight.data_ptr() == start + self.aligned * pitch
            and (self.lower is None or self.down.weight.data_ptr() == self.lower.data_ptr())
            and self.gate.weight.dtype == self.both.dtype
        )

    def _biases_are_ours(self, bias: Tensor) -> bool:
        biases: tuple[Tensor | None, Tensor | None] = (self.gate.bias, self.up.bias)
        if biases[0] is None or biases[1] is None:
            return False
        start, size = bias.data_ptr(), bias.element_size()
        return biases[0].data_ptr() == start and biases[1].data_ptr() == start + self.aligned * size

    def __call__(self, x: Tensor, name: Activation) -> Tensor:
        """The MLP of ``[tokens, inputs]`` rows."""
        joined = functional.linear(x, self.both, self.bias)
        lower = self.down.weight if self.lower is None else self.lower
        return functional.linear(gated_activation(joined, activation=name), lower, self.down.bias)

    def part(self) -> None:
        """Gives each parameter memory of its own again."""
        parameters = [self.gate.weight, self.up.weight, self.down.weight]
        parameters += [] if self.bias is None else [self.gate.bias, self.up.bias]
        ours = {
            one.untyped_storage().data_ptr() for one in (self.both, self.bias, self.lower) if one is not None
        }
        with torch.no_grad(), torch.inference_mode(False):
            for parameter in parameters:
                if parameter is not None and parameter.untyped_storage().data_ptr() in ours:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _move(parameter: Tensor, view: Tensor) -> None:
    """Has a parameter lie where a view does, with the values that it has."""
    view.copy_(parameter)
    parameter.data = view
