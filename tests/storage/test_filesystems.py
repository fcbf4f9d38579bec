"""Which kind of file system a file lies on, and that what the table says of it is what is done and
told. Must not know what a checkpoint holds.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpoint, _engine
from fastckpt.engine.staging import Staging
from fastckpt.storage import policies
from fastckpt.storage.file_system import Storage
from fastckpt.storage.policies import POLICIES, Mount, Policy, recognised
from tests.kit.doubles import process_on
from tests.kit.paths import ROOT

WAIT_S = 60.0
MAGICS = {
    "ext4": 0xEF53,
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "tmpfs": 0x01021994,
    "local": 0x794C7630,  # overlay
    "lustre": 0x0BD00BD0,
    "remote": 0x6969,  # NFS
    "remote with locks": 0x47504653,  # GPFS
    "cifs": 0xFF534D42,
    "fuse": 0x65735546,
}


@pytest.mark.parametrize(("kind", "magic"), MAGICS.items())
def test_magic_alone_is_enough(kind: str, magic: int) -> None:
    assert recognised(magic, None) == kind


@pytest.mark.parametrize(
    ("mount", "kind"),
    [
        ("ext2", "local"),
        ("ext3", "local"),
        ("overlay", "local"),
        ("nfs4", "remote"),
        ("smb3", "cifs"),
        ("fhgfs", "remote with locks"),
        ("wekafs", "remote with locks"),
        ("fuseblk", "fuse"),
        ("fuse.sshfs", "fuse"),
        ("fuse.gcsfuse", "object store"),
        ("fuse.mount-s3", "object store"),
    ],
)
def test_the_mount_tells_what_shares_a_magic(mount: str, kind: str) -> None:
    assert recognised(0xEF53, Mount(mount, "x")) == kind
    assert recognised(None, Mount(mount, "x")) == kind


def test_moosefs_is_told_by_the_name_of_its_master() -> None:
    """Its mount type is that of every FUSE daemon."""
    assert recognised(MAGICS["fuse"], Mount("fuse", "mfs#10.0.0.1:9421")) == "moosefs"
    assert recognised(MAGICS["fuse"], Mount("fuse", "another")) == "fuse"
    assert POLICIES["moosefs"] == POLICIES["fuse"]._replace(readers=1)


@pytest.mark.parametrize("magic", [0xEF53, 0x58465342, 0x01021994, 0x0BD00BD0])
def test_a_number_that_9p_passes_on_is_not_believed(magic: int) -> None:
    assert recognised(magic, Mount("9p", "share")) == "9p"


def test_a_file_on_9p_is_loaded_by_the_descriptor_that_was_opened(disk: Path) -> None:
    """A second one would be another file's once that has taken the name, as the double has it."""
    path = disk / "a.pt"

    class Server(Storage):
        opens_by_name = True

        def policy(self, fd: int) -> tuple[str, Policy]:
            return ("9p", POLICIES["9p"]) if self.opens_by_name else super().policy(fd)

        def open(self, file: str | int, how: Any = "read") -> int:
            found = super().open(str(path) if isinstance(file, int) else file, how)
            if (disk / "b.pt").exists():
                os.replace(disk / "b.pt", path)
            return found

    def opened(path: Path) -> torch.Tensor:
        with fastckpt.open(path) as found:
            return found["w"][...]

    for read in (lambda path: fastckpt.load(path)["w"], opened):
        for opens_by_name in (True, False):
            for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
                fastckpt.save({"w": torch.full((1 << 20,), value)}, disk / name).result(WAIT_S)
            storage = Server()
            storage.opens_by_name = opens_by_name
            with process_on(storage):
                if opens_by_name:
                    assert bool((read(path) == 1.0).all())
                else:  # so the double does what such a server does
                    with pytest.raises(CorruptCheckpoint, match="CRC-32 mismatch"):
                        read(path)


def test_a_mount_type_of_another_name_falls_back_to_the_magic() -> None:
    assert recognised(0x0BD00BD0, Mount("lustre_tgt", "x")) == "lustre"
    assert recognised(0x65735546, Mount("virtiofs", "x")) == "fuse"


@pytest.mark.parametrize("magic", [None, 0, 0x12345678])
def test_what_nobody_knows_is_on_the_safe_line(magic: int | None) -> None:
    assert recognised(magic, Mount("newfs", "x")) == recognised(magic, None) == "remote"
    safe = POLICIES["remote"]
    assert safe.backend == "threads" and safe.syncs_all and safe.renames_at_once


def test_real_file_systems_are_recognised(disk: Path) -> None:
    for path in (disk, Path("/dev/shm")):
        fd = os.open(path, os.O_RDONLY)
        try:
            mount = policies.mount_of(fd)
            assert mount is not None
            magic = policies.magic_of(fd)
            assert magic == policies.magic_of(str(path)) is not None
            if mount.kind in MAGICS:
                assert magic == MAGICS[mount.kind]
                assert policies.policy_of(fd) == (mount.kind, POLICIES[mount.kind])
        finally:
            os.close(fd)


