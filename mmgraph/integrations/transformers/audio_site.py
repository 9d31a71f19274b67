"""Qwen2-Audio's encoder: clips of one length, of which each has its own number of real frames.

transformers builds a mask of frames by frames for each clip. Here each clip is two sequences of the variable-length
attention, its real frames and its padding, so that neither sees the other: real frames come out as with the mask.
What padding comes out as is not the same, and nothing reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import CapturedEncoder
from mmgraph.integrations.transformers.fixed_parts import clip_input, known_tower
from mmgraph.integrations.transformers.fixed_site import FixedRunner
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.integrations.transformers.runners import Unserved
from mmgraph.integrations.transformers.sites import Options
from mmgraph.towers.fixed import FixedInput, unstacked

__all__ = ["AudioSite", "clip_offsets"]

#: Real frames behind the convolutions, int32 ``[clips]``, of the clips that the model's forward is at.
_LENGTHS: ContextVar[Tensor | None] = ContextVar("mmgraph_clip_lengths", default=None)


class AudioSite:
    """Replaces the forward of Qwen2-Audio's encoder, which learns the clips' lengths from the model around it.

    Args:
        name: The model's dotted name.
        model: ``Qwen2AudioModel``.
        options: What was asked for.

    Raises:
        UnsupportedModelError: The model isn't built as known.
    """

    def __init__(self, name: str, model: Any, options: Options) -> None:
        self.family, self.model = type(model).__name__, model
        self.name = f"{name}.audio_tower" if name else "audio_tower"
        self.tower = known_tower(model, "audio_tower", "Qwen2AudioEncoder")
        self._clips = clip_input(self.tower)
        self._frames = int(part(self.tower, "config.max_source_positions"))
        self._forward: Callable[..., Any] = self.tower.forward
        self.encoder: CapturedEncoder | None = None
        inputs = {**self._clips, "lengths": FixedInput((), torch.int32)}
        self.runner = FixedRunner(
            self.name, self.tower, (self.tower,), self._run, inputs, ("last",), "clips", options
        )

    def install(self, patches: Patches) -> None:
        """See `Site`."""
        self.runner.capture()
        self.encoder = self.runner.encoder
        patches.replace(self.tower, "forward", self.forward)
        patches.replace(self.model, "forward", _with_lengths(self.model.forward))

    def close(self) -> None:
        """See `Site`."""
        self.runner.close()
        self.encoder = None

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """As the encoder's own forward.

        Args:
            input_features: ``[clips, mel bins, frames]``.
            attention_mask: transformers' mask; the lengths that it was made of are known.
            **kwargs: What the encoder's own forward takes; what the fast way hasn't got runs the encoder's own.

        Returns:
            transformers' record, whose ``last_hidden_state`` is that of transformers in all real frames.
        """
        if torch.compiler.is_compiling():
            return self._forward(input_features, attention_mask, **kwargs)
        lengths = _LENGTHS.get()
        try:
            return self._served(input_features, attention_mask, lengths, kwargs)
        except Unserved as reason:
            why = str(reason)
        return self.runner.as_it_was(why, self._original, input_features, attention_mask, **kwargs)

    def _original(self, clips: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        from transformers.masking_utils import create_bidirectional_mask

        if mask is not None and mask.ndim == 2:
            # The model made it while another thread had given the encoder mmgraph's attention, or it is of the flash
            # attention's kind, which comes out of this as it went in.
            embeds = clips.new_zeros(
                clips.shape[0], mask.shape[1], 1, dtype=self._clips["input_features"].dtype
            )
            mask = create_bidirectional_mask(
                config=self.tower.config, inputs_embeds=embeds, attention_mask=mask
            )
        return self._forward(clips, attention_mask=mask, **kwargs)

    def _served(
        self, clips: Tensor, mask: Tensor | None, lengths: Tensor | None, kwargs: dict[str, Any]
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        self.runner.check(kwargs, self.tower.config, ())
        if mask is not None and (lengths is None or lengths.shape[0] != clips.shape[0]):
            raise Unserved("it was given a mask by another caller than the model")
        if mask is None or lengths is None:
            lengths = torch.full((clips.shape[0],), self._frames, dtype=torch.int32, device=clips.device)
        found = self.runner(unstacked({"input_features": clips, "lengths": lengths}))
        return BaseModelOutput(last_hidden_state=found["last"])

    def _run(self, input_features: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        offsets = clip_offsets(lengths, self._frames)
        longest = self._frames
        record = type(self.tower).forward(
            self.tower,
            input_features,
            attention_mask=None,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=longest,
            max_length_k=longest,
        )
        return {"last": record.last_hidden_state}


def clip_offsets(lengths: Tensor, frames: int) -> Tensor:
    """Offsets of two sequences for each clip: its real frames, and the padding behind them.

    Args:
        lengths: int32 ``[clips]``.
        frames: Of each clip, real or not.

    Returns:
        int32 ``[2 * clips + 1]``.
    """
    starts = torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device) * frames
    ends = starts + lengths.clamp(0, frames)
    whole = lengths.new_full((1,), lengths.shape[0] * frames)
    return torch.cat([torch.stack([starts, ends], 1).flatten(), whole])


def _with_lengths(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward, which lets the encoder know the clips' lengths as it computes them itself."""
    signature = inspect.signature(forward)

    def known(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        try:
            mask = signature.bind(*args, **kwargs).arguments.get("feature_attention_mask")
        except TypeError:
            return forward(*args, **kwargs)  # which says what is wrong with them
        frames = None if mask is None else mask.sum(-1)
        token = _LENGTHS.set(None if frames is None else ((frames - 1) // 2 + 1).to(torch.int32))
        try:
            return forward(*args, **kwargs)
        finally:
            _LENGTHS.reset(token)

    return known
