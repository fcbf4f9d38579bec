"""The watch over the saves in flight: if a call of the file system never returns, the thread of its
save is stuck in it, and another thread ends the save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple

from fastckpt.errors import StorageError
from fastckpt.latch import Latch, items_of, start_thread
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage import calls
from fastckpt.storage.bound import LOOK_S, Bound


class RunningSave(NamedTuple):
    """A save in flight: its lane, a latch that is set when nothing of it is left to do, the thread
    that it runs on, how long that may be in one call, and what ends the save if it is longer.
    """

    lane: str
    gone: Latch
    thread: threading.Thread
    ident: int
    bound: Bound
    give_up: Callable[[StorageError], None]


def drained(
    in_flight: dict[InnerHandle, RunningSave],
    still_s: float = inf,
    only: Sequence[InnerHandle] | None = None,
) -> list[InnerHandle]:
    """Waits for every save in flight, and for what it does after its commit.

    Args:
        only: no others than these.
        still_s: for how long none of them may get on: what the caller's functions and objects
            do has no bound of its own.

    Returns:
        The saves that have not ended.
    """
    seen, since = None, time.monotonic()
    while saves := [it for it in items_of(in_flight) if only is None or it[0] in only]:
        if saves[0][1].gone.wait(LOOK_S):
            continue
        now = [(handle, _how_far(handle)) for handle, _ in saves]
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since >= still_s:
            return [handle for handle, _ in saves]
    return []


def _how_far(handle: InnerHandle) -> tuple[object, ...]:
    """Returns what changes whenever a save gets on."""
    stats = handle.stats
    clocks = (stats.staged_s, stats.opened_s, stats.written_s, stats.synced_s)
    return (handle.done(), *handle.progress(), *map(repr, clocks))


class Watch:
    """The thread that watches over saves; there is none without saves. It is no daemon, unlike
    theirs: Python waits for it at exit, and so for each save that ends or is given up.

    Args:
        in_flight: the saves, which others add and remove.
    """

    def __init__(self, in_flight: dict[InnerHandle, RunningSave]) -> None:
        self._in_flight = in_flight
        self._lock = threading.Lock()  # which only threads of saves take
        self._thread: threading.Thread | None = None  # under _lock

    def begin(self) -> None:
        """Sees to it that a thread watches; called by a save's, after it has been added."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fastckpt-watch", daemon=False)
                with suppress(RuntimeError):  # no thread can be started: then nobody watches
                    thread.start()
                    self._thread = thread

    def join(self) -> None:
        """Waits for the end of the thread, when all saves have ended."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            saves = [save for _, save in items_of(self._in_flight)]
            if not saves:
                with self._lock:
                    if not self._in_flight:
                        self._thread = None
                        return
            for save in saves:
                self._look(save)
            saves[0].gone.wait(min(save.bound.look_s for save in saves))

    def _look(self, save: RunningSave) -> None:
        call = calls.of_thread(save.ident)
        if call is None or not save.bound.is_over(call.seconds(), call.text):
            return
        error = call.error()

        def give_up() -> None:
            try:
                save.give_up(error)
            finally:
                call.ended.set()

        # Told by yet another thread, since that may take a while, too: this one looks again then.
        if call.give_up() and not start_thread(give_up, "fastckpt-give-up", daemon=True):
            give_up()
