"""Do a million replays stay right, and does memory stay level?

The function is exact: a product, sums over each sequence and a gather, on integers that single precision holds, so that
neither padding nor the order of a sum changes a bit. Calls of random sizes go to 16 buckets. Every few thousand calls
the graphs' pool is filled with NaN. Every thousandth result is compared, bit for bit, with the function run on the
call's inputs padded by hand, right away; the last hundred results are all compared again later. Part of the calls come
from two threads, each on a stream of its own, that call two managers in turn.

Device memory, PyTorch's and the driver's, and the process's memory are read between rounds, when no result is held; the
first round of each part warms up. A failure, a miss, a bucket without a call, or tensors that hold more memory at the
end of a part than after its first round end in an error.

    PYTHONPATH=. python bench/soak.py --out bench/results/<gpu>/soak.json
"""

import argparse
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import environment, show, write

from mmgraph.capture import BucketGrid, CaptureManager, offsets, rows

WIDTH = 64
ROUNDS = 20
KEPT = 100
SHARE_OF_ONE = 0.6  # of the calls, from one thread; the others come from two
LARGEST_GROWTH = 1 << 20  # bytes that tensors may hold more at the end than after the warm-up
MEMORY = ("allocated", "reserved", "driver", "host")

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    tokens: tuple[int, ...] = (128, 256, 512, 1024)
    batch: tuple[int, ...] = (8, 16, 32, 64)
    cases: int = 256
    sample_every: int = 1000
    poison_every: int = 4000

    def grid(self) -> BucketGrid:
        return BucketGrid(tokens=self.tokens, batch=self.batch)


SMOKE = Plan(tokens=(8, 32), batch=(2, 4), cases=16, sample_every=10, poison_every=15)


class Exact(torch.nn.Module):
    """Each row's product plus the sum over its sequence, and these sums."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator).float()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.arange(WIDTH).float(), requires_grad=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, cu: torch.Tensor) -> Results:
        y = (x @ self.weight) * scale + self.bias
        places = torch.arange(x.shape[0], dtype=cu.dtype, device=cu.device)
        # Rows behind the last sequence have an entry of their own, which nobody is given.
        owner = torch.bucketize(places, cu[1:], right=True)
        sums = y.new_zeros(cu.shape[0], WIDTH).index_add_(0, owner, y)
        return {"rows": y + sums[owner], "sequences": sums[:-1]}


@dataclass(frozen=True)
class Case:
    """One call, its inputs at its bucket's sizes, and what it must give."""

    call: dict[str, torch.Tensor]
    padded: dict[str, torch.Tensor]
    expected: Results

    def cut(self, results: Results) -> Results:
        """The real rows of the function's results on padded inputs."""
        return {
            "rows": results["rows"][: len(self.call["x"])],
            "sequences": results["sequences"][: len(self.call["cu"]) - 1],
        }


def make_cases(function: Exact, plan: Plan, device: torch.device) -> list[Case]:
    """Calls of random sizes, as many in each bucket, some of which they fill."""
    draw, grid = random.Random(0), plan.grid()
    cases = []
    for number in range(plan.cases):
        at, of = number % len(plan.tokens), number // len(plan.tokens) % len(plan.batch)
        sizes = [
            draw.choice((steps[i], draw.randint(steps[i - 1] + 1 if i else 1, steps[i])))
            for steps, i in ((plan.tokens, at), (plan.batch, of))
        ]
        tokens, batch = sizes
        bucket = grid.choose({"tokens": tokens, "batch": batch})
        if bucket is None:
            raise SystemExit(f"no bucket holds {sizes}")
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(-4, 5, (tokens, WIDTH), generator=generator).float().to(device)
        scale = torch.randint(-3, 4, (tokens, WIDTH), generator=generator).float().to(device)
        ends = [0, *sorted(draw.choices(range(tokens + 1), k=batch - 1)), tokens]
        cu = torch.tensor(ends, dtype=torch.int32, device=device)
        more = bucket["tokens"] - tokens
        padded = {
            "x": torch.cat([x, x.new_zeros(more, WIDTH)]),
            "scale": torch.cat([scale, scale.new_zeros(more, WIDTH)]),
            "cu": torch.cat([cu, cu[-1:].expand(bucket["batch"] - batch)]),
        }
        case = Case({"x": x, "scale": scale, "cu": cu}, padded, {})
        case.expected.update({name: t.clone() for name, t in case.cut(function(**padded)).items()})
        cases.append(case)
    return cases


