"""Checkpointer as one process uses it: its arguments, handles, fences and options, the order of its
saves, and what a step directory holds after every operation of a save that failed or was the last
before a power cut. What a state may consist of is test_tree.py's business, whole runs of steps are
test_steps.py's, damage is test_step_fuzz.py's, and several ranks are others'.
"""

from __future__ import annotations

import concurrent.futures
import copy
import errno
import gc
import gzip
import importlib.util
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors
import torch
import zstandard

import fastckpt
from fastckpt import Checkpointer, PerRank, SaveHandle
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StagingConflict, StorageError
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks import coordinator
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import (
    Crash,
    Delay,
    FailAlways,
    FailAt,
    Operation,
    PowerCut,
    Recorder,
    dead_pid,
    plant,
    process_on,
)
from tests.kit.options import gathered
from tests.kit.paths import ROOT
from tests.kit.programs import run_python
from tests.kit.saves import HeldTensor, Octets, wait_until
from tests.kit.steps import (
    BIG,
    WAIT_S,
    assert_holds,
    attempt,
    directories,
    held_up,
    place_of_commit,
    restored,
    state,
)
from tests.kit.storm import Storm

SEED = 20261120
DATA = ROOT / "tests" / "data"
Same = Callable[[Any, Any], None]
T = TypeVar("T")


# ---- arguments ----


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (10**15, ValueError), (1.0, TypeError), ("1", TypeError)]
)
def test_a_step_is_a_number_from_0(disk: Path, step: Any, error: type[Exception]) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        with pytest.raises(error):
            checkpointer.save(step, state(1))
        checkpointer.save(torch.tensor(3).item(), state(3))
    assert restored(disk / "run") == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_a_process_has_no_copy(copied: Callable[[Any], Any], disk: Path) -> None:
    with (
        fastckpt.Checkpointer(disk / "run") as checkpointer,
        fastckpt.StopSignals() as stop,
    ):
        handle = checkpointer.save(1, {"a": torch.ones(3)})
        handle.result(60)
        with fastckpt.open(disk / "run") as tensors:
            for it in (checkpointer, stop, handle, tensors):
                with pytest.raises(TypeError, match=r"belongs? to this process"):
                    copied([it] if copied is copy.deepcopy else it)
        assert checkpointer.save(2, {"a": torch.ones(3)}).result(60)


@pytest.mark.parametrize("make", [lambda value: value, fastckpt.PerRank])
def test_what_cannot_be_pickled_is_named(disk: Path, make: Callable[[Any], Any]) -> None:
    state = {"model": torch.ones(9), "data": [1, {"a/b": {"lock": make(threading.Lock())}}, {}]}
    with Checkpointer(disk / "run") as checkpointer:
        with pytest.raises(
            TypeError, match=r"at 'data/1/a~1b/lock' cannot be pickled: .*lock"
        ) as caught:
            checkpointer.save(1, state)
        assert caught.value.__cause__ is not None
        checkpointer.save(2, {"model": torch.ones(9)}).result(WAIT_S)


def test_what_cannot_be_pickled_is_the_callers_error(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        for bad in ({"a": lambda: 0}, {"a": PerRank(lambda: 0)}, {"a": threading.Lock()}):
            with pytest.raises(Exception, match="pickle"):
                checkpointer.save(1, bad)
        cycle: list[Any] = []
        cycle.append(cycle)
        with pytest.raises(
            ValueError, match=r"contains itself: .*at .a/0. is the value at .a. again"
        ):
            checkpointer.save(1, {"a": cycle})
        checkpointer.save(1, state(1)).result(WAIT_S)
    assert directories(disk / "run") == ["step-00000001"]


# ---- a save and what comes back ----


def test_a_save_tells_path_and_times(disk: Path) -> None:
    root = disk / "a" / "run"
    with Checkpointer(os.fsencode(root)) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.root == str(root) and not root.parent.exists()
        handle = checkpointer.save(120, state(120))
        assert isinstance(handle, SaveHandle) and handle.is_staged()
        stats = handle.result(WAIT_S)
        assert handle.path == str(root / "step-00000120")
        assert stats is handle.stats
        times = [stats.staged_s, stats.written_s, stats.committed_s]
        assert None not in times and times == sorted(times) and min(times) > 0
        assert stats.stall_s is not None and stats.stall_s > 0
        shard = root / "step-00000120" / "rank-00000.safetensors"
        assert stats.nbytes == shard.stat().st_size + (shard.parent / "objects.pt").stat().st_size
        assert stats.backend in ("io_uring", "threads") and stats.why
        assert 0 < stats.staged_bytes_max <= 3 * BLOCK_BYTES  # two of the shard, one of objects
    assert directories(root / "step-00000120") == [
        "manifest.json",
        "objects.pt",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]


def test_restore_load_steps_and_latest(disk: Path) -> None:
    root = disk / "run"
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state(999)) is None
        assert checkpointer.latest() is None and checkpointer.steps() == []
        assert not root.exists(), "only a save makes the directory"
        for step in (3, 20, 100):
            checkpointer.save(step, state(step))
        found = state(999)
        assert checkpointer.restore(found) == 100  # waits for saves in flight
        assert_holds(found, 100)
        assert checkpointer.steps() == [3, 20, 100] and checkpointer.latest() == 100
        assert_holds(checkpointer.load(), 100)
        assert_holds(checkpointer.load(20), 20)
        assert checkpointer.restore(found, 3) == 3
        assert_holds(found, 3)
        assert checkpointer.latest() == 100


