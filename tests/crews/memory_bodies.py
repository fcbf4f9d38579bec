"""What each rank does in the tests of memory and its neighbours; the functions that the ranks call.

Responsible for calling Checkpointer with a Memory for each node, and for telling what came of it.
Must not know what should come of it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from fastckpt import Checkpointer, CheckpointError, Memory, SaveHandle, SaveOptions
from fastckpt.ranks.peer_link import PeerLink
from fastckpt.saving import pipeline
from fastckpt.saving.lease import LEASE_FILE
from fastckpt.storage import file_system, machine, vanishing
from fastckpt.storage.file_system import Storage
from fastckpt.tiers.drain import Drain
from fastckpt.tiers.peers import Peers
from tests.crews.group_crew import Member, Outcome, Told, attempt
from tests.crews.steps_bodies import found_in, meet
from tests.crews.steps_states import stamped
from tests.kit.doubles import Deadly, Operation, Recorder
from tests.kit.saves import wait_until

T = TypeVar("T")


def memory(member: Member, locals_: list[str], options: dict[str, Any]) -> Memory:
    """The memory of this rank's node, played by a directory."""
    return Memory(directory=locals_[member.rank], **{"budget": "256MiB", **options})


def save_steps(
    member: Member, root: str, locals_: list[str], steps: list[int], options: dict[str, Any]
) -> list[tuple[bool, str, float | None]]:
    """Saves stamped steps one after another; returns of each what wait_memory() and stats say."""
    told = []
    with Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, options),
        options=SaveOptions(timeout_s=30),
    ) as saving:
        for step in steps:
            handle = saving.save(step, stamped(member, step))
            kept = handle.wait_memory(60)
            stats = handle.result()
            told.append((kept, stats.local_why or stats.replicas_why, stats.replicated_s))
    meet(member)
    return told


def save_unlike(
    member: Member, root: str, locals_: list[str], each: list[dict[str, Any]]
) -> BaseException | None:
    """Saves with other options on each rank; returns the error."""
    saving = Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, each[member.rank]),
        options=SaveOptions(timeout_s=30),
    )
    found = saving.save(1, stamped(member, 1)).exception(60)
    meet(member)
    return found


def save_with_another_lease(
    member: Member, root: str, locals_: list[str], asked: str | None
) -> list[str]:
    """Saves once, and twice after the second node's lease was taken over by whom the file `asked`
    asks and who removes it, or became a directory; returns the kind of error of these, or why they
    went past the memory.
    """
    with Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, {}),
        options=SaveOptions(timeout_s=30),
    ) as saving:
        saving.save(1, stamped(member, 1)).result()
        meet(member)
        if member.rank == 1:
            (tier,) = Path(locals_[1]).iterdir()
            if asked is not None:
                Path(asked).touch()
                wait_until(lambda: not Path(asked).exists(), "the tier is taken over")
            else:
                (tier / LEASE_FILE).unlink()
                (tier / LEASE_FILE).mkdir()
        meet(member)
        told = []
        for step in (2, 3):
            handle = saving.save(step, stamped(member, step))
            error = handle.exception(60)
            told.append(handle.stats.local_why if error is None else type(error).__name__)
            meet(member)
    return told


def save_and_die(
    member: Member,
    root: str,
    locals_: list[str],
    steps: list[int],
    options: dict[str, Any],
    deleted: int | None = None,
) -> None:
    """All ranks are killed once the last step is at the neighbours, and one is deleted."""
    saving = Checkpointer(root, group=member.group, local=memory(member, locals_, options))
    for step in steps:
        assert saving.save(step, stamped(member, step)).wait_memory(60)
    meet(member)
    if deleted is not None:
        saving.delete(deleted)
        meet(member)
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_close(
    member: Member, root: str, locals_: list[str], step: int, options: dict[str, Any]
) -> float | None:
    """Closes as soon as save() returns; returns when the neighbours had the step."""
    with Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, options),
        options=SaveOptions(timeout_s=30),
    ) as saving:
        handle = saving.save(step, stamped(member, step))
    return handle.stats.replicated_s


