"""Invariant: a cuDNN plan serves exactly the calls that agree with it in everything that enters its graph."""

import gc
import sys
import threading
import time
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.capture.buckets import ENCODER_BATCH_BUCKETS, ENCODER_SEQLEN_BUCKETS, round_up_to_bucket
from mmgraph.ops import packages
from mmgraph.ops.attention import cudnn_backend as backend
from mmgraph.ops.attention import cudnn_cache, cudnn_handles
from mmgraph.ops.attention import cudnn_plans as plans
from mmgraph.ops.attention.registry import Traits

KEY = plans.PlanKey(
    device=0,
    dtype=torch.bfloat16,
    heads=16,
    kv_heads=8,
    width=80,
    v_width=72,
    q_stride=3840,
    q_head_stride=80,
    k_stride=1280,
    k_head_stride=160,
    v_stride=576,
    v_head_stride=144,
    batch=8,
    max_seqlen=4096,
    scale=0.3,
    causal=False,
    with_lse=False,
    version=91900,
)
OTHERS = {
    "device": 1,
    "dtype": torch.float16,
    "heads": 32,
    "kv_heads": 4,
    "width": 88,
    "v_width": 80,
    "q_stride": 1280,
    "q_head_stride": 96,
    "k_stride": 3840,
    "k_head_stride": 80,
    "v_stride": 1152,
    "v_head_stride": 72,
    "batch": 16,
    "max_seqlen": 8192,
    "scale": 0.30000001,
    "causal": True,
    "with_lse": True,
    "version": 92000,
}


class Recorder:
    """Writes down every call on it and on what it gives, as text."""

    def __init__(self, calls, name="graph"):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            self._calls.append(f"{self._name}.{name}{arguments}{keywords}")
            results = [Recorder(self._calls, f"{self._name}.{len(self._calls)}.{i}") for i in range(2)]
            return results if name == "sdpa" else results[0]

        return call

    def __repr__(self):
        return self._name


class DataTypes:
    BFLOAT16, HALF, FLOAT, INT32, INT64 = "bf16", "fp16", "fp32", "i32", "i64"


class FakeFrontend:
    data_type = DataTypes


@pytest.fixture
def frontend(monkeypatch):
    monkeypatch.setattr(plans, "package", lambda: FakeFrontend)
    monkeypatch.setattr(plans, "version", lambda: 91900)


def description(key):
    calls = []
    plans.describe(Recorder(calls), key)
    return calls


def test_every_field_of_the_key_has_another_value_to_try():
    assert OTHERS.keys() == set(plans.PlanKey._fields)
    assert all(getattr(KEY, name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"device", "version"}))
def test_every_property_enters_the_graph_and_tells_keys_apart(name, frontend):
    other = KEY._replace(**{name: OTHERS[name]})
    assert other != KEY
    assert description(other) != description(KEY)
    assert description(KEY) == description(KEY)


def inputs(device="cpu", dtype=torch.bfloat16, width=16, v_width=8, heads=4, kv_heads=2):
    shapes = ((10, heads, width), (10, kv_heads, width), (10, kv_heads, v_width))
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def padded(tensor, rows=0, heads=0):
    """The same shape with other strides."""
    tokens, count, width = tensor.shape
    room = torch.zeros(tokens, count + rows, width + heads, dtype=tensor.dtype)
    return room[:, :count, :width]


def test_calls_that_differ_in_one_property_have_other_keys(frontend):
    q, k, v = inputs()
    rest = {"batch": 4, "max_seqlen": 100, "scale": 0.25, "causal": False, "with_lse": False}
    keys = [plans.plan_key(q, k, v, **rest)]
    changes = ({"batch": 9}, {"max_seqlen": 4097}, {"scale": 0.5}, {"causal": True}, {"with_lse": True})
    keys += [plans.plan_key(q, k, v, **rest | change) for change in changes]
    for place in range(3):
        for more in ({"rows": 1}, {"heads": 8}):
            tensors = [q, k, v]
            tensors[place] = padded(tensors[place], **more)
            keys.append(plans.plan_key(*tensors, **rest))
    keys.append(plans.plan_key(*inputs(dtype=torch.float16), **rest))
    keys.append(plans.plan_key(*inputs(width=24), **rest))
    keys.append(plans.plan_key(*inputs(v_width=16), **rest))
    keys.append(plans.plan_key(*inputs(heads=2), **rest))
    keys.append(plans.plan_key(*inputs(kv_heads=4), **rest))
    assert len(set(keys)) == len(keys)
    assert plans.plan_key(*inputs(), **rest) == keys[0]


