"""Invariant: FlashAttention 3's op gets its arguments by the names in its schema, and its own defaults for the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("namespace", "order"), [("fa3_fwd", "released"), ("flash_attn_3", "released"), ("fa3_fwd", "turned")]
)
def test_arguments_are_placed_by_the_schema(namespace, order, pytestconfig):
    path = os.pathsep.join([str(pytestconfig.rootpath), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("played_fa3.py")), namespace, order],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "placed"
