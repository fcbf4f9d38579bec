"""Directories that others use as well: whose files are whose, who may open them when, and what
becomes of a save whose credentials expire. Must not know which operation a save does when.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import fastckpt
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.engine import staging
from fastckpt.errors import StorageError
from fastckpt.saving import pipeline as pipeline_module
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage import file_system as storage
from fastckpt.storage import policies
from fastckpt.storage.policies import POLICIES, REFUSALS
from tests.kit.doubles import FailAlways, Operation, Recorder, process_on, save_through

MIB = 1 << 20
WAIT_S = 60.0
OTHER_GROUP = 12345
T = TypeVar("T")


class Modes(Recorder):
    """Notes owner, group and mode of every temporary, after each operation on it."""

    def __init__(self) -> None:
        super().__init__(by_engine=True)
        self.seen: set[tuple[int, int]] = set()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        result = real()
        if operation.path.endswith(".tmp") and os.path.exists(operation.path):
            status = os.stat(operation.path)
            self.seen.add((stat.S_IMODE(status.st_mode), status.st_gid))
        return result


def saved_on(double: storage.Storage, path: Path, value: float = 1) -> fastckpt.SaveHandle:
    pipeline = Pipeline(storage=double, budget_bytes=64 * MIB)
    try:
        handle = save_through(pipeline, {"w": torch.full((3 * MIB,), value)}, path)
        handle.exception(WAIT_S)
        return handle
    finally:
        pipeline.close()


@pytest.fixture
def umask() -> Any:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_nobody_writes_to_a_temporary(disk: Path, umask: Callable[[int], int], mask: int) -> None:
    umask(mask)
    double = Modes()
    saved_on(double, disk / "a.pt").result(WAIT_S)
    assert stat.S_IMODE((disk / "a.pt").stat().st_mode) == 0o666 & ~mask
    # The last look is at the whole file, which is widened as the umask says.
    assert {mode for mode, _group in double.seen} <= {0o664 & ~mask, 0o666 & ~mask}
    assert (0o664 & ~mask) in {mode for mode, _group in double.seen}


@pytest.mark.parametrize("mode", [0o640, 0o666, 0o604])
def test_a_replacement_opens_to_nobody_before_it_is_whole(disk: Path, mode: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a file to another group")
    path = disk / "a.pt"
    saved_on(storage.Storage(), path, 1)
    os.chown(path, -1, OTHER_GROUP)
    os.chmod(path, mode)
    double = Modes()
    saved_on(double, path, 2).result(WAIT_S)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (mode, OTHER_GROUP)
    for seen, group in double.seen:
        assert seen == 0o600 or (seen, group) == (mode, OTHER_GROUP), oct(seen)


def test_files_are_of_the_group_of_a_setgid_directory(disk: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a directory to another group")
    os.chown(disk, -1, OTHER_GROUP)
    os.chmod(disk, 0o2770)
    state = {"w": torch.ones(3 * MIB), "step": 1}
    fastckpt.save(state, disk / "a.pt").result(WAIT_S)
    fastckpt.save(state, disk / "a.pt").result(WAIT_S)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state).result(WAIT_S)
    made = list(disk.rglob("*"))
    assert len(made) >= 7 and {path.stat().st_gid for path in made} == {OTHER_GROUP}
    assert all(path.stat().st_mode & stat.S_ISGID for path in made if path.is_dir())


# Expired credentials.


class Expired(Recorder):
    """From the first write of data on, every operation of these names is refused with `code`, until
    renew() is called.
    """

    def __init__(self, code: int, *names: str) -> None:
        super().__init__()
        self._code, self._names = code, names
        self.refused = threading.Event()
        self._renewed = threading.Event()

    def renew(self) -> None:
        self._renewed.set()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name in self._names and not self._renewed.is_set():
            self.refused.set()
            raise OSError(self._code, os.strerror(self._code))
        return real()


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Takes files for those of NFS, with so many seconds of patience."""

    def patched(patience_s: float) -> None:
        monkeypatch.setattr(policies, "policy_of", lambda _fd: ("nfs", POLICIES["remote"]))
        monkeypatch.setattr(staging, "PATIENCE_S", patience_s)
        monkeypatch.setattr(storage, "PATIENCE_S", patience_s)

    return patched


