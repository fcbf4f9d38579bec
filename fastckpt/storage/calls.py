"""The permit of a save to call the file system. If a server never answers a call, the thread in
that call hangs. Another thread detects the hang and revokes the permit.

If the call returns later, every storage call of that thread except close raises Revoked, as if the
process had been killed in the call. The thread then cannot remove, rename or write anything,
because another job may have taken over in the meantime. Files that it closes under a temporary name
are debris, like those of a dead process.
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
from fastckpt.latch import Latch, TimedOut, call_aside
from fastckpt.storage.bound import Bound
from fastckpt.storage.owners import divided

T = TypeVar("T")

_OPENING = ("open", "create")


class _Thread(threading.local):
    permit: Permit | None = None


_thread = _Thread()


class Revoked(BaseException):
    """Ends the work of a thread whose permit was revoked. Handlers of file system errors do not
    catch it.
    """


class Permit:
    """The permit of one save. The thread that enters it records its storage calls here. After the
    permit is revoked, each call except close raises Revoked.

    Attributes:
        is_revoked: whether the permit is revoked.
        ended: set by the thread that revoked the permit, after it has ended the save. Until then,
            calls of the revoked thread neither return nor raise.
        left: the temporary files and directories that the thread has closed since the revocation.
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
        """Revokes the permit if the current call has made no progress within the bound; without a
        bound, revokes it in any case. Returns the error of the save that ends because of that call.
        """
        calls = self.under_way[-1:]
        if bound is not None and not (calls and bound.is_over(calls[0].seconds(), calls[0].text)):
            return None
        with self.lock:
            if self.is_revoked or (bound is not None and self.under_way[-1:] != calls):
                return None  # or the call has returned
            self.is_revoked, self.hung = True, self.under_way[-1:]
        return self.hung[0].error(bound) if self.hung else None

    def check(self) -> None:
        """If the permit is revoked, waits until the save is ended and raises Revoked."""
        if self.is_revoked:
            self.ended.wait()
            raise Revoked

    def closes(self, fd: int, path: str) -> bool:
        """Returns whether the thread of this revoked permit still has that file open, and records
        that the thread closes it now. After a close, another file may have the same descriptor
        number.
        """
        if any(call.name == "close" for call in self.under_way):  # a test double's close
            return True
        if fd in self._closed:
            return False
        self._closed.add(fd)
        if divided(os.path.basename(path))[1] is not None:
            self.left.append(path)
        return True


class Call:
    """A storage call, or a sequence of calls, active while its context is entered.

    Args:
        name: the operation; also an attribute.
        subject: the path or descriptor of the operation.

    Attributes:
        since: the time of the last progress, by time.monotonic().
    """

    def __init__(self, name: str, subject: object) -> None:
        self.name, self._subject = name, subject
        self._permit = _thread.permit
        self.since = time.monotonic()

    def __enter__(self) -> None:
        if (permit := self._permit) is None:
            return
        with permit.lock:
            # The inner calls of a call that hangs are carried out, as a server would do.
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
                outer.since = time.monotonic()  # this is progress
        if self in permit.hung:
            permit.check()

    def seconds(self) -> float:
        """Returns the time without progress."""
        return time.monotonic() - self.since

    def text(self) -> str:
        """Returns a description of the call for which the thread waits."""
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
        return os.readlink(f"/proc/self/fd/{fd}")  # this sends no request to a server
    except OSError:
        return ""


class NotedLock:
    """A re-entrant lock whose waits are recorded as Calls, because its holder may be in a call that
    never returns. It must not be used on threads that run signal handlers. For the arguments see
    Call.
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
    """Removes a new file that no other process knows of, if it still has its name."""
    with suppress(OSError):  # a leftover is removed as debris
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)


def as_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of Storage to record its calls as Calls. If a revoked call opened a file, the
    file is closed again; if it created a file, the file is removed.
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
    """Calls a function that looks up a path, and returns its result. Raises StorageError if the
    function has not returned after timeout_s, so that save() does not wait for a server that does
    not respond.
    """
    outcome, bound, since = call_aside(look), Bound(timeout_s), time.monotonic()

    def describe() -> str:
        return f"the look-up of {path!r} has not returned for {time.monotonic() - since:.0f} s"

    try:
        while True:
            try:
                return outcome.result(bound.look_s)
            except TimedOut:
                if outcome.done():
                    return outcome.result()
            if bound.is_over(time.monotonic() - since, describe):
                detail = (
                    f"{describe()} (timeout_s); nothing was started: call again when the server "
                    "responds"
                )
                raise StorageError("look up", path, errno.ETIMEDOUT, detail=detail)
    finally:
        del outcome  # it refers to the error, and the error to this frame


def real_path(path: str, timeout_s: float) -> str:
    """Returns a path without symbolic links. For errors see looked_up()."""
    return looked_up(lambda: os.path.realpath(path), path, timeout_s)


def note(kind: type, seam: type) -> None:
    """Applies as_call() to each public method of `seam` that a class defines."""
    for name, method in [*vars(kind).items()]:
        if isinstance(method, FunctionType) and not name.startswith("_") and hasattr(seam, name):
            setattr(kind, name, as_call(name, method))
