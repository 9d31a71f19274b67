"""One block of a vision tower on mmgraph's ops, and batches of every kind for it, for the tests of compiling.

The block is what towers have: norm, packed projection, rotary positions, attention per sequence, output projection,
norm, gated MLP, with a residual around each half.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend

from mmgraph import ops

Tensor = torch.Tensor


class TowerBlock(nn.Module):
    """``(hidden [tokens, dim], cos, sin [tokens, head_dim / 2], cu_seqlens, max_seqlen) -> [tokens, dim]``."""

    def __init__(self, heads: int, head_dim: int, ratio: int = 2, backend: str | None = None):
        super().__init__()
        dim = heads * head_dim
        self.heads, self.head_dim, self.backend = heads, head_dim, backend
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate, self.up = nn.Linear(dim, ratio * dim), nn.Linear(dim, ratio * dim)
        self.down = nn.Linear(ratio * dim, dim)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        qkv = self.qkv(self.norm1(hidden))
        q, k, v = ops.packed_qkv_rope(qkv, cos, sin, self.heads, self.heads, self.head_dim)
        rows = ops.varlen_attention(q, k, v, cu_seqlens, max_seqlen, backend=self.backend)
        hidden = hidden + self.proj(rows.flatten(1))
        normed = self.norm2(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class LongestByValue(nn.Module):
    """The block for AOTInductor, which takes tensors only: ``max_seqlen`` is an int64 tensor of the host, ``[]``."""

    def __init__(self, block: TowerBlock):
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: Tensor) -> Tensor:
        return self.block(hidden, cos, sin, cu_seqlens, longest.item())


class LongestByShape(LongestByValue):
    """The same, where ``longest`` is an empty tensor ``[max_seqlen, 0]``."""

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: Tensor) -> Tensor:
        return self.block(hidden, cos, sin, cu_seqlens, longest.shape[0])


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths of the sequences, rows of padding behind them, and how far ``max_seqlen`` is above the longest."""

    lengths: tuple[int, ...]
    tail: int = 0
    above: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.tail

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0) + self.above


# The first one's counts differ from each other and from the widths: what is equal in the first call is taken for one.
SIZES = (
    Size((20, 7, 30, 4, 9)),
    Size((16,) * 8),  # windows
    Size((16,) * 5 + (9, 3), tail=5),  # windows, the last ones cut, and padding
    Size((100, 150)),
    Size((5, 0, 12)),  # an empty sequence
    Size((33, 21), tail=10),  # padding
    Size((0, 0, 4), tail=2, above=3),
    Size((64,) * 3 + (0,), above=64),
    Size((1, 2, 3, 4, 5, 6)),
    Size((301,), tail=3),
)


def inputs(
    size: Size,
    block: TowerBlock,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    padding: float | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of the block. Rows of padding hold ``padding``, or numbers like those of other rows."""
    g = torch.Generator().manual_seed(seed * 10_007 + size.tokens)
    hidden = torch.randn(size.tokens, block.heads * block.head_dim, generator=g)
    if padding is not None:
        hidden[sum(size.lengths) :] = padding
    angles = torch.arange(size.tokens)[:, None] * 0.5 ** torch.arange(block.head_dim // 2)
    offsets = [sum(size.lengths[:i]) for i in range(len(size.lengths) + 1)]
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    return hidden.to(device, dtype), angles.cos().to(device), angles.sin().to(device), cu, size.max_seqlen


def exact_block(block: TowerBlock) -> TowerBlock:
    """The same block in float64, on the reference."""
    other = copy.deepcopy(block).double()
    other.backend = "reference"
    return other


def exactly(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments for the block in float64."""
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


def assert_right(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """``got`` is as far from ``exact`` as ``eager`` is, twice over, and a rounding."""
    # In wide types eager's error is at times luckily small, so there some units more are allowed.
    units = 1 if got.dtype in (torch.bfloat16, torch.float16) else 16
    assert (got.dtype, got.shape, got.device) == (eager.dtype, eager.shape, eager.device)
    if not got.numel():
        return
    off, own = (float((x.detach().double() - exact.detach()).abs().max()) for x in (got, eager))
    assert off <= 2 * own + units * torch.finfo(got.dtype).eps * float(exact.detach().abs().max())


def gradients(block: TowerBlock, call: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Of the weighted sum of what ``call`` returns, for the input and every parameter of the block."""
    block.zero_grad(set_to_none=True)
    hidden = arguments[0].detach().clone().requires_grad_()
    out = call(hidden, *arguments[1:])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    out.backward(weight.to(out))
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {"hidden": hidden.grad, **found}


class CountingBackend:
    """A backend of torch.compile, and how many graphs it compiled.

    Where floats are dynamic, PyTorch traces once more after the first attempt, which compiles nothing.
    """

    def __init__(self, name: str = "inductor"):
        self.compile, self.graphs = lookup_backend(name), 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        compiled = self.compile(graph, example)
        self.graphs += 1
        return compiled
