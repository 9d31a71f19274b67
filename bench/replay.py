"""What a call costs, on the host and on the device: a manager's ways, beside a graph by hand and PyTorch's own ways.

The function is a chain of small dependent kernels, each on 200 rows of 64 numbers. It takes four inputs (two of rows,
offsets, a bucket's size), and its one output is copied. The first kernel reads all three tensors; the i-th behind it
adds the module's i-th parameter, or 1 where there are no more. So min(kernels - 1, parameters) parameters are read; the
others belong to the module and are watched, but not read. All numbers are small integers: no order of sums changes one.

Ways:

- eager: the module itself.
- manager: a call, with the default check of the weights. always: with check="always". lease, into: without an
  allocation, and into the caller's tensor. stage: nothing is copied in, and what was written before is replayed.
  varying: a cycle of 64 calls of random sizes over 4 buckets.
- reduce-overhead: torch.compile's graphs, for this one shape. It fuses the chain, and its result is overwritten by the
  next call.
- make_graphed_callables: PyTorch's, for this one shape. It takes tensors only, hands all parameters over at each call,
  pads nothing, and its result is overwritten by the next call.
- by hand: a graph with copies and fills in front and a copy of the result behind, unchecked. bare: its replay alone.

Times are us of a call:

- host: what it takes to enqueue it, in batches that the device's queue holds.
- in a row: between events around many calls, where either side may be what takes long.
- device: the same behind a pause of the device in which the host gets ahead; none where the queue doesn't hold so much.

"own" are the durations of the manager's kernels in a profile, and "guard" is the check of the weights alone.

    PYTHONPATH=. python bench/replay.py --out bench/results/<gpu>/replay.json
"""

import argparse
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from measure import environment, host_us, show, write

import mmgraph.capture
from mmgraph.capture import BucketGrid, CaptureManager, bucket_size, offsets, rows
from mmgraph.capture.guard import WeightGuard

TOKENS, WIDTH, LONGEST = 200, 64, 80
ROWS = 256  # the bucket of the fixed call
GRID = BucketGrid(tokens=(64, 128, ROWS, 512), batch=(8,), seqlen=(512,))
KERNELS, PARAMETERS = (1, 10, 300, 3000), (0, 100, 600)
COMPILED_UP_TO = 300  # kernels; more take Inductor minutes
VARYING = 64
QUEUE = 900  # launches that a stream takes before the host waits
MODES: tuple[Literal["epoch", "always"], ...] = ("epoch", "always")


