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
    """How far a save is; docs/project/design.md has what ends it in each state."""

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
        reads: the memory of the state that lies on devices.
        watched: the tensors that must not change before they have been copied.
        forget: drops references to what was copied; called once, when everything has been.

    Attributes:
        permit: the worker's, to call the file system.
        transfers: the transfers that read the state; complete before placed().
        interrupted: set by a caller that could not wait: unless everything was copied by then, the
            save fails. It is an attribute, because a second signal could break off a call.
        is_lost: set by that caller if the save fails by that.
        begun: set when the save has its place in the order of its queue.
        told: set when the result has been told.
        gone: set when nothing of it is left to do.
        worker: the worker's thread; None if there is none, because none can be started.
        outcome: by the worker, when the stages have ended: their error.
        is_left: by the worker, when it has done what is left to do after the result was told. Both
            are plain stores, which no error can prevent; wake() has them seen at once.
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
        """How far it is. The end, which the thread of this life tells, is the last state."""
        return self._fate[0] if self._fate else self._reached

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
        self._reached = state

    def placed(self) -> None:
        """Says that the caller may be let go from now on, as soon as everything is copied."""
        self._is_placed = True
        self.wake()

    def wake(self) -> None:
        """Has the thread of this life look at what the worker has noted."""
        self._news.put(None)

    def raise_if_ended(self) -> None:
        """Raises what ends a save whose caller does not wait for it: SaveCancelled, or the error of
        an interrupted one, or of the copies. Asks no other rank.
        """
        self._agreement.raise_if_ended()
        self.permit.check()
        if self._failure is not None:
            raise self._failure
        if self.is_lost:
            raise self.interruption()

    def wait_for(self, transfer: ImageTransfer) -> None:
        """Waits until one transfer has been copied; raises as wait_copied()."""
        while not transfer.staged(CANCEL_LOOK_S):
            self._raise_if_not_awaited()

    def wait_copied(self) -> None:
        """Waits until everything has been copied and nothing had changed before.

        Raises:
            StorageError, DeviceError: a write or a copy failed. StagingConflict: a tensor changed.
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
        """Starts the worker, which notes its `outcome` and wakes this life, waits until it is told,
        and notes that it `is_left`. Returns False if there can be no thread.
        """
        self.worker = threading.Thread(target=work, name=name, daemon=True)
        try:
            self.worker.start()
        except RuntimeError:
            self.worker = None
        return self.worker is not None

    def follow(self) -> BaseException | None:
        """Waits for the end of the stages; returns their error. If none comes, revokes the permit,
        and raises an error that ends the save in their place.
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
        """Drops all references, and changes the state for the last time."""
        in_doubt = State.IN_DOUBT if is_visible(error) else State.FAILED
        self._fate = [State.COMMITTED if error is None else in_doubt]
        self.forget_copies()
        self._failure, self._forget = None, lambda: None

    def forget_copies(self) -> None:
        """Drops the references to what was copied; nothing is being copied any more."""
        self._verdict.forget()
        self.transfers.clear()
        self._reads = DeviceSources()

    def wait_left(self) -> None:
        """Waits until the worker has done what is left to do after the result has been told, unless
        it hangs.
        """
        try:
            while not (self.worker is None or self.permit.is_revoked or self.is_left):
                self._wait()
        except CheckpointError as hung:
            log.warning("%s", hung)

    def leave(self) -> None:
        """Lets a worker go that still waits, as its permit is revoked, and everybody else."""
        self.permit.ended.set()
        self._copied.set()
        self.gone.set()

    def worker_is_gone(self) -> bool:
        return self.worker is None or not self.worker.is_alive()

    def _wait(self) -> None:
        """Waits for a while until the worker has noted something; raises as follow()."""
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
        """Waits for the copies, and opens the fence; keeps the error for the worker."""
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
        """Ends the save, before everything has been copied, if the caller does not wait for it."""
        self._agreement.raise_if_ended()
        if self.interrupted:
            raise self.interruption()

    def _order(self) -> bool:
        """Orders the calling thread's streams after the copies; returns False if it cannot."""
        self._verdict.give()
        return self._reads.lead()
