"""Invariant: with compile=True a manager compiles once, before it serves, and what it captures is verified."""

import functools

import pytest
import torch

from mmgraph.capture import Bucket, BucketGrid, CaptureManager, SpecError, bucket_size, core, rows
from mmgraph.capture.compiling import CompiledFunction


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(core, "CompiledFunction", functools.partial(CompiledFunction, backend="aot_eager"))


def manager_of(module: torch.nn.Module) -> CaptureManager:
    return CaptureManager(
        module,
        inputs={"x": rows("tokens"), "longest": bucket_size("seqlen")},
        outputs=rows("tokens"),
        buckets=BucketGrid(tokens=(4, 8, 16), seqlen=(4, 8)),
        compile=True,
        verify=True,
    )


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, longest: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) / longest
        return x


def test_one_compilation_serves_predictions_captures_and_calls() -> None:
    tower = Tower().requires_grad_(False)
    manager = manager_of(tower)
    example = {"x": torch.randn(5, 8), "longest": 3}
    assert manager.predict_bytes(example) is not None
    manager.precompile(example, progress=False)
    assert manager.report().compilations == 1
    assert manager.report().graph_breaks == 0
    for tokens, longest in ((3, 4), (8, 8), (13, 8), (17, 8), (40, 9)):  # the last two beyond the grid
        x = torch.randn(tokens, 8)
        expected = tower(x, 4 if longest <= 4 else 8 if longest <= 8 and tokens <= 16 else longest)
        torch.testing.assert_close(manager(x=x, longest=longest), expected)
    report = manager.report()
    assert (report.hits, report.misses) == (3, {"beyond the grid": 2})
    assert report.compilations == 1
    manager.evict(Bucket(tokens=16, seqlen=8))
    manager.precompile(example, progress=False)
    assert manager.report().compilations == 1


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    with pytest.raises(SpecError, match="compile"):
        manager_of(torch.compile(Tower(), backend="eager"))
