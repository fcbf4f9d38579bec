"""Calls of the file system that are under way, by thread: a server may never answer one, and its
thread can do nothing about that. Responsible for telling others which call a thread is in and for
how long, and for what a thread may still do that was given up.

A thread that was given up goes on, if its call returns, as if its process had been killed in that
call: every further one raises GivenUp, so that nothing is removed, renamed or written any more that
others may have taken over by now. It only closes its files. What it closes under a temporary name
is what a dead process leaves, see left_behind().
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from fastckpt.errors import StorageError
from fastckpt.latch import Latch, TimedOut, asked, taken
from fastckpt.storage.bound import Bound
from fastckpt.storage.owners import divided

T = TypeVar("T")

_OPENING = ("open", "create")
_under_way: dict[int, Call] = {}  # the innermost, by thread


class _Thread(threading.local):
    """The record of a thread that was given up: the descriptors that it has closed, and the
    temporary names that these had.
    """

    is_given_up = False

    def __init__(self) -> None:
        self.closed, self.left = set[int](), list[str]()


_thread = _Thread()


class GivenUp(BaseException):
    """Ends the work of a thread that was given up: no handler of errors of the file system takes it
    for one.
    """


class Call:
    """A call, or some that follow each other, while its context is entered.

    Args:
        name: what is done.
        subject: the path or descriptor that it is done to.

    Attributes:
        ended: to be set by who gives it up, when its work has been ended: then only may it return.
    """

    def __init__(self, name: str, subject: object) -> None:
        self._name, self._subject = name, subject
        self._claims = [None]  # taken by its return, or by who gives it up
        self.ended = Latch()

    def __enter__(self) -> None:
        if _thread.is_given_up and self._name != "close":
            raise GivenUp
        self._ident, self._since = threading.get_ident(), time.monotonic()
        self._outer = _under_way.get(self._ident)
        _under_way[self._ident] = self

    def __exit__(self, *_: object) -> None:
        returns = taken(self._claims)
        if not returns:
            self.ended.wait()  # as the call under way: the outer one is not given up, too
        if self._outer is None:
            _under_way.pop(self._ident, None)
        else:
            self._outer._since = time.monotonic()  # it has got on
            _under_way[self._ident] = self._outer
        if not returns:
            _thread.is_given_up = True
            raise GivenUp(self.text())

    def seconds(self) -> float:
        """Returns for how long it has not got on."""
        return time.monotonic() - self._since

    def give_up(self) -> bool:
        """Gives its thread up; returns False if it has returned, or was given up before."""
        return taken(self._claims)

    def text(self) -> str:
        """Returns what is waited for, in words."""
        return f"{self._name} of {self._path()!r} has not returned for {self.seconds():.0f} s"

    def error(self) -> StorageError:
        """Returns the error of a save that ends because of this call."""
        detail = f"it has not returned for {self.seconds():.0f} s and is given up (timeout_s)"
        return StorageError(self._name, self._path(), errno.ETIMEDOUT, detail=detail)

    def _path(self) -> str:
        return _path_of(self._subject) if isinstance(self._subject, int) else str(self._subject)


# The paths of descriptors that the kernel knows by no name, or another one.
names: dict[int, str] = {}


def _path_of(fd: int) -> str:
    if (path := names.get(fd)) is not None:
        return path
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # which asks no server
    except OSError:
        return ""


class NotedLock:
    """A re-entrant lock whose waits are Calls: who has it may be in one that never returns. Not for
    threads on which signal handlers run.

    Args: as Call's.
    """

    def __init__(self, name: str, subject: str) -> None:
        self._lock, self._named = threading.RLock(), (name, subject)

    def __enter__(self) -> None:
        has_it = False
        try:
            with Call(*self._named):
                has_it = self._lock.acquire()
        except GivenUp:
            if has_it:
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def of_thread(ident: int) -> Call | None:
    """Returns the call that a thread is in."""
    return _under_way.get(ident)


def is_given_up() -> bool:
    """Returns whether this thread was given up."""
    return _thread.is_given_up


def left_behind() -> list[str]:
    """Returns the temporary files and directories that this thread has closed since it was given
    up, once: it has let go of all else that it had, and may call as others do from now on.
    """
    left, _thread.is_given_up = _thread.left, False
    _thread.closed, _thread.left = set(), []
    return left


def _closes(fd: int, path: str) -> bool:
    """Returns whether this thread, which was given up, has that file still open: the number of what
    it has closed may be another file's by now. Notes what it closes, and if that is a temporary.
    """
    outer = _under_way.get(threading.get_ident())
    if outer is not None and outer._name == "close":  # a double's, which calls the real one
        return True
    if fd in _thread.closed:
        return False
    _thread.closed.add(fd)
    if divided(os.path.basename(path))[1] is not None:
        _thread.left.append(path)
    return True


def _unmake(fd: int, path: str) -> None:
    """Removes a new file that nobody knows of yet, if it still has its name."""
    with suppress(OSError):  # what stays is left to whoever finds it
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)


def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of Storage whose calls are Calls. What opens a file closes it again if it
    was given up, and what makes one removes it.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        result, subject = None, args[0] if args else ""
        if name == "close":
            subject = _path_of(args[0])
            if _thread.is_given_up and not _closes(args[0], subject):
                return None
        try:
            with Call(name.replace("_", " "), subject):
                result = method(self, *args, **options)
        except GivenUp:
            if name == "close":
                _closes(args[0], subject)
            elif name == "make_directory" and divided(os.path.basename(subject))[1] is not None:
                _thread.left.append(subject)
            elif result is not None and name in _OPENING:
                if name == "create":
                    _unmake(result, args[0])
                self.close(result)
            raise
        return result

    return call


def looked_up(look: Callable[[], T], path: str, timeout_s: float) -> T:
    """Returns what a function returns that looks a path up, so that save() itself waits for no
    server that does not answer. Raises StorageError if it has not for so long.
    """
    outcome, bound, since = asked(look), Bound(timeout_s), time.monotonic()

    def awaited() -> str:
        return f"the look-up of {path!r} has not returned for {time.monotonic() - since:.0f} s"

    try:
        while True:
            try:
                return outcome.result(bound.look_s)
            except TimedOut:
                if outcome.done():
                    return outcome.result()
            if bound.is_over(time.monotonic() - since, awaited):
                told = f"{awaited()} (timeout_s), and nothing was begun: call again when it answers"
                raise StorageError("look up", path, errno.ETIMEDOUT, detail=told)
    finally:
        del outcome  # which keeps the error, which keeps this frame


def real_path(path: str, timeout_s: float) -> str:
    """Returns a path without symbolic links; raises as looked_up()."""
    return looked_up(lambda: os.path.realpath(path), path, timeout_s)


os.register_at_fork(after_in_child=names.clear)
os.register_at_fork(after_in_child=_under_way.clear)  # their threads are not there


def note(kind: type, seam: type) -> None:
    """Makes the public methods of `seam` that a class defines noted() ones."""
    for name, method in [*vars(kind).items()]:
        if isinstance(method, FunctionType) and not name.startswith("_") and hasattr(seam, name):
            setattr(kind, name, noted(name, method))
