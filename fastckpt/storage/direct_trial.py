"""The choice for or against O_DIRECT, where the kind of file system does not decide it.

Saves measure it with their own files: of the first four long ones, two are written in the usual way
and two in the other, each timed from its creation until it is durable, page cache included. Later
files go the faster way. Staging.route() decides: it asks the file system's policy, this trial, the
page cache and a probe, in this order. This module must not know how O_DIRECT is switched on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

TIMED_BYTES = 64 << 20  # shorter files take longer to create and sync than to write
SAMPLES = 2  # of each way; the better one counts, since others use the storage too
VALID_S = 3600.0  # then it is measured again, for the load of a file system changes


class _Running(NamedTuple):
    """A file that is being timed."""

    begun_s: float
    device: int
    direct: bool
    is_usual: bool


class _Known:
    """The findings about one file system, and when its first file was timed.

    Attributes:
        rates: bytes/s of each file written with O_DIRECT (True) or buffered (False).
        unusual_fails: whether the unusual way was refused, or a file written so was given up.
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


class DirectTrial:
    """A process's findings about its file systems, by device number. No method waits or takes a
    lock, so a child of fork() may call them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._running: dict[int, _Running] = {}  # by descriptor

    def pick(self, device: int, usual: bool, nbytes: int | None) -> tuple[bool, str]:
        """Returns whether a file is to be written with O_DIRECT, and why.

        Args:
            device: the file system's number (st_dev).
            usual: whether O_DIRECT is used there as long as nothing was measured.
            nbytes: how much is written without a pause; None if that cannot be timed.
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
        # Usual, other, other, usual: the slow first save of a process then harms neither way.
        direct = usual if many < others or not many else not usual
        return direct, f"being measured: {known.text() or 'nothing yet'}"

    def begin(self, fd: int, device: int, direct: bool, usual: bool, nbytes: int) -> None:
        """Times a file from now on, if it is long enough, until it is synced or closed."""
        if nbytes >= TIMED_BYTES:
            self._running[fd] = _Running(self._clock(), device, direct, direct is usual)

    def synced(self, fd: int, nbytes: int) -> None:
        """Notes the rate of a file that is durable now."""
        running = self._running.pop(fd, None)
        if running is not None:
            known = self._known.setdefault(running.device, _Known(running.begun_s))
            took_s = max(1e-9, self._clock() - running.begun_s)
            if not known.is_decided:  # more samples would only favour the chosen way
                known.rates[running.direct].append(nbytes / took_s)

    def flushed(self, fd: int) -> None:
        """Forgets a file that is not going to be synced: its time means nothing."""
        self._running.pop(fd, None)

    def closed(self, fd: int) -> None:
        """Notes that a file is closed. If it was still being timed, its save has given it up."""
        running = self._running.pop(fd, None)
        if running is not None and not running.is_usual:
            self.refused(running.device)

    def refused(self, device: int) -> None:
        """Notes that the file system does not take the unusual way."""
        self._known.setdefault(device, _Known(self._clock())).unusual_fails = True
