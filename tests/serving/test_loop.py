"""A pass through embedder, tower and cache gives transformers' own logits and tokens, eagerly and captured.

Every request of the batch is compared with the full Qwen3-VL forward on its own ids and photos, within twice that
forward's own float32 error against float64. Replays compare with eager within the tolerance that the command states.
"""

import pytest
import torch

from mmgraph.serving.compare import compare_tokens, difference
from mmgraph.serving.grids import decode_grid, prefill_grid, tower_grid
from mmgraph.serving.loop import PHASES, Functions, ServingLoop
from mmgraph.serving.model import SMALL_LIMITS, image_processor, raised_precision, random_model, small_config
from mmgraph.serving.photos import packaged_photos
from mmgraph.serving.requests import build_requests, prepare_images

CPU = torch.device("cpu")
BUDGET = 128
STEPS = 2


@pytest.fixture(scope="module")
def model():
    return random_model(small_config(), device=CPU, dtype=torch.float32, seed=21)


@pytest.fixture(scope="module")
def loop(model):
    images = prepare_images(packaged_photos(5), image_processor(model.config, SMALL_LIMITS), SMALL_LIMITS)
    requests = build_requests(images, model.config, count=5, budget=BUDGET, seed=8)
    return ServingLoop(model, requests, budget=BUDGET, decode_steps=STEPS)


@pytest.fixture(scope="module")
def eager(loop):
    return loop.run(loop.eager())


def capture(loop):
    """The three managers, captured."""
    longest = max(len(r.ids) for r in loop.requests)
    managers = (
        loop.tower.manager(tower_grid(budget=BUDGET, limits=SMALL_LIMITS, patch=16, merge=2)),
        loop.language.prefill_manager(prefill_grid(budget=BUDGET, longest=longest)),
        loop.language.decode_manager(decode_grid(requests=len(loop.requests))),
    )
    return [m.precompile(e, progress=False) for m, e in zip(managers, loop.examples().values(), strict=True)]


def transformers_logits(model, request, tokens):
    """Logits after the prompt and after each of the tokens, by transformers' full forward."""
    ids = [*request.ids, *tokens]
    kinds = torch.tensor([[int(i == model.config.image_token_id) for i in ids]])
    extra = {}
    if request.images:
        patches = torch.cat([image.patches for _, image in request.images])
        extra["pixel_values"] = patches.to(model.lm_head.weight.dtype)
        extra["image_grid_thw"] = torch.tensor([image.grid for _, image in request.images])
    model.model.rope_deltas = None
    out = model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, use_cache=False, **extra)
    return out.logits[0, len(request.ids) - 1 :].double()


@torch.no_grad()
def test_every_request_equals_transformers(model, loop, eager):
    assert eager.logits.shape == (STEPS + 1, len(loop.requests), model.config.text_config.vocab_size)
    for number, request in enumerate(loop.requests):
        tokens = eager.tokens[:STEPS, number].tolist()
        theirs = transformers_logits(model, request, tokens)
        with raised_precision(model, torch.float64):
            exact = transformers_logits(model, request, tokens)
        allowed = 2 * (theirs - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (eager.logits[:, number] - exact).abs().max() <= allowed, request.kind
        assert eager.tokens[:, number].tolist() == theirs.argmax(-1).tolist(), request.kind


def test_a_photo_in_two_requests_is_encoded_once(eager):
    assert eager.images_used == 5
    assert eager.images_encoded == 4
    assert eager.encode_calls >= 2


def test_every_phase_takes_time(eager):
    assert set(eager.seconds) == set(PHASES)
    assert all(seconds > 0 for seconds in eager.seconds.values())


def test_passes_begin_afresh(loop, eager):
    again = loop.run(loop.eager())
    assert torch.equal(again.logits, eager.logits)
    assert all(torch.equal(a, b) for a, b in zip(again.embeds, eager.embeds, strict=True))
    assert again.images_encoded == eager.images_encoded


def test_forced_tokens_are_what_decode_sees(loop, eager):
    other = (eager.tokens + 1) % 100
    forced = loop.run(loop.eager(), forced=other)
    assert torch.equal(forced.logits[0], eager.logits[0])
    assert not torch.equal(forced.logits[1], eager.logits[1])
    assert torch.equal(loop.run(loop.eager(), forced=eager.tokens).logits, eager.logits)


def test_captured_equals_eager_with_every_call_a_hit(model, loop, eager):
    with raised_precision(model, torch.float64):
        wide = ServingLoop(model, loop.requests, budget=BUDGET, decode_steps=STEPS, backend="reference")
        reference = wide.run(wide.eager(), forced=eager.tokens)
    managers = capture(loop)
    captured = [loop.run(Functions(*managers), forced=eager.tokens) for _ in range(2)]
    for name in ("embeds", "deep"):
        found = difference(name, getattr(eager, name), getattr(captured[0], name), getattr(reference, name))
        assert found.ok, found
    found = difference("logits", [eager.logits], [captured[0].logits], [reference.logits])
    assert found.ok, found
    flat = (-1, eager.logits.shape[-1])
    tokens = compare_tokens(eager.logits.reshape(flat), captured[0].logits.reshape(flat), found.allowed)
    assert tokens.compared == (STEPS + 1) * len(loop.requests)
    assert tokens.ok
    assert torch.equal(captured[0].logits, captured[1].logits)
    for manager in managers:
        report = manager.report()
        assert report.hits > 0
        assert not report.misses


def test_no_decode_steps_give_the_prompts_tokens(model, loop, eager):
    short = ServingLoop(model, loop.requests, budget=BUDGET, decode_steps=0)
    only = short.run(short.eager())
    assert torch.equal(only.logits, eager.logits[:1])
    assert only.seconds["decode"] < eager.seconds["decode"]


@torch.no_grad()
def test_a_generated_placeholder_is_text(model, loop, eager):
    generated = torch.full_like(eager.tokens, model.config.image_token_id)
    forced = loop.run(loop.eager(), forced=generated)
    assert forced.images_encoded == eager.images_encoded
    text_only = 2
    theirs = transformers_logits(model, loop.requests[text_only], generated[:STEPS, text_only].tolist())
    torch.testing.assert_close(forced.logits[:, text_only].double(), theirs, rtol=1e-4, atol=1e-5)
