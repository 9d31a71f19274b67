"""Invariant: a call gives what the function gives on its own inputs, whatever ran between; results never change."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import assert_same, make_call, segment_means

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CallError,
    CaptureManager,
    bucket_size,
    constant,
    rows,
    static,
)

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


def test_constant_outputs_are_the_callers_own() -> None:
    manager = CaptureManager(
        lambda x: (x * 1, {"sizes": [1, 2]}),
        inputs={"x": rows("n")},
        outputs=(rows("n"), constant()),
        buckets=BucketGrid(n=(4,)),
    )
    manager.precompile({"x": torch.zeros(3)}, progress=False)
    manager(x=torch.zeros(3))[1]["sizes"].append(9)
    assert manager(x=torch.zeros(3))[1] == {"sizes": [1, 2]}


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
    assert 0 <= report.static_bytes - 2 * 16 * 4 <= 128  # the buffers, and a record of a few numbers
    data = report.to_dict()
    assert data["misses"] == {"beyond the grid": 1}
    assert len(data["dropped"]) == 1
    assert "4 calls, 3 hits" in str(report)
    assert '"hits": 3' in report.to_json()