def delete(
    member: Member,
    root: str,
    locals_: list[str],
    step: int,
    options: dict[str, Any],
    restores: bool,
) -> Exception | None:
    """Deletes a step, after a restore or without; returns the error."""
    with Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, options),
        options=SaveOptions(timeout_s=30),
    ) as checkpointer:
        if restores:
            found_in(member, checkpointer)
        return attempt(lambda: checkpointer.delete(step)).error


def restore(
    member: Member,
    root: str,
    locals_: list[str],
    options: dict[str, Any],
    step: int | None = None,
) -> tuple[Outcome, dict[str, str], list[str]]:
    """What is restored, all of which was looked at; where it was read from, and the warnings."""
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    try:
        with Checkpointer(
            root,
            group=member.group,
            local=memory(member, locals_, options),
            options=SaveOptions(timeout_s=30),
        ) as checkpointer:
            found = attempt(lambda: found_in(member, checkpointer, step))
            return found, checkpointer.restored_from, told.lines
    finally:
        logging.getLogger("fastckpt").removeHandler(told)


def save_for_ever(
    member: Member, root: str, locals_: list[str], begin: int, options: dict[str, Any], report: str
) -> None:
    """Saves steps until it is killed; reports each that is at all neighbours."""
    saving = Checkpointer(root, group=member.group, local=memory(member, locals_, options))
    with open(f"{report}-{member.rank}", "w", encoding="ascii") as file:
        for step in itertools.count(begin):
            if saving.save(step, stamped(member, step)).wait_memory(60):
                print(step, file=file, flush=True)


def save_beside_who_hangs(
    member: Member, root: str, locals_: list[str], hanging: int, steps: list[int]
) -> list[tuple[bool, str]]:
    """One rank takes connections and never answers; returns of each step what the rest is told."""
    over = threading.Event()
    if member.rank == hanging:
        Peers._serve = lambda _self, _link: over.wait(60)  # type: ignore[method-assign]
    told = []
    with Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, {}),
        options=SaveOptions(timeout_s=9),
    ) as saving:
        for step in steps:
            handle = saving.save(step, stamped(member, step))
            told.append((handle.wait_memory(60), handle.result().replicas_why))
        over.set()
        assert found_in(member, saving) == steps[-1]
    meet(member)
    return told


def save_beside_who_is_stopped(
    member: Member, root: str, locals_: list[str], stopped: int, how: int, timeout_s: float
) -> tuple[BaseException | None, bool, bool]:
    """One rank gets a signal while a file comes to it; returns what the others are told, and
    whether the nodes have the step, and their neighbours.
    """
    if member.rank == stopped:

        def receive(*_: Any) -> None:
            os.kill(os.getpid(), how)

        PeerLink.receive_parts = receive  # type: ignore[method-assign]
    saving = Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, {}),
        options=SaveOptions(timeout_s=timeout_s),
    )
    handle = saving.save(1, stamped(member, 1))
    return attempt(handle.result).error, handle.wait_local(0), handle.wait_memory(0)


def meet_as_machines(member: Member, root: str, locals_: list[str], machines: int) -> list[str]:
    """Ranks meet, some of them on another machine by what the kernel says; returns warnings."""
    machine._BOOT_ID = f"{locals_[member.rank]}.boot"
    with open(machine._BOOT_ID, "w", encoding="ascii") as file:
        print(f"machine{member.rank % machines}", file=file)
    told = Told()
    logging.getLogger("fastckpt").addHandler(told)
    try:
        with Checkpointer(
            root,
            group=member.group,
            local=memory(member, locals_, {}),
            options=SaveOptions(timeout_s=30),
        ) as checkpointer:
            assert checkpointer._tier is not None and checkpointer._tier.nodes() is not None
    finally:
        logging.getLogger("fastckpt").removeHandler(told)
    return told.lines


def _result_path(handle: SaveHandle) -> str:
    handle.result()
    return handle.path


_BUDGET_MIB = 64


