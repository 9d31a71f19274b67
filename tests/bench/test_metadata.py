"""Invariant: the benchmark of host metadata runs, and finds what transformers finds."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_both_towers_are_measured_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    metadata = importlib.import_module("metadata")
    assert Path(metadata.__file__ or "").parent == BENCH
    for kind, layout in (("windows", metadata.windows_layout()), ("table", metadata.table_layout())):
        row = metadata.measure("two", [(1, 32, 28), (2, 6, 10)], layout, lambda calls: 1)
        assert (row["tower"], row["patches"], row["equal"]) == (kind, 1016, True)
        assert min(row[f"{who} us"] for who in ("transformers", "ours", "cold")) > 0
        wrong = metadata.theirs(metadata.torch.tensor([(2, 6, 10), (1, 32, 28)]), layout)
        assert not metadata.equal(metadata.GridCache(layout).batch([(1, 32, 28), (2, 6, 10)]), wrong)
