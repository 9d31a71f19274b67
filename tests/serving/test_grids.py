"""The buckets hold every call that the loop can make within its budget, and nothing larger than that."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.serving.grids import decode_grid, geometric, prefill_grid, tower_grid
from mmgraph.serving.model import REAL_LIMITS, SMALL_LIMITS


@given(
    first=st.integers(1, 100), last=st.integers(1, 5000), steps=st.integers(1, 5), multiple=st.integers(1, 9)
)
def test_sizes_ascend_to_the_last_and_pad_by_no_more_than_a_step(first, last, steps, multiple):
    sizes = geometric(first, last, steps=steps, multiple=multiple)
    assert last <= sizes[-1] < last + multiple
    assert list(sizes) == sorted(set(sizes))
    assert all(size % multiple == 0 for size in sizes)
    assert all(b <= 2 ** (1 / steps) * a + multiple for a, b in itertools.pairwise(sizes))
    assert sizes[0] >= min(first, last)


@pytest.mark.parametrize(("budget", "limits"), [(128, SMALL_LIMITS), (2048, REAL_LIMITS)])
def test_tower_buckets_hold_a_step_and_one_image(budget, limits):
    grid = tower_grid(budget=budget, limits=limits, patch=16, merge=2)
    largest = limits.max_pixels // 256
    most = 4 * budget + largest
    assert grid.choose({"tokens": most, "batch": 16, "seqlen": largest}) is not None
    assert grid.choose({"tokens": most + 4, "batch": 1, "seqlen": 4}) is None
    assert all(b["tokens"] % 4 == 0 for b in grid)


@given(budget=st.integers(8, 4096), longest=st.integers(1, 9000), tokens=st.integers(1, 4096))
def test_prefill_buckets_hold_every_step(budget, longest, tokens):
    grid = prefill_grid(budget=budget, longest=longest)
    tokens = min(tokens, budget)
    sizes = {"tokens": tokens, "context": tokens + longest, "chunks": min(16, tokens), "visual": tokens}
    bucket = grid.choose(sizes)
    assert bucket is not None
    assert bucket["visual"] == bucket["tokens"]
    assert grid.choose({**sizes, "tokens": budget + 1, "visual": 0}) is None


@given(st.integers(1, 300))
def test_decode_buckets_hold_all_requests(count):
    grid = decode_grid(requests=count)
    bucket = grid.choose({"batch": count})
    assert bucket is not None
    assert bucket["batch"] < 2 * max(count, 4)
