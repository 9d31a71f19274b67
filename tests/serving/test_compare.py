"""A difference beyond the measured tolerance, a NaN, or a token that is no tie never counts as agreement."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.serving.compare import compare_tokens, difference


def tensors(seed):
    exact = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return exact, exact.float()


@given(seed=st.integers(0, 2**31), factor=st.floats(0.0, 4.0))
def test_bound_is_twice_the_eager_error_and_one_rounding(seed, factor):
    exact, eager = tensors(seed)
    eager = eager + 1e-3
    error = (eager.double() - exact).abs().max().item()
    bound = 2 * error + torch.finfo(torch.float32).eps * exact.abs().max().item()
    captured = eager.clone()
    captured[1, 2] += factor * bound
    found = difference("x", [eager], [captured], [exact])
    assert math.isclose(found.allowed, bound, rel_tol=1e-9)
    assert math.isclose(found.reference_error, error, rel_tol=1e-9)
    assert found.absolute == (captured.double() - eager.double()).abs().max().item()
    assert found.ok == (found.absolute <= bound)
    if factor < 0.99:
        assert found.ok
    if factor > 1.01:
        assert not found.ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_values_that_are_not_finite_never_pass(value, where):
    exact, eager = tensors(1)
    bad = eager.clone()
    bad[0, 0] = value
    good = difference("x", [eager, eager], [eager, eager], [exact, exact])
    captured = [eager, eager]
    captured[where] = bad
    assert good.ok
    assert not difference("x", [eager, eager], captured, [exact, exact]).ok


def test_shapes_and_numbers_must_agree():
    exact, eager = tensors(2)
    with pytest.raises(ValueError):
        difference("x", [eager, eager], [eager], [exact, exact])
    assert difference("x", [eager[:0]], [eager[:0]], [exact[:0]]).ok


def test_a_token_may_differ_only_where_the_logits_tie():
    eager = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.2, 0.0], [0.0, 0.0, 3.0]])
    captured = torch.tensor([[0.94, 0.96, 0.0], [0.1, 0.2, 0.0], [0.0, 0.0, 3.0]])
    check = compare_tokens(eager, captured, 0.06)
    assert (check.compared, check.different, check.ties) == (3, 2, 1)
    assert not check.equal
    assert not check.ok
    tie_only = compare_tokens(eager[:1], captured[:1], 0.06)
    assert tie_only.ok
    assert not tie_only.equal
    same = compare_tokens(eager, eager, 0.0)
    assert same.equal
    assert same.ok
