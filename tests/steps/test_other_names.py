"""Promise: a step that was copied, renamed or linked to is a step, for whatever takes a path; and a
root's retention removes none that has a name of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.errors import CheckpointError, CorruptCheckpoint
from tests.kit.steps import assert_holds, directories, restored, state

WAIT_S = 60.0
STEP = "step-00000200"


def copied(run: Path) -> Path:
    return Path(shutil.copytree(run / STEP, run / "best"))


def renumbered(run: Path) -> Path:
    return Path(shutil.copytree(run / STEP, run.parent / "step-00000007"))


def linked(run: Path) -> Path:
    shutil.move(run / STEP, run.parent / "kept")
    (run / "best").symlink_to("../kept")
    return run / "best"


def itself(run: Path) -> Path:
    return run / STEP


OTHERS = [copied, renumbered, linked, itself]


@pytest.fixture
def run(disk: Path) -> Path:
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(200, state(200)).result(WAIT_S)
    return disk / "run"


@pytest.mark.parametrize("other", OTHERS)
def test_it_is_restored_by_its_path(other: Callable[[Path], Path], run: Path) -> None:
    path = other(run)
    with Checkpointer(path) as checkpointer:
        assert (checkpointer.steps(), checkpointer.latest()) == ([200], 200)
        for step in (None, 200):
            found = state(999)
            assert checkpointer.restore(found, step, required=True) == 200
            assert_holds(found, 200)
        assert_holds(checkpointer.load(), 200)
        assert {*map(Path, checkpointer.restored_from.values())} <= {*path.resolve().iterdir()}
        with pytest.raises(
            CheckpointError, match=r"no committed step 7: the newest steps are \[200\]"
        ):
            checkpointer.restore(state(999), 7)
        with pytest.raises(ValueError, match="it is itself a step: pass "):
            checkpointer.save(8, state(8))
    with fastckpt.open(path) as tensors:
        assert tensors.facts["step"] == 200 and tensors.is_verified
    with pytest.raises(
        IsADirectoryError, match=r"it is a step: load it with fastckpt.Checkpointer"
    ):
        fastckpt.load(path)


@pytest.mark.parametrize("other", OTHERS)
def test_the_commands_take_it(
    other: Callable[[Path], Path], run: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(other(run))
    assert main(["ls", path, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["steps"]
    assert row["step"] == 200 and Path(row["path"]) == Path(path).resolve()
    for file in ("", "objects.pt", "rank-00000.safetensors"):
        assert main(["verify", f"{path}/{file}"]) == 0, capsys.readouterr()
    assert main(["inspect", path]) == 0
    assert main(["convert", path, str(disk / "new"), "--to", "step"]) == 0
    assert directories(disk / "new") == [STEP]


def test_damage_is_found_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = copied(run)
    shard = best / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with Checkpointer(best) as checkpointer, pytest.raises(CorruptCheckpoint, match="best"):
        checkpointer.restore(state(999))
    for path in (run, best, shard):
        assert main(["verify", str(path)]) == 1
        assert "damaged" in capsys.readouterr().out
    (best / "objects.pt").unlink()  # one safetensors file is left, beside the manifest
    with pytest.raises(CorruptCheckpoint, match=r"objects\.pt"):
        fastckpt.open(best)
    (best / "manifest.json").unlink()
    with fastckpt.open(shard) as tensors, Checkpointer(best) as checkpointer:
        assert not tensors.is_verified and checkpointer.restore(state(999)) is None


@pytest.mark.parametrize("other", [copied, renumbered, linked])
def test_retention_lets_it_be(other: Callable[[Path], Path], run: Path) -> None:
    path = other(run)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with Checkpointer(run, keep_last=1) as checkpointer:
        for step in (300, 400):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert {*directories(run)} - {"best"} == {"step-00000400"}
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert restored(path) == 200


def test_in_a_root_a_name_has_to_tell_the_step(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(run / STEP, run / "step-00000900")
    with Checkpointer(run, keep_last=1) as checkpointer:
        assert checkpointer.restore(state(1)) == 200
        assert "the manifest belongs to step 200, not to 'step-00000900'" in caplog.text
        with pytest.raises(
            CheckpointError, match=r"no committed step 900: the newest steps are \[200\]"
        ):
            checkpointer.restore(state(1), 900)
        for step in (300, 400):
            checkpointer.save(step, {"w": torch.ones(3)}).result(WAIT_S)
    assert directories(run) == ["step-00000400", "step-00000900"]
    assert (main(["verify", str(run)]), main(["verify", str(run / "step-00000900")])) == (1, 0)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_named_as_a_step_and_is_none_is_told(
    kind: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run) as checkpointer:
        checkpointer.save(300, state(300)).result(WAIT_S)
    newest = run / "step-00000300"
    shutil.move(newest, run.parent / "moved")
    newest.symlink_to("../moved") if kind == "link" else newest.write_bytes(b"")
    assert restored(run) == 200
    assert f"skipping {newest}: it is a link or a file, not a directory" in caplog.text