def test_a_missing_step_is_an_error_that_tells_which_there_are(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        with pytest.raises(CheckpointError, match="no committed step: there is no such directory"):
            checkpointer.load()
        with pytest.raises(CheckpointError, match="no committed step 7: there is no such"):
            checkpointer.restore(state(1), 7)
        checkpointer.save(5, state(5))
        found = state(999)
        with pytest.raises(
            CheckpointError, match=r"no committed step 7: the newest steps are \[5\]"
        ) as caught:
            checkpointer.restore(found, 7)
        assert type(caught.value) is CheckpointError
        assert_holds(found | {"rng": seen(999)}, 999)
        with pytest.raises(CheckpointError, match="no committed step 7"):
            checkpointer.load(7)
        with pytest.raises(TypeError):
            checkpointer.restore(found, "5")  # type: ignore[arg-type]


def test_a_restored_state_can_be_saved_as_a_file(disk: Path) -> None:
    """A value of a rank's own knows how to read those of others, which is no part of it."""
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state(1)).result()
        found = state(999)
        assert checkpointer.restore(found) == 1
        saved = found["rng"].saved
        fastckpt.save(found, disk / "final.pt").result()
        torch.save(found, disk / "torch.pt")
        for name in ("final.pt", "torch.pt"):
            again = fastckpt.load(disk / name, weights_only=False)["rng"]
            assert again.value.tolist() == [1, 1] and again.found and again.saved == []
        assert torch.equal(found["rng"].saved[0], saved[0])


def seen(step: int) -> PerRank:
    value = PerRank(torch.tensor([step, 1]))
    value.found = True
    return value


@pytest.mark.parametrize("bad", [7, "state", None])
def test_what_cannot_be_restored_in_place_is_refused(disk: Path, bad: Any) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(
            TypeError, match="must be a dict, a list, a tensor, PerRank or stateful"
        ):
            checkpointer.restore(bad)
        checkpointer.save(2, bad).result(WAIT_S)  # but it can be saved, and loaded
        loaded = checkpointer.load()
        assert str(loaded) == str(bad) and type(loaded) is type(bad)


def test_a_tuple_or_a_tensor_is_restored_in_place(disk: Path) -> None:
    def made(value: int) -> list[Any]:
        """A tensor, of which a tuple, and a tuple of tuples hold more and other things."""
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        rest = ({"step": value}, [value, torch.full((2,), value)], [value], model)
        large = torch.full((1 << 20,), value)
        return [large, (large.clone(), rest), (PerRank(value),), (), PerRank(value)]

    with Checkpointer(disk / "run") as checkpointer:
        for step, (saved, found) in enumerate(zip(made(3), made(8), strict=True)):
            checkpointer.save(step, saved)
            parts = [*flattened(found)]
            assert checkpointer.restore(found, step) == step
            assert str([*flattened(found)]) == str([*flattened(saved)])
            kept = zip(flattened(found), parts, strict=True)
            assert all(now is before for now, before in kept if not isinstance(now, int))
        with pytest.raises(fastckpt.IncompatibleCheckpoint, match=r"state has 3 items.* 2 items"):
            checkpointer.restore(({}, {}, {}), 1)


def flattened(value: Any) -> Iterator[Any]:
    """Yields the items of nested tuples; of PerRank, what it holds."""
    if isinstance(value, tuple):
        for item in value:
            yield from flattened(item)
    elif isinstance(value, PerRank):
        yield value.value
    else:
        yield value
        if isinstance(value, torch.nn.Module):
            yield value.weight


# ---- close ----


def test_close_waits_for_saves_and_what_they_remove(disk: Path) -> None:
    """The removal of old steps is held up; close() returns when it is over all the same."""
    with held_up("remove_directory") as (_, go_on):
        checkpointer = Checkpointer(disk / "run", keep_last=1)
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2)).result(WAIT_S)
        closed = threading.Event()

        def close() -> None:
            checkpointer.close()
            closed.set()

        closing = threading.Thread(target=close)
        closing.start()
        early = closed.wait(0.2)
        go_on.set()
        closing.join(WAIT_S)
        assert not early and closed.is_set()
        assert directories(disk / "run") == ["step-00000002"]


