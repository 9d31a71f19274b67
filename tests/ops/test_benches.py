"""Invariant: the benchmarks of the ops run, check their results and write their JSON, on tiny sizes without a GPU."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["assembly", "attention", "regret", "rope"])
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


def test_a_smoke_run_of_the_choices_writes_a_table_that_is_read(tmp_path, pytestconfig):
    from mmgraph.ops.attention import choice_table

    root = pytestconfig.rootpath
    out = tmp_path / "sm00.json"
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(root / "bench" / "choices.py"), "--smoke", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for more in (
        ["--drawn", "40"],
        ["--only", "reference", "--below", "1e9"],
    ):  # anew, and then some of it again
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(out.read_text())
    assert {kind["width"] for kind in measured["kinds"]} == set(choice_table.WIDTHS)
    assert len(measured["drawn"]) == 40
    assert all(one["microseconds"]["reference"] > 0 for one in measured["drawn"])
    fit = [sys.executable, str(root / "bench" / "fit_choices.py"), str(out), "--processors", "2"]
    done = subprocess.run(fit, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    fitted = json.loads(out.read_text())
    assert {key: fitted[key] for key in measured} == measured  # nothing measured is lost
    table = choice_table.parse(fitted)
    assert table.processors == 2
    assert table.kinds
    assert all(set(costs.of_any) == {"reference"} for costs in table.kinds.values())


def test_drawn_lengths_are_lengths(pytestconfig):
    import importlib.util
    import random

    spec = importlib.util.spec_from_file_location("shapes", pytestconfig.rootpath / "bench" / "shapes.py")
    shapes = importlib.util.module_from_spec(spec)
    sys.modules["shapes"] = shapes  # a dataclass looks its module up
    spec.loader.exec_module(shapes)
    draw = random.Random(0)
    for _ in range(2000):
        batch = draw.randint(1, 300)
        tokens, ratio = draw.randint(batch, 70000), draw.choice((1, draw.uniform(1, 2), draw.uniform(2, 12)))
        lengths = shapes.spread(tokens, batch, ratio, draw)
        assert len(lengths) == batch
        assert sum(lengths) == tokens
        assert min(lengths) >= 0
        assert max(lengths) <= tokens / batch * max(ratio, 1) + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "nosuch"], "not usable here: nosuch"),
        (["--only", "reference", "--out", "missing.json"], "measure all backends first"),
        (["--out", "real.json"], "has another grid"),
    ],
)
def test_choices_spoil_no_table(options, words, tmp_path, pytestconfig):
    root = pytestconfig.rootpath
    real = (root / "ops" / "attention" / "choices" / "sm90.json").read_text()
    (tmp_path / "real.json").write_text(real)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(root / "bench" / "choices.py"), "--smoke", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["real.json"]
    assert (tmp_path / "real.json").read_text() == real
