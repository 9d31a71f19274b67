"""Rotary positions written out element by element in float64, and inputs of every layout, for the tests of the op."""

from dataclasses import dataclass

import torch

TABLE_KINDS = ("plain", "sliced", "transposed", "repeated", "parts")


@dataclass(frozen=True)
class Heads:
    """The model's constants."""

    q: int
    kv: int
    width: int

    @property
    def columns(self):
        return (self.q + 2 * self.kv) * self.width

    def counts(self):
        return self.q, self.kv, self.width

    def split(self, qkv):
        """Float64 copies of q, k and v, by head."""
        parts = qkv.double().split([self.q * self.width, self.kv * self.width, self.kv * self.width], dim=1)
        return [part.unflatten(1, (part.shape[1] // self.width, self.width)) for part in parts]


def place(element, width, interleaved):
    """Of an element of a head: the other one of its pair, its sign there, and the pair's number."""
    if interleaved:
        return (element + 1, -1.0, element // 2) if element % 2 == 0 else (element - 1, 1.0, element // 2)
    half = width // 2
    return (element + half, -1.0, element) if element < half else (element - half, 1.0, element - half)


def rotated(heads, cos, sin, interleaved):
    """``x * cos + rotate(x) * sin`` of ``[T, heads, width]``, one element of the width after the other."""
    width = heads.shape[2]
    columns = []
    for element in range(width):
        other, sign, pair = place(element, width, interleaved)
        column = element if cos.shape[1] == width else pair
        c, s = cos[:, column, None].to(heads.dtype), sin[:, column, None].to(heads.dtype)
        columns.append(heads[..., element] * c + sign * heads[..., other] * s)
    return torch.stack(columns, dim=-1)


def normed(heads, weight, eps):
    return heads / (heads.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.to(heads.dtype)


def exact(qkv, cos, sin, heads, interleaved=False, q_norm=None, k_norm=None, eps=1e-6):
    """q, k and v in float64; differentiable."""
    q, k, v = heads.split(qkv)
    q = q if q_norm is None else normed(q, q_norm, eps)
    k = k if k_norm is None else normed(k, k_norm, eps)
    if cos is not None:
        q, k = rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)
    return q, k, v


def packed(generator, tokens, heads, dtype, layout="plain"):
    """A projection: contiguous, with room between its rows, or with columns apart."""
    if layout == "apart":
        return torch.randn(heads.columns, tokens, generator=generator).to(dtype).t()
    gap = 5 if layout == "gaps" else 0
    return torch.randn(tokens, heads.columns + gap, generator=generator).to(dtype)[:, : heads.columns]


def table(generator, tokens, width, dtype, kind="plain"):
    """A table of values of no particular kind, so that every place of it matters."""
    if kind == "sliced":
        return torch.randn(tokens, width + 3, generator=generator).to(dtype)[:, 1 : 1 + width]
    if kind == "transposed":
        return torch.randn(width, tokens, generator=generator).to(dtype).t()
    if kind == "repeated":
        return torch.randn(1, width, generator=generator).to(dtype).expand(tokens, width)
    if kind == "parts":
        return torch.randn(tokens, width, 2, generator=generator).to(dtype)[..., 1]
    return torch.randn(tokens, width, generator=generator).to(dtype)


def assert_rounded_once(got, expected):
    """``got`` is the exact value rounded to its dtype, but for the error of math in float32 (float64) before."""
    info = torch.finfo(got.dtype)
    math = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = info.eps / 2 * expected.abs() + 16 * math.eps * largest + info.smallest_normal * info.eps
    wrong = (got.double() - expected).abs() > allowed
    assert not bool(wrong.any()), (got.dtype, float((got.double() - expected).abs().max()), largest)
