"""Which graph a call gets, or why it gets none."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .buckets import Bucket
from .constants import same_constant
from .core import Core
from .errors import CallError, CaptureError
from .layout import check_leaf, sizes_of_leaves
from .modes import autocast_state, is_capturing
from .policies import Candidate, check_choice
from .spec import Rows
from .store import Stored, Variant

__all__ = ["Resolution", "Resolver"]


@dataclass(frozen=True)
class Resolution:
    """What a call gets.

    Attributes:
        sizes: its named sizes.
        bucket: the bucket that it would have, or None.
        stored: for a hit, the graph.
        reason: for a miss, why; its kind stands before the first colon.
    """

    sizes: Mapping[str, int]
    bucket: Bucket | None
    stored: Stored | None
    reason: str = ""

    @property
    def kind(self) -> str:
        """What the miss is counted as."""
        return self.reason.partition(":")[0]


class Resolver(Core):
    """A manager's state, and the answers to calls."""

    def quick(self, state: Variant, leaves: Sequence[Any], sizes: list[int]) -> Stored | None:
        """The graph of a call, where all is as it was at the capture; None for `resolve` to look closer."""
        if not self.is_smallest:
            return None
        for position, value in state.constants.items():
            if not same_constant(value, leaves[position]):
                return None
        stored = state.smallest(self.grid, self.steps, self.bounded(sizes))
        if stored is None or self._why_not_now(state) is not None:
            return None
        return stored

    def resolve(self, leaves: Sequence[Any], name: Hashable) -> Resolution:
        """What a call gets. Raises where the arguments are wrong."""
        self.refuse_gradients(leaves)
        if is_capturing(any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)):
            sizes = sizes_of_leaves(self.signature.inputs, leaves)
            return Resolution(sizes, None, None, "inside another capture: the function becomes part of it")
        sizes = sizes_of_leaves(self.signature.inputs, leaves)
        state = self.store.variants.get(name) if self.store is not None else None
        if state is not None:
            for layout, value in zip(state.layouts, leaves, strict=True):
                if layout is not None:
                    check_leaf(layout, value)
        self.check_divisible(sizes)
        if name in self.suspended:
            return Resolution(sizes, None, None, "suspended: resume() captures its graphs again")
        if state is None:
            known = list(self.store.variants) if self.store is not None else []
            if known:
                return Resolution(sizes, None, None, f"not precompiled: variant {name!r}, only {known}")
            bucket = self.grid.choose(sizes)
            failed = self._failed(name, bucket) if bucket is not None else None
            return Resolution(sizes, None, None, failed or "not precompiled")
        for position, value in state.constants.items():
            if not same_constant(value, leaves[position]):
                path = self.signature.inputs[position].path
                return Resolution(sizes, None, None, f"constant changed: {path}")
        return self._resolve_bucket(state, name, sizes)

    def resolve_sizes(self, state: Variant | None, sizes: dict[str, int], name: Hashable) -> Resolution:
        """What a call of these sizes would get whose other arguments are as declared."""
        for size_name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise CallError(f"size {size_name!r} must be a Python int of zero or more, got {size!r}")
        self.check_divisible(sizes)
        if name in self.suspended:
            return Resolution(sizes, None, None, "suspended: resume() captures its graphs again")
        if state is None:
            return Resolution(sizes, None, None, f"not precompiled: variant {name!r}")
        for leaf in self.signature.inputs:
            if isinstance(leaf.spec, Rows) and sizes[leaf.spec.dim] % leaf.spec.per:
                raise CallError(
                    f"{leaf.spec.dim}={sizes[leaf.spec.dim]} is not a multiple of {leaf.spec.per}, which "
                    f"{leaf.path} needs"
                )
        return self._resolve_bucket(state, name, sizes)

    def lacks(self, sizes: Mapping[str, int], name: Hashable) -> Bucket | None:
        """The bucket to capture for a call of these sizes, if the policy would take it and it isn't there."""
        bucket = self.grid.choose(sizes)
        state = self.store.variants.get(name) if self.store is not None else None
        if bucket is None or (name, bucket) in self.failed or (state is not None and bucket in state.graphs):
            return None
        alone = (Candidate(bucket, 0, None, None),)
        in_order = self.bounded([sizes[n] for n in self.grid.names])
        choice = self.policy.choose(dict(zip(self.grid.names, in_order, strict=True)), alone, alone)
        return check_choice(choice, alone, self.policy).bucket

    def _resolve_bucket(self, state: Variant, name: Hashable, sizes: Mapping[str, int]) -> Resolution:
        bucket = self.grid.choose(sizes)
        if bucket is None:
            return Resolution(sizes, None, None, f"beyond the grid: {self.grid.why_none(sizes)}")
        holding = [c for c in state.candidates(self.grid) if self.grid.holds(c.bucket, sizes)]
        if not holding:
            # What would stand in a graph's way stands in the way of capturing another beside it.
            missing = self._failed(name, bucket) or f"not captured: {bucket}"
            return Resolution(sizes, bucket, None, self._why_not_now(state) or missing)
        stored = None
        if self.is_smallest:
            stored = state.smallest(self.grid, self.steps, self.bounded([sizes[n] for n in self.grid.names]))
        if stored is None:
            in_order = self.bounded([sizes[n] for n in self.grid.names])
            bounded = dict(zip(self.grid.names, in_order, strict=True))
            choice = self.policy.choose(bounded, holding, state.candidates(self.grid))
            check_choice(choice, holding, self.policy)
            if choice.bucket is None:
                return Resolution(sizes, bucket, None, choice.reason)
            stored = state.graphs[choice.bucket]
        reason = self._why_not_now(state)
        if reason is not None:
            return Resolution(sizes, stored.graph.bucket, None, reason)
        return Resolution(sizes, stored.graph.bucket, stored)

    def _failed(self, name: Hashable, bucket: Bucket) -> str | None:
        """Why a bucket is not to be captured on demand again."""
        error = self.failed.get((name, bucket))
        return None if error is None else f"capture failed: {error}"

    def _why_not_now(self, state: Variant) -> str | None:
        """Why no graph of a variant can serve a call at this moment, or None."""
        device = self.device
        if device is None:
            raise CaptureError("internal: graphs without a device")
        if is_capturing(device.type == "cuda"):
            return "inside another capture: the function becomes part of it"
        now = autocast_state(device)
        if now != state.autocast:
            return f"autocast differs: captured under {state.autocast}, called under {now}"
        for module, training in state.training:
            if module.training is not training:
                mode = "train" if training else "eval"
                return f"training mode differs: {type(module).__name__} was captured in {mode}() mode"
        if state.guard is not None:
            stale = state.guard.stale()
            if stale:
                self.stale_names = stale
                return f"stale weights: {', '.join(stale[:5])}{' ...' if len(stale) > 5 else ''}"
        return None
