"""The row-wise ops written out in float64, inputs of every layout, and how near a result has to be, for their tests."""

import math

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("plain", "gaps", "apart", "repeated")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")


def rows(generator, tokens, width, dtype, layout="plain", scale=1.0):
    """Random rows: adjacent, with room between them, with columns apart, or one row for all tokens."""
    if layout == "gaps":
        return (torch.randn(tokens, width + 3, generator=generator) * scale).to(dtype)[:, 2 : 2 + width]
    if layout == "apart":
        return (torch.randn(width, tokens, generator=generator) * scale).to(dtype).t()
    if layout == "repeated":
        return (torch.randn(1, width, generator=generator) * scale).to(dtype).expand(tokens, width)
    return (torch.randn(tokens, width, generator=generator) * scale).to(dtype)


def vector(generator, width, dtype):
    """Every second element of a vector."""
    return torch.randn(2 * width, generator=generator).to(dtype)[::2]


def exact_norm(x, weight, bias, eps, kind):
    """In float64 and rounded nowhere."""
    x = x.double()
    if kind == "layer":
        x = x - x.mean(1, keepdim=True)
    y = x / (x.square().mean(1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def exact_activation(x, kind):
    """In float64 and rounded nowhere."""
    x = x.double()
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "gelu":
        return x / 2 * torch.special.erfc(-x / math.sqrt(2))
    if kind == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + torch.exp(-x * (1.702 if kind == "quick_gelu" else 1)))


def exact_mix(table, indices, weights, base):
    """A loop over tokens and taps, in float64."""
    out = torch.zeros(indices.shape[0], table.shape[1], dtype=torch.float64)
    for token in range(indices.shape[0]):
        for tap in range(indices.shape[1]):
            out[token] += table[int(indices[token, tap])].double() * float(weights[token, tap])
    return out if base is None else out + base.double()


def spacing(values):
    """From each value to the next one of its dtype, in float64."""
    info = torch.finfo(values.dtype)
    size = values.double().abs().clamp(min=info.tiny)
    return torch.exp2(size.log2().floor()) * info.eps


def assert_near(got, exact, own, steps=2):
    """Off by at most twice the model's own error against float64, plus some eps of the largest value."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    found = float((got.double() - exact).abs().max()) if exact.numel() else 0.0
    error = float((own.double() - exact).abs().max()) if exact.numel() else 0.0
    assert found <= 2 * error + steps * torch.finfo(got.dtype).eps * largest, (found, error, largest)


def assert_steps_at_most(steps, got, expected, slack=0.0):
    """At most so many values of the dtype apart; ``slack`` is added, for what the sums inside lose."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    off = (got.double() - expected.double()).abs()
    assert bool((off <= steps * 1.001 * spacing(expected) + slack).all()), float(
        (off / spacing(expected)).max()
    )
