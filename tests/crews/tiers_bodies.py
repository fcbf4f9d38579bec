"""What each rank does in the tests of tiers; the module whose functions the ranks call.

Responsible for calling Checkpointer with a local directory for each node, and for telling what came
of it. Must not know what should come of it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastckpt import Checkpointer, PerRank, SaveOptions
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import Storage
from fastckpt.tiers.drain import Drain
from fastckpt.tiers.survey import Survey
from tests.crews.group_crew import WAIT_S, Member, Outcome, attempt
from tests.crews.steps_bodies import found_in, meet, saved
from tests.crews.steps_states import stamped
from tests.kit.doubles import Deadly, Operation, Recorder, process_on
from tests.kit.options import gathered
from tests.kit.saves import wait_until

T = TypeVar("T")


def save_tiered(
    member: Member,
    root: str,
    locals_: list[str],
    steps: list[int],
    options: dict[str, Any],
    keep: int = 2,
) -> list[tuple[float | None, str]]:
    """Saves stamped steps, one after another, over the local directory of each rank, which keeps so
    many; returns when each was committed there, or why it was not.
    """
    told, local = [], (locals_[member.rank], keep)
    with Checkpointer(root, group=member.group, local=local, **gathered(**options)) as saving:
        for step in steps:
            stats = saved(member, saving, step)
            told.append((stats.local_committed_s, stats.local_why))
    meet(member)
    return told


def save_paced(
    member: Member, root: str, locals_: list[str], steps: int, options: dict[str, Any]
) -> tuple[str, str]:
    """Saves so many stamped steps that overlap; returns why the last one went past the local
    directory, and what its stats tell of its pace.
    """
    options = {"timeout_s": 30, **options}
    with Checkpointer(
        root, group=member.group, local=locals_[member.rank], **gathered(**options)
    ) as saving:
        handles = []
        for step in range(1, steps + 1):
            handles.append(saving.save(step, stamped(member, step)))
            handles[-1].wait_staged()
        stats = [handle.result() for handle in handles][-1]
    meet(member)
    return stats.local_why, stats.pacing


def drain_and_fail(
    member: Member, root: str, locals_: list[str], failing: int, options: dict[str, Any]
) -> Outcome:
    """One rank has no room in the root; returns what each is told."""
    real = Storage.allocate

    def allocate(storage: Storage, fd: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(root):
            raise OSError(errno.ENOSPC, "planted")
        real(storage, fd, nbytes)

    options = {"timeout_s": 600, **options}
    with Checkpointer(
        root, group=member.group, local=locals_[member.rank], **gathered(**options)
    ) as saving:
        if member.rank == failing:
            Storage.allocate = allocate  # type: ignore[method-assign]
        own = {"own": PerRank(torch.full((6_000_000,), float(member.rank)))}
        meet(member)
        handle = saving.save(1, own)
        assert handle.wait_local(30)
        outcome = attempt(handle.result)
        Storage.allocate = real  # type: ignore[method-assign]
        meet(member)
    return outcome


def save_and_die(
    member: Member, root: str, locals_: list[str], step: int, deaths: dict[int, tuple[str, str]]
) -> Any:
    """Saves a step in the midst of which ranks are killed, each by what it does to some path."""
    if member.rank in deaths:
        pipeline._current = pipeline.Pipeline(Deadly.at(*deaths[member.rank]))
    checkpointer = Checkpointer(
        root, group=member.group, local=locals_[member.rank], options=SaveOptions(timeout_s=10)
    )
    state = stamped(member, step)
    meet(member)
    handle = checkpointer.save(step, state)
    local = attempt(lambda: handle.wait_local(60))
    return local, handle.exception(), handle.stats.local_committed_s


def save_and_drain_later(member: Member, root: str, locals_: list[str], step: int) -> None:
    """Saves a stamped step, which is copied to the root when the test says so."""
    real, may_drain = Drain.write, threading.Event()

    def write(drain: Drain, current: pipeline.Pipeline) -> None:
        may_drain.wait(WAIT_S)
        real(drain, current)

    Drain.write = write  # type: ignore[method-assign]
    with Checkpointer(root, group=member.group, local=locals_[member.rank]) as saving:
        assert saving.save(step, stamped(member, step)).wait_local(60)
        meet(member)
        member.store.set("saved", b"")
        member.store.wait(["drain"])
        may_drain.set()
    meet(member)


def restore_beside(member: Member, root: str, locals_: list[str]) -> Outcome:
    """What is restored; tells the test when it waits for another job to copy that to the root."""
    real = Survey.await_drain_beside

    def wait(survey: Survey, nonce: str) -> None:
        member.store.set("waits", b"")
        real(survey, nonce)

    Survey.await_drain_beside = wait  # type: ignore[method-assign]
    with Checkpointer(root, group=member.group, local=locals_[member.rank]) as checkpointer:
        return attempt(lambda: found_in(member, checkpointer))


def restore_tiered(
    member: Member, root: str, locals_: list[str], step: int | None = None
) -> tuple[Outcome, dict[str, str]]:
    """What is restored, every element of which was looked at; and where it was read from."""
    with Checkpointer(root, group=member.group, local=locals_[member.rank]) as checkpointer:
        found = attempt(lambda: found_in(member, checkpointer, step))
        return found, checkpointer.restored_from


class AfterTheFirst(Recorder):
    """Files of steps in a root are created when their directory is gone again."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "create" and operation.path.startswith(f"{self._root}/step-"):
            wait_until(lambda: not os.path.exists(os.path.dirname(operation.path)))
        return real()


def restore_after_the_first(
    member: Member, root: str, locals_: list[str]
) -> tuple[Outcome, dict[str, str]]:
    """As restore_tiered(), but the first rank has given the copy to the root up before the others
    begin to write to it.
    """
    with process_on(AfterTheFirst(root) if member.rank else Recorder()):
        return restore_tiered(member, root, locals_)


def save_soon(
    member: Member,
    root: str,
    locals_: list[str],
    deadline_s: float,
    known_s: list[tuple[float, float]],
) -> tuple[float | None, str]:
    """Saves a stamped step in a job that ends soon, on ranks that know such times of the step
    before; returns when it was committed on the nodes, or why it was not.
    """
    with Checkpointer(root, group=member.group, local=locals_[member.rank]) as checkpointer:
        assert checkpointer._tier is not None
        checkpointer._tier.drainer.note_times(*known_s[member.rank])
        state = stamped(member, 1)
        stats = checkpointer.save(1, state, deadline_s=deadline_s).result()
        assert found_in(member, checkpointer, 1) == 1
    meet(member)
    return stats.local_committed_s, stats.local_why


def one_has_a_deadline(member: Member, root: str) -> tuple[BaseException | None, int | None]:
    """Only the first rank says that the job ends soon; returns the error, and the step found."""
    with Checkpointer(root, group=member.group, options=SaveOptions(timeout_s=3)) as checkpointer:
        deadline_s = None if member.rank else 500.0
        handle = checkpointer.save(1, stamped(member, 1), deadline_s=deadline_s)
        error = handle.exception()
        meet(member)
        return error, checkpointer.latest()
