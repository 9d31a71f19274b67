"""Host side of a step of the language model: slots, owners and places of its tokens, moved to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mmgraph.serving.language import LanguageModel, slot_runs
from mmgraph.serving.requests import Chunk, Request
from mmgraph.staging import upload


@dataclass(frozen=True)
class SlotMap:
    """A run of cache slots for each request, one after the other; slot 0 stays the padding's.

    Attributes:
        first: The first slot of each request.
        room: How many each has.
    """

    first: tuple[int, ...]
    room: tuple[int, ...]

    @classmethod
    def for_lengths(cls, lengths: Sequence[int]) -> SlotMap:
        """Slots for requests of these lengths, each with its decoded tokens."""
        first = 1 + np.concatenate([[0], np.cumsum(lengths)])
        return cls(tuple(int(f) for f in first[:-1]), tuple(lengths))

    @property
    def slots(self) -> int:
        """How many slots there are, without the padding's."""
        return sum(self.room)


def prefill_inputs(
    model: LanguageModel,
    requests: Sequence[Request],
    chunks: Sequence[Chunk],
    slots: SlotMap,
    *,
    embeds: Tensor,
    deep_pool: Tensor,
    deep_rows: Tensor,
) -> dict[str, Any]:
    """The inputs of `LanguageModel.prefill` for a step.

    Args:
        model: The language model.
        requests: All requests.
        chunks: The step's chunks, in the order of their rows.
        slots: Where the requests' tokens lie in the cache.
        embeds: ``[tokens, hidden]``, the step's embeddings.
        deep_pool: ``[rows, levels * hidden]``.
        deep_rows: int32 ``[tokens]``.
    """
    firsts = [slots.first[c.request] for c in chunks]
    counts = [c.count for c in chunks]
    ends = [c.prefix + c.count for c in chunks]
    numbers = np.arange(1, len(chunks) + 1)
    positions = np.concatenate(
        [requests[c.request].positions[:, c.prefix : c.prefix + c.count] for c in chunks], axis=1
    )
    cos, sin = model.rotary(positions)
    places = np.concatenate([np.arange(c.prefix, c.prefix + c.count) for c in chunks])
    host: dict[str, np.ndarray[Any, Any]] = {
        "slots": slot_runs([(first + c.prefix, c.count) for first, c in zip(firsts, chunks, strict=True)]),
        "owners": np.repeat(numbers, counts).astype(np.int32),
        "places": places.astype(np.int32),
        "key_slots": slot_runs(list(zip(firsts, ends, strict=True))),
        "key_owners": np.repeat(numbers, ends).astype(np.int32),
        "key_places": np.concatenate([np.arange(end) for end in ends]).astype(np.int32),
        "last": np.cumsum(counts) - 1,
    }
    moved: dict[str, Any] = {name: upload(array, embeds.device) for name, array in host.items()}
    return {"embeds": embeds, "cos": cos, "sin": sin, **moved, "deep_pool": deep_pool, "deep_rows": deep_rows}


def decode_inputs(
    model: LanguageModel, requests: Sequence[Request], slots: SlotMap, *, ids: Tensor, step: int
) -> dict[str, Any]:
    """The inputs of `LanguageModel.decode` for a step of all requests.

    Every prompt's row of slots has the same width, a multiple of 64, which suits the attention kernels' alignment.

    Args:
        model: The language model.
        requests: All requests, their prompts in the cache.
        slots: Where their tokens lie; every one has room for the token of this step.
        ids: int64 ``[requests]``, the tokens.
        step: The step, counted from 0.
    """
    longest = -(-max(slots.room) // 64) * 64
    lengths = [len(r.ids) + step + 1 for r in requests]
    positions = np.array([[r.next_position + step for r in requests]] * 3, dtype=np.int64)
    cos, sin = model.rotary(positions)
    table = np.zeros((len(requests), longest), dtype=np.int64)
    for row, (first, length) in enumerate(zip(slots.first, lengths, strict=True)):
        table[row, :length] = np.arange(first, first + length)
    own = np.array(slots.first, dtype=np.int64) + np.array(lengths) - 1
    device = ids.device
    return {
        "ids": ids,
        "cos": cos,
        "sin": sin,
        "slots": upload(own, device),
        "table": upload(table, device),
        "lengths": upload(np.array(lengths, dtype=np.int32), device),
    }
