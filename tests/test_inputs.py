"""Invariant: padding writes each item's pad value at its offsets and nowhere else, and changes no prompt's length."""

import copy
import operator
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
from mmgraph.errors import ContextError, InputsError
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


@pytest.mark.parametrize("value", [-1, 2**63, 2**80])
def test_a_pad_value_that_is_no_token_id_is_refused(value: int) -> None:
    item = MultimodalDataItem("image", [(0, 1)], pad_value=value)
    with pytest.raises(InputsError, match=rf"must be a token id, 0 to {2**63 - 1}, got {value}; 'auto'"):
        pad_input_tokens([1, 2], MultimodalInputs([item]))
    item.pad_value = 0
    assert pad_input_tokens([1, 2], MultimodalInputs([item])) == [0, 0]


@pytest.mark.parametrize(
    "ids",
    [(1, 2, 3), range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]).int()],
)
def test_ids_may_be_of_any_kind_with_one_dimension(ids: object) -> None:
    padded = pad_input_tokens(ids, MultimodalInputs([MultimodalDataItem("image", [(1, 1)], pad_value=8)]))
    assert (type(padded), padded) == (list, [1, 8, 3])
    assert pad_input_tokens(ids, None) == pad_input_tokens(ids, MultimodalInputs()) == [1, 2, 3]
    assert all(type(number) is int for number in padded)


@pytest.mark.parametrize(
    ("ids", "came"),
    [
        (None, "NoneType"),
        ("abc", "str"),
        ([[1, 2]], "list of list"),
        ([1.0, 2.0], "list of float"),
        (torch.zeros(2), "Tensor of float"),
        (torch.zeros(2, 2).int(), "Tensor of list"),
        (torch.tensor(3), "Tensor"),
    ],
)
def test_other_ids_are_refused(ids: object, came: str) -> None:
    for inputs in (None, MultimodalInputs([MultimodalDataItem("image", [(0, 0)])])):
        with pytest.raises(InputsError, match=f"one prompt's token ids, a list of integers, got {came};"):
            pad_input_tokens(ids, inputs)


def test_media_of_other_kinds_are_refused() -> None:
    item = MultimodalDataItem("image", [(0, 0)])
    with pytest.raises(InputsError, match=r"inputs must be MultimodalInputs or None, got list"):
        pad_input_tokens([1], [item])
    for wrong in (None, item, "x", 3, {"image": item}):
        with pytest.raises(InputsError, match=f"mm_items must be a list of .*, got {type(wrong).__name__}"):
            MultimodalInputs(wrong)
    wrong = MultimodalInputs([None, "x"])
    for use in (
        wrong.has_items,
        wrong.span_index,
        MultimodalForwardContext([wrong], [0], [1]).has_inputs,
        lambda: pad_input_tokens([1], wrong),
    ):
        with pytest.raises(InputsError, match="item 1, an object of type str: mm_items must hold"):
            use()
    wrong.mm_items = [item]
    assert wrong.has_items()
    with pytest.raises(ContextError, match=r"mm_inputs\[1\] must be MultimodalInputs or None, got list"):
        MultimodalForwardContext([None, [item]], [0], [1]).has_inputs()


def test_items_compare_by_identity() -> None:
    first, second = (MultimodalDataItem("image", [(0, 1)], hash=1) for _ in range(2))
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize(
    "offsets",
    [
        [(0, 2), (4, 4)],
        [[0, 2], [4, 4]],
        np.array([[0, 2], [4, 4]]),
        torch.tensor([[0, 2], [4, 4]]),
        [np.array([0, 2]), np.array([4, 4])],
        [torch.tensor([0, 2]), torch.tensor([4, 4])],
        [(torch.tensor(0), np.int64(2)), (4, 4)],
        iter([(0, 2), (4, 4)]),
    ],
)
def test_offsets_may_be_pairs_of_any_integers(offsets: object) -> None:
    item = MultimodalDataItem(Modality.VIDEO, offsets)
    assert item.offsets == [(0, 2), (4, 4)]
    assert item.offsets == ((0, 2), (4, 4))
    assert item.offsets != [(0, 2)]
    assert item.num_tokens == 4
    item.offsets = None
    assert item.num_tokens == 0


CHANGES = [
    lambda values: values.append(values[0]),
    lambda values: values.extend(values),
    lambda values: values.insert(0, values[0]),
    lambda values: values.remove(values[0]),
    lambda values: values.pop(),
    lambda values: values.clear(),
    lambda values: values.sort(key=id),
    lambda values: values.reverse(),
    lambda values: operator.setitem(values, 0, values[0]),
    lambda values: operator.setitem(values, slice(0, 1), []),
    lambda values: operator.delitem(values, 0),
    lambda values: operator.iadd(values, values),
    lambda values: operator.imul(values, 2),
]


@pytest.mark.parametrize("change", CHANGES)
def test_offsets_and_items_read_like_lists_and_refuse_changes_in_place(change: object) -> None:
    item = MultimodalDataItem("image", [(0, 1), (3, 4)])
    inputs = MultimodalInputs([item, None])
    assert isinstance(item.offsets, list)
    assert inputs.mm_items == [item, None] == inputs.mm_items[:]
    assert (item.offsets[1:], [*item.offsets.copy(), (6, 6)]) == ([(3, 4)], [(0, 1), (3, 4), (6, 6)])
    with pytest.raises(InputsError, match=r"assign a new one: item\.offsets = "):
        change(item.offsets)
    with pytest.raises(InputsError, match=r"assign a new one: inputs\.mm_items = "):
        change(inputs.mm_items)
    assert (item.offsets, inputs.mm_items) == ([(0, 1), (3, 4)], [item, None])
    for again in (pickle.loads(pickle.dumps(item)), copy.deepcopy(item), copy.copy(item)):
        assert again.offsets == item.offsets
        with pytest.raises(InputsError):
            change(again.offsets)
    item.offsets = [*item.offsets, (6, 6)]
    assert inputs.span_index().starts == [0, 3, 6]


@pytest.mark.parametrize("settled", [True, False])
def test_a_copy_of_an_item_that_is_never_shared_has_its_own_id(settled: bool) -> None:
    item = MultimodalDataItem("image", [(0, 1)], feature=[np.zeros(2)], model_specific_data={"grid": [1]})
    if settled:
        _ = item.pad_value
    MultimodalInputs([item]).span_index()
    shallow, deep = copy.copy(item), copy.deepcopy(item)
    both = copy.deepcopy([item, MultimodalInputs([item])])
    assert both[1].mm_items[0] is both[0]
    assert len({made.pad_value for made in (item, shallow, deep, both[0])}) == 4
    assert pickle.loads(pickle.dumps(item)).pad_value == item.pad_value
    assert shallow.feature is item.feature
    assert deep.feature is not item.feature
    deep.model_specific_data["grid"].append(2)
    assert item.model_specific_data == {"grid": [1]}
    assert copy.copy(MultimodalDataItem("image", pad_value=9)).pad_value == 9
    assert copy.copy(shared := MultimodalDataItem("image", hash=9)).pad_value == shared.pad_value
    shallow.offsets = [(5, 5)]
    assert (item.offsets, item.num_tokens, shallow.num_tokens) == ([(0, 1)], 2, 1)


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
