"""Under install() Megatron's own loop saves and loads by fastckpt, as Megatron's own code says.

Responsible for what is put in place: strategies, the queue of asynchronous saves, the choice of an
iteration that is whole. The ranks train by a double of megatron.training
(crews/megatron_training.py), with real models, optimizers, strategies and checkpoints.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import async_utils as core_async

from fastckpt import CorruptCheckpoint, SaveOptions
from fastckpt.directories import iterations
from fastckpt.integrations import megatron
from fastckpt.integrations.megatron.calls_queue import Queue
from tests.crews import megatron_training as training
from tests.crews.group_crew import Crew, Nursery

pytestmark = pytest.mark.multiprocess
RANKS_IMPORT = "tests.crews.megatron_imports"
TRACKER = training.TRACKER
HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
ALL = ("weight", "optimizer", "schedule", "random")


class Run:
    """A run of two ranks, which are one tensor parallel group.

    Args:
        crew: the ranks.
        disk: where the run is.
    """

    def __init__(self, crew: Crew, disk: Path) -> None:
        self._crew = crew
        self.disk, self.root = disk, disk / "run"

    def __call__(self, *script: Any, options: Any = {}, **given: Any) -> list[Any]:  # noqa: B006
        """What came of each part of a script, on the first rank; see crews' play()."""
        where = {"save": str(self.root), "load": str(self.root)}
        told = self._crew(training.play, where | given, list(script), options)
        self.said, self.warned = told[0]["said"], told[0]["warned"]
        failed = [[isinstance(part, BaseException) for part in each["results"]] for each in told]
        assert failed[0] == failed[1]
        return list(told[0]["results"])

    def loads(self, **given: Any) -> Any:
        """(iteration, operations), and what each part of the model has of it."""
        (_, loaded) = self(("mark", 50), ("load",), **given)
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def saves(self, *iterations: int, **given: Any) -> list[Any]:
        script = [each for number in iterations for each in (("mark", number), ("save", number))]
        *results, _ended = self(*script, ("end",), **given)
        assert set(results) == {None}, results
        return results

    def iterations(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.root.glob("iter_*"))


@pytest.fixture
def run(nursery: Nursery, disk: Path) -> Run:
    return Run(nursery.lasting_crew(2, "training"), disk)


