"""Whether files of a file system are written with O_DIRECT, where its kind does not decide that.

Saves find it out by their own bytes: of the first four long files two are written in the usual way
and two in the other, each timed from when it was made until all of it is durable, so that what was
left in the page cache counts. Later files go the faster way. Nothing is written for the trial
alone. This module must not know how a file is switched to O_DIRECT, nor what is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

TIMED_BYTES = 64 << 20  # shorter files take longer to be made and synced than to be written
SAMPLES = 2  # of each way, of which the better one counts: others use the storage, too
VALID_S = 3600.0  # then it is measured again: the load of a file system changes


class _Running(NamedTuple):
    """A file that is being timed: since when, on which file system, and how it is written."""

    begun_s: float
    device: int
    direct: bool
    is_usual: bool


class _Known:
    """The findings about one file system.

    Attributes:
        since_s: when its first file was timed.
        rates: bytes/s of the files written with O_DIRECT (True) and buffered (False).
        unusual_fails: the file system refused the unusual way, or a file written so was given up.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.rates: dict[bool, list[float]] = {True: [], False: []}
        self.unusual_fails = False

    @property
    def is_decided(self) -> bool:
        return min(map(len, self.rates.values())) >= SAMPLES

    def text(self) -> str:
        ways = ((name, self.rates[way]) for name, way in (("direct", True), ("buffered", False)))
        return ", ".join(f"{name} {max(rates) / 1e6:.0f} MB/s" for name, rates in ways if rates)


class DirectChoice:
    """What one process has found out of its file systems, by their device numbers. No method waits
    or takes a lock: a child of fork() may call them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._running: dict[int, _Running] = {}  # by descriptor

    def pick(self, device: int, usual: bool, nbytes: int | None) -> tuple[bool, str]:
        """Whether a file is to be written with O_DIRECT, and why.

        Args:
            device: the file system's.
            usual: what is done as long as nothing was measured.
            nbytes: how much is written to the file at a stretch; None: it cannot be timed.
        """
        known = self._known.get(device)
        if known is not None and self._clock() - known.since_s >= VALID_S:
            self._known.pop(device, None)
            known = None
        known = known or _Known(0.0)
        if known.unusual_fails:
            return usual, f"{'buffered' if usual else 'direct'} writes failed here"
        if known.is_decided:
            return max(known.rates[True]) > max(known.rates[False]), f"measured: {known.text()}"
        if nbytes is None or nbytes < TIMED_BYTES:
            return usual, "not measured yet"
        many, others = len(known.rates[usual]), len(known.rates[not usual])
        # Usual, other, other, usual: that the first save of a process is slow speaks against none.
        direct = usual if many < others or not many else not usual
        return direct, f"being measured: {known.text() or 'nothing yet'}"

    def begin(self, fd: int, device: int, direct: bool, usual: bool, nbytes: int) -> None:
        """From now on a file is timed, if it is long enough, until it is synced or closed."""
        if nbytes >= TIMED_BYTES:
            self._running[fd] = _Running(self._clock(), device, direct, direct is usual)

    def synced(self, fd: int, nbytes: int) -> None:
        """A file of so many bytes is durable."""
        running = self._running.pop(fd, None)
        if running is not None:
            known = self._known.setdefault(running.device, _Known(running.begun_s))
            took_s = max(1e-9, self._clock() - running.begun_s)
            if not known.is_decided:  # else the way that was chosen would only ever gain
                known.rates[running.direct].append(nbytes / took_s)

    def flushed(self, fd: int) -> None:
        """A file is not going to be synced, so its time tells nothing."""
        self._running.pop(fd, None)

    def closed(self, fd: int) -> None:
        """A file is closed; if it was being timed, it was given up."""
        running = self._running.pop(fd, None)
        if running is not None and not running.is_usual:
            self.refused(running.device)

    def refused(self, device: int) -> None:
        """The file system does not take the unusual way."""
        self._known.setdefault(device, _Known(self._clock())).unusual_fails = True
