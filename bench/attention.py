"""How fast is each attention backend, and what does a call cost on the host?

bfloat16, non-causal, views of one packed qkv; TFLOP/s from 4 * length^2 * heads * width a sequence; L2 is cleared
before each run. The error is the largest difference from the reference backend, beside the time. Host time is a call
under inference mode, the op against the backend's own function.

    python bench/attention.py [--out results.json] [--smoke] [--sweep]
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from measure import device_ms, environment, host_us, show, write

from mmgraph import ops
from mmgraph.ops.attention import triton_backend
from mmgraph.ops.attention.registry import _table

# sequences, length, heads, width
SHAPES = (
    (4, 4096, 16, 64),
    (4, 4096, 16, 72),
    (4, 4096, 16, 80),
    (4, 4096, 16, 128),
    (1, 16384, 16, 72),
    (16, 1024, 16, 72),
    (256, 64, 16, 80),
    (64, 64, 16, 80),
)
SMOKE = ((2, 16, 2, 8),)


def prepare(shape: tuple[int, int, int, int], device: torch.device) -> tuple[Any, ...]:
    batch, length, heads, width = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(batch * length, 3 * heads * width, device=device).to(dtype)
    q, k, v = (x.unflatten(1, (heads, width)) for x in qkv.chunk(3, dim=1))
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return q, k, v, cu, length


def label(shape: tuple[int, int, int, int]) -> str:
    batch, length, heads, width = shape
    return f"{batch} x {length}, {heads}, {width}"


def tflops(shape: tuple[int, int, int, int], ms: float) -> float:
    batch, length, heads, width = shape
    return 4e-9 * batch * length**2 * heads * width / ms


def others(q: Any, k: Any, v: Any, cu: Any, length: int) -> dict[str, Any]:
    """Calls that mmgraph is compared with, where they are there."""
    if not q.is_cuda:
        return {}
    width = q.shape[2]
    scale = width**-0.5
    return {
        "torch varlen": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, length, length, 0.0, False, False, scale=scale
        )[0]
    }


def measure(shape: tuple[int, int, int, int], device: torch.device) -> list[dict[str, Any]]:
    q, k, v, cu, length = prepare(shape, device)
    expected = ops.varlen_attention(q, k, v, cu, length, backend="reference").float()
    reports = ops.explain_backends(device=device, dtype=q.dtype, head_dim=shape[3], heads=shape[2])
    names = [report.name for report in reports if report.usable and report.name != "reference"] or ["reference"]
    chosen = ops.select_backend(
        device=device, dtype=q.dtype, head_dim=shape[3], heads=shape[2],
        tokens=q.shape[0], batch=shape[0], max_seqlen=length,
    )  # fmt: skip
    calls = {name: lambda n=name: ops.varlen_attention(q, k, v, cu, length, backend=n) for name in names}
    calls[f"None ({chosen})"] = lambda: ops.varlen_attention(q, k, v, cu, length)
    calls |= others(q, k, v, cu, length)
    found = []
    for name, call in calls.items():
        error = float((call().float() - expected).abs().max())
        ms = device_ms(call, device)
        found.append(
            {"shape": label(shape), "backend": name, "ms": ms, "TFLOP/s": tflops(shape, ms), "error": error}
        )
    return found


def host(device: torch.device) -> list[dict[str, Any]]:
    """One call on a small input: the op that chooses, the backend's own op, and the backend's function."""
    q, k, v, cu, length = prepare((2, 16, 2, 64), device)
    found = []
    reports = ops.explain_backends(device=device, dtype=q.dtype, head_dim=64, heads=2)
    for name in (report.name for report in reports if report.usable):
        forward = _table()[name].forward
        row = {
            "call": name,
            "named op us": host_us(lambda n=name: ops.varlen_attention(q, k, v, cu, length, backend=n), device),
            "backend alone us": host_us(lambda f=forward: f(q, k, v, cu, length, 0.125, False, False), device),
        }
        row["op adds us"] = row["named op us"] - row["backend alone us"]
        found.append(row)
    name = ops.select_backend(
        device=device, dtype=q.dtype, head_dim=64, heads=2, tokens=32, batch=2, max_seqlen=16
    )
    alone = next(row["backend alone us"] for row in found if row["call"] == name)
    chosen = host_us(lambda: ops.varlen_attention(q, k, v, cu, length), device)
    found.append(
        {
            "call": f"None ({name})",
            "named op us": chosen,
            "backend alone us": alone,
            "op adds us": chosen - alone,
        }
    )
    return found


def sweep(shape: tuple[int, int, int, int], device: torch.device) -> list[dict[str, Any]]:
    """The Triton kernel with other block sizes than the committed ones, the fastest first."""
    q, k, v, cu, length = prepare(shape, device)
    rows_at_once = (64,) if length <= 64 else (64, 128)
    found = []
    for blocks in itertools.starmap(
        triton_backend.Blocks, itertools.product(rows_at_once, (32, 64, 128), (4, 8), (1, 2, 3))
    ):
        try:
            ms = device_ms(
                lambda b=blocks: triton_backend.forward(q, k, v, cu, length, 0.1, False, False, b), device, 30
            )
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            continue  # these blocks don't fit in shared memory
        found.append(
            {"shape": label(shape), "blocks": str(tuple(blocks)), "ms": ms, "TFLOP/s": tflops(shape, ms)}
        )
    return sorted(found, key=lambda row: row["ms"])[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU where there is no GPU")
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes of the Triton kernel")
    parser.add_argument("--shapes", type=int, nargs="*", help="only these shapes, by place in the list")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    shapes = SMOKE if options.smoke else SHAPES
    if options.shapes is not None:
        shapes = tuple(shapes[i] for i in options.shapes)
    results: dict[str, Any] = {"benchmark": "attention", "environment": environment(device)}
    with torch.inference_mode():
        results["rows"] = [row for shape in shapes for row in measure(shape, device)]
        show("Attention (sequences x length, heads, width)", results["rows"])
        results["host"] = host(device)
        show("Host cost of a call", results["host"])
        if options.sweep and device.type == "cuda":
            results["sweep"] = []
            for shape in shapes:
                best = sweep(shape, device)
                show("Blocks (queries, keys, warps, stages)", best)
                results["sweep"] += best
    write(options.out, results)


if __name__ == "__main__":
    main()
