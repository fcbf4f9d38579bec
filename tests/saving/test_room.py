"""The room for a file is taken before its first byte is written, where the file system can do that.

A save that finds too little has written nothing, and its error tells what is needed and what is
left. Real disks that are full are tests/files/test_faults.py's business.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from fastckpt import Checkpointer, StorageError
from fastckpt.saving.pipeline import Pipeline
from tests.kit.doubles import Operation, Recorder, process_on, save_through
from tests.kit.steps import directories

T = TypeVar("T")
MIB = 1 << 20
WAIT_S = 60.0
STATE = {"w": torch.ones(20 * MIB // 4)}
ROOM = r"20\.0 MiB are needed, but 7\.00 MiB are free on the file system"


class NearlyFull(Recorder):
    """A file system with 7 MiB left."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "free_bytes":
            return 7 * MIB  # type: ignore[return-value] # what free_bytes() returns
        if operation.name == "allocate" and operation.args[0] > 7 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real()

    def written(self, path: Path) -> list[Operation]:
        """What was written to a file, or to what is to become it."""
        return [each for each in self.log if each.name == "write" and str(path) in each.path]


def test_a_file(disk: Path) -> None:
    storage = NearlyFull()
    pipeline = Pipeline(storage=storage)
    with pytest.raises(StorageError, match=ROOM) as told:
        save_through(pipeline, STATE, disk / "a.pt").result(WAIT_S)
    pipeline.close()
    assert (told.value.op, told.value.errno) == ("allocate", errno.ENOSPC)
    assert "Lustre" not in str(told.value), "it lies on another file system"
    assert not storage.written(disk) and not [*disk.iterdir()]


def test_a_step(disk: Path) -> None:
    storage = NearlyFull()
    with process_on(storage), Checkpointer(disk / "run", keep_last=1) as checkpointer:
        small = {"w": torch.ones(1000)}
        checkpointer.save(1, small).result(WAIT_S)
        assert storage.written(disk / "run"), "writes are recorded"
        storage.log.clear()
        with pytest.raises(StorageError, match=ROOM) as told:
            checkpointer.save(2, STATE).result(WAIT_S)
        assert told.value.path.endswith("step-00000002/rank-00000.safetensors")
        assert not storage.written(disk / "run/step-00000002")
        assert directories(disk / "run") == ["step-00000001"]
        checkpointer.save(3, small).result(WAIT_S)
