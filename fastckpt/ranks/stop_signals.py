"""StopSignals: signals that ask a job to stop. All ranks report the request at the same call.

The module combines the signal handlers and the agreement.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

from fastckpt.errors import CheckpointError, PeerFailed, retold
from fastckpt.latch import Latch, start_thread
from fastckpt.ranks.coordinator import Coordinator, check_alone, default_group
from fastckpt.ranks.round import TIMEOUT_S, pause
from fastckpt.ranks.signal_handlers import SignalHandlers, checked_signals

log = logging.getLogger("fastckpt")

_LOOK_S = 1.0  # how often a rank looks whether another one was asked
_LOOKS_PER_S = 4000  # by all ranks together, so that the store has time for others
_RANKS_IN_BATCH, _RANKS_NAMED = 256, 8
# How long a promise is waited for, beyond the time in which all ranks look: threads that only look
# make promises, whatever training does, and the shortest usual time before a kill is 30 s.
_AGREE_S = 10.0
_PAUSES_S = (0.2, 1.0, 3.0)  # before each new connection to the store, after which it is lost


class StopAgreement:
    """The agreement of all ranks on the call at which they stop, active until close().

    Every rank creates one, and makes the same calls of is_reached(). Between a request and the
    stop, one call waits for about a second, until the last rank has noticed the request.

    Args:
        coordinator: the connection to the store, which must stay open until close() has returned.
        timeout_s: how long to wait for each rank's promise, limited by _AGREE_S.

    Raises:
        CheckpointError: no thread can be started.
    """

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        self._coordinator = coordinator
        # In a large job, each rank looks in another one of so many turns.
        self._turns = 1 + int(coordinator.world_size / (_LOOKS_PER_S * _LOOK_S))
        self._timeout_s = min(timeout_s, _AGREE_S + self._turns * _LOOK_S)
        self._pid = os.getpid()
        self._life = f"stop {next(coordinator.session.stops)}"
        # These are written by one thread each, in the order that the proof above needs.
        self._calls = 0
        self._is_asked = self._has_promised = self._is_closing = False
        self._is_deaf = self._is_miscounted = False
        self._stop = 0
        self._failure: BaseException | None = None
        self._wanted, self._known = Latch(), Latch()
        if not start_thread(self._run, "fastckpt-stop"):
            raise CheckpointError("cannot start the thread that watches for requests to stop")

    def ask(self) -> None:
        """Asks all ranks to stop. It may be called in a signal handler."""
        self._is_asked = True
        self._wanted.set()

    def is_reached(self) -> bool:
        """Returns whether the stop is at this call or an earlier one. The n-th call returns the
        same on all ranks. One thread of the process must make all calls.

        Raises:
            PeerFailed: a rank was asked to stop, but the ranks cannot agree, because a rank is
                missing or the store is unreachable.
        """
        is_asked, patience_s = self._is_asked, 2 * self._timeout_s  # of a store that hangs, too
        if is_asked:  # asked on this very rank: the caller knows, and need not go on
            self._known.wait(patience_s)
        self._calls = number = self._calls + 1
        if not (is_asked or self._has_promised):
            return False
        if not self._known.wait(patience_s):
            raise PeerFailed(
                "the job was asked to stop, but the store that ranks agree through does not answer"
            )
        if self._failure is not None:
            raise retold(self._failure, str(self._failure))
        return number >= self._stop

    def close(self) -> None:
        """Leaves the agreement. Frees the keys if all other ranks have left. Idempotent."""
        if self._is_closing or os.getpid() != self._pid:  # the thread of the parent is not here
            return
        self._is_closing = True
        self._wanted.set()
        self._known.wait()
        try:
            ranks = self._coordinator.world_size
            if self._call_once("add", "left", 1) == ranks:
                calls = [f"calls/{rank}" for rank in range(ranks)]
                for key in ("asked", "promises", "stop", "left", *calls):
                    self._call_once("delete_key", key)
        except (RuntimeError, ValueError, OSError) as error:
            log.debug("keys of %s stay in the store: %s", self._life, error)

    def _run(self) -> None:
        """Waits for a request or the end, promises this rank's number of calls, and waits for the
        stop.
        """
        try:
            self._wait_for_request()
            self._promise()
            self._wait_for_stop()
        except BaseException as error:  # it is raised by the next call
            self._failure = error
        self._has_promised = True
        self._known.set()

    def _wait_for_request(self) -> None:
        """Waits until a rank is asked to stop, or this rank closes the agreement or exits. If this
        rank was asked, notifies the others.
        """
        turn = self._coordinator.rank
        while not self._wanted.wait(_LOOK_S):
            if not threading.main_thread().is_alive():  # the interpreter exits, and waits for this
                self._is_closing = True
                return
            turn += 1
            if turn % self._turns == 0 and self._is_another_asked():
                return
        if self._is_asked:
            self._call("set", "asked", b"")

    def _is_another_asked(self) -> bool:
        """Returns whether another rank was asked to stop, as far as the store can be reached."""
        if self._is_deaf:
            return False
        try:
            return bool(self._call("check", ["asked"]))
        except PeerFailed as error:
            self._is_deaf = True
            log.warning("requests to stop on other ranks are no longer noticed: %s", error)
            return False

    def _promise(self) -> None:
        """Publishes this rank's promise, and computes the stop if all other ranks have promised."""
        coordinator = self._coordinator
        self._has_promised = True  # before the number is taken: see the proof
        self._call("set", f"calls/{coordinator.rank}", b"%d" % self._calls)
        try:
            if self._call_once("add", "promises", 1) == coordinator.world_size:
                self._set_stop()
        except ConnectionError:  # counted twice, a promise would stand for that of another rank
            self._is_miscounted = True

    def _set_stop(self) -> None:
        """Computes the stop from all promises. Ranks that compute it concurrently get the same
        result.
        """
        promised: list[bytes] = []
        for keys in self._promises():
            promised += self._call("multi_get", keys)
        self._call("set", "stop", b"%d" % (max(map(int, promised)) + 1))

    def _promises(self) -> Iterator[list[str]]:
        """Yields the keys of all ranks' promises, in batches."""
        ranks = self._coordinator.world_size
        for begin in range(0, ranks, _RANKS_IN_BATCH):
            yield [f"calls/{rank}" for rank in range(begin, min(begin + _RANKS_IN_BATCH, ranks))]

    def _wait_for_stop(self) -> None:
        since = time.monotonic()
        until = since + self._timeout_s
        while not self._call("check", ["stop"]):
            if self._is_miscounted and all(self._call("check", its) for its in self._promises()):
                self._set_stop()
            if self._is_closing:
                raise CheckpointError(
                    "this rank has left the job and no longer learns when to stop"
                )
            if time.monotonic() >= until:
                raise self._missing()
            pause(since, until)
        self._stop = int(self._call("get", "stop"))
        if self._is_asked or self._call("check", ["asked"]):  # else all ranks have left
            level = logging.DEBUG if self._coordinator.rank else logging.INFO
            log.log(level, "asked to stop: requested() is True from call %d on", self._stop)

    def _missing(self) -> PeerFailed:
        """Returns the error for this rank if other ranks have not promised in time."""
        ranks = range(self._coordinator.world_size)
        missing = [rank for rank in ranks if not self._call("check", [f"calls/{rank}"])]
        named = ", ".join(f"rank {rank}" for rank in missing[:_RANKS_NAMED]) or "some rank"
        more = f" and {len(missing) - _RANKS_NAMED} more" if len(missing) > _RANKS_NAMED else ""
        return PeerFailed(
            f"the job was asked to stop, but {named}{more} did not agree within "
            f"{self._timeout_s:g} s on when to stop: all ranks must be alive and have StopSignals",
            tuple(missing),
        )

    def _call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        """Calls an operation that may be carried out twice; repeats it if the connection was
        lost.
        """
        for pause_s in _PAUSES_S:
            try:
                return self._call_once(operation, key, *values)
            except ConnectionError:
                time.sleep(0.0 if self._is_closing else pause_s)
                self._coordinator.renew()
        try:
            return self._call_once(operation, key, *values)
        except ConnectionError as error:
            raise PeerFailed(
                f"the store that ranks agree through is unreachable ({error}): the process that "
                "hosts it, likely rank 0's or the launcher's agent, is gone, and ranks can no "
                "longer agree on when to stop"
            ) from None

    def _call_once(self, operation: str, key: str | list[str], *values: Any) -> Any:
        life = self._life
        full = f"{life}/{key}" if isinstance(key, str) else [f"{life}/{each}" for each in key]
        return self._coordinator.call(operation, full, *values)


