"""How near is embedding assembly to the speed of a plain copy, and how do other ways compare?

Rows are 4096 bfloat16 values from a vocabulary of 151,936. Every way starts from ids, table and encoder rows and ends
in the merged embeddings; results are compared before they are timed, bit for bit. The copy is PyTorch's, of as many
rows. Device times are medians with the L2 cache cleared before each run; "kernels" is what a profiler sums of a call's
kernels and copies, for calls that wait for the host. Wall time is from an idle device to an idle device: a plain copy's
and a bare allocation's say what part of it is the machine's.

    python bench/assembly.py [--out results.json] [--smoke]
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import device_ms, environment, graph_ms, host_us, kernels_ms, show, write

from mmgraph import ops

Case = dict[str, Any]
Way = Callable[[], torch.Tensor]

# rows, items, rows of each item, goal in ms on an H200
CASES = ((8192, 8, 768, 0.036), (8192, 256, 24, 0.036), (32768, 64, 400, 0.135), (2048, 2, 700, 0.011))
SMOKE = ((64, 4, 8, 0.0),)
WIDTHS = (1152, 2048, 3584, 5120, 8192)
LEVELS = 3


def prepare(rows: int, items: int, each: int, width: int, vocab: int, device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(rows + items)
    gap = rows // items
    starts = [i * gap for i in range(items)]
    row_map = ops.RowMap.from_ranges(
        rows, starts, [s + each - 1 for s in starts], [i * each for i in range(items)], pool_rows=items * each
    )
    ids = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    pool = torch.randn(items * each, width, device=device).bfloat16()
    return {
        "ids": ids,
        "table": torch.randn(vocab, width, device=device).bfloat16(),
        "pool": pool,
        "parts": [part.clone() for part in pool.split(each)],
        "starts": starts,
        "map": row_map.to(device),
        "host map": row_map,
        "mask": torch.from_numpy(row_map.host >= 0).to(device),
        "index": torch.from_numpy((row_map.host >= 0).nonzero()[0]).to(device),
        "out": torch.empty(rows, width, device=device).bfloat16(),
    }


def peers(case: Case) -> dict[str, Way]:
    ids, table, pool, parts = case["ids"], case["table"], case["pool"], case["parts"]
    embedding = torch.nn.functional.embedding

    def masked_scatter() -> torch.Tensor:
        embeds = embedding(ids, table)
        return embeds.masked_scatter(case["mask"][:, None].expand_as(embeds), pool)

    def slices() -> torch.Tensor:
        embeds = embedding(ids, table)
        for start, part in zip(case["starts"], parts, strict=True):
            embeds[start : start + part.shape[0]] = part
        return embeds

    def index_put() -> torch.Tensor:
        embeds = embedding(ids, table)
        embeds[case["index"]] = torch.cat(parts)
        return embeds

    return {"masked_scatter": masked_scatter, "loop of slices": slices, "cat + index put": index_put}


def ours(case: Case) -> dict[str, Way]:
    ids, table, pool = case["ids"], case["table"], case["pool"]

    def into() -> torch.Tensor:
        ops.assemble_embeddings_out(ids, table, pool, case["map"], out=case["out"])
        out: torch.Tensor = case["out"]
        return out

    return {
        "pool, map": lambda: ops.assemble_embeddings(ids, table, pool, case["map"]),
        "pool, map, out": into,
        "pool, RowMap": lambda: ops.assemble_embeddings(ids, table, pool, case["host map"]),
        "list, RowMap": lambda: ops.assemble_embeddings(ids, table, case["parts"], case["host map"]),
    }


def require(same: bool, what: str) -> None:
    if not same:
        raise SystemExit(f"{what} gives another result")


def wall_us(call: Callable[[], Any], device: torch.device, runs: int = 60) -> float:
    """Median time of a call from an idle device to an idle device, with a cold L2 cache, in us."""
    clear = torch.empty(256 << 20 if device.type == "cuda" else 1, dtype=torch.int8, device=device)
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times = []
    for _ in range(runs):
        clear.zero_()
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def transient_bytes(call: Way, device: torch.device) -> int:
    """What a call allocates at most beyond its result."""
    kept = call()
    del kept
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = call()
    peak = torch.cuda.max_memory_allocated(device)
    return (
        peak
        - before
        - (out.numel() * out.element_size() if torch.cuda.memory_allocated(device) > before else 0)
    )


def forward(case: Case, goal: float, device: torch.device) -> dict[str, Any]:
    calls = peers(case) | ours(case)
    expected = calls["loop of slices"]()
    row: dict[str, Any] = {"goal ms": goal}
    for name, call in calls.items():
        require(torch.equal(call(), expected), name)
        row[f"{name} ms"] = device_ms(call, device)
    row["pool, map captured ms"] = graph_ms(calls["pool, map"], device)
    copy = functools.partial(torch.empty_like(expected).copy_, torch.randn_like(expected))
    row["copy limit ms"] = device_ms(copy, device)
    for name, call in ours(case).items():
        row[f"{name} kernels ms"] = kernels_ms(call, device)
    row["copy limit kernels ms"] = kernels_ms(copy, device)
    row["bit equal"] = "yes"
    return row


def host(case: Case, row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Wall time, its part beyond the device's, what enqueuing takes, and transient memory."""
    copy = functools.partial(torch.empty_like(case["out"]).copy_, torch.randn_like(case["out"]))
    found: dict[str, Any] = {
        "idle wait us": wall_us(lambda: None, device),
        "bare allocation host us": host_us(lambda: torch.empty_like(case["out"]), device),
        "copy wall us": wall_us(copy, device),
    }
    found["copy beyond kernels us"] = found["copy wall us"] - 1e3 * row["copy limit kernels ms"]
    calls = peers(case) | ours(case)
    for name, call in calls.items():
        found[f"{name} wall us"] = wall_us(call, device)
        if name in ours(case):
            found[f"{name} beyond kernels us"] = found[f"{name} wall us"] - 1e3 * row[f"{name} kernels ms"]
            found[f"{name} host us"] = host_us(call, device)
        if device.type == "cuda":
            found[f"{name} transient bytes"] = transient_bytes(call, device)
    found["allowed transient bytes"] = 64 * len(case["starts"]) + 8 * case["ids"].shape[0]
    return found


