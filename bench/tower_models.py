"""The towers that `bench/towers.py` measures: real architectures, random weights, and what is asked of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmgraph.towers.grids import Grid

# Sixteen sizes of photos, in patches of 16 pixels: 10976 patches.
MIXED: tuple[tuple[int, int], ...] = (
    (28, 28), (28, 28), (20, 20), (40, 30), (30, 40), (16, 24), (24, 16), (36, 20),
    (20, 36), (48, 20), (20, 20), (32, 32), (14, 20), (40, 24), (18, 26), (22, 14),
)  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """A tower of random weights and what is asked of it."""

    name: str
    visual: Any
    rows: dict[str, tuple[Grid, ...]]


def square(pixels: int, patch: int, merge: int = 2) -> Grid:
    """The grid that a processor makes of a square image: multiples of a merge block."""
    side = round(pixels / (patch * merge)) * merge
    return (1, side, side)


def qwen3(device: torch.device, layers: int) -> Tower:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=layers, hidden_size=1152, num_heads=16, intermediate_size=4304, patch_size=16, out_hidden_size=4096,
        num_position_embeddings=2304, deepstack_visual_indexes=[i for i in (8, 16, 24) if i < layers],
    )  # fmt: skip
    small, large = square(448, 16), square(1024, 16)
    mixed = tuple((1, h, w) for h, w in MIXED)
    rows = {
        "1 x 448 px": (small,),
        "4 x 448 px": (small,) * 4,
        "1 x 1024 px": (large,),
        "8 x 1024 px": (large,) * 8,
        "16 mixed": mixed,
    }
    return Tower("qwen3-vl-8b", made(Qwen3VLVisionModel, config, device), rows)


def qwen2_5(device: torch.device, layers: int) -> Tower:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(
        depth=layers, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14, out_hidden_size=3584,
        window_size=112, fullatt_block_indexes=[i for i in (7, 15, 23, 31) if i < layers],
    )  # fmt: skip
    small, large = square(448, 14), square(1024, 14)
    rows = {
        "1 x 448 px": (small,),
        "4 x 448 px": (small,) * 4,
        "1 x 1024 px": (large,),
        "8 x 1024 px": (large,) * 8,
    }
    visual = made(Qwen2_5_VisionTransformerPretrainedModel, config, device)
    return Tower("qwen2.5-vl-7b", visual, rows)


def made(kind: Any, config: Any, device: torch.device) -> Any:
    """A model of random weights: small ones, so that its values stay in bfloat16's range, and no weight is trivial."""
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        visual = kind(config)
    for parameter in visual.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return visual.to(dtype).eval().requires_grad_(False)


def pixels(visual: Any, grids: Sequence[Grid], seed: int = 0) -> torch.Tensor:
    weight = visual.patch_embed.proj.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(
        count, weight[0].numel(), device=weight.device, generator=generator, dtype=torch.float32
    ).to(weight.dtype)
