"""The choice by measurement: each usable backend runs on the call's own tensors, and the fastest serves that shape.

Meant for shapes that come again, such as a capture's buckets: the runs that warm a bucket up measure, and the capture
takes what they found. A measurement waits for the device, so it can't be made inside a capture, and a shape that
changes with every call would be measured at every call.
"""

import itertools
import logging
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mmgraph.ops.attention.registry import AttentionBackend, Traits, usable_backends
from mmgraph.ops.errors import DuringCaptureError, UnusableBackend

_CAPACITY = 4096
_RUNS = 7
_CYCLES_A_SECOND = 2e9  # more than any GPU's, so that none waits too short

_log = logging.getLogger("mmgraph.ops.attention")

_found: OrderedDict[tuple[Any, ...], AttentionBackend] = OrderedDict()
_lock = threading.Lock()
_measuring = threading.Lock()


def choose(
    traits: Traits, tokens: int, batch: int, max_seqlen: int, run: Callable[[AttentionBackend], Any]
) -> AttentionBackend:
    """The backend that was fastest on this shape; measured now if it wasn't before.

    Args:
        traits: What the call is like.
        tokens: Rows of q.
        batch: Sequences.
        max_seqlen: The longest length.
        run: Runs the call on a backend.

    Raises:
        DuringCaptureError: The shape wasn't measured yet, and a graph is being captured.
        BrokenBackend, UnusableBackend: As for every choice.
    """
    key = (traits, tokens, batch, max_seqlen)
    with _lock:
        found = _found.get(key)
        if found is not None:
            _found.move_to_end(key)
            return found
    if traits.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            f"backend='measure' has not measured {tokens} tokens in {batch} sequences of up to {max_seqlen} "
            "yet, and can't "
            "while a graph is being captured. Run the function once on that shape before capturing it."
        )
    usable = usable_backends(traits)
    # The reference is a matter of last resort on a GPU: quadratic in all rows, and in memory.
    names = [name for name in usable if name != "reference"] or list(usable)
    with _measuring:
        with _lock:
            found = _found.get(key)
        if found is None:
            found = usable[_fastest(run, {name: usable[name] for name in names}, traits.device)]
            with _lock:
                _found[key] = found
                if len(_found) > _CAPACITY:
                    _found.popitem(last=False)  # the one that wasn't asked for the longest
    return found


def _fastest(
    run: Callable[[AttentionBackend], Any], backends: dict[str, AttentionBackend], device: torch.device
) -> str:
    times: dict[str, float] = {}
    refusal: UnusableBackend | None = None
    for name, backend in backends.items():
        try:
            times[name] = _time(run, backend, device)
        except UnusableBackend as error:  # cuDNN may know only now that it has no plan
            _log.warning("backend='measure' leaves %s out: %s", name, error)
            refusal = error
    if not times:
        raise refusal or UnusableBackend("no attention backend can serve this call.")
    best = min(times, key=lambda name: times[name])
    _log.info("backend='measure' takes %s: %s", best, {name: f"{s * 1e6:.1f} us" for name, s in times.items()})
    return best


def forget() -> None:
    """Drop all measurements."""
    with _lock:
        _found.clear()


def _time(run: Callable[[AttentionBackend], Any], backend: AttentionBackend, device: torch.device) -> float:
    """Median seconds of a run, after two that compile and warm up."""
    run(backend)
    run(backend)
    if device.type != "cuda":
        times = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            run(backend)
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run(backend)
        host = time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_RUNS + 1)]
        # The device is held while the host gets ahead of it, so that it is the device that is timed. A captured graph,
        # for which the choice is made, costs the host nothing.
        hold(device, (_RUNS + 1) * host)
        events[0].record()
        for event in events[1:]:
            run(backend)
            event.record()
        events[-1].synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))) / 1e3


def hold(device: torch.device, seconds: float) -> None:
    """Keep a device's current stream busy for at least some time, and most others free: one thread counts cycles."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))