def make_manager(function: Exact, plan: Plan, example: dict[str, torch.Tensor]) -> CaptureManager:
    manager = CaptureManager(
        function,
        inputs={"x": rows("tokens"), "scale": rows("tokens"), "cu": offsets("batch", of="tokens")},
        outputs={"rows": rows("tokens"), "sequences": rows("batch")},
        buckets=plan.grid(),
    )
    return manager.precompile(example, progress=False)


def same_bits(got: Results, expected: Results) -> bool:
    """Waits for the device."""
    return got.keys() == expected.keys() and all(
        got[name].shape == value.shape and torch.equal(got[name].view(torch.int32), value.view(torch.int32))
        for name, value in expected.items()
    )


@dataclass
class Worker:
    """Calls managers in turn, and compares.

    Attributes:
        managers: whose turn comes one after another.
        function: what they captured.
        cases: drawn from at random.
        stream: to call on; None for the current one.
        failures: in words.
        calls, samples, compared_later, poisonings: counts.
    """

    managers: Sequence[Any]
    function: Exact
    cases: list[Case]
    plan: Plan
    stream: torch.cuda.Stream | None
    seed: int
    failures: list[str] = field(default_factory=list)
    calls: int = 0
    samples: int = 0
    compared_later: int = 0
    poisonings: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._turns = itertools.cycle(self.managers)
        self._kept: deque[tuple[int, int, Results]] = deque(maxlen=KEPT)

    def run(self, calls: int) -> float:
        """So many calls; gives the seconds. No result is held afterwards."""
        cases, kept, plan = self.cases, self._kept, self.plan
        start = time.perf_counter()
        with self._on_stream(), torch.inference_mode():
            for number in self._draw.choices(range(len(cases)), k=calls):
                manager = next(self._turns)
                result = manager(**cases[number].call)
                self.calls += 1
                kept.append((self.calls, number, result))
                if self.calls % plan.sample_every == 0:
                    self._compare_now(number, result)
                if self.calls % plan.poison_every == 0:
                    for each in self.managers:
                        each.poison()
                    self.poisonings += 1
                    self._compare_kept()
            self._compare_kept()
            kept.clear()
            if self.stream is not None:
                self.stream.synchronize()
        return time.perf_counter() - start

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _compare_now(self, number: int, result: Results) -> None:
        case = self.cases[number]
        self.samples += 1
        self._note(self.calls, number, result, case.cut(self.function(**case.padded)), "at once")

    def _compare_kept(self) -> None:
        for call, number, result in self._kept:
            self.compared_later += 1
            self._note(call, number, result, self.cases[number].expected, "later")

    def _note(self, call: int, number: int, got: Results, expected: Results, when: str) -> None:
        if not same_bits(got, expected):
            case = self.cases[number].call
            sizes = f"{len(case['x'])} tokens, {len(case['cu']) - 1} sequences"
            self.failures.append(f"worker {self.seed}, call {call}, case {number} ({sizes}), compared {when}")


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes of tensors, of the allocator, taken from the device, and of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    host = pages * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "driver": 0, "host": host}
    torch.cuda.synchronize(device)
    free, whole = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "driver": whole - free,
        "host": host,
    }


