"""Two jobs on one root, of which one is frozen for two days at an operation of its choice, and then
goes on: what both have acknowledged has to be there, whole.

Responsible for the lives of the two. The second one is another process, on a host of another name,
with pids of its own; neither sees the other's locks. It must not know what a save does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch

from fastckpt import Checkpointer
from fastckpt.latch import call_aside
from fastckpt.saving import pipeline
from fastckpt.storage.policies import POLICIES
from tests.kit.doubles import Operation, Recorder, process_on
from tests.kit.interpreters import Program

T = TypeVar("T")
WAIT_S = 60.0
KEEP = 3  # steps that a job keeps, which has saved as many when it is frozen in the next save
SHIFT_S = 2 * 86400.0
FIRST, SECOND = 1, 2  # the jobs

# A line of its input is a command, its subject and, of the third, the operation to be frozen at.
SECOND_JOB = """
import sys
from tests.kit.hosts import become
become("node-b", own_pids=True)
from tests.kit import frozen
frozen.serve(sys.argv[1] and int(sys.argv[1]))
"""


class Blind(Recorder):
    """A file system of several hosts, which do not see each other's locks."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name in ("lock", "lock shared"):
            return True  # type: ignore[return-value]  # as lock()
        if operation.name == "policy":
            return ("nfs", POLICIES["remote"])  # type: ignore[return-value]  # as policy()
        return real()


class Freezing(Blind):
    """Such a one that does nothing any more from an operation on, until go_on is set.

    Attributes:
        at: the number of the operation; None: none yet.
        name: of the operation; "": any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at: int | None = None
        self.name = ""
        self.reached, self.go_on = threading.Event(), threading.Event()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if self.at is not None and number >= self.at and self.name in ("", operation.name):
            self.name = ""  # and so is whatever comes after it
            self.reached.set()
            assert self.go_on.wait(WAIT_S), f"nobody let {operation} go on"
        return super().perform(number, operation, real)


class Gate(Protocol):
    """What freezes a job: its storage, or the way to its server."""

    reached: threading.Event
    go_on: threading.Event


def state_of(step: int, job: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), 10.0 * step + job), "told": [step, job]}


def told_by(state: dict[str, Any]) -> tuple[int, int]:
    """The step and the job of a state, all of which is of them."""
    step, job = state["told"]
    assert torch.equal(state["weights"], state_of(step, job)["weights"])
    return step, job


@contextmanager
def in_two_days() -> Iterator[None]:
    """This process's clock is ahead meanwhile."""
    now = time.time
    with mock.patch.object(time, "time", lambda: now() + SHIFT_S):
        yield


def begun(saver: Checkpointer, job: int) -> Any:
    """The handle of the save after the newest step; and the state that was restored."""
    found = state_of(0, 0)
    number = saver.restore(found)
    assert number is not None and told_by(found)[0] == number
    return told_by(found), saver.save(number + 1, state_of(number + 1, job))


def begin_life(saver: Checkpointer, job: int) -> None:
    for step in range(KEEP):
        saver.save(step, state_of(step, job)).result(WAIT_S)
    pipeline.current().drain()


def outcome(handle: Any, step: int, job: int) -> list[list[int]]:
    """The steps that a handle has acknowledged."""
    return [] if handle.exception(WAIT_S) else [[step, job]]


def serve(port: int | str) -> None:
    """What the second job does, until its input ends; with the port of a server of objects."""
    import sys

    from tests.kit.objects.weed import options

    told: dict[str, Any] = {"storage_options": options(int(port))} if port else {}
    storage: Freezing | None = None
    for line in sys.stdin:
        command, root, *more = line.split()
        if command in ("live", "freeze"):
            storage = None if port else Freezing()
            with process_on(storage):
                saver = Checkpointer(root, keep_last=KEEP, **told)
                if command == "live":
                    if port:  # what tells how late the store's clock is
                        with Checkpointer(f"{root}-clock", **told) as other:
                            other.save(0, {}).result(WAIT_S)
                    with in_two_days():
                        found, handle = begun(saver, SECOND)
                        step = found[0] + 1
                        say(found, outcome(handle, step, SECOND))
                else:
                    begin_life(saver, SECOND)
                    if storage is None:  # its way to the server is frozen
                        say("begun", [])
                        sys.stdin.readline()
                    else:
                        storage.at, storage.name = len(storage.log), more[0]
                    handle, step = saver.save(KEEP, state_of(KEEP, SECOND)), KEEP
                    if storage is None:
                        sys.stdin.readline()
                    else:
                        assert storage.reached.wait(WAIT_S)
                    say("frozen", handle.done())
                    sys.stdin.readline()
                    if storage is not None:
                        storage.go_on.set()
                    say("over", outcome(handle, step, SECOND))
                pipeline.current().drain()
                sys.stdin.readline()
                saver.close()
                say("closed", [])


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


