"""Invariant: FlashAttention's kernels get what they need, and the results are those of the call that was made.

They need positive scales, one width that is a multiple of 8, aligned rows and adjacent offsets. They are played by the
reference's math, which takes anything, so that this runs without a GPU; the players look at what they get, and leave
garbage in the rows that no sequence covers, as the kernels do.
"""

import pytest
import torch

from mmgraph.ops import DuringCaptureError, UnusableBackend
from mmgraph.ops.attention import fa2, fa3, fa4, flash_backward, flash_shared, reference, torch_varlen

CU = torch.tensor([0, 9, 3, 9, 3, 9, 8, 9], dtype=torch.int32)[::2]  # entries that aren't adjacent
LONGEST = 5
SCALES = (0.4, -0.4, 0.0, -1e-3)
TOKENS = 10


def play(q, k, v, cu, longest, scale, causal):
    """What a kernel does, after a look at what it gets."""
    assert scale > 0
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % 8 == 0
    for x in (q, k, v):
        assert x.stride(2) == 1
        assert x.stride(0) % 8 == x.stride(1) % 8 == x.data_ptr() % 16 == 0
    assert cu.is_contiguous()
    out, lse = reference.forward(q, k, v, cu, longest, scale, causal, True)
    out[int(cu[-1]) :] = lse[:, int(cu[-1]) :] = float("nan")
    return out, lse


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """The kernels' part, in plain PyTorch; the scales and longest lengths that they got, and what closes an output."""
    seen = {"scales": [], "longest": [], "closed": []}

    def note(scale, longest, other_longest):
        seen["scales"].append(scale)
        seen["longest"].append(longest)
        assert longest == other_longest

    def of_torch(q, k, v, cu, cu_k, longest, longest_k, dropout, causal, debug, *, scale):
        assert cu is cu_k
        assert (dropout, debug) == (0.0, False)
        note(scale, longest, longest_k)
        return *play(q, k, v, cu, longest, scale, causal), None, None, None

    def of_flash_attn(
        q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, alibi_slopes_,
        max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left,
        window_size_right, softcap, return_softmax, gen_,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k
        assert all(x is None for x in (out_, seqused_k, leftpad_k_, block_table_, alibi_slopes_, gen_))
        assert (p_dropout, softcap, zero_tensors, return_softmax) == (0.0, 0.0, False, False)
        assert (window_size_left, window_size_right) == (-1, 0 if is_causal else -1)
        note(softmax_scale, max_seqlen_q, max_seqlen_k)
        return *play(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, is_causal), None, None

    def of_fa3(q, k, v, cu, cu_k, longest, longest_k, scale, causal, splits):
        assert cu is cu_k
        assert splits == 1
        note(scale, longest, longest_k)
        return *play(q, k, v, cu, longest, scale, causal), None, None

    def of_fa4(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse
    ):
        assert cu_seqlens_q is cu_seqlens_k
        note(softmax_scale, max_seqlen_q, max_seqlen_k)
        out, lse = play(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal)
        return out, lse if return_lse else None

    def backward(
        grad, q, k, v, out, lse, cu, cu_k, longest, longest_k, dropout, causal, seed, unused, *, scale
    ):
        note(scale, longest, longest_k)
        assert grad.shape == out.shape == q.shape
        return reference.backward(grad, q, k, v, lse, cu, scale, causal)

    def zero_tail(out, cu, longest=None):
        assert out.is_contiguous()
        out[int(cu[-1]) :] = 0

    def close_tail(out, q, k, v, cu, longest, scale, causal):
        zero_tail(out, cu)
        seen["closed"].append((q, k, v, longest, scale, causal))

    monkeypatch.setattr(flash_shared, "zero_tail", zero_tail)
    monkeypatch.setattr(flash_shared, "close_tail", close_tail)
    monkeypatch.setattr(flash_backward, "zero_tail", zero_tail)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", of_torch)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(fa2, "_package", lambda: of_flash_attn)
    monkeypatch.setattr(fa3, "_build", lambda: fa3._Build("played", of_fa3, (None,) * 10, tuple(range(10)), {}))
    monkeypatch.setattr(fa4, "_package", lambda: of_fa4)
    monkeypatch.setattr(fa4, "_called", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def fa2_of_torch(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa2, "_package", lambda: None)
        return fa2.forward(*arguments)


FORWARDS = {
    "fa2": fa2.forward,
    "fa2 of torch": fa2_of_torch,
    "torch": torch_varlen.forward,
    "fa3": fa3.forward,
    "fa4": fa4.forward,
}


def inputs(width=6, v_width=5, heads=4, kv_heads=2):
    """q, k, v and a gradient, the first three as views of one projection."""
    g = torch.Generator().manual_seed(3)
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    packed = torch.randn(TOKENS, sum(sizes), generator=g, dtype=torch.float64)
    parts = zip(packed.split(sizes, 1), (width, width, v_width), strict=True)
    grad = torch.randn(TOKENS, heads, v_width, generator=g, dtype=torch.float64)
    return [*(x.unflatten(1, (-1, w)) for x, w in parts), grad]


@pytest.mark.parametrize("scale", SCALES)
def test_positive_scale_keeps_the_scores(scale):
    q, k, _, _ = inputs()
    other, positive = flash_shared.positive_scale(q, scale)
    assert positive > 0
    wanted = torch.einsum("qhd,khd->hqk", q[:, :2], k) * scale
    torch.testing.assert_close(torch.einsum("qhd,khd->hqk", other[:, :2], k) * positive, wanted)
    assert (other is q) == (scale > 0)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_output_and_gradients_are_those_of_the_scale_asked_for(seen, name, scale, causal):
    q, k, v, grad = inputs()
    out, lse = FORWARDS[name](q, k, v, CU, LONGEST, scale, causal, True)
    expected, sums = reference.forward(q, k, v, CU, LONGEST, scale, causal, True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    assert out.is_contiguous()
    got = flash_backward.backward(grad, q, k, v, out, lse, CU, LONGEST, scale, causal)
    for one, other in zip(got, reference.backward(grad, q, k, v, sums, CU, scale, causal), strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()
    assert len(seen["scales"]) == 2
    assert all(given > 0 for given in seen["scales"])


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(("width", "v_width"), [(8, 8), (16, 8), (8, 24), (7, 7), (1, 1), (13, 40)])
def test_any_widths_give_the_output_of_those_widths(name, width, v_width):
    q, k, v, _ = inputs(width, v_width)
    out, lse = FORWARDS[name](q, k, v, CU, LONGEST, 0.3, False, False)
    assert lse is None
    assert out.is_contiguous()
    torch.testing.assert_close(out, reference.forward(q, k, v, CU, LONGEST, 0.3, False, False)[0])


@pytest.mark.parametrize("name", FORWARDS)
def test_a_longest_length_of_one_is_no_call_of_another_kind(seen, name):
    """With it and grouped heads, FlashAttention 2 takes every row for a sequence of its own."""
    q, k, v, _ = inputs()
    cu = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    out, _ = FORWARDS[name](q, k, v, cu, 1, 0.3, False, False)
    torch.testing.assert_close(out, reference.forward(q, k, v, cu, 1, 0.3, False, False)[0])
    assert seen["longest"] == [1 if name in ("fa3", "fa4") else 2]


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_rows_behind_the_end_are_looked_at_as_the_kernels_got_them(seen, name):
    q, k, v, _ = inputs()
    FORWARDS[name](q, k, v, CU, LONGEST, -0.3, True, False)
    ((got_q, got_k, got_v, longest, scale, causal),) = seen["closed"]
    assert (longest, scale, causal) == (LONGEST, 0.3, True)
    assert torch.equal(got_q[:, :, :6], -q)
    assert torch.equal(got_k[:, :, :6], k)
    assert torch.equal(got_v[:, :, :5], v)
    assert got_q.shape[2] == got_k.shape[2] == got_v.shape[2] == 8


def test_fa4_refuses_a_new_kind_of_call_inside_a_capture(seen, monkeypatch):
    q, k, v, _ = inputs()

    def call(q=q, k=k, v=v, cu=CU, causal=False, with_lse=False, scale=0.3):
        return fa4.forward(q, k, v, cu, LONGEST, scale, causal, with_lse)

    call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call()
    call(scale=-0.7)  # known: no constant of the kernel
    call(q.clone(), k.clone(), v.clone())
    call(cu=torch.tensor([0, 2, 5, 8], dtype=torch.int32))
    calls = len(seen["scales"])
    news = (
        {"causal": True},
        {"with_lse": True},
        {"q": q.float(), "k": k.float(), "v": v.float()},
        dict(zip("qkv", inputs(16, 16), strict=False)),
        dict(zip("qkv", inputs(heads=2), strict=False)),
        dict(zip("qkv", inputs(kv_heads=4), strict=False)),
    )
    for new in news:
        with pytest.raises(DuringCaptureError, match=r"'fa4' compiles.*before capturing it") as caught:
            call(**new)
        assert "widths, heads, dtype and batch" in str(caught.value)
        with pytest.raises(DuringCaptureError):  # the refusal didn't make it known
            call(**new)
    assert len(seen["scales"]) == calls
    call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for new in news:
        call(**new)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for new in news:
        call(**new)


def test_a_kind_of_fa4_is_known_once_its_call_returned(seen, monkeypatch):
    q = torch.randn(TOKENS, 2, 16).half()
    arguments = (q, q, q, CU, LONGEST, 0.25, False, False)
    working = fa4._package()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def fail(*tensors, **options):
        assert not fa4.ready(*arguments)
        raise MemoryError

    monkeypatch.setattr(fa4, "_package", lambda: fail)
    with pytest.raises(MemoryError):
        fa4.forward(*arguments)
    assert not fa4.ready(*arguments)
    monkeypatch.setattr(fa4, "_package", lambda: working)
    fa4.forward(*arguments)
    assert fa4.ready(*arguments)
    assert not fa4.ready(q, q, q, CU, 500, 0.25, False, False)
    assert not fa4.ready(*arguments[:7], True)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_other_kernels_in_place_of_pytorchs_are_refused(seen, monkeypatch, name):
    q = torch.randn(TOKENS, 2, 16).half()
    monkeypatch.setattr(flash_shared, "current_flash_attention_impl", lambda: name)
    with pytest.raises(UnusableBackend, match=f"switched to {name}"):
        torch_varlen.forward(q, q, q, CU, LONGEST, 0.25, False, False)
    with pytest.raises(UnusableBackend, match=f"switched to {name}"):
        flash_backward.backward(q, q, q, q, q, torch.zeros(2, TOKENS), CU, LONGEST, 0.25, False)
    assert not seen["scales"]
    for own in (None, "FA2"):
        monkeypatch.setattr(flash_shared, "current_flash_attention_impl", lambda own=own: own)
        torch_varlen.forward(q, q, q, CU, LONGEST, 0.25, False, False)
