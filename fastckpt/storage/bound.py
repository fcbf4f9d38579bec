"""Bound: the limit for the duration of a wait without progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("fastckpt")

LOOK_S = 0.5  # how often waits look
PARTING_S = 10.0  # how long transfers of a failed or ended save are waited for without progress
_LOG_S = 60.0  # how often a wait without progress is logged


class Bound:
    """The time limit of successive waits. Each look adds at most look_s to the measured time,
    however long ago the last look was. Otherwise a process that was stopped would mistake its own
    pause for a hung disk.

    Attributes:
        timeout_s: the longest time without progress; inf means no limit.
        look_s: the longest time between two looks.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.look_s = timeout_s, min(LOOK_S, timeout_s / 4)
        self._looked = self._still_s = self._logged_s = 0.0

    def is_over(self, seconds: float, describe: Callable[[], str]) -> bool:
        """Returns whether there was no progress for timeout_s. Logs a wait without progress once a
        minute.

        Args:
            seconds: the time without progress, by the clock.
            describe: returns a text about what the caller waits for and how long it has waited.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        self._still_s = min(seconds, self._still_s + min(since, self.look_s))
        if seconds < since:  # there was progress since the last look
            self._still_s = min(seconds, self.look_s)
        if self._still_s < self._logged_s:
            self._logged_s = 0.0
        elif self._still_s >= self._logged_s + _LOG_S and self._still_s < self.timeout_s:
            self._logged_s = self._still_s
            log.warning(
                "%s: check that the server or the disk responds. The operation is abandoned "
                "after %g s without progress",
                describe(),
                self.timeout_s,
            )
        return self._still_s >= self.timeout_s
