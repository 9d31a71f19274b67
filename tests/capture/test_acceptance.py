"""Invariant: faults that captured graphs are known for don't happen to a manager's callers, or are refused by name."""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from segments import OUTPUTS, SPECS, assert_same, make_call, segment_means

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CaptureFailedError,
    CaptureManager,
    MissError,
    NotCapturableError,
    StaleWeights,
    constant,
    rows,
    static,
)
from mmgraph.capture.errors import VerificationError
from mmgraph.capture.policies import Candidate, Choice, cost_aware

GRID = BucketGrid(n=(4, 8, 16))


def manager_of(fn: Callable[..., Any], **options: Any) -> CaptureManager:
    return CaptureManager(fn, inputs={"x": rows("n")}, outputs=rows("n"), buckets=GRID, **options)


def captured(fn: Callable[..., Any], *trailing: int, **options: Any) -> CaptureManager:
    return manager_of(fn, **options).precompile({"x": torch.ones(3, *trailing)}, progress=False)


def test_inputs_and_the_example_may_be_freed_or_overwritten_after_the_call() -> None:
    example, x = torch.ones(3), torch.arange(5.0)
    manager = manager_of(lambda x: x * 2).precompile({"x": example}, progress=False)
    result = manager(x=x)
    gone = [weakref.ref(example), weakref.ref(x)]
    x.fill_(float("nan"))
    del example, x
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert result.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert manager(x=torch.ones(7)).tolist() == [2.0] * 7


class Scaled(torch.nn.Module):
    """A parameter, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3))
        self.table = [torch.ones(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + self.shift) * self.table[0]


def assigned_state(module: Scaled) -> None:
    state = {name: torch.full_like(value, 5.0) for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


REPLACEMENTS: dict[str, Callable[[Scaled], object]] = {
    "a new parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.full((3,), 5.0))),
    "a new buffer": lambda m: setattr(m, "shift", torch.full((3,), 5.0)),
    "a new tensor in a list": lambda m: m.table.__setitem__(0, torch.full((3,), 5.0)),
    "load_state_dict with assign": assigned_state,
    "data": lambda m: setattr(m.weight, "data", torch.full((3,), 5.0)),
    "a deleted and remade parameter": lambda m: (
        delattr(m, "weight"),
        m.register_parameter("weight", torch.nn.Parameter(torch.full((3,), 5.0))),
    ),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_replaced_weights_are_refused_recaptured_or_run_eagerly_and_never_stale(how: str) -> None:
    x = torch.arange(15.0).view(5, 3)
    for on_stale in ("error", "recapture", "eager"):
        module = Scaled().requires_grad_(False)
        manager = captured(lambda x, module=module: module(x), 3, on_stale=on_stale)
        assert torch.equal(manager(x=x), module(x))
        before = module(x)
        REPLACEMENTS[how](module)
        assert not torch.equal(module(x), before)
        if on_stale == "error":
            with pytest.raises(StaleWeights):
                manager(x=x)
            manager.precompile({"x": x}, progress=False)
        assert torch.equal(manager(x=x), module(x))
        assert manager.report().hits == (1 if on_stale == "eager" else 2)


def test_a_tensor_of_the_functions_that_nobody_binds_any_more_is_not_recycled_under_a_graph() -> None:
    table = {"now": torch.full((3,), 2.0)}
    manager = captured(lambda x: x * table["now"], 3, on_stale="eager")
    watched = weakref.ref(table["now"])
    del table["now"]
    gc.collect()
    assert watched() is not None  # the guard holds it while graphs read it
    manager.close()
    gc.collect()
    assert watched() is None


def test_cast_weights_of_an_autocast_region_around_the_capture_are_not_frozen_into_it() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=GRID)
    x = torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)  # autocast now keeps the cast weight until the region ends
        manager.precompile({"input": x}, progress=False)
        first = manager(input=x)
        with torch.no_grad():
            module.weight.mul_(-2)
        assert torch.equal(manager(input=x), first * -2)
    assert manager.report().hits == 2


def test_scalars_that_change_are_inputs_and_those_that_were_baked_in_miss() -> None:
    manager = CaptureManager(
        lambda x, rate, power: (x * rate) ** power,
        inputs={"x": rows("n"), "rate": static(), "power": constant()},
        outputs=rows("n"),
        buckets=GRID,
    )
    x = torch.arange(3.0)
    manager.precompile({"x": x, "rate": torch.tensor(1.0), "power": 2}, progress=False)
    for rate in (0.5, 3.0):
        assert torch.equal(manager(x=x, rate=torch.tensor(rate), power=2), (x * rate) ** 2)
    assert manager.report().hits == 2
    assert torch.equal(manager(x=x, rate=torch.tensor(3.0), power=3), (x * 3) ** 3)
    assert dict(manager.report().misses) == {"constant changed": 1}


def test_paths_of_early_exit_are_variants_that_dont_meet() -> None:
    layers = [lambda x: x + 1, lambda x: x * 3]
    depth = {"now": 2}

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[: depth["now"]]:
            x = layer(x)
        return x

    manager = manager_of(function)
    for depth["now"] in (1, 2):
        manager.precompile({"x": torch.zeros(3)}, progress=False, variant=f"depth {depth['now']}")
    x = torch.ones(5)
    for _ in range(2):
        assert manager(x=x, variant="depth 1").tolist() == [2.0] * 5
        assert manager(x=x, variant="depth 2").tolist() == [6.0] * 5
    assert manager.report().hits == 4


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a list as index": lambda x: x + x[[0, 1]].sum(),
    "bounds of a slice": lambda x: x + x[: (x > 0).sum()].sum(),
    "python's max": lambda x: x + max(x[0], x[1]),
    "experts by count": lambda x: torch.cat([x[x > 0] * 2, x[x <= 0]]),
    "clipped on the host": lambda x: x * 0.5 if x.norm() > 1 else x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_waits_for_the_device_or_follows_values_is_refused_before_a_gpu_sees_it(name: str) -> None:
    with pytest.raises(CaptureFailedError) as caught:
        captured(REFUSED[name])
    assert isinstance(caught.value.__cause__, NotCapturableError)


def test_hooks_are_python_and_run_on_misses_only() -> None:
    seen = []
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=GRID)
    manager.precompile({"input": torch.zeros(3, 2)}, progress=False)
    module.register_forward_hook(lambda *_: seen.append(1))
    manager(input=torch.zeros(3, 2))
    assert seen == []
    manager(input=torch.zeros(17, 2))
    assert seen == [1]


def test_what_depends_on_being_captured_is_found_by_verify() -> None:
    runs = {"n": 0}

    def function(x: torch.Tensor) -> torch.Tensor:
        runs["n"] += 1
        return x * (2 if runs["n"] == 4 else 1)  # the fourth run of each bucket is recorded

    def once(**options: Any) -> CaptureManager:
        runs["n"] = 0
        manager = CaptureManager(
            function,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
            ignore=("runs",),
            **options,
        )
        return manager.precompile({"x": torch.ones(3)}, progress=False)

    assert once()(x=torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(CaptureFailedError) as caught:
        once(verify=True)
    assert isinstance(caught.value.__cause__, VerificationError)


class Tuner:
    """As a kernel's tuner: waits for each way at the first use of a size, and keeps the best."""

    def __init__(self) -> None:
        self.best: dict[int, object] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in self.best:
            ways = (lambda x: x * 2, lambda x: x + x)
            times = [float(way(x).sum()) for way in ways]
            self.best[x.shape[0]] = ways[times.index(min(times))]
        result: torch.Tensor = self.best[x.shape[0]](x)  # type: ignore[operator]
        return result


