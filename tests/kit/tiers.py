"""Local tiers before a root, and the steps in them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fastckpt import Memory
from fastckpt.formats.step_names import SPARES
from tests.kit.doubles import Operation, Recorder, process_on
from tests.kit.saves import wait_until
from tests.kit.steps import directories

WAIT_S = 60.0
T = TypeVar("T")
SHARD = "rank-00000.safetensors"


@pytest.fixture
def local(disk: Path) -> Iterator[Path]:
    """A directory on another file system than `disk`."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(disk).st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def local_steps(local: Path) -> list[str]:
    """Steps in the local tier of the one root that has any there."""
    return directories(next(path for path in local.iterdir() if path.is_dir()))


def local_step(local: Path, step: int) -> Path:
    return next(local.glob(f"*/step-{step:08d}"))


class Doors(Recorder):
    """Operations below some directories wait, or fail.

    Attributes:
        closed: directories below which whatever makes or changes something waits.
        faults: the error number that operations of a name meet below a directory.
    """

    CHANGES = frozenset(
        {"create", "make_directory parents", "make_directory", "write_at", "rename"}
    )

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self.closed: list[Path] = []
        self.faults: dict[tuple[str, Path], int] = {}
        self.waits_s = 0.0
        self._changed = threading.Condition()

    def open_doors(self) -> None:
        with self._changed:
            self.closed.clear()
            self._changed.notify_all()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        path = Path(operation.path)
        for (name, directory), code in self.faults.items():
            if operation.name == name and path.is_relative_to(directory):
                raise OSError(code, os.strerror(code))
        if operation.name in self.CHANGES:
            with self._changed:
                assert self._changed.wait_for(
                    lambda: not any(path.is_relative_to(each) for each in self.closed), WAIT_S / 4
                )
        return real()


@contextmanager
def doors() -> Iterator[Doors]:
    """The process is on such a storage."""
    storage = Doors()
    with process_on(storage):
        try:
            yield storage
        finally:
            storage.open_doors()


def memory(local: Path, **options: Any) -> Memory:
    return Memory(directory=local, **{"root_every": 100, "budget": "400MiB", **options})


def shard(local: Path, step: int) -> Path:
    return next(local.glob(f"*/step-{step:08d}/{SHARD}"))


def spares(local: Path) -> int:
    return len([*local.glob(f"*/{SPARES}/*")])


def await_spares(local: Path, are_due: bool) -> None:
    """Waits for what retention does after a save."""
    wait_until(lambda: spares(local) > 0 or not are_due)


def has_landed(why: str) -> bool:
    return why.endswith("copied straight into the file")
