"""Directories of files in others' formats: what is visible after a crash or an error at any moment,
what stock readers find in them, and what is said of a damaged one. Must not know any framework.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import fastckpt
from fastckpt.directories import iterations
from fastckpt.directories.draft import Draft
from fastckpt.directories.place import DirectoryPlace
from fastckpt.directories.save import remove_directory, save_directory, wait_for_directories
from fastckpt.directories.shelf import numbered
from fastckpt.directories.verify import check, newest_whole
from fastckpt.engine.staging import Allowance
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    PeerFailed,
    StagingConflict,
    StorageError,
)
from fastckpt.formats import file_list
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import (
    BUDGET_BYTES,
    Crash,
    Delay,
    FailAt,
    Operation,
    PowerCut,
    Recorder,
    dead_pid,
    plant,
    power_cuts,
    through,
)
from tests.kit.storm import SUITE_SEED, Storm

WAIT_S = 60.0
T = TypeVar("T")
FILES = {"fastckpt.json", "model.safetensors", "notes.txt", "optimizer.pt", "sub/more.txt"}


def tensors(step: int) -> dict[str, torch.Tensor]:
    weight = torch.arange(6000, dtype=torch.float32).reshape(60, 100) + step
    return {
        "weight": weight,
        "tied": weight,
        "column": weight[:, 3],
        "half": weight.to(torch.bfloat16)[:7],
        "none": torch.empty(0, 4),
        "count": torch.tensor(step),
    }


def fill_with(step: int) -> Callable[[Draft], None]:
    def fill(draft: Draft) -> None:
        assert draft.add_tensors(tensors(step), "model.safetensors", {"format": "pt"})
        draft.add({"step": step, "state": torch.ones(40_000) * step}, "optimizer.pt")
        Path(draft.directory, "notes.txt").write_text(f"step {step}")
        Path(draft.directory, "sub").mkdir()
        Path(draft.directory, "sub", "more.txt").write_text("")

    return fill


def files_in(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def step_in(directory: Path) -> int:
    """Which step a directory holds, read by stock readers; fails unless it is whole."""
    assert files_in(directory) == FILES
    state = torch.load(directory / "optimizer.pt")
    step: int = state["step"]
    loaded = safetensors.torch.load_file(directory / "model.safetensors")
    assert loaded.keys() == tensors(step).keys()
    for name, tensor in tensors(step).items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    assert torch.equal(state["state"], torch.ones(40_000) * step)
    assert (directory / "notes.txt").read_text() == f"step {step}"
    assert check(str(directory))
    return step


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("budget_bytes", [8 << 20, BUDGET_BYTES])
def test_stock_readers_find_what_was_saved(disk: Path, fence: str, budget_bytes: int) -> None:
    with through(Storage(), budget_bytes):
        for step in range(3):  # the first makes the directory and its parent, others replace it
            handle = save_directory(
                str(disk / "runs" / "a"), fill_with(step), options=fastckpt.SaveOptions(fence=fence)
            )
            stats = handle.result(WAIT_S)
            wait_for_directories(str(disk / "runs"))
            assert step_in(disk / "runs" / "a") == step
            assert os.listdir(disk / "runs") == ["a"]
            assert stats.nbytes > 200_000 and stats.committed_s is not None
    with safetensors.safe_open(disk / "runs" / "a" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_files_are_written_in_blocks(disk: Path) -> None:
    large = {"a": torch.randn(5 << 20), "b": torch.randn(1000)}  # 20 MiB, blocks of 8
    with through(Storage(), 16 << 20):

        def fill(draft: Draft) -> None:
            draft.add_tensors(large, "model.safetensors", {})
            draft.add(large, "model.pt")

        save_directory(str(disk / "a"), fill).result(WAIT_S)
    assert check(str(disk / "a"))
    for loaded in (
        safetensors.torch.load_file(disk / "a" / "model.safetensors"),
        fastckpt.load(disk / "a" / "model.pt"),
    ):
        assert all(torch.equal(loaded[name], large[name]) for name in large)


def test_a_stop_at_any_operation_leaves_the_old_directory_or_the_new_one(
    memory: Path, storm: Storm
) -> None:
    path, seen, recorder = memory / "a", set(), Recorder()
    with through(Storage()):
        save_directory(str(path), fill_with(0)).result(WAIT_S)
    with through(recorder):
        save_directory(str(path), fill_with(0)).result(WAIT_S)
    for number in storm.moments([operation.name for operation in recorder.log], 10):
        with through(FailAt(number, errno.EIO, lasting=True)):
            handle = save_directory(
                str(path), fill_with(number + 1), options=fastckpt.SaveOptions(on_error="warn")
            )
            failed = handle.exception(WAIT_S) is not None
        seen.add((failed, step_in(path) == number + 1))
        assert failed or step_in(path) == number + 1
        with through(Storage()):
            save_directory(str(path), fill_with(0)).result(WAIT_S)
    assert number > 30 and {(True, False), (False, True)} <= seen
    for left in memory.glob(".*.tmp"):  # of this process, which is alive
        os.rename(left, str(left).replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    with through(Storage()):
        save_directory(str(path), fill_with(1)).result(WAIT_S)
    assert os.listdir(memory) == ["a"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("inside", ["a", "new/er/a"], ids=["over", "new"])
def test_any_operation_may_be_the_last(memory: Path, inside: str, storm: Storm) -> None:
    """Under the name is the old directory or the new one, and under that of the one that the save
    removes afterwards this one or nothing: never a part.
    """
    before = memory / "before"
    steps = {"older": 0} | ({"a": 1} if inside == "a" else {})
    with through(Storage()):
        for name, step in steps.items():
            save_directory(str(before / name), fill_with(step)).result(WAIT_S)

    def save(storage: Crash, live: Path) -> bool:
        with through(storage) as pipeline:
            retain = partial(remove_directory, str(live / "older"))
            handle = save_directory(str(live / inside), fill_with(2), retain=retain)
            told = handle.exception(WAIT_S) is None
            with suppress(PowerCut):  # what it is for
                pipeline.drain()
        return told

    def find(after: Path) -> dict[str, int]:
        there = [name for name in ("older", inside) if (after / name).exists()]
        return {name: step_in(after / name) for name in there}

    for cut in power_cuts(before, save, find, storm=storm):
        new = cut.found in (steps | {inside: 2}, {inside: 2})
        assert new or (cut.found == steps and not cut.told), cut.text
    assert cut.count > 60


class CrashWithoutExchange(Crash):
    """The file system cannot exchange two names, either."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        def refuse() -> T:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        return super().perform(number, operation, refuse if operation.name == "exchange" else real)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_directory_that_was_put_aside_gets_its_name_back(memory: Path, storm: Storm) -> None:
    """Two renames leave a moment in which nothing has the name: who saves next finds the old one.
    (Of their names some alone may not survive: no file system does one rename without the other.)
    """
    before, live, after = (memory / name for name in ("before", "live", "after"))
    with through(Storage()):
        save_directory(str(before / "a"), fill_with(1)).result(WAIT_S)
    owner, seen, looked_at = dead_pid(), set(), set()
    shutil.copytree(before, live)
    with through(CrashWithoutExchange(live, sys.maxsize)) as pipeline:
        save_directory(str(live / "a"), fill_with(2)).result(WAIT_S)
        pipeline.drain()
        operations = [operation.name for operation in pipeline.storage.log]
    shutil.rmtree(live)
    for count in storm.moments(operations, 10):
        shutil.copytree(before, live)
        storage, told = CrashWithoutExchange(live, count), False
        with through(storage) as pipeline, suppress(PowerCut):  # what it is for
            told = save_directory(str(live / "a"), fill_with(2)).exception(WAIT_S) is None
            pipeline.drain()
        for label, image in storage.images(SUITE_SEED + count, 0):
            key = told, hash(tuple(image.items()))
            if key in looked_at:
                continue
            looked_at.add(key)
            plant(image, after, owner)
            is_there = (after / "a").exists()
            atomic.remove_dead_directories(Storage(), str(after))
            what = f"{count} operations, the last {storage.log[:count][-1:]}; survived: {label}"
            assert os.listdir(after) == ["a"], what
            found = step_in(after / "a")
            assert found == 2 or (found == 1 and not told), what
            seen.add((is_there, found))
            shutil.rmtree(after)
        shutil.rmtree(live)
    assert seen == {(True, 1), (False, 1), (True, 2)}


