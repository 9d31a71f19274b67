"""A directory of shared memory to oneself, and forked processes that can be killed at a given step.

The forks copy this process, with torch and what the tests have patched in it, so that they start at once. They leave
through ``os._exit`` or by a signal, so that no exit handler tidies up behind them.
"""

import contextlib
import errno
import os
import secrets
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mmgraph import ShmTensorHandle
from mmgraph import transport_files as files

FAILED = 70


@contextlib.contextmanager
def own_directory(patch: pytest.MonkeyPatch, nameless: bool = True) -> Iterator[Path]:
    """Let segments lie in a new directory; as on a system without nameless files, if wanted."""
    directory = Path("/dev/shm") / f"mmgraph-tests-{secrets.token_hex(8)}"
    directory.mkdir()
    patch.setattr(files, "DIRECTORY", str(directory))
    patch.setattr(files.own, "_owner", None)
    if not nameless:
        patch.setattr(files.OwnProcess, "open", _refusing(files.OwnProcess.open))
    try:
        yield directory
    finally:
        for left in list(Fork.running):  # of a test that failed
            os.kill(left.pid, signal.SIGKILL)
            left.wait()
        files.own._leave()
        shutil.rmtree(directory)


def _refusing(real: Callable[..., int]) -> Callable[..., int]:
    def open_file(self: files.OwnProcess, path: str, flags: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(self, path, flags)

    return open_file


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def segments(directory: Path) -> list[str]:
    return [name for name in names(directory) if files.is_segment(name)]


def open_in_here(directory: Path) -> list[str]:
    """What this process has open in a directory, removed or nameless files too."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(directory))]


class Fork:
    """A forked process that runs a function; what the function returns is its exit status.

    The function gets the fork as its argument, and may ``tell`` its parent bytes or ``stop`` for good.
    """

    running: ClassVar[list["Fork"]] = []

    def __init__(self, run: Callable[["Fork"], int | None]) -> None:
        self._from_child, self._to_parent = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(self._to_parent)
            Fork.running.append(self)
            return
        Fork.running.clear()
        status = FAILED
        try:
            os.close(self._from_child)
            status = run(self) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def tell(self, data: bytes) -> None:
        os.write(self._to_parent, len(data).to_bytes(4, "little") + data)

    def stop(self, *_: Any, **__: Any) -> None:
        """Say so and wait to be killed."""
        self.tell(b"stopped")
        while True:
            signal.pause()

    def hear(self) -> bytes | None:
        """Give what the child told next, or None where it is gone; for the parent."""
        size = os.read(self._from_child, 4)
        return os.read(self._from_child, int.from_bytes(size, "little")) if size else None

    def lives(self) -> bool:
        """Tell whether it runs; where it doesn't, there is nothing to wait for any more."""
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if found:
            self._ended(status)
        return not found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        """Give the exit status, or the signal as a negative number."""
        return self._ended(os.waitpid(self.pid, 0)[1])

    def _ended(self, status: int) -> int:
        Fork.running.remove(self)
        os.close(self._from_child)
        return os.waitstatus_to_exitcode(status)


def fork(run: Callable[[Fork], int | None]) -> int:
    """Run a function in a fork and give the exit status."""
    return Fork(run).wait()


# What processes of multiprocessing run: here, where a spawned one finds it.


def publish_for_a_parent(directory: str, feature: Any, pipe: Any) -> None:
    files.DIRECTORY = directory
    pipe.send(ShmTensorHandle.publish(feature))


def consume_in_a_group(directory: str, queue: Any, barrier: Any, results: Any) -> None:
    files.DIRECTORY = directory
    handle = queue.get()["feature"].attach()
    barrier.wait()
    results.put(handle.consume().tolist())
