"""How much slower than the best backend is the one that ``varlen_attention`` chooses, on shapes it wasn't tuned on?

Shapes are drawn from a seed: widths, heads, grouping, causal or not, and lengths of several sorts (equal, ragged,
windows, one long among short ones). Each usable backend runs on each, and so does the call that names none. Its regret
is the time of the chosen backend over that of the fastest.

    PYTHONPATH=. python bench/regret.py --out bench/results/h200/regret.json
"""

import argparse
import functools
import random
from pathlib import Path
from typing import Any

import torch
from choices import Clock
from measure import environment, show, write
from shapes import Call, spread

from mmgraph import ops

WIDTHS = (64, 72, 80, 96, 128)
SORTS = ("equal", "ragged", "windows", "one long")


def draw_call(draw: random.Random, most: int) -> Call:
    """A call of at most about ``most`` rows."""
    sort = draw.choice(SORTS)
    width = draw.choice(WIDTHS)
    causal = width in (64, 128) and draw.random() < 0.4
    heads = draw.choice((8, 12, 16, 32))
    group = draw.choice((1, 1, 1, 4)) if width in (64, 128) else 1
    tokens = int(2 ** draw.uniform(min(9, most.bit_length() - 2), most.bit_length() - 1))
    if sort == "windows":
        lengths = tuple(draw.choice((64, 64, 64, 64, 16, 32, 48)) for _ in range(max(1, tokens // 64)))
    else:
        batch = max(1, int(2 ** draw.uniform(0, min(8, tokens.bit_length() - 6))))
        ratio = {"equal": 1.0, "ragged": draw.uniform(1.2, 2.0), "one long": draw.uniform(3.0, 10.0)}[sort]
        lengths = spread(tokens, batch, ratio, draw)
    return Call(lengths, heads, heads // group, width, causal)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--shapes", type=int, default=200, help="how many shapes")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the shapes")
    parser.add_argument(
        "--smoke", action="store_true", help="three tiny shapes, on a CPU where there is no GPU"
    )
    options = parser.parse_args()
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
    summary = []
    for name in ("regret", "regret of the unnamed call"):
        values = sorted(row[name] for row in rows)
        summary.append(
            {
                "what": name,
                "shapes": len(values),
                "median": values[len(values) // 2],
                "95th percentile": values[min(len(values) - 1, int(len(values) * 0.95))],
                "worst": values[-1],
            }
        )
    show("Regret", summary)
    worst = sorted(rows, key=lambda row: -row["regret"])[:8]
    show("Worst", [{key: value for key, value in row.items() if key != "ms"} for row in worst])
    write(
        options.out,
        {
            "benchmark": "regret",
            "environment": environment(device),
            "seed": options.seed,
            "summary": summary,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
