"""Invariant: timing replays on a device waits for nothing and breaks no capture, its own thread's or another's."""

import threading

import pytest
import torch

from mmgraph.capture.metrics import ReplayTimer

pytestmark = pytest.mark.cuda


def timed(timer: ReplayTimer, cycles: int = 0) -> None:
    stream = torch.cuda.current_stream()
    timer.start(stream)
    if cycles:
        torch.cuda._sleep(cycles)
    timer.stop(stream)


def test_a_sample_appears_once_the_device_is_done() -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    timed(timer, 200_000_000)
    assert timer.snapshot().total == 0  # the device is still busy, and nobody waited
    torch.cuda.synchronize()
    got = timer.snapshot()
    assert got.total == 1
    assert got.sum > 10e-3


def test_samples_in_other_threads_leave_a_global_capture_valid() -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    timed(timer)
    torch.cuda.synchronize()
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(4):
                    timed(timer)
                    timer.snapshot()
        except BaseException as error:
            failures.append(error)

    with torch.cuda.graph(graph):  # in the "global" mode
        x += 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        x += 1
    assert not failures
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 4
    assert timer.snapshot().total == 5


def test_within_a_capture_of_the_same_thread_nothing_is_recorded() -> None:
    timer = ReplayTimer(torch.device("cuda"), 1)
    timed(timer)
    torch.cuda.synchronize()
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        timed(timer)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4
    assert timer.snapshot().total == 1
