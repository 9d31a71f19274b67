"""Weights: decided by the seed, or loaded whole from a folder; never downloaded, and unharmed by a wider pass."""

import json
import sys

import pytest
import torch

from mmgraph.serving.errors import MissingExtraError, ModelError
from mmgraph.serving.model import (
    SMALL_LIMITS,
    image_processor,
    load_checkpoint,
    raised_precision,
    random_model,
    real_config,
    small_config,
)
from mmgraph.serving.photos import packaged_photos

CPU = torch.device("cpu")


def small(seed, dtype=torch.float32):
    return random_model(small_config(), device=CPU, dtype=dtype, seed=seed)


@pytest.fixture(scope="module")
def model():
    return small(4)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_seed_decides_the_weights_and_nothing_else_changes(model):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again, other = small(4), small(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights(model), weights(again))
    differ = [n for n, v in weights(other).items() if not torch.equal(v, weights(model)[n])]
    assert len(differ) == len(weights(model))
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_the_dtype_is_that_of_every_weight():
    half = small(0, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.visual.rotary_pos_emb.inv_freq.dtype == torch.float32


def test_the_small_model_has_every_feature_of_the_real_one():
    small_one, real = small_config(), real_config()
    for config in (small_one, real):
        vision, text = config.vision_config, config.text_config
        assert len(vision.deepstack_visual_indexes) == 3
        assert max(vision.deepstack_visual_indexes) < vision.depth
        assert vision.out_hidden_size == text.hidden_size
        assert text.num_attention_heads > text.num_key_value_heads > 1
        assert sum(text.rope_parameters["mrope_section"]) == text.head_dim // 2
        assert text.num_hidden_layers > 3
        assert config.image_token_id < text.vocab_size
    vision = real.vision_config
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (
        27,
        1152,
        16,
        4304,
    )
    assert (real.text_config.hidden_size, real.text_config.vocab_size) == (4096, 151936)


@pytest.mark.parametrize(("own", "wider"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_wider_pass_leaves_every_bit(own, wider):
    model = small(6, own)
    before, buffers = weights(model), [b.clone() for b in model.buffers()]

    def fail():
        with raised_precision(model, wider):
            assert {p.dtype for p in model.parameters()} == {wider}
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert same(before, weights(model))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(buffers, model.buffers(), strict=True))


def test_a_checkpoint_loads_bit_for_bit(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, device=CPU, dtype=torch.float32)
    assert same(weights(model), weights(loaded))
    assert not any(p.requires_grad for p in loaded.parameters())


def test_a_folder_that_is_no_whole_qwen3_vl_is_an_error(model, tmp_path):
    def load(path):
        return load_checkpoint(path, device=CPU, dtype=torch.float32)

    with pytest.raises(ModelError, match="has none"):
        load(tmp_path / "absent")
    config = tmp_path / "config.json"
    config.write_text("{not json")
    with pytest.raises(ModelError, match="not a readable configuration"):
        load(tmp_path)
    config.write_text("[]")
    with pytest.raises(ModelError, match="not a readable configuration"):
        load(tmp_path)
    config.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="'llama'"):
        load(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="could not be loaded"):
        load(tmp_path)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in weights(model).items() if "blocks.2" not in k})
    with pytest.raises(ModelError, match=r"lacks .* weight"):
        load(tmp_path)
    model.save_pretrained(tmp_path)
    assert same(weights(model), weights(load(tmp_path)))


def test_the_processor_uses_the_checkpoints_mean_and_the_models_patch(model, tmp_path):
    photo = packaged_photos(1)[0]
    plain = image_processor(model.config, SMALL_LIMITS)(images=[photo.pixels], return_tensors="np")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0, 0, 0], "image_std": [1, 1, 1]})
    )
    other = image_processor(model.config, SMALL_LIMITS, tmp_path)(images=[photo.pixels], return_tensors="np")
    assert plain["pixel_values"].shape == (196, 3 * 2 * 16 * 16)
    assert abs((other["pixel_values"] - 0.5) / 0.5 - plain["pixel_values"]).max() < 1e-5
    assert "Pil" in type(image_processor(model.config, SMALL_LIMITS)).__name__


@pytest.mark.parametrize(("module", "package"), [("transformers", "transformers"), ("PIL", "pillow")])
def test_a_missing_package_names_the_extra(monkeypatch, module, package):
    with monkeypatch.context() as patched:
        for name in [n for n in sys.modules if n.split(".")[0] == module]:
            patched.delitem(sys.modules, name)
        patched.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"{package}.*mmgraph\[hf,photos\]"):
            small_config()
    assert small_config().text_config.num_hidden_layers > 0


def test_an_old_transformers_is_named(monkeypatch):
    import transformers

    with monkeypatch.context() as patched:
        patched.setattr(transformers, "__version__", "4.57.1")
        with pytest.raises(MissingExtraError, match=r"transformers >= 5\.17 \(here is 4\.57\.1\)"):
            small_config()
    small_config()
