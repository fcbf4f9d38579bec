"""A save that is cancelled, or refused by before_commit, is not committed on any rank and leaves
nothing; one that is cancelled too late commits as if nobody had asked.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, SaveCancelled
from fastckpt.saving.pipeline import Pipeline
from tests.crews import cancel_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.doubles import Delay, save_through
from tests.kit.options import gathered
from tests.kit.saves import HeldTensor, wait_until

WAIT_S = 60.0
SLOW = 1000.0  # bytes a second: such a save takes hours
RANKS_IMPORT = "tests.crews.cancel_bodies"


@pytest.fixture
def old(disk: Path) -> Iterator[Path]:
    """A path with a checkpoint, under which nothing else may be in the end."""
    path = disk / "a.pt"
    fastckpt.save("old", path).result(WAIT_S)
    yield path
    assert fastckpt.load(path) == "old" and os.listdir(disk) == ["a.pt"]


def cancelled(handle: fastckpt.SaveHandle) -> SaveCancelled:
    error = handle.exception(WAIT_S)
    assert type(error) is SaveCancelled, error
    assert "it was cancelled; nothing was committed" in str(error) and error.ranks == (0,)
    return error


def test_nothing_of_an_export_is_left_when_it_is_told(disk: Path) -> None:
    left: Queue[list[str]] = Queue()
    with HeldTensor() as held:
        handle = fastckpt.export(
            {"w": held.tensor}, disk / "a", options=fastckpt.SaveOptions(fence="step")
        )
        held.wait_reached()
        wait_until(lambda: os.listdir(disk) != [])  # its thread makes the directory
        assert handle.cancel()
        handle.add_done_callback(lambda _: left.put(os.listdir(disk)))
        held.release()
        cancelled(handle)
    assert left.get(timeout=WAIT_S) == []


def test_while_memory_is_short(old: Path) -> None:
    """What is left to be copied waits for writes that take hours."""
    options = {"fence": "step", "staging_bytes": 8 << 20, "drain_rate": SLOW}
    handle = fastckpt.save({"w": torch.ones(6 << 20)}, old, **gathered(**options))
    handle.cancel()
    cancelled(handle)


def test_while_an_earlier_save_is_in_flight(disk: Path) -> None:
    """It loses its turn; the others keep theirs."""
    go_on = threading.Event()
    storage = Delay("sync", go_on)
    pipeline = Pipeline(storage)
    first, second, third = (save_through(pipeline, n, disk / "a.pt") for n in (1, 2, 3))
    assert second.cancel()
    go_on.set()
    cancelled(second)
    assert first.result(WAIT_S) and third.result(WAIT_S)
    assert fastckpt.load(disk / "a.pt") == 3
    pipeline.close()


def test_nobody_is_told_of_what_he_cancelled(old: Path) -> None:
    """Neither the next save nor the Checkpointer's close()."""
    fastckpt.save({"w": torch.ones(1 << 20)}, old, drain_rate=SLOW).cancel()
    fastckpt.save("old", old).result(WAIT_S)
    with Checkpointer(old.parent / "run", drain_rate=SLOW) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1 << 20)}).cancel()
    with Checkpointer(old.parent / "run") as checkpointer:
        assert checkpointer.steps() == []
    os.rmdir(old.parent / "run")


def test_a_task_that_waits_too_long_cancels(old: Path) -> None:
    """As for any future; asyncio.shield prevents it."""
    handle = fastckpt.save({"w": torch.ones(1 << 20)}, old, drain_rate=SLOW)

    async def wait(shielded: bool) -> None:
        future = asyncio.wrap_future(handle)
        waited = asyncio.shield(future) if shielded else future
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waited, 0.001)
        future.add_done_callback(lambda its: its.cancelled() or its.exception())

    asyncio.run(wait(True))
    asyncio.run(wait(False))
    assert handle.is_cancelled()
    cancelled(handle)


def test_a_step_in_the_local_tier_stays(disk: Path, memory: Path) -> None:
    if os.stat(disk).st_dev == os.stat(memory).st_dev:
        pytest.skip("there is only one file system here")
    state = {"w": torch.ones(1 << 20)}
    with Checkpointer(disk, local=memory, drain_rate=4e6) as checkpointer:
        handle = checkpointer.save(1, state)
        assert handle.wait_local(WAIT_S)
        handle.cancel()
        assert handle.result(WAIT_S).local_committed_s is not None
        assert checkpointer.latest() == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("cancelling", [[0], [2], [0, 1, 2]], ids=str)
def test_all_ranks_agree(crew: Callable[[int], Crew], disk: Path, cancelling: list[int]) -> None:
    texts = set()
    for outcome, after, left, latest in crew(3)(bodies.cancel_step, str(disk), cancelling):
        assert type(outcome.error) is SaveCancelled, outcome
        assert outcome.error.ranks[0] in cancelling
        assert str(disk) in str(outcome.error)
        texts.add(str(outcome.error))
        assert left == [] and after.error is None and latest == 2
    assert len(texts) == 1 or len(cancelling) > 1, texts


