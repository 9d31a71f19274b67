"""The split tower gives what transformers' own vision model gives for the same patches, grids and weights.

The metadata that the host computes equals what transformers computes with tensors; the rows and every deepstack
level are within twice the error that transformers' float32 has against float64.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from mmgraph.serving.model import raised_precision, random_model, small_config
from mmgraph.serving.positions import tower_metadata
from mmgraph.serving.tower import VisionTower

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def visual():
    return random_model(small_config(), device=CPU, dtype=torch.float32, seed=3).model.visual


grids_strategy = st.lists(
    st.tuples(
        st.integers(1, 2), st.integers(1, 9).map(lambda n: 2 * n), st.integers(1, 9).map(lambda n: 2 * n)
    ),
    min_size=1,
    max_size=4,
)


@given(grids=grids_strategy, side=st.integers(2, 48))
def test_metadata_equals_transformers(grids, side):
    inv_freq = (1.0 / 10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float) / 12)).numpy()
    host = tower_metadata(grids, side=side, merge=2, inv_freq=inv_freq)
    thw = torch.tensor(grids)
    rows, weights = get_vision_interpolation_indices_and_weights(
        thw, num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    # Where a weight is zero the row doesn't count: transformers may name another one there after rounding.
    counts = (weights > 1e-4).numpy()
    np.testing.assert_array_equal(np.where(counts, host.table_rows, 0), np.where(counts, rows.numpy(), 0))
    np.testing.assert_allclose(host.table_weights, weights.numpy(), atol=1e-5)
    places = get_vision_position_ids(thw, 2).numpy()
    angles = (places[:, :, None].astype(np.float32) * inv_freq).reshape(len(places), -1)
    np.testing.assert_allclose(host.cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(host.sin, np.sin(angles), atol=1e-6)
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    assert np.diff(host.cu_seqlens).tolist() == lengths
    assert host.max_seqlen == max(lengths)
    assert host.cu_seqlens.dtype == np.int32


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("grids", [[(1, 8, 12)], [(1, 4, 6), (1, 10, 8), (1, 4, 6), (2, 6, 2)]])
def test_rows_and_levels_equal_transformers(visual, grids, kind):
    visual.config._attn_implementation = kind
    patches = torch.randn(sum(t * h * w for t, h, w in grids), 1536, generator=torch.Generator().manual_seed(5))
    thw = torch.tensor(grids)
    tower = VisionTower(visual)
    with torch.no_grad():
        expected = visual(patches, grid_thw=thw)
        got = tower.forward_blocks(**tower.prepare(patches, grids))
        with raised_precision(visual, torch.float64):
            truth = visual(patches.double(), grid_thw=thw)
    assert len(got["deep"]) == 3
    pairs = [(got["main"], expected.pooler_output, truth.pooler_output)]
    pairs += list(zip(got["deep"], expected.deepstack_features, truth.deepstack_features, strict=True))
    for mine, theirs, exact in pairs:
        own_error = (theirs.double() - exact).abs().max().item()
        allowed = 2 * own_error + torch.finfo(torch.float32).eps * exact.abs().max().item()
        assert mine.shape == theirs.shape
        assert (mine.double() - exact).abs().max().item() <= allowed


def test_images_do_not_see_each_other(visual):
    tower = VisionTower(visual)
    grids = [(1, 6, 4), (1, 4, 8)]
    patches = torch.randn(24 + 32, 1536, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        both = tower.forward_blocks(**tower.prepare(patches, grids))["main"]
        other = patches.clone()
        other[24:] = 7.0
        changed = tower.forward_blocks(**tower.prepare(other, grids))["main"]
    torch.testing.assert_close(both[:6], changed[:6], rtol=0, atol=0)
    assert not torch.equal(both[6:], changed[6:])


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [], [(1, 4, 4), (1, 4, 6)]])
def test_grids_that_do_not_fit_are_an_error(visual, grids):
    tower = VisionTower(visual)
    with pytest.raises(ValueError, match="one grid per image"):
        tower.prepare(torch.zeros(24, 1536), grids)
    assert tower.prepare(torch.zeros(24, 1536), [(1, 4, 6)])["max_seqlen"] == 24
