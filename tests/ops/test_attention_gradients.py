"""Invariant: gradients of q, k and v are right, and those of rows that no sequence covers are zero."""

import pytest
import torch
from torch.autograd import gradcheck

from mmgraph import ops

CU = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def leaves(tokens, heads, kv_heads, width, v_width, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, v_width))
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_passes_gradcheck(causal, backend):
    q, k, v = leaves(9, 4, 2, 3, 2)
    assert gradcheck(
        lambda *x: ops.varlen_attention(*x, CU, 4, causal=causal, scale=0.6, backend=backend), (q, k, v)
    )


def test_garbage_in_the_tail_reaches_no_gradient():
    q, k, v = leaves(9, 2, 2, 4, 4)
    with torch.no_grad():
        for x in (q, k, v):
            x[7:] = float("nan")
    grad = torch.ones(9, 2, 4, dtype=torch.float64)
    grad[7:] = float("nan")
    ops.varlen_attention(q, k, v, CU, 4).backward(grad)
    for x in (q, k, v):
        assert bool(x.grad.isfinite().all())
        assert float(x.grad[7:].abs().sum()) == 0.0
        assert float(x.grad[:7].abs().sum()) > 0.0


def test_the_default_scale_has_the_gradient_of_that_scale():
    named, default = leaves(7, 2, 2, 9, 9), leaves(7, 2, 2, 9, 9)
    ops.varlen_attention(*named, CU, 4, scale=1 / 3).square().sum().backward()
    ops.varlen_attention(*default, CU, 4).square().sum().backward()
    for a, b in zip(named, default, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_alone_may_need_a_gradient(which):
    inputs = leaves(7, 2, 1, 4, 4)
    for i, x in enumerate(inputs):
        x.requires_grad_(i == which)
    ops.varlen_attention(*inputs, CU, 4).sum().backward()
    assert [x.grad is not None for x in inputs] == [i == which for i in range(3)]


@pytest.mark.parametrize(("tokens", "cu", "longest"), [(0, [0], 0), (4, [0], 0), (4, [0, 0, 0], 2)])
def test_no_covered_row_means_zero_gradients(tokens, cu, longest):
    q, k, v = leaves(tokens, 2, 2, 4, 4)
    ops.varlen_attention(q, k, v, torch.tensor(cu, dtype=torch.int32), longest).sum().backward()
    assert float(q.grad.abs().sum() + k.grad.abs().sum() + v.grad.abs().sum()) == 0.0


def test_low_precision_gradients_have_their_inputs_dtype():
    inputs = leaves(7, 2, 2, 4, 4, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ops.varlen_attention(*inputs, CU, 4).float().sum().backward()
    ops.varlen_attention(*wide, CU, 4).sum().backward()
    for low, high in zip(inputs, wide, strict=True):
        assert low.grad.dtype == torch.bfloat16
        torch.testing.assert_close(low.grad.double(), high.grad, atol=2e-2, rtol=2e-2)


def test_no_grad_mode_needs_no_gradient():
    q, k, v = leaves(7, 2, 2, 4, 4)
    with torch.no_grad():
        assert not ops.varlen_attention(q, k, v, CU, 4).requires_grad
    assert ops.varlen_attention(q, k, v, CU, 4).requires_grad