@pytest.mark.multiprocess
def test_other_steps_are_not_touched(crew: Callable[[int], Crew], disk: Path) -> None:
    """Whether the second one comes too late or not: all ranks tell the same."""
    for number in range(4):
        root = disk / str(number)
        ranks = crew(2)(bodies.cancel_in_turn, str(root))
        ends = {tuple(type(outcome.error) for outcome in outcomes) for outcomes in ranks}
        assert len(ends) == 1
        ((first, second, third),) = ends
        assert first is third is type(None) and second in (type(None), SaveCancelled)
        with Checkpointer(root) as checkpointer:
            assert checkpointer.steps() == [1, 3] if second is SaveCancelled else [1, 2, 3]


@pytest.mark.multiprocess
@pytest.mark.parametrize("cancelling", [0, 1])
def test_a_step_that_was_cancelled_does_not_stop_the_next(
    crew: Callable[[int], Crew], disk: Path, cancelling: int
) -> None:
    """Though nobody asks for the first; the log tells of it, unless the first rank cancelled it."""
    for rank, (outcome, told) in enumerate(crew(2)(bodies.cancel_unasked, str(disk), cancelling)):
        assert outcome.error is None
        assert len(told) == (rank == 0 and cancelling == 1)
        assert all("rank 1 cancelled it" in line for line in told)


# before_commit


def test_what_it_sees(disk: Path) -> None:
    seen: list[Any] = []

    def look(stats: fastckpt.SaveStats, digest: str) -> None:
        seen.append((digest, stats.nbytes, os.listdir(disk / "x")))

    (disk / "x").mkdir()
    for number in (1, 1, 2):
        state = {"w": torch.full((1 << 20,), float(number))}
        fastckpt.save(state, disk / "x" / "a.pt", before_commit=look).result(WAIT_S)
        os.remove(disk / "x" / "a.pt")
    (one, nbytes, names), again, two = seen
    assert again[0] == one != two[0] and len(one) == 64 and int(one, 16)
    assert nbytes > 4 << 20 and "a.pt" not in names


def test_its_exit_is_no_exit(old: Path) -> None:
    """It would be one of whoever asks for the result."""
    handle = fastckpt.save("new", old, before_commit=lambda *_: sys.exit(3))
    with pytest.raises(fastckpt.CheckpointError, match="with SystemExit: 3; nothing was committed"):
        handle.result(WAIT_S)


@pytest.mark.parametrize("method", ["restore", "close"])
def test_it_does_not_wait_for_itself(disk: Path, method: str) -> None:
    def wait(*_: Any) -> None:
        arguments = [{"w": torch.ones(3)}] if method == "restore" else []
        getattr(checkpointer, method)(*arguments)

    with Checkpointer(disk, before_commit=wait) as checkpointer:
        handle = checkpointer.save(1, {"w": torch.ones(3)})
        with pytest.raises(fastckpt.CheckpointError, match="wait for itself, since the save to"):
            handle.result(WAIT_S)


class Later:
    """What somebody else has to wait for."""

    async def __call__(self, *_: Any) -> None:
        raise ValueError("the loss is nan")

    def __await__(self) -> Iterator[None]:
        raise ValueError("the loss is nan")


def test_it_has_to_be_a_function(old: Path) -> None:
    for later in (Later.__call__, Later(), partial(Later.__call__, Later())):
        with pytest.raises(TypeError, match=r"before_commit is .* is async and would never be"):
            fastckpt.save("new", old, before_commit=later)
    handle = fastckpt.save("new", old, before_commit=lambda *_: Later())
    with pytest.raises(fastckpt.CheckpointError, match="TypeError: it returned a Later, which"):
        handle.result(WAIT_S)


@pytest.mark.multiprocess
@pytest.mark.parametrize("refusing", [0, 1])
def test_one_rank_refuses_for_all(crew: Callable[[int], Crew], disk: Path, refusing: int) -> None:
    for rank, (outcomes, digests, latest) in enumerate(crew(2)(bodies.refuse, str(disk), refusing)):
        first, refused, third = (outcome.error for outcome in outcomes)
        assert first is third is None and latest == 3
        wanted = fastckpt.CheckpointError if rank == refusing else fastckpt.PeerFailed
        assert type(refused) is wanted and "loss is nan" in str(refused)
        assert str(refused).count("nothing was committed") == 1
        # A rank that hears of the refusal before it has synced its own files is not asked at all.
        assert len(set(digests)) == 1 and len(digests) in ({3} if rank == refusing else {2, 3})
    assert sorted(os.listdir(disk)) == ["step-00000001", "step-00000003"]
