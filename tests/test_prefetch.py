"""Invariant: a prefetch changes when a feature is copied, and nothing else: what an encoder reads is the item's feature
as it is when it is encoded, and a feature that can't be read fails then, for its request alone.

The device is simulated; see ``simulated_cuda``. The encoders' kernels are run late and know what they must find.
"""

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, Handle, simple_item
from simulated_cuda import DEVICE, SimulatedLane, UnmarkedLane, UnwaitedLane, World

from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.errors import ContextError, FeatureError, OptionError
from mmgraph.features import leaves_of
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.prefetch import Prefetcher
from mmgraph.staging import FeatureMover


def simulated(
    world: World, lane: type[SimulatedLane] = SimulatedLane, prefetch_bytes: int = 1 << 20
) -> MultimodalEmbedder:
    """An embedder whose way to a CUDA device ends in a simulated one."""
    embedder = MultimodalEmbedder()
    embedder._mover = FeatureMover(lane=lambda device: lane(world), buffer_bytes=1024)
    embedder._features = Prefetcher(embedder._mover, prefetch_bytes)
    return embedder


def batch(items: list[MultimodalDataItem]) -> MultimodalForwardContext:
    """One request for each item, of four rows."""
    return MultimodalForwardContext(
        [MultimodalInputs([item]) for item in items], [0] * len(items), [4] * len(items)
    )


def image(feature: object, **fields: object) -> MultimodalDataItem:
    return simple_item([(1, 2)], feature=feature, **fields)


