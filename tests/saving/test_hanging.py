"""A server that does not answer: a save whose writes or other calls do not return fails within its
bound and says what it waited for, what the kernel still uses is kept until it is given back, and a
process ends.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, StorageError
from fastckpt.directories.draft import Draft
from fastckpt.directories.save import save_directory, wait_for_directories
from fastckpt.engine import transfer
from fastckpt.formats.step_names import step_of
from fastckpt.integrations import dcp
from fastckpt.latch import within
from fastckpt.saving import pipeline as pipeline_module
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps import log
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage import bound
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import Recorder
from tests.kit.mounts import Mount, mounted_fuse
from tests.kit.programs import run_python
from tests.kit.saves import temporaries, wait_until

MIB = 1 << 20
WAIT_S = 60.0


class Hanging(Recorder):
    """A file system of which writes from `offset` on do not return before release()."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self._offset = offset
        self._released = threading.Event()
        self.begun = threading.Event()

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if kind == "write" and offset >= self._offset:
            self.begun.set()
            self.await_release()
        return super().attempt(kind, fd, memory, offset)

    def await_release(self) -> None:
        assert self._released.wait(2 * WAIT_S)

    def release(self) -> None:
        self._released.set()


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5 * MIB,), float(value))}


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[Hanging, Pipeline]]]:
    """Makes the process's pipeline one whose writes from an offset on hang."""
    made = []

    def make(offset: int = 0) -> tuple[Hanging, Pipeline]:
        double = Hanging(offset)
        current = Pipeline(storage=double, budget_bytes=64 * MIB)
        made.append((double, current))
        monkeypatch.setattr(pipeline_module, "_current", current)
        return made[-1]

    yield make
    for double, current in made:
        double.release()
        wait_until(current.staging.hung.sweep, "the writes have returned")
        current.close()


def descriptors_of(path: Path) -> list[str]:
    """The files under a directory that this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in names if name.startswith(f"{path}/")]


def test_a_save_whose_writes_do_not_return_fails(
    disk: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk / "a.pt"
    fastckpt.save(state_of(1), path).result(WAIT_S)
    double, current = hanging(8 * MIB)
    monkeypatch.setattr(bound, "_LOG_S", 0.6)
    caplog.set_level(logging.WARNING, "fastckpt")
    handle = fastckpt.save(state_of(2), path, options=fastckpt.SaveOptions(timeout_s=1.5))
    error = handle.exception(WAIT_S)
    assert isinstance(error, StorageError) and not error.visible
    assert (error.op, error.path, error.errno) == ("write", str(path), errno.ETIMEDOUT)
    assert error.offset is not None and error.offset >= 8 * MIB  # one that waits for it, perhaps
    assert "has not ended for" in str(error) and "timeout_s" in str(error)
    told = [record.getMessage() for record in caplog.records]
    assert any("check that the server or the disk responds" in text for text in told), told
    assert any(f"'{path}' at offset {8 * MIB} was abandoned" in text for text in told), told
    assert torch.equal(torch.load(path)["w"], state_of(1)["w"]), "the checkpoint before stays"
    # What hangs keeps its one block and its file, whose number must not become another's.
    engine = current.staging.engine()
    assert engine.arena_blocks_in_use() == 1
    assert len(temporaries(disk)) == 1 and len(descriptors_of(disk)) == 1
    double.release()
    wait_until(lambda: engine.arena_blocks_in_use() == 0, "the write has returned")
    fastckpt.save(state_of(3), path).result(WAIT_S)
    assert torch.equal(torch.load(path)["w"], state_of(3)["w"])
    assert not temporaries(disk) and not descriptors_of(disk)


def test_the_bound_of_a_save_by_dcp_holds_for_its_writes(
    disk: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for the removal of its file, which the server does not answer either."""
    double, _ = hanging()
    monkeypatch.setattr(pipeline_module, "SERVER_S", math.inf)
    monkeypatch.setattr(double, "remove", lambda _path: double.await_release())
    error = dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id=disk, options=fastckpt.SaveOptions(timeout_s=0.2)
    ).exception(WAIT_S)
    assert isinstance(error, StorageError) and (error.op, error.errno) == ("write", errno.ETIMEDOUT)


