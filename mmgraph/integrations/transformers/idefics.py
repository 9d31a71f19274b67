"""Idefics3 and SmolVLM: tiles of one size, of which some may be black, and masks that say what of them is padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmgraph.integrations.transformers.fixed_parts import (
    PIXELS,
    Answer,
    Encode,
    FixedParts,
    StandIn,
    image_input,
    known_tower,
)
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.integrations.transformers.runners import Unserved
from mmgraph.towers.fixed import FixedInput, FixedItem

__all__ = ["idefics"]


def idefics(tower_class: str, keeps_one: bool) -> Callable[[Any], FixedParts]:
    """What reads the parts of these models.

    Args:
        tower_class: The name of the tower's class.
        keeps_one: Whether the first image stays where all are black.
    """

    def build(model: Any) -> FixedParts:
        tower, connector = known_tower(model, "vision_model", tower_class), part(model, "connector")
        inputs = image_input(tower)
        return FixedParts(
            tower,
            "vision_model",
            (tower, connector),
            inputs,
            _unmasked(tower, connector, inputs[PIXELS]),
            {"get_image_features": _wholeimages_of(model, int(part(tower, "config.patch_size")), keeps_one)},
            takes=frozenset({PIXELS, "pixel_attention_mask"}),
        )

    return build


def _unmasked(tower: Any, connector: Any, image: FixedInput) -> Callable[[Tensor], dict[str, Tensor]]:
    """Tower and connector for images without padding, whose positions are the same for all."""
    embeddings, encoder = part(tower, "embeddings"), part(tower, "encoder")
    projection, table = part(embeddings, "patch_embedding"), part(embeddings, "position_embedding")
    norm = part(tower, "post_layernorm")
    positions = _positions(embeddings, table, image, int(part(tower, "config.patch_size")))

    def run(pixel_values: Tensor) -> dict[str, Tensor]:
        hidden = projection(pixel_values).flatten(2).transpose(1, 2) + table(positions)
        last = norm(encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state)
        return {"rows": connector(last), "last": last}

    return run


def _positions(embeddings: Any, table: Any, image: FixedInput, patch: int) -> Tensor:
    """The rows of the position table that transformers takes for an image without padding: ``[1, patches]``."""
    taken: list[Tensor] = []
    channels, height, width = image.shape
    like = {"dtype": image.dtype, "device": table.weight.device}

    def note(positions: Tensor) -> Tensor:
        taken.append(positions)
        return torch.zeros(*positions.shape, 1, **like)

    def flat(pixels: Tensor) -> Tensor:
        return torch.zeros(1, 1, height // patch, width // patch, **like)

    stand_in = StandIn(embeddings, patch_embedding=flat, position_embedding=note)
    mask = torch.ones(1, height // patch, width // patch, dtype=torch.bool, device=table.weight.device)
    type(embeddings).forward(
        stand_in, pixel_values=torch.zeros(1, channels, height, width, **like), patch_attention_mask=mask
    )
    return taken[0]


def _wholeimages_of(model: Any, patch: int, keeps_one: bool) -> Answer:
    """Leaves out black images, as transformers does, and serves those without padding.

    Which images are black only the device knows: two flags for each image are read back, once.
    """

    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        pixels, mask = given[PIXELS], given.get("pixel_attention_mask")
        if not isinstance(pixels, Tensor) or pixels.ndim != 5:
            raise Unserved("pixel_values aren't [prompts, images, channels, height, width]")
        images = pixels.to(dtype=model.dtype).flatten(0, 1)
        real = (images != 0).flatten(1).any(1)
        flags = [real, real.new_ones(real.shape) if mask is None else _unpadded(mask.flatten(0, 1), patch)]
        shown, whole = torch.stack(flags).tolist()
        kept = [index for index, one in enumerate(shown) if one]
        if not kept and keeps_one:
            kept = [0]
        if not all(whole[index] for index in kept):
            raise Unserved("an image is padded")
        found = encode([FixedItem({PIXELS: images[index]}) for index in kept])
        record = BaseModelOutput(last_hidden_state=found["last"])
        record.pooler_output = found["rows"]
        return record

    return answer


def _unpadded(mask: Tensor, patch: int) -> Tensor:
    """Which images have something in each patch: bool ``[images]``, from a mask ``[images, height, width]``."""
    height, width = (size // patch * patch for size in mask.shape[1:])
    patches = mask[:, :height, :width].unflatten(1, (-1, patch)).unflatten(3, (-1, patch))
    whole: Tensor = (patches != 0).any(4).any(2).flatten(1).all(1)
    return whole
