"""Staging on a CUDA device that was made slow and dirty on purpose, so that a missing order shows each time.

Every copy on the side stream comes late, every new block holds NaN until then, and memory that was let go is asked for
again and overwritten at once. Reads on the compute stream come later still. Lanes that forget one thing each say
whether that would be found.
"""

from collections.abc import Sequence

import torch

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.lane import CudaLane, Event
from mmgraph.prefetch import Prefetcher
from mmgraph.staging import FeatureMover

DEVICE = torch.device("cuda", 0)


class DirtyLane(CudaLane):
    """Copies late, into memory full of NaN."""

    def __init__(self, device: torch.device, cycles: int) -> None:
        super().__init__(device)
        self.cycles = cycles

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        tensor = super().allocate(source)
        _poison(tensor)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(self.cycles)
        super().copy(target, source)

    def trample(self, tensor_bytes: Sequence[int]) -> None:
        """Ask for blocks of these sizes on the side stream, spoil them and let them go."""
        with self.entered():
            blocks = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in tensor_bytes]
            for block in blocks:
                block.fill_(0xFF)


class UnwaitedLane(DirtyLane):
    """Forgets that the compute stream must wait."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self.device))


class UnmarkedLane(DirtyLane):
    """Forgets to mark memory as used by the compute stream."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        super().hand_over(event, [])


class HastyEvent:
    """Says that it has passed."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HastyLane(DirtyLane):
    """Forgets that copies from a pinned buffer take time; the compute stream waits as it should."""

    def mark(self) -> Event:
        return HastyEvent(super().mark())

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        assert isinstance(event, HastyEvent)
        super().hand_over(event.event, tensors)


class Detector:
    """A mover and an embedder on a dirty lane, and what was read of what they brought.

    Args:
        lane: Which lane.
        buffer_bytes: The bound of the pinned buffers.
        side_cycles: How late copies come, in cycles of the device; ten million are about 5 ms.
        compute_cycles: How late reads come.
    """

    def __init__(
        self,
        lane: type[DirtyLane] = DirtyLane,
        *,
        buffer_bytes: int = 1 << 16,
        side_cycles: int = 10_000_000,
        compute_cycles: int = 60_000_000,
    ) -> None:
        _warm_up()
        self.lane = lane(DEVICE, side_cycles)
        self.mover = FeatureMover(lane=lambda device: self.lane, buffer_bytes=buffer_bytes)
        self.embedder = MultimodalEmbedder()
        self.embedder._mover = self.mover
        self.embedder._features = Prefetcher(self.mover, 1 << 30)
        self._compute_cycles = compute_cycles
        self._seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def read(self, feature: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        """Let a kernel on the current stream read a feature, late."""
        torch.cuda._sleep(self._compute_cycles)
        self._seen.append((name, feature.clone(), expected.clone()))

    def wrong(self) -> list[str]:
        """Give the names of the reads that found something else."""
        torch.cuda.synchronize()
        return [name for name, found, expected in self._seen if not torch.equal(found.cpu(), expected.cpu())]


def _warm_up() -> None:
    """Load the kernels that are used, since loading waits for the device; and leave no cached block behind."""
    torch.cuda.synchronize()
    lane = DirtyLane(DEVICE, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        mover = FeatureMover(lane=lambda device: lane)
        [moved] = mover.move([torch.ones(70, 3).to(dtype)], DEVICE)
        moved.clone().cpu()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    del moved
    torch.cuda.empty_cache()


def _poison(tensor: torch.Tensor) -> None:
    tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