class SecondJob(Program):
    """The second job, which lives once for each root that it is told of."""

    def __init__(self, port: int | str = "") -> None:
        super().__init__(SECOND_JOB, port)

    def ask(self, line: str) -> Any:
        self.tell(line)
        assert self.stdout is not None
        said = self.stdout.readline()
        assert said, self.communicate()[1]
        return json.loads(said)

    def tell(self, line: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()


def frozen_or_over(gate: Gate, begun: Any) -> bool:
    """Waits until a job is frozen, or its save over and all that follows it; returns which.

    Args:
        begun: gets the handle of the save from the call of save(), which may be frozen, too.
    """

    def end() -> None:
        begun.result(WAIT_S).exception(WAIT_S)
        pipeline.current().drain()

    over = call_aside(end)
    while not gate.reached.wait(0.005):
        if over.done():
            over.result(0)
            return gate.reached.is_set()
    return True


def check(root: str, acknowledged: list[list[int]], **told: Any) -> None:
    """A new job finds all that was acknowledged and need not have gone, and takes one of it."""
    expected = {(step, job) for step, job in acknowledged}
    with Checkpointer(root, **told) as reader:
        committed, faults = reader._steps.committed()
        assert not faults, faults
        whole = set()
        for item in committed:
            with Checkpointer(reader._steps.path(item.name)) as one:
                whole.add(told_by(one.load()))
        assert expected <= whole, (expected, whole)
        found = state_of(0, 0)
        assert reader.restore(found) is not None and told_by(found) in expected


def first_is_frozen(root: str, other: SecondJob, freeze: Callable[[], Gate], **told: Any) -> bool:
    """The first job is frozen in a save, the second takes the root; returns whether it came to it.

    Args:
        freeze: has it frozen at an operation from now on.
    """
    with Checkpointer(root, keep_last=KEEP, **told) as saver:
        begin_life(saver, FIRST)
        gate = freeze()
        begun = call_aside(lambda: saver.save(KEEP, state_of(KEEP, FIRST)))
        is_frozen = frozen_or_over(gate, begun)
        found, acknowledged = other.ask(f"live {root}")
        gate.go_on.set()
        own = outcome(begun.result(WAIT_S), KEEP, FIRST)
        pipeline.current().drain()
        assert acknowledged, "nobody keeps the second one from saving"
        other.ask("-")
        check(root, [[KEEP - 1, FIRST], *own, *acknowledged], **told)
        assert found in [[KEEP - 1, FIRST], *own]
    return is_frozen


def second_is_frozen(
    root: str,
    other: SecondJob,
    was_done: bool,
    freeze: Callable[[], Gate],
    thaw: Callable[[], object] = lambda: None,
    **told: Any,
) -> bool:
    """Another job is frozen in a save; one that takes the root is frozen, and the other goes on.
    Returns whether it came to it.

    Args:
        was_done: whether the other job had acknowledged that save.
        freeze: has the one that takes the root frozen at an operation from now on.
        thaw: lets the other one go on, which waits for a line besides.
    """
    with in_two_days(), Checkpointer(root, keep_last=KEEP, **told) as saver:
        gate = freeze()
        outcomes: list[Any] = []

        def live() -> None:
            found, handle = begun(saver, FIRST)
            outcomes.append((found, outcome(handle, found[0] + 1, FIRST)))
            pipeline.current().drain()

        over = call_aside(live)
        while not (is_frozen := gate.reached.wait(0.005)) and not over.done():
            pass
        thaw()
        theirs = other.ask("go")[1]
        gate.go_on.set()
        over.result(WAIT_S)
        ((found, own),) = outcomes
        assert own or theirs
        other.ask("-")
        assert not was_done or theirs
    check(root, [[KEEP - 1, SECOND], *own, *theirs], **told)
    assert list(found) in [[KEEP - 1, SECOND], *theirs]
    return is_frozen
