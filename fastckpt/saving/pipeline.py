"""The saves in flight of one process.

Responsible for the begin and end of each save, the order of saves, their errors, and their
treatment at exit and after a fork. It must not know what a save writes.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue

from fastckpt.engine.devices import Devices, DeviceSources
from fastckpt.engine.gds import Gds
from fastckpt.engine.save_stats import CLOCKS_BYTES, RankClocks
from fastckpt.engine.staging import Staging
from fastckpt.engine.token_buckets import TokenBuckets
from fastckpt.errors import CheckpointError, SaveCancelled, StorageError, retold
from fastckpt.latch import SERVER_S, is_called_back, items_of, start_thread, within
from fastckpt.ranks.round import Round
from fastckpt.ranks.signal_handlers import DeferredErrors
from fastckpt.saving.ctrl_c import fail_exit, tell_lost, tell_lost_in_child, wait_at_exit
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.life import Life, State
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.storage import calls
from fastckpt.storage.atomic import remove_dead
from fastckpt.storage.bound import LOOK_S
from fastckpt.storage.file_system import Storage, close_inherited, shortage_told
from fastckpt.storage.objects import PathStorage

log = logging.getLogger("fastckpt")

IN_FLIGHT_MAX = 16
_HEAD_START_S = 0.001
_LOOK_S = 0.5  # how often a save that waits for a slot looks whether its caller still waits
_STILL_S = 1800.0  # for how long exit waits for saves of which none gets on
FREEING_S = 60.0  # longest wait for the blocks of replaced files
_LOWEST = 19  # nice(2)


class Pipeline:
    """The saves in flight of one process, and the storage and staging memory that they use.

    A signal handler may raise at any moment on a thread that calls save() or waits. So all
    resources of a save belong to its own threads; the caller only begins the save, waits for it,
    and reports an interruption by setting a plain attribute. Shared state is changed by single
    operations of dicts and sets, without a lock. For Args see Staging.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        budget_bytes: int | None = None,
        devices: Devices | None = None,
        gds: Gds | None = None,
    ) -> None:
        self.storage = storage or PathStorage()
        self.staging = Staging(self.storage, budget_bytes, devices, gds)
        self.rates = TokenBuckets()
        self._slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(IN_FLIGHT_MAX):
            self._slots.put(None)
        self._in_flight: dict[InnerHandle, Job] = {}  # in the order of save()
        # Their errors may not have been asked for; whether another kind of save has warned of them.
        self._failed: dict[InnerHandle, bool] = {}
        self._retention = calls.NotedLock("retention", "")

    def save(self, job: Job) -> InnerHandle:
        """Begins a save on its own threads; returns when its fence permits."""
        handle, life = job.handle, job.life
        with job.agreement.failing():
            if _comes_too_late():
                raise CheckpointError(
                    f"the save to {handle.path!r} was refused: the interpreter is exiting and "
                    "does not wait for this thread"
                )
        try:
            # Python joins this thread, which ends even if the worker hangs.
            if _exited or not start_thread(partial(self._run, job), f"{job.name}-life"):
                self._run_here(job)
            life.begun.wait()
            if job.fence == "step":
                self.staging.fence_next_step(handle)
            else:
                handle.pass_fence()
        except BaseException as raised:  # the caller goes on, and may change what is not copied
            # This store comes first: a second signal may end this handler at its first call.
            life.interrupted = True
            handle.note_reported()
            if life.claim():  # no thread has begun the save, and none will
                error = life.interruption()
                job.agreement.fail(error)
                self._finish(job, error)
                job.end(self)
            elif isinstance(raised, KeyboardInterrupt):
                life.is_lost = life.settle()
                handle.tell_interrupted(life.is_lost)
            raise
        handle.stats.stall_s = handle.elapsed_s()
        return handle

    def _run_here(self, job: Job) -> None:
        """Saves on the caller's thread, for the case that no thread can be started. At exit it also
        raises the save's error, since no later save will. If a signal handler raises during the
        save, the save is cancelled, and the handler's error is raised after all resources are
        freed.
        """
        with DeferredErrors(job.handle.cancel):
            self._run(job, on_caller=True)
            if _exited:
                self.staging.close()
                if job.handle.failure() is not None:
                    fail_exit(job.handle.path)
        if _exited:
            job.handle.result()

    def _run(self, job: Job, on_caller: bool = False) -> None:
        """Runs a save from its begin to its end, on the thread of its life."""
        life, error = job.life, None
        try:
            try:
                if not life.claim():
                    return
                job.has_slot = not on_caller and self._take_slot(job)
                # It enters first and looks then, so that saves that begin at once agree on their
                # order.
                self._in_flight[job.handle] = job
                job.previous = self._pending(job.queue, before=job.handle)
            finally:
                life.begun.set()
            error = self._outcome(job, on_caller)
        except BaseException as failure:  # of this thread: the worker's is an outcome
            error = failure.with_traceback(None)
            life.permit.revoke()
        try:
            if life.permit.is_revoked and error is not None:
                error = job.give_up(error)
            self._finish(job, error)
            if life.worker is None:
                job.end(self)
        finally:  # whatever fails, nobody waits for ever
            try:
                if not job.handle.done():
                    self._tell(job, error)
                life.wait_left()
                if life.permit.is_revoked and life.worker is not None:
                    self.staging.hung.add(-threading.get_ident(), life.worker_is_gone)
                    job.agreement.close()
            finally:
                self._in_flight.pop(job.handle, None)
                life.leave()
                del job, life, error  # a traceback may keep this frame

    def _outcome(self, job: Job, on_caller: bool) -> BaseException | None:
        """Makes the worker run the stages, or runs them itself if no thread can be started; returns
        their error. Raises an error that ends the save while the stages still run.
        """
        if job.fence == "step" and not on_caller:
            # What comes next holds the GIL, and the caller waits for nothing else.
            time.sleep(_HEAD_START_S)
        if on_caller or not job.life.start(job.name, partial(self._work, job)):
            with job.life.permit:
                return job.run(self)
        return job.life.follow()

    def _work(self, job: Job) -> None:
        """Runs the stages, and then the work that remains after the result was set."""
        life = job.life
        try:
            with life.permit, suppress(calls.Revoked):  # then the life has told the error
                life.outcome = (job.run(self),)
                life.wake()
                life.told.wait()
                job.end(self)
            with suppress(OSError):  # what stays is left to a later process
                for path in life.permit.left:
                    remove_dead(self.storage, path)
        except BaseException as unforeseen:
            life.outcome = life.outcome or (unforeseen.with_traceback(None),)
            raise
        finally:
            life.is_left = True
            life.wake()
            del job, life  # a traceback may keep this frame

    def _take_slot(self, job: Job) -> bool:
        """Waits for one of IN_FLIGHT_MAX slots. Returns False if the caller was interrupted or has
        cancelled the save; the save then fails without a slot.
        """
        while not job.life.interrupted and not job.agreement.is_cancelled():
            try:
                self._slots.get(timeout=_LOOK_S)
                return True
            except Empty:
                pass  # looks again whether the caller still waits
        return False

    def _finish(self, job: Job, error: BaseException | None) -> None:
        """Drops the save's references to the state, and sets the result."""
        handle, reads = job.handle, job.reads
        if error is not None:
            self._failed[handle] = False
            handle.drop = partial(self._failed.pop, handle, None)
        job.life.end(error)
        job.release()
        job.previous = []
        if handle.stats.stall_s is None:  # save() has yet to return; callbacks see how long it took
            handle.stats.stall_s = handle.elapsed_s()
        if error is None:
            handle.stats.gpu_stall_s = reads.stall_s()
            handle.stats.committed_s = handle.elapsed_s()
        self._tell(job, error)
        if error is None:
            # Logged after the result was told, so that a log that is stuck cannot delay it.
            level = logging.DEBUG if job.agreement.rank else logging.INFO
            log.log(level, "%s %r: %s", job.deed, handle.path, handle.stats)
            self.staging.warm(job.staging_nbytes, reads)
        elif isinstance(error, SaveCancelled):  # which no later save tells
            known = job.agreement.rank or (handle.is_cancelled() and not handle.is_given_up())
            log.log(logging.DEBUG if known else logging.WARNING, "%s", error)

    def _tell(self, job: Job, error: BaseException | None) -> None:
        if job.has_slot:
            self._slots.put(None)  # before callbacks run, which may save, or raise
            job.has_slot = False
        try:
            if error is None:
                job.handle.set_result(job.handle.stats)
            else:
                job.handle.set_exception(error)
        finally:  # a callback may raise a BaseException
            job.life.told.set()
            job.reads, job.failure = DeviceSources(), None  # whoever waits may close the devices

    def _pending(self, queue: str, before: InnerHandle | None = None) -> list[InnerHandle]:
        pending = []
        for handle, job in items_of(self._in_flight):
            if handle is before:
                break
            if job.queue == queue:
                pending.append(handle)
        return pending

    def wait_for(self, queue: str, *, ended: bool = False) -> None:
        """Waits for the saves in flight of this queue (for a file, its path), and raises no errors.

        If `ended` is set, it also waits, for a limited time, for their work after the commit.
        """
        for handle in self._pending(queue):
            handle.wait_done()
        if ended:
            self.drain(FREEING_S, self._pending(queue))

    def refuse(self, handle: InnerHandle, error: Exception, handled: BaseException | None) -> None:
        """Ends a save that could not begin, with an error that result() or the next save raises.

        Args:
            handled: the exception that the caller was handling at the call, which is not changed.
        """
        link: BaseException | None = error
        while link is not None:  # frames hold the state, also those of the caller, which still run
            link.__traceback__ = None
            if link.__context__ is handled:
                link.__context__ = None
            link = link.__cause__ or link.__context__
        self._failed[handle] = False
        handle.set_exception(error)

    def raise_unreported(self, path: str, kind: str, on_error: str = "raise") -> None:
        """Raises the first error of an earlier save of this kind that was not retrieved, if there
        is one. Errors of other kinds are only logged as warnings, once, since the next save of
        their kind raises them.

        Args:
            path: the path of the save that the error prevents; "": a file-like object.
            kind: see InnerHandle.
            on_error: "raise"; or "warn": the errors do not prevent this save.
        """
        unheard = self.unreported()
        raised = [its for its in unheard if its.kind == kind and on_error == "raise"]
        for handle in unheard:
            if handle not in raised and not self._failed.get(handle):
                self._failed[handle] = True
                log.warning("an earlier save, to %r, failed: %s", handle.path, handle.failure())
        for first in raised[:1]:
            raise_earlier(first, path)

    def unreported(self) -> list[InnerHandle]:
        """Returns the failed saves whose errors were not retrieved."""
        for handle, _ in items_of(self._failed):
            if handle.is_asked_for():
                self._failed.pop(handle, None)
        return [handle for handle, _ in items_of(self._failed)]

    def allocate(self, fd: int, nbytes: int, path: str) -> None:
        """Allocates space for a file. If there is too little, first waits until committed saves
        have freed the files that they replaced.

        Raises:
            StorageError: there is too little space; the message has the numbers.
            OSError: any other refusal.
        """
        others = items_of(self._in_flight)  # first: a save that ends meanwhile frees space, too
        with shortage_told(self.storage, fd, path, nbytes):
            try:
                self.storage.allocate(fd, nbytes)
            except OSError as error:
                freeing = [handle for handle, _ in others if handle.done()]
                if error.errno != errno.ENOSPC or not freeing:
                    raise
                self.drain(FREEING_S, freeing)
                self.storage.allocate(fd, nbytes)

    def prepare(self, nbytes: int) -> None:
        """Allocates staging pages for a save of `nbytes`, on a thread of the lowest priority."""

        def take() -> None:
            with suppress(OSError):  # then it runs at the priority of the others
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
            self.staging.engine()
            self.staging.warm(nbytes, DeviceSources())

        start_thread(take, "fastckpt-prepare")

    def retain(self, path: str, remove: Callable[[], None]) -> None:
        """Removes older checkpoints by calling `remove`, after the commit of the one at `path`;
        logs an error. Only one call runs at a time, since two would try to remove the same
        directories.
        """
        try:
            with self._retention, calls.Call("retention", path):
                remove()
        except Exception as error:
            log.warning("%r is committed, but older checkpoints were not removed: %s", path, error)

    def in_flight(self) -> list[InnerHandle]:
        """Returns the saves whose work has not ended."""
        return [handle for handle, _ in items_of(self._in_flight)]

    def drain(
        self, still_s: float = inf, only: Sequence[InnerHandle] | None = None
    ) -> list[InnerHandle]:
        """Waits for every save in flight, including its work after the commit. Does not wait in a
        callback of a save, since the save waits for the callback.

        Args:
            only: wait for these saves only.
            still_s: the longest time without progress of any of them. It is needed because calls of
                the user's functions and objects have no time limit.

        Returns:
            The saves that have not ended.
        """
        if is_called_back():
            return []
        seen, since = None, time.monotonic()
        while saves := [it for it in items_of(self._in_flight) if only is None or it[0] in only]:
            if saves[0][1].life.gone.wait(LOOK_S):
                continue
            now = [(it, job.life.state, it.progress(), it.stats.paced_s) for it, job in saves]
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since >= still_s:
                return [handle for handle, _ in saves]
        return []

    def close(self) -> None:
        """Waits for every save in flight and frees the engine's memory and threads."""
        self.drain()
        self.staging.close()


