"""Attributes set on other people's objects, and put back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from mmgraph.errors import TowerError

__all__ = ["Patches", "Replacement", "refuse_copy"]

logger = logging.getLogger(__name__)

_ABSENT = object()


def refuse_copy(what: str) -> TowerError:
    """The error of a copy of something that serves one model."""
    return TowerError(
        f"{what} of an accelerated model serves the model that it was made for, and can't be copied or pickled: "
        "restore(model) first, and accelerate the copy too"
    )


class Replacement:
    """A function in a method's place. It can't be copied: the copy of a model would run the first one's.

    Args:
        function: What is called.
        original: Whose signature and name it has.
    """

    def __init__(self, function: Callable[..., Any], original: Any) -> None:
        functools.update_wrapper(self, original, updated=())
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refuse_copy("a method")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy("a method")


class Patches:
    """Instance attributes that were set, with what was there before."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Puts a function in the place of a method of an object, not of its class."""
        before = vars(owner).get(name, _ABSENT)
        replacement = Replacement(function, getattr(owner, name))
        self._set.append((owner, name, before, replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Puts back what was there, the last first; what somebody else put there since stays."""
        while self._set:
            owner, name, before, ours = self._set.pop()
            if vars(owner).get(name, _ABSENT) is not ours:
                logger.warning(
                    "%s.%s was replaced again after accelerate, and stays: it calls transformers' own from now on",
                    type(owner).__name__,
                    name,
                )
                if isinstance(ours, Replacement):
                    ours._function = _as_before(owner, name, before)
            elif before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)

    def __len__(self) -> int:
        return len(self._set)


def _as_before(owner: Any, name: str, before: Any) -> Callable[..., Any]:
    """What a method did before it was replaced."""
    found: Callable[..., Any] = getattr(type(owner), name).__get__(owner) if before is _ABSENT else before
    return found
