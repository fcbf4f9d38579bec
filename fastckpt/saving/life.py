"""The life of a save: one state, which one thread changes, and who may end it.

A save has two threads. Its *worker* runs the stages, the commit too, and makes all calls of the
file system, of which one may never return. The thread of its *life* makes none: it waits for the
copies and lets the caller go, looks whether the worker's call hangs, and ends the save. Callers
only wait for it; what they have to say are plain stores, which both threads look at.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue

from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError, StorageError, is_visible
from fastckpt.latch import Latch, taken
from fastckpt.ranks.round import HEED_S, Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.mutation_check import MutationCheck, WatchedTensors
from fastckpt.storage.bound import Bound
from fastckpt.storage.calls import Permit

log = logging.getLogger("fastckpt")


class State(Enum):
    """How far a save is; docs/design.md has what ends it in each state."""

    STAGING = "staging"
    WRITING = "writing"
    AGREEING = "agreeing"
    PUBLISHING = "publishing"
    COMMITTED = "committed"
    FAILED = "failed"
    IN_DOUBT = "in doubt"


class HungCall(Exception):
    """Ends a save whose worker is in a call that never returns."""

    def __init__(self, error: StorageError) -> None:
        super().__init__()
        self.error = error


class Life:
    """The life of one save.

    Args:
        handle: the handle that callers wait on.
        agreement: the save's round.
        reads: the memory of the state that lies on devices.
        watched: the tensors that must not change before they have been copied.
        forget: drops references to what was copied; called once, when everything has been.

    Attributes:
        state: changed by the thread of this life alone.
        permit: the worker's, to call the file system.
        transfers: the transfers that read the state; complete before placed().
        interrupted: set by a caller that could not wait: unless everything was copied by then, the
            save fails. It is an attribute, because a second signal could break off a call.
        is_lost: set by that caller if the save fails by that.
        begun: set when the save has its place in the order of its lane.
        told: set when the result has been told.
        gone: set when nothing of it is left to do.
        worker: the worker's thread; None if there is none, because none can be started.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        reads: DeviceSources,
        watched: Sequence[WatchedTensors],
        forget: Callable[[], None],
    ) -> None:
        self.state, self.permit = State.STAGING, Permit()
        self.transfers: list[ImageTransfer] = []
        self.interrupted = self.is_lost = False
        self.begun, self.told, self.gone = Latch(), Latch(), Latch()
        self.worker: threading.Thread | None = None
        self._handle, self._agreement, self._reads = handle, agreement, reads
        self._verdict, self._forget = MutationCheck(watched), forget
        self._bound = Bound(agreement.timeout_s)
        self._beginnings, self._settlings = [None], [None]
        self._handed: SimpleQueue[Callable[[], None]] = SimpleQueue()  # by the worker, to do here
        self._copied = Latch()
        self._copy_error: BaseException | None = None
        self._error: BaseException | None = None
        self._has_ended = self._is_gone = False

    # ---- what the caller says

    def claim(self) -> bool:
        """Returns True once: to the thread of this life or an interrupted save(), which then
        carries the save through.
        """
        return taken(self._beginnings)

    def settle(self) -> bool:
        """Returns True once: to this life, when everything has been copied, or to an interrupted
        caller, if that came first; then the save fails.
        """
        return taken(self._settlings)

    def interruption(self) -> CheckpointError:
        return CheckpointError(
            f"the save to {self._handle.path!r} was interrupted before everything was copied; "
            "nothing was committed"
        )

    # ---- the worker

    def reach(self, state: State) -> None:
        """Says how far the worker is."""
        self._hand(partial(self._enter, state))

    def placed(self) -> None:
        """Says that the caller may be let go from now on, as soon as everything is copied."""
        if self.worker is not None:
            self._handed.put(self._copy)

    def _hand(self, act: Callable[[], None]) -> None:
        act() if self.worker is None else self._handed.put(act)

    def heed(self) -> None:
        """Raises what ends a save whose caller does not wait for it: SaveCancelled, or the error of
        an interrupted one. Asks no other rank.
        """
        self._agreement.heed()
        if self.is_lost:
            raise self.interruption()

    def wait_for(self, transfer: ImageTransfer) -> None:
        """Waits until one transfer has been copied; raises as wait_copied()."""
        while not transfer.staged(HEED_S):
            self._heed_copying()

    def wait_copied(self) -> None:
        """Waits until everything has been copied and nothing had changed before.

        Raises:
            StorageError, DeviceError: a write or a copy failed. StagingConflict: a tensor changed.
            SaveCancelled: the caller has cancelled the save.
        """
        if self.worker is None:
            self._copy()
        self._copied.wait()
        if self._copy_error is not None:
            raise self._copy_error

    def tell_ended(self, error: BaseException | None) -> None:
        """Says how the stages have ended; returns when the result has been told."""
        self._hand(partial(self._note_end, error))
        self.told.wait()

    # ---- the thread of this life

    def start(self, name: str, work: Callable[[], None]) -> bool:
        """Starts the worker, which calls tell_ended(); returns False if there can be no thread."""
        self.worker = threading.Thread(target=self._work, args=(work,), name=name, daemon=True)
        try:
            self.worker.start()
        except RuntimeError:
            self.worker = None
        return self.worker is not None

    def follow(self) -> BaseException | None:
        """Waits for the end of the stages; returns their error. Raises HungCall if none comes."""
        while not self._has_ended:
            self._next()()
        error, self._error = self._error, None
        return error

    def end(self, error: BaseException | None) -> None:
        """Drops all references, and changes the state for the last time."""
        in_doubt = State.IN_DOUBT if is_visible(error) else State.FAILED
        self.state = State.COMMITTED if error is None else in_doubt
        self.forget_copies()
        self._copy_error, self._forget = None, lambda: None

    def forget_copies(self) -> None:
        """Drops the references to what was copied; nothing is being copied any more."""
        self._verdict.forget()
        self.transfers.clear()
        self._reads = DeviceSources()

    def wait_gone(self) -> None:
        """Waits until the worker has done what is left to do after the result has been told, unless
        it hangs.
        """
        try:
            while not (self.worker is None or self.permit.is_revoked or self._is_gone):
                self._next()()
        except HungCall as hung:
            log.warning("%s", hung.error)

    def worker_is_gone(self) -> bool:
        return self.worker is None or not self.worker.is_alive()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # unforeseen: else this life would wait for an end for ever
            self._handed.put(partial(self._note_end, error.with_traceback(None)))
            raise
        finally:
            self._handed.put(self._note_gone)
            del self, work  # a traceback may keep this frame

    def _enter(self, state: State) -> None:
        self.state = state

    def _note_end(self, error: BaseException | None) -> None:
        if not self._has_ended:
            self._has_ended, self._error = True, error

    def _note_gone(self) -> None:
        self._is_gone = True

    def _next(self) -> Callable[[], None]:
        """Waits for what the worker hands over next; raises HungCall if nothing comes."""
        while True:
            try:
                return self._handed.get(timeout=self._bound.look_s)
            except Empty:
                self._watch()

    def _watch(self) -> None:
        error = self.permit.revoke(self._bound)
        if error is not None:
            raise HungCall(error)

    def _copy(self) -> None:
        """Waits for the copies, and opens the fence; keeps the error for the worker."""
        try:
            self._wait_copied()
        except HungCall:
            raise
        except BaseException as error:
            # Frames of this thread would hold the save, in a circle with the error.
            self._copy_error = error.with_traceback(None)
        self._copied.set()

    def _wait_copied(self) -> None:
        handle, transfers = self._handle, self.transfers
        if self._reads.ranges:
            for transfer in transfers:
                while not transfer.queued(self._bound.look_s):
                    self._look()
            handle.mark_queued(self._order)
        for transfer in transfers:
            while not transfer.staged(self._bound.look_s):
                self._look()
            transfer.account(handle.stats)
        self._verdict.check(handle.path)
        if self.interrupted or not self.settle():
            raise self.interruption()
        self._forget()
        self.state = State.WRITING
        handle.mark_staged()

    def _look(self) -> None:
        self._heed_copying()
        self._watch()

    def _heed_copying(self) -> None:
        """Ends the save, before everything has been copied, if the caller does not wait for it."""
        self._agreement.heed()
        if self.interrupted:
            raise self.interruption()

    def _order(self) -> bool:
        """Orders the calling thread's streams after the copies; returns False if it cannot."""
        self._verdict.give()
        return self._reads.lead()
