"""The directories of steps under one root over a run's life: which names they get, which of them is
the newest, which are removed and which never are, what dead, living and foreign processes left
there, and which step a restore falls back to. What is in a step is others' business.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from fastckpt import Checkpointer, SaveOptions
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
    Vanished,
)
from fastckpt.formats.step_names import STEP_MAX, step_name
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.lease import Lease
from fastckpt.steps.options import StepOptions
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.retention import superfluous
from fastckpt.steps.store import Draft
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Purpose, Storage
from tests.kit.doubles import FailAlways, FailAt, Operation, Recorder, dead_pid, process_on
from tests.kit.network_double import NetworkClient
from tests.kit.noise import flip
from tests.kit.programs import program, run_python, tell, told
from tests.kit.saves import warnings_in
from tests.kit.steps import assert_holds, directories, restored, state

WAIT_S = 60.0
T = TypeVar("T")


@pytest.fixture
def root(disk: Path) -> Path:
    return disk / "run"


def saved(root: Path, *steps: int, **options: Any) -> list[str]:
    """Saves steps one after the other, with a new Checkpointer; the directories there are then."""
    with Checkpointer(root, options=SaveOptions(durable=False), **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step)).result(WAIT_S)
    return directories(root)


def name(step: int, attempt: int = 0) -> str:
    return f"step-{step:08d}" + ("-again" if attempt else "")


# ---- names ----


def test_names() -> None:
    assert step_name(100) == "step-00000100" and step_name(0, "3f") == "step-00000000-3f"
    assert step_name(STEP_MAX - 1) == "step-999999999999999"
    for step in (-1, STEP_MAX):
        with pytest.raises(ValueError, match="must be at least 0 and below"):
            step_name(step)


def test_large_steps_are_steps(root: Path) -> None:
    saved(root, 123_456_789, STEP_MAX - 1, 7)
    assert directories(root) == ["step-00000007", "step-123456789", "step-999999999999999"]
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == [7, 123_456_789, STEP_MAX - 1]
        assert checkpointer.latest() == 7


def test_other_names_are_not_looked_at(root: Path) -> None:
    saved(root, 5)
    others = ["step-6", "step-00000006-x", "step-0000000a", "xstep-00000006", "step-00000006.bak"]
    others += [
        "step-00000006-",
        "step-1234567890123456",
        "tmp",
        "step-\u0661\u0662\u0663\u0664" * 2,
    ]
    for other in others:
        shutil.copytree(root / name(5), root / other)
    (root / "notes.txt").write_text("mine")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == [5]
    assert saved(root, 8, keep_last=1) == sorted([*others, "notes.txt", name(8)])


def test_a_taken_name_gets_a_number(root: Path) -> None:
    """By a file, a link, a directory of somebody else: none of them is touched. A directory that a
    save has left that died at once has a free name.
    """
    root.mkdir()
    (root / name(1)).write_bytes(b"a file")
    (root / name(2)).symlink_to("nowhere")
    (root / name(3)).mkdir()
    (root / name(3) / "model.distcp").write_bytes(b"of another tool")
    (root / name(4) / "below").mkdir(parents=True)
    (root / name(5)).mkdir()
    every = [name(step, attempt) for step in (1, 2, 3, 4) for attempt in (0, 1)]
    assert saved(root, 1, 2, 3, 4, 5) == [*every, name(5)]
    assert (root / name(5) / "manifest.json").exists()
    assert (root / name(1)).read_bytes() == b"a file"
    assert (root / name(3) / "model.distcp").read_bytes() == b"of another tool"
    assert restored(root) == 5


def test_a_name_on_what_several_hosts_see_is_one_attempt_s_alone(root: Path) -> None:
    """They may not see each other's locks, so nobody knows if a plain name is anybody's."""
    double = NetworkClient()
    with double.mounted(), process_on(double):
        assert saved(root, 1, 2) == [name(1, 1), name(2, 1)]


def test_a_number_of_names_is_tried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastckpt.steps.posix.secrets.token_hex", lambda _nbytes: "0a")
    root.mkdir()
    for taken in (name(1), f"{name(1)}-0a"):
        (root / taken).write_bytes(b"")
    handle = Checkpointer(root).save(1, state(1))
    error = handle.exception(WAIT_S)
    assert isinstance(error, StorageError) and error.errno == errno.EEXIST


def test_a_linked_directory_is_nobodys_step(disk: Path, root: Path) -> None:
    """What a link leads to is neither restored, nor written to, nor removed."""
    precious = disk / "precious"
    saved(disk / "other", 7)
    shutil.copytree(disk / "other" / name(7), precious / name(7))
    (precious / "empty").mkdir()
    (precious / "unfinished").mkdir()
    (precious / "unfinished" / "objects.pt").write_bytes(b"precious")
    root.mkdir()
    (root / name(7)).symlink_to(precious / name(7))
    (root / name(8)).symlink_to(precious / "empty")
    (root / name(9)).symlink_to(precious / "unfinished")
    before = sorted(str(path) for path in precious.rglob("*"))
    with Checkpointer(root, keep_last=1) as checkpointer:
        assert checkpointer.steps() == [] and checkpointer.restore(state(1)) is None
        for step in (7, 8, 9, 9):
            checkpointer.save(step, state(step))
    assert sorted(str(path) for path in precious.rglob("*")) == before
    assert (precious / "unfinished" / "objects.pt").read_bytes() == b"precious"
    assert sum(path.is_symlink() for path in root.iterdir()) == 3
    assert restored(root) == 9


# ---- which is the newest ----


def test_the_newest_is_the_one_committed_last(root: Path) -> None:
    saved(root, 10, 20, 30)
    with Checkpointer(root) as checkpointer:
        found = state(999)
        assert checkpointer.restore(found, 20) == 20
        checkpointer.save(25, state(25)).result(WAIT_S)
        assert checkpointer.latest() == 25 and checkpointer.steps() == [10, 20, 25, 30]
    assert restored(root) == 25
    saved(root, 20)
    assert restored(root) == 20
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 20


def test_order_survives_a_manifest_that_cannot_be_read(root: Path) -> None:
    """A commit is newer than a step that was unreadable meanwhile and came back."""
    saved(root, 1, 2, 3)
    manifest = root / name(3) / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-1])
    saved(root, 2)
    manifest.write_bytes(content)
    assert restored(root) == 2
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 2 and checkpointer.steps() == [1, 2, 3]
    assert saved(root, 1, keep_last=2) == [name(1, 1), name(2, 1)]


# ---- what is kept ----


def test_so_many_are_kept(root: Path) -> None:
    kept = [0, 4, 8, 9, 10]
    assert saved(root, *range(11), keep_last=2, keep_every=4) == [name(step) for step in kept]
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == kept


def test_the_last_ones_are_those_committed_last(root: Path) -> None:
    saved(root, 30, 40, 50)
    assert saved(root, 5, keep_last=1) == [name(5)], "the one just committed stays"
    saved(root, 10, 20, 3)
    assert saved(root, 7, keep_last=3) == [name(3), name(7), name(20)]


def test_what_others_put_into_a_step_stays(root: Path) -> None:
    saved(root, 1)
    (root / name(1) / "notes.txt").write_text("the best one")
    (root / name(1) / "plots").mkdir()
    assert saved(root, 2, keep_last=1) == [name(1), name(2)]
    assert sorted(os.listdir(root / name(1))) == ["notes.txt", "plots"]
    assert restored(root) == 2
    assert saved(root, 3, keep_last=1) == [name(1), name(3)]
    assert (root / name(1) / "notes.txt").read_text() == "the best one"


READER = """
import sys
from tests.kit.doubles import Recorder, process_on
from tests.kit.steps import assert_holds, state
from fastckpt import Checkpointer

