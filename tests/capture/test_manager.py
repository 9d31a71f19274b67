"""Invariant: a call gives what the function gives on its own inputs, whatever ran between; results never change."""

import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CallError,
    CallGradientError,
    CaptureFailedError,
    CaptureManager,
    NotCapturableError,
    OutputError,
    SpecError,
    bucket_size,
    constant,
    offsets,
    rows,
    static,
)


def segment_means(x: torch.Tensor, cu: torch.Tensor, weight: torch.Tensor, longest: int) -> dict[str, Any]:
    """Rows plus the sum of their sequence; zero for rows of none. Integers in float64, so that sums are exact."""
    position = torch.arange(x.shape[0])
    segment = torch.searchsorted(cu[1:].contiguous(), position, right=True)
    covered = (position < cu[-1])[:, None]
    member = (segment[:, None] == segment[None, :]) & covered & covered.T
    total = member.to(x.dtype) @ x
    merged = torch.where(covered, x * longest + total @ weight, 0)
    return {"main": merged[::2].contiguous(), "deep": [merged * 2, (merged + 1,)], "length": 3}


SPECS: dict[str, Any] = {
    "x": rows("tokens"),
    "cu": offsets("batch", of="tokens"),
    "weight": static(),
    "longest": constant(),
}
OUTPUTS: dict[str, Any] = {
    "main": rows("tokens", per=2),
    "deep": [rows("tokens"), (rows("tokens"),)],
    "length": constant(),
}


