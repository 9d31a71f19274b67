"""The command: what it prints, what it writes, and its exit codes 0, 1 and 2."""

import json
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mmgraph
from mmgraph.capture import BucketGrid
from mmgraph.cli import app
from mmgraph.serving import job
from mmgraph.serving.language import LanguageModel
from mmgraph.serving.model import random_model, small_config

SMALL = ["run", "--device", "cpu", "--requests", "4", "--decode-steps", "1", "--passes", "1"]


@pytest.fixture
def one_bucket(monkeypatch):
    """Each function is captured for its largest sizes alone: a bucket costs more than all else that a run does.

    The run whose table and report are looked at has the buckets that it always has.
    """

    def largest(made):
        def grid(**options):
            sizes = dict(made(**options).buckets[-1])
            return BucketGrid(**{name: (size,) for name, size in sizes.items()})

        return grid

    for name in ("tower_grid", "prefill_grid"):
        monkeypatch.setattr(job, name, largest(getattr(job, name)))


def invoke(*args):
    return CliRunner().invoke(app, list(args))


def test_version_and_module_entry():
    done = subprocess.run(
        [sys.executable, "-m", "mmgraph", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"mmgraph {mmgraph.__version__}\n"


def test_importing_the_command_loads_nothing_heavy():
    code = (
        "import sys, mmgraph.cli; "
        "print(sorted({'torch', 'triton', 'transformers', 'PIL', 'skimage', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """One whole run with a seed: what it printed, and the report that it wrote."""
    target = tmp_path_factory.mktemp("seeded") / "out.json"
    result = invoke(*SMALL, "--seed", "7", "--json", str(target))
    assert result.exit_code == 0, result.output
    return result, json.loads(target.read_text())


def test_run_prints_its_table_and_writes_json(seeded):
    result, report = seeded
    for word in ("plan", "encode", "assemble", "prefill", "decode", "precompile", "hit", "missed", "padding"):
        assert word in result.stdout
    assert "eager and captured agree" in result.stdout
    assert "Speed shows on a GPU only" in result.stdout
    assert report["ok"] is True
    assert report["settings"]["seed"] == 7
    assert [r["kind"] for r in report["requests"]] == [
        "photo",
        "the same photo again",
        "text only",
        "longer than a step",
    ]
    assert report["images_used"] == 3
    assert report["images_encoded"] == 2
    assert len(report["requests"][3]["chunks"]) > 1
    assert [p["name"] for p in report["phases"]] == ["plan", "encode", "assemble", "prefill", "decode"]
    assert all(p["eager"] > 0 and p["captured"] > 0 for p in report["phases"])
    assert {g["name"]: bool(g["report"]["hits"]) for g in report["graphs"]} == dict.fromkeys(
        ("tower", "prefill", "decode"), True
    )
    assert all(d["ok"] and d["absolute"] <= d["allowed"] for d in report["differences"])
    assert report["tokens"]["compared"] == 8
    assert report["memory"]["static"] > 0


def test_json_to_stdout_is_only_json_and_the_largest_seed_will_do(one_bucket):
    largest = 2**63 - 1
    result = invoke(*SMALL, "--json", "-", "--decode-steps", "0", "--seed", str(largest))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["settings"]["seed"] == largest
    assert [g["name"] for g in report["graphs"]] == ["tower", "prefill"]


def test_a_difference_beyond_the_tolerance_exits_with_1(monkeypatch, one_bucket):
    made = LanguageModel.decode_manager

    def wrong(self, grid):
        manager = made(self, grid)

        class Wrong:
            def precompile(self, example, *, progress):
                manager.precompile(example, progress=progress)
                return self

            def __call__(self, **inputs):
                return {"logits": manager(**inputs)["logits"] + 0.01}

            def report(self):
                return manager.report()

        return Wrong()

    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "decode_manager", wrong)
        result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "differ beyond the tolerance" in result.stdout
    assert "too large" in result.stdout


def test_photos_from_a_folder(tmp_path):
    for number, size in enumerate([(90, 60), (50, 120)]):
        Image.effect_noise(size, 40 + number).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    # With all buckets: rows of so small photos in the largest one are further from the eager ones than the rule allows.
    result = invoke(*SMALL, "--images", str(tmp_path), "--decode-steps", "0", "--json", "-")
    assert result.exit_code == 0, result.output
    names = {i["name"] for r in json.loads(result.stdout)["requests"] for i in r["images"]}
    assert names == {"0.png", "1.png"}
    assert "broken.png" in result.stderr


def test_a_checkpoint_folder(tmp_path, seeded, one_bucket):
    model = random_model(small_config(), device=torch.device("cpu"), dtype=torch.float32, seed=7)
    model.save_pretrained(tmp_path)
    result = invoke(*SMALL, "--model", str(tmp_path), "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"]["weights"] == "checkpoint"
    of_the_seed = seeded[1]["token_ids"]  # eager passes chose them, whatever the buckets
    text_only = 2  # its prompt depends on --seed, its weights don't
    assert report["token_ids"][text_only] != of_the_seed[text_only]
    same = json.loads(invoke(*SMALL, "--seed", "7", "--model", str(tmp_path), "--json", "-").stdout)
    assert same["token_ids"] == of_the_seed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--images", "/absent"], "not a folder"),
        (["--model", "/absent"], "has none"),
        (["--json", "/absent/x.json"], "folder that exists"),
        (["--json", "/proc/x"], "file that can be written"),
        (["--json", "/"], "folder that exists"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**63)], "--seed"),
        (["--seed", str(2**64 - 1)], "--seed"),
        (["--seed", "9" * 23], "--seed"),
        (["--requests", "0"], "--requests"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--decode-steps", "-1"], "--decode-steps"),
        (["--unknown"], "--unknown"),
    ],
)
def test_what_cannot_be_done_as_asked_exits_with_2(args, message, monkeypatch):
    monkeypatch.setattr("mmgraph.serving.app.random_model", lambda *_, **__: pytest.fail("the work began"))
    result = invoke(*SMALL, *args)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_report_that_can_no_longer_be_written_exits_with_2_after_the_table(one_bucket):
    result = invoke(*SMALL, "--decode-steps", "0", "--json", "/dev/full")
    assert result.exit_code == 2
    assert "eager and captured agree" in result.stdout
    assert "the report can't be written to '/dev/full': No space left" in result.stderr
    assert "Traceback" not in result.output


def test_the_check_of_the_report_s_place_leaves_it_as_it_was(tmp_path):
    place, link = tmp_path / "report.json", tmp_path / "link.json"
    link.symlink_to(place)
    for path in (place, link):
        assert invoke("run", "--images", "/absent", "--json", str(path)).exit_code == 2
        assert not place.exists()
        assert link.is_symlink()
    place.write_text("before")
    assert invoke("run", "--images", "/absent", "--json", str(place)).exit_code == 2
    assert place.read_text() == "before"


def test_cuda_without_a_device_exits_with_2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("run", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees none" in result.output


EXTRAS = ("transformers", "PIL", "skimage")

# One interpreter has torch, which takes the longest, and none of the extras; a fork of it is without one of them.
WITHOUT = f"""
import os, sys
import torch
assert not set({EXTRAS}) & set(sys.modules)
from mmgraph.cli import main
for module in {EXTRAS}:
    child = os.fork()
    if not child:
        sys.modules[module] = None
        main()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"exit {{status}} without {{module}}", file=sys.stderr)
"""


def test_a_missing_extra_is_named():
    done = subprocess.run([sys.executable, "-c", WITHOUT, *SMALL], capture_output=True, text=True, check=True)
    said = re.findall(r"(.*?)^exit (\S+) without (\w+)\n", done.stderr, re.M | re.S)
    assert [(module, status) for _, status, module in said] == [(module, "2") for module in EXTRAS]
    for words, _, _ in said:
        assert 'pip install "mmgraph[hf,photos]"' in words
    assert "Traceback" not in done.stderr


def test_doctor_names_every_backend():
    table = invoke("doctor")
    assert table.exit_code == 0, table.output
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["numpy"]
    backends = {b["name"]: b for b in found["backends"]}
    assert backends["reference"]["usable"]
    assert {"reference", "triton", "fa2"} <= set(backends)
    for name, backend in backends.items():
        assert name in table.stdout
        assert backend["usable"] or backend["reason"]
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["choice"] in table.stdout.replace("\n", " ")


def test_doctor_says_what_the_environment_asks_for(monkeypatch):
    from mmgraph.ops.attention import settings

    cases = {
        "reference": "reference, asked for by",
        "mesure": "no attention backend is named",
        "triton": "can't serve this call: it needs a GPU",
    }
    for name, words in cases.items():
        monkeypatch.setenv(settings.VARIABLE, name)
        settings._from_environment.cache_clear()
        try:
            result = invoke("doctor", "--json")
        finally:
            settings._from_environment.cache_clear()
        assert result.exit_code == 0
        assert words in json.loads(result.stdout)["choice"]
