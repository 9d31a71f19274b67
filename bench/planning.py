"""How long does the plan of one forward batch take on the host?

64 requests with 4 images each (256 spans) must plan in at most 150 us; the time must grow with the spans that
the chunk touches, and not with the prompt or with the other items of a request. Prints JSON; ``--out FILE``
writes it too.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import RowMap
from mmgraph.planning import build_plan

REQUESTS = (1, 4, 16, 64, 256, 1024)


def request(images: int, rows: int = 16, gap: int = 4, *, first_hash: int) -> MultimodalInputs:
    step = rows + gap
    return MultimodalInputs(
        [
            MultimodalDataItem("image", offsets=[(k * step, k * step + rows - 1)], hash=first_hash + k)
            for k in range(images)
        ]
    )


def measure(ctx: MultimodalForwardContext, repeats: int = 400) -> dict[str, Any]:
    total = sum(ctx.extend_seq_lens or ())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        plan = build_plan(ctx, total)
        arrays = (plan.dst_start, plan.dst_end, plan.src_start)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    assert len(arrays[0]) == len(plan.scatter_ranges)
    return {"ranges": len(plan.scatter_ranges), "median_us": statistics.median(times), "min_us": min(times)}


def measure_map(ctx: MultimodalForwardContext, repeats: int = 40) -> dict[str, Any]:
    """The row map of a plan over a pool in which the items lie one after another, as a kernel reads it."""
    total = sum(ctx.extend_seq_lens or ())
    plan = build_plan(ctx, total)
    source = np.cumsum(plan.dst_end - plan.dst_start + 1) - (plan.dst_end - plan.dst_start + 1)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        RowMap.from_ranges(total, plan.dst_start, plan.dst_end, source, pool_rows=total).index()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return {"ranges": len(source), "median_us": statistics.median(times), "min_us": min(times)}


def batch(requests: int, images: int) -> MultimodalForwardContext:
    inputs = [request(images, first_hash=r * images) for r in range(requests)]
    return MultimodalForwardContext(inputs, [0] * requests, [images * 20] * requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
    }
    for requests in REQUESTS:
        results[f"{requests} requests x 4 images"] = measure(batch(requests, 4), 200 if requests <= 64 else 20)
    for requests in REQUESTS:
        results[f"row map of {requests} requests"] = measure_map(batch(requests, 4))
    for images in (16, 10_000):
        long = MultimodalForwardContext([request(images, first_hash=0)], [40], [80])
        results[f"a chunk over 4 of {images} images"] = measure(long)
    print(json.dumps(results, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
