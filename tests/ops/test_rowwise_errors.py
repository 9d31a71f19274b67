"""Invariant: each wrong argument of the row-wise ops has its own clear error, and the next good call works."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmgraph import ops

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, generator=torch.Generator().manual_seed(1))
INDICES = torch.tensor([[0, 1], [2, 2]])
SHARES = torch.full((2, 2), 0.5)

NORM = {"x": X, "delta": X, "weight": W, "bias": None, "eps": 1e-6, "kind": "layer"}
MIX = {"table": X, "indices": INDICES, "weights": SHARES, "base": None}


def good() -> None:
    total, out = ops.add_norm(**NORM)
    assert torch.equal(total, X + X)
    assert torch.equal(out, torch.nn.functional.layer_norm(total, (4,), W, None, 1e-6))
    torch.testing.assert_close(ops.mix_rows(**MIX), torch.stack([(X[0] + X[1]) / 2, X[2]]))


WRONG_NORMS = [
    ({"x": X.tolist()}, r"x must be a torch\.Tensor, got list; make it with"),
    ({"weight": torch.nn.LayerNorm(4)}, r"weight must be a torch\.Tensor or None, got LayerNorm"),
    ({"bias": 0}, r"bias must be a torch\.Tensor or None, got int"),
    ({"x": X[None]}, r"x must be a matrix .* got torch\.float32 \[1, 3, 4\]; flatten a batch"),
    ({"x": X.long()}, r"x must be a matrix .*bfloat16, float16, float32 or float64, got torch\.int64"),
    ({"x": X[:, :0], "delta": X[:, :0], "weight": None}, r"must have columns to normalise, got .* \[3, 0\]"),
    ({"weight": W[:3]}, r"weight must be a vector \[4\] in the dtype of x, torch\.float32, got .* \[3\]"),
    ({"weight": W[None]}, "weight must be a vector"),
    ({"weight": W.bfloat16()}, r"got torch\.bfloat16 \[4\]; convert the module"),
    ({"bias": W.double()}, r"bias must be a vector \[4\] .* got torch\.float64"),
    ({"bias": W, "kind": "rms"}, "'rms' has no bias"),
    ({"weight": W.to("meta")}, "one device; x is on cpu and weight on meta"),
    ({"bias": W.to("meta")}, "one device; x is on cpu and bias on meta"),
    ({"kind": "batch"}, "kind must be one of 'layer', 'rms', got 'batch'"),
    ({"kind": None}, "kind must be one of 'layer', 'rms', got NoneType"),
    ({"eps": -1e-6}, "eps must be zero or positive and finite, got -1e-06"),
    ({"eps": float("nan")}, "eps must be zero or positive and finite, got nan"),
    ({"eps": float("inf")}, "eps must be zero or positive and finite, got inf"),
    ({"eps": 10**400}, "eps must be zero or positive and finite, got an integer"),
    ({"eps": None}, "eps must be a Python number, got NoneType; pass a float"),
    ({"eps": True}, "eps must be a Python number, got bool"),
    ({"eps": torch.tensor(1e-6)}, "got Tensor; reading it would synchronise"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("change", "words"), WRONG_NORMS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_norms_refuse(change, words, grad):
    given = {**NORM, **change}
    if grad and "x" not in change:
        given["x"] = X.clone().requires_grad_()
    with pytest.raises(ops.ArgumentError, match=words) as caught:
        ops.add_norm(**given)
    assert str(caught.value).startswith("add_norm: ")
    given.pop("delta")
    with pytest.raises(ops.ArgumentError, match=words) as caught:
        ops.norm(**given)
    assert str(caught.value).startswith("norm: ")
    good()


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (None, r"delta must be a torch\.Tensor, got NoneType"),
        (
            X[:1],
            r"shape and dtype of x, torch\.float32 \[3, 4\], got torch\.float32 \[1, 4\]; nothing is broadcast",
        ),
        (X.double(), r"got torch\.float64 \[3, 4\]"),
        (X.to("meta"), "x is on cpu and delta on meta"),
    ],
)
def test_what_is_added_must_fit(delta, words):
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(ops.ArgumentError, match=words):
            ops.add_norm(**{**NORM, "x": x, "delta": delta})
    good()


@pytest.mark.parametrize(
    ("x", "name", "words"),
    [
        (X.numpy(), "silu", r"x must be a torch\.Tensor, got numpy\.ndarray"),
        (X[0], "silu", r"must be a matrix \[tokens, width\].* got torch\.float32 \[4\]; flatten"),
        (X.to(torch.float8_e4m3fn), "silu", "must be a matrix .*; convert it"),
        (X, "swish", r"must be one of 'silu', 'gelu', 'gelu_tanh', 'quick_gelu', 'relu', got 'swish'"),
        (X, torch.nn.functional.silu, "got function"),
    ],
)
def test_activations_refuse(x, name, words):
    with pytest.raises(ops.ArgumentError, match=f"^activation: .*{words}"):
        ops.activation(x, kind=name)
    with pytest.raises(ops.ArgumentError, match=f"^gated_activation: .*{words}"):
        ops.gated_activation(x, activation=name)
    assert ops.activation(X, kind="relu").min() == 0


def test_a_gated_row_has_two_halves():
    for x in (X[:, 1:], X[:, 1:].clone().requires_grad_()):
        with pytest.raises(ops.ArgumentError, match=r"gate and up side by side.*got the odd width 3"):
            ops.gated_activation(x, activation="silu")
    assert ops.activation(X[:, 1:], kind="silu").shape == (3, 3)


WRONG_MIXTURES = [
    ({"indices": INDICES.tolist()}, r"indices must be a torch\.Tensor, got list"),
    ({"base": 0.0}, r"base must be a torch\.Tensor or None, got float"),
    ({"table": W}, r"table must be a matrix \[rows, width\] .* got torch\.float32 \[4\]"),
    ({"table": X.long()}, "table must be a matrix"),
    (
        {"indices": INDICES[0]},
        r"indices must be an int32 or int64 matrix .* got torch\.int64 \[2\]; for one row",
    ),
    ({"indices": INDICES.float()}, "indices must be an int32 or int64 matrix"),
    ({"weights": SHARES.bfloat16()}, r"weights must be float32, .* got torch\.bfloat16; convert them"),
    ({"weights": SHARES.double()}, r"float64 only with a float64 table\), got torch\.float64"),
    ({"weights": SHARES[:, :1]}, r"shape of indices, \[2, 2\], one for each tap, got \[2, 1\]"),
    ({"base": X}, r"base must have a row for each token and the table's width, \[2, 4\], got \[3, 4\]"),
    ({"base": X[:2, :3]}, r"got \[2, 3\]"),
    ({"base": X[:2].long()}, r"base must be a matrix \[tokens, width\]"),
    ({"weights": SHARES.to("meta")}, "table is on cpu and weights on meta"),
    ({"base": X[:2].to("meta")}, "table is on cpu and base on meta"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("change", "words"), WRONG_MIXTURES, ids=lambda x: x[:30] if isinstance(x, str) else ""
)
def test_mixtures_refuse(change, words, grad):
    given = {**MIX, **change}
    if grad and "table" not in change:
        given["table"] = X.clone().requires_grad_()
    with pytest.raises(ops.ArgumentError, match=words) as caught:
        ops.mix_rows(**given)
    assert str(caught.value).startswith("mix_rows: ")
    good()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_an_index_outside_the_table_is_named(kind):
    for wrong in (-1, 3, int(torch.iinfo(kind).max), int(torch.iinfo(kind).min)):
        indices = torch.tensor([[0, 1], [2, wrong], [wrong, wrong]], dtype=kind)
        words = rf"0 to 2, token 1 has {wrong} as tap 1 \(2 such tokens\)"
        with pytest.raises(ops.DataError, match=words):
            ops.mix_rows(X, indices, torch.ones(3, 2))
    with pytest.raises(ops.DataError, match="token 0 has 0"):
        ops.mix_rows(X[:0], INDICES, SHARES)
    assert ops.mix_rows(X[:0], INDICES[:, :0], SHARES[:, :0]).tolist() == np.zeros((2, 4)).tolist()
    good()


def test_fakes_refuse_too():
    with FakeTensorMode() as mode:
        x, weight, indices, shares = (mode.from_tensor(t) for t in (X, W, INDICES, SHARES))
        with pytest.raises(ops.ArgumentError, match="weight must be a vector"):
            ops.norm(x, weight[:2], eps=1e-6, kind="rms")
        with pytest.raises(ops.ArgumentError, match="the shape and dtype of x"):
            ops.add_norm(x, x[:2], weight, eps=1e-6, kind="rms")
        with pytest.raises(ops.ArgumentError, match="odd width"):
            ops.gated_activation(x[:, 1:], activation="silu")
        with pytest.raises(ops.ArgumentError, match="one for each tap"):
            ops.mix_rows(x, indices, shares[:1])
        with pytest.raises(ops.ArgumentError, match="must be a matrix"):
            ops.activation(weight, kind="silu")
