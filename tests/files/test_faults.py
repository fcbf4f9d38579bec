"""Faults of the world met by a save, made by real means: full and read-only file systems, limits of
a process, directories that are missing or go away. What counts is always the same: a StorageError
that says what failed, the previous checkpoint intact, nothing left behind, and saving goes on
afterwards. Must not know in which order a save uses the file system.
"""

from __future__ import annotations

import concurrent.futures
import errno
import io
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fastckpt
from tests.kit.mounts import MIB, leave_free, mounted, run_as_root
from tests.kit.programs import run_python
from tests.kit.saves import (
    WAIT_S,
    HeldTensor,
    every_test_settles,
    saving_threads,
    temporaries,
    wait_until,
)

__all__ = ["every_test_settles"]  # for all tests here, too


def state(value: float, nbytes: int = 10 * MIB) -> dict[str, torch.Tensor]:
    return {"w": torch.full((nbytes // 4,), float(value))}


def value_of(path: Path) -> float:
    w = fastckpt.load(path)["w"]
    assert bool((w == w[0]).all()), "old and new values mixed"
    return float(w[0])


def check_storage_error(
    error: BaseException | None, number: int, path: Path, *ops: str
) -> fastckpt.StorageError:
    """That the error tells all of it: what failed, where, why; in every way callers look at it."""
    assert isinstance(error, fastckpt.StorageError)
    assert isinstance(error, fastckpt.CheckpointError)
    assert isinstance(error, RuntimeError) and isinstance(error, OSError)
    assert error.errno == number, error
    assert error.op in ops, error
    assert error.path == str(path) and error.filename == str(path)
    assert (error.offset is not None) == (error.op in ("write", "read")), error
    for part in (error.op, str(path), os.strerror(number), errno.errorcode[number]):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy).keys() >= {"op", "path", "offset"}
    return error


# A full disk.


@contextmanager
def no_room(directory: Path) -> Iterator[None]:
    """The file system has room for a small file only."""
    ballast = leave_free(directory, 2 * MIB)
    yield
    ballast.unlink()


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "ext2"])
def test_full_disk(disk: Path, kind: str) -> None:
    with mounted(kind, disk, 48 * MIB if kind == "tmpfs" else 0) as mount:
        path = mount / "a.pt"
        fastckpt.save(state(1), path).result(WAIT_S)
        with no_room(mount):
            for fence in ("call", "step"):
                handle = fastckpt.save(state(2), path, options=fastckpt.SaveOptions(fence=fence))
                error = check_storage_error(
                    handle.exception(WAIT_S), errno.ENOSPC, path, "allocate", "write"
                )
                with pytest.raises(fastckpt.StorageError):
                    handle.result()
                # ext2 cannot allocate ahead: there the write itself meets the end of the disk.
                assert error.op == ("write" if kind == "ext2" else "allocate")
                is_told = re.search(r"MiB are needed, but .*B are free on the file sy", str(error))
                assert is_told or error.op == "write"
                assert error.offset is None or 0 <= error.offset < handle.stats.nbytes
                assert value_of(path) == 1 and not temporaries(mount)
            free = os.statvfs(mount)
            assert free.f_bfree * free.f_frsize > MIB, "the failed saves keep their space"
        fastckpt.save(state(3), path).result(WAIT_S)
        assert value_of(path) == 3


@pytest.mark.filesystem
@pytest.mark.parametrize("backend", ["threads", "io_uring"])
def test_write_that_meets_the_end_of_the_disk_names_its_offset(disk: Path, backend: str) -> None:
    with mounted("ext2", disk) as mount:
        path = mount / "a.pt"
        leave_free(mount, 20 * MIB)
        handle = fastckpt.save(
            state(1, 40 * MIB),
            path,
            options=fastckpt.SaveOptions(backend=backend, staging_bytes=16 * MIB),
        )
        error = handle.exception(WAIT_S)
        if isinstance(error, fastckpt.BackendUnavailable):
            pytest.skip(str(error))
        error = check_storage_error(error, errno.ENOSPC, path, "write")
        # Two were under way, and threads may write the first block last.
        first = 8 * MIB if backend == "io_uring" else 0
        assert error.offset is not None and first <= error.offset < 32 * MIB
        assert not path.exists() and not temporaries(mount)


