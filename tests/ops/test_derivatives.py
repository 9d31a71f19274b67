"""Invariant: the ops can be differentiated once, in reverse; other derivatives are refused, never wrong or zero."""

from collections.abc import Callable

import pytest
import torch

from mmgraph import ops

ROW_MAP = torch.tensor([-1, 1, 0, -1], dtype=torch.int32)
IDS = torch.tensor([0, 1, 2, 0])
CU = torch.tensor([0, 1, 4], dtype=torch.int32)


def table() -> torch.Tensor:
    return torch.arange(9.0, dtype=torch.float64).reshape(3, 3)


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "assemble_embeddings": lambda x: ops.assemble_embeddings(IDS, table(), x, ROW_MAP),
    "merge_embeddings": lambda x: ops.merge_embeddings(table(), torch.tensor([True, False, True]), x),
    "deepstack_add": lambda x: ops.deepstack_add(table()[:2], x, ROW_MAP[:2], 0),
    "varlen_attention": lambda x: ops.varlen_attention(
        x.repeat(2, 1)[:, None], x.repeat(2, 1)[:, None], x.repeat(2, 1)[:, None], CU, 3
    ),
    "packed_qkv_rope": lambda x: torch.cat(
        ops.packed_qkv_rope(x.reshape(1, 6), table()[:1, 1:2], table()[:1, 2:], 1, 1, 2, q_norm=table()[1, 1:])
    ),
}


def rows() -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_is_refused_and_the_first_still_works(name: str) -> None:
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(OPS[name](x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(ops.GradientError, match="can be differentiated once"):
        torch.autograd.grad(first.pow(2).sum(), x)
    assert torch.autograd.gradcheck(OPS[name], (rows().requires_grad_(),))


@pytest.mark.parametrize("name", OPS)
def test_forward_mode_is_refused(name: str) -> None:
    with pytest.raises(ops.GradientError, match="no forward-mode derivative"):
        torch.func.jvp(OPS[name], (rows(),), (torch.ones(2, 3, dtype=torch.float64),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows(), torch.ones(2, 3, dtype=torch.float64))
        with pytest.raises(ops.GradientError, match=name):
            OPS[name](dual)
    assert OPS[name](rows()).isfinite().all()


@pytest.mark.parametrize("name", OPS)
def test_a_derivative_of_something_else_is_not_refused(name: str) -> None:
    def function(scale: torch.Tensor) -> torch.Tensor:
        return scale * OPS[name](rows()).sum()

    one = torch.ones((), dtype=torch.float64)
    _, tangent = torch.func.jvp(function, (one,), (one,))
    torch.testing.assert_close(tangent, OPS[name](rows()).sum())


@pytest.mark.parametrize("name", OPS)
def test_compiled_function_transforms_never_give_zeros(name: str) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: OPS[name](y).pow(2).sum())(x)

    leaf = rows().requires_grad_()
    (expected,) = torch.autograd.grad(OPS[name](leaf).pow(2).sum(), leaf)
    torch._dynamo.reset()
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    try:
        got = compiled(rows())
    except Exception as error:  # PyTorch refuses the transform aloud, as it does in eager
        assert "functorch" in str(error) or "setup_context" in str(error) or "autograd" in str(error).lower()  # noqa: PT017
    else:
        torch.testing.assert_close(got, expected)


def test_a_source_near_the_largest_integer_is_outside_the_pool() -> None:
    with pytest.raises(ops.ArgumentError, match="must lie inside the 10 pool rows"):
        ops.RowMap.from_ranges(5, [0], [2], [2**63 - 2], pool_rows=10)
    assert ops.RowMap.from_ranges(5, [0], [2], [7], pool_rows=10).host.tolist() == [7, 8, 9, -1, -1]


def out_form(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, 3, dtype=torch.float64)
    ops.assemble_embeddings_out(IDS, table(), x, ROW_MAP, out=out)
    return out.sum()


def in_place_form(x: torch.Tensor) -> torch.Tensor:
    q, *_ = ops.packed_qkv_rope_(x.reshape(1, 6).clone(), table()[:1, 1:2], table()[:1, 2:], 1, 1, 2)
    return q.sum()


def in_place_norm(x: torch.Tensor) -> torch.Tensor:
    q, *_ = ops.packed_qkv_rope_(
        torch.arange(6.0, dtype=torch.float64)[None], None, None, 1, 1, 2, q_norm=x[0, :2]
    )
    return q.sum()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("form", [out_form, in_place_form, in_place_norm], ids=lambda f: f.__name__)
def test_forms_without_a_gradient_refuse_function_transforms(
    form: Callable[..., torch.Tensor], backend: str
) -> None:
    """Inside an op, tensors of a transform no longer say that they need a gradient; it would be zero."""
    ways = (
        lambda x: torch.func.grad(form)(x),
        lambda x: torch.func.vjp(form, x)[1](torch.ones((), dtype=torch.float64)),
        lambda x: torch.func.jacrev(form)(x),
    )
    for way in ways:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="has no gradient"):
            (way if backend is None else torch.compile(way, backend=backend, fullgraph=True))(rows())
    assert form(rows()).isfinite()


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_transformed_argument_itself_is_refused_too(backend: str | None) -> None:
    """Handed over as it comes, it doesn't say while a graph is traced that it needs a gradient."""

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        def rotate(norm: torch.Tensor) -> torch.Tensor:
            packed = torch.arange(6.0)[None]
            return ops.packed_qkv_rope_(packed, None, None, 1, 1, 2, q_norm=norm)[0].sum()

        return torch.func.grad(rotate)(weight)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="has no gradient"):
        (gradient if backend is None else torch.compile(gradient, backend=backend))(torch.ones(2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPS)
def test_forward_mode_is_refused_while_a_graph_is_traced(name: str, backend: str) -> None:
    torch._dynamo.reset()
    tangent = torch.ones(2, 3, dtype=torch.float64)
    compiled = torch.compile(
        lambda x: torch.func.jvp(OPS[name], (x,), (tangent,))[1], backend=backend, fullgraph=True
    )
    with pytest.raises(Exception, match="no forward-mode derivative"):
        compiled(rows())
    assert OPS[name](rows()).isfinite().all()


def test_vmap_inside_a_jvp_of_something_else_works_and_of_the_ops_is_refused() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return ops.varlen_attention(x, x, x, CU, 3)

    many = torch.randn(2, 4, 1, 3, dtype=torch.float64)
    one = torch.ones(4, 1, 3, dtype=torch.float64)
    expected = torch.vmap(attend)(many)
    _, tangent = torch.func.jvp(lambda y: y * torch.vmap(attend)(many).sum(0), (one,), (one,))
    torch.testing.assert_close(tangent, expected.sum(0))
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(torch.vmap(attend)(many), expected)
    with pytest.raises(ops.GradientError, match="no forward-mode derivative"):
        torch.func.jvp(torch.vmap(attend), (many,), (torch.ones_like(many),))
