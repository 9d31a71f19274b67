"""Invariant: the benchmarks of the ops run, check their results and write their JSON, on tiny sizes without a GPU."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["assembly", "attention"])
def test_a_smoke_run_writes_its_results(name, tmp_path, pytestconfig):
    root = pytestconfig.rootpath
    out = tmp_path / "results" / f"{name}.json"
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(root / "bench" / f"{name}.py"), "--smoke", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert results["benchmark"] == name
    assert {"date", "torch", "device"} <= set(results["environment"])
    assert results["rows"]
