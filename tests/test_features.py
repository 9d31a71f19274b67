"""Invariant: reading a feature changes its item only where it succeeds; what needs no change stays the same object."""

import subprocess
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from mm_batches import HIDDEN, Encoder, Handle, simple_item

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.errors import FeatureError
from mmgraph.features import leaves_of, load_feature, rebuilt
from mmgraph.inputs import Modality, MultimodalForwardContext, MultimodalInputs

ROWS = torch.randn(2, HIDDEN)


def test_leaves_come_in_order_and_go_back_to_their_places() -> None:
    feature = {"a": [ROWS, "text"], "b": ROWS + 1, "c": 7, "d": [{"e": ROWS + 2}]}
    leaves = leaves_of(feature)
    assert list(map(id, leaves)) == list(map(id, [ROWS, feature["b"], feature["d"][0]["e"]]))
    doubled = rebuilt(feature, iter([leaf * 2 for leaf in leaves]))
    assert doubled["a"][1] == "text"
    assert doubled["c"] == 7
    for leaf, twice in zip(leaves, leaves_of(doubled), strict=True):
        assert torch.equal(leaf * 2, twice)
    assert leaves_of(doubled)[0] is doubled["a"][0]


@pytest.mark.parametrize(
    "feature", [ROWS, [ROWS, {"grid": torch.ones(1)}], {"a": ROWS, "b": [1, "x"]}, [], None]
)
def test_what_is_in_form_stays_the_same_object(feature: object) -> None:
    item = simple_item([(0, 1)], feature=feature)
    assert load_feature(item) is None
    assert item.feature is feature


def test_arrays_and_tuples_become_tensors_and_lists_once() -> None:
    item = simple_item([(0, 1)], feature={"a": (np.ones(2), ROWS), "b": ROWS})
    load_feature(item)
    first = item.feature
    assert isinstance(first["a"], list)
    assert first["a"][1] is first["b"] is ROWS
    load_feature(item)
    assert item.feature is first


def test_a_handle_that_gives_nothing_is_an_error_and_is_kept() -> None:
    handle = Handle(ROWS)
    handle.consume = lambda: None  # type: ignore[method-assign]
    item = simple_item([(0, 1)], hash=0xF1, feature=handle)
    with pytest.raises(FeatureError, match=r"0xf1.*can't be consumed.*consume\(\) gave None"):
        load_feature(item)
    assert item.feature is handle


class Segment:
    """A handle of a segment in shared memory that another process made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def consume(self) -> torch.Tensor:
        segment = shared_memory.SharedMemory(self.name)
        try:
            return torch.frombuffer(bytearray(segment.buf), dtype=torch.float32).reshape(2, HIDDEN).clone()
        finally:
            segment.close()

    def release(self) -> None:
        pass


def test_the_handle_of_a_dead_process_fails_one_request_alone() -> None:
    made = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "from multiprocessing.shared_memory import SharedMemory as S; print(S(create=True, size=40).name)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = Segment(made.stdout.strip())
    items = [simple_item([(1, 2)]), simple_item([(1, 2)], feature=dead), simple_item([(1, 2)], variant=2)]
    rows = [-items[0].feature, -items[2].feature]
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)
    result = MultimodalEmbedder().apply_result(
        torch.zeros(12, dtype=torch.int64),
        torch.zeros(3, HIDDEN),
        ctx,
        {Modality.IMAGE: Encoder()},
        on_error="isolate",
    )
    assert list(result.failed) == [1]
    assert type(result.failed[1]) is FeatureError
    assert isinstance(result.failed[1].__cause__, FileNotFoundError)
    assert items[1].feature is dead
    assert torch.equal(result.embeds[1:3], rows[0])
    assert torch.equal(result.embeds[9:11], rows[1])
