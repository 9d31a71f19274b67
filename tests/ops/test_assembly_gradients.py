"""Invariant: gradients reach text rows of the table, pool rows (those used twice add up) and nothing else."""

import types

import pytest
import torch
from torch.autograd import gradcheck

from mmgraph import ops
from mmgraph.ops.assembly import cuda

IDS = torch.tensor([0, 1, 1, 99, -4, 3, 2])
MAP = torch.tensor([-1, -1, 2, 2, -1, 0, -1], dtype=torch.int32)
MASK = torch.tensor([True, False, True, True, False])


def leaf(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def test_assemble_passes_gradcheck():
    assert gradcheck(lambda t, p: ops.assemble_embeddings(IDS, t, p, MAP), (leaf(5, 3), leaf(4, 3, seed=1)))


def test_merge_passes_gradcheck():
    assert gradcheck(lambda e, f: ops.merge_embeddings(e, MASK, f), (leaf(5, 3), leaf(3, 3, seed=1)))


@pytest.mark.parametrize("level", [0, 1])
def test_deepstack_passes_gradcheck(level):
    assert gradcheck(lambda h, p: ops.deepstack_add(h, p, MAP, level), (leaf(7, 3), leaf(4, 6, seed=1)))


def test_each_rows_share_of_the_gradient_is_counted():
    table, pool = leaf(5, 2), leaf(4, 2)
    ops.assemble_embeddings(IDS, table, pool, MAP).sum().backward()
    # Row 0 is taken by id 0 and by the clamped -4; id 99 and the second 1 are covered; pool row 2 is used twice.
    assert table.grad[:, 0].tolist() == [2.0, 1.0, 1.0, 0.0, 0.0]
    assert pool.grad[:, 0].tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("need", ["table", "pool"])
def test_one_side_alone_may_need_a_gradient(need):
    table, pool = leaf(5, 2), leaf(4, 2)
    (pool if need == "table" else table).requires_grad_(False)
    ops.assemble_embeddings(IDS, table, pool, MAP).sum().backward()
    assert (table.grad is not None) == (need == "table")
    assert (pool.grad is not None) == (need == "pool")


@pytest.mark.parametrize(
    ("table_dtype", "pool_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_gradients_have_their_inputs_dtype_and_the_plain_value(table_dtype, pool_dtype):
    table, pool = leaf(5, 8, dtype=table_dtype), leaf(4, 8, dtype=pool_dtype)
    weight = torch.randn(7, 8, generator=torch.Generator().manual_seed(5)).to(table_dtype)
    ops.assemble_embeddings(IDS, table, pool, MAP).backward(weight)
    plain_table, plain_pool = (x.detach().clone().requires_grad_() for x in (table, pool))
    text = torch.nn.functional.embedding(IDS.clamp(0, 4), plain_table)
    rows = plain_pool[MAP.clamp(min=0).long()].to(table_dtype)
    torch.where((MAP >= 0)[:, None], rows, text).backward(weight)
    assert table.grad.dtype == table_dtype
    assert pool.grad.dtype == pool_dtype
    torch.testing.assert_close(table.grad, plain_table.grad)
    torch.testing.assert_close(pool.grad, plain_pool.grad)


def test_an_empty_pool_and_no_rows_have_empty_gradients():
    table, pool = leaf(5, 2), leaf(0, 2)
    ops.assemble_embeddings(IDS, table, pool, torch.full((7,), -1, dtype=torch.int32)).sum().backward()
    assert pool.grad.shape == (0, 2)
    table.grad = None
    ops.assemble_embeddings(IDS[:0], table, pool, MAP[:0]).sum().backward()
    assert float(table.grad.abs().sum()) == 0.0


def test_nan_gradients_of_covered_rows_stay_away_from_the_table():
    table, pool = leaf(5, 2), leaf(4, 2)
    grad = torch.ones(7, 2, dtype=torch.float64)
    grad[MAP >= 0] = float("nan")
    ops.assemble_embeddings(IDS, table, pool, MAP).backward(grad)
    assert bool(table.grad.isfinite().all())


@pytest.mark.parametrize("columns_adjacent", [True, False])
def test_a_buffer_that_a_kernel_writes_is_seen_by_autograd(columns_adjacent, monkeypatch):
    """A kernel writes through a pointer, of which autograd sees nothing."""

    def launch(kernel, programs, tensors, *rest, **options):
        tensors[4].numpy().fill(2)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "kernel_module", lambda name: types.SimpleNamespace(assemble_kernel=None))
    monkeypatch.setattr(cuda, "flag_for", lambda device: None)
    table, pool = leaf(5, 3).detach(), leaf(4, 3).detach()
    y = leaf(7, 3).exp() if columns_adjacent else leaf(3, 7).t().exp()
    loss = (y * y).sum()
    with torch.no_grad():
        cuda.assemble_out(IDS, table, pool, MAP, False, out=y)
        assert bool((y == 2).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        cuda.assemble_out(IDS, table, pool, MAP, False, out=torch.zeros(7, 3, dtype=torch.float64))
