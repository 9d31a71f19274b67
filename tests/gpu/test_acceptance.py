"""Invariant: on CUDA, faults that graphs are known for don't happen to callers, or fail a capture harmlessly."""

import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CaptureFailedError,
    CaptureManager,
    StaleWeights,
    VerificationError,
    rows,
)
from mmgraph.capture.memory import pool_bytes

pytestmark = pytest.mark.cuda

Function = Callable[[torch.Tensor], torch.Tensor]


def manager_of(fn: Function, *sizes: int, **options: Any) -> CaptureManager:
    grid = BucketGrid(n=sizes or (64,))
    return CaptureManager(fn, inputs={"x": rows("n")}, outputs=rows("n"), buckets=grid, **options)


def captured(fn: Function, x: torch.Tensor, *sizes: int, **options: Any) -> CaptureManager:
    return manager_of(fn, *sizes, **options).precompile({"x": x}, progress=False)


def assert_nothing_was_harmed() -> None:
    torch.manual_seed(1)
    first = torch.rand(8, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    x = torch.ones(50, device="cuda")
    manager = captured(lambda x: torch.nn.functional.dropout(x * 2, 0.5), x)
    assert set(manager(x=x).unique().tolist()) <= {0.0, 4.0}
    manager.close()


# ---- what waits, asks, or draws behind the graph's back


def synchronizes_a_stream() -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        return x * 2

    return function


def synchronizes_an_event() -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return x * 2

    return function


def asks_a_stream() -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().query()
        return x * 2

    return function


def asks_an_event() -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        event = torch.cuda.Event()
        event.record()
        event.query()
        return x * 2

    return function


def waits_for_work_outside() -> Function:
    side = torch.cuda.Stream()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            other = torch.zeros(1, device="cuda") + 1
        torch.cuda.current_stream().wait_stream(side)
        return x + other

    return function


def draws_from_a_generator_of_its_own() -> Function:
    generator = torch.Generator("cuda").manual_seed(3)
    return lambda x: x + torch.rand(x.shape, device="cuda", generator=generator)


def prints() -> Function:
    return lambda x: x + len(str(x))


MUST_FAIL = (
    synchronizes_a_stream,
    synchronizes_an_event,
    asks_a_stream,
    asks_an_event,
    waits_for_work_outside,
    draws_from_a_generator_of_its_own,
    prints,
)


@pytest.mark.parametrize("make", MUST_FAIL, ids=lambda make: make.__name__)
def test_what_waits_or_asks_or_draws_on_the_host_fails_the_capture_and_nothing_else(
    make: Callable[[], Function],
) -> None:
    x = torch.ones(50, device="cuda")
    older = captured(lambda x: x * 3, x)
    state = torch.cuda.get_rng_state()
    with pytest.raises(CaptureFailedError):
        captured(make(), x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert older(x=x).tolist() == [3.0] * 50
    assert_nothing_was_harmed()


def checkpoints_with_the_generators_state(x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    result: torch.Tensor = checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=True)
    return result


def slices_by_values(x: torch.Tensor) -> torch.Tensor:
    end = torch.full((), 3, device="cuda")
    return x + x[:end].sum()


INDEX = [2, 0, 1]
REFUSED_OR_RIGHT: dict[str, Function] = {
    "a list as index": lambda x: x + x[INDEX].sum(),
    "an index on the host": lambda x: x + x[torch.arange(3)].sum(),
    "a number assigned by index": lambda x: x.clone().index_fill_(0, torch.zeros(1, device="cuda").long(), 7.0),
    "bounds of a slice": slices_by_values,
    "a checkpoint": checkpoints_with_the_generators_state,
    "pinned memory": lambda x: x + torch.empty(1 << 20, pin_memory=True).numel(),
}


@pytest.mark.parametrize("name", REFUSED_OR_RIGHT)
def test_what_may_wait_by_version_of_pytorch_is_refused_or_right(name: str) -> None:
    fn = REFUSED_OR_RIGHT[name]
    try:
        manager = captured(fn, torch.ones(64, device="cuda"))
    except CaptureFailedError:
        assert_nothing_was_harmed()
        return
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(64, device="cuda")
        torch.testing.assert_close(manager(x=x), fn(x))
    assert manager.report().hits == 2


# ---- streams


def test_runs_of_a_capture_are_on_a_stream_other_than_the_default() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("on the default stream")
        return x * 2

    manager = captured(function, torch.ones(50, device="cuda"))
    assert manager(x=torch.ones(50, device="cuda")).tolist() == [2.0] * 50


def test_side_streams_that_fork_and_join_are_part_of_the_graph() -> None:
    side, weights = torch.cuda.Stream(), torch.randn(2, 32, 32, device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            left = (x @ weights[0]).relu()
        right = (x @ weights[1]).relu()
        current.wait_stream(side)
        return left + right

    manager = captured(function, torch.ones(3, 32, device="cuda"), 16, 64, verify=True)
    for n in (5, 60, 16):
        x = torch.randn(n, 32, device="cuda")
        expected = (x @ weights[0]).relu() + (x @ weights[1]).relu()
        torch.testing.assert_close(manager(x=x), expected, rtol=1e-3, atol=1e-3)
    assert manager.report().hits == 3


def test_work_on_the_default_stream_is_not_left_out_unnoticed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        y = x + 1
        if not capturing:
            torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.default_stream()):
            z = y * 2
        if not capturing:
            torch.cuda.synchronize()
        return z

    try:
        manager = captured(function, torch.ones(64, device="cuda"), verify=True)
    except CaptureFailedError:
        assert_nothing_was_harmed()
        return
    x = torch.randn(64, device="cuda")
    assert torch.equal(manager(x=x), (x + 1) * 2)


def test_what_depends_on_being_captured_is_found_by_verify() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if torch.cuda.is_current_stream_capturing() else 2)

    with pytest.raises(CaptureFailedError) as caught:
        captured(function, torch.ones(50, device="cuda"), verify=True)
    assert isinstance(caught.value.__cause__, VerificationError)


def test_another_thread_may_ask_events_and_pin_memory_during_captures() -> None:
    stop, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            stream, size = torch.cuda.Stream(), 1 << 12
            while not stop.is_set():
                size = size * 2 if size < 1 << 22 else 1 << 12
                with torch.cuda.stream(stream):
                    pinned = torch.empty(size, pin_memory=True).fill_(1)
                    there = pinned.to("cuda", non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                while not event.query():
                    stream.query()
                if there.sum().item() != size:
                    raise AssertionError("the copy is not what was copied")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        x = torch.randn(40, 16, device="cuda")
        for _ in range(3):
            manager = captured(lambda x: (x @ x.T).relu() @ x, x, 16, 32, 64)
            torch.testing.assert_close(manager(x=x), (x @ x.T).relu() @ x, rtol=1e-3, atol=1e-2)
            manager.close()
    finally:
        stop.set()
        thread.join()
    assert errors == []


# ---- first use

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def scaled(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * 3, at < n)


tuned = triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 1024})], key=["n"])(scaled)
"""


def kernels(folder: Path) -> ModuleType:
    """Kernels that nobody has run yet."""
    file = folder / "kernels_of_a_test.py"
    file.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("counts", [False, True], ids=["without state", "with state"])
@pytest.mark.parametrize("name", ["scaled", "tuned"])
def test_kernels_compile_and_tune_before_the_capture_that_first_uses_them(
    name: str, counts: bool, tmp_path: Path
) -> None:
    kernel, runs = getattr(kernels(tmp_path), name), torch.zeros((), device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        if counts:
            runs.add_(1)  # put back before each run, which must not put the tuner's findings back
        y = torch.empty_like(x)
        grid = (lambda meta: (-(-x.numel() // meta["BLOCK"]),)) if name == "tuned" else (-(-x.numel() // 64),)
        kernel[grid](x, y, x.numel(), **({} if name == "tuned" else {"BLOCK": 64}))
        return y

    manager = captured(function, torch.ones(5, device="cuda"), 64, 4096)
    for n in (3, 64, 4000):
        x = torch.randn(n, device="cuda")
        assert torch.equal(manager(x=x), x * 3)
    assert manager.report().hits == 3
    assert runs.item() == 3 * counts


# ---- workspaces and memory


def crowd() -> list[torch.Tensor]:
    """Takes the memory that PyTorch gave back, in blocks of several sizes, all sevens."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = [32 << 20] * 16 + [12 << 20] * 16 + [2 << 20] * 32
    return [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes]