@pytest.mark.filesystem
def test_full_disk_and_torchs_legacy_format(disk: Path) -> None:
    with mounted("tmpfs", disk, 48 * MIB) as mount:
        path = mount / "a.pt"
        fastckpt.save(state(1), path).result(WAIT_S)
        with no_room(mount):
            with pytest.raises((OSError, RuntimeError)):
                fastckpt.save(state(2), path, _use_new_zipfile_serialization=False).result(WAIT_S)
            assert value_of(path) == 1 and not temporaries(mount)
        fastckpt.save(state(3), path, _use_new_zipfile_serialization=False).result(WAIT_S)
        assert value_of(path) == 3


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs"])
@pytest.mark.parametrize("durable", [True, False])
def test_room_for_two_copies_is_enough_for_ever(disk: Path, kind: str, durable: bool) -> None:
    with mounted(kind, disk, 48 * MIB if kind == "tmpfs" else 0) as mount:
        path = mount / "a.pt"
        # Two copies and what the file system adds of its own, but never three.
        leave_free(mount, 24 * MIB)
        turns = 25
        for turn in range(turns):
            fastckpt.save(state(turn), path, options=fastckpt.SaveOptions(durable=durable)).result(
                WAIT_S
            )
        assert value_of(path) == turns - 1
        assert not temporaries(mount)


# Limits and permissions.

FILE_SIZE_LIMIT = """
import errno, resource, sys
import torch, fastckpt
path = sys.argv[1]
fastckpt.save({"w": torch.zeros(10)}, path).result(60)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (1 << 20, 1000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        fastckpt.save({"w": torch.ones(3 << 20)}, path).result(60)
        sys.exit("the limit was not met")
    except fastckpt.StorageError as error:
        assert error.errno == errno.EFBIG and error.path == path, error
        assert error.op in ("allocate", "write") and "ulimit" in str(error), error
assert fastckpt.load(path)["w"].numel() == 10
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
fastckpt.save({"w": torch.ones(3 << 20)}, path).result(60)
assert fastckpt.load(path)["w"].numel() == 3 << 20
"""


@pytest.mark.multiprocess
def test_file_size_limit(disk: Path) -> None:
    run_python(FILE_SIZE_LIMIT, disk / "a.pt")
    assert [path.name for path in disk.iterdir()] == ["a.pt"]


SHORT_WRITE = """
import errno, resource, sys
import fastckpt
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
storage, path = Storage(), sys.argv[1]
assert atomic.replace_file(storage, path, b"old", durable=True) is None
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
try:
    atomic.replace_file(storage, path, b"new" * 4000, durable=True)
except fastckpt.StorageError as error:
    assert error.errno == errno.EFBIG and error.op == "write" and not error.visible, repr(error)
else:
    sys.exit("a part of the content was committed")
assert storage.read_file(path, 1 << 20) == b"old"
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
storage.close(atomic.replace_file(storage, path, b"new" * 4000, durable=True))
assert storage.read_file(path, 1 << 20) == b"new" * 4000
"""


@pytest.mark.multiprocess
def test_a_small_file_is_never_replaced_by_a_part(disk: Path) -> None:
    """Commit records, such as a tracker: the kernel writes what fits, and refuses the rest only
    when it is asked for that.
    """
    run_python(SHORT_WRITE, disk / "latest")
    assert [path.name for path in disk.iterdir()] == ["latest"]


OPEN_FILES_LIMIT = """
import errno, os, resource, sys
import torch, fastckpt
path = sys.argv[1]
fastckpt.save({"w": torch.zeros(10)}, path).result(60)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EMFILE
for spare in range(4):
    handle = fastckpt.save({"w": torch.ones(10)}, path)
    error = handle.exception(60)
    if error is None:
        break
    assert isinstance(error, fastckpt.StorageError) and error.errno == errno.EMFILE, repr(error)
    os.close(taken.pop())
else:
    sys.exit("four descriptors were not enough")
assert bool((fastckpt.load(path)["w"] == 1).all())
"""


@pytest.mark.multiprocess
def test_no_descriptors_left(disk: Path) -> None:
    run_python(OPEN_FILES_LIMIT, disk / "a.pt")
    assert [path.name for path in disk.iterdir()] == ["a.pt"]


