"""What the benchmarks share: device and host times, the machine's description, tables and JSON."""

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
    }
    if device.type == "cuda":
        import triton

        found |= {
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        try:
            found["driver and clocks"] = subprocess.run(
                query, capture_output=True, text=True, check=True, timeout=20
            ).stdout.splitlines()[0]
        except (OSError, subprocess.SubprocessError):
            found["driver and clocks"] = "nvidia-smi can't say"
    return found


def device_ms(call: Callable[[], Any], device: torch.device, repeat_ms: int = 60) -> float:
    """Median time of a call in ms; on a GPU by events, with the L2 cache cleared before each run.

    As ``triton.testing.do_bench`` does it, but for a pause of the device before each run, in which the host gets ahead:
    else a short call is timed with the host's work on a slow host.
    """
    if device.type == "cuda":
        return _device_ms(call, device, repeat_ms)
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


_PAUSE_CYCLES = 500_000  # a quarter of a millisecond


def _device_ms(call: Callable[[], Any], device: torch.device, repeat_ms: int) -> float:
    clear = torch.empty(256 << 20, dtype=torch.int8, device=device)
    times: list[float] = []
    runs = 5  # to warm up, and to see how long one takes
    for _ in range(2):
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)
        ]
        for start, end in events:
            torch.cuda._sleep(_PAUSE_CYCLES)
            clear.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        times = [start.elapsed_time(end) for start, end in events]
        runs = max(10, min(200, int(repeat_ms / statistics.median(times))))
    return statistics.median(times)


def graph_ms(call: Callable[[], Any], device: torch.device, repeat_ms: int = 60) -> float:
    """As ``device_ms``; on a GPU that of the call's captured graph, so that a short kernel doesn't wait for the host.

    A backward runs on the stream that its forward ran on: make both on one that isn't the default stream.
    """
    if device.type != "cuda":
        return device_ms(call, device, repeat_ms)
    call()
    torch.cuda.synchronize(device)
    current = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=None if current == torch.cuda.default_stream(device) else current):
        call()
    return device_ms(graph.replay, device, repeat_ms)


def kernels_ms(call: Callable[[], Any], device: torch.device, calls: int = 20) -> float:
    """Mean time that a call's kernels and copies take on the device in ms, by the profiler, with a cold L2 cache.

    For calls that the host can't enqueue as fast as the device runs them. On a CPU as ``device_ms``.
    """
    if device.type != "cuda":
        return device_ms(call, device)
    clear = torch.empty(256 << 20, dtype=torch.int8, device=device)
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(calls):
            clear.fill_(1)
            call()
        torch.cuda.synchronize(device)
    events = [
        event
        for event in profile.events()
        if event.device_type.name == "CUDA" and "FillFunctor<signed char>" not in event.name
    ]
    return float(sum(event.time_range.elapsed_us() for event in events)) / calls / 1e3


def host_us(call: Callable[[], Any], device: torch.device, calls: int = 200) -> float:
    """Median host time of a call in us: what it takes to enqueue it, in batches that the device's queue can hold."""
    times = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(times) * 1e6


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows that share their keys as a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=200).print(table)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Write results as JSON, making the folder, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n")
