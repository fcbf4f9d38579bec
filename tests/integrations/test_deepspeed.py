"""DeepSpeed's checkpoints through fastckpt, with real engines of every ZeRO stage on two ranks.

Responsible for: files that stock DeepSpeed reads and the other way round, a tag that counts when
all ranks are done and not before, and what is left after failures and kills. What ranks do stands
in ranks/deepspeed_bodies.py.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.kit.jobs import Job

pytest.importorskip("deepspeed")

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import fastckpt
from fastckpt import CheckpointError, PeerFailed, StorageError
from fastckpt.arguments.options import WriteOptions
from fastckpt.directories.verify import check
from fastckpt.integrations._tag import Tag
from fastckpt.integrations.deepspeed import FastckptCheckpointEngine
from fastckpt.ranks import round as round_module
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage.atomic import temporary_path
from fastckpt.storage.file_system import Storage
from tests.crews import deepspeed_bodies as bodies
from tests.crews.group_crew import Nursery, RankDied
from tests.kit.doubles import (
    Crash,
    FailAt,
    LostStore,
    Operation,
    PowerCut,
    Recorder,
    assert_old_or_new,
    dead_pid,
    power_cuts,
    process_on,
)
from tests.kit.storm import Storm

RANKS_IMPORT = "tests.crews.deepspeed_bodies"

RANKS = 2
pytestmark = pytest.mark.multiprocess


@pytest.fixture
def call(nursery: Nursery) -> Callable[..., list[Any]]:
    """`call(body, ...)`: what it returned on each rank of a job that lasts."""

    def by_all(body: Callable[..., Any], *args: Any) -> list[Any]:
        return nursery.lasting_crew(RANKS)(body, *args)

    return by_all


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")]
)
def test_files_are_those_of_stock_deepspeed_and_either_reads_the_others(
    stage: int,
    dtype: str,
    call: Callable[..., list[Any]],
    disk: Path,
    assert_same: Callable[[Any, Any], None],
) -> None:
    for seen in call(bodies.round_trip, str(disk), stage, dtype):
        unbroken = seen["stock goes on"]
        assert seen["ours goes on"] == unbroken
        for way in ("ours", "stock"):
            for saved in ("ours", "stock"):
                assert seen[f"{saved} loaded by {way}"] == unbroken, (saved, way)
        assert seen["stats"].nbytes > 0 or stage == 0
    assert names(disk / "ours") == sorted(["global_step2/fastckpt.json", *names(disk / "stock")])
    assert (disk / "ours/latest").read_bytes() == (disk / "stock/latest").read_bytes()
    files = sorted((disk / "ours").rglob("*.pt"))
    assert len(files) == {0: 1, 1: 3, 2: 3, 3: 4}[stage]
    for path in files:
        ours, stock = (
            torch.load(disk / way / path.relative_to(disk / "ours"), weights_only=False)
            for way in ("ours", "stock")
        )
        assert_same(comparable(ours), comparable(stock))


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Loss scalers by their type, and tensors without the number that each engine gives anew."""
    optimizer = state.get("optimizer_state_dict") or {}
    if "loss_scaler" in optimizer:
        optimizer["loss_scaler"] = str(type(optimizer["loss_scaler"]))
    for tensor in optimizer.get("fp32_flat_groups", []):
        del tensor.ds_id
    return state


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_makes_the_weights_of_the_moment_of_the_save(
    stage: int, call: Callable[..., list[Any]], disk: Path
) -> None:
    call(bodies.keep_weights, str(disk), stage)
    weights = torch.load(disk / "weights.pt")
    found = get_fp32_state_dict_from_zero_checkpoint(str(disk))
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(found[key], value), key


