"""The one save path and the one load path.

    save: object -> capture (pickle) -> layout (image) -> stage and write (blocks) -> commit
    load: file -> parse (index) -> read and verify (blocks) -> torch.load over the verified bytes

Responsible for the order of these stages, for the saves in flight and for their errors. It must not
know the bytes of a format, how a block moves, or how a file system is spoken to.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from fastckpt import commit
from fastckpt.errors import CheckpointError
from fastckpt.fence import check_unchanged
from fastckpt.formats import torch_pickle, torch_zip
from fastckpt.handle import SaveHandle
from fastckpt.image import BLOCK_BYTES, PAGE_BYTES, Image, block_count
from fastckpt.staging import Staging, Transfer, stager_count
from fastckpt.storage import Storage, reported

log = logging.getLogger("fastckpt")

IN_FLIGHT_MAX = 16
_FREEING_S = 60.0  # longest wait for the blocks of replaced files


class Pipeline:
    """The saves in flight of one process. close() waits for them and frees everything.

    Args:
        storage: the seam to the file system.
        budget_bytes: hard limit of staging memory (see Staging).
    """

    def __init__(self, storage: Storage | None = None, budget_bytes: int | None = None) -> None:
        self.storage = storage or Storage()
        self.staging = Staging(self.storage, budget_bytes)
        self._slots = threading.BoundedSemaphore(IN_FLIGHT_MAX)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # State below is protected by _lock.
        self._in_flight: list[SaveHandle] = []  # in the order of save()
        self._failed: list[SaveHandle] = []  # not yet known to have been asked for

    def save(self, job: Save) -> SaveHandle:
        """Sends a save on its way; returns when its fence allows."""
        handle = job.handle
        if _exited and threading.current_thread() is not threading.main_thread():
            raise CheckpointError(f"save to {handle.path!r} refused: the interpreter is exiting")
        self._slots.acquire()
        try:
            with self._lock:
                job.previous = self._pending(handle.path)
                self._in_flight.append(handle)
            if job.fence == "step":
                self.staging.fence_next_step(handle)
            started = self._started(job)
        except BaseException:  # Ctrl-C, say: if the save has not begun, it never will
            if self._claimed(job):
                handle.reported = True
                self._finish(job, CheckpointError("interrupted before it began"))
            raise
        if not started:
            # No thread is to be had: the caller does the work. At exit it also sees the error,
            # since there will be no next save to raise it.
            self._run(job)
            if _exited:
                self.staging.close()
                handle.result()
        if job.fence == "call":
            handle.wait_staged()
        handle.stats.stall_s = handle.elapsed_s()
        return handle

    def _started(self, job: Save) -> bool:
        if _exited:
            return False
        name = f"fastckpt-save-{os.path.basename(job.handle.path)}"
        try:
            threading.Thread(target=self._run, args=(job,), name=name).start()
        except RuntimeError:
            return False
        return True

    def _claimed(self, job: Save) -> bool:
        """Whether the caller is the one, of its thread and an interrupted save(), to finish it."""
        with self._lock:
            claimed, job.begun = not job.begun, True
        return claimed

    def _run(self, job: Save) -> None:
        if self._claimed(job):
            self._finish(job, job.run(self))

    def _finish(self, job: Save, error: BaseException | None) -> None:
        handle = job.handle
        with self._lock:
            if error is not None:
                self._failed.append(handle)
        handle.mark_staged()
        self._slots.release()  # before callbacks run, which may save, or raise
        try:
            if error is None:
                handle.stats.committed_s = handle.elapsed_s()
                handle.set_result(handle.stats)
            else:
                handle.set_exception(error)
            if job.replaced is not None:
                close_quietly(self.storage, job.replaced)
            if error is None:
                self.staging.warm(job.staging_nbytes)
        finally:
            with self._changed:
                if handle in self._in_flight:
                    self._in_flight.remove(handle)
                self._changed.notify_all()

    def _pending(self, path: str) -> SaveHandle | None:
        return next((h for h in reversed(self._in_flight) if h.path == path), None)

    def wait_for(self, path: str) -> None:
        """Waits for the saves to this path that are in flight; a failure is their handles' to
        report.
        """
        with self._lock:
            pending = self._pending(path)
        if pending is not None:
            pending.wait_done()

    def raise_unreported(self) -> None:
        """Raises the first error of an earlier save that nobody has asked for; then it counts as
        asked for.
        """
        with self._lock:
            self._failed = [handle for handle in self._failed if not handle.reported]
            first = self._failed[0] if self._failed else None
        if first is not None:
            first.result()

    def unreported(self) -> list[SaveHandle]:
        """Failed saves that nobody asked for."""
        with self._lock:
            return [handle for handle in self._failed if not handle.reported]

    def allocate(self, fd: int, nbytes: int) -> None:
        """Allocates; if the space is short, first lets committed saves free what they replaced."""
        with self._lock:  # before trying: what is freed from now on may be what was short
            others = list(self._in_flight)
        try:
            self.storage.allocate(fd, nbytes)
        except OSError as error:
            with self._changed:
                freeing = [handle for handle in others if handle.done()]
                if error.errno != errno.ENOSPC or not freeing:
                    raise
                self._changed.wait_for(
                    lambda: not any(handle in self._in_flight for handle in freeing), _FREEING_S
                )
            self.storage.allocate(fd, nbytes)

    def drain(self) -> None:
        """Waits for every save in flight, and for what it still does after its commit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight)

    def close(self) -> None:
        """Waits for every save in flight and frees threads, memory and descriptors."""
        self.drain()
        self.staging.close()


