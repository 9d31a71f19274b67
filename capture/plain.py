"""Plain Python values that a function sets: which of them a replay would leave stale.

A replay runs no Python, so a number, string or flag that the function sets stays as it was. That does no harm
where only the first run sets it (a flag that a table is made, the longest length so far), and is stale wherever
later runs set it to something else. Values inside lists, dictionaries and sets are not looked at.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import NotCapturableError
from .places import UNSET, Place

__all__ = ["Change", "PlainKey", "PlainState", "PlainTable", "is_plain", "same_plain"]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_LONGEST_TUPLE = 256
_NAMED = 3


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string, bytes, None, a member of an enumeration, or a short tuple of these."""
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, enum.Enum):
        return True
    if not issubclass(kind, tuple) or tuple.__len__(value) > _LONGEST_TUPLE:
        return False
    return all(map(is_plain, tuple.__iter__(value)))


def same_plain(a: Any, b: Any) -> bool:
    """Whether two plain values are one, by type and value; a NaN is the same as another."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if issubclass(kind, tuple):
        same_length = tuple.__len__(a) == tuple.__len__(b)
        return same_length and all(map(same_plain, tuple.__iter__(a), tuple.__iter__(b)))
    return kind in _PLAIN and bool(a == b or (a != a and b != b))


@dataclass(frozen=True, eq=False, slots=True)
class PlainTable:
    """A dictionary of attributes or globals, and the plain values in it: lighter than a place for each.

    Attributes:
        name: what a place in it is called, with `{}` for the key.
        table: the dictionary.
        values: the plain values; UNSET for a global that a function names and that is not there yet.
        keys: all keys that it had, where new ones count, else None.
    """

    name: str
    table: dict[Any, Any]
    values: dict[Any, Any]
    keys: frozenset[Any] | None

    @classmethod
    def of_attributes(cls, where: str, table: dict[Any, Any]) -> PlainTable:
        """All attributes of an object."""
        values = {key: value for key, value in dict.items(table) if is_plain(value)}
        name = where.replace("{", "{{").replace("}", "}}") + ".{}"
        return cls(name, table, values, frozenset(dict.keys(table)))

    @classmethod
    def of_globals(cls, table: dict[str, Any], names: Iterable[str]) -> PlainTable:
        """Those globals that a function names."""
        found = {name: dict.get(table, name, UNSET) for name in names}
        values = {name: value for name, value in found.items() if value is UNSET or is_plain(value)}
        return cls("the global {!r}", table, values, None)

    def moved(self) -> Iterator[Place]:
        """The places where something else is bound than at the walk."""
        table = self.table
        for key, old in self.values.items():
            if dict.get(table, key, UNSET) is not old:
                yield Place(self.name.format(key), table, key, old)
        if self.keys is not None and dict.keys(table) != self.keys:
            for key in dict.keys(table) - self.keys:
                yield Place(self.name.format(key), table, key, UNSET)


@dataclass(frozen=True)
class Change:
    """A place, and the plain values before and after."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} (from {reprlib.repr(self.old)} to {reprlib.repr(self.new)})"


class _Other:
    """Stands for whatever is no plain value: one is taken for as good as another."""


_OTHER = _Other()
PlainKey = tuple[int, Any]
_Values = dict[PlainKey, tuple[Place, Any]]


class PlainState:
    """The plain values at the places of one walk, as they were then.

    Args:
        noted: the places.
        ignore: names of places that may change: "Counter.steps", or the last part alone.
    """

    def __init__(self, noted: Sequence[Place | PlainTable], ignore: Collection[str] = ()) -> None:
        self._noted = noted
        self._ignore = frozenset(ignore)
        # What differs from the walk: as it was at the mark, and when last looked at.
        self._marked: _Values = {}
        self._now: _Values = {}
        self._first_use: set[PlainKey] = set()

    def look(self) -> None:
        """Takes note of the values as they are: one pass over all places."""
        # Places that were seen to differ are put back at the end even if they have their old value at present.
        now = {key: (place, place.old) for key, (place, _) in self._now.items()}
        for entry in self._noted:
            for place in entry.moved() if isinstance(entry, PlainTable) else (entry,):
                value = place.now()
                if value is not place.old and _counts(place.old, value):
                    now[id(place.holder), place.key] = (
                        place,
                        value if is_plain(value) or value is UNSET else _OTHER,
                    )
        self._now = now

    def mark(self) -> None:
        """Makes the values last looked at those that `changes` compares with."""
        self._marked = self._now

    def changes(self) -> dict[PlainKey, Change]:
        """What differs between the mark and the last look, without what is ignored."""
        changes = {}
        for key, (place, new) in self._now.items():
            old = self._marked[key][1] if key in self._marked else place.old
            if old is _OTHER or new is _OTHER or same_plain(old, new) or self._ignored(place):
                continue
            changes[key] = Change(place.name, old, new)
        return changes

    def settle(self) -> None:
        """Says of what differs since the walk and isn't ignored that only first runs set it."""
        self._first_use |= {
            key for key, (place, value) in self._now.items() if value is not _OTHER and not self._ignored(place)
        }

    def refuse(self, when: str) -> None:
        """Raises where something changed between the mark and the last look.

        Args:
            when: of which runs this is the difference: "again at its second run".

        Raises:
            NotCapturableError: names places, values and remedies.
        """
        changes = list(self.changes().values())
        if not changes:
            return
        named = ", ".join(map(str, changes[:_NAMED]))
        more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        raise NotCapturableError(
            f"the function sets {named}{more} {when}, and a replay runs no Python: it would leave the value of some "
            "other run; keep it in a tensor that is written in place, or name it in ignore= of the CaptureManager "
            f"if a stale value does no harm: ignore=[{_short_names(changes[0].name)[-1]!r}]"
        )

    def put_back(self, *, everything: bool) -> None:
        """Binds the old values again where others were seen.

        Args:
            everything: else what only a first run sets is left.
        """
        left: _Values = {}
        for key, (place, value) in self._now.items():
            if everything or key not in self._first_use:
                now = place.now()
                if now is not place.old and _counts(place.old, now):
                    place.bind_old()
                left[key] = (place, place.old)
            else:
                left[key] = (place, value)
        self._now = self._marked = left

    def _ignored(self, place: Place) -> bool:
        return bool(self._ignore) and not self._ignore.isdisjoint(_short_names(place.name))


def _counts(old: Any, new: Any) -> bool:
    """Whether a change concerns plain values: None and what isn't set may give way to anything else."""
    return (old is not None and old is not UNSET) or new is UNSET or is_plain(new)


def _short_names(name: str) -> tuple[str, ...]:
    """What a place may be called: its name, the last part alone, or its type and attribute."""
    start, quote, rest = name.partition("'")
    if quote and start in ("the global ", "the variable "):
        return name, rest.partition("'")[0]
    last = name.rpartition(".")[2]
    return name, last, f"{name.partition(' ')[0].partition('.')[0]}.{last}"
