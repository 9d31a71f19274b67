"""Replay times as a histogram. Nothing waits for the device, and a call that isn't sampled pays one comparison."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import CallError, SpecError

if TYPE_CHECKING:
    pass

__all__ = ["Histogram", "HistogramSnapshot", "ReplayTimer"]

# 20 us to 10 s in steps of 1, 2 and 5.
_BOUNDS = tuple(float(f"{step}e{power}") for power in range(-5, 2) for step in (1, 2, 5))[1:-2]

# Samples whose end the device may not have reached yet. When all are in flight, replays go unsampled.
_RING = 8


@dataclass(frozen=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        bounds: ascending upper bounds, in seconds.
        counts: for each bound, how many values were at most it.
        total: how many values there were, those beyond the last bound among them.
        sum: of all values, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: int
    sum: float

    def quantile(self, q: float) -> float:
        """The time that a share `q` of the values is at most, in seconds.

        Linear within the bounds that it lies between; the last bound where it lies beyond; NaN where there are no
        values.

        Raises:
            CallError: `q` is not from 0 to 1.
        """
        if not 0 <= q <= 1:
            raise CallError(f"q must be a share from 0 to 1, got {q!r}")
        if not self.total:
            return math.nan
        rank = q * self.total
        index = bisect.bisect_left(self.counts, rank or 1)  # for a rank of 0 the first that isn't empty
        if index == len(self.bounds):
            return self.bounds[-1]
        low, before = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0)
        return low + (self.bounds[index] - low) * (rank - before) / (self.counts[index] - before)


class Histogram:
    """Counts times by fixed bounds; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Counts one time."""
        with self._lock:
            self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
            self._sum += seconds

    def snapshot(self) -> HistogramSnapshot:
        """What was counted so far."""
        with self._lock:
            *counts, total = itertools.accumulate(self._counts)
            return HistogramSnapshot(_BOUNDS, tuple(counts), total, self._sum)


class ReplayTimer:
    """Times every Nth replay without waiting for it.

    On CUDA a sample is a pair of events around the replay, read at a later sample or `snapshot` that finds both
    done; on a CPU it is the wall time. `start` and `stop` of one timer must not run in two threads at once;
    `snapshot` may run at any time.

    Args:
        device: where the replays run.
        every: which replays are sampled; 0 for none.
        histogram: where samples go; a new one by default.

    Raises:
        SpecError: `every` is not an integer of zero or more.
    """

    def __init__(self, device: torch.device, every: int, histogram: Histogram | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise SpecError(f"every must be the number of replays to one sample, or 0 for none, got {every!r}")
        self.histogram = histogram if histogram is not None else Histogram()
        self._device = device
        self._every = every
        self._left = every  # for 0 it counts down from -1 and never reaches 0
        self._began: Any = None  # the sample between start and stop: a time, or a pair of events
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._pending: deque[Any] = deque()
        if every and device.type == "cuda":
            self._free = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_RING)]

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        """Right before a replay on `stream` (None on a CPU)."""
        self._left -= 1
        if self._left == 0:
            self._start_sample(stream)

    def stop(self, stream: torch.cuda.Stream | None = None) -> None:
        """Right after it, on the same stream. A replay that failed needs none."""
        if self._began is not None:
            self._stop_sample(stream)

    def snapshot(self) -> HistogramSnapshot:
        """All samples that are done by now."""
        self._collect()
        return self.histogram.snapshot()

    def _start_sample(self, stream: torch.cuda.Stream | None) -> None:
        self._left = self._every
        if self._device.type != "cuda":
            self._began = time.perf_counter()
            return
        self._collect()
        with self._lock:
            if self._began is not None:  # its replay failed
                self._free.append(self._began)
                self._began = None
            if not self._free or torch.cuda.is_current_stream_capturing():
                return
            self._began = self._free.pop()
        self._began[0].record(stream)

    def _stop_sample(self, stream: torch.cuda.Stream | None) -> None:
        began, self._began = self._began, None
        if self._device.type != "cuda":
            self.histogram.add(time.perf_counter() - began)
            return
        began[1].record(stream)
        with self._lock:
            self._pending.append(began)

    def _collect(self) -> None:
        """Reads the pairs that are done."""
        if not self._pending:
            return
        with self._lock, torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
            with _queries_leave_captures_alone():
                while self._pending and all(event.query() for event in self._pending[0]):
                    begin, end = pair = self._pending.popleft()
                    self.histogram.add(begin.elapsed_time(end) * 1e-3)
                    self._free.append(pair)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def _queries_leave_captures_alone() -> Iterator[None]:
    """Lets this thread query events while another captures.

    In the usual ("global") capture mode, which `torch.cuda.graph` has by default, a query in any other thread
    invalidates the capture, unless that thread has said that its calls are none of the capture's business.
    """
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    if (status := exchange(ctypes.byref(mode))) != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUresult {status}")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # `mode` now holds what was before
