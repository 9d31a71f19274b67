"""Invariant: on CUDA, captured encoders of images and of sound give what transformers gives, and wait for nothing."""

from typing import Any

import hub_models
import pytest
import torch
from torch import Tensor

from mmgraph.integrations.transformers import accelerate

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")
IMAGES = ("llava_clip", "llava_siglip", "gemma3", "internvl", "vipllava", "aya_vision")


def built(family: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    model, inputs = hub_models.build(family)
    return model.to(CUDA, dtype), {name: value.to(CUDA) for name, value in inputs.items()}


def rows_of(record: Any) -> Tensor:
    rows = record.pooler_output
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([one.flatten(0, -2) for one in parts])


@pytest.mark.parametrize("family", IMAGES)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(family: str) -> None:
    whole, inputs = built(family, torch.float32)
    model, _ = built(family, torch.bfloat16)
    pixels = inputs["pixel_values"].bfloat16()
    with torch.no_grad():
        exact = rows_of(whole.model.get_image_features(pixels.float()))
        own = rows_of(model.model.get_image_features(pixels)).float()
        done = accelerate(model, max_images=4, progress=False)
        found = rows_of(model.model.get_image_features(pixels)).float()
        done.restore()
    assert float((found - exact).norm()) <= 2 * float((own - exact).norm())


@pytest.mark.parametrize("family", IMAGES)
def test_any_number_of_images_neither_captures_nor_waits(family: str) -> None:
    model, inputs = built(family, torch.float32)
    batches = [inputs["pixel_values"].repeat(3, 1, 1, 1)[:count].contiguous() for count in (1, 2, 3, 5, 9)]
    with torch.no_grad():
        expected = [rows_of(model.model.get_image_features(pixels)) for pixels in batches]
        done = accelerate(model, max_images=4, progress=False)
        rows_of(model.model.get_image_features(batches[0]))
        (encoder,) = [site.encoder for site in done.sites]
        assert encoder is not None
        graphs = len(encoder.report().towers[None].buckets)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [rows_of(model.model.get_image_features(pixels)) for pixels in batches]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report = encoder.report()
        assert len(report.towers[None].buckets) == graphs == 3
        assert not report.eager
        assert not report.towers[None].misses
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).norm()) <= 1e-4 * float(other.norm())
        done.restore()


@pytest.mark.parametrize("family", [*IMAGES, "llava_next", "idefics3", "kimi_k25", "qwen2_audio", "voxtral"])
def test_greedy_tokens_are_equal(family: str) -> None:
    model, inputs = built(family, torch.float32)
    expected = hub_models.generated(model, inputs)
    done = accelerate(model, max_images=4, max_tokens=256, progress=False)
    assert torch.equal(hub_models.generated(model, inputs), expected)
    done.restore()
    assert torch.equal(hub_models.generated(model, inputs), expected)
