"""One log line for each choice of an attention backend that an encoder's eager calls meet, and who made it."""

import logging
from functools import lru_cache

import torch

from mmgraph.ops import select_backend
from mmgraph.ops.attention import settings

Tensor = torch.Tensor

_log = logging.getLogger("mmgraph.encoder_attention")


def note_choice(q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str | None) -> None:
    """Log, once for each choice and kind of call, which backend served a call and whether somebody asked for it.

    Only host facts are looked at. Where the logger isn't on for INFO it costs next to nothing.

    Args:
        q: ``[tokens, heads, width]``, as it was given to ``varlen_attention``.
        k: ``[tokens, kv_heads, width]``.
        cu_seqlens: ``[batch + 1]``.
        max_seqlen: As given.
        backend: As given.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    kind = (q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], gradient)
    asked, origin = (backend, "backend=") if backend is not None else settings.asked_for()
    if asked is not None:
        _say(asked, f"asked for by {origin}", kind)
        return
    _say(_automatic(kind, q.shape[0], cu_seqlens.shape[0] - 1, max_seqlen), "automatic", kind)


_Kind = tuple[torch.device, torch.dtype, int, int, int, bool]


@lru_cache(maxsize=4096)
def _automatic(kind: _Kind, tokens: int, batch: int, max_seqlen: int) -> str:
    device, dtype, heads, kv_heads, width, gradient = kind
    return select_backend(
        device=device,
        dtype=dtype,
        head_dim=width,
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        batch=batch,
        max_seqlen=min(max_seqlen, tokens),
        gradient=gradient,
    )


@lru_cache(maxsize=4096)
def _say(name: str, how: str, kind: _Kind) -> None:
    device, dtype, heads, kv_heads, width, gradient = kind
    _log.info(
        "encoder attention: backend %s (%s) for %d heads of width %d over %d of k and v, %s on %s%s",
        name,
        how,
        heads,
        width,
        kv_heads,
        dtype,
        device,
        ", with a gradient" if gradient else "",
    )


def forget_notes() -> None:
    """Log every choice anew, for tests."""
    _automatic.cache_clear()
    _say.cache_clear()
