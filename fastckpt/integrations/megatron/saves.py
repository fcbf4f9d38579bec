"""The saves of a run, and the work after a commit: the tracker and retention.

Responsible for keeping track of the run's saves and for waiting for them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from math import inf

from fastckpt.directories import iterations
from fastckpt.directories.iterations import Retention
from fastckpt.errors import StorageError, is_visible
from fastckpt.integrations.megatron.strategies import Afterwards
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.in_flight import InFlight
from fastckpt.saving.lease import give_up


class Saves:
    """The saves of a run; pass the same object to each save_checkpoint() of the run.

    Saves to one directory commit in the order of their calls. Used as a context manager, it waits
    for the saves at the end; after an exception in the body it does not raise their errors.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._saves = InFlight()

    def wait(self) -> None:
        """Waits until all saves have ended and old iterations are removed. Call it before the
        process group is destroyed.

        Raises:
            CheckpointError: with on_error="raise", a save failed and its error was not raised yet.
        """
        self._wait()
        self._saves.raise_first()

    def _wait(self) -> None:
        self._saves.wait(inf)
        for root in self._runs:
            give_up(root)

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        self._wait()
        if kind is None:
            self._saves.raise_first()

    def is_first(self, root: str) -> bool:
        """Whether no save to this directory has begun yet."""
        return root not in self._runs

    def begin(
        self,
        root: str,
        iteration: int,
        retention: Retention,
        save: Callable[[Afterwards], InnerHandle],
    ) -> InnerHandle:
        """Begins a save with `save`, whose argument is the work after the commit."""
        run = self._runs.setdefault(root, _Run(root))
        retain = partial(run.retain, iteration, retention)
        handle = save(Afterwards(root, partial(run.committed, iteration), retain))
        self._saves.add(handle)
        return handle


class _Run:
    """The tracker and retention of one directory, on the first rank. Saves commit there in order,
    but one save may still be removing old iterations when the next one commits.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._named: int | None = None  # the iteration that the tracker durably names

    def committed(self, iteration: int) -> None:
        """Updates the tracker.

        Raises:
            StorageError: a restart may load the iteration that the tracker named before. The error
                is `visible`, because this iteration is committed.
        """
        self._named = None
        try:
            iterations.track(self._root, iteration)
        except StorageError as error:
            does = "names it, but perhaps not durably" if is_visible(error) else "does not name it"
            detail = f"iteration {iteration} is committed, but {iterations.TRACKER} {does}"
            number = error.errno or errno.EIO
            raise StorageError(error.op, error.path, number, detail=detail, visible=True) from error
        self._named = iteration

    def retain(self, iteration: int, retention: Retention) -> None:
        """Removes old iterations, after a committed save has reported its result. Removes nothing
        if the tracker may name another iteration after a crash, or if the retention of a later save
        follows.
        """
        if self._named != iteration:
            return
        saves = pipeline.current().in_flight()
        in_flight = {handle.path for handle in saves if not handle.done()}
        iterations.retain(self._root, iteration, retention, in_flight)
