"""Invariant: a batch's host metadata equals what transformers makes of the same grids to the bit, kept or made anew."""

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import vision_utils

from mmgraph.errors import GridError, MultimodalError, OptionError, TowerError
from mmgraph.towers import grids as module
from mmgraph.towers.frames import merge_order
from mmgraph.towers.grids import GridCache, GridLayout, PositionTable, grids_of


@st.composite
def batches(draw, merge=None):
    """A merge block's side and grids of whole blocks, videos and repeated sizes among them."""
    merge = draw(st.sampled_from([1, 2, 3])) if merge is None else merge
    side = st.integers(1, 9).map(lambda n: n * merge)
    return merge, draw(st.lists(st.tuples(st.sampled_from([1, 1, 2, 5]), side, side), min_size=1, max_size=5))


tables = st.builds(
    PositionTable,
    side=st.integers(1, 48),
    mode=st.sampled_from(["bilinear", "bicubic"]),
    align_corners=st.booleans(),
    padding=st.sampled_from(["border", "zeros"]),
    raster=st.booleans(),
)


def same(mine, theirs, dtype):
    """Equal to the bit in the dtype that is ours: the sign of a zero counts."""
    assert mine.dtype == dtype
    assert mine.tobytes() == np.ascontiguousarray(theirs.numpy().astype(dtype)).tobytes()
    assert mine.shape == tuple(theirs.shape)


@given(batch=batches(), table=tables)
def test_table_entries_equal_transformers(batch, table):
    merge, grids = batch
    host = GridCache(GridLayout(merge=merge, table=table)).batch(grids)
    taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(grids),
        table.side,
        mode=table.mode,
        align_corners=table.align_corners,
        spatial_merge_size=1 if table.raster else merge,
        padding=table.padding,
    )
    assert taps.shape[1] == table.taps
    same(host.taps, taps, np.int32)
    same(host.tap_weights, weights, np.float32)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(6, 10), (24, 16), (1, 1), (40, 56)])
def test_table_entries_interpolate_as_pytorch_does(mode, align_corners, height, width):
    """A reference that shares nothing with the entries: float64 images through PyTorch's own resampling."""
    learned = torch.randn(1, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = functional.interpolate(learned, (height, width), mode=mode, align_corners=align_corners)
    table = PositionTable(16, mode=mode, align_corners=align_corners)
    host = GridCache(GridLayout(table=table)).batch([(2, height, width)])
    entries = learned[0].flatten(1).T[torch.from_numpy(host.taps).long()]
    mixed = (entries * torch.from_numpy(host.tap_weights)[:, :, None].double()).sum(1)
    frame = expected[0].flatten(1).T
    # Weights are products of float32 numbers, each off by the rounding of a place on an axis of 16.
    assert mixed.shape == (2 * height * width, 3)
    assert float((mixed - torch.cat([frame, frame])).abs().max()) < 64 * torch.finfo(torch.float32).eps


@given(batch=batches(), window=st.integers(1, 5), windowed=st.booleans(), temporal=st.booleans())
def test_positions_and_windows_equal_transformers(batch, window, windowed, temporal):
    merge, grids = batch
    thw = torch.tensor(grids)
    layout = GridLayout(merge=merge, window=window, windowed=windowed, temporal=temporal)
    cache = GridCache(layout)
    host = cache.batch(grids)
    order, cu_windows = vision_utils.get_vision_window_index(thw, merge, window * merge * 14, 14)
    same(host.order, order, np.int32)
    same(host.back, order.argsort(), np.int32)
    same(host.cu_windows, cu_windows, np.int32)
    assert host.max_window == int(cu_windows.diff().max())
    assert sum(map(cache.windows, host.grids)) == len(cu_windows) - 1
    positions = vision_utils.get_vision_position_ids(thw, merge, include_temporal=temporal)
    if windowed:
        positions = positions.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
    same(host.positions, positions, np.int32)


@given(batch=batches(), clips=st.booleans())
def test_sequences_equal_transformers(batch, clips):
    merge, grids = batch
    host = GridCache(GridLayout(merge=merge, clips=clips)).batch(grids)
    cu_seqlens = vision_utils.get_vision_cu_seqlens(torch.tensor(grids), merge_temporal=clips)
    same(host.cu_seqlens, cu_seqlens, np.int32)
    assert host.max_seqlen == int(cu_seqlens.diff().max())
    assert host.grids == tuple(grids)
    assert host.patches == sum(t * h * w for t, h, w in grids)
    assert (host.taps, host.order, host.cu_windows, host.max_window) == (None, None, None, 0)
    assert set(host.arrays()) == {"cu_seqlens", "positions"}


@given(batch=batches())
def test_merge_order_leads_from_raster_to_blocks(batch):
    merge, grids = batch
    for _, height, width in grids:
        raster = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1).reshape(-1, 2)
        host = GridCache(GridLayout(merge=merge)).batch([(1, height, width)])
        assert np.array_equal(raster[merge_order(height, width, merge)], host.positions)


