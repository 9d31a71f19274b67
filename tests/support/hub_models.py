"""Tiny models of transformers with random weights, by family, and a left-padded batch of prompts for each.

Nothing is downloaded. Weights are drawn so that images and clips decide what is generated: with transformers' own small
ones the features would hardly count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as hub
from torch import Tensor, nn

__all__ = ["AUDIO", "FIXED", "PACKED", "build", "generated", "randomised"]

WIDTH = 32
PAD, START, END, IMAGE, VIDEO, AUDIO_TOKEN, VOCABULARY = 0, 90, 91, 92, 93, 94, 96
PATCH, SIDE = 4, 16
"""Pixels of a patch's side, and of a fixed-size image's."""

Built = tuple[nn.Module, dict[str, Tensor]]


def build(family: str, *, video: bool = False, seed: int = 0) -> Built:
    """A model in float32 on the CPU, in eval mode, and keywords for its ``forward`` or ``generate``.

    Args:
        family: One of `PACKED`, `FIXED` or `AUDIO`.
        video: Put videos into the prompts, for those of `PACKED`.
        seed: Of weights, pixels and text.

    Returns:
        The model, and a batch of two prompts with different numbers of images or clips, padded on the left.
    """
    makers: dict[str, Callable[[torch.Generator], Built]] = {**FIXED, **AUDIO}
    generator = torch.Generator().manual_seed(seed)
    if family in PACKED:
        model, inputs = _packed(family, video, generator)
    else:
        model, inputs = makers[family](generator)
    return randomised(model, generator).eval().requires_grad_(False), inputs


def randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draws all weights anew: matrices that keep the size of what passes, norms about 1, biases and tables small."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2:
            one = float(("norm" in name.lower() and name.endswith("weight")) or "lambda" in name)
            weight.data.copy_(one + 0.1 * noise)
        elif "embed_tokens" in name:
            weight.data.copy_(0.3 * noise)
        elif "position" in name or "pos_emb" in name:
            weight.data.copy_(noise)
        else:
            inputs = weight.shape[-1] if "experts" in name else weight[0].numel()
            weight.data.copy_(noise * 1.6 / math.sqrt(inputs))
    return model


def generated(model: nn.Module, inputs: Mapping[str, Tensor], tokens: int = 6) -> Tensor:
    """Greedy continuation, with no end of sequence that would cut it short."""
    with torch.no_grad():
        made: Tensor = model.generate(  # type: ignore[operator]
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=PAD
        )
    return made


def left_padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Prompts of different lengths as ``input_ids`` and ``attention_mask``, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, START, (count,), generator=generator).tolist()


def _prompts(counts: Sequence[Sequence[int]], token: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Prompts with runs of placeholders: ``counts`` has each prompt's runs."""
    prompts = []
    for runs in counts:
        prompt = _text(3, generator)
        for run in runs:
            prompt += [START, *[token] * run, END, *_text(2, generator)]
        prompts.append(prompt)
    return left_padded(prompts)


def _decoder(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


# Packed towers -------------------------------------------------------------------------------------------------------

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
}


def _vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": WIDTH,
        "num_heads": 2,
        "intermediate_size": 44,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        **more,
    }


_QWEN3_VISION = _vision(num_position_embeddings=36, deepstack_visual_indexes=[0, 2])
_QWEN3_5_VISION = _vision(num_position_embeddings=36)
_GLM_VISION = _vision(image_size=24)
_QWEN3_ROPE = {"rope_parameters": {**_MROPE, "mrope_interleaved": True}, "head_dim": 8}

#: By family, the names of the config and of the model, and what their parts are configured with.
PACKED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {
            "depth": 3,
            "embed_dim": WIDTH,
            "hidden_size": WIDTH,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        _decoder(rope_parameters=_MROPE),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        _vision(window_size=16, fullatt_block_indexes=[1], tokens_per_second=2),
        _decoder(rope_parameters=_MROPE),
    ),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _QWEN3_VISION, _decoder(**_QWEN3_ROPE)),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        _QWEN3_VISION,
        _decoder(**_QWEN3_ROPE, **_EXPERTS),
    ),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _QWEN3_5_VISION, _decoder(**_LINEAR)),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        _QWEN3_5_VISION,
        _decoder(**_LINEAR, **_EXPERTS, shared_expert_intermediate_size=16),
    ),
    "glm4v": (
        "Glm4vConfig",
        "Glm4vForConditionalGeneration",
        _GLM_VISION,
        _decoder(rope_parameters={**_MROPE, "partial_rotary_factor": 1.0}),
    ),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        "Glm4vMoeForConditionalGeneration",
        _GLM_VISION,
        _decoder(
            rope_parameters={**_MROPE, "partial_rotary_factor": 1.0},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            head_dim=8,
        ),
    ),
}

