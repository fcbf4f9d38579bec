"""Locks and removals on NFS and CIFS: who reads is safe from who removes, other ranks may write,
nothing stays. Runs on models of the clients (network_double.py), for want of servers.
"""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer
from fastckpt.errors import StorageError
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage import atomic
from fastckpt.storage import file_system as storage
from fastckpt.storage.file_system import Storage
from fastckpt.storage.vanishing import is_removed
from tests.kit.doubles import dead_pid, process_on
from tests.kit.network_double import Cifs, NetworkClient, RemembersAbsence, Stale, lingering
from tests.kit.steps import attempt, directories, state

WAIT_S = 60.0
CLIENTS = pytest.mark.parametrize("client", [NetworkClient, Cifs], ids=["nfs", "cifs"])


@pytest.fixture
def root(disk: Path) -> Path:
    return disk / "run"


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        (errno.EWOULDBLOCK, False),
        (errno.EACCES, False),
        (errno.ENOSYS, True),
        (errno.EOPNOTSUPP, True),
        (errno.ENOLCK, True),
        (errno.EBADF, None),
        (errno.EIO, None),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if value and value is not True else str(value),
)
def test_what_a_refused_lock_means(
    code: int, taken: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has it; there are no locks, so nobody has; or there is no telling."""

    def refuse(_fd: int, _how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for lock in (Storage().lock, partial(Storage().lock, shared=True)):
        if taken is None:
            with pytest.raises(OSError, match=os.strerror(code)):
                lock(0)
        else:
            assert lock(0) is taken


@CLIENTS
def test_a_step_that_is_read_is_not_removed(root: Path, client: type[NetworkClient]) -> None:
    double = client()
    with double.mounted(), process_on(double), Checkpointer(root, keep_last=1) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        with PosixSteps(double, str(root)).hold(attempt(root, 1).name):
            checkpointer.save(2, state(2)).result(WAIT_S)
            fastckpt.saving.pipeline.current().drain()
            assert directories(root) == ["step-00000001-again", "step-00000002-again"]
            assert len(os.listdir(attempt(root, 1))) == 4
        checkpointer.save(3, state(3))
    assert directories(root) == ["step-00000003-again"]


@CLIENTS
def test_a_step_that_was_removed_is_found_gone_by_who_waited_for_it(
    root: Path, client: type[NetworkClient]
) -> None:
    """The client counts the name that it keeps the manifest under as one of the file's."""
    double = client()
    with double.mounted(), process_on(double):
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state(1)).result(WAIT_S)
        path = str(attempt(root, 1) / "manifest.json")
        fd = double.open(path)
        assert not is_removed(double, fd, path)
        steps, name = PosixSteps(double, str(root)), attempt(root, 1).name
        assert steps.remove(name, steps.read(name).nonce)
        assert os.fstat(fd).st_nlink == 1 and is_removed(double, fd, path)
        double.close(fd)


@CLIENTS
def test_pruned_and_failed_steps_leave_no_directory(
    root: Path, client: type[NetworkClient]
) -> None:
    double = client()
    with double.mounted(), process_on(double), Checkpointer(root, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        fastckpt.saving.pipeline.current().drain()
        assert directories(root) == ["step-00000003-again"]
        double.is_full = True
        assert checkpointer.save(4, state(4)).exception(WAIT_S) is not None
        fastckpt.saving.pipeline.current().drain()
    assert directories(root) == ["step-00000003-again"]


@CLIENTS
def test_a_directory_in_which_something_lingers_goes_at_the_next_save(
    root: Path, client: type[NetworkClient]
) -> None:
    double = client()
    with double.mounted(), process_on(double), Checkpointer(root, keep_last=1) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        directory = attempt(root, 1)
        fd = double.open(str(directory / "objects.pt"))  # as torch.load(mmap=True) has
        checkpointer.save(2, state(2)).result(WAIT_S)
        fastckpt.saving.pipeline.current().drain()
        assert len(lingering(directory)) == 1
        assert double.names(str(directory)) == []
        checkpointer.save(3, state(3)).result(WAIT_S)
        fastckpt.saving.pipeline.current().drain()
        assert directories(root) == ["step-00000001-again", "step-00000003-again"]
        double.close(fd)
        checkpointer.save(4, state(4))
    assert directories(root) == ["step-00000004-again"]


@CLIENTS
def test_debris_is_recognised(disk: Path, client: type[NetworkClient]) -> None:
    path, double = str(disk / "a.pt"), client()
    own = atomic.temporary_path(path)
    debris = own.replace(f"-{os.getpid()}-", f"-{dead_pid()}-")
    for name in (own, debris):
        Path(name).write_bytes(b"begun")
    with double.mounted():
        held = double.open(debris, "lock")
        assert double.lock(held)
        assert atomic.remove_debris(double, path) == []
        double.close(held)
        assert atomic.remove_debris(double, path) == [debris]
    os.unlink(own)
    assert os.listdir(disk) == []


def test_a_file_that_may_only_be_read_is_opened_all_the_same(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "a").write_bytes(b"")
    real = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *rest)

    monkeypatch.setattr(storage.os, "open", refusing)
    fd = Storage().open(str(disk / "a"), "lock")
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    Storage().close(fd)


STALE = pytest.mark.parametrize("name", ["status", "open fd", "read_at", "read"])


@STALE
def test_a_file_that_others_replace_is_read_from_the_beginning(disk: Path, name: str) -> None:
    fastckpt.save({"w": torch.ones(3_000_000)}, disk / "a.pt").result(WAIT_S)
    for options in ({}, {"mmap": True}):
        double = Stale(name, 2)
        with double.mounted(), process_on(double):
            loaded = fastckpt.load(disk / "a.pt", **options)
        assert double.left == 0 and bool((loaded["w"] == 1).all())


@STALE
def test_a_file_that_is_replaced_for_ever_is_an_error(
    disk: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the read: those of the closes do not hide it."""
    monkeypatch.setattr(storage, "_STALE_PAUSES_S", (0.0, 0.0))
    fastckpt.save({"w": torch.ones(3_000_000)}, disk / "a.pt").result(WAIT_S)
    double = Stale(name, 1000)
    with double.mounted(), process_on(double), pytest.raises(StorageError) as caught:
        fastckpt.load(disk / "a.pt")
    assert caught.value.errno == errno.ESTALE and caught.value.op in ("open", "read")
    assert double.numbers_of(name) and 1000 - double.left >= 3


def test_small_files_are_read_from_the_beginning(disk: Path) -> None:
    (disk / "a").write_bytes(b"content")
    double = Stale("read_at", 3)
    assert double.read_file(str(disk / "a"), 100) == b"content" and double.left == 0


def test_what_another_machine_made_is_looked_for_again(root: Path) -> None:
    """A manifest that this one has looked for before it was there."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
    path = root / "step-00000001" / "manifest.json"
    double = RemembersAbsence(path, 1)
    with double.mounted(), PosixSteps(double, str(root)).hold("step-00000001"):
        assert double.numbers_of("look_again")


def test_a_local_file_system_is_not_asked_twice(disk: Path) -> None:
    assert not Storage().look_again(str(disk / "a")) and not Storage().look_again("/dev/shm/a/b")
    with NetworkClient().mounted():
        assert Storage().look_again(str(disk / "a")) and Storage().look_again(str(disk / "a" / "b"))
