"""SaveHandle, the caller's view of a save, and InnerHandle, the library's view of it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from fastckpt.arguments.quantities import shown_share, shown_size
from fastckpt.engine.save_stats import Progress, SaveStats, profile_of
from fastckpt.errors import CheckpointError, SaveCancelled, as_url, fate
from fastckpt.latch import Latch, SignalSafeFuture, TimedOut, is_called_back, log_aside

log = logging.getLogger("fastckpt")


class SaveHandle(SignalSafeFuture[SaveStats]):
    """A save in flight: a concurrent.futures.Future whose result is its SaveStats.

    If a save fails and its error is not retrieved by result() or exception(), the next save of the
    same kind raises the error, unless on_error is "warn". If there is no next save, the error is
    reported on stderr at exit, and the exit status is not 0. A call in a callback of
    add_done_callback() does not count, since errors of callbacks are only logged. If a signal
    handler raises in a method, the save continues.

    Attributes:
        path: the final path, or "" for a file-like target.
        stats: the save's SaveStats, which are filled in as it proceeds.
    """

    _shown = "SaveHandle"  # as repr() calls it

    def __init__(self, path: str, started: float, target: object = None) -> None:
        super().__init__()
        self.path = path
        self.stats = SaveStats()
        self._started = started
        self._target = type(target).__name__
        self._pid = os.getpid()
        self._decider: int | None = None  # the thread that runs before_commit
        self._is_cancelled = self._is_reported = False
        self._staged = Latch()
        self._replicated = Latch()  # set after the attempt to replicate, or at the end
        self._first = Latch()  # set by the first commit in any tier, or at the end
        self._progress: Callable[[], Progress] | None = None

    @property
    def path(self) -> str:
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path = as_url(path)

    def __repr__(self) -> str:
        error = self._failure()
        if error is not None:
            state = f"failed: {type(error).__name__}: {error}"
        elif self.done():
            state = f"committed: {self.stats}"
        else:
            state = f"writing: {self._how_far()}" if self._staged.is_set() else "copying"
            if self._is_cancelled:
                state += ", cancel() was called"
        target = repr(self.path) if self.path else f"{self._target} object"
        return f"<{self._shown} {target}: {state}>"

    def _how_far(self) -> str:
        """Returns the progress of the save on this rank as a text."""
        if self.stats.local_committed_s is not None:
            return "it is committed on the nodes and is being copied to the root"
        written, total = self.progress()
        size, whose = shown_size(total), shown_share(self.stats.ranks)
        if not total:
            return "nothing is written yet"
        if written == total:
            return f"all {size}{whose} are written, but not committed"
        return f"{shown_size(written)} of {size}{whose} are written ({100 * written // total} %)"

    def result(self, timeout: float | None = None) -> SaveStats:
        """Waits for the commit and returns the SaveStats. Raises the save's error, or TimeoutError
        if it has not ended within `timeout` seconds (None: no limit).
        """
        self._check_wait()
        try:
            stats = super().result(timeout)
        except BaseException as error:
            # A timeout or an interrupt is not the save's error, even if the save has failed too.
            if self.done() and error is self._failure():
                self._note_asked()
            del self  # it refers to the error, and the error to this frame
            raise
        self._note_asked()
        return stats

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the save. Returns its error or None; raises TimeoutError."""
        self._check_wait()
        error = super().exception(timeout)
        self._note_asked()
        return error

    def cancel(self) -> bool:
        """Asks the save to end without a commit, on all ranks, and to remove the files it has made.

        Returns at once. Until the save has ended (exception() waits for this), it may still read
        the object, and its files exist. The save ends with SaveCancelled on every rank; but if the
        first rank has already begun to publish, the save commits as usual. Other saves are not
        affected, and no later save raises this SaveCancelled on any rank. If another rank cancels,
        the first rank logs a warning. With a local tier, a step can be cancelled until it is
        committed in the tier.

        asyncio.wait_for() calls this on a timeout; asyncio.shield() prevents that.

        Returns:
            False if the save has already ended and was not cancelled. Otherwise True: result() then
                shows whether the commit came first.
        """
        self._is_cancelled = True
        return not self.done() or isinstance(self._failure(), SaveCancelled)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the object may be changed, because it has been copied or the save has failed.
        Raises TimeoutError after `timeout` seconds (None: no limit).
        """
        self._check_process()
        if not self._staged.wait(timeout):
            raise TimedOut(f"{self._subject()} was not staged within {timeout:g} s")

    def wait_local(self, timeout: float | None = None) -> bool:
        """Waits until a step is committed in the local tier on every node, or in the root if the
        step bypasses the tier. Waits at most `timeout` seconds (None: no limit).

        Returns:
            True if the step is committed in the local tier; False if it is committed in the root,
                because there is no local tier or the step bypassed it.

        Raises:
            TimeoutError: the step was not committed within `timeout`.
            CheckpointError: the save failed.
        """
        self._check_wait()
        if not self._first.wait(timeout):
            raise TimedOut(f"{self._subject()} was not committed within {timeout:g} s")
        if self.stats.local_committed_s is None:
            self.result(timeout)
        return self.stats.local_committed_s is not None

    def wait_memory(self, timeout: float | None = None) -> bool:
        """Waits until a step is in the memory of the nodes and, if Memory has peers, every rank's
        files are also in the memory of its neighbours. Waits at most `timeout` seconds (None: no
        limit).

        Returns:
            True if the files are there. False if the step bypassed the memory (the reason is in
                `stats.local_why`), or a neighbour did not store the files (the reason is in
                `stats.replicas_why`). Without a Memory, the result of wait_local().

        Raises:
            The errors of wait_local().
        """
        self._check_wait()
        if not self._replicated.wait(timeout):
            raise TimedOut(f"{self._subject()} did not reach the neighbours within {timeout:g} s")
        return self.wait_local(timeout) and not self.stats.replicas_why

    def progress(self) -> Progress:
        """Returns how many bytes of its part this process has written so far, and how many in
        total.

        Both are 0 until the copies of this save begin, which may have to wait for earlier saves.
        With a codec, bytes are counted before compression. While a step is copied from the local
        tier to the root, the bytes of this second copy are counted.
        """
        progress = self._progress
        return Progress(self.stats.nbytes, self.stats.nbytes) if progress is None else progress()

    def profile(self) -> dict[str, Any]:
        """Returns the times of this save's phases and the slowest rank, as values for JSON.

        Returns:
            "ranks", "nbytes", "total_nbytes", "stored_nbytes", "stall_s", "committed_s",
                "local_committed_s", "backend", "direct" and "staging" as in SaveStats; "rate" in
                bytes a second, of all ranks if total_nbytes is known; "by_rank": for each member of
                RankClocks the list of all ranks' values; "write_sizes": the size classes, in bytes,
                by which "writes" are counted; "slowest": the rank whose files were durable last,
                the phase ("capture", "copy", "write" or "sync") in which it was slow, and the
                "seconds" of this phase; "commit_s": the time from then to the commit (if there is a
                local tier, the commit there); "drain_s": with a local tier, the time from its
                commit to the commit in the root. On ranks other than the first, the values are of
                that rank only.
        """
        return profile_of(self.stats)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            f"the handle of the {self._subject()} belongs to this process and cannot be copied or "
            "pickled"
        )

    def _subject(self) -> str:
        return f"save to {self.path!r}"

    def _failure(self) -> BaseException | None:
        """Returns the error of a failed save, without marking it as retrieved."""
        return super().exception(0) if self.done() else None

    def _note_asked(self) -> None:
        """Marks the error, if any, as retrieved by the caller, except in a callback."""
        if not is_called_back():
            self._note_reported()

    def _note_reported(self) -> None:
        self._is_reported = True

    def _check_wait(self) -> None:
        """Raises an error if a wait would never end, or if this is another process."""
        self._check_process()
        if self._decider == threading.get_ident():
            raise RuntimeError(
                f"before_commit would wait for itself, since the {self._subject()} only ends after "
                "it: call result(), restore() and close() outside before_commit"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise CheckpointError(
                f"the save to {self.path!r} belongs to process {self._pid}, but this process was "
                "forked from that one: use the handle there"
            )


class InnerHandle(SaveHandle):
    """A SaveHandle with the methods for the library: the save records its progress here, and the
    library records whether a failure was reported.

    Attributes:
        kind: "file", "dcp", or a directory of steps or of other checkpoints. A save raises earlier
            errors of its kind.
        drop: a function that is called after the error was reported, to free the frames in its
            traceback.
        tells: whether this rank logs for all ranks, that is, whether it is the first.
        goes_on_told: whether a line was logged about the save's fate after Ctrl-C.

    Args:
        started: when save() was called, by time.perf_counter().
        target: the file-like target, if any.
        on_error: "warn": a failure is logged when it happens, and only result() raises it.
    """

    def __init__(
        self,
        path: str,
        started: float,
        target: object = None,
        *,
        kind: str = "file",
        on_error: str = "raise",
    ) -> None:
        super().__init__(path, started, target)
        self.kind = kind
        self.tells = True
        self.goes_on_told = self._is_broken_off = False
        self._given_up_s = inf
        self.drop: Callable[[], object] = bool
        self._queued = Latch()
        self._order: Callable[[], bool] | None = None
        self._is_warned_of = on_error == "warn"
        if self._is_warned_of:
            self.add_done_callback(log_failure)

    subject = SaveHandle._subject
    how_far = SaveHandle._how_far
    failure = SaveHandle._failure
    check_wait = SaveHandle._check_wait

    def is_cancelled(self) -> bool:
        """Returns whether cancel() was called on this rank, even if the save committed later."""
        return self._is_cancelled

    def give_up(self) -> None:
        """Cancels the save and also its copy from the local tier to the root."""
        self._given_up_s = min(self._given_up_s, time.monotonic())
        self.cancel()

    def is_given_up(self) -> bool:
        """Returns whether give_up() was called."""
        return self._given_up_s < inf

    def given_up_for(self) -> float:
        """Returns how many seconds ago give_up() was called; -inf if it was not called."""
        return time.monotonic() - self._given_up_s

    def is_asked_for(self) -> bool:
        """Returns whether an error of this save need not be reported any more. A cancellation is
        never reported, since the caller of cancel() knows of it.
        """
        is_reported = self._is_reported or self._is_warned_of
        return is_reported or isinstance(self.failure(), SaveCancelled)

    def may_be_told(self) -> bool:
        """Returns whether this save may still fail, or has failed with an unreported error."""
        return not self.done() or (self.failure() is not None and not self.is_asked_for())

    def note_reported(self) -> None:
        """Records that the error, if any, was reported, so that no later save reports it."""
        super()._note_reported()
        drop, self.drop = self.drop, bool  # it refers to the handle, in a cycle
        drop()

    _note_reported = note_reported

    def mark_writing(self, progress: Callable[[], Progress] | None) -> None:
        """Sets the function that returns the progress; None: the save has ended."""
        self._progress = progress

    def wait_first(self) -> None:
        """Waits for the first commit in any tier, or for the end of the save."""
        self.check_wait()
        self._first.wait()

    def mark_local(self) -> None:
        """Records, once, that the step is committed in the local tier on every node."""
        self.stats.local_committed_s = self.elapsed_s()
        self._first.set()

    def mark_memory(self) -> None:
        """Records, once, that the attempt to copy the step to the neighbours, if any, has ended."""
        self._replicated.set()

    def _wait_ended(self, timeout: float | None = None) -> bool:
        """Waits for the end. If Ctrl-C ends the wait only, logs that the save continues."""
        try:
            return super()._wait_ended(timeout)
        except KeyboardInterrupt:
            if not (self.done() or self._is_broken_off):
                self._tell_goes_on()
            raise

    def tell_interrupted(self, is_lost: bool) -> None:
        """Logs the fate of a save after Ctrl-C has ended the call of save(). `is_lost`: whether
        this happened before everything was copied.
        """
        if is_lost:
            self._is_broken_off = self.goes_on_told = True
            self.say(
                f"the {self.subject()} was interrupted before everything was copied: it is not "
                "committed, and committed checkpoints stay"
            )
        elif not self.done():
            self._tell_goes_on()

    def _tell_goes_on(self) -> None:
        self.goes_on_told = True
        self.say(
            f"the {self.subject()} continues: {self.how_far()}. This process waits for it at exit; "
            "Ctrl-C during that wait, or cancel(), abandons it; committed checkpoints stay"
        )

    def say(self, line: str) -> None:
        """Logs a line about the save after Ctrl-C."""
        log_aside(logging.WARNING if self.tells else logging.INFO, "%s", line)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for the end of the save; returns whether it has ended.
        Does not mark an error as retrieved.
        """
        self.check_wait()
        return self._wait_ended(timeout)

    def wait_quietly(self, timeout: float | None = None) -> bool:
        """Waits like wait_done(), but logs nothing if Ctrl-C ends the wait."""
        return super()._wait_ended(timeout)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def is_staged(self) -> bool:
        """Returns whether the save no longer reads the object."""
        return self._staged.is_set()

    def pass_fence(self) -> None:
        """Waits until the caller may change the object, or its streams wait for the copies."""
        self._check_process()
        self._queued.wait()
        order = self._order
        if not self._staged.is_set() and (order is None or not order()):
            self.wait_staged()

    def before_step(self) -> bool:
        """Passes the fence before an optimizer step; returns whether everything is copied."""
        begin_s = self.elapsed_s()
        self.pass_fence()
        if self.stats.stall_s is not None:
            self.stats.stall_s += self.elapsed_s() - begin_s
        return self.is_staged()

    def mark_queued(self, order: Callable[[], bool]) -> None:
        """Records, once, that only devices still read the object.

        Args:
            order: makes the calling thread's streams wait for these copies; returns False if it
                cannot.
        """
        if not self._queued.is_set():
            self._order = order
            self._queued.set()

    def mark_staged(self) -> None:
        """Records that the save no longer reads the object."""
        if not self._staged.is_set():
            self.stats.staged_s = self.elapsed_s()
            self._staged.set()
            self._order = None
            self._queued.set()

    def _end(self, result: SaveStats | None, exception: BaseException | None) -> None:
        self.mark_staged()
        self.mark_memory()
        self._first.set()
        super()._end(result, exception)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Makes this thread's waits for the save raise, since the save waits for the body."""
        self._decider = threading.get_ident()
        try:
            yield
        finally:
            self._decider = None


def log_failure(handle: Any) -> None:
    """Logs the error of an ended save unless it was cancelled; used as a handle's callback."""
    error = handle.failure()
    if error is not None and not isinstance(error, SaveCancelled):
        what = fate(error, "was not saved")
        log.warning("%r %s: %s: %s", handle.path, what, type(error).__name__, error)
