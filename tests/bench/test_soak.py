"""Invariant: the soak notices a wrong bit, at once and later, and a result that a later call writes to."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("soak", ROOT / "bench" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


class Eager:
    """Stands for a manager; `change` is done to a result before it is handed out."""

    def __init__(self, soak: ModuleType, change: Any) -> None:
        self.function, self.change, self.calls = soak.Exact(), change, 0

    def __call__(self, **call: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        results = self.function(**call)
        self.change(self.calls, results)
        return results  # type: ignore[no-any-return]

    def poison(self) -> None:
        pass


def worker(soak: ModuleType, change: Any) -> Any:
    function = soak.Exact()
    with torch.no_grad():
        cases = soak.make_cases(function, soak.SMOKE, torch.device("cpu"))
    return soak.Worker([Eager(soak, change)], function, cases, soak.SMOKE, None, 0)


def test_what_is_right_passes_and_every_result_is_compared(soak: ModuleType) -> None:
    worked = worker(soak, lambda number, results: None)
    worked.run(60)
    assert worked.failures == []
    assert worked.samples == 60 // soak.SMOKE.sample_every
    assert worked.compared_later >= 60


def test_one_wrong_bit_is_noticed(soak: ModuleType) -> None:
    def negate_zero(number: int, results: dict[str, torch.Tensor]) -> None:
        if number == 10:
            results["sequences"][0, 0] = -0.0
        else:
            results["sequences"][0, 0] = 0.0

    worked = worker(soak, negate_zero)
    for case in worked.cases:
        case.expected["sequences"][0, 0] = 0.0
    worked.plan = soak.Plan(sample_every=1000, poison_every=1000)
    worked.run(20)
    assert len(worked.failures) == 1
    assert "call 10," in worked.failures[0]


def test_a_result_that_changes_afterwards_is_noticed(soak: ModuleType) -> None:
    first: list[torch.Tensor] = []

    def overwrite(number: int, results: dict[str, torch.Tensor]) -> None:
        first.append(results["rows"])
        if number == 12:
            first[3].fill_(7)

    worked = worker(soak, overwrite)
    worked.run(13)
    assert worked.failures
    assert all("call 4," in failure for failure in worked.failures)
    assert all("later" in failure for failure in worked.failures)
