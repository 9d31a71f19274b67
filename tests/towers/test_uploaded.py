"""Invariant: a batch's upload is made once for its grids and its stream, and what is kept stays within its bound."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmgraph.towers.uploaded import UploadCache

CPU = torch.device("cpu")


def test_equal_grids_share_an_upload_and_others_dont() -> None:
    cache, made = UploadCache(), []

    def make(grids: tuple[Any, ...]) -> dict[str, Any]:
        made.append(grids)
        return {"positions": torch.arange(len(grids)), "side": 3}

    first = cache.get(((1, 2, 2),), CPU, make)
    again = cache.get(((1, 2, 2),), CPU, make)
    assert again["positions"] is first["positions"]
    assert again is not first  # a caller may add to its own
    again["other"] = 1
    assert "other" not in cache.get(((1, 2, 2),), CPU, make)
    cache.get(((1, 2, 2), (1, 2, 2)), CPU, make)
    assert made == [((1, 2, 2),), ((1, 2, 2), (1, 2, 2))]
    cache.clear()
    assert cache.nbytes == 0
    cache.get(((1, 2, 2),), CPU, make)
    assert len(made) == 3


def test_the_least_recently_used_give_way_and_large_ones_are_not_kept() -> None:
    cache, made = UploadCache(max_bytes=4 * 80), []

    def make(grids: tuple[Any, ...]) -> dict[str, Any]:
        made.append(grids)
        return {"positions": torch.zeros(10 * len(grids), dtype=torch.int64)}

    one, two, three, four, five = (((1, n, n),) for n in range(2, 12, 2))
    for grids in (one, two, three, four, one, five):
        cache.get(grids, CPU, make)
    assert cache.nbytes == 4 * 80
    cache.get(one, CPU, make)  # was used after the second one, which gave way
    assert made == [one, two, three, four, five]
    cache.get(two, CPU, make)
    assert made[-1] == two
    large = (*one, *two)
    before = cache.nbytes
    cache.get(large, CPU, make)
    cache.get(large, CPU, make)
    assert made[-2:] == [large, large]
    assert cache.nbytes == before


def pretend_stream(monkeypatch: pytest.MonkeyPatch, handle: int, stream_id: int) -> None:
    stream = SimpleNamespace(cuda_stream=handle, stream_id=stream_id)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def test_each_stream_has_its_own_and_streams_that_may_end_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made, device = UploadCache(), [], torch.device("cuda", 0)

    def make(grids: tuple[Any, ...]) -> dict[str, Any]:
        made.append(grids)
        return {"positions": torch.zeros(2)}

    kinds = [(0, 0), (1000, 35), (2000, 67)]  # the default stream, and two of PyTorch's pool
    for handle, stream_id in kinds * 2:
        pretend_stream(monkeypatch, handle, stream_id)
        cache.get(((1, 2, 2),), device, make)
    assert len(made) == len(kinds)
    pretend_stream(monkeypatch, 3000, 3000)  # somebody else's: its handle may be another stream's tomorrow
    cache.get(((1, 2, 2),), device, make)
    cache.get(((1, 2, 2),), device, make)
    assert len(made) == len(kinds) + 2
