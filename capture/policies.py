"""Bucket policies: which of the buckets that hold a call serves it, or that running the function is better.

No policy's choice is trusted: `check_choice` refuses a bucket that doesn't hold the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .buckets import Bucket
from .costs import CostSurface
from .errors import BucketError, SpecError

__all__ = [
    "BucketPolicy",
    "Candidate",
    "Choice",
    "check_choice",
    "cost_aware",
    "exact",
    "policy_of",
    "smallest",
]

# Sets of candidates whose costs one policy remembers: a policy may serve several managers with several variants.
_SURFACES = 32


@dataclass(frozen=True)
class Candidate:
    """A captured bucket and what is known of its costs.

    Attributes:
        bucket: its sizes.
        elements: of all its static buffers; what "smallest" goes by.
        replay_seconds: wall time of one replay, or None where it wasn't measured.
        eager_seconds: wall time of the function run eagerly at exactly the bucket's sizes, or None.
    """

    bucket: Bucket
    elements: int
    replay_seconds: float | None
    eager_seconds: float | None


@dataclass(frozen=True)
class Choice:
    """A policy's answer.

    Attributes:
        bucket: one of those that hold the call, or None for none of them.
        reason: for None, why. It is the miss's reason; misses are counted by the text before its first ":", which
            should therefore not vary with the sizes.
    """

    bucket: Bucket | None
    reason: str = ""


class BucketPolicy(Protocol):
    """Chooses a call's bucket. Any object with these two may be given.

    `choose` runs on every call and in any thread.
    """

    @property
    def name(self) -> str:
        """What reports and errors call it."""
        ...

    def choose(
        self, sizes: Mapping[str, int], holding: Sequence[Candidate], every: Sequence[Candidate]
    ) -> Choice:
        """The bucket for a call.

        Args:
            sizes: the call's named sizes, those that lie within another bounded by it.
            holding: the captured buckets that hold the call, in the grid's order.
            every: all captured buckets.
        """
        ...


@dataclass(frozen=True)
class Smallest:
    name: str = "smallest"

    def choose(
        self, sizes: Mapping[str, int], holding: Sequence[Candidate], every: Sequence[Candidate]
    ) -> Choice:
        if not holding:
            return _NOTHING_HOLDS
        return Choice(min(holding, key=lambda candidate: candidate.elements).bucket)


@dataclass(frozen=True)
class _Exact:
    name: str = "exact"

    def choose(
        self, sizes: Mapping[str, int], holding: Sequence[Candidate], every: Sequence[Candidate]
    ) -> Choice:
        if not holding:
            return _NOTHING_HOLDS
        for candidate in holding:
            if not _differences(candidate.bucket, sizes):
                return Choice(candidate.bucket)
        nearest = min(holding, key=lambda candidate: candidate.elements).bucket
        different = ", ".join(f"{n}={sizes[n]} is not {nearest[n]}" for n in _differences(nearest, sizes))
        return Choice(None, f"not exact: {different}")


@dataclass(frozen=True)
class _CostAware:
    margin: float
    name: str = "cost_aware"
    _surfaces: dict[int, tuple[Sequence[Candidate], CostSurface]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def choose(
        self, sizes: Mapping[str, int], holding: Sequence[Candidate], every: Sequence[Candidate]
    ) -> Choice:
        if not holding:
            return _NOTHING_HOLDS
        if any(candidate.replay_seconds is None for candidate in holding):  # which of them is best isn't known
            return Choice(min(holding, key=lambda candidate: candidate.elements).bucket)
        best = min(holding, key=lambda candidate: (candidate.replay_seconds or 0.0, candidate.elements))
        least = best.replay_seconds or 0.0
        eager = self._surface(every).estimate(sizes)
        if eager is not None and eager < (1 - self.margin) * least:
            return Choice(None, f"eager is faster: {eager * 1e3:.2f} ms against {least * 1e3:.2f} ms")
        return Choice(best.bucket)

    def _surface(self, every: Sequence[Candidate]) -> CostSurface:
        known = self._surfaces.get(id(every))
        if known is not None:
            return known[1]
        surface = CostSurface((c.bucket, c.eager_seconds) for c in every if c.eager_seconds is not None)
        if isinstance(every, tuple):  # nothing else is sure to stay as it is
            if len(self._surfaces) >= _SURFACES:
                self._surfaces.clear()
            self._surfaces[id(every)] = (every, surface)  # holds it, so that no other gets its id
        return surface


_NOTHING_HOLDS = Choice(None, "no bucket holds the call")


def smallest() -> BucketPolicy:
    """Of the buckets that hold a call, the one with the fewest elements; of equals the grid's first."""
    return Smallest()


