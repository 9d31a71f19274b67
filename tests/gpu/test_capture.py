"""Invariant: a replay gives what the function gives, whatever lies in the pool; a failed capture harms nothing."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmgraph.ops
from mmgraph.capture import (
    Bucket,
    BucketGrid,
    CaptureFailedError,
    CaptureManager,
    bucket_size,
    offsets,
    rows,
    static,
)

pytestmark = pytest.mark.cuda

HEADS, WIDTH = 2, 32


class Block(torch.nn.Module):
    """Projection, variable-length attention, projection, and a merger of two rows into one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.out = torch.nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.merge = torch.nn.Linear(2 * HEADS * WIDTH, 8)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> dict[str, Any]:
        self.runs += 1
        q, k, v = self.qkv(x).view(-1, 3, HEADS, WIDTH).unbind(1)
        attended = mmgraph.ops.varlen_attention(q, k, v, cu_seqlens, max_seqlen)
        y = x + self.out(attended.reshape(x.shape))
        return {"main": self.merge(y.view(-1, 2 * HEADS * WIDTH)), "deep": [y]}


def make_call(lengths: list[int], tail: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    tokens += tokens % 2
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(tokens, HEADS * WIDTH, generator=generator)
    return {"x": x.to("cuda", torch.bfloat16), "cu_seqlens": cu.cuda(), "max_seqlen": max([*lengths, 1])}


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    # Padding changes the tiles that the products are cut into, so sums may be taken in another order.
    torch.testing.assert_close(got["main"], expected["main"], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got["deep"][0], expected["deep"][0], rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module")
def block() -> Block:
    return Block().cuda().to(torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def graphs(block: Block) -> CaptureManager:
    grid = BucketGrid(tokens=(64, 256, 1024), batch=(4, 16), seqlen=(64, 512))
    manager = CaptureManager(
        block,
        inputs={
            "x": rows("tokens"),
            "cu_seqlens": offsets("batch", of="tokens"),
            "max_seqlen": bucket_size("seqlen"),
        },
        outputs={"main": rows("tokens", per=2), "deep": [rows("tokens")]},
        buckets=grid,
    )
    assert Bucket(tokens=64, batch=4, seqlen=512) in [d.bucket for d in grid.dropped]
    manager.precompile(example=make_call([20, 30], 0, seed=0), progress=False)
    assert manager.report().backend == "cuda graphs"
    return manager


def test_replays_follow_changed_values_and_changed_boundaries(graphs: CaptureManager, block: Block) -> None:
    hits = graphs.report().hits
    kept = []
    for seed, lengths in enumerate(
        [[30, 20], [20, 30], [50], [1, 0, 49], [0, 0], [10, 10, 10], [64], [100, 28], [7] * 16]
    ):
        call = make_call(lengths, 0, seed)
        kept.append((call, graphs(**call)))
    for call, result in kept:
        assert_close(result, block(**call))
    assert graphs.report().hits == hits + len(kept)


def test_a_replay_equals_eager_on_the_same_padded_input_to_the_bit(
    graphs: CaptureManager, block: Block
) -> None:
    call = make_call([33, 20], 1, seed=5)
    padded = {
        "x": torch.cat([call["x"], call["x"].new_zeros(10, HEADS * WIDTH)]),
        "cu_seqlens": torch.cat([call["cu_seqlens"], call["cu_seqlens"][-1:].expand(2)]),
        "max_seqlen": 64,
    }
    got, expected = graphs(**call), block(**padded)
    assert torch.equal(got["main"], expected["main"][:27])
    assert torch.equal(got["deep"][0], expected["deep"][0][:54])


def test_two_buckets_in_one_pool_poisoned_with_nan(graphs: CaptureManager) -> None:
    small, large = make_call([20, 30], 0, seed=1), make_call([300, 200, 400], 0, seed=2)
    clean = [graphs(**small), graphs(**large)]
    assert graphs.report().pool_bytes > 0
    for _ in range(3):
        for call, expected in zip((small, large, small), (*clean, clean[0]), strict=True):
            graphs.poison()
            got = graphs(**call)
            assert torch.equal(got["main"], expected["main"])
            assert torch.equal(got["deep"][0], expected["deep"][0])


def test_nan_in_an_earlier_call_never_reaches_a_later_one(graphs: CaptureManager, block: Block) -> None:
    dirty = make_call([64], 0, seed=3)
    dirty["x"].fill_(float("nan"))
    graphs(**dirty)
    clean = make_call([33], 0, seed=4)
    result = graphs(**clean)
    assert not result["deep"][0].isnan().any()
    assert_close(result, block(**clean))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 70), max_size=17), st.integers(0, 5), st.integers(0, 2**31))