def backward(case: Case, device: torch.device) -> dict[str, Any]:
    """Gradients to the pool alone, as with a frozen language model, and to pool and table."""
    row: dict[str, Any] = {}
    grad = torch.randn_like(case["out"])
    for what in ("pool", "pool and table"):
        leaves = dict(case)
        leaves["pool"] = case["pool"].detach().requires_grad_()
        leaves["parts"] = list(leaves["pool"].split(case["parts"][0].shape[0]))
        leaves["table"] = case["table"].detach().requires_grad_(what != "pool")
        wanted = [leaves["pool"], *([leaves["table"]] if what != "pool" else [])]
        expected = None
        for name, call in (peers(leaves) | {"mmgraph": ours(leaves)["pool, map"]}).items():
            out = call()
            run = functools.partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)
            got = run()
            if expected is None:
                expected = got
            require(torch.equal(got[0], expected[0]), f"{name}'s gradient of the pool")
            if what != "pool":
                difference = (got[1].float() - expected[1].float()).abs().max()
                require(bool(difference <= 2**-6 * expected[1].abs().max()), f"{name}'s gradient of the table")
            row[f"{name}: {what}, kernels ms"] = kernels_ms(run, device)
            row[f"{name}: {what}, wall us"] = wall_us(run, device, 20)
            del out, run, got
    return row


