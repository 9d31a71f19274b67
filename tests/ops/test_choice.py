"""Invariant: a call that names no backend gets what is asked for outside of it, else the fastest by measurements."""

import json
import math
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.ops.attention import choice_table, dispatch, measured, order, registry, settings
from mmgraph.ops.attention.choice_model import (
    EQUAL,
    Cost,
    Shape,
    features,
    lengths_like,
    microseconds,
    window_form,
)
from mmgraph.ops.attention.choice_table import Costs, Kind, Table, kind_of, nearest_kind
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

    def make(names, capability=(9, 0), table=None, load=False):
        records = {n: AttentionBackend(n, lambda *a: None, lambda traits: None, True) for n in names}
        monkeypatch.setattr(order, "usable_backends", lambda traits: records)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        if load or table is not None:
            monkeypatch.setattr(choice_table, "load", lambda major, minor: table)

    return make


def cost(**coefficients):
    """A cost with 128 queries to a tile, 64 keys at a time and one program; coefficients that aren't named are zero."""
    names = ("work", "rows", "chain", "sequences", "start", "elements")
    given = {name: float(coefficients.pop(name, 0)) for name in names}
    return Cost(**({"queries": 128, "keys": 64, "programs": 1} | coefficients), **given)


def table_of(windows=None, **costs):
    """A table that knows calls of width 96 or less."""
    return Table(132, {Kind(96, False, False): Costs(costs, windows or {})})


# The formula.

