"""StepPlace: a step becomes visible under the root, in a directory that a manifest commits.

The module must not know what the directory holds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Protocol

from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Place
from fastckpt.steps.options import StepOptions
from fastckpt.steps.retention import tidy
from fastckpt.steps.root import Steps
from fastckpt.steps.uncommitted_step import UncommittedStep


class AnyStepPlace(Protocol):
    """The part of a Place that a StepPlan needs, of the root's or a tier's.

    Attributes:
        step: the directory that is written to, as this rank sees it.
        directory: the path that the step's directory lies in.
    """

    @property
    def step(self) -> UncommittedStep: ...
    @property
    def directory(self) -> str: ...
    def agree(self, meets: bool) -> tuple[str, bool]:
        """Tells all ranks the directory's name. Returns the first rank's nonce, and whether ranks
        of a node meet before they write, which the first rank decides by `meets`.
        """

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        """Commits the step, on the first rank; `manifest` makes its manifest from the sequence
        number of this commit.
        """


class StepPlace(Place):
    """The root, as one rank of a save sees it; `number` is the step's."""

    def __init__(self, steps: Steps, agreement: Round, number: int, options: StepOptions) -> None:
        self.step = UncommittedStep(steps, agreement)
        self.directory = steps.root
        self._steps = steps
        self._agreement = agreement
        self._number = number
        self._options = options

    def begin(self) -> None:
        if self._agreement.rank == 0:
            self.step.begin(self._number)

    def agree(self, meets: bool) -> tuple[str, bool]:
        if self._agreement.rank == 0:
            told = {"name": self.step.name, "nonce": secrets.token_hex(16), "meet": meets}
            self._agreement.put("place", json.dumps(told).encode())
        else:
            told = json.loads(self._agreement.get("place"))
            self.step.join(str(told["name"]))
            if self._options.durable:
                self._steps.sync_grown()  # the first rank does so for what it has made
        return str(told["nonce"]), bool(told["meet"])

    def publish(self, manifest: Callable[[int], Manifest]) -> None:
        self.step.publish(manifest(self._steps.next_sequence()), self._options.durable)

    def abandon(self) -> None:
        self.step.abandon()

    def close(self) -> None:
        self.step.close()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        if failure is None and self.step.is_begun:
            tidy(self._steps, self.step.name, self._options)
