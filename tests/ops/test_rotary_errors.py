"""Invariant: each wrong argument of the rotary ops has its own clear error, and the next good call works."""

import pytest
import torch
from rotary import Heads, assert_rounded_once, exact, table
from torch._subclasses.fake_tensor import FakeTensorMode

from mmgraph import ops

HEADS = Heads(4, 2, 6)
G = torch.Generator().manual_seed(0)
QKV = torch.randn(5, HEADS.columns, generator=G)
COS, SIN = table(G, 5, 3, torch.float32), table(G, 5, 3, torch.float32)
NORM = torch.randn(6, generator=G)
COMPLEX = torch.complex(COS, SIN)


def arguments(**change):
    counts = dict(zip(("num_heads", "num_kv_heads", "head_dim"), HEADS.counts(), strict=True))
    return {"qkv": QKV, "cos": COS, "sin": SIN, **counts, **change}


def good():
    q, k, _ = ops.packed_qkv_rope(**arguments())
    for got, expected in zip((q, k), exact(QKV, COS, SIN, HEADS)[:2], strict=True):
        assert_rounded_once(got, expected)


WRONG = [
    ({"qkv": QKV.tolist()}, r"qkv must be a torch\.Tensor, got list"),
    ({"cos": COS.numpy()}, r"cos must be a torch\.Tensor or None, got ndarray; make it with"),
    ({"q_norm": torch.nn.RMSNorm(6)}, r"q_norm must be a torch\.Tensor or None, got RMSNorm"),
    ({"num_heads": 4.0}, "num_heads must be a Python int, got float"),
    ({"head_dim": torch.tensor(6)}, "head_dim must be a Python int, got Tensor"),
    ({"num_kv_heads": True}, "num_kv_heads must be a Python int, got bool"),
    ({"head_dim": 7}, "head_dim must be positive and even, since pairs are rotated; got 7"),
    ({"head_dim": 0}, "head_dim must be positive and even"),
    ({"num_kv_heads": 3}, "positive multiple of num_kv_heads, got 4 and 3"),
    ({"num_kv_heads": 0}, "positive multiple of num_kv_heads, got 4 and 0"),
    ({"num_heads": 0}, "positive multiple"),
    ({"qkv": QKV[None]}, r"qkv must be a matrix .* got torch\.float32 \[1, 5, 48\]; flatten a batch"),
    ({"qkv": QKV.long()}, "qkv must be a matrix"),
    ({"qkv": QKV.to(torch.float8_e4m3fn)}, "bfloat16, float16, float32 or float64"),
    ({"qkv": QKV[:, 1:]}, r"\(4 \+ 2 \* 2\) \* 6 = 48 wide, got 47; the order is"),
    ({"num_kv_heads": 4}, r"= 72 wide, got 48"),
    ({"sin": None}, "cos was given without sin; pass both"),
    ({"cos": None}, "sin was given without cos; pass both"),
    (
        {"cos": COS[None]},
        r"cos must be a floating-point matrix \[tokens, 3\] or \[tokens, 6\].*drop dimensions of one",
    ),
    ({"sin": SIN.long()}, "sin must be a floating-point matrix"),
    ({"cos": COS[:4], "sin": SIN[:4]}, "one row per token, 5, got 4 and 4"),
    ({"sin": SIN[:1]}, "one row per token, 5, got 5 and 1"),
    ({"cos": COS[:, :2], "sin": SIN[:, :2]}, "half of head_dim, 3, or head_dim, 6, wide, got 2 and 2"),
    ({"cos": torch.cat([COS, COS], dim=1)}, "wide, got 6 and 3"),
    ({"cos": COS.to("meta"), "sin": SIN.to("meta")}, "one device; qkv is on cpu and cos on meta"),
    ({"q_norm": NORM.to("meta")}, "qkv is on cpu and q_norm on meta"),
    ({"q_norm": NORM[:3]}, r"q_norm must be a floating-point vector \[6\], shared by all heads, got .* \[3\]"),
    ({"k_norm": NORM[None]}, "k_norm must be a floating-point vector"),
    ({"k_norm": NORM.long()}, "k_norm must be a floating-point vector"),
    ({"eps": -1e-6}, "eps must be zero or positive and finite, got -1e-06"),
    ({"eps": float("nan")}, "eps must be zero or positive"),
    ({"eps": 10**400}, "eps must be zero or positive"),
    ({"eps": None}, "eps must be a Python number, got NoneType"),
    ({"eps": "1"}, "eps must be a Python number, got str"),
    ({"eps": True}, "eps must be a Python number, got bool"),
    ({"eps": torch.tensor(1e-6)}, "eps must be a Python number, got Tensor; reading it would synchronise"),
    ({"interleaved": "no"}, "interleaved must be True or False, got str"),
    ({"interleaved": None}, "interleaved must be True or False, got NoneType"),
    ({"interleaved": 1}, "interleaved must be True or False, got int"),
    ({"cos": COMPLEX}, "a complex table holds cosine and sine, so sin must be None"),
    ({"sin": COMPLEX}, "a complex table is passed as cos"),
    ({"cos": COMPLEX, "sin": None}, r"rotates adjacent pairs: pass interleaved=True, or.*table\.real"),
    (
        {"cos": torch.cat([COMPLEX, COMPLEX], dim=1), "sin": None, "interleaved": True},
        r"a complex table must have shape \[tokens, 3\], one entry per pair, got torch\.complex64 \[5, 6\]",
    ),
    ({"cos": None, "sin": None}, r"nothing to do .* split qkv with qkv\.split"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_both_forms_refuse(change, words):
    for function, name in (
        (ops.packed_qkv_rope, "packed_qkv_rope: "),
        (ops.packed_qkv_rope_, "packed_qkv_rope_: "),
    ):
        before = QKV.clone()
        with pytest.raises(ops.ArgumentError, match=words) as caught:
            function(**arguments(**change))
        assert str(caught.value).startswith(name)
        assert torch.equal(QKV, before)
    good()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cos": COS[:4], "sin": SIN[:4]}, "one row per token"),
        ({"qkv": QKV[:, 1:]}, "wide, got 47"),
        ({"q_norm": NORM[:3]}, "q_norm must be"),
    ],
)
def test_fakes_refuse_too(change, words):
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in arguments(**change).items()
        }
        for function in (ops.packed_qkv_rope, ops.packed_qkv_rope_):
            with pytest.raises(ops.ArgumentError, match=words):
                function(**fake)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": QKV.t().contiguous().t()}, r"columns of qkv must be adjacent in memory, got strides \[1, 5\]"),
        ({"qkv": QKV[:1].expand(5, -1)}, "a place of their own in memory"),
        ({"qkv": torch.randn(99).as_strided((5, HEADS.columns), (7, 1))}, "a place of their own"),
        ({"cos": QKV[:, :3]}, "qkv overlaps cos in memory"),
        ({"sin": QKV[:, 8:11]}, "qkv overlaps sin in memory"),
        ({"k_norm": QKV[4, -6:]}, "qkv overlaps k_norm in memory"),
    ],
)
def test_the_form_in_place_refuses_memory_that_does_not_fit(change, words):
    before = QKV.clone()
    with pytest.raises(ops.ArgumentError, match=words):
        ops.packed_qkv_rope_(**arguments(**change))
    assert torch.equal(QKV, before)
    ops.packed_qkv_rope(**arguments(**change))
    good()


