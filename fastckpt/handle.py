"""A caller holds a SaveHandle of each save in flight; its clocks are SaveStats.

Responsible for states and waiting. It must not know how a save is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastckpt.arguments.quantities import shown_share, shown_size, shown_time, shown_transfer
from fastckpt.errors import CheckpointError
from fastckpt.latch import Latch, Outcome, TimedOut


@dataclass
class SaveStats:
    """Clocks and facts of one save. Times are seconds since save() was called; None: not there yet.

    Attributes:
        stall_s: when save() returned, that is, how long the caller was blocked. With the step
            fence, the time its optimizer waited is added.
        staged_s: when everything was copied and the caller might mutate the object.
        written_s: when the last byte had been transferred.
        committed_s: when the file was durable (with durable=True) and visible under its name; with
            a local tier, in the root.
        local_committed_s: when the step was committed in the node-local tier, on every node; None
            if there is none, or the step went straight to the root.
        local_why: why it did, in words, where there is one.
        nbytes: what this process writes: the file, or its part of it, or its files of a step; as it
            was before a codec. 0 if torch.save wrote to what does not tell its position: a socket.
        ranks: how many ranks save together.
        total_nbytes: what all of them write; on the first rank, when all are done.
        staged_bytes_max: the most bytes of staging memory the save held at a time.
        backend: "io_uring", "threads", or "stock" where torch.save itself wrote to the target.
        direct: whether O_DIRECT was used.
        why: why this backend and this way, in words.
        pacing: what was asked for to spare the storage, and this rank's share, in words; or "".
        paced_s: for how long writing waited for that: for its moment, its turn, and tokens.
        staging: "host" if nothing lay on a GPU, else "pinned" or "pageable", as the memory is that
            was copied to.
        staging_why: why so, in words.
        d2h_s: how long the GPU that took longest was copying.
        d2h_gbps: what GPUs copied in that time, in 10^9 bytes a second; None if nothing.
        gpu_stall_s: how long streams of the caller waited for copies, by their own clocks; None
            also if they still do when the checkpoint commits.
    """

    stall_s: float | None = None
    staged_s: float | None = None
    written_s: float | None = None
    committed_s: float | None = None
    local_committed_s: float | None = None
    local_why: str = ""
    nbytes: int = 0
    ranks: int = 1
    total_nbytes: int | None = None
    staged_bytes_max: int = 0
    backend: str = ""
    direct: bool = False
    why: str = ""
    pacing: str = ""
    paced_s: float = 0.0
    staging: str = ""
    staging_why: str = ""
    d2h_s: float | None = None
    d2h_gbps: float | None = None
    gpu_stall_s: float | None = None

    def __str__(self) -> str:
        """One line: how much, how long, how fast, how long the caller was blocked, and by what."""
        nbytes, whose = self.nbytes, shown_share(self.ranks)
        if self.total_nbytes is not None:
            nbytes, whose = self.total_nbytes, f" by {self.ranks} ranks" if self.ranks > 1 else ""
        if self.backend == "stock" and not nbytes and self.committed_s is not None:
            told = [f"bytes not counted, in {shown_time(self.committed_s)}"]
        elif self.committed_s is None:
            told = [f"{shown_size(nbytes)}{whose}, not committed"]
        else:
            told = [shown_transfer(nbytes, self.committed_s, whose)]
        if self.local_committed_s is not None:
            told.append(f"on the node after {shown_time(self.local_committed_s)}")
        if self.stall_s is not None:
            told.append(f"the caller was blocked for {shown_time(self.stall_s)}")
        if self.backend:
            told.append(f"{self.backend}, O_DIRECT" if self.direct else self.backend)
        return "; ".join(told)


class SaveHandle(Outcome[SaveStats]):
    """A save in flight: a concurrent.futures.Future whose result is its SaveStats.

    result(timeout=None) returns when the checkpoint is durable and committed, and raises the save's
    error (a CheckpointError) if it was not. A failure that nobody asked for by result() or
    exception() is raised by the next fastckpt.save, or else reported on stderr at exit. A save
    cannot be cancelled. A signal handler may raise in any of its methods: the save goes on.

    Attributes:
        path: the final path, or "" for a file-like target.
        stats: the SaveStats so far.

    Args:
        started: when save() was called, by time.perf_counter().
        target: a file-like target.
    """

    def __init__(self, path: str, started: float, target: object = None) -> None:
        super().__init__()
        self.path = path
        self._target = type(target).__name__
        self.stats = SaveStats()
        self.reported = False
        self._started = started
        self._staged = Latch()
        self._queued = Latch()
        self._first = Latch()  # set by the first commit, or the end
        self._order: Callable[[], bool] | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        """The path, or the type of a file-like target, and how far the save has come."""
        error = self.failure()
        if error is not None:
            state = f"failed: {type(error).__name__}: {error}"
        elif self.done():
            state = f"committed: {self.stats}"
        else:
            state = "writing" if self.is_staged() else "copying"
        target = repr(self.path) if self.path else f"{self._target} object"
        return f"<{type(self).__name__} {target}: {state}>"

    def subject(self) -> str:
        return f"save to {self.path!r}"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the object was copied (or the save failed) and may be mutated.

        Args:
            timeout: seconds, None for ever.

        Raises:
            TimeoutError: it was not within `timeout`.
        """
        self._check_process()
        if not self._staged.wait(timeout):
            raise TimedOut(f"{self.subject()} was not staged within {timeout:g} s")

    def result(self, timeout: float | None = None) -> SaveStats:
        """Waits for the commit. Returns the SaveStats; raises the save's error, or TimeoutError."""
        self._check_process()
        try:
            stats = super().result(timeout)
        except BaseException as error:
            # A TimeoutError or an interrupt is not the save's error, even if that came meanwhile.
            if self.done() and error is self.failure():
                self.reported = True
            raise
        self.reported = True
        return stats

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end. Returns the save's error or None; raises TimeoutError."""
        self._check_process()
        error = super().exception(timeout)
        self.reported = True
        return error

    def wait_local(self, timeout: float | None = None) -> bool:
        """Waits until a step of a Checkpointer with a local tier is committed there, on every node.

        Args:
            timeout: seconds, None for ever.

        Returns:
            True: it is, and on its way to the root. False: there is no such tier, or the step went
                straight to the root, and is committed there.

        Raises:
            TimeoutError: neither was so within `timeout`. CheckpointError: the save failed before.
        """
        self._check_process()
        if not self._first.wait(timeout):
            raise TimedOut(f"{self.subject()} was not committed within {timeout:g} s")
        if self.stats.local_committed_s is None:
            self.result(timeout)
        return self.stats.local_committed_s is not None

    def wait_first(self) -> None:
        """Waits for the first commit, in whichever tier, or for the end of the save."""
        self._check_process()
        self._first.wait()

    def mark_local(self) -> None:
        """Called once by the save: the local tier has it on every node."""
        self.stats.local_committed_s = self.elapsed_s()
        self._first.set()

    def wait_done(self) -> None:
        """Waits for the end of the save; does not count as asking for its error."""
        self._check_process()
        self.wait()

    def failure(self) -> BaseException | None:
        """The error of a save that is done, without counting as asked for."""
        return super().exception(0) if self.done() else None

    def elapsed_s(self) -> float:
        """Seconds since save() was called."""
        return time.perf_counter() - self._started

    def is_staged(self) -> bool:
        """Whether the object is no longer read."""
        return self._staged.is_set()

    def is_queued(self) -> bool:
        """Whether all that is still read is read by devices, in the order of their streams."""
        return self._queued.is_set()

    def pass_fence(self) -> None:
        """Returns when the caller may change the object: it was copied, or what the caller's
        current streams are given from now on waits until it is.
        """
        self._check_process()
        self._queued.wait()
        order = self._order
        if not self._staged.is_set() and (order is None or not order()):
            self.wait_staged()

    def mark_queued(self, order: Callable[[], bool]) -> None:
        """Called once by the save: what is still read is read by devices.

        Args:
            order: makes the calling thread's streams wait for these copies; False if it cannot.
        """
        if not self._queued.is_set():
            self._order = order
            self._queued.set()

    def mark_staged(self) -> None:
        """Called once by the save: the object is no longer read."""
        if not self._staged.is_set():
            self.stats.staged_s = self.elapsed_s()
            self._staged.set()
            self._order = None
            self._queued.set()

    def set_result(self, result: SaveStats) -> None:
        self._first.set()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._first.set()
        super().set_exception(exception)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            f"the save to {self.path!r} belongs to this process: its handle has no copy"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise CheckpointError(
                f"the save to {self.path!r} belongs to process {self._pid}, which this "
                "one was forked from: ask for its result there"
            )
