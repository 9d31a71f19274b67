"""Which parts transformers' models with inputs of one size are made of: LLaVA's kin, Gemma, InternVL, Voxtral.

A model is known by its class's name and then checked part by part. What is captured is transformers' own tower and
projector; what lies around them, such as the packing of crops, stays transformers' own method, run on a stand-in of the
model whose tower hands out what the graph gave.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmgraph.errors import UnsupportedModelError
from mmgraph.integrations.transformers.fixed_parts import (
    PIXELS,
    Answer,
    Encode,
    FixedParts,
    StandIn,
    clip_input,
    frozen,
    image_input,
    known_tower,
    list_answer,
    tensor_answer,
    whole_method,
)
from mmgraph.integrations.transformers.idefics import idefics
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.towers.fixed import unstacked

__all__ = ["FIXED_MODELS", "fixed_parts_of"]


def fixed_parts_of(model: Any) -> FixedParts:
    """What of a model is replaced.

    Args:
        model: One of transformers' models whose class is in `FIXED_MODELS`.

    Raises:
        UnsupportedModelError: Its class isn't known, or a part is missing or of another kind.
    """
    build = FIXED_MODELS.get(type(model).__name__)
    if build is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no model with inputs of one size that mmgraph knows: "
            f"{', '.join(sorted(FIXED_MODELS))}"
        )
    return build(model)


def _square(model: Any) -> Any:
    return known_tower(model, "vision_tower", "CLIPVisionModel", "SiglipVisionModel")


def _selecting(
    tower: Any, projector: Any, layers: int | Sequence[int], crop: bool
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Tower, choice of layers and projector. The layers between aren't kept."""
    depth = int(part(tower, "config.num_hidden_layers"))
    places = [layer % (depth + 1) for layer in ([layers] if isinstance(layers, int) else layers)]
    # Asked for by number, transformers counts the blocks' results and leaves out what the first block is given.
    blocks = [place - 1 for place in places]
    everything = min(blocks) < 0

    def run(pixel_values: Tensor) -> dict[str, Tensor]:
        asked = True if everything else sorted(set(blocks))
        record = tower(pixel_values, output_hidden_states=asked, return_dict=True)
        hidden = [record.hidden_states[place] for place in (places if everything else blocks)]
        if crop:
            hidden = [one[:, 1:] for one in hidden]
        chosen = hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=-1)
        return {"rows": projector(chosen), "last": record.last_hidden_state}

    return run


def _with_chosen_layers(model: Any, methods: Mapping[str, Answer], takes: Sequence[str] = ()) -> FixedParts:
    """A tower, a choice of its layers, and a projector."""
    tower, projector = _square(model), part(model, "multi_modal_projector")
    options = frozen(model, "vision_feature_layer", "vision_feature_select_strategy")
    layers, strategy = options.values()
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        image_input(tower),
        _selecting(tower, projector, layers, strategy == "default"),
        methods,
        takes=frozenset({PIXELS, *takes}),
        options=options,
    )


def _llava(model: Any) -> FixedParts:
    return _with_chosen_layers(model, {"get_image_features": list_answer})


def _anyres(*methods: str, takes: Sequence[str]) -> Callable[[Any], FixedParts]:
    """LLaVA's later kinds, whose method cuts its arguments into crops and packs what comes out."""
    return lambda model: _with_chosen_layers(
        model, {method: _packing(model, method) for method in methods}, takes
    )


def _packing(model: Any, method: str) -> Answer:
    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        def tower(pixel_values: Tensor, **_: Any) -> Any:
            found = encode(unstacked({PIXELS: pixel_values}))
            return BaseModelOutputWithPooling(last_hidden_state=found["last"], hidden_states=(found["rows"],))

        # The graph has chosen, cropped and projected, so that the method finds one layer and takes it as it is.
        stand_in = StandIn(model, vision_tower=tower, multi_modal_projector=lambda features: features)
        arguments = {**given, "vision_feature_layer": 0, "vision_feature_select_strategy": "full"}
        record = getattr(type(model), method)(stand_in, **arguments, return_dict=True)
        return BaseModelOutputWithPooling(
            last_hidden_state=record.last_hidden_state, pooler_output=record.pooler_output
        )

    return answer


def _vipllava(model: Any) -> FixedParts:
    tower, projector = _square(model), part(model, "multi_modal_projector")
    options = frozen(model, "vision_feature_layers")
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        image_input(tower),
        _selecting(tower, projector, options["vision_feature_layers"], crop=True),
        {"get_image_features": tensor_answer()},
        options=options,
    )


def _projected(*names: str) -> Callable[[Any], FixedParts]:
    """Models whose method takes images as they are and gives a tensor: it is captured whole."""

    def build(model: Any) -> FixedParts:
        tower, projector = _square(model), part(model, "multi_modal_projector")
        options = frozen(model, *names)
        return FixedParts(
            tower,
            "vision_tower",
            (tower, projector),
            image_input(tower),
            whole_method(model, "get_image_features", **options),
            {"get_image_features": tensor_answer()},
            options=options,
        )

    return build


def _internvl(model: Any) -> FixedParts:
    tower, projector = (
        known_tower(model, "vision_tower", "InternVLVisionModel"),
        part(model, "multi_modal_projector"),
    )
    options = frozen(model, "vision_feature_layer", "vision_feature_select_strategy")
    module = importlib.import_module(type(tower).__module__)
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        image_input(tower),
        whole_method(model, "get_image_features", **options),
        {"get_image_features": tensor_answer(part(module, "InternVLVisionModelOutputWithPooling"))},
        options=options,
    )


def _voxtral(model: Any) -> FixedParts:
    tower, projector = (
        known_tower(model, "audio_tower", "VoxtralEncoder"),
        part(model, "multi_modal_projector"),
    )
    whole = whole_method(model, "get_audio_features")

    def run(input_features: Tensor) -> dict[str, Tensor]:
        found = whole(input_features=input_features)
        return {**found, "rows": found["rows"].unflatten(0, (input_features.shape[0], -1))}

    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        found = encode(unstacked({"input_features": given["input_features"]}))
        return BaseModelOutputWithPooling(
            last_hidden_state=found["last"], pooler_output=found["rows"].flatten(0, 1)
        )

    return FixedParts(
        tower,
        "audio_tower",
        (tower, projector),
        clip_input(tower),
        run,
        {"get_audio_features": answer},
        takes=frozenset({"input_features"}),
        unit="clips",
    )


_CROPS = ("image_sizes", "batch_num_images", "vision_aspect_ratio")

#: Names of transformers' classes, and what reads their parts.
FIXED_MODELS: dict[str, Callable[[Any], FixedParts]] = {
    "LlavaModel": _llava,
    "VipLlavaModel": _vipllava,
    "LlavaNextModel": _anyres("get_image_features", takes=_CROPS[:1]),
    "LlavaNextVideoModel": _anyres("get_image_features", takes=_CROPS[:1]),
    "LlavaOnevisionModel": _anyres("get_image_features", "get_video_features", takes=_CROPS),
    "Gemma3Model": _projected(),
    "PaliGemmaModel": _projected(),
    "Cohere2VisionModel": _projected(),
    "AyaVisionModel": _projected("vision_feature_layer", "vision_feature_select_strategy"),
    "InternVLModel": _internvl,
    "Idefics3Model": idefics("Idefics3VisionTransformer", keeps_one=False),
    "SmolVLMModel": idefics("SmolVLMVisionTransformer", keeps_one=True),
    "VoxtralModel": _voxtral,
}
