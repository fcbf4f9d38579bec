"""Promise: the best steps and the pinned ones stay, whatever is missing, equal or killed, and
whatever another process removes at the same time; and a step goes when it is told to.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.steps.pins import is_pinned, pin, unpin
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import (
    Crash,
    FailAt,
    Operation,
    PowerCut,
    Recorder,
    T,
    assert_old_or_new,
    dead_pid,
    plant,
    power_cuts,
    process_on,
)
from tests.kit.mounts import mounted, run_as_root
from tests.kit.options import gathered
from tests.kit.steps import directories, place_of_commit
from tests.kit.storm import Storm

WAIT_S, SEED = 60.0, 20261126
BEST = ("val_loss", "min", 2)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((9,), step), "n": step}


def saved(root: Path, losses: dict[int, Any], **options: Any) -> list[int]:
    """Saves steps with these metrics, by a job of its own; the steps there are then."""
    with Checkpointer(
        root, **gathered(**{"keep_last": 1, "keep_best": BEST, **options})
    ) as checkpointer:
        for step, loss in losses.items():
            metrics = None if loss is None else {"val_loss": loss}
            checkpointer.save(step, state(step), metrics=metrics).result(WAIT_S)
    return left(root)


def left(root: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in directories(root) if name.startswith("step-")]


def whole(root: Path) -> list[int]:
    """The steps that are whole."""
    with process_on(None), Checkpointer(root) as checkpointer:
        steps = checkpointer.steps()
        assert [checkpointer.load(step)["n"] for step in steps] == steps
    return steps


# ---- metrics ----


def test_metrics_are_in_the_manifest(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, given = (
        memory / "run",
        {
            **{"a": 2, "b": torch.tensor(0.5), "c": numpy.float32(0.25), "d": None, "e": "good"},
            **{"f": math.nan, "g": -math.inf, "h\n": 1e-300},
        },
    )
    kept = {"a": 2.0, "b": 0.5, "c": 0.25, "e": "good", "f": "nan", "g": "-inf", "h\n": 1e-300}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1), metrics=given).result(WAIT_S)
        checkpointer.save(2, state(2), metrics={"d": None}).result(WAIT_S)
        checkpointer.pin(2)
        assert [checkpointer.best("a"), checkpointer.best("d"), checkpointer.best("f")] == [
            *(1, None, None)
        ]
    assert main(["ls", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [(row["metrics"], row["pinned"]) for row in rows] == [({}, True), (kept, False)]
    assert main(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 rank  pinned  committed" in lines[0] and "  h\\n 1e-300  committed" in lines[1]


# ---- the best ----


@pytest.mark.parametrize(
    ("losses", "options", "expected", "best"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}, {}, [2, 3, 5], 2),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}, {"keep_last": 2}, [2, 3, 4, 5], 2),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}, {"keep_every": 4}, [2, 3, 4, 5], 2),
        ({1: 3.0, 2: 5.0, 3: 4.0, 4: 1.0}, {"keep_best": ["val_loss", "max", 1]}, [2, 4], 2),
        ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {}, [1, 2, 4], 1),  # of equal ones the first
        ({1: 2.0, 2: 1.0, 3: math.nan, 4: None, 5: "bad", 6: -math.inf}, {}, [1, 2, 6], 2),
        ({1: 9.0, 2: None, 3: None}, {}, [1, 3], 1),
        ({1: None, 2: None, 3: None}, {}, [3], None),
    ],
)
def test_the_best_stay(
    losses: dict[int, Any], options: Any, expected: list[int], best: int | None, memory: Path
) -> None:
    root = memory / "run"
    assert saved(root, losses, durable=False, **options) == expected
    by = options.get("keep_best", BEST)
    with Checkpointer(root, keep_last=1, keep_best=by) as checkpointer:
        assert checkpointer.best() == checkpointer.best(*by[:2]) == best


def test_resumed_runs_go_on_with_what_is_there(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory / "run"
    assert saved(root, {1: 0.1, 2: 0.2, 3: 0.3}) == [1, 2, 3]
    assert saved(root, {4: 0.15, 5: 0.4}) == [1, 4, 5]
    assert saved(root, {2: 0.5}) == [1, 2, 4]  # it has gone back
    assert saved(root, {1: 9.0, 6: 9.0}) == [2, 4, 6]  # and has saved the best anew, which it was
    assert saved(root, {7: 9.0}, keep_best=None) == [7]
    assert not caplog.messages
    with Checkpointer(root, keep_last=1, keep_best=BEST) as checkpointer:
        for step in (8, 9):
            checkpointer.save(step, state(step), metrics={"val_los": 1.0}).result(WAIT_S)
    (told,) = caplog.messages
    assert "step 8 are 'val_los', but a step without 'val_loss', which keep_best uses" in told


def test_the_first_removal_warns_if_no_step_has_the_metric(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory / "run"
    assert saved(root, {1: None}) == [1]
    assert not caplog.messages
    assert saved(root, {2: None, 3: None}) == [3]
    (told,) = caplog.messages
    assert "no step has the metric 'val_loss' that keep_best uses" in told
    assert saved(root, {4: 1.0, 5: None, 6: None}) == [4, 6]
    assert caplog.messages == [told], "step 4 has one"


def test_the_best_is_told_when_saves_have_ended_and_by_its_own_mode(memory: Path) -> None:
    with Checkpointer(memory / "run", keep_last=3, keep_best=("acc", "max", 1)) as checkpointer:
        for step, metrics in enumerate([{"acc": 1, "loss": 1}, {"acc": 2, "loss": 2}, {"acc": 3}]):
            checkpointer.save(step, {"w": torch.full((1 << 20,), float(step))}, metrics=metrics)
            assert checkpointer.best() == checkpointer.best("acc") == step
        assert checkpointer.best("acc", "min") == checkpointer.best("loss") == 0
        assert checkpointer.best("loss", "max") == 1


def test_a_pinned_step_that_was_saved_again_does_not_come_back(memory: Path) -> None:
    with Checkpointer(memory / "run", keep_last=2) as checkpointer:
        checkpointer.save(4, state(4)).result(WAIT_S)
        checkpointer.pin(4)
        for step in (4, 5, 6, 7, 8):
            checkpointer.save(step, state(step + 100)).result(WAIT_S)
    with Checkpointer(memory / "run", keep_last=2) as checkpointer:
        assert checkpointer.steps() == [4, 7, 8]
        found = state(0)
        assert checkpointer.restore(found, 4) == 4 and found["n"] == 104


def test_a_step_that_cannot_be_removed_is_told_and_holds_up_no_other(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = Storage.remove

    def refused(storage: Storage, path: str) -> None:
        if "step-00000001" in path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        remove(storage, path)

    with Checkpointer(memory / "run", keep_last=1) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        monkeypatch.setattr(Storage, "remove", refused)
        with pytest.raises(StorageError, match=r"remove.*step-00000001"):
            checkpointer.delete(1)
        for step in (2, 3):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert left(memory / "run") == [1, 3]
    assert "could not be removed: remove" in caplog.text


def test_a_damaged_step_takes_no_place_among_the_best(memory: Path) -> None:
    root = memory / "run"
    saved(root, {1: 0.3, 2: 0.2, 3: 0.1}, keep_last=3)
    objects = root / "step-00000003" / "objects.pt"
    objects.write_bytes(objects.read_bytes()[:-9] + b"123456789")
    with Checkpointer(root, keep_last=1, keep_best=BEST) as checkpointer:
        assert checkpointer.best() == 3
        assert checkpointer.restore(state(0)) == 2
        assert checkpointer.best() == 2
        checkpointer.save(4, state(4), metrics={"val_loss": 9.0}).result(WAIT_S)
        checkpointer.save(5, state(5), metrics={"val_loss": 9.0}).result(WAIT_S)
    assert left(root) == [1, 2, 3, 5]


def test_wrong_arguments_are_refused(memory: Path) -> None:
    for wrong, told in (
        (("val_loss", "least", 3), "the mode of keep_best is 'least'"),
        (("val_loss", "min", 0), "the count of keep_best is 0, must be at least 1"),
        ("val_loss", "must be a metric, "),
        (("val_loss", "min"), "must be a metric, "),
    ):
        with pytest.raises(ValueError, match=told):
            Checkpointer(memory, keep_last=1, keep_best=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_best has no effect without keep_last"):
        Checkpointer(memory, keep_best=BEST)
    with Checkpointer(memory) as checkpointer:
        with pytest.raises(ValueError, match="pass one, or keep_best="):
            checkpointer.best()
        with pytest.raises(ValueError, match="mode is 'least'"):
            checkpointer.best("a", "least")  # type: ignore[arg-type]


# ---- pins ----


def test_a_pinned_step_stays_until_it_is_unpinned(memory: Path) -> None:
    root = memory / "run"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.pin(1)  # which waits for the commit
        checkpointer.pin(1)
    assert saved(root, {2: None, 3: None}) == [1, 3]
    with Checkpointer(root) as checkpointer:
        with pytest.raises(CheckpointError, match=r"pinned: call unpin\(1\) first"):
            checkpointer.delete(1)
        checkpointer.save(1, {"w": torch.zeros(9), "n": 1}).result(WAIT_S)
        assert left(root) == [1, 1, 3]  # the pinned one, and the one that is step 1 now
        assert checkpointer.load(1)["w"].sum() == 0
        checkpointer.unpin(1)
        checkpointer.unpin(1)
        with pytest.raises(
            CheckpointError, match=r"no committed step 7: the newest steps are \[1, 3\]"
        ):
            checkpointer.pin(7)
        with pytest.raises(CheckpointError, match="no committed step 7"):
            checkpointer.unpin(7)
    (root / "step-00000003" / "pinned").touch()  # as from a shell
    assert saved(root, {4: None}) == [3, 4]


@pytest.mark.parametrize("target", ["gone", "pinned", None])
def test_whatever_is_called_pinned_is_a_pin(memory: Path, target: str | None) -> None:
    """A link to nothing, a link to itself, a directory."""
    root = memory / "run"
    saved(root, {1: None})
    odd = root / "step-00000001" / "pinned"
    if target is None:
        odd.mkdir()
    else:
        odd.symlink_to(target)
    assert saved(root, {2: None, 3: None}) == [1, 3]
    with Checkpointer(root) as checkpointer:
        checkpointer.pin(1)
        with pytest.raises(CheckpointError, match=r"pinned: call unpin\(1\) first"):
            checkpointer.delete(1)
        if target is not None:
            checkpointer.unpin(1)
    assert saved(root, {4: None}) == ([4] if target is not None else [1, 4])


def test_a_step_is_deleted_unless_it_is_read(memory: Path) -> None:
    root = memory / "run"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        checkpointer.delete(3)
        assert (checkpointer.latest(), left(root)) == (2, [1, 2])
        with (
            PosixSteps(Storage(), str(root)).hold("step-00000001"),
            pytest.raises(CheckpointError, match=r"step-00000001.* is being read"),
        ):
            checkpointer.delete(1)
        checkpointer.delete(1)
        with pytest.raises(
            CheckpointError, match=r"no committed step 1: the newest steps are \[2\]"
        ):
            checkpointer.delete(1)
        checkpointer.save(4, state(4)).result(WAIT_S)
    assert whole(root) == [2, 4]
    with Checkpointer(root / "step-00000002") as checkpointer:
        for change in (checkpointer.pin, checkpointer.unpin, checkpointer.delete):
            with pytest.raises(ValueError, match="it is itself a step: pass "):
                change(2)


@pytest.mark.filesystem
def test_a_step_on_a_read_only_file_system_is_not_deleted(disk: Path) -> None:
    with mounted("tmpfs", disk) as mount:
        root = mount / "run"
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state(1))
        run_as_root("mount", "-o", "remount,ro", str(mount))
        try:
            with pytest.raises(StorageError, match=r"step-00000001/manifest.*read-only") as caught:
                Checkpointer(root).delete(1)
        finally:
            run_as_root("mount", "-o", "remount,rw", str(mount))
        assert caught.value.errno == errno.EROFS
        assert whole(root) == [1]


class Stale(Recorder):
    """Another host removes a step, and a manifest that is opened then has a stale handle, as on
    NFS.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if (operation.name, operation.path) == ("open lock", str(self._path)):
            shutil.rmtree(self._path.parent)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real()