def in_a_thread(work: Callable[[], object]) -> None:
    errors = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


class Products:
    """Products whose inner length is so much larger than the others that the library splits it, in its workspace."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(32768, 64, device="cuda", dtype=dtype) / 64
        self.x = torch.randn(50, 32768, device="cuda", dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


WORKSPACES = ("cleared", "a graph was evicted", "another manager was closed", "the thread has ended")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("what", WORKSPACES)
def test_a_graphs_workspace_is_its_own_whatever_becomes_of_pytorchs(what: str, dtype: torch.dtype) -> None:
    products = Products(dtype)
    manager = manager_of(products, 64, 128)
    capture = lambda: manager.precompile({"x": products.x}, progress=False)  # noqa: E731
    if what == "the thread has ended":
        in_a_thread(capture)
    else:
        capture()
    expected = manager(x=products.x).clone()
    torch.testing.assert_close(expected.float(), products(products.x).float(), rtol=5e-2, atol=5e-2)
    if what == "cleared":
        torch._C._cuda_clearCublasWorkspaces()
    elif what == "a graph was evicted":
        assert manager.evict(Bucket(n=128))
    elif what == "another manager was closed":
        captured(products, products.x, 64).close()
    else:
        in_a_thread(lambda: products(products.x))  # takes over the handle of the thread that ended
        torch._C._cuda_clearCublasWorkspaces()
    blocks = crowd()
    for _ in range(3):
        got = manager(x=products.x)
        products(products.x)  # an eager product between, in PyTorch's workspace
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(bool((block == 7).all()) for block in blocks)
    assert manager.report().hits == 4


def test_memory_is_level_over_captures_evictions_and_closings() -> None:
    products, levels = Products(torch.bfloat16), []
    for _ in range(5):
        for _ in range(3):
            manager = captured(products, products.x, 64, 128)
            manager(x=products.x)
            manager.evict(Bucket(n=64))
            manager.precompile({"x": products.x}, progress=False)
            manager.evict(Bucket(n=128))
            manager.close()
        del manager
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        levels.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert levels[-1][0] == levels[1][0]
    assert levels[-1][1] - levels[1][1] <= 2 << 20


def test_small_large_small_calls_that_capture_on_demand_keep_every_graph_and_result() -> None:
    weight = torch.randn(256, 256, device="cuda")
    manager = manager_of(lambda x: torch.relu(x @ weight), 8, 64, 512, on_miss="capture")
    kept = []
    for seed, n in enumerate((5, 60, 7, 500, 3, 64, 512, 1, 0)):
        torch.manual_seed(seed)
        x = torch.randn(n, 256, device="cuda")
        kept.append((manager(x=x), torch.relu(x @ weight)))
        manager.poison()
        blocks = crowd()
        del blocks
    for result, expected in kept:
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    report = manager.report()
    assert report.hits == report.calls == len(kept)
    assert [bucket.bucket["n"] for bucket in report.buckets] == [8, 64, 512]


def test_a_replaced_weight_is_noticed_and_its_memory_is_not_recycled_under_the_graph() -> None:
    module = torch.nn.Linear(64, 64, bias=False).cuda().requires_grad_(False)
    x = torch.randn(50, 64, device="cuda")
    for on_stale in ("error", "recapture"):
        manager = captured(lambda x: module(x), x, on_stale=on_stale)
        torch.testing.assert_close(manager(x=x), module(x), rtol=1e-3, atol=1e-3)
        module.load_state_dict({"weight": torch.randn(64, 64, device="cuda")}, assign=True)
        if on_stale == "error":
            with pytest.raises(StaleWeights, match="weight"):
                manager(x=x)
        else:
            torch.testing.assert_close(manager(x=x), module(x), rtol=1e-3, atol=1e-3)
            assert manager.report().hits == 2


def test_pinned_memory_that_the_function_holds_is_read_at_each_replay_and_kept() -> None:
    held = {"scale": torch.full((1,), 2.0).pin_memory()}
    manager = captured(lambda x: x * held["scale"].to("cuda", non_blocking=True), torch.ones(50, device="cuda"))
    x = torch.ones(50, device="cuda")
    assert manager(x=x).tolist() == [2.0] * 50
    held["scale"].fill_(5.0)
    assert manager(x=x).tolist() == [5.0] * 50


SEGMENTS = """
import gc
import sys
import torch
from mmgraph.capture import BucketGrid, CaptureFailedError, CaptureManager, rows

