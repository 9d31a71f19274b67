"""Invariant: each wrong argument of attention has its own clear error, and the next good call works."""

import numpy as np
import pytest
import torch

from mmgraph import ops

Q = torch.randn(6, 4, 8)
KV = torch.randn(6, 2, 8)
CU = torch.tensor([0, 2, 5], dtype=torch.int32)


def good():
    out = ops.varlen_attention(Q, KV, KV, CU, 3)
    assert bool(out[:5].isfinite().all())
    assert float(out[5].abs().sum()) == 0.0


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": Q[None]}, ops.ArgumentError, r"must have shape \[tokens, heads, width\]"),
        ({"q": Q.long()}, ops.ArgumentError, "one floating-point dtype"),
        ({"k": KV.double()}, ops.ArgumentError, "one floating-point dtype"),
        ({"k": KV[:5]}, ops.ArgumentError, "must agree in tokens"),
        ({"v": KV[:, :1]}, ops.ArgumentError, "must agree in tokens"),
        ({"k": KV[:, :, :4]}, ops.ArgumentError, "q and k in width"),
        ({"q": Q[:, :3]}, ops.ArgumentError, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"q": Q[:, :0], "k": KV[:, :0], "v": KV[:, :0]}, ops.ArgumentError, "must be positive"),
        ({"cu_seqlens": CU.long()}, ops.ArgumentError, "one-dimensional int32"),
        ({"cu_seqlens": CU[None]}, ops.ArgumentError, "one-dimensional int32"),
        ({"cu_seqlens": CU[:0]}, ops.ArgumentError, "batch \\+ 1 entries, got none"),
        ({"cu_seqlens": CU.to("meta")}, ops.ArgumentError, "on one device"),
        ({"cu_seqlens": cu(1, 5)}, ops.DataError, "must start at 0, got 1"),
        ({"cu_seqlens": cu(0, 3, 2, 5)}, ops.DataError, "must not decrease, got 3 then 2 at entry 2"),
        ({"cu_seqlens": cu(0, 3, 7)}, ops.DataError, "ends at 7 but there are 6 tokens"),
        ({"q": [Q]}, ops.ArgumentError, r"q must be a torch\.Tensor, got list; make it with torch\.as_tensor"),
        ({"k": None}, ops.ArgumentError, r"k must be a torch\.Tensor, got NoneType; pass one"),
        ({"v": KV.numpy()}, ops.ArgumentError, r"v must be a torch\.Tensor, got ndarray"),
        ({"cu_seqlens": [0, 2, 5]}, ops.ArgumentError, r"cu_seqlens must be a torch\.Tensor, got list"),
        ({"max_seqlen": 2}, ops.DataError, "longest sequence has 3 tokens but max_seqlen is 2"),
        ({"max_seqlen": -1}, ops.ArgumentError, "must not be negative"),
        ({"max_seqlen": torch.tensor(3)}, ops.ArgumentError, "would synchronise"),
        ({"max_seqlen": 3.0}, ops.ArgumentError, "must be a Python int, got float"),
        ({"max_seqlen": True}, ops.ArgumentError, "must be a Python int, got bool"),
        (
            {"backend": "flash"},
            ops.UnknownBackend,
            "choose one of fa3, fa4, fa2, .*reference",
        ),
        ({"backend": "triton"}, ops.UnusableBackend, "reference: usable"),
        ({"backend": "fa2"}, ops.UnusableBackend, "tensors are on cpu"),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_attention_refuses(change, error, words, gradient):
    arguments = {"q": Q, "k": KV, "v": KV, "cu_seqlens": CU, "max_seqlen": 3} | change
    if gradient and isinstance(arguments["q"], torch.Tensor) and arguments["q"].is_floating_point():
        arguments["q"] = arguments["q"].clone().requires_grad_()
    with pytest.raises(error, match=words):
        ops.varlen_attention(**arguments)
    good()


def test_the_gradient_free_op_refuses_to_drop_a_gradient():
    q = Q.clone().requires_grad_()
    for op in (torch.ops.mmgraph.varlen_attention, torch.ops.mmgraph.attn_reference):
        with pytest.raises(ops.GradientError, match=r"mmgraph\.ops\.varlen_attention"):
            op(q, KV, KV, CU, 3, None, False)
    good()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "x"}, "scale must be a Python number or None, got str"),
        ({"scale": torch.tensor(0.5)}, "scale must be .*got Tensor; reading it would synchronise"),
        ({"scale": True}, "scale must be .*got bool"),
        ({"causal": None}, "causal must be True or False, got NoneType"),
        ({"causal": "yes"}, "causal must be True or False, got str"),
        ({"causal": np.True_}, "causal must be True or False, got numpy.bool"),
        ({"scale": 10**400}, "scale must be a finite number"),
    ],
)
def test_scalars_of_other_types(options, words):
    q, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ops.ArgumentError, match=words):
        ops.varlen_attention(q, q, q, cu, 4, **options)
    ops.varlen_attention(q, q, q, cu, 4, scale=1, causal=True)


@pytest.mark.parametrize(
    ("longest", "words"),
    [
        (np.int64(4), r"got numpy.int64; convert it with int\("),
        (2**63, "below 2\\^63"),
        (-1, "must not be negative"),
    ],
    ids=str,
)
def test_longest_lengths_that_are_no_python_int_or_none_that_fits(longest, words):
    q, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ops.ArgumentError, match=words):
        ops.varlen_attention(q, q, q, cu, longest)
    assert torch.equal(ops.varlen_attention(q, q, q, cu, 2**62), ops.varlen_attention(q, q, q, cu, 4))


def test_offsets_of_another_shape_are_not_told_to_be_converted():
    q, cu = torch.randn(7, 2, 8), torch.tensor([[0, 3, 7]], dtype=torch.int32)
    with pytest.raises(ops.ArgumentError, match="flatten it"):
        ops.varlen_attention(q, q, q, cu, 4)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32, torch.complex64], ids=str
)
def test_dtypes_that_no_backend_computes_in_are_refused(dtype):
    q, cu = torch.ones(7, 2, 8).to(dtype), torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ops.ArgumentError, match="bfloat16, float16, float32 or float64"):
        ops.varlen_attention(q, q, q, cu, 4)


def test_a_name_of_another_type_is_unknown():
    q, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    for name in (["triton"], "", 3):
        with pytest.raises(ops.UnknownBackend):
            ops.varlen_attention(q, q, q, cu, 4, backend=name)
