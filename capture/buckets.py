"""Buckets: the named sizes that graphs are captured at, and the rule by which a call finds its own.

A call's bucket is the smallest that holds every one of its named sizes. Beyond the grid there is no bucket (a
miss): nothing here rounds past the largest. Points of the grid that no call can be given are dropped, with the
reason kept.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import BucketError

__all__ = [
    "ENCODER_BATCH_BUCKETS",
    "ENCODER_SEQLEN_BUCKETS",
    "Bucket",
    "BucketGrid",
    "DroppedBucket",
    "round_up_to_bucket",
]

#: Default buckets for the number of sequences of an encoder batch.
ENCODER_BATCH_BUCKETS: tuple[int, ...] = (8, 16, 32, 64)
#: Default buckets for the longest sequence of an encoder batch, in tokens.
ENCODER_SEQLEN_BUCKETS: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)


def _as_size(value: object, what: str, *, minimum: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BucketError(f"{what} must be an integer, got {value!r} ({type(value).__name__})")
    size = operator.index(value)
    if size < minimum:
        raise BucketError(f"{what} must be at least {minimum}, got {size}")
    return size


def _check_sizes(sizes: Sequence[int], what: str) -> tuple[int, ...]:
    """Sizes as a tuple; an error where they are none, not positive, unsorted or repeated."""
    if hasattr(sizes, "tolist"):
        sizes = sizes.tolist()
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise BucketError(f"{what} must be a sequence of integers such as (8, 16), got {sizes!r}")
    if not sizes:
        raise BucketError(f"{what} is empty: give at least one size")
    checked = tuple(_as_size(size, f"every size of {what}", minimum=1) for size in sizes)
    for lower, upper in itertools.pairwise(checked):
        if lower == upper:
            raise BucketError(f"{what} repeats the size {lower}: give each size once")
        if lower > upper:
            raise BucketError(
                f"{what} is not sorted ({lower} stands before {upper}): give sizes in ascending order"
            )
    return checked


def round_up_to_bucket(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that is at least `value`.

    Beyond the last bucket it is the next multiple of the last; for zero or less it is the first. (A
    `BucketGrid` never rounds beyond its last size: this rule is for kernels whose plans are cached by rounded
    sizes.)

    Args:
        value: the size to round.
        buckets: ascending positive sizes.

    Raises:
        BucketError: `buckets` is empty, unsorted, repeated or has sizes below 1.
    """
    sizes = _check_sizes(buckets, "buckets")
    number = _as_size(value, "value", minimum=-(2**63))
    index = bisect_left(sizes, number)
    if index < len(sizes):
        return sizes[index]
    last = sizes[-1]
    return -(-number // last) * last


class Bucket(Mapping[str, int]):
    """Named sizes, frozen and hashable: `Bucket(tokens=1024, batch=8)["tokens"] == 1024`."""

    __slots__ = ("_hash", "_sizes")
    _sizes: dict[str, int]
    _hash: int

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **named: int) -> None:
        merged = {**(sizes or {}), **named}
        checked = {name: _as_size(size, f"size {name!r}", minimum=0) for name, size in merged.items()}
        object.__setattr__(self, "_sizes", checked)
        object.__setattr__(self, "_hash", hash(frozenset(checked.items())))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Bucket is frozen: cannot set {name!r}")

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Bucket):
            return self._sizes == other._sizes
        return NotImplemented

    def __repr__(self) -> str:
        return f"Bucket({', '.join(f'{name}={size}' for name, size in self._sizes.items())})"

    def __reduce__(self) -> tuple[type[Bucket], tuple[dict[str, int]]]:
        return Bucket, (dict(self._sizes),)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether every named size of `sizes` that this bucket has is at most the bucket's."""
        own = self._sizes
        return all(size <= own[name] for name, size in sizes.items() if name in own)


@dataclass(frozen=True)
class DroppedBucket:
    """A point of the grid that gets no graph, and why."""

    bucket: Bucket
    reason: str


