"""What each rank does in the tests of exports; the module whose functions the ranks call.

Responsible for calling fastckpt.export with whatever is wrong on one rank, and for telling what
came of it. Must not know what should come of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import fastckpt
from fastckpt.directories.save import wait_for_directories
from fastckpt.ranks import per_group
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member, Outcome, attempt
from tests.crews.steps_states import arranged, numbers, spread
from tests.kit.doubles import Operation, Recorder
from tests.kit.options import gathered

T = TypeVar("T")
WAIT_S = 60.0


def exported(state: Any, path: str, **options: Any) -> int:
    """Exports, waits also until nothing else is left of it, and returns the bytes written here."""
    try:
        return fastckpt.export(state, path, **gathered(**options)).result(WAIT_S).nbytes
    finally:
        wait_for_directories(os.path.dirname(path))


def export_arranged(member: Member, path: str, variation: int, options: dict[str, Any]) -> int:
    """Exports every tensor, each spread in another way; returns the bytes that this rank wrote."""
    state = {"model": arranged(member, variation)}
    return exported(state, path, group=member.group, **options)


def export_tied(member: Member, path: str) -> int:
    """Exports a replica, a shard of its columns, and a shard under two names."""
    world = (member.world_size,)
    whole = numbers(0, 6000).reshape(60, 100)
    rows = spread(whole, (world, (Shard(0),)))
    state = {
        "same": spread(whole, (world, (Replicate(),))),
        "columns": spread(whole, (world, (Shard(1),))),
        "rows": rows,
        "head": rows.detach(),
    }
    return exported(state, path, group=member.group)


def export_alone(member: Member, path: str) -> Outcome:
    """Exports DTensors without naming the group."""
    return attempt(lambda: exported(arranged(member, 0), path))


def export_what_differs(member: Member, path: str, what: str) -> Outcome:
    """Exports a tensor that is another one on the last rank."""
    is_last = member.rank == member.world_size - 1
    seed = int(is_last and what in ("content", "replica"))
    weight = numbers(seed, 20_000).reshape(100, 200)
    if what == "replica":
        weight = spread(weight, ((member.world_size,), (Replicate(),)))
    if is_last and what == "shape":
        weight = weight.t()
    options: dict[str, Any] = {"group": member.group}
    if is_last and what == "dtype":
        options["dtype"] = torch.bfloat16
    if is_last and what == "shard_bytes":
        options["shard_bytes"] = 1000
    state = {what: weight}
    if is_last and what == "names":
        state["more"] = weight + 1
        options["shard_bytes"] = 1
    return attempt(lambda: exported(state, path, **options))


def export_while_told_of_differences(member: Member, path: str) -> int:
    """Exports two tensors. The first rank hears that the second one differs when it has looked at
    what differs once, the second rank when it has done so twice.
    """
    shared, looks = per_group.together(member.group), 0

    def unequal() -> frozenset[str]:
        nonlocal looks
        looks += 1
        return frozenset("b" if looks > member.rank + 1 else "")

    state = {name: numbers(0, 20_000).reshape(100, 200) for name in "ab"}
    with mock.patch.object(shared, "unequal", unequal):
        return exported(state, path, group=member.group)


class _NoRoom(Recorder):
    """Writes are refused."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name.startswith("write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real()


def export_while_writes_fail(member: Member, path: str, failing: int) -> Outcome:
    """Exports while one rank cannot write."""
    storage = _NoRoom() if member.rank == failing else Storage()
    current = pipeline.Pipeline(storage, 64 << 20)
    with mock.patch.object(pipeline, "_current", current):
        outcome = attempt(lambda: exported(arranged(member, 1), path, group=member.group))
        current.close()
    dist.barrier(member.group)
    return outcome


def die_while_exporting(member: Member, path: str, dying: int) -> Outcome:
    """Exports while one rank ends without a word when it is about to write. The first rank, whose
    files others write to, does so when they have opened these.
    """

    class Life(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name.startswith("write") and member.rank == dying:
                if member.rank == 0:
                    member.store.wait(["opened"])
                os._exit(1)
            result = real()
            if operation.name == "open write":
                member.store.set("opened", "")
            return result

    current = pipeline.Pipeline(Life(), 64 << 20)
    with mock.patch.object(pipeline, "_current", current):
        state = arranged(member, 1)
        dist.barrier(member.group)  # what follows is to take less time than ranks wait
        outcome = attempt(lambda: exported(state, path, group=member.group, timeout_s=5))
        current.close()
    return outcome
