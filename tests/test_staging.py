"""Invariant: whatever a feature's form, and however late a device is, what the compute stream reads is the feature.

The device is simulated: work is done late, in any legal order; see ``simulated_cuda``. Each way to be careless is
also tried, and must be found out.
"""

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import (
    DEVICE,
    HastyLane,
    SimulatedLane,
    UnmarkedLane,
    UnwaitedLane,
    World,
)

from mmgraph import lane as lanes
from mmgraph.errors import FeatureError, OptionError
from mmgraph.staging import FeatureMover, is_staged, settled

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64, torch.float64)


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=generator).to(dtype)


def dressed(source: torch.Tensor, form: str, world: World) -> torch.Tensor:
    if form == "transposed":
        return source.t().contiguous().t()
    if form == "every other":
        return torch.stack([source, source], dim=-1)[..., 0]
    if form == "expanded":
        return source[:1].expand(source.shape)
    if form == "parameter":
        return torch.nn.Parameter(source, requires_grad=False)
    if form == "inner":
        return torch.cat([source[:1], source])[1:]
    if form == "conjugate":
        return source.conj()
    return world.pinned(source) if form == "pinned" else source


FORMS = ("plain", "transposed", "every other", "expanded", "parameter", "inner", "conjugate", "pinned")


def batches(world: World, lane: SimulatedLane, seed: int, *, buffer_bytes: int = 1024) -> FeatureMover:
    """Move batch after batch, read each by a kernel, and let go of it at once."""
    mover = FeatureMover(lane=lambda device: lane, buffer_bytes=buffer_bytes)
    for step in range(12):
        sources = []
        for number in range(world.rng.randrange(1, 5)):
            shape = (world.rng.choice([0, 1, 3, 8, 40]), world.rng.choice([1, 7, 16]))
            dtype = world.rng.choice(DTYPES)
            sources.append(
                dressed(values(dtype, shape, seed + 7 * step + number), world.rng.choice(FORMS), world)
            )
        expected = [source.clone() for source in sources]
        moved = mover.move(sources, DEVICE)
        del sources
        for number, (copy, wanted) in enumerate(zip(moved, expected, strict=True)):
            assert (copy.shape, copy.dtype) == (wanted.shape, wanted.dtype)
            world.kernel(copy, wanted, f"batch {step}, tensor {number}")
        del moved, copy
    world.drain()
    return mover


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**20),
    eager=st.sampled_from([0.0, 0.3, 0.8]),
    ahead=st.sampled_from([None, "side", "compute"]),
)
def test_what_is_read_is_the_feature(seed: int, eager: float, ahead: str | None) -> None:
    world = World(seed, eager=eager, ahead=ahead)
    batches(world, SimulatedLane(world), seed)
    assert world.reads > 10
    assert world.wrong == []


CARELESS = {
    "compute does not wait": (UnwaitedLane, {"ahead": "compute"}),
    "memory is not marked": (UnmarkedLane, {"ahead": "side"}),
    "a buffer is written again too early": (HastyLane, {"ahead": "compute"}),
}


@pytest.mark.parametrize("kind", CARELESS)
def test_the_simulation_finds_what_is_careless(kind: str) -> None:
    lane, order = CARELESS[kind]
    for careless in (True, False):
        world = World(1, eager=0.0, **order)
        batches(world, (lane if careless else SimulatedLane)(world), 1)
        assert bool(world.wrong) is careless


def test_a_pinned_source_lives_until_its_copy_has_ended() -> None:
    for careless in (True, False):
        world = World(0, eager=0.0)
        lane = HastyLane(world) if careless else SimulatedLane(world)
        mover = FeatureMover(lane=lambda device, lane=lane: lane)
        source = world.pinned(torch.ones(6, 4))
        [copy] = mover.move([source], DEVICE)
        world.kernel(copy, torch.ones(6, 4), "pinned")
        del source
        mover.move([torch.zeros(1)], DEVICE)  # lets go of what has ended
        world.drain()
        assert bool(world.wrong) is careless
        assert world.host_waits == 0
        mover.move([torch.zeros(1)], DEVICE)
        gc.collect()
        assert all((raw == 0x77).all() for raw in world.host.values())


