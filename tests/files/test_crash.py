"""What a save leaves behind when the machine dies or the file system refuses: after every
operation, in every state the disk may then be in. Responsible for proving that a path always holds
one whole checkpoint. How operations are counted, broken and forgotten is doubles.py's business.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import fastckpt
from fastckpt.errors import StorageError
from fastckpt.saving.pipeline import IN_FLIGHT_MAX, Pipeline
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
from fastckpt.storage.machine import started
from tests.kit import storm as storm_module
from tests.kit.doubles import (
    METHODS,
    Crash,
    Delay,
    FailAlways,
    FailAt,
    FailOnce,
    Image,
    Operation,
    PowerCut,
    Recorder,
    Shorten,
    Storm,
    dead_pid,
    load_through,
    path_of,
    plant,
    save_through,
)

BUDGET_BYTES = 64 << 20
SEED = 20261120
WAIT_S = 60.0
T = TypeVar("T")
pytestmark = [  # an error that only a thread saw is a failure
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]
FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
TAKES_SPACE = ("allocate", "write")  # of these a save looks at the number of the error
ROUTES = pytest.mark.parametrize("by_engine", [False, True], ids=["callback", "engine"])

# What a failing operation is called in the StorageError, and what the error's path names.
REPORTED = {
    "status": ("open", "path"),
    "names": ("open", "path"),
    "create": ("open", "path"),
    "set_permissions": ("set mode", "temporary"),
    "policy": ("open", "path"),
    "set_direct": ("write", "path"),
    "allocate": ("allocate", "path"),
    "write": ("write", "path"),
    "truncate": ("truncate", "path"),
    "fstat": ("write", "path"),
    "sync": ("sync", "path"),
    "open directory": ("open directory", "directory"),
    "rename": ("rename", "path"),
    "sync_directory": ("sync directory", "directory"),
}
# A commit can do without these: a lock, the old file's descriptor, and closing what is durable.
DISPENSABLE = {"lock", "open", "close"}
LOOK = 0  # the first operation is the call's own: whether the directory is there at all


def state(step: int, *sizes: int) -> dict[str, Any]:
    """An object whose content tells its step, with float32 tensors of so many elements."""
    tensors = [torch.arange(size, dtype=torch.float32) * (step + 1) + step for size in sizes]
    return {"step": step, "tensors": tensors, "tiny": torch.tensor([step]), "name": f"step {step}"}


def several(step: int) -> dict[str, Any]:
    """12 MB in two blocks: storages that cross a block's end, and one of a few bytes."""
    return state(step, 1_500_000, 17, 1_200_000, 400_000)


@pytest.fixture(scope="module")
def original(real_disk: Path) -> bytes:
    """The file of several(1) as the real storage wrote it."""
    path = real_disk / "original.pt"
    fastckpt.save(several(1), path).result(WAIT_S)
    content = path.read_bytes()
    path.unlink()
    return content


@contextmanager
def pipeline_on(storage: Storage) -> Iterator[Pipeline]:
    """A pipeline that is closed afterwards; by then its arena is unused again."""
    pipeline = Pipeline(storage=storage, budget_bytes=BUDGET_BYTES)
    try:
        yield pipeline
        must_end(pipeline.drain)
        assert pipeline.staging.engine().arena_blocks_in_use() == 0
    finally:
        must_end(pipeline.close)
        join_saves()


