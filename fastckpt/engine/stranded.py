"""Transfers that the kernel holds: their saves have given up, but system calls still use their
memory and files. Responsible for keeping both until these have returned, which may be never.
So it also knows which threads of saves hang. It must not know why a save gave up, nor what a file
is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from fastckpt.errors import CheckpointError


@dataclass
class _Held:
    """The transfers on their way to one descriptor, and the contexts to leave after them."""

    transfers: list[Callable[[], bool]] = field(default_factory=list)
    files: ExitStack | None = None


class Stranded:
    """The stranded transfers of one process. Their blocks stay taken from the staging budget."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by descriptor

    def add(self, fd: int, has_returned: Callable[[], bool]) -> None:
        """Keeps a transfer to fd until it has returned, which has_returned tells; a thread has a
        negative number in the place of fd.
        """
        with self._lock:
            self._held.setdefault(fd, _Held()).transfers.append(has_returned)

    def take_over(self, fd: int, files: ExitStack) -> bool:
        """Takes over the contexts that close fd, if a transfer to it is here: another file that got
        its number would be written to. Returns whether it has.
        """
        with self._lock:
            held = self._held.get(fd)
            if held is not None:
                held.files = files.pop_all()
            return held is not None

    def sweep(self) -> bool:
        """Leaves the contexts of the files to which nothing is on its way any more, as after an
        error. Returns whether nothing is stranded any more.
        """
        with self._lock:
            done = {
                fd: held
                for fd, held in self._held.items()
                if all([has_returned() for has_returned in held.transfers])
            }
            for fd in done:
                del self._held[fd]
            is_empty = not self._held
        for held in done.values():
            if held.files is not None:
                error = CheckpointError("its save had given up")
                with suppress(OSError, CheckpointError):  # what stays is removed as debris
                    held.files.__exit__(CheckpointError, error, None)
        return is_empty
