"""What to put into padding in place of its fill, so that a value that gets out of it shows."""

from __future__ import annotations

import torch

__all__ = ["KINDS", "Number", "garbage"]

KINDS = ("nan", "large", "moderate")
"""The kinds of garbage, in the order in which they are tried."""

Number = bool | int | float | complex


def garbage(kind: str, dtype: torch.dtype, fill: Number, sample: torch.Tensor) -> Number | None:
    """A value to put in the padding of an input in place of its fill.

    Floating point and complex: NaN; or a power of two about twice the square root of the dtype's largest
    number, which lives through sums and projections but overflows when squared or multiplied with its like; or
    something below the largest of the real values. Integers and booleans may be indices, and one out of range
    kills a GPU's context, so they get only values of real rows other than the fill: the first, the largest and
    the last of them.

    Args:
        kind: one of `KINDS`.
        dtype: of the input.
        fill: what the padding holds otherwise.
        sample: the real rows, any shape.

    Returns:
        The value, representable in the dtype; None when there is none to choose.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if not (dtype.is_floating_point or dtype.is_complex):
        return _garbage_integer(kind, dtype, fill, sample)
    try:
        largest = torch.finfo(dtype).max
    except (
        NotImplementedError,
        TypeError,
    ):  # packed pairs such as float4_e2m1fn_x2 have no numbers of their own
        return None
    real: float
    if kind == "nan":
        real = float("nan")
    elif kind == "large":
        real = 2.0 ** (_exponent(largest) // 2 + 1)
    else:
        real = _moderate(dtype, fill, sample)
    return complex(real, real) if dtype.is_complex else real


def _exponent(largest: float) -> int:
    """The smallest even exponent of two that is not below the number."""
    exponent = len(bin(int(largest))) - 2
    return exponent + exponent % 2


def _moderate(dtype: torch.dtype, fill: Number, sample: torch.Tensor) -> float:
    values = torch.view_as_real(sample.resolve_conj()) if dtype.is_complex else sample
    values = values.detach().to(torch.float64 if dtype.itemsize >= 8 else torch.float32).abs()
    finite = torch.where(values.isfinite(), values, 0)
    top = float(finite.max()) if finite.numel() else 0.0
    for factor in (0.7, 0.35, 1.0):
        value = float(
            torch.tensor(factor * (top or 1.0), dtype=torch.float64, device="cpu")
            .to(_part(dtype))
            .to(torch.float64)
        )
        if value not in (fill, 0.0):
            return value
    return 1.0


def _part(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _garbage_integer(kind: str, dtype: torch.dtype, fill: Number, sample: torch.Tensor) -> Number | None:
    wide = sample.detach().reshape(-1).to(torch.int64)  # torch compares few unsigned types
    others = wide[wide != _wrapped(int(fill.real))]
    if not others.numel():
        return None
    value = int({"nan": others[0], "large": others.max(), "moderate": others[-1]}[kind])
    if dtype == torch.bool:
        return bool(value)
    return value + (1 << 64) if value < 0 and not dtype.is_signed else value


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
