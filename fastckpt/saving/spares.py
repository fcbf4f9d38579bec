"""Spares: files of removed steps in memory, whose pages are used again for the next ones."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeGuard

from fastckpt.engine.landing import Landing
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage

__all__ = ["Landing", "Spares"]

BYTES_MIN = 1 << 20  # of a file that is worth the trouble
_BLOCK = 512  # the unit of st_blocks, see stat(2)


class Spares:
    """The spares of one directory, as this process sees them. Several may use it.

    A file is in use as long as somebody has its lock. Its name is that of the file it was, so that
    each rank finds the one it has mapped, and its inode's number.

    Args:
        directory: where they lie, on the file system of the steps; made when it is first needed.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self._directory = storage, directory
        # Also held to look which are in use, which takes their locks for a moment.
        self._lock = threading.Lock()
        self._landings: dict[int, Landing] = {}  # under _lock, by inode; of steps, too

    def keep(self, directory: str, names: Sequence[str]) -> list[str]:
        """Takes the files that can be spares out of a step that no longer is one; returns the rest
        of the names.
        """
        rest = []
        for name in names:
            path = os.path.join(directory, name)
            try:
                status = self._storage.status(path, link=True)
                if name.startswith(".") or not _is_whole(status):
                    rest.append(name)
                    continue
                self._storage.make_directory(self._directory, parents=True)
                self._storage.rename(path, self._path(f"{name}.{status.st_ino}"))
            except OSError:  # it is gone, or is removed as ever
                rest.append(name)
        return rest

    def take(self, file: str, nbytes: int) -> Landing | None:
        """Returns a spare of a file's name that has as many pages, to be staged in; or None."""
        with self._lock:
            self._sweep()
            for path, status in self._found(file, nbytes):
                with suppress(OSError):  # somebody else was faster
                    landing = self._mapped(path, status)
                    if landing.take(path, nbytes):
                        return landing
        return None

    def has(self, file: str, nbytes: int) -> bool:
        """Returns whether there is a spare that take() would look at."""
        with self._lock:
            return bool(self._found(file, nbytes))

    @contextmanager
    def lent(self, file: str, nbytes: int, path: str) -> Iterator[int | None]:
        """Gives the path to a spare of a file's name that has as many pages, and yields its
        descriptor; or None, without spares of that name, instead of which a new file may be made.
        """
        with ExitStack() as lending:
            fd = None
            with self._lock:
                for found, _status in self._found(file, nbytes):
                    with suppress(OSError):  # somebody else was faster
                        landing = Landing(self._storage, found)
                        lending.callback(landing.close)
                        if landing.take(found, nbytes):
                            lending.callback(landing.release)
                            self._storage.rename(found, path)
                            fd = landing.fd
                            break
                if fd is None:
                    for found, _status in self._found(file):
                        self._remove(found)
            yield fd

    def prepare(self, file: str) -> None:
        """Maps the spares of a file's name, so that no save has to wait for that."""
        with self._lock:
            for path, status in self._found(file):
                with suppress(OSError):  # a save that needs it finds out
                    self._mapped(path, status)

    def sweep(self) -> None:
        """Lets go of the memory of files that were removed."""
        with self._lock:
            self._sweep()

    def trim(self, nbytes_max: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Removes spares that nobody uses, the oldest first, until they take so many bytes at most
        and it `is_over` no more.
        """
        with self._lock:
            found = self._found("")
            while found and (sum(_nbytes(its) for _, its in found) > nbytes_max or is_over()):
                self._remove(found.pop()[0])
            self._sweep()

    def close(self) -> None:
        """Lets go of all that is not in use."""
        with self._lock:
            self._sweep(all_of_them=True)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _found(self, file: str, nbytes: int | None = None) -> list[tuple[str, os.stat_result]]:
        """Returns spares of a file's name, or of any, that nobody uses, with as many pages if a
        size is given; the newest first.
        """
        found = []
        with suppress(OSError):  # what cannot be looked at is not used
            for name in self._storage.names(self._directory):
                if name.startswith(f"{file}.") or not file:
                    status = self._storage.status(self._path(name), link=True)
                    if not _is_whole(status) or self._is_used(status.st_ino, name):
                        continue
                    if nbytes is None or _pages(status.st_size) == _pages(nbytes):
                        found.append((self._path(name), status))
        return sorted(found, key=lambda pair: -pair[1].st_ctime_ns)

    def _is_used(self, inode: int, name: str) -> bool:
        landing = self._landings.get(inode)
        if landing is not None and landing.is_taken:
            return True
        with suppress(OSError):  # it is gone, or not ours to touch
            fd = self._storage.open(self._path(name), "lock")
            try:
                return not self._storage.lock(fd)
            finally:
                close_quietly(self._storage, fd)
        return True

    def _mapped(self, path: str, status: os.stat_result) -> Landing:
        landing = self._landings.get(status.st_ino)
        if landing is not None and _pages(landing.of_engine.nbytes) != _pages(status.st_size):
            landing.close()
            landing = None
        if landing is None:
            landing = Landing(self._storage, path)
            try:
                landing.map(status.st_size)
            except OSError:
                landing.close()
                raise
            self._landings[status.st_ino] = landing
        return landing

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # it is gone
            fd = self._storage.open(path, "lock")
            try:
                if self._storage.lock(fd):
                    self._storage.remove(path)
            finally:
                close_quietly(self._storage, fd)

    def _sweep(self, all_of_them: bool = False) -> None:
        for inode, landing in [*self._landings.items()]:
            with suppress(OSError):  # then a later call looks again
                if not landing.is_taken and (all_of_them or landing.is_removed):
                    del self._landings[inode]
                    landing.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES)


def _nbytes(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK


def _is_whole(status: os.stat_result | None) -> TypeGuard[os.stat_result]:
    """Returns whether a file is worth the trouble, has this one name, and lacks no page, which
    there may be no memory for when it is touched.
    """
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and status.st_size >= BYTES_MIN
        and _nbytes(status) == _pages(status.st_size) * PAGE_BYTES
    )
