"""`fastckpt ls` lists the steps of a root, and tells what is not as the manifest says."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.cli import main
from fastckpt.formats.step_names import tier_name
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import FailAlways, process_on


def listed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[Any]:
    assert main(["ls", *arguments, "--json"]) == status
    steps: list[Any] = json.loads(capsys.readouterr().out)["steps"]
    return steps


def saved(root: Path, *numbers: int) -> None:
    with fastckpt.Checkpointer(root) as checkpointer:
        for number in numbers:
            checkpointer.save(number, {"w": torch.ones(600_000), "n": number}).result(60)


def test_steps_are_listed_the_last_first(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(disk / "run", 10, 30, 20)
    (disk / "run" / "step-00000040").mkdir()
    rows = listed(capsys, str(disk / "run"))
    assert [(row.get("step"), row["state"]) for row in rows] == [
        (20, "committed"),
        (30, "committed"),
        (10, "committed"),
        (None, "not committed"),
    ]
    files = os.scandir(disk / "run" / "step-00000020")
    nbytes = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    assert rows[0]["nbytes"] == nbytes and rows[0]["ranks"] == 1
    assert main(["ls", str(disk / "run")]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("step-00000020  root  2.30 MiB  ") and line.endswith("1 rank  committed")


def test_an_export_named_as_a_step_is_no_save_that_was_not_committed(
    disk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    root = disk / "run"
    fastckpt.export({"w": torch.ones(3)}, root / "step-00000007").result(60)
    assert main(["ls", str(root)]) == 1
    assert "not committed" not in capsys.readouterr().err
    saved(root, 1)
    assert [row["state"] for row in listed(capsys, str(root))] == ["committed"]
    with fastckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"w": torch.ones(600_000), "n": 0}) == 1
    assert "not committed" not in caplog.text


def test_damage_that_sizes_tell(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = disk / "run"
    saved(root, 1, 2, 3, 4)
    os.truncate(root / "step-00000002" / "objects.pt", 100)
    (root / "step-00000003" / "rank-00000.json").unlink()
    (root / "step-00000004" / "manifest.json").write_text("{}")
    rows = {row["name"]: row for row in listed(capsys, str(root), status=1)}
    assert rows["step-00000001"]["state"] == "committed"
    assert "objects.pt has 100 bytes, must have" in rows["step-00000002"]["why"]
    assert rows["step-00000003"]["why"] == "rank-00000.json is missing"
    assert (
        rows["step-00000004"]["state"] == "damaged" and "manifest" in rows["step-00000004"]["why"]
    )


def test_a_local_tier_has_steps_of_other_roots(
    disk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tier, root = disk / "tier", disk / "run"
    saved(root, 1)
    saved(tier / tier_name(str(root)), 1, 2)
    saved(tier / tier_name(str(disk / "other")), 3)
    for local in (tier, tier / tier_name(str(root))):
        rows = listed(capsys, str(root), "--local", str(local))
        assert [(row["where"], row["step"]) for row in rows] == [
            ("root", 1),
            ("local", 2),
            ("local", 1),
        ]
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    shutil.rmtree(tier / tier_name(str(root)))
    assert len(listed(capsys, str(root), "--local", str(tier))) == 1
    assert caplog.messages[-1].startswith(f"{str(tier)!r} has no step of {str(root)!r}, only")


def test_the_newest_step_of_both_tiers_is_inspected(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, root = disk / "tier", disk / "run"
    saved(root, 1)
    saved(tier / tier_name(str(disk / "other")), 9)
    own = tier / tier_name(str(root))
    saved(own, 1, 2, 3)
    (own / "step-00000003" / "rank-00000.safetensors").unlink()  # as another node has it
    for local, step in (((), 1), (("--local", str(tier)), 2)):
        assert main(["inspect", str(root), *local, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == step
    shutil.rmtree(own / "step-00000002")
    shutil.rmtree(root)
    assert main(["inspect", str(root), "--local", str(tier), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(own / "step-00000001")
    assert main(["diff", str(root), str(own), "--local", str(tier)]) == 0


def test_checkpoints_of_a_trainers_run(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = disk / "run"
    for number in (4, 10, 20):
        fastckpt.export({"w": torch.ones(600_000)}, run / f"checkpoint-{number}").result(60)
    os.truncate(run / "checkpoint-4" / "model.safetensors", 100)
    (run / "checkpoint-20" / "fastckpt.json").unlink()  # as the stock Trainer writes it
    (run / "checkpoint-final").mkdir()
    rows = listed(capsys, str(run), status=1)
    assert [(row["step"], row["state"]) for row in rows] == [
        (20, "no fastckpt.json"),
        (10, "committed"),
        (4, "damaged"),
    ]
    files = (run / "checkpoint-10").iterdir()
    assert rows[1]["nbytes"] == sum(file.stat().st_size for file in files)
    assert rows[2]["why"].startswith("model.safetensors has 100 bytes, must have 2404096")
    assert main(["ls", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("checkpoint-20  root  2.29 MiB  ")
    assert lines[0].endswith(" old  no fastckpt.json: it is not verified")
    assert lines[1].endswith(f"  {rows[1]['listed_files']} files in fastckpt.json  committed")
    (run / "checkpoint-10" / "fastckpt.json").write_text('{"fastckpt": 1}')
    assert listed(capsys, str(run), status=1)[1]["state"] == "damaged"
    shutil.rmtree(run / "checkpoint-10")
    shutil.rmtree(run / "checkpoint-4")
    assert [row["step"] for row in listed(capsys, str(run))] == [20]


class Unreadable(Storage):
    """A storage that denies everything about the files in one directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._inside = f"{directory}/"

    def _check(self, path: str) -> None:
        if path.startswith(self._inside):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def status(self, file: Any, **how: bool) -> Any:
        self._check(str(file))
        return super().status(file, **how)

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        self._check(path)
        return super().read_file(path, nbytes_max)


def test_a_step_that_cannot_be_read_is_told(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(disk / "run", 1, 2)
    with process_on(Unreadable(disk / "run" / "step-00000001")):
        rows = {row["name"]: row for row in listed(capsys, str(disk / "run"), status=1)}
    assert rows["step-00000002"]["state"] == "committed"
    assert rows["step-00000001"]["state"] == "unreadable"
    assert "EACCES" in rows["step-00000001"]["why"]


def test_a_root_that_cannot_be_listed_is_one_line(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(disk / "run", 1)
    (disk / "file").write_text("")
    for arguments in (["file"], ["run", "--local", str(disk / "file")]):
        assert main(["ls", str(disk / arguments[0]), *arguments[1:]]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(disk / "file") in err
        assert ("ENOTDIR" in err) if arguments[1:] else ("`fastckpt inspect`" in err)
    with process_on(FailAlways("names directories", errno.EACCES)):
        assert main(["ls", str(disk / "run")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "EACCES" in err and str(disk / "run") in err


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_steps_are_one_line(name: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "empty").mkdir()
    assert main(["ls", str(disk / name)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(disk / name) in err
