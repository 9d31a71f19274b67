"""Invariant: the derivatives of the row-wise ops are PyTorch's own, of any order, and autocast changes nothing."""

from collections.abc import Callable

import pytest
import torch
from rowwise import ACTIVATIONS
from torch.nn import functional as F

from mmgraph import ops

N = torch.ops.mmgraph
INDICES = torch.tensor([[0, 1], [1, 1], [1, 0]])


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "add_norm layer": (
        lambda x, d, w, b: torch.cat(ops.add_norm(x, d, w, b, eps=1e-3, kind="layer")),
        ((2, 4), (2, 4), (4,), (4,)),
    ),
    "add_norm rms": (
        lambda x, d, w: torch.cat(ops.add_norm(x, d, w, eps=1e-3, kind="rms")),
        ((2, 4), (2, 4), (4,)),
    ),
    "norm": (lambda x, w: ops.norm(x, w, eps=1e-3, kind="rms"), ((2, 4), (4,))),
    "mix_rows": (lambda t, w, b: ops.mix_rows(t, INDICES, w, base=b), ((2, 4), (3, 2), (3, 4))),
    "gated_activation": (lambda x: ops.gated_activation(x, activation="silu"), ((2, 4),)),
    "activation": (lambda x: ops.activation(x, kind="gelu_tanh"), ((2, 4),)),
}


def inputs(name: str, grad: bool = True) -> list[torch.Tensor]:
    return [values(*shape, seed=i).requires_grad_(grad) for i, shape in enumerate(CALLS[name][1])]


@pytest.mark.parametrize("name", CALLS)
def test_every_order_and_mode_is_right(name: str) -> None:
    function = CALLS[name][0]
    assert torch.autograd.gradcheck(function, inputs(name), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs(name))


@pytest.mark.parametrize("name", CALLS)
def test_each_input_alone_gets_its_gradient(name: str) -> None:
    function = CALLS[name][0]
    every = torch.autograd.grad(
        function(*inputs(name)).square().sum(), leaves := inputs(name), allow_unused=True
    )
    assert every == (None,) * len(leaves)  # other tensors than those that it was computed from
    all_of_them = inputs(name)
    expected = torch.autograd.grad(function(*all_of_them).square().sum(), all_of_them)
    for place, gradient in enumerate(expected):
        alone = inputs(name, grad=False)
        alone[place].requires_grad_()
        (got,) = torch.autograd.grad(function(*alone).square().sum(), alone[place])
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("name", CALLS)
def test_with_and_without_a_gradient_values_are_equal(name: str) -> None:
    function = CALLS[name][0]
    assert torch.equal(function(*inputs(name)), function(*inputs(name, grad=False)))
    with torch.no_grad():
        assert torch.equal(function(*inputs(name)), function(*inputs(name, grad=False)))


@pytest.mark.parametrize("name", CALLS)
def test_function_transforms_are_right(name: str) -> None:
    def function(*given: torch.Tensor) -> torch.Tensor:
        return CALLS[name][0](*given).square().sum()

    given = inputs(name)
    (expected,) = torch.autograd.grad(function(*given), given[0], create_graph=False)
    plain = inputs(name, grad=False)
    torch.testing.assert_close(torch.func.grad(function)(*plain), expected)
    direction = torch.ones_like(plain[0])
    _, tangent = torch.func.jvp(lambda x: function(x, *plain[1:]), (plain[0],), (direction,))
    torch.testing.assert_close(tangent, (expected * direction).sum())
    many = torch.stack([plain[0], plain[0] * 2])
    mapped = torch.vmap(lambda x: function(x, *plain[1:]))(many)
    torch.testing.assert_close(mapped, torch.stack([function(x, *plain[1:]) for x in many]))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradients_in_half_precision_are_those_of_the_models_expression(kind: str) -> None:
    x = values(3, 10, dtype=torch.bfloat16).requires_grad_()
    gate, up = x.chunk(2, dim=1)
    written = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
        "relu": F.relu,
    }[kind]
    direction = values(3, 5, dtype=torch.bfloat16)
    (expected,) = torch.autograd.grad(written(gate) * up, x, direction)
    (got,) = torch.autograd.grad(ops.gated_activation(x, activation=kind), x, direction)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_changes_nothing(grad: bool) -> None:
    x, delta, weight = (values(*s, dtype=torch.bfloat16).requires_grad_(grad) for s in ((3, 8), (3, 8), (8,)))
    single = values(3, 8, dtype=torch.float32).requires_grad_(grad)

    def run() -> list[torch.Tensor]:
        return [
            *ops.add_norm(x, delta, weight, eps=1e-6, kind="rms"),
            ops.norm(x, weight, weight, eps=1e-6, kind="layer"),
            ops.norm(single, None, eps=1e-6, kind="layer"),
            ops.gated_activation(single, activation="quick_gelu"),
            ops.mix_rows(single, INDICES, torch.ones(3, 2), base=single),
        ]

    expected = run()
    with torch.autocast("cpu", dtype=torch.float16):
        got = run()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_the_raw_ops_refuse_to_drop_a_gradient() -> None:
    x = values(2, 4).requires_grad_()
    calls = {
        "add_norm": (x, x, None, None, 1e-6, "rms"),
        "norm": (x, None, None, 1e-6, "rms"),
        "activation": (x, "silu"),
        "gated_activation": (x, "silu"),
        "mix_rows": (x, INDICES, torch.ones(3, 2), None),
    }
    for name, arguments in calls.items():
        with pytest.raises(ops.GradientError, match=rf"mmgraph::{name} has no gradient.*mmgraph\.ops\.{name}"):
            getattr(N, name)(*arguments)
        with torch.no_grad():
            getattr(N, name)(*arguments)


def test_indices_outside_the_table_are_found_with_gradients_too() -> None:
    table = values(2, 4).requires_grad_()
    for wrong in (-1, 2):
        with pytest.raises(ops.DataError, match=f"token 1 has {wrong} as tap 0"):
            ops.mix_rows(table, torch.tensor([[0], [wrong]]), torch.ones(2, 1))
    torch._dynamo.reset()
    compiled = torch.compile(ops.mix_rows, backend="eager", fullgraph=True)
    out = compiled(table, torch.tensor([[0], [2], [-5]]), torch.ones(3, 1))
    assert torch.equal(out[0], table[0])
    assert bool(out[1:].isnan().all())  # nothing can be looked at there: it shows, and reads nothing outside
