"""Slot: a mapped file on a tmpfs in which an image is staged, each block at its final offset.

The file's pages are allocated in advance, since a new page costs several times as much as the copy
into it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress

from fastckpt import _engine
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage


class Slot:
    """A recycled file, which processes open by its name only in order to take it. Once mapped, it
    stays mapped in this process, even while it is in use under another name.

    Attributes:
        path: the file's path when it was last taken.
        fd: a descriptor, which the mapping also uses: see _is_alone().
        of_engine: the mapping, after map().

    Raises:
        OSError: it cannot be opened.
    """

    of_engine: _engine.Landing

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self.path = storage, path
        self._lock: int | None = None  # a descriptor, as long as the file is taken
        self.fd = storage.open(path, "write")

    def map(self, nbytes: int) -> None:
        """Maps the file, which has this size; raises OSError."""
        try:
            self.of_engine = _engine.Landing(self.fd, nbytes, BLOCK_BYTES)
        except (RuntimeError, MemoryError) as error:
            raise OSError(str(error)) from error

    @property
    def is_taken(self) -> bool:
        """Whether an image is staged in the file, or the staged bytes are still to be written."""
        return self._lock is not None

    @property
    def is_removed(self) -> bool:
        """Whether the file has lost its name, so that only this mapping keeps its memory."""
        return self._storage.fstat(self.fd).st_nlink == 0

    def take(self, path: str, nbytes: int) -> bool:
        """Takes the file by its name for an image of the same number of pages. Returns False
        without a change if the file is taken or open elsewhere, because another process may be
        reading it.
        """
        storage = self._storage
        if self.is_taken or not _is_alone(self.fd):
            return False
        lock = storage.open(path, "lock")
        with suppress(OSError):  # then it is somebody else's
            own, named = storage.fstat(self.fd), storage.status(path)
            is_there = named is not None and os.path.samestat(own, named) and own.st_nlink == 1
            if is_there and storage.lock(lock):
                storage.truncate(self.fd, nbytes)  # within its last page
                self.path, self._lock = path, lock
                return True
        close_quietly(storage, lock)
        return False

    def release(self) -> None:
        """Gives the file back, when its content is not needed any more. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            close_quietly(self._storage, lock)

    def close(self) -> None:
        """Closes and unmaps the file, which frees its memory if it was removed."""
        self.__dict__.pop("of_engine", None)
        close_quietly(self._storage, self.fd)


def _is_alone(fd: int) -> bool:
    """Returns whether the file of fd has no other open descriptor or mapping."""
    try:
        # Whoever opens it meanwhile waits a moment; this one is told by a signal that nobody needs.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
