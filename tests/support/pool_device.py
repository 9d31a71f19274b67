"""A pretended device for a pool: work is queued on streams and run in any order that streams and waits allow."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mmgraph.pool_streams import Mark


@dataclass(eq=False)
class Event:
    passed: bool = False


class PretendedDevice:
    """A clock for a pool, whose streams lag behind the host as far as chance will have it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.current: Hashable = "a"
        self.captured: set[Hashable] = set()
        self.waits = 0
        self._numbers = itertools.count()
        self._queues: dict[Hashable, deque[Callable[[], bool]]] = {}

    def capturing(self, stream: Hashable | None = None) -> bool:
        return (self.current if stream is None else stream) in self.captured

    def stream(self) -> Hashable:
        return self.current

    def record(self, stream: Hashable) -> Mark:
        event = Event()

        def passes() -> bool:
            event.passed = True
            return True

        self._queue(stream).append(passes)
        return Mark(stream, event, next(self._numbers))

    def wait(self, mark: Mark) -> None:
        self.waits += 1
        self._queue(self.current).append(lambda: mark.event.passed)

    def launch(self, work: Callable[[], object]) -> None:
        def runs() -> bool:
            work()
            return True

        self._queue(self.current).append(runs)

    def step(self) -> bool:
        """Run the next work of a stream, where one can go on."""
        streams = [stream for stream, queue in self._queues.items() if queue]
        self.rng.shuffle(streams)
        for stream in streams:
            if self._queues[stream][0]():
                self._queues[stream].popleft()
                return True
        if streams:
            raise RuntimeError("every stream waits for another")
        return False

    def drain(self) -> None:
        while self.step():
            pass

    def _queue(self, stream: Hashable) -> deque[Callable[[], bool]]:
        return self._queues.setdefault(stream, deque())
