"""Renames of which it is found out what became of them if the server's answer is lost.

A server may do what it was asked and still give an error: the reply was lost, or came too late.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2  # of renameat2(2)
# Its errors where the file system, or the kernel, does not know a flag.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# Errors of a server, or of the way to it: all others are checks, which come before the change.
_LOST = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


def rename(source: str, target: str, replaces: bool = True) -> None:
    """Renames a file or directory, as rename(2) does.

    Args:
        replaces: whether something may have the target's name. If not, that is an error; where the
            file system cannot promise it, what gets the name at this very moment is replaced.

    Raises:
        OSError: nothing has changed. ETIMEDOUT: nobody knows whether it has.
    """
    try:
        if replaces:
            os.rename(source, target)
        else:
            _rename_to_free_name(source, target)
    except OSError as error:
        _raise_unless(error, lambda: _identity(source) is None and _identity(target) is not None)


def exchange(one: str, other: str) -> None:
    """Exchanges two names in one step: renameat2(2), which not every file system has. Raises as
    rename().
    """
    moved = _identity(one)
    try:
        _renameat2(one, other, _RENAME_EXCHANGE)
    except OSError as error:
        _raise_unless(error, lambda: moved is not None and _identity(other) == moved)


def _rename_to_free_name(source: str, target: str) -> None:
    try:
        _renameat2(source, target, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        if _identity(target) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


def _renameat2(source: str, target: str, flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _raise_unless(error: OSError, is_done: Callable[[], bool]) -> None:
    """Raises the error of a change, unless it is seen that the change was made."""
    if error.errno not in _LOST:
        raise error
    try:
        done = is_done()
    except OSError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    if not done:
        raise error


def _identity(path: str) -> tuple[int, int] | None:
    """Returns the device and inode of what has this name, or None."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
