"""What do a manager's graphs cost in memory and in time to capture, for 1 to 32 buckets?

The function is a stack of 4 layers (norm, packed projection, varlen attention, projection, norm, MLP) of hidden size
1152, bfloat16. The buckets are tokens up to 16384 in steps of one size; the largest is the same in every row. Beside
the manager stand the same graphs made by torch.cuda.graph: each with static inputs and a pool of its own, and all in
one pool, the largest first, each with static inputs of its own; outputs stay in their pools.

- total: static buffers, pool, executable graphs and workspace, as ``report()`` has them; "ratio" is that to the total
  of one bucket.
- reserved, driver: what PyTorch's allocator and the device's free memory say of the same; the workspace was there
  before. left: what PyTorch's allocator has more than before, once the manager is closed.
- predicted: what ``predict_bytes`` said beforehand of static buffers and pool; "off" is how far that was from what
  they took.
- difference: the largest one between a replay and the function on inputs padded by hand.

Last a few buckets with compile=True.

    PYTHONPATH=. python bench/graph_memory.py --out bench/results/<gpu>/graph_memory.json
"""

import argparse
import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import environment, show, write

from mmgraph import ops
from mmgraph.capture import Bucket, BucketGrid, CaptureManager, bucket_size, offsets, rows

COUNTS = (1, 2, 4, 8, 16, 32)
COMPILED = 4  # buckets with compile=True
LARGEST_DIFFERENCE = 1 / 32
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The stack's sizes, and those of its largest bucket."""

    layers: int = 4
    hidden: int = 1152
    heads: int = 16
    mlp: int = 4304
    tokens: int = 16384
    batch: int = 32
    longest: int = 1024


SMOKE = Sizes(layers=1, hidden=32, heads=2, mlp=48, tokens=64, batch=4, longest=16)


class Layer(torch.nn.Module):
    """A block of a vision tower."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads, self.width = sizes.heads, hidden // sizes.heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, sizes.mlp), torch.nn.Linear(sizes.mlp, hidden)

    def forward(self, x: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(-1, 3, self.heads, self.width).unbind(1)
        x = x + self.out(ops.varlen_attention(q, k, v, cu, longest).flatten(1))
        hidden = torch.nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class Stack(torch.nn.Module):
    """Layers, one after another."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))

    def forward(self, x: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cu, longest)
        return x


