"""Invariant: an accelerated model gives what transformers gives, and what was done can be undone without a trace."""

import copy
import gc
import weakref
from typing import Any

import hub_models
import pytest
import torch
from torch import nn

from mmgraph.capture import BucketGrid, CapturedEncoder, CaptureFailedError
from mmgraph.errors import OptionError, TowerError, UnsupportedModelError
from mmgraph.integrations.transformers import Acceleration, Rewrites, accelerate, restore
from mmgraph.integrations.transformers.packed_families import parts_of
from mmgraph.integrations.transformers.packed_site import PackedSite
from mmgraph.towers import linears

FAMILIES = tuple(hub_models.PACKED)
#: GLM's towers are given each frame of a video as an image of its own; that goes through `generate` below.
WITH_VIDEO_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: One family of each structure, where a test isn't about the family.
STRUCTURES = ("qwen2_5_vl", "qwen3_vl", "glm4v")
BUCKETS = BucketGrid(
    tokens=(64, 512),
    side=(4096,),
    derived={"batch": lambda b: 16, "seqlen": lambda b: b["tokens"], "windows": lambda b: 64},
)
PLAIN_BUCKETS = BucketGrid(
    tokens=(64, 512), side=(4096,), derived={"batch": lambda b: 16, "seqlen": lambda b: b["tokens"]}
)


def buckets_of(family: str) -> BucketGrid:
    return BUCKETS if family == "qwen2_5_vl" else PLAIN_BUCKETS


def recorded(model: nn.Module, family: str, **options: Any) -> Acceleration:
    return accelerate(model, capture=True, buckets=buckets_of(family), **options)


def tensors_of(record: Any) -> list[torch.Tensor]:
    return [
        record.pooler_output,
        record.last_hidden_state,
        *(getattr(record, "deepstack_features", None) or []),
    ]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= 1e-4 * float(other.norm())


def tower_call(family: str, *, video: bool = False) -> tuple[nn.Module, Any, dict[str, Any]]:
    model, inputs = hub_models.build(family, video=video)
    pixels, grid = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    return model, model.model.visual, {"hidden_states": inputs[pixels], "grid_thw": inputs[grid]}


def count_calls(done: Acceleration) -> list[str]:
    """Fills up with the names of towers whose fast way is taken."""
    served: list[str] = []
    for site in done.sites:
        assert isinstance(site, PackedSite)
        assert site.tower is not None
        forward, name = site.tower.forward, site.name
        site.tower.forward = lambda *args, f=forward, n=name, **kw: (served.append(n), f(*args, **kw))[1]  # type: ignore[method-assign]
    return served


@pytest.mark.parametrize(
    ("family", "rewrites"),
    [
        *((family, Rewrites()) for family in FAMILIES),
        *((family, Rewrites.none()) for family in STRUCTURES),  # one of each structure: the code is the same
    ],
)
def test_the_tower_gives_what_it_gave(family: str, rewrites: Rewrites) -> None:
    model, visual, call = tower_call(family)
    with torch.no_grad():
        expected = visual(**call)
        done = accelerate(model, capture=False, rewrites=rewrites)
        assert_same(visual(**call), expected)
        assert_same(visual(call["hidden_states"], call["grid_thw"], return_dict=True), expected)
        done.restore()


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_towers_give_what_they_gave_to_other_images_too(family: str) -> None:
    model, visual, call = tower_call(family)
    others = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]])
    pixels = torch.randn(int(others.prod(1).sum()), call["hidden_states"].shape[1])
    with torch.no_grad():
        expected = visual(**call), visual(pixels, others)
        done = recorded(model, family)
        for _ in range(2):
            assert_same(visual(**call), expected[0])
            assert_same(visual(pixels, others), expected[1])
        (report,) = done.report().values()
        assert report is not None
        done.restore()


@pytest.mark.parametrize("family", WITH_VIDEO_GRIDS)
def test_videos(family: str) -> None:
    model, visual, call = tower_call(family, video=True)
    with torch.no_grad():
        expected = visual(**call)
        done = recorded(model, family)
        assert_same(visual(**call), expected)
        done.restore()


@pytest.mark.parametrize(
    ("family", "video"), [*((family, False) for family in FAMILIES), *((family, True) for family in STRUCTURES)]
)
def test_greedy_tokens_of_a_left_padded_batch_are_equal(family: str, video: bool) -> None:
    model, inputs = hub_models.build(family, video=video)
    expected = hub_models.generated(model, inputs)
    done = accelerate(model, capture=False)
    served = count_calls(done)
    assert torch.equal(hub_models.generated(model, inputs), expected)
    assert served
    done.restore()
    assert torch.equal(hub_models.generated(model, inputs), expected)