def test_a_callback_may_close_and_restore(disk: Path) -> None:
    """It runs before its save has ended, which must not wait for itself."""
    with Checkpointer(disk / "run", keep_last=1) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        called: list[Any] = []

        def restore_and_close(_handle: Any) -> None:
            begun = time.monotonic()
            found = state(0)
            called.extend([checkpointer.restore(found), found])
            checkpointer.close()
            called.append(time.monotonic() - begun)

        with held_up("rename") as (_, go_on):
            second = checkpointer.save(2, state(2))
            second.add_done_callback(restore_and_close)
            go_on.set()
            second.result(WAIT_S)
            wait_until(lambda: len(called) == 3, "the callback returned")
    assert called[0] == 2 and called[2] < WAIT_S / 2
    assert_holds(called[1], 2)


def test_after_close_nothing_is_saved_or_restored(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        handle = checkpointer.save(1, state(1))
    assert handle.done() and handle.exception() is None
    for call in (
        lambda: checkpointer.save(2, state(2)),
        lambda: checkpointer.restore(state(2)),
        lambda: checkpointer.load(),
        lambda: checkpointer.__enter__().save(2, state(2)),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    checkpointer.close()
    assert checkpointer.steps() == [1] and checkpointer.latest() == 1
    assert directories(disk / "run") == ["step-00000001"]


def test_several_checkpointers_of_a_process(disk: Path) -> None:
    with (
        Checkpointer(disk / "a") as a,
        Checkpointer(disk / "b") as b,
        Checkpointer(disk / "a") as reader,
    ):
        saves = [(a, b)[step % 2].save(step, state(step)) for step in range(4)]
        for save in saves[1::2]:
            save.result(WAIT_S)
        found = state(999)
        assert reader.restore(found) == 2  # it waits for this process's saves to the root
        assert_holds(found, 2)
        assert b.steps() == [1, 3] and a.steps() == reader.steps() == [0, 2]


# ---- errors ----


@contextmanager
def full_disk(number: int = 0) -> Iterator[Pipeline]:
    """Every allocation finds the disk full."""

    class Full(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "allocate":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real()

    with process_on(Full()) as current:
        yield current


def test_an_error_nobody_asked_for_is_raised_by_the_next_save(disk: Path) -> None:
    with full_disk(), Checkpointer(disk / "run") as checkpointer:
        failed = checkpointer.save(1, state(1))
        failed.wait_done()
        assert checkpointer.restore(state(1)) is None, "a restore does not ask for it"
        with pytest.raises(StorageError, match="are needed, but") as caught:
            checkpointer.save(2, state(2))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path == str(disk / "run/step-00000001/rank-00000.safetensors")
        second = checkpointer.save(3, state(3))
        with pytest.raises(StorageError):
            second.result(WAIT_S)
        third = checkpointer.save(4, state(4))  # asked for: it is not raised twice
        assert isinstance(third.exception(WAIT_S), StorageError)
    assert directories(disk / "run") == []


def refuse(*_: object) -> None:
    raise ArithmeticError("the loss is not a number")


def test_training_goes_on_after_a_failure_that_is_only_warned_of(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"before_commit": refuse, "on_error": "warn"}
    with Checkpointer(disk / "run", **gathered(**how)) as checkpointer:
        handles = [checkpointer.save(step, state(1)) for step in (10, 15)]
        concurrent.futures.wait(handles, WAIT_S)
        checkpointer._before_commit = None
        checkpointer.save(20, state(1)).result(WAIT_S)
    for handle, step in zip(handles, (10, 15), strict=True):
        (line,) = [text for text in caplog.messages if f"step-{step:08d}" in text]
        assert "was not saved: CheckpointError: before_commit refused" in line
        with pytest.raises(CheckpointError, match="the loss is not a number"):
            handle.result()
    assert checkpointer.steps() == [20]


def test_saves_to_elsewhere_that_fail_cost_no_step(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are warned of, once, and raised where they belong."""
    other = Checkpointer(disk / "other", before_commit=refuse)
    best = fastckpt.save(torch.ones(3), disk / "best.pt", before_commit=refuse)
    concurrent.futures.wait([other.save(1, state(1)), best], WAIT_S)
    with Checkpointer(disk / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(1)).result(WAIT_S)
    for path in (disk / "other/step-00000001", disk / "best.pt"):
        told = f"an earlier save, to {str(path)!r}, failed: before_commit refused"
        assert sum(line.startswith(told) for line in caplog.messages) == 1
    with pytest.raises(CheckpointError, match=r"other/step-00000001.*was not begun"):
        other.save(2, state(1))
    assert best in fastckpt.saving.pipeline.current().unreported(), "it is told at exit, or by:"
    with pytest.raises(CheckpointError, match=r"best\.pt.*was not begun"):
        fastckpt.save(torch.ones(3), disk / "last.pt")
    other.close()


def test_an_error_nobody_asked_for_is_raised_by_close(disk: Path) -> None:
    with full_disk():
        with pytest.raises(StorageError, match="rank-00000"):  # noqa: SIM117
            with Checkpointer(disk / "run") as checkpointer:
                checkpointer.save(1, state(1))
        checkpointer.close()
        checkpointer = Checkpointer(disk / "run")
        checkpointer.save(1, state(1)).wait_done()
        with pytest.raises(
            StorageError, match=r"^an earlier save, to '.*/step-00000001', failed: "
        ):
            checkpointer.close()
        checkpointer.close()


def test_one_line_is_logged_for_a_restore(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(7, state(1)).result(WAIT_S)
        fastckpt.saving.pipeline.current().drain()
        with caplog.at_level("INFO", "fastckpt"):
            assert checkpointer.restore(state(2)) == 7
            checkpointer.load()
    told = [line for line in caplog.messages if not line.startswith(("using ", "falling back "))]
    restored, loaded = told
    assert re.fullmatch(rf"restored step 7 of '{disk}/run': \S+ MiB in .* \(.*B/s\)", restored)
    assert loaded.startswith("loaded step 7 of ")


def test_the_line_of_a_restore_counts_small_tensors(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They lie in a file of their own, with what is no tensor."""
    small = {f"w{n}": torch.ones(50_000) for n in range(10)}
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, small).result(WAIT_S)
        with caplog.at_level("INFO", "fastckpt"):
            checkpointer.restore(small)
    (told,) = (line for line in caplog.messages if line.startswith("restored "))
    assert f": {shown_size(next(disk.rglob('objects.pt')).stat().st_size)} in " in told


@pytest.mark.parametrize(("rank", "warnings"), [("0", 0), ("1", 1), ("", 0)])
def test_ranks_that_do_not_know_each_other_are_warned_once(
    rank: str,
    warnings: int,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(coordinator, "_has_warned", False)
    with Checkpointer(disk / "run") as checkpointer:
        for step in range(2):
            checkpointer.save(step, state(step)).result(WAIT_S)
    assert caplog.text.count("rank 1 of 2: the Checkpointer of ") == warnings


def test_the_error_of_the_body_counts(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk(), pytest.raises(ZeroDivisionError), Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state(1))
        raise ZeroDivisionError
    assert "a save also failed" in caplog.text and "No space" in caplog.text


def test_a_root_that_is_no_directory(disk: Path) -> None:
    """It is refused when it is given; or told by the save, if it became one later."""
    (disk / "file").write_bytes(b"content")
    for root in (disk / "file", disk / "file" / "below"):
        with pytest.raises(ValueError, match="must be a directory: this path or a"):
            Checkpointer(root)
        (disk / "file").rename(disk / "hidden")
        checkpointer = Checkpointer(root)
        (disk / "hidden").rename(disk / "file")
        handle = checkpointer.save(1, state(1))
        error = handle.exception(WAIT_S)
        assert isinstance(error, StorageError) and error.errno == errno.ENOTDIR
        assert error.path == str(root)
        with pytest.raises(StorageError, match="list of"):
            checkpointer.restore(state(1))
    assert (disk / "file").read_bytes() == b"content"


# ---- fences and options ----


def held_state(held: HeldTensor) -> dict[str, Any]:
    """With a tensor that stops staging, one beyond it, and small ones of both kinds."""
    return {
        "held": held.tensor,
        "big": torch.zeros(BIG),
        "turned": torch.zeros(BIG // 100, 100).t(),
        "buffer": torch.zeros(10),  # up to 64 KiB: taken when save() is called
        "small": torch.zeros(50_000),  # up to 1 MiB: kept in objects.pt
    }


def test_the_root_is_there_when_save_returns(disk: Path) -> None:
    """So that the caller can save a file there at once, as for the best model so far."""
    root, gate = disk / "runs" / "a", threading.Event()
    storage = Delay("make_directory", gate)  # of the step, in the background
    with (
        process_on(storage),
        Checkpointer(root, options=fastckpt.SaveOptions(fence="step")) as checkpointer,
    ):
        checkpointer.save(1, state(1))
        fastckpt.save(state(1), root / "best.pt").result(WAIT_S)
        gate.set()
    synced = [each.path for each in storage.log if each.name == "sync_directory"]
    assert {str(disk), str(disk / "runs"), str(root)} <= {*synced}
    with process_on(FailAlways("make_directory parents", errno.EROFS)):
        handle = Checkpointer(disk / "other").save(1, state(1))
        with pytest.raises(StorageError, match="make directory of"):
            handle.result(WAIT_S)


def test_the_step_fence_lets_training_go_on_until_the_optimizer(disk: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(BIG))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(BIG)
    with (
        HeldTensor() as held,
        Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence="step")) as checkpointer,
    ):
        values = held_state(held) | {"parameter": parameter, "optimizer": optimizer}
        handle = checkpointer.save(1, values)
        held.wait_reached()
        assert not handle.is_staged() and handle.stats.stall_s is not None
        stalled_s = handle.stats.stall_s
        values["buffer"].add_(1)  # as a forward pass does to BatchNorm's
        values["turned"].add_(1)  # what is not contiguous was copied at once, too
        stepped = threading.Event()

        def step() -> None:
            optimizer.step()
            stepped.set()

        stepping = threading.Thread(target=step)
        stepping.start()
        assert not stepped.wait(0.1)
        held.release()
        stepping.join(WAIT_S)
        handle.result(WAIT_S)
        assert handle.stats.stall_s > stalled_s, "the optimizer's wait counts"
        assert bool((parameter == -1).all())
        loaded = checkpointer.load()
    for name in ("parameter", "buffer", "turned"):
        assert bool((loaded[name] == 0).all()), name


@pytest.mark.parametrize("name", ["big", "small"])
def test_a_change_too_early_fails_that_save_alone(disk: Path, name: str) -> None:
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence="step")) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        with HeldTensor() as held:
            values = held_state(held)
            handle = checkpointer.save(2, values)
            held.wait_reached()
            values[name][5] = 1
            held.release()
            error = handle.exception(WAIT_S)
        assert type(error) is StagingConflict
        assert name in str(error) and "wait_staged() first" in str(error)
        assert checkpointer.steps() == [1]
        checkpointer.save(3, state(3)).result(WAIT_S)
        found = state(999)
        assert checkpointer.restore(found) == 3
        assert_holds(found, 3)
    assert directories(disk / "run") == ["step-00000001", "step-00000003"]


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(BIG)


def test_the_step_fence_takes_tensors_without_a_version(disk: Path) -> None:
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence="step")) as checkpointer:
        checkpointer.save(1, {"w": inference_tensor(), "small": inference_tensor()[:9].clone()})
        target = inference_tensor() * 2
        assert checkpointer.restore({"w": target}) == 1
        assert bool((target == 1).all())


