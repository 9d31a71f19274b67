"""A device that runs late: streams whose work is done in any legal order, and memory that is handed out again at once.

It drives the library's own staging through a `mmgraph.lane.Lane`. What it keeps of CUDA is what staging relies on:

- work is done long after it was asked for, in the order of its stream; an event orders streams, and the host may
  ask for one or wait for it;
- a block that the host frees goes to the next allocation of its size on the side stream at once, unless another stream
  was marked as using it; then only when that stream has come to where it was when the block was freed;
- a copy reads its source when it is done, not when it was asked for; a new block holds NaN, written by the stream;
- host memory that the device reads and nobody keeps is overwritten.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

DEVICE = torch.device("cuda", 0)
"""What the simulated device is called; no CUDA takes part."""


class Event:
    """A point in a stream's work."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.passed = False

    def query(self) -> bool:
        self.world.advance()
        return self.passed

    def synchronize(self) -> None:
        self.world.host_waits += 1
        while not self.passed:
            assert self.world.step(), "the host waits for an event that never comes"


class Stream:
    """Work in order."""

    def __init__(self) -> None:
        self.work: deque[tuple[str, Any]] = deque()


class Block:
    """Device memory, with the streams that use it beside the side stream."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.users: set[str] = set()
        self.pending: list[Event] = []


class _Memory(np.ndarray):
    """An array that tells when it goes."""


class World:
    """The device, its memory and its two streams.

    Args:
        seed: Decides the order of work.
        eager: How much work is done, on average, whenever the host calls.
        ahead: A stream whose work goes first whenever it can: "side", "compute" or None.
    """

    def __init__(self, seed: int = 0, *, eager: float = 0.5, ahead: str | None = None) -> None:
        self.rng = random.Random(seed)
        self.eager = eager
        self.ahead = ahead
        self.streams = {"side": Stream(), "compute": Stream()}
        self.free: dict[int, list[Block]] = {}
        self.late: list[Block] = []
        self.blocks: dict[int, Block] = {}
        self.host: dict[int, np.ndarray] = {}
        self.host_waits = 0
        self.wrong: list[str] = []
        self.reads = 0

    def enqueue(self, stream: str, work: Callable[[], Any]) -> None:
        self.streams[stream].work.append(("run", work))
        self.advance()

    def record(self, stream: str) -> Event:
        event = Event(self)
        self.streams[stream].work.append(("record", event))
        return event

    def wait(self, stream: str, event: Event) -> None:
        self.streams[stream].work.append(("wait", event))

    def step(self) -> bool:
        """Do one piece of work that can be done; tell whether there was one."""
        ready = [
            name
            for name, stream in self.streams.items()
            if stream.work and (stream.work[0][0] != "wait" or stream.work[0][1].passed)
        ]
        if not ready:
            return False
        name = self.ahead if self.ahead in ready else self.rng.choice(ready)
        kind, what = self.streams[name].work.popleft()
        if kind == "run":
            what()
        elif kind == "record":
            what.passed = True
        return True

    def advance(self) -> None:
        while self.rng.random() < self.eager and self.step():
            pass

    def drain(self) -> None:
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams.values()), "a stream waits for ever"

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the side stream, poisoned by it."""
        for block in [block for block in self.late if all(event.passed for event in block.pending)]:
            self.late.remove(block)
            self.free.setdefault(block.memory.numel(), []).append(block)
        size = max(16, like.nbytes)
        free = self.free.get(size)
        block = free.pop() if free else Block(torch.empty(size, dtype=torch.uint8))
        self.blocks[_address(block.memory)] = block
        memory = block.memory
        self.enqueue("side", lambda: memory.fill_(0xFF))
        strides = torch.empty_like(like, device="meta").stride()
        tensor = memory[: like.nbytes].view(like.dtype).as_strided(like.shape, strides)
        weakref.finalize(tensor, self._freed, block)
        return tensor

    def _freed(self, block: "Block") -> None:
        block.pending = [self.record(user) for user in sorted(block.users)]
        block.users = set()
        if block.pending:
            self.late.append(block)
        else:
            self.free.setdefault(block.memory.numel(), []).append(block)

    def mark_used(self, tensor: torch.Tensor, stream: str) -> None:
        self.blocks[_address(tensor)].users.add(stream)

    def pinned(self, values: torch.Tensor) -> torch.Tensor:
        """Host memory that the device reads; overwritten once nobody keeps it."""
        raw = np.frombuffer(bytearray(max(values.nbytes, 1)), dtype=np.uint8)
        owner = raw.view(_Memory)
        kept = torch.from_numpy(owner)[: values.nbytes].view(values.dtype).reshape(values.shape)
        kept.copy_(values)
        self.host[_address(kept)] = raw
        weakref.finalize(owner, raw.fill, 0x77)
        return kept

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory behind another object, as a pointer is: it keeps no owner alive."""
        raw = self.host.get(_address(tensor))
        if raw is None:
            return tensor.view(tensor.shape)
        bytes_of = torch.from_numpy(raw)[: raw.size // tensor.itemsize * tensor.itemsize]
        return bytes_of.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def kernel(self, tensor: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        """A kernel on the compute stream that reads a tensor when its turn comes and knows what it must find."""
        memory = self.raw(tensor)
        wanted = expected.clone()

        def read() -> None:
            self.reads += 1
            if not torch.equal(memory, wanted):
                self.wrong.append(name)

        self.enqueue("compute", read)


class SimulatedLane:
    """The way into a `World`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def entered(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def follow(self, sources: Sequence[torch.Tensor]) -> None:
        pass

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def reads(self, source: torch.Tensor) -> bool:
        return _address(source) in self.world.host

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        return self.world.allocate(source)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, come = self.world.raw(target), self.world.raw(source)
        self.world.enqueue("side", lambda: to.copy_(come))

    def mark(self) -> Event:
        return self.world.record("side")

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        self.world.wait("compute", event)
        for tensor in tensors:
            self.world.mark_used(tensor, "compute")


class UnwaitedLane(SimulatedLane):
    """Forgets that the compute stream must wait."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.world.mark_used(tensor, "compute")


class UnmarkedLane(SimulatedLane):
    """Forgets to mark memory as used by the compute stream."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        self.world.wait("compute", event)


class HastyEvent:
    """Says that it has passed."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HastyLane(SimulatedLane):
    """Forgets that copies from the host take time; the compute stream waits as it should."""

    def mark(self) -> HastyEvent:
        return HastyEvent(super().mark())

    def hand_over(self, event: HastyEvent, tensors: Sequence[torch.Tensor]) -> None:
        super().hand_over(event.event, tensors)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