def soak(
    name: str, workers: Sequence[Worker], calls: int, device: torch.device, until: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One part of the run: all workers at once, in rounds.

    Returns:
        What is to be told of it, and the memory after each round.
    """
    each = max(1, calls // ROUNDS // len(workers))
    samples: list[dict[str, Any]] = []
    seconds = 0.0
    # A thread for each worker for the whole part: libraries keep handles and workspaces for threads.
    pools = [ThreadPoolExecutor(max_workers=1) for _ in workers]
    try:
        for number in range(ROUNDS):
            start = time.perf_counter()
            if len(workers) == 1:
                workers[0].run(each)
            else:
                futures = [pool.submit(worker.run, each) for pool, worker in zip(pools, workers, strict=True)]
                for future in futures:
                    future.result()
            seconds += time.perf_counter() - start
            done = sum(worker.calls for worker in workers)
            samples.append({"part": name, "calls": done, **memory_now(device)})
            if time.monotonic() > until:
                print(f"{name}: the time is over after round {number + 1} of {ROUNDS}", flush=True)
                break
    finally:
        for pool in pools:
            pool.shutdown()
    row: dict[str, Any] = {
        "part": name,
        "calls": sum(worker.calls for worker in workers),
        "compared at once": sum(worker.samples for worker in workers),
        "compared later": sum(worker.compared_later for worker in workers),
        "poisonings": sum(worker.poisonings for worker in workers),
        "failures": sum(len(worker.failures) for worker in workers),
        "seconds": seconds,
        "us a call": seconds / sum(worker.calls for worker in workers) * 1e6,
    }
    warm = samples[1:] or samples
    for kind in MEMORY:
        values = [sample[kind] for sample in warm]
        row |= {f"{kind} first": values[0], f"{kind} last": values[-1], f"{kind} most": max(values)}
    return row, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--calls", type=int, default=None, help="a million; 400 with --smoke")
    parser.add_argument(
        "--limit", type=float, default=210.0, help="seconds after which no further round begins"
    )
    parser.add_argument("--smoke", action="store_true", help="few calls of small sizes; runs on a CPU too")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("this run needs a GPU; --smoke tries it on a CPU")
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = SMOKE if arguments.smoke else Plan()
    calls = arguments.calls or (400 if arguments.smoke else 1_000_000)
    function = Exact().to(device)
    with torch.no_grad():
        cases = make_cases(function, plan, device)
    managers = [make_manager(function, plan, cases[0].call) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
    alone = [Worker(managers[:1], function, cases, plan, None, 0)]
    together = [
        Worker(order, function, cases, plan, stream, seed)
        for seed, (stream, order) in enumerate(zip(streams, (managers, managers[::-1]), strict=True), 1)
    ]
    table: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    failures: list[str] = []
    of_one = int(calls * SHARE_OF_ONE)
    until = began + arguments.limit
    print(f"captured after {time.monotonic() - began:.0f} s", flush=True)
    for name, workers, share, end in (
        ("one manager, one stream", alone, of_one, began + arguments.limit * SHARE_OF_ONE),
        ("two managers, two streams, two threads", together, calls - of_one, until),
    ):
        row, taken = soak(name, workers, share, device, end)
        table.append(row)
        samples += taken
        failures += [failure for worker in workers for failure in worker.failures]
        print(f"{name}: {row['calls']} calls after {time.monotonic() - began:.0f} s", flush=True)
    reports = [manager.report() for manager in managers]
    counts = {
        "asked": calls,
        "calls": sum(report.calls for report in reports),
        "hits": sum(report.hits for report in reports),
        "misses": sum(sum(report.misses.values()) for report in reports),
        "buckets": len(reports[0].buckets),
        "least hits of a bucket": min(bucket.hits for report in reports for bucket in report.buckets),
        "failures": len(failures),
        "seconds": time.monotonic() - began,
    }
    write(
        arguments.out,
        {
            "environment": environment(device),
            **counts,
            "first failures": failures[:20],
            "rows": table,
            "memory": samples,
        },
    )
    of_memory = [f"{kind} {when}" for kind in MEMORY for when in ("first", "last", "most")]
    show("soak", [{name: value for name, value in row.items() if name not in of_memory} for row in table])
    in_mib = [{"part": row["part"], **{name: row[name] / (1 << 20) for name in of_memory}} for row in table]
    show("memory, MiB", in_mib)
    show("counts", [counts])
    grown = [row["part"] for row in table if row["allocated last"] - row["allocated first"] > LARGEST_GROWTH]
    problems = [
        *failures[:5],
        *(f"memory grew with {part}" for part in grown),
        *([f"{counts['misses']} misses"] if counts["misses"] else []),
        *(["some bucket had no hit"] if not counts["least hits of a bucket"] else []),
    ]
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