def make_call(lengths: list[int], tail: int, seed: int, width: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    tokens += tokens % 2
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    draw = lambda *shape: torch.randint(-9, 9, shape, generator=generator).double()  # noqa: E731
    return {"x": draw(tokens, width), "cu": cu, "weight": draw(width, width), "longest": 7}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["length"] == expected["length"]
    assert torch.equal(got["main"], expected["main"])
    assert torch.equal(got["deep"][0], expected["deep"][0])
    assert isinstance(got["deep"][1], tuple)
    assert torch.equal(got["deep"][1][0], expected["deep"][1][0])


@pytest.fixture(scope="module")
def graphs() -> CaptureManager:
    grid = BucketGrid(tokens=(4, 8, 16), batch=(2, 4))
    manager = CaptureManager(segment_means, inputs=SPECS, outputs=OUTPUTS, buckets=grid)
    return manager.precompile(example=make_call([3, 2], 1, seed=0), progress=False)


calls = st.builds(
    make_call,
    st.lists(st.integers(0, 6), min_size=0, max_size=5),
    st.integers(0, 3),
    st.integers(0, 2**31),
)


@settings(max_examples=300)
@given(calls=st.lists(calls, min_size=1, max_size=4))
def test_every_call_equals_the_function_and_keeps_its_result(
    graphs: CaptureManager, calls: list[dict[str, Any]]
) -> None:
    results = [(call, graphs(**call)) for call in calls]
    for call, result in results:  # compared only now: later calls must not have changed them
        assert_same(result, segment_means(**call))


def test_calls_within_the_grid_replay_and_beyond_it_run_eagerly(graphs: CaptureManager) -> None:
    before = graphs.report()
    for lengths, hit in [([3, 3], True), ([1] * 4, True), ([1] * 5, False), ([16], True), ([17], False)]:
        call = make_call(lengths, 0, seed=1)
        assert graphs.explain_call(**call).hit is hit
        assert_same(graphs(**call), segment_means(**call))
    after = graphs.report()
    assert after.hits - before.hits == 3
    assert after.misses["beyond the grid"] - before.misses.get("beyond the grid", 0) == 2
    assert after.calls == after.hits + sum(after.misses.values())
    assert sum(b.hits for b in after.buckets) == after.hits


def test_same_total_and_other_boundaries_share_a_bucket_and_no_result(graphs: CaptureManager) -> None:
    first, second = make_call([5, 3], 0, seed=2), make_call([2, 6], 0, seed=2)
    assert graphs.explain_call(**first).bucket == graphs.explain_call(**second).bucket
    one, two = graphs(**first), graphs(**second)
    assert not torch.equal(one["main"], two["main"])
    assert_same(one, segment_means(**first))
    assert_same(two, segment_means(**second))


def test_nan_in_an_earlier_call_never_reaches_a_later_one(graphs: CaptureManager) -> None:
    dirty = make_call([8, 8], 0, seed=3)
    dirty["x"].fill_(float("nan"))
    graphs(**dirty)
    clean = make_call([9], 0, seed=4)
    assert_same(graphs(**clean), segment_means(**clean))


def test_inputs_by_position_and_by_name_are_the_same(graphs: CaptureManager) -> None:
    call = make_call([2, 2], 0, seed=5)
    assert_same(graphs(call["x"], call["cu"], longest=7, weight=call["weight"]), segment_means(**call))


def test_strided_inputs_are_taken_as_they_are(graphs: CaptureManager) -> None:
    call = make_call([4, 3], 1, seed=6)
    wide = torch.zeros(8, 6, dtype=torch.float64)
    wide[:, ::2] = call["x"]
    assert_same(graphs(**{**call, "x": wide[:, ::2]}), segment_means(**call))


def test_a_changed_constant_is_a_miss_with_the_right_result(graphs: CaptureManager) -> None:
    call = {**make_call([2, 2], 0, seed=7), "longest": 8}
    assert "constant changed: longest" in graphs.explain_call(**call).reason
    assert_same(graphs(**call), segment_means(**call))


GOOD = make_call([2, 2], 0, seed=8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"x": GOOD["x"].float()}, "x must be torch.float64, got torch.float32"),
    "width": ({"x": GOOD["x"][:, :2]}, r"x must have shape \[tokens, 3\], got \[4, 2\]"),
    "rank": ({"x": GOOD["x"][None]}, r"x must have shape \[tokens, 3\]"),
    "scalar": ({"x": torch.zeros((), dtype=torch.float64)}, "x must have rows along axis 0"),
    "not a tensor": ({"x": [1.0]}, "x must be a tensor, got list"),
    "device": ({"x": GOOD["x"].to("meta")}, "x must be on cpu, got meta"),
    "offset dtype": ({"cu": GOOD["cu"].long()}, "cu must be torch.int32, got torch.int64"),
    "offset rank": ({"cu": GOOD["cu"][None]}, r"cu must have shape \[batch \+ 1\]"),
    "no offsets": ({"cu": GOOD["cu"][:0]}, r"cu must have shape \[batch \+ 1\]"),
    "static shape": ({"weight": GOOD["weight"][:2]}, r"weight must have shape \[3, 3\] in every call"),
    "not divisible": ({"x": GOOD["x"][:3]}, "tokens=3 is not a multiple of 2"),
    "unknown": ({"y": 1}, r"unknown \['y'\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_a_good_call_follows(graphs: CaptureManager, name: str) -> None:
    change, message = WRONG[name]
    calls = graphs.report().calls
    with pytest.raises(CallError, match=message):
        graphs(**{**GOOD, **change})
    assert graphs.report().calls == calls
    assert_same(graphs(**GOOD), segment_means(**GOOD))


def test_missing_and_repeated_arguments_are_named(graphs: CaptureManager) -> None:
    with pytest.raises(CallError, match=r"missing \['cu'\]"):
        graphs(**{name: value for name, value in GOOD.items() if name != "cu"})
    with pytest.raises(CallError, match="'x' is given both"):
        graphs(GOOD["x"], **GOOD)
    with pytest.raises(CallError, match="at most 4"):
        graphs(1, 2, 3, 4, 5)


def test_an_input_that_needs_a_gradient_is_refused_with_a_hint(graphs: CaptureManager) -> None:
    call = {**GOOD, "x": GOOD["x"].clone().requires_grad_()}
    with pytest.raises(CallGradientError, match="detach"):
        graphs(**call)
    with torch.no_grad():
        assert_same(graphs(**call), segment_means(**call))


def test_bucket_size_gives_the_caller_his_own_size_and_the_graph_the_buckets() -> None:
    seen: list[int] = []

    def function(x: torch.Tensor, longest: int) -> torch.Tensor:
        seen.append(longest)
        return x + 0

    grid = BucketGrid(tokens=(4, 16), seqlen=(4, 8))
    manager = CaptureManager(
        function,
        inputs={"x": rows("tokens"), "longest": bucket_size("seqlen")},
        outputs=rows("tokens"),
        buckets=grid,
    )
    assert [d.bucket for d in grid.dropped] == [Bucket(tokens=4, seqlen=8)]
    manager.precompile({"x": torch.zeros(3, 1), "longest": 3}, progress=False)
    assert set(seen) == {4, 8}
    seen.clear()
    manager(x=torch.ones(3, 1), longest=3)
    assert seen == []
    manager(x=torch.ones(9, 1), longest=9)
    assert seen == [9]
    for bad, message in [
        (torch.tensor(3), "would wait for the device"),
        (2.0, "Python int"),
        (-1, "zero or more"),
    ]:
        with pytest.raises(CallError, match=message):
            manager(x=torch.ones(3, 1), longest=bad)


def test_sizes_that_disagree_are_an_error_that_names_both() -> None:
    manager = CaptureManager(
        lambda a, b: a + b.sum(),
        inputs={"a": rows("tokens"), "b": rows("tokens", per=2)},
        outputs=rows("tokens"),
        buckets=BucketGrid(tokens=(8,)),
    )
    manager.precompile({"a": torch.zeros(4), "b": torch.zeros(2)}, progress=False)
    with pytest.raises(CallError, match="b gives tokens=6, but a gives tokens=4"):
        manager(a=torch.zeros(4), b=torch.zeros(3))
    assert manager(a=torch.zeros(4), b=torch.ones(2)).tolist() == [2.0] * 4


def test_padding_rows_hold_the_fill_and_rows_may_lie_along_another_axis() -> None:
    manager = CaptureManager(
        lambda x, y: (x.amax(0), y * 1),
        inputs={"x": rows("tokens", fill=-5.0), "y": rows("tokens", axis=1)},
        outputs=(static(), rows("tokens", axis=1)),
        buckets=BucketGrid(tokens=(4, 8)),
    )
    manager.precompile({"x": torch.zeros(3, 2), "y": torch.zeros(2, 3, 2)}, progress=False)
    low, y = torch.full((5, 2), -9.0), torch.randn(2, 5, 2)
    peak, same = manager(x=low, y=y)
    assert peak.tolist() == [-5.0, -5.0]  # the padding shows, with its fill
    assert torch.equal(same, y)
    assert same.is_contiguous()


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict[str, torch.Tensor]


def test_pytrees_of_inputs_and_outputs_keep_their_structure() -> None:
    specs = Pair(rows("n"), {"a": rows("n"), "b": static()})
    manager = CaptureManager(
        lambda state: (Pair(state.left * 2, {"a": state.right["a"] + 1, "b": state.right["b"]}), None),
        inputs={"state": specs},
        outputs=(specs, None),
        buckets=BucketGrid(n=(4, 8)),
    )
    example = Pair(torch.zeros(3), {"a": torch.zeros(3, 2), "b": torch.zeros(2)})
    manager.precompile({"state": example}, progress=False)
    state = Pair(torch.randn(5), {"a": torch.randn(5, 2), "b": torch.randn(2)})
    pair, nothing = manager(state=state)
    assert nothing is None
    assert isinstance(pair, Pair)
    assert torch.equal(pair.left, state.left * 2)
    assert torch.equal(pair.right["a"], state.right["a"] + 1)
    assert torch.equal(pair.right["b"], state.right["b"])
    with pytest.raises(CallError, match="'state' does not have the declared structure"):
        manager(state=(torch.zeros(3),))
    with pytest.raises(CallError, match="right"):
        manager(state=Pair(torch.zeros(5), {"a": torch.zeros(5, 3), "b": torch.zeros(2)}))


def test_before_precompile_and_after_close_calls_run_eagerly() -> None:
    manager = CaptureManager(
        lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    assert manager(x=torch.ones(3)).tolist() == [2.0] * 3
    manager.precompile({"x": torch.zeros(2)}, progress=False)
    assert manager(x=torch.ones(3)).tolist() == [2.0] * 3
    manager.close()
    assert manager(x=torch.ones(3)).tolist() == [2.0] * 3
    report = manager.report()
    assert (report.hits, report.misses) == (1, {"not precompiled": 2})


def test_where_only_some_buckets_are_captured_the_least_that_holds_a_call_serves_it() -> None:
    grid = BucketGrid(n=(4, 8, 16))
    manager = CaptureManager(lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=grid)
    manager.precompile({"x": torch.zeros(2)}, progress=False, buckets=[grid.buckets[1]])
    assert manager.explain_call(x=torch.ones(3)).bucket == Bucket(n=8)
    assert manager(x=torch.ones(3)).tolist() == [2.0] * 3
    assert manager(x=torch.ones(5)).tolist() == [2.0] * 5
    assert manager.report().hits == 2
    assert manager.explain_call(x=torch.ones(9)).reason.startswith("not captured")
    assert manager(x=torch.ones(9)).tolist() == [2.0] * 9
    with pytest.raises(SpecError, match="some of the grid's 3 buckets"):
        manager.precompile({"x": torch.zeros(2)}, progress=False, buckets=[Bucket(n=5)])


def test_a_failed_capture_names_bucket_and_cause_and_leaves_the_others() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * x.sum().item()

    grid = BucketGrid(n=(4, 8))
    manager = CaptureManager(function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=grid)
    with pytest.raises(CaptureFailedError, match=r"Bucket\(n=4\).*scalar is read") as caught:
        manager.precompile({"x": torch.zeros(2)}, progress=False)
    assert caught.value.bucket == Bucket(n=4)
    assert isinstance(caught.value.__cause__, NotCapturableError)
    assert manager(x=torch.ones(6)).tolist() == [2.0] * 6
    assert manager(x=torch.ones(3)).tolist() == [2.0] * 3  # the larger bucket's graph serves it
    assert manager.report().hits == 2


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (lambda x: x[:1], rows("n"), "must have 8 rows along axis 0"),
        (lambda x: (x, x), rows("n"), "must be a tensor, got tuple"),
        (lambda x: x, (rows("n"), rows("n")), "does not have the declared structure"),
        (lambda x: x, None, "declared as None"),
        (lambda x: 3, rows("n"), r"declare constant\(\)"),
        (lambda x: x, constant(), "declared constant but is a tensor"),
        (
            lambda x: x.float() if x.shape[0] == 8 else x,
            rows("n"),
            r"torch.float32 \[4, 2\], got torch.float64",
        ),
        (lambda x: x[:, :1] if x.shape[0] == 8 else x, rows("n"), r"\[4, 1\], got"),
    ],
)
def test_outputs_other_than_declared_are_named(function: Any, outputs: Any, message: str) -> None:
    manager = CaptureManager(function, inputs={"x": rows("n")}, outputs=outputs, buckets=BucketGrid(n=(4, 8)))
    with pytest.raises(CaptureFailedError, match=message) as caught:
        manager.precompile({"x": torch.zeros(3, 2, dtype=torch.float64)}, progress=False)
    assert isinstance(caught.value.__cause__, OutputError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {}}, "must map argument names"),
        ({"inputs": {"x": 3}}, "input x must be a spec"),
        ({"inputs": {"x": rows("m")}}, "names the size 'm'"),
        ({"inputs": {"x": [rows("n"), offsets("n", of="z")]}}, r"x\[1\] names the size 'z'"),
        ({"outputs": rows("m")}, "output names the size 'm'"),
        ({"outputs": bucket_size("n")}, "output must be rows"),
        ({"outputs": rows("n", per=3)}, "does not divide Bucket"),
        ({"inputs": {"x": static()}}, "no input gives the size 'n'"),
        ({"buckets": (4, 8)}, "must be a BucketGrid"),
        ({"warmup": 1}, "at least 2"),
        ({"fn": 3}, "fn must be callable"),
    ],
)
def test_declarations_that_do_not_fit_are_errors_at_construction(
    arguments: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {
        "fn": lambda x: x,
        "inputs": {"x": rows("n")},
        "outputs": rows("n"),
        "buckets": BucketGrid(n=(4, 8)),
    }
    fn = arguments.pop("fn", good.pop("fn"))
    with pytest.raises(SpecError, match=message):
        CaptureManager(fn, **{**good, **arguments})


@pytest.mark.parametrize(
    "make", [lambda: rows("n", per=0), lambda: rows("n", axis=-1), lambda: rows(""), lambda: offsets(3, of="n")]
)  # type: ignore[arg-type]
def test_specs_that_cannot_be_are_errors(make: Any) -> None:
    with pytest.raises(SpecError):
        make()


def test_an_example_that_does_not_fit_is_an_error_and_harms_nothing() -> None:
    manager = CaptureManager(
        lambda x, c: x * c,
        inputs={"x": rows("n", dtype=torch.float32, shape=(2,)), "c": constant()},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    manager.precompile({"x": torch.zeros(3, 2), "c": 2}, progress=False)
    for bad in (torch.zeros(3, 2).double(), torch.zeros(3, 5), torch.zeros(()), "x"):
        with pytest.raises(CallError, match="x must"):
            manager.precompile({"x": bad, "c": 2}, progress=False)
        assert manager(x=torch.ones(3, 2), c=2).sum() == 12
    assert manager.report().misses == {}


def test_an_example_larger_than_a_bucket_points_at_no_row_that_the_bucket_lacks() -> None:
    manager = CaptureManager(
        lambda x, last: x[last],
        inputs={"x": rows("n"), "last": rows("k")},
        outputs=rows("k"),
        buckets=BucketGrid(n=(4, 16), k=(2, 8)),
    )
    manager.precompile({"x": torch.arange(12.0), "last": torch.tensor([11, 7, 3])}, progress=False)
    assert manager(x=torch.arange(3.0), last=torch.tensor([2])).tolist() == [2.0]
    assert manager(x=torch.arange(13.0), last=torch.tensor([12, 0, 5])).tolist() == [12.0, 0.0, 5.0]
    assert manager.report().hits == 2


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.cache = [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.cache[0].add_(1)
        return x + self.steps + torch.rand(()) * 0


def test_state_ends_as_after_exactly_the_calls_that_the_user_made() -> None:
    module = Counter()
    manager = CaptureManager(module, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
    before = torch.get_rng_state()
    manager.precompile({"x": torch.zeros(3)}, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.steps == 0
    assert module.cache[0].tolist() == [0.0] * 4
    for step in range(1, 4):
        assert manager(x=torch.zeros(2 * step)).tolist() == [float(step)] * (2 * step)
    assert module.steps == 3


def test_state_is_put_back_after_a_failed_capture_too() -> None:
    module = Counter()
    manager = CaptureManager(
        lambda x: module(x) * x.sum().item(),
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    with pytest.raises(CaptureFailedError):
        manager.precompile({"x": torch.zeros(3)}, progress=False)
    assert module.steps == 0


def test_weights_changed_in_place_are_used() -> None:
    module = torch.nn.Linear(3, 2).double()
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)))
    manager.precompile({"input": torch.zeros(3, 3).double()}, progress=False)
    x = torch.randn(3, 3).double()
    for _ in range(2):
        with torch.no_grad():
            module.weight.mul_(3)
            torch.testing.assert_close(manager(input=x), module(x))


def test_a_manager_called_inside_anothers_function_becomes_part_of_it() -> None:
    inner = CaptureManager(
        lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(8,))
    )
    inner.precompile({"x": torch.zeros(3)}, progress=False)
    outer = CaptureManager(
        lambda x: inner(x=x) + 1, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    outer.precompile({"x": torch.zeros(3)}, progress=False)
    replayed = inner.report().hits
    assert outer(x=torch.ones(3)).tolist() == [3.0] * 3
    assert inner.report().hits == replayed
    assert "inside another capture" in inner.report().misses


def test_autocast_other_than_at_capture_is_a_miss() -> None:
    module = torch.nn.Linear(4, 4)
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)))
    manager.precompile({"input": torch.zeros(3, 4)}, progress=False)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert manager(input=x).dtype == torch.bfloat16
    assert manager(input=x).dtype == torch.float32
    assert manager.report().misses == {"autocast differs": 1}


