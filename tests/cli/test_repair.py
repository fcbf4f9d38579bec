"""`fastckpt repair` finds what dead saves left, removes it when told to, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.cli import main
from fastckpt.formats.step_names import tier_name
from fastckpt.saving.lease import give_up
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import FailAlways, process_on
from tests.kit.interpreters import Program
from tests.kit.torches import NEEDS_DCP
from tests.kit.torches import dcp as fast_dcp

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
elif sys.argv[1] == "dcp":
    from fastckpt.integrations.dcp import save
    save(state, checkpoint_id=sys.argv[2] + "/whole", no_dist=True)
else:
    fastckpt.save(state, sys.argv[2] + "/a.pt").result()
"""


OTHERS = ("--yes", "--other-hosts")


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
    found, *lease = repaired(capsys, disk, status=1)
    assert [each["path"] for each in lease] == [str(disk / "lease.json")] * (kind == "step")
    assert found["nbytes"] > 1 << 22 and not found["removed"] and os.path.exists(found["path"])
    assert main(["repair", str(disk)]) == 1
    assert found["what"] in capsys.readouterr().out
    removed = repaired(capsys, disk, "--yes", status=0)
    assert all(each["removed"] for each in removed) and sorted(os.listdir(disk)) == kept
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
    back = r"a temporary directory that holds run\x1b, which will be renamed back, "
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
    assert (
        out == ""
        and err.count("\n") == 1
        and str(disk / "file") in err
        and "`fastckpt verify`" in err
    )
    (disk / "step-00000001").mkdir()
    for name in ("names", "names directories"):
        with process_on(FailAlways(name, errno.EACCES)):
            assert main(["repair", str(disk), "--yes"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(disk) in err and "EACCES" in err


def test_a_missing_directory_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(disk / "x")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(disk / "x") in err


def elsewhere(path: Path) -> Path:
    """Returns the name that another host's process would give a temporary of this."""
    return Path(re.sub(r"\.[^.+]*\+", ".elsewhere+", atomic.temporary_path(str(path))))


def left_by_another_host(disk: Path) -> list[Path]:
    """A file, a directory and a step; each is what its host's process locks, and days old."""
    step = disk / "step-00000007"
    step.mkdir()
    paths = [elsewhere(disk / "a.pt"), elsewhere(disk / "hf"), elsewhere(step / "manifest.json")]
    paths[0].write_bytes(bytes(5000))
    paths[1].mkdir()
    paths[2].touch()
    for path in paths:
        os.utime(path, (time.time() - 3 * 24 * 3600,) * 2)
    return paths


def test_what_another_host_left_is_told_and_stays(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_by_another_host(disk)
    before = sorted(disk.rglob("*"))
    for options in ([], ["--yes"], ["--other-hosts"]):
        found = repaired(capsys, disk, *options, status=1)
        assert len(found) == 3 and all(", from another host" in each["what"] for each in found)
        assert not any(each["is_dead"] or each["removed"] for each in found)
    assert sorted(each["age_s"] > 24 * 3600 for each in found) == [False, True, True]
    assert sorted(disk.rglob("*")) == before
    assert main(["repair", str(disk), "--yes"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(
        "not removed; this host cannot detect whether its save is alive" in line for line in lines
    )
    assert sum("changed 3.00 d ago" in line for line in lines) == 2
    assert all(each["removed"] for each in repaired(capsys, disk, *OTHERS, status=0))
    assert os.listdir(disk) == []


def test_what_another_host_has_locked_stays_however_old(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clocks of hosts, or of a server, need not agree."""
    paths = left_by_another_host(disk)
    with ExitStack() as locks:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            locks.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        before = sorted(disk.rglob("*"))
        assert repaired(capsys, disk, *OTHERS, status=0) == []
        with fastckpt.Checkpointer(disk) as checkpointer:  # which removes what a day tells is dead
            checkpointer.save(1, {}).result(60)
            assert {*before} <= {*disk.rglob("*")}
    with fastckpt.Checkpointer(disk) as checkpointer:
        checkpointer.save(2, {}).result(60)
    assert not (disk / "step-00000007").exists()
    assert all(each["removed"] for each in repaired(capsys, disk, *OTHERS, status=0))


def test_data_files_of_a_dcp_save_that_was_killed(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if fast_dcp is None:
        pytest.skip(NEEDS_DCP)
    for name in ("whole", "begun"):
        fast_dcp.save({"w": torch.ones(300_000)}, checkpoint_id=str(disk / name))
    give_up(str(disk / "begun"))
    (disk / "begun" / ".metadata").unlink()
    (file,) = (disk / "begun").iterdir()
    assert repaired(capsys, disk, *OTHERS, status=0) == []  # this process may commit it yet
    file = file.rename(file.with_name(f"__0_{'0' * 40}.distcp"))  # of another host
    shutil.copy(file, disk / "whole" / file.name)
    before = sorted(disk.rglob("*"))
    for where, count in ((disk, 2), (disk / "whole", 1)):
        found = repaired(capsys, where, "--yes", status=1)
        assert [each["what"] for each in found] == [
            "1 data file of DCP that no .metadata names"
        ] * count
        assert all(each["nbytes"] > 1_200_000 for each in found)
    assert sorted(disk.rglob("*")) == before
    assert len(repaired(capsys, disk, *OTHERS, status=0)) == 2
    assert os.listdir(disk) == ["whole"] and not (disk / "whole" / file.name).exists()
    assert main(["verify", str(disk)]) == 0


def with_another_name(content: bytes) -> bytes:
    """One bit of the name of a data file differs."""
    at = content.index(b".distcp") - 1
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [with_another_name, lambda its: its[: len(its) // 2], lambda _its: b"", lambda _its: b"a text"],
    ids=["flipped", "cut", "empty", "replaced"],
)
def test_data_files_stay_while_what_named_them_is_damaged(
    disk: Path, capsys: pytest.CaptureFixture[str], damaged: Callable[[bytes], bytes]
) -> None:
    if fast_dcp is None:
        pytest.skip(NEEDS_DCP)
    fast_dcp.save({"w": torch.ones(300_000)}, checkpoint_id=str(disk / "run"))
    metadata = disk / "run" / ".metadata"
    (file,) = (disk / "run").glob("*.distcp")
    of_the_dead = f"__0_{'0' * 40}.distcp".encode()
    content = metadata.read_bytes().replace(file.name.encode(), of_the_dead)
    body = content[:-46]
    end = b"fastckpt metadata 01 %016x %08x" % (len(body), zlib.crc32(body))
    file.rename(file.with_name(of_the_dead.decode()))
    metadata.write_bytes(body + end)
    assert main(["verify", str(disk / "run")]) == 0
    capsys.readouterr()
    metadata.write_bytes(damaged(metadata.read_bytes()))
    before = sorted(disk.rglob("*"))
    for where in (disk, disk / "run"):
        assert repaired(capsys, where, *OTHERS, status=0) == []
    assert sorted(disk.rglob("*")) == before
    assert main(["verify", str(disk / "run")]) == 1
    said = capsys.readouterr().out
    assert "damaged" in said and "left over" not in said and "ok" in said


def test_data_files_of_a_dcp_save_that_was_killed_here(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if fast_dcp is None:
        pytest.skip(NEEDS_DCP)
    fast_dcp.save({"w": torch.ones(9)}, checkpoint_id=str(disk / "whole"))
    give_up(str(disk / "whole"))
    before = sorted(disk.rglob("*"))
    with Program(LEAVES, "dcp", disk, "dies") as program:
        assert program.stdout.readline() == "there\n"
        program.wait(60)
    (found,) = repaired(capsys, disk, "--yes", status=0)
    assert found["removed"] and found["what"] == "1 data file of DCP that no .metadata names"
    assert sorted(disk.rglob("*")) == before


def test_what_a_save_left_in_a_local_tier(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = disk / "tier" / tier_name(str(disk / "run"))
    for name in (disk / "run", tier / "step-00000003", disk / "tier" / "other" / "step-00000001"):
        name.mkdir(parents=True)
    (found,) = repaired(capsys, disk / "run", "--yes", "--local", str(disk / "tier"), status=0)
    assert found["removed"] and found["path"] == str(tier / "step-00000003")
    assert (disk / "tier" / "other" / "step-00000001").exists()


class Vanishing(Storage):
    """A step that was listed is removed by its job before somebody looks into it."""

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        if os.path.basename(directory) == "step-00000001":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        return super().names(directory, directories=directories)


def test_a_step_that_is_removed_meanwhile_is_no_fault(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
    with process_on(Vanishing()):
        status = main(["repair", str(disk / "run")])
    assert status == 0 and "nothing to repair" in capsys.readouterr().out
