"""How near are rotary positions to the speed of a plain copy, and how do PyTorch's own ways compare?

bfloat16, half-width float32 tables. Times are those of a captured graph's replay, since most of these calls are
shorter than what it takes the host to make them; L2 is cleared before each run. Eager is the usual formula in
float32 on a split projection (with full-width tables, as that formula wants them), compiled is the same under
torch.compile. The copy limit is a device copy of as many bytes as q, k and the tables; of the backward, of the whole
packed gradient. Each way's error is the largest difference from the formula in float64, beside its time.

    python bench/rope.py [--out results.json] [--smoke] [--sweep]
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from measure import environment, graph_ms, host_us, show, write

from mmgraph import ops
from mmgraph.ops.rotary import cuda as launches

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
Norms = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


@dataclass(frozen=True)
class Shape:
    """A model's heads, and tokens."""

    tokens: int
    heads: int
    kv_heads: int
    width: int

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.width

    @property
    def rotated(self) -> int:
        return (self.heads + self.kv_heads) * self.width

    def counts(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.width

    def __str__(self) -> str:
        return f"{self.tokens}, {self.heads}/{self.kv_heads} x {self.width}"


MODELS = ((16, 16, 72), (16, 16, 80), (16, 16, 64), (32, 8, 128))
TOKENS = (1024, 4096, 16384, 32768)
SMOKE = (Shape(5, 4, 4, 12), Shape(7, 4, 2, 8))
# Rounding to bfloat16 once is off by up to 1/256 of a value; the rest is for the math in float32 before it.
LARGEST_ERROR = 1 / 200


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def plain(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: Norms,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """The usual way: split, norm, rotate with full-width tables, cast back."""
    heads, kv_heads, width = shape.counts()
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    q, k, v = (part.unflatten(1, (-1, width)) for part in qkv.split(sizes, dim=1))
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    turned = []
    for part, weight in zip((q, k), norms, strict=True):
        wide = part.to(dtype)
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.to(dtype)
        turned.append((wide * cos + rotate_half(wide) * sin).to(qkv.dtype if dtype == torch.float32 else dtype))
    return turned[0], turned[1], v


@dataclass(frozen=True)
class Case:
    """Inputs on the device; ``full`` are the tables as the usual way wants them."""

    shape: Shape
    qkv: torch.Tensor
    half: Pair
    full: Pair
    norms: Pair

    @staticmethod
    def prepare(shape: Shape, device: torch.device) -> "Case":
        generator = torch.Generator().manual_seed(shape.tokens)
        qkv = torch.randn(shape.tokens, shape.columns, generator=generator).to(device).bfloat16()
        pairs = shape.width // 2
        angles = torch.arange(shape.tokens)[:, None] * 10_000.0 ** (-torch.arange(pairs) / pairs)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        full = torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)
        q_norm, k_norm = torch.randn(2, shape.width, generator=generator).to(device).bfloat16().unbind(0)
        return Case(shape, qkv, (cos, sin), full, (q_norm, k_norm))

    def exact(self, norms: bool) -> Tensors:
        return plain(self.qkv, *self.full, self.weights(norms), self.shape, torch.float64)

    def weights(self, norms: bool) -> Norms:
        return self.norms if norms else (None, None)


def copy_ms(elements: int, table_bytes: int, device: torch.device) -> float:
    """A copy of bfloat16 elements, and half a copy of the tables' bytes, which are read and not written."""
    source = torch.empty(elements * 2 + table_bytes // 2, dtype=torch.uint8, device=device)
    return graph_ms(functools.partial(torch.empty_like(source).copy_, source), device)


def error(got: Tensors, expected: Tensors) -> float:
    """The largest difference, as a part of the value where that is above 1; to save memory, by blocks of rows."""
    pairs = zip(got, expected, strict=True)
    blocks = (block for a, b in pairs for block in zip(a.split(4096), b.split(4096), strict=True))
    return max(float(((a.double() - b).abs() / b.abs().clamp(min=1)).max()) for a, b in blocks)


def measure(case: Case, device: torch.device, norms: bool, compile: bool) -> dict[str, Any]:
    shape, weights = case.shape, case.weights(norms)
    q_norm, k_norm = weights
    usual = functools.partial(plain, case.qkv, *case.full, weights, shape)
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    ours = functools.partial(
        ops.packed_qkv_rope, case.qkv, *case.half, *shape.counts(), q_norm=q_norm, k_norm=k_norm
    )
    own = case.qkv.clone()
    in_place = functools.partial(
        ops.packed_qkv_rope_, own, *case.half, *shape.counts(), q_norm=q_norm, k_norm=k_norm
    )
    calls: dict[str, Callable[[], Tensors]] = {
        "eager": usual,
        "compiled": functools.partial(compiled, case.qkv, *case.full, weights, shape),
        "mmgraph": ours,
        "in place": in_place,
    }
    expected = case.exact(norms)
    row: dict[str, Any] = {"shape": str(shape), "what": "with norms" if norms else "rotation"}
    for name, call in calls.items():
        if name == "compiled" and not compile:
            row[f"{name} error"] = row[f"{name} ms"] = None
            continue
        row[f"{name} error"] = error(call(), expected)  # in place: the first call, on the values as they were
        row[f"{name} ms"] = graph_ms(call, device)
    tables = sum(table.numel() * table.element_size() for table in case.half)
    row["copy limit ms"] = copy_ms(shape.tokens * shape.rotated, tables, device)
    row["mmgraph / copy"] = row["mmgraph ms"] / row["copy limit ms"]
    row["mmgraph host us"] = host_us(ours, device)
    return row


def measure_backward(case: Case, device: torch.device, norms: bool, compile: bool) -> dict[str, Any]:
    shape = case.shape
    qkv, *weights = (x.detach().requires_grad_() for x in (case.qkv, *case.norms))
    given: Norms = (weights[0], weights[1]) if norms else (None, None)
    leaves = [qkv, *weights] if norms else [qkv]

    def gradient(outs: Tensors) -> Callable[[], Tensors]:
        return functools.partial(torch.autograd.grad, outs, leaves, directions, retain_graph=True)

    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    ours = ops.packed_qkv_rope(qkv, *case.half, *shape.counts(), q_norm=given[0], k_norm=given[1])
    directions = [torch.randn_like(x) for x in ours]
    ways = {
        "eager": plain(qkv, *case.full, given, shape),
        "compiled": compiled(qkv, *case.full, given, shape) if compile else None,
        "mmgraph": ours,
    }
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_norms: Norms = (wide[1], wide[2]) if norms else (None, None)
    exact = plain(wide[0], *case.full, wide_norms, shape, torch.float64)
    expected = torch.autograd.grad(exact, wide, [d.double() for d in directions])
    row: dict[str, Any] = {"shape": str(shape), "what": "backward with norms" if norms else "backward"}
    for name, outs in ways.items():
        if outs is None:
            row[f"{name} error"] = row[f"{name} ms"] = None
            continue
        call = gradient(outs)
        # The weights' gradients are sums over all rows and heads; their size says nothing about the packed one's.
        row[f"{name} error"] = error(call()[:1], expected[:1])
        row[f"{name} ms"] = graph_ms(call, device)
    tables = sum(table.numel() * table.element_size() for table in case.half)
    more = shape.tokens * shape.rotated if norms else 0
    row["copy limit ms"] = copy_ms(shape.tokens * shape.columns, tables + 2 * more, device)
    row["mmgraph / copy"] = row["mmgraph ms"] / row["copy limit ms"]
    return row


def sweep(case: Case, device: torch.device) -> dict[str, Any]:
    """The forward kernel with other blocks of heads and warps than the committed ones."""
    committed = launches._shape
    row: dict[str, Any] = {
        "shape": str(case.shape),
        "committed": str(committed(case.shape.heads, case.shape.width // 2, launches._FORWARD_PER_WARP)),
    }
    call = functools.partial(ops.packed_qkv_rope, case.qkv, *case.half, *case.shape.counts())
    try:
        for block in (4, 8, 16, 32):
            for warps in (1, 2, 4, 8):
                launches._shape = functools.partial(_fixed, (block, warps))
                row[f"{block}/{warps}"] = graph_ms(call, device, 30)
    finally:
        launches._shape = committed
    return row


def _fixed(shape: tuple[int, int], heads: int, half: int, per_warp: int) -> tuple[int, int]:
    return shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU where there is no GPU")
    parser.add_argument("--sweep", action="store_true", help="also time other blocks of heads and warps")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="only these numbers of tokens")
    parser.add_argument(
        "--compiled",
        type=int,
        nargs="*",
        default=TOKENS,
        help="compile PyTorch's way for these numbers of tokens only",
    )
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch._functorch.config.donated_buffer = False  # backwards are run many times
    results: dict[str, Any] = {
        "benchmark": "rope",
        "environment": environment(device),
        "rows": [],
        "backward": [],
    }
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # a backward is captured on its forward's stream
    swept = []
    shapes = tuple(Shape(tokens, *model) for model in MODELS for tokens in options.tokens)
    for shape in SMOKE if options.smoke else shapes:
        case = Case.prepare(shape, device)
        compile = options.smoke or shape.tokens in options.compiled
        for norms in (False, True):
            with torch.inference_mode():
                results["rows"].append(measure(case, device, norms, compile))
            results["backward"].append(measure_backward(case, device, norms, compile))
        if options.sweep and not options.smoke and shape.tokens == 16384:
            with torch.inference_mode():
                swept.append(sweep(case, device))
    show("Rotary positions (tokens, heads/kv heads x width)", results["rows"])
    show("Their backward", results["backward"])
    if swept:
        results["sweep"] = swept
        show("Heads at a time / warps, ms", swept)
    write(options.out, results)
    checked = [*results["rows"], *results["backward"]]
    wrong = [
        row
        for row in checked
        for key in row
        if key.endswith("error") and row[key] is not None and not row[key] <= LARGEST_ERROR
    ]
    if wrong:
        raise SystemExit(f"results differ from the formula: {wrong}")


if __name__ == "__main__":
    main()