def test_a_cancelled_save_does_not_wait_for_writes_that_hang(
    disk: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PARTING_S", 0.6)
    double, _current = hanging()
    handle = fastckpt.save(state_of(1), disk / "a.pt")
    assert double.begun.wait(WAIT_S)
    handle.cancel()
    assert isinstance(handle.exception(WAIT_S), fastckpt.SaveCancelled)
    double.release()


def test_closing_waits_for_no_write_that_hangs(disk: Path, hanging: Any) -> None:
    """close() leaves to the kernel what it has; nothing of it is used for anything else."""
    double, current = hanging()
    handle = fastckpt.save(state_of(1), disk / "a.pt", options=fastckpt.SaveOptions(timeout_s=0.6))
    assert isinstance(handle.exception(WAIT_S), StorageError)
    engine = current.staging.engine()
    current.close()
    assert engine.arena_blocks_in_use() == 1 and len(descriptors_of(disk)) == 1
    double.release()
    wait_until(current.staging.hung.sweep, "the write has returned")
    assert engine.arena_blocks_in_use() == 0
    assert not descriptors_of(disk) and not temporaries(disk)


ENDS = """
import os, sys, threading
import torch, fastckpt
from fastckpt.saving import pipeline
from tests.kit.doubles import Recorder

class Hanging(Recorder):
    def attempt(self, kind, fd, memory, offset):
        threading.Event().wait()

pipeline._current = pipeline.Pipeline(storage=Hanging())
handle = fastckpt.save(
    {"w": torch.ones(3 << 20)}, sys.argv[1], options=fastckpt.SaveOptions(timeout_s=0.6)
)
"""


@pytest.mark.multiprocess
def test_a_process_ends_though_writes_hang(disk: Path) -> None:
    path = disk / "a.pt"
    ended = run_python(ENDS, path, returncode=1, frees=True)
    assert f"the save to '{path}' FAILED and was not committed: write of '{path}'" in ended.stderr
    assert "ETIMEDOUT" in ended.stderr and "terminate" not in ended.stderr
    assert not path.exists() and len(temporaries(disk)) == 1
    fastckpt.save(state_of(1), path).result(WAIT_S)
    assert not temporaries(disk), "what the process has left is debris"


class WithoutLog(Hanging):
    """A file system on which a line of a log is not appended before release()."""

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        return Recorder.attempt(self, kind, fd, memory, offset)

    def append(self, path: str, line: bytes) -> None:
        self.await_release()
        super().append(path, line)


def test_the_bound_of_a_save_holds_for_its_line_in_the_log(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    double = WithoutLog()
    current = Pipeline(storage=double, budget_bytes=64 * MIB)
    monkeypatch.setattr(pipeline_module, "_current", current)
    options = fastckpt.SaveOptions(timeout_s=1.5)
    checkpointer = fastckpt.Checkpointer(disk / "run", options=options, log=True)
    try:
        handle = checkpointer.save(1, state_of(1))
        assert handle.result(WAIT_S).committed_s is not None
        assert current.drain(20.0) == [], "what hangs is given up"
        assert f"append of '{disk}/run/{log.NAME}' failed: " in caplog.text
        assert "is abandoned (timeout_s)" in caplog.text
        assert checkpointer.steps() == [1]
    finally:
        double.release()
    wait_until(current.staging.hung.sweep, "the call has returned")
    checkpointer.close()
    current.close()


STUCK = """
import sys, threading
import torch, fastckpt
from fastckpt.saving import pipeline
from tests.kit.doubles import Recorder

class Stuck(Recorder):
    def sync(self, *_):
        threading.Event().wait()

pipeline._current = pipeline.Pipeline(storage=Stuck())
handle = fastckpt.save(
    {"w": torch.ones(3 << 20)}, sys.argv[1], options=fastckpt.SaveOptions(timeout_s=0.6)
)
"""


@pytest.mark.multiprocess
def test_a_process_ends_though_a_sync_hangs(disk: Path) -> None:
    path = disk / "a.pt"
    ended = run_python(STUCK, path, returncode=1, frees=True)
    assert f"the save to '{path}' FAILED and was not committed: sync of '{disk}" in ended.stderr
    assert "terminate" not in ended.stderr and not path.exists()
    for name in temporaries(disk):
        os.unlink(disk / name)


# Other calls of the file system, of a real one that does not answer.


@contextmanager
def silent(mount: Mount, request: str, offset: int = 0) -> Iterator[None]:
    """Has the server leave one such request unanswered while the body runs."""
    over = mount.control.with_name(mount.control.name + ".over")
    over.unlink(missing_ok=True)
    mount.control.write_text(f"{request} 0 {offset} {offset + 1}")
    try:
        yield
        assert not mount.control.exists(), f"there was no {request}"
    finally:
        over.touch()
        wait_until(pipeline_module.current().staging.hung.sweep, "the call has returned")


@pytest.mark.filesystem
def test_a_save_fails_whose_server_does_not_answer(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tells which call hangs, and others go on; what it has made is removed in the end."""
    monkeypatch.setattr(bound, "_LOG_S", 0.0)
    with mounted_fuse(disk, "through") as mount:
        path = mount.point / "a.pt"
        for number, request in enumerate(["create", "sync", "rename", "remove"]):
            fastckpt.save(state_of(number), path).result(WAIT_S)
            if request == "remove":  # of a save that fails by itself
                monkeypatch.setattr(fastckpt.saving.image_file, "settle", refuse)
            with silent(mount, request):
                handle = fastckpt.save(
                    state_of(9), path, options=fastckpt.SaveOptions(timeout_s=0.6)
                )
                error = handle.exception(WAIT_S)
                assert isinstance(error, StorageError), request
                told = (errno.EIO, "sync") if request == "remove" else (errno.ETIMEDOUT, request)
                assert (error.errno, error.op) == told
                assert error.in_doubt == (request == "rename")
                monkeypatch.undo()
                fastckpt.save(state_of(1), disk / "other.pt").result(WAIT_S)
            wait_until(lambda: not temporaries(mount.files), "its file is removed")
            loaded = torch.load(path)["w"][0].item()
            assert loaded == (9 if request == "rename" else number), request
    assert (
        "create of" in caplog.text and "check that the server or the disk responds" in caplog.text
    )


def refuse(*_: object) -> None:
    raise StorageError("sync", "", errno.EIO)


@pytest.mark.filesystem
def test_a_root_whose_server_does_not_answer_holds_up_no_caller(disk: Path) -> None:
    with ExitStack() as stack:
        mount = stack.enter_context(mounted_fuse(disk, "through"))
        checkpointer = stack.enter_context(
            Checkpointer(mount.point / "run", options=fastckpt.SaveOptions(timeout_s=0.6))
        )
        with silent(mount, "create"):  # of the lease
            error = checkpointer.save(1, state_of(1)).exception(WAIT_S)
            assert isinstance(error, StorageError) and error.path.endswith("lease.json")
            with pytest.raises(StorageError):  # it waits for the first one's thread
                checkpointer.save(2, state_of(2)).result(WAIT_S)
        with silent(mount, "status"), pytest.raises(StorageError, match="nothing was started"):
            Checkpointer(mount.point / "other", options=fastckpt.SaveOptions(timeout_s=0.6))
        checkpointer.save(3, state_of(3)).result(WAIT_S)
        assert checkpointer.latest() == 3


@pytest.mark.filesystem
def test_a_step_that_is_named_after_it_was_given_up_makes_no_room(disk: Path) -> None:
    """No directory is synced after that name, so a crash may take it."""
    with ExitStack() as stack:
        mount = stack.enter_context(mounted_fuse(disk, "through"))
        run = mount.point / "run"
        checkpointer = stack.enter_context(
            Checkpointer(run, keep_last=2, options=fastckpt.SaveOptions(timeout_s=0.6))
        )
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result(WAIT_S)
        with silent(mount, "rename"):
            error = checkpointer.save(3, state_of(3)).exception(WAIT_S)
            assert isinstance(error, StorageError) and error.in_doubt
        wait_until(lambda: checkpointer.latest() == 3, "the step is named")
        checkpointer.save(4, state_of(4)).result(WAIT_S)
        checkpointer.close()  # which removes what need not stay
        steps = {step_of(path.name) for path in mount.files.glob("run/step-*")}
        assert steps == {2, 3, 4}


@pytest.mark.filesystem
def test_an_export_to_a_server_that_does_not_answer_holds_up_no_caller(disk: Path) -> None:
    """The directory is made in the background; one that is made late does not stay."""
    with mounted_fuse(disk, "through") as mount:
        path, state = mount.point / "hf", {"w": torch.ones(9)}
        with silent(mount, "mkdir"):
            handle = within(
                WAIT_S,
                lambda: fastckpt.export(state, path, options=fastckpt.SaveOptions(timeout_s=0.6)),
            )
            error = handle.exception(WAIT_S)
            assert isinstance(error, StorageError) and error.op == "make directory"
            assert error.errno == errno.ETIMEDOUT
        assert os.listdir(mount.files) == []
        fastckpt.export(state, path).result(WAIT_S)
        wait_for_directories(str(mount.point))


@pytest.mark.filesystem
def test_a_directory_stays_whole_whose_replacement_hangs(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late call is done in the end; what then goes is what a killed process would leave."""
    with mounted_fuse(disk, "through") as mount:
        path = str(mount.point / "tag")
        for exchanges in (True, False):
            save_directory(path, filling("old")).result(WAIT_S)
            if not exchanges:
                monkeypatch.setattr(Storage, "exchange", cannot)
            with silent(mount, "rename"):
                error = save_directory(
                    path, filling("new"), options=fastckpt.SaveOptions(timeout_s=0.6)
                ).exception(WAIT_S)
                assert isinstance(error, StorageError) and error.in_doubt
            assert (mount.files / "tag" / "x").read_text() == ("new" if exchanges else "old")
            wait_until(lambda: os.listdir(mount.files) == ["tag"], "the leftover is removed")


def filling(text: str) -> Callable[[Draft], None]:
    return lambda draft: draft.add_content(text.encode(), "x")


def cannot(*_: object) -> None:
    raise OSError(errno.EINVAL, "no exchange of names here")


@pytest.mark.filesystem
def test_save_itself_waits_no_longer_for_a_server(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted_fuse(disk, "through") as mount:
        path = mount.point / "a.pt"
        with silent(mount, "status"):
            with pytest.raises(StorageError, match="nothing was started") as raised:
                fastckpt.save(state_of(1), path, options=fastckpt.SaveOptions(timeout_s=0.6))
            assert raised.value.errno == errno.ETIMEDOUT
            handle = fastckpt.save(
                state_of(1), path, options=fastckpt.SaveOptions(timeout_s=0.6, on_error="warn")
            )
            assert "nothing was started" in caplog.text
            assert isinstance(handle.exception(WAIT_S), StorageError)
        fastckpt.save(state_of(1), path).result(WAIT_S)


class LateClose(Recorder):
    """A server that has closed a file and says so late, as NFS may where close(2) writes back."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.closed = "", -1
        self.may_return = threading.Event()

    def close(self, fd: int) -> None:
        is_it = os.readlink(f"/proc/self/fd/{fd}") == self.name
        super().close(fd)
        if is_it:
            self.closed, self.name = fd, ""
            assert self.may_return.wait(WAIT_S)


def test_a_number_of_a_closed_file_is_another_ones(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close that hung may have closed its file: nothing is done to that number again."""
    double, lease = LateClose(), disk / "run" / "lease.json"
    current = Pipeline(storage=double, budget_bytes=64 * MIB)
    monkeypatch.setattr(pipeline_module, "_current", current)
    with (
        Checkpointer(disk / "run", options=fastckpt.SaveOptions(timeout_s=0.6)) as checkpointer,
        ExitStack() as mine,
    ):
        checkpointer.save(1, state_of(1)).result(WAIT_S)
        lease.unlink()  # so that the next save lets go of it
        double.name = f"{lease} (deleted)"
        error = checkpointer.save(2, state_of(2)).exception(WAIT_S)
        assert isinstance(error, StorageError) and error.op == "close" and "lease" in error.path
        while (fd := os.open("/dev/null", os.O_RDWR)) != double.closed:
            mine.callback(os.close, fd)
        mine.callback(os.close, fd)
        double.may_return.set()
        wait_until(current.staging.hung.sweep, "the call has returned")
        checkpointer.save(3, state_of(3)).result(WAIT_S)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/null"
        assert checkpointer.latest() == 3
    current.close()


def test_a_process_that_was_stopped_does_not_count_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bound.time, "monotonic", lambda: now)
    limit, began, looks = bound.Bound(1.0), now, 0
    assert not limit.is_over(0.0, str)
    now += 4.0  # as after SIGCONT
    while not limit.is_over(now - began, str):
        now, looks = now + limit.look_s, looks + 1
    assert looks >= 2
    assert not limit.is_over(0.0, str), "another wait begins"


NEVER = """
import sys, threading
import torch, fastckpt
from fastckpt.saving import pipeline

pipeline._STILL_S = 0.5
asked = threading.Event()

def before_commit(*_):
    asked.set()
    threading.Event().wait()

handle = fastckpt.save({"w": torch.ones(8)}, sys.argv[1], before_commit=before_commit)
asked.wait()
"""


@pytest.mark.multiprocess
def test_a_process_ends_though_a_function_of_the_callers_hangs(disk: Path) -> None:
    ended = run_python(NEVER, disk / "a.pt", returncode=1, frees=True)
    lost = f"the save to '{disk / 'a.pt'}' may be lost; this process no longer waits for it"
    assert lost in ended.stderr
    for name in temporaries(disk):
        os.unlink(disk / name)


IN_A_WORKER = """
import multiprocessing, sys, threading
import torch, fastckpt

def work(path):
    def save():
        threading.main_thread().join()
        fastckpt.save({"w": torch.ones(1 << 18)}, path, drain_rate=4 << 20)
    threading.Thread(target=save).start()

worker = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],))
worker.start()
worker.join()
"""


@pytest.mark.multiprocess
def test_a_forked_worker_waits_for_saves_of_its_threads(disk: Path) -> None:
    """It ends by os._exit(), so that no function of atexit is called."""
    run_python(IN_A_WORKER, disk / "a.pt")
    assert torch.load(disk / "a.pt")["w"].sum() == 1 << 18


class SlowList(Storage):
    """Lists a directory late, once."""

    def __init__(self) -> None:
        self.begun, self.may_return = threading.Event(), threading.Event()

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        if not self.begun.is_set():
            self.begun.set()
            assert self.may_return.wait(WAIT_S)
        return super().names(directory, directories=directories)


def test_a_listing_that_hangs_holds_no_lock(disk: Path) -> None:
    double = SlowList()
    steps = PosixSteps(double, str(disk))
    thread = threading.Thread(target=steps.next_sequence)
    thread.start()
    assert double.begun.wait(WAIT_S)
    first = within(WAIT_S, steps.next_sequence)
    double.may_return.set()
    thread.join(WAIT_S)
    assert steps.next_sequence() == first + 2


def test_an_export_whose_server_hangs_is_told(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real_path = threading.Event(), os.path.realpath

    def hanging(path: Any, **options: Any) -> Any:
        if "exports" in str(path):
            answers.wait(WAIT_S)
        return real_path(path, **options)

    monkeypatch.setattr(os.path, "realpath", hanging)
    with pytest.raises(StorageError, match="look-up"):
        fastckpt.export(
            {"w": torch.ones(9)},
            disk / "exports" / "1",
            options=fastckpt.SaveOptions(timeout_s=0.5),
        )
    answers.set()
