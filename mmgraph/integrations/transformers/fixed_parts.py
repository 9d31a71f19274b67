"""What a model with inputs of one size is made of, and the pieces that families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmgraph.errors import UnsupportedModelError
from mmgraph.integrations.transformers.packed_families import part
from mmgraph.integrations.transformers.runners import Unserved
from mmgraph.towers.fixed import FixedInput, FixedItem, unstacked

__all__ = [
    "PIXELS",
    "Answer",
    "Encode",
    "FixedParts",
    "StandIn",
    "clip_input",
    "frozen",
    "image_input",
    "images_of",
    "known_tower",
    "list_answer",
    "tensor_answer",
    "whole_method",
]

#: Items to the encoder's outputs by name, ``[items, ...]``; raises `Unserved`.
Encode = Callable[[Sequence[FixedItem]], dict[str, Tensor]]

#: What a replaced method does: the encoder and the call's arguments by name, to transformers' record.
Answer = Callable[[Encode, Mapping[str, Any]], Any]

PIXELS = "pixel_values"


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
    takes: frozenset[str] = frozenset({PIXELS})
    options: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "images"


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


def known_tower(model: Any, name: str, *known: str) -> Any:
    """A model's tower, by its dotted name.

    Raises:
        UnsupportedModelError: It isn't there, or its class isn't among the known ones.
    """
    tower = part(model, name)
    if type(tower).__name__ not in known:
        raise UnsupportedModelError(
            f"{type(model).__name__}.{name} is a {type(tower).__name__}; mmgraph knows this model with "
            f"{' or '.join(known)}. mmgraph.capture.CapturedEncoder serves any encoder by an adapter"
        )
    return tower


def image_input(tower: Any) -> dict[str, FixedInput]:
    """The images that a tower takes, by its configuration."""
    size = part(tower, "config.image_size")
    height, width = (size, size) if isinstance(size, int) else size
    weight = next(tower.parameters())
    return {
        PIXELS: FixedInput((int(part(tower, "config.num_channels")), int(height), int(width)), weight.dtype)
    }


def frozen(model: Any, *names: str) -> dict[str, Any]:
    """What a model's configuration says now."""
    return {name: copy(part(model, f"config.{name}")) for name in names}


def clip_input(tower: Any) -> dict[str, FixedInput]:
    """The spectrograms that an encoder of Whisper's kind takes."""
    first, second = part(tower, "conv1"), part(tower, "conv2")
    frames = int(part(tower, "config.max_source_positions")) * first.stride[0] * second.stride[0]
    return {"input_features": FixedInput((int(first.in_channels), frames), first.weight.dtype)}


def whole_method(model: Any, method: str, **options: Any) -> Callable[..., dict[str, Tensor]]:
    """transformers' method as it stands."""

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        record = getattr(type(model), method)(model, **inputs, return_dict=True, **options)
        return {"rows": record.pooler_output, "last": record.last_hidden_state}

    return run


def images_of(given: Mapping[str, Any]) -> list[FixedItem]:
    """The images of a call.

    Raises:
        Unserved: They aren't in one tensor ``[images, channels, height, width]``.
    """
    pixels = given[PIXELS]
    if not isinstance(pixels, Tensor) or pixels.ndim != 4:
        shape = list(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise Unserved(f"pixel_values aren't [images, channels, height, width] but {shape}")
    return unstacked({PIXELS: pixels})


def tensor_answer(record: Callable[..., Any] | None = None) -> Answer:
    """The features in one tensor."""

    def answer(encode: Encode, given: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        found = encode(images_of(given))
        make = BaseModelOutputWithPooling if record is None else record
        return make(last_hidden_state=found["last"], pooler_output=found["rows"])

    return answer


def list_answer(encode: Encode, given: Mapping[str, Any]) -> Any:
    """The features as a list of each image's."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    found = encode(images_of(given))
    return BaseModelOutputWithPooling(last_hidden_state=found["last"], pooler_output=list(found["rows"]))
