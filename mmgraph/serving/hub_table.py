"""What ``mmgraph run --compare`` found, as a table for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmgraph.serving.compare import TokenCheck
from mmgraph.serving.hub_compare import Closeness, Comparison, Way
from mmgraph.serving.hub_loop import HUB_PHASES


def show_comparison(comparison: Comparison, passes: int, console: Console) -> None:
    """Print the comparison, what each way is, and whether mmgraph agrees with transformers.

    Args:
        comparison: What a run found.
        passes: Timed passes of each way.
        console: Where to print.
    """
    console.print(
        f"\n[bold]the same requests by transformers' own calls, one after the other, median of {passes} passes[/bold]"
    )
    console.print(_ways(comparison))
    for way in comparison.ways:
        console.print(f"[dim]{way.name}: {escape(way.detail)}[/dim]")
    console.print(
        "[dim]tower: pixels to rows; prefill: the rest of the prompts' forward, with upload and merge. first pass: "
        "with compiling or capturing. features, tokens: largest difference over the largest value, and equal tokens, "
        "against transformers; every way decodes with its tokens.[/dim]"
    )
    console.print(f"allowed: {comparison.rule}")
    for failure in comparison.failures:
        console.print(f"[red]{escape(failure)}[/red]")
    console.print(
        f"[bold green]{comparison.judged} and transformers agree[/bold green]"
        if comparison.ok
        else f"[bold red]{comparison.judged} and transformers differ beyond the tolerance[/bold red]"
    )


def _ways(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    columns = ("way", *HUB_PHASES, "all", "speedup", "first pass", "features", "tokens")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    base = sum(comparison.ways[0].seconds.values())
    for way in comparison.ways:
        if way.failure is not None:
            table.add_row(way.name, *["-"] * (len(columns) - 2), "[red]failed[/red]")
            continue
        whole = sum(way.seconds.values())
        table.add_row(
            way.name,
            *[f"{way.seconds[phase] * 1e3:.2f} ms" for phase in HUB_PHASES],
            f"{whole * 1e3:.2f} ms",
            f"{base / whole:.2f}",
            "-" if way.first_pass is None else f"{way.first_pass:.2f} s",
            _features(way),
            _tokens(way.tokens),
        )
    return table


def _features(way: Way) -> str:
    found: Closeness | None = way.features
    return "-" if found is None else f"{found.relative:.2g}"


def _tokens(found: TokenCheck | None) -> str:
    if found is None:
        return "-"
    ties = f", {found.ties} ties" if found.ties else ""
    return f"{found.compared - found.different} of {found.compared}{ties}"
