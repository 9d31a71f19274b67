"""Invariant: a staging buffer is asked for on the host by name, so that torch's default device has no say."""

import pytest
import torch

from mmgraph import staging


def test_the_pinned_buffer_does_not_follow_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = torch.empty, []

    def unpinned(*args: object, pin_memory: bool, **fields: object) -> torch.Tensor:
        asked.append((pin_memory, fields.get("device")))  # to pin takes a device; all else is as on one
        return empty(*args, **fields)

    monkeypatch.setattr(torch, "empty", unpinned)
    source = torch.randn(3, 2)
    moved = staging._start_copy(source, torch.device("cpu"))
    assert asked == [(True, "cpu")]
    assert torch.equal(moved, source)
