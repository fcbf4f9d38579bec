"""Steps of a run: their states, their directories, and what is in them."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastckpt import Checkpointer, PerRank
from fastckpt.formats.step_names import ATTEMPT_BYTES, SPARES
from fastckpt.saving.lease import LEASE_FILE
from fastckpt.saving.lease_records import LeaseRecord
from fastckpt.storage.machine import pid_space, started
from tests.kit.doubles import Delay, Recorder, process_on

WAIT_S = 60.0
BIG = 300_000  # elements: more than 1 MiB, so it goes to the shards


@functools.cache
def counting(elements: int) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.float32)


def state(step: int, elements: int = BIG) -> dict[str, Any]:
    """A state whose every value tells its step."""
    return {
        "model": {"w": counting(elements) + step, "b": torch.full((7,), step)},
        "rng": PerRank(torch.tensor([step, 1])),
        "name": f"step {step}",
    }


def assert_holds(found: dict[str, Any], step: int, elements: int = BIG) -> None:
    expected = state(step, elements)
    assert torch.equal(found["model"]["w"], expected["model"]["w"])
    assert torch.equal(found["model"]["b"], expected["model"]["b"])
    assert found["rng"].found and found["rng"].value.tolist() == [step, 1]
    assert found["name"] == f"step {step}" and len(found) == 3


def restored(root: Path, elements: int = BIG) -> int | None:
    """The step that a new Checkpointer restores, every value of which was looked at."""
    found = state(999, elements)
    with Checkpointer(root) as checkpointer:
        step = checkpointer.restore(found)
    assert_holds(found, 999 if step is None else step, elements) if step is not None else None
    return step


def directories(root: Path) -> list[str]:
    """What lies in a root, with "again" for the random number that a name may end with."""
    found = {path.name for path in root.iterdir()}
    drawn = rf"(?<=step-\d{{8}}-)[0-9a-f]{{{2 * ATTEMPT_BYTES}}}\Z"
    return sorted(re.sub(drawn, "again", each) for each in found - {LEASE_FILE, SPARES})


def attempt(root: Path, step: int) -> Path:
    """The directory of the attempt at a step whose name ends with a random number."""
    (found,) = root.glob(f"step-{step:08d}-{'?' * 2 * ATTEMPT_BYTES}")
    return found


@contextmanager
def held_up(name: str) -> Iterator[tuple[Delay, threading.Event]]:
    """The process is on a storage whose first operation of this name waits for the event."""
    go_on = threading.Event()
    storage = Delay(name, go_on)
    with process_on(storage):
        try:
            yield storage, go_on
        finally:
            go_on.set()


def place_of_commit(storage: Recorder) -> tuple[float, float]:
    """Where in the log the manifest is renamed, and where that is made durable; infinity if not.

    The engine writes on a thread of its own: no two logs need be alike.
    """
    names = storage.names_logged()
    if "rename" not in names:
        return math.inf, math.inf
    renamed = names.index("rename")
    after = names[renamed:]
    return renamed, renamed + after.index(
        "sync_directory"
    ) if "sync_directory" in after else math.inf


def record(**changes: Any) -> LeaseRecord:
    """The lease of another process, which is this one's parent if nothing else is said."""
    pid = os.getppid()
    whole = LeaseRecord(
        "ab" * 16, "elsewhere", pid_space(), pid, started(pid) or 0, "", 0, "then", "then", 7200
    )
    return whole._replace(**changes)