class Trouble:
    """What is wrong with a job's nodes while it lasts; made before a rank meets the others.

    Args:
        kind: "" for nothing; "refused": nobody listens; "hung": whoever listens never answers;
            "full": a node has no room for new files; "budget": files of others that are in use take
            all of its budget.
        bad: the rank on whose node that is so.
    """

    def __init__(self, kind: str, bad: int) -> None:
        self.kind, self.bad = kind, bad
        self._hangs = False
        if kind == "hung":
            real = Peers._serve

            def serve(peers: Peers, link: Any) -> None:
                if self._hangs:
                    threading.Event().wait(600)
                real(peers, link)

            Peers._serve = serve  # type: ignore[method-assign]

    def timeout_s(self) -> float:
        return 6.0 if self.kind == "hung" else 60.0

    def options(self, member: Member) -> dict[str, Any]:
        return {"budget": f"{_BUDGET_MIB}MiB"} if self.kind == "budget" else {}

    def begin(self, member: Member, checkpointer: Checkpointer, local: str) -> None:
        """Begins once all ranks know where the others listen; what is read again and again while it
        fails is so without a pause.
        """
        file_system.REREAD_PAUSES_S = (0.02,)
        tier = checkpointer._tier
        assert tier is not None and tier.nodes() is not None
        self._hangs = self.kind == "hung"
        if self.kind == "full" and member.rank == self.bad:
            real = Storage.allocate

            def allocate(storage: Storage, fd: int, nbytes: int) -> None:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(local):
                    raise OSError(errno.ENOSPC, "planted")
                real(storage, fd, nbytes)

            Storage.allocate = allocate  # type: ignore[method-assign]
        if self.kind == "budget" and member.rank == self.bad:
            assert tier.ring is not None
            used = Path(tier.ring._recycled) / "of-another.1"
            used.parent.mkdir(exist_ok=True)
            self._file = used.open("wb")
            self._file.write(bytes(_BUDGET_MIB << 20))
            self._file.flush()
            fcntl.flock(self._file, fcntl.LOCK_EX)
        meet(member)
        if self.kind == "refused" and tier.peers is not None:
            tier.peers.close()
        meet(member)


def live(
    member: Member,
    root: str,
    locals_: list[str],
    options: dict[str, Any],
    trouble: tuple[str, int],
    saves: list[tuple[int, str]],
    report: str,
    ends: bool,
    lock_s: float = 60.0,
) -> None:
    """The life of a job: restores, saves these steps, waits for each as it says, and ends, or goes
    on until it is killed. Reports what was restored, and which promises were kept, each at once.
    For a lock that somebody else holds a restore waits `lock_s`.
    """
    wrong = Trouble(*trouble)
    own = memory(member, locals_, {**options, **wrong.options(member)})
    checkpointer = Checkpointer(
        root,
        group=member.group,
        local=own,
        options=SaveOptions(timeout_s=wrong.timeout_s(), on_error="warn"),
    )
    with open(f"{report}-{member.rank}", "w", encoding="utf-8") as file:

        def tell(*words: object) -> None:
            print(*words, file=file, flush=True)

        wrong.begin(member, checkpointer, locals_[member.rank])
        with mock.patch.object(vanishing, "_LOCK_S", lock_s):
            found = attempt(lambda: found_in(member, checkpointer))
        if isinstance(found.error, CheckpointError):
            tell("refused", type(found.error).__name__, str(found.error).replace("\n", " "))
        elif found.error is not None:
            tell("broken", repr(found.error))
        else:
            tell("restored", found.value or 0)
            for step, wait in saves:
                handle = checkpointer.save(step, stamped(member, step))
                with suppress(CheckpointError):  # it is not acknowledged then
                    tell("local" if handle.wait_local(60) else "root", step)
                    if wait in ("memory", "result") and handle.wait_memory(60):
                        tell("memory", step)
                    if wait == "result" and _result_path(handle).startswith(root):
                        tell("root", step)
        tell("over")
    if not ends:
        threading.Event().wait(600)
    checkpointer.close()


