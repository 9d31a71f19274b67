"""Rounds of one producer and some consumers that die at random times; fails where what a survivor finds is wrong.

Started by test_transport_processes.py with a number of rounds, in a process of its own. Prints, for nameless files and
for named ones, how many rounds ended in which way.
"""

import contextlib
import json
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shm import Fork, names, own_directory, segments

from mmgraph import ShmTensorHandle
from mmgraph.errors import SegmentGoneError
from mmgraph.transport import sweep

FEATURE = torch.arange(3000)
GONE = 3


def mortal(rng: random.Random, longest_s: float) -> None:
    """With even odds, die without a word at a random time from now."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if rng.random() < 0.5:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest_s))


def one_round(shm: Path, rng: random.Random) -> str:
    """One producer and some consumers, any of which may die at any time; gives what happened."""
    seeds = [rng.getrandbits(32) for _ in range(1 + rng.randint(1, 3))]
    is_swept = rng.random() < 0.3

    def produce(child: Fork) -> None:
        mortal(random.Random(seeds[0]), 0.005)
        child.tell(pickle.dumps(ShmTensorHandle.publish(FEATURE)))
        while True:
            signal.pause()

    producer = Fork(produce)
    told = None
    with contextlib.suppress(EOFError):
        told = producer.hear()
    if told is None:
        assert producer.wait() == -signal.SIGALRM
        return "not published"
    if is_swept:
        sweep(0)
    go_read, go_write = os.pipe()

    def consume(seed: int) -> Callable[[Fork], int]:
        def run(child: Fork) -> int:
            os.close(go_write)
            mortal(random.Random(seed), 0.005)
            try:
                handle = pickle.loads(told).attach()
            except SegmentGoneError:
                return GONE
            child.tell(b"attached")
            os.read(go_read, 1)  # ends when the parent closes it: the group's barrier
            return 0 if torch.equal(handle.consume(), FEATURE) else 1

        return run

    group = [Fork(consume(seed)) for seed in seeds[1:]]
    os.close(go_read)
    for member in group:
        member.hear()
    if rng.random() < 0.3:
        sweep(0)
    os.close(go_write)
    ends = [member.wait() for member in group]
    is_alive = producer.lives()
    assert set(ends) <= {0, GONE, -signal.SIGALRM}
    if is_alive:
        assert GONE not in ends  # nobody sweeps what a living producer has published
        assert pickle.loads(told).name not in sweep(0)
        if pickle.loads(told).name not in names(shm):  # a consumer may die between the removal and its end
            assert {0, -signal.SIGALRM} & set(ends)
        pickle.loads(told).release()
        producer.kill()
    assert 0 not in ends or pickle.loads(told).name not in names(shm)
    return "consumed" if 0 in ends else "gone" if GONE in ends else "all died"


def rounds(shm: Path, count: int) -> dict[str, int]:
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    for index in range(count):
        try:
            what = one_round(shm, rng)
        except AssertionError as error:
            raise AssertionError(f"round {index} of seed {seed}") from error
        seen[what] = seen.get(what, 0) + 1
        if index % 10 == 9:
            sweep(0)
            assert segments(shm) == [], f"round {index} of seed {seed}"
    sweep(0)
    assert names(shm) == []
    return seen


if __name__ == "__main__":
    for nameless in (True, False):
        with pytest.MonkeyPatch.context() as patch, own_directory(patch, nameless) as directory:
            print(json.dumps(rounds(directory, int(sys.argv[1]))), flush=True)
