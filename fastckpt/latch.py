"""Waits, futures and starts of threads that a signal handler may interrupt at any point.

Python runs handlers on the main thread between bytecodes. If a handler raises, the lock of a
threading.Condition, Event, Semaphore or Future can stay locked for ever; Thread.start() has the
same problem. So in this module a caller's thread changes shared state only by single operations of
lists and deques, which are atomic, and each wait uses its own lock. C locks in `with` statements
are safe (up to Python 3.13 no handler runs between the acquisition and the body); they guard caches
only. If a handler raises inside a log call, a lock of `logging` can stay locked, and a save that
logs then hangs. Since Ctrl-C may be pressed again at any time, messages about it are logged on
another thread. Log calls of the user's program remain unprotected.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar, cast

from fastckpt.errors import free_locals

log = logging.getLogger("fastckpt")

K = TypeVar("K")
T = TypeVar("T")

SERVER_S = 10.0  # the longest wait in within() for a server that may not answer
# Waits check the flag this often: a set() interrupted by a handler may not wake every sleeper.
_LOOK_S = 1.0

if sys.version_info >= (3, 11):
    TimedOut = TimeoutError
else:

    class TimedOut(TimeoutError, futures.TimeoutError):
        """The builtin TimeoutError, and that of concurrent.futures, which differs before 3.11."""


def items_of(shared: dict[K, T]) -> list[tuple[K, T]]:
    """Returns the items of a dict that other threads may be changing.

    dict.copy() is not atomic: it may trigger garbage collection, and another thread may run then.
    If the number of keys changes during the copy, it raises RuntimeError.
    """
    while True:
        try:
            return [*shared.copy().items()]
        except RuntimeError:
            continue


def taken(claims: list[None]) -> bool:
    """Removes one of the claims, if any is left; returns whether it removed one."""
    try:
        claims.pop()
    except IndexError:
        return False
    return True


class Latch:
    """An event that happens once, for any number of threads to wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._sleepers: list[_thread.LockType] = []  # one lock for each wait, released to end it

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Records that the event has happened, and wakes all waiting threads. Idempotent."""
        self._is_set = True  # first, since a wait that begins from now on only checks this
        while self._sleepers:
            try:
                sleeper = self._sleepers.pop()
            except IndexError:  # the wait has taken its lock back, or another set() has it
                break
            sleeper.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for the event; returns whether it has happened."""
        if self._is_set:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        sleeper = _thread.allocate_lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            while not self._is_set:  # read after the append: a set() from now on finds the lock
                remaining_s = _LOOK_S if until is None else until - time.monotonic()
                if remaining_s <= 0:
                    break
                sleeper.acquire(timeout=min(remaining_s, _LOOK_S))
        finally:
            try:
                self._sleepers.remove(sleeper)
            except ValueError:
                pass  # set() has taken it
        return self._is_set


class _Calling(threading.local):
    """Whether the current thread runs a callback."""

    is_under_way = False


_calling = _Calling()


def is_called_back() -> bool:
    """Returns whether the caller runs in a callback of a SignalSafeFuture. The result of a callback
    is ignored, and its exception is only logged.
    """
    return _calling.is_under_way


