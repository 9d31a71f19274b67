"""Invariant: on CUDA an encoder serves new sizes with no wait, capture or compilation, and gives what eager gives."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from clips import GRID, ClipAdapter, expected, make_clip
from torch._dynamo.utils import counters

from mmgraph.capture import CapturedEncoder

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)


@contextmanager
def no_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_five_hundred_mixed_lists_are_served_without_waits_captures_or_compilations() -> None:
    adapter = ClipAdapter(DEVICE)
    encoder = CapturedEncoder(adapter, buckets=GRID)
    examples = [make_clip([6, 4], 0, device=DEVICE), make_clip([6], 1, "video", device=DEVICE)]
    encoder.precompile(examples, progress=False)
    rng = random.Random(0)
    lists = [
        [
            make_clip(
                [rng.randint(0, 12) for _ in range(rng.randint(0, 6))] if rng.random() < 0.95 else [70],
                rng.randint(0, 2**31),
                rng.choice(["image", "video"]),
                DEVICE,
            )
            for _ in range(rng.randint(0, 10))
        ]
        for _ in range(500)
    ]
    before = [(row.variant, row.bucket, row.capture_seconds) for row in encoder.report().towers[None].buckets]
    compiled = {kind: dict(counts) for kind, counts in counters.items()}
    with no_waits():
        results = [encoder(items) for items in lists]
    report = encoder.report()
    assert [(row.variant, row.bucket, row.capture_seconds) for row in report.towers[None].buckets] == before
    assert {kind: dict(counts) for kind, counts in counters.items()} == compiled
    assert report.towers[None].backend == "cuda graphs"
    assert report.towers[None].hits > 400
    assert report.towers[None].misses.keys() == report.eager.keys() == {"beyond the grid"}
    for items, got in zip(lists, results, strict=True):  # only now: later calls must not have changed them
        for one, other in zip(got, expected(adapter, items), strict=True):
            assert torch.equal(one, other)


def test_rows_go_into_memory_of_the_callers_on_his_own_stream() -> None:
    adapter = ClipAdapter(DEVICE)
    encoder = CapturedEncoder(adapter, buckets=GRID)
    items = [make_clip([n], n, device=DEVICE) for n in (4, 70, 12)]
    encoder.precompile(items[:1], progress=False)
    wanted = torch.cat(expected(adapter, items))
    out = torch.zeros_like(wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_waits():
        assert encoder(items, out=out) is out
    stream.synchronize()
    assert torch.equal(out, wanted)
