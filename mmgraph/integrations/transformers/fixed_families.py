"""Which parts transformers' models with inputs of one size are made of: LLaVA's kin, Gemma, InternVL, Idefics, Voxtral.

A model is known by its class's name and then checked part by part. What is captured is transformers' own tower and
projector; what lies around them, such as the packing of crops, stays transformers' own method, run on a stand-in of the
model whose tower hands out what the graph gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmgraph.errors import UnsupportedModelError
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.towers.fixed import FixedInput, FixedItem, unstacked

__all__ = ["FIXED_MODELS", "Encode", "FixedParts", "StandIn", "Unserved", "fixed_parts_of"]

#: Items to the encoder's outputs by name, ``[items, ...]``; raises `Unserved`.
Encode = Callable[[Sequence[FixedItem]], dict[str, Tensor]]

#: What a replaced method does: the encoder and the call's arguments by name, to transformers' record.
Answer = Callable[[Encode, Mapping[str, Any]], Any]

_PIXELS = "pixel_values"


class Unserved(Exception):
    """A call that must run as transformers runs it; says why."""


@dataclass(frozen=True, eq=False)
class FixedParts:
    """What is replaced in a model, and by what.

    Attributes:
        tower: The tower, whose attention becomes mmgraph's while it runs.
        tower_name: Its name within the model.
        modules: All that `run` runs: watched, and asked whether they train.
        inputs: What `run` takes.
        run: The captured function: batches by name to "rows" and "last" by name, ``[items, ...]`` each.
        methods: The model's methods that are replaced, and what answers them.
        takes: Names of arguments that the answers deal with.
        options: Names of arguments that the captured function was made for, and their values; a call for others isn't
            served. None in a call stands for what the configuration says by then.
        unit: What an item is called.
    """

    tower: nn.Module
    tower_name: str
    modules: tuple[nn.Module, ...]
    inputs: Mapping[str, FixedInput]
    run: Callable[..., Mapping[str, Tensor]]
    methods: Mapping[str, Answer]
    takes: frozenset[str] = frozenset({_PIXELS})
    options: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "images"


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


class StandIn:
    """A module with some of its attributes replaced, for one call of one of its methods.

    Args:
        module: What everything else is taken from.
        **replaced: The attributes.
    """

    def __init__(self, module: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


# Towers --------------------------------------------------------------------------------------------------------------


def _known_tower(model: Any, name: str, *known: str) -> Any:
    tower = part(model, name)
    if type(tower).__name__ not in known:
        raise UnsupportedModelError(
            f"{type(model).__name__}.{name} is a {type(tower).__name__}; mmgraph knows this model with "
            f"{' or '.join(known)}. mmgraph.capture.CapturedEncoder serves any encoder by an adapter"
        )
    return tower


def _square(model: Any) -> Any:
    return _known_tower(model, "vision_tower", "CLIPVisionModel", "SiglipVisionModel")


def _image_input(tower: Any) -> dict[str, FixedInput]:
    size = part(tower, "config.image_size")
    height, width = (size, size) if isinstance(size, int) else size
    weight = next(tower.parameters())
    return {
        _PIXELS: FixedInput((int(part(tower, "config.num_channels")), int(height), int(width)), weight.dtype)
    }


def _frozen(model: Any, *names: str) -> dict[str, Any]:
    return {name: part(model, f"config.{name}") for name in names}


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


def _whole(model: Any, method: str, **options: Any) -> Callable[..., dict[str, Tensor]]:
    """transformers' method as it stands."""

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        record = getattr(type(model), method)(model, **inputs, return_dict=True, **options)
        return {"rows": record.pooler_output, "last": record.last_hidden_state}

    return run


def _images(given: Mapping[str, Any]) -> list[FixedItem]:
    pixels = given[_PIXELS]
    if not isinstance(pixels, Tensor) or pixels.ndim != 4:
        shape = list(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise Unserved(f"pixel_values aren't [images, channels, height, width] but {shape}")
    return unstacked({_PIXELS: pixels})


def _tensor_answer(record: Callable[..., Any] | None = None) -> Answer:
    """The features in one tensor."""

    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        found = encode(_images(given))
        make = BaseModelOutputWithPooling if record is None else record
        return make(last_hidden_state=found["last"], pooler_output=found["rows"])

    return answer


def _list_answer(encode: Encode, given: Mapping[str, Any]) -> Any:
    """The features as a list of each image's."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    found = encode(_images(given))
    return BaseModelOutputWithPooling(last_hidden_state=found["last"], pooler_output=list(found["rows"]))


# Families ------------------------------------------------------------------------------------------------------------


def _llava(model: Any) -> FixedParts:
    tower, projector = _square(model), part(model, "multi_modal_projector")
    options = _frozen(model, "vision_feature_layer", "vision_feature_select_strategy")
    layers, strategy = options.values()
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        _image_input(tower),
        _selecting(tower, projector, layers, strategy == "default"),
        {"get_image_features": _list_answer},
        options=options,
    )


def _anyres(*methods: str, takes: Sequence[str]) -> Callable[[Any], FixedParts]:
    """LLaVA's later kinds, whose method cuts its arguments into crops and packs what comes out."""

    def build(model: Any) -> FixedParts:
        tower, projector = _square(model), part(model, "multi_modal_projector")
        options = _frozen(model, "vision_feature_layer", "vision_feature_select_strategy")
        layers, strategy = options.values()
        return FixedParts(
            tower,
            "vision_tower",
            (tower, projector),
            _image_input(tower),
            _selecting(tower, projector, layers, strategy == "default"),
            {method: _packing(model, method) for method in methods},
            takes=frozenset({_PIXELS, *takes}),
            options=options,
        )

    return build


def _packing(model: Any, method: str) -> Answer:
    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        def tower(pixel_values: Tensor, **_: Any) -> Any:
            found = encode(unstacked({_PIXELS: pixel_values}))
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
    options = _frozen(model, "vision_feature_layers")
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        _image_input(tower),
        _selecting(tower, projector, options["vision_feature_layers"], crop=True),
        {"get_image_features": _tensor_answer()},
        options=options,
    )


