"""The life of a save: its state, which only one thread changes, and the ways in which it ends.

A save has two threads. Its *worker* runs all stages including the commit, and makes all file system
calls, any of which may hang. The thread of its *life* makes no such calls: it waits for the copies
and releases the caller, checks whether a call of the worker hangs, and ends the save. Callers only
wait for the save. They notify it by setting plain attributes, which both threads check.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from queue import Empty, SimpleQueue

from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import CheckpointError, is_visible
from fastckpt.latch import Latch, taken
from fastckpt.ranks.round import CANCEL_LOOK_S, Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.mutation_check import MutationCheck, WatchedTensors
from fastckpt.storage.bound import Bound
from fastckpt.storage.calls import Permit

log = logging.getLogger("fastckpt")

GIVEN_UP_S = 10.0  # the longest wait for the end of a save that Ctrl-C has given up


class State(Enum):
    """The progress of a save; docs/project/design.md lists the events that end it in each state."""

    STAGING = "staging"
    WRITING = "writing"
    AGREEING = "agreeing"
    PUBLISHING = "publishing"
    COMMITTED = "committed"
    FAILED = "failed"
    IN_DOUBT = "in doubt"  # or known to be visible, with an error


class Life:
    """The life of one save.

    Args:
        handle: the handle that callers wait on.
        agreement: the save's round.
        reads: the part of the state's memory that is on devices.
        watched: the tensors that must not change before they have been copied.
        forget: drops references to the state; called once, after everything has been copied.

    Attributes:
        permit: the worker's permission to call the file system.
        transfers: the transfers that read the state; all are added before placed().
        interrupted: set by a caller whose wait was interrupted. The save then fails if something is
            not yet copied. It is an attribute because a second signal could interrupt a method
            call.
        is_lost: set by that caller if the interruption makes the save fail.
        begun: set when the save has its place in the order of its queue.
        told: set when the result has been set.
        gone: set when all work of the save has ended.
        worker: the worker's thread; None if no thread could be started.
        outcome: set by the worker when the stages have ended: their error.
        is_left: set by the worker when it has finished its work after the result was set. Both are
            plain attributes, which can be set in spite of any error; wake() makes the life check
            them at once.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        reads: DeviceSources,
        watched: Sequence[WatchedTensors],
        forget: Callable[[], None],
    ) -> None:
        self.permit = Permit()
        self.transfers: list[ImageTransfer] = []
        self.interrupted = self.is_lost = self.is_left = False
        self.begun, self.told, self.gone = Latch(), Latch(), Latch()
        self.worker: threading.Thread | None = None
        self.outcome: tuple[BaseException | None] | None = None
        self._reached, self._fate = State.STAGING, list[State]()
        self._handle, self._agreement, self._reads = handle, agreement, reads
        self._verdict, self._forget = MutationCheck(watched), forget
        self._bound = Bound(agreement.timeout_s)
        self._beginnings, self._settlings = [None], [None]
        self._news: SimpleQueue[None] = SimpleQueue()
        self._is_placed, self._copied = False, Latch()
        self._failure: BaseException | None = None  # of the copies, which the worker is to raise

    @property
    def state(self) -> State:
        """The current state. Only the thread of this life sets the final one."""
        return self._fate[0] if self._fate else self._reached

    # ---- what the caller says

    def claim(self) -> bool:
        """Returns True once, either to the thread of this life or to an interrupted save(). The
        winner runs the save to its end.
        """
        return taken(self._beginnings)

    def settle(self) -> bool:
        """Returns True once: to this life after everything has been copied, or to a caller that is
        interrupted before; in the second case the save fails.
        """
        return taken(self._settlings)

    def interruption(self) -> CheckpointError:
        return CheckpointError(
            f"the save to {self._handle.path!r} was interrupted before everything was copied; "
            "nothing was committed"
        )

    # ---- the worker

    def reach(self, state: State) -> None:
        """Records the worker's progress."""
        self._reached = state

    def placed(self) -> None:
        """Records that the caller may be released as soon as everything is copied."""
        self._is_placed = True
        self.wake()

    def wake(self) -> None:
        """Makes the thread of this life check the worker's attributes."""
        self._news.put(None)

    def raise_if_ended(self) -> None:
        """Raises the error that ends a save whose caller does not wait for it: SaveCancelled, the
        error of an interruption, or that of the copies. Does not communicate with other ranks.
        """
        self._agreement.raise_if_ended()
        self.permit.check()
        if self._failure is not None:
            raise self._failure
        if self.is_lost:
            raise self.interruption()

    def wait_for(self, transfer: ImageTransfer) -> None:
        """Waits until one transfer has been copied; raises like wait_copied()."""
        while not transfer.staged(CANCEL_LOOK_S):
            self._raise_if_not_awaited()

    def wait_copied(self) -> None:
        """Waits until everything is copied, and checks that no tensor changed before its copy.

        Raises:
            StorageError, DeviceError: a write or a copy failed.
            StagingConflict: a tensor changed.
            SaveCancelled: the caller has cancelled the save.
        """
        if self.worker is None:
            self._copy()
        self._copied.wait()
        self.permit.check()
        if self._failure is not None:
            raise self._failure

    # ---- the thread of this life

    def start(self, name: str, work: Callable[[], None]) -> bool:
        """Starts the worker, which sets its `outcome`, wakes this life, waits until the result is
        set, and sets `is_left`. Returns False if no thread can be started.
        """
        self.worker = threading.Thread(target=work, name=name, daemon=True)
        try:
            self.worker.start()
        except RuntimeError:
            self.worker = None
        return self.worker is not None

    def follow(self) -> BaseException | None:
        """Waits for the end of the stages; returns their error. If they hang, revokes the permit
        and raises an error that ends the save.
        """
        while self.outcome is None:
            try:
                if self._is_placed and not self._copied.is_set():
                    self._copy()
                else:
                    self._wait()
            except BaseException as error:
                if self.permit.is_revoked and self.outcome is None:
                    raise
                # Unforeseen. The worker may be writing what it has copied, and is to end first.
                self._failure = self._failure or error.with_traceback(None)
        (failure,), self.outcome = self.outcome, (None,)
        return failure

    def end(self, error: BaseException | None) -> None:
        """Drops all references and sets the final state."""
        in_doubt = State.IN_DOUBT if is_visible(error) else State.FAILED
        self._fate = [State.COMMITTED if error is None else in_doubt]
        self.forget_copies()
        self._failure, self._forget = None, lambda: None

    def forget_copies(self) -> None:
        """Drops the references to the copied state; called after all copies have ended."""
        self._verdict.forget()
        self.transfers.clear()
        self._reads = DeviceSources()

    def wait_left(self) -> None:
        """Waits until the worker has finished its work after the result was set, or hangs."""
        try:
            while not (self.worker is None or self.permit.is_revoked or self.is_left):
                self._wait()
        except CheckpointError as hung:
            log.warning("%s", hung)

    def leave(self) -> None:
        """Releases all waiters, including a worker that waits after its permit was revoked."""
        self.permit.ended.set()
        self._copied.set()
        self.gone.set()

    def worker_is_gone(self) -> bool:
        return self.worker is None or not self.worker.is_alive()

    def _wait(self) -> None:
        """Waits for a while for a notification of the worker; raises like follow()."""
        try:
            self._news.get(timeout=self._bound.look_s)
        except Empty:
            self._watch()

    def _watch(self) -> None:
        if self.worker is None:  # this thread is it
            return
        error: CheckpointError | None = self.permit.revoke(self._bound)
        if error is None and self._handle.given_up_for() >= GIVEN_UP_S:
            error = self.permit.revoke() or CheckpointError(
                f"the {self._handle.subject()} was abandoned, but did not end within "
                f"{GIVEN_UP_S:g} s; this process no longer waits for it"
            )
        if error is not None:
            raise error

    def _copy(self) -> None:
        """Waits for the copies and opens the fence; keeps an error for the worker."""
        try:
            self._wait_copied()
        except BaseException as error:
            # Frames of this thread would hold the save, in a circle with the error.
            self._failure = error.with_traceback(None)
            if self.permit.is_revoked:
                raise
        finally:
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
        self.reach(State.WRITING)
        handle.mark_staged()

    def _look(self) -> None:
        self._raise_if_not_awaited()
        self._watch()

    def _raise_if_not_awaited(self) -> None:
        """Raises the error of a save that was cancelled or interrupted during its copies."""
        self._agreement.raise_if_ended()
        if self.interrupted:
            raise self.interruption()

    def _order(self) -> bool:
        """Makes the calling thread's streams wait for the copies; returns False if it cannot."""
        self._verdict.give()
        return self._reads.lead()
