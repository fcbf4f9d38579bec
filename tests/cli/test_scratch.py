"""Promise: a measurement that is ended by a signal leaves nothing where it wrote, and its exit
status says so.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import pytest

from tests.kit import interpreters

AS_A_MODULE = 'import runpy; runpy.run_module("fastckpt", run_name="__main__", alter_sys=True)'


def has_a_file(directory: Path) -> bool:
    """Whether there is one below a directory that another process writes to."""
    with contextlib.suppress(FileNotFoundError):  # a directory that was listed is gone
        return any(path.is_file() for path in directory.rglob("*"))
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_measurement_that_is_ended_leaves_nothing(number: int, disk: Path) -> None:
    arguments = ("bench", "save", disk, "--size", "4MiB", "--rounds", "100000")
    with interpreters.Program(AS_A_MODULE, *arguments) as process:
        until = time.monotonic() + 60
        while not has_a_file(disk) and time.monotonic() < until:
            time.sleep(0.01)
        assert any(disk.iterdir()), "nothing was measured"
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert list(disk.iterdir()) == []
