"""How an encoder's q and k get their positions: rotary tables in one fused pass, or a function of the model's own."""

from collections.abc import Callable
from typing import Any

import torch

from mmgraph.encoder_parallel import HeadCounts
from mmgraph.errors import EncoderAttentionError
from mmgraph.ops import packed_qkv_rope

Tensor = torch.Tensor
Heads = tuple[Tensor, Tensor, Tensor]

PositionFunction = Callable[[Tensor, Tensor, Any, torch.Size], tuple[Tensor, Tensor]]
"""``(q [tokens, heads, d], k [tokens, kv_heads, d], positions, x_shape) -> (q, k)`` of the same shapes and dtypes."""

POSITION_MODES = ("rope", "interleaved_rope", "complex_rope")


def check_positions(mode: Any, function: Any) -> None:
    """Raise EncoderAttentionError for an unknown mode, or a function that can't be called or comes with a mode."""
    if mode not in POSITION_MODES:
        raise EncoderAttentionError(
            f"position_mode must be one of {', '.join(map(repr, POSITION_MODES))}, got {mode!r}."
        )
    if function is not None and not callable(function):
        raise EncoderAttentionError(
            f"position_function must be a function f(q, k, positions, x_shape) or None, got {function!r}."
        )
    if function is not None and mode == "complex_rope":
        raise EncoderAttentionError(
            "position_function and position_mode='complex_rope' both say what position_embeddings are: give one."
        )


def place_heads(
    qkv: Tensor,
    heads: HeadCounts,
    mode: str,
    function: PositionFunction | None,
    position_embeddings: Any,
    cos: Tensor | None,
    sin: Tensor | None,
    x_shape: torch.Size,
) -> Heads:
    """q, k and v of a packed projection, with positions.

    Args:
        qkv: ``[tokens, (heads + 2 * kv_heads) * width]``.
        heads: The counts.
        mode: One of ``POSITION_MODES``.
        function: The model's own function; it runs where ``position_embeddings`` are given.
        position_embeddings: ``(cos, sin)``, a complex table in the mode for one, or what the function takes.
        cos: Looked at only without ``position_embeddings``.
        sin: As ``cos``.
        x_shape: ``[batch, seq, dim]``, for the function.

    Returns:
        q ``[tokens, heads, width]``, k and v ``[tokens, kv_heads, width]``; those not rotated are views.

    Raises:
        EncoderAttentionError: Positions don't fit the mode, one of cos and sin is missing, or the function returned
            something else.
        ArgumentError: A table's shape, dtype or device doesn't fit.
    """
    if function is not None and position_embeddings is not None:
        return _placed_by(function, split_heads(qkv, heads), position_embeddings, x_shape)
    if mode == "complex_rope":
        table = _complex_table(position_embeddings, cos, sin)
        if table is None:
            return split_heads(qkv, heads)
        return packed_qkv_rope(
            qkv, _flat(table, x_shape), None, heads.q, heads.kv, heads.width, interleaved=True
        )
    cos, sin = _pair(position_embeddings, cos, sin)
    if cos is None or sin is None:
        return split_heads(qkv, heads)
    interleaved = mode == "interleaved_rope"
    return packed_qkv_rope(
        qkv, _flat(cos, x_shape), _flat(sin, x_shape), heads.q, heads.kv, heads.width, interleaved=interleaved
    )


def split_heads(qkv: Tensor, heads: HeadCounts) -> Heads:
    """Views of the packed rows by head."""
    q, k, v = (
        part.view(-1, part.shape[1] // heads.width, heads.width) for part in qkv.split(heads.sections, 1)
    )
    return q, k, v


def _flat(table: Tensor, x_shape: torch.Size) -> Tensor:
    """Tables ``[batch, seq, width]`` as ``[tokens, width]``; others as they are.

    Raises:
        EncoderAttentionError: Another order of batch and sequence, which would be applied to the wrong rows.
    """
    if table.dim() != 3:
        return table
    rows = x_shape[0] * x_shape[1]
    if table.shape[:2] != x_shape[:2] and (table.shape[0] != 1 or table.shape[1] != rows):
        raise EncoderAttentionError(
            f"tables of three dimensions must be [batch, seq, width] as x is, {list(x_shape[:2])} and their width, got "
            f"{list(table.shape)}: transpose them, or give [tokens, width]"
        )
    return table.flatten(0, 1)


def _pair(embeddings: Any, cos: Any, sin: Any) -> tuple[Tensor | None, Tensor | None]:
    names = "rotary_pos_emb_cos", "rotary_pos_emb_sin"
    if embeddings is not None:
        if isinstance(embeddings, torch.Tensor) or not isinstance(embeddings, (tuple, list)):
            remedy = (
                "a complex table needs position_mode='complex_rope'"
                if isinstance(embeddings, torch.Tensor) and embeddings.is_complex()
                else "a form of the model's own needs position_function="
            )
            raise EncoderAttentionError(
                f"position_embeddings must be the pair (cos, sin), got {_kind(embeddings)}: {remedy}."
            )
        if len(embeddings) != 2:
            raise EncoderAttentionError(
                f"position_embeddings must be the pair (cos, sin), got {len(embeddings)} values."
            )
        cos, sin = embeddings
        names = "cos of position_embeddings", "sin of position_embeddings"
    if (cos is None) != (sin is None):
        given, missing = names if sin is None else names[::-1]
        raise EncoderAttentionError(
            f"{given} was given without {missing}: pass both, or neither for no rotation."
        )
    for name, table in zip(names, (cos, sin), strict=True):
        if table is not None and not isinstance(table, torch.Tensor):
            raise EncoderAttentionError(f"{name} must be a tensor, got {_kind(table)}.")
    return cos, sin


def _complex_table(embeddings: Any, cos: Any, sin: Any) -> Tensor | None:
    if embeddings is None:
        if cos is not None or sin is not None:
            raise EncoderAttentionError(
                "position_mode='complex_rope' takes one complex table as position_embeddings, got rotary_pos_emb_cos "
                "or rotary_pos_emb_sin: pass torch.complex(cos, sin), or use position_mode='interleaved_rope'."
            )
        return None
    if not isinstance(embeddings, torch.Tensor) or not embeddings.is_complex():
        raise EncoderAttentionError(
            "position_mode='complex_rope' takes one complex table [tokens, head_size / 2] as position_embeddings, got "
            f"{_kind(embeddings)}: pass torch.complex(cos, sin), or use another position_mode."
        )
    return embeddings


def _placed_by(function: PositionFunction, heads: Heads, positions: Any, x_shape: torch.Size) -> Heads:
    q, k, v = heads
    placed = function(q, k, positions, x_shape)
    if not isinstance(placed, (tuple, list)) or len(placed) != 2:
        raise EncoderAttentionError(f"position_function must return the pair (q, k), got {_kind(placed)}.")
    for name, given, got in (("q", q, placed[0]), ("k", k, placed[1])):
        if not isinstance(got, torch.Tensor) or got.shape != given.shape or got.dtype != given.dtype:
            raise EncoderAttentionError(
                f"position_function must return {name} as it came, {_kind(given)}, got {_kind(got)}: keep the shape, "
                "and cast back to the dtype that came."
            )
    return placed[0], placed[1], v


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"