expandable = sys.argv[1] == "True"
weight = torch.randn(1024, 1024, device="cuda")


def function(x):
    for _ in range(3):
        x = (x @ weight).relu() / 16
    return x


def manager_of(fn):
    grid = BucketGrid(n=(64, 256, 1024))
    return CaptureManager(fn, inputs={"x": rows("n")}, outputs=rows("n"), buckets=grid)


def assert_right(manager):
    for n in (1000, 30, 200, 1, 1024):
        x = torch.randn(n, 1024, device="cuda")
        manager.poison()
        torch.testing.assert_close(manager(x=x), function(x), rtol=1e-2, atol=1e-2)


example = {"x": torch.randn(100, 1024, device="cuda")}
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()) == expandable
manager = manager_of(function).precompile(example, progress=False)
assert_right(manager)
levels = []
for _ in range(4):
    try:
        manager_of(lambda x: x * x.sum().item()).precompile(example, progress=False)
    except CaptureFailedError:
        pass
    else:
        raise AssertionError("captured a wait for the device")
    assert_right(manager)
    manager.precompile(example, progress=False)
    assert_right(manager)
    manager.suspend()
    blocks = [torch.full((8 << 20,), 1.0, device="cuda") for _ in range(8)]
    manager.resume()
    assert_right(manager)
    assert all(bool((block == 1).all()) for block in blocks)
    del blocks
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    levels.append(torch.cuda.memory_reserved())
assert levels[-1] - levels[0] <= 4 << 20, levels
assert not manager.report().misses, manager.report().misses
manager.close()
torch.randn(4, device="cuda")
print("done")
"""


@pytest.mark.parametrize("expandable", [True, False])
def test_capture_failure_recapture_and_replay_with_either_kind_of_segments(
    expandable: bool, pytestconfig: pytest.Config
) -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    finish([start([SEGMENTS, str(expandable)], pytestconfig, settings)])


# ---- process groups

GROUP = """
import sys
import torch
import torch.distributed as dist
from mmgraph.capture import BucketGrid, CaptureManager, rows

