"""Promise: a step in the nodes' memory outlives the process, within a budget looked at ahead.

What any local tier promises is test_tiers.py's business; this is about what memory adds.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer, Memory
from fastckpt.cli import main
from fastckpt.saving import ring
from fastckpt.saving.lease import LEASE_FILE
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from fastckpt.tiers.drain import Drain
from tests.kit.interpreters import Program
from tests.kit.mounts import mounted
from tests.kit.programs import tell, told
from tests.kit.saves import wait_until
from tests.kit.steps import assert_holds, directories, state
from tests.kit.storm import Storm
from tests.kit.tiers import local, local_steps

__all__ = ["local"]
MIB = 1 << 20


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def taken_from(checkpointer: Checkpointer) -> set[str]:
    return {os.path.dirname(path) for path in checkpointer.restored_from.values()}


def test_the_root_takes_some_steps_and_memory_all(disk: Path, local: Path) -> None:
    """A job that ends is followed by one that finds the newest in memory, and copies it."""
    root, memory = disk / "run", Memory(directory=local, root_every=4, budget="400MiB")
    with Checkpointer(root, local=memory) as checkpointer:
        for step in range(7):
            handle = checkpointer.save(step, state(step))
            stats = handle.result()
            assert stats.local_committed_s is not None
            assert Path(handle.path).is_relative_to(local if step % 4 else root)
    assert directories(root) == names(0, 4)
    assert local_steps(local) == names(5, 6), "older ones go, though the root never had them"
    with Checkpointer(root, local=memory) as checkpointer:
        found = state(999)
        assert checkpointer.restore(found) == 6
        assert_holds(found, 6)
        assert all(path.startswith(str(local)) for path in taken_from(checkpointer))
    assert directories(root) == names(0, 4, 6), "the newest alone is copied"
    with Checkpointer(root, local=memory) as checkpointer:
        checkpointer.save(9, state(9), deadline_s=60.0).result()
        assert checkpointer.steps() == [0, 4, 6, 9], "the job ends soon"


def test_steps_stay_within_the_budget(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest goes that the root has had; where none may go, the step goes past the memory."""
    root, taken = disk / "run", list[int]()
    model = {"w": torch.zeros(6 << 20)}
    real = Storage.allocate

    def allocate(storage: Storage, fd: int, nbytes: int) -> None:
        real(storage, fd, nbytes)
        taken.append(sum(path.stat().st_blocks * 512 for path in local.rglob("*.*")))

    monkeypatch.setattr(Storage, "allocate", allocate)
    memory = Memory(directory=local, keep=9, budget=100 * MIB, root_every=2)
    with Checkpointer(root, local=memory) as checkpointer:
        for step in range(8):
            model["w"].fill_(step)
            stats = checkpointer.save(step, model).result()
            assert stats.local_committed_s is not None, stats.local_why
        assert local_steps(local) == names(5, 6, 7)
        assert 72 * MIB < max(taken) <= 100 * MIB
    small = Memory(directory=local, budget=30 * MIB)
    with Checkpointer(root, local=small) as checkpointer:
        stats = checkpointer.save(8, model).result()
        assert stats.local_committed_s is None
        assert "has a budget of 30.0 MiB on this node: the step needs 40" in stats.local_why
        enough = stats.local_why.split("budget='")[1].split("'")[0]
        assert checkpointer.restore(model) == 8
    with Checkpointer(root, local=Memory(directory=local, budget=enough)) as checkpointer:
        assert checkpointer.save(9, model).result().local_why == "", enough
    with pytest.raises(ValueError, match=r"must be above 16\.0 MiB"):
        Checkpointer(root, local=Memory(directory=local, budget="16MiB"))