def must_end(wait: Callable[[], None]) -> None:
    """Calls what waits for saves; one that waits for ever fails this test and no other."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), f"{wait.__qualname__} does not end"


def saving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastckpt-save-")]


def join_saves() -> None:
    """Waits for what saves do after they were told done."""
    for thread in saving_threads():
        thread.join(WAIT_S)


def held_by(path: Path, states: dict[int, Any], same: Callable[[Any, Any], None]) -> int | None:
    """The step of the checkpoint under path, whole for fastckpt and for torch; None for none."""
    steps = []
    for load in (fastckpt.load, torch.load):
        try:
            loaded = load(path)
        except FileNotFoundError:
            steps.append(None)
            continue
        same(loaded, states[loaded["step"]])
        steps.append(loaded["step"])
    assert steps[0] == steps[1]
    return steps[0]


def operations_of(directory: Path, obj: Any, *, by_engine: bool, before: bytes | None) -> Recorder:
    """What a save of obj does, over nothing or over a file with the content `before`."""
    directory.mkdir()
    if before is not None:
        (directory / "ckpt.pt").write_bytes(before)
    recorder = Recorder(by_engine=by_engine)
    with pipeline_on(recorder) as pipeline:
        save_through(pipeline, obj, directory / "ckpt.pt").result(WAIT_S)
    shutil.rmtree(directory)
    return recorder


def test_every_method_of_storage_is_recorded(disk: Path) -> None:
    recorder = Recorder()
    assert set(METHODS) >= {"create", "lock", "allocate", "truncate", "sync", "rename", "remove"}
    for name in METHODS:
        assert getattr(Recorder, name) is not getattr(Storage, name), name
    fd = recorder.create(str(disk / "a"), 0o600)
    recorder.rename(str(disk / "a"), str(disk / "b"))
    recorder.sync(fd)
    recorder.close(fd)
    recorder.remove(str(disk / "b"))
    assert [(operation.name, os.path.basename(operation.path)) for operation in recorder.log] == [
        ("create", "a"),
        ("rename", "a"),
        ("sync", "b"),
        ("close", "b"),
        ("remove", "b"),
    ]


def test_syncs_reach_the_kernel(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every other test here believes of Storage: its syncs are the kernel's, of that file."""
    synced = []
    for name in ("fsync", "fdatasync"):
        call = getattr(os, name)

        def spy(fd: int, call: Callable[[int], None] = call) -> None:
            call(fd)
            synced.append(path_of(fd))

        monkeypatch.setattr(os, name, spy)
    storage = Storage()
    fd = storage.create(str(disk / "a"), 0o600)
    storage.sync(fd)
    storage.close(fd)
    storage.sync_directory(str(disk))
    assert synced == [str(disk / "a"), str(disk)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        storage.sync(fd)
    with pytest.raises(FileNotFoundError):
        storage.sync_directory(str(disk / "missing"))


@ROUTES
@pytest.mark.parametrize("overwriting", [False, True], ids=["new", "over"])
def test_operations_stand_in_the_order_that_makes_a_commit(
    disk: Path, original: bytes, overwriting: bool, by_engine: bool
) -> None:
    before = original if overwriting else None
    directory = disk / "run"
    recorder = operations_of(directory, several(2), by_engine=by_engine, before=before)
    log, path = recorder.log, str(directory / "ckpt.pt")
    (created,) = recorder.numbers_of("create")
    (synced,) = recorder.numbers_of("sync")
    (renamed,) = recorder.numbers_of("rename")
    (listed,) = recorder.numbers_of("sync_directory")
    temporary = log[created].path
    assert os.path.dirname(temporary) == str(directory) and temporary != path
    assert log[renamed].path == log[synced].path == temporary and log[renamed].args == (path,)
    assert log[listed].path == str(directory)
    changing = {"allocate", "write", "truncate", "set_permissions", "set_direct"}
    changes = [number for number, operation in enumerate(log) if operation.name in changing]
    assert created < min(changes) and max(changes) < synced < renamed < listed
    assert all(log[number].path == temporary for number in changes)
    assert {operation.name for operation in log[renamed + 1 :]} == {"sync_directory", "close"}
    assert recorder.numbers_of("close")[0] > renamed, "the lock ends with the descriptor"
    assert recorder.numbers_of("remove") == []
    assert bool(recorder.numbers_of("truncate")) == by_engine
    assert len(recorder.numbers_of("set_permissions")) == overwriting


def test_without_durable_nothing_is_synced(disk: Path) -> None:
    recorder = Recorder()
    with pipeline_on(recorder) as pipeline:
        save_through(pipeline, several(1), disk / "ckpt.pt", durable=False).result(WAIT_S)
    assert recorder.numbers_of("sync") == recorder.numbers_of("sync_directory") == []
    assert recorder.numbers_of("rename")[0] > recorder.numbers_of("write")[-1]


def crash(directory: Path, obj: Any, count: int, *, by_engine: bool, durable: bool = True) -> Crash:
    """Saves obj over what is in directory and loses power after `count` operations."""
    storage = Crash(directory, count, by_engine=by_engine)
    # The first operation is the call's own.
    with pipeline_on(storage) as pipeline, suppress(PowerCut):
        save_through(pipeline, obj, directory / "ckpt.pt", durable=durable).exception(WAIT_S)
    return storage


class Aftermath:
    """Looks at images of a crash as the next run would: loads, saves over it, looks again.

    Images that differ in the content of temporaries only are looked at once.
    """

    def __init__(self, directory: Path, same: Callable[[Any, Any], None]) -> None:
        self._directory = directory
        self._same = same
        self._states = {1: several(1), 2: several(2), 3: state(3)}
        self._owner = dead_pid()
        self._seen: dict[tuple[object, int], int | None] = {}

    def step_found(self, image: Image) -> int | None:
        """The step of the checkpoint in the image; a further save was seen to succeed over it."""
        key = (image.get("ckpt.pt"), len(image))
        if key not in self._seen:
            self._seen[key] = self._look(image)
        return self._seen[key]

    def _look(self, image: Image) -> int | None:
        self._directory.mkdir()
        plant(image, self._directory, self._owner)
        path = self._directory / "ckpt.pt"
        found = held_by(path, self._states, self._same)
        fastckpt.save(self._states[3], path).result(WAIT_S)
        assert held_by(path, self._states, self._same) == 3
        assert os.listdir(self._directory) == [path.name], "debris of the dead remains"
        shutil.rmtree(self._directory)
        return found


@ROUTES
@pytest.mark.parametrize(
    "overwriting", [pytest.param(False, marks=pytest.mark.torture), True], ids=["new", "over"]
)
def test_any_operation_may_be_the_last(
    disk: Path,
    original: bytes,
    assert_same: Callable[[Any, Any], None],
    overwriting: bool,
    by_engine: bool,
    storm: storm_module.Storm,
) -> None:
    """Each of them in `make torture`; in `make test` those about the commit, and some others."""
    before = original if overwriting else None
    old = 1 if overwriting else None
    recorder = operations_of(disk / "run", several(2), by_engine=by_engine, before=before)
    renamed, synced = (recorder.numbers_of(name)[0] for name in ("rename", "sync_directory"))
    aftermath = Aftermath(disk / "after", assert_same)
    print(f"seed {SEED}")
    about = {place + more for place in (renamed, synced) for more in (0, 1)}
    for count in sorted({*about, *storm.some(range(len(recorder.log) + 1), 8)}):
        live = disk / "live"
        live.mkdir()
        if before is not None:
            (live / "ckpt.pt").write_bytes(before)
        storage = crash(live, several(2), count, by_engine=by_engine)
        assert storage.names_logged()[:count] == recorder.names_logged()[:count]
        last = storage.log[count - 1].name if count else "nothing"
        for label, image in storage.images(SEED + count):
            what = f"{count} operations, the last {last}; survived: {label}"
            try:
                found = aftermath.step_found(image)
            except Exception as error:
                raise AssertionError(what) from error
            if count <= renamed:
                assert found == old, what
            elif count > synced or label.startswith(("names", "everything")):
                assert found == 2, what
            else:
                assert found in (old, 2), what
        shutil.rmtree(live)


def test_the_images_of_a_crash_tear_what_was_not_synced(disk: Path) -> None:
    """The model is no kinder than a disk: it tears a save that did not sync."""
    live = disk / "live"
    live.mkdir()
    storage = crash(live, several(1), 1000, by_engine=False, durable=False)
    outcomes = {}
    for label, image in storage.images(SEED):
        directory = disk / label
        directory.mkdir()
        plant(image, directory, dead_pid())
        try:
            fastckpt.load(directory / "ckpt.pt")
            outcomes[label] = "whole"
        except Exception as error:
            outcomes[label] = type(error).__name__
    assert outcomes.pop("everything") == "whole"
    for label in ("nothing unsynced", "data, no names"):
        assert outcomes.pop(label) == "FileNotFoundError"
    assert len(outcomes) == 4 and "whole" not in outcomes.values()


def test_only_temporaries_of_the_dead_are_debris(disk: Path) -> None:
    path = str(disk / "ckpt.pt")
    own = atomic.temporary_path(path)
    pid = f"-{os.getpid()}-"
    of_the_dead = own.replace(pid, f"-{dead_pid()}-")
    recycled_pid = own.replace(pid, f"{pid}1")
    debris = {of_the_dead, recycled_pid}
    locked = own.replace(pid, f"-{dead_pid()}-")
    others = {
        own,  # this process lives
        locked,  # by a process in another pid namespace, as far as anyone can tell
        own.replace(".ckpt.pt.", ".ckpt.pt.other-host", 1).replace(pid, f"-{dead_pid()}-"),
        of_the_dead.replace("ckpt.pt", "ckpt.pt.old"),
        of_the_dead.replace("ckpt.pt", "pt"),
        of_the_dead + "x",
        str(disk / "notes.tmp"),
    }
    assert len(debris | others) == 9
    for name in debris | others:
        Path(name).write_bytes(b"begun")
    storage = Storage()
    lock = storage.open(locked)
    try:
        assert storage.lock(lock)
        fastckpt.save(several(1), path).result(WAIT_S)
        assert {str(left) for left in disk.iterdir()} == others | {path}
    finally:
        storage.close(lock)
    fastckpt.save(several(2), path).result(WAIT_S)
    assert {str(left) for left in disk.iterdir()} == others - {locked} | {path}
    for name in others - {locked}:
        os.unlink(name)


def test_a_process_that_nobody_has_reaped_is_dead(disk: Path) -> None:
    """Process 1 of a container may never ask what became of a rank that was killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        own = atomic.temporary_path(str(disk / "ckpt.pt"))
        began = {pid: started(pid) for pid in (os.getpid(), process.pid)}
        of_another, of_this = (f"-{pid}-{began[pid]}-" for pid in (process.pid, os.getpid()))
        temporary = own.replace(of_this, of_another)
        assert temporary != own and not atomic.is_of_dead(Storage(), temporary)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists() and atomic.is_of_dead(Storage(), temporary)


class Fault:
    """One operation of an overwriting save that fails, and what must be true afterwards."""

    def __init__(
        self, directory: Path, before: bytes, same: Callable[[Any, Any], None], by_engine: bool
    ) -> None:
        self._directory = directory
        self._path = directory / "ckpt.pt"
        self._before = before
        self._states = {2: several(2), 3: state(3)}
        self._same = same
        self._by_engine = by_engine

    def happen(self, number: int, code: int) -> None:
        self._path.write_bytes(self._before)
        storage = FailAt(number, code, by_engine=self._by_engine)
        with pipeline_on(storage) as pipeline:
            handle = save_through(pipeline, self._states[2], self._path)
            error = handle.exception(WAIT_S)
            join_saves()
            operation = storage.log[number]
            committed = self._visible(storage, number)
            if number > LOOK and operation.name not in DISPENSABLE:
                assert error is not None, "the failure was swallowed"
            if error is not None:
                assert type(error) is StorageError, repr(error)
                self._check(error, storage, number, code)
                assert error.visible == committed == (operation.name == "sync_directory")
                assert (
                    f"{str(self._path)!r} is the new checkpoint and complete" in str(error)
                ) == (error.visible)
            if committed or error is None:
                assert held_by(self._path, self._states, self._same) == 2
            else:
                assert self._path.read_bytes() == self._before
            assert os.listdir(self._directory) == [self._path.name], "a temporary is left"
            assert pipeline.staging.engine().arena_blocks_in_use() == 0
            assert pipeline.unreported() == []
            save_through(pipeline, self._states[3], self._path).result(WAIT_S)
            assert held_by(self._path, self._states, self._same) == 3

    def _visible(self, storage: FailAt, number: int) -> bool:
        renamed = storage.numbers_of("rename")
        return bool(renamed) and renamed[0] < number and storage.log[number].name != "close"

    def _check(self, error: StorageError, storage: FailAt, number: int, code: int) -> None:
        operation = storage.log[number]
        name, place = REPORTED[operation.name]
        wanted = {"path": str(self._path), "directory": str(self._directory)}.get(place)
        if place == "temporary":
            wanted = operation.path
        offset = operation.args[0] if operation.name == "write" else None
        if operation.name == "set_direct":
            offset = 0
        assert (error.op, error.path, error.errno, error.offset) == (name, wanted, code, offset)
        assert repr(wanted) in str(error) and errno.errorcode[code] in str(error)


@pytest.mark.parametrize("name", sorted({*REPORTED, *DISPENSABLE}))
def test_a_failing_operation_is_reported_and_undone(
    disk: Path, original: bytes, assert_same: Callable[[Any, Any], None], name: str
) -> None:
    happened = 0
    for by_engine in (False, True):
        recorder = operations_of(disk / "run", several(2), by_engine=by_engine, before=original)
        logged = set(recorder.names_logged())
        assert logged <= {*REPORTED, *DISPENSABLE}, "an operation was forgotten here"
        fault = Fault(disk, original, assert_same, by_engine)
        for number in recorder.numbers_of(name):
            for code in FAULTS if name in TAKES_SPACE else FAULTS[number % 3 :][:1]:
                try:
                    fault.happen(number, code)
                except Exception as error:
                    what = f"{recorder.log[number]} failed with {errno.errorcode[code]}"
                    raise AssertionError(what) from error
                happened += 1
    assert happened, "no save does this"


def test_a_disk_that_is_gone_is_one_error(disk: Path, original: bytes) -> None:
    """From some operation on everything fails, the cleaning up included: the first error counts."""
    recorder = operations_of(disk / "run", several(2), by_engine=False, before=original)
    path = disk / "ckpt.pt"
    outcomes = {}
    for number in range(recorder.numbers_of("rename")[0] + 1):
        path.write_bytes(original)
        name = recorder.log[number].name
        if name in DISPENSABLE:
            continue
        storage = FailAt(number, errno.EIO, lasting=True)
        with pipeline_on(storage) as pipeline:
            error = save_through(pipeline, several(2), path).exception(WAIT_S)
        outcomes[name] = error.op if isinstance(error, StorageError) else repr(error)
        for left in disk.glob(".*.tmp"):  # there was no removing it
            left.unlink()
        assert path.read_bytes() == original
    assert outcomes == {name: REPORTED[name][0] for name in outcomes}


def test_a_save_ends_when_its_closes_fail(disk: Path) -> None:
    """For the pipeline, too: it has room for further saves and can be closed."""
    with pipeline_on(FailAlways("close", errno.EIO)) as pipeline:

        def save_many() -> None:
            for step in range(IN_FLIGHT_MAX + 2):
                save_through(pipeline, state(step), disk / "ckpt.pt").exception(WAIT_S)

        must_end(save_many)
    assert fastckpt.load(disk / "ckpt.pt")["step"] == IN_FLIGHT_MAX + 1


def one_byte(_nbytes: int, _attempt: int) -> int:
    return 1


def half(nbytes: int, _attempt: int) -> int:
    return -(-nbytes // 2)


def unaligned(nbytes: int, attempt: int) -> int:
    return min(nbytes, 4096 * (attempt % 7) + 511)


def a_byte_short(nbytes: int, _attempt: int) -> int:
    return max(1, nbytes - 1)


def sometimes_nothing(nbytes: int, attempt: int) -> int:
    return 0 if attempt % 5 else min(nbytes, 1_000_003)


@pytest.mark.parametrize(
    ("portion", "obj"),
    [
        (one_byte, state(1, 5_000)),
        (half, several(1)),
        (unaligned, several(1)),
        (a_byte_short, several(1)),
        (sometimes_nothing, several(1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_short_transfers_end_in_a_whole_file(
    disk: Path,
    assert_same: Callable[[Any, Any], None],
    portion: Callable[[int, int], int],
    obj: Any,
) -> None:
    storage = Shorten(portion)
    with pipeline_on(storage) as pipeline:
        stats = save_through(pipeline, obj, disk / "ckpt.pt").result(WAIT_S)
        assert storage.attempts > 4
        assert (disk / "ckpt.pt").stat().st_size == stats.nbytes
        assert held_by(disk / "ckpt.pt", {1: obj}, assert_same) == 1
        if portion is not sometimes_nothing:  # of a read this means the end of the file
            assert_same(load_through(pipeline, disk / "ckpt.pt"), obj)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_storms_that_pass_end_in_a_whole_file(
    disk: Path, assert_same: Callable[[Any, Any], None], code: int
) -> None:
    storage = Storm(code, 5, portion=half)
    with pipeline_on(storage) as pipeline:
        save_through(pipeline, state(1, 3000, 5), disk / "ckpt.pt").result(WAIT_S)
        assert held_by(disk / "ckpt.pt", {1: state(1, 3000, 5)}, assert_same) == 1
        assert_same(load_through(pipeline, disk / "ckpt.pt"), state(1, 3000, 5))


@pytest.mark.parametrize(
    ("storage", "code"),
    [
        (Storm(errno.EINTR, None), errno.EINTR),
        (Storm(errno.EAGAIN, None), errno.EAGAIN),
        (Shorten(lambda _nbytes, _attempt: 0), errno.EIO),
        (Shorten(lambda nbytes, attempt: nbytes // 3 if attempt == 0 else 0), errno.EIO),
    ],
    ids=["EINTR", "EAGAIN", "no progress", "no more progress"],
)
def test_endless_trouble_is_an_error(
    disk: Path, original: bytes, storage: Shorten, code: int
) -> None:
    path = disk / "ckpt.pt"
    path.write_bytes(original)
    with pipeline_on(storage) as pipeline:
        handle = save_through(pipeline, several(2), path)
        with pytest.raises(StorageError) as caught:
            handle.result(WAIT_S)
        assert (caught.value.op, caught.value.path, caught.value.errno) == (
            "write",
            str(path),
            code,
        )
        offsets = [storage.log[number].args[0] for number in storage.numbers_of("write")]
        assert caught.value.offset in offsets
    assert path.read_bytes() == original
    assert os.listdir(disk) == [path.name]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_failing_read_is_reported(disk: Path, original: bytes, code: int) -> None:
    path = disk / "ckpt.pt"
    path.write_bytes(original)
    recorder = Recorder()
    with pipeline_on(recorder) as pipeline:
        load_through(pipeline, path)
    # Blocks are read by several threads, in any order, and one may be read twice.
    reads = {each.args: each for each in recorder.log if each.name in ("read", "read_at")}
    assert [each.name for each in reads.values()].count("read") > 1
    for read in reads.values():
        storage = FailOnce(read, code)
        with pipeline_on(storage) as pipeline:
            with pytest.raises(StorageError) as caught:
                load_through(pipeline, path)
            assert (caught.value.op, caught.value.path) == ("read", str(path))
            assert caught.value.errno == code
            if read.name == "read":
                assert caught.value.offset == read.args[0]
            assert load_through(pipeline, path)["step"] == 1


def test_saves_to_one_path_commit_in_order(
    disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    """The first one's sync is held until the second has been synced: it still commits first."""
    go_on = threading.Event()
    storage = Delay("sync", go_on)
    path = disk / "ckpt.pt"
    with pipeline_on(storage) as pipeline:
        first = save_through(pipeline, several(1), path)
        assert storage.reached.wait(WAIT_S)
        second = save_through(pipeline, several(2), path)
        second.wait_staged(WAIT_S)
        assert not first.done() and not second.done() and not path.exists()
        go_on.set()
        second.result(WAIT_S)
        assert first.done() and first.exception() is None
        sources = [storage.log[number].path for number in storage.numbers_of("rename")]
        created = [storage.log[number].path for number in storage.numbers_of("create")]
        assert sources == created and len(sources) == 2
    assert held_by(path, {2: several(2)}, assert_same) == 2


def test_close_waits_for_the_last_descriptor(disk: Path, original: bytes) -> None:
    """The replaced file is closed after the commit was told, yet before close() returns."""
    path = disk / "ckpt.pt"
    path.write_bytes(original)
    go_on, closed = threading.Event(), threading.Event()
    written = threading.Event()
    written.set()
    storage = Delay("close", written, written, go_on)  # the directory, the new file, the old one
    pipeline = Pipeline(storage=storage, budget_bytes=BUDGET_BYTES)
    save_through(pipeline, several(2), path).result(WAIT_S)

    def close() -> None:
        pipeline.close()
        closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    early = closed.wait(0.2)
    go_on.set()
    closing.join(WAIT_S)
    join_saves()
    assert not early, "close() returned while a save still held a descriptor"
    assert len(storage.numbers_of("close")) == 3


class Crowded(Recorder):
    """The second allocation finds no space, while the file that the first save replaced is open.

    Args:
        freed_first: that file is closed before the refusal is told, or only after it.
    """

    def __init__(self, freed_first: bool) -> None:
        super().__init__()
        self._freed_first = freed_first
        self._go_on = threading.Event()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "close" and len(self.numbers_of("close")) == 3:
            assert self._go_on.wait(WAIT_S)
        if operation.name == "allocate" and len(self.numbers_of("allocate")) == 2:
            first = saving_threads()[0]
            self._go_on.set()
            if self._freed_first:
                assert first is not threading.current_thread()
                first.join(WAIT_S)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real()


@pytest.mark.parametrize("freed_first", [False, True])
def test_space_that_a_commit_frees_is_used(disk: Path, original: bytes, freed_first: bool) -> None:
    (disk / "ckpt.pt").write_bytes(original)
    with pipeline_on(Crowded(freed_first)) as pipeline:
        save_through(pipeline, state(2), disk / "ckpt.pt").result(WAIT_S)
        save_through(pipeline, state(3), disk / "other.pt").result(WAIT_S)
    assert sorted(os.listdir(disk)) == ["ckpt.pt", "other.pt"]