class Slow(Recorder):
    waited = False
    def perform(self, number, operation, real):
        if operation.name == "read" and not self.waited:
            Slow.waited = True
            print("reading", flush=True)
            assert sys.stdin.readline() == "go on\\n"
        return real()

with process_on(Slow()):
    found = state(999)
    with Checkpointer(sys.argv[1]) as checkpointer:
        step = checkpointer.restore(found, *map(int, sys.argv[2:]))
    assert_holds(found, step)
print(step, flush=True)
"""


@pytest.mark.multiprocess
def test_a_step_that_another_process_reads_stays(root: Path) -> None:
    saved(root, 1)
    with program(READER, root) as process:
        assert told(process) == "reading"
        assert saved(root, 2, 3, keep_last=1) == [name(1), name(3)]
        # Replaced by another attempt, which is what is restored from now on.
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state(4)).result(WAIT_S)
            assert checkpointer.steps() == [1, 3] and checkpointer.load()["name"] == "step 4"
        assert directories(root) == [name(1), name(1, 1), name(3)]
        tell(process, "go on")
        assert told(process) == "1"
    assert saved(root, 5, keep_last=2) == [name(1, 1), name(5)]


def test_a_step_that_is_removed_before_it_is_held(root: Path) -> None:
    """By another job, between looking for the newest step and reading it: the next one is taken."""
    saved(root, 1, 2)

    class Remover(Recorder):
        def __init__(self, when: str) -> None:
            super().__init__()
            self._when = when

        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == self._when and (root / name(2)).exists():
                shutil.rmtree(root / name(2))
            return real()

    for when in ("open", "lock shared"):
        with process_on(Remover(when)), Checkpointer(root) as checkpointer:
            found = state(999)
            assert checkpointer.restore(found) == 1
            assert_holds(found, 1)
        saved(root, 2)
    steps = PosixSteps(Storage(), str(root))
    late = PosixSteps(Remover("lock shared"), str(root))
    for held in (steps.hold(name(9)), late.hold(name(2))):
        with pytest.raises(Vanished), held:
            raise AssertionError("held what is not there")


def test_a_damaged_step_does_not_count_as_kept(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once found out, it is no reason to remove the last good one."""
    saved(root, 3, 4, 5)
    (root / name(5) / "objects.pt").write_bytes(b"damaged")
    with Checkpointer(root, keep_last=2) as checkpointer:
        assert checkpointer.restore(state(0)) == 4
        checkpointer.save(6, state(6)).result(WAIT_S)
    assert directories(root) == [name(4), name(5), name(6)]
    shutil.rmtree(root / name(6))
    assert restored(root) == 4


def test_what_is_known_of_a_step_is_not_held_against_the_next_of_that_name(root: Path) -> None:
    """Step 5 was found damaged. Another job removes it, and saves it again: it counts as kept."""
    saved(root, 4, 5, 6)
    with Checkpointer(root, keep_last=2) as checkpointer:
        (root / name(5) / "objects.pt").write_bytes(b"damaged")
        with pytest.raises(CorruptCheckpoint):
            checkpointer.restore(state(0), 5)
        shutil.rmtree(root / name(5))
        other = PosixSteps(Storage(), str(root))
        begun, manifest = other.begin(5), other.read(name(6))
        again = replace(manifest, step=5, nonce="ab" * 16, sequence=manifest.sequence + 1)
        begun.commit(again, durable=False)
        begun.close()
        steps = checkpointer._steps
        steps.note_seen(steps.committed()[0])  # as a restore does
        checkpointer.save(7, state(7)).result(WAIT_S)
    assert directories(root) == [name(5), name(7)]


def test_what_was_committed_later_is_not_removed(root: Path) -> None:
    """As a save does that was held up while another job went on."""
    saved(root, 1, 2, 3)
    steps = PosixSteps(Storage(), str(root))
    assert superfluous(steps, steps.committed()[0], name(2), StepOptions(keep_last=1)) == [name(1)]
    steps.remove(name(1), steps.read(name(1)).nonce)
    with Checkpointer(root) as checkpointer:
        with steps.hold(name(3)):
            checkpointer.save(3, state(33)).result(WAIT_S)
            pipeline.current().drain()  # it has tried to remove the first attempt, which is held
        assert directories(root) == [name(2), name(3), name(3, 1)]
        # The first attempt, if it came last, once the job knows of the other one.
        found = steps.committed()[0]
        assert superfluous(steps, found, name(3), StepOptions()) == []
        steps.note_seen(found)
        assert superfluous(steps, found, name(3), StepOptions()) == [name(3)]
        assert checkpointer.load()["name"] == "step 33"