@pytest.mark.parametrize("family", STRUCTURES)
def test_greedy_tokens_from_a_captured_tower(family: str) -> None:
    model, inputs = hub_models.build(family)
    expected = hub_models.generated(model, inputs)
    done = recorded(model, family)
    assert torch.equal(hub_models.generated(model, inputs), expected)
    (report,) = done.report().values()
    assert report.calls > 0  # that is, generate's calls were served, and not run as transformers runs them
    assert not report.eager
    done.restore()


def traces(model: nn.Module) -> dict[str, Any]:
    """What accelerate could leave behind: attributes of modules, attention names, where weights lie."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (
            sorted(vars(module)),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
    for name, parameter in model.named_parameters():
        found[f"{name} (weight)"] = parameter.shape, parameter.stride(), parameter.is_contiguous()
    return found


@pytest.mark.parametrize("family", STRUCTURES)
@pytest.mark.parametrize("by_handle", [True, False])
def test_restore_leaves_nothing_behind(family: str, by_handle: bool) -> None:
    model, visual, call = tower_call(family)
    before = traces(model), {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = visual(**call)
    done = recorded(model, family)
    assert traces(model) != before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    if by_handle:
        done.restore()
        done.restore()  # does nothing
    else:
        restore(model)
    assert traces(model) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    storages = {p.untyped_storage().data_ptr() for p in visual.parameters()}
    assert len(storages) == len(list(visual.parameters()))
    with torch.no_grad():
        assert torch.equal(visual(**call).pooler_output, expected.pooler_output)
    accelerate(model, capture=False).restore()  # and again


def test_joined_weights_follow_changes_in_place_and_are_saved_whole(tmp_path: Any) -> None:
    model, visual, call = tower_call("qwen2_5_vl")
    other, other_visual, _ = tower_call("qwen2_5_vl")
    other.load_state_dict({k: v + 0.01 * torch.randn_like(v) for k, v in other.state_dict().items()})
    with torch.no_grad():
        expected = other_visual(**call)
        done = recorded(model, "qwen2_5_vl")
        model.load_state_dict(other.state_dict())
        assert_same(visual(**call), expected)
        model.save_pretrained(tmp_path)
        done.restore()
    again = type(model).from_pretrained(tmp_path).eval()
    for name, value in other.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_weights_that_were_replaced_run_as_the_modules_have_them() -> None:
    """A load with assign=True takes the joined weights from under the tower."""
    model, visual, call = tower_call("qwen2_5_vl")
    other, other_visual, _ = tower_call("qwen2_5_vl")
    other.load_state_dict({k: v + 0.01 * torch.randn_like(v) for k, v in other.state_dict().items()})
    with torch.no_grad():
        expected = other_visual(**call)
        done = accelerate(model, capture=False)
        model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
        assert_same(visual(**call), expected)
        done.restore()
        assert_same(visual(**call), expected)


@pytest.mark.parametrize("family", STRUCTURES)
def test_training_and_what_was_asked_for_beside_runs_as_transformers_runs_it(family: str) -> None:
    model, visual, call = tower_call(family)
    with torch.no_grad():
        expected = visual(**call, output_hidden_states=True)
    done = accelerate(model, capture=False)
    with torch.no_grad():
        found = visual(**call, output_hidden_states=True)
    assert done.fallbacks() == {"model.visual": {"it was asked for output_hidden_states": 1}}
    assert len(found.hidden_states) == len(expected.hidden_states)
    assert_same(found, expected)
    visual.requires_grad_(True)
    visual(**call).pooler_output.sum().backward()
    projection = visual.patch_embed.proj.weight
    assert projection.grad is not None
    assert bool(projection.grad.abs().sum() > 0)
    done.restore()


def test_more_than_the_largest_bucket_runs_eagerly_beside_what_fits() -> None:
    model, visual, call = tower_call("qwen3_vl")
    grids = torch.tensor([[1, 4, 4], [1, 26, 24], [1, 4, 8]])  # 624 patches are more than 512
    pixels = torch.randn(int(grids.prod(1).sum()), call["hidden_states"].shape[1])
    with torch.no_grad():
        expected = visual(pixels, grids)
        done = recorded(model, "qwen3_vl")
        assert_same(visual(pixels, grids), expected)
        done.restore()


def test_a_wrong_number_of_features_is_an_error_that_says_so() -> None:
    model, inputs = hub_models.build("qwen3_vl")
    done = accelerate(model, capture=False)
    fewer = dict(inputs)
    fewer["image_grid_thw"] = inputs["image_grid_thw"][:-1]
    last = int(inputs["image_grid_thw"][-1].prod())
    fewer["pixel_values"] = inputs["pixel_values"][:-last]
    with pytest.raises(Exception, match=r"(?i)features|placeholders"), torch.no_grad():
        model(**fewer)
    done.restore()


def test_models_without_a_known_encoder_are_refused_by_name() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_tower = nn.Linear(2, 2)

    with pytest.raises(
        UnsupportedModelError, match=r"Other holds no encoder .*vision_tower \(Linear\).*Qwen3VL"
    ):
        accelerate(Other())
    with pytest.raises(UnsupportedModelError, match="Linear is no packed tower"):
        parts_of(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("rotary_pos_emb", "no inv_freq|no rotary_pos_emb"),
        ("patch_embed", "no patch_embed"),
        ("merger", "no merger"),
    ],
)
def test_a_tower_that_is_built_otherwise_is_an_error_that_names_the_part(path: str, match: str) -> None:
    model, visual, _ = tower_call("qwen3_vl")
    delattr(visual, path)
    before = traces(model)
    with pytest.raises(UnsupportedModelError, match=match):
        accelerate(model, capture=False)
    assert traces(model) == before


def test_norms_of_q_and_k_and_unknown_activations_are_refused() -> None:
    model, visual, _ = tower_call("qwen3_vl")
    visual.blocks[1].attn.q_norm = nn.LayerNorm(8)
    with pytest.raises(UnsupportedModelError, match="norms of q and k"):
        accelerate(model, capture=False)
    del visual.blocks[1].attn.q_norm
    visual.config.hidden_act = "mish"
    with pytest.raises(UnsupportedModelError, match="'mish'"):
        accelerate(model, capture=False)


def test_accelerating_twice_and_restoring_twice_are_errors() -> None:
    model, _, _ = tower_call("qwen2_vl")
    done = accelerate(model, capture=False)
    with pytest.raises(OptionError, match="accelerated already"):
        accelerate(model)
    restore(model)
    with pytest.raises(OptionError, match="not accelerated"):
        restore(model)
    done.restore()


def test_a_capture_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, visual, call = tower_call("qwen2_5_vl")
    with torch.no_grad():
        expected = visual(**call)
    before = traces(model)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("mmgraph.towers.mergers.NormedMerger.__call__", fails)
    with pytest.raises(CaptureFailedError):
        recorded(model, "qwen2_5_vl")
    monkeypatch.undo()
    assert traces(model) == before
    with torch.no_grad():
        assert_same(visual(**call), expected)


def changed_projection(visual: Any) -> None:
    old = visual.blocks[0].attn.qkv
    new = nn.Linear(old.in_features, old.out_features)
    visual.blocks[0].attn.qkv = new.requires_grad_(False)


def hooked_block(visual: Any) -> None:
    visual.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def replaced_bias(visual: Any) -> None:
    gate = visual.blocks[0].mlp.gate_proj
    gate.bias = nn.Parameter(gate.bias + 1, requires_grad=False)


def asking_configuration(visual: Any) -> None:
    visual.config.output_hidden_states = True


@pytest.mark.parametrize("change", [changed_projection, hooked_block, replaced_bias, asking_configuration])
@pytest.mark.parametrize("before", [False, True], ids=["afterwards", "before"])
def test_what_is_changed_on_the_model_counts(change: Any, before: bool) -> None:
    torch.manual_seed(0)
    model, visual, call = tower_call("qwen2_5_vl")
    if before:
        change(visual)
    done = accelerate(model, capture=False)
    if not before:
        change(visual)
    with torch.no_grad():
        found = visual(**call)
        done.restore()
        assert_same(found, visual(**call))
        assert (found.hidden_states is None) == (change is not asking_configuration)


def test_gradients_of_pixels_are_transformers_own() -> None:
    _, visual, call = tower_call("qwen3_vl")
    done = accelerate(visual, capture=False)
    pixels = call["hidden_states"].clone().requires_grad_()
    visual(pixels, call["grid_thw"]).pooler_output.sum().backward()
    assert pixels.grad is not None
    done.restore()


def test_weights_that_would_need_gradients_are_joined_too() -> None:
    model, visual, call = tower_call("qwen2_5_vl")
    visual.requires_grad_(True)
    with torch.no_grad():
        expected = visual(**call)
        done = accelerate(model, capture=False)
        (site,) = done.sites
        assert isinstance(site, PackedSite)
        assert site.tower is not None
        assert all(block.mlp.join() for block in site.tower.parts.blocks)
        assert_same(visual(**call), expected)
    visual.train()
    visual(**call).pooler_output.sum().backward()
    assert visual.blocks[0].mlp.down_proj.weight.grad is not None
    done.restore()


def test_models_that_share_a_configuration_dont_share_what_is_done() -> None:
    model, visual, call = tower_call("qwen3_vl")
    other = type(model)(model.config).eval()
    with torch.no_grad():
        expected = other.model.visual(**call)
        done = accelerate(model, capture=False)
        assert torch.equal(other.model.visual(**call).pooler_output, expected.pooler_output)
    assert visual.config._attn_implementation == other.model.visual.config._attn_implementation == "sdpa"
    done.restore()


def test_copies_of_an_accelerated_model_are_refused_and_of_a_restored_one_are_copies() -> None:
    for family in ("qwen3_vl", "llava_clip"):
        model, inputs = hub_models.build(family)
        done = accelerate(model, capture=False)
        for part in (model, model.model):
            with pytest.raises(TowerError, match="restore"):
                copy.deepcopy(part)
        done.restore()
        twin = copy.deepcopy(model)
        assert torch.equal(hub_models.generated(twin, inputs), hub_models.generated(model, inputs))


@pytest.mark.parametrize("outer_first", [False, True])
def test_parts_of_an_accelerated_model_are_refused(outer_first: bool) -> None:
    model, _, _ = tower_call("qwen3_vl")
    before = traces(model)
    first, second = (model, model.model) if outer_first else (model.model, model)
    done = accelerate(first, capture=False)
    with pytest.raises(OptionError, match=r"part of an accelerated model|accelerated already"):
        accelerate(second, capture=False)
    done.restore()
    assert traces(model) == before


def test_an_accelerated_part_is_collected_with_its_model() -> None:
    _, visual, _ = tower_call("qwen3_vl")
    accelerate(visual, capture=False)
    gone = weakref.ref(visual)
    del visual, _
    gc.collect()
    assert gone() is None


def test_a_failure_in_the_middle_of_joining_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = tower_call("qwen2_5_vl")
    before = traces(model)
    join, calls = linears.JoinedGate.__init__, []

    def runs_out(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no memory")
        join(self, *args)

    monkeypatch.setattr(linears.JoinedGate, "__init__", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        accelerate(model, capture=False)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture": "yes"}, "capture must be"),
        ({"max_tokens": 1.5}, "max_tokens must be"),
        ({"max_images": 0}, "max_images must be"),
        ({"rewrites": "all"}, "Rewrites record"),
        ({"backend": "nope"}, "one of .*triton"),
        ({"buckets": 3}, "BucketGrid"),
        ({"buckets": {"model.visul": PLAIN_BUCKETS}}, "model.visul, and the model's encoders are model.visual"),
    ],
)
def test_options_are_checked(options: dict[str, Any], match: str) -> None:
    model, _, _ = tower_call("qwen3_vl")
    with pytest.raises(OptionError, match=match):
        accelerate(model, **options)


def test_patches_that_dont_fit_their_grids_are_transformers_error() -> None:
    model, visual, call = tower_call("qwen3_vl")
    errors = []
    for accelerated in (False, True):
        done = accelerate(model, capture=False) if accelerated else None
        with torch.no_grad(), pytest.raises(Exception) as caught:
            visual(call["hidden_states"][:-1], call["grid_thw"])
        errors.append((caught.type, str(caught.value)))
        if done is not None:
            done.restore()
    assert errors[0] == errors[1]


def test_what_somebody_puts_in_place_later_stays_and_calls_transformers_own_after_restore() -> None:
    model, visual, call = tower_call("qwen3_vl")
    with torch.no_grad():
        expected = visual(**call)
        done = accelerate(model, capture=False)
        ours, calls = visual.forward, []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return ours(*args, **kwargs)

        visual.forward = wrapped
        assert_same(visual(**call), expected)
        done.restore()
        assert visual.forward is wrapped
        assert torch.equal(visual(**call).pooler_output, expected.pooler_output)
        assert len(calls) == 2


def test_a_capture_that_fails_gives_back_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = tower_call("qwen3_vl")
    closed = []
    close = CapturedEncoder.close
    monkeypatch.setattr(CapturedEncoder, "close", lambda self: (closed.append(self), close(self))[1])

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("mmgraph.towers.mergers.NormedMerger.__call__", fails)
    with pytest.raises(CaptureFailedError):
        recorded(model, "qwen3_vl")
    assert len(closed) == 1


def test_weights_that_were_cast_run_as_the_modules_have_them() -> None:
    model, visual, call = tower_call("qwen2_5_vl")
    done = recorded(model, "qwen2_5_vl")
    model.to(torch.float64)
    with torch.no_grad():
        found = visual(**call)
        (counts,) = done.fallbacks().values()
        assert "torch.float32 on cpu and are torch.float64" in next(iter(counts))
        done.restore()
        assert torch.equal(found.pooler_output, visual(**call).pooler_output)
