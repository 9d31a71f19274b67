"""Which attention backend is the fastest for which shape? This measures what ``varlen_attention`` chooses by.

Every usable backend runs over a grid of shapes per kind of call: the class of widths, causal or not, grouped or not.
The axes are the mean length, the longest over it, and rows times heads, as base-2 logarithms. Lengths of a grid are
powers of two, which kernels like; so with ``--drawn`` there are shapes of any lengths beside it, drawn from a seed.
Run it with all packages installed; a later run of some backends (``--only``) takes the others' times from the table
there is. ``bench/fit_choices.py`` then fits the coefficients that the library reads.

    PYTHONPATH=. python bench/choices.py --out mmgraph/ops/attention/choices/sm90.json
    PYTHONPATH=. python bench/choices.py --out mmgraph/ops/attention/choices/sm90.json --widths --drawn 130
"""

import argparse
import functools
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from measure import environment
from shapes import DRAWN_WIDTHS, Call, draw_call, spread

from mmgraph import ops
from mmgraph.ops.attention.choice_table import WIDTHS
from mmgraph.ops.attention.measured import hold

# What stands for each class of widths: for up to 96, the heads of 80 of Qwen2.5-VL.
WIDTH_OF = {width: 80 if width == 96 else width for width in WIDTHS}
GROUPED = (64, 128)
HEADS = 16
GROUP = 4
MEANS = (4, 5, 6, 7, 8, 9, 10, 12, 14)
RATIOS = (0, 1, 3)
ROWS = (14, 16, 18, 20)
MOST_FLOPS = 2.5e12
# Not the seed of bench/regret.py, whose shapes say how good the choice is.
DRAWN_SEED = 1


def points(rows: tuple[int, ...] = ROWS) -> list[tuple[int, int, int]]:
    return list(itertools.product(MEANS, RATIOS, rows))


def call_at(point: tuple[int, int, int], width: int, causal: bool, grouped: bool) -> Call | None:
    """The call at a point of the grid, or None where there is none or it takes too long."""
    mean, ratio, rows = (2**x for x in point)
    tokens = rows // HEADS
    batch = tokens // mean
    if batch < 1 or mean * ratio > tokens or (ratio > 1 and batch < 2):
        return None
    call = Call(
        spread(tokens, batch, ratio, random.Random(0)),
        HEADS,
        HEADS // GROUP if grouped else HEADS,
        width,
        causal,
    )
    return call if call.flops() <= MOST_FLOPS else None


class Clock:
    """Median device microseconds of a call, the L2 cache cleared before each run.

    As ``triton.testing.do_bench``, but the device is held before each run for as long as the host takes to call it:
    small shapes would otherwise show the host's time in place of the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._cache = torch.empty(1 << 28, dtype=torch.uint8, device=device)

    def __call__(self, run: Any, most: int) -> float:
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        if self._device.type != "cuda":
            return host * 1e6
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * most)]
        for first, second in zip(events[::2], events[1::2], strict=True):
            self._cache.zero_()
            hold(self._device, 1.5 * min(host, 1e-3))
            first.record()
            run()
            second.record()
        torch.cuda.synchronize(self._device)
        times = sorted(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True))
        return float(times[len(times) // 2]) * 1e3


def measure(call: Call, names: list[str] | None, device: torch.device, clock: Clock) -> dict[str, float]:
    """Microseconds of each usable backend (of those named)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, cu = call.tensors(device, dtype)
    reports = ops.explain_backends(
        device=device,
        dtype=dtype,
        head_dim=call.width,
        heads=call.heads,
        kv_heads=call.kv_heads,
        causal=call.causal,
    )
    usable = [report.name for report in reports if report.usable and report.name != "reference"] or [
        "reference"
    ]
    found = {}
    most = 9 if call.flops() > 2e11 else 15
    for name in usable:
        if names is None or name in names:
            run = functools.partial(
                ops.varlen_attention, q, k, v, cu, call.longest, causal=call.causal, backend=name
            )
            found[name] = round(clock(run, most), 2)
    return found


def draw(count: int, smoke: bool, device: torch.device, clock: Clock) -> list[dict[str, Any]]:
    """Drawn shapes with the microseconds of each usable backend."""
    random_one = random.Random(DRAWN_SEED)
    widths = (*DRAWN_WIDTHS, 32, 256)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        while len(found) < count:
            call = draw_call(random_one, 64 if smoke else 1 << 16, widths)
            if call.flops() > 4e12:
                continue
            shape = {"tokens": call.tokens, "batch": len(call.lengths), "longest": call.longest}
            shape |= {
                "heads": call.heads,
                "kv_heads": call.kv_heads,
                "width": call.width,
                "causal": call.causal,
            }
            found.append({**shape, "microseconds": measure(call, None, device, clock)})
    return found


