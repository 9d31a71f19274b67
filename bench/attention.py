"""How fast is each attention backend, and what does a call cost on the host?

bfloat16, views of one packed qkv; TFLOP/s from 4 * length^2 * heads * width a sequence, half of it where causal; L2 is
cleared before each run. The error is the largest difference from the reference in single precision. Beside
the backends run the packages' own functions and PyTorch's dense cuDNN attention. Host time is that of a call
under inference mode: the op, the backend's function inside it, and the package's own function.

    python bench/attention.py [--out results.json] [--smoke] [--sweep]
"""

import argparse
import functools
import importlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import device_ms, environment, host_us, show, write

from mmgraph import ops
from mmgraph.ops.attention import fa2, fa3, triton_backend
from mmgraph.ops.attention.registry import _table


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, or (`ragged`) drawn around it; heads, width, key heads, causal or not.

    ``empty`` sequences of no row stand behind them, as in the padding of a bucket.
    """

    batch: int
    length: int
    heads: int
    width: int
    kv_heads: int = 0
    causal: bool = False
    ragged: bool = False
    empty: int = 0

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.length] * self.batch + [0] * self.empty
        draw = random.Random(self.length)
        return [draw.randint(1, 2 * self.length) for _ in range(self.batch)]

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads else ""
        kind = (", causal" if self.causal else "") + (", ragged" if self.ragged else "")
        kind += f", {self.empty} empty ones" if self.empty else ""
        return f"{self.batch} x {self.length}, {self.heads}{kv}, {self.width}{kind}"

    def tflops(self, ms: float) -> float:
        pairs = sum(n * n for n in self.lengths()) / (2 if self.causal else 1)
        return 4e-9 * pairs * self.heads * self.width / ms


SHAPES = (
    Shape(4, 4096, 16, 64),
    Shape(4, 4096, 16, 72),
    Shape(4, 4096, 16, 80),
    Shape(4, 4096, 16, 128),
    Shape(1, 16384, 16, 72),
    Shape(16, 1024, 16, 72),
    Shape(256, 64, 16, 80),
    Shape(64, 64, 16, 80),
    Shape(256, 64, 16, 80, empty=768),
    Shape(16, 1024, 16, 72, ragged=True),
    Shape(64, 196, 16, 72, ragged=True),
    Shape(128, 128, 16, 64),
    Shape(8, 576, 16, 64),
    Shape(4, 2048, 8, 256),
    Shape(4, 4096, 32, 128, kv_heads=8),
    Shape(4, 4096, 32, 128, kv_heads=8, causal=True),
    Shape(16, 512, 32, 128, kv_heads=8, causal=True, ragged=True),
    Shape(32, 64, 16, 64, causal=True),
)
# Outputs of bfloat16 stay below 8, where its steps are 1/32.
LARGEST_ERROR = 1 / 32

SMOKE = (Shape(2, 16, 2, 8), Shape(3, 9, 4, 8, kv_heads=2, causal=True, ragged=True))


def prepare(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    lengths = shape.lengths()
    heads, kv_heads, width = shape.heads, shape.kv_heads or shape.heads, shape.width
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, width, device=device).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return q, k, v, cu, max(lengths)


def packages(q: Any, k: Any, v: Any, cu: Any, length: int, causal: bool) -> dict[str, Callable[[], Any]]:
    """Calls of the packages' own public functions, where they are installed, by our name for their kernels."""
    found: dict[str, Callable[[], Any]] = {}
    if not q.is_cuda:
        return found
    usable = {report.name for report in ops.explain_backends(**traits_of(q, k, causal)) if report.usable}
    window = (-1, 0) if causal else (-1, -1)
    if (
        "torch" in usable and q.shape[1] == k.shape[1]
    ):  # grouped heads: an argument that torch 2.11 doesn't have
        from torch.nn.attention.varlen import varlen_attn

        found["torch"] = lambda: varlen_attn(q, k, v, cu, cu, length, length, window_size=window)
    if "fa2" in usable and fa2.source() == "flash-attn":
        from flash_attn import flash_attn_varlen_func as call_fa2

        found["fa2"] = lambda: call_fa2(q, k, v, cu, cu, length, length, causal=causal)
    if "fa3" in usable:
        call_fa3 = importlib.import_module(fa3.source() or "").flash_attn_varlen_func
        found["fa3"] = lambda: call_fa3(q, k, v, cu, cu, length, length, causal=causal)
    if "fa4" in usable:
        from flash_attn.cute import flash_attn_varlen_func as call_fa4

        found["fa4"] = lambda: call_fa4(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=length,
            max_seqlen_k=length,
            causal=causal,
        )
    return found


