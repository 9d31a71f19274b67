"""A manager's options, checked once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from .errors import CallError, SpecError

__all__ = ["Check", "OnMiss", "OnStale", "Options", "as_names", "as_watched", "hashable"]

Check = Literal["epoch", "always"]
OnMiss = Literal["eager", "error", "capture"]
OnStale = Literal["error", "recapture", "eager"]


@dataclass(frozen=True)
class Options:
    """See `CaptureManager`."""

    warmup: int
    check: Check
    on_stale: OnStale
    on_miss: OnMiss
    compile: bool
    verify: bool
    prove_padding: bool
    ignore: tuple[str, ...]
    max_graphs: int | None
    max_bytes: int | None
    debug: bool
    nvtx: bool
    time_every: int

    def __post_init__(self) -> None:
        _require_int("warmup", self.warmup, 2)
        _require_int("time_every", self.time_every, 0)
        for name in ("max_graphs", "max_bytes"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        for name, kind in (("check", Check), ("on_stale", OnStale), ("on_miss", OnMiss)):
            if getattr(self, name) not in get_args(kind):
                raise SpecError(f"{name} must be one of {list(get_args(kind))}, got {getattr(self, name)!r}")
        for name in ("compile", "verify", "prove_padding", "debug", "nvtx"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} must be True or False, got {getattr(self, name)!r}")


def as_names(ignore: Collection[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        SpecError: a lone string, or something else than names.
    """
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise SpecError(f"ignore must be names such as ('Counter.steps',), got {ignore!r}")
    return tuple(ignore)


def as_watched(watch: Any) -> Mapping[str, object] | tuple[object, ...]:
    """What to watch, kept apart from what the caller goes on to change; a lone module or tensor is one.

    Raises:
        SpecError: nothing that could be watched.
    """
    if isinstance(watch, (torch.nn.Module, torch.Tensor)):
        return (watch,)
    if isinstance(watch, Mapping):
        return dict(watch)
    if isinstance(watch, Iterable) and not isinstance(watch, (str, bytes)):
        return tuple(watch)
    raise SpecError(f"watch must be modules and tensors, or a mapping that names them, got {watch!r}")


def hashable(variant: object) -> None:
    """Raises CallError for a variant that can't be looked up."""
    try:
        hash(variant)
    except TypeError:
        raise CallError(f"variant must be hashable, such as a string, got {variant!r}") from None


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} must be an integer of at least {least}, got {value!r}")
