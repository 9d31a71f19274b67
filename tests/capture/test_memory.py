"""Invariant: asking what a pool holds costs nobody a reference."""

import contextlib
import ctypes
import gc
import sys
from typing import Any

import pytest
import torch

from mmgraph.capture.memory import pool_bytes, used_bytes

SEGMENTS = [
    {
        "total_size": 512,
        "blocks": [{"size": 384, "state": "inactive"}, {"size": 128, "state": "active_allocated"}],
    },
    {"total_size": 256, "blocks": [{"size": 256, "state": "active_pending_free"}]},
]


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
@pytest.mark.parametrize("taken", [0, 1, 2], ids="takes {}".format)
def test_references_that_the_allocator_takes_are_given_back(
    monkeypatch: pytest.MonkeyPatch, taken: int, fails: bool
) -> None:
    def snapshot(mempool_id: tuple[int, int], include_traces: bool) -> list[dict[str, Any]]:
        assert not include_traces
        assert mempool_id == (0, 1000)
        for index in range(2):  # by index: a name for the number would be kept by the error's traceback
            for _ in range(taken):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(mempool_id[index]))
        if fails:
            raise RuntimeError("the device has failed")
        return SEGMENTS

    class Watched(int):
        def __new__(cls, number: int) -> "Watched":
            made = super().__new__(cls, number)
            held.append([made] * 10)  # so many that no wrong count frees it
            return made

    held: list[list[Watched]] = []
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", snapshot)
    with monkeypatch.context() as watching:
        watching.setattr("mmgraph.capture._compat._OwnNumber", Watched)
        with pytest.raises(RuntimeError, match="device") if fails else contextlib.nullcontext():
            pool_bytes((0, 1000))
    gc.collect()
    # theirs, and the call's own
    counts = [sys.getrefcount(of_one[0]) for of_one in held]
    assert counts == [11, 11]
    if fails:
        return
    handle = (0, int("1000"))
    before = sys.getrefcount(handle[1])
    pool, used = pool_bytes(handle), used_bytes(handle)
    after = sys.getrefcount(handle[1])
    assert (pool, used, after) == (768, 384, before)
    # nor does it keep any
    assert not [found for found in gc.get_objects() if type(found).__name__ == "_OwnNumber"]
