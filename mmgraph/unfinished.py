"""Rows of items that a later chunk needs again: held in the pool or cache from the first chunk to the last.

Promises: what a request has begun to use isn't evicted under it; the hold ends with the chunk that covers the item's
last position, or with the item.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from mmgraph.items import MultimodalDataItem
from mmgraph.keeping import Keeper
from mmgraph.planning import EncodePlan

Release = Callable[[], None]


class UnfinishedItems:
    """The holds of an embedder, by the requests' own items."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: weakref.WeakKeyDictionary[MultimodalDataItem, Any] = weakref.WeakKeyDictionary()
        # A finalizer may run anywhere, also inside the pool: it only leaves what is to be done.
        self._ended: deque[Release] = deque()

    def __len__(self) -> int:
        self.settle()
        return len(self._holds)

    def update(self, plan: EncodePlan, keeper: Keeper) -> None:
        """Begin the holds of a plan's unfinished items and end those of items that it finishes.

        Args:
            plan: A plan whose items' rows are all there.
            keeper: Has the rows.
        """
        self.settle()
        if not plan.unfinished and not self._holds:
            return
        unfinished = set(plan.unfinished)
        for item in dict.fromkeys(plan.range_owners):
            with self._lock:
                hold = self._holds.pop(item, None) if item not in unfinished else self._holds.get(item)
            if item in unfinished and hold is None:
                release = keeper.hold(item)
                if release is not None:
                    finalizer = weakref.finalize(item, self._ended.append, release)
                    finalizer.atexit = False
                    with self._lock:
                        self._holds[item] = finalizer
            elif item not in unfinished and hold is not None:
                ended = hold.detach()
                if ended is not None:
                    ended[2][0]()

    def clear(self) -> None:
        """End all holds."""
        with self._lock:
            holds = list(self._holds.values())
            self._holds.clear()
        for hold in holds:
            hold()
        self.settle()

    def settle(self) -> None:
        """Release the rows of items that are gone."""
        while self._ended:
            self._ended.popleft()()