SHAPES = st.builds(
    Shape,
    tokens=st.integers(1, 1 << 17),
    batch=st.integers(1, 1 << 12),
    longest=st.integers(1, 1 << 17),
    heads=st.integers(1, 64),
    causal=st.booleans(),
).map(
    lambda s: replace(
        s, batch=min(s.batch, s.tokens), longest=max(min(s.longest, s.tokens), -(-s.tokens // s.batch))
    )
)


@given(SHAPES)
def test_lengths_add_up_to_what_is_known(shape):
    groups = lengths_like(shape.tokens, shape.batch, shape.longest)
    assert sum(count for count, _, _ in groups) == pytest.approx(shape.batch)
    assert all(count >= 0 and length >= 0 for count, length, _ in groups)
    rows = sum(count * length for count, length, _ in groups)
    assert shape.tokens * (1 - 1e-9) <= rows <= shape.tokens * EQUAL + shape.batch
    assert max(length for count, length, _ in groups if count) <= shape.longest + 1


@pytest.mark.parametrize(
    ("known", "groups"),
    [
        ((100, 1, 100), ((1, 100, True),)),
        ((1000, 10, 103), ((10, 103, True),)),
        (
            (1000, 10, 104),
            ((10 / 3, 100 - 4 * 2 / 3, False), (10 / 3, 100, False), (10 / 3, 100 + 4 * 2 / 3, False)),
        ),
        ((1000, 10, 400), ((1.25, 400, False), (8.75, 500 / 8.75, False))),
        (
            (1000, 2, 990),
            ((2 / 3, 500 - 490 * 2 / 3, False), (2 / 3, 500, False), (2 / 3, 500 + 490 * 2 / 3, False)),
        ),
        ((1000, 3, 990), ((1.0, 900, False), (2.0, 50, False))),
    ],
    ids=str,
)
def test_lengths_are_equal_even_or_a_few_long_ones(known, groups):
    got = lengths_like(*known)
    assert len(got) == len(groups)
    for one, other in zip(got, groups, strict=True):
        assert one == (pytest.approx(other[0]), pytest.approx(other[1]), other[2])


def test_lengths_that_are_not_known_exactly_fill_half_a_tile_more():
    pairs, rows, *_ = features(128, 64, 1, Shape(1000, 10, 104, 1, False), 132)
    lengths = (100 - 8 / 3, 100, 100 + 8 / 3)
    assert rows == pytest.approx(sum(10 / 3 * (length + 64) for length in lengths))
    assert pairs == pytest.approx(sum(10 / 3 * (length + 64) * (length + 32) for length in lengths))
    assert features(128, 64, 1, Shape(30, 10, 4, 1, False), 132)[1] == pytest.approx(
        1280
    )  # at least a tile each


def test_equal_lengths_fill_their_tiles_up():
    def pairs(length):
        return features(128, 64, 1, Shape(10 * length, 10, length, 1, False), 132)[0]

    for length, tall, wide in (
        (1, 128, 64),
        (64, 128, 64),
        (65, 128, 128),
        (128, 128, 128),
        (129, 256, 192),
        (137, 256, 192),
    ):
        assert pairs(length) == 10 * tall * wide
    whole = features(128, 64, 1, Shape(2560, 10, 256, 1, False), 132)[0]
    half = features(128, 64, 1, Shape(2560, 10, 256, 1, True), 132)[0]
    assert half == whole / 2 + 2560 * 32


def test_tiles_beyond_the_programs_at_once_take_further_turns():
    def way(sequences, programs=1, processors=132):
        return features(128, 64, programs, Shape(sequences * 128, sequences, 128, 1, False), processors)[2]

    assert way(1) == way(132) == 128
    assert way(133) == way(264) == 256
    assert way(265) == 384
    assert way(264, programs=2) == way(264, processors=264) == 128


@given(SHAPES, st.integers(0, 10**6))
def test_times_are_the_start_and_the_larger_of_work_and_way(shape, seed):
    draw = random.Random(seed)
    names = ("work", "rows", "chain", "sequences", "start", "elements")
    one = cost(**{name: 10 ** draw.uniform(-7, 1) for name in names})
    time = microseconds(one, shape, 132)
    alone = {name: microseconds(cost(**{name: getattr(one, name)}), shape, 132) for name in names}
    work = sum(alone[name] for name in names if name not in ("start", "chain"))
    larger = max(work, alone["chain"])
    assert one.start + larger <= time * (1 + 1e-9)
    assert time <= one.start + 2**0.25 * larger * (1 + 1e-9)
    assert microseconds(one, replace(shape, heads=2 * shape.heads), 132) >= time


# The table.


@given(st.integers(1, 256), st.integers(1, 256), st.booleans(), st.booleans())
def test_a_kind_is_the_class_of_the_larger_width(head_dim, v_dim, causal, grouped):
    kind = kind_of(head_dim, v_dim, causal, grouped)
    assert max(head_dim, v_dim) <= kind.width
    assert not any(max(head_dim, v_dim) <= width < kind.width for width in choice_table.WIDTHS)
    assert (kind.causal, kind.grouped) == (causal, grouped)


def test_what_stands_for_a_kind_that_was_not_measured():
    grids = {Kind(64, False, False), Kind(128, False, True), Kind(128, True, False)}
    assert nearest_kind(grids, Kind(64, False, False)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(64, False, True)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(96, False, False)) == Kind(64, False, False)
    assert nearest_kind(grids, Kind(256, True, True)) == Kind(128, True, False)
    assert nearest_kind(grids, Kind(32, False, False)) == Kind(64, False, False)
    assert nearest_kind([], Kind(64, False, False)) is None


@pytest.mark.parametrize("path", sorted(choice_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_tables_are_whole(path):
    major, minor = path.stem.removeprefix("sm")[:-1], path.stem[-1]
    table = choice_table.load(int(major), int(minor))
    for width, causal in product(choice_table.WIDTHS, (False, True)):
        costs = table.kinds[Kind(width, causal, False)]
        assert set(costs.of_any) <= set(backend_names()) - {"reference"}
        assert len(costs.of_any) >= 2
        assert set().union(*costs.of_windows.values()) <= {"triton"}
        assert "triton" in costs.of_windows["whole"]
    assert json.loads(path.read_text())["environment"]["capability"] == [int(major), int(minor)]


@pytest.mark.parametrize("path", sorted(choice_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_formula_says_what_was_measured_of_drawn_shapes(path):
    """Within a quarter for most, and what it would choose within a tenth of the best: else it must be fitted anew."""
    table, misses, regrets = choice_table.load(int(path.stem[2:-1]), int(path.stem[-1])), [], []
    for one in json.loads(path.read_text())["drawn"]:
        traits = GPU._replace(
            head_dim=one["width"],
            v_dim=one["width"],
            heads=one["heads"],
            kv_heads=one["kv_heads"],
            causal=one["causal"],
        )
        shape = order.rounded_shape(one["tokens"], one["batch"], one["longest"], traits)
        times, measured = order.table_times(table, traits, shape), one["microseconds"]
        misses += [abs(math.log2(times[name] / time)) for name, time in measured.items()]
        regrets.append(measured[min(times, key=times.get)] / min(measured.values()) - 1)
    assert len(regrets) >= 100
    assert sorted(misses)[int(0.9 * len(misses))] < math.log2(1.25)
    assert sorted(regrets)[int(0.95 * len(regrets))] < 0.1


@pytest.mark.parametrize("path", sorted(choice_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_formula_says_what_was_measured_of_the_grid(path):
    """For each backend and form of windows apart: near for most points; and what it would choose, for almost all."""
    table, data = choice_table.load(int(path.stem[2:-1]), int(path.stem[-1])), json.loads(path.read_text())
    misses, regrets = {}, []
    for kind in data["kinds"]:
        costs = table.kinds[Kind(kind["width"], kind["causal"], kind["grouped"])]
        kv_heads = 4 if kind["grouped"] else 16
        traits = GPU._replace(
            head_dim=kind["width"], v_dim=kind["width"], causal=kind["causal"], kv_heads=kv_heads
        )
        for place, (mean, ratio, rows) in enumerate(product(*kind["axes"])):
            measured = {n: c[place] for n, c in kind["microseconds"].items() if c[place] is not None}
            tokens = 2**rows // 16
            shape = Shape(tokens, tokens >> mean, min(2 ** (mean + ratio), tokens), 16, kind["causal"])
            if len(measured) < 2 or not shape.batch:
                continue
            times = order.table_times(table, traits, shape)
            form = window_form(shape) if shape.longest <= 64 else None
            for name, time in measured.items():
                key = (name, form if name in costs.of_windows.get(form, {}) else None)
                misses.setdefault(key, []).append(abs(math.log2(times[name] / time)))
            regrets.append(measured[min(measured, key=times.get)] / min(measured.values()) - 1)
    assert len(misses) >= 6
    for key, found in misses.items():
        assert sorted(found)[int(0.9 * len(found))] < math.log2(1.4), key
    assert len(regrets) > 1000
    assert sorted(regrets)[int(0.95 * len(regrets))] < 0.1
    assert max(regrets) < 0.8


def test_the_committed_regret_is_of_the_committed_table():
    results = Path(__file__).parents[2] / "bench" / "results" / "h200" / "regret.json"
    table, found = choice_table.load(9, 0), json.loads(results.read_text())
    for row in found["rows"]:
        heads, kv_heads = map(int, row["heads"].split("/"))
        traits = GPU._replace(
            head_dim=row["width"], v_dim=row["width"], heads=heads, kv_heads=kv_heads, causal=row["causal"]
        )
        shape = order.rounded_shape(row["tokens"], row["batch"], row["longest"], traits)
        times = order.table_times(table, traits, shape)
        assert row["chosen"] == min(row["ms"], key=times.get)
        assert row["regret"] == pytest.approx(row["ms"][row["chosen"]] / min(row["ms"].values()) - 1)


# The choice.


def test_the_fastest_usable_backend_is_chosen(gpu):
    # fa3 starts slowly and works fast.
    table = table_of(
        fa3=cost(start=20, work=1e-7), fa2=cost(start=5, work=1e-6), triton=cost(start=9, work=1e-6)
    )
    gpu(["fa2", "fa3", "triton"], table=table)
    assert order.rank(GPU, 1024, 8, 128)[0].name == "fa2"
    assert order.rank(GPU, 65536, 16, 4096)[0].name == "fa3"
    order.forget_choices()
    gpu(["fa3", "triton", "torch"], table=table)
    assert [one.name for one in order.rank(GPU, 1024, 8, 128)] == ["triton", "fa3", "torch"]
    order.forget_choices()
    gpu(["torch"], table=table)  # usable, and not measured
    assert order.rank(GPU, 4096, 4, 1024)[0].name == "torch"


def test_windows_have_costs_of_their_own(gpu):
    of_forms = {"whole": 2, "even": 3, "packed": 5}
    windows = {form: {"triton": cost(start=start)} for form, start in of_forms.items()}
    gpu(["fa2", "triton"], table=table_of(windows, fa2=cost(start=4), triton=cost(start=9)))
    places = {
        8: "triton",
        9: "fa2",
        16: "triton",
        24: "triton",
        63: "triton",
        64: "triton",
        65: "fa2",
        1024: "fa2",
    }
    for longest, name in places.items():
        assert order.rank(GPU, longest * 16, 16, longest)[0].name == name, longest
    assert order.rank(GPU, 160, 16, 64)[0].name == "fa2"  # a mean of 10, packed


def test_more_sequences_than_rows_and_too_short_a_longest_one_are_put_right():
    assert order.rounded_shape(5, 100, 3, GPU) == Shape(5, 5, 3, 16, False)
    assert order.rounded_shape(4631, 25, 191, GPU) == Shape(
        25 * 192, 25, 192, 16, False
    )  # not longer than the longest
    assert order.rounded_shape(100, 4, 7, GPU) == Shape(100, 4, 25, 16, False)


def test_grouped_heads_have_costs_of_their_own(gpu):
    kinds = {
        Kind(96, False, grouped): Costs({"fa2": cost(start=4), "fa3": cost(start=2 if grouped else 9)}, {})
        for grouped in (False, True)
    }
    gpu(["fa2", "fa3"], table=Table(132, kinds))
    assert order.rank(GPU, 4096, 4, 1024)[0].name == "fa2"
    assert order.rank(GPU._replace(kv_heads=4), 4096, 4, 1024)[0].name == "fa3"


@given(SHAPES, st.integers(0, 10**6))
def test_every_choice_is_usable_and_the_cheapest_of_its_class(shape, seed):
    draw = random.Random(seed)
    costs = {
        name: cost(start=draw.uniform(1, 30), work=10 ** draw.uniform(-8, -6), chain=10 ** draw.uniform(-3, -1))
        for name in ("fa2", "fa3", "triton")
    }
    table = table_of(**costs)
    traits = GPU._replace(heads=shape.heads, kv_heads=shape.heads)
    with pytest.MonkeyPatch.context() as patch:
        order.forget_choices()
        records = {n: AttentionBackend(n, lambda *a: None, lambda t: None, True) for n in costs}
        patch.setattr(order, "usable_backends", lambda traits: records)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(choice_table, "load", lambda major, minor: table)
        ranked = [one.name for one in order.rank(traits, shape.tokens, shape.batch, shape.longest)]
    rounded = order.rounded_shape(shape.tokens, shape.batch, shape.longest, traits)
    times = {name: microseconds(one, rounded, 132) for name, one in costs.items()}
    assert [times[name] for name in ranked] == sorted(times.values())


@given(SHAPES)
def test_classes_are_of_five_bits_and_keep_what_matters(shape):
    traits = GPU._replace(heads=shape.heads, causal=shape.causal)
    rounded = order.rounded_shape(shape.tokens, shape.batch, shape.longest, traits)
    for exact, up in ((shape.batch, rounded.batch), (shape.longest, rounded.longest)):
        assert exact <= up <= exact * (1 + 1 / 16)
    for tile in (16, 64, 128, 176, 192):  # on the same side of a tile's border
        assert -(-shape.longest // tile) == -(-rounded.longest // tile) or shape.longest > 2048
    assert (rounded.longest <= 64) == (shape.longest <= 64)
    groups = lengths_like(rounded.tokens, rounded.batch, rounded.longest)
    assert max(length for count, length, _ in groups if count) <= rounded.longest * (1 + 1e-9)
    if shape.longest * shape.batch <= EQUAL * shape.tokens:
        assert rounded.tokens == rounded.batch * rounded.longest
    else:
        most = rounded.batch * rounded.longest
        assert min(shape.tokens, most) <= rounded.tokens <= min(shape.tokens * (1 + 1 / 16), most)
    assert (rounded.heads, rounded.causal) == (shape.heads, shape.causal)


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
    gpu(usable, capability, load=True)
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
    gpu(["reference"], load=True)
    order.rank(GPU, 4096, 4, 1024)
    assert "slow and quadratic" in caplog.text
    order.rank(GPU, 8192, 3, 7000)
    assert caplog.text.count("slow and quadratic") == 1  # not for each shape


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


def damaged(**change):
    one = {"width": 64, "causal": False, "grouped": False, "backend": "fa2", "windows": None, "programs": 1}
    one |= {"tile": [128, 64], "microseconds": [1.0] * 6} | change
    return json.dumps({"model": {"processors": 132, "costs": [one]}})


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"kinds": [{"wid',
        "{}",
        "[]",
        '{"kinds": [], "drawn": []}',
        damaged(tile=[128]),
        damaged(tile=[128, 0]),
        damaged(tile=[128, 64.0]),
        damaged(programs="2"),
        damaged(microseconds=[1.0] * 5),
        damaged(microseconds=[1.0] * 5 + [-1.0]),
        damaged(microseconds=[1.0] * 5 + [math.nan]),
        damaged(microseconds=None),
        damaged(windows="most"),
    ],
)
def test_a_damaged_table_is_named(content, tmp_path, monkeypatch):
    (tmp_path / "sm77.json").write_text(content)
    monkeypatch.setattr(choice_table, "FOLDER", tmp_path)
    with pytest.raises(ops.DataError, match=r"sm77\.json is no table"):
        choice_table.load(7, 7)
    (tmp_path / "sm78.json").write_text(damaged())
    assert choice_table.load(7, 8).kinds[Kind(64, False, False)].of_any["fa2"].queries == 128
    assert choice_table.load(7, 9) is None


def test_a_backend_that_no_order_lists_comes_before_the_reference(gpu):
    gpu(["reference", "mine", "triton"], load=True)
    assert [one.name for one in order.rank(GPU, 4096, 4, 1024)] == ["triton", "mine", "reference"]


def test_the_reference_serves_the_devices_that_the_ops_are_made_for():
    for device, usable in (("cpu", True), ("mps", False)):
        reports = {one.name: one for one in ops.explain_backends(device=device, dtype=torch.float32)}
        assert reports["reference"].usable == usable


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"head_dim": -3}, "head_dim must be a Python int of at least 1 below 2.63, got -3"),
        ({"head_dim": 64.5}, "head_dim must be"),
        ({"v_dim": 0}, "v_dim must be a Python int of at least 1 below 2.63, got 0"),
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


@pytest.mark.parametrize(
    "call", [{"tokens": -1}, {"tokens": 10**60}, {"batch": 1.5}, {"max_seqlen": float("nan")}], ids=str
)
def test_shapes_that_there_cant_be_have_no_choice(call):
    with pytest.raises(ops.ArgumentError, match="must be a Python int of at least 0"):
        ops.select_backend(**call)
    with pytest.raises(ops.UnknownBackend):
        ops.select_backend(backend=["triton"])
