"""How much slower than the best backend is the one that ``varlen_attention`` chooses, on shapes it wasn't tuned on?

Shapes are drawn from a seed: widths, heads, grouping, causal or not, and lengths of several sorts (equal, ragged,
windows, one long among short ones). Each usable backend runs on each, and so does the call that names none. Its regret
is the time of the chosen backend over that of the fastest.

    PYTHONPATH=. python bench/regret.py --out bench/results/h200/regret.json
    PYTHONPATH=. python bench/regret.py --again bench/results/h200/regret.json    # another table, the same times

With ``--again`` nothing is measured: the table of choices that there is now chooses among a file's times.
"""

import argparse
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from choices import Clock
from measure import environment, show, write
from shapes import Call, draw_call

from mmgraph import ops
from mmgraph.ops.attention import choice_table, order
from mmgraph.ops.attention.registry import Traits


def measure(call: Call, device: torch.device, clock: Clock) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, cu = call.tensors(device, dtype)
    traits: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "head_dim": call.width,
        "heads": call.heads,
        "kv_heads": call.kv_heads,
        "causal": call.causal,
    }
    reports = ops.explain_backends(**traits)
    names = [report.name for report in reports if report.usable and report.name != "reference"] or ["reference"]
    batch = len(call.lengths)
    chosen = ops.select_backend(**traits, tokens=call.tokens, batch=batch, max_seqlen=call.longest)
    run = functools.partial(ops.varlen_attention, q, k, v, cu, call.longest, causal=call.causal)
    most = 11 if call.flops() > 2e11 else 25
    times = {name: clock(functools.partial(run, backend=name), most) / 1e3 for name in names}
    unnamed = clock(run, most) / 1e3
    best = min(times, key=lambda name: times[name])
    return {
        "tokens": call.tokens,
        "batch": batch,
        "longest": call.longest,
        "heads": f"{call.heads}/{call.kv_heads}",
        "width": call.width,
        "causal": call.causal,
        "best": best,
        "chosen": chosen,
        "regret": times[chosen] / times[best] - 1,
        "regret of the unnamed call": unnamed / times[best] - 1,
        "ms": times,
    }


def choose_again(row: dict[str, Any], table: choice_table.Table) -> dict[str, Any]:
    """A measured row with what the table chooses of it now; the unnamed call wasn't made."""
    heads, kv_heads = map(int, row["heads"].split("/"))
    device = torch.device("cuda", 0)
    traits = Traits(device, torch.bfloat16, row["width"], row["width"], heads, kv_heads, row["causal"])
    shape = order.rounded_shape(row["tokens"], row["batch"], row["longest"], traits)
    if shape is None:
        raise SystemExit("a measured call has no row")
    costs = order.table_times(table, traits, shape)
    chosen = min(row["ms"], key=lambda name: costs.get(name, math.inf))
    kept = {key: value for key, value in row.items() if key != "regret of the unnamed call"}
    return kept | {"chosen": chosen, "regret": row["ms"][chosen] / row["ms"][row["best"]] - 1}


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    summary = []
    for name in ("regret", "regret of the unnamed call"):
        if name not in rows[0]:
            continue
        values = sorted(row[name] for row in rows)
        at = {part: values[min(len(values) - 1, int(len(values) * part / 100))] for part in (90, 95)}
        summary.append(
            {
                "what": name,
                "shapes": len(values),
                "median": values[len(values) // 2],
                "mean": sum(values) / len(values),
                "90th percentile": at[90],
                "95th percentile": at[95],
                "worst": values[-1],
            }
        )
    return summary


def report(path: Path | None, rows: list[dict[str, Any]], seed: int, where: dict[str, Any]) -> None:
    summary = summary_of(rows)
    show("Regret", summary)
    worst = sorted(rows, key=lambda row: -row["regret"])[:8]
    show("Worst", [{key: value for key, value in row.items() if key != "ms"} for row in worst])
    found = {"benchmark": "regret", "environment": where, "seed": seed, "summary": summary, "rows": rows}
    write(path, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--shapes", type=int, default=200, help="how many shapes")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the shapes")
    parser.add_argument(
        "--smoke", action="store_true", help="three tiny shapes, on a CPU where there is no GPU"
    )
    parser.add_argument("--again", type=Path, help="choose anew among this file's times, and write it")
    options = parser.parse_args()
    if options.again is not None:
        measured = json.loads(options.again.read_text())
        table = choice_table.load(*measured["environment"]["capability"])
        if table is None:
            raise SystemExit("there is no table for the GPU that this was measured on")
        rows_again = [choose_again(row, table) for row in measured["rows"]]
        report(options.again, rows_again, measured["seed"], measured["environment"])
        return
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    draw = random.Random(options.seed)
    clock = Clock(device)
    count, most = (3, 64) if options.smoke else (options.shapes, 1 << 16)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        while len(rows) < count:
            call = draw_call(draw, most)
            if call.flops() <= 4e12:
                rows.append(measure(call, device, clock))
    report(options.out, rows, options.seed, environment(device))


if __name__ == "__main__":
    main()
