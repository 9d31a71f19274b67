"""Invariant: the kernel with a program per window and head gives what dense float64 attention gives, whatever the
lengths, the tail, the layout and the flags; nothing outside a sequence reaches it; a graph replays new boundaries."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.ops.attention import windows

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def nothing_recorded():
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def projection(tokens, heads, kv_heads, width, v_width, dtype, seed):
    """q, k and v as views of one packed buffer."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    packed = torch.randn(tokens, sum(sizes), generator=g, device="cuda").to(dtype)
    parts = zip(packed.split(sizes, 1), (width, width, v_width), strict=True)
    return [x.unflatten(1, (-1, w)) for x, w in parts]


def exact(q, k, v, lengths, scale, causal):
    """Output and log-sum-exps in float64, sequence by sequence."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows])
        lse[:, rows] = scores.logsumexp(-1)
        first += length
    return out, lse


def run(q, k, v, cu, scale, causal, with_lse=True):
    assert windows.takes_full_windows(q, v, cu.shape[0] - 1, True)
    return windows.forward(q, k, v, cu, 64, scale, causal, with_lse, True)


def assert_right(got, q, k, v, lengths, scale, causal):
    out, lse = got
    covered = sum(lengths)
    expected, sums = exact(q[:covered], k[:covered], v[:covered], lengths, scale, causal)
    assert torch.equal(out[covered:], torch.zeros_like(out[covered:]))
    assert bool((lse[:, covered:] == float("-inf")).all())
    # Weights and outputs are each rounded to the dtype once.
    limit = 2 * torch.finfo(out.dtype).eps * float(v[:covered].abs().amax()) if covered else 0.0
    torch.testing.assert_close(out[:covered].double(), expected, atol=limit, rtol=0.0)
    torch.testing.assert_close(lse[:, :covered].double(), sums, atol=1e-4, rtol=1e-5)


# heads, kv_heads, width, v_width, dtype, causal, sign of the scale
FORMS = [
    (16, 16, 80, 80, torch.bfloat16, False, 1),
    (4, 1, 72, 72, torch.float16, True, 1),
    (6, 3, 64, 128, torch.bfloat16, False, -1),
    (3, 3, 8, 40, torch.float16, False, 1),
    (2, 1, 256, 256, torch.bfloat16, True, 1),
    (5, 5, 160, 16, torch.bfloat16, True, 0),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(48, 64) | st.sampled_from((64, 63, 16, 1, 0)), min_size=1, max_size=40),
    tail=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_equals_dense_attention(form, lengths, tail, seed):
    heads, kv_heads, width, v_width, dtype, causal, sign = form
    covered = sum(lengths)
    tail = max(tail, windows.FULL_PER_HEAD * len(lengths) - covered)
    q, k, v = projection(covered + tail, heads, kv_heads, width, v_width, dtype, seed)
    for x in (q, k, v):
        x[covered:] = float("nan")
    scale = sign * width**-0.5
    got = run(q, k, v, offsets(lengths), scale, causal)
    assert_right(got, q, k, v, lengths, scale, causal)
    without = run(q, k, v, offsets(lengths), scale, causal, with_lse=False)
    assert without[1] is None
    assert torch.equal(without[0], got[0])


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_every_width(width):
    lengths = [64, 64, 17, 64, 64]
    q, k, v = projection(sum(lengths) + 70, 3, 1, width, width, torch.bfloat16, width)
    assert_right(run(q, k, v, offsets(lengths), 0.2, False), q, k, v, lengths, 0.2, False)


def test_layouts_are_taken_as_they_are():
    """Contiguous tensors, views with gaps, heads in front of rows, and a repeated head."""
    lengths = [64, 50, 64]
    tokens = sum(lengths)
    q, k, v = projection(tokens, 4, 4, 80, 80, torch.bfloat16, 1)
    expected = run(q, k, v, offsets(lengths), 0.1, False)
    gaps = [torch.nn.functional.pad(x, (0, 16))[..., :80] for x in (q, k, v)]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for form in ([x.contiguous() for x in (q, k, v)], gaps, heads_first):
        for a, b in zip(run(*form, offsets(lengths), 0.1, False), expected, strict=True):
            assert torch.equal(a, b)
    one = k[:, :1].expand(-1, 4, -1)
    got = run(q, one, one, offsets(lengths), 0.1, False)
    for a, b in zip(got, run(q, one.contiguous(), one.contiguous(), offsets(lengths), 0.1, False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_sequence(bad):
    lengths = [64, 40, 64, 1, 64]
    q, k, v = projection(sum(lengths), 4, 4, 80, 80, torch.bfloat16, 2)
    clean = run(q, k, v, offsets(lengths), 0.1, False)
    rows = slice(64, 104)
    for x in (q, k, v):
        x[rows] = bad
    got = run(q, k, v, offsets(lengths), 0.1, False)
    assert not got[0][rows].isfinite().any()
    for a, b in ((got[0], clean[0]), (got[1].T, clean[1].T)):
        assert torch.equal(a[:64], b[:64])
        assert torch.equal(a[104:], b[104:])


def test_a_graph_replays_new_values_and_boundaries_in_a_poisoned_pool():
    batch, tokens = 20, 20 * 64
    q, k, v = projection(tokens, 4, 2, 72, 72, torch.bfloat16, 3)
    cu = offsets([64] * batch)
    run(q, k, v, cu, 0.1, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        poison = torch.full((tokens * 4 * 72 * 2,), float("nan"), device="cuda")
        del poison
        got = run(q, k, v, cu, 0.1, False)
    for seed in range(4):
        draw = random.Random(seed)
        lengths = [draw.choice((64, 64, 63, 5, 0)) for _ in range(batch)]
        new = projection(tokens, 4, 2, 72, 72, torch.bfloat16, 10 + seed)
        for x, y in zip((q, k, v), new, strict=True):
            x.copy_(y)
        cu.copy_(offsets(lengths))
        graph.replay()
        assert_right(got, q, k, v, lengths, 0.1, False)


WRONG = (
    [3, 64, 128, 192],
    [0, 70, 128, 192],
    [0, 128, 64, 192],
    [0, 64, 128, 400],
    [-7, 64, 128, 192],
    [0, 64, 2**31 - 1, 5],
)


def room_for(*shape, dtype):
    """A tensor of nines with as much again before and after it, and the whole room."""
    size = math.prod(shape)
    room = torch.full((3 * size,), 9.0, dtype=dtype, device="cuda")
    return room, room[size : 2 * size].view(shape)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_wrong_offsets_are_recorded_and_stay_inside(wrong, heads_first):
    """Around the inputs lie NaN, which would show in a result; around the outputs nines, which must stay."""
    tokens, heads, width = 200, 4, 80
    shape = (heads, 3 * tokens, width) if heads_first else (3 * tokens, heads, width)
    q, k, v = (torch.full(shape, float("nan"), device="cuda").bfloat16() for _ in range(3))
    q, k, v = ((x.transpose(0, 1) if heads_first else x)[tokens : 2 * tokens] for x in (q, k, v))
    for x in (q, k, v):
        x.copy_(torch.randn(tokens, heads, width))
    out_room, out = room_for(tokens, heads, width, dtype=torch.bfloat16)
    lse_room, lse = room_for(heads, tokens, dtype=torch.float32)
    cu = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    windows._forward_full(q, k, v, out, lse, cu, 64, 0.1, False)
    with pytest.raises(ops.DeviceError, match="cu_seqlens"):
        ops.check_errors()
    assert bool(out.isfinite().all())
    assert not lse.isnan().any()
    for room in (out_room, lse_room):
        size = room.shape[0] // 3
        assert bool((room[:size] == 9).all())
        assert bool((room[2 * size :] == 9).all())


@pytest.mark.parametrize(("width", "v_width"), [(37, 37), (80, 37), (37, 64), (36, 36), (1, 1)])
def test_widths_of_no_whole_pieces_in_aligned_rows_are_served(width, v_width):
    """Their rows start at multiples of 16 bytes, so only the width says that another kernel must take them."""
    lengths = [64, 64, 50]
    q, k, v = torch.randn(sum(lengths), 3, 4, 80, device="cuda").bfloat16().unbind(1)
    q, k, v = q[..., :width], k[..., :width], v[..., :v_width]
    got = ops.varlen_attention(q, k, v, offsets(lengths), 64, backend="triton")
    expected, _ = exact(q, k, v, lengths, width**-0.5, False)
    assert float((got - expected).abs().max()) <= 0.02 * float(v.abs().max())


def test_calls_that_it_is_not_for_go_to_the_other_kernel():
    q, _, v = projection(640, 4, 4, 80, 80, torch.bfloat16, 4)
    assert windows.takes_full_windows(q, v, 10, True)
    assert windows.takes_full_windows(q, v, 640 // windows.FULL_PER_HEAD, True)
    assert not windows.takes_full_windows(q, v, 640 // windows.FULL_PER_HEAD + 1, True)
    assert not windows.takes_full_windows(q, v, 10, False)
    assert not windows.takes_full_windows(q.float(), v.float(), 10, True)
    narrow = torch.randn(128, 3, 4, 37, device="cuda").bfloat16().unbind(1)  # rows of no multiple of 16 bytes
    got = ops.varlen_attention(*narrow, offsets([64, 64]), 64, backend="triton")
    expected, _ = exact(*narrow, [64, 64], 37**-0.5, False)
    assert float((got - expected).abs().max()) <= 0.02


def test_both_kernels_agree():
    lengths = [64, 64, 30, 64, 7, 64, 64]
    q, k, v = projection(sum(lengths) + 100, 8, 2, 80, 80, torch.bfloat16, 5)
    got = run(q, k, v, offsets(lengths), 0.1, True)
    blocks = windows.WindowBlocks(64, False, 2, 2, 3, 3)
    other = windows.forward(q, k, v, offsets(lengths), 64, 0.1, True, True, True, blocks)
    for a, b in zip(got, other, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)
