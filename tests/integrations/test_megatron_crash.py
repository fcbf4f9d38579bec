"""What a save of an iteration leaves when the machine dies, the file system refuses or the store of
a rank is lost, at any operation: the checkpoint that was there or the new one, whole, and on each
rank an error that says which.

The ranks are threads of this process, which the state is small enough for. What is saved by a whole
Megatron is test_megatron.py's business.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import FileSystemReader, load

from fastckpt import CheckpointError, SaveOptions
from fastckpt.directories import iterations
from fastckpt.directories.hidden_directory import HiddenDirectory
from fastckpt.integrations import dcp
from fastckpt.integrations.megatron import SaveStrategy, strategies
from fastckpt.integrations.megatron.saves import Saves
from fastckpt.ranks import round as round_module
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import (
    Crash,
    FailAlways,
    FailAt,
    LostStore,
    Recorder,
    dead_pid,
    end_leases,
    plant,
)
from tests.kit.storm import SUITE_SEED

RANKS, ROWS = 2, 3000
BUDGET_BYTES = 32 << 20
ITERATION = iterations.directory_name(7)
KEPT = "train_dataloader.pt"  # a file of others in the iteration's directory


class Ranks:
    """Two ranks, each a thread with a pipeline, and a connection of its own to the store, as DCP
    sees them.
    """

    def __init__(
        self, storage: Storage, stores: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._local = threading.local()
        self._pipelines = [Pipeline(storage, BUDGET_BYTES) for _ in range(RANKS)]
        current = lambda: self._pipelines[getattr(self._local, "rank", 0)]  # noqa: E731
        monkeypatch.setattr(pipeline, "current", current)
        self._coordinators = [
            Coordinator(store, rank, RANKS, "dcp") for rank, store in enumerate(stores)
        ]
        self._shared = [dcp._Shared(coordinator) for coordinator in self._coordinators]
        monkeypatch.setattr(dcp, "_group", lambda *_: (self, self._local.rank))
        monkeypatch.setattr(dcp, "_shared", self)

    def of(self, _group: Any) -> Any:
        return self._shared[self._local.rank]

    def save(self, root: Path, step: int, *how: Any) -> list[BaseException | None]:
        """All ranks save the iteration; what each is told, None if it is saved."""
        told: list[BaseException | None] = [None] * RANKS

        def rank_saves(rank: int) -> None:
            self._local.rank = rank
            try:
                save_iteration(root, rank, step, *how)
            except BaseException as error:
                told[rank] = error

        threads = [threading.Thread(target=rank_saves, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()
        for each in self._pipelines:
            each.close()
        end_leases(self._pipelines[0].storage)
        return told


def common_of(step: int) -> bytes:
    common = io.BytesIO()
    torch.save({"step": step}, common)
    return common.getvalue()


def save_iteration(
    root: Path, rank: int, step: int, timeout_s: float, has_common: bool = True
) -> None:
    """Saves as save_checkpoint() does, with a state that tells its step everywhere; or as Megatron
    does, which has written common.pt.
    """
    rows = torch.full((ROWS, 2), float(step))
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, RANKS)),
        "object": ShardedObject("object", step, (RANKS,), (rank,)),
    }
    strategy = SaveStrategy(options=SaveOptions(timeout_s=timeout_s))
    content = common_of(step) if rank == 0 and has_common else None
    path = str(root / ITERATION)
    saves = Saves()
    saves.begin(
        str(root),
        7,
        iterations.Retention(),
        lambda after: strategy.begin(state, path, content, after),
    ).result(100)


def save_by_two(
    root: Path,
    step: int,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    stores: tuple[Any, Any] | None = None,
    timeout_s: float = 60.0,
    has_common: bool = True,
) -> list[BaseException | None]:
    one = dist.HashStore()
    with monkeypatch.context() as patched:
        return Ranks(storage, stores or (one, one), patched).save(root, step, timeout_s, has_common)


def step_of(root: Path) -> int | None:
    """The step that every file of the iteration is of, for stock readers; None if there is none."""
    path = root / ITERATION
    if not (path / iterations.METADATA).exists():
        return None
    rows = {"rows": torch.zeros(RANKS * ROWS, 2)}
    load(rows, storage_reader=FileSystemReader(path), no_dist=True)
    metadata = strategies.stored_metadata(path)
    common = strategies.stored_common(str(path), metadata)
    assert torch.load(path / iterations.COMMON) == common
    assert json.loads((path / iterations.CONFIG).read_text()) == strategies._CONFIG
    keys = strategies.object_keys(metadata)
    objects = strategies.read_objects(str(path), keys, True)
    values = [strategies.unpickled(objects[key], key, True)[0] for key in keys]
    assert len(values) == RANKS
    (step,) = {float(each) for each in (*rows["rows"].unique(), *values, common["step"])}
    if not root.name.startswith("new"):
        assert (path / KEPT).read_text() == "kept"
    return int(step)


@pytest.fixture
def saved(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the iteration of step 1, in whose directory there is a file of others."""
    assert save_by_two(memory / "saved", 1, Storage(), monkeypatch) == [None, None]
    (memory / "saved" / ITERATION / KEPT).write_text("kept")
    return memory / "saved"


