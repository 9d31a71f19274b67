"""Which parts transformers' packed vision towers are made of: Qwen2-VL to Qwen3.5, and GLM-4V.

A tower is known by its class's name and then checked part by part, so that a version of transformers that builds it
otherwise is an error that names the part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mmgraph.errors import UnsupportedModelError
from mmgraph.towers.blocks import Attention, Block, GatedMlp, Norm, PlainMlp
from mmgraph.towers.grids import GridLayout, PositionTable
from mmgraph.towers.linears import ACTIVATIONS, Activation
from mmgraph.towers.mergers import DownsamplingMerger, NormedMerger, ShuffledMerger
from mmgraph.towers.packed import TowerParts
from mmgraph.towers.rotary import RotaryTables

__all__ = ["PACKED_TOWERS", "parts_of"]


def parts_of(visual: Any, backend: str | None = None) -> TowerParts:
    """What a tower is made of.

    Args:
        visual: One of transformers' towers whose class is in `PACKED_TOWERS`.
        backend: The attention backend, or None for the library's choice.

    Raises:
        UnsupportedModelError: Its class isn't known, or a part is missing or of another kind.
    """
    build = PACKED_TOWERS.get(type(visual).__name__)
    if build is None:
        raise UnsupportedModelError(
            f"{type(visual).__name__} is no packed tower that mmgraph knows: {', '.join(sorted(PACKED_TOWERS))}"
        )
    return build(visual, backend)


def part(owner: Any, path: str) -> Any:
    """A part of a module by its dotted name.

    Raises:
        UnsupportedModelError: It isn't there.
    """
    found = owner
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name, None)
        if found is None:
            raise UnsupportedModelError(
                f"{type(owner).__name__} has no {path}: this version of transformers builds it otherwise; supported "
                "versions stand in the manual"
            )
    return found


def norm_of(module: Any) -> Norm:
    """A layer norm or an RMS norm, by what the module has."""
    if isinstance(module, nn.LayerNorm):
        return Norm(module, "layer", module.eps)
    return Norm(module, "rms", float(part(module, "variance_epsilon")))


def activation_of(owner: Any, name: str) -> Activation:
    """An activation's name among the ops.

    Raises:
        UnsupportedModelError: An activation that there is no op for.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{type(owner).__name__} has the activation {name!r}; mmgraph has {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _attention(module: Any, backend: str | None) -> Attention:
    heads, scale = int(part(module, "num_heads")), float(part(module, "scaling"))
    qkv, proj = part(module, "qkv"), part(module, "proj")
    if hasattr(module, "q_norm") or hasattr(module, "k_norm"):
        raise UnsupportedModelError(
            f"{type(module).__name__} has norms of q and k, which its tower's rewrite lacks"
        )
    return Attention(qkv, proj, heads, int(part(module, "head_dim")), scale, backend)


def _gated(module: Any, activation: str) -> GatedMlp:
    return GatedMlp(
        part(module, "gate_proj"),
        part(module, "up_proj"),
        part(module, "down_proj"),
        activation_of(module, activation),
    )


def _two_layers(module: Any, activation: Activation) -> PlainMlp:
    return PlainMlp(part(module, "linear_fc1"), part(module, "linear_fc2"), activation)


def _blocks(visual: Any, mlp: Callable[[Any], PlainMlp | GatedMlp], backend: str | None) -> tuple[Block, ...]:
    return tuple(
        Block(
            norm_of(part(block, "norm1")),
            _attention(part(block, "attn"), backend),
            norm_of(part(block, "norm2")),
            mlp(part(block, "mlp")),
        )
        for block in part(visual, "blocks")
    )


def _rotary(visual: Any) -> RotaryTables:
    module = part(visual, "rotary_pos_emb")
    return RotaryTables(part(module, "inv_freq"), float(getattr(module, "attention_scaling", 1.0)))


def _sequential_merger(visual: Any, unit: int) -> NormedMerger:
    merger = part(visual, "merger")
    mlp = PlainMlp(part(merger, "mlp.0"), part(merger, "mlp.2"), "gelu")
    return NormedMerger(norm_of(part(merger, "ln_q")), mlp, unit)


def _qwen2(visual: Any, backend: str | None) -> TowerParts:
    act, merge = visual.config.hidden_act, int(part(visual, "spatial_merge_size"))
    return TowerParts(
        module=visual,
        projection=part(visual, "patch_embed.proj"),
        blocks=_blocks(
            visual, lambda m: PlainMlp(part(m, "fc1"), part(m, "fc2"), activation_of(m, act)), backend
        ),
        rotary=_rotary(visual),
        merger=_sequential_merger(visual, merge**2),
        layout=GridLayout(merge=merge),
    )


def _qwen2_5(visual: Any, backend: str | None) -> TowerParts:
    act, merge = visual.config.hidden_act, int(part(visual, "spatial_merge_size"))
    window = int(part(visual, "window_size")) // int(part(visual, "patch_size")) // merge
    return TowerParts(
        module=visual,
        projection=part(visual, "patch_embed.proj"),
        blocks=_blocks(visual, lambda m: _gated(m, act), backend),
        rotary=_rotary(visual),
        merger=_sequential_merger(visual, merge**2),
        layout=GridLayout(merge=merge, window=window),
        whole=frozenset(part(visual, "fullatt_block_indexes")),
        window=(window * merge) ** 2,
    )


def _qwen3(visual: Any, backend: str | None) -> TowerParts:
    act, merge = visual.config.hidden_act, int(part(visual, "spatial_merge_size"))
    levels = list(getattr(visual, "deepstack_visual_indexes", None) or [])
    mergers = part(visual, "deepstack_merger_list") if levels else []
    merger, unit = part(visual, "merger"), merge**2
    return TowerParts(
        module=visual,
        projection=part(visual, "patch_embed.proj"),
        blocks=_blocks(
            visual,
            lambda m: _two_layers(m, activation_of(m, act)),
            backend,
        ),
        rotary=_rotary(visual),
        merger=NormedMerger(norm_of(part(merger, "norm")), _two_layers(merger, "gelu"), unit),
        layout=GridLayout(
            merge=merge,
            table=PositionTable(
                side=int(part(visual, "num_grid_per_side")),
                mode=part(visual, "interpolation_mode"),
                align_corners=bool(visual.interpolation_align_corners),
            ),
        ),
        table=part(visual, "pos_embed"),
        deep={
            index: ShuffledMerger(norm_of(part(one, "norm")), _two_layers(one, "gelu"), unit)
            for index, one in zip(levels, mergers, strict=True)
        },
    )


def _glm4v(visual: Any, backend: str | None) -> TowerParts:
    act, merge = visual.config.hidden_act, int(part(visual, "spatial_merge_size"))
    merger, unit = part(visual, "merger"), merge**2
    embedding = part(visual, "embeddings")
    return TowerParts(
        module=visual,
        projection=part(visual, "patch_embed.proj"),
        blocks=_blocks(visual, lambda m: _gated(m, act), backend),
        rotary=_rotary(visual),
        merger=DownsamplingMerger(
            norm_of(part(visual, "post_layernorm")),
            part(visual, "downsample"),
            part(merger, "proj"),
            norm_of(part(merger, "post_projection_norm")),
            _gated(merger, act),
            unit,
        ),
        layout=GridLayout(
            merge=merge,
            table=PositionTable(
                side=int(part(embedding, "num_positions") ** 0.5), mode=part(embedding, "interpolated_method")
            ),
        ),
        after_projection=norm_of(part(visual, "post_conv_layernorm")),
        table=part(embedding, "position_embedding"),
        last_per=unit,
    )


#: Names of transformers' classes, and what reads their parts.
PACKED_TOWERS: dict[str, Callable[[Any, str | None], TowerParts]] = {
    "Qwen2VisionTransformerPretrainedModel": _qwen2,
    "Qwen2_5_VisionTransformerPretrainedModel": _qwen2_5,
    "Qwen3VLVisionModel": _qwen3,
    "Qwen3VLMoeVisionModel": _qwen3,
    "Qwen3_5VisionModel": _qwen3,
    "Qwen3_5MoeVisionModel": _qwen3,
    "Glm4vVisionModel": _glm4v,
    "Glm4vMoeVisionModel": _glm4v,
}
