"""Invariant: a segment is whole or not there, lies where nobody else can read it, and is removed once nobody owns it.

Nobody: neither the producer lives nor a process that has it open. Each test runs with nameless files and, as in
sandboxes that have none, with files that are named when they are made.
"""

import errno
import fcntl
import os
import pickle
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shm import Fork, fork, names, open_in_here, own_directory, segments

from mmgraph import transport_files as files
from mmgraph.errors import SegmentDamagedError, SegmentGoneError, SharedMemoryFullError, TransportError
from mmgraph.transport_segments import (
    SegmentRef,
    open_segment,
    release_published,
    sweep,
    unlink_segment,
    write_segment,
)

DATA = bytes(range(200))


@pytest.fixture(params=[True, False], ids=["nameless", "named"])
def shm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_directory(monkeypatch, request.param) as directory:
        yield directory


def written(data: bytes = DATA) -> SegmentRef:
    return write_segment(len(data), [(0, memoryview(data))])


def contents(ref: SegmentRef) -> bytes:
    buffer = bytearray(ref.size)
    open_segment(ref).read_into(0, memoryview(buffer))
    return bytes(buffer)


def written_by_the_dead() -> SegmentRef:
    """A segment whose producer has ended without any exit handler."""
    producer = Fork(lambda child: child.tell(pickle.dumps(written())))
    ref = pickle.loads(producer.hear() or b"")
    assert producer.wait() == 0
    assert isinstance(ref, SegmentRef)
    return ref


# Bytes


def test_parts_lie_where_they_belong_with_zeros_between(shm: Path) -> None:
    ref = write_segment(100, [(64, memoryview(DATA[:36])), (0, memoryview(DATA[:10]))])
    assert contents(ref) == DATA[:10] + bytes(54) + DATA[:36]


def test_long_reads_and_writes_that_the_system_cuts(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:11]], offset))
    assert contents(written()) == DATA


def test_an_empty_segment(shm: Path) -> None:
    ref = written(b"")
    assert contents(ref) == b""
    assert segments(shm) == [ref.name]


