"""Invariant: autocast changes nothing in attention: what computes in single precision goes on doing so."""

import pytest
import torch

from mmgraph import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_reference_computes_as_without_autocast(dtype):
    cu = torch.tensor([0, 5, 11], dtype=torch.int32)

    def run():
        q, k, v = torch.randn(13, 3, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(1)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ops.varlen_attention(*leaves, cu, 6)
        out.float().square().sum().backward()
        return out.detach(), *(x.grad for x in leaves)

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
