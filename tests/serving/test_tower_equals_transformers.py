"""The split tower gives what transformers' own vision model gives for the same patches, grids and weights.

The metadata that the host computes equals what transformers computes with tensors; the rows and every deepstack
level are within twice the error that transformers' float32 has against float64.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from mmgraph.serving.model import raised_precision, random_model, small_config
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


@given(grids=grids_strategy)
def test_metadata_equals_transformers(visual, grids):
    thw = torch.tensor(grids)
    total = sum(t * h * w for t, h, w in grids)
    got = VisionTower(visual).prepare(torch.zeros(total, 1536), grids)
    rows, weights = get_vision_interpolation_indices_and_weights(
        thw,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=2,
    )
    assert torch.equal(got["table_rows"].long(), rows)
    assert torch.equal(got["table_weights"], weights)
    cos, sin = visual.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(thw, 2))
    half = cos.shape[1] // 2
    for mine, theirs in ((got["cos"], cos), (got["sin"], sin)):
        torch.testing.assert_close(torch.cat([mine, mine], 1), theirs, rtol=0, atol=1e-6)
        assert mine.shape == (total, half)
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    assert got["cu_seqlens"].dtype == torch.int32
    assert got["cu_seqlens"].diff().tolist() == lengths
    assert got["max_seqlen"] == max(lengths)


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
