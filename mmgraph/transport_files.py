"""Files in Linux's ``/dev/shm`` and the locks that say who is alive; what segments of shared memory are made of.

Promises: a file has mode 0600 and, where the system knows nameless files, no name before it is given one; a fork
owns nothing: the descriptors that it inherits are closed in it, so that it keeps neither memory nor locks of its
parent. Locks are advisory (flock): the system drops them when their process ends, however it ends. Process ids
play no part: they are reused, and mean nothing in another container that shares ``/dev/shm``. Imports no torch.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize

from mmgraph.errors import SharedMemoryFullError, TransportError

DIRECTORY = "/dev/shm"
PREFIX = "mmgraph-shm-"

# A producer's file, and after it what marks a segment of that producer.
_NAME = re.compile(rf"({PREFIX}[0-9a-f]{{16}})(-[0-9a-f]{{32}})?")
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
# What systems answer that have no nameless files, such as sandboxes with a kernel of their own.
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


class OwnProcess:
    """What this process holds: open descriptors, and the locked file that says that it lives."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards the state of every handle, briefly; may be taken again, since finalizers run anywhere."""
        self.epoch = object()
        """Another object in a fork."""
        self._descriptors: set[int] = set()
        self._sees_forks = False
        self._owner: tuple[str, int] | None = None

    @property
    def owner_name(self) -> str | None:
        """Name of the locked file, or None where nothing was published yet."""
        owner = self._owner
        return None if owner is None else owner[0]

    def become_owner(self) -> str:
        """Give the name of the locked file; made where there is none, or where something has removed it."""
        with self.lock:
            if self._owner is not None and not os.fstat(self._owner[1]).st_nlink:
                self._leave()
            while self._owner is None:
                self._owner = self._locked_file(PREFIX + secrets.token_hex(8))
                # Runs in multiprocessing's children too, where atexit doesn't before Python 3.13.
                Finalize(None, self._leave, exitpriority=-1)
            return self._owner[0]

    def open(self, path: str, flags: int) -> int:
        """Open a file in such a way that a fork closes it."""
        with self.lock:
            if not self._sees_forks:
                os.register_at_fork(
                    before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self._forked
                )
                self._sees_forks = True
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            self._descriptors.add(fd)
            return fd

    def close(self, fd: int) -> None:
        """Close a file that `open` gave."""
        with self.lock:
            self._descriptors.discard(fd)
            os.close(fd)

    def _locked_file(self, name: str) -> tuple[str, int] | None:
        """Make the file that says that this process lives; None where a sweep was faster."""
        fd, is_named = new_file(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_named:
                give_name(fd, name)  # only now, so that no sweep sees it unlocked
            elif not os.fstat(fd).st_nlink:
                raise BlockingIOError
        except BlockingIOError:
            self.close(fd)
            return None
        except BaseException:
            self.close(fd)
            raise
        return name, fd

    def _leave(self) -> None:
        """Remove the locked file; what is still on its way stays for whoever fetches it, or for a sweep."""
        with self.lock:
            owner, self._owner = self._owner, None
            if owner is not None:
                with contextlib.suppress(OSError):  # at exit nobody is there to be told, and a sweep takes it
                    unlink(owner[0])
                self.close(owner[1])

    def _forked(self) -> None:
        self.epoch = object()
        self._owner = None
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = set()
        self.lock.release()


own = OwnProcess()


def is_segment(name: str) -> bool:
    """Tell whether a name is a segment's."""
    found = _NAME.fullmatch(name)
    return found is not None and found[2] is not None


def owner_of(segment: str) -> str:
    """Give the name of the file that a segment's producer keeps locked."""
    return segment.rpartition("-")[0]


def is_dead(owner: str) -> bool:
    """Tell whether the producer whose locked file has this name is dead."""
    try:
        fd = try_lock(owner, fcntl.LOCK_SH)
    except FileNotFoundError:
        return True
    if fd is None:
        return False
    own.close(fd)
    return True


def new_file(name: str) -> tuple[int, bool]:
    """Make an empty file to write.

    Returns:
        The descriptor, and whether the file has its name already. It has none where the system can do without,
        so that a process killed while it writes leaves nothing.
    """
    try:
        fd, is_named = own.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR), False
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
        fd, is_named = own.open(path_of(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW), True
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
    except BaseException:
        own.close(fd)
        raise
    return fd, is_named


def give_name(fd: int, name: str) -> None:
    """Let a nameless file appear."""
    # Python calls the linkat() that follows the link in /proc only where a directory is given.
    directory = own.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        own.close(directory)


def try_lock(name: str, how: int) -> int | None:
    """Open a file and lock it; None where somebody's lock stands against it."""
    fd = own.open(path_of(name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BaseException as error:
        own.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def unlink(name: str) -> None:
    """Remove a file's name; nothing happens where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(name))


def path_of(name: str) -> str:
    """Give the path of a file by its name."""
    return f"{DIRECTORY}/{name}"


def names_older_than(age_s: float) -> list[str]:
    """List this user's segments and producers' files that are at least so many seconds old."""
    names = []
    now = time.time()
    with os.scandir(DIRECTORY) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                    if is_own and now - found.st_ctime >= age_s:
                        names.append(entry.name)
    return names


@contextlib.contextmanager
def reported(what: str, size: int = 0) -> Iterator[None]:
    """Turn the system's refusals into the library's errors.

    Args:
        what: What can't be done.
        size: Bytes that are needed for it.

    Raises:
        SharedMemoryFullError: There is no room.
        TransportError: Another refusal.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise TransportError(f"{what}: {error}") from error
        raise SharedMemoryFullError(
            f"{what}: {error.strerror}; {size} bytes are needed, {_free_bytes()} are free in {DIRECTORY}: consume or "
            "release what is published, call sweep() for what dead processes left, or make it larger (docker run "
            "--shm-size)"
        ) from error


def _free_bytes() -> int | str:
    try:
        found = os.statvfs(DIRECTORY)
    except OSError:
        return "an unknown number"
    return found.f_bavail * found.f_frsize