def raise_earlier(handle: InnerHandle, not_begun: str | None = None) -> None:
    """Raises the error of an earlier save in a later call, and marks it as retrieved.

    Args:
        handle: the handle of the save that failed.
        not_begun: the path of the save that the error prevents; "": a file-like object; None: the
            later call is not a save.
    """
    error = handle.exception()
    assert error is not None, "the save has failed"
    text = f"an earlier save, to {handle.path!r}, failed: {error}"
    if not_begun is not None:
        target = repr(not_begun) if not_begun else "a file-like object"
        text += f"; this save, to {target}, was not begun"
    raise retold(error, text)


class Job:
    """One save of this process. A subclass defines its files and their place in write().

    Args:
        handle: the save's handle, which has the path and the clocks; the pipeline sets its result.
        agreement: this save's round, with other ranks or of this rank alone.
        reads: the part of the state's memory that is on devices; None: there is none.
        watched: the tensors that must not change before they have been copied.
        fence: "call" or "step". The caller waits in Pipeline.save() for InnerHandle.pass_fence(),
            until the life releases it.
        queue: the name of the save's queue; saves of one queue commit in the order of their calls.

    Attributes:
        moving: the contexts of transfers in flight; write() enters them.
        deed: a verb for the log line of a successful save.
        name: the name of its worker's thread.
        life: the save's Life.
    """

    deed = "saved"

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        reads: DeviceSources | None = None,
        watched: Sequence[WatchedTensors] = (),
        *,
        fence: str,
        queue: str,
    ) -> None:
        self.handle = handle
        self.agreement = agreement
        handle.stats.ranks, handle.tells = agreement.world_size, agreement.rank == 0
        if handle.stats.captured_s is None:  # else another job began with this handle
            handle.stats.captured_s = handle.elapsed_s()
        self.reads = reads = DeviceSources() if reads is None else reads
        self.name = f"fastckpt-save-{os.path.basename(handle.path)}"
        self.life = Life(handle, agreement, reads, watched, self.forget)
        self.moving = ExitStack()
        self.fence = fence
        self.queue = queue
        self.previous: list[InnerHandle] = []  # all in flight: the last may fail before the others
        self.has_slot = False
        self.failure: BaseException | None = None  # the first, from before it hung
        self.staging_nbytes = 0  # how much it would stage if all pages were there

    def commit(self, pipeline: Pipeline) -> None:
        """Writes and commits; on an error, removes this rank's files and raises the error."""
        try:
            with self.moving:
                # Others hear of a failure while the files are still open: a rank that is about to
                # open one would report that it is gone, or find another under its descriptor.
                try:
                    self.write(pipeline)
                except BaseException as error:
                    cause = self._cause(error)
                    self.fail(cause)
                    if cause is not error:
                        raise cause from error
                    raise
        except BaseException as error:
            # If the first rank was lost after its commit, its checkpoint must not be destroyed.
            if not self.agreement.may_be_visible:
                self._remove(pipeline.storage, error)
            raise

    def _cause(self, error: BaseException) -> BaseException:
        """Returns the failure of another rank in the place of an error that this rank has because
        the other one has removed the directory since.
        """
        if isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ESTALE):
            try:
                self.agreement.check()
            except CheckpointError as failure:
                return failure
        return error

    def fail(self, error: BaseException) -> None:
        """Reports the failure to the other ranks; keeps the first error."""
        if calls.is_revoked():  # they were told
            return
        self.failure = self.failure or error
        self.agreement.fail(error)

    def give_up(self, error: BaseException) -> BaseException:
        """Ends the save's transfers and its round; called on another thread than the worker's.
        Returns the error to report, which is an earlier one if the save hangs in its cleanup.
        """
        error = self.failure or error
        self.agreement.fail(error)
        for transfer in self.life.transfers:
            transfer.cancel()
        for transfer in self.life.transfers:
            transfer.__exit__()
        return error

    def _remove(self, storage: Storage, error: BaseException) -> None:
        """Calls abandon(); limits the wait if the server already failed to answer the writes."""
        if isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT:
            with suppress(Exception):  # what stays is debris, which a later save removes
                within(min(SERVER_S, self.agreement.timeout_s), partial(self.abandon, storage))
        else:
            self.abandon(storage)

    def write(self, pipeline: Pipeline) -> None:
        """Writes, and commits by conclude()."""
        raise NotImplementedError

    def abandon(self, storage: Storage) -> None:
        """Removes this rank's files of a failed save that write() has not removed."""

    def forget(self) -> None:
        """Drops references to the state; called after everything has been copied."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops every reference to the saved state."""
        raise NotImplementedError

    def end(self, pipeline: Pipeline) -> None:
        """Does the work that remains after the result was set."""
        self.agreement.close()

    def run(self, pipeline: Pipeline) -> BaseException | None:
        """Runs the stages on this thread. Returns the error that prevented the commit."""
        try:
            if self.life.interrupted:
                raise self.life.interruption()
            pipeline.staging.hung.sweep()
            self.commit(pipeline)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the state
            # Frames that still run hold the job, in a circle with the handle's error, and memory of
            # devices must not wait for the garbage collector. Nothing is being copied any more.
            self.reads = DeviceSources()
            self.fail(error)
            return error
        if self.agreement.rank:
            # This machine may still believe that the path does not exist, as when this rank looked.
            with suppress(OSError):  # then the path is seen later
                pipeline.storage.look_again(self.handle.path)
        return None

    def wait_turn(self) -> None:
        """Waits, on the first rank, until the earlier saves of the queue have committed or failed,
        so that this save may publish.
        """
        for handle in self.previous:
            handle.wait_done()

    def follow(self) -> None:
        """Does the work of the other ranks while the first rank commits."""

    def conclude(self, record: bytes, publish: Callable[[list[bytes]], None]) -> None:
        """Commits by Round.conclude(), in the queue's order; adds up the ranks' written bytes."""
        stats = self.handle.stats

        def publish_all(records: list[bytes]) -> None:
            self.life.reach(State.PUBLISHING)
            stats.by_rank = tuple(RankClocks.from_bytes(its[:CLOCKS_BYTES]) for its in records)
            stats.total_nbytes = sum(its.nbytes for its in stats.by_rank)
            publish([its[CLOCKS_BYTES:] for its in records])

        told = RankClocks.of(stats).to_bytes() + record
        self.life.reach(State.AGREEING)
        self.agreement.conclude(told, publish_all, turn=self.wait_turn, follow=self.follow)


