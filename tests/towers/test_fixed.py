"""Invariant: a batch of fixed-size items is what its items are, without a copy where they lie in a row already."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.capture import CapturedEncoder
from mmgraph.errors import TowerError
from mmgraph.towers.fixed import FixedEncoder, FixedInput, FixedItem, doubling, stacked, unstacked
from mmgraph.towers.items import joined

CPU = torch.device("cpu")


def squares(x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"squares": x * x * scale[:, None], "sums": x.sum(1)}


def encoder() -> FixedEncoder:
    inputs = {"x": FixedInput((3,), torch.float64), "scale": FixedInput((), torch.int32)}
    return FixedEncoder(squares, inputs, ("squares", "sums"), device=CPU, unit="clips")


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_stacked_rows_are_the_rows(shape: list[int], picks: list[int]) -> None:
    table = torch.arange(float(6 * math.prod(shape))).reshape(6, *shape)
    parts = [table[index] for index in picks]
    result = stacked(parts)
    assert torch.equal(result, torch.stack(parts))
    if picks == list(range(picks[0], picks[0] + len(picks))) and table.numel():
        assert result.data_ptr() == parts[0].data_ptr()


@pytest.mark.parametrize(
    "parts",
    [
        [torch.arange(4.0), torch.arange(4.0)],
        list(torch.arange(8.0).reshape(4, 2).t().unbind(0)),
        list(torch.arange(8.0).reshape(4, 2).unbind(0))[::-1],
        [torch.arange(8.0)[:3], torch.arange(8.0)[4:7]],
    ],
    ids=["two memories", "columns", "backwards", "gaps"],
)
def test_what_does_not_lie_in_a_row_is_copied(parts: list[torch.Tensor]) -> None:
    result = stacked(parts)
    assert torch.equal(result, torch.stack(parts))
    assert result.data_ptr() not in [part.data_ptr() for part in parts]


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_buckets_double(largest: int, sizes: tuple[int, ...]) -> None:
    assert doubling(largest) == sizes
    assert [bucket["clips"] for bucket in encoder().grid(largest).buckets] == list(sizes)


def test_no_bucket_is_an_error() -> None:
    with pytest.raises(TowerError, match="at least 1 item, got 0"):
        doubling(0)


@pytest.fixture(scope="module")
def captured() -> Iterator[CapturedEncoder]:
    adapter = encoder()
    made = CapturedEncoder(adapter, buckets=adapter.grid(4))
    yield made.precompile([adapter.example()], progress=False)
    made.close()


@given(seed=st.integers(0, 2**31), count=st.integers(1, 7))
def test_a_captured_encoder_gives_each_item_its_own(captured: CapturedEncoder, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    scale = torch.randint(-3, 4, (count,), generator=generator, dtype=torch.int32)
    found = captured(unstacked({"x": x, "scale": scale}))
    assert len(found) == count
    for index, one in enumerate(found):
        assert torch.equal(one["squares"], x[index] ** 2 * scale[index])
        assert torch.equal(one["sums"], squares(x[index : index + 1], scale[index : index + 1])["sums"][0])


def test_other_shapes_and_no_items_are_errors() -> None:
    adapter = encoder()
    with pytest.raises(TowerError, match="at least one item"):
        adapter.prepare([], None)
    item = FixedItem({"x": torch.zeros(4), "scale": torch.tensor(1)})
    with pytest.raises(TowerError, match=r"x of each item must have the shape \[3\], got \[4\]"):
        adapter.prepare([adapter.example(), item], None)


def test_inputs_come_in_the_declared_dtype() -> None:
    made = encoder().prepare(
        unstacked({"x": torch.ones(2, 3), "scale": torch.ones(2, dtype=torch.int64)}), None
    )
    assert made["x"].dtype == torch.float64
    assert made["scale"].dtype == torch.int32


def test_lazily_negated_parts_keep_their_sign():
    whole = torch.arange(8.0).reshape(4, 2)
    negated = torch._neg_view(whole)
    assert stacked([whole[0], negated[1]]).tolist() == [[0, 1], [-2, -3]]
    assert stacked([negated[0], negated[1]]).tolist() == [[0, -1], [-2, -3]]
    assert joined([whole[:2], negated[2:]]).tolist() == [[0, 1], [2, 3], [-4, -5], [-6, -7]]
    assert joined([negated[:2], negated[2:]]).tolist() == negated.tolist()
    assert joined([whole[:2], whole[2:]]).data_ptr() == whole.data_ptr()
