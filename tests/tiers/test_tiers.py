"""Checkpointer with a node-local tier, as one process uses it: two commits and their clocks, what
stays in the tier, and what a restore takes from where after a kill, a loss, damage or a fault.

Responsible for what must hold of both tiers together. Several ranks and nodes are
test_ranks_tiers.py's business; what a step directory holds is test_checkpointer.py's.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fastckpt import Checkpointer, SaveCancelled, SaveOptions
from fastckpt.arguments.quantities import shown_size
from fastckpt.engine.codec import FrameWriter
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats.step_names import step_name
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.saving import pipeline
from fastckpt.steps import pins
from fastckpt.steps.newest_whole import candidates
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage.file_system import Storage
from fastckpt.tiers import place as node_place
from fastckpt.tiers.drain import Drain
from fastckpt.tiers.survey import Survey
from tests.kit.doubles import FailAt, Operation, Recorder, dead_pid, process_on
from tests.kit.mounts import leave_free, mounted
from tests.kit.noise import flip
from tests.kit.options import gathered
from tests.kit.programs import run_python
from tests.kit.saves import interrupted_in, wait_until
from tests.kit.steps import assert_holds, directories, state
from tests.kit.tiers import WAIT_S, T, doors, local, local_step, local_steps

__all__ = ["local"]  # a fixture

MIB = 1 << 20


def content(root: Path, local: Path | None, **options: Any) -> tuple[int | None, dict[str, str]]:
    """What a new job restores, every value of which was looked at, and where it was taken from."""
    found = state(999)
    with Checkpointer(root, local=local, **gathered(**options)) as checkpointer:
        step = checkpointer.restore(found)
        taken = dict(checkpointer.restored_from)
    assert_holds(found, 999 if step is None else step) if step is not None else None
    return step, taken


# ---- arguments ----


def test_wrong_settings_are_refused_with_the_reason(disk: Path, local: Path) -> None:
    with pytest.raises(ValueError, match="must be on another file system than the root"):
        Checkpointer(disk / "run", local=disk / "not yet" / "there")
    with pytest.raises(ValueError, match="the count of local is 0, must be at least 1"):
        Checkpointer(disk / "run", local=(local, 0))
    with pytest.raises(TypeError, match="must be a path"):
        Checkpointer(disk / "run", local=(local,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local is '', must be a path"):
        Checkpointer(disk / "run", local="")
    with pytest.raises(TypeError):
        Checkpointer(disk / "run", local=(local, 1.5))  # type: ignore[arg-type]
    assert os.listdir(disk) == os.listdir(local) == []


# ---- two commits ----


@pytest.mark.parametrize("codec", [None, "zstd", "planes"])
def test_a_step_is_committed_in_both_tiers(disk: Path, local: Path, codec: str | None) -> None:
    root = disk / "run"
    with Checkpointer(root, local=local, codec=codec) as checkpointer:
        handle = checkpointer.save(7, state(7, 5_000_000))
        assert handle.wait_local(WAIT_S)
        stats = handle.result(WAIT_S)
        assert handle.wait_local(WAIT_S) and handle.path == str(root / "step-00000007")
    times = [stats.staged_s, stats.written_s, stats.local_committed_s, stats.committed_s]
    assert None not in times and times == sorted(times) and stats.local_why == ""
    profile = handle.profile()
    captured_s, synced_s = (profile["by_rank"][name][0] for name in ("captured_s", "synced_s"))
    assert captured_s <= stats.staged_s, "the drain begins later"
    assert profile["commit_s"] == pytest.approx(stats.local_committed_s - synced_s, abs=1e-5)
    assert profile["drain_s"] == pytest.approx(stats.committed_s - stats.local_committed_s)
    one, other = local_step(local, 7), root / "step-00000007"
    assert {*directories(one)} == {*directories(other), "drained"}
    for name in directories(other):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    found = state(999, 5_000_000)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(found) == 7
    assert_holds(found, 7, 5_000_000)


def test_without_a_tier_wait_local_says_so(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        handle = checkpointer.save(1, state(1))
        assert not handle.wait_local(WAIT_S) and handle.done()
        assert handle.stats.local_committed_s is None
        assert checkpointer.restore(state(0)) == 1
        assert set(checkpointer.restored_from) == {"objects.pt"} | {
            f"rank-00000.{kind}" for kind in ("json", "safetensors")
        }


def test_a_slow_root_holds_up_neither_staging_nor_local_commits(disk: Path, local: Path) -> None:
    """Until so many steps wait to be drained as are kept; none of them is removed before."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        storage.closed.append(root)
        handles = [checkpointer.save(step, state(step)) for step in (1, 2, 3)]
        assert all(handle.wait_local(WAIT_S) for handle in handles)
        assert local_steps(local) == [f"step-{step:08d}" for step in (1, 2, 3)]
        assert not any(handle.done() for handle in handles) and not root.exists()
        begun = threading.Thread(target=lambda: handles.append(checkpointer.save(4, state(4))))
        begun.start()
        begun.join(0.3)
        assert begun.is_alive(), "the fourth waits for the first to be drained"
        with pytest.raises(TimeoutError):
            handles[0].result(0.01)
        storage.open_doors()
        begun.join(WAIT_S)
        for handle in handles:
            handle.result(WAIT_S)
        assert checkpointer.steps() == [1, 2, 3, 4]
    assert local_steps(local) == ["step-00000003", "step-00000004"]


