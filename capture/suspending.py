"""Giving back all memory for a while, and capturing again what was there.

What a capture needs of an example is taken from the static inputs, where the last call's rows and their padding lie,
and waits in host memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .errors import SpecError
from .filling import Filler
from .spec import BucketSize, Constant

__all__ = ["ALL", "resume", "suspend"]


class _TheOnlyOne:
    def __repr__(self) -> str:
        return "the only one"


#: The suspended variant, if there is one only.
ALL = _TheOnlyOne()


def suspend(core: Filler) -> None:
    """Drops all graphs, pools and buffers; remembers which there were. The locks are held."""
    core.refuse_busy("suspend")
    if core.store is None:
        return
    for name, state in core.store.variants.items():
        if not state.graphs:
            continue
        latest = max(state.graphs.values(), key=lambda stored: stored.graph.clock)
        generation = latest.generation
        generation.settle()
        graph = generation.latest or latest.graph
        leaves: list[Any] = []
        for position, leaf in enumerate(core.signature.inputs):
            layout = generation.layouts[position]
            if layout is not None:
                view = generation.inputs.view(position, graph.bucket)
                if position in core.written:  # it holds what the function left
                    view = torch.full_like(view, getattr(leaf.spec, "fill", 0))
                leaves.append(view.to("cpu", copy=True))
            elif isinstance(leaf.spec, BucketSize):
                leaves.append(graph.bucket[leaf.spec.dim])
            else:
                leaves.append(state.constants[position])
        core.suspended[name] = (leaves, tuple(state.graphs))
    core.store.clear()


def resume(core: Filler, progress: bool, variant: Hashable = ALL) -> None:
    """Captures a suspended variant's graphs again. The locks are held."""
    names = list(core.suspended)
    if variant is ALL:
        if len(names) > 1:
            raise SpecError(
                f"the variants {names} are suspended, and each is captured in the state that the function is in: put "
                "it there and call resume(variant=...) for each"
            )
        variant = names[0] if names else None
    if variant not in core.suspended or core.device is None:
        raise SpecError(f"nothing is suspended under variant {variant!r}; suspended: {names}")
    leaves, buckets = core.suspended[variant]
    leaves = [
        value.to(core.device)
        if isinstance(value, torch.Tensor) and not isinstance(leaf.spec, Constant)
        else value
        for leaf, value in zip(core.signature.inputs, leaves, strict=True)
    ]
    saved = core.suspended[variant]
    try:
        core.capture(leaves, buckets, variant, progress=progress)
    except BaseException:
        if core.store is not None:
            core.store.drop_variant(variant)
            core.store.prune()
        core.suspended[variant] = saved  # to be tried again
        raise