@pytest.mark.parametrize("code", sorted(REFUSALS), ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["write", "rename"])
def test_a_ticket_renewed_in_time_saves_the_checkpoint(
    disk: Path, on_nfs: Callable[[float], None], name: str, code: int
) -> None:
    on_nfs(WAIT_S)
    double = Expired(code, name)
    pipeline = Pipeline(storage=double, budget_bytes=64 * MIB)
    try:
        w = torch.ones(5 * MIB)
        handle = save_through(pipeline, {"w": w}, disk / "a.pt")
        assert double.refused.wait(WAIT_S)
        time.sleep(0.1)
        assert not handle.done()
        w.fill_(2)  # what was staged is kept meanwhile
        double.renew()
        handle.result(WAIT_S)
    finally:
        pipeline.close()
    assert bool((fastckpt.load(disk / "a.pt")["w"] == 1).all())


@pytest.mark.parametrize("code", sorted(REFUSALS), ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["write", "rename"])
def test_a_ticket_that_stays_expired_is_reported(
    disk: Path, on_nfs: Callable[[float], None], name: str, code: int
) -> None:
    on_nfs(0.6)
    path = disk / "a.pt"
    saved_on(storage.Storage(), path, 1)
    double = Expired(code, name)
    begun = time.monotonic()
    error = saved_on(double, path, 2).exception(WAIT_S)
    assert time.monotonic() - begun >= 0.6
    assert isinstance(error, StorageError) and error.errno == code and error.op == name
    assert "ticket expired" in str(error) and errno.errorcode[code] in str(error)
    assert os.listdir(disk) == ["a.pt"]
    assert bool((fastckpt.load(path)["w"] == 1).all()), "the checkpoint before stays"
    saved_on(storage.Storage(), path, 3).result(WAIT_S)
    assert bool((fastckpt.load(path)["w"] == 3).all())


@pytest.mark.parametrize("code", sorted(REFUSALS), ids=errno.errorcode.get)
def test_a_sync_that_failed_is_not_asked_again(
    disk: Path, on_nfs: Callable[[float], None], code: int
) -> None:
    on_nfs(WAIT_S)
    double = FailAlways("sync", code)
    error = saved_on(double, disk / "a.pt").exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == "sync" and "expired" in str(error)
    assert len(double.numbers_of("sync")) == 1 and os.listdir(disk) == []


def test_a_disk_of_ones_own_is_not_waited_for(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "policy_of", lambda _fd: ("ext4", POLICIES["ext4"]))
    double = FailAlways("rename", errno.EPERM)
    error = saved_on(double, disk / "a.pt").exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == "rename"
    assert len(double.numbers_of("rename")) == 1


def test_a_directory_without_permission_is_reported_at_once(
    disk: Path, on_nfs: Callable[[float], None]
) -> None:
    on_nfs(WAIT_S)
    double = FailAlways("create", errno.EACCES)
    error = saved_on(double, disk / "a.pt").exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == "open"
    assert len(double.numbers_of("create")) == 1


