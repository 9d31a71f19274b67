"""Where an encoder's sequences lie in its rows, from whatever form the caller has: plain offsets, packed ones, or none.

Promises: what comes out is what ``varlen_attention`` takes. Inside a capture or a traced graph nothing is read from a
tensor and nothing is moved; what would need it is refused there, and done in eager code.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mmgraph.capture.buckets import ENCODER_BATCH_BUCKETS, ENCODER_SEQLEN_BUCKETS, round_up_to_bucket
from mmgraph.capture.modes import is_capturing
from mmgraph.errors import EncoderAttentionError, EncoderCaptureError

Tensor = torch.Tensor

_LARGEST = 2**31 - 1
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class Lengths(NamedTuple):
    """int32 offsets ``[batch + 1]`` on the rows' device, and the longest sequence or more."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class RowWidths:
    """Elements from one row to the next, by which packed offsets count.

    Attributes:
        q: Of q and of the attention's output, which are contiguous: heads * head_size.
        kv: Of a contiguous v: kv_heads * head_size.
        packed: Of the packed projection, in which v lies: both of k and v, and q.
    """

    q: int
    kv: int
    packed: int


@dataclass(frozen=True, slots=True)
class PackedOffsets:
    """Element offsets as cuDNN's attention counts them, with its sizes rounded up to the encoder's buckets.

    Attributes:
        cu_seqlens: int64 ``[3 * (n + 1)]``: offsets in q and k, in v, in the output; each ``n + 1`` long and padded
            with its last value.
        sequence_lengths: int32 ``[n]``, padded with zeros.
        max_seqlen: The longest sequence, rounded up.
    """

    cu_seqlens: Tensor
    sequence_lengths: Tensor
    max_seqlen: int


def resolve_lengths(
    x: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    sequence_lengths: Tensor | None,
    widths: RowWidths,
) -> Lengths:
    """The sequences of ``x`` ``[batch, seq, dim]``.

    Args:
        x: The input; only its sizes and device are looked at.
        cu_seqlens: Plain offsets ``[n + 1]`` in rows; packed ones ``[3 * (n + 1)]`` beside ``sequence_lengths``; or
            None: every batch row is a sequence of ``seq``.
        max_seqlen: The longest sequence or more; None to find it, which reads the offsets.
        sequence_lengths: ``[n]``, beside packed offsets only.
        widths: What packed offsets count by.

    Raises:
        EncoderAttentionError: A type, dtype or size doesn't fit.
        EncoderCaptureError: Inside a capture or a traced graph: something would have to be read, converted or moved.
    """
    _check_max(max_seqlen)
    frozen = _frozen(x.device)
    if cu_seqlens is None:
        return _even(x, max_seqlen, sequence_lengths)
    _check_integers("cu_seqlens", cu_seqlens)
    if sequence_lengths is not None:
        return _unpacked(x.device, cu_seqlens, max_seqlen, sequence_lengths, widths, frozen)
    if max_seqlen is None:
        max_seqlen = _longest(cu_seqlens.diff() if frozen is None else None, frozen)
    if cu_seqlens.dtype == torch.int32 and cu_seqlens.device == x.device:
        return Lengths(cu_seqlens, max_seqlen)
    if frozen is not None:
        raise EncoderCaptureError(
            f"cu_seqlens must be int32 on {x.device} {frozen}, where nothing may be converted or moved, got "
            f"{cu_seqlens.dtype} on {cu_seqlens.device}: convert it before."
        )
    _check_range(cu_seqlens)
    return Lengths(cu_seqlens.to(x.device, torch.int32), max_seqlen)


def pack_offsets(cu_seqlens: Tensor, max_seqlen: int, widths: RowWidths) -> PackedOffsets:
    """Plain offsets in the packed form, made on their device; nothing is read back.

    Args:
        cu_seqlens: Integers ``[batch + 1]``, with at least one entry.
        max_seqlen: The longest sequence or more; a Python int.
        widths: Elements per row; v's are those of the packed projection.

    Raises:
        EncoderAttentionError: A type, dtype or size doesn't fit.
    """
    _check_integers("cu_seqlens", cu_seqlens)
    _check_max(max_seqlen)
    if max_seqlen is None or cu_seqlens.shape[0] == 0:
        raise EncoderAttentionError(
            f"packed offsets need a max_seqlen and at least one offset, got {max_seqlen} and {cu_seqlens.shape[0]}."
        )
    batch = cu_seqlens.shape[0] - 1
    padding = round_up_to_bucket(batch, ENCODER_BATCH_BUCKETS) - batch
    offsets = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(padding)]).long()
    packed = torch.cat([offsets * width for width in (widths.q, widths.packed, widths.q)])
    return PackedOffsets(packed, offsets.diff().int(), round_up_to_bucket(max_seqlen, ENCODER_SEQLEN_BUCKETS))


def _frozen(device: torch.device) -> str | None:
    """Where values and places of tensors are fixed now, in words for a message; None in eager code."""
    if torch.compiler.is_compiling():  # first: what is asked below can't be traced
        return "while a graph is traced"
    return "inside a capture" if is_capturing(device.type == "cuda") else None


