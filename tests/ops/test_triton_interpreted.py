"""Invariant: the Triton kernels equal the reference, run on a CPU by Triton's interpreter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["", "_windows", "_tails", "_cudnn", "_rotary"])
def test_kernels_equal_the_reference_under_the_interpreter(name, pytestconfig):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = [str(pytestconfig.rootpath), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(f"interpreted{name}.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("same")
