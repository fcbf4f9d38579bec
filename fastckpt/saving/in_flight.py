"""The saves that one owner, a Checkpointer or a framework's part, has begun and may still hear of.

Responsible for which handles are kept, so that there is a bound to their number, and for raising
the first error once. It must not know what was saved, nor why an owner waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fastckpt.saving import ctrl_c, pipeline
from fastckpt.saving.handle import InnerHandle

log = logging.getLogger("fastckpt")


class InFlight:
    """The saves of one owner, in the order of their calls: those of which something is left to do,
    the first one that has failed and whose error nobody has asked for, and the newest in any case.

    The pipeline reports the errors of saves that are not kept: by the next save of their kind, or
    at exit. An exception in a wait, such as Ctrl-C, loses nothing: saves go on and stay in here.

    Args:
        newest: how many of the saves begun last stay although they have ended.
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
        """The save that was begun last; None if there is none."""
        return self._handles[-1] if self._handles else None

    def add(self, handle: InnerHandle) -> None:
        """Adds a save, and drops older ones that have ended."""
        handles = (*self._handles, handle)
        older, newest = handles[: -self._newest], handles[-self._newest :]
        left = pipeline.current().in_flight()  # also those that still remove what is old
        ended = [each for each in older if each.done() and each not in left]
        failed = [each for each in ended if each.may_be_told()]
        dropped = {id(each) for each in ended} - {id(each) for each in failed[:1]}
        self._handles = (*(each for each in older if id(each) not in dropped), *newest)

    def running(self) -> list[InnerHandle]:
        """Returns the saves that have not ended."""
        return [each for each in self._handles if not each.done()]

    def wait(self, removal_s: float = 0.0) -> None:
        """Waits until all have ended; raises no error of theirs.

        Args:
            removal_s: for how long, at most, also for what they remove after their commits.
        """
        handles = self._handles
        for handle in handles:
            handle.wait_done()
        if removal_s:
            pipeline.current().drain(removal_s, handles)

    def close(self, pressed: bool = False) -> bool:
        """Waits as ctrl_c.wait_or_give_up(): the first Ctrl-C is answered by a line, and a second
        one gives the saves up. Returns whether it was pressed.
        """
        return ctrl_c.wait_or_give_up(self._handles, pressed)

    def raise_first(self, not_begun: str | None = None) -> None:
        """Raises the first error that nobody has asked for, if there is one, and logs the others;
        all of them then count as asked for. `not_begun` is as raise_earlier()'s.
        """
        failed = [each for each in self._handles if each.done() and each.may_be_told()]
        for other in failed[1:]:
            log.warning("another save also failed: %s", other.exception())
        for first in failed[:1]:
            pipeline.raise_earlier(first, not_begun)