class Reader:
    """An encoder whose kernels check what they read; the rows are of no interest."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.expected: dict[MultimodalDataItem, list[torch.Tensor]] = {}
        self.failing = 0

    def expect(self, item: MultimodalDataItem, *leaves: torch.Tensor) -> None:
        self.expected[item] = [leaf.clone() for leaf in leaves]

    def __call__(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        for item in items:
            for leaf, wanted in zip(leaves_of(item.feature), self.expected[item], strict=True):
                self.world.kernel(leaf, wanted, repr(item))
        if self.failing:
            self.failing -= 1
            raise RuntimeError("boom")
        return torch.zeros(2 * len(items), HIDDEN)


def encode(embedder: MultimodalEmbedder, items: list[MultimodalDataItem], reader: Reader) -> None:
    plan = embedder.plan(batch(items), 4 * len(items))
    embedder.encode(plan, {Modality.IMAGE: reader}, device=DEVICE)


def rows(seed: int = 0, tokens: int = 2) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def serve(world: World, embedder: MultimodalEmbedder, steps: int = 12) -> Reader:
    """Batch after batch: some of what comes next is prefetched, some of that is changed, replaced or never comes."""
    rng, reader = world.rng, Reader(world)
    waiting: list[MultimodalDataItem] = []
    for step in range(steps):
        for number in range(rng.randrange(4)):
            source = rows(100 * step + number, rng.choice([1, 2, 9, 70]))
            feature = rng.choice(
                [
                    source,
                    world.pinned(source),
                    source.numpy().copy(),
                    Handle(source.clone()),
                    [source, {"grid": torch.tensor([1, step])}],
                    source.t().contiguous().t(),
                ]
            )
            waiting.append(image(feature))
            reader.expect(
                waiting[-1], *([source, torch.tensor([1, step])] if isinstance(feature, list) else [source])
            )
        embedder.prefetch(batch([item for item in waiting if rng.random() < 0.7]), device=DEVICE)
        for item in waiting:
            kind = rng.randrange(12)
            if kind == 0:
                item.feature = rows(step + 5000)
                reader.expect(item, item.feature)
            elif kind == 1 and isinstance(item.feature, torch.Tensor):
                item.feature.add_(1)
                reader.expect(item, item.feature)
        rng.shuffle(waiting)
        coming = [waiting.pop() for _ in range(rng.randrange(len(waiting) + 1))]
        if waiting and rng.random() < 0.3:
            reader.expected.pop(waiting.pop())  # its request was given up
        if coming:
            reader.failing = rng.random() < 0.2
            try:
                encode(embedder, coming, reader)
            except Exception:
                encode(embedder, coming, reader)
        for item in coming:
            assert item.feature is None
            reader.expected.pop(item)
        del coming
    world.drain()
    return reader


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**20),
    eager=st.sampled_from([0.0, 0.4]),
    ahead=st.sampled_from([None, "side", "compute"]),
)
def test_what_is_read_is_the_feature_as_it_is_then(seed: int, eager: float, ahead: str | None) -> None:
    world = World(seed, eager=eager, ahead=ahead)
    embedder = simulated(world, prefetch_bytes=world.rng.choice([0, 500, 1 << 20]))
    serve(world, embedder)
    assert world.wrong == []
    counts = embedder.counters()
    assert counts.prefetch_hits <= counts.prefetch_started
    assert counts.prefetch_dropped <= counts.prefetch_started - counts.prefetch_hits


@pytest.mark.parametrize(
    ("lane", "ahead"), [(UnwaitedLane, "compute"), (UnmarkedLane, "side")], ids=["early read", "early reuse"]
)
def test_the_simulation_finds_what_is_careless(lane: type[SimulatedLane], ahead: str) -> None:
    for kind in (lane, SimulatedLane):
        world = World(3, eager=0.0, ahead=ahead)
        embedder, reader = simulated(world, kind), Reader(world)
        for step in range(6):
            item = image(rows(step))
            reader.expect(item, rows(step))
            assert embedder.prefetch(batch([item]), device=DEVICE) == 1
            encode(embedder, [item], reader)
            del item
            reader.expected.clear()
        world.drain()
        assert embedder.counters().prefetch_hits == 6
        assert bool(world.wrong) is (kind is lane)


def test_a_prefetched_feature_is_not_copied_again() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    items = [image([rows(k), torch.tensor([k])]) for k in range(3)]
    for k, item in enumerate(items):
        reader.expect(item, rows(k), torch.tensor([k]))
    assert embedder.prefetch(batch(items[:2]), device=DEVICE) == 2
    assert embedder.prefetch(batch(items[:2]), device=DEVICE) == 0
    moved = embedder.counters()
    assert (moved.features_moved, moved.bytes_moved) == (4, 2 * (rows().nbytes + 8))
    encode(embedder, items, reader)
    world.drain()
    assert world.wrong == []
    counts = embedder.counters()
    assert (counts.features_moved, counts.bytes_moved) == (6, 3 * (rows().nbytes + 8))
    assert (counts.prefetch_started, counts.prefetch_hits, counts.prefetch_misses) == (2, 2, 1)
    assert counts.prefetch_dropped == 0


def test_a_feature_that_can_go_early_in_part_is_put_together() -> None:
    class Special(torch.Tensor):
        """Not plain memory, so torch is to copy it; on the simulated device it is there at once."""

        def to(self, *args: object, **options: object) -> "Special":
            return self

    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    special = torch.ones(2).as_subclass(Special)
    item = image({"a": special, "b": [rows(1), 5, special], "c": rows(2)})
    reader.expect(item, torch.ones(2), rows(1), torch.ones(2), rows(2))
    assert embedder.prefetch(batch([item]), device=DEVICE) == 1
    encode(embedder, [item], reader)
    world.drain()
    assert world.wrong == []
    assert (embedder.counters().features_moved, embedder.counters().prefetch_hits) == (2, 1)


def replaced(item: MultimodalDataItem) -> None:
    item.feature = item.feature.clone()


def changed(item: MultimodalDataItem) -> None:
    item.feature.mul_(3)


def changed_in_inference_mode(item: MultimodalDataItem) -> None:
    with torch.inference_mode():
        item.feature.mul_(3)


def changed_by_a_view(item: MultimodalDataItem) -> None:
    item.feature[0].zero_()


def put_inside(item: MultimodalDataItem) -> None:
    item.feature = [item.feature]


@pytest.mark.parametrize(
    "change", [replaced, changed, changed_in_inference_mode, changed_by_a_view, put_inside]
)
def test_a_changed_feature_is_not_answered_with_the_old_copy(change: object) -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    item = image(rows(1))
    embedder.prefetch(batch([item]), device=DEVICE)
    change(item)
    reader.expect(item, *leaves_of(item.feature))
    encode(embedder, [item], reader)
    world.drain()
    assert world.wrong == []
    counts = embedder.counters()
    if change is not put_inside:  # the same tensor, unchanged
        assert (counts.prefetch_hits, counts.prefetch_dropped, counts.prefetch_misses) == (0, 1, 1)


def test_a_change_is_seen_by_a_second_prefetch() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    item = image(rows(1))
    embedder.prefetch(batch([item]), device=DEVICE)
    changed(item)
    reader.expect(item, item.feature)
    assert embedder.prefetch(batch([item]), device=DEVICE) == 1
    encode(embedder, [item], reader)
    world.drain()
    assert world.wrong == []
    counts = embedder.counters()
    assert (counts.prefetch_hits, counts.prefetch_dropped) == (1, 1)


def test_an_encoder_that_spoils_its_feature_and_fails_gets_a_fresh_one() -> None:
    world = World(0, eager=1.0)
    embedder, reader = simulated(world), Reader(world)
    item = image(rows(1))
    reader.expect(item, rows(1))

    def spoils(items: list[MultimodalDataItem]) -> torch.Tensor:
        items[0].feature.zero_()
        raise RuntimeError("boom")

    embedder.prefetch(batch([item]), device=DEVICE)
    plan = embedder.plan(batch([item]), 4)
    with pytest.raises(Exception, match="boom"):
        embedder.encode(plan, {Modality.IMAGE: spoils}, device=DEVICE)
    embedder.encode(plan, {Modality.IMAGE: reader}, device=DEVICE)
    world.drain()
    assert world.wrong == []


def test_a_gradient_is_not_lost_to_a_copy_made_without() -> None:
    embedder = simulated(World(0))
    item = image(rows(1).requires_grad_())
    with torch.no_grad():
        assert embedder.prefetch(batch([item]), device=DEVICE) == 1
    early = embedder._features._early[item]
    with torch.no_grad():
        assert early.is_of(item.feature, DEVICE)
    assert not early.is_of(item.feature, DEVICE)
    assert embedder.prefetch(batch([image(rows(2).requires_grad_())]), device=DEVICE) == 0


def test_copies_go_with_their_item() -> None:
    world = World(0)
    embedder = simulated(world)
    item = image(rows(1))
    embedder.prefetch(batch([item]), device=DEVICE)
    assert len(embedder._features._early) == 1
    assert world.free == {}
    del item
    gc.collect()
    assert len(embedder._features._early) == 0
    assert sum(map(len, world.free.values())) == 1  # handed out again
    assert embedder.counters().prefetch_dropped == 1


def test_the_bound_refuses_and_what_was_begun_first_stays() -> None:
    world = World(0)
    embedder = simulated(world, prefetch_bytes=2 * rows().nbytes)
    items = [image(rows(k)) for k in range(4)]
    assert embedder.prefetch(batch(items), device=DEVICE) == 2
    assert list(embedder._features._early) == items[:2]
    assert embedder.counters().prefetch_refused == 2
    reader = Reader(world)
    for k, item in enumerate(items):
        reader.expect(item, rows(k))
    encode(embedder, items[:1], reader)
    assert embedder.prefetch(batch(items), device=DEVICE) == 1
    encode(embedder, items, reader)
    world.drain()
    assert world.wrong == []
    assert embedder.counters().prefetch_hits == 3


def gone() -> Handle:
    handle = Handle(rows())
    handle.consume = lambda: (_ for _ in ()).throw(FileNotFoundError("its process is dead"))  # type: ignore[method-assign]
    return handle


@pytest.mark.parametrize("feature", [gone, lambda: np.array([object()])], ids=["dead process", "array"])
def test_a_bad_feature_fails_when_it_is_encoded_and_harms_no_other(feature: object) -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    items = [image(rows(1)), image(feature()), image(rows(2))]
    bad = items[1].feature
    for item, k in ((items[0], 1), (items[2], 2)):
        reader.expect(item, rows(k))
    assert embedder.prefetch(batch(items), device=DEVICE) == 2
    assert items[1].feature is bad
    assert embedder.counters().prefetch_failed == 1
    spec = EncoderSpec(reader, device=DEVICE)
    ids = torch.zeros(12, dtype=torch.int64)
    result = embedder.apply_result(
        ids, torch.zeros(3, HIDDEN), batch(items), {Modality.IMAGE: spec}, on_error="isolate"
    )
    assert {request: type(error) for request, error in result.failed.items()} == {1: FeatureError}
    assert items[1].feature is bad
    world.drain()
    assert world.wrong == []
    assert embedder.counters().failures_isolated == 1


def test_a_move_that_fails_fails_one_item_alone() -> None:
    world = World(0)

    class Full(SimulatedLane):
        def allocate(self, source: torch.Tensor) -> torch.Tensor:
            if source.shape[0] == 13:
                raise torch.OutOfMemoryError("device full")
            return super().allocate(source)

    embedder, reader = simulated(world, Full), Reader(world)
    items = [image(rows(1)), image(rows(2, 13)), image(rows(3))]
    for item in items:
        reader.expect(item, item.feature)
    big = items[1].feature
    assert embedder.prefetch(batch(items), device=DEVICE) == 2
    assert embedder.counters().prefetch_failed == 1
    spec = EncoderSpec(reader, device=DEVICE)
    ids = torch.zeros(12, dtype=torch.int64)
    result = embedder.apply_result(
        ids, torch.zeros(3, HIDDEN), batch(items), {Modality.IMAGE: spec}, on_error="isolate"
    )
    assert list(result.failed) == [1]
    assert "can't be brought to cuda:0: OutOfMemoryError: device full" in str(result.failed[1])
    assert items[1].feature is big
    assert [item.encoded is None for item in items] == [False, True, False]
    world.drain()
    assert world.wrong == []


def test_a_request_that_can_not_be_planned_is_passed_over() -> None:
    embedder = simulated(World(0))
    items = [image(rows(1)), MultimodalDataItem("image", [(2, 1)], feature=rows(1)), image(rows(2))]
    assert embedder.prefetch(batch(items), device=DEVICE) == 2
    assert embedder.counters().prefetch_failed == 1
    with pytest.raises(ContextError):
        embedder.prefetch(items, device=DEVICE)


def test_what_is_encoded_or_without_a_feature_is_passed_over_and_a_twin_serves() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    items = [image(None, hash=1), image(gone(), hash=1), image(rows(7), hash=1)]
    done = image(rows(2), encoded=torch.zeros(2, HIDDEN))
    assert embedder.prefetch(batch([*items, done]), device=DEVICE) == 1
    reader.expect(items[2], rows(7))
    encode(embedder, items, reader)
    world.drain()
    assert world.wrong == []
    assert embedder.counters().prefetch_hits == 1
    assert items[0].encoded is items[2].encoded


def test_a_handle_that_a_prefetch_consumed_is_released_once_the_item_is_encoded() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    handles = [Handle(rows(1)), Handle(rows(2))]
    item, twin = image(handles[0], hash=1), image(handles[1], hash=1)
    reader.expect(item, rows(1))
    embedder.prefetch(batch([item, twin]), device=DEVICE)
    assert [handle.consumed for handle in handles] == [1, 0]
    encode(embedder, [item, twin], reader)
    assert [(handle.consumed, handle.released) for handle in handles] == [(1, 1), (0, 1)]
    assert (item.feature, twin.feature) == (None, None)


def test_a_plan_and_an_encoder_s_own_device_serve_too() -> None:
    world = World(0)
    embedder = simulated(world)
    items = [image(rows(1)), simple_item([(1, 2)], Modality.AUDIO, feature=rows(2))]
    plan = embedder.plan(batch(items), 8)
    elsewhere = {Modality.AUDIO: EncoderSpec(Reader(world), device="cpu")}
    assert embedder.prefetch(plan, elsewhere, device=DEVICE) == 1
    assert embedder.prefetch(plan, device="cpu") == 0
    assert (
        embedder.prefetch(plan, {Modality.AUDIO: EncoderSpec(Reader(world), device=DEVICE)}, device="cpu") == 1
    )


def test_on_a_cpu_nothing_is_done() -> None:
    embedder = MultimodalEmbedder()
    handle = Handle(rows())
    assert embedder.prefetch(batch([image(handle), image(rows())]), device="cpu") == 0
    assert handle.consumed == 0
    assert embedder.counters() == MultimodalEmbedder().counters()


def test_a_thread_may_prefetch_while_another_encodes() -> None:
    world_lock = threading.RLock()

    class Direct(SimulatedLane):
        """Copies when told: what could go wrong here is who reads, drops and releases what."""

        def allocate(self, source: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(source)

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)

        def mark(self) -> object:
            with world_lock:
                return super().mark()

        def reads(self, source: torch.Tensor) -> bool:
            return False

        def hand_over(self, event: object, tensors: object) -> None:
            pass

    world = World(0, eager=1.0)
    embedder = simulated(world, Direct)
    items = [image(Handle(rows(k)) if k % 2 else rows(k)) for k in range(120)]
    handles = [item.feature for item in items if isinstance(item.feature, Handle)]
    wrong: list[object] = []
    stop = threading.Event()

    def ahead() -> None:
        while not stop.is_set():
            try:
                embedder.prefetch(batch(items), device=DEVICE)
            except Exception as error:
                wrong.append(error)

    def encoder(chunk: list[MultimodalDataItem]) -> torch.Tensor:
        for item in chunk:
            if not torch.equal(item.feature, rows(items.index(item))):
                wrong.append(item)
        return torch.zeros(2 * len(chunk), HIDDEN)

    threads = [threading.Thread(target=ahead) for _ in range(2)]
    for thread in threads:
        thread.start()
    for start in range(0, 120, 6):
        encode(embedder, items[start : start + 6], encoder)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(item.encoded is not None and item.feature is None for item in items)
    assert [(handle.consumed, handle.released) for handle in handles] == [(1, 1)] * len(handles)
    assert embedder.counters().prefetch_failed == 0
    assert list(embedder._features._early) == []


class Slow(Handle):
    """Its reading takes until it may go on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def consume(self) -> torch.Tensor:
        self.reading.set()
        assert self.go_on.wait(60)
        return super().consume()


