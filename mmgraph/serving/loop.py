"""The loop itself: prompts to embeddings to a filled cache to greedy tokens, by functions that are eager or captured.

One pass serves the whole batch: per prefill step plan, encode, assemble, prefill; then the decode steps of all
requests together. The same code runs eagerly and captured; only the three functions differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext, MultimodalInputs, pad_input_tokens
from mmgraph.modality import Modality
from mmgraph.serving.language import KeyValueCache, LanguageModel
from mmgraph.serving.requests import Chunk, Request, schedule
from mmgraph.serving.steps import SlotMap, decode_inputs, prefill_inputs
from mmgraph.serving.tower import VisionTower

PHASES = ("plan", "encode", "assemble", "prefill", "decode")


@dataclass(frozen=True)
class Functions:
    """What a pass calls: the plain functions, or capture managers around them.

    Attributes:
        blocks: `VisionTower.forward_blocks`.
        prefill: `LanguageModel.prefill`.
        decode: `LanguageModel.decode`.
    """

    blocks: Callable[..., Any]
    prefill: Callable[..., Any]
    decode: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a pass made.

    Attributes:
        seconds: Time of each phase; the device is waited for at the end of each.
        embeds: The embeddings of each prefill step, ``[tokens, hidden]``.
        deep: The deepstack rows of each prefill step, ``[rows, levels * hidden]``.
        logits: ``[steps + 1, requests, vocabulary]``: after the prompt, then after each decode step.
        tokens: int64 ``[steps + 1, requests]``, greedy.
        images_used: Images in all prompts.
        images_encoded: Images that went through the tower.
        encode_calls: Calls of the tower.
    """

    seconds: dict[str, float]
    embeds: list[Tensor]
    deep: list[Tensor]
    logits: Tensor
    tokens: Tensor
    images_used: int
    images_encoded: int
    encode_calls: int