class Chain(torch.nn.Module):
    """Small kernels that each need the one before."""

    def __init__(self, kernels: int, parameters: int) -> None:
        super().__init__()
        self.kernels = kernels
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((WIDTH,), float(i % 3)), requires_grad=False)
            for i in range(parameters)
        )

    def forward(self, x: torch.Tensor, scale: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        y = torch.addcmul(x, scale, cu[-1])
        read = min(self.kernels - 1, len(self.weights))
        for i in range(read):
            y = y + self.weights[i]
        for _ in range(self.kernels - 1 - read):
            y = y + 1.0
        return y


class Bound(torch.nn.Module):
    """The chain as a function of tensors alone."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: torch.Tensor, scale: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return self.chain(x, scale, cu, LONGEST)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Way:
    """A way to make the call.

    Attributes:
        name: what it is called.
        call: what is timed.
        result: a call whose result is compared.
        expected: what it must be.
        launches: what one call puts into the device's queue, at most.
    """

    name: str
    call: Callable[[], Any]
    result: Callable[[], torch.Tensor]
    expected: torch.Tensor
    launches: int = 9


def make_call(tokens: int, lengths: list[int], device: torch.device, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, scale = (torch.randint(-9, 10, (tokens, WIDTH), generator=generator).float() for _ in range(2))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return {"x": x.to(device), "scale": scale.to(device), "cu": cu.to(device), "longest": max(lengths)}


def varying_calls(device: torch.device) -> list[dict[str, Any]]:
    """Calls of random sizes, as many in each bucket."""
    draw = random.Random(0)
    steps = sorted({bucket["tokens"] for bucket in GRID})
    calls = []
    for number in range(VARYING):
        step = number % len(steps)
        tokens = draw.randint(steps[step - 1] + 1 if step else 1, steps[step])
        ends = sorted(draw.choices(range(tokens + 1), k=draw.randint(0, 7)))
        lengths = [b - a for a, b in itertools.pairwise([0, *ends, tokens])]
        calls.append(make_call(tokens, lengths, device, number))
    draw.shuffle(calls)
    return calls


def manager_of(chain: Chain, check: Literal["epoch", "always"]) -> CaptureManager:
    return CaptureManager(
        chain,
        inputs={
            "x": rows("tokens"),
            "scale": rows("tokens"),
            "cu": offsets("batch", of="tokens"),
            "longest": bucket_size("seqlen"),
        },
        outputs=rows("tokens"),
        buckets=GRID,
        check=check,
    )


def by_hand(
    function: Callable[..., torch.Tensor], call: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], Any], torch.Tensor]:
    """A graph of the function at the bucket's sizes: with staging and copy-out, the replay alone, and the real rows."""
    x, scale, cu = call["x"], call["scale"], call["cu"]
    real = len(cu)
    static_x, static_scale = (torch.zeros(ROWS, WIDTH, device=x.device) for _ in range(2))
    static_cu = torch.zeros(9, dtype=torch.int32, device=x.device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function(static_x, static_scale, static_cu, 512)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = function(static_x, static_scale, static_cu, 512)

    def whole() -> torch.Tensor:
        static_x[:TOKENS].copy_(x)
        static_x[TOKENS:].fill_(0)
        static_scale[:TOKENS].copy_(scale)
        static_scale[TOKENS:].fill_(0)
        static_cu[:real].copy_(cu)
        static_cu[real:].copy_(cu[-1:].expand(9 - real))
        graph.replay()
        return out[:TOKENS].clone()

    return whole, graph.replay, out[:TOKENS]


def ways_of_manager(chain: Chain, call: dict[str, Any], expected: torch.Tensor) -> Iterator[Way]:
    """The fixed call in every way that a manager has."""
    with torch.inference_mode(False):
        manager = manager_of(chain, "epoch").precompile(call, progress=False)
        always = manager_of(chain, "always").precompile(
            call, progress=False, buckets=[bucket for bucket in GRID if bucket["tokens"] == ROWS]
        )
    out = torch.empty_like(expected)
    sizes = {"tokens": TOKENS, "batch": len(call["cu"]) - 1, "seqlen": LONGEST}

    def leased() -> None:
        with manager.lease(**call):
            pass

    def staged() -> torch.Tensor:
        with manager.stage(sizes) as inputs:
            result: torch.Tensor = inputs.replay()
            return result

    def written() -> torch.Tensor:
        with manager.stage(sizes) as inputs:
            for name in ("x", "scale", "cu"):
                inputs.inputs[name].copy_(call[name])
            inputs.replay()
        return staged()

    yield Way("manager", lambda: manager(**call), lambda: manager(**call), expected)
    yield Way("always", lambda: always(**call), lambda: always(**call), expected)
    yield Way("lease", leased, lambda: manager.lease(**call).get(), expected)
    yield Way("into", lambda: manager.into(out, **call), lambda: manager.into(out.zero_(), **call), expected)
    yield Way("stage", staged, written, expected)
    calls = varying_calls(expected.device)
    endless = itertools.cycle(calls)
    yield Way(
        "varying",
        lambda: manager(**next(endless)),
        lambda: torch.cat([manager(**each) for each in calls]),
        torch.cat([chain(**each) for each in calls]),
    )


def other_ways(chain: Chain, call: dict[str, Any], expected: torch.Tensor) -> Iterator[Way]:
    """What doesn't need a manager, but for torch.compile."""
    eager = chain.kernels
    yield Way("eager", lambda: chain(**call), lambda: chain(**call), expected, launches=eager)
    if expected.device.type != "cuda":
        return
    tensors = call["x"], call["scale"], call["cu"]
    with torch.inference_mode(False):
        clones = tuple(tensor.clone() for tensor in tensors)
        graphed: Any = torch.cuda.make_graphed_callables(Bound(chain), clones)
    yield Way("make_graphed_callables", lambda: graphed(*tensors), lambda: graphed(*tensors), expected)
    whole, bare, out = by_hand(chain, call)

    def replayed() -> torch.Tensor:
        whole()
        bare()
        return out

    yield Way("by hand", whole, whole, expected)
    yield Way("bare", bare, replayed, expected)


def reduce_overhead(chain: Chain, call: dict[str, Any], expected: torch.Tensor) -> Way:
    torch._dynamo.reset()  # else the cases share a limit of compilations
    compiled = torch.compile(chain, mode="reduce-overhead")
    for _ in range(4):
        compiled(**call)
    return Way("reduce-overhead", lambda: compiled(**call), lambda: compiled(**call), expected)


def row_us(call: Callable[[], Any], device: torch.device, calls: int) -> float | None:
    """Time of a call between events around many in a row; None on a CPU."""
    if device.type != "cuda":
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / calls * 1e3


def device_us(way: Way, device: torch.device, host: float) -> float | None:
    """Time of a call on a device that the host is ahead of; None where it can't get ahead, and on a CPU."""
    calls = min(20, QUEUE // way.launches)
    if device.type != "cuda" or calls < 2:
        return None
    times: list[float] = []
    cycles = int(host * calls * 4000 + 1_000_000)  # twice what the host takes, at 2 GHz
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(calls):
            way.call()
        ahead = not start.query()
        end.record()
        torch.cuda.synchronize(device)
        if ahead:
            times.append(start.elapsed_time(end) / calls * 1e3)
        else:
            cycles = min(2 * cycles, 200_000_000)
    return sorted(times)[len(times) // 2] if times else None


def time_way(way: Way, device: torch.device, kernels: int, smoke: bool) -> dict[str, Any]:
    """One row: is the result right, and what does the call take."""
    equal = torch.equal(way.result(), way.expected)
    calls, many = (100, 200) if kernels <= COMPILED_UP_TO else (20, 40)
    if way.name == "eager":
        calls, many = max(3, min(calls, QUEUE // kernels)), max(10, min(many, 20_000 // kernels))
    if smoke:
        calls, many = 2, 2
    for _ in range(calls):  # the guard learns the mode that it is called in, slice by slice
        way.call()
    host = host_us(way.call, device, calls)
    return {
        "way": way.name,
        "host us": host,
        "in a row us": row_us(way.call, device, many),
        "device us": device_us(way, device, host),
        "equal": equal,
    }


def not_measured(name: str, why: str) -> dict[str, Any]:
    return {"way": name, "host us": None, "in a row us": None, "device us": None, "equal": None, "why": why}


def own_kernels() -> set[str]:
    """The names of the manager's kernels, as its sources have them."""
    folder = Path(mmgraph.capture.__file__).parent
    sources = "\n".join(path.read_text() for path in sorted(folder.glob("*_kernels.py")))
    return set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))


def own_us(call: Callable[[], Any], device: torch.device, calls: int) -> dict[str, float]:
    """Time on the device that each of the manager's kernels takes in a call, by the profiler, with a warm L2 cache."""
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
    names, found = own_kernels(), dict[str, float]()
    for event in profile.events():
        if event.device_type.name == "CUDA" and event.name in names:
            found[event.name] = found.get(event.name, 0.0) + float(event.time_range.elapsed_us()) / calls
    return dict(sorted(found.items()))


def guard_costs(device: torch.device, smoke: bool) -> list[dict[str, Any]]:
    """The check of the weights alone."""
    found = []
    for parameters in PARAMETERS:
        chain = Chain(1, parameters).to(device)
        row: dict[str, Any] = {"parameters": parameters}
        for mode in MODES:
            guard = WeightGuard(chain, seen=list(chain.weights), mode=mode)
            with torch.inference_mode():
                for _ in range(100):
                    guard.stale()
                row["watched"] = guard.num_watched
                row[f"{mode} us"] = host_us(guard.stale, device, 5 if smoke else 1000)
            guard.close()
        found.append(row)
    return found


def pivot(table: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """A row for each function, with a column for each way."""
    ways = list(dict.fromkeys(row["way"] for row in table))
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in table:
        case = row["kernels"], row["parameters"]
        first = {"kernels": case[0], "parameters": case[1], **dict.fromkeys(ways)}
        found.setdefault(case, first)[row["way"]] = row[key]
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few kernels; runs on a CPU too")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds after which torch.compile is left out"
    )
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    table: list[dict[str, Any]] = []
    calls_to_profile: list[tuple[int, int, Callable[[], Any]]] = []
    call = make_call(TOKENS, [50, 70, LONGEST], device, seed=0)
    for kernels, parameters in itertools.product((1, 3) if smoke else KERNELS, (1,) if smoke else PARAMETERS):
        case = {"kernels": kernels, "parameters": parameters}
        chain = Chain(kernels, parameters).to(device).eval()
        with torch.inference_mode():
            expected = chain(**call)
            for way in itertools.chain(
                other_ways(chain, call, expected), ways_of_manager(chain, call, expected)
            ):
                table.append({**case, **time_way(way, device, kernels, smoke)})
                if way.name == "manager":
                    calls_to_profile.append((kernels, parameters, way.call))
            if smoke or kernels > COMPILED_UP_TO:
                row = not_measured("reduce-overhead", "too long to compile")
            elif time.monotonic() - began > arguments.limit:
                row = not_measured("reduce-overhead", "no time left")
            else:
                row = time_way(reduce_overhead(chain, call, expected), device, kernels, smoke)
            table.append({**case, **row})
        print(f"{case} done after {time.monotonic() - began:.0f} s", flush=True)
    results: dict[str, Any] = {
        "environment": environment(device),
        "rows": table,
        "guard": guard_costs(device, smoke),
    }
    write(arguments.out, results)
    # Last, since a profiler may leave the launches slower that come after it.
    results["own"] = []
    if device.type == "cuda":
        with torch.inference_mode():
            for kernels, parameters, timed in calls_to_profile:
                own = own_us(timed, device, 5 if kernels > COMPILED_UP_TO else 20)
                results["own"].append({"kernels": kernels, "parameters": parameters, **own})
    results["seconds"] = time.monotonic() - began
    write(arguments.out, results)
    for key in ("host us", "in a row us", "device us", "equal"):
        show(key, pivot(table, key))
    show("check of the weights", results["guard"])
    if results["own"]:
        show("the manager's own kernels, us of a call", results["own"])
    if any(row["equal"] is False for row in table):
        raise SystemExit("a result differs from the function's")


if __name__ == "__main__":
    main()