@pytest.mark.parametrize("what", ["load", "drop"])
def test_a_handle_that_a_prefetch_is_reading_is_left_to_it(what: str) -> None:
    embedder = simulated(World(0))
    handle = Slow(rows(1))
    item = image(handle)
    reading = threading.Thread(target=lambda: embedder.prefetch(batch([item]), device=DEVICE), daemon=True)
    reading.start()
    assert handle.reading.wait(60)
    if what == "drop":
        item.encoded = torch.zeros(2, HIDDEN)
    given: list[object] = []
    other = threading.Thread(target=lambda: given.append(getattr(embedder._features, what)(item)), daemon=True)
    other.start()
    other.join(0.1)
    assert given == []
    handle.go_on.set()
    reading.join(60)
    other.join(60)
    assert handle.consumed == 1
    if what == "load":
        assert given == [None]
        assert torch.equal(item.feature, rows(1))
    else:
        assert given == [(True, [handle])]
        assert item.feature is None


def test_what_a_prefetch_reads_in_inference_mode_still_tells_of_changes() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    item = image(rows(1).numpy().copy())
    with torch.inference_mode():
        assert embedder.prefetch(batch([item]), device=DEVICE) == 1
        item.feature.add_(1)
    reader.expect(item, rows(1) + 1)
    encode(embedder, [item], reader)
    world.drain()
    assert world.wrong == []


def test_an_item_that_another_plan_has_encoded_is_passed_over_with_its_twins() -> None:
    embedder = simulated(World(0))
    items = [image(rows(1), hash=1), image(rows(1), hash=1)]
    plan = embedder.plan(batch(items), 8)
    items[0].encoded, items[0].feature = torch.zeros(2, HIDDEN), None
    assert embedder.prefetch(plan, device=DEVICE) == 0


def test_copies_on_one_device_do_not_serve_another() -> None:
    world = World(0)
    embedder, reader = simulated(world), Reader(world)
    item = image(rows(1))
    reader.expect(item, rows(1))
    assert embedder.prefetch(batch([item]), device=torch.device("cuda", 1)) == 1
    encode(embedder, [item], reader)
    counts = embedder.counters()
    assert (counts.prefetch_hits, counts.prefetch_misses, counts.prefetch_dropped) == (0, 1, 1)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(OptionError, match="prefetch_bytes must not be negative, got -1"):
        MultimodalEmbedder(prefetch_bytes=-1)
