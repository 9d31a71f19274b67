"""Invariant: inputs are widened and copied only where FlashAttention's kernels need it, and outputs end as promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.ops.attention import flash_shared
from mmgraph.ops.attention.flash_shared import finish, padded_width, widen


@pytest.fixture
def tails(monkeypatch):
    """What zero_tail and close_tail got, played in plain PyTorch."""
    seen = []

    def zero_tail(out, cu, longest=None):
        assert out.is_contiguous()
        out[int(cu[-1]) :] = 0
        seen.append(("zero", longest))

    def close_tail(out, *rest):
        assert out.is_contiguous()
        out[int(rest[3][-1]) :] = 0
        seen.append(("close", *rest))

    monkeypatch.setattr(flash_shared, "zero_tail", zero_tail)
    monkeypatch.setattr(flash_shared, "close_tail", close_tail)
    return seen


@given(st.integers(1, 256), st.integers(1, 256))
def test_the_padded_width_is_the_least_multiple_of_8_that_holds_both(width, v_width):
    padded = padded_width(width, v_width)
    assert padded % 8 == 0
    assert max(width, v_width) <= padded < max(width, v_width) + 8


def is_taken(x):
    return x.stride(2) == 1 and x.stride(0) % 8 == x.stride(1) % 8 == x.data_ptr() % 16 == 0


@given(st.integers(0, 2**32 - 1))
def test_widened_tensors_hold_the_values_and_zeros(seed):
    g = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=g))

    tokens, heads, width = draw(1, 5), draw(1, 4), draw(1, 20)
    room = torch.randn(tokens * 2, heads + 1, width + 9, generator=g).bfloat16()
    x = room[:: draw(1, 3)][:tokens, :heads, draw(0, 9) :][:, :, :width]
    if draw(0, 4) == 0:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif draw(0, 4) == 0:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = padded_width(width, draw(1, 20))
    got = widen(x, wide)
    assert got.shape == (*x.shape[:2], wide)
    assert torch.equal(got[:, :, :width], x)
    assert int((got[:, :, width:] != 0).sum()) == 0
    assert is_taken(got)
    assert (got is x) == (width == wide and is_taken(x))


@pytest.mark.parametrize(
    ("strides", "start", "taken"),
    [
        ((32, 8, 1), 0, True),
        ((24, 12, 1), 0, False),
        ((20, 8, 1), 0, False),
        ((32, 8, 1), 4, False),
        ((32, 8, 2), 0, False),
    ],
)
def test_each_alignment_counts(strides, start, taken):
    x = torch.randn(200).bfloat16().as_strided((4, 2, 8), strides, start)
    got = widen(x, 8)
    assert (got is x) == taken
    assert torch.equal(got, x)
    assert is_taken(got)


def test_views_of_a_packed_projection_are_taken_as_they_are():
    packed = torch.zeros(4, 3 * 16).bfloat16()
    for part in packed.split(16, 1):
        x = part.unflatten(1, (2, 8))
        assert widen(x, 8) is x
    odd = torch.zeros(4, 40)[:, 1:17].unflatten(1, (2, 8))
    assert widen(odd, 8) is not odd


@pytest.mark.parametrize("v_dim", [8, 5])
@pytest.mark.parametrize("head_major", [False, True])
def test_an_output_is_contiguous_of_vs_width_and_clear_behind_the_end(tails, v_dim, head_major):
    given_out = torch.randn(6, 2, 8)
    if head_major:
        given_out = given_out.transpose(0, 1).contiguous().transpose(0, 1)
    values = given_out[:4, :, :v_dim].clone()
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    lse = torch.randn(2, 6)
    sums = lse[:, :4].clone()
    out, found = finish(given_out, lse, v_dim, cu, 3)
    assert out.is_contiguous()
    assert torch.equal(out[:4], values)
    assert float(out[4:].abs().sum()) == 0.0
    assert torch.equal(found[:, :4], sums)
    assert bool((found[:, 4:] == float("-inf")).all())
    assert tails == [("zero", 3)]
    if v_dim == 8 and not head_major:
        assert out is given_out  # no copy


def test_no_sums_asked_for_are_no_sums(tails):
    out, lse = finish(torch.randn(3, 1, 8), None, 8, torch.tensor([0, 2], dtype=torch.int32), 2)
    assert lse is None
    assert out.shape == (3, 1, 8)


def test_an_overhang_is_closed(tails):
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    out, _ = finish(torch.randn(6, 2, 8), None, 8, cu, 4, (q, k, v, 0.5, True))
    assert float(out[4:].abs().sum()) == 0.0
    ((kind, *rest),) = tails
    assert kind == "close"
    assert all(one is other for one, other in zip(rest, (q, k, v, cu), strict=False))
    assert rest[4:] == [4, 0.5, True]


@pytest.mark.parametrize("which", [0, 1])
def test_expanded_views_are_copied(which):
    shape = [6, 4, 16]
    shape[which] = 1
    expanded = torch.randn(shape).half().expand(6, 4, 16)
    widened = flash_shared.widen(expanded, 16)
    assert widened.is_contiguous()
    assert torch.equal(widened, expanded)
