"""Invariant: the benchmarks run, find equal results, and the manual's tables are what their results say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_in_the_manual_are_the_results() -> None:
    tables = load("tables")
    found = 0
    for name in tables.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.filled(text) == text
        found += len(tables.BLOCK.findall(text))
    assert found >= 5


def test_a_table_follows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load("tables")
    results = {"environment": {"device": "X", "torch": "1", "date": "2030-01-02T00:00"}}
    results["summary"] = [{"what": "regret", "shapes": 3, "median": 0.25, "mean": 0.5, "worst": 1.0}]
    results["summary"][0] |= {"90th percentile": 0.75, "95th percentile": 0.8}
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = "before\n<!-- table: regret.json -->\nold\n<!-- end of table -->\nafter"
    made = tables.filled(page)
    assert tables.PENDING in made
    assert "old" not in made
    (tmp_path / "regret.json").write_text(json.dumps(results))
    made = tables.filled(made)
    assert "| regret | 3 | 25.0% | 50.0% | 75.0% | 80.0% | 100.0% |" in made
    assert tables.PENDING not in made
    assert tables.filled(made) == made


def test_the_table_of_calls_has_a_place_for_what_was_not_measured() -> None:
    def row(way: str, host: float | None, equal: bool | None) -> dict[str, Any]:
        times = {"host us": host, "in a row us": 2.0, "device us": None}
        return {"kernels": 10, "parameters": 600, "way": way, **times, "equal": equal}

    results = {
        "environment": {"device": "X", "torch": "1", "date": "2030-01-02T00:00"},
        "rows": [row("eager", 7.0, True), row("manager", 3.0, False), row("reduce-overhead", None, None)],
        "own": [{"kernels": 10, "parameters": 600, "stage_kernel": 1.5}],
        "guard": [{"parameters": 600, "watched": 603, "epoch us": 4.0, "always us": 9.0}],
    }
    made = load("tables").RENDER["replay"](results)
    assert "| 10, 600 | 7.0 | 3.0 |  |" in made
    assert "1 of 2 results are equal" in made
    assert "| 10, 600 | 1.5 |" in made
    assert "| 600 | 603 | 4.0 | 9.0 |" in made


def test_the_table_of_rotary_positions_has_both_directions() -> None:
    times = {f"{n} ms": 0.5 for n in ("eager", "compiled", "mmgraph", "in place", "copy limit")}
    row = {"shape": "5, 4/2 x 8", "what": "rotation", **times}
    results = {"environment": {"device": "X", "torch": "1", "date": "2030-01-02T00:00"}, "rows": [row]}
    results["backward"] = [{**row, "what": "backward"}]
    made = load("tables").RENDER["rope"](results)
    assert "| 5, 4/2 x 8, rotation | 0.5000 | 0.5000 | 0.5000 | 0.5000 | 0.5000 |" in made
    assert "| 5, 4/2 x 8, backward | 0.5000 | 0.5000 | 0.5000 | 0.5000 |\n" in made + "\n"


WRONG = """
        /*4940*/                   UMOV UR6, UR12 ;
        /*4980*/                   UIADD3 UR4, UP0, UR5, 0x40, URZ ;
        /*4990*/                   UIADD3.X UR5, UR5, -0x7fffffe0, URZ, UP0, !UPT ;
"""
RIGHT = """
        /*0a00*/                   USEL UR4, UR5, URZ, UP1 ;
        /*0a10*/                   UMOV UR4, URZ ;
        /*0a20*/                   UIADD3.X UR9, UR4, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0a30*/                   UIADD3.X UR9, UR8, 0x20, URZ, UP0, !UPT ;
"""


def test_a_wrong_descriptor_is_found_in_machine_code() -> None:
    found = load("machine_code").wrong_descriptors
    setup = "        /*4000*/                   USEL UR5, UR17, UR5, !UP0 ;"
    assert [line.split(":")[0] for line in found(setup + WRONG)] == ["4990"]
    assert found(RIGHT) == []
    assert len(found(RIGHT.replace("UMOV UR4, URZ", "UMOV UR4, UR7"))) == 1
    # A small negative number that is added to an address.
    assert found(setup + WRONG.replace("-0x7fffffe0", "-0x1")) == []
    # The other two swizzles.
    for constant in ("0x40000020", "-0x3fffffe0"):
        assert len(found(setup + WRONG.replace("-0x7fffffe0", constant))) == 1


@pytest.mark.parametrize(
    "stem", ["graph_memory", "replay", "soak"]
)  # the ops' are in tests/ops/test_benches.py
def test_the_benchmarks_run_at_small_sizes(stem: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(ROOT / "bench" / f"{stem}.py"), "--smoke", "--out", str(out)],
        check=True,
        env=environment,
        timeout=200,
    )
    results = json.loads(out.read_text())
    assert results["rows"]
    assert results["environment"]["torch"]
    assert load("tables").RENDER[stem](results).startswith("cpu, torch ")
    if stem == "replay":
        ways = {row["way"] for row in results["rows"] if row["equal"]}
        assert ways == {"eager", "manager", "always", "lease", "into", "stage", "varying"}
    if stem == "soak":
        assert results["hits"] == results["calls"] == results["asked"]
        assert results["failures"] == 0
