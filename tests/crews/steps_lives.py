"""The life of a rank that saves every step until another rank is gone, or until it is killed.

Responsible for reporting on the way, in a file that outlives the process, and for what the handles
said in the end. Must not know when and how lives end: that is for the test to choose.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastckpt import Checkpointer, CheckpointError
from fastckpt.saving import pipeline
from tests.crews.group_crew import Member
from tests.crews.steps_states import restamp, stamped, step_of
from tests.doubles import Operation, Recorder

BORN, RESTORED, BEGUN, COMMITTED, FAILED = b"p", b"r", b"b", b"c", b"f"
REPORT = struct.Struct("<cI")
IN_FLIGHT = 2

T = TypeVar("T")


class Reports:
    """What one rank has done: records at the end of a file, there as soon as they are made."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / str(rank)
        self._fd: int | None = None

    def add(self, kind: bytes, number: int) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)
        os.write(self._fd, REPORT.pack(kind, number))

    def last(self, kind: bytes) -> int | None:
        """The number of the last record of a kind, None if there is none."""
        content = self._path.read_bytes() if self._path.exists() else b""
        found = [number for each, number in REPORT.iter_unpack(content) if each == kind]
        return found[-1] if found else None


class Deadly(Recorder):
    """Once armed, the process is killed before so many more operations have been done.

    The engine's transfers are not counted.
    """

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self.deadly: int | None = None

    def arm(self, operations: int) -> None:
        self.deadly = len(self.log) + operations

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if self.deadly is not None and number >= self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return real()


def live(member: Member, root: str, reports: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Restores, then saves step after step, some in flight at any time, until a save fails.

    Args:
        reports: a directory for those of all ranks.
        order: "timeout_s" and "fence" of the Checkpointer; and for whoever is "dying", after how
            many operations on files.

    Returns:
        The step restored, the error of each save that failed, and when all of this was known.
    """
    report = Reports(reports, member.rank)
    report.add(BORN, os.getpid())
    try:
        return _live(member, root, report, order)
    except BaseException:
        report.add(FAILED, 0)
        raise


def _live(member: Member, root: str, report: Reports, order: dict[str, Any]) -> dict[str, Any]:
    storage = Deadly()
    pipeline._current = pipeline.Pipeline(storage)
    # Never closed: that would take a while, for the rank that is gone does not leave its rounds.
    checkpointer = Checkpointer(root, keep_last=3, fence=order["fence"])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    state = stamped(member, 0)
    restored = checkpointer.restore(state) or 0
    assert step_of(member, state) == restored
    checkpointer._timeout_s = order["timeout_s"]  # short, now that there is a connection
    report.add(RESTORED, restored)
    if member.rank in order["dying"]:
        storage.arm(order["dying"][member.rank])
    step, handles = restored, {}
    try:
        while True:
            step += 1
            optimizer.step()  # waits for what a save with the step fence still copies
            restamp(member, state, step)
            report.add(BEGUN, step)
            handles[step] = checkpointer.save(step, state)
            if step - IN_FLIGHT in handles:
                handles[step - IN_FLIGHT].result()
                report.add(COMMITTED, step - IN_FLIGHT)
    except CheckpointError:
        pass  # it is asked for again, of the handle it came from
    errors = {step: handle.exception() for step, handle in handles.items()}
    return {
        "restored": restored,
        "errors": {step: error for step, error in errors.items() if error is not None},
        "saved": [step for step, error in errors.items() if error is None],
        "known": time.monotonic(),
    }