def test_any_lengths(graphs: CaptureManager, block: Block, lengths: list[int], tail: int, seed: int) -> None:
    call = make_call(lengths, tail, seed)
    graphs.poison()
    assert_close(graphs(**call), block(**call))


def test_no_call_waits_for_the_device(graphs: CaptureManager, block: Block) -> None:
    call = make_call([20, 30], 0, seed=6)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = graphs(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(result, block(**call))


def test_state_ends_as_after_the_calls_made(block: Block) -> None:
    before, seed = block.runs.clone(), torch.cuda.get_rng_state()
    manager = CaptureManager(
        lambda x: block(
            x, torch.full((2,), x.shape[0], dtype=torch.int32, device="cuda").cumsum(0).int() - x.shape[0], 64
        ),
        inputs={"x": rows("tokens")},
        outputs={"main": rows("tokens", per=2), "deep": [rows("tokens")]},
        buckets=BucketGrid(tokens=(32, 64)),
    )
    manager.precompile({"x": make_call([8], 0, 0)["x"]}, progress=False)
    assert torch.equal(block.runs, before)
    assert torch.equal(torch.cuda.get_rng_state(), seed)
    manager(x=make_call([8], 0, 0)["x"])
    assert block.runs == before + 1


def test_dropout_differs_between_replays_and_follows_the_seed() -> None:
    manager = CaptureManager(
        lambda x: torch.nn.functional.dropout(x, 0.5),
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(64,)),
    )
    x = torch.ones(50, device="cuda")
    manager.precompile({"x": x}, progress=False)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append([manager(x=x), manager(x=x)])
    assert not torch.equal(*draws[0])
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_any_thread_and_stream_may_call(graphs: CaptureManager, block: Block) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(10):
                call = make_call([seed * 7 % 50 + 1, step], 0, seed=seed * 100 + step)
                got, expected = graphs(**call), block(**call)
                if not torch.allclose(
                    got["deep"][0].float(), expected["deep"][0].float(), rtol=2e-2, atol=2e-2
                ):
                    failures.append(f"thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_another_thread_may_work_on_the_device_during_a_capture(block: Block) -> None:
    stop, generator = threading.Event(), torch.Generator("cuda")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                # A generator of its own: PyTorch lets nobody draw from the default one during a capture.
                x = torch.randn(256, 256, device="cuda", generator=generator)
                float((x @ x).sum())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        manager = CaptureManager(
            lambda x: (x @ x.T).relu() @ x,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(32, 64, 128, 256)),
        )
        manager.precompile({"x": torch.randn(16, 16, device="cuda")}, progress=False)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    x = torch.randn(40, 16, device="cuda")
    torch.testing.assert_close(manager(x=x), (x @ x.T).relu() @ x, rtol=1e-3, atol=1e-2)