def test_a_step_that_another_host_removes_is_deleted(memory: Path) -> None:
    root = memory / "run"
    saved(root, {1: None})
    with process_on(Stale(root / "step-00000001" / "manifest.json")):
        Checkpointer(root).delete(1)
    assert whole(root) == []


class Beside(Recorder):
    """Another process does something when a step of this one is locked, just before or after."""

    def __init__(self, path: Path, other: Callable[[], None], *, is_before: bool) -> None:
        super().__init__(by_engine=True)
        self._path, self._other, self._is_before = str(path), other, is_before

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        is_it = operation.name == "lock" and operation.path == self._path
        if is_it and self._is_before:
            self._other()
        result = real()
        if is_it and not self._is_before:
            self._other()
        return result


@pytest.mark.parametrize("is_before", [True, False])
def test_a_pin_beside_the_retention_of_another_process(memory: Path, is_before: bool) -> None:
    """Either it is in time, or it is told that the step is gone."""
    root, told = memory / "run", list[BaseException | None]()
    saved(root, {1: None})

    def pinned() -> None:
        try:
            pin(PosixSteps(Storage(), str(root)), 1)
            told.append(None)
        except CheckpointError as error:
            told.append(error)

    pinning = threading.Thread(target=pinned)

    def other() -> None:
        pinning.start()
        if is_before:
            pinning.join(WAIT_S)

    storage = Beside(root / "step-00000001" / "manifest.json", other, is_before=is_before)
    with process_on(storage):
        expected = [1, 2] if is_before else [2]
        assert saved(root, {2: None}) == expected
    pinning.join(WAIT_S)
    assert whole(root) == expected
    (error,) = told
    assert error is None if is_before else "no committed step 1" in str(error)


