"""The saves in flight of one process.

    save: object -> capture (pickle) -> layout (image) -> stage and write (blocks) -> commit
    load: file -> parse (index) -> read and verify (blocks) -> torch.load over the verified bytes

Responsible for beginning saves on threads of their own, for their order, their errors, and for what
happens to them at exit and after a fork. It must not know what a save writes: that is its Job's.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from fastckpt.engine.devices import Devices, Reads
from fastckpt.engine.gds import Gds
from fastckpt.engine.gds_trial import Choice
from fastckpt.engine.rates import Rates
from fastckpt.engine.staging import Staging
from fastckpt.errors import CheckpointError, fate, retold
from fastckpt.handle import SaveHandle
from fastckpt.latch import Latch, start_thread
from fastckpt.ranks.round import Round
from fastckpt.saving.copying import Copying
from fastckpt.saving.fence import Watched
from fastckpt.storage.file_system import Storage, close_inherited, shortage_told

log = logging.getLogger("fastckpt")

IN_FLIGHT_MAX = 16
_HEAD_START_S = 0.001
_LOOK_S = 0.5  # how often a save that waits for its turn looks whether it is still wanted
_FREEING_S = 60.0  # longest wait for the blocks of replaced files
_LOWEST = 19  # nice(2)
_SIZE_BYTES = 8  # of the number that each rank's record begins with: how much it has written


class InFlight(NamedTuple):
    """A save in flight: its lane, and a latch that it sets when nothing of it is left to do."""

    lane: str
    gone: Latch


class Pipeline:
    """The saves in flight of one process. close() waits for them and frees everything.

    A signal handler may raise on the thread that saves or waits, at any moment. So all that a save
    holds is held by its own thread: the caller begins that thread, waits for it, and tells it by a
    plain store if it was interrupted. What both look at is changed by single operations of dicts
    and sets, without a lock.

    Args:
        storage: the seam to the file system.
        budget_bytes, devices, gds: as Staging's.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        budget_bytes: int | None = None,
        devices: Devices | None = None,
        gds: Gds | None = None,
    ) -> None:
        self.storage = storage or Storage()
        self.staging = Staging(self.storage, budget_bytes, devices, gds)
        self.rates = Rates()
        self._slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(IN_FLIGHT_MAX):
            self._slots.put(None)
        self._in_flight: dict[SaveHandle, InFlight] = {}  # in the order of save()
        self._failed: dict[SaveHandle, None] = {}  # not yet known to have been asked for
        self._telling: set[int] = set()  # threads that tell a result, which callbacks may run on

    def save(self, job: Job) -> SaveHandle:
        """Sends a save on its way; returns when its fence allows."""
        handle = job.handle
        with job.agreement.failing():
            if _exited and threading.current_thread() is not threading.main_thread():
                raise CheckpointError(
                    f"save to {handle.path!r} refused: the interpreter is exiting"
                )
        name = f"fastckpt-save-{os.path.basename(handle.path)}"
        try:
            if _exited or not start_thread(partial(self._run, job), name):
                self._run_here(job)
            job.begun.wait()
            if job.fence == "step":
                self.staging.fence_next_step(handle)
            else:
                handle.pass_fence()
        except BaseException:  # Ctrl-C, say: the caller goes on, and may change what is not copied
            # First of all: a second signal may end this handler, at its first call.
            job.copying.interrupted = handle.reported = True
            if job.claim():  # no thread has begun it, and none will
                error = CheckpointError("interrupted before it began")
                job.agreement.fail(error)
                self._finish(job, error)
            raise
        handle.stats.stall_s = handle.elapsed_s()
        return handle

    def _run_here(self, job: Job) -> None:
        """No thread is to be had: the caller does the work. At exit it also sees the error, since
        there will be no next save to raise it.
        """
        self._run(job, on_caller=True)
        failure = job.handle.failure()
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # Ctrl-C: it was not the save's alone
        if _exited:
            self.staging.close()
            job.handle.result()

    def _run(self, job: Job, on_caller: bool = False) -> None:
        """A save from its beginning to its end."""
        if not job.claim():
            return
        slot = not on_caller and self._take_slot(job)
        try:
            # In flight first, and then what was before it: saves that begin at once agree on that.
            self._in_flight[job.handle] = InFlight(job.lane, Latch())
            job.previous = self._pending(job.lane, before=job.handle)
        finally:
            job.begun.set()
        if job.fence == "step" and not on_caller:
            # The caller, who waits for nothing else, would wait for the GIL while an image is laid
            # out.
            time.sleep(_HEAD_START_S)
        try:
            error = job.run(self)
        except BaseException as unforeseen:  # or whoever waits would wait for ever
            error = unforeseen
        if slot:
            self._slots.put(None)  # before callbacks run, which may save, or raise
        self._finish(job, error)

    def _take_slot(self, job: Job) -> bool:
        """Waits for its turn among IN_FLIGHT_MAX saves. False: the caller no longer waits for it,
        and it will fail without one.
        """
        while not job.copying.interrupted:
            try:
                self._slots.get(timeout=_LOOK_S)
                return True
            except Empty:
                pass  # looks again whether the caller still waits
        return False

    def _finish(self, job: Job, error: BaseException | None) -> None:
        handle = job.handle
        if error is not None:
            self._failed[handle] = None
        self._telling.add(threading.get_ident())
        handle.mark_staged()
        try:
            try:
                if error is None:
                    handle.stats.gpu_stall_s = job.reads.stall_s()
                    handle.stats.committed_s = handle.elapsed_s()
                    handle.set_result(handle.stats)
                else:
                    handle.set_exception(error)
            finally:  # a callback may raise SystemExit
                job.end(self)
            if error is None:
                # Told after the result, so that no log that is stuck can hold that up.
                level = logging.DEBUG if job.agreement.rank else logging.INFO
                log.log(level, "saved %r: %s", handle.path, handle.stats)
                self.staging.warm(job.staging_nbytes, job.reads)
                if job.choice is not None:
                    job.choice.learn()
        finally:
            self._telling.discard(threading.get_ident())
            ended = self._in_flight.pop(handle, None)
            if ended is not None:
                ended.gone.set()

    def _pending(self, lane: str, before: SaveHandle | None = None) -> list[SaveHandle]:
        pending = []
        for handle, save in self._in_flight.copy().items():
            if handle is before:
                break
            if save.lane == lane:
                pending.append(handle)
        return pending

    def wait_for(self, lane: str, *, ended: bool = False) -> None:
        """Waits for the saves of this lane (one file: its path) that are in flight; a failure is
        their handles' to report.

        With `ended` also for what they still do afterwards, within reason; but not in a callback of
        one of them, which is among that.
        """
        for handle in self._pending(lane):
            handle.wait_done()
        if ended and threading.get_ident() not in self._telling:
            self._wait_gone(self._pending(lane))

    def _wait_gone(self, handles: list[SaveHandle]) -> None:
        """Waits until nothing is left to do for these saves, within reason."""
        until = time.monotonic() + _FREEING_S
        for handle in handles:
            save = self._in_flight.get(handle)
            if save is not None:
                save.gone.wait(max(0.0, until - time.monotonic()))

    def raise_unreported(self, path: str) -> None:
        """Raises the first error of an earlier save that nobody has asked for; then it counts as
        asked for.

        Args:
            path: where the save goes that is not begun because of that error, for the message; ""
                for a file-like object.
        """
        for first in self.unreported()[:1]:
            raise_earlier(first, path)

    def unreported(self) -> list[SaveHandle]:
        """Failed saves that nobody asked for."""
        for handle in self._failed.copy():
            if handle.reported:
                self._failed.pop(handle, None)
        return [*self._failed.copy()]

    def allocate(self, fd: int, nbytes: int, path: str) -> None:
        """Allocates; if the space is short, first lets committed saves free what they replaced.

        Raises:
            StorageError: there is too little room, and how much. OSError: what else is refused.
        """
        others = self._in_flight.copy()  # before: what is freed from now on may be what was short
        with shortage_told(self.storage, fd, path, nbytes):
            try:
                self.storage.allocate(fd, nbytes)
            except OSError as error:
                freeing = [handle for handle in others if handle.done()]
                if error.errno != errno.ENOSPC or not freeing:
                    raise
                self._wait_gone(freeing)
                self.storage.allocate(fd, nbytes)

    def prepare(self, nbytes: int) -> None:
        """Takes the pages that a save of so much stages in, on a thread of its own, which has less
        right to a CPU than any other.
        """

        def take() -> None:
            with suppress(OSError):  # then it has as much
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
            self.staging.engine()
            self.staging.warm(nbytes, Reads())

        start_thread(take, "fastckpt-prepare")

    def drain(self) -> None:
        """Waits for every save in flight, and for what it still does after its commit."""
        while self._in_flight:
            for save in self._in_flight.copy().values():
                save.gone.wait()

    def close(self) -> None:
        """Waits for every save in flight and frees everything."""
        self.drain()
        self.staging.close()


