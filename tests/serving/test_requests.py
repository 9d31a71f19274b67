"""The batch holds what it promises, and the schedule covers every prompt once, in order, within the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.serving.errors import RequestError
from mmgraph.serving.model import SMALL_LIMITS, image_processor, small_config
from mmgraph.serving.photos import Photo, packaged_photos
from mmgraph.serving.requests import PreparedImage, build_requests, prepare_images, schedule

CONFIG = small_config()
BUDGET = 128


@pytest.fixture(scope="module")
def images():
    return prepare_images(packaged_photos(6), image_processor(CONFIG, SMALL_LIMITS), SMALL_LIMITS)


def fake(tokens, name="x"):
    return PreparedImage(name, "here", (1, 2, 2 * tokens), torch.zeros(4 * tokens, 8), tokens)


def test_images_differ_in_size_and_stay_within_the_limits(images):
    assert len({image.grid for image in images}) >= 4
    for image in images:
        assert image.patches.shape == (np.prod(image.grid), 1536)
        assert image.tokens * 4 == len(image.patches)
        assert len(image.patches) * 256 <= SMALL_LIMITS.max_pixels
    assert images[0].tokens * 2 + 60 <= BUDGET


def test_the_batch_holds_what_it_promises(images):
    requests = build_requests(images, CONFIG, count=6, budget=BUDGET, seed=1)
    assert len(requests) == 6
    assert requests[0].images[0][1] is requests[1].images[0][1]
    assert requests[2].images == ()
    steps = schedule([len(r.ids) for r in requests], BUDGET)
    assert {c.request for c in steps[0]} >= {0, 1}
    start, image = requests[3].images[0]
    (first, second) = [c for step in steps for c in step if c.request == 3]
    assert start < second.prefix < start + image.tokens
    assert first.count == second.prefix
    for request in requests:
        places = [p for s, i in request.images for p in range(s, s + i.tokens)]
        assert [p for p, t in enumerate(request.ids) if t == CONFIG.image_token_id] == places
        for s, i in request.images:
            assert request.ids[s - 1] == CONFIG.vision_start_token_id
            assert request.ids[s + i.tokens] == CONFIG.vision_end_token_id
        special = {CONFIG.image_token_id, CONFIG.video_token_id}
        special |= {CONFIG.vision_start_token_id, CONFIG.vision_end_token_id}
        assert all(t < CONFIG.text_config.vocab_size for t in request.ids)
        assert sum(t in special for t in request.ids) == len(places) + 2 * len(request.images)


def test_the_seed_decides_the_text(images):
    def ids(seed):
        return [r.ids for r in build_requests(images, CONFIG, count=7, budget=BUDGET, seed=seed)]

    assert ids(3) == ids(3)
    assert all(a != b for a, b in zip(ids(3), ids(4), strict=True))


@given(
    count=st.integers(1, 14),
    tokens=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    budget=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_any_batch_is_well_formed(count, tokens, budget, seed):
    requests = build_requests([fake(n) for n in tokens], CONFIG, count=count, budget=budget, seed=seed)
    assert len(requests) == count
    for request in requests:
        assert request.positions.shape == (3, len(request.ids))
        assert request.next_position <= len(request.ids) + max(tokens)
        for start, image in request.images:
            assert set(request.ids[start : start + image.tokens]) == {CONFIG.image_token_id}


@given(lengths=st.lists(st.integers(1, 50), max_size=12), budget=st.integers(1, 40))
def test_the_schedule_covers_every_prompt_once(lengths, budget):
    steps = schedule(lengths, budget)
    seen = [[] for _ in lengths]
    for step in steps:
        assert 0 < sum(c.count for c in step) <= budget
        assert [c.request for c in step] == sorted({c.request for c in step})
        for c in step:
            seen[c.request] += range(c.prefix, c.prefix + c.count)
    assert seen == [list(range(n)) for n in lengths]
    cut = {c.request for step in steps for c in step if c.count < lengths[c.request]}
    assert all(lengths[r] > budget for r in cut)


def test_nonsense_is_an_error(images):
    with pytest.raises(RequestError, match="at least 1, got 0"):
        build_requests(images, CONFIG, count=0, budget=BUDGET, seed=0)
    with pytest.raises(RequestError, match="at least one image"):
        build_requests([], CONFIG, count=2, budget=BUDGET, seed=0)
    assert build_requests(images, CONFIG, count=1, budget=BUDGET, seed=0)


def test_a_photo_without_patches_is_passed_over():
    processor = image_processor(CONFIG, SMALL_LIMITS)
    ribbon = Photo("ribbon.png", "here", np.zeros((1, 500, 3), dtype=np.uint8))
    thin = Photo("thin.png", "here", np.zeros((3, 90, 3), dtype=np.uint8))
    with pytest.warns(UserWarning, match=r"ribbon\.png.*aspect ratio.*passed over"):
        assert [i.name for i in prepare_images([ribbon, thin], processor, SMALL_LIMITS)] == ["thin.png"]
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(RequestError, match=r"none of 1 photo"):
        prepare_images([ribbon], processor, SMALL_LIMITS)