OPTIONS: list[dict[str, Any]] = [
    {"staging_bytes": 1},
    {"staging_bytes": BLOCK_BYTES},
    {"staging_bytes": 3 * BLOCK_BYTES, "backend": "threads"},
    {"durable": False},
    {},
]


def some_options() -> Iterator[Any]:
    """All of them with all codecs and fences, of which `make test` takes every second one."""
    ways = itertools.product([None, "zstd", "planes"], OPTIONS, ["call", "step"])
    for number, (codec, options, fence) in enumerate(ways):
        taken = number % 2 == number // 2 % 2
        name = f"{codec}-{'-'.join(options) or 'default'}-{fence}"
        marks = [] if taken else [pytest.mark.torture]
        yield pytest.param(fence, codec, options, marks=marks, id=name)


@pytest.mark.parametrize(("fence", "codec", "options"), some_options())
def test_every_option_brings_back_the_same(
    disk: Path, fence: str, codec: str | None, options: dict[str, Any]
) -> None:
    elements = 5_000_000  # 20 MB: three blocks
    with Checkpointer(
        disk / "run", codec=codec, **gathered(fence=fence, **options)
    ) as checkpointer:
        stats = checkpointer.save(1, state(1, elements)).result(WAIT_S)
        limit = max(BLOCK_BYTES, options.get("staging_bytes", 1 << 40))
        assert stats.staged_bytes_max <= limit
        if "backend" in options:
            assert stats.backend == "threads"
        found = state(999, elements)
        assert checkpointer.restore(found) == 1
    assert_holds(found, 1, elements)