def test_what_another_job_has_committed_meanwhile_stays_until_a_restore(root: Path) -> None:
    saved(root, 1)
    steps, options = PosixSteps(Storage(), str(root)), StepOptions(keep_last=1)
    manifest = steps.committed()[0][0].manifest
    saved(root, 2)
    begun = steps.begin(3)
    own = replace(manifest, step=3, nonce="ab" * 16, sequence=steps.next_sequence())
    begun.commit(own, durable=False)
    begun.close()
    found = steps.committed()[0]
    assert superfluous(steps, found, name(3), options) == [name(1)]
    steps.note_seen(found)
    assert superfluous(steps, found, name(3), options) == [name(2), name(1)]


def test_one_checkpointer_after_another_commits_in_one_order(root: Path) -> None:
    with Checkpointer(root) as reader:
        for numbers, keep_last in (([10], 1), ([11, 12, 13], None), ([9], 1)):
            with Checkpointer(root, keep_last=keep_last) as checkpointer:
                for number in numbers:
                    checkpointer.save(number, state(number)).result(WAIT_S)
            assert reader.latest() == numbers[-1]
    assert directories(root) == [name(9)]


FORKING = """
import contextlib, os, signal, sys, time, torch
from tests.kit.steps import assert_holds, held_up, state
from fastckpt import Checkpointer
root = sys.argv[1]
with held_up("rename") as (delay, go_on), Checkpointer(root, keep_last=1) as checkpointer:
    first = checkpointer.save(1, state(1))
    assert delay.reached.wait(60)
    child = os.fork()  # as a data loader's worker, which lives on
    if child == 0:
        signal.pause()
    go_on.set()
    first.result()
    def kept():
        found = []
        for link in os.scandir(f"/proc/{child}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it is closed just now
                found.append(os.readlink(link.path))
        return [path for path in found if path.startswith(root)]
    end = time.monotonic() + 60
    while kept() and time.monotonic() < end:  # until it has had its turn
        time.sleep(0.01)
    found = state(0)
    step = checkpointer.restore(found)
    checkpointer.save(2, state(2)).result()
    held = kept()
os.kill(child, signal.SIGKILL)
print(step, held, sorted(os.listdir(root)))
"""