def test_a_step_that_the_root_has_a_newer_one_than_makes_room(disk: Path, local: Path) -> None:
    """The memory has room for one step, so each second one goes past it."""
    memory = Memory(directory=local, budget=50 * MIB, root_every=1000, peers=0)
    with Checkpointer(disk / "run", local=memory) as checkpointer:
        model = {"w": torch.zeros(6 << 20)}
        saves = [checkpointer.save(step, model).wait_memory(60) for step in range(1, 6)]
        assert saves == [True, False, True, False, True]
        assert local_steps(local) == names(5)
        assert checkpointer.restore(model) == 5


@pytest.mark.parametrize(
    ("peers", "deadline_s", "why"),
    [(0, None, ""), (1, None, "no rank on another node"), (1, 60.0, "with a deadline")],
)
def test_who_has_no_neighbours_is_told(
    peers: int, deadline_s: float | None, why: str, disk: Path, local: Path
) -> None:
    memory = Memory(directory=local, budget="64MiB", peers=peers)
    with Checkpointer(disk / "run", local=memory) as saving:
        handle = saving.save(1, {"x": torch.zeros(10)}, deadline_s=deadline_s)
        assert handle.wait_memory(60) == (not why)
        assert why in handle.result().replicas_why


def test_a_step_whose_copies_are_being_sent_stays(disk: Path, local: Path) -> None:
    memory = Memory(directory=local, keep=1, root_every=100, budget="400MiB")
    with Checkpointer(disk / "run", local=memory) as checkpointer:
        checkpointer.save(1, state(1)).result()
        tier = checkpointer._tier
        assert tier is not None and tier.no_room_on_node(*names(1), 0) == ""
        for step in (2, 3):
            checkpointer.save(step, state(step)).result()
        wait_until(lambda: local_steps(local) == names(1, 3))
        tier.settle(*names(1), is_replicated=False)
        checkpointer.save(4, state(4)).result()
    assert local_steps(local) == names(4)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "directory"])
def test_a_tier_that_is_no_directory_any_more_is_passed(
    disk: Path, local: Path, in_memory: bool
) -> None:
    tier: Any = Memory(directory=local, budget="64MiB") if in_memory else local
    with Checkpointer(disk / "run", local=tier) as checkpointer:
        checkpointer.save(1, state(1)).result()
    (own,) = local.iterdir()
    shutil.rmtree(own)
    own.touch()
    with Checkpointer(disk / "run", local=tier) as checkpointer:
        found = state(999)
        assert checkpointer.restore(found) == 1
        assert_holds(found, 1)
        assert "Not a directory" in checkpointer.save(2, found).result().local_why
        assert checkpointer.steps() == [1, 2]