@pytest.mark.parametrize("fence", ["call", "step"])
def test_nothing_holds_a_state_that_was_saved(disk: Path, fence: str) -> None:
    with Checkpointer(disk / "run", options=fastckpt.SaveOptions(fence=fence)) as checkpointer:
        memory, few = Octets(2 << 20), Octets(99)
        values = {
            "w": torch.frombuffer(memory, dtype=torch.uint8),
            "few": torch.frombuffer(few, dtype=torch.uint8),
            "own": PerRank(1),
        }
        held = [weakref.ref(memory), weakref.ref(few), weakref.ref(values["own"])]
        handle = checkpointer.save(1, values)
        del memory, few, values
        handle.result(WAIT_S)
        gc.collect()
        assert [reference() for reference in held] == [None, None, None]


# ---- order ----


# ---- a step that is saved again ----


def test_a_step_is_replaced_by_the_commit_and_not_before(disk: Path) -> None:
    root = disk / "run"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
    with held_up("rename") as (storage, go_on), Checkpointer(root) as checkpointer:
        handle = checkpointer.save(1, state(2))
        assert storage.reached.wait(WAIT_S)
        assert directories(root) == ["step-00000001", "step-00000001-again"]
        assert restored_from(root) == 1, "not committed: the old one loads"
        assert checkpointer.steps() == [1] and checkpointer.latest() == 1
        go_on.set()
        handle.result(WAIT_S)
        assert handle.path == str(attempt(root, 1))
        found = state(999)
        assert checkpointer.restore(found) == 1
        assert found["name"] == "step 2"
    assert directories(root) == ["step-00000001-again"], "the old one is gone"
    with Checkpointer(root) as checkpointer:
        assert checkpointer.save(1, state(3)).result(WAIT_S) and checkpointer.steps() == [1]
        assert_holds(checkpointer.load(1), 3)
    assert directories(root) == ["step-00000001"], "its name is free again"


