"""The saves of a run: those in flight, and what becomes of each after its commit.

Responsible for the order in which the tracker and retention see saves, and for waiting. It must not
know what a checkpoint holds, nor how it is written.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from fastckpt import SaveHandle
from fastckpt.errors import is_visible
from fastckpt.integrations.megatron import iterations
from fastckpt.integrations.megatron.iterations import Retention
from fastckpt.latch import Latch
from fastckpt.saving.pipeline import raise_earlier

log = logging.getLogger("fastckpt")


class Listener(Protocol):
    """A listener is told, on the first rank and in the background, what happened to iterations."""

    def committed(self, root: str, iteration: int) -> None:
        """The iteration is committed, and the tracker was moved."""

    def removed(self, root: str, iteration: int) -> None:
        """The iteration was an old one, and retention has removed it."""


class Saves:
    """The saves of a run; each save_checkpoint() of the run is given the same object.

    Leaving it as a context waits for them; after an exception, without raising their errors. The
    listener, if there is one, is told of each iteration.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._directories: dict[str, _Directory] = {}

    @property
    def is_idle(self) -> bool:
        """Whether all saves that have begun have ended."""
        return all(directory.is_idle for directory in self._directories.values())

    def wait(self) -> None:
        """Waits until all saves have ended and old iterations are removed. Call it before the
        process group is destroyed.

        Raises:
            CheckpointError: a save failed with on_error="raise", and nobody asked for why.
        """
        handles = self._wait()
        for handle in handles:
            if not handle.is_asked_for() and handle.failure() is not None:
                raise_earlier(handle)

    def _wait(self) -> list[SaveHandle]:
        handles = [
            handle for directory in self._directories.values() for handle in directory.taken()
        ]
        for handle in handles:
            handle.wait_done()
        for directory in self._directories.values():
            directory.wait_ended()
        return handles

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._wait()

    def is_first(self, root: str) -> bool:
        """Whether no save to this directory has begun yet."""
        return root not in self._directories

    def begin(
        self,
        root: str,
        iteration: int,
        retention: Retention,
        save: Callable[[Callable[[], None]], SaveHandle],
    ) -> SaveHandle:
        """Begins a save: `save` is given a function to call after its commit, which moves the
        tracker. Old iterations are removed after that, when the save's result was told.
        """
        directory = self._directories.setdefault(root, _Directory(root, self._listener))
        number = next(directory.numbers)
        try:
            directory.begin(number, iteration)
            handle = save(lambda: directory.committed(number, iteration, retention))
        except BaseException:
            directory.ended(number)
            raise
        directory.note(number, handle)
        return handle


class _Directory:
    """The saves to one directory."""

    def __init__(self, root: str, listener: Listener | None) -> None:
        self._root, self._listener = root, listener
        self.numbers = itertools.count(1)  # of the saves, in their order
        # A signal handler may raise on the thread that saves: it reads what is in flight without
        # this lock, and waits by latches.
        self._lock = threading.RLock()
        self._ends: dict[int, Latch] = {}  # of saves of which something is left to do
        self._in_flight: dict[int, int] = {}  # iterations, by the save's number
        # State below is protected by _lock.
        self._tracked = 0  # number of the save that the tracker was last moved for
        self._newest = 0  # its iteration
        # Whether the tracker is durable: if not, it may after a crash name one that is removed now.
        self._is_durable = True
        self._due: dict[int, Retention] = {}  # of saves that have committed
        self._superseded: set[int] = set()  # iterations that the tracker named before
        self._handles: list[SaveHandle] = []

    @property
    def is_idle(self) -> bool:
        return not self._ends

    def begin(self, number: int, iteration: int) -> None:
        self._in_flight[number], self._ends[number] = iteration, Latch()

    def note(self, number: int, handle: SaveHandle) -> None:
        handle.add_done_callback(lambda _: self.ended(number))
        self._handles = [each for each in self._handles if not each.done()] + [handle]

    def taken(self) -> list[SaveHandle]:
        handles, self._handles = self._handles, []
        return handles

    def ended(self, number: int) -> None:
        """Removes old iterations, if this save has committed and has a retention."""
        try:
            self._retain(number)
        finally:
            end = self._ends.pop(number, None)
            if end is not None:
                end.set()

    def _retain(self, number: int) -> None:
        with self._lock:
            self._in_flight.pop(number, None)
            retention = self._due.pop(number, None)
            if retention is None or not self._is_durable:
                return
            in_flight = {*self._in_flight.copy().values()}
            try:
                removed = iterations.retain(
                    self._root, self._newest, retention, in_flight, self._superseded
                )
                self._superseded -= {*removed}
                for old in removed:
                    if self._listener is not None:
                        self._listener.removed(self._root, old)
            except Exception as error:
                log.error("old iterations could not be removed from %r: %s", self._root, error)

    def _track(self, number: int, iteration: int) -> None:
        if number <= self._tracked:
            self._superseded.add(iteration)
            return
        before, is_named = iterations.tracked(self._root), True
        try:
            iterations.track(self._root, iteration)
            self._is_durable = True
        except BaseException as error:
            is_named = is_visible(error)
            self._is_durable = self._is_durable and not is_named
            raise
        finally:
            if is_named:
                self._tracked, self._newest = number, iteration
                self._superseded |= {before} if isinstance(before, int) and before else set()

    def wait_ended(self) -> None:
        """Waits until ended() has run for all saves, whose results are known by now."""
        for end in self._ends.copy().values():
            end.wait()

    def committed(self, number: int, iteration: int, retention: Retention) -> None:
        """Moves the tracker, unless a later save was faster: then this iteration is an old one.
        Logs errors: the checkpoint is committed, and load_checkpoint finds it without the tracker.
        """
        with self._lock:
            self._due[number] = retention
            try:
                self._track(number, iteration)
            except Exception as error:
                what = "names, but perhaps not durably," if is_visible(error) else "does not name"
                path = os.path.join(self._root, iterations.TRACKER)
                log.error("%r %s iteration %d: %s", path, what, iteration, error)
        if self._listener is not None:
            try:
                self._listener.committed(self._root, iteration)
            except Exception as error:
                log.error("iteration %d is committed, but telling so failed: %s", iteration, error)
