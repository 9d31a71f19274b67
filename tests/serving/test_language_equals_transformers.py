"""Prefill and decode over the flat cache give transformers' own logits and greedy tokens, whole or in chunks.

The reference is the full Qwen3-VL forward on the same ids and images, run again from the start for every token.
The tolerance is twice that reference's own float32 error against float64.
"""

import numpy as np
import pytest
import torch

from mmgraph.serving.language import KeyValueCache, LanguageModel
from mmgraph.serving.model import ImageLimits, image_processor, raised_precision, random_model, small_config
from mmgraph.serving.photos import packaged_photos
from mmgraph.serving.requests import Chunk, build_requests, prepare_images, schedule
from mmgraph.serving.steps import SlotMap, decode_inputs, prefill_inputs
from mmgraph.serving.tower import VisionTower

CPU = torch.device("cpu")
STEPS = 3


@pytest.fixture(scope="module")
def model():
    return random_model(small_config(), device=CPU, dtype=torch.float32, seed=11)


@pytest.fixture(scope="module")
def requests(model):
    limits = ImageLimits(64 * 64, 128 * 128)
    images = prepare_images(packaged_photos(4), image_processor(model.config, limits), limits)
    return build_requests(images, model.config, count=5, budget=64, seed=2)


def reference(model, request):
    """Logits of the last prompt token and of each greedy step, and the tokens, by transformers alone."""
    ids, logits, tokens = list(request.ids), [], []
    images = [image for _, image in request.images]
    for _ in range(STEPS + 1):
        kinds = torch.tensor([[int(i == model.config.image_token_id) for i in ids]])
        extra = {}
        if images:
            dtype = model.lm_head.weight.dtype
            extra = {
                "pixel_values": torch.cat([i.patches for i in images]).to(dtype),
                "image_grid_thw": torch.tensor([i.grid for i in images]),
            }
        model.model.rope_deltas = None
        out = model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, use_cache=False, **extra)
        logits.append(out.logits[0, -1].double())
        tokens.append(int(logits[-1].argmax()))
        ids.append(tokens[-1])
    return torch.stack(logits), tokens


def embeddings(model, request):
    """Embeddings, deepstack rows and their places for a whole prompt, written down token by token."""
    tower = VisionTower(model.model.visual)
    embeds = model.model.language_model.embed_tokens(torch.tensor(request.ids)).clone()
    deep_rows = np.full(len(request.ids), -1, dtype=np.int32)
    pools = [torch.zeros(0, 3 * embeds.shape[1])]
    used = 0
    for start, image in request.images:
        out = tower.forward_blocks(**tower.prepare(image.patches, [image.grid]))
        embeds[start : start + image.tokens] = out["main"]
        pools.append(torch.cat(out["deep"], dim=1))
        deep_rows[start : start + image.tokens] = np.arange(used, used + image.tokens)
        used += image.tokens
    return embeds, torch.cat(pools), torch.from_numpy(deep_rows)


def serve(model, requests, steps_of_chunks):
    """Logits and greedy tokens of all requests by this package's functions."""
    slots = SlotMap.for_lengths([len(r.ids) + STEPS for r in requests])
    cache = KeyValueCache.create(model.config.text_config, slots.slots, device=CPU, dtype=torch.float32)
    language = LanguageModel(model, cache)
    rows = [embeddings(model, r) for r in requests]
    logits = [[] for _ in requests]
    for chunks in steps_of_chunks:
        pools, offsets, deep_rows = [], 0, []
        for c in chunks:
            _, pool, own = rows[c.request]
            own = own[c.prefix : c.prefix + c.count]
            deep_rows.append(torch.where(own >= 0, own + offsets, own))
            pools.append(pool)
            offsets += len(pool)
        inputs = prefill_inputs(
            language,
            requests,
            chunks,
            slots,
            embeds=torch.cat([rows[c.request][0][c.prefix : c.prefix + c.count] for c in chunks]),
            deep_pool=torch.cat(pools),
            deep_rows=torch.cat(deep_rows).to(torch.int32),
        )
        out = language.prefill(**inputs)["logits"]
        for row, c in enumerate(chunks):
            if c.prefix + c.count == len(requests[c.request].ids):
                logits[c.request].append(out[row])
    ids = torch.stack([one[0] for one in logits]).argmax(-1)
    for step in range(STEPS):
        out = language.decode(**decode_inputs(language, requests, slots, ids=ids, step=step))["logits"]
        for row, one in enumerate(logits):
            one.append(out[row])
        ids = out.argmax(-1)
    assert all(not t[0].any() for t in (*cache.keys, *cache.values))
    return [torch.stack(one).double() for one in logits]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["whole, alone", "in chunks of 17, alone", "packed in steps of 64"])
def test_logits_and_tokens_equal_transformers(model, requests, kind):
    if kind == "packed in steps of 64":
        served = serve(model, requests, schedule([len(r.ids) for r in requests], 64))
    else:
        most = 17 if "17" in kind else 10**6
        served = []
        for r in requests:
            n = len(r.ids)
            steps = [[Chunk(0, p, min(most, n - p))] for p in range(0, n, most)]
            served += serve(model, [r], steps)
    for request, got in zip(requests, served, strict=True):
        want, tokens = reference(model, request)
        with raised_precision(model, torch.float64):
            exact, _ = reference(model, request)
        allowed = 2 * (want - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (got - exact).abs().max() <= allowed, request.kind
        assert got.argmax(-1).tolist() == tokens, request.kind


@torch.no_grad()
def test_padding_rows_change_nothing(model, requests):
    request = requests[0]
    slots = SlotMap.for_lengths([len(request.ids) + 1])
    embeds, pool, deep_rows = embeddings(model, request)
    n = len(request.ids)
    results = []
    for pad in (0, 5):
        cache = KeyValueCache.create(model.config.text_config, slots.slots, device=CPU, dtype=torch.float32)
        language = LanguageModel(model, cache)
        chunks = [Chunk(0, 0, n)]
        inputs = prefill_inputs(
            language, [request], chunks, slots, embeds=embeds, deep_pool=pool, deep_rows=deep_rows
        )
        for name, value in inputs.items():
            if name == "deep_pool":
                continue
            tail = torch.zeros(pad, *value.shape[1:], dtype=value.dtype)
            if name == "embeds":
                tail.fill_(float("nan"))
            inputs[name] = torch.cat([value, tail])
        results.append((language.prefill(**inputs)["logits"][:1], cache))
    assert torch.isfinite(results[1][0]).all()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    for plain, padded in zip(results[0][1].values, results[1][1].values, strict=True):
        assert not padded[0].any()
        torch.testing.assert_close(plain, padded, rtol=1e-4, atol=1e-5)