@pytest.mark.filesystem
@pytest.mark.parametrize("how", ["remount", "bind"])
def test_read_only_mount(disk: Path, how: str) -> None:
    with mounted("tmpfs", disk, 48 * MIB) as mount:
        path = mount / "a.pt"
        fastckpt.save(state(1, MIB), path).result(WAIT_S)
        if how == "bind":
            run_as_root("mount", "--bind", str(mount), str(mount))
            run_as_root("mount", "-o", "remount,bind,ro", str(mount))
        else:
            run_as_root("mount", "-o", "remount,ro", str(mount))
        try:
            error = fastckpt.save(state(2, MIB), path).exception(WAIT_S)
        finally:
            undo = ["umount", "-l", str(mount)]
            if how == "remount":
                undo = ["mount", "-o", "remount,rw", str(mount)]
            subprocess.run(undo, check=True)
        check_storage_error(error, errno.EROFS, path, "open")
        assert value_of(path) == 1 and not temporaries(mount)
        fastckpt.save(state(3, MIB), path).result(WAIT_S)
        assert value_of(path) == 3


def too_long_a_name(disk: Path) -> Path:
    return disk / ("n" * 256)


def test_directory_removed_during_the_save(disk: Path) -> None:
    path = disk / "run" / "a.pt"
    path.parent.mkdir()
    with HeldTensor() as held:
        handle = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        wait_until(lambda: temporaries(path.parent), "the save has begun to write")
        shutil.rmtree(path.parent)
        held.release()
    check_storage_error(handle.exception(WAIT_S), errno.ENOENT, path.parent, "open directory")
    assert list(disk.iterdir()) == []
    path.parent.mkdir()
    fastckpt.save(state(2, MIB), path).result(WAIT_S)
    assert value_of(path) == 2


def test_directory_put_in_place_of_the_file_during_the_save(disk: Path) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held:
        handle = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        wait_until(lambda: temporaries(disk), "the save has begun to write")
        path.mkdir()
        held.release()
    check_storage_error(handle.exception(WAIT_S), errno.EISDIR, path, "rename")
    assert path.is_dir() and not temporaries(disk)


# Who hears of a failure.