class SignalSafeFuture(futures.Future[T], Generic[T]):
    """A concurrent.futures.Future that is in the state "running" from the beginning. It raises the
    builtin TimeoutError.

    The methods of this class take no lock. concurrent.futures.wait() and as_completed() take the
    lock of Future, and a signal handler may leave it locked; so the thread that ends this Future
    never waits for that lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._callbacks: deque[Callable[[], object]] = deque()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = Latch()

    def done(self) -> bool:
        return self._ended.is_set()

    def running(self) -> bool:
        return not self.done()

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def _subject(self) -> str:
        """Returns a name for messages."""
        return repr(self)

    def _wait_ended(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for the end; returns whether this has ended."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end. Returns the result; raises the exception, or TimeoutError."""
        self._wait(timeout)
        try:
            if self._error is not None:
                raise self._error
            return cast("T", self._value)
        finally:
            del self  # it refers to the exception, and the exception to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end. Returns the exception or None; raises TimeoutError."""
        self._wait(timeout)
        return self._error

    def _wait(self, timeout: float | None) -> None:
        if not self._wait_ended(timeout):
            raise TimedOut(f"{self._subject()} did not end within {timeout:g} s")

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls fn(self) at the end, on the thread that ends this; at once if this has ended."""
        call = partial(fn, self)
        self._callbacks.append(call)
        if self.done():
            try:
                self._callbacks.remove(call)
            except ValueError:
                return  # the other thread calls it, or has done so
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        before, _calling.is_under_way = _calling.is_under_way, True
        try:
            call()
        except Exception:
            log.exception("a callback of %r failed", self)
        except SystemExit:
            if threading.current_thread() is threading.main_thread():
                raise
            # Python would end the thread without a message, and skip the other callbacks.
            log.exception(
                "a callback of %r called sys.exit(), which does not end the program on a "
                "background thread: exit in the training loop",
                self,
            )
        finally:
            _calling.is_under_way = before

    def set_result(self, result: T) -> None:
        self._end(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        self._end(None, exception)

    def _end(self, result: T | None, exception: BaseException | None) -> None:
        if self._ended.is_set():
            raise futures.InvalidStateError(f"{self!r} has already ended")
        if exception is not None:
            free_locals(exception)
        self._value, self._error = result, exception
        self._ended.set()
        self._tell_waiters()
        while self._callbacks:
            try:
                call = self._callbacks.popleft()
            except IndexError:  # add_done_callback() calls the last one
                break
            self._call(call)

    def _tell_waiters(self) -> None:
        """Ends the base class's Future, for concurrent.futures. Uses another thread if a lock is
        needed that a signal handler may have left locked: the Future's or a waiting thread's.
        """
        is_free = self._condition.acquire(False)
        try:
            if is_free and not self._waiters:
                self._mirror()
            else:
                _thread.start_new_thread(self._mirror, ())
        except RuntimeError:  # no thread can be started
            self._mirror()
        finally:
            if is_free:
                self._condition.release()

    def _mirror(self) -> None:
        if self._error is None:
            super().set_result(cast("T", self._value))
        else:
            super().set_exception(self._error)


def start_thread(target: Callable[[], object], name: str, *, daemon: bool = False) -> bool:
    """Starts a thread without waiting for it; returns False if none can be started. Python joins it
    at exit unless it is a daemon.
    """
    claims = [target]

    def run() -> None:
        try:
            claimed = claims.pop()
        except IndexError:  # both threads of _start() called run(): the other one runs the target
            return
        try:
            claimed()
        finally:
            del claimed  # a traceback may keep this frame

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    try:
        _thread.start_new_thread(_start, (thread, run))
    except RuntimeError:
        return False
    return True


def _start(thread: threading.Thread, run: Callable[[], None]) -> None:
    # Thread.start() waits on an Event. If a signal handler ended that wait, the new thread could
    # find the Event locked; so start() is called on a thread on which no handler runs.
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # the thread may have started all the same: see run()
        run()


def log_aside(level: int, text: str, *arguments: object) -> None:
    """Logs on another thread, where no signal handler runs, and waits for that call."""
    within(inf, partial(log.log, level, text, *arguments))


def within(seconds: float, call: Callable[[], T]) -> T:
    """Calls a function by call_aside(), and returns its result or raises its error. Raises TimedOut
    if the function has not ended after `seconds`.
    """
    return call_aside(call).result(seconds)


def call_aside(call: Callable[[], T]) -> SignalSafeFuture[T]:
    """Calls a function on a separate daemon thread. Since a server may never answer, the
    interpreter does not wait for that thread at exit.
    """
    outcome = SignalSafeFuture[T]()
    claims = [outcome]

    def run() -> None:
        future, value, error = claims.pop(), None, None
        try:
            value = call()
        except BaseException as raised:
            error = raised
        try:  # outside the other try: on the caller's thread, a signal handler may raise here
            if error is None:
                future.set_result(cast("T", value))
            else:
                future.set_exception(error)
        finally:
            del future, error  # they refer to each other and to this frame

    if not start_thread(run, "fastckpt-call", daemon=True):
        run()
    return outcome