@pytest.mark.parametrize("counts", [False, True])
def test_what_is_tuned_at_first_use_is_tuned_before_the_capture(counts: bool) -> None:
    tuner, runs = Tuner(), torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        if counts:
            runs.add_(1)  # put back before each run, which must not put the findings back
        return tuner(x)

    manager = captured(function)
    for n in (3, 8, 16):
        assert manager(x=torch.ones(n)).tolist() == [2.0] * n
    assert manager.report().hits == 3
    assert runs.item() == 3 * counts


def test_small_large_small_calls_that_capture_on_demand_keep_every_graph_and_result() -> None:
    weight = torch.randn(3, 3)
    manager = manager_of(lambda x: torch.relu(x @ weight), on_miss="capture")
    kept = []
    for seed, n in enumerate((3, 7, 16, 2, 6, 15, 1)):
        torch.manual_seed(seed)
        x = torch.randn(n, 3)
        kept.append((manager(x=x), torch.relu(x @ weight)))
    for result, expected in kept:
        torch.testing.assert_close(result, expected)
    report = manager.report()
    assert report.hits == report.calls == 7
    assert [bucket.bucket["n"] for bucket in report.buckets] == [4, 8, 16]


def test_a_capture_on_demand_hides_no_replaced_weight_from_older_graphs() -> None:
    linear = torch.nn.Linear(2, 2).requires_grad_(False)
    manager = manager_of(lambda x: linear(x), on_miss="capture", on_stale="eager")
    small, large = torch.ones(3, 2), torch.ones(7, 2)
    assert torch.equal(manager(x=small), linear(small))
    linear.weight = torch.nn.Parameter(torch.full((2, 2), 5.0), requires_grad=False)
    for x in (large, small):
        assert torch.equal(manager(x=x), linear(x))


