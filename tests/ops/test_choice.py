"""Invariant: a call that names no backend gets what is asked for outside of it, else the fastest by measurements."""

import json
import math
import os
import random
import subprocess
import sys
import threading
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.ops.attention import choice_table, dispatch, measured, order, registry, settings
from mmgraph.ops.attention.choice_table import Grid, Kind, estimate, kind_of, nearest_kind, place_of
from mmgraph.ops.attention.registry import AttentionBackend, Traits, backend_names

GPU = Traits(torch.device("cuda", 0), torch.bfloat16, 80, 80, 16, 16)
CU = torch.tensor([0, 3, 7], dtype=torch.int32)


def q_of(seed=0, rows=7):
    return torch.randn(rows, 2, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh():
    def forget():
        registry.forget_choices()
        order.forget_choices()
        measured.forget()
        settings._from_environment.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of capability 9.0 on which the named backends are usable, without one."""

    def make(names, capability=(9, 0), grids=None):
        records = {n: AttentionBackend(n, lambda *a: None, lambda traits: None, True) for n in names}
        monkeypatch.setattr(order, "usable_backends", lambda traits: records)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        if grids is not None:
            monkeypatch.setattr(choice_table, "load", lambda major, minor: grids)

    return make


def grid_of(**times):
    """A grid with two places on each axis, whose times are given as functions of the place."""
    axes = ((2.0, 8.0), (0.0, 3.0), (10.0, 20.0))
    points = list(product(*axes))
    return Grid(axes, {name: tuple(f(*point) for point in points) for name, f in times.items()})


# The table.


@given(st.floats(-5, 30), st.floats(-1, 9), st.floats(0, 40))
def test_estimates_interpolate_planes_exactly_and_hold_at_the_edges(mean, ratio, rows):
    grid = grid_of(a=lambda x, y, z: 2 * x - y + 3 * z)
    inside = (min(max(mean, 2), 8), min(max(ratio, 0), 3), min(max(rows, 10), 20))
    expected = 2 * inside[0] - inside[1] + 3 * inside[2]
    assert estimate(grid, (mean, ratio, rows), ["a"]) == {"a": pytest.approx(expected)}


def test_backends_are_compared_at_points_that_all_of_them_have():
    grid = Grid(
        ((0.0, 1.0, 2.0), (0.0,), (0.0,)), {"a": (5.0, None, None), "b": (1.0, 9.0, None), "c": (None,) * 3}
    )
    assert estimate(grid, (0.9, 0, 0), ["a"]) == {"a": 5.0}
    assert estimate(grid, (0.9, 0, 0), ["b"]) == {"b": pytest.approx(8.2)}
    assert estimate(grid, (0.9, 0, 0), ["a", "b", "c", "d"]) == {"a": 5.0, "b": 1.0}
    assert estimate(grid, (9, 0, 0), ["b"]) == {"b": 9.0}  # the nearest point that was measured
    assert estimate(grid, (9, 0, 0), ["a", "b"]) == {"a": 5.0, "b": 1.0}
    assert estimate(grid, (0, 0, 0), ["c", "d"]) == {}


def test_points_beyond_an_edge_say_nothing_about_a_place_before_it():
    grid = Grid(((4.0, 8.0), (0.0,), (10.0,)), {"a": (1.0, 9.0)})
    assert estimate(grid, (6, 0, 10), ["a"]) == {"a": 5.0}
    assert estimate(grid, (6, 0, 10), ["a"], 6.0) == {"a": 1.0}
    assert estimate(grid, (6.1, 0, 10), ["a"], 6.0) == {"a": 9.0}
    assert estimate(grid, (5, 2, 10), ["a"], 6.0) == {"a": 9.0}  # the longest sequence is beyond it
    assert estimate(grid, (9, 0, 10), ["a"], 12.0) == {"a": 9.0}
    assert estimate(grid, (3, 0, 10), ["a"], 2.0) == {"a": 1.0}


def test_a_window_is_compared_with_windows(gpu):
    quick_windows = Grid(
        ((4.0, 6.0, 10.0), (0.0,), (10.0,)), {"triton": (1.0, 1.0, 9.0), "fa2": (4.0, 4.0, 5.0)}
    )
    gpu(["fa2", "triton"], grids={Kind(96, False, False): quick_windows})
    for longest, name in (
        (16, "triton"),
        (63, "triton"),
        (64, "triton"),
        (65, "fa2"),
        (80, "fa2"),
        (1024, "fa2"),
    ):
        assert order.rank(GPU, longest * 16, 16, longest)[0].name == name, longest


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 12), st.integers(1, 1 << 20), st.integers(1, 64))
def test_places_are_of_mean_longest_and_rows(tokens, batch, longest, heads):
    mean, ratio, rows = place_of(tokens, batch, longest, heads)
    assert 2**mean == pytest.approx(tokens / min(batch, tokens))
    assert ratio >= 0
    assert 2 ** (mean + ratio) == pytest.approx(max(min(longest, tokens), tokens / min(batch, tokens)))
    assert rows == pytest.approx(math.log2(tokens * heads))


@given(st.integers(1, 256), st.integers(1, 256), st.booleans(), st.booleans())
def test_a_kind_is_the_class_of_the_larger_width(head_dim, v_dim, causal, grouped):
    kind = kind_of(head_dim, v_dim, causal, grouped)
    assert max(head_dim, v_dim) <= kind.width
    assert not any(max(head_dim, v_dim) <= width < kind.width for width in choice_table.WIDTHS)
    assert (kind.causal, kind.grouped) == (causal, grouped)


def test_what_stands_for_a_kind_that_was_not_measured():
    empty = Grid(((0.0,), (0.0,), (0.0,)), {})
    grids = dict.fromkeys((Kind(64, False, False), Kind(128, False, True), Kind(128, True, False)), empty)
    assert nearest_kind(grids, Kind(64, False, False)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(64, False, True)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(96, False, False)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(256, True, True)) == Kind(128, True, False)
    assert nearest_kind(grids, Kind(32, False, False)) == Kind(64, False, False)
    assert nearest_kind({}, Kind(64, False, False)) is None


@pytest.mark.parametrize("path", sorted(choice_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_tables_are_whole(path):
    major, minor = path.stem.removeprefix("sm")[:-1], path.stem[-1]
    grids = choice_table.load(int(major), int(minor))
    for width, causal in product(choice_table.WIDTHS, (False, True)):
        grid = grids[Kind(width, causal, False)]
        assert all(list(axis) == sorted(set(axis)) for axis in grid.axes)
        points = math.prod(len(axis) for axis in grid.axes)
        assert set(grid.times) <= set(backend_names()) - {"reference"}
        assert len(grid.times) >= 2
        for column in grid.times.values():
            assert len(column) == points
            assert sum(time is not None for time in column) > points / 3
    assert json.loads(path.read_text())["environment"]["capability"] == [int(major), int(minor)]


# The choice.


def test_the_fastest_usable_backend_is_chosen(gpu):
    fast_when_long = grid_of(fa3=lambda x, y, z: 10 - x, fa2=lambda x, y, z: 5, triton=lambda x, y, z: 7)
    grids = {Kind(96, False, False): fast_when_long}
    gpu(["fa2", "fa3", "triton"], grids=grids)
    assert order.rank(GPU, 4096, 4096 // 8, 8)[0].name == "fa2"  # a mean of 2^3
    assert order.rank(GPU, 4096, 4096 // 128, 128)[0].name == "fa3"
    order.forget_choices()
    gpu(["fa3", "triton", "torch"], grids=grids)
    assert order.rank(GPU, 4096, 4096 // 8, 8)[0].name in ("fa3", "triton")
    order.forget_choices()
    gpu(["torch"], grids=grids)  # usable, and not measured
    assert order.rank(GPU, 4096, 4, 1024)[0].name == "torch"


@given(st.integers(0, 10**6))
def test_every_choice_is_usable_and_the_best_estimate_of_its_class(seed):
    draw = random.Random(seed)
    times = {n: [draw.uniform(0, 9) for _ in range(8)] for n in ("fa2", "fa3", "triton")}
    axes = ((2.0, 8.0), (0.0, 3.0), (10.0, 20.0))
    grid = Grid(axes, {name: tuple(column) for name, column in times.items()})
    tokens, batch = draw.randint(1, 1 << 16), draw.randint(1, 512)
    longest = draw.randint(-(-tokens // min(batch, tokens)), 1 << 16)  # no longest one is below the mean
    with pytest.MonkeyPatch.context() as patch:
        order.forget_choices()
        records = {n: AttentionBackend(n, lambda *a: None, lambda t: None, True) for n in times}
        patch.setattr(order, "usable_backends", lambda traits: records)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(choice_table, "load", lambda major, minor: {Kind(96, False, False): grid})
        name = order.rank(GPU, tokens, batch, longest)[0].name
    place = place_of(tokens, batch, longest, 16)
    estimates = estimate(grid, place, times, math.log2(64))
    # Classes are quarters and halves of an octave, so that an estimate is off by what lies within one.
    slack = 9 * (0.125 / 6 + 0.25 / 3 + 0.25 / 10) * 2
    assert estimates[name] <= min(estimates.values()) + slack


@pytest.mark.parametrize(
    ("capability", "usable", "long", "window"),
    [
        ((9, 0), ["fa2", "fa4", "fa3", "triton", "reference"], "fa3", "triton"),
        ((9, 0), ["fa2", "fa4", "triton", "reference"], "fa4", "triton"),
        ((10, 0), ["fa2", "fa4", "triton", "reference"], "fa4", "triton"),
        ((8, 0), ["fa2", "torch", "triton", "reference"], "fa2", "triton"),
        ((12, 0), ["triton", "reference"], "triton", "triton"),
        ((8, 6), ["reference"], "reference", "reference"),
    ],
)
def test_the_order_where_nothing_was_measured(gpu, capability, usable, long, window):
    gpu(usable, capability, grids={})
    assert order.rank(GPU, 4096, 4, 1024)[0].name == long
    assert order.rank(GPU, 4096, 64, 64)[0].name == window


def test_shapes_without_a_row_have_a_backend_too():
    cpu = Traits(torch.device("cpu"), torch.float32, 8, 8, 2, 2)
    for shape in ((0, 0, 0), (0, 3, 5), (4, 0, 0), (4, 9, 0), (1, 1, 1)):
        assert order.rank(cpu, *shape)[0].name == "reference"


# What is asked for.


def test_an_argument_goes_before_a_context_and_a_context_before_the_variable(monkeypatch):
    monkeypatch.setenv(settings.VARIABLE, "fa2")
    assert settings.asked_for()[0] == "fa2"
    with ops.attention_backend("fa3"):
        assert settings.asked_for()[0] == "fa3"
        with ops.attention_backend(None):
            assert settings.asked_for()[0] == "fa2"
        with ops.attention_backend("triton"):
            assert settings.asked_for()[0] == "triton"
        assert settings.asked_for()[0] == "fa3"
        with pytest.raises(ops.UnusableBackend, match="'fa3'"):
            ops.varlen_attention(q_of(), q_of(), q_of(), CU, 4)
        ops.varlen_attention(q_of(), q_of(), q_of(), CU, 4, backend="reference")
        wanting = q_of().requires_grad_()
        with pytest.raises(ops.UnusableBackend, match="'fa3'"):
            ops.varlen_attention(wanting, wanting, wanting, CU, 4)
    with pytest.raises(ops.UnusableBackend, match="'fa2'"):
        ops.select_backend(device="cpu")
    assert ops.select_backend(device="cpu", backend="reference") == "reference"


def test_a_context_ends_when_its_body_fails():
    with pytest.raises(ZeroDivisionError), ops.attention_backend("fa3"):
        raise ZeroDivisionError
    ops.varlen_attention(q_of(), q_of(), q_of(), CU, 4)


def test_threads_have_contexts_of_their_own():
    seen = []
    with ops.attention_backend("fa3"):
        thread = threading.Thread(target=lambda: seen.append(settings.asked_for()[0]))
        thread.start()
        thread.join()
    assert seen == [None]


def test_names_that_no_backend_has_are_refused():
    with pytest.raises(ops.UnknownBackend, match=r"'flash'.*reference"), ops.attention_backend("flash"):
        pass
    assert settings.asked_for()[0] is None
    code = "import torch; from mmgraph import ops; q = torch.zeros(2, 1, 8); "
    code += "ops.varlen_attention(q, q, q, torch.tensor([0, 2], dtype=torch.int32), 2)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, settings.VARIABLE: "flash"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "UnknownBackend" in done.stderr
    assert f"'flash' was asked for by the environment variable {settings.VARIABLE}" in done.stderr


def test_the_variable_is_read_once(monkeypatch):
    assert settings.asked_for()[0] is None
    monkeypatch.setenv(settings.VARIABLE, "fa2")
    assert settings.asked_for()[0] is None


def test_a_compiled_graph_asks_when_it_runs():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True)
    def attend(q):
        return ops.varlen_attention(q, q, q, CU, 4) + 1

    with torch.no_grad():
        expected = attend(q_of())
        with torch._dynamo.config.patch(error_on_recompile=True):
            with ops.attention_backend("fa3"), pytest.raises(ops.UnusableBackend, match="'fa3'"):
                attend(q_of())
            assert torch.equal(attend(q_of()), expected)


# The choice by measurement.


def test_measuring_keeps_the_fastest_and_measures_each_shape_once(monkeypatch):
    runs = []
    records = {n: AttentionBackend(n, lambda *a: None, lambda traits: None, True) for n in ("slow", "quick")}
    monkeypatch.setattr(measured, "usable_backends", lambda traits: records)
    clock = iter(range(10**6))
    now = [0.0]

    def run(backend):
        runs.append(backend.name)
        now[0] += {"slow": 3.0, "quick": 1.0}[backend.name]

    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0] + next(clock) * 1e-9)
    cpu = Traits(torch.device("cpu"), torch.float32, 8, 8, 2, 2)
    assert measured.choose(cpu, 64, 2, 32, run).name == "quick"
    count = len(runs)
    assert set(runs) == {"slow", "quick"}
    assert measured.choose(cpu, 64, 2, 32, run).name == "quick"
    assert len(runs) == count
    measured.choose(cpu, 64, 2, 33, run)
    assert len(runs) == 2 * count


def test_measurements_are_bounded(monkeypatch):
    record = AttentionBackend("one", lambda *a: None, lambda traits: None, True)
    monkeypatch.setattr(measured, "usable_backends", lambda traits: {"one": record})
    monkeypatch.setattr(measured, "_CAPACITY", 5)
    cpu = Traits(torch.device("cpu"), torch.float32, 8, 8, 2, 2)
    for longest in range(1, 20):
        measured.choose(cpu, 64, 2, longest, lambda backend: None)
    assert len(measured._found) == 5


def test_the_reference_is_measured_only_where_it_is_alone(monkeypatch):
    seen = []
    records = {
        n: AttentionBackend(n, lambda *a: None, lambda traits: None, True) for n in ("reference", "other")
    }
    monkeypatch.setattr(measured, "usable_backends", lambda traits: records)
    cpu = Traits(torch.device("cpu"), torch.float32, 8, 8, 2, 2)
    measured.choose(cpu, 64, 2, 32, lambda backend: seen.append(backend.name))
    assert set(seen) == {"other"}


def test_a_shape_that_was_not_measured_is_refused_inside_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ops.DuringCaptureError, match="once on that shape"):
        measured.choose(GPU, 64, 2, 32, lambda backend: None)


@pytest.mark.parametrize("gradient", [False, True])
def test_measure_by_argument_and_by_context(gradient):
    q = q_of().requires_grad_(gradient)
    expected = ops.varlen_attention(q, q, q, CU, 4)
    assert torch.equal(ops.varlen_attention(q, q, q, CU, 4, backend="measure"), expected)
    with ops.attention_backend("measure"):
        assert torch.equal(ops.varlen_attention(q, q, q, CU, 4), expected)
    assert len(measured._found) == 1
    with pytest.raises(ops.ArgumentError, match="measure"):
        ops.select_backend(backend="measure")


# What can't serve now.


def _ranked(monkeypatch, **forwards):
    records = [
        AttentionBackend(name, forward, lambda traits: None, True, ready)
        for name, (forward, ready) in forwards.items()
    ]
    monkeypatch.setattr(dispatch, "rank", lambda *arguments: records)


def test_a_backend_that_refuses_a_call_is_passed_over_and_said(monkeypatch, caplog):
    def refuse(*arguments):
        raise ops.UnusableBackend("no plan")

    _ranked(monkeypatch, first=(refuse, None), second=(lambda q, *rest: (q + 1, None), None))
    q = q_of()
    assert torch.equal(ops.varlen_attention(q, q, q, CU, 4), q + 1)
    assert "first refused a call" in caplog.text
    _ranked(monkeypatch, first=(refuse, None))
    with pytest.raises(ops.UnusableBackend, match="no plan"):
        ops.varlen_attention(q, q, q, CU, 4)


def test_a_capture_takes_the_next_backend_where_the_first_must_compile(monkeypatch):
    class Fake:
        is_cuda, shape = True, (7, 2, 8)

        def get_device(self):
            return 0

    arguments = (Fake(), None, None, CU, 4, None, False, False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ready = {"value": False}
    first = AttentionBackend(
        "first", lambda *a: ("first", None), lambda t: None, True, lambda *a: ready["value"]
    )
    second = AttentionBackend("second", lambda *a: ("second", None), lambda t: None, True)
    for capturing, is_ready, served in (
        (True, False, "second"),
        (True, True, "first"),
        (False, False, "first"),
    ):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        ready["value"] = is_ready
        assert dispatch._serve_by_rank([first, second], arguments)[0] == served


def test_measuring_leaves_out_what_refuses(monkeypatch):
    records = {n: AttentionBackend(n, lambda *a: None, lambda traits: None, True) for n in ("one", "two")}
    monkeypatch.setattr(measured, "usable_backends", lambda traits: records)
    cpu = Traits(torch.device("cpu"), torch.float32, 8, 8, 2, 2)

    def run(backend):
        if backend.name == "one":
            raise ops.UnusableBackend("no plan")

    assert measured.choose(cpu, 64, 2, 32, run).name == "two"
    del records["two"]
    with pytest.raises(ops.UnusableBackend, match="no plan"):
        measured.choose(cpu, 64, 2, 33, run)


def test_the_reference_is_never_taken_quietly_on_a_gpu(gpu, caplog):
    gpu(["reference"], grids={})
    order.rank(GPU, 4096, 4, 1024)
    assert "slow and quadratic" in caplog.text


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(ops.ArgumentError, match="scale"):
        ops.varlen_attention(q_of(), q_of(), q_of(), CU, 4, scale=scale)


def test_errors_say_who_asked():
    with (
        ops.attention_backend("fa3"),
        pytest.raises(ops.UnusableBackend, match=r"asked for by attention_backend"),
    ):
        ops.varlen_attention(q_of(), q_of(), q_of(), CU, 4)


def test_a_longest_length_beyond_all_rows_is_cut_before_anyone_sees_it(monkeypatch):
    seen = []

    def forward(q, k, v, cu_seqlens, max_seqlen, *rest):
        seen.append(max_seqlen)
        return q, None

    record = AttentionBackend("one", forward, lambda traits: None, True)
    monkeypatch.setattr(dispatch, "rank", lambda *arguments: seen.append(arguments[3]) or [record])
    monkeypatch.setattr(dispatch.measured, "choose", lambda *arguments: seen.append(arguments[3]) or record)
    q = q_of()
    ops.varlen_attention(q, q, q, CU, 10**9)
    ops.varlen_attention(q, q, q, CU, 10**9, backend="measure")
    ops.varlen_attention(q, q, q, CU, 5)
    assert seen == [7, 7, 7, 7, 5, 5]


def test_select_backend_says_who_asked():
    with (
        ops.attention_backend("fa3"),
        pytest.raises(ops.UnusableBackend, match="asked for by attention_backend"),
    ):
        ops.select_backend(device="cpu")
    with pytest.raises(ops.UnknownBackend):
        ops.select_backend(device="cpu", backend="")


def test_a_context_inside_what_is_exported_is_an_error():
    class Inside(torch.nn.Module):
        def forward(self, q):
            with ops.attention_backend("reference"):
                return ops.varlen_attention(q, q, q, CU, 4)

    with torch.no_grad(), pytest.raises(ops.ArgumentError, match="inside what is exported"):
        torch.export.export(Inside(), (q_of(),), strict=False)
    assert settings.asked_for()[0] is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"kinds": [{"wid',
        "{}",
        "[]",
        '{"kinds": [{"width": 64, "causal": false, "grouped": false, "axes": [[1, 2], [0], [0]], '
        '"microseconds": {"fa2": [1.0]}}]}',
        '{"kinds": [{"width": 64, "causal": false, "grouped": false, "axes": [[1, 1], [0], [0]], '
        '"microseconds": {"fa2": [1.0, 2.0]}}]}',
        '{"kinds": [{"width": 64, "causal": false, "grouped": false, "axes": [[1, 2], [0], [0]], '
        '"microseconds": {"fa2": [1.0, 0.0]}}]}',
        '{"kinds": [{"width": 64, "causal": false, "grouped": false, "axes": [[1, 2], [0], [0]], '
        '"microseconds": {"fa2": [1.0, NaN]}}]}',
    ],
)
def test_a_damaged_table_is_named(content, tmp_path, monkeypatch):
    (tmp_path / "sm77.json").write_text(content)
    monkeypatch.setattr(choice_table, "FOLDER", tmp_path)
    with pytest.raises(ops.DataError, match=r"sm77\.json is no table"):
        choice_table.load(7, 7)


def test_a_backend_that_no_order_lists_comes_before_the_reference(gpu):
    gpu(["reference", "mine", "triton"], grids={})
    assert [one.name for one in order.rank(GPU, 4096, 4, 1024)] == ["triton", "mine", "reference"]


def test_the_reference_serves_the_devices_that_the_ops_are_made_for():
    for device, usable in (("cpu", True), ("mps", False)):
        reports = {one.name: one for one in ops.explain_backends(device=device, dtype=torch.float32)}
        assert reports["reference"].usable == usable


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"head_dim": -3}, "head_dim must be a Python int of at least 1, got -3"),
        ({"head_dim": 64.5}, "head_dim must be"),
        ({"v_dim": 0}, "v_dim must be a Python int of at least 1, got 0"),
        ({"heads": 0}, "heads must be"),
        ({"heads": 3, "kv_heads": 2}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"causal": 1}, "causal must be True or False, got int"),
        ({"dtype": torch.int32}, "dtype must be one of"),
        ({"dtype": "float32"}, "dtype must be one of"),
        ({"device": "gpu"}, "device must be a device or its name"),
        ({"device": "cuda:77"}, "there is no cuda:77 here"),
    ],
    ids=str,
)
def test_calls_that_there_cant_be_have_no_choice(call, words):
    for function in (ops.select_backend, ops.explain_backends):
        with pytest.raises(ops.ArgumentError, match=words):
            function(**call)
    assert ops.select_backend(device="cpu") == "reference"


@pytest.mark.parametrize("call", [{"tokens": -1}, {"batch": 1.5}, {"max_seqlen": float("nan")}], ids=str)
def test_shapes_that_there_cant_be_have_no_choice(call):
    with pytest.raises(ops.ArgumentError, match="must be a Python int of at least 0"):
        ops.select_backend(**call)
    with pytest.raises(ops.UnknownBackend):
        ops.select_backend(backend=["triton"])
