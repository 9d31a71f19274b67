"""Invariant: every way of `--compare` makes the same calls, gives transformers' values, and leaves the model as it was.

Dynamo takes many seconds to trace a tower. So it compiles for real where a prompt has no image; elsewhere
`torch.compiler.set_stance` lets what was handed to it run as it is. On a GPU all of it is compiled.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from mmgraph.serving import hub_ways
from mmgraph.serving.hub_loop import HUB_PHASES, HubLoop
from mmgraph.serving.hub_ways import accelerated, as_it_is, compare_ways, compiled
from mmgraph.serving.model import SMALL_LIMITS, image_processor, random_model, small_config
from mmgraph.serving.photos import packaged_photos
from mmgraph.serving.requests import build_requests, prepare_images

CPU = torch.device("cpu")
STEPS = 2
ONE_BUCKET = {"capture": True, "max_tokens": 256}


@pytest.fixture(scope="module")
def model():
    config = small_config()
    config.vision_config.depth = 2
    config.vision_config.deepstack_visual_indexes = [0]
    config.text_config.num_hidden_layers = 1
    return random_model(config, device=CPU, dtype=torch.float32, seed=4)


@pytest.fixture(scope="module")
def requests(model):
    """A photo, the same photo again, and a prompt without any."""
    images = prepare_images(packaged_photos(1), image_processor(model.config, SMALL_LIMITS), SMALL_LIMITS)
    return build_requests(images, model.config, count=3, budget=128, seed=6)


@pytest.fixture(scope="module")
def loop(model, requests):
    return HubLoop(model, requests, decode_steps=STEPS)


@pytest.fixture(scope="module")
def plain(loop):
    return loop.run()


def traces(model):
    """Everything on a model that a way might leave changed: weights, attributes and hooks of all modules, settings."""
    modules = {
        name: {
            key: dict(value) if isinstance(value, dict) and key.endswith("hooks") else value
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        for name, module in model.named_modules()
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    return modules, weights, model.config.vision_config._attn_implementation


def assert_untouched(model, before):
    modules, weights, attention = before
    now, weights_now, attention_now = traces(model)
    assert attention_now == attention
    assert {n: sorted(v) for n, v in now.items()} == {n: sorted(v) for n, v in modules.items()}
    for name, attributes in now.items():
        for key, value in attributes.items():
            was = modules[name][key]
            assert value is was or value == was, (name, key)
    assert all(t.dtype == weights[n].dtype and torch.equal(t, weights[n]) for n, t in weights_now.items())


@contextmanager
def untraced():
    with torch.compiler.set_stance("force_eager"):
        yield


def compared(model, requests, **options):
    return compare_ways(model, requests, decode_steps=STEPS, passes=1, tell=lambda _: nullcontext(), **options)


def test_the_loop_is_what_generate_runs(model, loop, plain):
    assert plain.logits.shape == (STEPS + 1, 3, model.config.text_config.vocab_size)
    for number, inputs in enumerate(loop._inputs):
        model.model.rope_deltas = None
        out = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=STEPS + 1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        assert out.sequences[0, -STEPS - 1 :].tolist() == plain.tokens[:, number].tolist()
        torch.testing.assert_close(torch.cat(out.logits), plain.logits[:, number], rtol=1e-5, atol=1e-6)


def test_every_phase_takes_time_and_the_tower_runs_once_for_each_prompt_with_photos(model, loop, plain):
    assert set(plain.seconds) == set(HUB_PHASES)
    assert all(seconds > 0 for seconds in plain.seconds.values())
    levels = 1 + len(model.config.vision_config.deepstack_visual_indexes)
    assert len(plain.features) == 2 * levels
    assert torch.equal(plain.features[0], plain.features[levels])  # the same photo
    assert "forward" not in vars(model.model.visual)
    assert loop.images == 2


def test_the_tower_s_time_is_not_counted_twice(model, requests, monkeypatch):
    """With a clock that only the tower moves on, and one that all else does."""
    now = 0.0
    monkeypatch.setattr("mmgraph.serving.hub_loop.time.perf_counter", lambda: now)
    forward, head = model.model.visual.forward, model.lm_head.forward

    def slow(seconds, call):
        def called(*args, **kwargs):
            nonlocal now
            now += seconds
            return call(*args, **kwargs)

        return called

    monkeypatch.setitem(vars(model.model.visual), "forward", slow(10.0, forward))
    monkeypatch.setitem(vars(model.lm_head), "forward", slow(1.0, head))
    seconds = HubLoop(model, requests, decode_steps=STEPS).run().seconds
    assert seconds == {"tower": 20.0, "prefill": 3.0, "decode": 3.0 * STEPS}


def test_forced_tokens_are_what_is_fed(loop, plain):
    other = (plain.tokens + 1) % 100
    forced = loop.run(forced=other)
    assert torch.equal(forced.logits[0], plain.logits[0])
    assert not torch.equal(forced.logits[1], plain.logits[1])
    assert torch.equal(loop.run(forced=plain.tokens).logits, plain.logits)


def test_what_the_model_remembered_is_still_there(model, loop):
    mine = torch.tensor([[7]])
    model.model.rope_deltas = mine
    loop.run()
    assert model.model.rope_deltas is mine
    model.model.rope_deltas = None


def test_all_ways_agree_and_leave_the_model_as_it_was(model, requests, plain):
    before = traces(model)
    with untraced():
        comparison, hub = compared(model, requests, compile_backend="eager", **ONE_BUCKET)
    assert_untouched(model, before)
    assert torch.equal(hub.tokens, plain.tokens)
    assert [way.name for way in comparison.ways] == ["transformers", "torch.compile", "mmgraph"]
    assert comparison.ok
    assert not comparison.failures
    for way in comparison.ways:
        assert way.ok
        assert set(way.seconds) == set(HUB_PHASES)
        assert way.first_pass > 0
        assert way.tokens.compared == (STEPS + 1) * 3
        assert way.tokens.equal
        assert way.features.relative < 1e-5
        assert 0 < way.features.hub_error < 1e-5  # against a pass that really was wider
    # The first pass and one more, of two photos each, all from graphs.
    assert "4 of 4 images from them" in comparison.ways[2].detail


def test_a_model_that_does_not_compile_is_a_row_that_says_why(model, requests):
    before = traces(model)
    comparison, _ = compared(model, requests, compile_backend="absent", capture=False)
    assert_untouched(model, before)
    failed = comparison.ways[1]
    assert failed.failure.startswith("InvalidBackend: Invalid backend: 'absent'")
    assert not failed.ok
    assert failed.seconds == {}
    assert comparison.failures == (f"torch.compile failed: {failed.failure}",)
    assert comparison.ok  # of mmgraph nothing was found
    assert comparison.ways[2].tokens.equal


def test_a_wrong_mmgraph_is_found(model, requests, monkeypatch):
    @contextmanager
    def off(model, **_):
        def add(_, __, output):
            output.pooler_output += 0.01

        handle = model.model.visual.register_forward_hook(add)
        try:
            yield lambda images: "a little off"
        finally:
            handle.remove()

    monkeypatch.setattr(hub_ways, "accelerated", off)
    comparison, _ = compared(model, requests, compile_backend="absent")
    assert not comparison.ok
    assert not comparison.ways[2].features.ok
    assert comparison.ways[0].ok


@pytest.mark.parametrize(
    "way", [as_it_is, lambda m: compiled(m, "eager"), lambda m: accelerated(m, capture=False)]
)
def test_a_way_that_raises_leaves_the_model_as_it_was(model, way):
    before = traces(model)
    with pytest.raises(ZeroDivisionError), way(model):
        raise ZeroDivisionError
    assert_untouched(model, before)


def test_the_language_model_compiles_to_two_graphs_for_all_lengths(model, requests):
    texts = [request for request in requests if not request.images]
    short = build_requests([requests[0].images[0][1]], model.config, count=3, budget=128, seed=9)[2:]
    short[0] = type(short[0])("shorter", short[0].ids[:21], (), short[0].positions[:, :21])
    loop = HubLoop(model, [*texts, *short], decode_steps=STEPS)
    plain = loop.run()
    counters.clear()
    with compiled(model, "eager"):
        found = [loop.run(forced=plain.tokens) for _ in range(2)]
        graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2  # prefill and decode
    assert all(torch.equal(each.tokens, plain.tokens) for each in found)
    torch.testing.assert_close(found[1].logits, plain.logits, rtol=1e-5, atol=1e-6)
    assert loop.run().seconds["tower"] == 0.0
    assert counters["stats"]["unique_graphs"] == graphs  # what runs afterwards isn't compiled