def deepstack(case: Case, width: int, device: torch.device) -> dict[str, Any]:
    """Three levels added to hidden states: a dense buffer's slices, against the rows where they are."""
    pool, entries = torch.randn(case["pool"].shape[0], LEVELS * width, device=device).bfloat16(), case["map"]
    hidden = torch.randn_like(case["out"])
    dense = ops.assemble_embeddings(case["ids"] * 0, pool.new_zeros(1, pool.shape[1]), pool, entries)

    def make_dense() -> torch.Tensor:
        buffer = torch.zeros_like(dense)
        buffer[case["index"]] = pool
        return buffer

    def add_dense() -> torch.Tensor:
        return hidden + dense[:, width : 2 * width]

    def add_sparse() -> torch.Tensor:
        return ops.deepstack_add(hidden, pool, entries, 1)

    def add_in_place() -> torch.Tensor:
        return ops.deepstack_add_(hidden, pool, entries, 1)

    require(torch.equal(make_dense(), dense), "the dense buffer")
    require(torch.equal(add_sparse(), add_dense()), "deepstack_add")
    return {
        "make the dense buffer ms": device_ms(make_dense, device),
        "dense, a level ms": device_ms(add_dense, device),
        "deepstack_add, a level ms": device_ms(add_sparse, device),
        "deepstack_add_, a level ms": device_ms(add_in_place, device),
    }


def merge(case: Case, device: torch.device) -> dict[str, Any]:
    """The mask form, from embeddings that exist."""
    embeds, mask, features = torch.randn_like(case["out"]), case["mask"], case["pool"]
    count = features.shape[0]

    def masked_scatter() -> torch.Tensor:
        return embeds.masked_scatter(mask[:, None].expand_as(embeds), features)

    def assign() -> torch.Tensor:
        out = embeds.clone()
        out[mask] = features
        return out

    def ours() -> torch.Tensor:
        return ops.merge_embeddings(embeds, mask, features, num_placeholders=count)

    expected = assign()
    require(torch.equal(ours(), expected) and torch.equal(masked_scatter(), expected), "merge_embeddings")
    return {
        "masked_scatter ms": device_ms(masked_scatter, device),
        "boolean assignment (synchronises) ms": device_ms(assign, device),
        "merge_embeddings ms": device_ms(ours, device),
    }


def widths(device: torch.device, smoke: bool) -> list[dict[str, Any]]:
    """Other widths than the cases', 8192 rows with 8 items of 768."""
    found = []
    for width in (24,) if smoke else WIDTHS:
        rows, items, each, _ = SMOKE[0] if smoke else CASES[0]
        case = prepare(rows, items, each, width, 100 if smoke else 151_936, device)
        source, target = torch.randn_like(case["out"]), torch.empty_like(case["out"])
        found.append(
            {
                "width": width,
                "mmgraph ms": kernels_ms(ours(case)["pool, map"], device),
                "copy limit ms": kernels_ms(functools.partial(target.copy_, source), device),
            }
        )
    return found


def turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table with a column for each case."""
    names = [f"{row['rows']}, {row['items']}" if "items" in row else str(row["width"]) for row in rows]
    return [
        {"": key, **{name: row[key] for name, row in zip(names, rows, strict=True)}}
        for key in rows[0]
        if key not in ("rows", "items", "width")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU where there is no GPU")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    width, vocab = (64, 100) if options.smoke else (4096, 151_936)
    results: dict[str, Any] = {"benchmark": "assembly", "width": width, "environment": environment(device)}
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("rows", "host", "backward", "deepstack", "merge")
    }
    for rows, items, each, goal in SMOKE if options.smoke else CASES:
        case = prepare(rows, items, each, width, vocab, device)
        name = {"rows": rows, "items": f"{items} x {each}"}
        with torch.inference_mode():
            timed = forward(case, goal, device)
            tables["rows"].append(name | timed)
            tables["host"].append(name | host(case, timed, device))
            tables["deepstack"].append(name | deepstack(case, width, device))
            tables["merge"].append(name | merge(case, device))
        tables["backward"].append(name | backward(case, device))
        del case
    with torch.inference_mode():
        tables["widths"] = widths(device, options.smoke)
    for title, found in tables.items():
        show(f"Embedding assembly: {title}", turned(found))
    write(options.out, results | tables)


if __name__ == "__main__":
    main()