#: Frames, rows and columns of patches: the first prompt has one image, the second has two of other sizes.
IMAGE_GRIDS = (((1, 4, 6),), ((1, 2, 2), (1, 6, 4)))
VIDEO_GRIDS = (((3, 4, 2),), ())


def _packed(family: str, video: bool, generator: torch.Generator) -> Built:
    config_name, model_name, vision, text = PACKED[family]
    glm = family.startswith("glm")
    starts = (
        {"image_start_token_id": START, "image_end_token_id": END} if glm else {"vision_start_token_id": START}
    )
    if glm:
        starts |= {"video_start_token_id": 88, "video_end_token_id": 89}
    else:
        starts |= {"vision_end_token_id": END}
    config = getattr(hub, config_name)(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
        **starts,
    )
    model = getattr(hub, model_name)(config)
    # GLM's placeholders of videos are those of images, so that a call has the one or the other.
    images = () if video and glm else IMAGE_GRIDS
    videos = () if not video else (VIDEO_GRIDS[0], ((2, 2, 4),)) if glm else VIDEO_GRIDS
    # Frames stand apart, but for the two that give all frames of a video one run of placeholders.
    apart = family not in ("qwen2_vl", "qwen2_5_vl")
    prompts, kinds = [], []
    for number in range(2):
        prompt = _text(3, generator)
        kind = [0] * 3
        for grids, token, mark in ((images, IMAGE, 1), (videos, IMAGE if glm else VIDEO, 2)):
            for frames, height, width in grids[number] if grids else ():
                runs = frames if apart else 1
                for _ in range(runs):
                    run = frames * height * width // 4 // runs
                    tail = _text(2, generator)
                    prompt += [START, *[token] * run, END, *tail]
                    kind += [0, *[mark] * run, 0, 0, 0]
        prompts.append(prompt)
        kinds.append(kind)
    inputs = left_padded(prompts)
    longest = inputs["input_ids"].shape[1]
    inputs["mm_token_type_ids"] = torch.tensor([[0] * (longest - len(kind)) + kind for kind in kinds])
    for key, found in (("image", images), ("video", videos)):
        grids = [grid for prompt_grids in found for grid in prompt_grids]
        if grids:
            pixels = torch.randn(sum(map(math.prod, grids)), 3 * 2 * PATCH**2, generator=generator)
            inputs["pixel_values" if key == "image" else "pixel_values_videos"] = pixels
            inputs[f"{key}_grid_thw"] = torch.tensor(grids)
    if video and family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.ones(1)
    return model, inputs


# Encoders of fixed-size images ---------------------------------------------------------------------------------------

TEXT = {"model_type": "llama", **_decoder()}


def _square(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": WIDTH,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        **more,
    }


_PATCHES = (SIDE // PATCH) ** 2


def _images(count: int, generator: torch.Generator, side: int = SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=generator)


def _llava(vision: str, **options: Any) -> Callable[[torch.Generator], Built]:
    def make(generator: torch.Generator) -> Built:
        config = hub.LlavaConfig(
            vision_config=_square(vision), text_config=TEXT, image_token_index=IMAGE, **options
        )
        inputs = _prompts([[_PATCHES], [_PATCHES, _PATCHES]], IMAGE, generator)
        return hub.LlavaForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}

    return make


def _llava_siglip(generator: torch.Generator) -> Built:
    return _llava("siglip_vision_model", vision_feature_select_strategy="full", vision_feature_layer=-1)(
        generator
    )


def _vipllava(generator: torch.Generator) -> Built:
    config = hub.VipLlavaConfig(
        vision_config=_square("clip_vision_model"),
        text_config=TEXT,
        image_token_index=IMAGE,
        vision_feature_layers=[-2, -1, 0],
    )
    inputs = _prompts([[_PATCHES], [_PATCHES, _PATCHES]], IMAGE, generator)
    return hub.VipLlavaForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}


