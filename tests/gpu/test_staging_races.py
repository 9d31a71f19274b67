"""Invariant: on CUDA no feature is read before its copy has ended or after its memory went to another, and no pinned
buffer is written while it is copied from, however late the streams are.

Each promise is also broken on purpose, and the detector must say so.
"""

import random

import pytest
import torch
from mm_batches import HIDDEN, simple_item
from race_detector import DEVICE, Detector, DirtyLane, HastyLane, UnmarkedLane, UnwaitedLane

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.features import leaves_of
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.staging import FeatureMover

pytestmark = pytest.mark.cuda

BYTES = 1 << 16
SOON, LATE = 10_000_000, 60_000_000  # cycles: about 5 and 30 ms, against well under 1 ms of launches
# What is forgotten shows where copies come later than reads, or reads later than copies.
CARELESS = {
    "early read": (UnwaitedLane, {"side_cycles": LATE, "compute_cycles": 1}),
    "early reuse": (UnmarkedLane, {"side_cycles": SOON, "compute_cycles": LATE}),
    "early rewrite": (HastyLane, {"side_cycles": LATE, "compute_cycles": 1}),
}


def feature(number: int, nbytes: int = BYTES) -> torch.Tensor:
    return torch.full((nbytes // 16, 4), float(number))


def batch(items: list[MultimodalDataItem]) -> MultimodalForwardContext:
    return MultimodalForwardContext(
        [MultimodalInputs([item]) for item in items], [0] * len(items), [4] * len(items)
    )


def move_one_by_one(detector: Detector) -> None:
    for number in range(1, 7):
        [moved] = detector.mover.move([feature(number)], DEVICE)
        detector.read(moved, feature(number), f"feature {number}")
        del moved  # while nothing has read it yet
        detector.lane.trample([BYTES])


def prefetch_one_by_one(detector: Detector) -> None:
    expected: dict[MultimodalDataItem, torch.Tensor] = {}

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        for item in items:
            detector.read(item.feature, expected[item], repr(item))
        return torch.zeros(2 * len(items), HIDDEN, device=DEVICE)

    items = [simple_item([(1, 2)], feature=feature(number)) for number in range(1, 7)]
    expected |= {item: item.feature for item in items}
    for now, after in zip(items, [*items[1:], None], strict=True):
        plan = detector.embedder.plan(batch([now]), 4)
        detector.embedder.prefetch(plan, device=DEVICE)
        if after is not None:
            detector.embedder.prefetch(batch([after]), device=DEVICE)
        detector.embedder.encode(plan, {Modality.IMAGE: encoder}, device=DEVICE)
        detector.lane.trample([BYTES])
    assert detector.embedder.counters().prefetch_hits == 6


@pytest.mark.parametrize("kind", CARELESS)
@pytest.mark.parametrize("work", [move_one_by_one, prefetch_one_by_one])
def test_each_race_is_found_and_is_not_there(work: object, kind: str) -> None:
    lane, cycles = CARELESS[kind]
    careless = Detector(lane, **cycles)
    work(careless)
    assert careless.wrong() != []
    careful = Detector(**cycles)
    work(careful)
    assert careful.wrong() == []


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_are_read_right(seed: int) -> None:
    rng = random.Random(seed)
    detector = Detector(side_cycles=400_000, compute_cycles=600_000)
    embedder = detector.embedder
    expected: dict[MultimodalDataItem, list[torch.Tensor]] = {}

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        for item in items:
            for leaf, wanted in zip(leaves_of(item.feature), expected.pop(item), strict=True):
                detector.read(leaf, wanted, repr(item))
        return torch.zeros(2 * len(items), HIDDEN, device=DEVICE)

    waiting: list[MultimodalDataItem] = []
    for step in range(24):
        for _ in range(rng.randrange(4)):
            shape = (rng.choice([1, 70, 900]), rng.choice([1, 16, 50]))
            source = torch.randn(shape).to(rng.choice([torch.float32, torch.bfloat16, torch.complex64]))
            dressed = rng.choice(
                [
                    source,
                    source.pin_memory(),
                    source.t().contiguous().t(),
                    source[:1].expand(shape),
                    [source, {"grid": torch.tensor([1, step])}],
                    source.to(DEVICE),
                    source.t().contiguous().t().pin_memory(),
                ]
            )
            waiting.append(simple_item([(1, 2)], feature=dressed))
            expected[waiting[-1]] = [leaf.cpu().clone() for leaf in leaves_of(dressed)]
        embedder.prefetch(batch([item for item in waiting if rng.random() < 0.6]), device=DEVICE)
        for item in waiting:
            if rng.random() < 0.1 and isinstance(item.feature, torch.Tensor):
                item.feature = item.feature.clone().add_(1)
                expected[item] = [item.feature.cpu().clone()]
        rng.shuffle(waiting)
        coming = [waiting.pop() for _ in range(rng.randrange(len(waiting) + 1))]
        if coming:
            sizes = [leaf.nbytes for item in coming for leaf in leaves_of(item.feature)]
            plan = embedder.plan(batch(coming), 4 * len(coming))
            embedder.encode(plan, {Modality.IMAGE: encoder}, device=DEVICE)
            detector.lane.trample(sizes)
    assert detector.wrong() == []


def test_the_host_waits_only_where_all_buffers_are_in_use() -> None:
    detector = Detector()
    detector.mover.move([feature(1, BYTES // 4)] * 8, DEVICE)
    assert detector.mover.waits == 0
    [large] = detector.mover.move([feature(2, 5 * BYTES)], DEVICE)
    assert detector.mover.waits > 0
    detector.read(large, feature(2, 5 * BYTES), "large")
    assert detector.wrong() == []


def test_memory_that_was_pinned_by_hand_is_kept_until_its_copy_has_ended() -> None:
    detector = Detector()
    source = torch.randn(1 << 14)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(source.data_ptr(), source.nbytes, 0))
    try:
        assert source.is_pinned()
        [moved] = detector.mover.move([source], DEVICE)
        [entrance] = detector.mover._entrances.values()
        assert [kept.data_ptr() for _, sources in entrance._kept for kept in sources] == [source.data_ptr()]
        detector.read(moved, source, "registered")
        assert detector.wrong() == []
        detector.mover.move([feature(1)], DEVICE)
        assert not entrance._kept
    finally:
        torch.cuda.synchronize()
        torch.cuda.check_error(runtime.cudaHostUnregister(source.data_ptr()))


def test_a_source_on_the_same_device_is_not_copied() -> None:
    source = torch.ones(8, device=DEVICE)
    mover = FeatureMover()
    assert mover.move([source], DEVICE)[0] is source
    assert mover._entrances == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_source_on_another_device_is_waited_for() -> None:
    detector = Detector()
    other = torch.device("cuda", 1)
    source = torch.zeros(1 << 20, device=other)
    torch.cuda.synchronize(other)
    with torch.cuda.device(other):
        torch.cuda._sleep(10_000_000)
        source.fill_(3.0)
    [moved] = detector.mover.move([source], DEVICE)
    detector.read(moved, torch.full((1 << 20,), 3.0), "from another device")
    assert detector.wrong() == []


def test_nvtx_ranges_are_entered() -> None:
    embedder = MultimodalEmbedder(ranges="nvtx")
    item = simple_item([(0, 3)])
    rows = -item.feature
    ids = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    embeds, _ = embedder.apply(
        ids,
        torch.zeros(3, HIDDEN, device=DEVICE),
        batch([item]),
        {Modality.IMAGE: lambda items: -items[0].feature},
    )
    assert torch.equal(embeds[:4].cpu(), rows)


def test_a_dirty_lane_is_dirty() -> None:
    lane = DirtyLane(DEVICE, 1)
    with lane.entered():
        fresh = lane.allocate(torch.zeros(100))
    torch.cuda.synchronize()
    assert fresh.isnan().all()