def _even(x: Tensor, max_seqlen: int | None, sequence_lengths: Tensor | None) -> Lengths:
    batch, seq = x.shape[0], x.shape[1]
    if sequence_lengths is not None:
        raise EncoderAttentionError(
            "sequence_lengths go with packed cu_seqlens, [qk | v | output], and cu_seqlens is None: pass both, or "
            "neither where all sequences are equally long."
        )
    # While tracing, the comparison would be a condition on sizes, for an argument that then changes nothing.
    if max_seqlen is not None and not torch.compiler.is_compiling() and max_seqlen < seq:
        raise EncoderAttentionError(
            f"without cu_seqlens every sequence has {seq} rows, so max_seqlen can't be {max_seqlen}: leave it away, or "
            "pass cu_seqlens."
        )
    return Lengths(torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seq, seq)


def _unpacked(
    device: torch.device,
    packed: Tensor,
    max_seqlen: int | None,
    sequence_lengths: Tensor,
    widths: RowWidths,
    frozen: str | None,
) -> Lengths:
    """Plain offsets from the output's section; v's isn't needed, since the kernels read v by its own strides."""
    _check_integers("sequence_lengths", sequence_lengths)
    count = sequence_lengths.shape[0]
    if packed.shape[0] != 3 * (count + 1):
        raise EncoderAttentionError(
            f"beside sequence_lengths of {count} entries, cu_seqlens must be packed, [qk | v | output], with "
            f"3 * ({count} + 1) = {3 * (count + 1)} entries, got {packed.shape[0]}: leave sequence_lengths away for "
            "plain offsets."
        )
    if max_seqlen is None:
        max_seqlen = _longest(sequence_lengths if frozen is None else None, frozen)
    if packed.device != device and frozen is not None:
        raise EncoderCaptureError(
            f"cu_seqlens must be on {device} {frozen}, where nothing may be moved, got {packed.device}: move it before."
        )
    if frozen is None and packed.is_cpu and sequence_lengths.is_cpu:
        _check_sections(packed, sequence_lengths, widths)
    rows = torch.div(packed[2 * (count + 1) :], widths.q, rounding_mode="floor")
    return Lengths(rows.to(device, torch.int32), max_seqlen)


def _check_sections(packed: Tensor, sequence_lengths: Tensor, widths: RowWidths) -> None:
    """Raise unless the three sections and the lengths say the same; only where all of them are on the host."""
    qk, v, out = packed.long().chunk(3)
    rows = out // widths.q
    expected = (
        ("the output's section", out, (rows * widths.q,)),
        ("the section of q and k", qk, (rows * widths.q,)),
        ("v's section", v, (rows * widths.packed, rows * widths.kv)),
        ("sequence_lengths", sequence_lengths, (rows.diff(),)),
    )
    for name, found, choices in expected:
        if not any(torch.equal(found.long(), choice) for choice in choices):
            raise EncoderAttentionError(
                f"packed cu_seqlens don't fit together: by the output's section, which counts {widths.q} elements a "
                f"row, the sequences begin at rows {rows.tolist()}, but {name} is {found.tolist()}, not "
                f"{' or '.join(str(choice.tolist()) for choice in choices)}: pack_offsets makes all of them."
            )


def _longest(lengths: Tensor | None, frozen: str | None) -> int:
    if lengths is None:
        raise EncoderCaptureError(
            f"max_seqlen is missing {frozen}, where the offsets can't be read: pass the longest length, or the "
            "bucket's, as a Python int."
        )
    return int(lengths.max()) if lengths.numel() else 0


def _check_max(max_seqlen: Any) -> None:
    if max_seqlen is None or type(max_seqlen) is int:
        return
    if isinstance(max_seqlen, torch.Tensor):
        raise EncoderAttentionError(
            f"max_seqlen must be a Python int, got a tensor on {max_seqlen.device}: reading it would synchronise with "
            "the device in every layer. Take the maximum of the lengths on the host, where they come from."
        )
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise EncoderAttentionError(
            f"max_seqlen must be a Python int or None, got {type(max_seqlen).__name__}: convert it with int(...)."
        )


def _check_integers(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise EncoderAttentionError(
            f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}: make it with torch.as_tensor."
        )
    if tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
        raise EncoderAttentionError(
            f"{name} must be a vector of integers, got {tensor.dtype} {list(tensor.shape)}."
        )


def _check_range(cu_seqlens: Tensor) -> None:
    """Raise where a conversion to int32 would change an offset; only where that can be seen without waiting."""
    if cu_seqlens.is_cpu and cu_seqlens.dtype == torch.int64 and cu_seqlens.numel():
        low, high = (int(end) for end in cu_seqlens.aminmax())
        if low < -_LARGEST or high > _LARGEST:
            raise EncoderAttentionError(
                f"cu_seqlens must be within 32 bits, since rows are counted by int32, got {low} to {high}."
            )