def test_a_drain_reports_its_progress(disk: Path, local: Path) -> None:
    """As every save does: at exit a process ends without those that do not get on."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        storage.closed.append(root / "step-00000001" / "objects.pt")
        handle = checkpointer.save(1, state(1))
        assert handle.wait_local(WAIT_S)
        step = local_step(local, 1)
        shard, objects = (step / name for name in ("rank-00000.safetensors", "objects.pt"))
        written, total = shard.stat().st_size, shard.stat().st_size + objects.stat().st_size
        wait_until(lambda: handle.progress() == (written, total), "the shard is in the root")
        storage.open_doors()
        stats = handle.result(WAIT_S)
        assert handle.progress() == (stats.nbytes, stats.nbytes)


def test_a_save_that_waits_for_drains_can_be_cancelled(disk: Path, local: Path) -> None:
    root = disk / "run"
    with (
        doors() as storage,
        Checkpointer(root, local=(local, 1), options=SaveOptions(fence="step")) as checkpointer,
    ):
        storage.closed.append(root)
        handles = [checkpointer.save(step, state(step)) for step in (1, 2)]
        assert all(handle.wait_local(WAIT_S) for handle in handles)
        waiting = checkpointer.save(3, state(3))
        assert waiting.cancel()
        with pytest.raises(SaveCancelled):
            waiting.result(WAIT_S)
        assert not any(handle.done() for handle in handles)
        storage.open_doors()
        for handle in handles:
            handle.result(WAIT_S)
        assert checkpointer.steps() == [1, 2]


def test_what_the_root_removes_may_stay_and_what_it_lacks_must(disk: Path, local: Path) -> None:
    root = disk / "run"
    options: dict[str, Any] = {"keep_last": 1}
    with Checkpointer(root, local=local, **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert directories(root) == ["step-00000003"]
    assert local_steps(local) == ["step-00000002", "step-00000003"]
    with Checkpointer(root, local=local, **options) as checkpointer:  # no step 2 once more
        assert checkpointer.restore(state(0)) == 3
        checkpointer.save(4, state(4)).result(WAIT_S)
        checkpointer.save(4, state(4)).result(WAIT_S)  # again, which replaces it
    assert directories(root) == ["step-00000004-again"]
    assert local_steps(local) == ["step-00000004", "step-00000004-again"]


def test_two_roots_in_one_local_directory(disk: Path, local: Path) -> None:
    for name, step in (("a", 1), ("b", 2)):
        with Checkpointer(disk / name / "run", local=local) as checkpointer:
            checkpointer.save(step, state(step))
    for name, step in (("a", 1), ("b", 2)):
        assert content(disk / name / "run", local)[0] == step
    assert len(directories(local)) == 2


# ---- what a restore takes from where ----


KILLED = """
import sys
from tests.kit.doubles import Deadly
from tests.kit.steps import state
from fastckpt import Checkpointer
from fastckpt.saving import pipeline

root, local, name = sys.argv[1:]

