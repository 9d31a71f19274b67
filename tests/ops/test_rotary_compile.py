"""Invariant: the form in place works under torch.compile on buffers and parts of them, and touches nothing else."""

import pytest
import torch
from rotary import Heads

from mmgraph import ops

HEADS = Heads(4, 2, 8)
FREQS = 0.5 ** torch.arange(4.0)


def angles(tokens):
    return torch.arange(tokens)[:, None] * FREQS


def whole(buffer):
    tables = angles(buffer.shape[0])
    q, k, v = ops.packed_qkv_rope_(buffer, tables.cos(), tables.sin(), *HEADS.counts())
    return q + 1, k * 2, v - 1


def part(buffer):
    """Rows and columns of a larger buffer, which is read after it."""
    rows = buffer[1:-1, 3 : 3 + HEADS.columns]
    tables = angles(rows.shape[0])
    q, k, v = ops.packed_qkv_rope_(rows, tables.cos(), tables.sin(), *HEADS.counts())
    return q.sum() + k.sum() + v.sum(), buffer * 2


def made_inside(buffer):
    """A buffer of the function's own, rotated twice; what was taken from it before stays."""
    own = buffer * 2
    before = own + 1
    tables = torch.polar(torch.ones(()), angles(own.shape[0]))
    for _ in range(2):
        q, k, _ = ops.packed_qkv_rope_(own, tables, None, *HEADS.counts(), interleaved=True)
    return before, own, q, k


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [whole, part, made_inside], ids=lambda f: f.__name__)
def test_one_graph_writes_what_eager_writes(function, backend):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for index, tokens in enumerate((6, 9, 17, 33)):
        g = torch.Generator().manual_seed(tokens)
        extra = 5 if function is part else 0
        buffer = torch.randn(tokens, HEADS.columns + extra, generator=g)
        other = buffer.clone()
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=index > 0):
            got = compiled(buffer)
        expected = function(other)
        torch.testing.assert_close(buffer, other)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_both_forms_agree_in_one_graph():
    torch._dynamo.reset()

    def function(qkv):
        tables = angles(qkv.shape[0])
        out = ops.packed_qkv_rope(qkv, tables.cos(), tables.sin(), *HEADS.counts())
        back = ops.packed_qkv_rope_(qkv, tables.cos(), tables.sin(), *HEADS.counts())
        return out, back

    qkv = torch.randn(7, HEADS.columns)
    with torch.no_grad():
        out, back = torch.compile(function, fullgraph=True)(qkv)
    for a, b in zip(out, back, strict=True):
        torch.testing.assert_close(a, b)


def test_a_wrong_argument_is_named_while_tracing():
    torch._dynamo.reset()
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"= 64 wide, got 63"):
        compiled(torch.randn(5, HEADS.columns - 1))
    torch._dynamo.reset()
    buffer = torch.randn(5, HEADS.columns)
    for a, b in zip(compiled(buffer.clone()), whole(buffer), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_views_that_a_graph_returns_lie_where_its_input_lies(in_place, dynamic, gradients):
    """The input is a part of a buffer, cut outside of the graph; Inductor can lose where it begins."""

    def rotate(rows, cos, sin):
        function = ops.packed_qkv_rope_ if in_place else ops.packed_qkv_rope
        return function(rows, cos, sin, *HEADS.counts())

    torch._dynamo.reset()
    compiled = torch.compile(rotate, dynamic=dynamic)
    for tokens, row, column in ((7, 3, 0), (9, 3, 0), (11, 5, 16), (0, 0, 0), (4, 1, 7), (20, 0, 16)):
        g = torch.Generator().manual_seed(tokens)
        rows = torch.randn(tokens + 8, HEADS.columns + 16, generator=g)
        rows = rows[row : row + tokens, column : column + HEADS.columns]
        tables = angles(tokens)
        with torch.set_grad_enabled(gradients):
            expected = [
                x.clone() for x in ops.packed_qkv_rope(rows, tables.cos(), tables.sin(), *HEADS.counts())
            ]
            got = compiled(rows, tables.cos(), tables.sin())
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
        if in_place:
            starts = (0, HEADS.q * HEADS.width, (HEADS.q + HEADS.kv) * HEADS.width)
            places = [x.storage_offset() - rows.storage_offset() for x in got]
            assert places == list(starts)