class StopSignals:
    """Handlers of signals that ask the job to stop, active until close().

    Every rank creates one. Until close() the signals no longer end the process; previous handlers
    are still called. StopSignals is a context manager. If it is entered before a Checkpointer, a
    second signal does not end the wait for the last save.

    Args:
        group: a torch.distributed process group. Default: all ranks if torch.distributed is
            initialised, else this process alone.
        signals: names, with or without SIG, signal.Signals or their numbers. With (), this rank
            handles no signal, but still stops with the others.

    Raises:
        ValueError, TypeError: a signal is unknown or cannot be handled, this is not the main
            thread, or this process is not in the group.
        CheckpointError: no thread can be started.
    """

    def __init__(
        self, group: Any = None, signals: Collection[str | int] = ("SIGUSR1", "SIGTERM")
    ) -> None:
        self._group = default_group() if group is None else group
        self._is_closed = False
        with ExitStack() as opened:  # if anything below fails, the other ranks hear why
            coordinator = Coordinator.of_group(self._group, "stop signals")
            opened.push(coordinator.give_up)
            numbers = checked_signals(signals)
            SignalHandlers.check(numbers)
            self._agreement = StopAgreement(coordinator, TIMEOUT_S)
            opened.callback(self._agreement.close)
            self._handlers = SignalHandlers(numbers, self._agreement.ask)
            self._opened = opened.pop_all()

    def requested(self) -> bool:
        """Returns whether the job must stop, because any rank has received one of the signals. All
        ranks must call this equally often, for example once in each training step, each from one
        thread.

        The n-th call returns the same on every rank, without a collective and whatever their speed.
        Once it is True, it stays True. A call takes microseconds. Only after a signal, one call
        waits for about a second until all ranks have noticed the request.

        Raises:
            PeerFailed: the job must stop, but the ranks cannot agree on when: a rank is dead or has
                no StopSignals, or the job's store is unreachable. Raised after about ten seconds.
            ValueError: this object is closed, or several ranks created it before
                init_process_group().
        """
        if self._is_closed:
            raise ValueError("these StopSignals are closed")
        if self._group is None:
            check_alone("StopSignals", None)
        return self._agreement.is_reached()

    def close(self) -> None:
        """Restores the previous handlers, and leaves the group. Idempotent."""
        self._is_closed = True
        self._opened.close()
        self._handlers.close()

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("StopSignals belong to this process and cannot be copied or pickled")

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
