"""The report of ``mmgraph run`` as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from mmgraph.serving.hub_table import show_comparison
from mmgraph.serving.report import PhaseTime, RunReport


def show(report: RunReport, console: Console) -> None:
    """Print the report.

    Args:
        report: What a run found.
        console: Where to print.
    """
    env, model = report.environment, report.model
    console.print(
        f"[bold]{model['name']}[/bold], {model['weights']}, {model['parameters'] / 1e6:,.1f} M parameters"
    )
    console.print(
        f"{env['device_name']}, {env['dtype']}, torch {env['torch']}, tower attention: {env['attention']}, "
        f"seed {report.settings['seed']}"
    )
    for title, table in (_requests(report), _phases(report), _graphs(report), _differences(report)):
        console.print(f"\n[bold]{title}[/bold]")
        console.print(table)
    console.print(f"allowed: {report.tolerance_rule}")
    console.print(_tokens(report))
    console.print(_memory(report))
    for note in report.notes:
        console.print(f"[dim]{note}[/dim]")
    verdict = "[bold green]eager and captured agree[/bold green]"
    console.print(
        verdict if report.agrees else "[bold red]eager and captured differ beyond the tolerance[/bold red]"
    )
    if report.compare is not None:
        show_comparison(report.compare, report.settings["passes"], console)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _requests(report: RunReport) -> tuple[str, Table]:
    title = (
        f"{len(report.requests)} requests, {report.images_used} images in them, {report.images_encoded} encoded, "
        f"prefill steps of at most {report.settings['budget']} tokens"
    )
    table = _table("request", "tokens", "photos", "patches", "chunks")
    for number, request in enumerate(report.requests):
        images = request["images"]
        table.add_row(
            f"{number} {request['kind']}",
            str(request["tokens"]),
            ", ".join(image["name"] for image in images) or "-",
            ", ".join("x".join(str(n) for n in image["grid"][1:]) for image in images) or "-",
            " + ".join(str(count) for count in request["chunks"]),
        )
    return title, table


def _phases(report: RunReport) -> tuple[str, Table]:
    passes = report.settings["passes"]
    title = f"time of the whole batch, median of {passes} passes, the device waited for after each phase"
    table = _table("phase", "eager", "captured", "eager / captured")
    whole = PhaseTime("all", sum(p.eager for p in report.phases), sum(p.captured for p in report.phases))
    for phase in [*report.phases, whole]:
        ratio = f"{phase.eager / phase.captured:.2f}" if phase.captured and phase.eager > 1e-6 else "-"
        table.add_row(phase.name, f"{phase.eager * 1e3:.2f} ms", f"{phase.captured * 1e3:.2f} ms", ratio)
    return title, table


def _graphs(report: RunReport) -> tuple[str, Table]:
    backend = report.graphs[0].report.backend
    title = f"graphs ({backend}), calls of {report.graphs[0].passes} captured passes"
    table = _table("function", "buckets", "precompile", "hit", "missed", "padding", "static", "pool")
    for use in report.graphs:
        used = sum(1 for bucket in use.report.buckets if bucket.hits)
        table.add_row(
            use.name,
            f"{used} of {len(use.report.buckets)} used",
            f"{use.precompile_seconds:.2f} s",
            str(use.report.hits),
            str(use.missed),
            f"{use.padding:.0%}",
            size(use.report.static_bytes),
            size(use.report.pool_bytes),
        )
    return title, table


def _differences(report: RunReport) -> tuple[str, Table]:
    table = _table("values", "absolute", "relative", "allowed", "")
    for d in report.differences:
        mark = "[green]ok[/green]" if d.ok else "[red]too large[/red]"
        table.add_row(d.name, f"{d.absolute:.3g}", f"{d.relative:.3g}", f"{d.allowed:.3g}", mark)
    return "largest difference, eager against captured", table


def _tokens(report: RunReport) -> str:
    tokens = report.tokens
    if tokens.equal:
        return f"greedy tokens: all {tokens.compared} equal"
    return (
        f"greedy tokens: {tokens.different} of {tokens.compared} differ; in {tokens.ties} of them the eager logits of "
        "the two are a tie within the tolerance"
    )


def _memory(report: RunReport) -> str:
    m = report.memory
    line = (
        f"memory: weights {size(m.weights)}, key-value cache {size(m.cache)}, static buffers {size(m.static)}, "
        f"graph pools {size(m.pool)}"
    )
    if m.peak_eager is not None and m.peak_captured is not None:
        line += f", peak eager {size(m.peak_eager)}, peak captured {size(m.peak_captured)}"
    return line


def size(count: int) -> str:
    """Bytes in words, such as ``12.0 MiB``."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
