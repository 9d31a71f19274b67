"""A ragged encoder over clips of frames whose results are exact, for the tests of captured encoders."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmgraph.capture import Bucket, BucketGrid, bucket_size, constant, offsets, rows

WIDTH = 3
WINDOW = 4

#: What a clip's tokens take beside its frames: windows of four tokens, none across frames.
GRID = BucketGrid(
    tokens=(8, 32, 64),
    frames=(16,),
    seqlen=(16, 64),
    derived={"windows": lambda b: b["tokens"] // WINDOW + b["frames"]},
)


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of some tokens each, and which way they go."""

    frames: tuple[int, ...]
    x: torch.Tensor
    path: str = "image"

    @property
    def tokens(self) -> int:
        return sum(self.frames)

    @property
    def windows(self) -> list[int]:
        return [min(WINDOW, n - at) for n in self.frames for at in range(0, n, WINDOW)]


def make_clip(
    frames: Sequence[int], seed: int, path: str = "image", device: torch.device | str = "cpu"
) -> Clip:
    """A clip of even numbers of tokens, which hold small integers, so that sums are exact in any order."""
    frames = tuple(n + n % 2 for n in frames)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (sum(frames), WIDTH), generator=generator).double()
    return Clip(frames, x.to(device), path)


class ClipAdapter:
    """Rows plus the sums of their frame and of their window, two of them merged into one; and a deeper output."""

    inputs: Mapping[str, Any] = {
        "x": rows("tokens"),
        "cu_frames": offsets("frames", of="tokens"),
        "cu_windows": offsets("windows", of="tokens"),
        "longest": bucket_size("seqlen"),
        "path": constant(),
    }
    outputs: Any = {"main": rows("tokens", per=2), "deep": [rows("tokens", per=2)]}  # noqa: RUF012

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.weight = torch.tensor([[1.0, 2, 0], [0, 1, -1], [3, 0, 1]], dtype=torch.float64).to(device)
        self.prepared: list[Bucket | None] = []

    def path(self, item: Clip) -> str:
        return item.path

    def rows(self, item: Clip) -> int:
        return item.tokens // 2

    def sizes(self, item: Clip) -> Mapping[str, int]:
        return {
            "tokens": item.tokens,
            "frames": len(item.frames),
            "seqlen": max(item.frames, default=0),
            "windows": len(item.windows),
        }

    def prepare(self, items: Sequence[Clip], bucket: Bucket | None) -> Mapping[str, Any]:
        self.prepared.append(bucket)
        frames = [n for item in items for n in item.frames]
        return {
            "x": torch.cat([item.x for item in items]),
            "cu_frames": self.cumulated(frames),
            "cu_windows": self.cumulated([n for item in items for n in item.windows]),
            "longest": max(frames, default=0),
            "path": items[0].path,
        }

    def cumulated(self, lengths: Sequence[int]) -> torch.Tensor:
        host = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def forward(
        self, x: torch.Tensor, cu_frames: torch.Tensor, cu_windows: torch.Tensor, longest: int, path: str
    ) -> dict[str, Any]:
        scale = 2 if path == "video" else 1
        hidden = x @ self.weight * scale + summed(x, cu_frames) + 2 * summed(x, cu_windows)
        merged = hidden.reshape(x.shape[0] // 2, 2, WIDTH).sum(1)
        return {"main": merged, "deep": [merged * 3 - 1]}

    def split(self, outputs: Any, items: Sequence[Clip]) -> Sequence[torch.Tensor]:
        counts = [item.tokens // 2 for item in items]
        parts = zip(outputs["main"].split(counts), outputs["deep"][0].split(counts), strict=True)
        return [torch.cat(pair, 1) for pair in parts]


def summed(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """For each row the sum of its sequence; for rows behind all of them something."""
    position = torch.arange(x.shape[0], device=x.device, dtype=cu.dtype)
    sequence = torch.searchsorted(cu[1:].contiguous(), position, right=True)
    sums = x.new_zeros((cu.shape[0], x.shape[1])).index_add(0, sequence, x)
    return sums[sequence]


def expected(adapter: ClipAdapter, items: Sequence[Clip]) -> list[torch.Tensor]:
    """What the adapter gives item by item, without any encoder."""
    return [adapter.split(adapter.forward(**adapter.prepare([item], None)), [item])[0] for item in items]
