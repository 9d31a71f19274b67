"""Invariant: the Triton kernels equal the reference, run on a CPU by Triton's interpreter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


# The windows' in three parts, since they take some minutes.
@pytest.mark.parametrize(
    "name",
    ["", "_windows 0", "_windows 1", "_windows 2", "_tails", "_cudnn", "_rotary", "_assembly", "_rowwise"],
)
def test_kernels_equal_the_reference_under_the_interpreter(name, pytestconfig):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    root = pytestconfig.rootpath
    path = [str(root), str(root / "tests" / "support"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    file, *part = name.split(" ")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(f"interpreted{file}.py")), *part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("same")
