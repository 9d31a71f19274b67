"""Runs the rotary kernels under Triton's interpreter, on the CPU, against the reference; fails on any difference.

Started by test_triton_interpreted.py with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import itertools
import os

import torch
from interpreting import allow_new_numpy, patch_once

from mmgraph.ops.rotary import cuda as kernels
from mmgraph.ops.rotary import reference
from mmgraph.ops.rotary.dispatch import Rotation, parts

assert os.environ.get("TRITON_INTERPRET") == "1"

# heads, kv heads, width: padded widths, grouped heads, heads over several blocks, one pair.
SHAPES = ((2, 2, 16), (3, 1, 10), (6, 3, 72), (20, 4, 128), (1, 1, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def projection(generator, tokens, shape, dtype, gap):
    """Packed rows, each followed by ``gap`` nines; and all of the memory."""
    heads, kv_heads, width = shape
    columns = (heads + 2 * kv_heads) * width
    room = torch.full((tokens, columns + gap), 9.0, dtype=dtype)
    room[:, :columns] = torch.randn(tokens, columns, generator=generator)
    return room[:, :columns], room


def table(generator, tokens, width, kind, dtype):
    if kind == "parts":
        return torch.view_as_real(torch.randn(tokens, width, generator=generator, dtype=torch.complex64))[
            ..., 0
        ]
    if kind == "transposed":
        return torch.randn(width, tokens, generator=generator).to(dtype).t()
    if kind == "repeated":
        return torch.randn(1, width, generator=generator).to(dtype).expand(tokens, width)
    return torch.randn(tokens, width + 1, generator=generator).to(dtype)[:, 1:]


def close(got, expected, exact):
    """Off by at most twice the reference's own error against float64, plus eps times the largest value."""
    own = float((expected.double() - exact).abs().max())
    largest = float(exact.abs().max())
    eps = torch.finfo(expected.dtype).eps
    found = float((got.double() - exact).abs().max())
    # Wide dtypes are rounded at every step; what is compared with for float64 isn't more exact than it.
    steps = 8 if expected.element_size() > 2 else 1
    assert found <= 2 * own + steps * eps * largest, (found, own, largest, expected.dtype)


def doubled(rotation):
    tensors = (rotation.cos, rotation.sin, rotation.q_norm, rotation.k_norm)
    return Rotation(*(x if x is None else x.double() for x in tensors), rotation.interleaved, rotation.eps)


def rotations(generator, tokens, width):
    kinds = itertools.cycle(("plain", "parts", "transposed", "repeated"))
    for interleaved, full, norms in itertools.product((False, True), (None, False, True), ("", "q", "k", "qk")):
        kind = next(kinds)
        dtype = torch.float64 if kind == "transposed" else torch.float32
        cos = sin = None
        if full is not None:
            cos, sin = (table(generator, tokens, width if full else width // 2, kind, dtype) for _ in range(2))
        q_norm, k_norm = (
            torch.randn(2 * width, generator=generator)[::2] if name in norms else None for name in "qk"
        )
        yield Rotation(cos, sin, q_norm, k_norm, interleaved, 0.0 if kind == "plain" else 1e-5)


def forward(generator, shape, dtype, tokens, rotation):
    heads, kv_heads, width = shape
    qkv, room = projection(generator, tokens, shape, dtype, gap=3)

    def outputs(of):
        return [torch.full((tokens, n, width), 7.0, dtype=of) for n in (heads, kv_heads, kv_heads)]

    got, expected, exact = outputs(dtype), outputs(dtype), outputs(torch.float64)
    kernels.forward(qkv, rotation, *got)
    reference.forward(qkv, rotation, *expected)
    reference.forward(qkv.double(), doubled(rotation), *exact)
    for a, b, c in zip(got[:2], expected[:2], exact[:2], strict=True):
        close(a, b, c)
    assert torch.equal(got[2], expected[2])
    without = outputs(dtype)
    kernels.forward(qkv, rotation, *without[:2], None)
    assert torch.equal(without[0], got[0])
    assert torch.equal(without[1], got[1])
    before = room.clone()
    q, k, v = parts(qkv, *shape)
    kernels.forward(qkv, rotation, q, k, None)
    assert torch.equal(q, got[0])
    assert torch.equal(k, got[1])
    assert torch.equal(v, got[2])
    assert torch.equal(room[:, qkv.shape[1] :], before[:, qkv.shape[1] :])


def backward(generator, shape, dtype, tokens, rotation):
    heads, kv_heads, width = shape
    qkv, _ = projection(generator, tokens, shape, dtype, gap=5)
    dq = torch.randn(heads, tokens, width, generator=generator).to(dtype).transpose(0, 1)
    dk = torch.randn(tokens, kv_heads + 1, width, generator=generator).to(dtype)[:, 1:]
    dv = torch.randn(1, 1, 1, generator=generator).to(dtype).expand(tokens, kv_heads, width)
    results = []
    for backend, of, how in (
        (kernels, dtype, rotation),
        (reference, dtype, rotation),
        (reference, torch.float64, doubled(rotation)),
    ):
        out = torch.full(qkv.shape, 7.0, dtype=of)
        grads = (x.to(of) for x in (dq, dk, dv))
        norms = backend.backward(*grads, qkv.to(of) if rotation.has_norm else None, how, out, True)
        results.append([out, *(x for x in norms if x is not None)])
    assert len({len(one) for one in results}) == 1
    for got, expected, exact in zip(*results, strict=True):
        close(got, expected, exact)
    out = torch.full(qkv.shape, 7.0, dtype=dtype)
    kernels.backward(dq, dk, dv, qkv if rotation.has_norm else None, rotation, out, False)
    close(out, results[1][0], results[2][0])


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    # Several tokens for each program of a backward that sums.
    kernels._SUMMING_PROGRAMS = 2
    g = torch.Generator().manual_seed(0)
    for index, (one, of) in enumerate(itertools.product(SHAPES, DTYPES)):
        for number, rotation in enumerate(rotations(g, 3, one[2])):
            if (index + number) % 7 == 0:  # every seventh: each kind with three of the shapes and dtypes
                forward(g, one, of, 3, rotation)
                backward(g, one, of, 3, rotation)
    print("same")