@dataclass
class _Clock:
    """Adds up the time of phases, waiting for the device at the end of each."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.settle()
        self.seconds[name] += time.perf_counter() - start


class ServingLoop:
    """A model, a batch of requests and a cache, ready for any number of passes.

    Args:
        model: transformers' ``Qwen3VLForConditionalGeneration``.
        requests: The batch.
        budget: Tokens of a prefill step.
        decode_steps: Greedy steps after the prompts, zero or more.
        backend: The tower's attention backend by name, or None for the library's choice.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        budget: int,
        decode_steps: int,
        backend: str | None = None,
    ) -> None:
        weight = model.lm_head.weight
        self.device: torch.device = weight.device
        self.requests = list(requests)
        self.decode_steps = decode_steps
        self.slots = SlotMap.for_lengths([len(r.ids) + decode_steps for r in requests])
        self.cache = KeyValueCache.create(
            model.config.text_config, self.slots.slots, device=weight.device, dtype=weight.dtype
        )
        self.tower = VisionTower(model.model.visual, backend=backend)
        self.language = LanguageModel(model, self.cache)
        self.schedule = schedule([len(r.ids) for r in requests], budget)
        self._embedding = model.model.language_model.embed_tokens
        self._layout = _DeepstackLayout(self.tower)
        self._hashes: dict[int, int | str | bytes] = {}

    def eager(self) -> Functions:
        """The plain functions."""
        return Functions(self.tower.forward_blocks, self.language.prefill, self.language.decode)

    def examples(self) -> dict[str, dict[str, Any]]:
        """Inputs that a capture manager can begin from, for ``tower``, ``prefill`` and ``decode``.

        They are as small as a call can be, so that every row number in them exists in the smallest bucket too.
        """
        weight = self._embedding.weight
        side = self.tower.merge
        channels = self.tower.visual.patch_embed.proj.weight[0].numel()
        patches = torch.zeros(side**2, channels, device=self.device, dtype=weight.dtype)
        prefill = prefill_inputs(
            self.language,
            self.requests,
            [Chunk(0, 0, 1)],
            self.slots,
            embeds=torch.zeros(1, weight.shape[1], device=self.device, dtype=weight.dtype),
            deep_pool=torch.zeros(
                1, self.tower.levels * self.tower.width, device=self.device, dtype=weight.dtype
            ),
            deep_rows=torch.full((1,), -1, device=self.device, dtype=torch.int32),
        )
        ids = torch.zeros(len(self.requests), device=self.device, dtype=torch.int64)
        return {
            "tower": self.tower.prepare(patches, [(1, side, side)]),
            "prefill": prefill,
            "decode": decode_inputs(self.language, self.requests, self.slots, ids=ids, step=0),
        }

    @torch.no_grad()
    def run(self, functions: Functions, *, forced: Tensor | None = None) -> PassResult:
        """Serve the batch once, from an empty cache and with nothing encoded.

        Args:
            functions: What to call.
            forced: int64 ``[steps + 1, requests]``, tokens to decode with in place of the pass's own, so that passes
                can be compared step by step. The result's tokens are the pass's own either way.
        """
        self.cache.reset()
        encoder = _Encoder(self.tower, functions.blocks)
        embedder = MultimodalEmbedder()
        media = [self._media(request) for request in self.requests]
        ids = [pad_input_tokens(list(r.ids), m) for r, m in zip(self.requests, media, strict=True)]
        clock = _Clock(self.device)
        clock.settle()
        embeds: list[Tensor] = []
        deep: list[Tensor] = []
        first: list[Tensor | None] = [None] * len(self.requests)
        for chunks in self.schedule:
            rows, pool, deep_rows = self._embed(chunks, ids, media, embedder, encoder, clock)
            embeds.append(rows)
            deep.append(pool)
            with clock.phase("prefill"):
                inputs = prefill_inputs(
                    self.language,
                    self.requests,
                    chunks,
                    self.slots,
                    embeds=rows,
                    deep_pool=pool,
                    deep_rows=deep_rows,
                )
                logits = functions.prefill(**inputs)["logits"]
            for row, chunk in enumerate(chunks):
                if chunk.prefix + chunk.count == len(self.requests[chunk.request].ids):
                    first[chunk.request] = logits[row]
        steps = [torch.stack([one for one in first if one is not None])]
        with clock.phase("decode"):
            for step in range(self.decode_steps):
                tokens = steps[-1].argmax(-1) if forced is None else forced[step]
                inputs = decode_inputs(self.language, self.requests, self.slots, ids=tokens, step=step)
                steps.append(functions.decode(**inputs)["logits"])
        stacked = torch.stack(steps)
        return PassResult(
            seconds=clock.seconds,
            embeds=embeds,
            deep=deep,
            logits=stacked,
            tokens=stacked.argmax(-1),
            images_used=sum(len(r.images) for r in self.requests),
            images_encoded=encoder.images,
            encode_calls=encoder.calls,
        )

    def _embed(
        self,
        chunks: Sequence[Chunk],
        ids: Sequence[list[int]],
        media: Sequence[MultimodalInputs],
        embedder: MultimodalEmbedder,
        encoder: _Encoder,
        clock: _Clock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A step's embeddings ``[tokens, hidden]``, its deepstack rows, and the row of each token or -1."""
        flat = [i for c in chunks for i in ids[c.request][c.prefix : c.prefix + c.count]]
        input_ids = torch.tensor(flat, dtype=torch.int64).to(self.device)
        encoders = {Modality.IMAGE: EncoderSpec(encoder, deepstack=True, deepstack_form="sparse")}
        with clock.phase("plan"):
            ctx = MultimodalForwardContext(
                [media[c.request] for c in chunks], [c.prefix for c in chunks], [c.count for c in chunks]
            )
            plan = embedder.plan(ctx, len(flat))
        with clock.phase("encode"):
            embedder.encode(plan, encoders, self._layout, device=self.device, width=self.tower.width)
        with clock.phase("assemble"):
            embeds, kwargs = embedder.assemble(plan, input_ids, self._embedding, encoders, self._layout)
            if embeds is None:
                embeds = self._embedding(input_ids)
                pool = embeds.new_zeros(0, self.tower.levels * self.tower.width)
                return embeds, pool, torch.full_like(input_ids, -1, dtype=torch.int32)
        rows = kwargs["deepstack_rows"]
        return embeds, rows.pool, rows.row_map

    def _media(self, request: Request) -> MultimodalInputs:
        """Fresh items of a request, with nothing encoded; the hash of a photo is made once."""
        items = []
        for start, image in request.images:
            item = MultimodalDataItem(
                Modality.IMAGE,
                offsets=[(start, start + image.tokens - 1)],
                hash=self._hashes.get(id(image)),
                feature=image.patches,
                model_specific_data={"grid": image.grid},
            )
            self._hashes[id(image)] = item.ensure_hash()
            items.append(item)
        return MultimodalInputs(items)


class _Encoder:
    """The tower as the embedder calls it: items in, main and deepstack rows side by side out. It counts."""

    def __init__(self, tower: VisionTower, blocks: Callable[..., Any]) -> None:
        self._tower = tower
        self._blocks = blocks
        self.images = 0
        self.calls = 0

    def __call__(self, items: list[MultimodalDataItem]) -> Tensor:
        self.images += len(items)
        self.calls += 1
        patches = torch.cat([item.feature for item in items])
        inputs = self._tower.prepare(patches, [item.model_specific_data["grid"] for item in items])
        rows = self._blocks(**inputs)
        return torch.cat([rows["main"], *rows["deep"]], dim=1)


class _DeepstackLayout:
    """Tells the embedder where the deepstack rows lie in what the encoder returns."""

    def __init__(self, tower: VisionTower) -> None:
        self.deepstack_visual_indexes = list(tower.visual.deepstack_visual_indexes)
        self._width = tower.width

    def separate_deepstack_embeds(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, : self._width], rows[:, self._width :]
