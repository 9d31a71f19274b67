"""The ``mmgraph`` command. Tables for people, ``--json`` for machines, exit codes for scripts.

Exit codes: 0 all is well; 1 eager and captured, or mmgraph and transformers, differ beyond the tolerance; 2 the command
can't be done as asked.
Heavy packages are imported by the command that needs them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mmgraph

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="mmgraph",
    help="The multimodal half of a model, fast and graph-safe in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """The weights' dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Size(StrEnum):
    """Which configuration gets random weights."""

    auto = "auto"
    small = "small"
    real = "real"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mmgraph {mmgraph.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """The multimodal half of a model, fast and graph-safe in PyTorch."""


@app.command()
def run(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 6,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides random weights and prompts.")] = 0,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a device.")] = Device.auto,
    dtype: Annotated[
        Dtype | None, typer.Option(help="By default bfloat16 on CUDA and float32 on a CPU.", show_default=False)
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="A folder with photos. By default those inside scikit-image and scikit-learn.", metavar="DIR"
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Qwen3-VL checkpoint folder. By default random weights.", metavar="PATH"),
    ] = None,
    size: Annotated[
        Size, typer.Option(help="Configuration of the random weights; auto: real on CUDA, small on a CPU.")
    ] = Size.auto,
    decode_steps: Annotated[int, typer.Option(min=0, help="Greedy decode steps.")] = 4,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes; the table shows medians.")] = 3,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Serve the same requests by transformers' own calls too: as it is, with torch.compile, and "
            "accelerated by mmgraph. Compiling takes minutes.",
        ),
    ] = False,
    compile_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="torch.compile's backend for --compare; inductor by default.",
            show_default=False,
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="PATH|-", help="Write the report as JSON; - prints only JSON.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve real photos with a Qwen3-VL, eagerly and captured, and compare times and results."""
    from mmgraph.serving.errors import ServingError

    only_json = json_path == "-"
    console = _console(stderr=only_json)
    with _user_errors(ServingError, console):
        from mmgraph.serving.app import execute
        from mmgraph.serving.errors import RequestError
        from mmgraph.serving.hub_ways import INDUCTOR
        from mmgraph.serving.job import RunSettings
        from mmgraph.serving.table import show

        if compile_backend is not None and not compare:
            raise RequestError(
                "--compile-backend says how --compare compiles: give --compare too, or leave it out"
            )

        target = None if json_path is None or only_json else _writable(Path(json_path))
        settings = RunSettings(
            requests=requests,
            seed=seed,
            device=device.value,
            dtype=None if dtype is None else dtype.value,
            images=images,
            model=model,
            size=size.value,
            decode_steps=decode_steps,
            passes=passes,
            compare=compare,
            compile_backend=compile_backend or INDUCTOR,
        )
        report = execute(settings, progress=_progress(console), bars=console.is_terminal and not only_json)
    if only_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, console)
    if target is not None:
        with _user_errors(ServingError, console):
            _write(target, json.dumps(report.to_dict(), indent=2) + "\n")
    failures = () if report.compare is None else report.compare.failures
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if not report.ok:
        raise typer.Exit(1)
    if failures:
        raise typer.Exit(2)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, the GPU, and every attention backend with "usable" or the reason why not."""
    from mmgraph.doctor import diagnose, show

    diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        show(diagnosis, _console())


def main() -> None:
    """Run the command line; the entry point of the ``mmgraph`` script."""
    app(prog_name="mmgraph")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    # Outside a terminal rich assumes 80 columns, which would cut the tables in a log.
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def _progress(console: Console) -> Any:
    """A line on the console for what is going on, replaced by the next one on a terminal."""

    @contextmanager
    def tell(what: str) -> Iterator[None]:
        if not console.is_terminal:
            yield
            return
        if what.startswith("capturing"):
            console.print(f"[dim]{what}[/dim]")
            yield
            return
        with console.status(what):
            yield

    return tell


@contextmanager
def _user_errors(kind: type[Exception], console: Console) -> Iterator[None]:
    """Turn an error in what the user asked for into a line on stderr and exit code 2; warnings into lines."""

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = show_warning
            yield
    except kind as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _writable(path: Path) -> Path:
    """Refuse a place that can't be written before the work is done, not after."""
    from mmgraph.serving.errors import RequestError

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RequestError(f"--json takes a file in a folder that exists, or -, got {str(path)!r}")
    if path.exists() and not path.is_file():  # opening a pipe would wait for its reader, and end it
        writable = os.access(path, os.W_OK)
        reason = "it can't be written"
    else:
        writable, reason = _try_opening(path)
    if not writable:
        raise RequestError(f"--json takes a file that can be written, or -, got {str(path)!r}: {reason}")
    return path


def _try_opening(path: Path) -> tuple[bool, str]:
    """Open a file to write, and leave it as it was."""
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.resolve().unlink()  # the file, where the path is a link to it
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def _write(path: Path, text: str) -> None:
    from mmgraph.serving.errors import RequestError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"the report can't be written to {str(path)!r}: {error.strerror or error}"
        ) from error
