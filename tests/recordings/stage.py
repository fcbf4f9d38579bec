"""A stage: one rank's process while a scene is played on it, with the directories of the scene.

Responsible for putting a storage double behind the process's pipeline, and for what a scene may do
only once all ranks have come so far. It must not know what is saved.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import zstandard

from fastckpt.errors import CheckpointError
from fastckpt.integrations import dcp
from fastckpt.integrations.dcp import plan_exchange
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.saving import pipeline
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage import file_system as storage
from tests.crews.group_crew import Member
from tests.kit.doubles import end_leases
from tests.recordings.recorder import Naming, StageStorage, lines_of

BUDGET_BYTES = 8 * BLOCK_BYTES
Scene = Callable[["Stage"], None]


class Stage:
    """One rank's.

    Args:
        directory: of the scene; the same on all ranks.
        member: None where one process plays alone.

    Attributes:
        root: for what is saved.
        local: of a node's local tier, on a device of its own; each rank may have another.
        rank, ranks: of the scene.
        group, group_of_first: of all ranks, and of the first alone; None where there is but one.
    """

    def __init__(self, directory: Path, member: Member | None) -> None:
        self.root = directory / "root"
        self._apart = directory / "local"
        self._member = member
        self.rank = 0 if member is None else member.rank
        self.ranks = 1 if member is None else member.world_size
        self.group = None if member is None else member.group
        self.group_of_first = None if member is None else member.group_of(0, 1)
        self.local = self._apart / f"node-{2 * self.rank // self.ranks}"
        for path in (self.root, self.local):
            path.mkdir(parents=True, exist_ok=True)
        self._naming = Naming({str(self.root): "root", str(self._apart): "local"})
        self._lines: list[str] = []

    def meet(self) -> None:
        """Waits for the other ranks."""
        if self._member is not None:
            dist.barrier(self._member.group)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What is done meanwhile prepares the scene."""
        with self._on(StageStorage(str(self._apart))):
            yield

    @contextmanager
    def recorded(self, title: str = "", **options: Any) -> Iterator[StageStorage]:
        """What is done meanwhile is recorded, and so is the error that ends it, if one does.

        Args:
            title: of this part, where a scene has several.
            options: as StageStorage's.
        """
        double = StageStorage(str(self._apart), **options)
        outcome = []
        with self._on(double):
            try:
                yield double
            except (CheckpointError, OSError) as error:
                outcome = [f"raised {type(error).__name__}"]
        titles = [f"-- {title}"] if title else []
        self._lines += [*titles, *lines_of(double, self._naming), *outcome]

    @contextmanager
    def _on(self, double: StageStorage) -> Iterator[None]:
        before, pipeline._current = pipeline._current, Pipeline(double, BUDGET_BYTES)
        own = pipeline._current
        self.meet()
        try:
            yield
            self.meet()
        finally:
            own.close()
            end_leases(double)
            pipeline._current = before
        self.meet()

    def text(self) -> str:
        """What was recorded on this rank."""
        return "\n".join([f"== rank {self.rank}", *self._lines, ""])


def play(member: Member | None, scene: Scene, directory: Path) -> str:
    """Plays a scene on this rank; returns its part of the recording."""
    torch.manual_seed(0)
    numbers = itertools.count()
    rank = 0 if member is None else member.rank

    def token_hex(nbytes: int) -> str:
        return random.Random(f"{rank} {next(numbers)}").randbytes(nbytes).hex()

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.object(secrets, "token_hex", token_hex))
        stack.enter_context(mock.patch.object(storage, "_PAUSE_S", 0.0))
        # Plans that are known from other scenes draw no token.
        for known in (dcp._shared._alone, *dcp._shared._kept.values()):
            stack.enter_context(mock.patch.object(known, "plans", plan_exchange.PlanExchange()))
        before = os.umask(0o022)
        stack.callback(os.umask, before)
        stage = Stage(directory, member)
        scene(stage)
        stage.meet()
        return stage.text()


def versions() -> str:
    """Of what decides on sizes beside fastckpt itself."""
    return f"torch {torch.__version__.split('+')[0]}, zstandard {zstandard.__version__}"
