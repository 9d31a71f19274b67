"""Checks of a graph right after its capture: against the function, and that no padding reaches a real row."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .buckets import Bucket
from .compiling import eagerly
from .errors import VerificationError
from .graph import BucketGraph
from .layout import LeafLayout
from .leak_trace import Pattern
from .metrics import ReplayTimer
from .padding import fill_pattern
from .proof import PaddedInput, Proof, prove
from .replaying import Replayer
from .spec import Offsets, Rows, Signature

if TYPE_CHECKING:
    from .capturing import Capturer

logger = logging.getLogger(__name__)

__all__ = ["prove_graph", "verify_graph"]


def verify_graph(
    capturer: Capturer, graph: BucketGraph, run: Callable[[], list[Any]], begin: Callable[[], None]
) -> None:
    """Compares a replay with the function on the same inputs, which fill the whole bucket.

    Bit for bit; where the function itself differs from run to run, by twice what it differs.

    Raises:
        VerificationError: names the output, and by how much it is off.
    """
    # First the replay, out of memory that holds NaN: what the graph leaves out must not find it done by another run.
    begin()
    capturer.generation.poison()
    got = replay_whole(capturer, graph)
    # The recorder has recorded what compiled functions do eagerly.
    with contextlib.nullcontext() if capturer.generation.on_cuda else eagerly():
        begin()
        expected = _kept(run())
        begin()
        again = _kept(run())
    paths = capturer.generation.signature.output_paths
    for path, result, first, second in zip(paths, got, expected, again, strict=True):
        if result is None or first is None or second is None or _same(result, first) or _same(result, second):
            continue
        off, spread = _distance(result, first), _distance(first, second)
        if not off <= 2 * spread:
            raise VerificationError(
                f"at {graph.bucket} a replay's {path} is not the function's: off by {off:.3g}, where two runs of the "
                f"function differ by {spread:.3g}; does it depend on Python state, or on memory that it doesn't write?"
            )


def replay_whole(capturer: Capturer, graph: BucketGraph) -> list[torch.Tensor | None]:
    """Replays at the bucket's own sizes, on what lies in the static inputs; gives copies of the outputs."""
    return _replay(capturer, graph, graph.bucket)


def _replay(capturer: Capturer, graph: BucketGraph, sizes: Bucket) -> list[torch.Tensor | None]:
    generation = capturer.generation
    replayer = Replayer(generation, ReplayTimer(generation.device, 0))
    values = [sizes[name] for name in generation.names]
    results = replayer.results(values)
    replayer.run_staged(graph, values, results)
    return results


def _kept(flat: Sequence[Any]) -> list[torch.Tensor | None]:
    return [value.clone() if isinstance(value, torch.Tensor) else None for value in flat]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = (
        t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (left, right)
    )
    return torch.equal(left, right)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.numel() == 0:
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    off = (left.to(wide) - right.to(wide)).abs().max().item()
    return float("inf") if off != off else float(off)


def prove_graph(
    capturer: Capturer, graph: BucketGraph, run: Callable[[], list[Any]], restore: Callable[[], None]
) -> Proof | None:
    """Proves that no padding reaches a real row, on the example's rows at three quarters of the bucket.

    Returns:
        What was shown; None where the bucket is so small that nothing would be padded.

    Raises:
        PaddingLeakError: names the output, the garbage, and the operation where it can be told.
    """
    generation, signature = capturer.generation, capturer.generation.signature
    per = _divisors(signature)
    real = _partly(graph.bucket, per, signature.grid.within)
    if real == graph.bucket:
        return None
    rows = capturer.example_at(real, fits=capturer.example_fits(real))
    clean = generation.clean_fills()

    def stage(fills: Sequence[Pattern]) -> None:
        generation.set_fills(fills)
        restore()
        for layout, view, row in zip(generation.layouts, graph.inputs, rows, strict=True):
            if layout is None or view is None or row is None:
                continue
            if isinstance(layout.spec, (Rows, Offsets)):
                axis = layout.spec.axis if isinstance(layout.spec, Rows) else 0
                view = view.narrow(axis, 0, row.shape[axis])
            view.copy_(row)

    def replay(fills: Sequence[Pattern]) -> list[torch.Tensor | None]:
        stage(fills)
        return _replay(capturer, graph, real)

    def trace(fills: Sequence[Pattern], mode: AbstractContextManager[Any]) -> Sequence[Any]:
        stage(fills)
        generation.set_record(generation.numbers(real))
        generation.pad(graph.bucket)
        with mode:
            return run()

    inputs = [
        _padded_input(leaf.path, layout, row)
        for leaf, layout, row in zip(signature.inputs, generation.layouts, rows, strict=True)
    ]
    try:
        proof = prove(
            replay,
            inputs,
            signature.output_paths,
            fill_pattern,
            real=real,
            bucket=graph.bucket,
            run=trace,
            begin=restore,
            per=per,
        )
    finally:
        generation.set_fills(clean)
    for path in proof.unproved:
        logger.warning("%s at %s differs from run to run, so nothing is proved of it", path, graph.bucket)
    for path in proof.unvaried:
        logger.warning("the padding of %s can't be varied: there is only one value among its rows", path)
    return proof


def _padded_input(path: str, layout: LeafLayout | None, row: torch.Tensor | None) -> PaddedInput:
    if layout is None or row is None or not isinstance(layout.spec, Rows):
        return PaddedInput(path, torch.int64, 0, None)
    return PaddedInput(path, layout.dtype, layout.spec.fill, row, layout.spec.marks_padding)


def _divisors(signature: Signature) -> dict[str, set[int]]:
    """By which numbers each size is divided in the specs."""
    per: dict[str, set[int]] = {}
    for spec in (*(leaf.spec for leaf in signature.inputs), *signature.outputs):
        if isinstance(spec, Rows):
            per.setdefault(spec.dim, set()).add(spec.per)
    return per


def _partly(bucket: Bucket, per: Mapping[str, set[int]], within: Mapping[str, str]) -> Bucket:
    """Sizes of a call that leaves about a quarter of a bucket to padding."""
    sizes = {}
    for name, size in bucket.items():
        step = math.lcm(*per.get(name, {1}))
        part = size * 3 // 4 // step * step
        sizes[name] = size if name in within or part == 0 else part
    return Bucket(sizes)
