"""Invariant: an encoder's sequences are where the caller says, in every form, and nothing is read inside a capture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph import MultimodalEncoderAttention
from mmgraph.capture.modes import capturing
from mmgraph.encoder_lengths import RowWidths, pack_offsets, resolve_lengths
from mmgraph.errors import EncoderAttentionError, EncoderCaptureError
from mmgraph.ops import DataError

WIDTHS = RowWidths(q=32, kv=16, packed=64)
X = torch.zeros(2, 5, 32)


def resolve(cu_seqlens=None, max_seqlen=None, sequence_lengths=None, x=X):
    found = resolve_lengths(x, cu_seqlens, max_seqlen, sequence_lengths, WIDTHS)
    assert found.cu_seqlens.dtype == torch.int32
    return found.cu_seqlens.tolist(), found.max_seqlen


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@given(batch=st.integers(0, 4), seq=st.integers(0, 4))
def test_without_offsets_every_row_of_the_batch_is_a_sequence(batch, seq):
    x = torch.zeros(batch, seq, 32)
    expected = [row * seq for row in range(batch + 1)], seq
    assert resolve(x=x) == expected
    assert resolve(x=x, max_seqlen=seq + 3) == expected
    with capturing():
        assert resolve(x=x) == expected


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.int16, torch.uint8]),
)
def test_a_missing_maximum_and_another_dtype_are_put_right_in_eager_code(lengths, dtype):
    cu = offsets_of(lengths)
    expected = cu.tolist(), max(lengths, default=0)
    assert resolve(cu.to(dtype)) == expected
    assert resolve(cu.to(dtype), 20) == (expected[0], 20)
    with capturing():
        assert resolve(cu, 20) == (expected[0], 20)
        with pytest.raises(EncoderCaptureError, match="max_seqlen is missing inside a capture"):
            resolve(cu)
        if dtype != torch.int32:
            with pytest.raises(
                EncoderCaptureError, match=f"must be int32 on cpu inside a capture.*got {dtype}"
            ):
                resolve(cu.to(dtype), 20)
    assert resolve(cu.to(dtype)) == expected


def test_offsets_of_another_device_are_moved_in_eager_code_only():
    cu = offsets_of([2, 3])
    on_meta = resolve_lengths(X.to("meta"), cu, 3, None, WIDTHS)
    assert on_meta.cu_seqlens.device.type == "meta"
    packed = pack_offsets(cu, 3, WIDTHS)
    beside = packed.max_seqlen, packed.sequence_lengths
    moved = resolve_lengths(X.to("meta"), packed.cu_seqlens, *beside, WIDTHS)
    assert moved.cu_seqlens.device.type == "meta"
    with capturing():
        with pytest.raises(EncoderCaptureError, match="int32 on meta inside a capture"):
            resolve_lengths(X.to("meta"), cu, 3, None, WIDTHS)
        with pytest.raises(EncoderCaptureError, match="must be on meta inside a capture"):
            resolve_lengths(X.to("meta"), packed.cu_seqlens, *beside, WIDTHS)


@given(
    lengths=st.lists(st.integers(0, 9), max_size=70),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    contiguous_v=st.booleans(),
)
def test_packed_offsets_are_the_plain_ones(lengths, dtype, contiguous_v):
    cu, longest = offsets_of(lengths), max(lengths, default=0)
    packed = pack_offsets(cu, longest, WIDTHS)
    count = packed.sequence_lengths.shape[0]
    assert count in (8, 16, 32, 64, 128)
    assert count >= len(lengths)
    assert count < 2 * max(len(lengths), 5)
    padded = cu.tolist() + [cu[-1].item()] * (count - len(lengths))
    qk, v, out = packed.cu_seqlens.view(3, count + 1).tolist()
    assert qk == out == [row * 32 for row in padded]
    assert v == [row * 64 for row in padded]
    assert packed.sequence_lengths.tolist() == lengths + [0] * (count - len(lengths))
    assert packed.max_seqlen == 4096
    sections = packed.cu_seqlens.view(3, -1).clone()
    if contiguous_v:
        sections[1] //= 4
    given_as = sections.flatten().to(dtype)
    assert resolve(given_as, 4096, packed.sequence_lengths) == (padded, 4096)
    assert resolve(given_as, None, packed.sequence_lengths) == (padded, longest)
    with capturing():
        assert resolve(given_as, 4096, packed.sequence_lengths) == (padded, 4096)
        with pytest.raises(EncoderCaptureError, match="max_seqlen is missing"):
            resolve(given_as, None, packed.sequence_lengths)


def test_packing_rounds_the_longest_length_beyond_the_last_bucket():
    cu = offsets_of([1])
    found = [pack_offsets(cu, longest, WIDTHS).max_seqlen for longest in (0, 4096, 4097, 131073)]
    assert found == [4096, 4096, 8192, 262144]


def test_packed_offsets_do_not_overflow():
    cu = torch.tensor([0, 2**28], dtype=torch.int32)
    assert pack_offsets(cu, 1, WIDTHS).cu_seqlens[-1].item() == 2**33


CU = offsets_of([4, 3])
PACKED = pack_offsets(CU, 4, WIDTHS)


def changed(section, by):
    sections = PACKED.cu_seqlens.view(3, -1).clone()
    sections[section, 1] += by
    return sections.flatten()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            {"cu_seqlens": CU, "max_seqlen": torch.tensor(4)},
            "got a tensor on cpu: reading it would synchronise",
        ),
        ({"cu_seqlens": CU, "max_seqlen": True}, "Python int or None, got bool"),
        ({"cu_seqlens": CU, "max_seqlen": 4.0}, r"got float: convert it with int\("),
        ({"cu_seqlens": [0, 4, 7]}, "torch.Tensor or None, got list"),
        ({"cu_seqlens": CU.float()}, r"vector of integers, got torch.float32 \[3\]"),
        ({"cu_seqlens": CU[None]}, r"vector of integers, got torch.int32 \[1, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 2**32])}, "within 32 bits.*got 0 to 4294967296"),
        ({"max_seqlen": 4}, "every sequence has 5 rows, so max_seqlen can't be 4"),
        ({"sequence_lengths": CU}, "cu_seqlens is None: pass both, or neither"),
        (
            {"cu_seqlens": CU, "sequence_lengths": torch.tensor([4, 3])},
            r"3 \* \(2 \+ 1\) = 9 entries, got 3: leave sequence_lengths away",
        ),
        (
            {"cu_seqlens": PACKED.cu_seqlens, "sequence_lengths": PACKED.sequence_lengths[1:]},
            r"= 24 entries, got 27",
        ),
        (
            {"cu_seqlens": PACKED.cu_seqlens, "sequence_lengths": PACKED.sequence_lengths.float()},
            "sequence_lengths must be a vector of integers",
        ),
        *(
            (
                {"cu_seqlens": changed(section, by), "sequence_lengths": PACKED.sequence_lengths},
                f"don't fit together.*{name}.*pack_offsets makes all",
            )
            for section, by, name in [
                (0, 32, "the section of q and k"),
                (1, 1, "v's section"),
                (2, 1, "the output's section"),
                (2, 32, "the section of q and k"),
            ]
        ),
        (
            {"cu_seqlens": PACKED.cu_seqlens, "sequence_lengths": PACKED.sequence_lengths + 1},
            "but sequence_lengths is",
        ),
    ],
)
def test_wrong_lengths_are_refused_and_the_next_call_is_right(call, words):
    with pytest.raises(EncoderAttentionError, match=words):
        resolve(**call)
    assert resolve(CU) == ([0, 4, 7], 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((CU, None), "need a max_seqlen and at least one offset, got None and 3"),
        ((CU[:0], 4), "got 4 and 0"),
        ((CU, torch.tensor(4)), "synchronise"),
        ((CU.float(), 4), "vector of integers"),
    ],
)
def test_wrong_offsets_are_not_packed(arguments, words):
    with pytest.raises(EncoderAttentionError, match=words):
        pack_offsets(*arguments, WIDTHS)


def test_offsets_that_the_rows_do_not_have_are_the_ops_error():
    module = MultimodalEncoderAttention(32, 4)
    with pytest.raises(DataError, match="ends at 7 but there are 6 tokens"):
        module(torch.zeros(6, 32), CU)
    with pytest.raises(DataError, match="longest sequence has 4 tokens but max_seqlen is 3"):
        module(torch.zeros(7, 32), CU, 3)
    assert module(torch.zeros(7, 32), CU).shape == (7, 32)


@pytest.mark.parametrize("by_group", [False, True])
def test_a_modules_packed_form_counts_its_own_rows(by_group):
    module = MultimodalEncoderAttention(32, 4, num_kv_heads=2 if by_group else None)
    packed = module.pack_offsets(CU, 4).cu_seqlens.view(3, -1)
    assert packed[:, 1].tolist() == [4 * 32, 4 * (64 if by_group else 96), 4 * 32]