def test_everything_is_durable_before_the_name_and_the_name_before_the_result(disk: Path) -> None:
    path = disk / "a"
    with through(Storage()):
        save_directory(str(path), fill_with(0)).result(WAIT_S)
    storage = Recorder()
    with through(storage):
        save_directory(str(path), fill_with(1)).result(WAIT_S)
    (commit,) = storage.numbers_of("exchange")
    synced = {Path(op.path).name for op in storage.log[:commit] if op.name == "sync"}
    assert synced == {Path(name).name for name in FILES}
    for name in ("model.safetensors", "optimizer.pt"):
        order = [op.name for op in storage.log[:commit] if Path(op.path).name == name]
        assert order.index("sync") > max(n for n, op in enumerate(order) if op == "write")
    names = [Path(op.path).name for op in storage.log[:commit] if op.name == "sync_directory"]
    assert names == ["sub", "a"]
    assert ("sync_directory", str(disk)) in [(op.name, op.path) for op in storage.log[commit:]]


class SyncFails(Recorder):
    """Directories cannot be synced once the checkpoint has its name."""

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "sync_directory" and self.numbers_of("exchange"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real()


def test_a_directory_whose_last_sync_fails_is_visible_and_the_old_one_is_kept(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, removed = disk / "a", threading.Event()
    with through(Storage()):
        save_directory(str(path), fill_with(1)).result(WAIT_S)
    with through(SyncFails()) as pipeline:
        handle = save_directory(
            str(path),
            fill_with(2),
            retain=removed.set,
            options=fastckpt.SaveOptions(on_error="warn"),
        )
        error = handle.exception(WAIT_S)
        pipeline.drain()
    assert isinstance(error, StorageError) and error.visible and error.op == "sync directory"
    assert "is visible, but perhaps not durable" in caplog.text and not removed.is_set()
    assert step_in(path) == 2
    (kept,) = disk.glob(".a.*.tmp")
    assert step_in(kept / "a") == 1, "a crash may bring its name back"
    os.rename(kept, str(kept).replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    with through(Storage()):
        save_directory(str(path), fill_with(3)).result(WAIT_S)
    assert os.listdir(disk) == ["a"] and step_in(path) == 3


@pytest.mark.parametrize("own", [b"{}", b"[]", b'{"files": {}}', None])
def test_a_users_own_file_with_the_name_of_the_list_is_no_list(
    own: bytes | None, disk: Path
) -> None:
    """A directory has the name, too (None)."""
    path = disk / "a"
    (path / "fastckpt.json").mkdir(parents=True) if own is None else path.mkdir()
    if own is not None:
        (path / "fastckpt.json").write_bytes(own)
    (path / "model.safetensors").write_bytes(b"mine")
    handle = save_directory(str(path), fill_with(1), options=fastckpt.SaveOptions(on_error="warn"))
    error = handle.exception(WAIT_S)
    assert "nothing was changed" in str(error) and "fastckpt.json" in str(error), error
    assert files_in(path) >= {"model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == b"mine"


def test_two_renames_of_which_the_second_is_refused(disk: Path) -> None:
    class Refusing(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            renames = len(self.numbers_of("rename"))
            if operation.name == "exchange" or (operation.name == "rename" and renames == 2):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real()

    with through(Storage()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    with through(Refusing()) as pipeline:
        error = save_directory(str(disk / "a"), fill_with(2)).exception(WAIT_S)
        pipeline.drain()
    assert isinstance(error, StorageError) and not error.visible
    assert os.listdir(disk) == ["a"] and step_in(disk / "a") == 1


def test_without_exchange_it_is_replaced_by_two_renames(disk: Path) -> None:
    class Without(Storage):
        def exchange(self, one: str, other: str) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with through(Without()):
        for step in range(2):
            save_directory(str(disk / "a"), fill_with(step)).result(WAIT_S)
            wait_for_directories(str(disk))
            assert step_in(disk / "a") == step
    assert os.listdir(disk) == ["a"]


@pytest.mark.parametrize("name", ["mine.txt", ".mine", "deep/mine.txt", "link"])
def test_files_of_others_stay(disk: Path, name: str) -> None:
    path, mine = disk / "a", disk / "a" / name

    def fill(draft: Draft) -> None:
        fill_with(1)(draft)
        draft.add_content(b"", "of the first alone/1")

    with through(Storage()) as pipeline:
        save_directory(str(path), fill).result(WAIT_S)
        mine.parent.mkdir(exist_ok=True)
        if name == "link":
            mine.symlink_to("notes.txt")
        else:
            mine.write_text("mine")
        save_directory(str(path), fill_with(2)).result(WAIT_S)
        pipeline.drain()
    assert mine.read_text() == ("step 2" if name == "link" else "mine")
    mine.unlink()
    assert step_in(path) == 2 and not (path / "of the first alone").exists()
    assert os.listdir(disk) == ["a"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_that_comes_last_stays(disk: Path, exchanges: bool) -> None:
    """And one that goes meanwhile prevents nothing."""
    path = disk / "a"

    class Late(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            if operation.name == "link":
                (path / "mine.txt").unlink()
            if operation.name == "exchange":
                (path / "deep").mkdir()
                (path / "deep" / "mine.txt").write_text("late")
                if not exchanges:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real()

    with through(Storage()):
        save_directory(str(path), fill_with(1)).result(WAIT_S)
        (path / "mine.txt").write_text("mine")
    with through(Late()):
        save_directory(str(path), fill_with(2)).result(WAIT_S)
    (path / "deep" / "mine.txt").unlink()
    assert step_in(path) == 2 and os.listdir(disk) == ["a"]


@pytest.mark.parametrize("way", ["at once", "later", "as a directory", "in place of a directory"])
def test_files_of_others_whose_names_are_needed_are_refused(disk: Path, way: str) -> None:
    """Before anything is written; those of a damaged checkpoint of fastckpt are replaced."""
    name = {"at once": "notes.txt", "in place of a directory": "sub"}.get(way, "optimizer.pt")
    mine = disk / "a" / name
    if way == "as a directory":
        (mine / "deep").mkdir(parents=True)
    else:
        mine.parent.mkdir()
        mine.write_text("mine")
    with through(storage := Recorder()) as pipeline:
        shown = re.escape({"sub": "sub/more.txt"}.get(name, name))
        with pytest.raises(CheckpointError, match=f"did not save .* needs \\({shown}\\)"):
            save_directory(str(disk / "a"), fill_with(2)).result(WAIT_S)
        pipeline.drain()
        assert not storage.numbers_of("write")
        assert os.listdir(disk / "a") == [name] and os.listdir(disk) == ["a"]
        assert mine.is_dir() or mine.read_text() == "mine"
        shutil.rmtree(disk / "a")
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
        (disk / "a" / "fastckpt.json").write_text("damaged")
        save_directory(str(disk / "a"), fill_with(3)).result(WAIT_S)
    assert step_in(disk / "a") == 3


@pytest.mark.parametrize("mode", [0o750, 0o777])
def test_what_is_replaced_keeps_its_permissions(disk: Path, mode: int) -> None:
    """The directory's are kept before it has a file that others might read."""
    directory, seen = disk / "a", list[int]()

    def fill(draft: Draft) -> None:
        seen.append(os.stat(draft.directory).st_mode & 0o777)
        fill_with(1)(draft)

    with through(Storage()):
        save_directory(str(directory), fill_with(0)).result(WAIT_S)
        (directory / "sub").chmod(mode)
        directory.chmod(mode)
        for name in FILES:
            (directory / name).chmod(mode & 0o666)
        save_directory(str(directory), fill).result(WAIT_S)
    assert step_in(directory) == 1 and seen == [mode]
    found = {path: path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")]}
    assert found == {path: mode & (0o777 if path.is_dir() else 0o666) for path in found}


@pytest.mark.parametrize("after", [True, False], ids=["listed", "about to be listed"])
def test_a_directory_that_others_replace_meanwhile_is_replaced(after: bool, disk: Path) -> None:
    """Two processes save to one directory: files of the one are not in the list of the other."""

    class Replaced(Storage):
        """Another process commits just when the old directory was listed, or is about to be."""

        def __init__(self) -> None:
            self.others = [disk / "c", disk / "b"]

        def names(self, directory: str, *, directories: bool = False) -> list[str]:
            found = super().names(directory) if after else []
            if directory.startswith(str(disk / "a" / "of")) and self.others:
                super().exchange(str(disk / "a"), str(other := self.others.pop()))
                shutil.rmtree(other)
            return found if after else super().names(directory)

    def fill(draft: Draft) -> None:
        draft.add_content(b"1", f"of {os.path.basename(draft.directory)}/notes.txt")

    with through(Storage()):
        for name in ("a", "b", "c"):
            save_directory(str(disk / name), fill).result(WAIT_S)
    with through(storage := Replaced()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    assert step_in(disk / "a") == 1 and storage.others == []


def test_a_file_is_not_replaced(disk: Path) -> None:
    (disk / "a").write_text("mine")
    with through(Storage()), pytest.raises(CheckpointError, match="is a file"):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    assert (disk / "a").read_text() == "mine" and os.listdir(disk) == ["a"]


def test_directories_commit_in_the_order_of_their_saves(disk: Path) -> None:
    gate = threading.Event()
    retained: list[list[str]] = []

    def retain() -> None:
        retained.append(sorted(name for name in os.listdir(disk) if name[0] != "."))

    storage = Delay("sync", gate)
    with through(storage) as pipeline:
        first = save_directory(str(disk / "a"), fill_with(1), retain=retain)
        assert storage.reached.wait(WAIT_S)  # before that the second might be the one that waits
        second = save_directory(str(disk / "b"), fill_with(2), retain=retain)
        second.wait_staged(WAIT_S)
        assert not first.done() and not second.done() and not (disk / "b").exists()
        gate.set()
        second.result(WAIT_S)
        assert first.done()
        pipeline.drain()
    assert retained[0] in (["a"], ["a", "b"]) and retained[1] == ["a", "b"]


def test_removals_come_one_after_another(disk: Path) -> None:
    entered = [threading.Event(), threading.Event()]
    go_on = threading.Event()
    together = []

    def retain(number: int) -> None:
        entered[number].set()
        assert go_on.wait(60)
        together.append(entered[1 - number].wait(0.2))

    for number in (0, 1):
        retaining = partial(retain, number)
        save_directory(str(disk / "a"), fill_with(number), retain=retaining).result()
    go_on.set()
    wait_for_directories(str(disk))
    assert together == [False, True]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_what_fails_at_once(disk: Path, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    def fill(draft: Draft) -> None:
        fill_with(1)(draft)
        raise RuntimeError("no more")

    if on_error == "raise":
        with pytest.raises(RuntimeError, match="no more"):
            save_directory(str(disk / "a"), fill)
    else:
        handle = save_directory(
            str(disk / "a"), fill, options=fastckpt.SaveOptions(on_error="warn")
        )
        assert isinstance(handle.exception(0), RuntimeError)
        assert "was not saved: RuntimeError: no more" in caplog.text
    assert os.listdir(disk) == []


def test_what_fails_at_once_keeps_nothing_alive(disk: Path) -> None:
    """Neither what was to be saved, nor an error that the caller is handling as it was."""
    saved = torch.ones(300)
    alive = weakref.ref(saved)

    def fill(draft: Draft, tensor: torch.Tensor) -> None:
        raise StorageError("read", "x", 5) from OSError(5, f"{tensor.shape}")

    try:
        raise KeyError("mine")
    except KeyError as error:
        handle = save_directory(
            str(disk / "a"),
            partial(fill, tensor=saved),
            options=fastckpt.SaveOptions(on_error="warn"),
        )
        assert error.__traceback__ is not None
    del saved
    assert isinstance(handle.exception(0), StorageError) and alive() is None


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_what_fails_later(disk: Path, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Storage):
        full = True

        def allocate(self, fd: int, nbytes: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(fd, nbytes)

    storage = Full()
    with through(storage) as pipeline:
        handle = save_directory(
            str(disk / "a"), fill_with(1), options=fastckpt.SaveOptions(on_error=on_error)
        )
        pipeline.drain()
        assert os.listdir(disk) == []
        storage.full = False
        if on_error == "raise":
            with pytest.raises(StorageError, match="No space left"):
                save_directory(
                    str(disk / "a"), fill_with(2), options=fastckpt.SaveOptions(on_error=on_error)
                )
        else:
            assert "No space left" in caplog.text and handle.is_asked_for()
        save_directory(
            str(disk / "a"), fill_with(2), options=fastckpt.SaveOptions(on_error=on_error)
        ).result(WAIT_S)
    assert step_in(disk / "a") == 2


def test_a_file_that_another_rank_adds_to_a_failed_draft_goes_with_it(disk: Path) -> None:
    class Added(Storage):
        added = False

        def allocate(self, fd: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def remove_directory(self, path: str, *, content: bool = False) -> None:
            super().remove_directory(path, content=content)
            if not self.added:
                self.added = True
                os.mkdir(path)
                Path(path, "late.pt").touch()
                os.rmdir(path)  # as the removal's last step, which finds a file that came late

    with through(storage := Added()) as pipeline:
        save_directory(str(disk / "a"), fill_with(1), options=fastckpt.SaveOptions(on_error="warn"))
        pipeline.drain()
    assert storage.added and os.listdir(disk) == []


def test_a_draft_that_somebody_removes_is_a_failed_save(disk: Path) -> None:
    gate = threading.Event()
    storage = Delay("sync", gate)
    with through(storage):
        handle = save_directory(str(disk / "a"), fill_with(1))
        assert storage.reached.wait(WAIT_S)  # before that it would be made again
        (draft,) = disk.iterdir()
        draft.rename(disk / "elsewhere")
        gate.set()
        with pytest.raises(StorageError, match="No such file"):
            handle.result(WAIT_S)
    assert os.listdir(disk) == ["elsewhere"]


def test_a_draft_that_the_first_rank_has_removed_is_not_made_again(disk: Path) -> None:
    class Removed(Storage):
        def status(self, file: Any, **how: bool) -> Any:
            if str(file).endswith("sub/x"):  # when the other rank has heard of the draft
                first.discard()
                rounds[0].fail(StorageError("write", str(disk / "a"), errno.EIO, 0))
            return super().status(file, **how)

    store, storage, path = dist.HashStore(), Removed(), str(disk / "a")
    rounds = [Coordinator(store, rank, 2, "save").begin("save", WAIT_S) for rank in range(2)]
    with through(storage) as pipeline:
        made = (storage, pipeline.staging.devices, path, None, fastckpt.SaveOptions())
        first, second = (Draft(*made, agreement) for agreement in rounds)
        Path(second.directory, "sub").mkdir()
        Path(second.directory, "sub", "x").touch()
        pace: Any = None
        DirectoryPlace(storage, path, rounds[0], True, draft=first).open([], pace)
        with pytest.raises(PeerFailed, match="Input/output error"):
            files = {"sub/x": file_list.File(0, 0)}
            DirectoryPlace(storage, path, rounds[1], True, draft=second).bring(files)
        second.discard()
    assert os.listdir(disk) == []


def test_a_tensor_that_changes_too_early_fails_the_save(disk: Path) -> None:
    weight = torch.zeros(1 << 20)
    gate = threading.Event()

    def fill(draft: Draft) -> None:
        draft.add_tensors({"weight": weight, "small": torch.zeros(3)}, "m.safetensors", {})

    with through(Storage()) as pipeline:
        staging = pipeline.staging
        real = staging.allowance

        def late(nbytes: int | None) -> Allowance:
            assert gate.wait(WAIT_S)
            return real(nbytes)

        staging.allowance = late  # type: ignore[method-assign]
        handle = save_directory(str(disk / "a"), fill, options=fastckpt.SaveOptions(fence="step"))
        weight.add_(1)
        gate.set()
        with pytest.raises(StagingConflict, match="weight"):
            handle.result(WAIT_S)
    assert os.listdir(disk) == []


def test_small_tensors_may_change_at_once(disk: Path) -> None:
    small = torch.zeros(100)

    def fill(draft: Draft) -> None:
        draft.add_tensors({"small": small}, "m.safetensors", {})

    with through(Storage()):
        handle = save_directory(str(disk / "a"), fill, options=fastckpt.SaveOptions(fence="step"))
        small.add_(1)
        handle.result(WAIT_S)
    loaded = safetensors.torch.load_file(disk / "a" / "m.safetensors")
    assert not loaded["small"].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_what_the_format_has_not_is_left_to_others(disk: Path, tensor: torch.Tensor) -> None:
    def fill(draft: Draft) -> None:
        assert not draft.add_tensors({"good": torch.ones(2), "other": tensor}, "m", {})
        assert not draft.pending

    with through(Storage()):
        save_directory(str(disk / "a"), fill).result(WAIT_S)
    assert files_in(disk / "a") == {"fastckpt.json"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit": flip,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "the file": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", sorted(FILES - {"sub/more.txt"}))
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told(disk: Path, name: str, damage: str) -> None:
    with through(Storage()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    DAMAGE[damage](disk / "a" / name)
    if name == "fastckpt.json" and damage == "the file":
        assert not check(str(disk / "a"))  # as if others had written it
        return
    with pytest.raises(CorruptCheckpoint, match=name.replace("fastckpt.json", "a.* is damaged")):
        check(str(disk / "a"))


def test_a_file_of_another_size_is_not_read(disk: Path) -> None:
    class Reading(Storage):
        def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
            assert offset < 1 << 20, "holes of terabytes are read for hours"
            return super().read_at(fd, nbytes, offset)

    with through(Storage()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    os.truncate(disk / "a" / "model.safetensors", 1 << 42)
    with pytest.raises(CorruptCheckpoint, match=f"model.safetensors' has {1 << 42} bytes, but"):
        check(str(disk / "a"), Reading())


def test_ranks_divide_the_files_of_a_check(disk: Path) -> None:
    with through(Storage()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    flip(disk / "a" / "notes.txt")
    found = []
    for rank in range(3):
        with suppress(CorruptCheckpoint):  # which one of them raises
            found.append(check(str(disk / "a"), None, rank, 3))
    assert found == [True, True], "one of the ranks reads the damaged file"


def test_the_newest_that_is_whole(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [str(disk / name) for name in "cba"]
    with through(Storage()):
        for path in paths:
            save_directory(path, fill_with(1)).result(WAIT_S)
    assert newest_whole(lambda: paths) == paths[0]
    assert newest_whole(list) is None
    flip(disk / "c" / "model.safetensors")
    assert newest_whole(lambda: paths) == paths[1]
    assert "'model.safetensors' has" in caplog.text
    for name in "ba":
        flip(disk / name / "notes.txt")
    with pytest.raises(CorruptCheckpoint, match=r"c' is damaged: 'model\.safetensors'"):
        newest_whole(lambda: paths)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"files": {}},
        {"fastckpt": 0, "files": {}},
        {"fastckpt": 1, "files": {"../a": {"nbytes": 1, "crc32": 1}}},
        {"fastckpt": 1, "files": {"/a": {"nbytes": 1, "crc32": 1}}},
        {"fastckpt": 1, "files": {"a": {"nbytes": -1, "crc32": 1}}},
        {"fastckpt": 1, "files": {"a": {"nbytes": 1, "crc32": 1 << 32}}},
        {"fastckpt": 1, "files": {"a": {"nbytes": 1}}},
    ],
)
def test_a_list_that_nobody_wrote_is_refused(value: object) -> None:
    with pytest.raises(CorruptCheckpoint):
        file_list.from_bytes(json.dumps(value).encode())


def test_a_list_of_a_newer_version_is_told() -> None:
    with pytest.raises(IncompatibleCheckpoint, match="version 2"):
        file_list.from_bytes(b'{"fastckpt": 2, "folders": []}')


def test_removal_leaves_a_directory_whole_or_hidden(disk: Path) -> None:
    with through(Storage()):
        save_directory(str(disk / "a"), fill_with(1)).result(WAIT_S)
    storage = FailAt(2, errno.EIO, lasting=True)  # when the rename is durable
    with through(storage), pytest.raises(StorageError):
        remove_directory(str(disk / "a"))
    assert storage.names_logged()[:3] == ["rename", "sync_directory", "remove_directory content"]
    (left,) = os.listdir(disk)
    assert left.startswith(".a.") and left.endswith(".tmp")
    with through(Storage()):
        os.rename(disk / left, disk / "a")
        remove_directory(str(disk / "a"))
        remove_directory(str(disk / "a"))  # as two saves do that remove what is old at a time
    assert os.listdir(disk) == []


def test_arguments_are_checked(disk: Path) -> None:
    with pytest.raises(ValueError, match="staging is 'gds', must be 'host' here"):
        save_directory(str(disk / "a"), fill_with(1), options=fastckpt.SaveOptions(staging="gds"))


def test_a_directory_that_is_gone_when_its_turn_comes(disk: Path) -> None:
    """A newer one was there before it was removed: the directories are listed again."""
    listings = 0

    def listed() -> list[str]:
        nonlocal listings
        there = sorted(map(str, disk.glob("checkpoint-*")), reverse=True)
        if (listings := listings + 1) < 4:
            os.mkdir(disk / f"checkpoint-{listings}")
            for path in there:
                os.rmdir(path)
        return there

    os.mkdir(disk / "checkpoint-0")
    assert newest_whole(listed) == str(disk / "checkpoint-3")


@pytest.mark.parametrize("is_whole", [os.path.isdir, iterations.is_complete])
def test_directories_that_are_all_removed_while_they_are_listed(
    disk: Path, is_whole: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a newer one then, or an error: a run that has saved does not begin anew."""
    monkeypatch.setattr("fastckpt.storage.vanishing.LISTING_PAUSES_S", (0.0,) * 20)
    real, left, names = os.listdir, 5, re.compile(r"at-(\d+)\Z")

    def make(number: int) -> None:
        (disk / f"at-{number}").mkdir()
        (disk / f"at-{number}" / iterations.METADATA).touch()

    def listdir(path: str) -> list[str]:
        nonlocal left
        there = real(path)
        if left > 0:
            left -= 1
            make(100 - left)
            for name in there:
                shutil.rmtree(disk / name)
        return there

    make(1)
    monkeypatch.setattr(os, "listdir", listdir)
    assert numbered(str(disk), names, is_whole) == [(100, str(disk / "at-100"))]
    left = 1000
    with pytest.raises(StorageError, match="removed before they were read, 20 times"):
        numbered(str(disk), names, is_whole)
