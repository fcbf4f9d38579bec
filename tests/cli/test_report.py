"""`fastckpt report` tells where the time of saves went."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.cli import main

NO_SPACE = f"StorageError: write of {'/long' * 50!r} failed: {os.strerror(errno.ENOSPC)} [ENOSPC]"


def entry(step: int, ranks: int, slow: int, **others: Any) -> str:
    """Returns a line of a log, of a save in which one rank wrote slowly."""
    ends = [9.0 if rank == slow else 3.0 for rank in range(ranks)]
    columns = {
        "nbytes": [1 << 30] * ranks,
        "captured_s": [0.5] * ranks,
        "staged_s": [1.0] * ranks,
        "opened_s": [0.5] * ranks,
        "written_s": ends,
        "synced_s": [end + 0.5 for end in ends],
        "paced_s": [0.0] * ranks,
    }
    line = {
        "step": step,
        "began": "2026-01-02T03:04:05.678+00:00",
        "ranks": ranks,
        "nbytes": ranks << 30,
        "stall_s": 1.0,
        "committed_s": 10.0,
        "rate": (ranks << 30) / 10.0,
        "by_rank": columns,
        "slowest": {"rank": slow, "phase": "write", "seconds": 8.5},
        "commit_s": 0.5,
        "error": None,
    }
    return json.dumps({**line, **others})


@pytest.fixture
def logged(disk: Path) -> Path:
    failed = {"committed_s": None, "error": NO_SPACE, "rate": None}
    lines = [entry(100, 4, 2), entry(200, 4, 3, **failed), entry(300, 1, 0)]
    (disk / "saves.jsonl").write_text("\n".join(lines) + "\n")
    return disk


def test_a_root_without_a_log(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(disk)]) == 1
    assert "saves.jsonl" in (told := capsys.readouterr().err) and "pass log=True" in told


def test_a_line_for_each_save(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(logged)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["1 of 3 saves failed:", f"  step 200: {NO_SPACE}"]
    assert len(lines) == 6 and lines[2].split()[:3] == ["step", "began", "ranks"]
    assert "rank 2, write 8.50 s" in lines[3] and "4.00 GiB" in lines[3]
    assert lines[4].startswith("200") and lines[4].endswith("  failed")


def test_an_error_is_the_first_line_of_one_step(
    logged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(logged), "--step", "200"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"step 200 failed: {NO_SPACE}" and out.count(NO_SPACE) == 1


def test_of_many_failures_the_last_are_shown(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [entry(n, 1, 0, committed_s=None, rate=None, error=f"E{n}") for n in range(13)]
    (disk / "saves.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(disk)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "13 of 13 saves failed:" and shown[1] == "  step 3: E3"
    assert shown[10:12] == ["  step 12: E12", "  and 3 before these"]


def test_one_step_in_detail(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(logged / "saves.jsonl"), "--step", "100"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["write"] == ["write", "2.50", "s", "8.50", "s", "2"]
    assert rows["slowest:"][-5:] == ["rank", "2,", "write", "8.50", "s"]
    assert main(["report", str(logged), "--step", "200", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["saves"]
    assert found["step"] == 200


def test_what_the_storage_was_asked_for(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = json.loads(entry(1, 2, 0))["by_rank"]
    columns |= {"memory_waited_s": [0.0, 2.5], "writes": [[1, 0, 0, 0, 7], [0, 0, 0, 0, 8]]}
    sizes = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 8 << 20]
    fast = entry(2, 2, 0, rate=2 * (2 << 30) / 10.0)
    slow = entry(1, 2, 0, by_rank=columns, write_sizes=sizes)
    (disk / "saves.jsonl").write_text(f"{slow}\n{fast}\n")
    assert main(["report", str(disk), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "copies waited for staging memory, at most 2.50 s" in out
    assert "16 writes: 1 up to 4.00 KiB, 15 larger" in out
    assert "215 MB/s, 50% of the limit" in out
    assert main(["report", str(disk), "--limit", "2GB/s"]) == 0
    _title, *lines = capsys.readouterr().out.splitlines()
    assert "215 MB/s  11%" in lines[0] and "429 MB/s  21%" in lines[1]
    with pytest.raises(SystemExit):
        main(["report", str(disk), "--limit", "fast"])


def test_the_way_to_the_root_has_a_line_of_its_own(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slowest = {"rank": 0, "phase": "capture", "seconds": 0.683}
    tiered = {"local_committed_s": 1.0, "commit_s": 0.25, "drain_s": 9.0, "slowest": slowest}
    paced = json.loads(entry(2, 1, 0))["by_rank"] | {"paced_s": [7.5]}
    lines = [entry(1, 1, 0, **tiered), entry(2, 1, 0, by_rank=paced)]
    (disk / "saves.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(disk)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  drain 9.00 s")
    assert main(["report", str(disk), "--step", "1"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["commit"].split() == ["commit", "250", "ms"]
    assert rows["drain"].split() == ["drain", "9.00", "s"]
    assert rows["slowest:"] == "slowest: drain 9.00 s"
    assert main(["report", str(disk), "--step", "2"]) == 0
    assert "drain_rate or max_writers, at most 7.50 s" in capsys.readouterr().out


def test_what_a_run_has_logged(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fastckpt.Checkpointer(disk, log=True) as checkpointer:
        checkpointer.save(7, {"w": torch.ones(1 << 20)}).result(60)
    assert main(["report", str(disk), "--step", "7"]) == 0
    out = capsys.readouterr().out
    assert "step 7, started 20" in out and "sync" in out and "committed after" in out


def test_texts_cannot_steer_the_terminal(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slowest = {"rank": 0, "phase": "\x1b[2J", "seconds": 1}
    odd = entry(1, 1, 0, began="\x1b[31mred\n", error="\x1b]0;evil\x07", slowest=slowest)
    (disk / "saves.jsonl").write_text(f"{odd}\n{entry(2, 1, 0, slowest=slowest)}\n")
    assert main(["report", str(disk)]) == main(["report", str(disk), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"\x1b[31m" in out


@pytest.mark.parametrize("arguments", [["x"], ["."], ["saves.jsonl"], [".", "--step", "5"]])
def test_what_is_not_there_is_one_line(
    arguments: list[str],
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(disk)
    (disk / "saves.jsonl").write_text("")
    assert main(["report", *arguments]) == 1
    _out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("fastckpt report: ")


def test_what_is_no_file_is_called_so(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(disk / "saves.jsonl")
    for path in (disk, disk / "saves.jsonl"):
        assert main(["report", str(path)]) == 1
        assert f"{disk}/saves.jsonl' is not a regular file" in capsys.readouterr().err