def test_failure_not_asked_for_is_raised_by_the_next_save_once(disk: Path) -> None:
    failed = fastckpt.save(state(1, MIB), bad := too_long_a_name(disk))
    concurrent.futures.wait([failed], WAIT_S)
    good = disk / "good.pt"
    with pytest.raises(fastckpt.StorageError) as caught:
        fastckpt.save(state(2, MIB), good)
    assert caught.value.path == str(bad) and caught.value.errno == errno.ENAMETOOLONG
    assert str(caught.value) == (
        f"an earlier save, to {str(bad)!r}, failed: {failed.exception()}; "
        f"this save, to {str(good)!r}, was not begun"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not good.exists(), "the save that raises an earlier error must not begin"
    fastckpt.save(state(3, MIB), good).result(WAIT_S)
    assert value_of(good) == 3
    with pytest.raises(fastckpt.StorageError) as again:
        failed.result()
    assert again.value is caught.value.__cause__ and isinstance(again.value.__cause__, OSError)


def test_several_failures_are_raised_in_order_one_by_each_save(disk: Path) -> None:
    with HeldTensor() as held:
        # All three are on their way before the first can fail.
        handles = [
            fastckpt.save(
                {"w": held.tensor}, disk / f"{i}.pt", options=fastckpt.SaveOptions(fence="step")
            )
            for i in range(3)
        ]
        held.tensor[0] = 0
        held.release()
    concurrent.futures.wait(handles, WAIT_S)
    raised = []
    for _ in handles:
        with pytest.raises(fastckpt.StagingConflict) as caught:
            fastckpt.save(state(1, MIB), disk / "good.pt")
        raised.append(caught.value.__cause__)
    assert len(set(map(id, raised))) == 3
    assert {id(handle.exception()) for handle in handles} == set(map(id, raised))
    fastckpt.save(state(2, MIB), disk / "good.pt").result(WAIT_S)
    assert [path.name for path in disk.iterdir()] == ["good.pt"]


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_failure_asked_for_is_not_raised_again(disk: Path, ask: str) -> None:
    handle = fastckpt.save(state(1, MIB), too_long_a_name(disk))
    if ask == "result":
        with pytest.raises(fastckpt.StorageError):
            handle.result(WAIT_S)
    else:
        assert handle.exception(WAIT_S) is not None
    fastckpt.save(state(2, MIB), disk / "good.pt").result(WAIT_S)


def test_failure_is_only_warned_of_on_request(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed = fastckpt.save(
        state(1, MIB), bad := too_long_a_name(disk), options=fastckpt.SaveOptions(on_error="warn")
    )
    assert failed.wait_done(WAIT_S)
    fastckpt.save(state(2, MIB), disk / "good.pt").result(WAIT_S)
    told = [line for line in caplog.messages if "ENAMETOOLONG" in line]
    assert len(told) == 1 and told[0].startswith(f"{str(bad)!r} was not saved: StorageError: ")
    with pytest.raises(fastckpt.StorageError):
        failed.result()


def test_failure_is_raised_by_a_save_to_a_file_object_too(disk: Path) -> None:
    failed = fastckpt.save(state(1, MIB), too_long_a_name(disk))
    concurrent.futures.wait([failed], WAIT_S)
    with pytest.raises(fastckpt.StorageError, match="to a file-like object, was not begun"):
        fastckpt.save(state(1, MIB), io.BytesIO())


def test_failures_leak_nothing(disk: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    fastckpt.save(state(1, MIB), disk / "a.pt").result(WAIT_S)
    wait_until(lambda: not saving_threads(), "the first save is over")
    before = descriptors()
    for i in range(40):  # more than may be in flight together: each must give its place back
        path = disk / ("a.pt/a.pt" if i % 2 else "n" * 256)
        error = fastckpt.save(state(2, MIB), path).exception(WAIT_S)
        assert isinstance(error, fastckpt.StorageError)
    wait_until(lambda: not saving_threads(), "the failed saves are over")
    assert descriptors() <= before  # what earlier tests left to the collector may be gone
    fastckpt.save(state(3, MIB), disk / "a.pt").result(WAIT_S)
    assert value_of(disk / "a.pt") == 3


LITTLE_ADDRESS_SPACE = """
import resource, sys
import torch, fastckpt
state = {"w": torch.ones(6 << 20)}
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]), -1))
try:
    fastckpt.save(state, sys.argv[1]).result(60)
    blocks = fastckpt.saving.pipeline.current().staging.engine().arena_blocks
    assert blocks == 1 or blocks << 23 <= int(sys.argv[2]) // 2, blocks
    print("saved")
except fastckpt.CheckpointError as error:
    assert "address space" in str(error) or "threads" in str(error), error
    assert "ulimit -v" in str(error), error
    print("refused")
"""


LITTLE_TO_LOAD = """
import resource, sys
import torch, fastckpt
fastckpt.save({"w": torch.ones(16 << 20)}, sys.argv[1]).result(60)
fastckpt.load(sys.argv[1])  # threads and staging have their room
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), -1))
for options in ({}, {"mmap": True}, {"mmap": True, "verify": False}):
    try:
        fastckpt.load(sys.argv[1], **options)
    except fastckpt.StorageError as error:
        assert error.errno == 12 and error.path == sys.argv[1], repr(error)
        print(error.op)
"""


@pytest.mark.multiprocess
def test_no_address_space_to_load_into_is_told(disk: Path) -> None:
    """Whether the file is read or mapped."""
    said = run_python(LITTLE_TO_LOAD, disk / "a.pt").stdout
    assert said == "allocate memory to load\n" * 3


@pytest.mark.multiprocess
@pytest.mark.parametrize("room_mib", [1, 8, 20, 64, 4096])
def test_no_address_space_is_told_or_less_is_taken(disk: Path, room_mib: int) -> None:
    """Also if a budget would fit in, but then nothing else."""
    variables = {"FASTCKPT_STAGING_BYTES": f"{room_mib - 256}MiB"} if room_mib > 256 else None
    room = room_mib * MIB
    said = run_python(LITTLE_ADDRESS_SPACE, disk / "a.pt", room, variables=variables).stdout
    assert said == ("saved\n" if variables else said) and said in ("saved\n", "refused\n")
    assert os.listdir(disk) == (["a.pt"] if said == "saved\n" else [])