@contextmanager
def temporary(storage: Storage, path: str) -> Iterator[tuple[int, str]]:
    """A new locked file beside path, as (descriptor, name), which the body writes and renames.

    The descriptor, and with it the lock, is kept until then. The file is removed if the body fails.

    Raises:
        StorageError: path is a directory, or its directory is missing, full or not writable.
    """
    with reported("open", path):
        replaced = storage.status(path)
        is_file = replaced is None or stat.S_ISREG(replaced.st_mode)
        if not is_file or not os.path.basename(path):
            raise IsADirectoryError(errno.EISDIR, "not a regular file")
        commit.remove_debris(storage, path)
        name = commit.temporary_path(path)
        fd = storage.create(name, 0o666)
    try:
        storage.lock(fd)
        if replaced is not None:
            with reported("set mode", name):
                storage.set_owner_and_mode(fd, replaced)
        yield fd, name
    except BaseException:
        try:
            storage.remove(name)
        except OSError:
            # Gone by the rename, or left for the next save to remove: the first error counts.
            pass
        raise
    finally:
        close_quietly(storage, fd)


def settle(storage: Storage, fd: int, path: str, durable: bool) -> None:
    """Makes sure that what was written has arrived: on the device, or else with the file system."""
    with reported("sync" if durable else "flush", path):
        (storage.sync if durable else storage.flush)(fd)


def close_quietly(storage: Storage, fd: int) -> None:
    """Closes a file whose content has settled or no longer matters: no error means a loss."""
    try:
        storage.close(fd)
    except OSError as error:
        log.warning("close failed: %s", error)