FULL = GridLayout(merge=2, table=PositionTable(7, mode="bicubic"), window=2, temporal=True)


def equal(one, other):
    mine, theirs = one.arrays(), other.arrays()
    assert mine.keys() == theirs.keys()
    assert len(mine) == 7
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


def test_no_items_make_empty_arrays():
    for none in ([], (), np.empty((0, 3), np.int64), torch.empty(0, 3, dtype=torch.int64)):
        host = GridCache(FULL).batch(none)
        assert {name: (array.shape, str(array.dtype)) for name, array in host.arrays().items()} == {
            "cu_seqlens": ((1,), "int32"),
            "positions": ((0, 3), "int32"),
            "taps": ((0, 16), "int32"),
            "tap_weights": ((0, 16), "float32"),
            "order": ((0,), "int32"),
            "back": ((0,), "int32"),
            "cu_windows": ((1,), "int32"),
        }
        assert (host.grids, host.patches, host.max_seqlen, host.max_window) == ((), 0, 0, 0)


def test_a_batch_is_the_callers_own():
    cache = GridCache(FULL)
    first = cache.batch([(1, 4, 6)])
    kept = copy.deepcopy(first)
    for array in first.arrays().values():
        array[...] = 77
    equal(cache.batch([(1, 4, 6)]), kept)


def test_frames_are_made_once_whatever_has_them(monkeypatch):
    made = []
    make = module.frame_arrays
    monkeypatch.setattr(
        module, "frame_arrays", lambda *size, **options: (made.append(size), make(*size, **options))[1]
    )
    cache = GridCache(FULL)
    cache.batch([(1, 4, 6), (3, 4, 6), (1, 6, 4), (1, 4, 6)])
    assert made == [(4, 6), (6, 4)]
    assert (cache.stats.hits, cache.stats.misses, cache.stats.frames) == (2, 2, 2)
    cache.batch([(9, 6, 4)])
    assert (cache.stats.hits, cache.stats.misses) == (3, 2)
    assert len(made) == 2
    cache.clear()
    assert (cache.stats.frames, cache.stats.nbytes) == (0, 0)
    cache.batch([(1, 6, 4)])
    assert len(made) == 3


@settings(max_examples=50)
@given(seed=st.integers(0, 2**20), bound=st.integers(0, 12_000))
def test_the_kept_bytes_stay_within_the_bound_and_the_last_used_stay(seed, bound):
    rng = np.random.default_rng(seed)
    cache, free = GridCache(FULL, bound), GridCache(FULL)
    kept, evictions = [], 0  # what the bound leaves, least recently used first
    for _ in range(12):
        grids = [(1, int(h), int(w)) for h, w in 2 * rng.integers(1, 5, (int(rng.integers(1, 4)), 2))]
        equal(cache.batch(grids), free.batch(grids))
        nbytes = {size: frame.nbytes for size, frame in free._kept.items()}
        wanted = list(dict.fromkeys(grid[1:] for grid in grids))
        there = [size for size in wanted if size in kept]
        kept = [size for size in kept if size not in there] + there
        for size in wanted:
            if size not in there and nbytes[size] <= bound:
                kept.append(size)
                while sum(nbytes[one] for one in kept) > bound:
                    kept.pop(0)
                    evictions += 1
        stats = cache.stats
        assert list(cache._kept) == kept
        assert (stats.frames, stats.evictions) == (len(kept), evictions)
        assert stats.nbytes == sum(nbytes[size] for size in kept) <= bound
    assert stats.hits + stats.misses == free.stats.hits + free.stats.misses