OF_ANOTHER_JOB = """
import sys
from fastckpt import Checkpointer, Memory
from tests.kit.steps import state

memory = Memory(directory=sys.argv[2], root_every=int(sys.argv[3]), budget="400MiB", peers=0)
with Checkpointer(sys.argv[1], local=memory) as checkpointer:
    for line in sys.stdin:
        if line == "restore\\n":
            print(checkpointer.restore(state(999)), flush=True)
            continue
        error = checkpointer.save(int(line), state(int(line))).exception(60)
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("root_every", [1, 100])
def test_a_second_job_puts_no_step_in_the_memory_of_the_first(
    root_every: int, disk: Path, local: Path
) -> None:
    """Though it may be long until one of either goes to the root."""
    root, memory = disk / "run", Memory(directory=local, root_every=root_every, peers=0)
    with Program(OF_ANOTHER_JOB, root, local, str(root_every)) as other:
        with Checkpointer(root, local=memory) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state(step)).result()
            if root_every == 100:  # so that the root is not there yet
                assert main(["repair", str(root), "--local", str(local)]) == 0
            tell(other, "7")
            refused = told(other)
            assert refused.startswith("RootInUse: ") and f"process {os.getpid()} on" in refused
            assert local_steps(local) == names(1, 2)
            found = state(999)
            assert checkpointer.restore(found) == 2
            assert_holds(found, 2)
        tell(other, "8")
        assert told(other) == "NoneType: None", "the first job is over"
        assert main(["repair", str(root), "--takeover", "--local", str(local)]) == 0
        with Checkpointer(root, local=memory) as checkpointer:
            checkpointer.save(9, state(9)).result()
            tell(other, "10")
            refused = told(other)
            assert refused.startswith("RootInUse: ") and "was taken over" in refused
            assert checkpointer.restore(found) == 9


@pytest.mark.multiprocess
def test_a_job_that_only_restores_is_in_nobodys_way(disk: Path, local: Path) -> None:
    """Beside a live job it copies nothing to the root; after a dead one it gives the root back."""
    root, memory = disk / "run", Memory(directory=local, root_every=5, budget="400MiB", peers=0)

    def job() -> Program:
        return Program(OF_ANOTHER_JOB, root, local, "5")

    with job() as first, job() as second, job() as third:
        tell(first, "1")
        assert told(first).startswith("NoneType")
        tell(second, "restore")
        assert told(second) == "1"
        assert not root.exists(), "the first job does so"
        tell(first, "5")
        assert told(first).startswith("NoneType")
        tell(first, "6")
        assert told(first).startswith("NoneType")
        first.kill()
        first.wait()
        tell(second, "restore")
        assert told(second) == "6"
        wait_until(lambda: directories(root) == names(5, 6))
        wait_until(lambda: not (root / LEASE_FILE).exists())
        tell(third, "10")
        assert told(third).startswith("NoneType"), "though the second job is there"
    with Checkpointer(root, local=memory) as checkpointer:
        assert checkpointer.restore(state(999)) == 10


@pytest.mark.multiprocess
def test_others_restore_a_step_that_is_on_its_way_to_the_root(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, memory = disk / "run", Memory(directory=local, budget="400MiB", peers=0)
    real, may_drain = Drain.write, threading.Event()

    def write(drain: Drain, pipeline: Pipeline) -> None:
        assert may_drain.wait(100)
        real(drain, pipeline)

    monkeypatch.setattr(Drain, "write", write)
    with (
        Program(OF_ANOTHER_JOB, root, local, "1") as other,
        Checkpointer(root, local=memory) as checkpointer,
    ):
        assert checkpointer.save(1, state(1)).wait_local(60)
        try:
            tell(other, "restore")
            assert told(other) == "1"
        finally:
            may_drain.set()


@pytest.mark.multiprocess
def test_a_lease_lasts_as_long_as_any_checkpointer_of_a_process_has_it(
    disk: Path, local: Path
) -> None:
    root, memory = disk / "run", Memory(directory=local, root_every=100, budget="400MiB", peers=0)
    with Program(OF_ANOTHER_JOB, root, local, "100") as other:
        with Checkpointer(root, local=memory) as stays:
            with Checkpointer(root, local=memory) as goes:
                goes.save(1, state(1)).result()
            stays.save(2, state(2)).result()
            (lease,) = local.glob(f"*/{LEASE_FILE}")
            with lease.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tell(other, "9")
            assert told(other).startswith("RootInUse")
            lease.unlink()
            lease.write_bytes(b"no lease")
            stays.save(3, state(3)).result()
            tell(other, "9")
            assert told(other).startswith("RootInUse"), "it was put right"
        assert not lease.exists()
        forgotten = Checkpointer(root, local=memory)
        forgotten.save(10, state(10)).result()
        held = forgotten._tier  # as a save does that is not over when the caller forgets it
        del forgotten
        with Checkpointer(root, local=memory) as last:
            last.save(11, state(11)).result()
        assert lease.exists()
        del held

        def is_given_up() -> bool:
            gc.collect()
            return not lease.exists()

        wait_until(is_given_up)
        tell(other, "19")
        assert told(other).startswith("NoneType")


@pytest.mark.filesystem
def test_what_memory_there_is_is_looked_at_ahead(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(memory: Memory) -> str:
        with pytest.raises(ValueError) as caught:
            Checkpointer(disk / "run", local=memory)
        return str(caught.value)

    assert "must be a tmpfs" in refused(Memory(directory="/proc"))
    missing = disk / "not here"
    told = refused(Memory(directory=missing, budget="1GiB"))
    assert f"mkdir -p '{missing}' && mount -t tmpfs -o size=1024m tmpfs '{missing}'`" in told
    assert f"{str(disk)!r} is " in told and "must be a tmpfs" in told
    (local / "a file").touch()
    assert "a file' is not a directory" in refused(Memory(directory=local / "a file"))
    with Checkpointer(disk / "run", local=Memory(directory=local / "new", peers=0)) as checkpointer:
        assert checkpointer.save(1, {"w": torch.zeros(1)}).wait_memory(60)
    with mounted("tmpfs", disk, 8 * MIB) as tiny:
        told = refused(Memory(directory=tiny))
        assert "is a tmpfs of 8.00 MiB" in told and "needs 16.0 MiB" in told
    with mounted("tmpfs", disk, 64 * MIB) as small:
        (inner := small / "inner").mkdir()
        with Checkpointer(disk / "run", local=Memory(directory=inner)) as checkpointer:
            why = checkpointer.save(1, {"w": torch.zeros(6 << 20)}).result().local_why
            assert f"32.0 MiB (half of the tmpfs {str(inner)!r}, 64.0 MiB, or" in why, why
        told = refused(Memory(directory=inner, budget="1GiB"))
        assert "a tmpfs of 64.0 MiB" in told and "needs 1.00 GiB" in told and "--shm-size" in told
        subprocess.run(told.split("`")[1], shell=True, check=True)
        with Checkpointer(disk / "run", local=Memory(directory=inner, budget="1GiB")):
            pass
    monkeypatch.setattr(ring, "memory_left_bytes", lambda: 32 * MIB)
    assert "the cgroup and the machine leave 32.0 MiB" in refused(
        Memory(directory=local, budget="1GiB")
    )
    for values in (
        {"keep": 0},
        {"root_every": 0},
        {"budget": "much"},
        {"directory": ""},
        {"address": "0.0.0.0"},
    ):
        with pytest.raises(ValueError):
            Memory(**values)


SAVING = """
import itertools, sys
from fastckpt import Checkpointer, Memory
from tests.kit.steps import state