@dataclass(frozen=True)
class Bench:
    """The function and its device."""

    sizes: Sizes
    stack: Stack
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def prepare(sizes: Sizes, device: torch.device) -> "Bench":
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        stack = Stack(sizes).to(device, dtype).requires_grad_(False).eval()
        return Bench(sizes, stack, device, dtype)

    def grid(self, count: int) -> BucketGrid:
        most = self.sizes.tokens
        return BucketGrid(
            tokens=tuple(most * (i + 1) // count for i in range(count)),
            batch=(self.sizes.batch,),
            seqlen=(self.sizes.longest,),
            within={},
        )

    def call(self, tokens: int) -> dict[str, Any]:
        """Sequences of three quarters of the longest, and what is left."""
        length = self.sizes.longest * 3 // 4
        lengths = [length] * (tokens // length) + [tokens % length]
        lengths = lengths[: self.sizes.batch]
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, self.sizes.hidden, generator=generator).to(self.device, self.dtype)
        return {"x": x, "cu": cu, "longest": length}

    def padded(self, call: dict[str, Any], bucket: Bucket) -> dict[str, Any]:
        """The call at a bucket's sizes."""
        x, cu = call["x"], call["cu"]
        return {
            "x": torch.cat([x, x.new_zeros(bucket["tokens"] - len(x), x.shape[1])]),
            "cu": torch.cat([cu, cu[-1:].expand(bucket["batch"] + 1 - len(cu))]),
            "longest": bucket["seqlen"],
        }

    def manager(self, grid: BucketGrid, compile: bool = False) -> CaptureManager:
        return CaptureManager(
            self.stack,
            inputs={
                "x": rows("tokens"),
                "cu": offsets("batch", of="tokens"),
                "longest": bucket_size("seqlen"),
            },
            outputs=rows("tokens"),
            buckets=grid,
            compile=compile,
        )

    def example(self) -> dict[str, Any]:
        """A small call, which every bucket of any grid holds."""
        return self.call(self.sizes.tokens // max(COUNTS))


def taken(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch has reserved, and that the device has given away, without what is only cached."""
    gc.collect()
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), whole - free


def difference(bench: Bench, manager: CaptureManager, grid: BucketGrid) -> float:
    """The largest difference between replays and the function on padded inputs, in the smallest and largest bucket."""
    worst = 0.0
    for bucket in (grid.buckets[0], grid.buckets[-1]):
        call = bench.call(bucket["tokens"] - bench.sizes.tokens // 64)  # less than a step of any grid
        got, expected = manager(**call), bench.stack(**bench.padded(call, bucket))[: len(call["x"])]
        worst = max(worst, float((got.float() - expected.float()).abs().max()))
    return worst


def measure_manager(bench: Bench, count: int) -> dict[str, Any]:
    """Memory and time of a manager with so many buckets; what it needs is gone afterwards."""
    grid, example = bench.grid(count), bench.example()
    before = taken(bench.device)
    manager = bench.manager(grid)
    began = time.perf_counter()
    predicted = manager.predict_bytes(example)
    between = time.perf_counter()
    taken(bench.device)
    start = time.perf_counter()
    manager.precompile(example, progress=False)
    seconds = time.perf_counter() - start
    after = taken(bench.device)
    report = manager.report()
    if len(report.buckets) != count:
        raise SystemExit(f"{len(report.buckets)} buckets were captured, not {count}")
    worst = difference(bench, manager, grid)
    manager.close()
    del manager
    left = taken(bench.device)
    took = report.static_bytes + report.pool_bytes
    return {
        "buckets": count,
        "static": report.static_bytes,
        "pool": report.pool_bytes,
        "executable": report.executable_bytes,
        "workspace": report.workspace_bytes,
        "total": took + report.executable_bytes + report.workspace_bytes,
        "reserved": after[0] - before[0],
        "driver": after[1] - before[1],
        "left": left[0] - before[0],
        "predicted": predicted,
        "off": None if predicted is None else predicted / took - 1,
        "predict seconds": between - began,
        "seconds": seconds,
        "seconds a bucket": seconds / count,
        "slowest bucket seconds": max(each.capture_seconds for each in report.buckets),
        "difference": worst,
    }


def measure_plain(bench: Bench, count: int, shared: bool) -> dict[str, Any]:
    """The same graphs by ``torch.cuda.graph``, with a pool each or all in one; nothing on a CPU."""
    name = "one pool" if shared else "own pools"
    if bench.device.type != "cuda":
        return {f"{name} reserved": None, f"{name} driver": None, f"{name} seconds": None}
    before = taken(bench.device)
    stream = torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle() if shared else None
    kept: list[Any] = []
    start = time.perf_counter()
    for bucket in reversed(bench.grid(count).buckets):
        static = bench.padded(bench.example(), bucket)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2):
                bench.stack(**static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            out = bench.stack(**static)
        kept.append((graph, static, out))
        del static, out
    for graph, _, _ in kept:
        graph.replay()
    seconds = time.perf_counter() - start
    after = taken(bench.device)
    kept.clear()
    del graph
    taken(bench.device)
    return {
        f"{name} reserved": after[0] - before[0],
        f"{name} driver": after[1] - before[1],
        f"{name} seconds": seconds,
    }


def settle(bench: Bench, counts: Sequence[int]) -> None:
    """Has kernels compiled and chosen, and the workspaces made, before anything is measured."""
    for count in counts:
        for bucket in bench.grid(count):
            bench.stack(**bench.padded(bench.example(), bucket))
    bench.manager(bench.grid(1)).precompile(bench.example(), progress=False).close()
    if bench.device.type == "cuda":
        measure_plain(bench, 1, shared=False)


def measure_compiled(bench: Bench, count: int) -> dict[str, Any]:
    """The same with compile=True: how long, how many compilations, and the memory then."""
    torch._dynamo.reset()
    grid = bench.grid(count)
    manager = bench.manager(grid, compile=True)
    start = time.perf_counter()
    manager.precompile(bench.example(), progress=False)
    seconds = time.perf_counter() - start
    report = manager.report()
    result = {
        "buckets": count,
        "seconds": seconds,
        "compilations": report.compilations,
        "first bucket seconds": max(each.capture_seconds for each in report.buckets),
        "pool": report.pool_bytes,
        "replay ms": report.buckets[-1].replay_seconds * 1e3,
        "difference": difference(bench, manager, grid),
    }
    manager.close()
    return result


def in_mib(row: dict[str, Any]) -> dict[str, Any]:
    """A row to be read: bytes as MiB."""
    return {
        name: value / MIB if isinstance(value, int) and name not in ("buckets", "compilations") else value
        for name, value in row.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, nothing compiled; runs on a CPU too")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    bench = Bench.prepare(SMOKE if smoke else Sizes(), device)
    counts = (1, 2) if smoke else COUNTS
    results: dict[str, Any] = {
        "environment": environment(device),
        "sizes": vars(bench.sizes),
        "rows": [],
        "compiled": [],
    }
    table: list[dict[str, Any]] = results["rows"]
    with torch.no_grad():
        settle(bench, counts)
        print(f"settled after {time.monotonic() - began:.0f} s", flush=True)
        for count in counts:
            row = measure_manager(bench, count)
            row["ratio"] = row["total"] / (table[0]["total"] if table else row["total"])
            for shared in (False, True):
                row |= measure_plain(bench, count, shared)
            table.append(row)
            print(f"{count} buckets done after {time.monotonic() - began:.0f} s", flush=True)
            write(arguments.out, results)
        if not smoke:
            results["compiled"].append(measure_compiled(bench, COMPILED))
    results["seconds"] = time.monotonic() - began
    write(arguments.out, results)
    times = ("predict seconds", "seconds", "seconds a bucket", "slowest bucket seconds", "difference")
    plain = [name for name in table[0] if "pool" in name and name != "pool"]
    memory = [name for name in table[0] if name not in (*times, *plain)]
    for title, names in (
        ("memory", memory),
        ("time", ["buckets", *times]),
        ("plain graphs", ["buckets", *plain]),
    ):
        show(f"{title}, bytes as MiB", [in_mib({name: row[name] for name in names}) for row in table])
    if results["compiled"]:
        show("compile=True, bytes as MiB", [in_mib(row) for row in results["compiled"]])
    if any(row["difference"] > LARGEST_DIFFERENCE for row in table):
        raise SystemExit("a replay differs from the function")


if __name__ == "__main__":
    main()
