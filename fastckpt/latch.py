"""A caller's thread waits with these, and begins threads by them: none can stay locked.

Responsible for waits, futures and beginnings of threads that a signal handler may break off. Python
runs handlers on the main thread between bytecodes, and what one raises there can leave the lock of
a threading.Condition, Event or Semaphore, or of a Future, taken for ever, also in Thread.start().
So here a caller's thread changes shared state by single operations of lists and deques only, each
of which happens as a whole, and waits on a lock that nobody else waits on. Locks of C in `with`
statements are safe (up to Python 3.13 no handler runs between taking one and the body); they guard
caches, never the course of a save. Those of `logging` are not ours: a handler that raises inside a
log call can leave one taken, and a save that logs then waits. It must not know what is waited for.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, Generic, TypeVar

log = logging.getLogger("fastckpt")

T = TypeVar("T")

_FINISHED = "FINISHED"  # of concurrent.futures
# A set() that was broken off itself, on a thread that found no other to do its work, wakes nobody.
_LOOK_S = 1.0

if sys.version_info >= (3, 11):
    TimedOut = TimeoutError
else:

    class TimedOut(TimeoutError, futures.TimeoutError):
        """The builtin TimeoutError, which concurrent.futures' was not before Python 3.11."""


class Latch:
    """An event that happens once, for any number of threads to wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._sleepers: list[_thread.LockType] = []  # one lock for each wait, released to end it

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened. Idempotent."""
        self._is_set = True  # first: who begins to wait from now on looks at this
        while self._sleepers:
            try:
                sleeper = self._sleepers.pop()
            except IndexError:  # its wait has taken it back, or another set() has it
                break
            sleeper.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has happened.

        Args:
            timeout: seconds, None for ever.

        Returns:
            Whether it has.
        """
        if self._is_set:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        sleeper = _thread.allocate_lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            while not self._is_set:  # looked at after the append: set() releases what it finds then
                left = _LOOK_S if until is None else until - time.monotonic()
                if left <= 0:
                    break
                sleeper.acquire(timeout=min(left, _LOOK_S))
        finally:
            try:
                self._sleepers.remove(sleeper)
            except ValueError:
                pass  # set() has taken it
        return self._is_set


class _NoLock:
    """In the place of a Future's condition, which concurrent.futures takes for itself."""

    def acquire(self, *_: object) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


class _Waiters(list[Any]):
    """Those of concurrent.futures.wait() and as_completed(), which put themselves here if the
    future was not over before. Each is told once, whichever comes first.
    """

    def __init__(self, outcome: Outcome[Any]) -> None:
        super().__init__()
        self._outcome = weakref.ref(outcome)
        self._untold: deque[Any] = deque()

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        self._untold.append(waiter)
        outcome = self._outcome()
        if outcome is not None and outcome.done() and self._claim(waiter):
            _add(waiter, outcome)

    def remove(self, waiter: Any) -> None:
        super().remove(waiter)
        self._claim(waiter)

    def _claim(self, waiter: Any) -> bool:
        try:
            self._untold.remove(waiter)
        except ValueError:
            return False
        return True

    def tell(self, outcome: Outcome[Any]) -> None:
        """Tells all of them; the future is over."""
        while self._untold:
            try:
                waiter = self._untold.popleft()
            except IndexError:  # it has given up, or told itself
                break
            # It waits on an Event, which an interrupt may have left locked: not on this thread.
            try:
                _thread.start_new_thread(_add, (waiter, outcome))
            except RuntimeError:  # no thread is to be had
                _add(waiter, outcome)


def _add(waiter: Any, outcome: Outcome[Any]) -> None:
    if outcome._exception is None:
        waiter.add_result(outcome)
    else:
        waiter.add_exception(outcome)


class Outcome(futures.Future[T], Generic[T]):
    """A concurrent.futures.Future that runs from the beginning and that nobody can leave locked.

    All of Future's methods work, as do concurrent.futures.wait(), as_completed() and
    asyncio.wrap_future(). A TimeoutError is the builtin one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _NoLock()  # type: ignore[assignment]
        self._told = self._waiters = _Waiters(self)
        self._callbacks: deque[Callable[[], object]] = deque()
        self._ended = Latch()
        self.set_running_or_notify_cancel()

    def done(self) -> bool:
        """Whether it is over."""
        return self._state == _FINISHED

    def subject(self) -> str:
        """Returns what it is the outcome of, for messages."""
        return repr(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits so many seconds, or for ever, for the end; whether it has come."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end. Returns the result; raises the exception, or TimeoutError."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end. Returns the exception or None; raises TimeoutError."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self.wait(timeout):
            raise TimedOut(f"{self.subject()} was not over within {timeout:g} s")

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls fn(self) at the end, on the thread that brings it; now if it has come."""
        call = partial(fn, self)
        self._callbacks.append(call)
        if self.done():
            try:
                self._callbacks.remove(call)
            except ValueError:
                return  # it was called, or is being called
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            log.exception("a callback of %r failed", self)

    def set_result(self, result: T) -> None:
        self._end(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        self._end(None, exception)

    def _end(self, result: T | None, exception: BaseException | None) -> None:
        if self.done():
            raise futures.InvalidStateError(f"{self._state}: {self!r}")
        self._result, self._exception = result, exception
        self._state = _FINISHED
        self._ended.set()
        self._told.tell(self)
        while self._callbacks:
            try:
                call = self._callbacks.popleft()
            except IndexError:  # add_done_callback() calls it
                break
            self._call(call)


def start_thread(target: Callable[[], object], name: str) -> bool:
    """Begins a thread that is no daemon, without waiting for it; False if none is to be had."""
    claims = [None]

    def run() -> None:
        try:
            claims.pop()
        except IndexError:  # the other thread of the two below has it
            return
        target()

    thread = threading.Thread(target=run, name=name, daemon=False)
    try:
        _thread.start_new_thread(_start, (thread, run))
    except RuntimeError:
        return False
    return True


def _start(thread: threading.Thread, run: Callable[[], None]) -> None:
    # Thread.start() waits for the thread by an Event, which the thread could find locked if a
    # signal handler ended that wait: it is called where none can.
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # no second thread is to be had, or only just
        run()