root, local, begin = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = Memory(directory=local, root_every=3, budget="400MiB")
with Checkpointer(root, local=memory, keep_last=2) as checkpointer:
    for step in itertools.count(begin):
        checkpointer.save(step, state(step)).wait_local()
        print(step, flush=True)
"""


@pytest.mark.torture
def test_a_kill_at_any_moment(disk: Path, local: Path, storm: Storm) -> None:
    """The newest step that was committed in memory is restored, and in the root after that."""
    root, memory = disk / "run", Memory(directory=local, root_every=3, budget="400MiB")
    begin, saves = 1, 0
    for rng in storm.rounds(suite=2, torture=300):
        with Program(SAVING, root, local, begin) as program:
            for _ in range(rng.randrange(1, 6)):
                program.stdout.readline()
            ready, _, _ = select.select([program._status], [], [], rng.uniform(0.0, 0.03))
            assert not ready, program.stderr.read()
            program.kill()
            program.wait()
            committed = [int(line) for line in program.stdout]
        found = state(999)
        with Checkpointer(root, local=memory, keep_last=2) as checkpointer:
            step = checkpointer.restore(found)
            assert step is not None and step >= max(committed, default=begin)
            assert_holds(found, step)
            assert all(path.startswith(str(local)) for path in taken_from(checkpointer))
        with Checkpointer(root) as checkpointer:
            assert checkpointer.latest() == step
        saves, begin = saves + step - begin, step + 1
    print(saves, "saves")