# ---- the last operation before a power cut ----


@pytest.mark.parametrize("change", [pin, unpin])
def test_any_operation_of_a_pin_may_be_the_last(
    memory: Path, change: Callable[[PosixSteps, int], None]
) -> None:
    """The step is there in any case; once the call has returned, so is the change."""
    before = memory / "before"
    saved(before / "run", {1: None})
    if change is unpin:
        pin(PosixSteps(Storage(), str(before / "run")), 1)

    def call(storage: Crash, live: Path) -> bool:
        change(PosixSteps(storage, str(live / "run")), 1)
        return True

    def find(after: Path) -> bool:
        assert whole(after / "run") == [1]
        return is_pinned(PosixSteps(Storage(), str(after / "run")), "step-00000001")

    assert_old_or_new(power_cuts(before, call, find), change is unpin, change is pin, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_operation_of_a_removal_may_be_the_last(memory: Path, storm: Storm) -> None:
    """Whatever is lost, the best steps, the pinned one and the newest are whole: after each
    operation in `make torture`; in `make test` after the first and the last ones, and some others.
    """
    before, live = memory / "before", memory / "live"
    saved(before / "run", {1: 0.2, 2: 0.1, 3: 0.3, 4: None}, keep_last=9)
    pin(PosixSteps(Storage(), str(before / "run")), 1)

    def crashed(count: int) -> Crash:
        shutil.copytree(before, live)
        storage = Crash(live, count)
        with process_on(storage), suppress(PowerCut):  # what it is for
            options: dict[str, Any] = {"keep_last": 1, "keep_best": (*BEST[:2], 1)}
            Checkpointer(live / "run", **options).save(5, state(5)).exception(WAIT_S)
        return storage

    storage = crashed(10**6)
    assert left(live / "run") == [1, 2, 5]
    shutil.rmtree(live)
    # What comes before the commit is others' business.
    counts = range(int(place_of_commit(storage)[1]) + 1, len(storage.log) + 1)
    seen = set()
    for count in storm.some(counts, 8):
        storage = crashed(count)
        for label, image in storage.images(SEED + count, 0):
            key = hash(tuple(image.items()))
            if key in seen:
                continue
            seen.add(key)
            plant(image, memory / "after", dead_pid())
            steps = whole(memory / "after" / "run")
            assert {1, 2, 5} <= {*steps}, f"{count} operations; survived: {label}"
            shutil.rmtree(memory / "after")
        shutil.rmtree(live)
    assert len(seen) > 7


def test_a_pin_that_fails_is_an_error(memory: Path) -> None:
    saved(memory / "run", {1: None})
    failed, swallowed = set(), set()
    for number in itertools.count():
        storage = FailAt(number, errno.EIO)
        try:
            pin(PosixSteps(storage, str(memory / "run")), 1)
            swallowed |= {operation.name for operation in storage.log[number : number + 1]}
        except StorageError:
            failed.add(storage.log[number].name)
        if number >= len(storage.log):
            break
        (memory / "run" / "step-00000001" / "pinned").unlink(missing_ok=True)
    assert failed >= {"create", "sync", "sync_directory"} and failed.isdisjoint(swallowed)
