"""Invariant: the packed gradient is the transposed map's, whole, from one op; weights of norms get theirs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary import Heads, exact, packed, table
from torch.utils._python_dispatch import TorchDispatchMode

from mmgraph import ops
from mmgraph.ops.rotary import dispatch

HEADS = Heads(4, 2, 6)


def leaf(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def tables(tokens, width, seed=1):
    g = torch.Generator().manual_seed(seed)
    return table(g, tokens, width, torch.float64), table(g, tokens, width, torch.float64)


class Calls(TorchDispatchMode):
    """The names of the ops that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [3, 6, None], ids=["half", "full", "no tables"])
@pytest.mark.parametrize("which", ["", "q", "k", "qk"])
def test_gradcheck_passes(interleaved, width, which):
    if width is None and not which:
        return
    cos, sin = (None, None) if width is None else tables(3, width)
    weights = [leaf(6, seed=2 + i) if name in which else None for i, name in enumerate("qk")]

    def function(qkv, *given):
        left = list(given)
        q_norm, k_norm = (None if w is None else left.pop(0) for w in weights)
        return ops.packed_qkv_rope(
            qkv, cos, sin, *HEADS.counts(), interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=1e-3
        )

    assert torch.autograd.gradcheck(function, (leaf(3, HEADS.columns), *(w for w in weights if w is not None)))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 4),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    layout=st.sampled_from(("plain", "gaps", "apart")),
    interleaved=st.booleans(),
    full=st.booleans(),
    which=st.sampled_from(("", "q", "k", "qk")),
    needs=st.sampled_from(("all", "qkv", "norms")),
    grads=st.sampled_from(("plain", "head-major", "expanded")),
)
def test_gradients_equal_those_of_the_formula(
    seed, tokens, dtype, layout, interleaved, full, which, needs, grads
):
    g = torch.Generator().manual_seed(seed)
    if needs == "norms" and not which:
        needs = "all"
    qkv = packed(g, tokens, HEADS, dtype, layout).requires_grad_(needs != "norms")
    cos, sin = (table(g, tokens, 6 if full else 3, torch.float32) for _ in range(2))
    norms = {
        f"{name}_norm": torch.randn(6, generator=g).to(dtype).requires_grad_(needs != "qkv") for name in which
    }
    outs = ops.packed_qkv_rope(qkv, cos, sin, *HEADS.counts(), interleaved=interleaved, **norms)
    expected = exact(qkv, cos, sin, HEADS, interleaved=interleaved, **norms)
    wanting = [x for x in (qkv, *norms.values()) if x.requires_grad]

    def gradient_of(out):
        made = torch.randn(out.shape[1], tokens, out.shape[2], generator=g).to(dtype)
        made = made.transpose(0, 1) if grads == "head-major" else made.transpose(0, 1).contiguous()
        return made[:1, :1, :1].expand(out.shape) if grads == "expanded" and tokens else made

    directions = [gradient_of(out) for out in outs]
    got = torch.autograd.grad(outs, wanting, directions)
    pairs = [(out, d.double()) for out, d in zip(expected, directions, strict=True) if out.requires_grad]
    wide = torch.autograd.grad([out for out, _ in pairs], wanting, [d for _, d in pairs])
    assert len(got) == len(wanting)
    for x, a, b in zip(wanting, got, wide, strict=True):
        assert a.dtype == x.dtype
        assert a.shape == x.shape
        # Both are rounded to the leaf's dtype at the end; before it, sums of terms up to about 100 are in float32.
        largest = float(b.abs().max()) if b.numel() else 0.0
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=eps, atol=eps * largest + 2e-4)


@pytest.mark.parametrize("used", ["q", "k", "v"])
def test_an_output_that_is_not_used_has_no_share(used):
    qkv = leaf(3, HEADS.columns)
    outs = dict(zip("qkv", ops.packed_qkv_rope(qkv, *tables(3, 3), *HEADS.counts()), strict=True))
    outs[used].sum().backward()
    shares = {name: bool((part != 0).any()) for name, part in zip("qkv", HEADS.split(qkv.grad), strict=True)}
    assert shares == {name: name == used for name in "qkv"}


@pytest.mark.parametrize("norm", [False, True])
def test_the_packed_gradient_comes_from_one_op(norm):
    qkv = leaf(3, HEADS.columns)
    norms = {"q_norm": leaf(6, seed=1)} if norm else {}
    q, k, v = ops.packed_qkv_rope(qkv, *tables(3, 3), *HEADS.counts(), **norms)
    directions = [torch.randn_like(x) for x in (q, k, v)]
    with Calls() as calls:
        torch.autograd.backward([q, k, v], directions)
    assert [name for name in calls.names if name not in ("detach.default",)] == [
        "packed_qkv_rope_backward.default"
    ]


def test_the_projection_is_kept_for_the_backward_only_where_a_norm_needs_it():
    def kept(**norms):
        shapes = []
        qkv = leaf(3, HEADS.columns)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x
        ):
            ops.packed_qkv_rope(qkv, *tables(3, 3), *HEADS.counts(), **norms)
        return tuple(qkv.shape) in shapes

    assert not kept()
    assert kept(q_norm=torch.ones(6, dtype=torch.float64))


def test_no_gradient_takes_the_op_without_one():
    with Calls() as calls:
        ops.packed_qkv_rope(torch.randn(3, HEADS.columns), *tables(3, 3), *HEADS.counts())
        ops.packed_qkv_rope(torch.randn(3, HEADS.columns), *tables(3, 3), *HEADS.counts(), copy_v=True)
        with torch.no_grad():
            ops.packed_qkv_rope(leaf(3, HEADS.columns), *tables(3, 3), *HEADS.counts())
    names = [name for name in calls.names if name.startswith("packed")]
    assert names == ["packed_qkv_rope.default", "packed_qkv_rope_copy.default", "packed_qkv_rope.default"]


def test_a_change_in_place_is_seen_by_autograd():
    qkv, weight = torch.randn(3, HEADS.columns), leaf(HEADS.columns, dtype=torch.float32)
    out = (qkv * weight).sum()
    ops.packed_qkv_rope_(qkv, *tables(3, 3), *HEADS.counts())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_change_in_place_that_a_kernel_makes_is_seen_by_autograd():
    """A kernel writes through a pointer, of which autograd sees nothing."""

    def write(qkv, rotation, q, k, v):
        q.numpy()[:], k.numpy()[:] = 2, 3

    op = dispatch.implementations(dispatch.Backend(write, None)).in_place
    cos, sin = tables(5, 3)
    y = leaf(5, HEADS.columns).exp()
    loss = (y * y).sum()
    with torch.no_grad():
        op(y, cos, sin, None, None, *HEADS.counts(), False, 1e-6)
        assert bool((y[:, : 4 * 6] == 2).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        op(torch.zeros(5, HEADS.columns), cos, sin, None, None, *HEADS.counts(), False, 1e-6)


def test_in_place_works_in_inference_mode():
    with torch.inference_mode():
        qkv = torch.randn(3, HEADS.columns)
        expected = ops.packed_qkv_rope(qkv, *tables(3, 3), *HEADS.counts(), copy_v=True)
        got = ops.packed_qkv_rope_(qkv, *tables(3, 3), *HEADS.counts())
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
