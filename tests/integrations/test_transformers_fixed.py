"""Invariant: encoders of fixed-size images and of sound give what transformers gives, and leave nothing behind."""

import functools
import threading
from collections.abc import Mapping
from typing import Any

import hub_models
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack

from mmgraph.errors import UnsupportedModelError
from mmgraph.integrations.transformers import ATTENTION_NAME, Acceleration, accelerate, merging
from mmgraph.integrations.transformers.attention import TowerAttention
from mmgraph.integrations.transformers.audio_site import clip_offsets
from mmgraph.integrations.transformers.fixed_families import FIXED_MODELS, fixed_parts_of

FAMILIES = (*hub_models.FIXED, *hub_models.AUDIO)
#: One family of each way in which something is replaced, where a test isn't about the family.
WAYS = ("llava_clip", "llava_next", "gemma3", "smolvlm", "kimi_k25", "qwen2_audio")
ARGUMENTS = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw", "input_features")


#: For tests that leave the model as it was.
built = functools.cache(hub_models.build)


def recorded(model: nn.Module) -> Acceleration:
    """Captured through the recorder, in buckets of 1 and 2, which three images or clips don't fit into."""
    return accelerate(model, capture=True, max_images=2, max_tokens=64)


def features(model: Any, inputs: Mapping[str, Tensor], **more: Any) -> Any:
    given = {name: inputs[name] for name in ARGUMENTS if name in inputs}
    if "feature_attention_mask" in inputs:
        # This family has no method for it: its model is run up to the language model.
        with torch.no_grad():
            return model.model(**inputs, **more)
    found = model.model.get_audio_features if "input_features" in given else model.model.get_image_features
    return found(**given, **more)


def rows_of(record: Any) -> Tensor:
    rows = getattr(record, "pooler_output", None)
    if rows is None:
        return record.last_hidden_state
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([one.flatten(0, -2) for one in parts])


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pooled = [getattr(record, "pooler_output", None) for record in (found, expected)]
    assert type(pooled[0]) is type(pooled[1])
    if pooled[0] is not None:
        assert [one.shape for one in pooled[0]] == [one.shape for one in pooled[1]]
    for one, other in (
        (rows_of(found), rows_of(expected)),
        (found.last_hidden_state, expected.last_hidden_state),
    ):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= 1e-4 * float(other.norm())


