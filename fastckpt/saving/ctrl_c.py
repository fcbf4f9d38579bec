"""Waits for saves that a person at the keyboard can give up.

Responsible for what Ctrl-C does while this process waits for its saves before it goes on or ends.
No signal handler is installed: Python raises KeyboardInterrupt where the process waits.
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

# ---- The end of a process that has lost a checkpoint: what it says, and that it is no success.


def tell_lost(failed: Sequence[InnerHandle]) -> None:
    """Reports failures that nobody has asked for, and has a status of 0 become 1, which is said
    last on stderr.
    """
    for handle in failed:
        with suppress(Exception):  # nobody reads it: the status says that something was lost
            sys.stderr.write(
                f"fastckpt: the save to {handle.path!r} FAILED and {fate(handle.failure())}: "
                f"{handle.failure()}\n"
            )
    if failed:
        fail_exit(failed[-1].path, len(failed) - 1)


def fail_exit(path: str, others: int = 0) -> None:
    """Has the process end with a status other than 0, because of a save to this path."""
    more = f", and {others} before it," if others else ""
    exit_status.fail_exit(
        f"fastckpt: this process has lost a checkpoint: the save to {path!r}{more} failed"
    )


def tell_lost_in_child(failed: Sequence[InnerHandle]) -> None:
    """Does what tell_lost() does in a process of multiprocessing, before Python joins its threads:
    where it was forked, it runs no function of atexit, and ends past libc.

    Raises SystemExit for the exit status, unless other threads are to be joined.
    """
    children = sys.modules.get("multiprocessing.process")
    if not failed or children is None or children.parent_process() is None:
        return
    tell_lost(failed)
    for handle in failed:
        handle.note_reported()
    others = [its for its in threading.enumerate() if its is not threading.current_thread()]
    if all(thread.daemon or thread.name.startswith("fastckpt-") for thread in others):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # as Python itself does, which the error prevents
                stream.flush()
        raise SystemExit(1)


_LOOK_S = 0.2


def wait_for(handles: Sequence[InnerHandle]) -> None:
    """Waits for the end of these saves."""
    for handle in handles:
        # Python does not notice a signal that comes just before a wait, until that ends.
        while not handle.wait_quietly(_LOOK_S):
            pass


def wait_or_give_up(
    handles: Sequence[InnerHandle],
    pressed: bool,
    wait: Callable[[Sequence[InnerHandle]], None] = wait_for,
) -> bool:
    """Waits for the end of these saves, and raises no errors of theirs.

    The first Ctrl-C is answered by one line, which says what is awaited. The second one gives the
    saves up; so does the first one if an earlier line, of InnerHandle, has said that it does.
    The others do nothing.

    Args:
        pressed: whether Ctrl-C has been pressed before the wait.
        wait: waits for these saves, in steps of less than a second.

    Returns:
        Whether Ctrl-C has been pressed before the wait or in it.

    Raises:
        As InnerHandle.check_wait().
    """
    awaited = [handle for handle in handles if not handle.done()]
    for handle in awaited:
        handle.check_wait()
    gives_up = all(handle.is_given_up() for handle in awaited)
    is_answered = all(handle.goes_on_told for handle in awaited)

    def attempt(again: bool) -> None:
        nonlocal pressed, gives_up, is_answered
        pressed, gives_up = pressed or again, gives_up or (again and is_answered)
        if gives_up:
            for handle in awaited:
                handle.give_up()
        elif pressed and not is_answered:
            is_answered = True
            _answer([handle for handle in awaited if not handle.goes_on_told])
        wait(awaited)

    _insist(attempt)
    return pressed


def _insist(attempt: Callable[[bool], None], again: bool = False) -> None:
    """Calls attempt(False), and attempt(True) after each Ctrl-C that ends it.

    Python looks for signals also where a handler jumps back to its loop and where a function
    begins, which no `try` there covers. So this is no loop, and two calls stand in a row.
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
    """Waits as wait_or_give_up(), and until nothing of these saves is left to do. A
    KeyboardInterrupt that ends the program counts as the first.

    Nobody watches this thread, because Python 3.12.0 to 3.12.2 start no thread as they exit.

    Args:
        drain: waits for saves, and returns those of which none gets on for so many seconds.
        still_s: after that the process ends with them.
    """

    def wait(awaited: Sequence[InnerHandle]) -> None:
        left = drain(still_s, awaited)
        for handle in left:
            outcome = fate(handle.failure(), "is committed") if handle.done() else "may be lost"
            sys.stderr.write(
                f"fastckpt: the save to {handle.path!r} {outcome}; this process no longer waits "
                f"for it, since there was no progress for {still_s:.0f} s: check that its server "
                "or disk responds\n"
            )
        if left:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no thread of these saves can be joined

    kind = getattr(sys, "last_type", None)  # of the error that Python has printed as the last one
    wait_or_give_up(handles, isinstance(kind, type) and issubclass(kind, KeyboardInterrupt), wait)
    wait(handles)


def _answer(handles: list[InnerHandle]) -> None:
    """Logs one line about saves that go on."""
    if not handles:
        return
    first = next((handle for handle in handles if handle.tells), handles[0])
    more = f" (and {len(handles) - 1} more)" if handles[1:] else ""
    first.say(
        f"waiting for the {first.subject()}{more}: {first.how_far()}. Press Ctrl-C again to "
        "abandon it; committed checkpoints stay"
    )