class BucketGrid:
    """The product of named size lists, with sizes that follow from others, less what no call can reach.

    `BucketGrid(tokens=(1024, 4096), batch=(8, 16), seqlen=(1024, 4096))` has a bucket for every combination
    except those with a sequence longer than all tokens, which a smaller bucket serves as well.

    Args:
        dims: for each named size its ascending list. Where several buckets hold a call, the first is taken in
            the order of (first name's size, second name's size, ...): name the costliest size first.
        derived: sizes that follow from a bucket's own, `{"windows": lambda b: b["tokens"] // 64 + b["batch"]}`.
            They bound a call like the others and do not multiply the grid.
        keep: predicate over the full bucket; points for which it is false get no graph.
        within: `{"seqlen": "tokens"}` says that a seqlen is the length of a sequence that lies in the tokens,
            so it never needs to be more than them: such a size is taken as at most the other when a call is
            given its bucket, and points that this leaves without any call are dropped. By default exactly this
            holds where the grid has sizes of these two names; `{}` says that nothing does.

    Attributes:
        names: all names, derived ones last.
        buckets: the kept buckets in ascending order.
        dropped: the others, each with its reason.

    Raises:
        BucketError: empty, unsorted or repeated lists, names that clash or are unknown, a derived size that
            isn't an integer of zero or more, or a grid of which no bucket is left.
    """

    def __init__(
        self,
        *,
        derived: Mapping[str, Callable[[Mapping[str, int]], int]] | None = None,
        keep: Callable[[Bucket], bool] | None = None,
        within: Mapping[str, str] | None = None,
        **dims: Sequence[int],
    ) -> None:
        if not dims:
            raise BucketError(
                "a grid needs at least one named size list, such as BucketGrid(tokens=(1024, 4096))"
            )
        self._dims = {name: _check_sizes(sizes, f"the size list {name!r}") for name, sizes in dims.items()}
        self._derived = dict(derived or {})
        for name in self._derived:
            if name in self._dims:
                raise BucketError(f"{name!r} is both a size list and a derived size: choose one")
        self.names: tuple[str, ...] = (*self._dims, *self._derived)
        self._arguments: dict[str, Any] = {"derived": derived, "keep": keep, **dims}
        self.within_is_default = within is None
        if within is None:
            within = {"seqlen": "tokens"} if {"seqlen", "tokens"} <= set(self.names) else {}
        self.within: dict[str, str] = self._check_within(within)

        kept: list[Bucket] = []
        dropped: list[DroppedBucket] = []
        for point in itertools.product(*self._dims.values()):
            bucket = self._with_derived(dict(zip(self._dims, point, strict=True)))
            if keep is not None and not _ask(keep, bucket, "keep"):
                dropped.append(DroppedBucket(bucket, "excluded by keep"))
                continue
            other = self._reached_instead(bucket, kept)
            if other is not None:
                dropped.append(
                    DroppedBucket(bucket, f"no call can reach it: {other} holds every call that it holds")
                )
                continue
            kept.append(bucket)
        if not kept:
            raise BucketError(f"no bucket is left: keep refused all {len(dropped)} points of the grid")
        self.buckets: tuple[Bucket, ...] = tuple(kept)
        self.dropped: tuple[DroppedBucket, ...] = tuple(dropped)
        self._by_point = {tuple(b[name] for name in self._dims): b for b in kept}

    def without_within(self) -> BucketGrid:
        """The same grid in which no size lies within another."""
        return BucketGrid(within={}, **self._arguments)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={sizes}" for name, sizes in self._dims.items())
        return f"BucketGrid({dims}: {len(self.buckets)} buckets, {len(self.dropped)} dropped)"

    def choose(self, sizes: Mapping[str, int]) -> Bucket | None:
        """The smallest bucket that holds all of `sizes`, or None where there is none.

        Args:
            sizes: an integer of zero or more for every name of the grid.

        Raises:
            BucketError: a name is missing or unknown, or a size is negative.
        """
        sizes = self._effective(sizes)
        point = []
        for name, choices in self._dims.items():
            index = bisect_left(choices, sizes[name])
            if index == len(choices):
                return None
            point.append(choices[index])
        # Rounding each size up by itself gives the least point of all that hold the call, so where it was kept,
        # and its derived sizes suffice, it is the one.
        bucket = self._by_point.get(tuple(point))
        if bucket is not None and bucket.holds(sizes):
            return bucket
        return next((b for b in self.buckets if b.holds(sizes)), None)

    def holds(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a bucket holds a call of these sizes, which name every size of the grid."""
        return bucket.holds(self._effective(sizes))

    def why_none(self, sizes: Mapping[str, int]) -> str:
        """In words, why no bucket holds `sizes`."""
        sizes = self._effective(sizes)
        too_large = [
            f"{name}={sizes[name]} is beyond the largest, {largest}"
            for name in self.names
            if sizes[name] > (largest := max(b[name] for b in self.buckets))
        ]
        return "; ".join(too_large) or f"no kept bucket holds {dict(sizes)} together"

    def _effective(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        if sizes.keys() != set(self.names):
            missing, unknown = set(self.names) - sizes.keys(), sizes.keys() - set(self.names)
            raise BucketError(
                f"sizes must name {sorted(self.names)}: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, size in sizes.items():
            if size < 0:
                raise BucketError(f"size {name!r} must be zero or more, got {size}")
        if not self.within:
            return sizes
        return _bounded(sizes, self.within)

    def _with_derived(self, sizes: dict[str, int]) -> Bucket:
        frozen = Bucket(sizes)
        for name, rule in self._derived.items():
            sizes[name] = _as_size(
                _ask(rule, frozen, f"derived size {name!r}"), f"derived size {name!r} at {frozen}", minimum=0
            )
        return Bucket(sizes)

    def _check_within(self, within: Mapping[str, str]) -> dict[str, str]:
        if not isinstance(within, Mapping):
            raise BucketError(f"within must map a size to the one that it lies in, got {within!r}")
        for inner, outer in within.items():
            for name in (inner, outer):
                if name not in self.names:
                    raise BucketError(
                        f"within names {name!r}, which is not a size of the grid {list(self.names)}"
                    )
            if outer in within or inner == outer:
                raise BucketError(
                    f"within must not chain: {outer!r} is itself within {within.get(outer, outer)!r}"
                )
        return dict(within)

    def _reached_instead(self, bucket: Bucket, smaller: list[Bucket]) -> Bucket | None:
        """A bucket that stands before this one and holds every call that this one holds."""
        if not self.within:
            return None
        most = _bounded(bucket, self.within)
        return next((b for b in smaller if b.holds(most)), None)


def _ask(rule: Callable[[Any], Any], bucket: Bucket, what: str) -> Any:
    if not callable(rule):
        raise BucketError(f"{what} must be a function of a bucket, got {rule!r}")
    try:
        return rule(bucket)
    except Exception as error:
        raise BucketError(f"{what} failed at {bucket} ({type(error).__name__}: {error})") from error


def _bounded(sizes: Mapping[str, int], within: Mapping[str, str]) -> dict[str, int]:
    return {name: min(size, sizes[within[name]]) if name in within else size for name, size in sizes.items()}