@pytest.mark.parametrize("name", ["qkv", "q_norm", "k_norm", "cos", "sin"])
def test_the_form_in_place_refuses_gradients_and_works_without(name):
    given = arguments(q_norm=NORM, k_norm=NORM, qkv=QKV.clone())
    expected = ops.packed_qkv_rope(**given)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(ops.GradientError, match=f"{name} requires one"):
        ops.packed_qkv_rope_(**given)
    values = [given[x] for x in ("qkv", "cos", "sin", "q_norm", "k_norm")]
    with pytest.raises(ops.GradientError, match=f"{name} requires one"):
        torch.ops.mmgraph.packed_qkv_rope_(*values, *HEADS.counts(), False, 1e-6)
    with torch.no_grad():
        got = ops.packed_qkv_rope_(**given)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_a_table_that_wants_a_gradient_is_refused(name):
    given = arguments(qkv=QKV.clone().requires_grad_())
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(ops.GradientError, match=rf"{name} requires one: pass {name}\.detach\(\)"):
        ops.packed_qkv_rope(**given)
    values = [given[x] for x in ("qkv", "cos", "sin")]
    for op in (torch.ops.mmgraph.packed_qkv_rope_autograd, torch.ops.mmgraph.packed_qkv_rope):
        with pytest.raises(ops.GradientError):
            op(*values, None, None, *HEADS.counts(), False, 1e-6)
    with torch.no_grad():
        ops.packed_qkv_rope(**given)
    good()


def test_a_complex_table_that_wants_a_gradient_is_refused():
    with pytest.raises(ops.GradientError, match="cos requires one"):
        ops.packed_qkv_rope(**arguments(cos=COMPLEX.clone().requires_grad_(), sin=None, interleaved=True))
    good()


@pytest.mark.parametrize("name", ["packed_qkv_rope", "packed_qkv_rope_copy"])
@pytest.mark.parametrize("which", [0, 3, 4])
def test_the_gradient_free_ops_refuse_to_drop_a_gradient(name, which):
    values = [QKV, COS, SIN, NORM, NORM]
    values[which] = values[which].clone().requires_grad_()
    op = getattr(torch.ops.mmgraph, name)
    with pytest.raises(
        ops.GradientError, match=rf"mmgraph::{name} has no gradient.*mmgraph\.ops\.packed_qkv_rope"
    ):
        op(*values, *HEADS.counts(), False, 1e-6)
    with torch.no_grad():
        op(*values, *HEADS.counts(), False, 1e-6)


def test_whether_v_is_copied_is_a_flag():
    with pytest.raises(ops.ArgumentError, match="copy_v must be True or False, got str"):
        ops.packed_qkv_rope(**arguments(copy_v="no"))
    good()
