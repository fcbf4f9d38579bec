"""StopSignals: signals that ask a job to stop, told to all of its ranks at the same call.

It puts the handlers and the agreement together, and must not know what a job does before it stops.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from fastckpt.ranks.coordinator import Coordinator, check_alone, default_group
from fastckpt.ranks.round import TIMEOUT_S
from fastckpt.ranks.signal_handlers import SignalHandlers, checked_signals
from fastckpt.ranks.stop import StopAgreement


class StopSignals:
    """Handlers of signals that ask the job to stop, from now until close().

    Every rank makes one. Until close() the signals no longer end the process; handlers that were
    there before are called, too. It is a context manager: enter it before a Checkpointer, and a
    second signal does not end the wait for the last save.

    Args:
        group: a torch.distributed process group. Default: all ranks if torch.distributed is
            initialised, else this process alone.
        signals: names, with or without SIG, signal.Signals or their numbers. (): none is handled on
            this rank, which still stops with the others.

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
        """Returns whether the job is to stop: one of the signals has come to any rank. All ranks
        call it equally often, such as once in each training step, from one thread each.

        The n-th call returns the same on every rank, without a collective, at whatever pace they
        go; once it is True, it stays True. A call takes microseconds. Only after a signal one call
        waits, for about a second, until all ranks have heard of it.

        Raises:
            PeerFailed: the job is to stop, but ranks cannot agree on when: one is dead or has no
                StopSignals, or the job's store is gone. It comes after about ten seconds.
            ValueError: this is closed, or several ranks made it before init_process_group().
        """
        if self._is_closed:
            raise ValueError("these StopSignals are closed")
        if self._group is None:
            check_alone("StopSignals", None)
        return self._agreement.is_reached()

    def close(self) -> None:
        """Puts the handlers back that were there before, and leaves the group. Idempotent."""
        self._is_closed = True
        self._opened.close()
        self._handlers.close()

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("StopSignals belong to this process and cannot be copied or pickled")

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
