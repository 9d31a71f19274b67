"""An encoder's attention written out sequence by sequence in plain PyTorch, and calls of every kind for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rotary import rotated
from torch.nn.functional import linear

Tensor = torch.Tensor
Place = Callable[[Tensor], Tensor]

POSITIONS = ("none", "half", "full", "keywords", "both", "interleaved", "complex", "function")
LENGTHS = ("none", "plain", "no maximum", "int64", "packed", "packed without maximum")


def plain_attention(
    module: Any, x: Tensor, lengths: list[int], place: Place, dtype: torch.dtype = torch.float64
) -> Tensor:
    """What a module of one process must give, in a dtype; differentiable in its parameters and ``x``.

    Args:
        module: Only its weights, counts and scale are looked at.
        x: ``[..., dim]``.
        lengths: Of the sequences; rows behind them see nothing.
        place: Puts positions on ``[tokens, heads, d]``.
        dtype: Of the arithmetic.
    """

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    heads = module.heads
    rows = linear(x.reshape(-1, x.shape[-1]).to(dtype), cast(module.qkv.weight), cast(module.qkv.bias))
    q, k, v = (part.unflatten(1, (-1, heads.width)) for part in rows.split(heads.sections, 1))
    q, k = place(q).to(dtype), place(k).to(dtype)
    scale = heads.width**-0.5 if module.scale is None else module.scale
    blocks, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        keys, values = (tensor[part].repeat_interleave(heads.q // heads.kv, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[part], keys) * scale
        blocks.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    blocks.append(q.new_zeros(q.shape[0] - start, heads.q, heads.width))
    out = linear(torch.cat(blocks).flatten(1), cast(module.proj.weight), cast(module.proj.bias))
    return out.reshape(x.shape)


def shift_by_table(q: Tensor, k: Tensor, positions: Tensor, x_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """A position function of nobody's: it says what it was given, and adds a row of ``positions`` to each token."""
    assert len(x_shape) == 3
    assert q.shape[0] == k.shape[0] == x_shape[0] * x_shape[1]
    assert q.dim() == k.dim() == 3
    return q + positions[:, None].to(q.dtype), k - positions[:, None].to(k.dtype)


@dataclass(frozen=True)
class Positions:
    """How a module is made and called for a kind of positions, and what that must do to q and to k."""

    options: dict[str, Any]
    call: dict[str, Any]
    place: Place


def positions(kind: str, tokens: int, width: int, g: torch.Generator, device: str = "cpu") -> Positions:
    """Of a kind of ``POSITIONS``; tables hold numbers of no particular kind, so that every place of them matters."""

    def table(columns: int) -> Tensor:
        return torch.randn(tokens, columns, generator=g).to(device)

    cos, sin = table(width // 2), table(width // 2)
    if kind == "none":
        return Positions({}, {}, lambda heads: heads)
    if kind == "full":
        cos, sin = table(width), table(width)
    call: dict[str, Any] = {"position_embeddings": (cos, sin)}
    if kind == "keywords":
        call = {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}
    if kind == "both":  # the pair goes first, and what isn't used isn't looked at
        call["rotary_pos_emb_cos"] = table(3)
    if kind == "interleaved":
        return Positions(
            {"position_mode": "interleaved_rope"}, call, lambda heads: rotated(heads, cos, sin, True)
        )
    if kind == "complex":
        call = {"position_embeddings": torch.complex(cos, sin)}
        return Positions({"position_mode": "complex_rope"}, call, lambda heads: rotated(heads, cos, sin, True))
    if kind == "function":
        shift = table(width)
        call = {"position_embeddings": shift, "rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}
        signs = iter((1, -1) * 3)  # q, then k
        return Positions(
            {"position_function": shift_by_table},
            call,
            lambda heads: heads + next(signs) * shift[:, None].to(heads.dtype),
        )
    return Positions({}, call, lambda heads: rotated(heads, cos, sin, False))


def draw_lengths(g: torch.Generator, tokens: int) -> list[int]:
    """Lengths of some sequences, empty ones among them, that cover the tokens or leave some at the end."""
    count = int(torch.randint(0, 5, (), generator=g))
    cuts = torch.randint(0, tokens + 1, (count,), generator=g).sort().values.tolist()
    return [end - start for start, end in zip([0, *cuts], cuts, strict=False)]


def length_arguments(kind: str, module: Any, lengths: list[int], device: str = "cpu") -> dict[str, Any]:
    """Arguments of a call for these lengths, in a form of ``LENGTHS``."""
    if kind == "none":
        return {}
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    longest = max(lengths, default=0)
    if kind.startswith("packed"):
        packed = module.pack_offsets(offsets.int(), longest)
        found = {"cu_seqlens": packed.cu_seqlens, "sequence_lengths": packed.sequence_lengths}
        return found if kind == "packed without maximum" else found | {"max_seqlen": packed.max_seqlen}
    if kind == "no maximum":
        return {"cu_seqlens": offsets.int()}
    return {"cu_seqlens": offsets if kind == "int64" else offsets.int(), "max_seqlen": longest}