def others(shape: Shape, q: Any, k: Any, v: Any, cu: Any, length: int) -> dict[str, Callable[[], Any]]:
    """Calls that mmgraph is compared with: the packages' own functions, and PyTorch's dense cuDNN attention."""
    found = {f"{name} package": call for name, call in packages(q, k, v, cu, length, shape.causal).items()}
    if q.is_cuda and not (shape.ragged or shape.kv_heads or shape.empty):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        dense_q, dense_k, dense_v = (x.unflatten(0, (shape.batch, -1)).transpose(1, 2) for x in (q, k, v))

        def attend() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(
                    dense_q, dense_k, dense_v, is_causal=shape.causal
                )
            return out.transpose(1, 2).flatten(0, 1)

        found["torch dense cuDNN"] = attend
    return found


def traits_of(q: Any, k: Any, causal: bool) -> dict[str, Any]:
    return {
        "device": q.device,
        "dtype": q.dtype,
        "head_dim": q.shape[2],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "causal": causal,
    }


def exact(q: Any, k: Any, v: Any, cu: Any, causal: bool) -> Any:
    """The reference in single precision, a sequence at a time."""
    ends = cu.tolist()
    parts = []
    for first, last in itertools.pairwise(ends):
        if first == last:
            continue
        rows = slice(first, last)
        own_q, own_k, own_v = q[rows].float(), k[rows].float(), v[rows].float()
        one = torch.tensor([0, last - first], dtype=torch.int32, device=q.device)
        out = ops.varlen_attention(own_q, own_k, own_v, one, last - first, causal=causal, backend="reference")
        parts.append(out)
    return torch.cat(parts)


def measure(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    q, k, v, cu, length = prepare(shape, device)
    expected = exact(q, k, v, cu, shape.causal)
    traits = traits_of(q, k, shape.causal)
    reports = ops.explain_backends(**traits)
    names = [report.name for report in reports if report.usable and report.name != "reference"] or ["reference"]
    batch = shape.batch + shape.empty
    chosen = ops.select_backend(**traits, tokens=q.shape[0], batch=batch, max_seqlen=length)
    run = functools.partial(ops.varlen_attention, q, k, v, cu, length, causal=shape.causal)
    calls: dict[str, Callable[[], Any]] = {name: functools.partial(run, backend=name) for name in names}
    calls[f"None ({chosen})"] = run
    calls |= others(shape, q, k, v, cu, length)
    found = []
    for name, call in calls.items():
        result = call()
        out = result[0] if isinstance(result, tuple) else result  # some packages give log-sum-exps too
        error = float((out.float() - expected).abs().max())
        ms = device_ms(call, device)
        found.append(
            {"shape": str(shape), "backend": name, "ms": ms, "TFLOP/s": shape.tflops(ms), "error": error}
        )
    return found


def host(device: torch.device) -> list[dict[str, Any]]:
    """One call on a small input: the op, the backend's function inside it, and the package's own function."""
    q, k, v, cu, length = prepare(Shape(2, 16, 2, 64), device)
    found: list[dict[str, Any]] = []
    direct = packages(q, k, v, cu, length, False)
    reports = ops.explain_backends(**traits_of(q, k, False))
    chosen = ops.select_backend(**traits_of(q, k, False), tokens=32, batch=2, max_seqlen=length)
    for name in (report.name for report in reports if report.usable):
        forward = _table()[name].forward
        row: dict[str, Any] = {
            "call": name,
            "op us": host_us(
                functools.partial(ops.varlen_attention, q, k, v, cu, length, backend=name), device
            ),
            "backend's function us": host_us(
                functools.partial(forward, q, k, v, cu, length, 0.125, False, False), device
            ),
            "package's function us": host_us(direct[name], device) if name in direct else None,
        }
        found.append(row)
    unnamed = host_us(functools.partial(ops.varlen_attention, q, k, v, cu, length), device)
    bare = next(row["backend's function us"] for row in found if row["call"] == chosen)
    found.append(
        {
            "call": f"None ({chosen})",
            "op us": unnamed,
            "backend's function us": bare,
            "package's function us": None,
        }
    )
    return found


def sweep(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """The Triton kernel with other block sizes than the committed ones, the fastest first."""
    q, k, v, cu, length = prepare(shape, device)
    rows_at_once = (64,) if length <= 64 else (64, 128)
    found: list[dict[str, Any]] = []
    for blocks in itertools.starmap(
        triton_backend.Blocks, itertools.product(rows_at_once, (32, 64, 128), (4, 8), (1, 2, 3))
    ):
        try:
            forward = functools.partial(
                triton_backend.forward, q, k, v, cu, length, 0.1, shape.causal, False, blocks
            )
            ms = device_ms(forward, device, 30)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            continue  # these blocks don't fit in shared memory
        found.append({"shape": str(shape), "blocks": str(tuple(blocks)), "ms": ms, "TFLOP/s": shape.tflops(ms)})
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
    shapes: tuple[Shape, ...] = SMOKE if options.smoke else SHAPES
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
    wrong = [row for row in results["rows"] if not row["error"] <= LARGEST_ERROR]
    if wrong:
        raise SystemExit(f"results differ from the reference: {wrong}")


if __name__ == "__main__":
    main()