pipeline._current = pipeline.Pipeline(Deadly.at(name, f"{root}/step-00000002"))
with Checkpointer(root, local=local) as checkpointer:
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, state(2)).result()
"""


@pytest.fixture(params=["make_directory", "rename"])
def killed(request: pytest.FixtureRequest, disk: Path, local: Path) -> tuple[Path, Path]:
    """Root and local directory of a job that was killed after step 2 was committed locally."""
    run_python(KILLED, disk / "run", local, request.param, returncode=-9)
    with Checkpointer(disk / "run") as checkpointer:
        assert checkpointer.steps() == [1]
    return disk / "run", local


def test_killed_between_the_commits(killed: tuple[Path, Path]) -> None:
    """Step 2 is read from the local tier at once, and in the root when the next job ends."""
    root, local = killed
    step, taken = content(root, local)
    assert step == 2 and all(path.startswith(str(local)) for path in taken.values())
    assert content(root, None)[0] == 2
    assert directories(local_step(local, 2)) == sorted(
        [*directories(next(root.glob("step-00000002*"))), "drained"]
    )
    assert not [path for path in root.rglob("*") if ".tmp" in path.name]


def test_a_step_on_its_way_to_the_root_is_not_told_to_be_skipped(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the very one that is read from the tier meanwhile."""
    steps = PosixSteps(Storage(), str(disk / "run"))
    begun = steps.begin(5)
    assert candidates([steps], None) == [] and "its save was not" not in caplog.text
    assert candidates([PosixSteps(Storage(), steps.root)], None) == []
    assert "step-00000005: its save was not committed" in caplog.text
    caplog.clear()
    begun.abandon()
    os.mkdir(steps.path(begun.name))
    assert candidates([steps], None) == [] and "its save was not committed" in caplog.text


def test_killed_between_the_commits_and_the_local_tier_lost(killed: tuple[Path, Path]) -> None:
    root, local = killed
    shutil.rmtree(local)
    local.mkdir()
    assert content(root, local)[0] == 1
    with Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(2, state(2))
    assert directories(root) == ["step-00000001", "step-00000002"]


