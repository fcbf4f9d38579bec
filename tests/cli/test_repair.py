"""`fastckpt repair` finds what dead saves left, removes it when told to, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.cli import main
from fastckpt.storage import atomic
from tests.doubles import FailAlways
from tests.interpreters import Program
from tests.steps.test_checkpointer import process_on

LEAVES = """
import os, signal, sys
import torch, fastckpt
from fastckpt.storage.file_system import Storage
def sync(self, fd):
    print("there", flush=True)
    if sys.argv[3] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
Storage.sync = sync
state = {"w": torch.ones(1 << 20)}
if sys.argv[1] == "step":
    fastckpt.Checkpointer(sys.argv[2]).save(7, state).result()
else:
    fastckpt.save(state, sys.argv[2] + "/a.pt").result()
"""


def repaired(
    capsys: pytest.CaptureFixture[str], path: Path, *options: str, status: int
) -> list[Any]:
    assert main(["repair", str(path), *options, "--json"]) == status
    found: list[Any] = json.loads(capsys.readouterr().out)["debris"]
    return found


@pytest.mark.parametrize("kind", ["step", "file"])
def test_what_a_killed_save_left(kind: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(1 << 20)}).result(60)
    torch.save({}, disk / "mine.pt")
    kept = sorted(os.listdir(disk))
    assert Program(LEAVES, kind, disk, "dies").wait(60) == -signal.SIGKILL
    (found,) = repaired(capsys, disk, status=1)
    assert found["nbytes"] > 1 << 22 and not found["removed"] and os.path.exists(found["path"])
    assert main(["repair", str(disk)]) == 1
    assert found["what"] in capsys.readouterr().out
    (found,) = repaired(capsys, disk, "--yes", status=0)
    assert found["removed"] and sorted(os.listdir(disk)) == kept
    assert repaired(capsys, disk, status=0) == []
    with fastckpt.Checkpointer(disk) as checkpointer:
        assert checkpointer.steps() == [1]


@pytest.mark.parametrize("kind", ["step", "file"])
def test_a_save_that_lives_is_left_alone(
    kind: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(LEAVES, kind, disk, "lives")
    assert program.stdout is not None and program.stdout.readline() == "there\n"
    assert repaired(capsys, disk, "--yes", status=0) == []
    program.communicate("\n" * 9, 60)
    assert program.returncode == 0


def test_damaged_and_foreign_directories_stay(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(1 << 20)}).result(60)
    (disk / "step-00000001" / "manifest.json").write_text("{}")
    (disk / "step-00000002").mkdir()
    (disk / "step-00000002" / "notes.txt").write_text("mine")
    before = sorted(path for path in disk.rglob("*"))
    assert repaired(capsys, disk, "--yes", status=0) == []
    assert sorted(path for path in disk.rglob("*")) == before


def test_names_that_are_not_ours_and_links_in_a_circle(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(atomic.temporary_path(str(disk / "a"))).name
    dead = mine.replace(f"-{os.getpid()}-", "-999999-")
    (disk / dead).mkdir()
    (disk / dead / "circle").symlink_to("circle")
    (disk / dead[1:]).write_text("mine")
    (found,) = repaired(capsys, disk, "--yes", status=0)
    assert found["path"] == str(disk / dead) and os.listdir(disk) == [dead[1:]]


def test_a_directory_that_a_dead_save_set_aside_gets_its_name_back(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = f"-{os.getpid()}-"
    for name in ("run\x1b", "taken"):
        aside = Path(atomic.temporary_path(str(disk / name)).replace(mine, "-999999-"))
        (aside / atomic.REPLACED).mkdir(parents=True)
        (aside / atomic.REPLACED / "w").write_text("old")
    (disk / "taken").mkdir()
    assert main(["repair", str(disk)]) == 1
    lines = capsys.readouterr().out.splitlines()
    back = r"a temporary directory that holds run\x1b, which gets its name back, "
    assert [back in line for line in lines] == ["run" in line for line in lines]
    assert len(lines) == 2 and all("a temporary directory" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    found = repaired(capsys, disk, "--yes", status=0)
    assert all(each["removed"] for each in found)
    assert sorted(os.listdir(disk)) == ["run\x1b", "taken"]
    assert (disk / "run\x1b" / "w").read_text() == "old" and not any((disk / "taken").iterdir())


def test_what_cannot_be_listed_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "file").write_text("")
    assert main(["repair", str(disk / "file")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(disk / "file") in err and "ENOTDIR" in err
    (disk / "step-00000001").mkdir()
    for name in ("names", "directories"):
        with process_on(FailAlways(name, errno.EACCES)):
            assert main(["repair", str(disk), "--yes"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(disk) in err and "EACCES" in err


def test_a_missing_directory_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(disk / "x")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(disk / "x") in err