def test_a_fork_during_a_save_holds_nothing_up(root: Path) -> None:
    """Its locks would keep the step from being read, and from being removed."""
    done = run_python(FORKING, root, limit_s=120)
    assert done.stdout.split("\n")[0] == f"1 [] ['{name(2)}']"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_exits_does_not_end_the_save_early(root: Path) -> None:
    with Checkpointer(root, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            handle = checkpointer.save(step, state(step))
            handle.add_done_callback(lambda _: sys.exit())
            handle.wait_done()
    assert directories(root) == [name(3)]


# ---- what others left ----


DYING = """
import os, signal, sys
from tests.kit.doubles import Recorder, process_on
from tests.kit.steps import state
from fastckpt import Checkpointer

class Stops(Recorder):
    def perform(self, number, operation, real):
        if operation.name == sys.argv[2]:
            print("stopped", flush=True)
            sys.stdin.readline()
            os.kill(os.getpid(), signal.SIGKILL)
        return real()

with process_on(Stops()):
    Checkpointer(sys.argv[1]).save(5, state(5)).result()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("operation", ["write", "rename"])
def test_debris_of_the_living_stays_and_of_the_dead_goes(
    root: Path, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(root, 4)
    with program(DYING, root, operation) as process:
        assert told(process) == "stopped"
        files = set(os.listdir(root / name(5)))
        assert len(files) > 1 and "manifest.json" not in files
        Lease(Storage(), str(root)).take_over()
        after_it = saved(root, 6)
        assert after_it == [name(4), name(5), name(6)], "its save may yet commit"
        assert set(os.listdir(root / name(5))) >= files
        assert saved(root, 5) == [name(4), name(5), name(5, 1), name(6)]
        with Checkpointer(root) as checkpointer:
            assert checkpointer.steps() == [4, 5, 6]
        tell(process, "die")
        process.wait(WAIT_S)
    caplog.clear()
    assert restored(root) == 5
    assert f"{root / name(5)}: its save was not committed" in caplog.text
    assert directories(root) == [name(4), name(5), name(5, 1), name(6)], "restoring removes nothing"
    assert saved(root, 7) == [name(4), name(5, 1), name(6), name(7)]


def unfinished(root: Path, step: int, host: str | None, pid: int | None = None) -> Path:
    """A directory as a save leaves it before its commit; with a temporary of this owner."""
    directory = root / name(step)
    directory.mkdir(parents=True)
    (directory / "rank-00000.safetensors").write_bytes(b"begun")
    (directory / "rank-00001.safetensors.zst").write_bytes(b"begun")
    (directory / "rank-123456.json").write_bytes(b"begun")
    if host is not None:
        temporary = Path(atomic.temporary_path(str(directory / "manifest.json")))
        own = re.search(r"\.([^.+]*)\+", temporary.name)
        assert own is not None
        changed = temporary.name.replace(f".{own[1]}+", f".{host or own[1]}+")
        changed = changed.replace(f"-{os.getpid()}-", f"-{pid or os.getpid()}-")
        (directory / changed).write_bytes(b"")
    return directory


def test_debris_tells_whose_it_is(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_this_process = unfinished(root, 1, "")
    of_the_dead = unfinished(root, 2, "", dead_pid())
    of_another_host = unfinished(root, 3, "elsewhere", dead_pid())
    long_dead = unfinished(root, 4, "elsewhere")
    of_nobody = unfinished(root, 5, None)
    foreign = unfinished(root, 6, "", dead_pid())
    (foreign / ".metadata").write_bytes(b"of another tool")
    a_day_ago = time.time() - atomic.DEAD_AFTER_S - 60
    for path in long_dead.glob(".*"):
        os.utime(path, (a_day_ago, a_day_ago))
    kept = [name(1), name(3), name(6)]
    with caplog.at_level(logging.WARNING, "fastckpt"):
        assert saved(root, 7, 8) == [*kept, name(7), name(8)]
    warnings = [record.message for record in warnings_in(caplog.records)]
    assert warnings == [
        f"{of_another_host} was begun on another host and not committed: remove it, or a save "
        "will remove it after a day"
    ], "told once"
    for path in (*of_another_host.glob(".*"), *foreign.glob(".*")):
        os.utime(path, (a_day_ago, a_day_ago))
    assert saved(root, 9) == [name(1), name(6), name(7), name(8), name(9)]
    assert not (of_the_dead.exists() or long_dead.exists() or of_nobody.exists())
    assert len(os.listdir(of_this_process)) == 4 and len(os.listdir(foreign)) == 5
    shutil.rmtree(of_this_process)
    shutil.rmtree(foreign)


def test_a_locked_temporary_is_alive(root: Path) -> None:
    """As of a process in another pid namespace, whose number says nothing here."""
    directory = unfinished(root, 2, "", dead_pid())
    (temporary,) = directory.glob(".*")
    storage = Storage()
    fd = storage.open(str(temporary))
    assert storage.lock(fd)
    assert saved(root, 3) == [name(2), name(3)]
    storage.close(fd)
    assert saved(root, 4) == [name(3), name(4)]


@pytest.mark.parametrize(
    ("after", "committing"),
    [("status link", False), ("names", False), ("status", False), ("names", True)],
)
def test_a_directory_that_comes_to_life_while_it_is_looked_at(
    root: Path, after: str, committing: bool
) -> None:
    """Another save makes its temporary after the first look, or commits: the directory stays."""
    directory = root / name(5)
    directory.mkdir(parents=True)
    temporary = Path(atomic.temporary_path(str(directory / "manifest.json")))

    class Late(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            result = real()
            if operation.name == after and len(self.numbers_of(after)) == 1:
                if committing:
                    temporary.rename(directory / "manifest.json")
                else:
                    temporary.write_bytes(b"")
            return result

    if committing:
        temporary.write_bytes(b"")
        (directory / "objects.pt").write_bytes(b"")
    assert not PosixSteps(Late(), str(root)).remove_if_dead(name(5))
    expected = ["manifest.json", "objects.pt"] if committing else [temporary.name]
    assert sorted(os.listdir(directory)) == expected
    shutil.rmtree(directory)


def test_a_directory_that_is_taken_for_dead_while_it_is_empty(root: Path) -> None:
    """Another process removes it between its making and the first file: it is made again."""

    class Taken(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "create" and len(self.numbers_of("make_directory")) == 1:
                assert PosixSteps(Storage(), str(root)).remove_dead() == [name(5)]
            return real()

    storage = Taken()
    with process_on(storage), Checkpointer(root) as checkpointer:
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert len(storage.numbers_of("make_directory")) == 2
    assert directories(root) == [name(5)] and restored(root) == 5


@pytest.mark.parametrize("is_shared", [False, True])
def test_two_processes_clean_up_at_once(root: Path, is_shared: bool) -> None:
    """Where locks are seen, the second leaves to the first what that is removing."""

    class Second(NetworkClient):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "remove" and len(self.numbers_of("remove")) == 1:
                removed = PosixSteps(Storage(), str(root)).remove_dead()
                assert removed == ([name(5)] if is_shared else [])
            return super().perform(number, operation, real)

    unfinished(root, 5, None)
    double = Second()
    with double.mounted() if is_shared else nullcontext():
        assert PosixSteps(double, str(root)).remove_dead() == ([] if is_shared else [name(5)])
    assert directories(root) == []


def test_a_file_that_comes_while_a_failed_step_is_removed(root: Path) -> None:
    """Whichever rank removes last removes the directory, too."""

    class Between(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "remove_directory":
                with late.made("rank-00001.safetensors", Purpose(0)):
                    pass
            return real()

    agreement = Coordinator.alone().begin("step 1")
    first = PosixSteps(Between(), str(root)).draft(agreement.check)
    late = PosixSteps(Storage(), str(root)).draft(agreement.check)
    late.name = first.begin(1)
    first.abandon()
    late.abandon()
    late.close()
    agreement.close()
    assert os.listdir(root) == []


class SyncFailsAfterRename(Recorder):
    """The first directory that is synced after a rename cannot be, as often as arm() was called."""

    def __init__(self) -> None:
        super().__init__()
        self._armed = self._renamed = False

    def arm(self) -> None:
        self._armed, self._renamed = True, False

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "sync_directory" and self._armed and self._renamed:
            self._armed = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._renamed |= operation.name == "rename"
        return real()


def test_a_step_whose_last_sync_fails_is_visible_and_makes_no_room(root: Path) -> None:
    """Readers may have seen it, so it is not taken back; a crash may, so it keeps no other out."""
    storage = SyncFailsAfterRename()
    with process_on(storage), Checkpointer(root, keep_last=1) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        storage.arm()
        error = checkpointer.save(2, state(2)).exception(WAIT_S)
        assert isinstance(error, StorageError) and error.op == "sync directory"
        assert error.visible and pickle.loads(pickle.dumps(error)).visible
        assert f"{str(root / name(2) / 'manifest.json')!r} is the new checkpoint" in str(error)
        assert checkpointer.latest() == 2 and directories(root) == [name(1), name(2)]
        found = state(999)
        assert checkpointer.restore(found) == 2
        assert_holds(found, 2)
        storage.arm()  # the one that is committed next may not be durable, either
        assert checkpointer.save(3, state(3)).exception(WAIT_S) is not None
        assert directories(root) == [name(1), name(2), name(3)]
        checkpointer.save(4, state(4)).result(WAIT_S)
    assert directories(root) == [name(4)]


def test_without_a_descriptor_for_the_last_sync_nothing_is_committed(root: Path) -> None:
    """What can fail before the rename does: too many open files, a directory not to be read."""
    for code in (errno.EMFILE, errno.EACCES):
        with process_on(FailAlways("open directory", code)), Checkpointer(root) as checkpointer:
            error = checkpointer.save(1, state(1)).exception(WAIT_S)
            assert isinstance(error, StorageError) and not error.visible
            assert (error.op, error.errno) == ("open directory", code)
            assert checkpointer.latest() is None
    assert directories(root) == []


# ---- what is damaged ----


FILES = ("manifest.json", "objects.pt", "rank-00000.json", "rank-00000.safetensors")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_damaged_step_is_skipped_and_told(
    root: Path, file: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(root, 1, 2, 3)
    harm(root / name(3) / file)
    caplog.clear()
    assert restored(root) == 2
    warning = caplog.records[0].message
    if file == "manifest.json" and harm is Path.unlink:
        assert warning == f"skipping {root / name(3)}: its save was not committed"
    else:
        assert warning.startswith("skipping") and str(root / name(3) / file) in warning
    with Checkpointer(root) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(state(999), 3)
        if file == "manifest.json":
            assert "holds no committed step 3: the newest steps are [1, 2]" in str(caught.value)
        else:
            assert type(caught.value) is CorruptCheckpoint and file in str(caught.value)
        if file == "manifest.json" and harm is damage:
            with pytest.raises(
                CorruptCheckpoint, match=r"holds no committed step 3: .* is damaged"
            ):
                checkpointer.delete(3)
        with pytest.raises(type(caught.value)):
            checkpointer.load(3)
        assert_holds(checkpointer.load(), 2)
        checkpointer.save(3, state(3))
    assert restored(root) == 3
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state(999), 3) == 3, "the whole attempt at it counts"


def test_all_damaged_is_an_error(root: Path) -> None:
    saved(root, 1, 2, 3, 4)
    for step, file in zip((1, 2, 3, 4), FILES, strict=True):
        damage(root / name(step) / file)
    with Checkpointer(root) as checkpointer:
        for call in (lambda: checkpointer.restore(state(1)), checkpointer.load):
            with pytest.raises(CorruptCheckpoint) as caught:
                call()
            assert f"no step under {str(root)!r} is intact" in str(caught.value)
            assert f"{name(4)}/rank-00000.safetensors" in str(caught.value)
            assert f"{name(3)}/rank-00000.json" in str(caught.value)
        for step in (2, 3, 4):
            damage(root / name(step) / "manifest.json")
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
            checkpointer.restore(state(1))


def test_a_manifest_that_cannot_be_looked_at(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One odd directory stops neither restoring nor saving, and is not removed."""
    saved(root, 1)
    for step, odd in ((2, "loop"), (3, "directory"), (4, "fifo")):
        (root / name(step)).mkdir()
        path = root / name(step) / "manifest.json"
        if odd == "loop":
            path.symlink_to("manifest.json")
        elif odd == "directory":
            path.mkdir()
        else:
            os.mkfifo(path)
    assert restored(root) == 1
    assert len([r for r in caplog.records if r.message.startswith("skipping ")]) == 3
    assert saved(root, 5, 6, keep_last=1) == [name(2), name(3), name(4), name(6)]
    assert restored(root) == 6


def resigned(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest and gives it the digest it should have."""
    written = json.loads(manifest.read_bytes())
    del written["sha256"]
    change(written)
    body = json.dumps(written, separators=(",", ":"))[:-1].encode()
    digest = hashlib.sha256(body).hexdigest()
    manifest.write_bytes(body + f',"sha256":"{digest}"}}\n'.encode())


def test_a_step_of_a_newer_version(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(root, 1)
    newer = root / name(1) / "manifest.json"
    resigned(newer, lambda written: written.update(version=5, more="unknown"))
    with Checkpointer(root) as checkpointer:
        for call in (lambda: checkpointer.restore(state(1)), checkpointer.load):
            with pytest.raises(IncompatibleCheckpoint, match=r"version 5, .* update it"):
                call()
        assert checkpointer.steps() == [] and checkpointer.latest() is None
    assert saved(root, 2, 3, keep_last=1) == [name(1), name(3)], "it is not removed"
    caplog.clear()
    assert restored(root) == 3 and "version 5" in caplog.text


def test_a_newest_step_of_a_newer_version_is_not_passed_over(root: Path) -> None:
    """The run would silently go back; whoever wants that names the step."""
    saved(root, 1, 2, 3)
    resigned(root / name(3) / "manifest.json", lambda written: written.update(version=5))
    with Checkpointer(root) as checkpointer:
        for call in (lambda: checkpointer.restore(state(1)), checkpointer.load):
            with pytest.raises(IncompatibleCheckpoint, match=r"version 5, .*the steps \[1, 2\]"):
                call()
        assert checkpointer.restore(state(1), 2) == 2


def test_a_step_to_fall_back_to_does_not_fit(root: Path) -> None:
    """The error says what came before. Nothing was read into the state."""
    saved(root, 1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, {**state(2), "more": torch.ones(3)}).result(WAIT_S)
        flip(root / name(2) / "rank-00000.safetensors", -1)  # the values of the rank: read first
        target = {**state(0), "more": torch.zeros(3)}
        with pytest.raises(IncompatibleCheckpoint, match=r"'more' is missing.*CRC-32 mismatch"):
            checkpointer.restore(target)
        assert torch.equal(target["model"]["w"], state(0)["model"]["w"])


def full(**values: float) -> dict[str, torch.Tensor]:
    """Tensors that are in the shards."""
    return {name: torch.full((1 << 18,), float(value)) for name, value in values.items()}


class Layers(torch.nn.Module):
    """A module with one parameter for each name."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        for name, value in full(**values).items():
            self.register_parameter(name, torch.nn.Parameter(value))


def stepped(
    value: float, steps: int = 1, kind: type[torch.optim.SGD] = torch.optim.SGD
) -> torch.optim.Optimizer:
    """An optimizer whose moments are of that value; without steps it has none."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 18))
    optimizer = kind([parameter], momentum=0.9)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return optimizer


class Shadow:
    """An object that makes its tensors when it needs them."""

    def __init__(self, **values: float) -> None:
        self.tensors = full(**values)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.tensors}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.tensors = dict(saved["shadow"])


class Best:
    """An object that leaves its tensor alone where there is none for it."""

    def __init__(self, value: float | None = None) -> None:
        self.tensor, self.has_value = full(x=value or 0)["x"], value is not None

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.tensor if self.has_value else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["x"] is not None:
            self.tensor.copy_(saved["x"])


LOST: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a dict": (lambda: {}, lambda: full(x=2), "'model/x'"),
    "a module": (lambda: Layers(), lambda: Layers(x=2), "'model/x'"),
    "an object": (lambda: Shadow(), lambda: Shadow(x=2), "'model/shadow/x'"),
    "an object that has None": (lambda: Best(), lambda: Best(2), "'model/x'"),
}


def with_damage_in(root: Path, value: float, *states: dict[str, Any]) -> Checkpointer:
    """Saves these states as steps 1, 2 and so on; the last one's tensors of a value are damaged."""
    checkpointer = Checkpointer(root, options=SaveOptions(durable=False))
    for step, each in enumerate(states, 1):
        checkpointer.save(step, each).result(WAIT_S)
    shard = root / name(len(states)) / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[content.index(full(x=value)["x"].numpy().tobytes()) + 5] ^= 1
    shard.write_bytes(content)
    return checkpointer


def test_a_step_does_not_fit_a_state_that_a_damaged_one_was_read_into(root: Path) -> None:
    with with_damage_in(root, 2, full(a=1), full(a=3, b=2)) as checkpointer:
        told = r"'b' is missing.*CRC-32 mismatch.* another step may have overwritten 'a', 'b'"
        with pytest.raises(CorruptCheckpoint, match=told):
            checkpointer.restore(full(a=0, b=0))


@pytest.mark.parametrize("kind", LOST)
def test_what_a_damaged_step_was_read_into_is_not_kept(kind: str, root: Path) -> None:
    """Otherwise it would hold bytes of that step, in a restore of another one that succeeds."""
    without, having, told = LOST[kind]
    before = {**full(a=1), "model": without()}, {**full(a=3), "model": having()}
    with with_damage_in(root, 2, *before) as checkpointer:
        target = {**full(a=0), "model": having()}
        with pytest.raises(
            CorruptCheckpoint, match=rf"{told} is missing in.*this step by its number"
        ):
            checkpointer.restore(target, missing="keep")
        target = {**full(a=0), "model": having()}
        assert checkpointer.restore(target, 1, missing="keep") == 1
        missing = () if "None" in kind else (told.strip("'"),)
        assert checkpointer.differences.missing == missing
        assert torch.equal(target["a"], full(a=1)["a"])


def test_an_optimizer_that_a_damaged_step_was_read_into_is_not_kept(root: Path) -> None:
    """A new one has no state yet that could have been overwritten."""
    states = full(a=1), {**full(a=3), "optimizer": stepped(2)}
    with with_damage_in(root, 2, *states) as checkpointer:
        target = {**full(a=0), "optimizer": stepped(5)}
        with pytest.raises(
            CorruptCheckpoint, match="'optimizer/state/0/momentum_buffer' is missing"
        ):
            checkpointer.restore(target, missing="keep")
        target = {**full(a=0), "optimizer": (new := stepped(5, steps=0))}
        assert checkpointer.restore(target, missing="keep") == 1 and not new.state
        assert torch.equal(target["a"], full(a=1)["a"])


class OwnLoad(torch.optim.SGD):
    """An optimizer that loads its state in a way of its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def test_state_that_an_optimizer_has_not_made_is_not_lost(root: Path) -> None:
    """The step before the damaged one was saved before the optimizer had any."""
    steps = [stepped(0, steps=0, kind=OwnLoad), stepped(2, kind=OwnLoad)]
    states = [{**full(a=1 + 2 * i), "optimizer": each} for i, each in enumerate(steps)]
    with with_damage_in(root, 2, *states) as checkpointer:
        target = {**full(a=0), "optimizer": (new := stepped(5, steps=0, kind=OwnLoad))}
        assert checkpointer.restore(target) == 1 and not new.state
        assert torch.equal(target["a"], full(a=1)["a"])


def test_what_a_damaged_step_was_read_into_is_of_the_older_one_or_gone(root: Path) -> None:
    """An optimizer gives up the state that it has; an object that has none yet loses nothing."""
    older = {"model": Layers(x=1), "optimizer": stepped(0, steps=0), "shadow": Shadow()}
    newer = {"model": Layers(x=2), "optimizer": stepped(3), "shadow": Shadow()}
    with with_damage_in(root, 2, older, newer) as checkpointer:
        target = {"model": Layers(x=0), "optimizer": stepped(5), "shadow": Shadow()}
        assert checkpointer.restore(target, missing="keep") == 1
        assert torch.equal(target["model"].x, full(x=1)["x"]) and not target["optimizer"].state


def test_a_run_that_was_copied_elsewhere(disk: Path, root: Path) -> None:
    saved(root, 1, 2)
    shutil.copytree(root, disk / "copy", symlinks=True)
    shutil.rmtree(root)
    assert restored(disk / "copy") == 2
    assert saved(disk / "copy", 3, keep_last=2) == [name(2), name(3)]


class BeginsWhileRemoved(Storage):
    """Another save of the step begins when its old directory has lost its manifest."""

    def __init__(self) -> None:
        self.begin: Callable[[], object] | None = None
        self.thread: threading.Thread | None = None

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        if self.begin is not None:
            self.thread = threading.Thread(target=self.begin)
            self.begin = None
            self.thread.start()
            self.thread.join(0.2)  # it may have to wait


def test_a_save_that_has_taken_the_name_is_not_removed(root: Path) -> None:
    """Of two saves that remove what they replace, one comes late."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        steps = checkpointer._steps
        (replaced,), _faults = steps.committed()
        assert steps.remove(replaced.name, replaced.manifest.nonce)
        assert steps.remove(replaced.name, replaced.manifest.nonce), "it is gone"
        checkpointer.save(1, state(1)).result(WAIT_S)
        assert steps.remove(replaced.name, replaced.manifest.nonce), "it is gone"
    assert directories(root) == [replaced.name] and restored(root) == 1


def test_a_save_keeps_its_directory_while_an_old_one_of_that_name_is_removed(root: Path) -> None:
    saved(root, 1)
    storage, begun = BeginsWhileRemoved(), []
    steps = PosixSteps(storage, str(root))
    steps._is_clean = True
    storage.begin = lambda: begun.append(steps.begin(1))
    assert steps.remove(name(1), steps.read(name(1)).nonce)
    assert storage.thread is not None
    storage.thread.join(WAIT_S)
    assert begun[0].name == name(1) and os.path.exists(begun[0]._temporary)
    begun[0].abandon()


READ_ONLY = """
import os, sys, tempfile
from tests.kit.steps import assert_holds, state
from fastckpt import Checkpointer
with tempfile.TemporaryDirectory() as directory, Checkpointer(directory) as checkpointer:
    checkpointer.save(1, state(1))  # imports what somebody else may not be able to
    checkpointer.restore(state(1))
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
with Checkpointer(sys.argv[1]) as checkpointer:
    found = state(999)
    assert checkpointer.restore(found) == 2 and checkpointer.steps() == [1, 2]
    assert_holds(found, 2)
    error = checkpointer.save(3, state(3)).exception()
    assert "Permission denied" in str(error), error
"""


@pytest.mark.multiprocess
def test_a_root_that_may_only_be_read() -> None:
    """A reader needs no permission but to read, and a writer is told what it lacks."""
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        root = Path(outer) / "run"
        saved(root, 1, 2)
        for path in (*root.rglob("*"), root):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if not all(path.stat().st_mode & 0o001 for path in Path(outer).parents):
            pytest.skip("temporary directories cannot be reached by others")
        try:
            run_python(READ_ONLY, root)
        finally:
            for path in (root, *root.glob("*")):
                path.chmod(0o755)
        assert directories(root) == [name(1), name(2)]


# ---- what cannot be read, and what is gone when its turn comes ----


class Unreadable(Recorder):
    """What asks for something below a directory fails, `count` times."""

    def __init__(self, below: Path, code: int, count: float) -> None:
        super().__init__()
        self._below, self._code, self.left = str(below), code, count

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        is_below = operation.path.startswith(self._below) and operation.name != "close"
        if self.left > 0 and is_below:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return real()


def test_a_read_that_fails_once_is_tried_again(root: Path, at_once: None) -> None:
    """Whichever operation of a restore it is, and whatever the error."""
    saved(root, 1, 2)
    codes = itertools.cycle([errno.EIO, errno.EMFILE, errno.EINVAL])
    number, failed = 0, set()
    while True:
        storage = FailAt(number, next(codes))
        with process_on(storage):
            assert restored(root) == 2, f"operation {number}"
        if number >= len(storage.log):
            break
        failed.add(storage.log[number].name)
        number += 1
    assert {"names directories", "status", "open", "open regular", "read_file", "read"} <= failed


class OpenedLate(Recorder):
    """Each file that lies there is not found the first time that it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "open regular" and operation.path not in self.late:
            self.late.add(operation.path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real()


def test_a_file_that_is_listed_is_not_missing(root: Path, at_once: None) -> None:
    """Clients of network file systems remember for a while that a name did not exist."""
    saved(root, 1, 2)
    storage = OpenedLate()
    with process_on(storage):
        assert restored(root) == 2
    assert {Path(path).name for path in storage.late} > {"objects.pt", "rank-00000.json"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("file", FILES)
def test_what_cannot_be_read_is_not_damage(root: Path, code: int, file: str, at_once: None) -> None:
    """No older step is taken in its place, and it is not removed when the next one is there."""
    saved(root, 1, 2)
    storage = Unreadable(root / name(2) / file, code, math.inf)
    with process_on(storage), Checkpointer(root, keep_last=1) as checkpointer:
        for call in (lambda: checkpointer.restore(state(999)), checkpointer.load):
            with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
                call()
            assert caught.value.errno == code and file in str(caught.value)
        if file == "manifest.json":
            for ask in (checkpointer.latest, checkpointer.steps):
                with pytest.raises(StorageError):
                    ask()
        assert checkpointer.restore(state(999), 1) == 1, "by its number, it is the user's choice"
        storage.left = 0
        checkpointer.save(3, state(3))
    assert directories(root) == [name(2), name(3)]
    assert restored(root) == 3


def test_a_step_that_was_read_at_last_is_as_any_other(root: Path, at_once: None) -> None:
    saved(root, 1, 2)
    storage = Unreadable(root / name(2) / "objects.pt", errno.EIO, math.inf)
    with process_on(storage), Checkpointer(root, keep_last=1) as checkpointer:
        with pytest.raises(StorageError):
            checkpointer.restore(state(999))
        storage.left = 0
        assert checkpointer.restore(state(999)) == 2
        checkpointer.save(3, state(3))
    assert directories(root) == [name(3)]


def test_no_memory_is_not_damage(
    root: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 1, 2)

    def none_left(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as context, Checkpointer(root) as checkpointer:
        context.setattr("fastckpt.steps.copies.body_of", none_left)
        with pytest.raises(StorageError, match=r"objects\.pt.*ENOMEM"):
            checkpointer.restore(state(999))
    assert restored(root) == 2


class Busy(Recorder):
    """After each listing of the root, `count` times, another job commits a step and removes all
    others.
    """

    def __init__(self, root: Path, count: int) -> None:
        super().__init__()
        self._root, self.left, self.step = root, count, 1

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        result = real()
        if operation.name == "names directories" and self.left > 0:
            self.left -= 1
            self.step += 1
            with process_on(None):
                saved(self._root, self.step, keep_last=1)
        return result


@pytest.mark.parametrize("count", [1, 4])
def test_steps_that_vanish_while_they_are_listed(root: Path, count: int) -> None:
    saved(root, 1)
    storage = Busy(root, 0)
    with process_on(storage), Checkpointer(root) as checkpointer:
        for ask in (
            checkpointer.latest,
            lambda: max(checkpointer.steps()),
            lambda: checkpointer.restore(state(999)),
            lambda: int(checkpointer.load()["name"].split()[1]),
        ):
            storage.left = count
            assert ask() == storage.step


class Abandoning(PosixSteps):
    """A save that has begun, here or elsewhere, fails after the next listing of the root."""

    failing: Draft | None = None

    def names(self) -> list[str]:
        names, failing, self.failing = super().names(), self.failing, None
        if failing is not None:
            failing.abandon()
        return names


def test_a_save_that_fails_here_was_no_step(root: Path, at_once: None) -> None:
    """The first step is committed while the second one is cancelled."""
    steps = Abandoning(Storage(), str(root))
    first, steps.failing = steps.begin(1), steps.begin(2)
    steps.next_sequence()
    assert steps.failing is None and directories(root) == [first.name]
    first.abandon()
    again = steps.begin(1)
    assert again.name != first.name, "a late rank may still write there"
    again.abandon()


def test_a_save_that_fails_elsewhere_leaves_an_empty_root(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits there for a step that never was."""
    monkeypatch.setattr("fastckpt.storage.vanishing.LISTING_PAUSES_S", (0.0,) * 5)
    steps = Abandoning(Storage(), str(root))
    steps.failing = PosixSteps(Storage(), str(root)).begin(1)
    assert steps.survey() == ([], []) and steps.failing is None and directories(root) == []


class Remembering(Recorder):
    """A machine that remembers what directories held, as sshfs does: the listing of the root, and
    with `deep`, of what was in it, stays what it was until it was asked for so often.
    """

    def __init__(self, root: Path, times: int, deep: bool) -> None:
        super().__init__()
        self._root, self._times, self._deep = str(root), times, deep
        self._known: dict[tuple[str, str], Any] = {}
        self.listings = 0

    def remember(self) -> None:
        """What is there now is known from now on."""
        self.listings = 0
        self._known[("names directories", self._root)] = self.names(self._root, directories=True)
        for name in self.names(self._root, directories=True) if self._deep else ():
            path = os.path.join(self._root, name, "manifest.json")
            self._known[("status", path)] = self.status(path)
        self.listings = 0

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if (operation.name, operation.path) == ("names directories", self._root):
            self.listings += 1
        key = (operation.name, operation.path)
        if key in self._known and self.listings <= self._times:
            return self._known[key]  # type: ignore[no-any-return]
        return real()


@pytest.mark.parametrize("deep", [False, True])
def test_a_listing_of_steps_that_are_all_gone(root: Path, at_once: None, deep: bool) -> None:
    """It is an old one that this machine remembers: never None, and no error if that ends."""
    for times, error in ((10, None), (1000, StorageError)):
        saved(root, 1, 2)
        storage = Remembering(root, times, deep)
        with process_on(storage), Checkpointer(root) as checkpointer:
            storage.remember()
            with process_on(None):
                saved(root, 3, 4, keep_last=2)
            for ask in (
                checkpointer.latest,
                lambda: max(checkpointer.steps()),
                lambda: checkpointer.restore(state(999)),
                lambda: checkpointer.restore(state(999), required=True),
                lambda: int(checkpointer.load()["name"].split()[1]),
            ):
                storage.listings = 0
                if error is None:
                    assert ask() == 4
                else:
                    with pytest.raises(
                        error, match="removed before they were read, 20 times"
                    ) as told:
                        ask()
                    assert told.value.errno == errno.EBUSY
        shutil.rmtree(root)


def test_steps_that_are_removed_while_they_are_listed(root: Path, at_once: None) -> None:
    """All of them, and nothing follows: nobody who has seen one may take the run for one that never
    began. What nobody has looked at yet might as well be gone before it was listed.
    """

    class Emptied(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            result = real()
            if operation.name == self.after and operation.path.startswith(str(root)):
                shutil.rmtree(root / name(1), ignore_errors=True)
            return result

    for after in ("names directories", "status", "read_file", "open"):
        for ask in (Checkpointer.latest, lambda checkpointer: checkpointer.restore(state(999))):
            shutil.rmtree(root, ignore_errors=True)
            saved(root, 1)
            storage = Emptied()
            storage.after = after  # type: ignore[attr-defined]
            with process_on(storage), Checkpointer(root) as checkpointer:
                try:
                    step = ask(checkpointer)
                    assert step == 1 or (step is None and after == "names directories"), after
                except StorageError as error:
                    assert "removed before they were read" in str(error)


def test_a_listing_that_misses_both_the_old_and_the_new(root: Path) -> None:
    """As one may that takes long: each is there for a part of it only."""
    saved(root, 1)

    class Missing(Recorder):
        done = False

        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            result: Any = real()
            if operation.name == "names directories" and not self.done:
                self.done, result = True, []
            return result

    for ask in (Checkpointer.latest, lambda checkpointer: checkpointer.restore(state(999))):
        with process_on(Missing()), Checkpointer(root) as checkpointer:
            assert ask(checkpointer) == 1


def test_a_step_that_is_removed_while_it_is_read(root: Path) -> None:
    """By a host that knows nothing of the lock: that is no damage, and the newer one is taken."""
    saved(root, 1)

    class Heedless(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "open regular" and "objects" in operation.path:
                with process_on(None):
                    if not (root / name(2)).exists():
                        saved(root, 2)
                        shutil.rmtree(root / name(1))
            return real()

    with process_on(Heedless()), Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state(999)) == 2
        with pytest.raises(
            CheckpointError, match=r"no committed step 1: the newest steps are \[2\]"
        ):
            checkpointer.restore(state(999), 1)


def test_a_root_without_steps_is_told_once(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(disk / "runs" / "one", 1)
    (disk / "empty").mkdir()
    (disk / "other").mkdir()
    (disk / "other" / "notes.txt").touch()
    (disk / "debris" / name(7)).mkdir(parents=True)
    (disk / "other" / "manifest.json").write_text('{"name": "an app"}')
    for path, reason in (
        (disk / "nowhere", "there is no such directory"),
        (disk / "empty", "the directory is empty"),
        (disk / "other", "it holds only 'manifest.json', 'notes.txt'"),
        (disk / "debris", f"all saves in it are uncommitted: {name(7)!r}"),
        (disk / "runs", "its subdirectories contain steps: 'one'"),
    ):
        caplog.clear()
        with Checkpointer(path) as checkpointer:
            assert checkpointer.restore(state(1)) is None
            assert checkpointer.restore(state(1)) is None
            assert caplog.text.count("holds no committed step") == 1
            assert f"{str(path)!r} holds no committed step: {reason}" in caplog.text
            for call in (lambda: checkpointer.restore(state(1), required=True), checkpointer.load):
                with pytest.raises(CheckpointError, match=re.escape(reason)) as caught:
                    call()
                assert type(caught.value) is CheckpointError
        assert not (disk / "nowhere").exists()
