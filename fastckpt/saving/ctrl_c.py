"""Waits for saves that a person at the keyboard can abandon.

Responsible for the effect of Ctrl-C while this process waits for its saves, during the run or at
exit. No signal handler is installed: Python raises KeyboardInterrupt where the process waits.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastckpt.engine import exit_status
from fastckpt.errors import fate
from fastckpt.saving.handle import InnerHandle

# ---- The end of a process that has lost a checkpoint: its last message and its exit status.


def tell_lost(failed: Sequence[InnerHandle]) -> None:
    """Reports failures that the caller does not know. Turns exit status 0 into 1 and explains this
    in the last line on stderr.
    """
    for handle in failed:
        with suppress(Exception):  # stderr may be closed: the status still reports the loss
            sys.stderr.write(
                f"fastckpt: the save to {handle.path!r} FAILED and {fate(handle.failure())}: "
                f"{handle.failure()}\n"
            )
    if failed:
        fail_exit(failed[-1].path, len(failed) - 1)


def fail_exit(path: str, others: int = 0) -> None:
    """Makes the process exit with a status other than 0, because of a save to this path."""
    more = f", and {others} before it," if others else ""
    exit_status.fail_exit(
        f"fastckpt: this process has lost a checkpoint: the save to {path!r}{more} failed"
    )


def tell_lost_in_child(failed: Sequence[InnerHandle]) -> None:
    """Does the same as tell_lost() in a process of multiprocessing, before Python joins its
    threads: a forked process runs no atexit functions and ends without libc's exit().

    Raises SystemExit for the exit status, unless other threads must still be joined.
    """
    children = sys.modules.get("multiprocessing.process")
    if not failed or children is None or children.parent_process() is None:
        return
    tell_lost(failed)
    for handle in failed:
        handle.note_reported()
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    if all(thread.daemon or thread.name.startswith("fastckpt-") for thread in others):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # Python does this too, but not after an error
                stream.flush()
        raise SystemExit(1)


_LOOK_S = 0.2


def wait_for(handles: Sequence[InnerHandle]) -> None:
    """Waits for the end of these saves."""
    for handle in handles:
        # Python notices a signal that comes just before a wait only after the wait.
        while not handle.wait_quietly(_LOOK_S):
            pass


def wait_or_give_up(
    handles: Sequence[InnerHandle],
    pressed: bool,
    wait: Callable[[Sequence[InnerHandle]], None] = wait_for,
) -> bool:
    """Waits for the end of these saves, and raises none of their errors.

    The first Ctrl-C logs a line that names the saves. The second one abandons the saves; so does
    the first one if InnerHandle has already logged such a line. Further ones have no effect.

    Args:
        pressed: whether Ctrl-C has been pressed before the wait.
        wait: waits for these saves, in steps of less than a second.

    Returns:
        Whether Ctrl-C has been pressed before the wait or in it.

    Raises:
        The errors of InnerHandle.check_wait().
    """
    pending = [handle for handle in handles if not handle.done()]
    for handle in pending:
        handle.check_wait()
    gives_up = all(handle.is_given_up() for handle in pending)
    is_answered = all(handle.goes_on_told for handle in pending)

    def attempt(again: bool) -> None:
        nonlocal pressed, gives_up, is_answered
        pressed, gives_up = pressed or again, gives_up or (again and is_answered)
        if gives_up:
            for handle in pending:
                handle.give_up()
        elif pressed and not is_answered:
            is_answered = True
            _answer([handle for handle in pending if not handle.goes_on_told])
        wait(pending)

    _insist(attempt)
    return pressed


def _insist(attempt: Callable[[bool], None], again: bool = False) -> None:
    """Calls attempt(False), and attempt(True) after each Ctrl-C that ends it.

    Python also checks for signals where an except clause jumps back to its loop and where a
    function begins; no `try` covers these places. So this function uses two nested calls instead of
    a loop.
    """
    try:
        attempt(again)
    except KeyboardInterrupt:
        try:
            _insist(attempt, True)
        except KeyboardInterrupt:
            _insist(attempt, True)


def wait_at_exit(
    handles: Sequence[InnerHandle],
    drain: Callable[[float, Sequence[InnerHandle]], list[InnerHandle]],
    still_s: float,
) -> None:
    """Waits like wait_or_give_up(), and then until these saves have finished all their work. A
    KeyboardInterrupt that ends the program counts as the first Ctrl-C.

    No other thread watches this one, because Python 3.12.0 to 3.12.2 start no threads at exit.

    Args:
        drain: waits for saves; returns the unfinished ones if none of them makes progress for the
            given number of seconds.
        still_s: the time without progress after which the process exits without the saves.
    """

    def wait(pending: Sequence[InnerHandle]) -> None:
        stuck = drain(still_s, pending)
        for handle in stuck:
            outcome = fate(handle.failure(), "is committed") if handle.done() else "may be lost"
            sys.stderr.write(
                f"fastckpt: the save to {handle.path!r} {outcome}; this process no longer waits "
                f"for it, since there was no progress for {still_s:.0f} s: check that its server "
                "or disk responds\n"
            )
        if stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no thread of these saves can be joined

    kind = getattr(sys, "last_type", None)  # of the last error that Python has printed
    wait_or_give_up(handles, isinstance(kind, type) and issubclass(kind, KeyboardInterrupt), wait)
    _insist(lambda _again: wait(handles))


def _answer(handles: list[InnerHandle]) -> None:
    """Logs one line about saves that continue."""
    if not handles:
        return
    first = next((handle for handle in handles if handle.tells), handles[0])
    more = f" (and {len(handles) - 1} more)" if handles[1:] else ""
    first.say(
        f"waiting for the {first.subject()}{more}: {first.how_far()}. Press Ctrl-C again to "
        "abandon it; committed checkpoints stay"
    )