def test_the_host_waits_only_where_all_buffers_are_in_use() -> None:
    world = World(0, eager=0.0)
    mover = FeatureMover(lane=lambda device: SimulatedLane(world), buffer_bytes=1024)
    small = torch.ones(16)  # 64 bytes, 256 with alignment
    for _ in range(8):
        mover.move([small], DEVICE)
    assert (mover.waits, world.host_waits) == (0, 0)
    mover.move([small], DEVICE)
    assert (mover.waits, world.host_waits) == (1, 1)
    world.drain()
    mover.move([small] * 8, DEVICE)
    assert (mover.waits, world.host_waits) == (1, 1)


def test_a_large_feature_alternates_between_the_buffers() -> None:
    world = World(0, eager=0.0)
    lane = SimulatedLane(world)
    copies: list[tuple[int, int]] = []
    begin = lane.copy
    lane.copy = lambda target, source: (  # type: ignore[method-assign]
        copies.append((source.untyped_storage().data_ptr(), source.numel())),
        begin(target, source),
    )[1]
    mover = FeatureMover(lane=lambda device: lane, buffer_bytes=1024)
    source = torch.arange(1100, dtype=torch.float32)
    [moved] = mover.move([source], DEVICE)
    world.kernel(moved, source, "large")
    world.drain()
    assert world.wrong == []
    assert [size for _, size in copies] == [1024, 1024, 1024, 1024, 304]
    assert copies[0][0] != copies[1][0]
    assert len({address for address, _ in copies}) == 2


def test_buffers_grow_in_powers_of_two_up_to_the_bound_and_take_nothing_before_use() -> None:
    world = World(0, eager=1.0)
    lane = SimulatedLane(world)
    made: list[int] = []
    make = lane.host_memory
    lane.host_memory = lambda nbytes: (made.append(nbytes), make(nbytes))[1]  # type: ignore[method-assign]
    mover = FeatureMover(lane=lambda device: lane, buffer_bytes=1 << 22)
    mover.move([world.pinned(torch.ones(4))], DEVICE)
    assert made == []
    for megabytes in (0.1, 0.5, 1.5, 1.5, 9, 9):  # the device is quick, so one buffer is enough
        mover.move([torch.ones(int(megabytes * (1 << 18)))], DEVICE)
    assert made == [1 << 20, 1 << 21, 1 << 22]
    world.eager = 0.0
    mover.move([torch.ones(9 << 18)], DEVICE)
    assert made == [1 << 20, 1 << 21, 1 << 22, 1 << 22]