@pytest.fixture
def hasty_threads():
    """Threads take turns every few instructions, so that what isn't guarded goes wrong."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_get_right_batches_and_counts():
    sizes = [(1, 2 * h, 2 * w) for h in range(1, 5) for w in range(1, 5)]
    expected = {size: GridCache(FULL).batch([size, (2, 4, 4)]) for size in sizes}
    cache = GridCache(FULL, 6000)  # less than all of them
    wrong, ready = [], threading.Barrier(4)

    def ask(seed):
        ready.wait(60)
        for number in np.random.default_rng(seed).integers(0, len(sizes), 150):
            try:
                equal(cache.batch([sizes[number], (2, 4, 4)]), expected[sizes[number]])
            except BaseException as error:  # whatever it is, it is reported below
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    stats = cache.stats
    assert stats.hits + stats.misses == 4 * 150 * 2
    assert stats.evictions > 0
    assert stats.nbytes == sum(frame.nbytes for frame in cache._kept.values()) <= 6000


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_has_the_options_and_nothing_kept(duplicate):
    cache = GridCache(FULL, 4321)
    host = cache.batch([(1, 4, 6)])
    other = duplicate(cache)
    assert (other.layout, other.max_bytes, other.stats.frames) == (FULL, 4321, 0)
    equal(other.batch([(1, 4, 6)]), host)


GRIDS = ((1, 4, 6), (3, 2, 2))


@pytest.mark.parametrize(
    "given",
    [
        GRIDS,
        list(map(list, GRIDS)),
        np.array(GRIDS),
        np.array(GRIDS, dtype=np.uint8),
        np.array(GRIDS, dtype=np.int32)[::-1][::-1],
        torch.tensor(GRIDS),
        torch.tensor(GRIDS, dtype=torch.int32),
        [torch.tensor(grid) for grid in GRIDS],
    ],
)
def test_grids_come_in_many_forms(given):
    grids = grids_of(given)
    assert grids == GRIDS
    assert {type(number) for grid in grids for number in grid} == {int}
    equal(GridCache(FULL).batch(given), GridCache(FULL).batch(GRIDS))


WRONG = {
    "a number that is zero": ([(1, 4, 6), (1, 0, 4)], r"at least 1; grid 1 is \(1, 0, 4\)"),
    "a negative number": (torch.tensor([[1, 4, -6]]), r"at least 1; grid 0 is \(1, 4, -6\)"),
    "two numbers": ([(4, 6)], r"rows of 3 integers .* shape \(1, 2\)"),
    "no list": ((1, 4, 6), r"rows of 3 integers .* shape \(3,\)"),
    "ragged": ([(1, 4, 6), (1, 4)], "rows of 3 integers"),
    "fractions": ([(1, 4.0, 6)], "rows of 3 integers .* float64"),
    "a fractional tensor": (torch.ones(2, 3), r"rows of 3 integers.*float32"),
    "flags": (torch.ones(2, 3, dtype=torch.bool), "rows of 3 integers .* bool"),
    "text": ([("1", "4", "6")], "rows of 3 integers"),
    "huge numbers": ([(1, 2**70, 2)], "rows of 3 integers .* object"),
    "too many": ([(2, 2**15, 2**15)], "more than int32 can count"),
    "too many in all": ([(1, 2**15, 2**15)] * 2, "more than int32 can count"),
    "more than int64 can count": ([(2**40, 2**40, 2**40)], "more than int32 can count"),
    "None": (None, "rows of 3 integers"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_grids_are_refused(kind):
    given, message = WRONG[kind]
    cache = GridCache(FULL)
    for call in (grids_of, cache.batch):
        with pytest.raises(GridError, match=message):
            call(given)
    assert cache.stats.misses == 0
    assert cache.batch(GRIDS).grids == GRIDS


def test_grids_of_broken_blocks_are_refused():
    cache = GridCache(FULL)
    with pytest.raises(GridError, match=r"multiples of the merge block's side, 2; grid 1 is \(1, 4, 5\)"):
        cache.batch([(1, 4, 6), (1, 4, 5)])
    assert cache.stats.misses == 0
    assert GridCache(GridLayout(merge=1)).batch([(1, 4, 5)]).patches == 20
    assert issubclass(GridError, (TowerError, MultimodalError, ValueError))


def test_grids_on_a_device_are_refused():
    there = torch.ones(2, 3, dtype=torch.int64, device="meta")
    for call in (grids_of, GridCache(FULL).batch):
        with pytest.raises(GridError, match=r"on meta, .* move them to the host first"):
            call(there)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: GridLayout(merge=0),
        lambda: GridLayout(merge=True),
        lambda: GridLayout(window=2.0),
        lambda: GridLayout(window=-1),
        lambda: PositionTable(0),
        lambda: PositionTable(46341),
        lambda: PositionTable(8.0),
        lambda: PositionTable(8, mode="nearest"),
        lambda: PositionTable(8, padding="reflect"),
        lambda: GridCache(FULL, -1),
        lambda: GridCache(FULL, None),
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(OptionError, match=r", got "):
        wrong()
