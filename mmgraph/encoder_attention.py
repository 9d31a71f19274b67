"""The attention of a vision or audio encoder: projection, positions, attention per sequence, projection.

Built on ``mmgraph.ops``: one pass for the positions, one call for the attention of all sequences, no padding between
them. It traces whole, is capturable, trains, and its two projections are plain ``nn.Linear``.
"""

import math
from typing import Any

import torch
from torch import nn

from mmgraph.encoder_checkpoints import adapt_checkpoint
from mmgraph.encoder_choice import note_choice
from mmgraph.encoder_lengths import PackedOffsets, RowWidths, pack_offsets, resolve_lengths
from mmgraph.encoder_parallel import HeadCounts, enter_shards, find_shard, make_projections, sum_over_shards
from mmgraph.encoder_positions import PositionFunction, check_positions, place_heads
from mmgraph.errors import EncoderAttentionError
from mmgraph.ops import varlen_attention
from mmgraph.ops.attention.settings import check_name

Tensor = torch.Tensor


class MultimodalEncoderAttention(nn.Module):
    """Self-attention within each of many sequences of an encoder, with its projections.

    Its parameters are those of two ``nn.Linear``: ``qkv``, with rows q | k | v, and ``proj``. Both are only called, so
    whatever changes or replaces a Linear (torchao's ``quantize_``, an adapter) is what runs. ``load_state_dict`` takes
    the usual names: ``qkv`` or ``in_proj_weight`` and ``in_proj_bias``; ``q_proj``, ``q`` or ``query`` with those of k
    and v; ``proj``, ``out_proj``, ``o_proj`` or ``projection_layer``. A bias that k alone lacks is zero.

    With ``process_group`` or ``device_mesh`` each rank has whole heads, and the outputs are summed; the output's bias
    is then ``proj_bias``, added once after the sum. Input, output and lengths are the same on every rank. A whole
    checkpoint loads on every rank, each taking its part, and so does what the rank itself saved. Seed all ranks alike,
    or load a checkpoint.

    Args:
        embed_dim: Width of the input and the output.
        num_heads: Heads of q.
        head_size: Width of a head; None is ``embed_dim / num_heads``.
        num_kv_heads: Heads of k and v, which divide those of q; None is as many.
        qkv_bias: Whether ``qkv`` has a bias.
        proj_bias: Whether ``proj`` has one.
        scale: Multiplies the scores; None is ``head_size ** -0.5``.
        position_mode: What tables are: ``"rope"``, cos and sin for pairs ``(j, j + head_size / 2)``;
            ``"interleaved_rope"``, cos and sin for adjacent pairs; ``"complex_rope"``, one complex table for those.
        position_function: The model's own, ``f(q, k, positions, x_shape) -> (q, k)`` on q ``[tokens, heads, d]`` and k
            ``[tokens, kv_heads, d]``, with ``x_shape`` ``[batch, seq, dim]``. It runs where a call gives
            ``position_embeddings``, whatever those are.
        backend: An attention backend's name, or None for the choice that ``varlen_attention`` makes.
        process_group: The ranks that share the weights; None: not shared.
        device_mesh: The same as a one-dimensional mesh.
        device: Where the parameters are.
        dtype: Theirs.

    Raises:
        EncoderAttentionError: A size, mode or group doesn't fit; the ranks don't divide the heads.
        UnknownBackend: No backend has the name.
    """

    qkv: nn.Module
    proj: nn.Module
    proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_size: int | None = None,
        num_kv_heads: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        scale: float | None = None,
        position_mode: str = "rope",
        position_function: PositionFunction | None = None,
        backend: str | None = None,
        process_group: Any = None,
        device_mesh: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads = _head_counts(embed_dim, num_heads, head_size, num_kv_heads)
        check_positions(position_mode, position_function)
        if backend is not None:
            check_name(backend)
        self.embed_dim = embed_dim
        self.scale = _checked_scale(scale)
        self.position_mode = position_mode
        self.position_function = position_function
        self.backend = backend
        self.shard = find_shard(process_group, device_mesh)
        self.local_heads = self.shard.local(self.heads)
        self.qkv, self.proj, bias = make_projections(
            embed_dim,
            self.heads,
            self.shard,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            device=device,
            dtype=dtype,
        )
        self.register_parameter("proj_bias", bias)
        self.register_load_state_dict_pre_hook(adapt_checkpoint)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        position_embeddings: Any = None,
        rotary_pos_emb_cos: Tensor | None = None,
        rotary_pos_emb_sin: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Rows that no sequence covers reach no other row, whatever they hold; theirs is the bias of the output.

        Args:
            x: ``[batch, seq, embed_dim]``, or ``[seq, embed_dim]`` as a batch of one, in the parameters' dtype.
            cu_seqlens: Where each sequence starts in the ``batch * seq`` rows, and where the last one ends: integers
                ``[n + 1]``. In eager code any integers on any device; inside a capture or a traced graph int32 on the
                input's. With ``sequence_lengths``, packed offsets (``pack_offsets``). None: a sequence is a batch row.
            max_seqlen: The longest sequence or more, a Python int. None: without ``cu_seqlens`` it is ``seq``; with
                them it is computed on the host, which on a GPU waits for the device, and is an error inside a capture
                or a traced graph.
            position_embeddings: The pair (cos, sin), each ``[tokens, head_size / 2]`` or ``[tokens, head_size]``, or
                with tokens as ``batch, seq``; one complex table ``[tokens, head_size / 2]`` in mode ``"complex_rope"``;
                what ``position_function`` takes. Goes before the next two.
            rotary_pos_emb_cos: As cos.
            rotary_pos_emb_sin: As sin.
            sequence_lengths: ``[n]``: says that ``cu_seqlens`` is packed, with ``3 * (n + 1)`` entries.

        Returns:
            In the shape and dtype of ``x``.

        Raises:
            EncoderAttentionError: The input, lengths or positions don't fit.
            EncoderCaptureError: Something would have to be read, converted or moved in a capture or a traced graph.
            ArgumentError, DataError, BackendError: As ``varlen_attention`` and ``packed_qkv_rope``.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim:
            raise EncoderAttentionError(
                f"the input must be [batch, seq, {self.embed_dim}] or [seq, {self.embed_dim}], got {list(x.shape)}."
            )
        batch = x if x.dim() == 3 else x[None]
        cu_seqlens, max_seqlen = resolve_lengths(
            batch, cu_seqlens, max_seqlen, sequence_lengths, self._row_widths()
        )
        heads = self.local_heads
        qkv = self.qkv(enter_shards(batch.reshape(-1, self.embed_dim), self.shard))
        if qkv.shape[-1] != sum(heads.sections):
            raise EncoderAttentionError(
                f"qkv must give {sum(heads.sections)} columns, q | k | v, got {qkv.shape[-1]} from "
                f"{type(self.qkv).__name__}."
            )
        q, k, v = place_heads(
            qkv,
            heads,
            self.position_mode,
            self.position_function,
            position_embeddings,
            rotary_pos_emb_cos,
            rotary_pos_emb_sin,
            batch.shape,
        )
        rows = varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale=self.scale, backend=self.backend)
        if not torch.compiler.is_compiling():
            note_choice(q, k, cu_seqlens, max_seqlen, self.backend)
        out = sum_over_shards(self.proj(rows.flatten(1)), self.shard)
        if self.proj_bias is not None:
            out = out + self.proj_bias.to(out.dtype)
        return out.reshape(x.shape)

    def pack_offsets(self, cu_seqlens: Tensor, max_seqlen: int) -> PackedOffsets:
        """Offsets in cuDNN's packed form, with batch and longest length rounded up to the encoder's buckets.

        The packed form is for callers that already have it: this module takes plain offsets on every backend, and the
        ops make what cuDNN needs from them on the device.

        Args:
            cu_seqlens: Integers ``[batch + 1]`` in rows.
            max_seqlen: The longest sequence or more.

        Returns:
            ``cu_seqlens``, ``sequence_lengths`` and ``max_seqlen`` as ``forward`` takes them, on the same device. They
            count elements of this rank's rows.

        Raises:
            EncoderAttentionError: A type, dtype or size doesn't fit.
        """
        return pack_offsets(cu_seqlens, max_seqlen, self._row_widths())

    def _row_widths(self) -> RowWidths:
        q, kv, _ = self.local_heads.sections
        return RowWidths(q, kv, q + 2 * kv)

    def extra_repr(self) -> str:
        """Sizes and choices, for ``print``."""
        kv = "" if self.heads.q == self.heads.kv else f", num_kv_heads={self.heads.kv}"
        ranks = "" if self.shard.size == 1 else f", rank {self.shard.rank} of {self.shard.size}"
        return (
            f"{self.embed_dim}, {self.heads.q}, head_size={self.heads.width}{kv}, "
            f"position_mode={self.position_mode!r}, backend={self.backend!r}{ranks}"
        )


VisionAttention = MultimodalEncoderAttention


def _head_counts(embed_dim: Any, num_heads: Any, head_size: Any, num_kv_heads: Any) -> HeadCounts:
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if head_size is not None:
        sizes["head_size"] = head_size
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise EncoderAttentionError(f"{name} must be a positive Python int, got {size!r}.")
    if head_size is None:
        if embed_dim % num_heads:
            raise EncoderAttentionError(
                f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}: pass head_size= where "
                "heads have a width of their own."
            )
        head_size = embed_dim // num_heads
    if num_heads % num_kv_heads:
        raise EncoderAttentionError(
            f"num_heads must be divisible by num_kv_heads, got {num_heads} and {num_kv_heads}."
        )
    return HeadCounts(num_heads, num_kv_heads, head_size)


def _checked_scale(scale: Any) -> float | None:
    """The scale, or None, for which the op takes that of the width that q has, padded for no backend yet."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise EncoderAttentionError(f"scale must be a finite Python number or None, got {scale!r}.")
    return float(scale)
