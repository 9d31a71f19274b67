"""Which operation lets padding into a real row: one function run with clean and with garbage padding, op by op.

What is compared is a digest of the real region of each operation's results, so nothing that the function makes
is kept alive and the host waits for the device only at the end of a run. The real region is told by shape (see
`RealRegion`); so an operation is blamed only if a chain of results that differ leads from it to an output that
differs. Results that differ where no chain leads on (a row of sums that only padding goes to) are not leaks.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Pattern", "RealRegion", "Run", "as_bits", "first_leak"]

logger = logging.getLogger(__name__)

Pattern = tuple[int, int]
"""16 bytes that padding is filled with, as two int64."""

Run = Callable[[Sequence[Pattern], AbstractContextManager[Any]], Sequence[Any]]
"""Fills the static inputs' padding with the patterns, then calls the function on them inside the context manager
(the call alone: what fills padding must not be traced), and returns the flat leaves of its outputs."""

_CHUNK = 1 << 20
_ROOT = __name__.partition(".")[0]


def first_leak(
    run: Run,
    clean: Sequence[Pattern],
    dirty: Sequence[Pattern],
    real: Mapping[str, int],
    bucket: Mapping[str, int],
    *,
    per: Mapping[str, Collection[int]] | None = None,
    output: int | None = None,
) -> str | None:
    """The first operation whose inputs had equal real rows under both paddings and whose result has not.

    The function runs four times: twice clean, since an operation that differs by itself proves nothing; once
    dirty; once more to find the line that called the operation.

    Args:
        run: see `Run`. Each call must start from the same state and random numbers.
        clean: the padding as it always is.
        dirty: garbage padding.
        real: how much of each size is real.
        bucket: the sizes as the function sees them.
        per: the divisors that specs have for a size (`rows("tokens", per=4)`), next to 1.
        output: which leaf of what `run` returns got padding in; None for any.

    Returns:
        For example `aten.mean.dim (in forward, model.py:31)`; None when no operation can be named: the function
        does what can't be traced (torch.cond, flex_attention), or its outputs are right when it is not captured.
    """
    region, digest = RealRegion(real, bucket, per), _Digest()
    try:
        first, second = (_trace(run, clean, region, digest) for _ in range(2))
        garbage = _trace(run, dirty, region, digest)
        culprit = _culprit(first, second, garbage, output)
        if culprit is None:
            return None
        where = _trace(run, dirty, region, None, locate=culprit).location
    except Exception as error:  # naming the operation is a service: the leak is reported without it
        logger.debug("could not trace the function: %s", error)
        return None
    return garbage.names[culprit] + (f" ({where})" if where else "")


class RealRegion:
    """Which part of a tensor may be the real one, told by its shape.

    For each size that has padding, a tensor may be:

    1. cut along all axes that are as long as `bucket // per`, or `bucket + 1` (offsets, and sums from 0), to
       `real // per` or `real + 1`: scores `[heads, tokens, tokens]` twice;
    2. rows spread over neighbouring axes whose lengths multiply to `bucket // per`: windows `[tokens // 16, 16, D]`;
    3. rows that share an axis with something else: `[tokens * heads, D]`, or `[heads * tokens, D]`;
    4. real as a whole, if none of these fits.

    A result counts as different only if it is different in each of the parts that fit, and where two sizes fit
    an axis the smaller part is taken: a part that is too small names a later operation, but one that is too
    large would take padding for a leak.
    """

    def __init__(
        self,
        real: Mapping[str, int],
        bucket: Mapping[str, int],
        per: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self._rows: dict[int, int] = {}
        offsets: dict[int, int] = {}
        for name, size in bucket.items():
            if real[name] == size:
                continue
            offsets[size + 1] = min(real[name] + 1, offsets.get(size + 1, size))
            for divisor in {1, *(per or {}).get(name, ())}:
                rows, kept = size // divisor, real[name] // divisor
                if rows > 1:  # an axis of one may be any axis
                    self._rows[rows] = min(kept, self._rows.get(rows, kept))
        self._lengths = {**offsets, **self._rows}

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of which one is the real one, views where they can be."""
        shape, parts = tensor.shape, []
        fitting = [axis for axis, size in enumerate(shape) if size in self._lengths]
        if fitting:
            cut = tensor
            for axis in fitting:
                cut = cut.narrow(axis, 0, self._lengths[shape[axis]])
            parts.append(cut)
        for start in range(len(shape)):
            product = shape[start]
            for end in range(start + 1, len(shape)):
                product *= shape[end]
                if product in self._rows and 1 not in (shape[start], shape[end]):
                    parts.append(tensor.flatten(start, end).narrow(start, 0, self._rows[product]))
        for axis, size in enumerate(shape):
            for rows, kept in self._rows.items():
                if axis not in fitting and size > rows and size % rows == 0:
                    parts.append(tensor.narrow(axis, 0, kept * (size // rows)))
                    parts.append(tensor.unflatten(axis, (size // rows, rows)).narrow(axis + 1, 0, kept))
        # A part without elements can't differ; it must not excuse those that do.
        return [part for part in parts if part.numel()] or parts[:1] or [tensor]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as a flat tensor of integers of at most 32 bits each; NaN is as good as any number."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,))  # one element is contiguous at any stride, but has no view
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # Eight bytes become two words: the top bit of an int64 would be lost in a product with another top bit.
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.dtype.itemsize, torch.int32))


class _Digest:
    """A sum of all elements' bits modulo 2**64, each times an odd 64-bit weight of its position."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        bits = as_bits(tensor)
        weights = self._of(bits.device, min(bits.numel(), _CHUNK))
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for chunk in bits.split(_CHUNK):  # one chunk is widened at a time
            total = total * 0x5851F42D4C957F2D + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
        return total

    def _of(self, device: torch.device, count: int) -> torch.Tensor:
        weights = self._weights.get(device)
        if weights is None or weights.numel() < count:
            # splitmix64 of the position, so longer weights begin with the shorter ones
            mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
            for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
                mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
            weights = self._weights[device] = (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1
        return weights


class _Trace(TorchDispatchMode):
    """One run's operations: their names, what they read, and the digests of what they wrote.

    Attributes:
        names: of the operations, in order.
        reads: for each, the operations whose results it reads.
        digests: for each and for each of its results, one of each part that may be the real one.
        location: where the operation number `locate` was called.
    """

    def __init__(self, region: RealRegion, digest: _Digest | None, locate: int | None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.reads: list[set[int]] = []
        self.digests: list[list[list[Any]]] = []
        self.location: str | None = None
        self.outputs: list[set[int]] = []
        self._region, self._digest, self._locate = region, digest, locate
        self._makers: dict[int, _Makers] = {}

    def __torch_dispatch__(
        self, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        number = len(self.names)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _comparable(leaf)]
        self.names.append(str(func))
        self.reads.append(set().union(*map(self.made_by, given)))
        if number == self._locate:
            self.location = _caller()
        results = func(*args, **kwargs)
        if self._digest is None:
            return results
        written = [leaf for leaf in _written(func, args, kwargs) if _comparable(leaf)]
        returned = pytree.tree_leaves(results)
        read_storages = {_storage(leaf) for leaf in given}
        for leaf in written:
            self._makers.setdefault(_storage(leaf), _Makers()).writers.add(number)
        for leaf in returned:
            if _comparable(leaf) and not any(leaf is other for other in written):
                if _storage(leaf) not in read_storages:  # new memory: who had it before says nothing
                    self._makers[_storage(leaf)] = _Makers(number)
                self._makers.setdefault(_storage(leaf), _Makers()).views[_geometry(leaf)] = number
        seen = list({id(leaf): leaf for leaf in [*returned, *written]}.values())
        unset = func.namespace == "aten" and "empty" in func._schema.name  # whatever lay in the memory
        self.digests.append([] if unset else [self._digested(leaf) for leaf in seen])
        return results

    def made_by(self, tensor: torch.Tensor) -> set[int]:
        """The operations that a tensor's values came from directly."""
        makers = self._makers.get(_storage(tensor))
        if makers is None:
            return set()
        made = makers.views.get(_geometry(tensor), makers.first)
        return makers.writers if made is None else makers.writers | {made}

    def _digested(self, leaf: Any) -> list[Any]:
        if isinstance(leaf, (bool, int, float)):
            return [repr(leaf)]
        if not _comparable(leaf) or self._digest is None:
            return []
        return [self._digest(part) for part in self._region.of(leaf)]

    def finish(self, outputs: Sequence[Any]) -> None:
        """Brings the digests to the host, and notes which operations made the outputs."""
        self.outputs = [self.made_by(leaf) if _comparable(leaf) else set() for leaf in outputs]
        self._makers.clear()
        flat, tree = pytree.tree_flatten(self.digests)
        for device in {leaf.device for leaf in flat if isinstance(leaf, torch.Tensor)}:
            places = [
                i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.device == device
            ]
            values = torch.stack([flat[place] for place in places]).tolist()
            for place, value in zip(places, values, strict=True):
                flat[place] = value
        self.digests = pytree.tree_unflatten(flat, tree)


class _Makers:
    """Which operations gave a storage its values: the one that made it, those that made views, the writers."""

    def __init__(self, first: int | None = None) -> None:
        self.first = first
        self.views: dict[tuple[Any, ...], int] = {}
        self.writers: set[int] = set()


def _trace(
    run: Run, fills: Sequence[Pattern], region: RealRegion, digest: _Digest | None, locate: int | None = None
) -> _Trace:
    trace = _Trace(region, digest, locate)
    # A compiled function would hide its operations.
    with torch.compiler.set_stance("force_eager"):
        outputs = run(fills, trace)
    if digest is not None:
        trace.finish(outputs)
    return trace


def _culprit(first: _Trace, second: _Trace, garbage: _Trace, output: int | None) -> int | None:
    """The first of the operations from which results that differ lead to an output that differs."""
    if not first.names == second.names == garbage.names:
        return None  # it ran other operations: nothing can be compared
    noisy = [_differ(one, other) for one, other in zip(first.digests, second.digests, strict=True)]
    differs = [_differ(one, other) for one, other in zip(first.digests, garbage.digests, strict=True)]
    outputs = garbage.outputs if output is None else [garbage.outputs[output]]
    waiting = [number for made in outputs for number in made]
    reached: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number not in reached and (differs[number] or noisy[number]):
            reached.add(number)
            waiting.extend(garbage.reads[number])
    return min((number for number in reached if not noisy[number]), default=None)


def _differ(one: list[list[Any]], other: list[list[Any]]) -> bool:
    """Whether a result differs in every part that may be the real one."""
    if [len(parts) for parts in one] != [len(parts) for parts in other]:
        return True
    return any(
        bool(parts) and all(a != b for a, b in zip(parts, others, strict=True))
        for parts, others in zip(one, other, strict=True)
    )


def _comparable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes, flat."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return pytree.tree_leaves(written)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _caller() -> str | None:
    """The innermost line of the traced function that is not PyTorch's or this package's."""
    fallback: str | None = None
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _trace.__code__:
        module = str(frame.f_globals.get("__name__", ""))
        root, place = module.partition(".")[0], _place(frame)
        if root not in ("torch", "triton", "contextlib", "functools", _ROOT):
            return place
        if root == _ROOT and not module.startswith(__package__ or _ROOT):
            fallback = fallback or place  # an operation of this package's own models
        frame = frame.f_back
    return fallback


def _place(frame: Any) -> str:
    path = str(frame.f_code.co_filename)
    return f"in {frame.f_code.co_name}, {path.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"
