"""Runs every Triton kernel once at small odd sizes, for compute-sanitizer. It times nothing.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python bench/sanitize.py

Without PyTorch's caching allocator every tensor is an allocation of its own, so that a read past its end is seen.
"""

import argparse
import itertools

import torch

from mmgraph import ops

PARTS = ("assembly", "triton", "fa2", "backward")
WIDTHS = ((1, torch.float32), (70, torch.bfloat16), (2049, torch.float16), (4096, torch.bfloat16))


def attention(part: str, width: int, v_width: int, causal: bool, packed: bool) -> None:
    lengths = [1, 0, 63, 64, 65, 130]
    tokens, heads, kv_heads = sum(lengths) + 7, 4, 2
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    qkv = torch.randn(tokens, sum(sizes), device="cuda").bfloat16()
    parts = qkv.split(sizes, dim=1)
    q, k, v = (x.unflatten(1, (-1, w)) for x, w in zip(parts, (width, width, v_width), strict=True))
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    if part == "backward":
        q.requires_grad_()
        ops.varlen_attention(q, k, v, cu, 130, causal=causal, backend="triton").float().sum().backward()
        return
    out = ops.varlen_attention(q, k, v, cu, 130, causal=causal, backend=part)
    if bool(out.isnan().any()):
        raise SystemExit(f"{part} gave NaN")


def assembly(width: int, dtype: torch.dtype) -> None:
    table, pool = torch.randn(11, width, device="cuda"), torch.randn(5, width, device="cuda").to(dtype)
    ids = torch.tensor([0, 10, -4, 99, 3], device="cuda")
    index = torch.tensor([-1, 4, -1, 0, 2], dtype=torch.int32, device="cuda")
    ops.assemble_embeddings(ids, table, pool, index)
    ops.assemble_embeddings_out(ids, table, pool, index, out=torch.empty(5, width, device="cuda"))
    ops.merge_embeddings(table[:5], index >= 0, pool[:3])
    deep = torch.cat([pool, pool], dim=1)
    ops.deepstack_add(table[:5], deep, index, 1)
    bad = torch.tensor([-1, 7, -9, 2**31 - 1, 0], dtype=torch.int32, device="cuda")
    ops.assemble_embeddings(ids, table, pool, bad)
    ops.deepstack_add(table[:5], deep, bad, 0)
    try:
        ops.check_errors()
    except ops.DeviceError:
        return
    raise SystemExit("rows outside the pool were not recorded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"some of {', '.join(PARTS)}")
    parts = parser.parse_args().parts
    ops.prepare_device("cuda")
    for part in parts:
        if part == "assembly":
            for width, dtype in WIDTHS:
                assembly(width, dtype)
            continue
        for width, v_width in ((16, 16), (37, 37), (72, 72), (80, 40), (128, 128), (256, 256)):
            for causal, packed in ((False, True), (True, False)):
                attention(part, width, v_width, causal, packed)
    torch.cuda.synchronize()
    ops.check_errors()
    print("all kernels ran")


if __name__ == "__main__":
    main()