@pytest.fixture(scope="module")
def three(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the iterations 1 to 3."""
    made = Run(nursery.lasting_crew(2, "training"), tmp_path_factory.mktemp("three"))
    made.saves(1, 2, 3)
    return made.root


def of(value: float) -> tuple[tuple[int, int], dict[str, float]]:
    """What is loaded of an iteration of this number."""
    return (int(value), int(10 * value)), dict.fromkeys(ALL, value)


# Saves and loads.


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_megatrons_loop_saves_and_loads_by_us(asynchronous: bool, run: Run) -> None:
    run.saves(1, 2, async_save=asynchronous)
    assert (run.root / TRACKER).read_text() == "2" and run.iterations() == [1, 2]
    assert run.said == ["successfully saved 1", "successfully saved 2"]
    data = list((run.root / "iter_0000002").glob("*.distcp"))
    assert data and all(re.fullmatch(r"__\d+_[0-9a-f]{40}\.distcp", each.name) for each in data)
    assert run.loads() == of(2)
    assert run.loads(ckpt_step=1) == of(1)
    assert run.loads(ckpt_fully_parallel_load=True) == of(2)


def test_stock_megatron_loads_what_we_saved_and_we_what_it_saved(run: Run, three: Path) -> None:
    shutil.copytree(three, run.root)
    (_, loaded) = run(("mark", 50), ("load",), options=None)
    assert loaded == of(3)
    assert run(("mark", 4), ("save", 4), options=None) == [None, None]
    assert not list((run.root / "iter_0000004").glob("__?_" + "?" * 40 + ".distcp"))
    assert run.loads() == of(4)


def test_what_megatron_writes_beside_our_files_stays(run: Run) -> None:
    """The state of ModelOpt has a directory of its own, of which Megatron takes care."""
    given = {"async_save": True, "has_modelopt": True}
    *_, ended = run(("mark", 1), ("save", 1), ("end",), **given)
    assert ended == [0]
    kept = run.root / "iter_0000001" / "modelopt_state" / "common.pt"
    assert kept.read_bytes() == b"its state" and run.loads() == of(1)


def test_asynchronous_saves_are_finalized_while_training_goes_on(run: Run) -> None:
    script = [("mark", 1), ("save", 1), *[("poll",)] * 400, ("mark", 2), ("save", 2), ("end",)]
    *polls, ended = run(*script, async_save=True)
    finalized = [each for each in polls if each]
    assert [*finalized, ended] in ([[0], [1]], [[0, 1]])
    assert (run.root / TRACKER).read_text() == "2"


def test_a_failed_asynchronous_save_moves_no_tracker_and_training_goes_on(run: Run) -> None:
    script = [("save", 1), ("end",), ("do", training.save_on_full_disk, 2), ("save", 3), ("end",)]
    results = run(*script, async_save=True)
    assert results == [None, [0], [], None, [2]]
    assert (run.root / TRACKER).read_text() == "3"
    assert run.said == ["successfully saved 1", "successfully saved 3"]
    assert not iterations.is_complete(str(run.root / "iter_0000002"))


def test_a_failed_save_ends_training_if_asked_to(run: Run) -> None:
    script = [("save", 1), ("end",), ("do", training.save_on_full_disk, 2)]
    *_, failed = run(*script, async_save=True, options={"on_error": "raise"})
    assert "rank 1" in str(failed) and (run.root / TRACKER).read_text() == "1"
    *_, failed = run(("do", training.save_on_full_disk, 2))
    assert isinstance(failed, Exception) and (run.root / TRACKER).read_text() == "1"


def test_requests_of_others_go_to_megatrons_own_queue(nursery: Nursery) -> None:
    seen: list[str] = []
    request = core_async.AsyncRequest(None, (), [lambda: seen.append("finalized")], {})

    class Stock:
        def schedule_async_request(self, given: Any) -> int:
            assert given is request
            return 7

        def maybe_finalize_async_calls(self, blocking: bool, no_dist: bool) -> list[int]:
            assert blocking and not no_dist
            return [7]

        def get_num_unfinalized_calls(self) -> int:
            return 1

        def close(self, abort: bool) -> None:
            seen.append(f"closed, abort={abort}")

    queue = Queue(Stock, SaveOptions())
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(request) == 7
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [7]
    queue.close()
    assert seen == ["closed, abort=False"]


# The call in which saves are finalized.


@pytest.mark.parametrize(
    "ends",
    [[[0, 0]], [[0, 3]], [[5, 1]], [[0, 6], [1, 1]], [[4, 2], [0, 9], [3, 3]]],
    ids=str,
)
def test_all_ranks_finalize_in_the_same_call_without_a_collective(
    ends: list[list[int]], nursery: Nursery
) -> None:
    crew = nursery.lasting_crew(2, "training")
    (seen, errors), other = crew(training.calls_of_saves, ends, None, {})
    assert (seen, errors) == other and errors == []
    assert [number for number, _ in seen] == [*range(len(ends))]
    for number, call in seen:  # after it has ended on all, in order
        assert call > max(max(each) for each in ends[: number + 1])


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_save_that_failed_on_one_rank_is_finalized_on_none(
    on_error: str, nursery: Nursery
) -> None:
    crew = nursery.lasting_crew(2, "training")
    options = {"on_error": on_error}
    told = crew(training.calls_of_saves, [[1, 2], [3, 3]], 1, options)
    for seen, errors in told:
        assert [number for number, _ in seen] == [1]
        assert len(errors) == (on_error == "raise")
        assert all("no space" in error for error in errors)
    assert told[0][0] == told[1][0]
    assert [error.partition(":")[0] for error in told[0][1]] == [
        error.partition(":")[0] for error in told[1][1]
    ]


# Which iteration is loaded.


def test_after_a_rollback_the_new_line_is_taken(run: Run, three: Path) -> None:
    shutil.copytree(three, run.root)
    assert run(("load",), ("mark", 2), ("save", 2), ckpt_step=1)[0][0] == (1, 10)
    assert (run.root / TRACKER).read_text() == "2"
    assert run.loads() == of(2) and run.warned == []


def test_a_tracker_edited_by_hand_is_obeyed(run: Run, three: Path) -> None:
    shutil.copytree(three, run.root)
    (run.root / TRACKER).write_text("1")
    assert run.loads() == of(1) and run.warned == []


def test_what_committed_before_the_tracker_moved_waits_for_it(run: Run, three: Path) -> None:
    """The tracker is Megatron's word; what nobody finalized is the next choice."""
    shutil.copytree(three, run.root)
    run(("mark", 4), ("do", training.save_without_finalizing, 4), async_save=True)
    assert iterations.is_complete(str(run.root / "iter_0000004"))
    assert run.loads() == of(3)
    (run.root / "iter_0000003" / "common.pt").unlink()
    assert run.loads() == of(4)


def damage_data(path: Path) -> None:
    file = max(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def damage_common(path: Path) -> None:
    content = bytearray((path / "common.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "common.pt").write_bytes(content)


@pytest.mark.parametrize("parallel", [False, True], ids=["each reads", "fully parallel"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_data, "skipping .*iter_0000003: rank . *"),
        (damage_common, "skipping .*iter_0000003: .*"),
        (lambda path: next(path.glob("__1_*.distcp")).unlink(), "skipping .*iter_0000003: .*"),
        (lambda path: (path / ".metadata").unlink(), ".* iteration 3, .* has no .metadata"),
        (shutil.rmtree, ".*iteration 3, which .* names, is missing"),
        (lambda path: (path.parent / TRACKER).unlink(), f".* because {TRACKER} is missing"),
        (
            lambda path: (path.parent / TRACKER).write_text(""),
            ".* holds '', which is not an iteration",
        ),
    ],
    ids=["data", "common", "no data", "no metadata", "missing", "no tracker", "empty tracker"],
)
def test_damage_is_told_and_the_commit_before_is_loaded(
    damage: Callable[[Path], object], why: str, parallel: bool, run: Run, three: Path
) -> None:
    shutil.copytree(three, run.root)
    damage(run.root / "iter_0000003")
    is_there = (run.root / "iter_0000003").exists() and not (run.root / TRACKER).exists()
    is_whole = is_there or (run.root / TRACKER).read_text() == ""
    assert run.loads(ckpt_fully_parallel_load=parallel) == of(3 if is_whole else 2)
    assert any(re.match(why, line) for line in run.warned), run.warned


def test_an_iteration_that_is_asked_for_is_loaded_or_none(run: Run, three: Path) -> None:
    shutil.copytree(three, run.root)
    damage_data(run.root / "iter_0000003")
    with pytest.raises(CorruptCheckpoint, match="iter_0000003"):
        run.loads(ckpt_step=3)


def test_nothing_whole_is_an_error_and_nothing_at_all_is_none(run: Run, three: Path) -> None:
    run.root.mkdir()
    assert run(("mark", 50), ("load",))[1] == ((0, 0), dict.fromkeys(ALL, 50.0))
    shutil.copytree(three, run.root, dirs_exist_ok=True)
    for number in run.iterations():
        damage_data(run.root / f"iter_000000{number}")
    with pytest.raises(
        CorruptCheckpoint, match=r"all checkpoints in .* are damaged: .*iter_0000003"
    ):
        run.loads()
    for number in run.iterations():
        shutil.rmtree(run.root / f"iter_000000{number}")
    with pytest.raises(CorruptCheckpoint, match="names iter_0000003, but neither this iteration"):
        run.loads()


def test_the_commit_before_was_saved_on_other_sizes(run: Run, three: Path) -> None:
    """Megatron has read the sizes of the damaged one by then: the user is to begin again."""
    shutil.copytree(three, run.root)
    run(("save", 4), tensor_model_parallel_size=2, world_size=4)
    damage_data(run.root / "iter_0000004")
    with pytest.raises(CorruptCheckpoint, match="restart with --ckpt-step 3"):
        run.loads(world_size=4)


def test_a_newer_non_persistent_one_is_loaded_and_one_before_it_if_it_is_damaged(
    run: Run, three: Path
) -> None:
    shutil.copytree(three, run.root)
    run(("mark", 4), ("save", 4, True))
    given = {"non_persistent_ckpt_type": "global"}
    assert run.loads() == of(3)
    assert run.loads(**given) == of(4)
    damage_data(run.root / "non_persistent" / "iter_0000004")
    assert run.loads(**given) == of(3)


# Other parallel sizes.


def test_buckets_are_loaded_onto_other_sizes(nursery: Nursery, disk: Path) -> None:
    for found, wrong in nursery.lasting_crew(2, "sizes")(
        training.save_then_load_elsewhere, str(disk)
    ):
        assert found == (5, 50) and wrong == []


# What is put in place.


def modules(monkeypatch: pytest.MonkeyPatch, since_0_17: bool) -> tuple[Any, Any]:
    """Modules with the names alone that install() wants of Megatron, before 0.17 and since."""
    checkpointing: Any = types.ModuleType("megatron.training.checkpointing")
    queues: Any = types.ModuleType("megatron.training.async_utils")
    names = ["_load_base_checkpoint", "_load_global_dist_base_checkpoint", "generate_state_dict"]
    names += ["save_checkpoint", "load_checkpoint"]
    for name in names:
        setattr(checkpointing, name, lambda *_, **__: None)
    if since_0_17:
        checkpointing.TorchDistSaveShardedStrategy = object
        checkpointing.TorchDistLoadShardedStrategy = object
        queues.get_async_strategy = no_nvrx
        queues.get_args = lambda: types.SimpleNamespace(async_strategy="nvrx")
        queues._async_calls_queue = None
    else:
        checkpointing.get_default_save_sharded_strategy = lambda _: None
        checkpointing.get_default_load_sharded_strategy = lambda _: None
        queues.AsyncCallsQueue = core_async.AsyncCallsQueue
        queues._async_calls_queue = core_async.AsyncCallsQueue()
    for module in (checkpointing, queues):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return checkpointing, queues


def no_nvrx(async_strategy: str = "nvrx", module: str | None = None) -> Any:
    raise ModuleNotFoundError("A compatible `nvidia-resiliency-ext` installation is required")


def test_names_of_megatron_before_0_17(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointing, queues = modules(monkeypatch, since_0_17=False)
    before = checkpointing.save_checkpoint, checkpointing.load_checkpoint
    megatron.install()
    assert (checkpointing.save_checkpoint, checkpointing.load_checkpoint) == before
    assert isinstance(queues._async_calls_queue, Queue)
    assert isinstance(queues.AsyncCallsQueue(persistent=True), Queue)
    found = checkpointing.get_default_save_sharded_strategy("torch_dist")
    assert isinstance(found, megatron.SaveStrategy)
    assert checkpointing.get_default_load_sharded_strategy("of another format") is None


def test_names_of_megatron_since_0_17_need_no_nvrx(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointing, queues = modules(monkeypatch, since_0_17=True)
    megatron.install()
    name, found = queues.get_async_strategy("nvrx")
    assert name == "nvrx" and queues._async_calls_queue is None
    queue = found["AsyncCallsQueue"](persistent=True, cpu_shm_mode=True)
    assert isinstance(queue, Queue)
    queue.warmup_persistent_caller(0, cpu_priority=10, io_priority=3, cpu_shm_mode=True)
    assert found["get_write_results_queue"](mp_mode="fork") is None
    with pytest.raises(ModuleNotFoundError, match="nvidia-resiliency-ext"):
        _ = found["FileSystemWriterAsync"]
    save = checkpointing.TorchDistSaveShardedStrategy(cpu_shm_mode=False)
    load = checkpointing.TorchDistLoadShardedStrategy(cache_metadata=True)
    assert isinstance(save, megatron.SaveStrategy) and isinstance(load, megatron.LoadStrategy)


@pytest.mark.parametrize("since_0_17", [False, True], ids=["before 0.17", "since 0.17"])
@pytest.mark.parametrize(
    "name",
    ["_load_base_checkpoint", "generate_state_dict", "strategy", "queue", "_async_calls_queue"],
)
def test_a_version_that_lacks_a_name_is_refused_and_nothing_is_put_in_place(
    name: str, since_0_17: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, queues = modules(monkeypatch, since_0_17)
    name = {
        "strategy": "TorchDistLoadShardedStrategy"
        if since_0_17
        else "get_default_load_sharded_strategy",
        "queue": "get_async_strategy" if since_0_17 else "AsyncCallsQueue",
    }.get(name, name)
    for module in (checkpointing, queues):
        vars(module).pop(name, None)
    before = dict(vars(checkpointing)), dict(vars(queues))
    with pytest.raises(ImportError, match=name):
        megatron.install()
    assert (dict(vars(checkpointing)), dict(vars(queues))) == before


@pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training is not installed")
def test_the_megatron_that_is_installed_has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkpointing", "async_utils"):
        module = importlib.import_module(f"megatron.training.{name}")
        for each, value in list(vars(module).items()):
            monkeypatch.setattr(module, each, value)  # to be put back
    megatron.install()


@pytest.mark.skipif(HAS_TRAINING, reason="megatron.training is installed")
def test_without_megatron_training_there_is_nothing_to_install() -> None:
    with pytest.raises(ImportError, match=r"needs megatron\.training\.\w+\. Before 0\.17"):
        megatron.install()
