"""The row-wise ops in plain PyTorch: the readable definition of what the kernels do, and the CPU implementation.

The expressions are those that models write, with the same roundings in between, and their gradient is PyTorch's own.
Autocast changes nothing in them, as it changes nothing in the kernels.
"""

import torch
from torch.nn import functional as F

from mmgraph.ops import rowwise_checks as checks
from mmgraph.ops.rowwise.dispatch import Backend, Norm

Tensor = torch.Tensor


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The rows of ``x`` normalised.

    "layer" is rounded once, at the end. "rms" is rounded before the weight too, as the norm of language models is,
    which towers took over.
    """
    with torch.autocast(x.device.type, enabled=False):
        if norm.kind == "layer":
            return F.layer_norm(x, (x.shape[1],), norm.weight, norm.bias, norm.eps)
        wide = x.to(math_dtype(x.dtype))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return scaled.to(x.dtype) if norm.weight is None else norm.weight * scaled.to(x.dtype)


def added_and_normed(x: Tensor, delta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """``x + delta``, and that sum, as it was rounded, normalised."""
    total = (x + delta).contiguous()
    return total, normed(total, norm)


def activated(x: Tensor, kind: str) -> Tensor:
    """The activation of that name, elementwise."""
    with torch.autocast(x.device.type, enabled=False):
        if kind == "silu":
            return F.silu(x)
        if kind == "gelu":
            return F.gelu(x)
        if kind == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        if kind == "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        return F.relu(x)


def gated(x: Tensor, kind: str) -> Tensor:
    """The first half of the columns, activated, times the second half."""
    gate, up = x.chunk(2, dim=1)
    return activated(gate, kind) * up


def mixed(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
    """The sum over taps of ``table[indices] * weights``, in order, rounded once; then added to ``base``.

    An index outside the table makes its row NaN: where indices can't be looked at, nothing else would show it, and the
    device's own assertion would end the process's use of the GPU.
    """
    dtype = math_dtype(table.dtype)
    rows = table.shape[0]
    inside = (indices >= 0) & (indices < rows)
    safe = torch.where(inside, indices, 0)
    shares = torch.where(inside, weights.to(dtype), torch.nan)
    total = table.new_zeros((indices.shape[0], table.shape[1]), dtype=dtype)
    if rows:
        for tap in range(indices.shape[1]):
            total = total + table[safe[:, tap]].to(dtype) * shares[:, tap, None]
    elif indices.shape[1]:
        total = total + torch.nan
    return total.to(table.dtype) if base is None else base + total.to(base.dtype)


def _fill_norm(x: Tensor, delta: Tensor | None, norm: Norm, total: Tensor | None, out: Tensor) -> None:
    if delta is not None and total is not None:
        torch.add(x, delta, out=total)
        x = total
    out.copy_(normed(x, norm))


def _fill_activation(x: Tensor, kind: str, is_gated: bool, out: Tensor) -> None:
    out.copy_(gated(x, kind) if is_gated else activated(x, kind))


def _fill_mixed(table: Tensor, indices: Tensor, weights: Tensor, base: Tensor | None, out: Tensor) -> None:
    checks.check_index_values(indices, table.shape[0])
    out.copy_(mixed(table, indices, weights, base))


BACKEND = Backend(_fill_norm, _fill_activation, _fill_mixed)
