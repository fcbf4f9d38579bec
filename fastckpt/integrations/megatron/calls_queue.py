"""Megatron's queue of asynchronous saves, for saves that commit by themselves.

Responsible for the call of maybe_finalize_async_calls() in which a save is finalized, the same one
on all ranks, since Megatron's functions run collectives there. It must not know what they do.
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

# Calls that a rank makes after it has told the others how many it had made, and before it needs
# their answer: a training step gives that time to arrive.
_CALLS_AHEAD = 1
_coordinators = PerGroup[Coordinator]("megatron saves", lambda coordinator: coordinator)


class Awaited:
    """The first of the functions that finalize a request for a save of ours: it waits for that."""

    def __init__(self, handle: InnerHandle) -> None:
        self.handle = handle

    def __call__(self) -> None:
        self.handle.result()


class _Call:
    """A save in the queue.

    When it has ended on a rank, that rank tells how many calls it has made until then, in the
    background. The save is finalized in the first call that no rank can have made before it knows
    the answers of all: until its own part in that, a rank goes on without a word.

    Attributes:
        number: as schedule_async_request() returns it.
        functions: what finalizes it.
        made: how many calls this rank had made when the save had ended here; None before that.
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
        """Finds out, in the background, in which call to finalize; `calls_made` sets `made`."""
        agreement = self._agreement
        try:
            with agreement.failing():
                agreement.put("begun", b"")  # so that nobody takes this rank for one that strayed
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
        """Returns whether all ranks finalize in this call at the latest. Waits only for answers
        that other ranks can give without their training thread.
        """
        if self.made is None or call <= self.made + _CALLS_AHEAD:
            return False
        self._wait()
        return self._turn <= call

    def finalize(self, on_error: str) -> bool:
        """Finalizes a save that is due, or waits for it to be; returns whether it has committed.

        Raises:
            CheckpointError: with on_error="raise", it has not; or ranks cannot agree any more.
        """
        self._wait()
        if not self._problem:
            for function in self.functions:
                function()
            return True
        if on_error == "raise":
            self.handle.result()  # raises, as a rule
            raise PeerFailed(f"{self.handle.path!r} was not saved: {self._problem}")
        if self.handle.failure() is None:  # else that was logged
            log.warning("%r is not finalized: %s", self.handle.path, self._problem)
        return False

    def _wait(self) -> None:
        self._agreed.wait()
        if self._failure is not None:
            raise CheckpointError(
                f"ranks disagree on the outcome of the save to {self.handle.path!r}: "
                f"{self._failure}"
            ) from self._failure


class Queue:
    """An AsyncCallsQueue for our saves. Requests of others go to one of Megatron's own.

    Args:
        others: makes the queue for requests of others, when the first of them comes.
        options: of the saves. With on_error="warn", a save that has failed is not finalized, and
            training goes on; with "raise" the call that would finalize it raises its error, on all
            ranks.
    """

    def __init__(self, others: Callable[[], Any], options: SaveOptions) -> None:
        self._make_others = others
        self._others: Any = None
        self._options = options
        self._lock = threading.Lock()
        self._made = self._scheduled = 0  # calls that have begun, guarded by the lock; requests
        self._calls: deque[_Call] = deque()
        self._threads: list[threading.Thread] = []

    def schedule_async_request(self, async_request: Any) -> int:
        """Takes a request, on all ranks; returns its number."""
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
        """Finalizes, in order, the saves that all ranks finalize in this call: with `blocking` all
        of them. Called on all ranks, equally often. Returns their numbers.
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
        """Returns how many saves are yet to be finalized, the same on all ranks."""
        others = 0 if self._others is None else self._others.get_num_unfinalized_calls()
        return len(self._calls) + int(others)

    def close(self, abort: bool = False) -> None:
        """Finalizes all, or with `abort` none; saves that were begun commit all the same."""
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
        """Does nothing: there is no process that would be started."""

    def _note(self, call: _Call) -> int:
        """Notes that a save has ended on this rank; returns how many calls were made before."""
        with self._lock:
            call.made = self._made
            return self._made
