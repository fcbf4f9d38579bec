"""Bound: the longest that nothing may get on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("fastckpt")

LOOK_S = 0.5  # how often waits look
PARTING_S = 10.0  # how long transfers of what has failed or ended are waited for if none gets on
_LOG_S = 60.0  # how often a wait in which nothing gets on is logged


class Bound:
    """The bound of one wait after another. Each look adds at most look_s, however long ago the last
    one was: a process that was stopped must not take its own pause for a disk that hangs.

    Attributes:
        timeout_s: for how long nothing may get on; inf: there is no limit.
        look_s: how long to wait at most between two looks.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.look_s = timeout_s, min(LOOK_S, timeout_s / 4)
        self._looked = self._still_s = self._logged_s = 0.0

    def is_over(self, seconds: float, awaited: Callable[[], str]) -> bool:
        """Returns whether nothing has got on for timeout_s; logs once a minute if nothing does.

        Args:
            seconds: for how long nothing has got on, by the clock.
            awaited: returns what is waited for, and for how long, in words.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        self._still_s = min(seconds, self._still_s + min(since, self.look_s))
        if seconds < since:  # it has got on since the last look
            self._still_s = min(seconds, self.look_s)
        if self._still_s < self._logged_s:
            self._logged_s = 0.0
        elif self._still_s >= self._logged_s + _LOG_S and self._still_s < self.timeout_s:
            self._logged_s = self._still_s
            log.warning(
                "%s: check that the server or the disk responds. It is abandoned after %g s "
                "without progress",
                awaited(),
                self.timeout_s,
            )
        return self._still_s >= self.timeout_s