class Save:
    """One save: what to write, where, and how. run() does all of it on the thread it is called on.

    Args:
        handle: tells the path and takes the clocks; its result is set by the pipeline.
        captured: what was pickled.
        obj: held until staged, to name a tensor that changed too early.
        fence, backend, durable, staging_bytes: as fastckpt.save's.
    """

    def __init__(
        self,
        handle: SaveHandle,
        captured: torch_pickle.Capture,
        obj: object,
        *,
        fence: str,
        backend: str,
        durable: bool,
        staging_bytes: int | None,
    ) -> None:
        self.handle = handle
        self.captured: torch_pickle.Capture | None = captured
        self.obj: object = obj
        self.fence = fence
        self.backend = backend
        self.durable = durable
        self.staging_bytes = staging_bytes
        self.previous: SaveHandle | None = None
        self.replaced: int | None = None
        self.begun = False  # guarded by the pipeline's lock
        self.staging_nbytes = 0  # what it would have used of the arena, had all pages been there

    def run(self, pipeline: Pipeline) -> BaseException | None:
        """Writes and commits. Returns the error that prevented it, having removed the temporary."""
        storage, path = pipeline.storage, self.handle.path
        try:
            with temporary(storage, path) as (fd, name):
                self._write(pipeline, fd)
                settle(storage, fd, path, self.durable)
                if self.previous is not None:
                    self.previous.wait_done()
                self.replaced = commit.publish(storage, name, path, self.durable)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the state
            return error
        finally:
            self.captured = self.obj = self.previous = None
        return None

    def _write(self, pipeline: Pipeline, fd: int) -> None:
        """Moves the whole image into fd and checks that all of it arrived."""
        storage, staging, path = pipeline.storage, pipeline.staging, self.handle.path
        assert self.captured is not None
        image, tensors = torch_zip.layout(self.captured), self.captured.tensors
        self.captured = None
        stats, nbytes = self.handle.stats, image.nbytes
        stats.nbytes = nbytes
        route = staging.route(fd, path, self.backend, writing=True)
        stats.backend, stats.direct, stats.why = route.backend.name, route.direct, route.why
        with reported("allocate", path):
            pipeline.allocate(fd, -(-nbytes // PAGE_BYTES) * PAGE_BYTES if route.direct else nbytes)
        # With the step fence one CPU is left to the training that goes on meanwhile.
        stagers = stager_count() - (self.fence == "step")
        limit = staging.blocks_limit(self.staging_bytes)
        self.staging_nbytes = min(limit, block_count(nbytes, BLOCK_BYTES) + 1) * BLOCK_BYTES
        with Transfer(staging, fd, path, route) as transfer:
            # One block of the budget is the tail's, which is staged before the body is written.
            transfer.start(image, 0, max(1, limit - 1), stagers)
            transfer.wait_staged()
            check_unchanged(tensors, self.obj)
            tail = bytearray(image.tail(transfer.block_crcs(), transfer.slot_crcs()))
            body_nbytes = image.body_nbytes
            tensors.clear()  # the pickler's class refers to this list, in a circle
            del image, tensors
            self.obj = None
            self.handle.mark_staged()
            if limit == 1:
                transfer.wait_written()
            transfer.start(Image.of_bytes(tail), body_nbytes, 1, 1)
            transfer.wait_written()
            stats.staged_bytes_max = min(transfer.staged_bytes_max(), limit * BLOCK_BYTES)
        stats.written_s = self.handle.elapsed_s()
        if route.direct:
            with reported("truncate", path):
                storage.truncate(fd, nbytes)
        with reported("write", path):
            assert storage.size(fd) == nbytes, "the file is not as long as its image"


def save_stock(
    pipeline: Pipeline, write: Callable[[IO[bytes]], None], handle: SaveHandle, durable: bool
) -> SaveHandle:
    """Lets another library write the file now, with our commit around it. Raises what `write`
    raises.
    """
    storage = pipeline.storage
    pipeline.wait_for(handle.path)
    with temporary(storage, handle.path) as (fd, name):
        with os.fdopen(os.dup(fd), "wb") as file:
            write(file)
        handle.mark_staged()
        handle.stats.written_s = handle.elapsed_s()
        handle.stats.nbytes = storage.size(fd)
        settle(storage, fd, handle.path, durable)
        replaced = commit.publish(storage, name, handle.path, durable)
    if replaced is not None:
        close_quietly(storage, replaced)
    return finish_stock(handle)


def finish_stock(handle: SaveHandle) -> SaveHandle:
    """Completes the handle of a save that torch.save did by itself before returning."""
    handle.mark_staged()
    handle.stats.backend, handle.stats.why = "stock", "written by torch.save itself"
    handle.stats.stall_s = handle.stats.committed_s = handle.elapsed_s()
    handle.set_result(handle.stats)
    return handle


_lock = threading.Lock()
_current: Pipeline | None = None
_exited = False


def current() -> Pipeline:
    """The process's pipeline, behind fastckpt.save and fastckpt.load; made at the first call."""
    global _current
    with _lock:
        if _current is None:
            _current = Pipeline()
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
            f"fastckpt: the save to {handle.path!r} FAILED and was not committed: "
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
    _current, _lock = None, threading.Lock()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
