"""The place of a step: it becomes visible under the root, in a directory that a manifest commits.

It must not know what the directory holds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Protocol

from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.save import Place
from fastckpt.steps.options import StepOptions
from fastckpt.steps.retention import tidy
from fastckpt.steps.root import Steps
from fastckpt.steps.step_directory import StepDirectory


class AnyStepPlace(Protocol):
    """A StepPlan needs this of a Place, which is the root's, or that of a tier.

    Attributes:
        step: the directory that is written to, as this rank sees it.
        directory: in which that is.
    """

    @property
    def step(self) -> StepDirectory: ...
    @property
    def directory(self) -> str: ...
    def agree(self, meets: bool) -> tuple[str, bool]:
        """Tells all ranks the name of the directory, and the save's nonce.

        Args:
            meets: the first rank wants ranks of a node to meet before they write.

        Returns:
            The nonce, and whether ranks meet.
        """

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        """THE commit, on the first rank.

        Args:
            manifest: makes it; given the place of this commit in the order of all.
        """


class StepPlace(Place):
    """The root, as one rank of a save sees it.

    Args:
        steps: the root's.
        agreement: the save's round.
        number: of the step; None: known when its directory is begun.
        options: how the step is written, and how many stay.

    Attributes:
        step: the directory that is written to.
    """

    def __init__(
        self, steps: Steps, agreement: Round, number: int | None, options: StepOptions
    ) -> None:
        self.step = StepDirectory(steps, agreement)
        self.directory = steps.root
        self._steps = steps
        self._agreement = agreement
        self._number = number
        self._options = options

    def begin(self) -> None:
        if self._agreement.rank == 0:
            assert self._number is not None
            self.step.begin(self._number)

    def agree(self, meets: bool) -> tuple[str, bool]:
        if self._agreement.rank == 0:
            told = {"name": self.step.name, "nonce": secrets.token_hex(16), "meet": meets}
            self._agreement.put("place", json.dumps(told).encode())
        else:
            told = json.loads(self._agreement.get("place"))
            self.step.name = str(told["name"])
        return str(told["nonce"]), bool(told["meet"])

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        self.step.publish(manifest(self._steps.next_sequence()), self._options.durable)

    def abandon(self) -> None:
        self.step.abandon()

    def close(self) -> None:
        self.step.close()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        if failure is None and self.step.is_begun and self._number is not None:
            keep_last, keep_every = self._options.keep_last, self._options.keep_every
            tidy(self._steps, self.step.name, self._number, keep_last, keep_every)