def test_sizes_of_one_bucket_share_a_plan(frontend):
    q, k, v = inputs()
    keys = {
        plans.plan_key(q[:n], k[:n], v[:n], batch, longest, 0.25, False, False)
        for n in (3, 10)
        for batch in (1, 8)
        for longest in (1, 64, plans.SEQLEN_BUCKETS[0])
    }
    assert len(keys) == 1


@given(st.integers(-5, 300_000))
def test_rounding_is_that_of_the_encoders_buckets(value):
    for buckets in (ENCODER_BATCH_BUCKETS, ENCODER_SEQLEN_BUCKETS):
        assert plans.round_up(value, buckets) == round_up_to_bucket(value, buckets)


def test_the_batch_buckets_are_the_encoders():
    assert plans.BATCH_BUCKETS == ENCODER_BATCH_BUCKETS


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 5))
def test_the_cache_keeps_the_last_used_and_all_that_a_capture_used(uses, capacity):
    cache = plans.PlanCache(capacity)
    recent, captured = [], set()
    for number, capturing in uses:
        key = KEY._replace(heads=number)
        plan = cache.find(key, capturing)
        assert (plan is not None) == (number in recent or number in captured)
        if plan is None:
            plan = cache.build(key, lambda key: plans.Plan(key, 0))
            cache.find(key, capturing)
        assert plan.graph == key
        assert key in cache
        if number in recent or number not in captured:
            recent = [other for other in recent if other != number] + [number]
            recent = recent[-capacity:]
        if capturing:
            captured.add(number)
        assert len(cache) == len(set(recent) | captured)


def test_threads_that_miss_at_once_build_one_plan():
    cache, made, gate = plans.PlanCache(4), [], threading.Barrier(4)

    def make(key):
        made.append(key)
        return plans.Plan(key, 0)

    def work():
        gate.wait()
        cache.find(KEY, False) or cache.build(KEY, make)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_failed_build_leaves_nothing_behind():
    cache = plans.PlanCache(4)

    def fail(key):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        cache.build(KEY, fail)
    assert len(cache) == 0
    assert cache.build(KEY, lambda key: plans.Plan(key, 7)).workspace == 7


def test_a_refusal_costs_one_build_and_the_last_ones_are_remembered():
    cache, asked = plans.PlanCache(2), []

    def refuse(key):
        asked.append(key.heads)
        raise ops.UnusableBackend(f"no kernel for {key.heads} heads")

    def ask(heads, capturing=False):
        key = KEY._replace(heads=heads)
        with pytest.raises(ops.UnusableBackend, match=f"no kernel for {heads} heads"):
            cache.find(key, capturing) or cache.build(key, refuse)
        assert key not in cache

    for heads in (1, 2, 1, 2):
        ask(heads)
    ask(1, capturing=True)
    assert asked == [1, 2]
    ask(3)  # in place of 2, which was asked for before 1
    ask(1)
    ask(2)
    assert asked == [1, 2, 3, 2]
    assert len(cache) == 0


def test_a_plan_is_destroyed_only_when_nothing_can_be_using_it(monkeypatch):
    """Not at its eviction: a kernel of it may run, a thread may have it in hand, and another may capture."""
    now = [1000.0]
    monkeypatch.setattr(cudnn_cache.time, "monotonic", lambda: now[0])
    cache, alive = plans.PlanCache(1), weakref.WeakSet()

    class FakePlan:
        def __init__(self, heads):
            self.heads = heads

    def build(heads):
        def make(key):
            plan = FakePlan(key.heads)
            alive.add(plan)
            return plan

        cache.build(KEY._replace(heads=heads), make)
        gc.collect()
        return sorted(plan.heads for plan in alive)

    assert build(1) == [1]
    assert build(2) == [1, 2]
    now[0] += cudnn_cache.QUIET_SECONDS - 1
    assert build(3) == [1, 2, 3]
    now[0] += 1
    assert cache.find(KEY._replace(heads=3), True) is not None
    assert build(4) == [1, 2, 3, 4]  # a capture may still be going on
    now[0] += cudnn_cache.QUIET_SECONDS
    assert build(5) == [3, 4, 5]  # of 3 for its graph, of 4 since it was put aside just now
    now[0] += cudnn_cache.QUIET_SECONDS
    assert build(6) == [3, 5, 6]


