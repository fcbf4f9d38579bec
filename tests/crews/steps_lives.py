"""The life of a rank that saves every step until another rank is gone, or until it is killed.

Responsible for reporting on the way, in files that outlive the process, for what the handles said
in the end, and for a clock by which no rank is late on a busy machine. Must not know when and how
lives end: that is for the test to choose.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastckpt import Checkpointer, CheckpointError, SaveOptions
from fastckpt.ranks import round as round_module
from fastckpt.saving import pipeline
from tests.crews.group_crew import Member
from tests.crews.steps_states import restamp, stamped, step_of
from tests.kit.doubles import Deadly

BORN, RESTORED, BEGUN, COMMITTED, FAILED = b"p", b"r", b"b", b"c", b"f"
REPORT = struct.Struct("<cI")
IN_FLIGHT = 2
TIMEOUT_S = 100.0  # of a save; by the Clock for ranks, and for files as long as tests wait

T = TypeVar("T")


class Reports:
    """What one rank has done: records at the end of a file, there as soon as they are made."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / str(rank)
        self._said = directory / f"{rank}.said"
        self._fd: int | None = None

    def keep_what_is_said(self) -> None:
        """From now on the process's standard error, with all that fastckpt logs, is kept beside."""
        os.dup2(os.open(self._said, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC), 2)
        logging.basicConfig(format="%(relativeCreated)d ms, %(threadName)s: %(message)s")
        logging.getLogger("fastckpt").setLevel(logging.DEBUG)

    def add(self, kind: bytes, number: int) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)
        os.write(self._fd, REPORT.pack(kind, number))

    def last(self, kind: bytes) -> int | None:
        """The number of the last record of a kind, None if there is none."""
        found = [number for each, number in self._records() if each == kind]
        return found[-1] if found else None

    def _records(self) -> list[tuple[bytes, int]]:
        content = self._path.read_bytes() if self._path.exists() else b""
        return [*REPORT.iter_unpack(content)]

    def told(self) -> str:
        """All of it, for messages."""
        done = " ".join(f"{kind.decode()}{number}" for kind, number in self._records())
        said = self._said.read_text(errors="replace") if self._said.exists() else ""
        return f"rank {self._path.name} did {done}, and said:\n{said}"


class Clock:
    """Time as ranks' waits for each other see it, in place of the module `time`: how long a thread
    has slept. Once a rank is dead, as a file tells, sleep takes no time: what waits for that rank
    ends at once. Until then no rank comes too late, however busy the machine is.
    """

    def __init__(self, directory: Path) -> None:
        self._dead = self.file(directory)
        self._thread = threading.local()
        self._waits: list[list[float]] = []  # of each thread, since then

    @staticmethod
    def file(directory: Path) -> Path:
        """The file that is there once a rank is dead."""
        return directory / "dead"

    @property
    def waited_s(self) -> float:
        """The longest that any thread has waited since then."""
        return max((wait[0] for wait in self._waits), default=0.0)

    def monotonic(self) -> float:
        return getattr(self._thread, "slept_s", 0.0)

    def sleep(self, seconds: float) -> None:
        if not self._dead.exists():
            time.sleep(seconds)
        else:
            if not hasattr(self._thread, "wait"):
                self._thread.wait = [0.0]
                self._waits.append(self._thread.wait)
            self._thread.wait[0] += seconds
        self._thread.slept_s = self.monotonic() + seconds


def live(member: Member, root: str, reports: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Restores, then saves step after step, some in flight at any time, until a save fails.

    Args:
        reports: a directory for those of all ranks.
        order: "fence" of the Checkpointer; and for whoever is "dying", after how many operations on
            files.

    Returns:
        The step restored, the error of each save that failed, the steps of those that did not, and
        how long a save has waited for a rank since that was dead.
    """
    report, clock = Reports(reports, member.rank), Clock(reports)
    report.keep_what_is_said()
    round_module.time = clock  # type: ignore[assignment]
    report.add(BORN, os.getpid())
    try:
        return _live(member, root, report, order) | {"waited_s": clock.waited_s}
    except BaseException:
        report.add(FAILED, 0)
        raise


def _live(member: Member, root: str, report: Reports, order: dict[str, Any]) -> dict[str, Any]:
    storage = Deadly()
    pipeline._current = pipeline.Pipeline(storage)
    # Never closed: that would take a while, for the rank that is gone does not leave its rounds.
    checkpointer = Checkpointer(
        root, keep_last=3, options=SaveOptions(fence=order["fence"], timeout_s=TIMEOUT_S)
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    state = stamped(member, 0)
    restored = checkpointer.restore(state) or 0
    assert step_of(member, state) == restored
    report.add(RESTORED, restored)
    if member.rank in order["dying"]:
        end = len(storage.log) + order["dying"][member.rank]
        storage.is_due = lambda number, _: number >= end
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
    }
