"""Proof, by trial, that nothing which a padding row computes reaches a real row.

A graph is replayed with clean padding and with several kinds of garbage in its place; the real rows of every
output must be the same, bit for bit. One kind is not enough: NaN goes through a product with 0 but not through
a comparison or `nan_to_num`; a large number overflows in a square but hides behind a rounding nowhere else; a
moderate one looks like data, so it also passes thresholds that the others fail.

It is a trial on one example: what depends on the values of real rows, or leaks only at other sizes, is not seen.
Nor is what does not depend on the inputs' padding: a division by the bucket's number of rows, a sum of constant
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import PaddingLeakError
from .garbage import KINDS, Number, garbage
from .leak_trace import Pattern, Run, as_bits, first_leak

__all__ = ["PaddedInput", "Proof", "prove"]


Replay = Callable[[Sequence[Pattern]], list[torch.Tensor | None]]
"""Stages the example, replays with these patterns, and gives copies of the real part of every output leaf."""

_NOISE_FACTOR = 16


@dataclass(frozen=True)
class PaddedInput:
    """One leaf of the inputs, in the order of the table of patterns.

    Attributes:
        path: where it stands, for messages.
        dtype: of its elements.
        fill: what its padding holds in a call.
        sample: its real rows, from which values for integers are taken; None where its padding is not filled
            with a pattern (offsets).
        relied_on: the function may tell padding by this leaf's fill (a mask that is False there), so it stays.
    """

    path: str
    dtype: torch.dtype
    fill: Number
    sample: torch.Tensor | None
    relied_on: bool = False


@dataclass(frozen=True)
class Proof:
    """What was shown, and what was not.

    Attributes:
        kinds: the kinds of garbage that were tried.
        exact: outputs whose real rows were the same, bit for bit.
        within: outputs that differ between two clean replays (atomic sums): how far garbage was allowed to move
            them, 16 times as far as clean replays were apart.
        unproved: outputs about which nothing could be said: two clean replays differ in integers or in where
            they are finite.
        unvaried: inputs whose padding could not be varied in any kind, apart from those that are relied on.
    """

    kinds: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    within: Mapping[str, float] = field(default_factory=dict)
    unproved: tuple[str, ...] = ()
    unvaried: tuple[str, ...] = ()


def prove(
    replay: Replay,
    inputs: Sequence[PaddedInput],
    outputs: Sequence[str],
    encode: Callable[[Any, torch.dtype], Pattern],
    *,
    real: Mapping[str, int],
    bucket: Mapping[str, int],
    run: Run | None = None,
    begin: Callable[[], object] | None = None,
    per: Mapping[str, Collection[int]] | None = None,
) -> Proof:
    """Shows that the garbage in the padding changes no real row of any output.

    Random numbers and state are no noise: `begin` puts both back before every replay and run, and the caller
    puts them back at the end. What then still differs between two clean replays is taken for the order of
    atomic sums, and such outputs are allowed several times as much (`Proof.within`). An output that seemed
    exact and then differs under garbage is replayed clean again before it is called a leak, since atomics
    agree by luck at times.

    Args:
        replay: see `Replay`.
        inputs: the leaves, one for each row of the table of patterns.
        outputs: the paths of the output leaves, in the order in which `replay` and `run` give them.
        encode: the pattern of a value in a dtype.
        real: the sizes of the example, in every size of the grid; where one is the bucket's there is no padding
            and nothing to prove.
        bucket: the sizes of the bucket.
        run: the function without a graph, to find the operation; see `leak_trace.Run`.
        begin: puts state and generators back to where the example starts.
        per: the divisors that specs have for a size, next to 1.

    Raises:
        PaddingLeakError: an output's real rows depend on padding.
    """
    prover = _Prover(replay, begin, _patterns(inputs, encode, None), outputs)
    tried, varied = [], {entry.path for entry in inputs if entry.relied_on or entry.sample is None}
    for kind in KINDS:
        values = _values(kind, inputs)
        if all(value is None for value in values):
            continue
        tried.append(kind)
        varied |= {entry.path for entry, value in zip(inputs, values, strict=True) if value is not None}
        dirty = _patterns(inputs, encode, values)
        leak = prover.leak(dirty)
        if leak is None:
            continue
        alone = []
        for position, value in enumerate(values):
            if value is not None:
                only = [*prover.clean[:position], dirty[position], *prover.clean[position + 1 :]]
                if prover.leak(only, leak) is not None:
                    alone.append(inputs[position].path)
        operation = None
        if run is not None:
            operation = first_leak(
                _starting(run, begin), prover.clean, dirty, real, bucket, per=per, output=leak
            )
        raise _error(outputs[leak], operation, kind, tuple(alone), run is not None, real, bucket)
    return Proof(
        tuple(tried),
        tuple(path for path, noise in zip(outputs, prover.noise, strict=True) if noise == 0),
        {path: _NOISE_FACTOR * noise for path, noise in zip(outputs, prover.noise, strict=True) if noise},
        tuple(path for path, noise in zip(outputs, prover.noise, strict=True) if noise is None),
        tuple(entry.path for entry in inputs if entry.path not in varied),
    )


class _Prover:
    """Replays against a baseline of clean ones, and how far clean replays lie apart.

    Attributes:
        clean: the patterns of clean padding.
        noise: for each output the largest difference of two clean replays, 0 where there was none, None where
            it can't be told.
    """

    def __init__(
        self,
        replay: Replay,
        begin: Callable[[], object] | None,
        clean: list[Pattern],
        outputs: Sequence[str],
    ) -> None:
        self._replay, self._begin, self.clean = replay, begin, clean
        self.noise: list[float | None] = [0.0] * len(outputs)
        self._baseline = self._outputs(clean)
        self._measure(1)
        if any(noise != 0 for noise in self.noise):
            self._measure(3)

    def leak(self, fills: Sequence[Pattern], output: int | None = None) -> int | None:
        """The first output (or the one asked about, if it does) that these patterns change."""
        found = self._outputs(fills)
        asked = range(len(found)) if output is None else [output]
        changed = [position for position in asked if self._changed(position, found[position])]
        if any(self.noise[position] == 0 for position in changed):
            self._measure(3)
            changed = [position for position in changed if self._changed(position, found[position])]
        return changed[0] if changed else None

    def _changed(self, position: int, found: torch.Tensor | None) -> bool:
        noise = self.noise[position]
        distance = _distance(self._baseline[position], found)
        return noise is not None and (distance is None or distance > _NOISE_FACTOR * noise)

    def _measure(self, times: int) -> None:
        for _ in range(times):
            for position, found in enumerate(self._outputs(self.clean)):
                noise, distance = self.noise[position], _distance(self._baseline[position], found)
                known = noise is not None and distance is not None
                self.noise[position] = max(noise or 0.0, distance or 0.0) if known else None

    def _outputs(self, fills: Sequence[Pattern]) -> list[torch.Tensor | None]:
        if self._begin is not None:
            self._begin()
        return self._replay(fills)


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float | None:
    """0 if all bits are equal; the largest difference; None where the tensors can't be subtracted."""
    if one is None or other is None:
        return 0.0 if one is other else None
    if one.shape == other.shape and torch.equal(as_bits(one), as_bits(other)):
        return 0.0
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return None
    try:
        if one.is_complex():
            one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
        one, other = one.to(torch.float64), other.to(torch.float64)
    except NotImplementedError:  # packed pairs of 4-bit numbers
        return None
    finite = one.isfinite()
    same_elsewhere = torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num())
    if not torch.equal(finite, other.isfinite()) or not same_elsewhere:
        return None
    # Zeros of two signs, or two forms of NaN, differ in bits and by no distance: the least there is.
    return max(float((one - other)[finite].abs().max()) if bool(finite.any()) else 0.0, 5e-324)


