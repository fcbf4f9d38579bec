"""Protection against concurrent removals: lists a directory again, or locks a file."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from fastckpt.errors import CorruptCheckpoint, StorageError, Vanished
from fastckpt.storage import atomic
from fastckpt.storage.file_system import (
    NoRegularFile,
    Storage,
    persistently,
    reported,
)

T = TypeVar("T")

# The pauses between listings of a directory whose entries vanish, in seconds: short ones for other
# processes at work, long ones for machines that cache a listing (sshfs: 20 s).
LISTING_PAUSES_S = (0.0,) * 4 + (0.05, 0.1, 0.2, 0.4, 0.8, 1.5) + (3.0,) * 9 + (0.0,)
_LOCK_S, _LOCK_POLL_S = 60.0, 0.01
_REPLACEMENTS_MAX = 5  # of a file before it is locked


def listed_anew(look: Callable[[], T | None]) -> T | None:
    """Calls a function that lists a directory and reads the entries, and returns its result. While
    the function raises Vanished, repeats it after a pause.

    A process only removes an entry after it has created a newer one. After an entry has vanished,
    an empty listing is therefore outdated, and the call is repeated as well.

    Args:
        look: returns None if there is no entry.

    Raises:
        StorageError: entries still vanished after half a minute (EBUSY).
    """
    path: str | None = None
    for pause_s in LISTING_PAUSES_S:
        try:
            result = look()
            if result is not None or path is None:
                return result
        except Vanished as error:
            path = error.path
        time.sleep(pause_s)
    assert path is not None
    times = len(LISTING_PAUSES_S)
    detail = f"all listed entries were removed before they were read, {times} times in a row"
    raise StorageError("list", path, errno.EBUSY, detail=detail)


@contextmanager
def locked_shared(storage: Storage, path: str) -> Iterator[None]:
    """Holds a shared lock on a listed file while the body reads the file's checkpoint. A process
    that removes a checkpoint must lock the file first.

    Raises:
        Vanished: the file was removed.
        CorruptCheckpoint: it is not a regular file.
        StorageError: it cannot be opened, or another process holds its lock for more than _LOCK_S.
    """

    def opened() -> int:
        with reported("open", path):
            try:
                try:
                    return storage.open(path)
                except FileNotFoundError:  # it was just removed, or only another machine sees it
                    if not storage.look_again(path):
                        raise
                    return storage.open(path)
            except OSError as error:
                if _is_no_file(storage, path):
                    raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
                if isinstance(error, FileNotFoundError):
                    raise Vanished(path) from None
                raise

    fd = persistently(opened, path)

    def on_file(call: Callable[[int], bool]) -> bool:
        with reported("lock", path):
            return call(fd)

    def is_locked() -> bool:
        return on_file(lambda fd: storage.lock(fd, shared=True))

    def is_gone() -> bool:
        return on_file(lambda fd: is_removed(storage, fd, path))

    def is_there() -> bool:
        return on_file(lambda _fd: storage.status(path) is not None)

    until, replacements = time.monotonic() + _LOCK_S, 0
    try:
        while True:
            while not persistently(is_locked, path):
                if time.monotonic() >= until:
                    raise StorageError("lock", path, errno.EAGAIN)
                time.sleep(_LOCK_POLL_S)
            if not persistently(is_gone, path):
                break
            # A file that has replaced this one has a lock of its own.
            if replacements == _REPLACEMENTS_MAX or not persistently(is_there, path):
                raise Vanished(path)
            replacements += 1
            atomic.close_quietly(storage, fd)
            fd = -1
            fd = persistently(opened, path)
        yield
    finally:
        if fd >= 0:
            atomic.close_quietly(storage, fd)


def is_unlocked(storage: Storage, path: str) -> bool:
    """Returns whether this machine sees no lock on a file or directory (see atomic.claim())."""
    with suppress(OSError):  # it was removed in the meantime, or may not be touched
        fd = storage.open(path, "lock")
        try:
            return storage.lock(fd)
        finally:
            atomic.close_quietly(storage, fd)
    return False


def is_removed(storage: Storage, fd: int, path: str) -> bool:
    """Returns whether an open file no longer has the path by which it was opened."""
    try:
        if storage.fstat(fd).st_nlink == 0:
            return True
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS's error for a removed file
            raise
        return True
    # A client may keep it under another name (policies.LINGERING), which counts as a link.
    return storage.status(path) is None


def leads_nowhere(storage: Storage, path: str) -> bool:
    """Returns whether path is a symbolic link that is broken or forms a loop."""
    try:
        if storage.status(path) is not None:
            return False
        link = storage.status(path, link=True)
    except NoRegularFile:
        return True
    return link is not None and stat.S_ISLNK(link.st_mode)


def _is_no_file(storage: Storage, path: str) -> bool:
    """Returns whether a path leads to a socket or a device, to nothing or in a loop, so that no
    later attempt can open a file there.
    """
    try:
        if leads_nowhere(storage, path):
            return True
        status = storage.status(path)
    except OSError:  # it may be a file: the error of the attempt to open it counts
        return False
    return status is not None and not stat.S_ISREG(status.st_mode)