def test_steps_wait_for_a_ticket_as_well(
    disk: Path, on_nfs: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:

    on_nfs(WAIT_S)
    for name in ("write_at", "rename"):
        double = Expired(errno.EKEYEXPIRED, name)
        current = Pipeline(storage=double, budget_bytes=64 * MIB)
        monkeypatch.setattr(pipeline_module, "_current", current)
        try:
            with fastckpt.Checkpointer(disk / name) as checkpointer:
                with ThreadPoolExecutor(1) as pool:  # save() itself waits for the root's lease
                    renewed = pool.submit(lambda d: d.refused.wait(WAIT_S) and d.renew(), double)
                    checkpointer.save(1, {"w": torch.ones(3 * MIB)}).result(WAIT_S)
                    assert renewed.result(WAIT_S) is None
                restored = {"w": torch.zeros(3 * MIB)}
                assert checkpointer.restore(restored) == 1
                assert bool((restored["w"] == 1).all())
        finally:
            current.close()


class ExpiredWithoutExchange(Expired):
    """The file system cannot exchange two names, either."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "exchange":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().perform(number, operation, real)


def fill_with(value: float) -> Callable[[Draft], None]:
    return lambda draft: draft.add({"w": torch.full((3,), value)}, "a.pt")


PUBLICATIONS = pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        # EPERM of it means that there is no such call.
        *((Expired, "exchange", code) for code in sorted(REFUSALS - {errno.EPERM})),
        *((ExpiredWithoutExchange, "rename", code) for code in sorted(REFUSALS)),
        (Expired, "touch", errno.EACCES),
    ],
)


@PUBLICATIONS
def test_directories_wait_for_a_ticket_as_well(
    disk: Path, on_nfs: Callable[[float], None], kind: type[Expired], name: str, code: int
) -> None:
    on_nfs(WAIT_S)
    save_directory(str(disk / "run"), fill_with(1)).result(WAIT_S)
    wait_for_directories(str(disk))  # it may still remove something
    double = kind(code, name)
    with process_on(double):
        handle = save_directory(str(disk / "run"), fill_with(2))
        assert double.refused.wait(WAIT_S)
        double.renew()
        handle.result(WAIT_S)
    assert bool((torch.load(disk / "run" / "a.pt")["w"] == 2).all())
    assert os.listdir(disk) == ["run"]


@PUBLICATIONS
def test_a_directory_stays_whose_ticket_stays_expired(
    disk: Path, on_nfs: Callable[[float], None], kind: type[Expired], name: str, code: int
) -> None:
    on_nfs(0.1)
    save_directory(str(disk / "run"), fill_with(1)).result(WAIT_S)
    wait_for_directories(str(disk))  # it may still remove something
    with process_on(kind(code, name)):
        error = save_directory(str(disk / "run"), fill_with(2)).exception(WAIT_S)
    assert isinstance(error, StorageError) and (error.op, error.errno) == ("rename", code)
    assert bool((torch.load(disk / "run" / "a.pt")["w"] == 1).all())
    assert os.listdir(disk) == ["run"]


# What stays open while a file is replaced.


class OnePlace(Recorder):
    """Renames as network clients do: what the new file replaces is gone at once, unless somebody
    has it open. A client of NFS first renames that one away, a client of CIFS is refused for good.
    """

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__()
        self._path, self._kind = path, kind
        self.absent = False

    def _is_open(self) -> bool:
        links = (entry.path for entry in os.scandir("/proc/self/fd"))
        return any(os.path.exists(link) and os.path.samefile(link, self._path) for link in links)

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "rename" and self._path.exists() and self._is_open():
            self.absent = True
            if self._kind == "cifs":
                self._path.unlink()
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._path.rename(self._path.with_name(".nfs0000000000000001"))
        return real()


@pytest.mark.parametrize("kind", POLICIES)
def test_what_is_replaced_is_kept_open_on_local_file_systems_alone(
    disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(policies, "policy_of", lambda _fd: (kind, POLICIES[kind]))
    monkeypatch.setattr(storage, "PATIENCE_S", 0.1)
    path = disk / "a.pt"
    saved_on(storage.Storage(), path, 1)
    double = OnePlace(path, kind)
    saved_on(double, path, 2).exception(WAIT_S)
    assert double.absent == (not POLICIES[kind].remote)
    if POLICIES[kind].remote:
        assert os.listdir(disk) == ["a.pt"]
        assert bool((fastckpt.load(path)["w"] == 2).all())


def test_what_is_local_is_a_closed_list() -> None:
    local = {"local", "ext4", "xfs", "btrfs", "tmpfs"}
    assert {kind for kind, policy in POLICIES.items() if not policy.remote} == local


# Mounts that upload a file as it is written.


class InSequence(Recorder):
    """A daemon like rclone's without a cache: no size ahead, no byte but the next one, and a file
    stays as long as it is open, and a moment longer.

    Args:
        sizes: whether a size ahead is taken; then what is written elsewhere is refused.
    """

    def __init__(self, *, sizes: bool) -> None:
        super().__init__()
        self._sizes = sizes
        self._open: set[str] = set()
        self._refusals = 2

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        name, path = operation.name, operation.path
        if name == "create":
            self._open.add(path)
        elif name == "close":
            self._open.discard(path)
        elif name in ("allocate", "truncate") and not self._sizes:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        elif name == "remove" and path.endswith(".tmp") and self._refusals:
            self._refusals -= path not in self._open
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        elif name == "write" and operation.args[0]:  # as if another block had come first
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real()


@pytest.mark.parametrize("sizes", [False, True])
def test_a_mount_that_writes_in_sequence_refuses_with_the_reason(
    disk: Path, monkeypatch: pytest.MonkeyPatch, sizes: bool
) -> None:
    policy = POLICIES["object store"]
    monkeypatch.setattr(policies, "policy_of", lambda _fd: ("fuse.rclone", policy))
    error = saved_on(InSequence(sizes=sizes), disk / "a.pt").exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == ("write" if sizes else "allocate")
    assert "sequential writes only" in str(error) and "--vfs-cache-mode" in str(error)
    assert os.listdir(disk) == []
