"""Host side of the window kernels: many short sequences, several to a program or one head of one sequence to each."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from mmgraph.ops.compat import knows_gluon
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import ROOMY_SHARED_BYTES, launch, shared_bytes
from mmgraph.ops.registration import kernel_module

Tensor = torch.Tensor

# The longest sequence that the kernel is for.
LONGEST = 64
# Offsets that one step of a tile's search for its sequences looks at, and of a row's search for its own.
_PROBES = 256
_CHUNK = 16
# Rows that a sequence has at least, in the mean, for having a program of its own.
_FULL = 40
# The same for one of its own per head, by the kernel for whole windows. Packing is faster from fewer rows on, but only
# where lengths divide a tile; where they don't, it takes two to three times as long (H200, 16 to 40 rows).
FULL_PER_HEAD = 24
# Warps of a program that has a whole window's head, 16 rows each.
_WARPS = 4
_LOG2_E = math.log2(math.e)
_FAULT = int(Fault.ATTENTION_OFFSETS)


class WindowBlocks(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: Rows of a tile, and keys at a time.
        packed: Whether a program has the sequences that start in a tile; otherwise it has one sequence.
        parts: Programs that share a tile's queries.
        warps: Warps of a program.
        heads: Heads of a program, one after another.
        stages: Heads whose rows are on their way or in use at once.
    """

    rows: int
    packed: bool
    parts: int
    warps: int
    heads: int
    stages: int


@lru_cache(maxsize=64)
def split_width(width: int) -> tuple[int, int]:
    """A width as a power of two and a rest padded to one (at least 16), or as one padded width and 0."""
    whole = max(16, 1 << (width - 1).bit_length())
    first = whole // 2
    rest = max(16, 1 << (width - first - 1).bit_length()) if width > first else 0
    return (whole, 0) if whole in (16, width) or rest >= first else (first, rest)


def window_blocks(
    item_size: int, width: int, v_width: int, tokens: int, batch: int, heads: int, shared: int
) -> WindowBlocks:
    """The committed block sizes for an element size, the two widths, and the amount of work.

    Args:
        item_size: Bytes of an element.
        width: Width of q and k.
        v_width: Width of v.
        tokens: Rows.
        batch: Sequences.
        heads: Query heads.
        shared: Bytes of shared memory that a program may have.
    """
    packed = tokens < _FULL * batch
    if item_size == 4:
        return WindowBlocks(32, packed, 1, 4, 1, 1)
    blocks = -(-tokens // 64) if packed else batch
    scarce = max(width, v_width) > 128 and shared < ROOMY_SHARED_BYTES
    if split_width(width)[1] or split_width(v_width)[1]:
        each = 2 if blocks * heads < 1024 else 8 if blocks * heads < 4096 else 16
        return WindowBlocks(64, packed, 2, 2, each, 2 if scarce else 3)
    return WindowBlocks(64, packed, 1, 4, 2, 1 if scarce else 2)


def full_window_bytes(width: int, v_width: int) -> int:
    """Shared memory of a program that has one head of one whole window in half precision, and of its fault's number."""
    return 2 * LONGEST * (2 * sum(split_width(width)) + sum(split_width(v_width))) + 8


def takes_full_windows(q: Tensor, v: Tensor, batch: int, aligned: bool) -> bool:
    """Whether the call is for the kernel with a program per sequence and head.

    That is one in half precision, in pieces of 16 bytes, whose sequences fill most of a block each, on a GPU that has
    room for it, with a release of Triton that the kernel was tried with.
    """
    return (
        aligned
        and q.shape[2] % 8 == v.shape[2] % 8 == 0  # columns are copied 16 bytes at a time
        and q.is_cuda
        and q.element_size() == 2
        and q.shape[0] >= FULL_PER_HEAD * batch
        and full_window_bytes(q.shape[2], v.shape[2]) <= shared_bytes(q.device)
        and knows_gluon()
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
    aligned: bool,
    blocks: WindowBlocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention per sequence; zeros, and minus infinity in the log-sum-exps, where no sequence covers.

    q, k and v have adjacent columns, ``cu_seqlens`` adjacent entries; ``aligned`` says that their rows start at
    multiples of 16 bytes. ``blocks`` overrides the choice of a kernel and the table, for measurements.
    """
    tokens, heads, _ = q.shape
    batch = cu_seqlens.shape[0] - 1
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((heads, tokens), dtype=torch.float32) if with_lse else None
    if blocks is None and takes_full_windows(q, v, batch, aligned):
        _forward_full(q, k, v, out, lse, cu_seqlens, max_seqlen, scale, causal)
    else:
        _forward_blocks(q, k, v, out, lse, cu_seqlens, max_seqlen, scale, causal, aligned, blocks)
    return out, lse


def _forward_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    batch = cu_seqlens.shape[0] - 1
    launch(
        kernel_module("attention.full_window_kernels").full_window_kernel,
        (batch + 1) * heads,
        (q, k, v, out, out if lse is None else lse, cu_seqlens, flag_for(q.device)),
        (tokens, batch, max_seqlen, scale * _LOG2_E),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (
            heads,
            heads // kv_heads,
            head_dim,
            *split_width(head_dim),
            v_dim,
            *split_width(v_dim),
            LONGEST,
            causal,
            lse is not None,
            scale <= 0,
            _WARPS,
            _FAULT,
        ),
        num_warps=_WARPS,
        num_stages=1,
    )


def _forward_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    aligned: bool,
    blocks: WindowBlocks | None,
) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    batch = cu_seqlens.shape[0] - 1
    if blocks is None:
        shared = shared_bytes(q.device)
        blocks = window_blocks(q.element_size(), head_dim, v_dim, tokens, batch, heads, shared)
    heads_each = min(blocks.heads, heads)
    # Where each sequence has a program, one more place stands for no sequence, and helps to clear the tail.
    places = -(-tokens // blocks.rows) if blocks.packed else batch + 1
    programs = places * -(-heads // heads_each) * blocks.parts
    launch(
        kernel_module("attention.window_kernels").window_kernel,
        programs,
        (q, k, v, out, out if lse is None else lse, cu_seqlens, flag_for(q.device)),
        (tokens, batch, max_seqlen, programs, heads_each, scale * _LOG2_E),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (
            heads,
            heads // kv_heads,
            head_dim,
            *split_width(head_dim),
            v_dim,
            *split_width(v_dim),
            LONGEST,
            blocks.rows,
            blocks.packed,
            blocks.parts,
            blocks.stages,
            _PROBES,
            _CHUNK,
            causal,
            lse is not None,
            aligned,
            scale <= 0,
            "ieee" if q.dtype == torch.float32 else "tf32",
            _FAULT,
        ),
        num_warps=blocks.warps,
        num_stages=1,
    )
