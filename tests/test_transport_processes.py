"""Invariant: whoever dies and whenever, those that live get the data or a clear error, and leave nothing behind.

Processes are killed at every step of publishing and consuming, and at random. After each death what is left is gone
once a survivor has consumed or released, or once a server that starts has swept.
"""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shm import Fork, consume_in_a_group, fork, names, own_directory, publish_for_a_parent, segments

from mmgraph import ShmTensorHandle, transport, transport_files, transport_segments
from mmgraph.errors import SegmentGoneError
from mmgraph.transport import sweep
from mmgraph.transport_segments import OpenSegment

FEATURE = torch.arange(3000)


@pytest.fixture(params=[True, False], ids=["nameless", "named"])
def shm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_directory(monkeypatch, request.param) as directory:
        yield directory


@pytest.fixture
def plain_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_directory(monkeypatch) as directory:
        yield directory


def consumed(handle: ShmTensorHandle) -> bool:
    return torch.equal(handle.attach().consume(), FEATURE)


def without_lock(directory: Path) -> list[str]:
    """What there is beside the file that this process keeps locked as a producer."""
    return [name for name in names(directory) if name != transport_files.own.owner_name]


# Killed while publishing

Patch = Callable[[Fork], None]


def before(module: Any, name: str) -> Patch:
    return lambda child: setattr(module, name, child.stop)


def after(module: Any, name: str) -> Patch:
    real = getattr(module, name)

    def patch(child: Fork) -> None:
        def stopping(*args: Any, **options: Any) -> None:
            real(*args, **options)
            child.stop()

        setattr(module, name, stopping)

    return patch