def test_a_failure_gives_the_buffer_back_and_the_next_move_works() -> None:
    world = World(0, eager=0.0)

    class Full(SimulatedLane):
        failing = True

        def allocate(self, source: torch.Tensor) -> torch.Tensor:
            if self.failing and source.numel() == 13:
                raise torch.OutOfMemoryError("device full")
            return super().allocate(source)

    lane = Full(world)
    mover = FeatureMover(lane=lambda device: lane, buffer_bytes=4096)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            mover.move([torch.ones(5), torch.ones(13)], DEVICE)
    lane.failing = False
    moved: list[torch.Tensor] = []
    done = threading.Thread(target=lambda: moved.extend(mover.move([torch.ones(13)], DEVICE)), daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive(), "a buffer was never given back"
    world.kernel(moved[0], torch.ones(13), "after the failure")
    world.drain()
    assert world.wrong == []


def test_several_threads_move_at_once() -> None:
    mover = FeatureMover(lane=lambda device: ImmediateLane(), buffer_bytes=1024)
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for step in range(60):
            source = torch.full((number * 40 + step,), float(number * 1000 + step))
            [moved] = mover.move([source], DEVICE)
            if not torch.equal(moved, source):
                wrong.append(f"thread {number}, step {step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class ImmediateLane(SimulatedLane):
    """Copies when told, and has no order to keep: what could still go wrong is two writers of one buffer."""

    def __init__(self) -> None:
        self.world = World(0)

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(source)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        threading.Event().wait(0.0002)  # another thread's turn
        target.copy_(source)

    def hand_over(self, event: object, tensors: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_not_plain_memory_is_left_to_torch() -> None:
    class Special(torch.Tensor):
        pass

    special = torch.ones(2).as_subclass(Special)
    gradient = torch.ones(2, requires_grad=True)
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for source in (special, gradient, torch.eye(2).to_sparse(), quantised, torch.ones(2, device="meta")):
        assert not is_staged(source, DEVICE)
    with torch.no_grad():
        assert is_staged(gradient, DEVICE)
    assert not is_staged(torch.ones(2), torch.device("cpu"))


def test_strides_of_dense_features_are_kept() -> None:
    world = World(0)
    mover = FeatureMover(lane=lambda device: SimulatedLane(world), buffer_bytes=1024)
    last = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    last = last.to(memory_format=torch.channels_last)
    sources = [last, last[:, :2], torch.tensor(2.5), last[0, 0, 0, 0]]
    moved = mover.move(sources, DEVICE)
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    for copy, source in zip(moved, sources, strict=True):
        assert copy.shape == source.shape
        world.kernel(copy, source, str(tuple(source.shape)))
    world.drain()
    assert world.wrong == []


def test_copies_made_in_inference_mode_are_normal_tensors() -> None:
    world = World(0)
    mover = FeatureMover(lane=lambda device: SimulatedLane(world))
    with torch.inference_mode():
        [first] = mover.move([torch.ones(3)], DEVICE)
    [second] = mover.move([torch.ones(3)], DEVICE)  # by the same buffer
    assert not first.is_inference()
    assert not second.is_inference()


def test_the_pinned_buffer_does_not_follow_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = torch.empty, []

    def unpinned(*args: object, pin_memory: bool, **fields: object) -> torch.Tensor:
        asked.append((pin_memory, fields.get("device")))  # to pin takes a device; all else is as on one
        return empty(*args, **fields)

    monkeypatch.setattr(torch, "empty", unpinned)
    memory = lanes.CudaLane.host_memory(object.__new__(lanes.CudaLane), 512)
    assert asked == [(True, "cpu")]
    assert (memory.dtype, memory.shape) == (torch.uint8, (512,))


def test_no_other_allocation_of_staging_follows_the_default_device() -> None:
    world = World(0)
    with torch.device("meta"):
        mover = FeatureMover(lane=lambda device: SimulatedHost(world), buffer_bytes=1024)
        sources = [torch.ones(4, device="cpu"), torch.ones(300, 8, device="cpu")[:, :3]]
        moved = mover.move(sources, DEVICE)
    assert [copy.device.type for copy in moved] == ["cpu", "cpu"]
    world.drain()
    assert torch.equal(moved[1], sources[1])


class SimulatedHost(SimulatedLane):
    """Names the device of its own memory, whatever the default is."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        with torch.device("cpu"):
            return super().host_memory(nbytes)

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"):
            return super().allocate(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": 1}, "at least 2 buffers"),
        ({"buffer_bytes": 3000}, "power of two.*got 3000; the next one is 4096"),
        ({"buffer_bytes": 0}, "power of two.*at least 256"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FeatureMover(**options)


def test_cuda_without_cuda_is_an_error_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", none)
    with pytest.raises(FeatureError, match="features can't go to cuda: Torch not compiled"):
        settled(torch.device("cuda"))
    assert settled(torch.device("cuda:3")) == torch.device("cuda:3")


def test_an_array_is_read_where_it_lies() -> None:
    world = World(0)
    mover = FeatureMover(lane=lambda device: SimulatedLane(world))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    [moved] = mover.move([torch.from_numpy(array)], DEVICE)
    world.kernel(moved, torch.arange(6, dtype=torch.float32).reshape(2, 3), "array")
    world.drain()
    assert world.wrong == []
