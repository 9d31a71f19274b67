"""Invariant: the benchmarks run, find equal results, and the manual's tables are what their results say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
    results = {"environment": {"device": "X", "torch": "1", "date": "2030-01-02T00:00"}, "rows": []}
    results["rows"] = [
        {"kernels": 1, **{f"{n} us": 2.0 for n in ("eager", "manager", "by hand", "bare", "reduce-overhead")}}
    ]
    (tmp_path / "replay.json").write_text(json.dumps(results))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = "before\n<!-- table: replay.json -->\nold\n<!-- end of table -->\nafter"
    made = tables.filled(page)
    assert "| 1 | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 |" in made
    assert "old" not in made
    assert tables.filled(made) == made


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
    "arguments",
    [[f"{name}.py", "--smoke"] for name in ("assembly", "attention", "replay", "rope")],
)
def test_the_benchmarks_run_at_small_sizes(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    name, *options = arguments
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(ROOT / "bench" / name), *options, "--out", str(out)],
        check=True,
        env=environment,
        timeout=200,
    )
    results = json.loads(out.read_text())
    assert results["rows"]
    assert results["environment"]["torch"]