def in_the_middle_of_the_write(child: Fork) -> None:
    def half(fd: int, offset: int, data: memoryview) -> None:
        os.pwrite(fd, data[: len(data) // 2], offset)
        child.stop()

    transport_segments._write = half  # type: ignore[assignment]


WHILE_PUBLISHING = {
    "before the producer's lock": before(transport_files.OwnProcess, "_locked_file"),
    "before the lock is taken": before(transport_files.fcntl, "flock"),
    "before the file": before(transport_segments.secrets, "token_hex"),
    "before the room is reserved": before(os, "posix_fallocate"),
    "before the copy": before(transport_segments, "_write"),
    "in the middle of the copy": in_the_middle_of_the_write,
    "after the copy": after(transport_segments, "_write"),
    "after all": after(ShmTensorHandle, "__init__"),
}


@pytest.mark.parametrize("step", WHILE_PUBLISHING)
def test_a_producer_killed_while_it_publishes(shm: Path, request: pytest.FixtureRequest, step: str) -> None:
    def run(child: Fork) -> None:
        WHILE_PUBLISHING[step](child)
        ShmTensorHandle.publish(FEATURE)

    producer = Fork(run)
    assert producer.hear() == b"stopped"
    fork(lambda _: len(sweep(0)))  # while it lives: takes nothing that it still needs
    left = segments(shm)
    producer.kill()
    assert segments(shm) == left
    if request.node.callspec.params["shm"]:  # nameless: even without a sweep
        assert len(left) == (step == "after all")
    sweep(0)
    assert names(shm) == []


@pytest.mark.parametrize("is_swept", [False, True])
def test_a_producer_killed_once_the_handle_is_on_its_way(shm: Path, is_swept: bool) -> None:
    def run(child: Fork) -> None:
        child.tell(pickle.dumps(ShmTensorHandle.publish(FEATURE)))
        child.stop()

    producer = Fork(run)
    told = producer.hear()
    assert told is not None
    assert producer.hear() == b"stopped"
    assert sweep(0) == []
    producer.kill()
    if is_swept:
        assert len(sweep(0)) == 1
        with pytest.raises(SegmentGoneError):
            pickle.loads(told).attach()
    else:
        assert consumed(pickle.loads(told))
    assert names(shm) == []


# Killed while consuming


def in_the_middle_of_the_read(child: Fork) -> None:
    def half(segment: OpenSegment, offset: int, buffer: memoryview) -> None:
        os.preadv(segment._fd, [buffer[: len(buffer) // 2]], offset)
        child.stop()

    OpenSegment.read_into = half  # type: ignore[method-assign]


WHILE_CONSUMING = {
    "before attach": before(ShmTensorHandle, "attach"),
    "before the lock": before(transport_files.fcntl, "flock"),
    "after attach": after(ShmTensorHandle, "attach"),
    "in the middle of the copy": in_the_middle_of_the_read,
    "before the removal": before(transport, "unlink_segment"),
}
AFTER_THE_REMOVAL = {
    "after the removal": after(transport_segments.files, "unlink"),
    "before it is closed": after(transport, "unlink_segment"),
    "after all": after(ShmTensorHandle, "consume"),
}


def killed_while_consuming(handle: ShmTensorHandle, patch: Patch) -> None:
    def run(child: Fork) -> None:
        patch(child)
        handle.attach().consume()

    consumer = Fork(run)
    assert consumer.hear() == b"stopped"
    consumer.kill()


@pytest.mark.parametrize("survivor", ["consumes", "releases", "dies"])
@pytest.mark.parametrize("patch", WHILE_CONSUMING.values(), ids=WHILE_CONSUMING.keys())
def test_a_consumer_killed_before_it_removes_the_segment(shm: Path, patch: Patch, survivor: str) -> None:
    def run(child: Fork) -> None:
        handle = ShmTensorHandle.publish(FEATURE)
        killed_while_consuming(handle, patch)
        assert sweep(0) == []
        assert segments(shm) == [handle.name]
        if survivor == "consumes":
            assert consumed(handle)
        if survivor == "releases":
            handle.release()
        if survivor != "dies":
            assert without_lock(shm) == []

    assert fork(run) == 0
    assert len(sweep(0)) == (survivor == "dies")
    assert names(shm) == []


@pytest.mark.parametrize("patch", AFTER_THE_REMOVAL.values(), ids=AFTER_THE_REMOVAL.keys())
def test_a_consumer_killed_after_it_has_removed_the_segment(shm: Path, patch: Patch) -> None:
    handle = ShmTensorHandle.publish(FEATURE)
    member = pickle.loads(pickle.dumps(handle)).attach()
    killed_while_consuming(handle, patch)
    assert without_lock(shm) == []
    assert consumed(member)
    handle.release()
    assert without_lock(shm) == []


@pytest.mark.parametrize("patch", WHILE_CONSUMING.values(), ids=WHILE_CONSUMING.keys())
def test_one_of_a_group_killed(shm: Path, patch: Patch) -> None:
    handle = ShmTensorHandle.publish(FEATURE)
    group = [pickle.loads(pickle.dumps(handle)).attach() for _ in range(3)]
    killed_while_consuming(handle, patch)
    assert all(map(consumed, group))
    assert without_lock(shm) == []


# Real processes, each with an interpreter of its own

CHILD = """
import base64, pickle, sys
from mmgraph import transport, transport_files
transport_files.DIRECTORY = sys.argv[1]
"""


def python(directory: Path, program: str, *args: str) -> str:
    """Run a program with every warning shown; it must say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "always", "-c", CHILD + program, str(directory), *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


PUBLISH = """
import torch
handle = transport.ShmTensorHandle.publish(torch.arange(3000))
print(pickle.dumps(handle).hex())
"""


def test_a_producer_that_exits_leaves_what_is_on_its_way_and_nothing_else(plain_shm: Path) -> None:
    handle = pickle.loads(bytes.fromhex(python(plain_shm, PUBLISH)))
    assert names(plain_shm) == [handle.name]
    assert sweep() == []  # as a server would that starts now
    assert consumed(handle)
    assert names(plain_shm) == []


ENDINGS = {
    "released": "handle.release()",
    "attached": "handle.attach()",
    "attached in a cycle": "cycle = [handle.attach()]; cycle.append(cycle); del handle, cycle",
    "attached in a module": "sys.attached = transport.attached = handle.attach()",
    "copied and pickled": "import copy; copy.deepcopy(pickle.loads(pickle.dumps(handle.attach()))).attach()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_consumer_that_exits_takes_nothing_along_and_says_nothing(plain_shm: Path, ending: str) -> None:
    handle = ShmTensorHandle.publish(FEATURE)
    python(
        plain_shm, f"handle = pickle.loads(bytes.fromhex(sys.argv[2])); {ending}", pickle.dumps(handle).hex()
    )
    if "release()" not in ending:
        assert consumed(handle)
    assert without_lock(plain_shm) == []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_remove_their_locks(plain_shm: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    producer = context.Process(target=publish_for_a_parent, args=(str(plain_shm), FEATURE, sending))
    producer.start()
    handle = receiving.recv()
    producer.join()
    assert producer.exitcode == 0
    assert names(plain_shm) == [handle.name]
    assert consumed(handle)
    assert names(plain_shm) == []


def test_a_group_of_spawned_consumers_behind_a_barrier(
    plain_shm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("spawn")
    queue, barrier, results = context.Queue(), context.Barrier(2), context.Queue()
    group = [  # of two: each imports PyTorch, which takes the longest
        context.Process(target=consume_in_a_group, args=(str(plain_shm), queue, barrier, results))
        for _ in range(2)
    ]
    for member in group:
        member.start()
    handle = ShmTensorHandle.publish(FEATURE)
    for _ in group:
        queue.put({"feature": handle})
    assert [results.get(timeout=120) for _ in group] == [FEATURE.tolist()] * 2
    for member in group:
        member.join()
    assert without_lock(plain_shm) == []
    assert capfd.readouterr().err == ""


# Killed at random


def test_two_hundred_rounds_of_random_deaths() -> None:
    """Of forks of a small process: a fork takes the longer, the more its parent has in memory."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            str(root / "tests" / "support" / "deaths.py"),
            "100",
        ],  # as many for each way to make files
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ways = [json.loads(line) for line in done.stdout.splitlines()]
    assert [sum(seen.values()) for seen in ways] == [100, 100]
    assert all({"consumed"} < set(seen) for seen in ways)
