"""Saves of two ranks, which are parts of this process, stopped in a state of their life."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import fastckpt
from fastckpt.ranks import per_group
from fastckpt.ranks.per_group import GroupMemo
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pipeline import Pipeline
from tests.kit.coordinators import opened
from tests.kit.doubles import Operation, Recorder, save_through
from tests.kit.saves import wait_until

WAIT_S = 60.0
BLOCK = 8 << 20
T = TypeVar("T")
# Which rank is stopped, and at which call, so that the first one is in a state.
STATES = {
    "staging": (0, "write"),  # with memory for one block of several
    "writing": (0, "sync"),
    "agreeing": (1, "sync"),
    "publishing": (0, "rename"),
}


class Stop(Recorder):
    """The first write, sync or rename waits for release(), which may have operations fail.

    Args:
        name: of the operation that waits; "": none does.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._claims = name, [None]
        self._faults: dict[str, int] = {}
        self._released = threading.Event()
        self.reached = threading.Event()

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        self._wait(kind)
        return super().attempt(kind, fd, memory, offset)

    def sync(self, fd: int) -> None:
        self._wait("sync")
        super().sync(fd)

    def rename(self, source: str, target: str) -> None:
        self._wait("rename")
        super().rename(source, target)

    def _wait(self, name: str) -> None:
        if name == self._name and self._claims:
            self._claims.clear()
            self.reached.set()
            assert self._released.wait(2 * WAIT_S)

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if (fault := self._faults.get(operation.name)) is None:
            return real()
        if fault == errno.ETIMEDOUT:  # a server that has not answered in time has done it
            real()
        raise OSError(fault, "injected")

    def release(self, **faults: int) -> None:
        self._faults |= faults
        self._released.set()


class Rank:
    """One rank: a part of this process with a storage and a pipeline of its own.

    Args:
        stops_at: the operation that its storage stops at; "" if it stops nowhere.
        elements: of what it saves.

    Attributes:
        rounds: those that it has begun.
    """

    def __init__(self, memo: GroupMemo, stops_at: str, elements: int) -> None:
        self.coordinator = memo.coordinator
        self.storage = Stop(stops_at)
        self.pipeline = Pipeline(self.storage, 64 << 20)
        self.state = {"w": torch.full((elements,), 2.0)}
        self.rounds: list[Round] = []
        self.handle: InnerHandle
        self._group = type("Group", (), {})()
        self._begin = memo.coordinator.begin
        memo.coordinator.begin = self._begun  # type: ignore[method-assign]
        per_group._files._kept[self._group] = memo

    def _begun(self, *how: Any) -> Round:
        self.rounds.append(self._begin(*how))
        return self.rounds[-1]

    def save(self, path: Path, **options: Any) -> None:
        options = {"fence": "step", "staging_bytes": BLOCK, "group": self._group, **options}
        self.handle = save_through(self.pipeline, self.state, path, **options)


class Life:
    """A save of two ranks over a checkpoint of ones, of which the first is stopped in a state.

    Attributes:
        log: what pytest has logged.
    """

    log: pytest.LogCaptureFixture

    def __init__(self, path: Path, state: str) -> None:
        self.path, self.state = path, state
        fastckpt.save({"w": torch.ones(5)}, path).result(WAIT_S)
        self._stopped, name = STATES[state]
        memos = map(GroupMemo, opened(dist.HashStore(), 2))
        elements = BLOCK if state == "staging" else BLOCK // 32  # of four bytes
        self.ranks = [
            Rank(memo, name if rank == self._stopped else "", elements)
            for rank, memo in enumerate(memos)
        ]
        self.first, self.second = self.ranks

    def begin(self, **options: Any) -> None:
        """Begins the save, and returns when the first rank is in the state. `before_commit` is the
        first one's alone.
        """
        self.first.save(self.path, **options)
        self.second.save(self.path, **{**options, "before_commit": None})
        self.arrive()

    def arrive(self) -> None:
        """Returns when the first rank is in the state."""
        assert self.ranks[self._stopped].storage.reached.wait(WAIT_S)
        life = self.first.pipeline._in_flight[self.first.handle].life
        wait_until(lambda: life.state.value == self.state, f"it is {self.state}")
        if self.state != "staging":
            self.first.handle.wait_staged(WAIT_S)
        assert not self.first.handle.done()
        assert self.first.handle.is_staged() == (self.state != "staging")

    def release(self, **faults: int) -> None:
        """Lets it go on; operations of these names fail from now on, by these numbers."""
        self.ranks[self._stopped].storage.release(**faults)

    def outcomes(self) -> list[BaseException | None]:
        return [rank.handle.exception(WAIT_S) for rank in self.ranks]

    def close(self) -> None:
        self.release()
        for rank in self.ranks:
            wait_until(rank.pipeline.staging.hung.sweep, "the calls have returned")
            rank.pipeline.close()
