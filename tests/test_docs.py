"""Invariant: every Python example in README.md and docs/ and in docstrings runs as written and prints what it shows.

Blocks of the README stand alone; those of a page of the manual share names from top to bottom. A block that a ``text``
block follows at once must print exactly that text (``...`` stands for anything). A block below ``<!-- cuda -->`` needs
a GPU and stands alone: it is compiled everywhere and run where there is one.
"""

import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mmgraph
import mmgraph.capture
import mmgraph.ops
from mmgraph.capture import policies
from mmgraph.capture.resolving import Resolver

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<cuda><!-- cuda -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n*^```text\n(?P<shown>.*?)^```\n)?",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    code: str
    shown: str | None
    cuda: bool

    def run(self, names: dict[str, Any]) -> None:
        program = compile("\n" * self.line + self.code, str(self.page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, names)
        if self.shown is not None:
            got = "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())
            same = doctest.OutputChecker().check_output(self.shown, got, doctest.ELLIPSIS)
            assert same, f"{self.page}:{self.line} shows\n{self.shown}\nbut prints\n{got}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            page,
            text.count("\n", 0, match.start("code")),
            match["code"],
            match["shown"],
            match["cuda"] is not None,
        )
        for match in BLOCK.finditer(text)
    ]
    assert len(found) == text.count("```python\n"), (
        f"{page} has a Python block that this test can't find the end of"
    )
    return found


def examples() -> list[Any]:
    """One parameter for each group of blocks that share names."""
    groups = []
    for page in PAGES:
        blocks = blocks_of(page)
        alone = [block for block in blocks if block.cuda or page.parent == ROOT]
        together = [block for block in blocks if block not in alone]
        for group in [*([together] if together else []), *([block] for block in alone)]:
            name = f"{page.relative_to(ROOT)}:{group[0].line}"
            groups.append(pytest.param(group, id=name, marks=pytest.mark.cuda if group[0].cuda else ()))
    return groups


@pytest.mark.parametrize("blocks", examples())
def test_examples_run_as_written(blocks: list[Block]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        block.run(names)


def test_examples_that_need_a_gpu_are_python() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            compile(block.code, str(page), "exec")


def modules_with_examples() -> list[str]:
    found = []
    for folder, _, files in os.walk(ROOT / "mmgraph", followlinks=True):
        for name in files:
            path = Path(folder, name)
            if path.suffix == ".py" and ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def test_some_docstrings_have_examples() -> None:
    assert "mmgraph.capture.manager" in modules_with_examples()


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("module", "page"), [(mmgraph, "mmgraph"), (mmgraph.ops, "ops"), (mmgraph.capture, "capture")]
)
def test_every_public_name_has_an_api_entry(module: Any, page: str) -> None:
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"^::: " + re.escape(module.__name__) + r"\.(\w+)$", text, re.M))
    aliases = (
        {"VisionAttention", "VisionEmbedder", "MultimodalError", "__version__"} if module is mmgraph else set()
    )
    assert entries - {"errors"} == set(module.__all__) - aliases


def test_paths_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:tests|bench|ops|capture|mmgraph|docs)/[\w./-]+\.(?:py|md))`", text):
            if not (ROOT / path).exists():
                missing.append(f"{page.relative_to(ROOT)}: {path}")
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


def first_column(page: str, heading: str) -> set[str]:
    """The names in backquotes in the first column of the first table below a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"{heading}\n", 1)[1]
    table = text[text.index("\n|---") :].split("\n\n", 1)[0]
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def test_the_command_s_options_and_report_are_listed() -> None:
    import typer.main

    from mmgraph.cli import app
    from mmgraph.serving.report import RunReport

    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {option for parameter in run.params for option in parameter.opts} - {"--help"}
    assert {entry.split()[0] for entry in first_column("guide/run.md", "## mmgraph run")} == options
    keys = {field.name for field in dataclasses.fields(RunReport)} | {"ok"}
    assert first_column("guide/run.md", "## JSON") == keys


def test_every_error_of_the_embedder_is_listed() -> None:
    errors = {kind.__name__ for kind in mmgraph.MultimodalError.__subclasses__()}
    assert first_column("guide/embedder.md", "## Errors and isolation") == errors


def test_every_backend_is_listed() -> None:
    names = {report.name for report in mmgraph.ops.explain_backends(device="cpu")}
    assert first_column("guide/ops.md", "## Backends") == names


def test_every_kind_of_miss_is_listed() -> None:
    source = inspect.getsource(Resolver) + inspect.getsource(policies)
    reasons = set(re.findall(r'(?:None, |or |else |return )f?"([a-z][a-z ]+)(?::|")', source))
    reasons -= {"eval", "none", "label", "no bucket holds the call"}  # words of messages; the last can't happen
    assert first_column("guide/capture.md", "## Misses") == reasons
    assert len(reasons) > 3


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    scripts = [
        path.name for path in (ROOT / "bench").glob("*.py") if "argparse" in path.read_text(encoding="utf-8")
    ]
    assert [name for name in scripts if f"bench/{name}" not in text] == []
    assert scripts
