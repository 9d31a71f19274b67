"""Invariant: fa2 gives its kernels positive scales only, and the results are those of the scale asked for.

The kernels are played by the reference's math, which takes any scale, so that this runs without a GPU.
"""

import pytest
import torch

from mmgraph.ops.attention import fa2, reference

CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
LONGEST = 5
SCALES = (0.4, -0.4, 0.0, -1e-3)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels' part, in plain PyTorch; the scales that they got."""
    seen = []

    def forward(q, k, v, cu, cu_k, longest, longest_k, dropout, causal, debug, *, scale):
        seen.append(scale)
        return reference.forward(q, k, v, cu, longest, scale, causal, True)

    def backward(
        grad, q, k, v, out, lse, cu, cu_k, longest, longest_k, dropout, causal, seed, unused, *, scale
    ):
        seen.append(scale)
        return reference.backward(grad, q, k, v, lse, cu, scale, causal)

    monkeypatch.setattr(fa2, "_package", lambda: None)
    monkeypatch.setattr(fa2, "zero_tail", lambda out, cu, longest=None: out[int(cu[-1]) :].zero_())
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return seen


def inputs():
    g = torch.Generator().manual_seed(3)
    shapes = ((10, 4, 6), (10, 2, 6), (10, 2, 5), (10, 4, 5))
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("scale", SCALES)
def test_positive_scale_keeps_the_scores(scale):
    q, k, _, _ = inputs()
    other, positive = fa2.positive_scale(q, scale)
    assert positive > 0
    wanted = torch.einsum("qhd,khd->hqk", q[:, :2], k) * scale
    torch.testing.assert_close(torch.einsum("qhd,khd->hqk", other[:, :2], k) * positive, wanted)
    assert (other is q) == (scale > 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_output_and_gradients_are_those_of_the_scale_asked_for(kernels, scale, causal):
    q, k, v, grad = inputs()
    out, lse = fa2.forward(q, k, v, CU, LONGEST, scale, causal, True)
    expected, sums = reference.forward(q, k, v, CU, LONGEST, scale, causal, True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    got = fa2.backward(grad, q, k, v, out, lse, CU, LONGEST, scale, causal)
    for one, other in zip(got, reference.backward(grad, q, k, v, sums, CU, scale, causal), strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()
    assert len(kernels) == 2
    assert all(given > 0 for given in kernels)
