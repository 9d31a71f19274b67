"""mmgraph's attention in transformers' own registry, by a name that its towers take as variable-length attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mmgraph.errors import TowerError
from mmgraph.ops import varlen_attention

__all__ = ["ATTENTION_NAME", "TowerAttention", "attention_forward", "register_attention"]

#: transformers hands sequence boundaries to what has "flash" in its name, and cuts into single sequences for all else.
ATTENTION_NAME = "mmgraph_flash"

#: The backend of the tower that runs in this thread; None for the library's choice.
_BACKEND: ContextVar[str | None] = ContextVar("mmgraph_attention_backend", default=None)


def register_attention() -> str:
    """Registers the attention with transformers; does nothing the second time. Gives its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    if ATTENTION_NAME not in AttentionInterface():
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    return ATTENTION_NAME


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An encoder's attention, as transformers calls it.

    Args:
        module: The attention module; its ``is_causal`` counts where none is given.
        query: ``[batch, heads, length, head_dim]``.
        key: ``[batch, kv_heads, length, head_dim]``.
        value: Likewise.
        attention_mask: None: encoders that need a mask aren't served.
        scaling: Of the scores; None for ``head_dim ** -0.5``.
        dropout: 0.
        is_causal: Whether rows see only those before them.
        cu_seq_lens_q: int32 ``[sequences + 1]`` over all rows of the batch one behind the other, or None: each row of
            the batch is a sequence.
        cu_seq_lens_k: The same.
        max_length_q: The longest sequence; needed beside ``cu_seq_lens_q``.
        max_length_k: The same.
        **kwargs: What transformers passes on; options that change the result are refused.

    Returns:
        ``[batch, length, heads, head_dim]``, and None for the weights.

    Raises:
        TowerError: A mask, dropout or another option that this attention doesn't have.
    """
    asked = {name: kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux", "position_bias")}
    refused = [name for name, given in asked.items() if given is not None]
    if attention_mask is not None:
        refused.append("attention_mask")
    if dropout:
        refused.append("dropout")
    if kwargs.get("output_attentions"):
        refused.append("output_attentions")
    if refused:
        raise TowerError(
            f"mmgraph's attention has no {', '.join(refused)}: restore(model), or set another attention implementation"
        )
    batch, _, length, _ = query.shape
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if cu_seq_lens_q is None:
        cu_seqlens = uniform_offsets(batch, length, query.device)
        longest = length
    else:
        cu_seqlens = cu_seq_lens_q
        if max_length_q is None:
            raise TowerError("cu_seq_lens_q needs max_length_q, the longest sequence as a Python int")
        longest = int(max_length_q)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    mixed = varlen_attention(q, k, v, cu_seqlens, longest, scale=scaling, causal=causal, backend=_BACKEND.get())
    return mixed.view(batch, length, *mixed.shape[1:]), None


def uniform_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """Offsets of equally long sequences, made on the device: int32 ``[batch + 1]``."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


class TowerAttention:
    """Gives a tower mmgraph's attention for as long as a function runs; for all other calls it stays as it is.

    transformers looks the attention up in the tower's configuration at each call, so that the two kinds of calls take
    turns: calls of one tower wait for each other while Python runs, not while the device works or a graph is replayed.

    Args:
        tower: The module whose parts call the attention.
        backend: The attention backend, or None for the library's choice.
    """

    def __init__(self, tower: torch.nn.Module, backend: str | None = None) -> None:
        # Parts share one configuration, or have one each.
        self._configs: list[Any] = []
        for config in map(_config_of, tower.modules()):
            known = any(config is one for one in self._configs)
            if not known and hasattr(config, "_attn_implementation_internal"):
                self._configs.append(config)
        self._backend = backend
        self._turn = threading.RLock()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Within it the tower has mmgraph's attention."""
        name = register_attention()
        with self._turn:
            before = [config._attn_implementation_internal for config in self._configs]
            backend = _BACKEND.set(self._backend)
            try:
                for config in self._configs:
                    config._attn_implementation_internal = name
                yield
            finally:
                _BACKEND.reset(backend)
                for config, implementation in zip(self._configs, before, strict=True):
                    config._attn_implementation_internal = implementation

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within it no other thread gives the tower mmgraph's attention."""
        with self._turn:
            yield


def _config_of(module: torch.nn.Module) -> Any:
    return getattr(module, "config", None)
