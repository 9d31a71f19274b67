"""Invariant: captures, closing, threads, modes and other graphs around a manager leave its results right."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from segments import make_call, segment_means

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CaptureFailedError,
    CaptureManager,
    NotCapturableError,
    SpecError,
    bucket_size,
    offsets,
    rows,
)


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


def test_a_capture_under_autocast_serves_calls_under_autocast() -> None:
    module = torch.nn.Linear(4, 4)
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        manager.precompile({"input": torch.zeros(3, 4)}, progress=False)
        assert manager(input=x).dtype == torch.bfloat16
        with torch.no_grad():
            module.weight.mul_(2)
            torch.testing.assert_close(manager(input=x), module(x), rtol=1e-2, atol=1e-2)
    assert manager.report().hits == 2
    assert manager(input=x).dtype == torch.float32


def test_captures_from_several_threads_and_calls_between_them_never_overlap() -> None:
    running, overlaps = threading.Lock(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not running.acquire(blocking=False):
            overlaps.append(1)
            return x * 2
        try:
            return (x * 2).abs()
        finally:
            running.release()

    managers = [
        CaptureManager(function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
        for _ in range(3)
    ]
    results: list[list[float]] = []

    def work(manager: CaptureManager) -> None:
        manager.precompile({"x": torch.zeros(3)}, progress=False)
        results.append(manager(x=torch.ones(3)).tolist())

    threads = [threading.Thread(target=work, args=(manager,)) for manager in managers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert results == [[2.0] * 3] * 6


def test_closed_managers_let_go_of_everything() -> None:
    manager = CaptureManager(
        lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    example = torch.zeros(3)
    manager.precompile({"x": example}, progress=False)
    gone = weakref.ref(example)
    del example
    gc.collect()
    assert gone() is None
    static = [weakref.ref(tensor) for tensor in manager._core.store.generations[0].inputs.storages]
    manager.close()
    gc.collect()
    assert [ref() for ref in static] == [None]


def test_example_offsets_are_no_longer_than_the_buckets_longest_sequence() -> None:
    seen: list[tuple[int, int]] = []

    def function(x: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        if not seen or seen[-1] != (longest, -1):
            lengths = cu.detach().clone()
            seen.append((longest, int(np.diff(np.asarray(lengths)).max()) if len(seen) % 4 != 3 else 0))
        return x * 1

    grid = BucketGrid(tokens=(16,), batch=(2,), seqlen=(4, 16))
    manager = CaptureManager(
        function,
        inputs={"x": rows("tokens"), "cu": offsets("batch", of="tokens"), "longest": bucket_size("seqlen")},
        outputs=rows("tokens"),
        buckets=grid,
    )
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    manager.precompile({"x": torch.zeros(5), "cu": cu, "longest": 3}, progress=False)
    assert seen
    assert all(length <= longest for longest, length in seen)


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

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend)
    def caller(x: torch.Tensor) -> torch.Tensor:
        return manager(x=x + 1) + 1

    assert caller(torch.ones(3)).tolist() == [5.0] * 3
    assert manager.report().hits == 1
    assert len(graphs) == 2  # what stands before the call and what stands behind it


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
