"""No call outlives itself: what a save or load has held, in frames or errors, is free when it has
ended and its handle is dropped, and not only when Python collects garbage.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt.errors import CheckpointError
from fastckpt.storage.file_system import reported
from tests.kit.doubles import FailAlways, process_on
from tests.kit.saves import Octets, wait_until

WAIT_S = 60.0


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


State = dict[str, torch.Tensor]


def steps(directory: Path, state: State) -> None:
    with fastckpt.Checkpointer(directory / "runs" / "run") as checkpointer:
        checkpointer.save(1, state).result(WAIT_S)
        checkpointer.save(2, state).result(WAIT_S)
        checkpointer.load()


def file(directory: Path, state: State) -> None:
    fastckpt.save(state, directory / "a.pt").result(WAIT_S)


def missing(directory: Path, _state: State) -> None:
    fastckpt.load(directory / "none.pt")


def damaged(directory: Path, state: State) -> None:
    file(directory, state)
    os.truncate(directory / "a.pt", 100)
    fastckpt.load(directory / "a.pt")


def no_steps(directory: Path, state: State) -> None:
    with fastckpt.Checkpointer(directory / "run") as checkpointer:
        checkpointer.load()


def no_directory(directory: Path, state: State) -> None:
    (directory / "file").touch()
    file(directory / "file", state)


def no_commit(directory: Path, state: State) -> None:
    with (
        process_on(FailAlways("rename", errno.EIO)),
        fastckpt.Checkpointer(directory / "run") as checkpointer,
    ):
        assert checkpointer.save(1, state).exception(WAIT_S) is not None


def translated(_directory: Path, _state: State) -> None:
    with reported("open", "a"):
        raise OSError(errno.EIO, "of the system")


def test_log_records_keep_no_error(caplog: pytest.LogCaptureFixture) -> None:
    log, error = logging.getLogger("fastckpt"), CheckpointError("full")
    log.warning("%r failed: %s", "a", error)
    record = caplog.records[-1]
    assert record.getMessage() == "'a' failed: full" and not record.args


CALLS = [steps, file, missing, damaged, no_steps, no_directory, no_commit, translated]


def test_no_call_outlives_itself(disk: Path, uncollected: None) -> None:
    def caller(call: Callable[[Path, State], None], directory: Path) -> weakref.ref[Octets]:
        memory = Octets(1 << 20)
        try:
            call(directory, {"w": torch.frombuffer(memory, dtype=torch.float32)})
        except (CheckpointError, OSError):  # that is what the call is for
            pass
        return weakref.ref(memory)

    for call in CALLS:
        name = call.__name__
        (disk / name).mkdir()
        held = caller(call, disk / name)
        wait_until(
            lambda held=held: held() is None, f"{name} has ended, and nothing kept the state"
        )