@pytest.mark.parametrize("umask", [0, 0o777])
def test_only_the_user_may_read(shm: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        written()
    finally:
        os.umask(before)
    assert len(names(shm)) == 2
    for name in names(shm):
        assert stat.S_IMODE((shm / name).stat().st_mode) == 0o600


def test_names_are_of_one_form_and_random(shm: Path) -> None:
    found = [written().name for _ in range(50)]
    assert len(set(found)) == 50
    assert all(files.is_segment(name) and name.startswith("mmgraph-shm-") for name in found)
    assert len({name[-32:-24] for name in found}) == 50


@pytest.mark.parametrize(
    "name", ["", "../etc/passwd", "mmgraph-shm-0123456789abcdef", "mmgraph-shm-x/../../y", "sem.a"]
)
def test_other_files_are_neither_opened_nor_removed(shm: Path, name: str) -> None:
    with pytest.raises(TransportError, match="a segment's name is mmgraph-shm-"):
        open_segment(SegmentRef(name, 1, 1))
    with pytest.raises(TransportError, match="a segment's name is mmgraph-shm-"):
        unlink_segment(name)


# Failures


def test_no_room_is_an_error_before_a_byte_is_copied(shm: Path) -> None:
    found = os.statvfs(shm)

    def parts() -> Iterator[tuple[int, memoryview]]:
        raise AssertionError("copied into a segment that has no room")
        yield

    with pytest.raises(
        SharedMemoryFullError, match=r"bytes are needed, \d+ are free in .*: consume or release"
    ):
        write_segment((found.f_blocks + 1) * found.f_frsize, parts())
    assert segments(shm) == []
    assert contents(written()) == DATA


def test_a_limit_of_the_process_is_no_room_too(shm: Path) -> None:
    def run(_: Fork) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(SharedMemoryFullError):
            written()
        assert segments(shm) == []
        assert contents(written(DATA[:100])) == DATA[:100]

    assert fork(run) == 0


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(shm: Path, error: BaseException) -> None:
    def parts() -> Iterator[tuple[int, memoryview]]:
        yield 0, memoryview(DATA[:50])
        raise error

    with pytest.raises(type(error)):
        write_segment(200, parts())
    assert segments(shm) == []
    assert len(open_in_here(shm)) == 1  # the producer's locked file


def test_a_failure_at_the_end_leaves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def refusing(fd: int) -> os.stat_result:
        found = fstat(fd)
        if found.st_size == len(DATA):
            raise OSError(errno.EIO, "refused")
        return found

    monkeypatch.setattr(os, "fstat", refusing)
    with pytest.raises(TransportError, match="refused"):
        written()
    assert segments(shm) == []
    assert len(open_in_here(shm)) == 1


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_failure_when_it_gets_its_name_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    with own_directory(monkeypatch) as shm:
        files.own.become_owner()
        link = os.link

        def failing(*args: Any, **options: Any) -> None:
            if is_linked:
                link(*args, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "link", failing)
        with pytest.raises(KeyboardInterrupt):
            written()
        assert segments(shm) == []
        assert len(open_in_here(shm)) == 1


@pytest.mark.parametrize("size", [0, 199, 201])
def test_another_size_is_an_error_when_opened(shm: Path, size: int) -> None:
    ref = written()
    os.truncate(shm / ref.name, size)
    with pytest.raises(SegmentDamagedError, match=f"of 200 bytes and is file .* of {size} bytes now"):
        open_segment(ref)
    assert len(open_in_here(shm)) == 1


def test_another_file_of_the_same_name_is_an_error(shm: Path) -> None:
    ref = written()
    (shm / "planted").write_bytes(DATA)
    os.replace(shm / "planted", shm / ref.name)
    with pytest.raises(SegmentDamagedError, match="something else has changed it"):
        open_segment(ref)


def test_a_link_is_not_followed(shm: Path) -> None:
    ref = written()
    os.rename(shm / ref.name, shm / "elsewhere")
    os.symlink(shm / "elsewhere", shm / ref.name)
    with pytest.raises(TransportError, match="can't be opened"):
        open_segment(ref)


def test_a_segment_shortened_while_open_is_an_error_when_read(shm: Path) -> None:
    ref = written()
    segment = open_segment(ref)
    os.truncate(shm / ref.name, 120)
    buffer = memoryview(bytearray(200))
    with pytest.raises(SegmentDamagedError, match="ended at byte 120 of 200"):
        segment.read_into(0, buffer)
    segment.read_into(0, buffer[:120])
    assert bytes(buffer[:120]) == DATA[:120]


def test_a_segment_that_is_gone(shm: Path) -> None:
    ref = written()
    unlink_segment(ref.name)
    unlink_segment(ref.name)
    with pytest.raises(SegmentGoneError, match="attach in every consumer before any"):
        open_segment(ref)


def test_a_segment_removed_while_it_is_opened(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = written()
    flock = fcntl.flock

    def removing(fd: int, how: int) -> None:
        (shm / ref.name).unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removing)
    with pytest.raises(SegmentGoneError):
        open_segment(ref)
    assert len(open_in_here(shm)) == 1


def test_a_segment_that_a_sweep_has_locked_is_gone(shm: Path) -> None:
    ref = written()
    fd = files.try_lock(ref.name, fcntl.LOCK_EX)
    assert fd is not None
    with pytest.raises(SegmentGoneError):
        open_segment(ref)
    files.own.close(fd)
    assert contents(ref) == DATA


def test_other_refusals_keep_their_cause(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DIRECTORY", str(shm / "missing"))
    with pytest.raises(TransportError, match=r"can't be made: .*No such file") as caught:
        written()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(TransportError, match="can't be swept"):
        sweep()


# Ownership


def test_once_removed_and_closed_nothing_keeps_the_memory(shm: Path) -> None:
    ref = written()
    assert len(open_in_here(shm)) == 1  # the producer's locked file
    segment = open_segment(ref)
    unlink_segment(ref.name)
    assert any(ref.name in path for path in open_in_here(shm))
    segment.close()
    segment.close()
    assert len(open_in_here(shm)) == 1


def test_a_dropped_segment_is_closed(shm: Path) -> None:
    ref = written()
    segment = open_segment(ref)
    assert len(open_in_here(shm)) == 2
    del segment
    assert len(open_in_here(shm)) == 1


def test_a_segment_on_its_way_is_kept_while_its_producer_lives(shm: Path) -> None:
    ref = written()
    assert fork(lambda _: len(sweep(0))) == 0
    assert sweep(0) == []
    assert contents(ref) == DATA


def test_a_dead_producers_segment_is_kept_until_it_is_old(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = written_by_the_dead()
    assert sweep() == []
    now = files.time.time()
    monkeypatch.setattr(files.time, "time", lambda: now + 59)
    assert sweep() == []
    assert contents(ref) == DATA
    monkeypatch.setattr(files.time, "time", lambda: now + 61)
    assert sweep() == [ref.name]
    assert names(shm) == []


def test_a_dead_producers_segment_is_kept_while_somebody_has_it_open(shm: Path) -> None:
    ref = written_by_the_dead()

    def run(child: Fork) -> None:
        kept = open_segment(ref)
        child.stop(kept)

    consumer = Fork(run)
    assert consumer.hear() == b"stopped"
    assert sweep(0) == []
    assert segments(shm) == [ref.name]
    consumer.kill()
    assert sweep(0) == [ref.name]
    assert names(shm) == []


def test_who_consumes_from_the_dead_leaves_nothing(shm: Path) -> None:
    ref = written_by_the_dead()
    assert len(names(shm)) == 2
    assert contents(ref) == DATA
    unlink_segment(ref.name)
    assert names(shm) == []


def test_who_consumes_from_the_living_leaves_its_lock(shm: Path) -> None:
    first, second = written(), written()
    unlink_segment(first.name)
    assert names(shm) == sorted([files.owner_of(second.name), second.name])
    assert sweep(0) == []


def test_another_users_segments_are_left(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = written_by_the_dead()
    me = os.geteuid()
    monkeypatch.setattr(files.os, "geteuid", lambda: me + 1)
    assert sweep(0) == []
    monkeypatch.undo()
    assert ref.name in names(shm)


def test_other_files_are_left(shm: Path) -> None:
    written_by_the_dead()
    others = ["mmgraph-shm-", "mmgraph-shm-0123456789abcdef-1", "sem.x", "psm_1234"]
    for name in others:
        (shm / name).touch()
    (shm / f"{files.PREFIX}{'a' * 16}").mkdir()
    assert len(sweep(0)) == 1
    assert names(shm) == sorted([*others, f"{files.PREFIX}{'a' * 16}"])


def test_sweeps_at_the_same_time(shm: Path) -> None:
    refs = [written_by_the_dead() for _ in range(6)]
    forks = [Fork(lambda child: child.tell(str(len(sweep(0))).encode())) for _ in range(4)]
    assert sum(int(child.hear() or b"") for child in forks) == len(refs)
    assert [child.wait() for child in forks] == [0] * 4
    assert names(shm) == []


def test_a_producer_whose_lock_was_removed_makes_another(shm: Path) -> None:
    """As login managers do to the shared memory of users who log out."""
    first = written()
    (shm / files.owner_of(first.name)).unlink()
    second = written()
    assert files.owner_of(second.name) != files.owner_of(first.name)
    assert sweep(0) == [first.name]
    assert contents(second) == DATA
    assert len(open_in_here(shm)) == 1


def test_a_sweep_between_a_locks_making_and_its_locking(
    shm: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    flock = fcntl.flock
    interruptions = ["removed", "held"]

    def interrupted(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and interruptions and names(shm):
            if interruptions.pop() == "held":
                raise BlockingIOError
            for name in names(shm):
                (shm / name).unlink()
        flock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        ref = written()
    assert interruptions == (["removed", "held"] if "nameless" in request.node.name else [])
    assert sweep(0) == []
    assert contents(ref) == DATA
    assert len(open_in_here(shm)) == 1


def test_release_published_removes_what_nobody_has(shm: Path) -> None:
    foreign = written_by_the_dead()
    held, lost = written(), written()
    segment = open_segment(held)
    assert release_published(60) == []
    assert release_published() == [lost.name]
    assert segments(shm) == sorted([foreign.name, held.name])
    segment.close()
    assert release_published() == [held.name]
    assert fork(lambda _: len(release_published())) == 0
    assert segments(shm) == [foreign.name]


# Forks


def test_a_fork_owns_nothing_and_can_own(shm: Path) -> None:
    ref = written()
    segment = open_segment(ref)

    def run(_: Fork) -> None:
        assert not segment.is_open
        assert open_in_here(shm) == []
        assert files.own.owner_name is None
        assert files.owner_of(written().name) != files.owner_of(ref.name)
        assert contents(ref) == DATA

    assert fork(run) == 0
    assert segment.is_open
    assert contents(ref) == DATA


def test_a_fork_keeps_no_lock_of_a_dead_parent(shm: Path) -> None:
    def parent(child: Fork) -> None:
        ref = written()
        segment = open_segment(ref)
        orphan = os.fork()
        if not orphan:
            child.stop(segment)
        child.tell(f"{orphan}".encode())

    producer = Fork(parent)
    told = {producer.hear(), producer.hear()}
    orphan = int((told - {b"stopped"}).pop() or b"")
    assert producer.wait() == 0
    try:
        assert len(sweep(0)) == 1
        assert names(shm) == []
    finally:
        os.kill(orphan, 9)


def test_a_fork_beside_a_thread_that_publishes(shm: Path) -> None:
    begun, finish = threading.Event(), threading.Event()

    def parts() -> Iterator[tuple[int, memoryview]]:
        begun.set()
        finish.wait()
        yield 0, memoryview(DATA)

    refs: list[SegmentRef] = []
    thread = threading.Thread(target=lambda: refs.append(write_segment(200, parts())))
    thread.start()
    begun.wait()

    def run(_: Fork) -> None:
        assert open_in_here(shm) == []
        assert contents(written()) == DATA

    try:
        assert fork(run) == 0
    finally:
        finish.set()
        thread.join()
    assert contents(refs[0]) == DATA


def test_threads_become_one_owner(shm: Path) -> None:
    start = threading.Barrier(8)
    owners = []

    def run() -> None:
        start.wait()
        owners.append(files.owner_of(written().name))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(owners)) == 1
    assert len(open_in_here(shm)) == 1


def test_the_directory_is_the_systems_own() -> None:
    assert files.DIRECTORY == "/dev/shm"