def raise_earlier(handle: SaveHandle, not_begun: str | None = None) -> None:
    """Raises the error of a save that failed, in a later call, and says that it is of that save.

    Args:
        handle: of the save that failed; from now on its error counts as asked for.
        not_begun: where the save goes that is not begun because of that error; "": to a file-like
            object. None: the call that raises begins no save.
    """
    error = handle.exception()
    assert error is not None, "the save has failed"
    text = f"an earlier save, to {handle.path!r}, failed: {error}"
    if not_begun is not None:
        target = repr(not_begun) if not_begun else "a file-like object"
        text += f"; this save, to {target}, was not begun"
    raise retold(error, text)


class Job:
    """One save of this process. A subclass says in write() what is written, where, and how.

    Args:
        handle: tells the path and takes the clocks; its result is set by the pipeline.
        agreement: this save's round with the other ranks; of one rank where there are none.
        reads: what of it lies on devices.
        watched: what must not change before it was copied.
        fence: "call" or "step".
        lane: saves of one lane commit in the order of their beginning.
    """

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        reads: Reads,
        watched: Sequence[Watched],
        *,
        fence: str,
        lane: str,
    ) -> None:
        self.handle = handle
        self.agreement = agreement
        handle.stats.ranks = agreement.world_size
        self.reads = reads
        self.copying = Copying(handle, reads, watched, self.forget)
        self.choice: Choice | None = None
        self.fence = fence
        self.lane = lane
        self.previous: list[SaveHandle] = []  # all in flight: the last may fail before the others
        self.begun = Latch()  # its thread has it, in its lane
        self._claims = [None]
        self.staging_nbytes = 0  # what it would have used of the arena, had all pages been there

    def claim(self) -> bool:
        """Whether the caller of this is the one, of the save's thread and an interrupted save(), to
        carry it through.
        """
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    def commit(self, pipeline: Pipeline) -> None:
        """Writes and commits, or raises having removed what was begun."""
        try:
            self.write(pipeline)
        except BaseException as error:
            self.agreement.fail(error)
            # The first rank may have committed before it was lost: its checkpoint is not destroyed.
            if not self.agreement.may_be_visible or self.agreement.failed:
                self.abandon(pipeline.storage)
            raise

    def write(self, pipeline: Pipeline) -> None:
        """Writes, and commits by conclude()."""
        raise NotImplementedError

    def abandon(self, storage: Storage) -> None:
        """Removes what this rank has made of a save that failed, beyond what write() has."""

    def forget(self) -> None:
        """Drops references to what was copied; called when all was."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops every reference to what was saved."""
        raise NotImplementedError

    def end(self, pipeline: Pipeline) -> None:
        """Does what is left to do when the result has been told."""
        self.agreement.close()

    def run(self, pipeline: Pipeline) -> BaseException | None:
        """All of it, on the thread it is called on. Returns the error that prevented the commit."""
        try:
            if self.copying.interrupted:
                raise CheckpointError("interrupted before it began")
            self.commit(pipeline)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the state
            # Those that still run hold the job, in a circle with the handle's error: a device must
            # not wait for the garbage collector. Nothing is being copied any more.
            self.reads, self.choice = Reads(), None
            self.agreement.fail(error)
            return error
        finally:
            self.copying.close()
            self.release()
            self.previous = []
        if self.agreement.rank:
            # It looked for the path before the first rank had made it, and is told now that it has.
            with suppress(OSError):  # it is seen later then
                pipeline.storage.look_again(self.handle.path)
        return None

    def wait_for_previous(self) -> None:
        """Waits until what was saved before in this lane has committed or failed."""
        for handle in self.previous:
            handle.wait_done()

    def wait_turn(self) -> None:
        """On the first rank: returns when the saves before this one in its lane have committed."""
        self.wait_for_previous()

    def follow(self) -> None:
        """On the other ranks: what they do while the first one commits."""

    def conclude(self, record: bytes, publish: Callable[[list[bytes]], None]) -> None:
        """Commits, as Round.conclude() does, in its turn in its lane; adds up what ranks wrote."""
        stats = self.handle.stats

        def publish_all(records: list[bytes]) -> None:
            sizes = (int.from_bytes(its[:_SIZE_BYTES], "little") for its in records)
            stats.total_nbytes = sum(sizes)
            publish([its[_SIZE_BYTES:] for its in records])

        told = stats.nbytes.to_bytes(_SIZE_BYTES, "little") + record
        self.agreement.conclude(told, publish_all, turn=self.wait_turn, follow=self.follow)


_lock = threading.Lock()
_current: Pipeline | None = None
_exited = False


def current() -> Pipeline:
    """The process's pipeline, behind fastckpt.save and fastckpt.load; made at the first call."""
    global _current
    if _current is None:
        made = Pipeline()
        with _lock:  # not around a call, in which a signal handler might save, too
            if _current is None:
                _current = made
    return _current


def _at_exit() -> None:
    """Drains, says what failed unnoticed, frees everything."""
    global _exited
    _exited = True
    pipeline = _current
    if pipeline is None:
        return
    pipeline.drain()
    for handle in pipeline.unreported():
        sys.stderr.write(
            f"fastckpt: the save to {handle.path!r} FAILED and {fate(handle.failure())}: "
            f"{handle.failure()}\n"
        )
    if any(thread.daemon for thread in threading.enumerate()):
        pipeline.staging.abandon()  # one of them may be in it; the kernel frees it in a moment
    else:
        pipeline.close()


def _after_fork_in_child() -> None:
    """The parent's saves go on in the parent; the child starts without any."""
    global _current, _lock
    if _current is not None:
        _current.staging.abandon()
    close_inherited()
    _current, _lock = None, threading.Lock()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