rank, world, store, order = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)


def function(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def input_of(rank, step, n):
    return torch.arange(float(n), device=device) + 10 * rank + 100 * step


manager = CaptureManager(
    function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(64, 256))
)
manager.precompile({"x": input_of(rank, 0, 50)}, progress=False)
for step, n in enumerate((50, 200, 64, 1)):
    expected = sum(2 * input_of(other, step, n) for other in range(world)) + 1
    assert torch.equal(manager(x=input_of(rank, step, n)), expected), (rank, step)
assert manager.report().hits == 4
torch.cuda.synchronize()
dist.barrier()
if order == "graphs first":
    manager.close()
    dist.destroy_process_group()
elif order == "process group first":
    dist.destroy_process_group()
    manager.close()
elif order == "process group alone":
    dist.destroy_process_group()
torch.randn(4, device=device)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("order", ["graphs first", "process group first", "process group alone"])
def test_graphs_and_the_process_group_of_their_collectives_may_go_in_any_order(
    order: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    finish([start([GROUP, "0", "1", str(tmp_path / "store"), order], pytestconfig)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device")
def test_a_captured_all_reduce_over_two_gpus_sums_what_each_replay_is_given(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    # NCCL waits for the graphs of a communicator of several ranks before it ends it: they go first.
    arguments = ["2", str(tmp_path / "store"), "graphs first"]
    finish([start([GROUP, str(rank), *arguments], pytestconfig) for rank in range(2)])


def start(
    arguments: list[str], config: pytest.Config, settings: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Runs a script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=config.rootpath,
        env={**os.environ, **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Each must end by itself, and say so; a hang is a failure."""
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.rstrip().endswith("done"), output


def test_pools_whose_numbers_python_counts_keep_them() -> None:
    """PyTorch's snapshot of a pool takes references that aren't its own; numbers above 256 would be freed by it."""
    handle = torch.cuda.graph_pool_handle()
    while handle[1] <= 256:
        handle = torch.cuda.graph_pool_handle()
    before = sys.getrefcount(handle[1])
    for _ in range(20):
        pool_bytes(handle)
    after = sys.getrefcount(handle[1])
    assert after == before