def test_a_tag_counts_when_every_rank_is_done_though_nobody_steps(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    seen = call(bodies.wait_for_the_last, str(disk))
    for each in seen:
        assert each["meanwhile"] == ("a", [])
        assert not each["done"]
        assert len(each["then"]) == 4
    assert not list(disk.rglob(".*"))


def test_a_load_waits_for_what_is_being_saved(call: Callable[..., list[Any]], disk: Path) -> None:
    for path, losses in call(bodies.read_at_once, str(disk)):
        assert path is not None and Path(path).is_relative_to(disk)
        assert len(losses) == 1


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_on_one_rank_leaves_the_tag_before(
    on_error: str, call: Callable[..., list[Any]], disk: Path
) -> None:
    first, second = call(bodies.fail_once, str(disk), ["a", "b", "c"], on_error)
    assert isinstance(second["error"], StorageError) and second["error"].errno == errno.EFBIG
    assert isinstance(first["error"], PeerFailed) and first["error"].ranks == (1,)
    assert "rank 1 failed: StorageError" in str(first["error"])
    for seen in (first, second):
        assert len(seen["losses"]) == 1
        assert (seen["latest"], seen["second"]) == ("a", [])
        if on_error == "raise":
            assert type(seen["next"]) is type(seen["error"])
            assert str(seen["next"]) == (
                f"an earlier save, to {str(disk / 'b')!r}, failed: {seen['error']}; this save, to "
                f"{str(disk / 'c')!r}, was not begun"
            )
        else:
            assert seen["next"] is None
        assert seen["finally"] == "c"


def test_a_save_that_fails_leaves_what_the_same_tag_had(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    seen = call(bodies.fail_once, str(disk), ["a", "a", "a"], "warn")[0]
    assert seen["error"] is not None
    steps = {
        torch.load(path, weights_only=False).get("global_steps", 3)
        for path in (disk / "a").glob("*.pt")
    }
    assert steps == {3}  # the third save has replaced it
    before = [content for name, content in seen["files"].items() if "model_states" in name]
    (disk / "before.pt").write_bytes(before[0])
    assert torch.load(disk / "before.pt", weights_only=False)["global_steps"] == 1


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_directory_that_cannot_be_made_fails_the_tag_on_all_ranks(
    on_error: str, call: Callable[..., list[Any]], disk: Path
) -> None:
    (disk / "file").touch()
    for begun, told, last in call(bodies.save_where_no_directory_is, str(disk), on_error):
        assert begun is None and last == "a"
        if on_error == "raise":
            assert isinstance(told, StorageError | PeerFailed) and "Not a directory" in str(told)
        else:
            assert told is None


def test_an_error_that_one_rank_has_been_told_holds_up_nobody(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    """DeepSpeed's collectives come after the moment at which the other rank could raise it."""
    (first, ended, then), (raised, also, after) = call(bodies.fail_and_tell_one_rank, str(disk))
    assert first is None and "an earlier save" in str(raised)
    assert "rank 1 failed" in str(ended) and "an earlier save" in str(also)
    assert then is None and after is None


def test_destroy_waits_and_raises(call: Callable[..., list[Any]], disk: Path) -> None:
    first, second = call(bodies.destroy_after_failure, str(disk))
    assert isinstance(first, OSError) and isinstance(second, PeerFailed)
    assert all("an earlier save, to " in str(error) for error in (first, second))
    assert not (disk / "latest").exists()


def test_a_checkpoint_that_deepspeed_gives_up_moves_nothing(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    first, second = call(bodies.fail_in_the_midst, str(disk))
    for seen in (first, second):
        assert isinstance(seen["b"], KeyError)
        assert (seen["latest"], seen["finally"]) == ("a", "d")
    assert "pickle" in str(first["c"]) and str(first["told"]) == str(first["c"])
    assert second["c"] is None and "rank 0 failed" in str(second["told"])
    assert not list(disk.rglob(".*"))


def test_the_end_of_the_process_waits(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(RANKS, orderly=True) as crew:
        crew(bodies.save_and_end, str(disk))
    assert (disk / "latest").read_text() == "only"
    assert len(list((disk / "only").glob("*.pt"))) == 3


def save_by_two(
    run: Path,
    tag: str,
    step: int,
    stores: tuple[Any, Any] | None = None,
    timeout_s: float = 60.0,
    ended: threading.Event | None = None,
    lost: BaseException | None = None,
    runs: list[Path] | None = None,
) -> list[InnerHandle]:
    """Two ranks of this process save a tag, each over its own connection to the store; the handle
    of each.

    The second one fails by the error `lost` when its files were written; `ended` is set when it has
    ended. Where ranks have disks of their own, `runs` has the directory of each.
    """
    one = dist.HashStore()
    rounds = [
        Coordinator(store, rank, RANKS, "deepspeed").begin(tag, timeout_s)
        for rank, store in enumerate(stores or (one, one))
    ]
    end: BaseException | None = None
    engine = FastckptCheckpointEngine(fastckpt.SaveOptions(timeout_s=60.0))
    tags = [
        Tag(str(its / tag), str(its / "latest"), tag, WriteOptions()) for its in runs or [run, run]
    ]
    try:
        for its in runs or [run]:
            engine.makedirs(str(its), exist_ok=True)
    except PowerCut as cut:
        end = cut
    for rank, (each, agreement) in enumerate(zip(tags, rounds, strict=True)):
        agreement.close = partial(agreement.close, 0.0)  # type: ignore[method-assign]
        state = {"step": step, "weight": torch.full((5000,), float(step))}
        each.add(state, f"rank_{rank}.pt")
    if lost is not None:
        rounds[1].conclude = Mock(side_effect=lost)  # type: ignore[method-assign]
    for each, agreement in zip(tags, rounds, strict=True):
        each.conclude(agreement, end)
    for each in reversed(tags):
        each.handle.wait_done()
        if ended is not None:
            ended.set()
    for each in tags:
        pipeline.current().wait_for(each.handle.path, ended=True)
    return [each.handle for each in tags]


def is_saved(handles: list[InnerHandle]) -> bool:
    """Whether the first rank was told that its tag is saved."""
    return bool(handles) and handles[0].done() and handles[0].failure() is None


def test_a_rank_that_fails_last_leaves_a_tag_that_is_saved_again_as_it_was(disk: Path) -> None:
    with process_on(Storage()):
        assert is_saved(save_by_two(disk, "a", 1))
        (disk / "a" / "mine.txt").write_text("mine")
        assert not is_saved(save_by_two(disk, "a", 2, lost=RuntimeError("lost")))
    assert step_of(disk) == 1
    assert not list(disk.glob(".a.*"))


def test_the_callers_thread_removes_no_debris_and_makes_no_directory(disk: Path) -> None:
    class ByThread(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            if threading.get_ident() == caller:
                own.add(operation.name)
            return real()

    caller, own = threading.get_ident(), set[str]()
    debris = Path(temporary_path(str(disk / "a")).replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    (debris / "a").mkdir(parents=True)
    with process_on(ByThread()):
        assert is_saved(save_by_two(disk, "a", 1))
    assert own == {"status"}  # of the run's directory, which makedirs() looks for
    assert sorted(os.listdir(disk)) == ["a", "latest"]


def test_ranks_on_disks_of_their_own_replace_their_directories_when_all_are_durable(
    disk: Path,
) -> None:
    class SyncFails(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            if operation.name == "sync" and operation.path.startswith(str(runs[1])):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real()

    runs = [disk / "node0", disk / "node1"]
    for storage, step, found in ((Storage(), 1, 1), (SyncFails(), 2, 1), (Storage(), 3, 3)):
        with process_on(storage):
            assert is_saved(save_by_two(disk, "a", step, runs=runs)) == (found == step)
        for rank, run in enumerate(runs):
            assert fastckpt.load(run / f"a/rank_{rank}.pt")["step"] == found
            (run / "a" / "mine.txt").write_text("mine")
    assert [sorted(os.listdir(run)) for run in runs] == [["a", "latest"], ["a"]]
    assert sorted(os.listdir(runs[1] / "a")) == ["fastckpt.json", "mine.txt", "rank_1.pt"]
    assert check(str(runs[1] / "a"))
    fresh = disk / "fresh"
    fresh.touch()
    assert (runs[0] / "latest").stat().st_mode == fresh.stat().st_mode


def step_of(run: Path) -> int | None:
    """Which step `latest` leads to, all of whose files are of that step; None without `latest`."""
    if not (run / "latest").exists():
        return None
    return step_in(run / (run / "latest").read_text())


def step_in(tag: Path) -> int | None:
    """Which step all files of a tag are of; None if there is no tag."""
    if not tag.exists():
        return None
    assert (tag / "mine.txt").exists() == (tag.name == "a")
    states = [fastckpt.load(tag / f"rank_{rank}.pt") for rank in range(RANKS)]
    (step,) = {float(value) for state in states for value in (state["step"], *state["weight"])}
    return int(step)


@pytest.fixture
def saved(memory: Path) -> Path:
    """A run with the tag "a" of step 1, in which others keep a file."""
    with process_on(Storage()):
        assert is_saved(save_by_two(memory / "saved", "a", 1))
    (memory / "saved" / "a" / "mine.txt").write_text("mine")
    return memory / "saved"


def check_fate(run: Path, tag: str, handles: list[InnerHandle]) -> None:
    """`latest` leads to a whole tag, and the one that was saved is what ranks were told of it."""
    found, before = step_in(run / tag), (1 if tag == "a" else None)
    assert step_of(run) in {1, 2} and found in {before, 2}
    for handle in handles:
        error = handle.failure()
        if error is None:
            assert found == step_of(run) == 2
        else:
            assert isinstance(error, CheckpointError)
            assert error.in_doubt or found == (2 if error.visible else before)


class AfterTheLost(Recorder):
    """The first rank gives the tag its name when the other one has ended, if that loses the store.

    Args:
        store: the other one's.
    """

    def __init__(self, store: LostStore) -> None:
        super().__init__()
        self._store, self.ended = store, threading.Event()

    def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
        if operation.name == "exchange" and self._store.is_lost:
            assert self.ended.wait(60)
        return real()


def lose_store(run: Path, tag: str, rank: int, count: int, is_heard: bool) -> LostStore:
    """Saves a tag by step 2; this rank loses the store after so many operations. Returns that."""
    one = dist.HashStore()
    lost = LostStore(one, count, is_heard)
    stores = (lost, one) if rank == 0 else (one, lost)
    storage = AfterTheLost(lost if rank else LostStore(one, sys.maxsize))
    with process_on(storage):
        handles = save_by_two(run, tag, 2, stores, 0.5, storage.ended)
    try:
        check_fate(run, tag, handles)
    except Exception as error:
        raise AssertionError(f"rank {rank} lost the store after {lost.log}") from error
    return lost


def test_a_rank_that_loses_the_store_removes_nothing_that_the_first_one_publishes(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it when its files are written, or when it has said that it is done."""
    monkeypatch.setattr(round_module, "_BEHIND_S", 0.1)
    for count, last in ((5, "/arrived/1"), (6, "/done/1")):
        lost = lose_store(saved, "a", 1, count, True)
        assert lost.log[-1][1].endswith(last)
    assert step_of(saved) == 2


@pytest.mark.torture
@pytest.mark.parametrize("tag", ["a", "b"])
@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("rank", range(RANKS))
def test_any_operation_of_the_store_may_be_a_ranks_last(
    rank: int, is_heard: bool, tag: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "_BEHIND_S", 0.1)
    for count in itertools.count(1):
        live = saved.with_name("live")
        shutil.copytree(saved, live)
        lost = lose_store(live, tag, rank, count, is_heard)
        shutil.rmtree(live)
        if not lost.is_lost:
            break
    assert count > 10


@pytest.mark.parametrize("tag", ["a", pytest.param("b", marks=pytest.mark.torture)])
def test_any_operation_may_fail(saved: Path, tag: str, storm: Storm) -> None:
    recorder, outcomes = Recorder(), set()
    shutil.copytree(saved, saved.with_name("live"))
    with process_on(recorder):
        assert is_saved(save_by_two(saved.with_name("live"), tag, 2))
    shutil.rmtree(saved.with_name("live"))
    for number in storm.moments([operation.name for operation in recorder.log], 6):
        live = saved.with_name("live")
        shutil.copytree(saved, live)
        storage = FailAt(number, errno.EIO)
        with process_on(storage):
            handles = save_by_two(live, tag, 2)
        try:
            check_fate(live, tag, handles)
        except Exception as error:
            what = f"{storage.log[number]} failed: {[handle.failure() for handle in handles]}"
            raise AssertionError(what) from error
        outcomes.add(step_in(live / tag))
        shutil.rmtree(live)
    assert outcomes == {1 if tag == "a" else None, 2} and number > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("tag", ["a", pytest.param("b", marks=pytest.mark.torture), "new/er/b"])
def test_any_operation_of_a_commit_may_be_the_last(memory: Path, tag: str, storm: Storm) -> None:
    """`latest` leads to the tag before or to the new one, whole on all ranks; so does it if the tag
    is saved again, with what others keep there.
    """
    above, tag = os.path.split(tag)
    before, old = memory / "before", None if above else 1
    before.mkdir()
    if old is not None:
        with process_on(Storage()):
            assert is_saved(save_by_two(before, "a", old))
        (before / "a" / "mine.txt").write_text("mine")

    def save(storage: Crash, live: Path) -> bool:
        with process_on(storage):
            return is_saved(save_by_two(live / above, tag, 2))

    cuts = power_cuts(before, save, lambda after: step_of(after / above), storm=storm)
    assert_old_or_new(cuts, old, 2, 50)


def test_a_tag_that_gets_no_name_back_is_kept_and_has_it_at_the_next_save(memory: Path) -> None:
    """As when a server without an exchange of names is gone after the first of two renames."""

    class Gone(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], Any]) -> Any:
            of_tag = f"{memory / 'a'}" in (operation.path, *operation.args)
            if operation.name == "exchange" or (
                operation.name == "rename" and of_tag and operation.path != str(memory / "a")
            ):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real()

    with process_on(Storage()):
        assert is_saved(save_by_two(memory, "a", 1))
    (memory / "a" / "mine.txt").write_text("mine")
    with process_on(Gone()):
        assert not is_saved(save_by_two(memory, "a", 2))
    (kept,) = memory.glob(".a.*.tmp")
    kept.rename(str(kept).replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    with process_on(Storage()):
        assert is_saved(save_by_two(memory, "b", 3))
    assert sorted(os.listdir(memory)) == ["a", "b", "latest"] and step_of(memory) == 3
    (memory / "latest").write_text("a")
    assert step_of(memory) == 1


@pytest.mark.parametrize("durable", [False, True])
def test_killed_ranks_resume_from_the_last_tag_that_all_had_saved(
    durable: bool, nursery: Nursery, call: Callable[..., list[Any]], tmp_path: Path
) -> None:
    with nursery.crew(RANKS) as crew:
        died = crew(bodies.save_and_die, str(tmp_path), durable)
    assert all(isinstance(each, RankDied) for each in died)
    assert (tmp_path / "latest").read_text() == ("b" if durable else "a")
    assert [first for first, _losses in call(bodies.resume, str(tmp_path))] == [1 + durable] * RANKS
    assert (tmp_path / "latest").read_text() == "c"


@pytest.mark.parametrize(("changes", "found"), [(0, 1), (1, 2)])
def test_a_kill_leaves_a_tag_that_is_saved_again_as_it_was_or_as_it_is_to_be(
    changes: int, found: int, nursery: Nursery, call: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Names change when the tag is replaced, and when `latest` is.
    What resumes compares its losses with a run without a break, so no file is of another save.
    """
    with nursery.crew(RANKS) as crew:
        died = crew(bodies.save_again_and_die, str(tmp_path), changes)
    assert all(isinstance(each, RankDied) for each in died)
    assert (tmp_path / "latest").read_text() == "a"
    assert [first for first, _losses in call(bodies.resume, str(tmp_path))] == [found] * RANKS
    assert not list(tmp_path.glob(".a.*"))  # which the next save has removed


@pytest.mark.parametrize("way", ["all", "no exchange", "no link"])
def test_a_tag_that_is_saved_again_is_replaced_but_for_what_others_keep_there(
    way: str, call: Callable[..., list[Any]], disk: Path
) -> None:
    files, _ = call(bodies.save_again, str(disk), way)
    assert len(files) == 5 and "deep" in files
    assert (disk / "a/deep/mine.txt").read_text() == "mine"
    assert not list(disk.rglob(".*"))
    assert [first for first, _losses in call(bodies.resume, str(disk))] == [2] * RANKS


def test_a_rank_that_is_lost_is_named_and_its_tag_does_not_count(
    nursery: Nursery, tmp_path: Path
) -> None:
    with nursery.crew(RANKS) as crew:
        error, died = crew(bodies.lose_a_rank, str(tmp_path))
    assert isinstance(died, RankDied)
    assert isinstance(error, PeerFailed) and error.ranks == (1,)
    assert (tmp_path / "latest").read_text() == "a"
    # Rank 0's file, which was durable, is gone; what rank 1 had begun stays, out of sight.
    assert not [path for path in (tmp_path / "b").glob("*") if path.name[0] != "."]


def test_engines_do_not_get_into_each_others_way(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    assert call(bodies.two_engines, str(disk)) == [["a", "b"]] * RANKS


def test_a_model_for_others_is_there_when_the_call_returns(
    call: Callable[..., list[Any]], disk: Path
) -> None:
    found = call(bodies.save_16bit, str(disk))[0]
    assert "pytorch_model.bin" in found and "latest" not in found
    assert "0.weight" in torch.load(disk / "pytorch_model.bin")


def test_options_of_the_engine_arrive(call: Callable[..., list[Any]], disk: Path) -> None:
    for whys in call(bodies.save_by_threads, str(disk)):
        assert whys and all("backend 'threads' was" in why for why in whys)


def test_what_cannot_be_installed_is_refused(call: Callable[..., list[Any]]) -> None:
    for fence, twice in call(bodies.refusals):
        assert isinstance(fence, ValueError) and "outside of optimizer steps" in str(fence)
        assert isinstance(twice, ValueError) and "must save with DeepSpeed's default" in str(twice)


def example(cwd: Path, *options: object) -> str:
    """Output of the example on two ranks, which log their losses."""
    saving = ("--preset", "tiny", "--every", 3, "--loss-log", "losses", "--stage", 3)
    script = "examples/deepspeed_zero.py"
    imports = "tests.crews.deepspeed_bodies"
    return Job(script, cwd, *saving, *options, ranks=RANKS, imports=imports).finish()


@pytest.mark.torture
def test_the_example_goes_on_where_it_stopped(disk: Path) -> None:
    example(disk, "--steps", 8)
    assert (disk / "run/latest").read_text() == "global_step6"
    assert "restored step 6" in example(disk, "--steps", 10)
    records = [json.loads(line) for line in (disk / "losses").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records]
    assert [step for step, _loss in losses] == [*range(8), *range(6, 10)]
    assert losses[8:10] == losses[6:8]
    assert (disk / "run/latest").read_text() == "global_step9"
