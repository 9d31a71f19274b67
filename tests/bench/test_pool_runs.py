"""Invariant: the pool's simulation runs and repeats itself, and the manual's table of it is what its results say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pool_runs", ROOT / "bench" / "pool_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_simulation_repeats_itself_in_a_full_pool() -> None:
    bench = load()
    first = bench.simulate(16, 400)
    assert bench.simulate(16, 400) == first
    assert first["evictions"] > 100
    assert 1 <= first["runs per image"] <= first["most runs of an image"]
    assert 0 < first["padding"] < 0.05
    assert bench.simulate(1, 400)["padding"] == 0


def test_the_table_in_the_manual_is_the_results() -> None:
    results = json.loads((ROOT / "bench" / "results" / "cpu" / "pool_runs.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "guide" / "pool.md").read_text(encoding="utf-8")
    for row in results["results"]:
        shares = (row["images in one run"], row["most runs of an image"], row["padding"])
        cells = "{:.0%} | {} | {:.1%} |".format(*shares)
        assert f"| {row['page_rows']} | {row['runs per image']:.2f} | {cells}" in page
    sizes = results["rows of an image"]
    assert f"{results['images']:,} images\nof {sizes['least']} to {sizes['most']} rows go" in page
    several = next(row for row in results["results"] if row["page_rows"] == 16)
    assert (
        f"({several['batches of several images in one run']:.1%} of such batches with pages of 16 rows)" in page
    )
