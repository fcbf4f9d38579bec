"""A replacement for Megatron's queue of asynchronous saves, for saves that commit by themselves.

Responsible for finalizing a save in the same call of maybe_finalize_async_calls() on all ranks,
because Megatron's functions run collectives there. It must not know what these functions do.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from fastckpt.arguments.options import SaveOptions
from fastckpt.errors import CheckpointError, PeerFailed
from fastckpt.latch import Latch
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.per_group import PerGroup, group_of_job
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle

log = logging.getLogger("fastckpt")

# The number of calls that a rank makes between sending its count of calls and reading the answer.
# The training steps between give the answer time to arrive.
_CALLS_AHEAD = 1
_coordinators = PerGroup[Coordinator]("megatron saves", lambda coordinator: coordinator)


class Awaited:
    """The first finalize function of a fastckpt request, which waits for the save."""

    def __init__(self, handle: InnerHandle) -> None:
        self.handle = handle

    def __call__(self) -> None:
        self.handle.result()


class _Call:
    """A save in the queue.

    When the save has ended on a rank, that rank sends the others, in the background, the number of
    calls that it has made. All ranks then finalize in the same call: the first call that every rank
    makes only after it has received all counts. Earlier calls do not wait.

    Attributes:
        number: the save's number, which schedule_async_request() returned.
        functions: the functions that finalize the save.
        made: the number of calls that this rank had made when the save ended on it; None before.
    """

    def __init__(
        self, number: int, handle: InnerHandle, functions: list[Any], agreement: Round
    ) -> None:
        self.number, self.handle, self.functions = number, handle, functions
        self.made: int | None = None
        self._agreement = agreement
        self._agreed = Latch()
        self._turn, self._problem = 0, ""
        self._failure: BaseException | None = None

    def agree(self, calls_made: Callable[[_Call], int]) -> None:
        """Agrees, in the background, on the call in which to finalize; `calls_made` sets `made`."""
        agreement = self._agreement
        try:
            with agreement.failing():
                agreement.put("begun", b"")  # shows that this rank made the call
                self.handle.wait_quietly()
                error = self.handle.failure()
                told = [
                    calls_made(self),
                    "" if error is None else f"{type(error).__name__}: {error}",
                ]
                agreement.put("ended", json.dumps(told).encode(errors="replace"))
                if agreement.rank == 0:
                    answers = [json.loads(answer) for answer in agreement.gather("ended")]
                    turn = max(made for made, _ in answers) + 1 + _CALLS_AHEAD
                    problem = next((problem for _, problem in answers if problem), "")
                    agreement.put("turn", json.dumps([turn, problem]).encode(errors="replace"))
                self._turn, self._problem = json.loads(agreement.get("turn"))
        except BaseException as failure:
            self._failure = failure
        finally:
            self._agreed.set()
        agreement.close()

    def is_due(self, call: int) -> bool:
        """Returns whether all ranks finalize in this call or an earlier one. Waits only for answers
        that other ranks send without their training thread.
        """
        if self.made is None or call <= self.made + _CALLS_AHEAD:
            return False
        self._wait()
        return self._turn <= call

    def finalize(self, on_error: str) -> bool:
        """Finalizes a save, after waiting until it is due; returns whether it was committed.

        Raises:
            CheckpointError: with on_error="raise", the save failed; or the ranks could not agree.
        """
        self._wait()
        if not self._problem:
            for function in self.functions:
                function()
            return True
        if on_error == "raise":
            self.handle.result()  # raises if it failed on this rank
            raise PeerFailed(f"{self.handle.path!r} was not saved: {self._problem}")
        if self.handle.failure() is None:  # otherwise the handle logged it
            log.warning("the save to %r is not finalized: %s", self.handle.path, self._problem)
        return False

    def _wait(self) -> None:
        self._agreed.wait()
        if self._failure is not None:
            raise CheckpointError(
                f"ranks disagree on the outcome of the save to {self.handle.path!r}: "
                f"{self._failure}"
            ) from self._failure


class Queue:
    """An AsyncCallsQueue for fastckpt's saves; other requests are passed to one of Megatron's
    queues.

    Args:
        others: makes the queue for other requests when the first one is scheduled.
        options: the saves' options. With on_error="warn", a failed save is not finalized, and
            training continues; with "raise", the call that would finalize the save raises its error
            on all ranks.
    """

    def __init__(self, others: Callable[[], Any], options: SaveOptions) -> None:
        self._make_others = others
        self._others: Any = None
        self._options = options
        self._lock = threading.Lock()
        self._made = self._scheduled = 0  # begun calls (guarded by the lock); requests
        self._calls: deque[_Call] = deque()
        self._threads: list[threading.Thread] = []

    def schedule_async_request(self, async_request: Any) -> int:
        """Adds a request to the queue, on all ranks; returns its number."""
        functions = list(async_request.finalize_fns)
        awaited = next((each for each in functions if isinstance(each, Awaited)), None)
        if awaited is None or async_request.async_fn is not None:
            if self._others is None:
                self._others = self._make_others()
            return int(self._others.schedule_async_request(async_request))
        self._scheduled += 1
        handle = awaited.handle
        agreement = _coordinators.of(group_of_job()).begin(
            f"end of the save to {handle.path!r}", self._options.timeout_s, "it is not finalized"
        )
        call = _Call(self._scheduled - 1, handle, functions, agreement)
        self._calls.append(call)
        self._threads = [each for each in self._threads if each.is_alive()]
        name = f"fastckpt end of {handle.path}"
        thread = threading.Thread(target=call.agree, args=(self._note,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return call.number

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalizes in order the saves that are due in this call, or with `blocking` all saves.
        Returns their numbers. All ranks must call it the same number of times.
        """
        with self._lock:
            self._made += 1
            number = self._made
        ended = []
        while self._calls and (blocking or self._calls[0].is_due(number)):
            call = self._calls.popleft()
            if call.finalize(self._options.on_error):
                ended.append(call.number)
        if self._others is not None:
            ended += self._others.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        return ended

    def get_num_unfinalized_calls(self) -> int:
        """Returns the number of saves that are not finalized yet, the same on all ranks."""
        others = 0 if self._others is None else self._others.get_num_unfinalized_calls()
        return len(self._calls) + int(others)

    def close(self, abort: bool = False) -> None:
        """Finalizes all saves, or none with `abort`. Saves that were begun are committed in either
        case.
        """
        if not abort and self._calls:
            self.maybe_finalize_async_calls(blocking=True)
        self._calls.clear()
        for thread in [] if abort else self._threads:
            thread.join()
        if self._others is not None:
            self._others.close(abort=abort)
            self._others = None

    @staticmethod
    def warmup_persistent_caller(rank: int, *, cpu_shm_mode: Any = None, **others: Any) -> None:
        """Does nothing, because no process has to be started."""

    def _note(self, call: _Call) -> int:
        """Records that a save has ended on this rank; returns the number of calls made so far."""
        with self._lock:
            call.made = self._made
            return self._made
