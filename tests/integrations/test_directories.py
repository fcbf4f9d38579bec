"""Directories whose checkpoint is replaced as a whole, by each framework that saves one: files of
others stay there, and of two jobs that live the second is refused by name.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from fastckpt.cli import main
from fastckpt.saving.lease import LEASE_FILE
from tests.kit.interpreters import LEAVE, Program
from tests.kit.programs import tell, told

WAIT_S = 60.0
SERVES = f"""
import sys
from tests.crews.directory_kinds import serve
serve(*sys.argv[1:])
{LEAVE}"""


class Kind(NamedTuple):
    """A kind of save, as tests/crews/directory_kinds.py has it.

    Attributes:
        directory: of the checkpoint, below the root that the save is given.
        leased: the directory, below the root, that one job at a time may save to; None: none.
        clash: a name that the checkpoint needs.
        is_record: whether that is a file that each checkpoint replaces, whoever wrote it.
        imports: what an interpreter has imported before it is forked.
        needs: a package that may not be installed.
    """

    directory: str
    leased: str | None
    clash: str
    is_record: bool
    imports: str
    needs: str


KINDS = {
    "dcp": Kind("items", "items", ".metadata", True, "tests.crews.dcp_imports", "torch"),
    "writer": Kind("items", "items", ".metadata", True, "tests.crews.dcp_imports", "torch"),
    "megatron": Kind(
        "iter_0000007", "", "metadata.json", True, "tests.crews.megatron_imports", "megatron.core"
    ),
    "trainer": Kind(
        "checkpoint-7", "", "optimizer.pt", False, "tests.crews.trainer_imports", "transformers"
    ),
    "accelerate": Kind(
        "state", None, "model.safetensors", False, "tests.crews.accelerate_imports", "accelerate"
    ),
    "lightning": Kind(
        "shards", None, ".metadata", False, "tests.crews.lightning_imports", "lightning"
    ),
    "deepspeed": Kind("tag", "", "rank_0.pt", False, "tests.crews.deepspeed_bodies", "deepspeed"),
    "export": Kind("export", None, "model.safetensors", False, "", "torch"),
}
ANY = pytest.mark.parametrize("kind", KINDS)
LEASED = pytest.mark.parametrize("kind", [k for k, its in KINDS.items() if its.leased is not None])
pytestmark = pytest.mark.multiprocess


class Saver:
    """A process that saves, by one kind, to directories below a root."""

    def __init__(self, kind: str, root: Path) -> None:
        pytest.importorskip(KINDS[kind].needs)
        self._program = Program(SERVES, kind, root, imports=KINDS[kind].imports)

    def __enter__(self) -> Saver:
        self._program.__enter__()
        self.pid = told(self._program)
        assert self.pid.isdigit(), self.pid
        return self

    def __exit__(self, *error: object) -> None:
        with self._program:
            if self._program.poll() is None:
                self._program.stdin.close()
                self._program.wait(WAIT_S)

    def save(self, number: int) -> str:
        tell(self._program, str(number))
        return told(self._program)

    def kill(self) -> None:
        self._program.kill()
        self._program.wait(WAIT_S)


def files_of(directory: Path) -> list[str]:
    """Files by their names, without the digits that are new in each."""
    found = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    drawn = re.compile("[0-9a-f]{40}")
    return sorted(drawn.sub("TOKEN", each) for each in found if each != LEASE_FILE)


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != LEASE_FILE
    }


@ANY
def test_an_earlier_checkpoint_is_replaced_and_files_of_others_stay(kind: str, disk: Path) -> None:
    directory = disk / KINDS[kind].directory
    with Saver(kind, disk) as saver:
        assert saver.save(1) == "saved"
        before, files = bytes_of(directory), files_of(directory)
        kept = {"notes.txt": "mine", ".hidden": "too", "deep/notes.txt": "deep"}
        for name, text in kept.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        os.link(directory / "notes.txt", disk / "notes")
        assert saver.save(2) == "saved"
        after = bytes_of(directory)
    assert files_of(directory) == sorted([*files, *kept])
    for name, text in kept.items():
        assert after.pop(str(directory / name)) == text.encode()
    assert os.path.samefile(directory / "notes.txt", disk / "notes"), "who has it open keeps it"
    assert after != before
    assert main(["verify", str(directory)]) == 0


@ANY
def test_a_name_that_both_need_is_refused_before_anything_is_written(kind: str, disk: Path) -> None:
    its = KINDS[kind]
    directory, mine = disk / its.directory, disk / its.directory / its.clash
    if its.is_record:  # a file of that name is the framework's
        (mine / "deep").mkdir(parents=True)
    else:
        directory.mkdir()
        mine.write_text("mine")
    with Saver(kind, disk) as saver:
        refused = saver.save(1)
        assert refused.startswith("CheckpointError: ") and repr(str(directory)) in refused
        assert its.clash in refused and "nothing was changed there" in refused
        assert {*os.listdir(directory)} <= {its.clash, LEASE_FILE}
        assert mine.is_dir() or mine.read_text() == "mine"
        shutil.rmtree(mine) if its.is_record else mine.unlink()
        # The error may be raised again, by the next save of the kind, which then does not begin.
        assert "saved" in (saver.save(2), saver.save(3))
    assert {*os.listdir(disk)} <= {
        its.directory,
        "latest",
        "latest_checkpointed_iteration.txt",
    }


@LEASED
def test_of_two_jobs_that_live_the_second_is_refused(kind: str, disk: Path) -> None:
    """After kill -9 of the first it is not, and what that has committed is there until then."""
    its = KINDS[kind]
    leased, directory = disk / str(its.leased), disk / its.directory
    with Saver(kind, disk) as first, Saver(kind, disk) as second:
        assert first.save(1) == "saved"
        before = bytes_of(disk)
        refused = second.save(2)
        assert refused.startswith("RootInUse: ") and f"process {first.pid} on host" in refused
        takeover = f"`fastckpt repair {leased} --takeover`"
        assert repr(str(leased)) in refused and takeover in refused
        assert bytes_of(disk) == before, "nothing of the first is gone, nor anything there of both"
        assert first.save(3) == "saved", "of the same job"
        before = bytes_of(disk)
        first.kill()
        assert bytes_of(disk) == before and (leased / LEASE_FILE).exists()
        # The refusal may be raised again, by the next save of the kind, which then does not begin.
        assert "saved" in (second.save(4), second.save(5))
    assert bytes_of(disk) != before and not (leased / LEASE_FILE).exists()
    assert main(["verify", str(directory)]) == 0


@LEASED
def test_a_job_whose_directory_was_taken_over_commits_nothing(kind: str, disk: Path) -> None:
    leased = disk / str(KINDS[kind].leased)
    with Saver(kind, disk) as first:
        assert first.save(1) == "saved"
        before = bytes_of(disk)
        assert main(["repair", str(leased), "--takeover"]) == 0
        with Saver(kind, disk) as second:
            assert second.save(2) == "saved"
            taken = bytes_of(disk)
            refused = first.save(3)
            assert refused.startswith("RootInUse: ") and second.pid in refused
            assert bytes_of(disk) == taken != before


@pytest.mark.parametrize("kind", ["dcp"])
def test_a_directory_that_is_not_saved_to_any_more_is_free(kind: str, disk: Path) -> None:
    """Where each checkpoint has a directory of its own, one is leased, the last."""
    with Saver(kind, disk) as saver:
        assert saver.save(1) == "saved" and (disk / "items" / LEASE_FILE).exists()
        (disk / "items").rename(disk / "old")
        assert saver.save(2) == "saved"
        assert (disk / "items" / LEASE_FILE).exists()
