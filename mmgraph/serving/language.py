"""The language layers over a flat key-value cache, as two functions that a graph can hold: prefill and decode.

Both run transformers' own weights and modules. The cache is a fixed block of slots for each layer; slot 0
belongs to padding, is always zero, and is never one that a real row reads. Which slots a row writes and reads
comes in as tensors, so that nothing is decided, and nothing waited for, inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mmgraph.capture import BucketGrid, CaptureManager, rows
from mmgraph.ops import deepstack_add
from mmgraph.serving.errors import ModelError
from mmgraph.serving.positions import Ints, text_rotary
from mmgraph.serving.tower import rotate
from mmgraph.staging import upload

# Not cuDNN's: it builds a plan for every new shape, which eager passes over chunks of many lengths would measure.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LanguageOutput(TypedDict):
    """``logits``, one row for each request of the batch, ``[requests, vocabulary]``."""

    logits: Tensor


@dataclass(frozen=True, eq=False)
class KeyValueCache:
    """Keys and values of every layer, each ``[slots + 1, kv_heads, head_dim]``; slot 0 is the padding's."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def create(cls, config: Any, slots: int, *, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """A cache of zeros.

        Args:
            config: The text configuration.
            slots: Tokens that it holds.
            device: Where it lies.
            dtype: Its dtype.
        """
        shape = (slots + 1, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            [torch.zeros(shape, device=device, dtype=dtype) for _ in layers],
            [torch.zeros(shape, device=device, dtype=dtype) for _ in layers],
        )

    def reset(self) -> None:
        """Back to zeros, in place: graphs that use the cache stay good."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class LanguageModel:
    """The language half of a Qwen3-VL over a flat cache.

    Args:
        model: transformers' ``Qwen3VLForConditionalGeneration``. Its weights are used where they are, never
            copied.
        cache: The cache; both functions write into it.

    Raises:
        ModelError: The model's rotary embedding changes with the length, which a fixed table can't follow.
    """

    def __init__(self, model: Any, cache: KeyValueCache) -> None:
        self.text = model.model.language_model
        self.head = model.lm_head
        self.cache = cache
        self.config = self.text.config
        self.levels = len(model.model.visual.deepstack_visual_indexes)
        rotary = self.text.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope"):
            raise ModelError(
                f"the model's rotary type {rotary.rope_type!r} changes with the prompt's length: "
                "this loop takes models with a fixed one, such as 'default' or 'yarn'"
            )
        self._sections: list[int] = list(rotary.mrope_section)
        self._scaling = float(rotary.attention_scaling)
        self._inv_freq = rotary.inv_freq.detach().to("cpu", torch.float32).numpy().copy()

    def rotary(self, positions: Ints) -> tuple[Tensor, Tensor]:
        """Cosine and sine for ``[3, tokens]`` positions, ``[tokens, head_dim // 2]`` beside the weights."""
        cos, sin = text_rotary(
            positions, inv_freq=self._inv_freq, sections=self._sections, scaling=self._scaling
        )
        weight = self.text.embed_tokens.weight
        return upload(cos, weight.device).to(weight.dtype), upload(sin, weight.device).to(weight.dtype)

    def prefill(
        self,
        embeds: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        owners: Tensor,
        places: Tensor,
        key_slots: Tensor,
        key_owners: Tensor,
        key_places: Tensor,
        last: Tensor,
        deep_pool: Tensor,
        deep_rows: Tensor,
    ) -> LanguageOutput:
        """Run packed chunks of several prompts, each after what the cache holds of its own prompt.

        Args:
            embeds: ``[tokens, hidden]``.
            cos: ``[tokens, head_dim // 2]`` in the model's dtype.
            sin: ``[tokens, head_dim // 2]``.
            slots: int64 ``[tokens]``, where each row's key and value go; 0 for padding.
            owners: int32 ``[tokens]``, the row's chunk, counted from 1; 0 for padding.
            places: int32 ``[tokens]``, the row's place in its prompt.
            key_slots: int64 ``[context]``, the slots of all prompts up to their chunk's end; 0 for padding.
            key_owners: int32 ``[context]``, like ``owners``.
            key_places: int32 ``[context]``, like ``places``.
            last: int64 ``[chunks]``, the row of each chunk's last token.
            deep_pool: ``[rows, levels * hidden]``, deepstack rows.
            deep_rows: int32 ``[tokens]``, the deepstack row of each row; -1 for none.
        """
        mask = (owners[:, None] == key_owners) & (key_places <= places[:, None])
        # A padding row sees everything, so that its softmax is finite; nothing ever reads what it computes.
        mask = mask | (owners == 0)[:, None]
        padding = (slots == 0)[:, None, None]
        hidden = embeds
        for index, layer in enumerate(self.text.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            keys, values = self._write(index, slots, k.masked_fill(padding, 0), v.masked_fill(padding, 0))
            mixed = _packed_attention(q, keys[key_slots], values[key_slots], mask, layer.self_attn.scaling)
            hidden = self._finish(layer, hidden, mixed)
            if index < self.levels:
                hidden = deepstack_add(hidden, deep_pool, deep_rows, index)
        logits: Tensor = self.head(self.text.norm(hidden[last]))
        return {"logits": logits}

    def decode(
        self, ids: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lengths: Tensor
    ) -> LanguageOutput:
        """One token for each of several prompts.

        Args:
            ids: int64 ``[batch]``, within the vocabulary.
            cos: ``[batch, head_dim // 2]`` in the model's dtype.
            sin: ``[batch, head_dim // 2]``.
            slots: int64 ``[batch]``, where each row's key and value go; 0 for padding.
            table: int64 ``[batch, longest]``, the slots of each prompt in order; anything beyond its length.
            lengths: int32 ``[batch]``, tokens of each prompt with this one.
        """
        padding = (slots == 0)[:, None, None]
        mask = (self._count(table) < lengths.clamp(min=1)[:, None])[:, None, None, :]
        hidden = self.text.embed_tokens(ids)
        for index, layer in enumerate(self.text.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            keys, values = self._write(index, slots, k.masked_fill(padding, 0), v.masked_fill(padding, 0))
            mixed = _paged_attention(q, keys[table], values[table], mask, layer.self_attn.scaling)
            hidden = self._finish(layer, hidden, mixed)
        logits: Tensor = self.head(self.text.norm(hidden))
        return {"logits": logits}

    def prefill_manager(self, grid: BucketGrid) -> CaptureManager:
        """A capture manager around `prefill`; the grid names tokens, context, chunks and visual."""
        per_token = ("embeds", "cos", "sin", "slots", "owners", "places")
        inputs: dict[str, Any] = {name: rows("tokens") for name in per_token}
        inputs |= {name: rows("context") for name in ("key_slots", "key_owners", "key_places")}
        inputs |= {"last": rows("chunks"), "deep_pool": rows("visual"), "deep_rows": rows("tokens", fill=-1)}
        return CaptureManager(self.prefill, inputs=inputs, outputs={"logits": rows("chunks")}, buckets=grid)

    def decode_manager(self, grid: BucketGrid) -> CaptureManager:
        """A capture manager around `decode`; the grid names ``batch``."""
        names = ("ids", "cos", "sin", "slots", "table", "lengths")
        return CaptureManager(
            self.decode,
            inputs={name: rows("batch") for name in names},
            outputs={"logits": rows("batch")},
            buckets=grid,
        )

    def _project(self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (hidden.shape[0], -1, attn.head_dim)
        q = attn.q_norm(attn.q_proj(normed).view(shape))
        k = attn.k_norm(attn.k_proj(normed).view(shape))
        return rotate(q, cos, sin), rotate(k, cos, sin), attn.v_proj(normed).view(shape)

    def _write(self, index: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[index], self.cache.values[index]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return keys, values

    def _finish(self, layer: Any, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + layer.self_attn.o_proj(mixed)
        result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return result

    def _count(self, table: Tensor) -> Tensor:
        return torch.arange(table.shape[1], device=table.device)


def _packed_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``[tokens, heads, d]`` over ``[context, kv_heads, d]``, mask ``[tokens, context]``, heads flattened."""
    tokens, heads, width = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = q.view(tokens, kv_heads, group, width).permute(2, 1, 0, 3)
    k = keys.transpose(0, 1).expand(group, -1, -1, -1)
    v = values.transpose(0, 1).expand(group, -1, -1, -1)
    with sdpa_kernel(_KERNELS):
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 1, 0, 3).reshape(tokens, heads * width)


def _paged_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``[batch, heads, d]`` over ``[batch, longest, kv_heads, d]``: the heads of a group are its queries."""
    batch, heads, width = q.shape
    kv_heads = keys.shape[2]
    grouped = q.view(batch, kv_heads, heads // kv_heads, width)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    with sdpa_kernel(_KERNELS):
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads * width)


def slot_runs(runs: Sequence[tuple[int, int]]) -> Ints:
    """The slots of several runs ``(first, count)``, one after the other, int64."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs]).astype(np.int64)