def test_garbage_with_graphs_in_it_is_not_collected_during_a_capture() -> None:
    def captured() -> CaptureManager:
        manager = CaptureManager(
            lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
        )
        return manager.precompile({"x": torch.zeros(3, device="cuda")}, progress=False)

    class Cycle:
        pass

    def make_garbage() -> None:
        cycle = Cycle()
        cycle.me, cycle.graph = cycle, captured()  # type: ignore[attr-defined]

    def allocates_much(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            [[] for _ in range(200_000)]
        return x + 1

    make_garbage()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        manager = CaptureManager(
            allocates_much, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
        )
        manager.precompile({"x": torch.zeros(3, device="cuda")}, progress=False)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
    assert manager(x=torch.ones(3, device="cuda")).tolist() == [2.0] * 3


def unjoined(x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sin()
    return x


def raises_while_capturing(x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("by the user")
    return x * 2


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    return x * 2


def synchronises(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x * 2


FAILURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x + x.nonzero().sum(),
    "mask": lambda x: x + x[x > 0].sum(),
    "random then item": lambda x: x + torch.rand(8, device="cuda").sum().item(),
    "python data": lambda x: x + torch.tensor([1.0], device="cuda"),
    "pageable copy": lambda x: x + torch.ones(1).cuda(),
    "to the host": lambda x: x + x.cpu().cuda(),
    "synchronize": synchronises,
    "exception": raises_while_capturing,
    "out of memory": out_of_memory,
    "unjoined stream": unjoined,
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_capture_leaves_the_process_as_it_was(name: str, graphs: CaptureManager, block: Block) -> None:
    call = make_call([20, 30], 0, seed=9)
    expected = graphs(**call)
    state, enabled = torch.cuda.get_rng_state(), gc.isenabled()
    failing = CaptureManager(
        FAILURES[name],
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(64,)),
    )
    x = torch.ones(50, device="cuda")

    def attempt() -> None:
        with pytest.raises(CaptureFailedError, match=r"Bucket\(n=64\)") as caught:
            failing.precompile({"x": x}, progress=False)
        assert caught.value.__cause__ is not None

    older = CaptureManager(
        lambda x: torch.nn.functional.dropout(x, 0.5),
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(64,)),
    )
    older.precompile({"x": x}, progress=False)
    attempt()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    # a graph with random numbers in it that was captured before follows the seed, and draws anew
    torch.manual_seed(7)
    drawn = [older(x=x), older(x=x)]
    torch.manual_seed(7)
    assert torch.equal(older(x=x), drawn[0])
    assert not torch.equal(drawn[0], drawn[1])
    older.close()
    torch.cuda.set_rng_state(state)
    assert gc.isenabled() is enabled
    # random numbers on the device, with and without a seed
    torch.randn(4, device="cuda")
    torch.manual_seed(1)
    first = torch.randn(4, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.randn(4, device="cuda"), first)
    # an old graph
    assert torch.equal(graphs(**call)["main"], expected["main"])
    # a new capture, with random numbers in it
    fresh = CaptureManager(
        lambda x: torch.nn.functional.dropout(x * 2, 0.5),
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(64,)),
    )
    fresh.precompile({"x": x}, progress=False)
    assert set(fresh(x=x).unique().tolist()) <= {0.0, 4.0}
    fresh.close()
    # memory is level over further failures
    del fresh
    levels = []
    for _ in range(4):
        for _ in range(3):
            attempt()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        levels.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    # A leak would be at least a segment of 2 MiB for each of the 9 failures since the first level.
    assert levels[3][0] == levels[0][0]
    assert levels[3][1] - levels[0][1] <= 2 << 20
    # memory marked for another stream is given back
    side = torch.cuda.Stream()
    allocated = torch.cuda.memory_allocated()
    marked = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    marked.record_stream(side)
    del marked
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - allocated < 1 << 20


def test_memory_is_the_largest_buckets_and_level_over_recaptures() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 1.5).relu()
        return x

    def captured(sizes: tuple[int, ...]) -> CaptureManager:
        manager = CaptureManager(
            function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=sizes)
        )
        return manager.precompile({"x": torch.zeros(8, 1024, device="cuda")}, progress=False)

    largest = captured((8192,)).report()
    every = captured((256, 512, 1024, 2048, 4096, 8192)).report()
    assert every.static_bytes == largest.static_bytes
    assert every.pool_bytes <= 1.15 * largest.pool_bytes

    manager = captured((256, 512, 1024))
    example = {"x": torch.zeros(8, 1024, device="cuda")}
    levels = []
    for _ in range(5):
        manager.precompile(example, progress=False)
        gc.collect()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_reserved())
    assert levels[-1] - levels[0] <= 2 << 20


def test_static_inputs_and_integers_on_the_device() -> None:
    manager = CaptureManager(
        lambda table, index: table[index],
        inputs={"table": static(), "index": rows("n", fill=3)},
        outputs=rows("n"),
        buckets=BucketGrid(n=(16, 64)),
    )
    manager.precompile(
        {"table": torch.zeros(4, 2, device="cuda"), "index": torch.tensor([0, 1], device="cuda")},
        progress=False,
    )
    for seed in range(3):
        torch.manual_seed(seed)
        table, index = torch.randn(4, 2, device="cuda"), torch.randint(0, 4, (20 + seed,), device="cuda")
        assert torch.equal(manager(table=table, index=index), table[index])


def test_a_call_inside_the_users_own_capture_becomes_part_of_it(graphs: CaptureManager, block: Block) -> None:
    call = make_call([20, 30], 0, seed=11)
    expected = block(**call)
    graph, pool_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=pool_stream, capture_error_mode="thread_local"):
        result = graphs(**call)
    call["x"].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(result["main"], expected["main"])
    assert torch.equal(result["main"], block(**call)["main"])


def test_a_compiled_function_is_captured_as_it_is_compiled() -> None:
    state = torch.zeros((), device="cuda")
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 64).cuda().requires_grad_(False)

    @torch.compile(dynamic=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return torch.nn.functional.gelu(linear(x)) * 2 + state

    manager = CaptureManager(
        function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(32, 64, 128))
    )
    x = torch.randn(50, 64, device="cuda")
    manager.precompile({"x": x}, progress=False)
    assert state == 0
    for step, n in enumerate((50, 20, 100), start=1):
        x = torch.randn(n, 64, device="cuda")
        expected = torch.nn.functional.gelu(linear(x)) * 2 + step
        torch.testing.assert_close(manager(x=x), expected, rtol=1e-3, atol=1e-3)
    assert manager.report().hits == 3