def test_without_proc_the_magic_has_to_do(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "mount_of", lambda _fd: None)
    with (disk / "a").open("w") as file:
        assert policies.policy_of(file.fileno())[0] in POLICIES


@pytest.mark.parametrize("kind", POLICIES)
def test_a_save_does_and_tells_what_the_table_says(
    kind: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES[kind]
    done: list[str] = []

    def spied(module: object, name: str) -> None:
        real = getattr(module, name)

        def spy(fd: int, *rest: int) -> None:
            if not os.path.isdir(os.readlink(f"/proc/self/fd/{fd}")):
                done.append(name)
            real(fd, *rest)

        monkeypatch.setattr(module, name, spy)

    monkeypatch.setattr(policies, "policy_of", lambda _fd: (kind, policy))
    for name in ("fsync", "fdatasync", "ftruncate"):
        spied(os, name)
    spied(_engine, "allocate")
    stats = fastckpt.save({"w": torch.ones(5000)}, disk / "a.pt").result(WAIT_S)
    assert policy.text() in stats.why and stats.why.startswith(f"{kind}: ")
    assert ("fsync" if policy.syncs_all else "fdatasync") in done
    assert ("fdatasync" if policy.syncs_all else "fsync") not in done
    assert (done[0] == "allocate") == policy.allocates
    assert not (stats.direct and not policy.direct)
    assert not (stats.backend == "io_uring" and policy.backend == "threads")
    assert bool((fastckpt.load(disk / "a.pt")["w"] == 1).all())


@pytest.mark.parametrize("kind", [kind for kind, its in POLICIES.items() if its.direct_if_asked])
def test_where_neither_way_is_faster_everywhere_writes_are_direct_if_asked(
    kind: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "a").write_bytes(bytes(1 << 20))
    tried: list[bool] = []

    class Probed(Storage):
        def set_direct(self, fd: int, *, writing: bool, **_: object) -> None:
            tried.append(writing)

        def policy(self, fd: int) -> tuple[str, Policy]:
            return kind, POLICIES[kind]

    staging = Staging(Probed(), 1 << 20)
    with closing(staging), open(disk / "a", "r+b") as file:
        for requested in ("auto", "threads", "io_uring"):
            for writing in (False, True):
                try:
                    route = staging.route(file.fileno(), "a", requested, writing=writing)
                except fastckpt.BackendUnavailable:  # there is no io_uring here
                    continue
                assert route.direct == (writing and requested == "io_uring")
    assert set(tried) == {True}


@pytest.mark.parametrize("writing, count", [(False, 16), (True, 4)])
def test_a_daemon_is_read_by_more_threads(
    disk: Path, monkeypatch: pytest.MonkeyPatch, writing: bool, count: int
) -> None:
    monkeypatch.setattr(policies, "policy_of", lambda _fd: ("fuse", POLICIES["fuse"]))
    staging = Staging(Storage(), 1 << 20)
    with closing(staging), open(disk / "a", "w+b") as file:
        before = len(os.listdir("/proc/self/task"))
        staging.route(file.fileno(), "a", "auto", writing=writing)
        assert len(os.listdir("/proc/self/task")) - before == count


def test_the_decision_is_made_once_for_a_descriptor(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = policies.policy_of

    def policy_of(fd: int) -> tuple[str, Policy]:
        asked.append(fd)
        return real(fd)

    monkeypatch.setattr(policies, "policy_of", policy_of)
    storage = Storage()
    for _ in range(2):  # the second file has the number of the first one
        fd = storage.create(str(disk / "a"), 0o600)
        storage.allocate(fd, 4096)
        storage.sync(fd)
        storage.policy(fd)
        storage.close(fd)
        storage.remove(str(disk / "a"))
    assert len(asked) == 2


def test_a_file_that_cannot_be_looked_at_is_closed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "a").touch()
    opened = []

    def stale(fd: int) -> os.stat_result:  # as NFS tells of a file that another machine has removed
        opened.append(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Stale"):
        patched.setattr(os, "fstat", stale)
        Storage().open(str(disk / "a"), "regular")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*opened)


def test_every_line_of_the_table_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "reference" / "filesystems.md").read_text(encoding="utf-8")
    for kind, policy in POLICIES.items():
        (row,) = re.findall(rf"^\| {re.escape(kind)} \|.*$", page, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        wanted = [
            policy.backend,
            "if asked" if policy.direct_if_asked else "tried" if policy.direct else "no",
            "blocks" if policy.allocates else "size",
            "fsync" if policy.syncs_all else "fdatasync",
            "at once" if policy.renames_at_once else "copies",
        ]
        assert cells[1:6] == wanted, kind
