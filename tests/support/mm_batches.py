"""Random forward batches from a seed, and what must come of them, written down position by position.

The oracle shares no code with the plan: it walks the prompt positions of each chunk and searches the items of the
request for the one that covers the position.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmgraph.embedder import EncoderSpec
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

VOCABULARY = 23
HIDDEN = 5
LEVELS = 2


class Handle:
    """A feature that lies elsewhere; says what was done with it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.consumed = 0
        self.released = 0

    def consume(self) -> torch.Tensor:
        if self.consumed:
            raise RuntimeError("consumed twice")
        self.consumed += 1
        return self.tensor

    def release(self) -> None:
        self.released += 1


class Model:
    """Main and deep rows lie side by side."""

    deepstack_visual_indexes = (3, 7)

    def separate_deepstack_embeds(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, :HIDDEN], rows[:, HIDDEN:]


class Encoder:
    """Gives each item's feature back, negated: exact in every dtype. Remembers its calls."""

    def __init__(self, width: int = HIDDEN, dtype: torch.dtype = torch.float32) -> None:
        self.width = width
        self.dtype = dtype
        self.calls: list[list[MultimodalDataItem]] = []

    def __call__(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        self.calls.append(list(items))
        rows = [item.feature.reshape(-1, self.width).to(self.dtype) for item in items]
        return -torch.cat(rows)


def feature_for(modality: Modality, variant: int, tokens: int, width: int = HIDDEN) -> torch.Tensor:
    """The contents that a modality, a variant and a size stand for."""
    generator = torch.Generator().manual_seed(
        hash((modality.value == "audio", modality.value == "video", variant, tokens))
    )
    return torch.randn(tokens, width, generator=generator)


@dataclass
class Batch:
    input_ids: torch.Tensor
    ctx: MultimodalForwardContext
    embedding: torch.nn.Embedding
    encoders: dict[Modality, EncoderSpec]
    deepstack: frozenset[Modality] = frozenset()
    contents: dict[MultimodalDataItem, torch.Tensor] = field(default_factory=dict)
    precomputed: dict[MultimodalDataItem, torch.Tensor] = field(default_factory=dict)

    def touched(self) -> list[tuple[int, MultimodalDataItem, int]]:
        """For each covered flat row, in order: the row, the item of the request, and the item's row."""
        found = []
        base = 0
        for inputs, prefix, length in zip(
            self.ctx.mm_inputs, self.ctx.extend_prefix_lens, self.ctx.extend_seq_lens, strict=False
        ):
            for step in range(length):
                for item in inputs.mm_items if inputs is not None else ():
                    place = 0
                    for start, end in item.offsets if item is not None else ():
                        if start <= prefix + step <= end:
                            found.append((base + step, item, place + prefix + step - start))
                        place += end - start + 1
            base += max(length, 0)
        return found

    def canonicals(self) -> dict[Any, MultimodalDataItem]:
        """For each key, in first-touch order, the item whose rows are used."""
        chosen: dict[Any, MultimodalDataItem] = {}
        for _, item, _ in self.touched():
            key = (item.modality, item.hash) if item.hash is not None else id(item)
            before = chosen.setdefault(key, item)
            if before not in self.precomputed and item in self.precomputed:
                chosen[key] = item
        return chosen

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and dense deepstack rows, row by row."""
        weight = self.embedding.weight.detach()
        ids = self.input_ids.tolist()
        embeds = torch.stack([weight[min(max(i, 0), VOCABULARY - 1)] for i in ids]) if ids else weight[:0]
        deep = torch.zeros(len(ids), HIDDEN * LEVELS, dtype=weight.dtype)
        chosen = self.canonicals()
        for row, item, place in self.touched():
            key = (item.modality, item.hash) if item.hash is not None else id(item)
            source = chosen[key]
            if source in self.precomputed:
                rows = self.precomputed[source]
            else:
                rows = -self.contents[source].to(self.encoders[source.modality].fn.dtype)
            embeds[row] = rows[place, :HIDDEN].to(weight.dtype)
            if item.modality in self.deepstack:
                deep[row] = rows[place, HIDDEN:].to(weight.dtype)
        return embeds, deep


def random_batch(
    seed: int, *, device: str = "cpu", deepstack: bool = True, requests: int | None = None
) -> Batch:
    """Make a batch: chunks, several modalities, multi-span items, twins, precomputed rows, decode rows."""
    rng = random.Random(seed)
    torch_rng = torch.Generator().manual_seed(seed)
    deep = frozenset(m for m in Modality if deepstack and rng.random() < 0.4)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch_rng).to(device, rng.choice(dtypes))
    embedding = torch.nn.Embedding.from_pretrained(weight)
    encoders = {
        m: EncoderSpec(
            Encoder(HIDDEN * (1 + LEVELS) if m in deep else HIDDEN, rng.choice(dtypes)), deepstack=m in deep
        )
        for m in Modality
    }
    batch = Batch(torch.empty(0), MultimodalForwardContext(), embedding, encoders, deep)
    inputs: list[MultimodalInputs | None] = []
    prefixes, lengths, ids = [], [], []
    count = rng.randrange(8) if requests is None else requests
    for _ in range(count):
        prompt = rng.randrange(1, 60)
        inputs.append(_random_inputs(rng, batch, prompt) if rng.random() < 0.85 else None)
        prefixes.append(rng.choice([0, rng.randrange(prompt)]))
        lengths.append(
            rng.choice([0, -1, prompt - prefixes[-1], *[rng.randrange(prompt - prefixes[-1] + 1)] * 3])
        )
        ids += [rng.randrange(VOCABULARY) for _ in range(max(lengths[-1], 0))]
    for _ in range(rng.randrange(3)):
        inputs.append(_random_inputs(rng, batch, 20) if rng.random() < 0.5 else None)
        ids += [rng.randrange(VOCABULARY)]
    for index in range(len(ids)):
        if rng.random() < 0.1:
            ids[index] = rng.choice([-200, VOCABULARY, 1_000_000, 2**31 - 2])
    batch.input_ids = torch.tensor(ids, dtype=rng.choice([torch.int32, torch.int64]), device=device)
    batch.ctx = MultimodalForwardContext(inputs, prefixes, lengths)
    for item, rows in batch.contents.items():
        if rng.random() < 0.15:
            batch.precomputed[item] = torch.randn(rows.shape, generator=torch_rng)
            item.encoded = batch.precomputed[item][:, :HIDDEN].clone()
            if item.modality in deep:
                item.encoded_deepstack = batch.precomputed[item][:, HIDDEN:].clone()
            if rng.random() < 0.5:
                item.feature = None
    return batch


def _random_inputs(rng: random.Random, batch: Batch, prompt: int) -> MultimodalInputs:
    spans = []
    position = rng.randrange(4)
    while position < prompt:
        end = min(position + rng.randrange(5), prompt - 1)
        spans.append((position, end))
        position = end + 1 + rng.randrange(4)
    owners: list[list[tuple[int, int]]] = [[] for _ in range(max(1, len(spans) // rng.randrange(1, 4)))]
    for span in spans:
        rng.choice(owners).append(span)
    items: list[MultimodalDataItem | None] = []
    for own in owners:
        tokens = sum(end - start + 1 for start, end in own)
        modality, variant = rng.choice(list(Modality)), rng.randrange(3)
        seen = [item for item in batch.contents if item.num_tokens == tokens and item.hash is not None]
        if seen and rng.random() < 0.7:  # a twin, or the same hash in another modality
            modality = rng.choice([modality, *[seen[0].modality] * 3])
            variant = (seen[0].hash + tokens) // 1000
        hash = None if rng.random() < 0.2 else variant * 1000 - tokens
        width = HIDDEN * (1 + LEVELS) if modality in batch.deepstack else HIDDEN
        rows = feature_for(modality, variant, tokens, width)
        item = MultimodalDataItem(modality, own, hash=hash, feature=_dressed(rng, rows))
        if tokens:
            batch.contents[item] = rows
        items.append(item)
    items += [None] * rng.randrange(2)
    rng.shuffle(items)
    return MultimodalInputs(items)


def _dressed(rng: random.Random, rows: torch.Tensor) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return rows.numpy().copy()
    if kind == 1:
        return Handle(rows.clone())
    if kind == 2:
        return rows.t().contiguous().t()
    if kind == 3:
        array = rows.numpy().copy()
        array.setflags(write=False)
        return array
    return rows.clone()


def simple_item(
    offsets: list[tuple[int, int]], modality: Modality = Modality.IMAGE, *, variant: int = 0, **fields: Any
) -> MultimodalDataItem:
    """An item with a feature whose rows the encoder above gives back."""
    tokens = sum(end - start + 1 for start, end in offsets)
    fields.setdefault("feature", feature_for(modality, variant, tokens))
    return MultimodalDataItem(modality, offsets, **fields)


def one_request(items: list[MultimodalDataItem], length: int) -> MultimodalForwardContext:
    """A batch of one request whose chunk is the whole prompt."""
    return MultimodalForwardContext([MultimodalInputs(items)], [0], [length])


def image_encoder() -> dict[Modality, EncoderSpec]:
    """Encoders for images alone."""
    return {Modality.IMAGE: EncoderSpec(Encoder())}


def as_array(values: Any) -> np.ndarray:
    """Any integers as an int64 array."""
    return np.asarray(values, dtype=np.int64)
