"""Invariant: padding is filled, and nothing else written, as counts on the device say; a recording does it anew."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture.errors import SpecError
from mmgraph.capture.padding import PadLeaf, fill_padding, fill_padding_reference, fill_pattern
from mmgraph.capture.recorder import Recording

Fill = Callable[[Sequence[PadLeaf], torch.Tensor, torch.Tensor], None]

# With a value whose bytes differ from each other where the dtype has several.
VALUES = {
    torch.bool: True,
    torch.uint8: 201,
    torch.int8: -3,
    torch.int16: -300,
    torch.int32: 70001,
    torch.int64: 2**60 + 12345,
    torch.float16: float("nan"),
    torch.bfloat16: -1.7,
    torch.float32: 0.1,
    torch.float64: float("-inf"),
    torch.complex64: 1.5,
    torch.complex128: 0.1,
    torch.float8_e4m3fn: -1.5,
    torch.float8_e5m2: 3.0,
    torch.uint16: 40001,
    torch.uint32: 4000000001,
}


@st.composite
def paddings(draw: st.DrawFn, most: int = 18) -> dict[str, object]:
    """Views, with a count for each that lies before, at or beyond its end."""
    leaves = []
    for _ in range(draw(st.integers(0, most))):
        shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        if draw(st.integers(0, 9)) == 0:
            shape[-1] = 0
        axis = draw(st.integers(0, len(shape) - 1))
        dtype, per, offsets = draw(st.sampled_from(list(VALUES))), draw(st.integers(1, 4)), draw(st.booleans())
        if offsets:
            dtype, per, axis = draw(st.sampled_from((torch.int32, torch.int64))), 1, 0
            shape = [draw(st.integers(0, 40))]
        counts = [draw(st.integers(0, (shape[axis] + 2) * per)) for _ in range(2)]
        leaves.append((shape, axis, per, dtype, offsets, draw(st.integers(0, 17)), counts))
    return {"leaves": leaves, "seed": draw(st.integers(0, 2**20))}


def expect(room: torch.Tensor, start: int, leaf: PadLeaf, count: int, pattern: tuple[int, int]) -> None:
    """Writes what is expected, element by element, into a copy of a leaf's room."""
    shape, item = list(leaf.view.shape), leaf.view.element_size()
    if not leaf.view.numel():
        return
    view = room[start : start + leaf.view.nbytes].view(-1, item)
    octets = torch.tensor(pattern).view(torch.uint8)[:item]
    rows = torch.arange(leaf.view.numel()).view(shape).movedim(leaf.axis, 0).reshape(shape[leaf.axis], -1)
    if leaf.offsets:
        for row in range(count + 1, shape[0]):
            view[row] = view[count]
    else:
        for row in range(count // leaf.per, shape[leaf.axis]):
            view[rows[row]] = octets


def check_fill(drawn: dict, wrap: Callable[[Callable[[], None], list], Callable[[], None]], fill: Fill) -> None:
    """Fills with two lots of counts, and compares every byte of the views and of what lies around them.

    `wrap` gets the function and the tensors that it uses, and returns what runs it.
    """
    generator = torch.Generator().manual_seed(drawn["seed"])
    rooms, starts, leaves, patterns, counts = [], [], [], [], [[], []]
    for shape, axis, per, dtype, offsets, shift, drawn_counts in drawn["leaves"]:
        start, size = 64 + shift * dtype.itemsize, torch.Size(shape).numel() * dtype.itemsize
        room = torch.randint(0, 256, (start + size + 64,), dtype=torch.uint8, generator=generator)
        view = room[start : start + size].view(dtype).view(shape)
        place = len(leaves)
        patterns.append(fill_pattern(VALUES[dtype], dtype))
        leaves.append(PadLeaf(view, axis, per, place, -1 if offsets else place, offsets))
        rooms.append(room)
        starts.append(start)
        for chosen, count in zip(counts, drawn_counts, strict=True):
            chosen.append(count)
    table = torch.tensor(counts[0] + [0], dtype=torch.int64)
    fills = torch.tensor([*patterns, (0, 0)], dtype=torch.int64)
    run = wrap(lambda: fill(leaves, table, fills), [*rooms, table, fills])
    for chosen in counts:
        for room in rooms:
            room.copy_(torch.randint(0, 256, room.shape, dtype=torch.uint8, generator=generator))
        table[:-1].copy_(torch.tensor(chosen, dtype=torch.int64))
        expected = [room.clone() for room in rooms]
        for room, start, leaf, count, pattern in zip(expected, starts, leaves, chosen, patterns, strict=True):
            expect(room, start, leaf, count, pattern)
        run()
        for room, wanted in zip(rooms, expected, strict=True):
            assert torch.equal(room, wanted)


def as_it_is(run: Callable[[], None], used: list[torch.Tensor]) -> Callable[[], None]:
    return run


@settings(max_examples=40)
@given(paddings())
def test_padding_and_nothing_else_is_filled(drawn: dict) -> None:
    check_fill(drawn, as_it_is, fill_padding)


@settings(max_examples=8)
@given(paddings(most=4))
def test_a_recording_fills_by_the_counts_of_its_replay(drawn: dict) -> None:
    check_fill(drawn, lambda run, used: Recording(run, used).replay, fill_padding)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_a_pattern_is_the_value_over_and_over(dtype: torch.dtype) -> None:
    for value in (VALUES[dtype], 0, 1):
        pattern = torch.tensor(fill_pattern(value, dtype)).view(dtype)
        expected = torch.empty(16 // dtype.itemsize, dtype=dtype).fill_(value)
        assert torch.equal(pattern.view(torch.uint8), expected.view(torch.uint8))


def test_negative_counts_are_none() -> None:
    view, fills = torch.ones(4, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    cu = torch.tensor([0, 3, 5])
    leaves = [PadLeaf(view, 0, 1, 0, 0, False), PadLeaf(cu, 0, 1, 0, 0, True)]
    fill_padding_reference(leaves, torch.tensor([-7]), fills)
    assert view.tolist() == [0, 0, 0, 0]
    assert cu.tolist() == [0, 0, 0]


def test_mistakes_are_named() -> None:
    counts, fills = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    view = torch.zeros(4, 4)
    with pytest.raises(SpecError, match="hold"):
        fill_pattern(300, torch.uint8)
    with pytest.raises(SpecError, match="counts"):
        fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts.int(), fills)
    with pytest.raises(SpecError, match="fills"):
        fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts, counts.view(2, 1))
    for leaf, words in (
        (PadLeaf(view.t(), 0, 1, 0, 0, False), "contiguous"),
        (PadLeaf(view, 2, 1, 0, 0, False), "axis"),
        (PadLeaf(view, 0, 0, 0, 0, False), "per"),
        (PadLeaf(view, 0, 1, 2, 0, False), "counts"),
        (PadLeaf(view, 0, 1, 0, 1, False), "fills"),
        (PadLeaf(view, 0, 1, 0, 0, True), "offsets"),
    ):
        with pytest.raises(SpecError, match=words):
            fill_padding([leaf], counts, fills)
