"""Invariant: leases, variants, bounds, misses and stale weights behave on CUDA graphs as they do on the recorder."""

import threading

import pytest
import torch
from manager_features import CHECKS, doubled, ramp

from mmgraph.capture import BucketGrid, CaptureError, CaptureManager, rows
from mmgraph.capture.ring import _SLOTS

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", CHECKS)
def test_feature(name: str) -> None:
    CHECKS[name](DEVICE)


def test_calls_may_run_ahead_of_the_device_by_more_than_the_ring_has_slots() -> None:
    manager = doubled(DEVICE)
    xs = [ramp(n % 16 + 1, DEVICE, n) for n in range(50)]
    kept = []
    for step in range(2 * _SLOTS + 100):
        if step % 1500 == 0:
            torch.cuda._sleep(20_000_000)  # the host gets ahead
        result = manager(x=xs[step % 50])
        if step % 41 == 0:
            kept.append((step % 50, result))
    for index, result in kept:
        assert torch.equal(result["y"], xs[index] * 2)
        assert torch.equal(result["z"][0], xs[index] + 1)


def test_a_graph_replayed_past_the_manager_is_noticed() -> None:
    manager = doubled(DEVICE)
    assert torch.equal(manager(x=ramp(3, DEVICE))["y"], ramp(3, DEVICE) * 2)
    next(iter(manager._core.store.variants[None].graphs.values())).graph.graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="past it"):
        manager(x=ramp(3, DEVICE))
    manager.precompile({"x": ramp(3, DEVICE)}, progress=False)
    assert torch.equal(manager(x=ramp(3, DEVICE))["y"], ramp(3, DEVICE) * 2)


def test_each_call_waits_for_the_one_before_on_another_stream() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.cuda._sleep(3_000_000)
        return y + x

    manager = CaptureManager(slow, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 16)))
    manager.precompile({"x": ramp(3, DEVICE)}, progress=False)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for step in range(30):
        x = ramp(step % 16 + 1, DEVICE, step)
        stream = streams[step % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append((x, manager(x=x)))
    torch.cuda.synchronize()
    for x, result in results:
        assert torch.equal(result, x * 3)


def test_a_lease_is_not_overwritten_while_another_stream_reads_it() -> None:
    manager = doubled(DEVICE)
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(10):
        x = ramp(16, DEVICE, step)
        torch.cuda.synchronize()
        with torch.cuda.stream(reader):
            lease = manager.lease(x=x)
            value = lease.get()["y"]
            torch.cuda._sleep(5_000_000)
            read = value.clone()
            if step % 2:
                lease.release()
        with torch.cuda.stream(writer):
            manager.lease(x=ramp(16, DEVICE, -7.0))
        torch.cuda.synchronize()
        assert torch.equal(read, x * 2)


def test_library_workspaces_are_nobody_elses() -> None:
    weight = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(512, device=DEVICE, dtype=torch.bfloat16)

    def captured() -> CaptureManager:
        manager = CaptureManager(
            lambda x: torch.addmm(bias, x @ weight, weight),
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(256, 2048)),
        )
        return manager.precompile(
            {"x": torch.randn(9, 512, device=DEVICE, dtype=torch.bfloat16)}, progress=False
        )

    manager, other = captured(), captured()
    x = torch.randn(2048, 512, device=DEVICE, dtype=torch.bfloat16)
    expected = manager(x=x)
    other.close()  # takes its graphs' workspaces with it
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's own graphs do
    torch.cuda.empty_cache()
    fill = [torch.full((16 << 20,), float("nan"), device=DEVICE) for _ in range(8)]
    for _ in range(3):
        assert torch.equal(manager(x=x), expected)
    assert all(tensor.isnan().all() for tensor in fill)  # nor does a replay write into what is somebody's now


def test_a_capture_on_a_thread_that_ends_leaves_its_graphs_usable() -> None:
    weight = torch.randn(256, 256, device=DEVICE)
    manager = CaptureManager(
        lambda x: x @ weight, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(64, 128))
    )
    x = torch.randn(100, 256, device=DEVICE)
    thread = threading.Thread(target=lambda: manager.precompile({"x": x}, progress=False))
    thread.start()
    thread.join()
    expected = manager(x=x)
    other = threading.Thread(target=lambda: (x @ weight).sum().item())
    other.start()
    other.join()
    torch.cuda.empty_cache()
    assert torch.equal(manager(x=x), expected)
    torch.testing.assert_close(expected, x @ weight, rtol=1e-3, atol=1e-2)


def test_predicted_bytes_are_what_a_capture_takes() -> None:
    for layers, width, sizes in [(4, 512, (64, 1024)), (8, 1024, (256, 512, 4096))]:
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, device=DEVICE) for _ in range(layers)])
        manager = CaptureManager(
            model, inputs={"input": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=sizes)
        )
        example = {"input": torch.randn(9, width, device=DEVICE)}
        predicted = manager.predict_bytes(example)
        report = manager.precompile(example, progress=False).report()
        assert predicted is not None
        assert abs(predicted / (report.static_bytes + report.pool_bytes) - 1) <= 0.15


def test_a_graph_is_captured_in_the_place_of_the_only_one_of_its_pool() -> None:
    """PyTorch refuses a pool whose graphs are all gone, and leaves the generator in a capture then."""
    manager = CaptureManager(
        lambda x: torch.nn.functional.dropout(x, 0.5),
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4, 8)),
        on_miss="capture",
        max_graphs=1,
    )
    for n in (7, 3, 8, 2):
        for variant in (None, "b"):
            assert manager(x=ramp(n, DEVICE), variant=variant).shape == (n, 2)
    torch.rand(2, device=DEVICE)
    report = manager.report()
    assert (report.hits, report.misses) == (8, {})
