"""Runs every Triton kernel of the library at small odd sizes, for compute-sanitizer. It times nothing.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python bench/sanitize.py

Without PyTorch's caching allocator every tensor is an allocation of its own, so that a read past its end is seen.

Covered are the kernels of a captured graph's own nodes, of assembly, of rotary positions (forward and backward), of
norms, activations and mixtures of rows, of the triton backend for long and for short sequences, of outputs' tails, and
the one in front of cuDNN's attention, with wrong offsets and indices too; with them run PyTorch's FlashAttention 2,
forward and backward, and cuDNN's attention. Where ``flashinfer_cudnn`` isn't usable, its kernel is not run, which is
printed. The kernels of fa3 and fa4 are not covered.
"""

import argparse
import itertools
import types

import torch

from mmgraph import ops
from mmgraph.capture import padding, publishing
from mmgraph.capture.ring import CallRing
from mmgraph.ops.attention import cudnn_backend, triton_backend, windows
from mmgraph.ops.attention.registry import Traits
from mmgraph.ops.attention.windows import WindowBlocks
from mmgraph.ops.attention.zero_tail import close_tail

PARTS = (
    "capture",
    "assembly",
    "rotary",
    "rowwise",
    "triton",
    "windows",
    "full_windows",
    "tails",
    "fa2",
    "flashinfer_cudnn",
    "backward",
)
# The committed forms of the window kernel, by whether a width is cut in two, and others.
WHOLE_FORMS = (
    None,
    WindowBlocks(64, True, 1, 4, 3, 2),
    WindowBlocks(64, True, 2, 2, 1, 3),
    WindowBlocks(64, True, 4, 1, 4, 1),
)
SPLIT_FORMS = (None, WindowBlocks(64, True, 2, 2, 3, 3), WindowBlocks(64, True, 4, 1, 1, 2))
# Lengths of short sequences, rows behind the last one.
BATCHES = (
    ([64] * 5, 0),
    ([64] * 3, 200),
    ([16, 64, 0, 32, 5, 64, 1], 7),
    ([0] * 700 + [3, 64] + [0] * 300, 1),
    ([1, 2, 3, 4, 5, 6, 7, 8] * 90, 0),
    ([100, 3, 90], 13),
)
HEADS = ((16, 16, 72), (28, 4, 128), (3, 1, 10), (1, 1, 2))
WIDTHS = ((1, torch.float32), (70, torch.bfloat16), (2049, torch.float16), (4096, torch.bfloat16))


def attention(part: str, width: int, v_width: int, causal: bool, packed: bool) -> None:
    lengths = [1, 0, 63, 64, 65, 130]
    tokens, heads, kv_heads = sum(lengths) + 7, 4, 2
    q, k, v = projection(tokens, heads, kv_heads, width, v_width, torch.bfloat16)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    cu = offsets(lengths)
    if part == "backward":
        q.requires_grad_()
        ops.varlen_attention(q, k, v, cu, 130, causal=causal, backend="triton").float().sum().backward()
        return
    out = ops.varlen_attention(q, k, v, cu, 130, causal=causal, backend=part)
    if bool(out.isnan().any()):
        raise SystemExit(f"{part} gave NaN")


