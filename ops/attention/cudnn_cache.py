"""Compiled plans by key: which are kept, when one is destroyed, and what was refused.

Destroying a plan unloads its code and frees device memory. Neither may happen while a kernel of it runs, nor while any
thread captures, and no thread can be asked for that. So a plan that is no longer among the last used is put aside, and
dropped by a later build once nothing can be using it: ``QUIET_SECONDS`` after it was put aside and after a capture last
used a plan.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mmgraph.ops.errors import UnusableBackend

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")

QUIET_SECONDS = 60.0


class PlanCache(Generic[Key, Plan]):
    """Plans by key: the last ``capacity`` used, and as long as the process lives those that a capture has used.

    A captured graph runs its plans' code, and doesn't say when it is destroyed itself. So the plans of captures grow in
    number with the kinds of call that are captured, and only with them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._recent: OrderedDict[Key, Plan] = OrderedDict()
        self._kept: dict[Key, Plan] = {}
        self._aside: deque[tuple[float, Plan]] = deque()
        self._captured_at = float("-inf")
        self._refusals: OrderedDict[Key, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent.keys() | self._kept.keys())

    def __contains__(self, key: Key) -> bool:
        return key in self._recent or key in self._kept

    def find(self, key: Key, capturing: bool) -> Plan | None:
        """The plan of that key, if it is built.

        Raises:
            UnusableBackend: It couldn't be built, the last time that this was tried.
        """
        with self._lock:
            if capturing:
                self._captured_at = time.monotonic()
            plan = self._recent.get(key)
            if plan is not None:
                self._recent.move_to_end(key)
                if capturing:
                    self._kept[key] = plan
                return plan
            plan = self._kept.get(key)
            if plan is None and key in self._refusals:
                self._refusals.move_to_end(key)
                raise UnusableBackend(self._refusals[key])
            return plan

    def build(self, key: Key, make: Callable[[Key], Plan]) -> Plan:
        """The plan of that key, made now unless another thread has made it meanwhile; outside captures only.

        Raises:
            UnusableBackend: ``make`` does. It is remembered, for the last ``capacity`` keys.
        """
        with self._building:
            plan = self.find(key, False)
            if plan is None:
                self._drop()
                try:
                    plan = make(key)
                except UnusableBackend as error:
                    with self._lock:
                        self._refusals[key] = str(error)
                        if len(self._refusals) > self.capacity:
                            self._refusals.popitem(last=False)
                    raise
                self._add(key, plan)
        return plan

    def _add(self, key: Key, plan: Plan) -> None:
        with self._lock:
            self._recent[key] = plan
            while len(self._recent) > self.capacity:
                self._aside.append((time.monotonic(), self._recent.popitem(last=False)[1]))

    def _drop(self) -> None:
        """Destroy the plans that nothing can be using any more."""
        unused = []
        with self._lock:
            before = time.monotonic() - QUIET_SECONDS
            while self._captured_at <= before and self._aside and self._aside[0][0] <= before:
                unused.append(self._aside.popleft())
        unused.clear()  # outside the lock: it takes its time
