"""Attributes set on other people's objects, and put back."""

from __future__ import annotations

from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Instance attributes that were set, with what was there before."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of an object, not of its class."""
        self._set.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts back what was there, the last first."""
        while self._set:
            owner, name, before = self._set.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)

    def __len__(self) -> int:
        return len(self._set)
