"""Clients of NFS and CIFS behind the seam and flock(2): what they refuse, where local file systems
would not, and what they leave of a file that is removed while it is open.

Responsible for answering as flock(2), fs/nfs and fs/smb/client of Linux do. The bytes of files, and
who has which lock, are the real file system's.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from unittest import mock

from fastckpt.storage import policies
from fastckpt.storage.policies import POLICIES
from tests.kit.doubles import Operation, Recorder

T = TypeVar("T")
_real_flock = fcntl.flock


def _refusal(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class NetworkClient(Recorder):
    """What clients of NFS and CIFS have in common: a file that is removed while some process of the
    machine has it open keeps its directory from being empty, under another name, until that closes.
    """

    KIND = "remote"
    LINGERS = ".nfs{:024x}"

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "remove" and self._is_open(operation.path):
            inode = os.stat(operation.path).st_ino
            hidden = os.path.join(os.path.dirname(operation.path), self.LINGERS.format(inode))
            os.rename(operation.path, hidden)
            self.lingering.add(hidden)
            return None  # type: ignore[return-value]  # as remove()
        result = real()
        if operation.name == "close":
            for hidden in [*self.lingering]:
                if not self._is_open(hidden):
                    with suppress(FileNotFoundError):  # another thread closes one, too
                        os.unlink(hidden)
                    self.lingering.discard(hidden)
        return result

    def __init__(self) -> None:
        super().__init__()
        self.lingering: set[str] = set()
        self.is_full = False

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if self.is_full and kind == "write":
            raise _refusal(errno.ENOSPC)
        return super().attempt(kind, fd, memory, offset)

    @staticmethod
    def _is_open(path: str) -> bool:
        if not os.path.isfile(path):
            return False
        its = os.stat(path)
        for link in os.scandir("/proc/self/fd"):
            with suppress(OSError):  # another thread has just closed it
                if os.path.samestat(os.stat(link.path), its):
                    return True
        return False

    def flock(self, fd: int, how: int) -> None:
        """A client of NFS turns it into a lock of bytes, which needs a file open for it."""
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        kind = how & ~fcntl.LOCK_NB
        if not os.path.isdir(f"/proc/self/fd/{fd}") and (
            (kind == fcntl.LOCK_EX and mode == os.O_RDONLY)
            or (kind == fcntl.LOCK_SH and mode == os.O_WRONLY)
        ):
            raise _refusal(errno.EBADF)
        _real_flock(fd, how)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """The kernel is such a client, for this process."""
        kind = (self.KIND, POLICIES[self.KIND])
        with (
            mock.patch.object(policies, "policy_of", lambda _fd: kind),
            mock.patch.object(fcntl, "flock", self.flock),
        ):
            yield


class Cifs(NetworkClient):
    """Locks are the server's and mandatory: through any other descriptor what is locked cannot be
    read or written, whoever tries.
    """

    KIND = "cifs"
    LINGERS = ".__smb{:08X}"

    def __init__(self) -> None:
        super().__init__()
        self._held: set[int] = set()

    def flock(self, fd: int, how: int) -> None:
        kind = how & ~fcntl.LOCK_NB
        try:
            _real_flock(fd, how)
        except BlockingIOError:
            raise _refusal(errno.EACCES) from None
        (self._held.discard if kind == fcntl.LOCK_UN else self._held.add)(fd)

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if fd not in self._held:
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            try:
                _real_flock(
                    other, fcntl.LOCK_NB | (fcntl.LOCK_SH if kind == "read" else fcntl.LOCK_EX)
                )
            except BlockingIOError:
                raise _refusal(errno.EACCES) from None
            finally:
                os.close(other)
        return super().attempt(kind, fd, memory, offset)


def lingering(directory: Path) -> list[str]:
    """What is left of files that were removed."""
    return [name for name in os.listdir(directory) if policies.LINGERING.fullmatch(name)]


class RemembersAbsence(NetworkClient):
    """A client that has looked for a path before another machine made it, and goes on saying that
    it is not there until the directory was opened so many times.

    Args:
        path: the one.
        openings: how often.
    """

    def __init__(self, path: Path, openings: int) -> None:
        super().__init__()
        self._path, self._left = str(path), openings

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "look_again" and os.path.dirname(self._path) in (
            operation.path,
            os.path.dirname(operation.path),
        ):
            self._left -= 1
        if operation.path == self._path and self._left > 0:
            if operation.name == "status":
                return None  # type: ignore[return-value]  # as status()
            if operation.name in ("open", "open regular"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return super().perform(number, operation, real)


class Stale(NetworkClient):
    """What is read was replaced by another machine, so many times: the server does not know it any
    more, says so when it is opened by its descriptor, or read, and says so again at the close.
    """

    def __init__(self, name: str, times: int) -> None:
        super().__init__()
        self._name, self.left = name, times
        self._closes = 0

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "close" and self._closes:
            self._closes -= 1
            real()
            raise _refusal(errno.ESTALE)
        if self.left and operation.name == self._name:
            self.left -= 1
            self._closes += 1
            raise _refusal(errno.ESTALE)
        return super().perform(number, operation, real)
