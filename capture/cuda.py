"""One capture on a CUDA device, and the way back when it fails.

A capture that ends in an error leaves PyTorch's bookkeeping half open: the random generator goes on believing
that it is being captured, the allocator goes on routing to the pool, and the pool can take no other capture.
`DeviceGraph` closes all of it, so that random numbers, older graphs and new captures work afterwards as if
the failed one had never been tried.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from ._compat import cuda_begin_raw_capture, cuda_drop_pool

__all__ = ["CAPTURE_LOCK", "DeviceGraph", "DevicePool"]

logger = logging.getLogger(__name__)

#: Captures never overlap in a process: the allocator, the garbage collector and the generators are shared by
#: all of them.
CAPTURE_LOCK = threading.RLock()

# Graphs whose capture could not be closed in an orderly way. The allocators may still ask them whether a stream
# is theirs, so they must stay alive. A few hundred bytes each, and only after a failure within a failure.
_ABANDONED: list[torch.cuda.CUDAGraph] = []


class DevicePool:
    """The memory pool that graphs share, and a handle that outlives a failed capture."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def renew(self) -> None:
        """Takes a new pool for the captures to come; the old one lives as long as its graphs."""
        self.handle = torch.cuda.graph_pool_handle()


class DeviceGraph:
    """A function's work on the device, captured once and replayed at will.

    Args:
        fn: called once, without arguments, on `stream`.
        stream: the stream to capture on; not the default stream.
        pool: the pool that intermediates are taken from.

    Raises:
        Exception: whatever `fn` or the capture raised, after the process is as it was.
    """

    def __init__(self, fn: Callable[[], object], stream: torch.cuda.Stream, pool: DevicePool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        device = stream.device
        with CAPTURE_LOCK, _no_garbage_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
            torch.cuda.synchronize(device)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            before = generator.get_state()
            graph = torch.cuda.CUDAGraph()
            began = False
            try:
                # Thread-local, so that what other threads do meanwhile neither fails nor lands in this graph.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                began = True
                fn()
                graph.capture_end()
            except BaseException:
                if not began:  # the generator may count as captured all the same
                    _abandon(graph, stream, pool)
                if not (began and _close_failed_capture(graph, stream, pool)):
                    # The generator's own state still counts as captured. A copy of it doesn't; graphs that were
                    # captured before keep the old one, so that this comes last of all remedies.
                    generator.graphsafe_set_state(generator.clone_state())
                generator.set_state(before)
                raise
            self._graph = graph

    def replay(self) -> None:
        """Launches the captured work on the current stream."""
        if self._graph is None:
            raise RuntimeError("this graph was reset and cannot be replayed: capture it again")
        self._graph.replay()

    def reset(self) -> None:
        """Destroys the graph. Its memory returns to the pool once no other graph of the pool needs it."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects now and not again until the end.

    A graph that the collector destroys during a capture breaks the capture.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _close_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: DevicePool) -> bool:
    """Ends a capture that failed inside, and everything that PyTorch keeps open for it.

    The first `capture_end` ends the capture on the stream; if the capture had become invalid it raises before
    the generators and allocators are told. Giving the graph an empty valid capture to end lets the same call
    run to its finish.

    Returns:
        Whether it was closed in an orderly way.
    """
    try:
        _end_capture(graph)
    except RuntimeError as first:
        logger.debug("the capture had become invalid: %s", first)
        try:
            if not torch.cuda.is_current_stream_capturing():
                cuda_begin_raw_capture(stream)
            _end_capture(graph)
        except (RuntimeError, OSError, AttributeError) as second:
            logger.warning(
                "a failed capture could not be closed in an orderly way (%s); its pool is given up", second
            )
            _abandon(graph, stream, pool)
            return False
    graph.reset()
    return True


def _abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: DevicePool) -> None:
    """Gives up a capture that can't be ended, with its pool."""
    _ABANDONED.append(graph)
    with contextlib.suppress(RuntimeError):
        cuda_drop_pool(stream.device, pool.handle)
    pool.renew()


def _end_capture(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty is the point
        graph.capture_end()
