"""Segments of shared memory: made, opened, removed, swept. No resource tracker takes part.

Promises: a segment appears whole or not at all, under a name that can't be guessed; a full ``/dev/shm`` is an error
at once, and a shortened segment an error when it is opened or read, never a SIGBUS, since nothing is mapped.
Imports no torch.

Ownership:

- A process that publishes keeps one empty file locked as long as it lives, and its segments carry that file's name
  in theirs. So a segment on its way, which nobody has open, belongs to its producer.
- Who has a segment open keeps the segment itself locked.
- What neither holds is nobody's. `sweep` removes it once it is old enough; before that it may still be fetched,
  since a producer may exit while its segment is on the way.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmgraph import transport_files as files
from mmgraph.errors import SegmentDamagedError, SegmentGoneError, TransportError
from mmgraph.transport_files import own, reported


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """What another process needs to find a segment.

    Attributes:
        name: File name below ``/dev/shm``.
        inode: Number of the file, by which another file of the same name is told apart.
        size: Bytes.
    """

    name: str
    inode: int
    size: int


class OpenSegment:
    """A segment that this process has open, and locked so that no sweep takes it; closed when it is dropped."""

    __slots__ = ("_epoch", "_fd", "_process", "_ref")

    def __init__(self, ref: SegmentRef, fd: int) -> None:
        self._ref = ref
        self._fd = fd
        self._process = own  # held here, since module globals may be gone when the interpreter ends
        self._epoch = own.epoch

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be read; false in a fork, which must open it anew."""
        return self._fd >= 0 and self._epoch is self._process.epoch

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset`` on.

        Raises:
            SegmentDamagedError: The segment ends before.
            TransportError: The system refuses.
        """
        done = 0
        while done < len(buffer):
            with reported(f"shared-memory segment {self._ref.name} can't be read"):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise SegmentDamagedError(
                    f"shared-memory segment {self._ref.name} ended at byte {offset + done} of {self._ref.size} while "
                    "it was read; something else has shortened it: publish the feature again"
                )
            done += count

    def close(self) -> None:
        """Close and unlock; may be called any number of times."""
        with self._process.lock:
            fd, self._fd = self._fd, -1
            if fd >= 0 and self._epoch is self._process.epoch:
                self._process.close(fd)


def write_segment(size: int, parts: Iterable[tuple[int, memoryview]]) -> SegmentRef:
    """Make a segment.

    Args:
        size: Bytes.
        parts: Offsets and the bytes to lie there; what no part covers is zero. Drawn one at a time.

    Raises:
        SharedMemoryFullError: There is no room for it.
        TransportError: The system refuses otherwise.
    """
    cant_fill = f"a shared-memory segment of {size} bytes can't be filled"
    with reported("a shared-memory segment can't be made"):
        name = f"{own.become_owner()}-{secrets.token_hex(16)}"
        fd, is_named = files.new_file(name)
    try:
        with reported(cant_fill, size):
            if size:
                os.posix_fallocate(fd, 0, size)
        for offset, data in parts:
            with reported(cant_fill, size):
                _write(fd, offset, data)
        with reported("a shared-memory segment can't be given its name"):
            inode = os.fstat(fd).st_ino
            if not is_named:
                files.give_name(fd, name)
    except BaseException:
        files.unlink(name)
        raise
    finally:
        own.close(fd)
    return SegmentRef(name, inode, size)


def open_segment(ref: SegmentRef) -> OpenSegment:
    """Open a segment and lock it against sweeps.

    Raises:
        SegmentGoneError: It isn't there any more, or is not seen from here.
        SegmentDamagedError: It isn't as it was published.
        TransportError: The system refuses otherwise.
    """
    with reported(f"shared-memory segment {ref.name} can't be opened"):
        try:
            fd = files.try_lock(_checked(ref.name), fcntl.LOCK_SH)
        except FileNotFoundError:
            raise _gone(ref) from None
        if fd is None:
            raise _gone(ref)  # only a sweep locks it for itself, just before it removes it
        segment = OpenSegment(ref, fd)
        found = os.fstat(fd)
    if not found.st_nlink:
        segment.close()
        raise _gone(ref)
    if (found.st_ino, found.st_size) != (ref.inode, ref.size):
        segment.close()
        raise SegmentDamagedError(
            f"shared-memory segment {ref.name} was published as file {ref.inode} of {ref.size} bytes and is file "
            f"{found.st_ino} of {found.st_size} bytes now; something else has changed it: publish the feature again"
        )
    return segment


def unlink_segment(name: str) -> None:
    """Remove a segment's name; its memory is freed once nobody has it open. Nothing happens where it is gone.

    Removes its producer's locked file too if the producer is dead, so that those that outlive it leave nothing.

    Raises:
        TransportError: The system refuses.
    """
    owner = files.owner_of(_checked(name))
    with reported(f"shared-memory segment {name} can't be removed"):
        files.unlink(name)
    with contextlib.suppress(OSError):  # only tidiness: the segment is removed, and a sweep takes what stays
        if files.is_dead(owner):
            files.unlink(owner)


def sweep(min_age_s: float = 60.0) -> list[str]:
    """Remove segments that no living process owns; call it when a server starts.

    A segment is kept while its producer lives, while a living process has it attached, while it is younger than
    ``min_age_s``, or if it is another user's. What dead producers had locked goes too.

    Args:
        min_age_s: Seconds since it was published; longer than a handle is ever on its way to a consumer after its
            producer has exited.

    Returns:
        Names of the segments that were removed.

    Raises:
        TransportError: The system refuses to list or to remove.
    """
    removed = []
    with reported(f"{files.DIRECTORY} can't be swept"):
        names = files.names_older_than(min_age_s)
        for name in names:
            if files.is_segment(name) and files.is_dead(files.owner_of(name)) and _reclaim(name):
                removed.append(name)
        for name in names:
            if not files.is_segment(name) and files.is_dead(name):
                files.unlink(name)
    return removed


def release_published(min_age_s: float = 0.0) -> list[str]:
    """Remove what this process has published and nobody has attached; for a producer whose consumers have died.

    Args:
        min_age_s: Seconds since it was published; younger segments are kept.

    Returns:
        Names of the segments that were removed.

    Raises:
        TransportError: The system refuses to list or to remove.
    """
    owner = own.owner_name
    if owner is None:
        return []
    with reported(f"what was published in {files.DIRECTORY} can't be released"):
        names = files.names_older_than(min_age_s)
        mine = [name for name in names if files.is_segment(name) and files.owner_of(name) == owner]
        return [name for name in mine if _reclaim(name)]


def _write(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _reclaim(name: str) -> bool:
    """Remove a segment that nobody has open; tell whether that was so."""
    try:
        fd = files.try_lock(name, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    if fd is None:
        return False
    try:
        files.unlink(name)
    finally:
        own.close(fd)
    return True


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not files.is_segment(name):
        raise TransportError(
            f"a segment's name is {files.PREFIX}<16 hex digits>-<32 hex digits>, got {name!r}; handles are made by "
            "publish() and by nothing else"
        )
    return name


def _gone(ref: SegmentRef) -> SegmentGoneError:
    return SegmentGoneError(
        f"shared-memory segment {ref.name} is gone: it was consumed, released or swept before this process attached, "
        f"or this process sees another {files.DIRECTORY} than the producer; attach in every consumer before any of "
        "them consumes (with a barrier between), and start containers with one IPC namespace"
    )