def _anyres(
    config_name: str, model_name: str, vision: str, **options: Any
) -> Callable[[torch.Generator], Built]:
    """LLaVA's later kinds: an image as crops of one size and a small one of it all, with lines that end."""

    def make(generator: torch.Generator) -> Built:
        config = getattr(hub, config_name)(
            vision_config=_square(vision),
            text_config=TEXT,
            image_token_index=IMAGE,
            image_grid_pinpoints=[[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
            **options,
        )
        model = getattr(hub, model_name)(config)
        sizes = torch.tensor([[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]])
        crops = torch.randn(3, 5, 3, SIDE, SIDE, generator=generator)
        with torch.no_grad():
            features = model.model.get_image_features(pixel_values=crops, image_sizes=sizes).pooler_output
        one, *more = [len(rows) for rows in features]
        inputs = _prompts([[one], more], IMAGE, generator)
        return model, inputs | {"pixel_values": crops, "image_sizes": sizes}

    return make


def _gemma3(generator: torch.Generator) -> Built:
    text = _decoder(head_dim=8, query_pre_attn_scalar=8, sliding_window=16)
    config = hub.Gemma3Config(
        vision_config=_square("siglip_vision_model", vision_use_head=False),
        text_config=text,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )
    inputs = _prompts([[4], [4, 4]], IMAGE, generator)
    inputs |= {"pixel_values": _images(3, generator), "token_type_ids": (inputs["input_ids"] == IMAGE).long()}
    return hub.Gemma3ForConditionalGeneration(config), inputs


def _paligemma(generator: torch.Generator) -> Built:
    config = hub.PaliGemmaConfig(
        vision_config=_square("siglip_vision_model", vision_use_head=False, projection_dim=WIDTH),
        text_config={"model_type": "gemma", **_decoder(head_dim=8)},
        image_token_index=IMAGE,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    inputs = _prompts([[_PATCHES], [_PATCHES, _PATCHES]], IMAGE, generator)
    return hub.PaliGemmaForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}


def _internvl(generator: torch.Generator) -> Built:
    config = hub.InternVLConfig(
        vision_config=_square("internvl_vision", image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
        text_config={"model_type": "qwen2", **_decoder()},
        image_token_id=IMAGE,
        image_seq_length=_PATCHES // 4,
        tie_word_embeddings=False,
    )
    inputs = _prompts([[_PATCHES // 4], [_PATCHES // 4] * 2], IMAGE, generator)
    return hub.InternVLForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}


def _aya(generator: torch.Generator) -> Built:
    config = hub.AyaVisionConfig(
        vision_config=_square("siglip_vision_model", vision_use_head=False),
        text_config={"model_type": "cohere2", **_decoder(layer_types=["full_attention"] * 2)},
        image_token_index=IMAGE,
        tie_word_embeddings=False,
        alignment_intermediate_size=64,
    )
    inputs = _prompts([[_PATCHES // 4], [_PATCHES // 4] * 2], IMAGE, generator)
    return hub.AyaVisionForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}


def _cohere2(generator: torch.Generator) -> Built:
    config = hub.Cohere2VisionConfig(
        vision_config=_square("siglip_vision_model", vision_use_head=False),
        text_config={"model_type": "cohere2", **_decoder(layer_types=["full_attention"] * 2)},
        image_token_id=IMAGE,
        alignment_intermediate_size=64,
        tie_word_embeddings=False,
    )
    inputs = _prompts([[_PATCHES // 4], [_PATCHES // 4] * 2], IMAGE, generator)
    return hub.Cohere2VisionForConditionalGeneration(config), inputs | {"pixel_values": _images(3, generator)}


def _idefics3(kind: str) -> Callable[[torch.Generator], Built]:
    """Images come as ``[prompts, images, ...]``, where a prompt with fewer is filled up with black ones."""

    def make(generator: torch.Generator) -> Built:
        config = getattr(hub, f"{kind}Config")(
            vision_config=_square("idefics3_vision" if kind == "Idefics3" else "smolvlm_vision"),
            text_config=TEXT,
            image_token_id=IMAGE,
            pad_token_id=PAD,
            scale_factor=2,
        )
        inputs = _prompts([[_PATCHES // 4], [_PATCHES // 4] * 2], IMAGE, generator)
        pixels = _images(4, generator).unflatten(0, (2, 2)).contiguous()
        mask = torch.ones(2, 2, SIDE, SIDE, dtype=torch.long)
        pixels[0, 1] = 0
        mask[0, 1] = 0
        inputs |= {"pixel_values": pixels, "pixel_attention_mask": mask}
        return getattr(hub, f"{kind}ForConditionalGeneration")(config), inputs

    return make


def _kimi(generator: torch.Generator) -> Built:
    """Images of any size, by grids in raster order; one row of the language model for four patches."""
    config = hub.Kimi_K25Config(
        vision_config={
            "patch_size": PATCH,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 44,
        },
        text_config={
            "model_type": "deepseek_v3",
            **_decoder(num_key_value_heads=4),
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        projection_hidden_size=WIDTH,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )
    grids = [grid for prompt in IMAGE_GRIDS for grid in prompt]
    counts = [[math.prod(grid) // 4 for grid in prompt] for prompt in IMAGE_GRIDS]
    inputs = _prompts(counts, IMAGE, generator)
    pixels = torch.randn(sum(map(math.prod, grids)), 3, PATCH, PATCH, generator=generator)
    inputs |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    return hub.Kimi_K25ForConditionalGeneration(config), inputs


#: Families whose images have one size, and Kimi, whose tower is captured as it stands, too.
FIXED: dict[str, Callable[[torch.Generator], Built]] = {
    "llava_clip": _llava("clip_vision_model"),
    "llava_siglip": _llava_siglip,
    "vipllava": _vipllava,
    "llava_next": _anyres("LlavaNextConfig", "LlavaNextForConditionalGeneration", "clip_vision_model"),
    "llava_next_video": _anyres(
        "LlavaNextVideoConfig", "LlavaNextVideoForConditionalGeneration", "clip_vision_model"
    ),
    "llava_onevision": _anyres(
        "LlavaOnevisionConfig",
        "LlavaOnevisionForConditionalGeneration",
        "siglip_vision_model",
        video_token_index=VIDEO,
    ),
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "internvl": _internvl,
    "aya_vision": _aya,
    "cohere2_vision": _cohere2,
    "idefics3": _idefics3("Idefics3"),
    "smolvlm": _idefics3("SmolVLM"),
    "kimi_k25": _kimi,
}


# Audio ---------------------------------------------------------------------------------------------------------------

_POSITIONS, _MELS = 24, 8
_FRAMES = (96, 61, 40)
"""Real frames of three clips, of 96 at most."""


def _qwen2_audio(generator: torch.Generator) -> Built:
    config = hub.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": _MELS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 44,
            "d_model": WIDTH,
            "max_source_positions": 2 * _POSITIONS,
        },
        text_config={"model_type": "qwen2", **_decoder()},
        audio_token_index=AUDIO_TOKEN,
    )
    mask = torch.arange(4 * _POSITIONS)[None] < torch.tensor(_FRAMES)[:, None]
    one, *more = [((frames - 1) // 2 + 1 - 2) // 2 + 1 for frames in _FRAMES]
    inputs = _prompts([[one], more], AUDIO_TOKEN, generator)
    clips = torch.randn(3, _MELS, 4 * _POSITIONS, generator=generator)
    inputs |= {"input_features": clips, "feature_attention_mask": mask.long()}
    return hub.Qwen2AudioForConditionalGeneration(config), inputs


def _voxtral(generator: torch.Generator) -> Built:
    """Clips are whole, and four rows of the encoder's width make one of the language model's."""
    config = hub.VoxtralConfig(
        audio_config={
            "model_type": "voxtral_encoder",
            "num_mel_bins": _MELS,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 4 * WIDTH,
            "hidden_size": WIDTH,
            "max_source_positions": 2 * _POSITIONS,
        },
        text_config=TEXT,
        audio_token_id=AUDIO_TOKEN,
    )
    inputs = _prompts([[_POSITIONS // 2], [_POSITIONS // 2] * 2], AUDIO_TOKEN, generator)
    clips = torch.randn(3, _MELS, 4 * _POSITIONS, generator=generator)
    return hub.VoxtralForConditionalGeneration(config), inputs | {"input_features": clips}


#: Families that hear.
AUDIO: dict[str, Callable[[torch.Generator], Built]] = {"qwen2_audio": _qwen2_audio, "voxtral": _voxtral}
