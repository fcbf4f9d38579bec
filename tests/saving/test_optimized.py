"""`python -O`, which drops asserts, drops no check that a commit or a load depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.programs import run_python

PROGRAM = """
import os, sys
import torch, fastckpt
from fastckpt.saving.image_file import ImageFile
from fastckpt.storage.file_system import Storage

sync, wait_written = Storage.sync, ImageFile.wait_written

def cuts(self, fd):
    '''Something else cuts each file, just after it was synced.'''
    sync(self, fd)
    os.ftruncate(fd, os.fstat(fd).st_size - 1)

def counts_wrongly(self):
    '''More bytes were to be written than were.'''
    self.transfer.nbytes += 1
    wait_written(self)

assert False, "asserts are on"
path, state = f"{sys.argv[1]}/a.pt", {"w": torch.arange(3 << 20)}
fastckpt.save(state, path).result(60)
before = open(path, "rb").read()
state["w"] += 1

def refused():
    error = fastckpt.save(state, path).exception(60)
    print(type(error).__name__, error)
    if open(path, "rb").read() != before:
        raise SystemExit("committed")

Storage.sync = cuts
refused()
Storage.sync, ImageFile.wait_written = sync, counts_wrongly
refused()
"""


@pytest.mark.multiprocess
def test_checks_hold_without_asserts(disk: Path) -> None:
    cut, short = run_python(PROGRAM, disk, options=("-O",)).stdout.splitlines()
    assert cut.startswith("CheckpointError ") and "nothing was committed" in cut
    assert short.startswith("AssertionError ") and " were written instead of " in short
