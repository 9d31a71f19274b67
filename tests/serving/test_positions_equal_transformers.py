"""The prompt's three rows of rotary positions, and the tables made from them, equal transformers' own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.serving.errors import ModelError
from mmgraph.serving.language import KeyValueCache, LanguageModel
from mmgraph.serving.model import random_model, small_config
from mmgraph.serving.positions import prompt_positions

CPU = torch.device("cpu")
MODEL = random_model(small_config(), device=CPU, dtype=torch.float32, seed=1)


def prompt(draws):
    """Ids, image places and grids from (text tokens, grid or None) pairs."""
    config = MODEL.config
    ids, places, grids = [], [], []
    for text, grid in draws:
        ids += [1] * text
        if grid is not None:
            ids.append(config.vision_start_token_id)
            places.append((len(ids), grid))
            grids.append(grid)
            ids += [config.image_token_id] * (grid[0] * grid[1] * grid[2] // 4)
            ids.append(config.vision_end_token_id)
    return [*ids, 1], places, grids


grid_strategy = st.tuples(
    st.just(1), st.integers(1, 8).map(lambda n: 2 * n), st.integers(1, 8).map(lambda n: 2 * n)
)


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | grid_strategy), max_size=5))
def test_positions_equal_get_rope_index(draws):
    ids, places, grids = prompt(draws)
    kinds = torch.tensor([[int(i == MODEL.config.image_token_id) for i in ids]])
    expected, delta = MODEL.model.get_rope_index(
        torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids) if grids else None
    )
    got = prompt_positions(len(ids), places, 2)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, expected[:, 0].numpy())
    assert int(got.max()) + 1 - len(ids) == int(delta)


def test_rotary_tables_equal_transformers():
    ids, places, _ = prompt([(4, (1, 6, 10)), (7, (1, 12, 4)), (2, None)])
    positions = prompt_positions(len(ids), places, 2)
    model = LanguageModel(
        MODEL, KeyValueCache.create(MODEL.config.text_config, 1, device=CPU, dtype=torch.float32)
    )
    cos, sin = model.rotary(positions)
    want_cos, want_sin = MODEL.model.language_model.rotary_emb(
        torch.zeros(1), torch.from_numpy(positions)[:, None]
    )
    half = cos.shape[1]
    assert half == MODEL.config.text_config.head_dim // 2
    torch.testing.assert_close(torch.cat([cos, cos], 1), want_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([sin, sin], 1), want_sin[0], rtol=0, atol=1e-6)
    assert not np.array_equal(positions[1], positions[2])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_that_changes_with_length_is_refused(kind):
    cache = KeyValueCache.create(MODEL.config.text_config, 1, device=CPU, dtype=torch.float32)
    rotary = MODEL.model.language_model.rotary_emb
    rotary.rope_type = kind
    try:
        with pytest.raises(ModelError, match=kind):
            LanguageModel(MODEL, cache)
    finally:
        rotary.rope_type = "default"
    LanguageModel(MODEL, cache)
