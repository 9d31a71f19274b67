"""The triton backend: our own varlen forward, for half and single precision, any width from 1 to 256.

It takes strided views of a packed projection without a copy, grouped heads, and v of another width. Block sizes come
from a small table; nothing is tuned in the user's process.
"""

import math
from typing import NamedTuple

import torch

from mmgraph.ops.attention import windows
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.attention.zero_tail import padded_power, triton_package
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import ROOMY_SHARED_BYTES, launch, shared_bytes
from mmgraph.ops.registration import kernel_module

Tensor = torch.Tensor

LARGEST_WIDTH = 256
WINDOW = windows.LONGEST
# Elements from row to row from which on a block of rows passes 2^31.
_FAR = 1 << 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Blocks(NamedTuple):
    """How the work is cut: query rows and key rows at a time, warps, and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def block_table(item_size: int, width: int, shared_bytes: int) -> Blocks:
    """The committed block sizes for an element size and the larger of the two widths."""
    if item_size == 4:
        return Blocks(32, 32, 4, 1) if width > 128 else Blocks(64, 32, 4, 1)
    roomy = shared_bytes >= ROOMY_SHARED_BYTES
    if width > 128:  # more keys or fewer warps spill registers
        return Blocks(128, 32, 8, 2) if roomy else Blocks(64, 32, 4, 1)
    if width <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 64, 8, 3 if roomy else 2)


def _rows_near(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with adjacent columns and rows near enough for 32 bits across a block of them."""
    row, _, column = tensor.stride()
    return tensor if column == 1 and row < _FAR else tensor.contiguous()


def _aligned(*tensors: Tensor) -> bool:
    """Whether every row of every head starts at a multiple of 16 bytes."""
    unit = 16 // tensors[0].element_size()
    return not any(x.stride(0) % unit or x.stride(1) % unit or x.data_ptr() % 16 for x in tensors)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention per sequence; zeros, and minus infinity in the log-sum-exps, where no sequence covers.

    ``blocks`` overrides the table, for measurements.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    batch = cu_seqlens.shape[0] - 1
    q, k, v = _rows_near(q), _rows_near(k), _rows_near(v)
    cu_seqlens = cu_seqlens.contiguous()
    aligned = _aligned(q, k, v)
    if blocks is None and max_seqlen <= WINDOW:
        return windows.forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse, aligned)
    out = q.new_empty((tokens, heads, v_dim))
    lse = q.new_empty((heads, tokens), dtype=torch.float32) if with_lse else None
    if blocks is None:
        blocks = block_table(q.element_size(), max(head_dim, v_dim), shared_bytes(q.device))
    per_sequence = -(-max_seqlen // blocks.queries)
    flat_blocks = tokens // blocks.queries + batch + 1
    # Where most blocks of a rectangular grid would be empty, each block finds its sequence by bisection instead.
    flat = per_sequence * (batch + 1) > 2 * flat_blocks
    count = flat_blocks if flat else per_sequence
    grid = heads * count if flat else heads * count * (batch + 1)
    launch(
        kernel_module("attention.triton_kernels").attention_kernel,
        grid,
        (q, k, v, out, out if lse is None else lse, cu_seqlens, flag_for(q.device)),
        (tokens, batch, count, max_seqlen, scale * math.log2(math.e)),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (
            heads,
            heads // kv_heads,
            head_dim,
            padded_power(head_dim),
            v_dim,
            padded_power(v_dim),
            blocks.queries,
            blocks.keys,
            causal,
            with_lse,
            flat,
            # Short sequences: neighbours in memory together; long ones: one head's keys stay in L2.
            per_sequence <= 2,
            aligned,
            scale <= 0,
            "ieee" if q.dtype == torch.float32 else "tf32",
            int(Fault.ATTENTION_OFFSETS),
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out, lse


def _why_not(traits: Traits) -> str | None:
    if traits.device.type != "cuda":
        return f"it needs a GPU, and the tensors are on {traits.device.type}"
    if traits.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {traits.dtype}"
    if max(traits.head_dim, traits.v_dim) > LARGEST_WIDTH:
        return f"it takes widths up to {LARGEST_WIDTH}, not {max(traits.head_dim, traits.v_dim)}"
    if torch.version.hip is None and torch.cuda.get_device_capability(traits.device) < (8, 0):
        return "it needs compute capability 8.0 or more"
    if triton_package() is None:
        return "triton isn't installed"
    return None


BACKEND = AttentionBackend("triton", forward, _why_not, supports_gradient=True)