def test_inference_mode_at_any_point_leaves_ordinary_results_usable() -> None:
    module = Counter()
    manager = CaptureManager(module, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)))
    with torch.inference_mode():
        manager.precompile({"x": torch.zeros(3)}, progress=False)
        assert manager(x=torch.zeros(3)).tolist() == [1.0] * 3
    result = manager(x=torch.zeros(3))
    result.add_(1)
    assert result.tolist() == [3.0] * 3
    (torch.ones(3, requires_grad=True) * result).sum().backward()


def test_compiled_callers_call_the_manager_as_it_is() -> None:
    manager = CaptureManager(
        lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    manager.precompile({"x": torch.zeros(3)}, progress=False)

    @torch.compile(backend="eager")
    def caller(x: torch.Tensor) -> torch.Tensor:
        return manager(x=x + 1) + 1

    assert caller(torch.ones(3)).tolist() == [5.0] * 3
    assert manager.report().hits == 1


def test_many_threads_each_get_their_own_result(graphs: CaptureManager) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        for step in range(15):
            call = make_call([(seed + step) % 5, seed % 4], step % 2, seed=seed * 100 + step)
            got, expected = graphs(**call), segment_means(**call)
            if not torch.equal(got["main"], expected["main"]):
                failures.append(f"thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_report_counts_padding_and_reads_as_table_and_json() -> None:
    grid = BucketGrid(tokens=(8, 16), seqlen=(8, 16))
    manager = CaptureManager(
        lambda x, m: x * 2,
        inputs={"x": rows("tokens"), "m": bucket_size("seqlen")},
        outputs=rows("tokens"),
        buckets=grid,
    )
    manager.precompile({"x": torch.zeros(3), "m": 3}, progress=True)
    for n in (6, 8, 12):
        manager(x=torch.ones(n), m=n)
    manager(x=torch.ones(17), m=17)
    report = manager.report()
    by_tokens = {b.bucket["tokens"]: b for b in report.buckets if b.hits}
    assert by_tokens[8].padding == {"tokens": pytest.approx(1 - 14 / 16)}
    assert by_tokens[16].padding == {"tokens": pytest.approx(0.25)}
    assert report.static_bytes == 2 * 16 * 4
    data = report.to_dict()
    assert data["misses"] == {"beyond the grid": 1}
    assert len(data["dropped"]) == 1
    assert "4 calls, 3 hits" in str(report)
    assert '"hits": 3' in report.to_json()