def restored_from(root: Path) -> int:
    """The number in what another process's restore would give, without waiting for saves here."""
    with process_on(None), Checkpointer(root) as checkpointer:
        return int(checkpointer.load()["name"].split()[1])


def test_two_saves_of_a_step_in_flight(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        for number in range(6):
            checkpointer.save(7, state(number))
        found = state(999)
        assert checkpointer.restore(found) == 7 and found["name"] == "step 5"
        assert checkpointer.steps() == [7]
    assert len(directories(disk / "run")) == 1


def test_a_failed_save_of_a_step_leaves_the_old_one(disk: Path) -> None:
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state(1))
    with full_disk(), Checkpointer(disk / "run") as checkpointer:
        assert checkpointer.save(1, state(2)).exception(WAIT_S) is not None
    assert restored(disk / "run") == 1 and directories(disk / "run") == ["step-00000001"]


# ---- stock readers ----


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_stock_readers_open_every_file(disk: Path, codec: str | None) -> None:
    values = state(4, 3_000_000) | {"more": torch.arange(600_000, dtype=torch.int16)}
    with Checkpointer(disk / "run", codec=codec) as checkpointer:
        checkpointer.save(4, values)
    directory = disk / "run" / "step-00000004"
    shard = directory / "rank-00000.safetensors"
    if codec is not None:
        packed = directory / "rank-00000.safetensors.zst"
        if shutil.which("zstd"):
            subprocess.run(["zstd", "-q", "-d", packed, "-o", shard], check=True)
        else:
            with packed.open("rb") as file:
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                shard.write_bytes(reader.read())
    with safetensors.safe_open(shard, framework="pt") as opened:
        assert set(opened.keys()) == {"model/w", "more", "fastckpt.per_rank"}
        assert torch.equal(opened.get_tensor("model/w"), values["model"]["w"])
        assert torch.equal(opened.get_tensor("more"), values["more"])
        own = disk / "own.pt"
        own.write_bytes(opened.get_tensor("fastckpt.per_rank").numpy().tobytes())
    assert torch.load(own)["rng"].tolist() == [4, 1]
    for loaded in (torch.load(directory / "objects.pt"), fastckpt.load(directory / "objects.pt")):
        assert loaded["name"] == "step 4" and loaded["model"]["b"].tolist() == [4] * 7
        assert loaded["model"]["w"] == {
            "fastckpt.tensor": "model/w",
            "dtype": "F32",
            "shape": [3_000_000],
        }
        assert loaded["rng"] == {"fastckpt.per_rank": "rng"}


# ---- operations that fail ----

# A commit can do without these, most of which look at other steps; a failure of others is told by
# the handle, unless the step has been committed and what failed is the removal of older ones, or it
# is tried again: save() makes the root so that its caller finds it, and its thread does if it could
# not.
DISPENSABLE = {"lock", "close", "names", "names directories", "status", "status link"} | {
    *("open", "open regular", "read_file", "read_at", "fstat")
}


@dataclass(frozen=True)
class Scenario:
    """A root with one step, and a save to it.

    Attributes:
        before: step that was committed; None: there is no root yet.
        step: that is saved; its content is that of state(2).
        options: of the Checkpointer.
    """

    before: int | None
    step: int
    options: dict[str, Any] = field(default_factory=dict)

    def prepare(self, root: Path) -> None:
        if self.before is not None:
            with Checkpointer(root, options=fastckpt.SaveOptions(durable=False)) as checkpointer:
                checkpointer.save(self.before, state(1))

    def save(self, root: Path, storage: Storage) -> SaveHandle:
        with process_on(storage):
            checkpointer = Checkpointer(root, **self.options)
            handle = checkpointer.save(self.step, state(2))
            handle.wait_done()
            with nullcontext() if handle.exception() is None else pytest.raises(BaseException):
                checkpointer.close()
                handle.result()
        return handle


SCENARIOS = {
    "first": Scenario(None, 2),
    "next": Scenario(1, 2, {"keep_last": 1}),
    "again": Scenario(1, 1),
    "zstd": Scenario(1, 2, {"keep_last": 1, "codec": "zstd"}),
}


def content_of(root: Path) -> int | None:
    """Which of state(1), state(2), ... a restore gives; None if it says there is no step."""
    found = state(999)
    with Checkpointer(root) as checkpointer:
        step = checkpointer.restore(found)
        if step is None:
            return None
        number = int(found["name"].split()[1])
        assert_holds(found, number)
        for listed in checkpointer.steps():
            loaded = checkpointer.load(listed)
            assert_holds(loaded, int(loaded["name"].split()[1]))
        return number


