"""Catalog: the committed steps of a root, which a Checkpointer lists, describes, pins, deletes."""

from __future__ import annotations

import copy
from typing import Any

from fastckpt.arguments.checks import Mode, check_integer
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.steps import pins, retention
from fastckpt.steps.options import StepOptions
from fastckpt.steps.store import Committed, StepStore
from fastckpt.tiers.local_tier import LocalTier


class Catalog:
    """The committed steps of a root; the base class of Checkpointer, whose attributes it uses."""

    _root: str
    _steps: StepStore
    _options: StepOptions
    _coordinator: Coordinator
    _tier: LocalTier | None

    def _changing(self) -> pipeline.Pipeline:
        """Returns the pipeline for a call that changes the root, which must not be a step."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending, as this rank sees the directory now. Raises
        StorageError if the directory or a manifest could not be read in several attempts.
        """
        infos, _faults = self._steps.survey()
        return sorted({item.manifest.step for item in infos})

    def latest(self) -> int | None:
        """Returns the step committed last, which need not have the highest number, as this rank
        sees the directory now; None if there is none. Raises StorageError like steps().
        """
        infos, _faults = self._steps.survey()
        return infos[0].manifest.step if infos else None

    def best(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Returns the step with the best value of a metric, or the first one of equal steps. Waits
        for this process's saves to the root, and reads the directory as this rank sees it. Returns
        None if no step has the metric; do not pass None on to restore(), which would restore the
        newest step. Only manifests are read, so a step with damaged files counts until this process
        has read these files.

        Args:
            metric: the metric's name; None: that of keep_best.
            mode: whether the lowest ("min") or highest ("max") value is the best. None: the mode of
                keep_best for its metric, "min" for any other.

        Raises:
            ValueError: neither metric nor keep_best is set.
            StorageError: see steps().
        """
        by = retention.criterion(self._options.keep_best, metric, mode)
        pipeline.current().wait_for(self._root, ended=True)
        return retention.best(self._steps, by)

    def metrics(self, step: int) -> dict[str, float | str]:
        """Returns the metrics that were saved with a step. Waits like best().

        Raises:
            CheckpointError: the root holds no such step.
            StorageError: see steps().
        """
        return dict(self._newest(step).manifest.metrics)

    def metadata(self, step: int) -> Any:
        """Returns the metadata that were saved with a step, or None. Otherwise like metrics()."""
        return copy.deepcopy(self._newest(step).manifest.metadata)

    def _newest(self, step: int) -> Committed:
        """Returns the newest attempt at a step."""
        pipeline.current().wait_for(self._root, ended=True)
        return pins.newest_attempt(self._steps, check_integer("step", step))

    def pin(self, step: int) -> None:
        """Protects a committed step from removal by keep_last, by delete() or by another save of
        the same step, in this and all other processes, until unpin(). One rank's call suffices.
        Waits for this process's saves to the root.

        Raises:
            CheckpointError: the root holds no such step.
            StorageError: it cannot be pinned.
            ValueError: see save().
        """
        self._changing().wait_for(self._root, ended=True)
        pins.pin(self._steps, check_integer("step", step))

    def unpin(self, step: int) -> None:
        """Permits the removal of a step again; it need not be pinned. Otherwise like pin()."""
        self._changing().wait_for(self._root, ended=True)
        pins.unpin(self._steps, check_integer("step", step))

    def delete(self, step: int) -> None:
        """Removes a step if called on the first rank; does nothing on other ranks. Copies of the
        step on other nodes become unusable at once, and the next restore removes them. Waits for
        this process's saves to the root.

        Raises:
            CheckpointError: there is no such step, it is pinned, or it is being read.
            StorageError: it cannot be removed.
            ValueError: see save().
        """
        self._changing().wait_for(self._root, ended=True)
        if self._coordinator.rank == 0:
            shelves = [self._steps, *([] if self._tier is None else [self._tier.steps])]
            pins.delete(shelves, check_integer("step", step))