def traces(model: nn.Module) -> dict[str, Any]:
    """What accelerate could leave behind: attributes of modules, and attention names."""
    return {
        name: (sorted(vars(module)), getattr(getattr(module, "config", None), "_attn_implementation", None))
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model, inputs = built(family)
    with torch.no_grad():
        expected = features(model, inputs)
        tokens = hub_models.generated(model, inputs)
        before = traces(model)
        done = accelerate(model, capture=False)
        assert_same(features(model, inputs), expected)
        done.restore()
        assert traces(model) == before

        done = recorded(model)
        assert_same(features(model, inputs), expected)
        assert torch.equal(hub_models.generated(model, inputs), tokens)
        (report,) = done.report().values()
        assert report.calls >= 2
        if family != "kimi_k25":  # whose images share a bucket of patches
            assert report.packs > report.calls
        assert not report.eager
        done.restore()
        assert traces(model) == before
        again = features(model, inputs)
        assert torch.equal(rows_of(again), rows_of(expected))
        assert torch.equal(hub_models.generated(model, inputs), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_these_models_look_and_listen(family: str) -> None:
    """Else equal tokens would prove nothing."""
    model, inputs = built(family)
    name = next(name for name in ("pixel_values", "input_features") if name in inputs)
    others = {**inputs, name: inputs[name] * -1.3}
    assert not torch.equal(hub_models.generated(model, inputs), hub_models.generated(model, others))


@pytest.mark.parametrize("family", WAYS)
def test_other_values_and_other_numbers_come_from_the_same_graphs(family: str) -> None:
    model, inputs = built(family)
    name = next(name for name in ("pixel_values", "input_features") if name in inputs)
    others = {**inputs, name: inputs[name].roll(1, -1) * 0.7}
    with torch.no_grad():
        expected = features(model, inputs), features(model, others)
        done = recorded(model)
        for _ in range(2):
            assert_same(features(model, inputs), expected[0])
            assert_same(features(model, others), expected[1])
        done.restore()


@pytest.mark.parametrize("family", WAYS)
def test_training_and_what_was_asked_for_beside_runs_as_transformers_runs_it(family: str) -> None:
    model, inputs = hub_models.build(family)
    tower = next(module for name, module in model.named_modules() if name.endswith(("_tower", "vision_model")))
    asked = {} if family == "qwen2_audio" else {"output_hidden_states": True}
    with torch.no_grad():
        expected = features(model, inputs, **asked)
    done = accelerate(model, capture=False)
    before = traces(model)
    with torch.no_grad():
        found = features(model, inputs, **asked)
    assert_same(found, expected)
    if family not in ("llava_next", "qwen2_audio"):
        assert len(found.hidden_states) == len(expected.hidden_states) > 1
    if family != "qwen2_audio":
        tower.requires_grad_(True)
        rows_of(features(model, inputs)).sum().backward()
        gradients = [weight.grad for weight in tower.parameters() if weight.grad is not None]
        assert any(bool(gradient.abs().sum() > 0) for gradient in gradients)
    assert {name: seen[1] for name, seen in traces(model).items()} == {
        name: seen[1] for name, seen in before.items()
    }
    done.restore()


def test_other_layers_are_not_those_that_were_captured() -> None:
    model, inputs = hub_models.build("llava_clip")
    pixels = inputs["pixel_values"]
    with torch.no_grad():
        expected = model.model.get_image_features(pixels, vision_feature_layer=-1)
        usual = model.model.get_image_features(pixels)
        done = recorded(model)
        assert_same(model.model.get_image_features(pixels, vision_feature_layer=-1), expected)
        assert_same(model.model.get_image_features(pixels, vision_feature_layer=-2), usual)
        model.config.vision_feature_layer = -1
        assert_same(model.model.get_image_features(pixels), expected)
        assert model.model.get_image_features(pixels, return_dict=False)[0].shape[0] == 3
        done.restore()


@pytest.mark.parametrize("layers", [[0, -1], [1, 2], [-3, 1]])
def test_several_layers_stand_beside_each_other(layers: list[int]) -> None:
    model, inputs = hub_models.build("llava_clip")
    model.model.multi_modal_projector = nn.Linear(2 * hub_models.WIDTH, hub_models.WIDTH)
    model.config.vision_feature_layer = layers
    with torch.no_grad():
        expected = features(model, inputs)
        done = accelerate(model, capture=False)
        assert_same(features(model, inputs), expected)
        done.restore()


def test_videos_of_crops() -> None:
    model, _ = built("llava_onevision")
    frames = torch.randn(2, 3, 3, hub_models.SIDE, hub_models.SIDE)
    with torch.no_grad():
        expected = model.model.get_video_features(frames)
        done = recorded(model)
        assert_same(model.model.get_video_features(frames), expected)
        (report,) = done.report().values()
        assert report.items == 6
        done.restore()


def test_images_of_another_size_and_padded_ones_run_as_before() -> None:
    """Tiles that nothing was captured for, and tiles with padding, whose positions are their own."""
    model, inputs = built("idefics3")
    half = hub_models.SIDE // 2
    padded = inputs["pixel_attention_mask"].clone()
    padded[1, 0, half:] = 0
    calls = (
        {"pixel_values": torch.randn(1, 2, 3, half, half)},
        {"pixel_values": inputs["pixel_values"], "pixel_attention_mask": padded},
        {"pixel_values": inputs["pixel_values"][1:]},
    )
    with torch.no_grad():
        expected = [model.model.get_image_features(**call) for call in calls]
        done = recorded(model)
        for call, one in zip(calls, expected, strict=True):
            assert_same(model.model.get_image_features(**call), one)
        (report,) = done.report().values()
        assert report.items == 2
        done.restore()


def test_of_black_images_alone_one_stays() -> None:
    model, inputs = built("smolvlm")
    black = torch.zeros_like(inputs["pixel_values"])
    with torch.no_grad():
        expected = model.model.get_image_features(black)
        done = recorded(model)
        found = model.model.get_image_features(black)
        assert found.pooler_output.shape[0] == 1
        assert_same(found, expected)
        done.restore()


def test_kimi_runs_images_of_any_grid_and_more_than_fit() -> None:
    model, _ = built("kimi_k25")
    grids = torch.tensor([[1, 2, 8], [1, 10, 10], [1, 4, 2]])
    pixels = torch.randn(int(grids.prod(1).sum()), 3, hub_models.PATCH, hub_models.PATCH)
    with torch.no_grad():
        expected = model.model.get_image_features(pixels, grids)
        done = recorded(model)
        assert_same(model.model.get_image_features(pixels, grids), expected)
        (report,) = done.report().values()
        assert sum(report.eager.values()) == 1
        done.restore()


def test_real_frames_of_clips_are_as_with_a_mask() -> None:
    """Clips of all lengths, from nearly nothing to whole."""
    model, inputs = built("qwen2_audio")
    tower, features_ = model.model.audio_tower, inputs["input_features"]
    whole = inputs["feature_attention_mask"].shape[1]
    lengths = torch.tensor([whole, 5, whole - 1])
    mask = (torch.arange(whole) < lengths[:, None]).long()
    kept = ((lengths - 1) // 2 + 1 - 2) // 2 + 1
    ids = torch.full((1, int(kept.sum())), hub_models.AUDIO_TOKEN)
    seen: list[Tensor] = []
    hook = tower.register_forward_hook(lambda _, __, record: seen.append(record.last_hidden_state))

    def run() -> Tensor:
        model.model(input_ids=ids, input_features=features_, feature_attention_mask=mask)
        return seen.pop()

    with torch.no_grad():
        expected, unmasked = run(), tower(features_).last_hidden_state
        seen.clear()
        done = recorded(model)
        found = run()
        for clip, count in enumerate(kept.tolist()):
            one, other = found[clip, :count], expected[clip, :count]
            assert float((one - other).norm()) <= 1e-4 * float(other.norm())
        assert float((expected[1] - unmasked[1]).norm()) > 1e-2  # the mask matters
        assert float((tower(features_).last_hidden_state - unmasked).norm()) <= 1e-4 * float(unmasked.norm())
        # A mask of another caller's making is followed, whatever it is.
        other_mask = torch.ones(3, 1, whole // 2, whole // 2, dtype=torch.bool)
        other_mask[..., ::2] = False
        by_others = tower(features_, attention_mask=other_mask).last_hidden_state
        done.restore()
        assert torch.equal(by_others, tower(features_, attention_mask=other_mask).last_hidden_state)
    hook.remove()


def test_clip_offsets_are_two_sequences_for_each_clip() -> None:
    assert clip_offsets(torch.tensor([3, 0, 5, 9], dtype=torch.int32), 5).tolist() == [
        0,
        3,
        5,
        5,
        10,
        15,
        15,
        20,
        20,
    ]


def test_the_attention_is_back_after_an_error_and_calls_take_turns() -> None:
    model, _ = built("llava_clip")
    tower = model.model.vision_tower
    attention = TowerAttention(tower)
    before = tower.config._attn_implementation

    def fails() -> None:
        with attention.ours():
            assert tower.config._attn_implementation == ATTENTION_NAME
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fails()
    assert tower.config._attn_implementation == before

    inside, seen = threading.Event(), []

    def other() -> None:
        inside.wait()
        with attention.as_before():
            seen.append(tower.config._attn_implementation)

    thread = threading.Thread(target=other)
    thread.start()
    with attention.ours():
        inside.set()
        thread.join(0.05)
        assert not seen
    thread.join()
    assert seen == [before]


def test_threads_get_their_own_images() -> None:
    model, inputs = built("llava_siglip")
    batches = [inputs["pixel_values"] * scale for scale in (1.0, -0.5, 2.0)]
    with torch.no_grad():
        expected = [model.model.get_image_features(one) for one in batches]
    done = recorded(model)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for _ in range(5):
                with torch.no_grad():
                    assert_same(model.model.get_image_features(batches[number]), expected[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.restore()
    assert not failed, failed


def test_unknown_towers_and_missing_parts_are_errors_that_name_them() -> None:
    model, _ = hub_models.build("llava_clip")
    before = traces(model)
    tower = model.model.vision_tower
    model.model.vision_tower = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"vision_tower is a Linear; .*CLIPVisionModel"):
        accelerate(model, capture=False)
    model.model.vision_tower = tower
    projector = model.model.multi_modal_projector
    del model.model.multi_modal_projector
    with pytest.raises(UnsupportedModelError, match="has no multi_modal_projector"):
        accelerate(model, capture=False)
    model.model.multi_modal_projector = projector
    assert traces(model) == before
    with pytest.raises(UnsupportedModelError, match=r"Linear is no model .*LlavaModel"):
        fixed_parts_of(nn.Linear(2, 2))


def test_wrong_arguments_are_transformers_own_errors() -> None:
    model, inputs = built("gemma3")
    done = recorded(model)
    with pytest.raises(TypeError):
        model.model.get_image_features()
    with pytest.raises(RuntimeError, match="must match the size") as caught, torch.no_grad():
        model.model.get_image_features(torch.zeros(1, 3, 8, 8))
    assert caught.value.__context__ is None
    with torch.no_grad():
        assert model.model.get_image_features(inputs["pixel_values"]).pooler_output.shape[0] == 3
    done.restore()


def test_every_known_model_is_built_by_a_family_here() -> None:
    assert {type(built(family)[0].model).__name__ for family in FAMILIES} >= set(FIXED_MODELS)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llava_clip", "vision_tower"), ("llava_clip", "multi_modal_projector"), ("kimi_k25", "mm_projector")],
)
@pytest.mark.parametrize("capture", [False, True])
def test_a_part_in_anothers_place_is_what_runs(family: str, name: str, capture: bool) -> None:
    model, inputs = hub_models.build(family)
    other, _ = hub_models.build(family, seed=1)
    done = accelerate(model, capture=capture, max_images=2, max_tokens=256)
    setattr(model.model, name, getattr(other.model, name))
    with torch.no_grad():
        found = features(model, inputs)
        (counts,) = done.fallbacks().values()
        assert sum(counts.values()) == 1
        done.restore()
        assert_same(found, features(model, inputs))


@pytest.mark.parametrize("family", ["llava_clip", "idefics3", "smolvlm"])
def test_weights_that_were_cast_run_as_transformers_has_them(family: str) -> None:
    model, inputs = hub_models.build(family)
    done = accelerate(model, capture=False)
    model.to(torch.float64)
    with torch.no_grad():
        found = features(model, inputs)
        (counts,) = done.fallbacks().values()
        assert "torch.float32 on cpu and are torch.float64" in next(iter(counts))
        done.restore()
        assert_same(found, features(model, inputs))


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_clip", "gemma3", "idefics3", "smolvlm", "qwen2_audio"])
def test_features_are_merged_by_the_op_once_and_outside_the_language_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, modes = [], []
    merge = merging.merge_embeddings
    monkeypatch.setattr(merging, "merge_embeddings", lambda *given: (merged.append(given), merge(*given))[1])
    model, inputs = hub_models.build(family)
    inner = next(module for module in model.modules() if merging.merges(module))
    language = getattr(inner, "language_model", None) or inner.text_model
    first = next(module for module in language.modules() if isinstance(module, nn.Linear))
    first.register_forward_pre_hook(lambda *_: modes.append(_len_torch_function_stack()))
    done = accelerate(model, capture=False)
    hub_models.generated(model, inputs)
    assert len(merged) == 1
    assert set(modes) == {0}
    done.restore()
    hub_models.generated(model, inputs)
    assert len(merged) == 1
    done = accelerate(model, capture=False, merge=False)
    hub_models.generated(model, inputs)
    assert len(merged) == 1
    done.restore()
