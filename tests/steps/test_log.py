"""The profile of a save, and the log of a root's saves."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.cli import main
from fastckpt.engine.save_stats import CLOCKS_BYTES, RankClocks, slowest_of
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.saving.handle import InnerHandle
from fastckpt.steps import log
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import WAIT_S, Crew, Member, Nursery, Outcome, attempt

CLOCKS = ("captured_s", "staged_s", "opened_s", "written_s", "synced_s")


def state(nbytes: int = 1 << 22) -> dict[str, Any]:
    return {"w": torch.ones(nbytes // 4), "n": 1}


def test_the_clocks_of_a_save_are_in_order(disk: Path) -> None:
    handle = fastckpt.save(state(), disk / "a.pt")
    stats = handle.result(60)
    own = [getattr(stats, name) for name in CLOCKS]
    assert None not in own and stats.committed_s is not None
    captured, staged, opened, written, synced = own
    assert captured <= staged <= synced and opened <= written <= synced <= stats.committed_s
    profile = handle.profile()
    assert json.loads(json.dumps(profile)) == profile
    assert profile["nbytes"] == stats.nbytes == profile["by_rank"]["nbytes"][0]
    assert profile["total_nbytes"] == stats.total_nbytes
    assert profile["slowest"]["rank"] == 0 and profile["rate"] > 0
    assert profile["by_rank"]["writes"] == [[*stats.writes]]
    assert handle.progress() == (stats.nbytes, stats.nbytes)


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_the_log_has_the_size_of_the_files(
    codec: Any, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fastckpt.Checkpointer(disk / "run", codec=codec, log=True) as checkpointer:
        handle = checkpointer.save(1, state())
        stats = handle.result(60)
    files = (disk / "run" / "step-00000001").iterdir()
    nbytes = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    (entry,) = log.entries(Storage(), str(disk / "run"))
    assert entry["stored_nbytes"] == stats.stored_nbytes == nbytes
    assert (nbytes < entry["nbytes"] / 10) == (codec is not None)
    for step in ([], ["--step", "1"]):
        assert main(["report", str(disk / "run"), *step]) == 0
        assert shown_size(nbytes) in capsys.readouterr().out


def test_writes_are_counted_by_their_size(disk: Path) -> None:
    # The body has a header of a page and more, and so two whole blocks, and a part of a third.
    stats = fastckpt.save(torch.ones(2 * BLOCK_BYTES, dtype=torch.uint8), disk / "a.pt").result(60)
    assert stats.writes == (0, 1, 0, 0, 2)
    small = fastckpt.save(torch.ones(600_000, dtype=torch.uint8), disk / "a.pt").result(60)
    assert small.writes == (0, 0, 1, 0, 0) and small.memory_waited_s == 0


def test_a_copy_that_waits_for_memory_is_told(disk: Path) -> None:
    big = torch.ones(6 * BLOCK_BYTES, dtype=torch.uint8)
    stats = fastckpt.save(
        big, disk / "a.pt", options=fastckpt.SaveOptions(staging_bytes=BLOCK_BYTES)
    ).result(60)
    assert stats.committed_s is not None and 0 < stats.memory_waited_s < stats.committed_s


def test_progress_is_told_while_a_save_writes(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, go_on = threading.Event(), threading.Event()
    sync = Storage.sync

    def wait(self: Storage, fd: int) -> None:
        syncing.set()
        assert go_on.wait(60)
        sync(self, fd)

    monkeypatch.setattr(Storage, "sync", wait)
    handle = fastckpt.save(state(20 << 20), disk / "a.pt")
    assert syncing.wait(60)
    written, total = handle.progress()
    go_on.set()
    assert written == total > 20 << 20
    handle.result(60)


@pytest.mark.parametrize("is_step", [False, True])
def test_the_total_is_known_before_any_file_is_made(
    is_step: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, go_on = threading.Event(), threading.Event()
    create = Storage.create

    def wait(self: Storage, *given: Any, **how: Any) -> int:
        making.set()
        assert go_on.wait(60)
        return create(self, *given, **how)

    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(fence="step", durable=False)
    ) as checkpointer:
        monkeypatch.setattr(Storage, "create", wait)
        values = state(20 << 20)
        if is_step:
            handle = checkpointer.save(1, values)
        else:
            handle = fastckpt.save(
                values, disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
            )
        assert making.wait(60)
        early = handle.progress()
        go_on.set()
        handle.result(60)
    assert early.written == 0 and 20 << 20 < early.total <= handle.progress().total


def test_each_save_has_a_line(disk: Path) -> None:
    with fastckpt.Checkpointer(disk / "run", log=True) as checkpointer:
        told = [checkpointer.save(step, state()).result(60).nbytes for step in (1, 2)]
    first, second = log.entries(Storage(), str(disk / "run"))
    assert (first["step"], second["step"]) == (1, 2) and first["error"] is None
    assert told == [first["nbytes"], second["nbytes"]]
    assert first["nbytes"] == sum(first["by_rank"]["nbytes"]) > 1 << 22
    assert sorted(os.listdir(disk / "run")) == ["saves.jsonl", "step-00000001", "step-00000002"]
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        assert checkpointer.steps() == [1, 2]


def test_a_failed_save_has_a_line(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fastckpt.Checkpointer(disk / "run", log=True) as checkpointer:
        checkpointer.save(1, state()).result(60)

        def fail(self: Storage, fd: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Storage, "sync", fail)
        with pytest.raises(StorageError):
            checkpointer.save(2, state()).result(60)
    _first, second = log.entries(Storage(), str(disk / "run"))
    assert second["committed_s"] is None and "sync" in second["error"]


def test_a_log_that_cannot_be_written_fails_no_save(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "run" / "saves.jsonl").mkdir(parents=True)
    with fastckpt.Checkpointer(disk / "run", log=True) as checkpointer:
        with caplog.at_level(logging.WARNING, "fastckpt"):
            checkpointer.save(1, state()).result(60)
        assert checkpointer.steps() == [1]
    assert "step 1 was not added to the log: append of" in caplog.text


def save_logged(member: Member, path: Path, fails: int = -1) -> Outcome:
    def save() -> None:
        with fastckpt.Checkpointer(path, group=member.group, log=True) as checkpointer:
            held: dict[str, Any] = {"w": torch.ones(3_000_000)}
            if member.rank == fails:
                held["x"] = torch.ones(3)
            checkpointer.save(3, held).result(WAIT_S)

    return attempt(save)


@pytest.mark.multiprocess
def test_all_ranks_are_in_the_line(nursery: Nursery, disk: Path) -> None:
    crew: Crew = nursery.lasting_crew(3)
    assert [outcome.error for outcome in crew(save_logged, disk / "run")] == [None] * 3
    (entry,) = log.entries(Storage(), str(disk / "run"))
    assert entry["ranks"] == 3 and sum(entry["by_rank"]["nbytes"]) == entry["nbytes"] > 12_000_000
    assert all(None not in entry["by_rank"][name] for name in CLOCKS)
    assert 0 <= entry["slowest"]["rank"] < 3
    outcomes = crew(save_logged, disk / "run", 1)
    assert all(isinstance(each.error, fastckpt.CheckpointError) for each in outcomes)
    assert len(log.entries(Storage(), str(disk / "run"))) == 2


def clocks(synced: float, written: float = 2, staged: float = 1, captured: float = 0.5) -> Any:
    return RankClocks(
        8, captured, staged, captured, written, synced, 0.0, 0.25, (1, 0, 3, 0, 1 << 40)
    )


def test_the_slowest_rank_is_named() -> None:
    usual = [clocks(3) for _ in range(5)]
    assert slowest_of([*usual, clocks(9, 8)]) == (5, "write", 7.5)
    assert slowest_of([clocks(9), *usual]) == (0, "sync", 7)
    assert slowest_of([*usual, clocks(9, 8, 7, 6)]) == (5, "capture", 6)
    assert slowest_of([clocks(3)]) == (0, "write", 1.5)
    assert slowest_of([clocks(nan)]) is None
    assert len(clocks(3).to_bytes()) == CLOCKS_BYTES
    assert RankClocks.from_bytes(clocks(3).to_bytes()) == clocks(3)


def test_a_file_of_many_lines_that_are_no_entries(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "saves.jsonl").write_text("x\n" * 1000)
    with pytest.raises(CorruptCheckpoint, match="is not a log of saves: pass the root"):
        log.entries(Storage(), str(disk))
    assert not caplog.records
    logged(disk)
    assert len(log.entries(Storage(), str(disk))) == 1
    assert len(caplog.records) == 11
    assert "990 more lines are skipped, because they are not entries" in caplog.text


def logged(disk: Path) -> str:
    with fastckpt.Checkpointer(disk, log=True) as checkpointer:
        checkpointer.save(1, state()).result(60)
    return (disk / "saves.jsonl").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "null",
        "x",
        '{"step": true}',
        "[" * 100_000,
        '{"step": 1, "by_rank": {"captured_s": [1], "staged_s": 3}}',
    ],
)
def test_a_line_that_is_no_entry(line: str, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    (disk / "saves.jsonl").write_text(f"{line}\n")
    with pytest.raises(CorruptCheckpoint, match="is not a log of saves"):
        log.entries(Storage(), str(disk))
    logged(disk)
    assert len(log.entries(Storage(), str(disk))) == 1
    assert "line 1 is skipped, because it is not an entry" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("commit_s", "abc"),
        ("commit_s", []),
        ("rate", math.inf),
        ("rate", "1"),
        ("rate", -1),
        ("committed_s", 10**400),
        ("stall_s", math.nan),
        ("step", -1),
        ("nbytes", 1.5),
        ("ranks", 1 << 63),
        ("began", 5),
        ("error", 5),
        ("by_rank", []),
        ("write_sizes", [4096]),
        ("write_sizes", 5),
        ("write_sizes", [-1, 1, 1, 1, 1]),
        ("slowest", {"rank": 0, "phase": 1, "seconds": 1}),
        ("slowest", {"rank": 0, "phase": "write", "seconds": None}),
        ("slowest", {"rank": "0", "phase": "write", "seconds": 1}),
    ],
)
def test_a_member_that_is_wrong(name: str, value: Any, disk: Path) -> None:
    entry = {**json.loads(logged(disk)), name: value}
    (disk / "saves.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(CorruptCheckpoint, match="is not a log of saves"):
        log.entries(Storage(), str(disk))


@pytest.mark.parametrize("name", ["rate", "stall_s", "committed_s", "error", "step"])
def test_a_member_that_is_missing(name: str, disk: Path) -> None:
    entry = json.loads(logged(disk))
    del entry[name]
    (disk / "saves.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(CorruptCheckpoint, match="is not a log of saves"):
        log.entries(Storage(), str(disk))


def test_a_line_that_is_cut_is_left_out(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = logged(disk)
    (disk / "saves.jsonl").write_text(content + content[:100])
    assert len(log.entries(Storage(), str(disk / "saves.jsonl"))) == 1
    assert "line 2 is skipped, because it is not an entry" in caplog.text
    logged(disk)  # goes on behind the line that was cut
    assert len(log.entries(Storage(), str(disk))) == 2


def test_of_a_log_that_is_too_large_the_end_is_read(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fastckpt.Checkpointer(disk, log=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state()).result(60)
    *_, second, third = (disk / "saves.jsonl").read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(log, "_BYTES_MAX", len(second) + len(third) - 1)
    assert [entry["step"] for entry in log.entries(Storage(), str(disk))] == [3]
    assert "saves.jsonl' is too large: only its last" in caplog.text
    monkeypatch.setattr(log, "_BYTES_MAX", len(second) + len(third) + 1)
    assert [entry["step"] for entry in log.entries(Storage(), str(disk))] == [2, 3]


def test_a_save_that_ends_before_save_returns_is_logged_with_all_clocks(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_fence = InnerHandle.pass_fence

    def pass_late(self: InnerHandle) -> None:
        assert self.wait_done(WAIT_S)
        pass_fence(self)

    monkeypatch.setattr(InnerHandle, "pass_fence", pass_late)
    with fastckpt.Checkpointer(disk, log=True) as checkpointer:
        stats = checkpointer.save(1, state()).result(WAIT_S)
    (entry,) = log.entries(Storage(), str(disk))
    assert stats.stall_s is not None and 0 < entry["stall_s"] <= stats.stall_s
