"""The permit of a save, to call the file system. A server may never answer a call, and the thread
that is in it can do nothing about that: another one sees it, and revokes the permit.

From then on the thread goes on, if its call returns, as if its process had been killed in that
call: nothing is removed, renamed or written any more that others may have taken over by now. It
only closes its files. What it closes under a temporary name is what a dead process leaves.
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
from fastckpt.latch import Latch, TimedOut, asked
from fastckpt.storage.bound import Bound
from fastckpt.storage.owners import divided

T = TypeVar("T")

_OPENING = ("open", "create")


class _Thread(threading.local):
    permit: Permit | None = None


_thread = _Thread()


class Revoked(BaseException):
    """Ends the work of a thread whose permit was revoked: no handler of errors of the file system
    takes it for one.
    """


class Permit:
    """The permit of one save, for the thread that has entered it, which notes its calls here. Once
    it is revoked, each of them but close raises Revoked.

    Attributes:
        is_revoked: whether it is.
        ended: to be set by who has revoked it, when the save is ended: only then does a call return
            to the thread, or raise.
        left: the temporary files and directories that the thread has closed since.
    """

    def __init__(self) -> None:
        self.ended, self.left = Latch(), list[str]()
        self.lock = threading.Lock()  # guards the following
        self.under_way: list[Call] = []  # the innermost is the last
        self.is_revoked, self.hung = False, list[Call]()
        self._closed = set[int]()

    def __enter__(self) -> None:
        _thread.permit = self

    def __exit__(self, *_: object) -> None:
        _thread.permit = None

    def revoke(self, bound: Bound | None = None) -> StorageError | None:
        """Revokes it if the call under way has not got on within the bound; without one, in any
        case. Returns the error of a save that ends because of that call.
        """
        calls = self.under_way[-1:]
        if bound is not None and not (calls and bound.is_over(calls[0].seconds(), calls[0].text)):
            return None
        with self.lock:
            if self.is_revoked or (bound is not None and self.under_way[-1:] != calls):
                return None  # or it has returned
            self.is_revoked, self.hung = True, self.under_way[-1:]
        return self.hung[0].error(bound) if self.hung else None

    def check(self) -> None:
        """Raises Revoked if it is revoked, once the save is ended."""
        if self.is_revoked:
            self.ended.wait()
            raise Revoked

    def closes(self, fd: int, path: str) -> bool:
        """Returns whether the thread of this permit, which is revoked, has that file still open:
        the number of what it has closed may be another file's by now. Notes what it closes.
        """
        if any(call.name == "close" for call in self.under_way):  # a double's calls the real one
            return True
        if fd in self._closed:
            return False
        self._closed.add(fd)
        if divided(os.path.basename(path))[1] is not None:
            self.left.append(path)
        return True


class Call:
    """A call, or some that follow each other, while its context is entered.

    Args:
        name: what is done; also an attribute.
        subject: the path or descriptor that it is done to.

    Attributes:
        since: when it last got on, by time.monotonic().
    """

    def __init__(self, name: str, subject: object) -> None:
        self.name, self._subject = name, subject
        self._permit = _thread.permit
        self.since = time.monotonic()

    def __enter__(self) -> None:
        if (permit := self._permit) is None:
            return
        with permit.lock:
            # What a call that hangs consists of is done, as by a server.
            if not permit.is_revoked or permit.under_way or self.name == "close":
                permit.under_way.append(self)
                return
        permit.check()

    def __exit__(self, *_: object) -> None:
        if (permit := self._permit) is None:
            return
        with permit.lock:
            permit.under_way.pop()
            for outer in permit.under_way[-1:]:
                outer.since = time.monotonic()  # it has got on
        if self in permit.hung:
            permit.check()

    def seconds(self) -> float:
        """Returns for how long it has not got on."""
        return time.monotonic() - self.since

    def text(self) -> str:
        """Returns what is waited for, in words."""
        return f"{self.name} of {self._path()!r} has not returned for {self.seconds():.0f} s"

    def error(self, bound: Bound | None) -> StorageError:
        """Returns the error of a save that ends because of this call."""
        why = "" if bound is None else " (timeout_s)"
        detail = f"the call has not returned for {self.seconds():.0f} s and is abandoned{why}"
        return StorageError(self.name, self._path(), errno.ETIMEDOUT, detail=detail)

    def _path(self) -> str:
        return _path_of(self._subject) if isinstance(self._subject, int) else str(self._subject)


def _path_of(fd: int) -> str:
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
        except Revoked:
            if has_it:
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def is_revoked() -> bool:
    """Returns whether this thread's permit is revoked."""
    return _thread.permit is not None and _thread.permit.is_revoked


def _unmake(fd: int, path: str) -> None:
    """Removes a new file that nobody knows of yet, if it still has its name."""
    with suppress(OSError):  # what stays is left to whoever finds it
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)


def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of Storage whose calls are Calls. What opened a file as it hung closes it
    again, and what made one removes it.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        permit = _thread.permit
        if permit is None:
            return method(self, *args, **options)
        result, subject = None, args[0] if args else ""
        if name == "close":
            subject = _path_of(args[0])
            if permit.is_revoked and not permit.closes(args[0], subject):
                return None
        try:
            with Call(name.replace("_", " "), subject):
                result = method(self, *args, **options)
        except Revoked:
            if name == "close":
                permit.closes(args[0], subject)
            elif name == "make_directory" and divided(os.path.basename(subject))[1] is not None:
                permit.left.append(subject)
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
                detail = (
                    f"{awaited()} (timeout_s); nothing was started: call again when the server "
                    "responds"
                )
                raise StorageError("look up", path, errno.ETIMEDOUT, detail=detail)
    finally:
        del outcome  # which keeps the error, which keeps this frame


def real_path(path: str, timeout_s: float) -> str:
    """Returns a path without symbolic links; raises as looked_up()."""
    return looked_up(lambda: os.path.realpath(path), path, timeout_s)


def note(kind: type, seam: type) -> None:
    """Makes the public methods of `seam` that a class defines noted() ones."""
    for name, method in [*vars(kind).items()]:
        if isinstance(method, FunctionType) and not name.startswith("_") and hasattr(seam, name):
            setattr(kind, name, noted(name, method))
