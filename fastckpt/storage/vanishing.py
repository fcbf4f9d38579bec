"""Names that others may remove meanwhile are listed again here, or kept while they are read.

Responsible for how often a directory is listed, and for the lock that keeps a file. It must not
know what the directory holds.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastckpt.errors import CheckpointError, StorageError
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, persistently, reported

T = TypeVar("T")

# Between listings of a directory whose entries are gone when they are looked at, in seconds. At
# first somebody else is at work; then this machine remembers an old listing (sshfs: for 20 s).
LISTING_PAUSES_S = (0.0,) * 4 + (0.05, 0.1, 0.2, 0.4, 0.8, 1.5) + (3.0,) * 9 + (0.0,)
_LOCK_S, _LOCK_POLL_S = 60.0, 0.01


class Vanished(CheckpointError):
    """Something that was listed is gone: list again.

    Attributes:
        path: of that.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} is gone: it was removed")
        self.path = path


def listed_anew(look: Callable[[], T | None]) -> T | None:
    """Calls what lists a directory and looks at what it holds, again after a pause while something
    that was listed is gone when it is looked at (Vanished).

    Whoever removed it has made something newer before, which the listing lacked. So once something
    was gone, finding nothing at all is no answer either.

    Args:
        look: returns what it has found; None: there is nothing.

    Raises:
        StorageError: it is gone however often it is listed, for half a minute.
    """
    path: str | None = None
    for pause_s in LISTING_PAUSES_S:
        try:
            found = look()
            if found is not None or path is None:
                return found
        except Vanished as error:
            path = error.path
        time.sleep(pause_s)
    assert path is not None
    times = len(LISTING_PAUSES_S)
    detail = f"whatever was listed was gone when it was looked at, {times} times in a row"
    raise StorageError("list", path, errno.EBUSY, detail=detail)


@contextmanager
def kept(storage: Storage, path: str) -> Iterator[None]:
    """Keeps a file that was listed from being removed while the body reads what it stands for: by a
    shared lock, as far as others ask for one before they remove it.

    Raises:
        Vanished: it is gone. StorageError: it cannot be opened, or another process holds it, to
            remove it, for longer than that takes.
    """

    def opened() -> int:
        with reported("open", path):
            try:
                return storage.open_known(path)
            except FileNotFoundError:
                raise Vanished(path) from None

    fd = persistently(opened, path)

    def asked(call: Callable[[int], bool]) -> bool:
        with reported("lock", path):
            return call(fd)

    try:
        until = time.monotonic() + _LOCK_S
        while not persistently(lambda: asked(storage.lock_shared), path):
            if time.monotonic() >= until:
                raise StorageError("lock", path, errno.EAGAIN)
            time.sleep(_LOCK_POLL_S)
        if persistently(lambda: asked(lambda fd: storage.is_removed(fd, path)), path):
            raise Vanished(path)
        yield
    finally:
        atomic.close_quietly(storage, fd)
