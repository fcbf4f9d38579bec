"""The saves that an owner, a Checkpointer or a framework, may still have to wait for or report.

Responsible for the choice of the handles to keep, so that their number is bounded, and for raising
the first error once. It must not know what was saved, or why an owner waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fastckpt.saving import ctrl_c, pipeline
from fastckpt.saving.handle import InnerHandle

log = logging.getLogger("fastckpt")


class InFlight:
    """The saves of one owner in the order of their calls: all unfinished ones, the first failed one
    whose error the caller does not know, and the newest ones in any case.

    The pipeline reports the errors of all other saves: by the next save of their kind, or at exit.
    After an exception in a wait, such as Ctrl-C, the saves continue and remain in this list.

    Args:
        newest: how many of the newest saves are kept after their end.
    """

    def __init__(self, newest: int = 1) -> None:
        self._newest = newest
        self._handles: tuple[InnerHandle, ...] = ()  # replaced, never changed: others may iterate

    def __iter__(self) -> Iterator[InnerHandle]:
        return iter(self._handles)

    def __reversed__(self) -> Iterator[InnerHandle]:
        return reversed(self._handles)

    @property
    def last(self) -> InnerHandle | None:
        """The newest save; None if there is none."""
        return self._handles[-1] if self._handles else None

    def add(self, handle: InnerHandle) -> None:
        """Adds a save, and drops older ones that have ended."""
        handles = (*self._handles, handle)
        older, newest = handles[: -self._newest], handles[-self._newest :]
        busy = pipeline.current().in_flight()  # including saves that still remove old files
        ended = [each for each in older if each.done() and each not in busy]
        failed = [each for each in ended if each.may_be_told()]
        dropped = {id(each) for each in ended} - {id(each) for each in failed[:1]}
        self._handles = (*(each for each in older if id(each) not in dropped), *newest)

    def running(self) -> list[InnerHandle]:
        """Returns the saves that have not ended."""
        return [each for each in self._handles if not each.done()]

    def wait(self, removal_s: float = 0.0) -> None:
        """Waits until all saves have ended; raises none of their errors.

        Args:
            removal_s: the longest further wait for removals after their commits.
        """
        handles = self._handles
        for handle in handles:
            handle.wait_done()
        if removal_s:
            pipeline.current().drain(removal_s, handles)

    def close(self, pressed: bool = False) -> bool:
        """Waits like ctrl_c.wait_or_give_up(): the first Ctrl-C logs a line, the second one
        abandons the saves. Returns whether Ctrl-C was pressed.
        """
        return ctrl_c.wait_or_give_up(self._handles, pressed)

    def raise_first(self, not_begun: str | None = None) -> None:
        """Raises the first error that the caller does not know, if there is one, and logs the
        others; then all count as known. For `not_begun` see raise_earlier().
        """
        failed = [each for each in self._handles if each.done() and each.may_be_told()]
        for other in failed[1:]:
            log.warning("another save also failed: %s", other.exception())
        for first in failed[:1]:
            pipeline.raise_earlier(first, not_begun)
