"""Invariant: padding writes each item's pad value at its offsets and nowhere else, and changes no prompt's length."""

import copy
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import random_batch, simple_item

import mmgraph
from mmgraph.errors import InputsError
from mmgraph.inputs import (
    Modality,
    MultimodalDataItem,
    MultimodalForwardContext,
    MultimodalInputs,
    pad_input_tokens,
)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_padding_position_by_position(seed: int) -> None:
    rng = random.Random(seed)
    for inputs in random_batch(seed).ctx.mm_inputs:
        if inputs is None:
            continue
        for item in inputs.mm_items:
            if item is not None and rng.random() < 0.2:
                item.pad_value = rng.choice([None, 17])
        ids = [rng.randrange(100) for _ in range(60)]
        expected = list(ids)
        for item in inputs.mm_items:
            for start, end in item.offsets if item is not None and item.pad_value is not None else ():
                for position in range(start, end + 1):
                    expected[position] = item.pad_value
        before = list(ids)
        padded = pad_input_tokens(ids, inputs)
        assert padded == expected
        assert ids == before
        assert (padded is ids) == (expected == before)
        assert pad_input_tokens(padded, inputs) is padded


def test_items_without_pad_value_or_offsets_are_passed_over() -> None:
    ids = [1, 2, 3, 4]
    items = [MultimodalDataItem("image", [(0, 1)], pad_value=None), MultimodalDataItem("image"), None]
    assert pad_input_tokens(ids, MultimodalInputs(items)) is ids
    assert pad_input_tokens(ids, MultimodalInputs([])) is ids
    assert pad_input_tokens(ids, None) is ids
    assert pad_input_tokens(
        ids, MultimodalInputs([*items, MultimodalDataItem("audio", [(3, 3)], pad_value=9)])
    ) == [1, 2, 3, 9]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([(2, 4)], r"span \(2, 4\) ends outside the prompt of 4 tokens"),
        ([(9, 12)], "ends outside the prompt"),
        ([(-2, 1)], "must lie in positions"),
        ([(2, 1)], "is empty"),
        ([(0, 1), (1, 2)], "begins at or before"),
        ([(2, 3), (0, 1)], "begins at or before"),
        ([(0, 1.0)], "pairs of integers"),
        ([(0, 0)], r"span \(0, 0\) overlaps span \(0, 0\) of item 1"),
    ],
)
def test_wrong_offsets_are_refused(offsets: list[tuple[int, int]], message: str) -> None:
    ids = [1, 2, 3, 4]
    good, bad = MultimodalDataItem("image", [(0, 0)], hash=1), MultimodalDataItem("image", offsets, hash=0x2B)
    with pytest.raises(InputsError, match=message) as caught:
        pad_input_tokens(ids, MultimodalInputs([None, good, bad]))
    assert "item 2, IMAGE item (hash 0x2b" in str(caught.value)
    assert ids == [1, 2, 3, 4]
    bad.offsets = [(2, 3)]
    assert pad_input_tokens(ids, MultimodalInputs([good, bad])) == [
        good.pad_value,
        2,
        bad.pad_value,
        bad.pad_value,
    ]


def test_a_pad_value_that_is_no_integer_is_refused() -> None:
    item = MultimodalDataItem("image", [(0, 1)], pad_value=1.5)
    with pytest.raises(InputsError, match=r"pad value must be an integer, None or 'auto', got 1\.5"):
        pad_input_tokens([1, 2], MultimodalInputs([item]))
    item.pad_value = 8
    assert pad_input_tokens([1, 2], MultimodalInputs([item])) == [8, 8]


def test_items_compare_by_identity() -> None:
    first, second = (MultimodalDataItem("image", [(0, 1)], hash=1) for _ in range(2))
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize(
    "offsets", [[(0, 2), (4, 4)], [[0, 2], [4, 4]], np.array([[0, 2], [4, 4]]), torch.tensor([[0, 2], [4, 4]])]
)
def test_offsets_may_be_pairs_of_any_integers(offsets: object) -> None:
    item = MultimodalDataItem(Modality.VIDEO, offsets)
    assert item.offsets == ((0, 2), (4, 4))
    assert item.num_tokens == 4
    item.offsets = None
    assert item.num_tokens == 0


def test_modalities_have_names() -> None:
    assert MultimodalDataItem("Audio").modality is Modality.AUDIO
    with pytest.raises(InputsError, match=r"one of \['IMAGE', 'VIDEO', 'AUDIO'\], got 'smell'"):
        MultimodalDataItem("smell")


def test_items_and_inputs_survive_pickling() -> None:
    item = simple_item([(0, 1)], hash=5, model_specific_data={"grid": (1, 2)})
    inputs = MultimodalInputs([item, None])
    inputs.span_index()
    for again in (pickle.loads(pickle.dumps(inputs)), copy.deepcopy(inputs)):
        twin = again.mm_items[0]
        assert twin is not item
        assert (twin.modality, twin.offsets, twin.hash, twin.pad_value) == (
            item.modality,
            item.offsets,
            5,
            item.pad_value,
        )
        assert twin.share_key == item.share_key
        assert torch.equal(twin.feature, item.feature)
        assert again.span_index().starts == [0]


def test_a_context_says_whether_it_has_media() -> None:
    media, empty = (
        MultimodalInputs([simple_item([(0, 1)])]),
        MultimodalInputs([None, MultimodalDataItem("image")]),
    )
    assert MultimodalForwardContext([None, media], [0], [3]).has_inputs()
    assert not MultimodalForwardContext([None, media], [0], [3]).has_extend_inputs()
    assert MultimodalForwardContext([media, None], [0], [3]).has_extend_inputs()
    for inputs in ([None], [empty], [], None):
        assert not MultimodalForwardContext(inputs, [0], [3]).has_inputs()
        assert not MultimodalForwardContext(inputs, [0], [3]).has_extend_inputs()
    assert not MultimodalForwardContext([media], None, None).has_extend_inputs()


def test_the_face_has_every_name() -> None:
    for name in mmgraph.__all__:
        assert getattr(mmgraph, name) is not None
    assert set(mmgraph.__all__) <= set(dir(mmgraph))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mmgraph.nonsense


def test_rooms_and_their_errors_are_found_from_the_face() -> None:
    code = (
        "import mmgraph; from mmgraph import errors; assert mmgraph.ops.RowMap;"
        "assert errors.OpError is mmgraph.ops.OpError;"
        "assert errors.CaptureError is mmgraph.capture.CaptureError;"
        "assert not hasattr(errors, 'Nonsense') and not hasattr(errors, 'torch')"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
