"""Rows of items that a later chunk needs again: held in the pool or cache from the first chunk to the last.

Promises: what a request has begun to use isn't evicted under it. A hold is of an item and of the position that its
request comes to next, so that requests which share an item each have their own; it ends with the chunk that begins
there, with the item, or when the request is given up.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from mmgraph.items import MultimodalDataItem
from mmgraph.planning import EncodePlan


class Hold(Protocol):
    """Something that is held; it ends when it is lost, too."""

    def release(self) -> None:
        """End it."""


class Holder(Protocol):
    """Makes holds."""

    def hold(self, item: MultimodalDataItem) -> Hold | None:
        """Hold an item's rows; None where they are not there, or need no hold."""


class UnfinishedItems:
    """The holds of an embedder, by the requests' own items."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # An item's holds are lost with it.
        self._holds: weakref.WeakKeyDictionary[MultimodalDataItem, dict[int, list[Hold]]] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        with self._lock:
            return sum(len(held) for places in list(self._holds.values()) for held in places.values())

    def update(self, plan: EncodePlan, holder: Holder) -> None:
        """Begin the holds of what a plan's requests need later, and end those that their chunks continue.

        Args:
            plan: A plan whose items' rows are all there.
            holder: Has the rows.
        """
        if not plan.unfinished and not self._holds:
            return
        ended: list[Hold] = []
        with self._lock:
            for step in plan.continued:
                places = self._holds.get(step.item, {})
                held = places.get(step.position, [])
                if held:
                    ended.append(held.pop())
                if not held:
                    places.pop(step.position, None)
                if not places:
                    self._holds.pop(step.item, None)
        for step in plan.unfinished:
            hold = holder.hold(step.item)
            if hold is not None:
                with self._lock:
                    self._holds.setdefault(step.item, {}).setdefault(step.position, []).append(hold)
        _release(ended)

    def forget(self, items: Iterable[MultimodalDataItem]) -> None:
        """End all holds of some items."""
        with self._lock:
            places = [self._holds.pop(item, {}) for item in items]
        _release(hold for place in places for held in place.values() for hold in held)

    def clear(self) -> None:
        """End all holds."""
        self.forget(list(self._holds))


def _release(holds: Iterable[Hold]) -> None:
    for hold in holds:
        hold.release()
