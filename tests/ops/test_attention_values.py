"""Invariant: attention equals dense float64 attention per sequence; uncovered rows are zero and reach nothing."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmgraph import ops


def dense(q, k, v, lengths, scale=None, causal=False):
    """Each sequence alone, in float64; zeros elsewhere."""
    q, k, v = q.double(), k.double(), v.double()
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], heads, v.shape[2], dtype=torch.float64)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(heads):
            scores = q[rows, head] @ k[rows, head // group].T * scale
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            out[rows, head] = torch.softmax(scores, -1) @ v[rows, head // group]
        start += length
    return out


def offsets(lengths):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def make(seed, tokens, heads, kv_heads, width, v_width, dtype, packed):
    g = torch.Generator().manual_seed(seed)
    if packed and width == v_width:
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, generator=g).to(dtype)
        parts = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
        return tuple(x.unflatten(1, (-1, width)) for x in parts)
    return (
        torch.randn(tokens, heads, width, generator=g).to(dtype),
        torch.randn(tokens, kv_heads, width, generator=g).to(dtype),
        torch.randn(tokens, kv_heads, v_width, generator=g).to(dtype),
    )


def assert_close(got, q, k, v, lengths, scale, causal):
    """The error is at most twice that of plain low-precision attention, and some units in the last place."""
    expected = dense(q, k, v, lengths, scale, causal)
    group = q.shape[1] // k.shape[1]
    own = 0.0
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        plain = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            k[rows].transpose(0, 1)[None].repeat_interleave(group, 1),
            v[rows].transpose(0, 1)[None].repeat_interleave(group, 1),
            is_causal=causal,
            scale=scale,
        )[0].transpose(0, 1)
        if length:
            own = max(own, float((plain.double() - expected[rows]).abs().max()))
        start += length
    # With so few elements plain attention's own error is at times luckily small: in wide types some units more.
    units = 1 if got.dtype in (torch.bfloat16, torch.float16) else 8
    largest = max(float(x.abs().max()) if x.numel() else 0.0 for x in (v, expected))
    limit = 2 * own + units * torch.finfo(got.dtype).eps * largest
    worst = float((got.double() - expected).abs().max()) if got.numel() else 0.0
    assert worst <= limit, f"off by {worst}, limit {limit}"


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 9), max_size=5),
    tail=st.integers(0, 4),
    groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(8, 8), (5, 3), (16, 24)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    packed=st.booleans(),
    scale=st.sampled_from([None, 0.7, -0.4]),
    slack=st.integers(0, 3),
    backend=st.sampled_from([None, "reference"]),
)
@example(0, [], 0, (1, 1), (8, 8), torch.float32, False, False, None, 0, None)
@example(0, [0, 0], 3, (1, 1), (8, 8), torch.float32, False, False, None, 0, "reference")
def test_equals_dense_attention(
    seed, lengths, tail, groups, widths, dtype, causal, packed, scale, slack, backend
):
    tokens = sum(lengths) + tail
    q, k, v = make(seed, tokens, *groups, *widths, dtype, packed)
    for x in (q, k, v):
        x[tokens - tail :] = float("nan")
    limit = max(lengths, default=0) + slack
    got = ops.varlen_attention(q, k, v, offsets(lengths), limit, scale=scale, causal=causal, backend=backend)
    assert got.shape == (tokens, groups[0], v.shape[2])
    assert got.dtype == dtype
    assert got.is_contiguous()
    covered = tokens - tail
    assert torch.equal(got[covered:], torch.zeros_like(got[covered:]))
    assert_close(got[:covered], q[:covered], k[:covered], v[:covered], lengths, scale, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_device_form_of_the_reference_equals_its_host_form(causal, monkeypatch):
    """The dense mask that CUDA tensors get, taken on the CPU, some query rows at a time."""
    from mmgraph.ops.attention import reference

    lengths, tail = [5, 0, 7, 1], 3
    q, k, v = make(3, 16, 4, 2, 8, 6, torch.float64, False)
    for x in (q, k, v):
        x[16 - tail :] = float("nan")
    cu = offsets(lengths)
    host, host_lse = reference.forward(q, k, v, cu, 7, 0.3, causal, True)
    grad = torch.randn(16, 4, 6, dtype=torch.float64)
    host_grads = reference.backward(grad, q, k, v, host_lse, cu, 0.3, causal)

    monkeypatch.setattr(reference, "_parts", reference._masked_parts)
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 5 * 4 * 16)
    device, device_lse = reference.forward(q, k, v, cu, 7, 0.3, causal, True)
    torch.testing.assert_close(device, host)
    torch.testing.assert_close(device_lse, host_lse)
    device_grads = reference.backward(grad, q, k, v, device_lse, cu, 0.3, causal)
    for a, b in zip(device_grads, host_grads, strict=True):
        torch.testing.assert_close(a, b)
        assert float(a[13:].abs().sum()) == 0.0


def test_boundaries_change_the_result_even_with_one_total():
    q, k, v = make(0, 8, 2, 2, 4, 4, torch.float32, False)
    one = ops.varlen_attention(q, k, v, offsets([3, 5]), 5)
    other = ops.varlen_attention(q, k, v, offsets([5, 3]), 5)
    assert not torch.allclose(one, other)


def test_inference_mode_gives_the_same():
    q, k, v = make(0, 8, 2, 2, 4, 4, torch.float32, False)
    with torch.inference_mode():
        inside = ops.varlen_attention(q, k, v, offsets([3, 5]), 5)
    assert torch.equal(inside, ops.varlen_attention(q, k, v, offsets([3, 5]), 5))
