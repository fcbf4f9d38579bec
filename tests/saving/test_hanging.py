"""A server that does not answer: a save whose writes do not return fails within its bound and says
what it waited for, what the kernel still uses is kept until it is given back, and a process ends.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import StorageError
from fastckpt.engine import transfer
from fastckpt.saving import pipeline as pipeline_module
from fastckpt.saving.pipeline import Pipeline
from tests.doubles import Recorder
from tests.files.test_faults import temporaries
from tests.saving.test_handle import wait_until
from tests.saving.test_process import run_python

MIB = 1 << 20
WAIT_S = 60.0


class Hanging(Recorder):
    """A file system of which writes from `offset` on do not return before release()."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self._offset = offset
        self._released = threading.Event()
        self.begun = threading.Event()

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if kind == "write" and offset >= self._offset:
            self.begun.set()
            assert self._released.wait(WAIT_S)
        return super().attempt(kind, fd, memory, offset)

    def release(self) -> None:
        self._released.set()


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5 * MIB,), float(value))}


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[Hanging, Pipeline]]]:
    """Makes the process's pipeline one whose writes from an offset on hang."""
    made = []

    def make(offset: int = 0) -> tuple[Hanging, Pipeline]:
        double = Hanging(offset)
        current = Pipeline(storage=double, budget_bytes=64 * MIB)
        made.append((double, current))
        monkeypatch.setattr(pipeline_module, "_current", current)
        return made[-1]

    yield make
    for double, current in made:
        double.release()
        wait_until(current.staging.stranded.sweep, "the writes have returned")
        current.close()


def descriptors_of(path: Path) -> list[str]:
    """The files under a directory that this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in names if name.startswith(f"{path}/")]


def test_a_save_whose_writes_do_not_return_fails(
    disk: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk / "a.pt"
    fastckpt.save(state_of(1), path).result(WAIT_S)
    double, current = hanging(8 * MIB)
    monkeypatch.setattr(transfer, "_LOG_S", 0.6)
    caplog.set_level(logging.WARNING, "fastckpt")
    handle = fastckpt.save(state_of(2), path, timeout_s=1.5)
    error = handle.exception(WAIT_S)
    assert isinstance(error, StorageError) and not error.visible
    assert (error.op, error.path, error.errno) == ("write", str(path), errno.ETIMEDOUT)
    assert error.offset is not None and error.offset >= 8 * MIB  # one that waits for it, perhaps
    assert "has not ended for" in str(error) and "timeout_s" in str(error)
    told = [record.getMessage() for record in caplog.records]
    assert any("does the server, or the disk, answer?" in text for text in told), told
    assert any(f"'{path}' at offset {8 * MIB} was given up" in text for text in told), told
    assert torch.equal(torch.load(path)["w"], state_of(1)["w"]), "the checkpoint before stays"
    # What hangs keeps its one block and its file, whose number must not become another's.
    engine = current.staging.engine()
    assert engine.arena_blocks_in_use() == 1
    assert len(temporaries(disk)) == 1 and len(descriptors_of(disk)) == 1
    double.release()
    wait_until(lambda: engine.arena_blocks_in_use() == 0, "the write has returned")
    fastckpt.save(state_of(3), path).result(WAIT_S)
    assert torch.equal(torch.load(path)["w"], state_of(3)["w"])
    assert not temporaries(disk) and not descriptors_of(disk)


def test_a_cancelled_save_does_not_wait_for_writes_that_hang(
    disk: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_PARTING_S", 0.6)
    double, _current = hanging()
    handle = fastckpt.save(state_of(1), disk / "a.pt")
    assert double.begun.wait(WAIT_S)
    handle.cancel()
    assert isinstance(handle.exception(WAIT_S), fastckpt.SaveCancelled)
    double.release()


def test_closing_waits_for_no_write_that_hangs(disk: Path, hanging: Any) -> None:
    """close() leaves to the kernel what it has; nothing of it is used for anything else."""
    double, current = hanging()
    handle = fastckpt.save(state_of(1), disk / "a.pt", timeout_s=0.6)
    assert isinstance(handle.exception(WAIT_S), StorageError)
    engine = current.staging.engine()
    current.close()
    assert engine.arena_blocks_in_use() == 1 and len(descriptors_of(disk)) == 1
    double.release()
    wait_until(current.staging.stranded.sweep, "the write has returned")
    assert engine.arena_blocks_in_use() == 0
    assert not descriptors_of(disk) and not temporaries(disk)


ENDS = """
import os, sys, threading
import torch, fastckpt
from fastckpt.saving import pipeline
from tests.doubles import Recorder

class Hanging(Recorder):
    def attempt(self, kind, fd, memory, offset):
        threading.Event().wait()

pipeline._current = pipeline.Pipeline(storage=Hanging())
handle = fastckpt.save({"w": torch.ones(3 << 20)}, sys.argv[1], timeout_s=0.6)
"""


@pytest.mark.multiprocess
def test_a_process_ends_though_writes_hang(disk: Path) -> None:
    path = disk / "a.pt"
    ended = run_python(ENDS, path)
    assert f"the save to '{path}' FAILED and was not committed: write of '{path}'" in ended.stderr
    assert "ETIMEDOUT" in ended.stderr and "terminate" not in ended.stderr
    assert not path.exists() and len(temporaries(disk)) == 1
    fastckpt.save(state_of(1), path).result(WAIT_S)
    assert not temporaries(disk), "what the process has left is debris"


STUCK = """
import sys, threading
import torch, fastckpt
from fastckpt.saving import pipeline
from tests.doubles import Recorder

class Stuck(Recorder):
    def sync(self, *_):
        threading.Event().wait()

pipeline._STILL_S = 0.5
pipeline._current = pipeline.Pipeline(storage=Stuck())
handle = fastckpt.save({"w": torch.ones(3 << 20)}, sys.argv[1])
"""


@pytest.mark.multiprocess
def test_a_process_ends_though_a_sync_hangs(disk: Path) -> None:
    path = disk / "a.pt"
    ended = run_python(STUCK, path, returncode=1)
    assert f"the save to '{path}' may be lost; it has not got on" in ended.stderr
    assert "terminate" not in ended.stderr and not path.exists()
    for name in temporaries(disk):
        os.unlink(disk / name)
