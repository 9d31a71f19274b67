"""Invariant: what `--compare` found reaches the table, the JSON and the exit code, and only mmgraph's values decide."""

import dataclasses
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from mmgraph.capture import BucketGrid
from mmgraph.cli import app
from mmgraph.serving import job
from mmgraph.serving.app import execute
from mmgraph.serving.compare import TokenCheck
from mmgraph.serving.hub_compare import Closeness, Comparison, Passes, closeness, judge, rule
from mmgraph.serving.hub_loop import HUB_PHASES, HubPass
from mmgraph.serving.hub_ways import loop_way
from mmgraph.serving.job import RunSettings
from mmgraph.serving.loop import PassResult
from mmgraph.serving.model import small_config

TIMES = dict.fromkeys(HUB_PHASES, 0.5)


def a_pass(logits, features=()):
    logits = torch.as_tensor(logits)
    return HubPass(TIMES, list(features), logits, logits.argmax(-1))


@pytest.mark.parametrize(
    ("dtype", "wider", "off", "ok"),
    [
        (torch.bfloat16, torch.float32, 0.031, True),  # eps is 2^-7, and the largest value 4
        (torch.bfloat16, torch.float32, 0.032, False),
        (torch.float32, torch.float64, 3.9e-4, True),  # 1e-4 of 4
        (torch.float32, torch.float64, 4.1e-4, False),
    ],
)
def test_a_way_may_be_a_little_off_where_transformers_is_not(dtype, wider, off, ok):
    exact = torch.tensor([4.0, 1.0], dtype=wider)
    found = closeness([exact.to(dtype)], [exact - torch.tensor([0.0, off], dtype=wider)], [exact])
    assert found.hub_error == 0.0
    assert found.ok is ok
    assert found.relative == pytest.approx(off / 4)


def test_the_allowance_is_twice_transformers_own_error():
    exact = torch.tensor([4.0, 1.0])
    hub = torch.tensor([4.0, 1.5], dtype=torch.bfloat16)
    within = closeness([hub], [torch.tensor([4.0, 0.0]).bfloat16()], [exact])
    beyond = closeness([hub], [torch.tensor([4.0, -0.1]).bfloat16()], [exact])
    assert within.allowed == pytest.approx(2 * 0.5 + 4 * 2**-7)
    assert (within.ok, beyond.ok) == (True, False)
    assert "at least 0.0001" in rule(torch.float32)
    assert "at least" not in rule(torch.bfloat16)


def test_values_that_are_not_finite_do_not_pass_and_are_null_in_json():
    good = a_pass([[[1.0, 2.0]]])
    bad = a_pass([[[1.0, math.nan]]])
    way = judge("mmgraph", "", TIMES, 1.0, Passes(good, bad, good))
    assert not way.ok
    found = Comparison((way,), "mmgraph", "").to_dict()
    assert found["ok"] is False
    assert found["ways"][0]["logits"]["relative"] is None
    json.dumps(found, allow_nan=False)


def test_the_loop_s_tokens_count_while_both_were_fed_the_same():
    """Two requests, three steps: of the second one, the loop was fed another token in the last step."""
    one_hot = torch.eye(8)
    hub = a_pass(one_hot[torch.tensor([[1, 2], [3, 4], [5, 6]])])
    base = judge("transformers", "", TIMES, 1.0, Passes(hub, hub, hub))
    fed = torch.tensor([[1, 2], [3, 7], [5, 6]])
    ours = one_hot[torch.tensor([[1, 2], [3, 7], [0, 0]])]
    captured = PassResult({}, [], [], ours, ours.argmax(-1), 0, 0, 0)
    times = {"plan": 1.0, "encode": 2.0, "assemble": 4.0, "prefill": 8.0, "decode": 16.0}
    way = loop_way(base, hub, fed, captured, times, first=3.0)
    assert (way.tokens.compared, way.tokens.different) == (5, 2)
    assert way.seconds == {"tower": 2.0, "prefill": 13.0, "decode": 16.0}
    assert way.first_pass == 3.0


@pytest.fixture(scope="module")
def report():
    """One whole run, with a small model and a bucket for each function; what torch.compile gets runs untraced."""

    def smaller():
        config = small_config()
        config.vision_config.depth = 2
        config.vision_config.deepstack_visual_indexes = [0]
        config.text_config.num_hidden_layers = 1
        return config

    def largest(made):
        def grid(**options):
            sizes = dict(made(**options).buckets[-1])
            return BucketGrid(**{name: (size,) for name, size in sizes.items()})

        return grid

    with pytest.MonkeyPatch.context() as patched, torch.compiler.set_stance("force_eager"):
        patched.setattr("mmgraph.serving.app.small_config", smaller)
        for name in ("tower_grid", "prefill_grid", "decode_grid"):
            patched.setattr(job, name, largest(getattr(job, name)))
        settings = RunSettings(
            requests=3, device="cpu", decode_steps=1, passes=1, compare=True, compile_backend="eager"
        )
        return execute(settings)


