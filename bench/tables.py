"""Writes the tables of the manual from the results that they show.

A page holds ``<!-- table: bench/results/h200/NAME.json -->`` and, behind the table, ``<!-- end of table -->``;
what stands between is made here, or says that there is no such file yet. A test runs the check.

    python bench/tables.py [--check]
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/benchmarks.md")
BLOCK = re.compile(r"(<!-- table: (?P<path>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(header), " | ".join(["---", *["---:"] * (len(header) - 1)])]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def run(data: dict[str, Any]) -> str:
    phases = [(p["name"], p["eager"] * 1e3, p["captured"] * 1e3) for p in data["phases"]]
    phases.append(("all", sum(p[1] for p in phases), sum(p[2] for p in phases)))
    table = markdown(
        ("phase", "eager ms", "captured ms", "ratio"),
        [
            (name, f"{eager:.2f}", f"{captured:.2f}", f"{eager / captured:.2f}")
            for name, eager, captured in phases
        ],
    )
    graphs = "; ".join(
        f"{g['name']} {g['report']['hits']} of {g['report']['calls']} calls hit, {g['padding']:.0%} padding"
        for g in data["graphs"]
    )
    worst = max(d["absolute"] for d in data["differences"])
    environment = data["environment"]
    return (
        f"{data['model']['name']}, {environment['device_name']}, {environment['dtype']}, torch {environment['torch']}, "
        f"{len(data['requests'])} requests:\n\n{table}\n\n"
        f"Graphs: {graphs}. Largest difference between the two: {worst:g}."
    )


def assembly(data: dict[str, Any]) -> str:
    def table(rows: list[dict[str, Any]], names: Sequence[str], form: str) -> str:
        made = [(_case(row), *(format(row[name], form) for name in names)) for row in rows]
        return markdown(("rows, items x rows", *names), made)

    peers = ("masked_scatter", "loop of slices", "cat + index put")
    device = (*(f"{name} ms" for name in peers), "pool, map ms", "copy limit ms", "goal ms")
    kernels = [name for name in data["rows"][0] if name.endswith("kernels ms")]
    host = [
        name
        for name in data["host"][0]
        if name.endswith((" wall us", "allocation host us")) or name.startswith("idle")
    ]
    backward = [name for name in data["backward"][0] if name.endswith("kernels ms")]
    rest = [[name for name in data[part][0] if name.endswith(" ms")] for part in ("deepstack", "merge")]
    widths = [(str(r["width"]), f"{r['mmgraph ms']:.4f}", f"{r['copy limit ms']:.4f}") for r in data["widths"]]
    return (
        f"{_where(data)}{table(data['rows'], device, '.4f')}\n\n"
        "What a profiler sums of each call's kernels and copies (a `RowMap` is sent to the device in the call):\n\n"
        f"{table(data['rows'], kernels, '.4f')}\n\n"
        "Wall time, from an idle device to an idle device, and what an idle device and a bare allocation take:\n\n"
        f"{table(data['host'], host, '.1f')}\n\n"
        "Backward, to the pool alone and to pool and table, kernels and copies summed:\n\n"
        f"{table(data['backward'], backward, '.4f')}\n\n"
        f"Deepstack rows of three levels, and the mask form:\n\n{table(data['deepstack'], rest[0], '.4f')}\n\n"
        f"{table(data['merge'], rest[1], '.4f')}\n\n"
        "Other widths, 8192 rows with 8 items of 768:\n\n"
        f"{markdown(('width', 'pool, map ms', 'copy limit ms'), widths)}"
    )


def planning(data: dict[str, Any]) -> str:
    rows = [
        (name, str(row["ranges"]), f"{row['median_us']:.0f}", f"{row['min_us']:.0f}")
        for name, row in data.items()
        if isinstance(row, dict)
    ]
    where = f"Python {data['python']}, {data['date']}, on the GPU's host:\n\n"
    return where + markdown(("batch", "ranges", "median us", "least us"), rows)


def _case(row: dict[str, Any]) -> str:
    return f"{row['rows']}, {row['items']}"


def attention(data: dict[str, Any]) -> str:
    shapes = list(dict.fromkeys(r["shape"] for r in data["rows"]))
    found = {(r["shape"], r["backend"].split(" (")[0]): r for r in data["rows"]}
    chosen = {r["shape"]: r["backend"] for r in data["rows"] if r["backend"].startswith("None")}
    names = list(
        dict.fromkeys(
            r["backend"]
            for r in data["rows"]
            if " " not in r["backend"] and not r["backend"].startswith("None")
        )
    )

    def cell(shape: str, name: str, key: str = "ms", form: str = ".4f") -> str:
        row = found.get((shape, name))
        return "" if row is None else format(row[key], form)

    times = markdown(
        (
            "sequences x length, heads, width",
            *(f"{n} ms" for n in names),
            "no name: ms",
            "chosen",
            "its TFLOP/s",
        ),
        [
            (
                shape,
                *(cell(shape, name) for name in names),
                cell(shape, "None"),
                chosen[shape].removeprefix("None (").removesuffix(")"),
                cell(shape, "None", "TFLOP/s", ".0f"),
            )
            for shape in shapes
        ],
    )
    peers = list(
        dict.fromkeys(r["backend"] for r in data["rows"] if " " in r["backend"] and "None" not in r["backend"])
    )
    others = markdown(
        ("sequences x length, heads, width", *(f"{n} ms" for n in peers)),
        [(shape, *(cell(shape, name) for name in peers)) for shape in shapes],
    )
    keys = ("op us", "backend's function us", "package's function us")
    host = markdown(
        ("call", *keys),
        [(r["call"], *("" if r[k] is None else f"{r[k]:.1f}" for k in keys)) for r in data["host"]],
    )
    return (
        f"{_where(data)}{times}\n\n"
        "The packages' own functions and PyTorch's dense cuDNN attention, in the same run:\n\n"
        f"{others}\n\nHost time of a call with 32 rows, in inference mode:\n\n{host}"
    )


def regret(data: dict[str, Any]) -> str:
    names = ("median", "mean", "90th percentile", "95th percentile", "worst")
    rows = [(r["what"], str(r["shapes"]), *(f"{r[n]:.1%}" for n in names)) for r in data["summary"]]
    return _where(data) + markdown(("slower than the fastest backend", "shapes", *names), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def rope(data: dict[str, Any]) -> str:
    forward = ("eager ms", "compiled ms", "mmgraph ms", "in place ms", "copy limit ms")
    names = ("eager ms", "compiled ms", "mmgraph ms", "copy limit ms")

    def table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
        made = [(f"{r['shape']}, {r['what']}", *(_number(r[name]) for name in columns)) for r in rows]
        return markdown(("tokens, heads/kv heads x width", *columns), made)

    return f"{_where(data)}{table(data['rows'], forward)}\n\n{table(data['backward'], names)}"


PENDING = "Not measured yet."


def replay(data: dict[str, Any]) -> str:
    ways = list(dict.fromkeys(row["way"] for row in data["rows"]))
    cases = list(dict.fromkeys((row["kernels"], row["parameters"]) for row in data["rows"]))
    found = {(row["kernels"], row["parameters"], row["way"]): row for row in data["rows"]}
    own = list(dict.fromkeys(name for row in data["own"] for name in row if name.endswith("_kernel")))
    measured = [row for row in data["rows"] if row["equal"] is not None]

    def table(key: str) -> str:
        made = [
            (f"{kernels}, {parameters}", *(_us(found[kernels, parameters, way][key]) for way in ways))
            for kernels, parameters in cases
        ]
        return markdown(("kernels, parameters", *ways), made)

    kernels = [(f"{r['kernels']}, {r['parameters']}", *(_us(r.get(name)) for name in own)) for r in data["own"]]
    guard = [
        (str(r["parameters"]), str(r["watched"]), f"{r['epoch us']:.1f}", f"{r['always us']:.1f}")
        for r in data["guard"]
    ]
    return (
        f"{_where(data)}On the host, us:\n\n{table('host us')}\n\n"
        f"In a row, us:\n\n{table('in a row us')}\n\n"
        f"On the device, us:\n\n{table('device us')}\n\n"
        f"{sum(row['equal'] for row in measured)} of {len(measured)} results are equal to the function's.\n\n"
        f"The manager's own kernels in a call, us on the device:\n\n"
        f"{markdown(('kernels, parameters', *own), kernels)}\n\n"
        f"The check of the weights alone, us on the host:\n\n"
        f"{markdown(('parameters', 'watched', 'epoch', 'always'), guard)}"
    )


def towers(data: dict[str, Any]) -> str:
    ways = ("eager", "eager + fa3", "graph + fa3", "compiled graph + fa3", "accelerated", "encoder", "in a row")

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"

    table = markdown(
        ("tower, input", "patches", *ways, "goal"),
        [
            (
                f"{row['tower']}, {row['row']}",
                str(row["patches"]),
                *(ms(row.get(way)) for way in ways),
                ms(row["goal"]),
            )
            for row in data["rows"]
        ],
    )
    cold = [
        f"{row['tower']}, {row['row']}: compiling took {row[name]:.0f} s"
        for row in data["rows"]
        for name in row
        if name == "compiled graph + fa3 cold s"
    ]
    errors = [f"{row['tower']} {row['error']:.2f}" for row in data["rows"] if "error" in row]
    captures = [
        f"{one['tower']}: the encoder's buckets {one['precompile s']:.0f} s, accelerate's {one['accelerate s']:.0f} s"
        for one in data["towers"]
    ]
    kernels = [
        (
            f"{one['tower']}, {one['row']}",
            one["kernel"].split("(")[0][:60],
            str(one["launches"]),
            f"{one['ms']:.3f}",
        )
        for one in data["profile"]
        if one["ms"] > 0.02 * sum(other["ms"] for other in data["profile"] if _same_row(one, other))
    ]
    notes = "; ".join([*cold, *captures])
    return (
        f"{_where(data)}Wall time, ms:\n\n{table}\n\n{notes}. Error in bfloat16 against float32, as a share of "
        f"transformers' own: {', '.join(errors)}.\n\nKernels that take more than 2% of a tower's time, ms:\n\n"
        f"{markdown(('tower, input', 'kernel', 'launches', 'ms'), kernels)}"
    )


def _same_row(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tower"] == other["tower"] and one["row"] == other["row"])


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / (1 << 20):.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def graph_memory(data: dict[str, Any]) -> str:
    rows = data["rows"]
    parts = ("static", "pool", "executable", "workspace", "total")
    memory = [
        (
            str(r["buckets"]),
            *(_mib(r[name]) for name in parts),
            f"{r['ratio']:.3f}",
            *(_mib(r[name]) for name in ("reserved", "driver", "one pool reserved", "own pools reserved")),
        )
        for r in rows
    ]
    times = [
        (
            str(r["buckets"]),
            _mib(r["predicted"]),
            "" if r["off"] is None else f"{r['off']:+.1%}",
            *(_seconds(r[name]) for name in ("predict seconds", "seconds", "seconds a bucket")),
            *(_seconds(r[name]) for name in ("one pool seconds", "own pools seconds")),
        )
        for r in rows
    ]
    compiled = [
        (str(r["buckets"]), f"{r['seconds']:.1f}", f"{r['first bucket seconds']:.1f}", str(r["compilations"]))
        for r in data["compiled"]
    ]
    worst = max(r["difference"] for r in rows)
    header = ("buckets", *parts, "ratio", "reserved", "driver", "one pool: reserved", "own pools: reserved")
    return (
        f"{_where(data)}MiB:\n\n{markdown(header, memory)}\n\n"
        "What was predicted of static buffers and pool, in MiB, and seconds:\n\n"
        + markdown(
            ("buckets", "predicted", "off by", "predict", "capture", "a bucket", "one pool", "own pools"), times
        )
        + f"\n\nLargest difference of a replay from the function: {worst:g}.\n\nWith `compile=True`:\n\n"
        + markdown(("buckets", "seconds", "of the slowest bucket", "compilations"), compiled)
    )


def soak(data: dict[str, Any]) -> str:
    counts = ("calls", "compared at once", "compared later", "poisonings", "failures")
    parts = [
        (r["part"], *(str(r[name]) for name in counts), f"{r['seconds']:.0f}", f"{r['us a call']:.1f}")
        for r in data["rows"]
    ]
    kinds = [
        f"{kind} {when}"
        for kind in ("allocated", "reserved", "driver", "host")
        for when in ("first", "last", "most")
    ]
    memory = [(r["part"], *(_mib(r[kind]) for kind in kinds)) for r in data["rows"]]
    return (
        f"{_where(data)}{markdown(('part', *counts, 'seconds', 'us a call'), parts)}\n\n"
        f"{data['hits']} of {data['calls']} calls hit, in {data['buckets']} buckets. Memory between rounds, MiB:\n\n"
        f"{markdown(('part', *kinds), memory)}"
    )


RENDER: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": run,
    "assembly": assembly,
    "planning": planning,
    "attention": attention,
    "regret": regret,
    "replay": replay,
    "towers": towers,
    "graph_memory": graph_memory,
    "soak": soak,
    "rope": rope,
}


def _where(data: dict[str, Any]) -> str:
    environment = data["environment"]
    return f"{environment['device']}, torch {environment['torch']}, {environment['date'][:10]}:\n\n"


def filled(text: str) -> str:
    """The page with every table made anew."""

    def replace(match: re.Match[str]) -> str:
        path = Path(match["path"])
        made = PENDING
        if (ROOT / path).exists():
            made = RENDER[path.stem](json.loads((ROOT / path).read_text()))
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return BLOCK.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a table is out of date"
    )
    options = parser.parse_args()
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if options.check and filled(text) != text:
            raise SystemExit(f"{name} has a table that is out of date: run python bench/tables.py")
        if not options.check:
            page.write_text(filled(text))


if __name__ == "__main__":
    main()
