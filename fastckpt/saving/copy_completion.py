"""The end of copying: from then on the caller may change the state that a save reads.

Responsible for waiting until everything has been copied, and for telling those who wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError
from fastckpt.latch import taken
from fastckpt.ranks.round import HEED_S
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.mutation_check import MutationCheck, WatchedTensors


class CopyCompletion:
    """The copying of one save: it follows what is still read, and lets the caller go on.

    Args:
        handle: the handle that callers wait on.
        reads: the memory of the state that lies on devices.
        watched: the tensors that must not change before they have been copied.
        forget: drops references to what was copied; called once, when everything has been.
        heed: raises SaveCancelled if the caller has cancelled the save.

    Attributes:
        transfers: the transfers that read the state; complete before watch().
        interrupted: set by a caller that could not wait: unless everything was copied by then, the
            save fails. It is an attribute, because a second signal could break off a call.
        is_lost: set by that caller if the save fails by that.
    """

    def __init__(
        self,
        handle: InnerHandle,
        reads: DeviceSources,
        watched: Sequence[WatchedTensors],
        forget: Callable[[], None],
        heed: Callable[[], None],
    ) -> None:
        self.transfers: list[ImageTransfer] = []
        self._handle = handle
        self._reads = reads
        self._verdict = MutationCheck(watched)
        self._forget = forget
        self._heed = heed
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None  # under _lock
        self._claims = [None]
        self.interrupted = self.is_lost = False

    def heed(self) -> None:
        """Raises what ends a save whose caller does not wait for it: SaveCancelled, or the error of
        an interrupted one. Asks no other rank.
        """
        self._heed()
        if self.is_lost:
            raise self._interruption()

    def watch(self) -> None:
        """Begins to let the caller go on as soon as it may, on a thread of its own, since the save
        may have to wait for a slow metadata server or another rank.
        """
        watcher = threading.Thread(target=self._watch, name=f"{threading.current_thread().name}-w")
        try:
            watcher.start()
        except RuntimeError:
            return  # no thread can be started: then the caller waits longer
        self._watcher = watcher

    def _watch(self) -> None:
        with suppress(Exception):  # wait() keeps it, and raises it again where the save waits
            self.wait()

    def wait(self) -> None:
        """Waits until everything has been copied, and checks that nothing had changed before.

        Raises:
            StorageError, DeviceError: a write or a copy failed. StagingConflict: a tensor changed.
            SaveCancelled: the caller has cancelled the save.
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
                while not transfer.queued(HEED_S):
                    self._look()
            self._handle.mark_queued(self._order)
        for transfer in self.transfers:
            self.wait_for(transfer)
            transfer.account(self._handle.stats)
        self._verdict.check(self._handle.path)
        if self.interrupted or not self.settle():
            raise self._interruption()
        self._forget()
        self._handle.mark_staged()

    def wait_for(self, transfer: ImageTransfer) -> None:
        """Waits until one transfer has been copied; raises StorageError, DeviceError and
        SaveCancelled as wait() does.
        """
        while not transfer.staged(HEED_S):
            self._look()

    def _look(self) -> None:
        """Ends the save, before everything has been copied, if the caller does not wait for it."""
        self._heed()
        if self.interrupted:
            raise self._interruption()

    def settle(self) -> bool:
        """Returns True once: to the save, when everything has been copied, or to an interrupted
        caller, if that came first; then the save fails.
        """
        return taken(self._claims)

    def _interruption(self) -> CheckpointError:
        return CheckpointError(
            f"the save to {self._handle.path!r} was interrupted before everything was copied; "
            "nothing was committed"
        )

    def _order(self) -> bool:
        """Orders the calling thread's streams after the copies; returns False if it cannot."""
        self._verdict.give()
        return self._reads.lead()

    def close(self) -> None:
        """Drops all references; nothing is in flight any more."""
        if self._watcher is not None:
            self._watcher.join()
        self._verdict.forget()
        self.transfers.clear()
        self._error, self._reads = None, DeviceSources()
        self._forget = self._heed = lambda: None
