"""Invariant: a call of flashinfer_cudnn never runs another call's plan, and its plans outlive what uses them.

The conformance cases that it shares with the other backends are in test_ops_attention.py.
"""

import gc
import itertools
import threading

import pytest
import torch

from mmgraph import ops
from mmgraph.ops.attention import cudnn_backend, cudnn_cache, cudnn_plans, reference

pytestmark = pytest.mark.cuda

LENGTHS = [70, 0, 129, 1]
TOKENS = sum(LENGTHS) + 6
LONGEST = max(LENGTHS)


@pytest.fixture(autouse=True)
def nothing_recorded():
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


@pytest.fixture
def no_plans(monkeypatch):
    cache = cudnn_plans.PlanCache(cudnn_plans.CAPACITY)
    monkeypatch.setattr(cudnn_plans, "PLANS", cache)
    return cache


def offsets(lengths):
    sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(sums, dtype=torch.int32, device="cuda")


def make(tokens=TOKENS, heads=4, kv_heads=4, width=64, v_width=64, dtype=torch.bfloat16, packed=True, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    qkv = torch.randn(tokens, sum(sizes), generator=g, device="cuda").to(dtype)
    q, k, v = qkv.split(sizes, dim=1)
    q, k, v = q.unflatten(1, (-1, width)), k.unflatten(1, (-1, width)), v.unflatten(1, (-1, v_width))
    return (q, k, v) if packed else (q.contiguous(), k.contiguous(), v.contiguous())


def call(q, k, v, lengths=LENGTHS, longest=LONGEST, scale=0.125, causal=False, cu=None):
    cu = offsets(lengths) if cu is None else cu
    if longest > q.shape[0]:  # the op would cut it to the tokens
        return cudnn_backend.forward(q, k, v, cu, longest, scale, causal, False)[0]
    return ops.varlen_attention(q, k, v, cu, longest, scale=scale, causal=causal, backend="flashinfer_cudnn")


def assert_right(got, q, k, v, lengths=LENGTHS, longest=LONGEST, scale=0.125, causal=False):
    arguments = (q.double(), k.double(), v.double(), offsets(lengths), longest, scale, causal, False)
    expected = reference.forward(*arguments)[0]
    covered = sum(lengths)
    assert bool((got[covered:] == 0).all())
    if not covered:
        return
    step = torch.finfo(got.dtype).eps * max(1.0, float(expected.abs().max()))
    assert float((got[:covered].double() - expected[:covered]).abs().max()) <= 4 * step


def test_calls_that_differ_in_one_property_right_after_each_other(no_plans):
    shapes = [
        {},
        {"dtype": torch.float16},
        {"packed": False},
        {"heads": 8},
        {"kv_heads": 2},
        {"width": 72},
        {"v_width": 40},
    ]
    options = [{}, {"scale": 0.3}, {"scale": -0.7}, {"causal": True}, {"longest": 5000}]
    for _ in range(2):  # plans of the first round are found in the second
        for shape, option in itertools.product(shapes, options):
            tensors = make(**shape)
            assert_right(call(*tensors, **option), *tensors, **option)
    assert len(no_plans) == len(shapes) * len(options)


def test_views_with_strides_of_their_own(no_plans):
    q, k, v = make(packed=False)
    for place in range(3):
        for rows, heads in ((2, 0), (0, 8)):
            tensors = [q, k, v]
            tokens, count, width = tensors[place].shape
            room = torch.full((tokens, count + rows, width + heads), float("nan"), device="cuda").bfloat16()
            room[:, :count, :width] = tensors[place]
            tensors[place] = room[:, :count, :width]
            assert_right(call(*tensors), q, k, v)
    assert len(no_plans) == 6


@pytest.mark.parametrize("causal", [False, True])
def test_batches_and_lengths_across_the_buckets(causal):
    bucket = cudnn_plans.SEQLEN_BUCKETS[0]
    for lengths in ([3] * 7, [3] * 8, [3] * 9, [2] * 64, [2] * 65, [1] * 200, [bucket], [bucket + 1, 5]):
        tensors = make(tokens=sum(lengths) + 3)
        options = {"lengths": lengths, "longest": max(lengths), "causal": causal}
        assert_right(call(*tensors, **options), *tensors, **options)


def test_the_log_sum_exps_are_those_of_the_reference():
    q, k, v = make(heads=8, kv_heads=2, width=80, v_width=48)
    cu = offsets(LENGTHS)
    op = torch.ops.mmgraph.varlen_attention_lse
    _, lse = op(q, k, v, cu, LONGEST, 0.2, True, "flashinfer_cudnn")
    _, expected = reference.forward(q.double(), k.double(), v.double(), cu, LONGEST, 0.2, True, True)
    assert lse.is_contiguous()
    torch.testing.assert_close(lse, expected.to(lse.dtype), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("longest", [LONGEST, 5000])
def test_nothing_outside_the_sequences_is_read_or_written(longest, monkeypatch):
    q, k, v = make()
    covered = sum(LENGTHS)
    for x in (q, k, v):
        x[covered:] = float("nan")
    kept, launch = [], cudnn_plans.run

    def run(plan, device, addresses, workspace):
        before = [x.clone() for x in (q, k, v)]
        launch(plan, device, addresses, workspace)
        kept.extend(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, (q, k, v), strict=True)
        )

    monkeypatch.setattr(cudnn_plans, "run", run)
    got = call(q, k, v, longest=longest)
    inputs = [x.nan_to_num(0) for x in (q, k, v)]
    assert_right(got, *inputs, longest=longest)
    assert kept == [True] * 3


def test_wrong_offsets_are_recorded_and_lead_nowhere():
    q, k, v = make()
    for sums in ([0, 300, 50], [-5, 2**30, TOKENS], [50, 20, 400], [0, TOKENS, TOKENS + 1]):
        cu = torch.tensor(sums, dtype=torch.int32, device="cuda")
        call(q, k, v, cu=cu)
        with pytest.raises(ops.DeviceError, match="cu_seqlens doesn't fit"):
            ops.check_errors()
    assert_right(call(q, k, v), q, k, v)


def test_threads_and_streams_at_once():
    q, k, v = make(heads=8, kv_heads=8, width=80, v_width=80)
    jobs = [
        {"scale": 0.1},
        {"scale": 0.2, "causal": True},
        {"scale": 0.1, "longest": 5000},
        {"scale": 0.3, "causal": True, "longest": 5000},
    ]
    expected = [call(q, k, v, **job) for job in jobs]
    cu = offsets(LENGTHS)
    torch.cuda.synchronize()
    wrong = []

    def work(place):
        try:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                results = [call(q, k, v, cu=cu, **jobs[place]) for _ in range(50)]
                torch.cuda.current_stream().synchronize()
                wrong.extend(place for one in results if not torch.equal(one, expected[place]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def capture(work):
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = work()
    return graph, out


def test_a_capture_replays_small_and_large_and_small():
    q, k, v = make()
    cu = offsets(LENGTHS)
    with torch.inference_mode():
        call(q, k, v, cu=cu, longest=TOKENS)
        graph, out = capture(lambda: call(q, k, v, cu=cu, longest=TOKENS))
        for lengths in ([1, 0, 2, 0], [TOKENS, 0, 0, 0], [0, 0, 0, 3], LENGTHS, [0, 0, 0, 0]):
            cu.copy_(offsets(lengths))
            out.fill_(float("nan"))
            graph.replay()
            assert_right(out, q, k, v, lengths=lengths, longest=TOKENS)


def test_eager_calls_between_replays_share_no_memory_with_the_graph():
    q, k, v = make()
    cu = offsets(LENGTHS)
    with torch.inference_mode():
        call(q, k, v, cu=cu)
        graph, out = capture(lambda: call(q, k, v, cu=cu))
        side = torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(side):
                eager = call(q, k, v, cu=cu, scale=0.3)
            graph.replay()
            torch.cuda.synchronize()
            assert_right(out, q, k, v)
            assert_right(eager, q, k, v, scale=0.3)


def test_a_plan_that_a_capture_used_outlives_its_eviction(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "PLANS", cudnn_plans.PlanCache(1))
    q, k, v = make()
    cu = offsets(LENGTHS)
    with torch.inference_mode():
        call(q, k, v, cu=cu)
        graph, out = capture(lambda: call(q, k, v, cu=cu))
        for scale in (0.3, 0.4, 0.5):
            assert_right(call(q, k, v, cu=cu, scale=scale), q, k, v, scale=scale)
        gc.collect()
        assert len(cudnn_plans.PLANS) == 2
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, q, k, v)


def test_evicted_plans_are_built_again(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "PLANS", cudnn_plans.PlanCache(2))
    q, k, v = make()
    for scale in (0.1, 0.2, 0.3, 0.1, 0.2, 0.3):
        assert_right(call(q, k, v, scale=scale), q, k, v, scale=scale)
    assert len(cudnn_plans.PLANS) == 2


def test_building_a_plan_does_not_synchronise(no_plans):
    q, k, v = make()
    cu = offsets(LENGTHS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call(q, k, v, cu=cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(got, q, k, v)


def test_a_capture_without_its_plan(no_plans):
    q, k, v = make()
    cu = offsets(LENGTHS)
    with torch.inference_mode():
        with pytest.raises(ops.DuringCaptureError, match="before a capture"):
            capture(lambda: call(q, k, v, cu=cu))
        assert_right(call(q, k, v, cu=cu), q, k, v)


def test_a_call_is_ready_for_a_capture_once_it_was_made(no_plans):
    q, k, v = make()
    cu = offsets(LENGTHS)
    asked = (q, k, v, cu, LONGEST, -0.125, False, False)
    assert not cudnn_backend.ready(*asked)
    with torch.inference_mode():
        call(q, k, v, cu=cu, scale=-0.125)
        assert cudnn_backend.ready(*asked)
        graph, out = capture(lambda: call(q, k, v, cu=cu, scale=-0.125))
        graph.replay()
        assert_right(out, q, k, v, scale=-0.125)


def test_plans_put_aside_are_dropped_later_and_their_neighbours_work_on(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "PLANS", cudnn_plans.PlanCache(1))
    monkeypatch.setattr(cudnn_cache, "QUIET_SECONDS", 0.0)
    q, k, v = make()
    for scale in (0.1, 0.2, 0.3, 0.1):
        assert_right(call(q, k, v, scale=scale), q, k, v, scale=scale)
        torch.cuda.synchronize()
        assert len(cudnn_plans.PLANS._aside) <= 1
