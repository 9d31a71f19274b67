"""`mmgraph run` on a CUDA device: exit code 0, every graph hit, eager and captured within the stated tolerance."""

import json

import pytest
from typer.testing import CliRunner

from mmgraph.cli import app

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_configuration_hits_graphs_and_agrees(dtype, tmp_path):
    args = [
        "run",
        "--device",
        "cuda",
        "--size",
        "small",
        "--dtype",
        dtype,
        "--requests",
        "6",
        "--json",
        str(tmp_path / "out.json"),
    ]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["ok"] is True
    assert report["environment"]["device"] == "cuda"
    assert report["environment"]["dtype"] == dtype
    for use in report["graphs"]:
        assert use["report"]["backend"] == "cuda graphs"
        assert use["report"]["hits"] > 0
        assert not use["report"]["misses"]
    assert report["images_encoded"] == report["images_used"] - 1
    assert report["memory"]["peak_captured"] > report["memory"]["weights"]
