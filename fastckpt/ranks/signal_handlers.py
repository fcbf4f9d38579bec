"""Signal handlers that report signals or defer the errors of other handlers. They change no other
behaviour.

The module installs handlers, calls the previous handlers, and restores them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_UNHANDLED = {
    **dict.fromkeys((signal.SIGKILL, signal.SIGSTOP), "which no process can handle"),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
        "which reports a fault that must end the process",
    ),
    signal.SIGCHLD: "which reports the end of a child process",
}


class SignalHandlers:
    """Handlers of these signals, active until close().

    A signal is reported and then passed to the previous handler. The default action, which would
    end the process, is not taken before close().

    A forked child inherits the handlers, but its signals are not reported. In the child, SIGTERM
    has its previous effect, because data loaders end their workers with it. The other signals do
    not end the child: SLURM sends them to every process of a job, and a rank fails if a worker
    dies.

    Args:
        numbers: the signals.
        told: called for each signal that arrives, on the main thread, between any two of its
            bytecodes.

    Raises:
        ValueError: this is not the main thread, the only one on which Python handles signals; or a
            signal has a handler that cannot be restored.
    """

    def __init__(self, numbers: Sequence[signal.Signals], told: Callable[[], object]) -> None:
        self.check(numbers)
        self._told = told
        self._pid = os.getpid()
        self._is_closed = False
        self._earlier: dict[int, Any] = {each: signal.getsignal(each) for each in numbers}
        try:
            for number in numbers:
                signal.signal(number, self._handle)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check(numbers: Sequence[signal.Signals]) -> None:
        """Raises ValueError if this thread may not install handlers of these signals."""
        here = threading.current_thread()
        if numbers and here is not threading.main_thread():
            raise ValueError(
                f"signals {_names(numbers)} can be handled only on the main thread, but this is "
                f"thread {here.name!r}: install them on the main thread"
            )
        foreign = [number for number in numbers if signal.getsignal(number) is None]
        if foreign:
            raise ValueError(
                f"signals {_names(foreign)} have handlers that Python did not install and cannot "
                "restore: choose other signals"
            )

    def close(self) -> None:
        """Restores the previous handlers, skipping those of this class that are closed. Idempotent.

        If called outside the main thread, or if another handler was installed in the meantime, the
        handler stays installed, but only passes signals to the previous one.
        """
        self._is_closed = True
        try:
            self._put_back()
        finally:  # a handler that is back already may have raised meanwhile
            self._put_back()

    def _put_back(self) -> None:
        for number in self._earlier:
            with suppress(ValueError):  # this is not the main thread
                if os.getpid() == self._pid and signal.getsignal(number) == self._handle:
                    signal.signal(number, self._before(number))

    def _before(self, number: int) -> Any:
        """Returns the previous handler, skipping handlers of this class that are closed."""
        earlier = self._earlier[number]
        while isinstance(owner := getattr(earlier, "__self__", None), SignalHandlers):
            if not owner._is_closed:
                break
            earlier = owner._earlier[number]
        return earlier

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = self._before(number)
        is_child = os.getpid() != self._pid
        is_told = not (self._is_closed or is_child)
        if is_told:
            self._told()
        if callable(earlier):
            if not (is_told and earlier is signal.default_int_handler):
                earlier(number, frame)
        elif earlier == signal.SIG_DFL and (number == signal.SIGTERM if is_child else not is_told):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class DeferredErrors(SignalHandlers):
    """Defers errors of the program's signal handlers on this thread until the context ends, so that
    no signal interrupts the body halfway. Then the first of these errors is raised.

    Args:
        told: called on this thread after each handler that has raised an error.
    """

    def __init__(self, told: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        numbers = []
        if threading.current_thread() is threading.main_thread():  # handlers run on no other
            valid = signal.valid_signals()
            numbers = [number for number in valid if callable(signal.getsignal(number))]
        super().__init__(numbers, told)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._earlier[number](number, frame)
        except BaseException as error:
            if self._is_closed or os.getpid() != self._pid:
                raise
            self._error = self._error or error
            self._told()


def checked_signals(value: object) -> tuple[signal.Signals, ...]:
    """Checks and returns signals without duplicates; there may be none. They are given by their
    names, with or without SIG, or by their numbers. Signals that cannot be requests to stop are
    refused.
    """
    example = 'names of signals, such as ("SIGTERM", "SIGUSR1")'
    if not isinstance(value, tuple | list | set | frozenset):
        raise TypeError(
            f"signals is {value!r:.80} of type {type(value).__name__}, must be a tuple of {example}"
        )
    result: dict[signal.Signals, None] = {}
    for each in value:
        number = _signal(each)
        if number is None:
            raise ValueError(f"signals has {each!r:.80}, must have {example}")
        if number in _UNHANDLED:
            raise ValueError(f"signals has {number.name}, {_UNHANDLED[number]}: choose another")
        result[number] = None
    return (*result,)


def _signal(value: Any) -> signal.Signals | None:
    if isinstance(value, str):
        names = signal.Signals.__members__
        return names.get(value) or names.get(f"SIG{value}")
    try:
        return None if isinstance(value, bool) else signal.Signals(value)
    except ValueError:
        return None


def _names(numbers: Sequence[signal.Signals]) -> str:
    return ", ".join(number.name for number in numbers)