def go_on(root: Path, what: str) -> None:
    """The next job saves step 3; then nothing but that, or what it replaced, is there."""
    with Checkpointer(
        root, keep_last=1, options=fastckpt.SaveOptions(durable=False)
    ) as checkpointer:
        checkpointer.save(3, state(3))
    assert content_of(root) == 3
    assert directories(root) == ["step-00000003"], what
    assert len(os.listdir(root / "step-00000003")) == 4


def operations_of(scenario: Scenario, root: Path, storm: Storm, some: int) -> list[int]:
    """Numbers of operations of a save, and that after the last: all of them, or those about the
    commit and some others.
    """
    storage = Recorder()
    scenario.prepare(root)
    assert scenario.save(root, storage).exception() is None
    about = [int(place) + more for place in place_of_commit(storage) for more in (-1, 0, 1)]
    return sorted({*storm.some(range(len(storage.log) + 2), some), *about})


def first_of_each_name(scenario: Scenario, root: Path) -> set[int]:
    """Numbers of operations of a save."""
    storage = Recorder()
    scenario.prepare(root)
    assert scenario.save(root, storage).exception() is None
    names = storage.names_logged()
    return {*map(names.index, names)}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("first", errno.EIO, marks=pytest.mark.torture),
        ("next", errno.EIO),
        pytest.param("next", errno.ENOSPC, marks=pytest.mark.torture),
        pytest.param("again", errno.EDQUOT, marks=pytest.mark.torture),
        pytest.param("zstd", errno.ENOSPC, marks=pytest.mark.torture),
    ],
)
def test_every_operation_may_fail(memory: Path, name: str, code: int, storm: Storm) -> None:
    """Each of them in `make torture`; in `make test` one of each name, those about the commit, and
    some others.
    """
    scenario = SCENARIOS[name]
    old = None if scenario.before is None else 1
    failed = set()
    numbers = first_of_each_name(scenario, memory / "first" / "run")
    for number in sorted({*operations_of(scenario, memory / "whole" / "run", storm, 4), *numbers}):
        root = memory / f"{number}" / "run"
        scenario.prepare(root)
        storage = FailAt(number, code)
        error = scenario.save(root, storage).exception()
        if number >= len(storage.log):
            break  # there are no more
        operation, (_, committed) = storage.log[number], place_of_commit(storage)
        failed.add(operation.name)
        what = f"operation {number}, {operation}, failed"
        if error is not None:
            assert type(error) is StorageError and error.errno == code, what
            assert number <= committed, f"{what}: it was committed"
            assert error.visible == (number == committed), what
        else:
            makes_root = operation == Operation("make_directory parents", os.fspath(root))
            # Whether the attempt before is dead: this one has another name if that is not known.
            looks = operation == Operation("open directory", os.fspath(root / "step-00000001"))
            assert (
                number > committed
                or operation.name in DISPENSABLE
                or (looks and scenario.step == scenario.before)
                or (makes_root and operation in storage.log[number + 1 :])
            ), f"{what}: swallowed"
        assert content_of(root) == (2 if error is None or error.visible else old), what
        go_on(root, what)
        shutil.rmtree(root.parent)
    wanted = {"make_directory", "create", "write_at", "sync", "sync_directory"}
    assert len(wanted & failed) >= 4, failed  # which one has a number is the threads' chance
    assert "codec" in scenario.options or {"allocate", "write"} <= failed
    assert old is None or {"remove", "remove_directory"} <= failed


# ---- the last operation before a power cut ----


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "name",
    ["next", *(pytest.param(each, marks=pytest.mark.torture) for each in ("first", "again"))],
)
def test_any_operation_may_be_the_last(memory: Path, name: str, storm: Storm) -> None:
    """Each of them in `make torture`; in `make test` those about the commit, and some others."""
    scenario = SCENARIOS[name]
    old = None if scenario.before is None else 1
    inside = Path("a/b/run") if old is None else Path("run")
    owner, told = dead_pid(), set()
    seen: dict[int, int | None] = {}
    print(f"seed {SEED}")
    for count in operations_of(scenario, memory / "whole" / inside, storm, 8):
        live = memory / "live"
        live.mkdir()
        scenario.prepare(live / inside)
        storage = Crash(live, count)
        with process_on(storage), suppress(PowerCut):  # what it is for
            handle = Checkpointer(live / inside, **scenario.options).save(scenario.step, state(2))
            handle.exception(WAIT_S)
        if count > len(storage.log):
            break  # there are no more
        renamed, synced = place_of_commit(storage)
        last = storage.log[count - 1] if count else "nothing"
        for label, image in storage.images(SEED + count):
            key = hash(tuple(image.items()))
            if key not in seen:
                plant(image, memory / "after", owner)
                root = memory / "after" / inside
                seen[key] = content_of(root)
                if len(seen) % 4 == 0 and root.exists():
                    go_on(root, f"{count} operations, {label}")
                shutil.rmtree(memory / "after", ignore_errors=True)
            found, what = seen[key], f"{count} operations, the last {last}; survived: {label}"
            told.add(found)
            if count <= renamed:
                assert found == old, what
            elif count > synced:
                assert found == 2, what
            else:
                assert found in (old, 2), what
        shutil.rmtree(live)
    assert told == {old, 2} and len(seen) > 10


