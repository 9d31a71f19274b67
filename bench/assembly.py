"""How near is embedding assembly to the speed of a plain copy, and how do other ways compare?

Rows are 4096 bfloat16 values from a vocabulary of 151,936. Every way starts from ids, table and encoder rows and ends
in the merged embeddings; results are compared bit for bit before they are timed. L2 is cleared before each run.

    python bench/assembly.py [--out results.json] [--smoke] [--sweep]
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import device_ms, environment, host_us, show, write

from mmgraph import ops
from mmgraph.ops.assembly import cuda as launches

# rows, items, rows of each item, goal in ms on an H200
CASES = ((8192, 8, 768, 0.036), (8192, 256, 24, 0.036), (32768, 64, 400, 0.135), (2048, 2, 700, 0.011))
SMOKE = ((64, 4, 8, 0.0),)


def prepare(rows: int, items: int, each: int, width: int, vocab: int, device: torch.device) -> dict[str, Any]:
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
        "parts": list(pool.split(each)),
        "starts": starts,
        "map": row_map.to(device),
        "host map": row_map,
        "mask": torch.from_numpy(row_map.host >= 0).to(device),
        "index": torch.from_numpy((row_map.host >= 0).nonzero()[0]).to(device),
    }


def ways(case: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    ids, table, pool = case["ids"], case["table"], case["pool"]
    embedding = torch.nn.functional.embedding

    def masked_scatter() -> torch.Tensor:
        embeds = embedding(ids, table)
        return embeds.masked_scatter(case["mask"][:, None].expand_as(embeds), pool)

    def slices() -> torch.Tensor:
        embeds = embedding(ids, table)
        for start, part in zip(case["starts"], case["parts"], strict=True):
            embeds[start : start + part.shape[0]] = part
        return embeds

    def index_put() -> torch.Tensor:
        embeds = embedding(ids, table)
        embeds[case["index"]] = torch.cat(case["parts"])
        return embeds

    return {
        "masked_scatter": masked_scatter,
        "loop of slices": slices,
        "cat + index put": index_put,
        "mmgraph": lambda: ops.assemble_embeddings(ids, table, pool, case["map"]),
    }


def measure(
    device: torch.device, cases: tuple[tuple[int, int, int, float], ...], width: int, vocab: int
) -> Any:
    found = []
    for rows, items, each, goal in cases:
        case = prepare(rows, items, each, width, vocab, device)
        calls = ways(case)
        expected = calls["loop of slices"]()
        row: dict[str, Any] = {"rows": rows, "items": f"{items} x {each}"}
        for name, call in calls.items():
            if not torch.equal(call(), expected):
                raise SystemExit(f"{name} gives another result than a loop of slices")
            row[f"{name} ms"] = device_ms(call, device)
        source, target = torch.randn(rows, width, device=device).bfloat16(), torch.empty_like(expected)
        row["copy limit ms"] = device_ms(functools.partial(target.copy_, source), device)
        row["goal ms"] = goal
        row["mmgraph host us"] = host_us(calls["mmgraph"], device)
        from_host = functools.partial(
            ops.assemble_embeddings, case["ids"], case["table"], case["pool"], case["host map"]
        )
        row["with RowMap host us"] = host_us(from_host, device)
        row["bit equal"] = "yes"
        found.append(row)
    return found


def _fixed(shape: tuple[int, int], width: int, item_size: int) -> tuple[int, int]:
    return shape


def sweep(device: torch.device, width: int, vocab: int) -> list[dict[str, Any]]:
    """The kernel with other shapes of program than the committed ones."""
    committed = launches._shape
    found = []
    try:
        for rows, items, each, _ in CASES:
            case = prepare(rows, items, each, width, vocab, device)
            call = ways(case)["mmgraph"]
            row: dict[str, Any] = {"rows": rows, "items": f"{items} x {each}"}
            for block in (1024, 2048, 4096):
                for warps in (1, 2, 4, 8):
                    launches._shape = functools.partial(_fixed, (block, warps))
                    row[f"{block}/{warps}"] = device_ms(call, device)
            found.append(row)
    finally:
        launches._shape = committed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU where there is no GPU")
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes and warps")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    width, vocab = (64, 100) if options.smoke else (4096, 151_936)
    results: dict[str, Any] = {"benchmark": "assembly", "width": width, "environment": environment(device)}
    with torch.inference_mode():
        results["rows"] = measure(device, SMOKE if options.smoke else CASES, width, vocab)
        show("Embedding assembly", results["rows"])
        if options.sweep and not options.smoke:
            results["sweep"] = sweep(device, width, vocab)
            show("Block / warps, ms", results["sweep"])
    write(options.out, results)


if __name__ == "__main__":
    main()
