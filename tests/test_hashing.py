"""Invariant: equal hashes mean equal modality, dtype, shape, partition and bytes; pad values name modality and hash."""

import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mmgraph.errors import InputsError
from mmgraph.hashing import (
    PAD_VALUE_MAX,
    PAD_VALUE_MIN,
    content_hash,
    pad_value_for_hash,
    pad_value_interval,
    private_pad_value,
)
from mmgraph.inputs import Modality, MultimodalDataItem

DIFFERENT = [
    torch.zeros(4, 6),
    torch.zeros(6, 4),
    torch.zeros(24),
    torch.zeros(4, 6, dtype=torch.float16),
    torch.zeros(4, 6, dtype=torch.bfloat16),
    torch.zeros(4, 12, dtype=torch.float16),
    torch.zeros(4, 6, dtype=torch.int32),
    torch.zeros(4, 6) + 1,
    torch.zeros(0),
    torch.zeros(0, 3),
    torch.zeros(0, dtype=torch.int64),
    torch.tensor(0.0),
    torch.tensor(0),
    torch.tensor([0.0]),
    [torch.zeros(2, 6), torch.zeros(2, 6)],
    [torch.zeros(1, 6), torch.zeros(3, 6)],
    [torch.zeros(4, 6)],
    {"a": torch.zeros(4, 6)},
    {"b": torch.zeros(4, 6)},
    [[1], 2],
    [1, [2]],
    [1, 2],
    [1.0, 2],
    [True, 2],
    "ab",
    b"ab",
    ["a", "b"],
    ["ab"],
    None,
    [],
    -0.0,
    0.0,
]


def test_every_difference_counts() -> None:
    hashes = [content_hash(value) for value in DIFFERENT]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < 2**128 for value in hashes)
    assert max(value.bit_length() for value in hashes) > 120
    assert content_hash("a", "b") != content_hash("ab")


def test_where_and_how_contents_lie_does_not_count() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    strided = torch.zeros(6, 8)[:, ::2].t()
    strided.copy_(tensor)
    expected = content_hash(tensor)
    assert content_hash(strided) == expected
    assert content_hash(tensor.numpy()) == expected
    assert content_hash(tensor.numpy().astype(">f4")) == expected
    assert content_hash(np.asfortranarray(tensor.numpy())) == expected
    assert content_hash(tensor.clone().requires_grad_()) == expected
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash([tensor]) == content_hash((tensor,))


def test_conjugate_views_hash_as_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert content_hash(values.conj()) == content_hash(torch.tensor([1 - 2j, 3 + 1j]))


def test_another_process_gives_the_same() -> None:
    code = (
        "from mmgraph.hashing import *; import numpy as np; from mmgraph.modality import Modality;"
        "print(content_hash(np.arange(5), 'x', Modality.IMAGE), pad_value_for_hash('x', Modality.AUDIO))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {
        f"{content_hash(np.arange(5), 'x', Modality.IMAGE)} {pad_value_for_hash('x', Modality.AUDIO)}\n".encode()
    }


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}, torch.zeros(2).to_sparse()])
def test_what_has_no_bytes_is_refused(value: object) -> None:
    with pytest.raises(InputsError, match="can't hash"):
        content_hash(value)


@given(hash=st.one_of(st.integers(), st.text(), st.binary()))
@example(hash=0)
@example(hash=-1)
@example(hash=2**128 - 1)
@example(hash=-(2**200))
def test_pad_values_lie_in_the_modality_s_interval(hash: int | str | bytes) -> None:
    values = [pad_value_for_hash(hash, modality) for modality in Modality]
    assert len(set(values)) == len(values)
    for modality, value in zip(Modality, values, strict=True):
        assert value in pad_value_interval(modality)
        assert 1_000_000 <= value <= 2**31 - 2
        item = MultimodalDataItem(modality, hash=hash)
        assert item.pad_value == value
        assert type(item.pad_value) is int


def test_intervals_are_disjoint_and_inside_int32() -> None:
    intervals = sorted(
        (pad_value_interval(modality) for modality in Modality), key=lambda interval: interval.start
    )
    assert intervals[0].start >= PAD_VALUE_MIN == 1_000_000
    assert intervals[-1].stop - 1 <= PAD_VALUE_MAX == 2**31 - 2
    assert all(a.stop <= b.start for a, b in itertools.pairwise(intervals))


def test_close_hashes_give_different_pad_values() -> None:
    for modality in Modality:
        assert len({pad_value_for_hash(number, modality) for number in range(-500, 500)}) == 1000


def test_items_that_are_never_shared_have_pad_values_of_their_own() -> None:
    items = [MultimodalDataItem(modality) for modality in Modality for _ in range(300)]
    values = [item.pad_value for item in items]
    assert len(set(values)) == len(values)
    assert values == [item.pad_value for item in items]
    hashed = {pad_value_for_hash(number, modality) for number in range(1000) for modality in Modality}
    assert not hashed & set(values)
    assert all(value in pad_value_interval(item.modality) for item, value in zip(items, values, strict=True))
    copy = pickle.loads(pickle.dumps(fresh := MultimodalDataItem(Modality.IMAGE)))
    assert copy.pad_value == fresh.pad_value
    assert private_pad_value(Modality.VIDEO) in pad_value_interval(Modality.VIDEO)


def test_ensure_hash_covers_modality_and_what_the_encoder_reads() -> None:
    def made(modality: Modality, **fields: object) -> object:
        return MultimodalDataItem(modality, **{"feature": torch.ones(4, 2), **fields}).ensure_hash()

    base = made(Modality.IMAGE)
    assert base == made(Modality.IMAGE)
    assert base == made(Modality.IMAGE, offsets=[(3, 5)])
    assert base != made(Modality.VIDEO)
    assert base != made(Modality.IMAGE, feature=torch.ones(2, 4))
    assert made(Modality.IMAGE, model_specific_data={"grid": [1, 2, 2]}) != made(
        Modality.IMAGE, model_specific_data={"grid": [1, 4, 1]}
    )
    assert isinstance(base, int)


def test_ensure_hash_keeps_a_hash_and_moves_the_pad_value() -> None:
    given_hash = MultimodalDataItem(Modality.IMAGE, hash="name")
    assert given_hash.ensure_hash() == "name"
    first, second = (MultimodalDataItem(Modality.IMAGE, feature=torch.ones(3)) for _ in range(2))
    assert first.pad_value != second.pad_value
    assert first.ensure_hash() == second.ensure_hash()
    assert first.pad_value == second.pad_value == pad_value_for_hash(first.hash, Modality.IMAGE)
    fixed = MultimodalDataItem(Modality.IMAGE, feature=torch.ones(3), pad_value=5)
    fixed.ensure_hash()
    assert fixed.pad_value == 5


@pytest.mark.parametrize("hash", [1.5, [1], object()])
def test_wrong_hashes_are_refused(hash: object) -> None:
    with pytest.raises(InputsError, match="hash must be an int, str"):
        MultimodalDataItem(Modality.IMAGE, hash=hash)
    with pytest.raises(InputsError, match="hash must be an int, str"):
        pad_value_for_hash(hash, Modality.IMAGE)


def test_no_feature_no_hash() -> None:
    item = MultimodalDataItem(Modality.IMAGE, [(0, 1)])
    with pytest.raises(InputsError, match="it has no feature"):
        item.ensure_hash()
    item.feature = torch.ones(2)
    assert item.ensure_hash() is not None