def save_unsent(
    member: Member,
    root: str,
    locals_: list[str],
    options: dict[str, Any],
    restores: int,
    sent: list[int],
    unsent: list[int],
    report: str,
) -> None:
    """Restores a step, if one is named, whose drain never ends; saves steps that come to the
    neighbours, and steps that do not, once nobody listens: each is reported, and the next waits for
    the test.
    """

    def hang(*_: Any) -> Any:
        threading.Event().wait(600)

    saving = Checkpointer(root, group=member.group, local=memory(member, locals_, options))
    if restores:
        Drain.write = hang  # type: ignore[method-assign]
        assert found_in(member, saving) == restores
    for step in sent:
        assert saving.save(step, stamped(member, step)).wait_memory(60)
    assert saving._tier is not None and saving._tier.nodes() is not None
    assert saving._tier.peers is not None
    meet(member)
    saving._tier.peers.close()
    meet(member)
    with open(f"{report}-{member.rank}", "w", encoding="ascii") as file:
        for step in unsent:
            assert saving.save(step, stamped(member, step)).wait_local(60)
            print(step, file=file, flush=True)
            member.store.wait([f"after {step}"])
    hang()


def restore_in_trouble(
    member: Member,
    root: str,
    locals_: list[str],
    options: dict[str, Any],
    trouble: tuple[str, int],
    steps: list[int | None],
) -> list[tuple[Outcome, dict[str, str]]]:
    """What is restored of these steps, all of which was looked at, and where it was read from."""
    wrong, told = Trouble(*trouble), []
    own = memory(member, locals_, {**options, **wrong.options(member)})
    with Checkpointer(
        root, group=member.group, local=own, options=SaveOptions(timeout_s=wrong.timeout_s())
    ) as checkpointer:
        wrong.begin(member, checkpointer, locals_[member.rank])
        for step in steps:
            found = attempt(lambda step=step: found_in(member, checkpointer, step))
            told.append((found, checkpointer.restored_from))
            meet(member)
    return told


def save_small(
    member: Member, root: str, locals_: list[str], steps: list[int], deadly: int | None
) -> tuple[int | None, list[bool]]:
    """Restores and saves a state that the first rank writes alone; one rank is killed before it
    publishes a step. Returns what was restored, and which saves were committed on the nodes.
    """
    if deadly is not None and member.rank:
        step_name = f"step-{deadly:08d}"
        pipeline._current = pipeline.Pipeline(Deadly.at("rename", step_name))
    state, told = {"step": 0}, []
    saving = Checkpointer(
        root,
        group=member.group,
        local=memory(member, locals_, {"root_every": 1000}),
        options=SaveOptions(timeout_s=10),
    )
    found = saving.restore(state)
    assert state["step"] == (found or 0)
    for step in steps:
        handle = saving.save(step, {"step": step})
        told.append(attempt(lambda handle=handle: handle.wait_local(60)).value is True)
        if step != deadly:
            handle.wait_memory(60)  # it is on the other node before anybody is killed
    return found, told


class Freezing(Recorder):
    """Stops the process at one operation, as if its machine were suspended, until it is woken."""

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self._at, self._report = 1 << 40, ""

    def arm(self, count: int, report: str) -> None:
        """Stops at the operation after so many others; reports what that is before."""
        self._at, self._report = len(self.log) + count, report

    def disarm(self) -> None:
        self._at = 1 << 40

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if number == self._at:
            Path(self._report).write_text(f"{operation.name} {operation.path}", "utf-8")
            os.kill(os.getpid(), signal.SIGSTOP)
        return real()


def save_frozen(
    member: Member, root: str, locals_: list[str], count: int, report: str
) -> BaseException | None:
    """Saves step 1, and step 2, in which the process is stopped after so many operations; returns
    what its caller is told in the end.
    """
    storage = Freezing()
    pipeline._current = pipeline.Pipeline(storage)
    own = memory(member, locals_, {"root_every": 1000, "peers": 0})
    saving = Checkpointer(root, group=member.group, local=own, options=SaveOptions(timeout_s=30))
    assert saving.save(1, stamped(member, 1)).wait_local(60)
    state = stamped(member, 2)
    storage.arm(count, report)
    handle = saving.save(2, state)
    error = attempt(lambda: handle.wait_local(60)).error
    pipeline.current().drain()  # what the save does after its commit may stop, too
    storage.disarm()  # but nothing that comes after this call, which the caller takes for running
    return error