def _projected(*options: str) -> Callable[[Any], FixedParts]:
    """Models whose method takes images as they are and gives a tensor: it is captured whole."""

    def build(model: Any) -> FixedParts:
        tower, projector = _square(model), part(model, "multi_modal_projector")
        frozen = _frozen(model, *options)
        return FixedParts(
            tower,
            "vision_tower",
            (tower, projector),
            _image_input(tower),
            _whole(model, "get_image_features", **frozen),
            {"get_image_features": _tensor_answer()},
            options=frozen,
        )

    return build


def _internvl(model: Any) -> FixedParts:
    import importlib

    tower, projector = (
        _known_tower(model, "vision_tower", "InternVLVisionModel"),
        part(model, "multi_modal_projector"),
    )
    frozen = _frozen(model, "vision_feature_layer", "vision_feature_select_strategy")
    module = importlib.import_module(type(tower).__module__)
    return FixedParts(
        tower,
        "vision_tower",
        (tower, projector),
        _image_input(tower),
        _whole(model, "get_image_features", **frozen),
        {"get_image_features": _tensor_answer(part(module, "InternVLVisionModelOutputWithPooling"))},
        options=frozen,
    )


def _voxtral(model: Any) -> FixedParts:
    tower, projector = (
        _known_tower(model, "audio_tower", "VoxtralEncoder"),
        part(model, "multi_modal_projector"),
    )
    whole = _whole(model, "get_audio_features")

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


def clip_input(tower: Any) -> dict[str, FixedInput]:
    """The spectrograms that an encoder of Whisper's kind takes."""
    first, second = part(tower, "conv1"), part(tower, "conv2")
    frames = int(part(tower, "config.max_source_positions")) * first.stride[0] * second.stride[0]
    return {"input_features": FixedInput((int(first.in_channels), frames), first.weight.dtype)}


# Idefics -------------------------------------------------------------------------------------------------------------


def _idefics(tower_class: str, keeps_one: bool) -> Callable[[Any], FixedParts]:
    def build(model: Any) -> FixedParts:
        tower, connector = _known_tower(model, "vision_model", tower_class), part(model, "connector")
        inputs = _image_input(tower)
        return FixedParts(
            tower,
            "vision_model",
            (tower, connector),
            inputs,
            _unmasked(tower, connector, inputs[_PIXELS]),
            {"get_image_features": _whole_images(model, int(part(tower, "config.patch_size")), keeps_one)},
            takes=frozenset({_PIXELS, "pixel_attention_mask"}),
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


def _whole_images(model: Any, patch: int, keeps_one: bool) -> Answer:
    """Leaves out black images, as transformers does, and serves those without padding.

    Which images are black only the device knows: two flags for each image are read back, once.
    """

    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        pixels, mask = given[_PIXELS], given.get("pixel_attention_mask")
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
        found = encode([FixedItem({_PIXELS: images[index]}) for index in kept])
        record = BaseModelOutput(last_hidden_state=found["last"])
        record.pooler_output = found["rows"]
        return record

    return answer


def _unpadded(mask: Tensor, patch: int) -> Tensor:
    """Which images have something in each patch: bool ``[images]``, from a mask ``[images, height, width]``."""
    height, width = (size // patch * patch for size in mask.shape[1:])
    patches = mask[:, :height, :width].unflatten(1, (-1, patch)).unflatten(3, (-1, patch))
    return (patches != 0).any(4).any(2).flatten(1).all(1)


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
    "Idefics3Model": _idefics("Idefics3VisionTransformer", keeps_one=False),
    "SmolVLMModel": _idefics("SmolVLMVisionTransformer", keeps_one=True),
    "VoxtralModel": _voxtral,
}
