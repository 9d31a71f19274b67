"""The requests by transformers' own calls, one by one: ``model(**inputs)`` for the prompt, then a token at a time.

It is the loop that a user of transformers writes, or that ``generate`` runs, with the time of its phases. Whatever is
done to the model beforehand, compiled or accelerated, the calls are the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmgraph.serving.requests import Request

HUB_PHASES = ("tower", "prefill", "decode")
"""The tower; the rest of the prompts' forward, with the upload of their inputs and the merge; the tokens after them."""


@dataclass(frozen=True, eq=False)
class HubPass:
    """What a pass over all requests made.

    Attributes:
        seconds: Time of each phase; the device is waited for at the end of each.
        features: What the tower gave, call by call: the merged rows, then each deepstack level, ``[rows, hidden]``.
        logits: ``[steps + 1, requests, vocabulary]``: after the prompt, then after each decode step.
        tokens: int64 ``[steps + 1, requests]``, greedy.
    """

    seconds: dict[str, float]
    features: list[Tensor]
    logits: Tensor
    tokens: Tensor


class HubLoop:
    """A model and its requests, ready for any number of passes.

    Args:
        model: transformers' ``Qwen3VLForConditionalGeneration``.
        requests: At least one.
        decode_steps: Greedy steps after each prompt, zero or more.
    """

    def __init__(self, model: Any, requests: Sequence[Request], *, decode_steps: int) -> None:
        self.model = model
        self.decode_steps = decode_steps
        self.images = sum(len(request.images) for request in requests)
        self._inputs = [_inputs(request, model.config.image_token_id) for request in requests]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.lm_head.weight.device
        return device

    @torch.no_grad()
    def run(self, *, forced: Tensor | None = None) -> HubPass:
        """Serve every request once.

        Args:
            forced: int64 ``[steps + 1, requests]``, tokens to decode with in place of the pass's own, so that ways can
                be compared step by step. The result's tokens are the pass's own either way.
        """
        clock = _Clock(self.device)
        rows: list[list[Tensor]] = []
        with self._own_positions(), _watched(self.model.model.visual, clock) as features:
            for number, inputs in enumerate(self._inputs):
                fed = None if forced is None else forced[:, number]
                rows.append(self._serve(inputs, fed, clock))
        logits = torch.stack([torch.stack(each) for each in zip(*rows, strict=True)])
        return HubPass(clock.seconds, features, logits, logits.argmax(-1))

    def _serve(self, inputs: dict[str, Tensor], fed: Tensor | None, clock: _Clock) -> list[Tensor]:
        """One request: its logits ``[vocabulary]`` after the prompt and after each step."""
        from transformers import DynamicCache

        model = self.model
        # Where a prompt has images the model computes its positions; one without would get those of the prompt before.
        model.model.rope_deltas = None
        cache = DynamicCache(config=model.config.text_config)
        within = clock.seconds["tower"]
        with clock.phase("prefill"):
            # No attention mask: alone in its batch, a prompt has no padding, and this is transformers at its fastest.
            moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            out = model(**moved, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[0, -1].argmax(-1)
        clock.seconds["prefill"] -= clock.seconds["tower"] - within
        rows = [out.logits[0, -1]]
        with clock.phase("decode"):
            for step in range(self.decode_steps):
                ids = (token if fed is None else fed[step]).view(1, 1)
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = out.logits[0, -1].argmax(-1)
                rows.append(out.logits[0, -1])
        return rows

    @contextmanager
    def _own_positions(self) -> Iterator[None]:
        """The model remembers by how much positions run ahead of places: what it remembered before comes back."""
        before = self.model.model.rope_deltas
        try:
            yield
        finally:
            self.model.model.rope_deltas = before


def _inputs(request: Request, image_token: int) -> dict[str, Tensor]:
    """What transformers' processor makes of a prompt, on the host: a batch of one."""
    ids = torch.tensor([request.ids], dtype=torch.int64)
    if not request.images:
        return {"input_ids": ids}
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == image_token).to(torch.int32),
        "pixel_values": torch.cat([image.patches for _, image in request.images]),
        "image_grid_thw": torch.tensor([image.grid for _, image in request.images], dtype=torch.int64),
    }


@dataclass
class _Clock:
    """Adds up the time of phases, waiting for the device at both ends of each."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HUB_PHASES, 0.0))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[name] += self.now() - start


@contextmanager
def _watched(visual: Any, clock: _Clock) -> Iterator[list[Tensor]]:
    """Within it the tower's calls are timed, and what they give is put into the list.

    In the place of whatever ``forward`` the tower has by then, so that torch.compile doesn't see it. Not by hooks: with
    them a tower isn't what was accelerated.
    """
    from mmgraph.integrations.transformers.patches import Patches

    features: list[Tensor] = []
    forward = visual.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.phase("tower"):
            output = forward(*args, **kwargs)
        features.extend([output.pooler_output, *output.deepstack_features])
        return output

    patches = Patches()
    patches.replace(visual, "forward", timed)
    try:
        yield features
    finally:
        patches.undo()