@pytest.fixture(params=["old", "new"])
def before(request: pytest.FixtureRequest, memory: Path, saved: Path) -> Path:
    """A run that has the iteration, or has none."""
    if request.param == "old":
        return saved
    (memory / "new").mkdir()
    return memory / "new"


def check_fate(root: Path, old: int | None, told: list[BaseException | None]) -> int | None:
    """The iteration is what each rank was told of it. Returns its step."""
    found = step_of(root)
    assert found in {old, 2}
    for error in told:
        if error is None:
            assert found == 2
        else:
            assert isinstance(error, CheckpointError), repr(error)
            assert error.in_doubt or found == (2 if error.visible else old)
    return found


def test_an_iteration_that_is_saved_again_is_replaced_as_a_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Recorder()
    assert save_by_two(saved, 2, storage, monkeypatch) == [None, None]
    assert step_of(saved) == 2
    assert sorted(os.listdir(saved)) == [ITERATION, iterations.TRACKER]
    data = [name for name in os.listdir(saved / ITERATION) if name.endswith(".distcp")]
    assert len(data) == RANKS
    assert [storage.log[number].args for number in storage.numbers_of("exchange")] == [
        (str(saved / ITERATION),)
    ]


def test_what_a_killed_save_has_left_is_removed_by_the_next(
    saved: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that saves another iteration, of which there is none yet."""
    live, after = memory / "live", memory / "after"
    shutil.copytree(saved, live)
    storage = FailAlways("exchange", errno.EIO)

    def dies(hidden: HiddenDirectory) -> None:
        if hidden.lock is not None:
            os.close(hidden.lock)
            hidden.lock = None

    with monkeypatch.context() as patched:
        patched.setattr(HiddenDirectory, "discard", dies)
        save_by_two(live, 2, storage, monkeypatch)
    (left,) = live.glob(".iter*.tmp")
    after.mkdir()
    left.rename(after / left.name.replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    assert save_by_two(after, 3, Storage(), monkeypatch) == [None, None]
    assert sorted(os.listdir(after)) == [ITERATION, iterations.TRACKER]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_any_operation_may_fail(every: int, before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, outcomes = step_of(before), set()
    for number in itertools.count(0, every):
        live = before.with_name(f"{before.name} live")
        shutil.copytree(before, live)
        storage = FailAt(number, errno.ENOSPC)
        told = save_by_two(live, 2, storage, monkeypatch)
        try:
            outcomes.add(check_fate(live, old, told))
        except Exception as error:
            raise AssertionError(f"{storage.log[number]} failed: {told}") from error
        shutil.rmtree(live)
        if number >= len(storage.log):
            break
    assert outcomes == {old, 2} and number > 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_any_operation_may_be_the_last(
    every: int, before: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, outcomes, owner = step_of(before), set(), dead_pid()
    for count in itertools.count(0, every):
        live, after = (before.with_name(f"{before.name} {name}") for name in ("live", "after"))
        shutil.copytree(before, live)
        storage = Crash(live, count)
        told = save_by_two(live, 2, storage, monkeypatch)
        for label, image in storage.images(SUITE_SEED + count, 8 if every == 1 else 2):
            what = f"{count} operations, the last {storage.log[:count][-1:]}; survived: {label}"
            try:
                after.mkdir()
                plant(image, after, owner)
                found = step_of(after)
            except Exception as error:
                raise AssertionError(what) from error
            shutil.rmtree(after)
            assert found == 2 or (found == old and told != [None, None]), what
            outcomes.add(found)
        shutil.rmtree(live)
        if count > len(storage.log):
            break
    assert outcomes == {old, 2} and count > 60


@pytest.mark.parametrize("fails", [True, False])
def test_a_checkpoint_of_which_megatron_has_replaced_a_part_is_none(
    fails: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own save() writes common.pt in place before it asks a strategy for anything: readers must
    not take that for the common state of the weights that are still there.
    """
    (saved / ITERATION / iterations.COMMON).write_bytes(common_of(2))
    storage = FailAlways("allocate", errno.ENOSPC) if fails else Storage()
    told = save_by_two(saved, 2, storage, monkeypatch, has_common=False)
    assert step_of(saved) == (None if fails else 2)
    assert all(isinstance(error, CheckpointError) == fails for error in told)


@pytest.mark.torture
@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("rank", range(RANKS))
def test_any_operation_of_the_store_may_be_a_ranks_last(
    rank: int, is_heard: bool, before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "_BEHIND_S", 0.1)
    monkeypatch.setattr(round_module.Round.close, "__defaults__", (0.0,))
    old = step_of(before)
    for count in itertools.count(1):
        live = before.with_name(f"{before.name} live")
        shutil.copytree(before, live)
        one = dist.HashStore()
        lost = LostStore(one, count, is_heard)
        stores = (lost, one) if rank == 0 else (one, lost)
        told = save_by_two(live, 2, Storage(), monkeypatch, stores, 0.5)
        try:
            check_fate(live, old, told)
        except Exception as error:
            raise AssertionError(f"rank {rank} lost the store after {lost.log}: {told}") from error
        shutil.rmtree(live)
        if not lost.is_lost:
            break
    assert count > 10