def _values(kind: str, inputs: Sequence[PaddedInput]) -> list[Number | None]:
    return [
        None
        if entry.relied_on or entry.sample is None
        else garbage(kind, entry.dtype, entry.fill, entry.sample)
        for entry in inputs
    ]


def _patterns(
    inputs: Sequence[PaddedInput],
    encode: Callable[[Any, torch.dtype], Pattern],
    values: Sequence[Number | None] | None,
) -> list[Pattern]:
    chosen = [None] * len(inputs) if values is None else values
    return [
        encode(entry.fill if value is None else value, entry.dtype)
        for entry, value in zip(inputs, chosen, strict=True)
    ]


def _starting(run: Run, begin: Callable[[], object] | None) -> Run:
    def started(fills: Sequence[Pattern], mode: Any) -> Sequence[Any]:
        if begin is not None:
            begin()
        return run(fills, mode)

    return started


def _error(
    output: str,
    operation: str | None,
    kind: str,
    inputs: tuple[str, ...],
    traced: bool,
    real: Mapping[str, int],
    bucket: Mapping[str, int],
) -> PaddingLeakError:
    sizes = ", ".join(f"{name} {real[name]} of {size}" for name, size in bucket.items())
    of = f" of {', '.join(inputs)}" if inputs else ""
    what = {"nan": "NaN", "large": "large numbers", "moderate": "other values like the data's"}[kind]
    if operation is not None:
        where = f"The first operation that lets it through is {operation}."
    elif traced:
        where = "No operation could be named: it is one that can't be traced, or only the captured form leaks."
    else:
        where = "The function was not traced."
    return PaddingLeakError(
        f"the real rows of {output} change with what lies in the padding{of} ({what} in place of the fill; "
        f"{sizes}). {where} Keep padding rows out of operations that mix rows, with torch.where or a mask (a "
        "product with 0 keeps NaN); if the function tells padding by an input's fill, declare it with "
        "rows(..., marks_padding=True)",
        output=output,
        operation=operation,
        kind=kind,
        inputs=inputs,
    )
