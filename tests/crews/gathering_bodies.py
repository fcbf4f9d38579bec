"""What each rank does in the tests of gathered shards.

Responsible for saving with writers_per_node and for what goes wrong in the midst of it. Must not
know what should come of it.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from fastckpt import Checkpointer, PerRank
from fastckpt.errors import StorageError
from fastckpt.steps import shared_shard
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member, Outcome, attempt
from tests.crews.steps_bodies import (
    found_in,
    isolated,
    meet,
    mounted,
    restore,
    restore_own_values,
    save_own_values,
    save_steps,
    saved,
)
from tests.crews.steps_states import arranged, differing, spread_by_group, stamped

__all__ = ["restore", "restore_own_values", "save_own_values", "save_steps"]


def save_arranged(member: Member, root: str, options: dict[str, Any]) -> list[str]:
    """Tensors in every placement, and values of each rank; returns what came back otherwise."""
    with Checkpointer(root, timeout_s=30, **options) as checkpointer:
        for step in range(3):
            state = arranged(member, step) | {"own": PerRank([member.rank, step])}
            checkpointer.save(step, state).result()
        return restore_arranged(member, root)


def restore_arranged(member: Member, root: str) -> list[str]:
    with Checkpointer(root, timeout_s=30) as checkpointer:
        blank = arranged(member, 1, blank=True) | {"own": PerRank()}
        assert checkpointer.restore(blank) == 2
    own = blank.pop("own")
    faults = differing(member, blank, 1)
    if own.found and own.value != [member.rank, 2]:
        faults.append(f"own is {own.value}")
    return faults + ([] if own.found else ["own was not found"])


def stats_and_memory(
    member: Member, root: str, nbytes: int, options: dict[str, Any]
) -> tuple[Any, int, int]:
    """Stats of the last of several saves that overlap; files in memory then, and after close()."""
    checkpointer = Checkpointer(root, timeout_s=30, **options)
    state = {"own": PerRank(torch.full((nbytes // 4,), float(member.rank)))}
    for step in range(6):
        handles = [checkpointer.save(2 * step + n, state) for n in range(2)]
        stats = [handle.result() for handle in handles][-1]
    held = memory_files()
    checkpointer.close()
    return stats, held, memory_files()


def memory_of_a_forgotten_one(member: Member, root: str) -> tuple[int, int]:
    """Files in memory while a Checkpointer is there, and when it is not, which nobody closed."""
    checkpointer = Checkpointer(root, timeout_s=30, writers_per_node=1)
    checkpointer.save(1, {"own": PerRank(member.rank)}).result()
    held = memory_files()
    del checkpointer
    until = time.monotonic() + 60
    while memory_files() and time.monotonic() < until:  # the save may still be ending
        time.sleep(0.05)
        gc.collect()
    return held, memory_files()


def memory_files() -> int:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # another thread has closed it, or it listed the directory
    return sum("memfd:fastckpt" in target for target in targets)


def save_and_die(member: Member, root: str, dying: int, moment: str) -> Outcome:
    """One rank is killed at a moment of its exchange; the others tell what they are told."""
    planted: dict[str, tuple[type, str]] = {
        "before it lends": (shared_shard.Gathering, "lend"),
        "before it makes the file": (shared_shard.Gathered, "announce"),
        "before it writes": (shared_shard.Guest, "open"),
        "when it has written": (
            (shared_shard.Gathered, "index")
            if member.rank == 0
            else (shared_shard.Guest, "written")
        ),
    }
    with Checkpointer(root, group=member.group, writers_per_node=1, timeout_s=60) as checkpointer:
        saved(member, checkpointer, 1)
        meet(member)
        checkpointer._timeout_s = 4.0
        if member.rank == dying:
            setattr(*planted[moment], die)
        return attempt(lambda: saved(member, checkpointer, 2))


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_damaged(member: Member, root: str, damaging: int) -> tuple[Outcome, int | None]:
    """What one rank says changes before it is read; then all save once more."""
    with Checkpointer(root, group=member.group, writers_per_node=1, timeout_s=20) as checkpointer:
        saved(member, checkpointer, 1)
        meet(member)
        real = Storage.write_at

        def write_at(self: Storage, fd: int, data: Any, offset: int) -> None:
            real(self, fd, data, offset)
            if b'"lent"' in bytes(data):
                os.pwrite(fd, b"\xff", len(data) // 2)

        if member.rank == damaging:
            Storage.write_at = write_at  # type: ignore[method-assign]
        outcome = attempt(lambda: saved(member, checkpointer, 2))
        Storage.write_at = real  # type: ignore[method-assign]
        meet(member)
        saved(member, checkpointer, 3)
        return outcome, found_in(member, checkpointer)


def save_onto_a_full_disk(member: Member, root: str, nbytes: int) -> tuple[Outcome, int | None]:
    """The root is a file system of so many bytes, on each rank one of its own; then it is not."""
    isolated()
    with Checkpointer(root, writers_per_node=1, timeout_s=20) as checkpointer:
        saved(member, checkpointer, 1)
        meet(member)
        with mounted(root, nbytes if member.rank == 0 else 0):
            outcome = attempt(lambda: saved(member, checkpointer, 2))
            meet(member)
        saved(member, checkpointer, 3)
        return outcome, found_in(member, checkpointer)


def time_saves(
    member: Member, roots: list[str], nbytes: int, rounds: int
) -> list[tuple[float, float]]:
    """Seconds of commits without and with a file for all, in turns."""
    whole = torch.randn(256 * member.world_size, nbytes // 8192)
    state = {str(number): spread_by_group(member, whole) for number in range(8)}
    took = []
    plain = Checkpointer(roots[0], keep_last=1)
    gathered = Checkpointer(roots[1], keep_last=1, writers_per_node=1)
    with plain, gathered:
        for step in range(rounds):
            pair = [0.0, 0.0]
            for which in (step % 2, 1 - step % 2):
                meet(member)
                stats = (plain, gathered)[which].save(step, state).result()
                pair[which] = stats.committed_s
                meet(member)
                time.sleep(0.02)
            took.append((pair[0], pair[1]))
    return took


def shards(root: str, step: int) -> list[str]:
    return sorted(path.name for path in Path(root).glob(f"step-{step:08d}/rank-*.safetensors*"))


def save_late(member: Member, root: str, is_taken: bool) -> tuple[Outcome, bytes, int | None]:
    """The rank that makes the file fails when it has told where that is; another one comes to it
    when its descriptor is closed, or another file's. Then all save once more.

    Returns what is in that other file, too.
    """
    announced: list[int] = []
    told, come = shared_shard.Gathered.announce, shared_shard.Guest.open
    decoy = Path(root).with_suffix(f".decoy{member.rank}")
    with Checkpointer(root, group=member.group, writers_per_node=1, timeout_s=20) as checkpointer:
        saved(member, checkpointer, 1)

        def announce(self: shared_shard.Gathered, fd: int, is_direct: bool) -> None:
            told(self, fd, is_direct)
            announced.append(fd)
            raise StorageError("write", root, errno.EIO, 0)

        def come_late(self: shared_shard.Guest) -> int:
            member.store.wait([f"late {root}"])
            return come(self)

        shared_shard.Gathered.announce = announce  # type: ignore[method-assign]
        shared_shard.Guest.open = come_late  # type: ignore[method-assign]
        handle = checkpointer.save(2, stamped(member, 2))
        if member.rank == 0:
            handle.wait_done()
            with decoy.open("wb") as file:
                if is_taken:
                    os.dup2(file.fileno(), announced[0])
                member.store.set(f"late {root}", b"")
                meet(member)
                if is_taken:
                    os.close(announced[0])
        else:
            handle.wait_done()
            meet(member)
        shared_shard.Gathered.announce = told  # type: ignore[method-assign]
        shared_shard.Guest.open = come  # type: ignore[method-assign]
        outcome = attempt(handle.result)
        meet(member)
        saved(member, checkpointer, 3)
        content = decoy.read_bytes() if member.rank == 0 else b""
        return outcome, content, found_in(member, checkpointer)