def exact() -> BucketPolicy:
    """A bucket only where every named size of the call equals the bucket's: nothing is ever padded."""
    return _Exact()


def cost_aware(margin: float = 0.0) -> BucketPolicy:
    """The bucket with the least measured replay time, or none where the function itself is expected to be faster.

    The eager time at the call's sizes is estimated from the times measured at the buckets' (`CostSurface`), never
    below what they show. Where a bucket that holds the call has no replay time, this is `smallest`; where no
    eager time bounds the call's, the best replay is taken.

    Args:
        margin: the share of the replay's time by which eager must be faster, from 0 to below 1.

    Raises:
        SpecError: another margin.
    """
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise SpecError(f"margin must be a share of the replay's time from 0 to below 1, got {margin!r}")
    return _CostAware(float(margin))


_NAMED = {"smallest": smallest, "exact": exact, "cost_aware": cost_aware}


def policy_of(value: str | BucketPolicy) -> BucketPolicy:
    """A policy by its name, or the policy given.

    Args:
        value: "smallest", "exact", "cost_aware", or an object with `name` and `choose`.

    Raises:
        SpecError: an unknown name, or an object that isn't a policy.
    """
    known = ", ".join(repr(name) for name in _NAMED)
    if isinstance(value, str):
        if value not in _NAMED:
            raise SpecError(f"unknown bucket policy {value!r}: known are {known}, or give a policy object")
        return _NAMED[value]()
    if isinstance(value, type) or not callable(getattr(value, "choose", None)):
        raise SpecError(
            f"a bucket policy is one of {known} or an object with a method choose(sizes, holding, every), "
            f"got {value!r}: functions and classes that make one must be called first"
        )
    if not isinstance(getattr(value, "name", None), str):
        raise SpecError(
            f"a bucket policy needs a name, a string by which errors can call it: {value!r} has none"
        )
    return value


def check_choice(choice: Choice, holding: Sequence[Candidate], policy: BucketPolicy) -> Choice:
    """The choice, once it is one that can be served.

    Args:
        choice: what the policy returned.
        holding: the candidates that it was to choose from.
        policy: whose choice it is, for the message.

    Raises:
        BucketError: not a Choice, a bucket that isn't among those that hold the call, or none without a reason.
    """
    if not isinstance(choice, Choice):
        raise BucketError(f"bucket policy {policy.name!r} must return a Choice, got {choice!r}")
    if choice.bucket is None:
        if not isinstance(choice.reason, str) or not choice.reason.partition(":")[0].strip():
            raise BucketError(
                f"bucket policy {policy.name!r} chose no bucket and gave no reason: "
                'return Choice(None, "label: details")'
            )
    elif not any(candidate.bucket == choice.bucket for candidate in holding):
        held = ", ".join(repr(candidate.bucket) for candidate in holding) or "none"
        raise BucketError(
            f"bucket policy {policy.name!r} chose {choice.bucket!r}, which is not among the captured buckets "
            f"that hold the call ({held}): choose from `holding`, or return Choice(None, reason)"
        )
    return choice


def _differences(bucket: Bucket, sizes: Mapping[str, int]) -> list[str]:
    return [name for name, size in bucket.items() if name in sizes and sizes[name] != size]