def test_killed_between_the_commits_and_a_local_shard_damaged(
    killed: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """It must not come into the root; the older step is restored."""
    root, local = killed
    flip(local_step(local, 2) / "rank-00000.safetensors", 0.5)
    assert content(root, local)[0] == 1
    assert "step-00000002" in caplog.text and "is damaged: CRC-32 mismatch" in caplog.text
    assert content(root, None)[0] == 1
    assert local_step(local, 2).exists(), "the root does not have it"


def test_a_restore_while_the_root_is_full(killed: tuple[Path, Path]) -> None:
    """What is whole locally needs no room in the root."""
    root, local = killed
    with doors() as storage:
        storage.faults["allocate", root] = errno.ENOSPC
        step, taken = content(root, local)
    assert step == 2 and all(path.startswith(str(local)) for path in taken.values())
    assert content(root, None)[0] == 1
    assert content(root, local)[0] == 2 and content(root, None)[0] == 2


DAMAGES = {
    "shard": lambda step: flip(step / "rank-00000.safetensors", 0.5),
    "half a shard": lambda step: os.truncate(step / "rank-00000.safetensors", 4096),
    "index": lambda step: flip(step / "rank-00000.json", 0.5),
    "objects": lambda step: flip(step / "objects.pt", 0.5),
    "no shard": lambda step: (step / "rank-00000.safetensors").unlink(),
}
FILES = {"index": "rank-00000.json", "objects": "objects.pt"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_locally_is_read_from_the_root(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    root = disk / "run"
    with Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(1))
    DAMAGES[damage](local_step(local, 1))
    caplog.set_level(logging.INFO)
    step, taken = content(root, local)
    damaged = FILES.get(damage, "rank-00000.safetensors")
    assert step == 1 and taken.pop(damaged) == str(root / "step-00000001" / damaged)
    assert len(taken) == 2 and all(path.startswith(str(local)) for path in taken.values())
    assert "step 1: 2 files read from" in caplog.text and "1 from the root" in caplog.text
    if damage != "no shard":
        assert f"reading '{root / 'step-00000001' / damaged}' instead" in caplog.text


def test_a_copy_whose_manifest_is_damaged_is_named(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        checkpointer.save(1, state(1))
    manifest = local_step(local, 1) / "manifest.json"
    flip(manifest, 0.5)
    step, taken = content(disk / "run", local)
    assert step == 1 and all(path.startswith(str(disk / "run")) for path in taken.values())
    assert f"skipping a copy of a step: {str(manifest)!r}" in caplog.text


def test_a_step_that_this_process_commits_meanwhile_is_not_called_uncommitted(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a drain does, while a restore lists the root."""
    with Checkpointer(disk / "a") as checkpointer:
        checkpointer.save(3, state(3))
    steps = PosixSteps(Storage(), str(disk / "b"))
    begun = steps.begin(3)
    listed = steps.incomplete()
    monkeypatch.setattr(steps, "incomplete", lambda: listed)
    manifest = PosixSteps(Storage(), str(disk / "a")).read(begun.name)
    begun.commit(manifest, durable=False)
    begun.close()
    assert listed == [begun.name] and candidates([steps], None, False, warn=True)
    assert "was not committed" not in caplog.text


def test_the_manifest_of_another_save_is_not_mixed_in(disk: Path, local: Path) -> None:
    """A step of the same number that was saved anew, past the tier, has other contents."""
    root = disk / "run"
    with Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(5))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
    step, taken = content(root, local)
    assert step == 1 and all(path.startswith(str(root)) for path in taken.values())


def test_who_waits_for_a_job_beside_takes_a_newer_step_that_came_instead(
    disk: Path, local: Path
) -> None:
    """As when that job could not copy the step to the root, and then copied the next one."""
    with Checkpointer(disk, options=SaveOptions(timeout_s=2)) as beside:
        beside.save(1, state(1)).result(WAIT_S)
        with Checkpointer(disk, local=local, options=SaveOptions(timeout_s=2)) as checkpointer:
            assert checkpointer.restore(state(999)) == 1
            tier, nonce = checkpointer._tier, "ab" * 16
            assert tier is not None
            newest = tier.root.committed()[0][0].manifest.sequence
            with closing(checkpointer._coordinator.begin("a look", 2)) as agreement:
                survey = Survey(tier, agreement)
                survey._order_of = {nonce: (2, newest + 1)}
                with pytest.raises(StorageError, match="another job has not copied step 2"):
                    survey.await_drain_beside(nonce)
                survey._order_of = {nonce: (2, newest)}
                beside.save(3, state(3)).result(WAIT_S)
                survey.await_drain_beside(nonce)


def test_steps_that_never_came_to_the_root_do_not_outrank_those_of_a_later_job(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later job has no tier, and so does not see them; one after that has it again."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Drain, "write", fails)
        with Checkpointer(disk, local=local, options=SaveOptions(on_error="warn")) as checkpointer:
            for step in (1, 2, 3):
                handle = checkpointer.save(step, state(step))
                assert handle.wait_local(WAIT_S)
                assert handle.exception(WAIT_S) is not None
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(101, state(101)).result(WAIT_S)
    target = state(999)
    with Checkpointer(disk, local=local) as checkpointer:
        assert checkpointer.restore(target) == 101
    assert_holds(target, 101)


def test_a_lost_local_tier_is_no_loss(disk: Path, local: Path) -> None:
    root = disk / "run"
    with Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(1))
    shutil.rmtree(next(local.iterdir()))
    step, taken = content(root, local)
    assert step == 1 and all(path.startswith(str(root)) for path in taken.values())


def test_a_deleted_step_does_not_come_back_from_the_nodes(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.delete(2)
        assert checkpointer.restore(state(0)) == 1
    assert local_steps(local) == ["step-00000001"]
    assert [name for name in directories(disk / "run") if "deleted-" not in name] == local_steps(
        local
    )


def test_notes_of_deleted_steps_do_not_grow_for_ever(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_NOTES_MAX", 4)
    with Checkpointer(disk / "run", local=local) as checkpointer:
        for step in range(9):
            checkpointer.save(step, {"step": step}).result()
            nonce = checkpointer._steps.read(step_name(step)).nonce
            checkpointer.delete(step)
            notes = pins.deleted(checkpointer._steps)
            assert nonce in notes and len(notes) <= 4 + 1
    assert len(notes) > 2


def test_a_step_that_is_asked_for_by_number(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=(local, 1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        for step in (1, 2, 3):
            found = state(999)
            assert checkpointer.restore(found, step) == step
            assert_holds(found, step)
            assert_holds(checkpointer.load(step), step)
        with pytest.raises(
            CheckpointError, match=r"no committed step 4: the newest steps are \[1, 2, 3\]"
        ):
            checkpointer.load(4)


# ---- a tier that cannot be used ----


@pytest.mark.filesystem
def test_a_full_tier_is_gone_past(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = disk / "run"
    with (
        mounted("tmpfs", disk, 64 * MIB) as local,
        Checkpointer(root, local=(local, 1)) as checkpointer,
    ):
        checkpointer.save(1, state(1)).result(WAIT_S)
        ballast = leave_free(local, MIB // 2)
        handle = checkpointer.save(2, state(2))
        assert not handle.wait_local(WAIT_S)
        stats = handle.result(WAIT_S)
        assert "No space" in stats.local_why and stats.local_committed_s is None
        assert "step 2 is saved directly to" in caplog.text
        assert local_steps(local) == ["step-00000001"]
        assert checkpointer.restore(state(0)) == 2
        ballast.unlink()
        assert checkpointer.save(3, state(3)).wait_local(WAIT_S)
        assert checkpointer.restore(state(0)) == 3
    assert content(root, None)[0] == 3


def test_the_tier_is_left_before_anything_is_made_in_the_root(disk: Path, local: Path) -> None:
    """All choose once: a step is never half in one and half in the other."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        storage.faults["allocate", local] = errno.ENOSPC
        handle = checkpointer.save(1, state(1))
        assert "No space" in handle.result(WAIT_S).local_why
        its = [each for each in storage.log if "step-00000001" in each.path]
    places = [each.path.startswith(str(root)) for each in its]
    assert places == sorted(places), "first operations in the tier, then those in the root"
    here = {each.name for each in its if each.path.startswith(str(local))}
    assert "create" in here and not here & {"write", "write_at", "sync"}


@pytest.mark.filesystem
def test_a_tier_that_was_unmounted_is_gone_past(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was mounted over, which may be the system's own disk, is not written to."""
    root = disk / "run"
    with mounted("tmpfs", disk) as local, Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        checkpointer._saves.wait()
        wait_until(lambda: not checkpointer._steps.incomplete(), "the save has ended")
        subprocess.run(["umount", "-l", str(local)], check=True)
        try:
            for step in (2, 3):
                handle = checkpointer.save(step, state(step))
                assert not handle.wait_local(WAIT_S)
                assert "no longer on the same file system" in handle.stats.local_why
            assert caplog.text.count("is saved directly to") == 1, "the same is told once"
            assert os.listdir(local) == []
            found = state(0)
            assert checkpointer.restore(found) == 3
            assert_holds(found, 3)
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "none", str(local)], check=True)


def test_a_tier_that_was_emptied_is_made_again(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        checkpointer.restore(state(0))  # when its end is over
        shutil.rmtree(local)
        assert checkpointer.save(2, state(2)).wait_local(WAIT_S)
        assert checkpointer.restore(state(0)) == 2


def test_a_tier_that_is_lost_before_the_drain(disk: Path, local: Path) -> None:
    """That save fails, as on a node that is lost; the next one does not."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        pipeline.current().drain()  # its end notes in the tier that it was drained
        storage.closed.append(root)
        handle = checkpointer.save(2, state(2))
        assert handle.wait_local(WAIT_S)
        shutil.rmtree(local)
        storage.open_doors()
        with pytest.raises(CorruptCheckpoint, match="is missing"):
            handle.result(WAIT_S)
        assert checkpointer.steps() == [1] and directories(root) == ["step-00000001"]
        checkpointer.save(3, state(3)).result(WAIT_S)
        assert checkpointer.restore(state(0)) == 3


@pytest.mark.parametrize("name", ["sync", "write_at"])
def test_a_tier_whose_disk_fails_is_used_no_more(disk: Path, local: Path, name: str) -> None:
    """The save that met it has nothing left to write elsewhere; the ones after go past."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        storage.faults[name, local] = errno.EIO
        with pytest.raises(StorageError, match="EIO"):
            checkpointer.save(2, state(2)).result(WAIT_S)
        stats = checkpointer.save(3, state(3)).result(WAIT_S)
        assert stats.local_committed_s is None and "EIO" in stats.local_why
        assert checkpointer.restore(state(0)) == 3
        assert checkpointer.steps() == [1, 3]


def test_a_slow_tier_is_used_no_more(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "write" and operation.path.startswith(str(local)):
                threading.Event().wait(0.5)
            return real()

    monkeypatch.setattr(node_place, "SLOW_S", 0.2)
    options = {"local": local, "durable": False}  # a sync of the root may be slow, too
    with process_on(Slow()), Checkpointer(disk / "run", **gathered(**options)) as checkpointer:
        assert checkpointer.save(1, state(1)).result(WAIT_S).local_committed_s is not None
        stats = checkpointer.save(2, state(2)).result(WAIT_S)
        assert stats.local_committed_s is None and "is slow" in stats.local_why
        assert checkpointer.restore(state(0)) == 2


def test_a_tier_is_not_slow_because_compression_is(
    disk: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes past it is compressed as well; a drain copies frames as they are."""
    real = FrameWriter.transfer

    def transfer(*args: Any) -> Any:
        threading.Event().wait(1.0)
        return real(*args)

    monkeypatch.setattr(node_place, "SLOW_S", 0.2)
    monkeypatch.setattr(FrameWriter, "transfer", transfer)
    with Checkpointer(disk / "run", local=local, codec="zstd") as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, state(step)).result(WAIT_S).local_why == ""


def test_what_a_later_job_drains_is_logged_as_that(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        storage.faults["allocate", root] = errno.ENOSPC
        handle = checkpointer.save(1, state(1, 5_000_000))
        assert handle.wait_local(WAIT_S) and handle.exception(WAIT_S) is not None
    with caplog.at_level(logging.INFO, "fastckpt"):
        with Checkpointer(root, local=local) as checkpointer:
            assert checkpointer.load()["name"] == "step 1"
        pipeline.current().drain()
    (told,) = [text for text in caplog.messages if text.startswith(("saved ", "drained "))]
    size = shown_size(handle.stats.nbytes)
    assert told.startswith(f"drained {str(root / 'step-00000001')!r}: {size} in ")
    assert "on the node" not in told


def test_a_drain_that_fails_is_told_and_made_up_for(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The root is full for a while: what was not drained stays, and the next job drains it."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=(local, 1)) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        storage.faults["allocate", root] = errno.ENOSPC
        for step in (2, 3, 4):
            handle = checkpointer.save(step, state(step))
            assert handle.wait_local(WAIT_S)
            with pytest.raises(StorageError, match="No space") as caught:
                handle.result(WAIT_S)
            assert not caught.value.visible  # in the root
        storage.faults.clear()
        assert directories(root) == ["step-00000001"]
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert "step-00000004 is only in the local tier: " in caplog.text
    assert directories(root) == ["step-00000001", "step-00000005"]
    assert local_steps(local) == [f"step-{step:08d}" for step in (2, 3, 4, 5)]
    assert content(root, local)[0] == 5
    with Checkpointer(root, local=(local, 1)) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4, 5] and checkpointer.latest() == 5
        checkpointer.save(6, state(6))
    assert local_steps(local) == ["step-00000006"]


def test_an_incomplete_step_that_is_saved_again_is_whole(disk: Path, local: Path) -> None:
    """No node had all of step 3. It is saved again, cannot be drained, and then stays."""
    root = disk / "run"
    with Checkpointer(root, local=local) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, state(step)).result(WAIT_S)
    shutil.rmtree(root / "step-00000003")
    for file in ("rank-00000.safetensors", "drained"):
        (local_step(local, 3) / file).unlink()
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(4, state(4)).result(WAIT_S)
        pipeline.current().drain()
        assert local_steps(local) == ["step-00000002", "step-00000004"]
        storage.faults["allocate", root] = errno.ENOSPC
        assert checkpointer.save(3, state(3)).exception(WAIT_S) is not None
        storage.faults.clear()
        checkpointer.save(5, state(5)).result(WAIT_S)
    assert local_steps(local) == ["step-00000003", "step-00000005"]
    assert content(root, local)[0] == 5


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_step_that_is_saved_again_past_the_tier_is_no_longer_there(
    disk: Path, local: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be that step again once the root has removed its own."""
    root, again = disk / "run", state(51)
    with doors() as storage:
        with Checkpointer(root, local=local, keep_last=2) as checkpointer:
            for step in (4, 5):
                checkpointer.save(step, state(step)).result(WAIT_S)
            if is_killed:  # before it could remove anything
                monkeypatch.setattr(node_place.LocalTier, "drop_replaced", lambda *_: None)
            storage.faults["allocate", local] = errno.ENOSPC
            handle = checkpointer.save(5, again)
            assert "No space" in handle.result(WAIT_S).local_why
        assert local_steps(local) == [
            f"step-{step:08d}" for step in ((4, 5) if is_killed else (4,))
        ]
        monkeypatch.undo()
        storage.faults.clear()
        with Checkpointer(root, local=local, keep_last=2) as checkpointer:
            assert checkpointer.restore(state(0)) == 5
            checkpointer.save(6, state(6)).result(WAIT_S)
    assert local_steps(local) == [f"step-{step:08d}" for step in (4, 6)]
    assert directories(root) == ["step-00000005-again", "step-00000006"]


# ---- a commit that may not be durable ----


class SyncFailsAfterRename(Recorder):
    """Directories below this one cannot be synced after a rename below it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._below = os.path.join(directory, "")
        self.failing = False

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if not operation.path.startswith(self._below):
            return real()
        if self.failing and operation.name == "sync_directory":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.failing |= operation.name == "rename"
        return real()


def test_a_local_commit_that_may_not_be_durable_is_drained(disk: Path, local: Path) -> None:
    """It outlives the process, which is all that the tier promises; then the tier is left alone."""
    double, root = SyncFailsAfterRename(local), disk / "run"
    with process_on(double), Checkpointer(root, local=local) as checkpointer:
        handle = checkpointer.save(1, state(1))
        assert handle.wait_local(WAIT_S)
        handle.result(WAIT_S)
        handle = checkpointer.save(2, state(2))
        handle.result(WAIT_S)
        assert "sync directory" in handle.stats.local_why
        assert not handle.wait_local(WAIT_S)
    assert content(disk / "run", None)[0] == 2
    assert local_steps(local) == ["step-00000001"]


def test_a_drained_step_that_may_not_be_durable_stays_in_the_local_tier(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double, root = SyncFailsAfterRename(disk / "run"), disk / "run"
    with process_on(double) as current, Checkpointer(root, local=local) as checkpointer:
        error = checkpointer.save(1, state(1)).exception(WAIT_S)
        assert isinstance(error, StorageError) and error.visible
        current.drain()
        double.failing = False
        assert "step-00000001 is also kept in the local tier" in caplog.text
        assert not local_step(local, 1).joinpath("drained").exists()
        assert content(root, None)[0] == 1


# ---- every operation ----


@pytest.fixture
def two(disk: Path, local: Path) -> Iterator[tuple[Path, Path]]:
    """A root and a local directory where syncs cost nothing."""
    with mounted("tmpfs", disk) as other:
        yield local, other


def life(base: tuple[Path, Path], storage: Storage | None, step: int, **options: Any) -> Any:
    """A job that restores and saves one step; what became of that, as (handle, error)."""
    handle: Any = None
    with process_on(storage):
        checkpointer = Checkpointer(base[0] / "run", local=(base[1], 1), **gathered(**options))
        try:
            handle = checkpointer.save(step, state(step))
            handle.wait_done()
            error = handle.exception()
        except CheckpointError as raised:
            error = raised
        with nullcontext() if error is None else pytest.raises(BaseException):
            checkpointer.close()
            if error is not None:
                raise error
    return handle, error


def operations(two: tuple[Path, Path], stride: int, **options: Any) -> Iterable[int]:
    """Numbers of operations of the second job's life, with one after the last: one in `stride` of
    them, and those about the commits in both tiers.
    """
    if stride == 1:
        return itertools.count()
    base = (two[0] / "whole", two[1] / "whole")
    for each in base:
        each.mkdir()
    life(base, None, 1, durable=False)
    storage = Recorder()
    assert life(base, storage, 2, **options)[1] is None
    commits = [
        number
        for number, each in enumerate(storage.log)
        if each.name == "rename" and "manifest" in each.path
    ]
    assert len(commits) == 2
    about = {number + more for number in commits for more in (0, 1)}
    return [*sorted({*range(0, len(storage.log), stride), *about}), 1 << 30]


@pytest.mark.filesystem
@pytest.mark.parametrize(
    ("code", "stride", "options"),
    [
        (errno.EIO, 17, {}),
        pytest.param(errno.EIO, 1, {}, marks=pytest.mark.torture),
        pytest.param(errno.ENOSPC, 3, {"codec": "zstd"}, marks=pytest.mark.torture),
    ],
    ids=["EIO of some", "EIO", "ENOSPC with zstd"],
)
def test_every_operation_may_fail(
    two: tuple[Path, Path], code: int, stride: int, options: dict[str, Any]
) -> None:
    """Nothing is lost by it: what a commit was told of is restored, in whichever tier it is."""
    seen, committed, failed = set[str](), 0, 0
    for number in operations(two, stride, **options):
        base = (two[0] / f"{number}", two[1] / f"{number}")
        for each in base:
            each.mkdir()
        _handle, error = life(base, None, 1, durable=False)
        assert error is None
        storage = FailAt(number, code)
        handle, error = life(base, storage, 2, **options)
        if number >= len(storage.log):
            break
        operation = storage.log[number]
        what = f"operation {number}, {operation}, failed"
        seen.add(operation.name)
        step, _taken = content(base[0] / "run", base[1], durable=False)
        if error is None:
            committed += 1
            assert step == 2, what
            assert content(base[0] / "run", None)[0] == 2, what
        else:
            failed += 1
            assert isinstance(error, StorageError) and error.errno == code, f"{what}: {error!r}"
            is_local = handle.stats.local_committed_s is not None
            assert step == 2 if is_local else step in (1, 2), what
        with Checkpointer(base[0] / "run", local=(base[1], 1), keep_last=1) as last:
            last.save(3, state(3))
        assert directories(base[0] / "run") == ["step-00000003"], what
        assert local_steps(base[1]) == ["step-00000003"], what
        for each in base:
            shutil.rmtree(each)
    assert min(committed, failed) > 20 / stride
    assert stride > 1 or seen >= {"make_directory", "create", "write_at", "sync", "rename"}


@pytest.mark.filesystem
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.torture)])
def test_any_operation_may_be_the_last(two: tuple[Path, Path], stride: int) -> None:
    """From some operation on nothing happens any more: a process that was killed there."""
    owner, steps = dead_pid(), set()
    for number in operations(two, stride):
        base = (two[0] / f"{number}", two[1] / f"{number}")
        for each in base:
            each.mkdir()
        life(base, None, 1, durable=False)
        storage = FailAt(number, errno.EIO, lasting=True)
        handle, error = life(base, storage, 2)
        if number >= len(storage.log):
            break
        what = f"operation {number}, {storage.log[number]}, was the last"
        for path in [path for each in base for path in each.rglob("*.tmp")]:
            path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{owner}-")))
        step, _taken = content(base[0] / "run", base[1], durable=False)
        steps.add(step)
        is_local = handle is not None and handle.stats.local_committed_s is not None
        assert step == 2 if is_local or error is None else step in (1, 2), what
        assert content(base[0] / "run", None)[0] == step, what
        with Checkpointer(base[0] / "run", local=(base[1], 1), keep_last=1) as last:
            last.save(3, state(3))
        assert directories(base[0] / "run") == ["step-00000003"], what
        assert local_steps(base[1]) == ["step-00000003"], what
        for each in base:
            shutil.rmtree(each)
    assert steps == {1, 2}


# ---- memory and size ----


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_drain_of_many_blocks_with_few(disk: Path, local: Path, codec: str | None) -> None:
    """Both directions of a copy share a budget of two blocks with the saves that follow."""
    elements = 13_000_000  # two chunks, seven blocks
    with process_on(None, 2 * BLOCK_BYTES) as current:
        with Checkpointer(disk / "run", local=local, codec=codec) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state(step, elements))
        assert current.staging.engine().arena_blocks == 2
        found = state(999, elements)
        with Checkpointer(disk / "run") as checkpointer:
            for step in (1, 2, 3):
                assert checkpointer.restore(found, step) == step
                assert_holds(found, step, elements)


def test_one_block_of_memory_is_too_little_for_a_tier(disk: Path, local: Path) -> None:
    with (
        process_on(None, BLOCK_BYTES),
        Checkpointer(disk / "run", local=local) as checkpointer,
    ):
        handle = checkpointer.save(1, state(1))
        assert not handle.wait_local(WAIT_S) and "one block" in handle.stats.local_why
        assert checkpointer.restore(state(0)) == 1


def test_a_drain_is_paced_and_a_local_commit_is_not(disk: Path, local: Path) -> None:
    nbytes, rate = 24_000_000, 16e6
    with Checkpointer(disk / "run", local=local, drain_rate=rate) as checkpointer:
        handle = checkpointer.save(1, state(1, nbytes // 4))
        handle.result(WAIT_S)
    stats = handle.stats
    assert stats.local_committed_s is not None and stats.committed_s is not None
    assert stats.committed_s - stats.local_committed_s > 0.8 * nbytes / rate
    assert stats.paced_s > 0 and "drain_rate 16 MB/s" in stats.pacing


def test_a_close_that_is_interrupted_once_still_waits_for_the_drain(
    disk: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(disk / "run", local=local, drain_rate=8e6)
    handle = checkpointer.save(1, state(1, 4_000_000))
    assert handle.wait_local(WAIT_S)
    with interrupted_in("wait_or_give_up"):
        checkpointer.close()
    assert "Press Ctrl-C again to abandon it" in caplog.text
    assert handle.done() and directories(disk / "run") == ["step-00000001"]
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.save(2, state(2))
    checkpointer.close()


@pytest.mark.filesystem
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_what_goes_past_the_tier_is_paced(disk: Path, codec: str | None) -> None:
    """It is the root that is to be spared, whichever way bytes come there."""
    nbytes, rate = 24_000_000, 16e6
    paced: dict[str, Any] = {"drain_rate": rate, "max_writers": 1}
    with mounted("tmpfs", disk, 64 * MIB) as local:
        leave_free(local, MIB)
        with Checkpointer(
            disk / "run", local=local, codec=codec, **gathered(**paced)
        ) as checkpointer:
            stats = checkpointer.save(1, state(1, nbytes // 4)).result(WAIT_S)
            found = state(999, nbytes // 4)
            assert checkpointer.restore(found) == 1
    assert_holds(found, 1, nbytes // 4)
    assert "No space" in stats.local_why and "drain_rate 16 MB/s" in stats.pacing
    wanted_s = 0.9 * (nbytes - BLOCK_BYTES) / rate  # frames are of blocks, and one is no wait
    assert stats.written_s is not None and stats.written_s > wanted_s
    assert stats.paced_s > 0