def with_way(report, **changes):
    """The report with mmgraph's way, or another by `name`, changed."""
    name = changes.pop("name", "mmgraph")
    ways = tuple(dataclasses.replace(w, **changes) if w.name == name else w for w in report.compare.ways)
    return dataclasses.replace(report, compare=dataclasses.replace(report.compare, ways=ways))


def invoke(monkeypatch, report, *args):
    """The command, whose work is done; and what it asked for."""
    asked = []

    def done(settings, **_):
        asked.append(settings)
        return report

    monkeypatch.setattr("mmgraph.serving.app.execute", done)
    result = CliRunner().invoke(app, ["run", "--compare", *args])
    return result, asked


def test_a_run_shows_four_ways(report, monkeypatch):
    result, asked = invoke(monkeypatch, report)
    assert result.exit_code == 0, result.output
    assert (asked[0].compare, asked[0].compile_backend) == (True, "inductor")
    for words in ("transformers", "torch.compile", "mmgraph loop", "tower", "first pass", "6 of 6"):
        assert words in result.stdout
    assert "eager and captured agree" in result.stdout
    assert "mmgraph and transformers agree" in result.stdout
    assert "failed" not in result.output


def test_the_same_in_json(report, monkeypatch):
    result, asked = invoke(monkeypatch, report, "--json", "-", "--compile-backend", "aot_eager")
    assert result.exit_code == 0, result.output
    assert asked[0].compile_backend == "aot_eager"
    found = json.loads(result.stdout)["compare"]
    assert found["ok"] is True
    assert found["judged"] == "mmgraph"
    assert [way["name"] for way in found["ways"]] == [
        "transformers",
        "torch.compile",
        "mmgraph",
        "mmgraph loop",
    ]
    for way in found["ways"]:
        assert way["ok"] is True
        assert way["failure"] is None
        assert set(way["seconds"]) == set(HUB_PHASES)
        assert all(seconds > 0 for seconds in (*way["seconds"].values(), way["first_pass"]))
        assert (way["tokens"]["compared"], way["tokens"]["equal"]) == (6, True)
    assert [way["features"] is None for way in found["ways"]] == [False, False, False, True]


def test_without_it_there_is_nothing_to_show(report, monkeypatch):
    monkeypatch.setattr(
        "mmgraph.serving.app.execute", lambda *_, **__: dataclasses.replace(report, compare=None)
    )
    result = CliRunner().invoke(app, ["run"])
    assert result.exit_code == 0
    assert "torch.compile" not in result.stdout
    assert json.loads(CliRunner().invoke(app, ["run", "--json", "-"]).stdout)["compare"] is None


def test_a_way_that_failed_exits_with_2_after_the_table(report, monkeypatch):
    failed = with_way(
        report, name="torch.compile", seconds={}, first_pass=None, features=None, logits=None, tokens=None,
        failure="InvalidCxxCompiler: No working C++ compiler found in [x]",
    )  # fmt: skip
    result, _ = invoke(monkeypatch, failed)
    assert result.exit_code == 2
    words = "torch.compile failed: InvalidCxxCompiler: No working C++ compiler found in [x]"
    assert f"error: {words}\n" in result.stderr
    assert words in result.stdout
    assert "mmgraph and transformers agree" in result.stdout
    as_json, _ = invoke(monkeypatch, failed, "--json", "-")
    assert as_json.exit_code == 2
    found = json.loads(as_json.stdout)
    assert found["ok"] is True
    assert found["compare"]["ways"][1]["failure"].startswith("InvalidCxxCompiler")


def test_mmgraph_that_differs_exits_with_1_whatever_else_failed(report, monkeypatch):
    far = Closeness(0.1, 0.2, 0.01, 0.03)
    wrong = with_way(report, features=far)
    result, _ = invoke(monkeypatch, wrong)
    assert result.exit_code == 1
    assert "mmgraph and transformers differ beyond the tolerance" in result.stdout
    assert "eager and captured agree" in result.stdout
    both = with_way(wrong, name="torch.compile", failure="RuntimeError: no")
    assert invoke(monkeypatch, both)[0].exit_code == 1


def test_torch_compile_that_differs_is_a_finding(report, monkeypatch):
    off = with_way(
        report, name="torch.compile", logits=Closeness(0.1, 0.2, 0.01, 0.03), tokens=TokenCheck(6, 2, 1)
    )
    result, _ = invoke(monkeypatch, off)
    assert result.exit_code == 0
    assert "4 of 6, 1 ties" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--compile-backend", "eager"], "give --compare too"),
        (["--compare", "--compile-backend", "nonesuch"], "--compile-backend must be one of"),
    ],
)
def test_options_that_make_no_sense_exit_with_2_before_the_work(args, message, monkeypatch):
    monkeypatch.setattr("mmgraph.serving.app.random_model", lambda *_, **__: pytest.fail("the work began"))
    result = CliRunner().invoke(app, ["run", "--device", "cpu", *args])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
