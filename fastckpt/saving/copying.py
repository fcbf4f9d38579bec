"""This module knows what a save still reads of the state, and when the state may change.

Responsible for waiting until everything was copied, and for telling those who wait for that.
It must not know what is copied, nor where to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastckpt.engine.devices import Reads
from fastckpt.engine.transfer import Transfer
from fastckpt.errors import CheckpointError
from fastckpt.handle import SaveHandle
from fastckpt.saving.fence import Verdict, Watched


class Copying:
    """It follows what one save still reads of the state, and lets the caller go on when it may.

    Args:
        handle: is told.
        reads: what is read of devices.
        watched: what must not change before it was copied.
        forget: drops references to what was copied; called once, when all was.

    Attributes:
        transfers: all that read the state; complete before watch().
        interrupted: set by a caller that did not wait: unless all was copied by then, the save
            fails. An attribute, since it takes a call to interrupt a caller again.
    """

    def __init__(
        self,
        handle: SaveHandle,
        reads: Reads,
        watched: Sequence[Watched],
        forget: Callable[[], None],
    ) -> None:
        self.transfers: list[Transfer] = []
        self._handle = handle
        self._reads = reads
        self._verdict = Verdict(watched)
        self._forget = forget
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None  # under _lock
        self.interrupted = False

    def watch(self) -> None:
        """From now on lets the caller go on as soon as it may, whatever the save waits for: a slow
        metadata server, or another rank.
        """
        watcher = threading.Thread(target=self._watch, name=f"{threading.current_thread().name}-w")
        try:
            watcher.start()
        except RuntimeError:
            return  # no thread is to be had: then the caller waits longer
        self._watcher = watcher

    def _watch(self) -> None:
        with suppress(Exception):  # kept, and raised where the save waits
            self.wait()

    def wait(self) -> None:
        """Waits until everything was copied, and checks that nothing changed too early.

        Raises:
            StorageError, DeviceError, StagingConflict.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._handle.is_staged():
                return
            try:
                self._wait()
            except BaseException as error:
                self._error = error
                raise

    def _wait(self) -> None:
        if self._reads.ranges:
            for transfer in self.transfers:
                transfer.wait_queued()
            self._handle.mark_queued(self._order)
        for transfer in self.transfers:
            transfer.wait_staged()
            transfer.account(self._handle.stats)
        self._verdict.check(self._handle.path)
        if self.interrupted:
            raise CheckpointError(
                f"save to {self._handle.path!r} was interrupted before everything was copied; "
                "nothing was committed"
            )
        self._forget()
        self._handle.mark_staged()

    def _order(self) -> bool:
        """Lets the calling thread go on to change the state, in the order of its streams."""
        self._verdict.give()
        return self._reads.lead()

    def close(self) -> None:
        """Lets go of everything; nothing is in flight."""
        if self._watcher is not None:
            self._watcher.join()
        self._verdict.forget()
        self.transfers.clear()
        self._error, self._reads, self._forget = None, Reads(), lambda: None
