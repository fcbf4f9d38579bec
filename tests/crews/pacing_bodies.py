"""What each rank does in the tests of pacing.

Responsible for saving at a pace and for telling when what happened. Must not know what should come
of it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import fastckpt
from fastckpt import Checkpointer, PerRank
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member, Outcome, attempt
from tests.crews.steps_bodies import found_in, meet, saved
from tests.kit.options import gathered


def own_state(member: Member, nbytes: int) -> dict[str, Any]:
    """A state of which each rank has so much for itself."""
    return {"own": PerRank(torch.full((nbytes // 4,), float(member.rank)))}


def save_paced(
    member: Member, root: str, nbytes: int, options: dict[str, Any]
) -> tuple[Any, float, Any]:
    """Saves; returns the stats, when the file was opened for writing, and what a restore finds."""
    state = own_state(member, nbytes)
    with Checkpointer(root, **gathered(timeout_s=30, **options)) as checkpointer:
        meet(member)
        began = time.monotonic()
        handle = checkpointer.save(1, state)
        stalled = time.monotonic() - began
        stats = handle.result()
        blank = {"own": PerRank(torch.zeros(1))}
        assert checkpointer.restore(blank) == 1
    return stats, stalled, bool(torch.equal(blank["own"].value, state["own"].value))


def save_and_fail_elsewhere(
    member: Member,
    root: str,
    nbytes: int,
    failing: int,
    options: dict[str, Any],
    after_s: float = 0.0,
) -> tuple[Outcome, int | None]:
    """One rank finds after a while that it has no room for its file, while another writes; then all
    save once more.
    """
    with Checkpointer(root, **gathered(timeout_s=600, **options)) as checkpointer:
        real = Storage.allocate

        def allocate(_self: Storage, _fd: int, _nbytes: int) -> None:
            time.sleep(after_s)
            raise OSError(28, "planted")

        if member.rank == failing:
            Storage.allocate = allocate  # type: ignore[method-assign]
        meet(member)
        outcome = attempt(lambda: checkpointer.save(1, own_state(member, nbytes)).result())
        Storage.allocate = real  # type: ignore[method-assign]
        meet(member)
    with Checkpointer(root, options=fastckpt.SaveOptions(timeout_s=30)) as checkpointer:
        saved(member, checkpointer, 2)
        return outcome, found_in(member, checkpointer)


def save_and_die(
    member: Member, root: str, nbytes: int, dying: int, options: dict[str, Any]
) -> Outcome:
    """One rank is killed as it writes; the others tell what they are told."""
    with Checkpointer(root, **gathered(**options)) as checkpointer:
        handle = checkpointer.save(1, own_state(member, nbytes))
        if member.rank == dying:
            handle.wait_staged()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(handle.result)


def save_file_paced(member: Member, path: str, nbytes: int, drain_rate: float) -> Any:
    """All ranks save one file together."""
    state = {"same": torch.arange(nbytes // 4, dtype=torch.float32)}
    stats = fastckpt.save(state, path, group=member.group, drain_rate=drain_rate).result()
    meet(member)
    assert torch.equal(torch.load(path)["same"], state["same"])
    return stats
