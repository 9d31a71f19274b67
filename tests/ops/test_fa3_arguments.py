"""Invariant: FlashAttention 3's op gets its arguments by the names in its schema, and its own defaults for the rest."""

import os
import subprocess
import sys
from pathlib import Path


def test_arguments_are_placed_by_the_schema(pytestconfig):
    """For both packages that have the op, and where a release has its arguments in another order."""
    path = os.pathsep.join([str(pytestconfig.rootpath), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("played_fa3.py"))],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["fa3_fwd placed", "flash_attn_3 placed", "fa3_fwd placed"]
