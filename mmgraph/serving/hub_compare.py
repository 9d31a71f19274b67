"""How transformers' calls do in several ways: the records, and when a way's values count as transformers' own.

Every way decodes with the tokens that transformers chose, so that each step compares the same inputs. A way may be off
a pass in the next wider dtype by twice what transformers itself is, plus one rounding of the largest value; in float32
by 1e-4 of the largest value at least: two orders of the same sums can differ by more than one of them happens to be
off. Only mmgraph's way is held to it; of torch.compile's it is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmgraph.serving.compare import WIDER, TokenCheck, compare_tokens, difference
from mmgraph.serving.hub_loop import HubPass

FLOAT32_FLOOR = 1e-4
"""In float32, the share of the largest value that a way may always be off."""


@dataclass(frozen=True)
class Closeness:
    """How far a way's values of one kind are from transformers'.

    Attributes:
        relative: The largest difference to transformers, over the largest value; NaN where one isn't finite.
        error: The way's largest error against the wider dtype.
        hub_error: transformers' own.
        allowed: What `error` may be.
    """

    relative: float
    error: float
    hub_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the way's error is within what is allowed."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Way:
    """One way of serving the requests.

    Attributes:
        name: Which.
        detail: How, in a few words.
        seconds: Median time of each of `HUB_PHASES` over the timed passes; empty where the way failed.
        first_pass: Seconds of what it needs (compiling, capturing) and its first pass; None where the way failed.
        features: Image features against transformers', with deepstack levels; None where there are none to compare.
        logits: Logits likewise.
        tokens: Greedy tokens against transformers'; None where the way failed.
        failure: Why it failed, or None.
    """

    name: str
    detail: str
    seconds: Mapping[str, float]
    first_pass: float | None
    features: Closeness | None = None
    logits: Closeness | None = None
    tokens: TokenCheck | None = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and its values are as close to transformers' as they must be."""
        close = all(found is None or found.ok for found in (self.features, self.logits))
        return self.failure is None and close and (self.tokens is None or self.tokens.ok)


@dataclass(frozen=True)
class Comparison:
    """All ways on the same requests.

    Attributes:
        ways: transformers first, which the others are compared with.
        judged: The name of the way that must agree with it.
        rule: What agreeing means, in words.
    """

    ways: tuple[Way, ...]
    judged: str
    rule: str

    @property
    def ok(self) -> bool:
        """Whether the judged way agrees with transformers."""
        return all(way.ok for way in self.ways if way.name == self.judged)

    @property
    def failures(self) -> tuple[str, ...]:
        """Ways that failed, and why."""
        return tuple(f"{way.name} failed: {way.failure}" for way in self.ways if way.failure is not None)

    def with_way(self, way: Way) -> Comparison:
        """The same with one more way."""
        return replace(self, ways=(*self.ways, way))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON; null stands for numbers that aren't finite."""
        found: dict[str, Any] = asdict(self)
        found["ok"] = self.ok
        for entry, way in zip(found["ways"], self.ways, strict=True):
            entry["ok"] = way.ok
            for kind, close in (("features", way.features), ("logits", way.logits)):
                if close is not None:
                    entry[kind]["ok"] = close.ok
            if way.tokens is not None:
                entry["tokens"]["equal"] = way.tokens.equal
        cleaned: dict[str, Any] = _finite(found)
        return cleaned


def rule(dtype: torch.dtype) -> str:
    """What a way may be off, in words.

    Args:
        dtype: What the model runs in.
    """
    own, wider = (str(one).removeprefix("torch.") for one in (dtype, WIDER[dtype]))
    text = f"error against {wider}: 2 x transformers' own + eps({own}) x the largest value"
    return f"{text}, at least {FLOAT32_FLOOR:g} x it" if dtype == torch.float32 else text


def closeness(hub: Sequence[Tensor], way: Sequence[Tensor], exact: Sequence[Tensor]) -> Closeness:
    """Compare lists of tensors element by element.

    Args:
        hub: transformers', all of one dtype.
        way: The way's, of the same shapes.
        exact: The wider pass's, of the same shapes.
    """
    theirs, ours = difference("theirs", hub, way, exact), difference("ours", way, hub, exact)
    allowed = theirs.allowed
    if hub and hub[0].dtype == torch.float32:
        largest = max((float(one.abs().max()) for one in exact if one.numel()), default=0.0)
        allowed = max(allowed, FLOAT32_FLOOR * largest)
    return Closeness(theirs.relative, ours.reference_error, theirs.reference_error, allowed)


@dataclass(frozen=True, eq=False)
class Passes:
    """A pass of a way, transformers' own, and that of the wider dtype."""

    hub: HubPass
    way: HubPass
    exact: HubPass


def judge(name: str, detail: str, medians: Mapping[str, float], first: float, passes: Passes) -> Way:
    """A way that ran.

    Args:
        name: Which.
        detail: How.
        medians: Time of each phase.
        first: Seconds up to the end of the first pass.
        passes: The way's values, and those that they are compared with.
    """
    hub, way, exact = passes.hub, passes.way, passes.exact
    logits = closeness([hub.logits], [way.logits], [exact.logits])
    flat = (-1, hub.logits.shape[-1])
    # Two logits may have moved towards each other by what the way and transformers may each be off.
    tokens = compare_tokens(
        hub.logits.reshape(flat), way.logits.reshape(flat), logits.allowed + logits.hub_error
    )
    features = closeness(hub.features, way.features, exact.features) if hub.features else None
    return Way(name, detail, dict(medians), first, features, logits, tokens)


def _finite(value: Any) -> Any:
    """The same with None in place of numbers that aren't finite, which JSON hasn't got."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
