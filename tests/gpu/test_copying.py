"""Invariant: on CUDA, a graph's own nodes move and fill what the plain forms do, without a wait or a late compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from call_kernels import (
    check_fetch,
    check_more_leaves_than_a_launch_takes,
    check_publish,
    check_runs_about_as_long_as_a_block,
    check_stage,
    publications,
    record_of,
    stagings,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture import launching, publishing
from mmgraph.capture.copying import pieces_of
from mmgraph.capture.errors import CaptureError, NotCapturableError
from mmgraph.capture.padding import PadLeaf, fill_padding, fill_padding_reference, fill_pattern
from mmgraph.capture.publishing import PublishLeaf
from mmgraph.capture.ring import CallRing

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def needs_free(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(DEVICE)[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


def random_bytes(size: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))


def publish(generation: Any, leaves: list[PublishLeaf]) -> None:
    generation.publish_leaves = lambda flat: leaves
    publishing.publish(generation, [leaf.source for leaf in leaves], ())


@settings(max_examples=40)
@given(st.sampled_from((20, 3000)).flatmap(lambda longest: stagings(most=20, longest=longest)))
def test_inputs_of_every_alignment_are_staged_and_nothing_else(drawn: dict) -> None:
    check_stage(drawn, DEVICE)


@settings(max_examples=40)
@given(st.sampled_from((6, 30)).flatmap(lambda longest: publications(most=20, longest=longest)))
def test_real_rows_are_published_and_nothing_else(drawn: dict) -> None:
    check_publish(drawn, DEVICE)


@settings(max_examples=10)
@given(stagings(longest=400), publications(longest=30))
def test_few_programs_go_on_to_further_blocks(staged: dict, published: dict) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_BLOCK_BYTES", 256)
        patch.setattr(publishing, "_MOST_PROGRAMS", 3)
        check_stage(staged, DEVICE)
        check_publish(published, DEVICE)


def test_leaves_beyond_those_of_a_launch() -> None:
    check_more_leaves_than_a_launch_takes(DEVICE)


def test_runs_about_as_long_as_a_block() -> None:
    check_runs_about_as_long_as_a_block(DEVICE, publishing._BLOCK_BYTES)


@pytest.mark.parametrize("width", [1, 5, 64])
def test_the_next_slot_is_fetched(width: int) -> None:
    check_fetch(width, 3, 7, DEVICE)


def test_a_ring_goes_round_and_notices_a_launch_too_many() -> None:
    record = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    ring, seen = CallRing(3, record), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    calls = 5000
    for call in range(calls):
        ring.write((call, call * call, -call))
        ring.fetch()
        ring.launched()
        seen += record
    total = calls * (calls - 1) // 2
    assert seen.tolist() == [total, total * (2 * calls - 1) // 3, -total]
    ring.fetch()
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="another call"):
        ring.write((0, 0, 0))


def test_a_captured_graph_moves_what_each_call_says() -> None:
    view, source = torch.zeros(40, 6, device=DEVICE), torch.randn(50, 18, device=DEVICE)
    doubled = torch.zeros(40, 6, device=DEVICE)
    generation = record_of([0] * 7, DEVICE)  # a size, the output's address, and the input's five numbers
    ring, leaves = CallRing(7, generation.record), [PublishLeaf(doubled, 0, 1, 0, False, 1)]
    fills = torch.tensor([fill_pattern(3.0, torch.float32)], device=DEVICE)

    def nodes() -> None:
        ring.fetch()
        publishing.stage(generation, [(view, 2)])
        fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], generation.record, fills)
        torch.mul(view, 2, out=doubled)
        publish(generation, leaves)

    ring.write([0] * 7)
    nodes()  # compiles
    ring.launched()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nodes()
    for rows in (7, 0, 40, 12):
        part = source[3 : 3 + rows, 4:10]  # its rows lie apart
        piece = pieces_of(part, view, 0)
        assert piece is not None
        result = torch.full((41, 6), -1.0, device=DEVICE)
        with no_waiting():
            ring.write([rows, result.data_ptr(), piece[0], *piece[2:]])
            graph.replay()
            ring.launched()
        assert torch.equal(result[:rows], part * 2)
        assert bool((result[rows:] == -1).all())
        assert bool((view[rows:] == 3).all())


def test_sources_beyond_two_gibibytes() -> None:
    needs_free(8)
    size = 2**31 + 4096 + 48
    src = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    src[:1000] = 1
    src[2**31 - 500 :] = torch.arange(size - 2**31 + 500, device=DEVICE).to(torch.uint8)
    dst = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for shift in (0, 4, 1):
        part, target = src[shift : size - 16], dst[shift : size - 16]
        dst.fill_(9)
        numbers = [src.data_ptr() + shift, part.numel(), 1, 0, 0]
        publishing.stage(record_of(numbers, DEVICE), [(target, 0)])
        assert torch.equal(part, target)
        assert bool((dst[:shift] == 9).all())
        assert bool((dst[size - 16 :] == 9).all())
        dst.fill_(9)
        rows = part.numel() - 100
        leaf = PublishLeaf(part, 0, 1, 0, False, 1)
        publish(record_of([rows, target.data_ptr()], DEVICE), [leaf])
        assert torch.equal(part[:rows], target[:rows])
        assert bool((dst[:shift] == 9).all())
        assert bool((target[rows:] == 9).all())
    far = torch.full((3, 32), 9, dtype=torch.uint8, device=DEVICE)
    publishing.stage(record_of([src.data_ptr(), 16, 3, 2**30, 32], DEVICE), [(far, 0)])
    assert torch.equal(far[:, :16], torch.stack([src[i * 2**30 :][:16] for i in range(3)]))
    assert bool((far[:, 16:] == 9).all())


def test_nothing_compiles_after_the_first_launch_of_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs["key"]))
    monkeypatch.setattr(publishing, "_BLOCK_BYTES", 2048)  # a structure that no other test has
    memory = torch.zeros(2**16, dtype=torch.uint8, device=DEVICE)
    calls = []
    for size in (1, 4, 16, 2048, 3000):
        for shift in (0, 1, 4, 16):
            view, source = memory[shift : shift + size], memory[2**15 + shift : 2**15 + shift + size]
            numbers = [size, view.data_ptr(), source.data_ptr(), size, 1, 0, 0]
            calls.append((record_of(numbers, DEVICE), view, PublishLeaf(source, 0, 1, 0, False, 1)))
    for number, (generation, view, leaf) in enumerate(calls):
        with no_waiting():
            publishing.stage(generation, [(view, 2)])
            publish(generation, [leaf])
        assert len(compiled) == 2, number


def leaves_on(
    rng: np.random.Generator, number: int, longest: int
) -> tuple[list[torch.Tensor], list[tuple[int, int, torch.Size, int, torch.dtype]], list[PadLeaf]]:
    """Rooms of random bytes on the CPU, where views lie in them, and leaves over these."""
    rooms, where, leaves = [], [], []
    for index in range(number):
        offsets = bool(rng.integers(0, 3) == 0)
        dtype = (torch.int32, torch.int64)[index % 2] if offsets else DTYPES[int(rng.integers(len(DTYPES)))]
        axis = 0 if offsets else int(rng.integers(0, 3))
        shape = torch.Size([int(rng.integers(0, longest))] if offsets else rng.integers(1, 30, 3).tolist())
        if not offsets and rng.integers(0, 4) == 0:
            shape = torch.Size([longest, 3])
            axis = int(rng.integers(0, 2))
        start = 64 + int(rng.integers(0, 9)) * dtype.itemsize
        room = random_bytes(start + shape.numel() * dtype.itemsize + 64, rng)
        rooms.append(room)
        where.append((start, shape.numel() * dtype.itemsize, shape, axis, dtype))
        leaves.append(PadLeaf(view_in(room, where[-1]), axis, int(rng.integers(1, 4)), index, index, offsets))
    return rooms, where, leaves


def view_in(room: torch.Tensor, at: tuple[int, int, torch.Size, int, torch.dtype]) -> torch.Tensor:
    start, size, shape, _, dtype = at
    return room[start : start + size].view(dtype).view(shape)


@settings(max_examples=30)
@given(st.integers(1, 20), st.sampled_from((50, 9000)), st.integers(0, 2**20))
def test_a_captured_fill_follows_the_counts(number: int, longest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rooms, where, leaves = leaves_on(rng, number, longest)
    there = [room.to(DEVICE) for room in rooms]
    moved = [
        PadLeaf(view_in(room, at), leaf.axis, leaf.per, leaf.count, leaf.fill, leaf.offsets)
        for room, at, leaf in zip(there, where, leaves, strict=True)
    ]
    fills = torch.tensor([fill_pattern(1.5 if at[4].is_floating_point else 1, at[4]) for at in where])
    counts = torch.zeros(number, dtype=torch.int64)
    counts_there, fills_there = counts.to(DEVICE), fills.to(DEVICE)
    fill_padding(moved, counts_there, fills_there)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_padding(moved, counts_there, fills_there)
    for _ in range(3):
        for room, target in zip(rooms, there, strict=True):
            room.copy_(random_bytes(room.numel(), rng))
            target.copy_(room)
        # No rows, all of them and more among the counts.
        drawn = [
            int(rng.integers(-1, at[2][leaf.axis] * leaf.per + 3))
            for at, leaf in zip(where, leaves, strict=True)
        ]
        counts.copy_(torch.tensor(drawn))
        counts_there.copy_(counts)
        graph.replay()
        fill_padding_reference(leaves, counts, fills)
        for room, target in zip(rooms, there, strict=True):
            assert torch.equal(room, target.cpu())


def test_a_fill_waits_for_nothing() -> None:
    view = torch.ones(300, 64, device=DEVICE)
    counts, fills = torch.full((1,), 7, device=DEVICE), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with no_waiting():
        fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts, fills)
    assert (view[:7] == 1).all()
    assert (view[7:] == 0).all()


def test_a_capture_of_something_not_yet_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_variants", {})
    view = torch.zeros(30, 64, device=DEVICE)
    counts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    fills = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    leaves, generation = [PadLeaf(view, 0, 1, 0, 0, False)], record_of([0] * 5, DEVICE)

    def capture(function: Callable[[], None]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            view.add_(1)
            function()

    with pytest.raises(NotCapturableError, match="compiled"):
        capture(lambda: fill_padding(leaves, counts, fills))
    with pytest.raises(NotCapturableError, match="compiled"):
        capture(lambda: publishing.stage(generation, [(view, 0)]))
    view.fill_(3)
    fill_padding(leaves, counts, fills)
    assert bool((view == 0).all())


def test_padding_beyond_two_gibibytes() -> None:
    needs_free(3)
    view = torch.full((2**21 + 8, 1024), 5, dtype=torch.uint8, device=DEVICE)
    counts = torch.full((1,), 2**21 + 3, device=DEVICE)
    fills = torch.tensor([fill_pattern(200, torch.uint8)], device=DEVICE)
    fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts, fills)
    assert bool((view[: 2**21 + 3] == 5).all())
    assert bool((view[2**21 + 3 :] == 200).all())
