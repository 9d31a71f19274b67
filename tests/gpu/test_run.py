"""`mmgraph run` on a CUDA device: exit code 0, every graph hit, all passes within the stated tolerances."""

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


def test_compare_serves_all_ways_and_mmgraph_from_graphs():
    """Two prompts with photos and one without; Dynamo compiles tower and language model, and Inductor nothing."""
    args = [
        "run",
        "--device",
        "cuda",
        "--size",
        "small",
        "--dtype",
        "bfloat16",
        "--requests",
        "3",
        "--passes",
        "2",
    ]
    result = CliRunner().invoke(app, [*args, "--compare", "--compile-backend", "eager", "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["compare"]
    assert found["ok"] is True
    ways = {way["name"]: way for way in found["ways"]}
    assert list(ways) == ["transformers", "torch.compile", "mmgraph", "mmgraph loop"]
    for way in ways.values():
        assert way["failure"] is None
        assert all(seconds > 0 for seconds in way["seconds"].values())
        assert way["tokens"]["compared"] > 0
    # Two photos in each of the passes: the first and two more.
    assert "6 of 6 images from them" in ways["mmgraph"]["detail"]
    assert ways["mmgraph"]["features"]["relative"] > 0  # it isn't transformers compared with itself