# ---- golden files ----


def golden() -> Any:
    """tests/data/make_golden.py as a module."""
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def golden_paths() -> list[Path]:
    """What make_golden.py makes, and itself: others have folders of their own beside it."""
    others = ("recordings", "corpus", "make_corpus.py", "golden", "make_directories.py")
    return [
        path
        for path in DATA.rglob("*")
        if not any(path.is_relative_to(DATA / other) for other in others)
    ]


def test_golden_files_are_small_and_all_there() -> None:
    files = sorted(str(path.relative_to(DATA)) for path in DATA.rglob("step/*/*"))
    assert [file.partition("/step-")[2] for file in files] == [
        *(f"00000003/{n}" for n in ("manifest.json", "objects.pt", "rank-00000.json")),
        *(f"00000003/rank-0000{n}" for n in ("0.safetensors", "1.json", "1.safetensors")),
        *(f"00000007/{n}" for n in ("manifest.json", "objects.pt", "rank-00000.json")),
        "00000007/rank-00000.safetensors.zst",
    ]
    assert sum(path.stat().st_size for path in golden_paths() if path.is_file()) < 200_000


def test_golden_steps_load(assert_same: Same) -> None:
    """Steps that every later version has to read."""
    made = golden()
    with Checkpointer(DATA / "step") as checkpointer:
        assert checkpointer.steps() == [3, 7] and checkpointer.latest() == 7
        loaded = checkpointer.load(made.PLAIN_STEP)
        own = loaded.pop("own")
        assert own.found and own.value == ("rank", 0)
        expected = made.values()
        del expected["own"]
        assert_same(loaded, expected | {"ordered": dict(expected["ordered"])})
        target = {
            "sharded": {
                name: torch.zeros(6, 5, dtype=t.dtype) for name, t in loaded["sharded"].items()
            },
            "columns": torch.zeros(11, 7).t(),
            "own": PerRank(),
        }
        assert checkpointer.restore(target, 3) == 3
        for name, tensor in expected["sharded"].items():
            assert torch.equal(target["sharded"][name].view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(target["columns"], expected["columns"])
        zstd = checkpointer.load(made.ZSTD_STEP)
        assert torch.equal(zstd["large"], made.large()) and zstd["own"].value == [1, 2]


def test_golden_files_load(disk: Path, assert_same: Same) -> None:
    made = golden()
    group = disk / "group-v1.pt"
    group.write_bytes(gzip.decompress((DATA / "group-v1.pt.gz").read_bytes()))
    cases = ((DATA / "file-v1.pt", made.small_file_values()), (group, made.file_values()))
    for path, expected in cases:
        for load in (fastckpt.load, torch.load):
            assert_same(load(path), expected)
        assert b"fastckpt1" in path.read_bytes()[:128], "marked as ours"


@pytest.mark.multiprocess
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch.save, which packs PerRank, wrote other bytes then"
)
def test_the_same_content_still_gives_the_same_bytes(disk: Path) -> None:
    """Of the shards all of it; of the JSON what does not depend on the time and on chance."""
    made = disk / "made"
    made.mkdir()
    start = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    imports = "tests.crews.steps_imports"
    run_python(start, DATA / "make_golden.py", made, imports=imports, limit_s=240)
    chance = (
        "nonce",
        "sequence",
        "sha256",
        "index_sha256",
        "created",
        "objects",
        "frames",
        "file_nbytes",
    )

    def lasting(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: lasting(v) for k, v in value.items() if k not in chance}
        return [lasting(item) for item in value] if isinstance(value, list) else value

    for path in sorted((DATA / "step").rglob("*.*")):
        again = made / path.relative_to(DATA)
        if path.suffix == ".safetensors":
            assert again.read_bytes() == path.read_bytes(), path
        elif path.suffix == ".zst":
            unpack = zstandard.ZstdDecompressor
            texts = []
            for file in (path, again):
                with file.open("rb") as packed:
                    reader = unpack().stream_reader(packed, read_across_frames=True)
                    texts.append(reader.read())
            assert texts[0] == texts[1] and len(texts[0]) > 10_000_000
        elif path.suffix == ".json":
            old, new = (json.loads(file.read_bytes()) for file in (path, again))
            assert list(new) == list(old) and lasting(new) == lasting(old), path
            sizes = {len(re.sub(rb'"sequence":\d+', b"", it.read_bytes())) for it in (path, again)}
            assert len(sizes) == 1, path
    assert sorted(p.name for p in made.rglob("*")) == sorted(
        p.name
        for p in golden_paths()
        if "golden" not in p.name and p.suffix != ".pyc" and p.name != "__pycache__"
    )