def test_a_capture_needs_the_plan_to_be_built(monkeypatch):
    monkeypatch.setattr(plans, "PLANS", plans.PlanCache(4))
    monkeypatch.setattr(plans, "make_plan", lambda key: plans.Plan(key, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ops.DuringCaptureError, match="Run the function once, with the same shapes, before"):
        plans.find_plan(KEY)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not plans.is_ready(KEY)
    plan = plans.find_plan(KEY)
    assert plans.is_ready(KEY)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert plans.find_plan(KEY) is plan


class FakeModule(types.SimpleNamespace):
    """The frontend's compiled part, as far as handles and launches go."""

    def __init__(self):
        super().__init__(made=[], streams={}, running=set(), launched=[])

    def create_handle(self):
        self.made.append(len(self.made) + 1)
        return self.made[-1]

    def _raw_set_stream(self, handle, stream):
        self.streams[handle] = stream


def test_a_handle_serves_one_call_at_a_time_and_follows_the_stream(monkeypatch):
    module, stream = FakeModule(), [5]
    monkeypatch.setattr(plans, "compiled", lambda: module)
    handles = cudnn_handles.Handles(module.create_handle)
    monkeypatch.setattr(plans, "HANDLES", handles)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def launch(pack, count, workspace, handle):
        assert handle not in module.running
        module.running.add(handle)
        module.launched.append((handle, module.streams[handle], count, workspace))
        if len(module.launched) == 1:  # a second call while the first one runs
            stream[0] = 6
            plans.run(plan, 0, [1, 2], 3)
        module.running.remove(handle)

    plan = plans.Plan(types.SimpleNamespace(_execute_with_raw_ptrs=launch), 0)
    plans.run(plan, 0, [1, 2], 3)
    stream[0] = 7
    plans.run(plan, 0, [1, 2], 3)
    plans.run(plan, 1, [1, 2], 3)
    assert [(s, count, ws) for _, s, count, ws in module.launched] == [(s, 2, 3) for s in (5, 6, 7, 7)]
    assert len(module.made) == 3

    def fail(pack, count, workspace, handle):
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        plans.run(plans.Plan(types.SimpleNamespace(_execute_with_raw_ptrs=fail), 0), 0, [1], 3)
    assert [handles.take(0).number for _ in range(2)] == [1, 2]
    assert len(module.made) == 3


def test_a_capture_waits_for_a_handle_and_makes_none(monkeypatch):
    module = FakeModule()
    handles = cudnn_handles.Handles(module.create_handle)
    taken = handles.take(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    got = []
    threads = [threading.Thread(target=lambda: got.append(handles.take(0)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert got == []
    handles.give(0, taken)
    for _ in range(100):
        if got:
            break
        time.sleep(0.05)
    assert got == [taken]
    handles.give(0, taken)
    for thread in threads:
        thread.join(5)
    assert got == [taken, taken]
    assert len(module.made) == 1
    handles.take(1)  # there is none to wait for
    assert len(module.made) == 2


def test_a_handle_that_could_not_be_made_is_waited_for_by_nobody(monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("no memory")

    handles = cudnn_handles.Handles(fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            handles.take(0)


class NotSupported(Exception):
    pass


class FailingGraph:
    """Takes every description and fails when it is to be built."""

    def __init__(self, error):
        self.error = error

    def validate(self):
        raise self.error


@pytest.fixture
def failing(monkeypatch):
    """Sets the error that every build ends with, and gives the handles."""

    def fail_with(error):
        module = types.SimpleNamespace(
            create_handle=lambda: 1, backend_graph=lambda **settings: FailingGraph(error)
        )
        package = types.SimpleNamespace(
            data_type=DataTypes,
            cudnnGraphNotSupportedError=NotSupported,
            backend_version_string=lambda: "9.19.0",
        )
        handles = cudnn_handles.Handles(module.create_handle)
        monkeypatch.setattr(plans, "compiled", lambda: module)
        monkeypatch.setattr(plans, "package", lambda: package)
        monkeypatch.setattr(plans, "describe", lambda graph, key: None)
        monkeypatch.setattr(plans, "HANDLES", handles)
        monkeypatch.setattr(plans, "PLANS", plans.PlanCache(4))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return handles

    return fail_with


@pytest.mark.parametrize(
    "error",
    [
        NotSupported("no engine"),
        RuntimeError("CUDNN_STATUS_NOT_SUPPORTED_SHAPE: no"),
        RuntimeError("[cudnn_frontend] ERROR: No valid engine configs returned from heuristics."),
    ],
    ids=str,
)
def test_what_cudnn_has_no_kernel_for_is_refused_and_remembered(error, failing):
    handles = failing(error)
    with pytest.raises(ops.UnusableBackend, match=r"cuDNN 9.19.0 builds no plan for PlanKey.device=0"):
        plans.find_plan(KEY)
    assert not plans.is_ready(KEY)
    with pytest.raises(ops.UnusableBackend, match="builds no plan"):
        plans.PLANS.find(KEY, False)
    assert handles.take(0).number == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
        ValueError("a tensor has no stride"),
    ],
    ids=str,
)
def test_other_errors_of_a_build_stay_what_they_are(error, failing):
    handles = failing(error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            plans.find_plan(KEY)
        assert caught.value is error
        assert not isinstance(caught.value, ops.OpError)
    assert handles.take(0).number == 1


LAYOUTS = {
    "packed": lambda x: padded(x, rows=2),
    "whole": lambda x: x,
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns apart": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows of odd length": lambda x: padded(x, heads=1),
    "starts anywhere": lambda x: torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : x.numel() + 1].view_as(x),
    "expanded rows": lambda x: x[:1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("scale", [0.5, -0.5, 0.0])
@pytest.mark.parametrize("width", [16, 13])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_key_says_how_tensors_lie_when_cudnn_gets_them(layout, width, scale, frontend):
    """So a call can be asked for its plan without a copy of anything."""
    q, k, v = (LAYOUTS[layout](x) for x in inputs(width=width, v_width=24))
    key = plans.plan_key(q, k, v, 4, 100, scale, False, False)
    got = backend._taken(q, k, v, scale, key)
    strides = (
        key.q_stride,
        key.q_head_stride,
        key.k_stride,
        key.k_head_stride,
        key.v_stride,
        key.v_head_stride,
    )
    assert [s for x in got for s in x.stride()[:2]] == list(strides)
    assert [x.shape[2] for x in got] == [key.width, key.width, key.v_width]
    assert all(x.stride(2) == 1 and x.data_ptr() % 16 == 0 for x in got)
    assert all(s % 8 == 0 and s for s in strides)
    assert key.scale > 0
    if layout == "packed" and width % 8 == 0 and scale > 0:
        assert all(a is b for a, b in zip(got, (q, k, v), strict=True))


def test_a_call_is_ready_once_its_plan_is_built(frontend, monkeypatch):
    monkeypatch.setattr(plans, "PLANS", plans.PlanCache(4))
    q, k, v = inputs()
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    call = (q, k, v, cu, 6, -0.25, True, False)
    assert not backend.ready(*call)
    key = plans.plan_key(q, k, v, 2, 6, -0.25, True, False)
    plans.PLANS.build(key, lambda key: plans.Plan(key, 0))
    assert backend.ready(*call)
    assert backend.ready(q, k, v, cu[:2], 5, -0.25, True, False)
    assert not backend.ready(q, k, v, cu, 6, -0.25, False, False)
    assert not backend.ready(q, k, v, cu, 6, -0.25, True, True)


@pytest.fixture
def hopper(monkeypatch):
    """Answer as on an H200 with triton and the frontend, without them."""
    graph = types.SimpleNamespace(_execute_with_raw_ptrs=None)
    module = types.SimpleNamespace(backend_graph=graph)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backend, "triton_package", object)
    monkeypatch.setattr(plans, "package", object)
    monkeypatch.setattr(plans, "compiled", lambda: module)
    monkeypatch.setattr(plans, "version", lambda: 91900)
    return module


def why_not(device="cuda:0", dtype=torch.bfloat16, width=80, v_width=80):
    return backend.BACKEND.why_not(Traits(torch.device(device), dtype, width, v_width, 16, 16))


def test_reasons(hopper, monkeypatch):
    assert why_not() is None
    assert "NVIDIA GPU" in why_not(device="cpu")
    assert "bfloat16 and float16" in why_not(dtype=torch.float32)
    largest = backend.LARGEST_WIDTHS[9]
    assert f"up to {largest} on this GPU, not {largest + 1}" in why_not(v_width=largest + 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert why_not() is None
    monkeypatch.setattr(plans, "version", lambda: 91300)
    assert "needs cuDNN 9.18.1 or newer on this GPU, not 9.13.0" in why_not()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "8.0" in why_not()


def test_other_frontends_and_missing_packages_have_reasons(hopper, monkeypatch):
    del hopper.backend_graph
    assert "lacks its compiled graph" in why_not()
    monkeypatch.setattr(plans, "package", lambda: None)
    assert "nvidia-cudnn-frontend isn't installed" in why_not()
    monkeypatch.setattr(backend, "triton_package", lambda: None)
    assert "triton isn't installed" in why_not()


def test_a_broken_frontend_is_an_error(monkeypatch):
    plans.package.cache_clear()
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ops.BrokenBackend, match="cudnn is installed but can't be imported"):
        plans.package()
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(__file__=None))  # a folder of that name
    assert plans.package() is None
    plans.package.cache_clear()