def projection(
    tokens: int, heads: int, kv_heads: int, width: int, v_width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k and v as views of one projection."""
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    packed = torch.randn(tokens, sum(sizes), device="cuda").to(dtype)
    parts = zip(packed.split(sizes, 1), (width, width, v_width), strict=True)
    return [x.unflatten(1, (-1, w)) for x, w in parts]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def short_sequences(width: int, v_width: int, dtype: torch.dtype, causal: bool) -> None:
    split = windows.split_width(width)[1] or windows.split_width(v_width)[1]
    alone = WindowBlocks(64, False, 2, 2, 3, 3) if split else WindowBlocks(64, False, 1, 4, 3, 2)
    forms = (*(SPLIT_FORMS if split else WHOLE_FORMS), alone)
    for (lengths, tail), blocks in itertools.product(BATCHES, forms[:1] if dtype == torch.float32 else forms):
        if max(lengths) > 64 and (blocks is None or not blocks.packed):
            continue  # not for the kernel that has a program per sequence
        tokens, cu = sum(lengths) + tail, offsets(lengths)
        q, k, v = projection(tokens, 4, 2, width, v_width, dtype)
        if tail:
            v[-tail:] = float("nan")
        v[5] = float("nan")  # of one sequence: its neighbours are computed apart from it
        aligned = triton_backend._aligned(q, k, v)
        out, lse = windows.forward(q, k, v, cu, max(lengths), 0.3, causal, True, aligned, blocks)
        if lse is None or bool(lse.isnan().any() | out[max(lengths) + 5 :].isnan().any()):
            raise SystemExit("a sequence's NaN reached another one's rows")


def full_windows(width: int, v_width: int, causal: bool) -> None:
    """Windows with a program per sequence and head, with wrong offsets too."""
    for lengths, tail in (([64] * 5, 0), ([64] * 3, 300), ([1, 64, 0, 63, 64, 64], 7)):
        tokens, cu = sum(lengths) + tail, offsets(lengths)
        q, k, v = projection(tokens, 4, 2, width, v_width, torch.bfloat16)
        if tail:
            v[-tail:] = float("nan")
        if not windows.takes_full_windows(q, v, len(lengths), True):
            raise SystemExit("another kernel would take these windows")
        out, lse = windows.forward(q, k, v, cu, 64, 0.3, causal, True, True)
        if lse is None or bool(lse.isnan().any() | out.isnan().any()):
            raise SystemExit("rows that no sequence covers reached others")
        ops.check_errors()
        wrong = torch.tensor([3, -5, 2**31 - 1, tokens - 2], dtype=torch.int32, device="cuda")
        windows.forward(q, k, v, wrong, 64, 0.3, causal, False, True)
        must_be_recorded()


def must_be_recorded() -> None:
    try:
        ops.check_errors()
    except ops.DeviceError:
        return
    raise SystemExit("wrong offsets were not recorded")


def tails(width: int, v_width: int, causal: bool) -> None:
    """Outputs are closed with NaN behind the last sequence, and with wrong offsets."""
    for lengths, tail in ((BATCHES[1][0], 300), BATCHES[2], ([300, 0, 130], 5)):
        tokens = sum(lengths) + tail
        q, k, v = (x.contiguous() for x in projection(tokens, 4, 2, width, width, torch.bfloat16))
        v[-tail:] = float("nan")
        out = torch.full((tokens, 4, v_width), float("nan"), device="cuda").bfloat16()
        out[: -tail - 300] = 0
        close_tail(out, q, k, v, offsets(lengths), max(lengths), 0.3, causal)
        if bool(out.isnan().any()):
            raise SystemExit("an output wasn't closed")
        wrong = torch.tensor([3, -5, 2**31 - 1, tokens - 2], dtype=torch.int32, device="cuda")
        close_tail(out, q, k, v, wrong, 64, 0.3, causal)
    try:
        ops.check_errors()
    except ops.DeviceError:
        return
    raise SystemExit("wrong offsets were not recorded")


def why_no_cudnn() -> str | None:
    """Why flashinfer_cudnn isn't usable here, or None."""
    device = torch.device("cuda", torch.cuda.current_device())
    return cudnn_backend.BACKEND.why_not(Traits(device, torch.bfloat16, 72, 72, 4, 2))


def cudnn_offsets() -> None:
    """The kernel that makes cuDNN's offsets, with wrong ones, in batches that one and several programs go through."""
    q, k, v = projection(40, 4, 2, 72, 72, torch.bfloat16)
    for starts in ([3, -5, 2**31 - 1, 38], [0, 30, 10], [0, 41], [7] * 300, [-(2**31)] * 9):
        cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
        ops.varlen_attention(q, k, v, cu, 40, backend="flashinfer_cudnn")
        try:
            ops.check_errors()
        except ops.DeviceError:
            continue
        raise SystemExit("wrong offsets were not recorded")


def assembly(width: int, dtype: torch.dtype) -> None:
    table, pool = torch.randn(11, width, device="cuda"), torch.randn(5, width, device="cuda").to(dtype)
    ids = torch.tensor([0, 10, -4, 99, 3], device="cuda")
    index = torch.tensor([-1, 4, -1, 0, 2], dtype=torch.int32, device="cuda")
    ops.assemble_embeddings(ids, table, pool, index)
    ops.assemble_embeddings_out(ids, table, pool, index, out=torch.empty(5, width, device="cuda"))
    ops.merge_embeddings(table[:5], index >= 0, pool[:3])
    deep = torch.cat([pool, pool], dim=1)
    ops.deepstack_add(table[:5], deep, index, 1)
    ops.deepstack_add_(table[:5].clone(), deep, index, 1)
    ops.store_rows(
        pool[:3], torch.tensor([4, -1, 0], dtype=torch.int32, device="cuda"), out=torch.empty_like(pool)
    )
    row_map = ops.RowMap.from_ranges(5, [0, 3], [1, 4], [3, 0], pool_rows=5)
    lists = (
        [pool],
        [pool[:2], pool[2:]],
        [pool[:2].float(), pool[2:4].half(), pool[4:].double()],
        [pool.t().contiguous().t()],
    )
    for parts in lists:
        ops.assemble_embeddings(ids, table, parts, row_map)
    ops.expand_ranges(torch.from_numpy(row_map.padded_ranges(5)).cuda(), 5)
    gradients(width, dtype)
    bad = torch.tensor([-1, 7, -9, 2**31 - 1, 0], dtype=torch.int32, device="cuda")
    ops.assemble_embeddings(ids, table, pool, bad)
    ops.deepstack_add(table[:5], deep, bad, 0)
    ops.store_rows(pool, bad, out=torch.empty_like(pool))
    ops.expand_ranges(
        torch.tensor([[-4, 9, 3], [2, 1, 5], [7, 2**31 - 2, 0]], dtype=torch.int32, device="cuda"), 5
    )
    try:
        ops.check_errors()
    except ops.DeviceError:
        return
    raise SystemExit("rows outside the pool were not recorded")


def gradients(width: int, dtype: torch.dtype) -> None:
    """Of rows that are alone, that share a place for several chunks, and that have none."""
    for rows, vocab, pool_rows in ((1, 1, 1), (200, 3, 2), (130, 200, 150)):
        table = torch.randn(vocab, width, device="cuda", requires_grad=True)
        pool = torch.randn(pool_rows, width, device="cuda").to(dtype).requires_grad_()
        ids = torch.randint(-2, vocab + 2, (rows,), device="cuda")
        index = torch.randint(-1, pool_rows, (rows,), dtype=torch.int32, device="cuda")
        hidden = ops.assemble_embeddings(ids, table, pool, index)
        hidden = ops.deepstack_add(hidden, torch.cat([pool, pool], dim=1), index, 1)
        mask = torch.zeros(rows, dtype=torch.bool, device="cuda")
        mask[:pool_rows] = True
        ops.merge_embeddings(hidden, mask, pool[: int(mask.sum())]).sum().backward()


def rotary(heads: int, kv_heads: int, width: int, interleaved: bool, full: bool) -> None:
    tokens, columns = 5, (heads + 2 * kv_heads) * width
    table_width = width if full else width // 2
    for dtype, gap, norms in itertools.product((torch.bfloat16, torch.float32), (0, 3), (False, True)):
        qkv = torch.randn(tokens, columns + gap, device="cuda").to(dtype)[:, gap:]
        cos, sin = (torch.randn(tokens, table_width, device="cuda") for _ in range(2))
        weights = [
            torch.randn(width, device="cuda").to(dtype).requires_grad_() if norms else None for _ in range(2)
        ]
        leaf = qkv.detach().requires_grad_()
        outs = ops.packed_qkv_rope(
            leaf,
            cos,
            sin,
            heads,
            kv_heads,
            width,
            interleaved=interleaved,
            q_norm=weights[0],
            k_norm=weights[1],
        )
        torch.autograd.backward(outs, [torch.randn_like(x) for x in outs])
        with torch.no_grad():
            ops.packed_qkv_rope(
                qkv, cos, sin, heads, kv_heads, width, interleaved=interleaved, q_norm=weights[0]
            )
            views = ops.packed_qkv_rope_(qkv, cos, sin, heads, kv_heads, width, interleaved=interleaved)
        if any(bool(x.isnan().any()) for x in (*outs, *views, leaf.grad) if x is not None):
            raise SystemExit("a rotary op gave NaN")


def rowwise(width: int, dtype: torch.dtype, device: str = "cuda") -> None:
    """Norms, activations and mixtures, of adjacent rows and of rows with room between them."""
    weight = torch.randn(width, device=device).to(dtype)
    for tokens, gap in itertools.product((0, 1, 5), (0, 3)):
        x, delta = (torch.randn(tokens, width + gap, device=device).to(dtype)[:, gap:] for _ in range(2))
        for kind in ("layer", "rms"):
            bias = weight if kind == "layer" else None
            ops.add_norm(x, delta, weight, bias, eps=1e-6, kind=kind)
            ops.norm(x, weight, bias, eps=1e-6, kind=kind)
        gated = torch.randn(tokens, 2 * width + gap, device=device).to(dtype)[:, gap:]
        for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu"):
            ops.activation(x, kind=name)
            ops.gated_activation(gated, activation=name)
        table = torch.randn(7, width + gap, device=device).to(dtype)[:, gap:]
        for taps in (0, 1, 4, 16):
            indices = torch.randint(0, 7, (tokens, taps), device=device)
            shares = torch.rand(tokens, taps, device=device)
            ops.mix_rows(table, indices, shares)
            ops.mix_rows(table, indices.int(), shares, base=x)
    ops.check_errors()
    try:
        ops.mix_rows(
            weight[None], torch.tensor([[-9], [2**40]], device=device), torch.ones(2, 1, device=device)
        )
        ops.check_errors()
    except ops.DataError:
        return
    raise SystemExit("an index outside the table was not recorded")


def capture_nodes(tokens: int, bucket: int, width: int, dtype: torch.dtype) -> None:
    """A graph's own nodes, launched one by one: fetch, stage, fill, publish."""
    device = torch.device("cuda", torch.cuda.current_device())
    record = torch.zeros(7, dtype=torch.int64, device=device)  # a size, a target, and an input's five numbers
    x = torch.randn(tokens, width + 1, device=device).to(dtype)[:, :width]  # rows that lie apart
    view, result = (torch.zeros(rows, width, dtype=dtype, device=device) for rows in (bucket, tokens))
    size = x.element_size()
    ring = CallRing(record.numel(), record)
    pitch = (width + 1) * size
    ring.write([tokens, result.data_ptr(), x.data_ptr(), width * size, tokens, pitch, width * size])
    ring.fetch()
    ring.launched()
    publishing.stage(types.SimpleNamespace(record=record), [(view, 2)])  # type: ignore[arg-type]
    fills = torch.tensor([padding.fill_pattern(3, dtype)], dtype=torch.int64, device=device)
    padding.fill_padding([padding.PadLeaf(view, 0, 1, 0, 0, False)], record, fills)
    leaf = publishing.PublishLeaf(view, 0, 1, 0, False, 1)
    publishing._launch("publish_kernel", record, [leaf.numbers()], [view.numel() * size])
    assert torch.equal(result, x)
    assert (view[tokens:] == 3).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"some of {', '.join(PARTS)}")
    parts = parser.parse_args().parts
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    ops.prepare_device("cuda")
    for part in parts:
        if part == "capture":
            for tokens, dtype in itertools.product((0, 1, 5, 63), (torch.int8, torch.bfloat16, torch.float32)):
                for width in (1, 3, 8, 129):
                    capture_nodes(tokens, 64, width, dtype)
            continue
        if part == "assembly":
            for width, dtype in WIDTHS:
                assembly(width, dtype)
            continue
        if part == "rotary":
            for shape, interleaved, full in itertools.product(HEADS, (False, True), (False, True)):
                rotary(*shape, interleaved, full)
            continue
        if part == "rowwise":
            for width, dtype in itertools.product(
                (1, 3, 72, 1152, 3420, 9001), (torch.bfloat16, torch.float32)
            ):
                rowwise(width, dtype)
            continue
        if part == "windows":
            for widths, dtype, causal in itertools.product(
                ((16, 16), (37, 37), (72, 72), (80, 40), (64, 128), (256, 256)),
                (torch.bfloat16, torch.float32),
                (False, True),
            ):
                short_sequences(*widths, dtype, causal)
            continue
        if part == "full_windows":
            for widths, causal in itertools.product(
                ((8, 8), (16, 16), (72, 72), (80, 40), (64, 128), (256, 256)), (False, True)
            ):
                full_windows(*widths, causal)
            continue
        if part == "tails":
            for widths, causal in itertools.product(
                ((8, 8), (40, 37), (72, 72), (128, 16), (256, 256)), (False, True)
            ):
                tails(*widths, causal)
            continue
        pairs = [(16, 16), (37, 37), (72, 72), (80, 40), (128, 128), (256, 256)]
        if part == "flashinfer_cudnn":
            reason = why_no_cudnn()
            if reason is not None:
                print(f"flashinfer_cudnn was not run: {reason}")
                continue
            cudnn_offsets()
            largest = cudnn_backend.LARGEST_WIDTHS.get(torch.cuda.get_device_capability()[0], 256)
            pairs = [pair for pair in pairs if max(pair) <= largest]
        for width, v_width in pairs:
            for causal, packed in ((False, True), (True, False)):
                attention(part, width, v_width, causal, packed)
    torch.cuda.synchronize()
    ops.check_errors()
    print("all kernels ran")


if __name__ == "__main__":
    main()
