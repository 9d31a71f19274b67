"""Invariant: on CUDA an accelerated packed tower gives what transformers gives, from graphs, without ever waiting."""

from collections.abc import Iterator
from typing import Any

import hub_models
import pytest
import torch

from mmgraph import ops
from mmgraph.capture import BucketGrid, CapturedEncoder
from mmgraph.integrations.transformers import accelerate
from mmgraph.integrations.transformers.packed_families import parts_of
from mmgraph.towers.buckets import example_item, packed_grid
from mmgraph.towers.items import PatchItem
from mmgraph.towers.packed import PackedTower

pytestmark = pytest.mark.cuda

STRUCTURES = ("qwen2_5_vl", "qwen3_vl", "glm4v")


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """transformers' patch projection is a convolution, which PyTorch runs in TF32 by default; the product isn't."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def on_gpu(family: str, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    model, inputs = hub_models.build(family, **options)
    moved = {name: value.to("cuda") for name, value in inputs.items()}
    return model.to("cuda", dtype), moved


def tensors_of(record: Any) -> list[torch.Tensor]:
    return [
        record.pooler_output,
        record.last_hidden_state,
        *(getattr(record, "deepstack_features", None) or []),
    ]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("family", hub_models.PACKED)
def test_greedy_tokens_are_equal(family: str) -> None:
    model, inputs = on_gpu(family, torch.float32)
    expected = hub_models.generated(model, inputs)
    done = accelerate(model, max_tokens=512)
    (report,) = done.report().values()
    assert torch.equal(hub_models.generated(model, inputs), expected)
    (report,) = done.report().values()
    assert report.calls > 0
    assert not report.eager
    done.restore()
    assert torch.equal(hub_models.generated(model, inputs), expected)
    ops.check_errors()


@pytest.mark.parametrize("family", STRUCTURES)
def test_features_in_float32_and_in_bfloat16(family: str) -> None:
    model, inputs = on_gpu(family, torch.float32)
    pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.no_grad():
        exact = tensors_of(model.model.visual(pixels, grid))
        done = accelerate(model, max_tokens=512)
        for found, expected in zip(tensors_of(model.model.visual(pixels, grid)), exact, strict=True):
            assert relative(found, expected) <= 1e-4
        done.restore()
        model.to(torch.bfloat16)
        own = tensors_of(model.model.visual(pixels.bfloat16(), grid))
        done = accelerate(model, max_tokens=512)
        for _ in range(2):
            ours = tensors_of(model.model.visual(pixels.bfloat16(), grid))
            for found, theirs, expected in zip(ours, own, exact, strict=True):
                assert relative(found, expected) <= 2 * relative(theirs, expected) + 2**-8
        done.restore()


@pytest.mark.parametrize("family", STRUCTURES)
def test_five_hundred_mixed_sizes_never_wait_capture_or_compile(family: str) -> None:
    import triton

    model, _ = on_gpu(family, torch.bfloat16)
    visual = model.model.visual
    tower = PackedTower(parts_of(visual), keep_last=False)
    encoder = CapturedEncoder(tower, buckets=packed_grid(1024, tower, smallest=64), watch=[visual])
    encoder.precompile([example_item(tower, side=8)], progress=False)
    draw = torch.Generator().manual_seed(0)
    sides = (2 * torch.randint(1, 9, (500, 4, 2), generator=draw)).tolist()
    counts = torch.randint(1, 5, (500,), generator=draw).tolist()
    width = visual.patch_embed.proj.weight[0].numel()
    patches = torch.randn(1024, width, device="cuda", dtype=torch.bfloat16)
    calls = [
        [PatchItem(patches[: h * w], (1, h, w)) for h, w in batch[:count]]
        for batch, count in zip(sides, counts, strict=True)
    ]
    with torch.inference_mode():
        alone = [tower.forward(**tower.prepare(items, None))["rows"] for items in calls[:20]]
        tower.forward(**tower.prepare(calls[0], None))
        encoder(calls[0])
        torch.cuda.synchronize()
        compiled: list[Any] = []
        before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = lambda **keywords: compiled.append(keywords["repr"])
        graphs = sum(len(report.buckets) for report in encoder.report().towers.values())
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [encoder(items) for items in calls]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            triton.knobs.runtime.jit_cache_hook = before
        assert compiled == []
        report = encoder.report()
        assert sum(len(one.buckets) for one in report.towers.values()) == graphs
        assert not report.eager
        for found, expected in zip(results, alone, strict=False):
            # Padding changes what the products are cut into, so sums may be taken in another order.
            assert relative(torch.cat(found), expected) <= 0.03
    encoder.close()
    tower.part()


def test_joined_weights_follow_changes_in_place_and_poison_changes_nothing() -> None:
    model, inputs = on_gpu("qwen2_5_vl", torch.float32)
    visual = model.model.visual
    call = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.no_grad():
        done = accelerate(model, max_tokens=512)
        first = visual(*call).pooler_output
        encoder = done.sites[0].encoder
        assert encoder is not None
        for manager in encoder.managers.values():
            manager.poison()
        assert torch.equal(visual(*call).pooler_output, first)
        visual.blocks[1].mlp.gate_proj.weight.mul_(1.5)
        visual.blocks[0].mlp.down_proj.weight.mul_(0.5)
        changed = visual(*call).pooler_output
        assert not torch.equal(changed, first)
        done.restore()
        assert relative(changed, visual(*call).pooler_output) <= 1e-4


def test_a_wrong_number_of_features_is_recorded_on_the_device() -> None:
    model, inputs = on_gpu("qwen3_vl", torch.float32)
    done = accelerate(model, capture=False)
    fewer = dict(inputs)
    fewer["image_grid_thw"] = inputs["image_grid_thw"][:-1]
    fewer["pixel_values"] = inputs["pixel_values"][: -int(inputs["image_grid_thw"][-1].prod())]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        mask, _ = model.model.get_placeholder_mask(inputs["input_ids"], inputs_embeds=embeds)
        features = model.model.visual(fewer["pixel_values"], fewer["image_grid_thw"]).pooler_output
        ops.merge_embeddings(embeds.flatten(0, 1), mask[..., 0].flatten(), features)
    with pytest.raises(ops.DataError):
        ops.check_errors()
    done.restore()


def test_sizes_of_a_grid_need_no_bucket_of_their_own() -> None:
    model, inputs = on_gpu("qwen3_vl", torch.float32)
    grid = BucketGrid(
        tokens=(256,), side=(4096,), derived={"batch": lambda b: 9, "seqlen": lambda b: b["tokens"]}
    )
    done = accelerate(model, buckets=grid)
    with torch.no_grad():
        model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"].cpu())
    (report,) = done.report().values()
    assert len(next(iter(report.towers.values())).buckets) == 1
    done.restore()
