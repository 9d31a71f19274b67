"""Invariant: importing the ops registers them once, touches no GPU and imports no kernel or optional package."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import mmgraph.ops
assert torch.ops.mmgraph.varlen_attention.default is not None
for name in ("triton.language", "flash_attn", "transformers"):
    assert name not in sys.modules, name
assert not torch.cuda.is_initialized()
"""


def test_the_import_is_light():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)


@pytest.mark.parametrize("statement", ["import ops", "import capture"])
def test_another_name_is_refused(statement, pytestconfig):
    done = subprocess.run(
        [sys.executable, "-c", statement],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "imported once" in done.stderr