def wanted(columns: dict[str, list[float | None]], place: int, below: float | None) -> bool:
    """Whether a point is to be measured: all are, or those where a backend took less than ``below`` microseconds."""
    known = [time_us for column in columns.values() if (time_us := column[place]) is not None]
    return below is None or not known or min(known) < below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table here")
    parser.add_argument(
        "--only", nargs="*", help="only these backends; the others' times stay as the table has them"
    )
    parser.add_argument(
        "--below", type=float, help="only points where a backend takes less than so many microseconds"
    )
    parser.add_argument(
        "--widths", type=int, nargs="*", default=list(WIDTHS), help="only these classes of widths"
    )
    parser.add_argument("--drawn", type=int, help="measure so many drawn shapes, too")
    parser.add_argument(
        "--smoke", action="store_true", help="a few tiny shapes, on a CPU where there is no GPU"
    )
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    if options.out is None and not options.smoke:
        raise SystemExit("name the table to write with --out")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    usable = {report.name for report in ops.explain_backends(device=device, dtype=dtype) if report.usable}
    unusable = sorted(set(options.only or ()) - usable)
    if unusable:
        raise SystemExit(f"no backend, or not usable here: {', '.join(unusable)}; see mmgraph doctor")
    if options.only is not None and (options.out is None or not options.out.exists()):
        raise SystemExit("--only adds to a table: measure all backends first, without it")
    rows = (6, 8) if options.smoke else ROWS
    clock = Clock(device)
    old: dict[tuple[Any, ...], dict[str, Any]] = {}
    if options.out is not None and options.out.exists():
        table = json.loads(options.out.read_text())
        if any(one["axes"] != [list(MEANS), list(RATIOS), list(rows)] for one in table["kinds"]):
            raise SystemExit(f"{options.out} has another grid: make it anew under another name")
        old = {(one["width"], one["causal"], one["grouped"]): one for one in table["kinds"]}
    kinds = [
        (width, causal, grouped)
        for width, causal, grouped in itertools.product(WIDTHS, (False, True), (False, True))
        if not grouped or width in GROUPED
    ]
    made = []
    drawn = [] if not old else list(table.get("drawn", []))
    # What was fitted before stays, so that the table can be read until it is fitted anew.
    fitted = {"model": table["model"]} if old and "model" in table else {}
    if options.drawn:
        drawn = draw(options.drawn, options.smoke, device, clock)
    with torch.inference_mode():
        for kind in kinds:
            width, causal, grouped = kind
            if width not in options.widths:
                if kind in old:
                    made.append(old[kind])
                continue
            start = time.perf_counter()
            places = points(rows)
            columns: dict[str, list[float | None]] = {}
            if kind in old and (options.only is not None or options.below is not None):
                columns = {name: list(column) for name, column in old[kind]["microseconds"].items()}
            for place, point in enumerate(places):
                call = call_at(point, WIDTH_OF[width], causal, grouped)
                if call is None or not wanted(columns, place, options.below):
                    continue
                for name, time_us in measure(call, options.only, device, clock).items():
                    columns.setdefault(name, [None] * len(places))[place] = time_us
            made.append(
                {
                    "width": width,
                    "causal": causal,
                    "grouped": grouped,
                    "axes": [list(MEANS), list(RATIOS), list(rows)],
                    "microseconds": columns,
                }
            )
            print(f"{kind}: {time.perf_counter() - start:.1f} s", flush=True)
            if options.out is not None:
                later = [
                    one for key, one in old.items() if key in kinds and kinds.index(key) > kinds.index(kind)
                ]
                kept = {"environment": environment(device), "kinds": made + later, "drawn": drawn}
                write(options.out, kept | fitted)
    if options.out is not None:
        write(options.out, {"environment": environment(device), "kinds": made, "drawn": drawn} | fitted)


def write(path: Path, table: dict[str, Any]) -> None:
    """Write the table, one line per column, so that a difference can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = []
    for one in table["kinds"]:
        head = {key: value for key, value in one.items() if key != "microseconds"}
        columns = ",\n".join(f'   "{n}": {json.dumps(c)}' for n, c in sorted(one["microseconds"].items()))
        kinds.append(f'  {json.dumps(head)[:-1]}, "microseconds": {{\n{columns}\n  }}}}')
    parts = [f'{{"environment": {json.dumps(table["environment"])}', list_of("kinds", kinds)]
    parts.append(list_of("drawn", [f"  {json.dumps(one)}" for one in table.get("drawn", [])]))
    if "model" in table:
        costs = [f"  {json.dumps(one)}" for one in table["model"]["costs"]]
        head = {key: value for key, value in table["model"].items() if key != "costs"}
        parts.append(f' "model": {json.dumps(head)[:-1]},{list_of("costs", costs)}}}')
    part = path.with_suffix(".part")
    part.write_text(",\n".join(parts) + "}\n")
    part.replace(path)  # whole, or not at all


def list_of(name: str, lines: list[str]) -> str:
    return f' "{name}": [\n' + ",\n".join(lines) + "\n ]"


if __name__ == "__main__":
    main()