_lock = threading.Lock()
_current: Pipeline | None = None
_exits = _exited = False  # since exit waits for saves; since Python has joined its threads
when_drained: list[Callable[[], None]] = []  # called at exit, when all saves have ended


def current() -> Pipeline:
    """Returns the process's pipeline; creates it at the first call."""
    global _current
    if _current is None:
        made = Pipeline()
        with _lock:  # around no call: a signal handler that runs in one might save, too
            if _current is None:
                _current = made
    return _current


def _comes_too_late() -> bool:
    """Returns whether the interpreter is exiting and does not wait for the calling thread. The exit
    would never end if a daemon thread could still save, because it waits for each save, and the
    next one would begin during the wait.
    """
    here, main = threading.current_thread(), threading.main_thread()
    return here is not main and (_exited or (_is_daemon(here) and (_exits or not main.is_alive())))


def _begin_exit() -> None:
    """Waits for all saves unless Ctrl-C abandons them. It does so before Python joins threads,
    since an error would prevent the joins.
    """
    global _exits
    _exits = True
    if _current is not None:
        wait_at_exit(_current.in_flight(), _current.drain, _STILL_S)
        tell_lost_in_child(_current.unreported())


def _is_daemon(thread: threading.Thread) -> bool:
    """Whether a thread is a daemon thread other than fastckpt's own."""
    return thread.daemon and not thread.name.startswith("fastckpt-")


def _at_exit() -> None:
    """Waits for all saves, reports errors that were not retrieved, and frees everything."""
    global _exited
    _exited = True
    if (pipeline := _current) is None:
        return
    try:
        _end(pipeline)
    except BaseException:  # Ctrl-C was pressed meanwhile, or what was given up now hangs
        pipeline.staging.abandon()
        raise


def _end(pipeline: Pipeline) -> None:
    try:
        wait_at_exit(pipeline.in_flight(), pipeline.drain, _STILL_S)
    finally:
        tell_lost(pipeline.unreported())
    for call in when_drained:
        call()
    if any(map(_is_daemon, threading.enumerate())):
        pipeline.staging.abandon()  # one may be using it; the kernel frees it in a moment
    else:
        pipeline.close()


def _after_fork_in_child() -> None:
    """Forgets the parent's saves in a forked child, which begins without any."""
    global _current, _lock
    if _current is not None:
        _current.staging.abandon()
    close_inherited()
    _current, _lock = None, threading.Lock()


atexit.register(_at_exit)
# Internal to CPython, as concurrent.futures uses it; nothing public comes before the joins.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_begin_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