def test_a_capture_on_demand_watches_and_keeps_what_only_older_graphs_read() -> None:
    tables = {n: torch.full((1,), float(n)) for n in (4, 8, 16)}
    manager = manager_of(lambda x: x * tables[x.shape[0]], on_miss="capture", on_stale="error", check="always")
    for n in (3, 7):
        assert manager(x=torch.ones(n)).tolist() == [n + 1.0] * n
    tables[4] = torch.full((1,), 40.0)
    with pytest.raises(StaleWeights):
        manager(x=torch.ones(3))


def test_a_capture_on_demand_hides_no_change_of_mode_from_older_graphs() -> None:
    module = torch.nn.Dropout(1.0).eval()
    manager = manager_of(lambda x: module(x), on_miss="capture")
    assert manager(x=torch.ones(3)).tolist() == [1.0] * 3
    module.train()
    for n in (7, 3):
        assert manager(x=torch.ones(n)).tolist() == [0.0] * n


def test_a_capture_on_demand_under_another_autocast_serves_no_call_of_the_first() -> None:
    linear = torch.nn.Linear(2, 2).requires_grad_(False)
    manager = manager_of(lambda x: linear(x), on_miss="capture")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert manager(x=torch.ones(3, 2)).dtype == torch.bfloat16
    for n in (7, 3):
        assert manager(x=torch.ones(n, 2)).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for n in (7, 3):
            assert manager(x=torch.ones(n, 2)).dtype == torch.bfloat16


def test_empty_sequences_and_calls_without_any(graphs: CaptureManager) -> None:
    hits = graphs.report().hits
    dirty = make_call([8, 8], 0, seed=0)
    dirty["x"].fill_(float("nan"))
    for lengths in ([0], [0, 0, 0, 0], [0, 3, 0], [], [5, 0]):
        graphs(**dirty)
        call = make_call(lengths, 0, seed=1)
        assert_same(graphs(**call), segment_means(**call))
    assert graphs.report().hits == hits + 10


def test_more_sequences_than_the_smallest_graph_has_slots_take_a_larger_one_or_miss() -> None:
    grid = BucketGrid(tokens=(8,), batch=(2, 4))
    manager = CaptureManager(segment_means, inputs=SPECS, outputs=OUTPUTS, buckets=grid, on_miss="error")
    manager.precompile(make_call([3, 2], 1, seed=0), progress=False)
    for sequences, bucket in ((2, 2), (3, 4), (4, 4)):
        call = make_call([2] * sequences, 0, seed=2)
        assert manager.explain_call(**call).bucket == Bucket(tokens=8, batch=bucket)
        assert_same(manager(**call), segment_means(**call))
    with pytest.raises(MissError, match="batch=5 is beyond"):
        manager(**make_call([1] * 5, 0, seed=2))


class Measured:
    """`cost_aware`, given other replay times than those that were measured here."""

    name = "measured elsewhere"

    def __init__(self, replay_seconds: float) -> None:
        self.replay_seconds, self.rule = replay_seconds, cost_aware()

    def choose(
        self, sizes: Mapping[str, int], holding: Sequence[Candidate], every: Sequence[Candidate]
    ) -> Choice:
        assert all(c.replay_seconds is not None and c.eager_seconds is not None for c in every)
        slow = [dataclasses.replace(c, replay_seconds=self.replay_seconds) for c in holding]
        return self.rule.choose(sizes, slow, every)


@pytest.mark.parametrize(("replay_seconds", "hits"), [(1e-12, 1), (3600.0, 0)])
def test_a_bucket_that_was_measured_slower_than_eager_isnt_used(replay_seconds: float, hits: int) -> None:
    manager = captured(lambda x: x * 2, policy=Measured(replay_seconds))
    assert manager(x=torch.ones(5)).tolist() == [2.0] * 5
    report = manager.report()
    assert report.hits == hits
    assert dict(report.misses) == ({} if hits else {"eager is faster": 1})


def test_predicted_bytes_are_those_that_a_capture_takes_and_none_are_kept() -> None:
    manager = manager_of(lambda x: x * 2)
    example = {"x": torch.ones(3, 5)}
    assert manager.report().static_bytes == 0
    predicted = manager.predict_bytes(example)
    assert manager.report().static_bytes == 0
    assert not manager.explain_call(**example).hit
    manager.precompile(example, progress=False)
    assert predicted is not None
    assert predicted == manager.report().static_bytes


def test_a_larger_grid_takes_no_more_static_memory_than_its_largest_bucket() -> None:
    sizes = []
    for grid in (BucketGrid(n=(16,)), BucketGrid(n=(2, 4, 6, 8, 10, 12, 14, 16))):
        manager = CaptureManager(lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=grid)
        manager.precompile({"x": torch.ones(3, 64)}, progress=False)
        sizes.append(manager.report().static_bytes)
    assert sizes[0] == sizes[1]
