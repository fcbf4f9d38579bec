"""save(deadline_s=): a job that will end soon saves by the fastest way that is safe, on all ranks,
and nothing that was asked for to spare the storage delays it any more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastckpt
from fastckpt import Checkpointer, CheckpointError, PeerFailed
from fastckpt.tiers.local_tier import LocalTier
from tests.crews import tiers_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.saves import wait_until
from tests.kit.steps import assert_holds, directories, restored, state
from tests.kit.tiers import WAIT_S, doors, local, local_steps

RANKS_IMPORT = "tests.crews.tiers_imports"

__all__ = ["local"]
SOON_S = 500.0


def tier_of(checkpointer: Checkpointer) -> LocalTier:
    assert checkpointer._tier is not None
    return checkpointer._tier


def test_no_rate_delays_it_nor_what_is_being_written(disk: Path) -> None:
    """At the rate that was asked for, the first step alone would take longer than is waited."""
    elements = 6_000_000
    paced = {"drain_rate": 4 * elements / WAIT_S / 2, "max_writers": 1}
    with Checkpointer(disk, **paced) as checkpointer:  # type: ignore[arg-type]
        first = checkpointer.save(1, state(1, elements))
        while not first.progress().written:
            assert not first.wait_done(0.01)
        last = checkpointer.save(2, state(2, elements), deadline_s=SOON_S).result(WAIT_S)
        assert first.done() and checkpointer.steps() == [1, 2]
        assert last.pacing == "" and last.paced_s == 0.0 and "drain_rate" in first.stats.pacing
        found = state(999, elements)
        assert checkpointer.restore(found) == 2
        assert_holds(found, 2, elements)


def test_the_failure_of_an_earlier_save_is_left_to_close(disk: Path) -> None:
    def refuse(stats: fastckpt.SaveStats, digest: str) -> None:
        if refusing:
            raise ValueError("no")

    refusing, checkpointer = [1], Checkpointer(disk, before_commit=refuse)
    checkpointer.save(1, state(1)).wait_done(WAIT_S)
    refusing.clear()
    checkpointer.save(2, state(2), deadline_s=SOON_S).result(WAIT_S)
    with pytest.raises(CheckpointError, match=r"an earlier save, to .*step-00000001"):
        checkpointer.close()
    assert restored(disk) == 2


def test_it_waits_for_no_drain_of_other_steps(disk: Path, local: Path) -> None:
    """It is in the root before them, and what is left in the end is what would be in order."""
    root = disk / "run"
    options: dict[str, Any] = {"local": (local, 1), "keep_last": 2}
    with doors() as storage, Checkpointer(root, **options) as checkpointer:
        storage.closed.append(root / "step-00000001" / "rank-00000.safetensors")
        earlier = [checkpointer.save(step, state(step)) for step in (1, 2)]
        assert all(handle.wait_local(WAIT_S) for handle in earlier)
        last = checkpointer.save(3, state(3), deadline_s=SOON_S).result(WAIT_S)
        assert last.local_committed_s is not None and last.local_why == ""
        assert not any(handle.done() for handle in earlier)
        assert checkpointer.latest() == 3
        storage.open_doors()
        for handle in earlier:
            handle.result(WAIT_S)
        assert checkpointer.latest() == 3
        checkpointer.save(4, state(4)).result(WAIT_S)
    assert directories(root) == ["step-00000003", "step-00000004"]
    assert local_steps(local) == ["step-00000004"]


def test_a_full_node_does_not_make_it_wait(disk: Path, local: Path) -> None:
    """It goes straight to the root, past the drains that would make room."""
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local, keep_last=1) as checkpointer:
        storage.closed.append(root / "step-00000001" / "rank-00000.safetensors")
        first = checkpointer.save(1, state(1))
        assert first.wait_local(WAIT_S)
        storage.faults["allocate", local] = errno.ENOSPC
        last = checkpointer.save(2, state(2), deadline_s=SOON_S).result(WAIT_S)
        assert "No space" in last.local_why and not first.done()
        assert checkpointer.latest() == 2
        storage.open_doors()
        first.result(WAIT_S)
        assert checkpointer.latest() == 2
        storage.faults.clear()
        checkpointer.save(3, state(3)).result(WAIT_S)
    assert directories(root) == ["step-00000003"]


def test_an_earlier_attempt_that_is_drained_later_does_not_stay(disk: Path, local: Path) -> None:
    root = disk / "run"
    with doors() as storage, Checkpointer(root, local=local) as checkpointer:
        storage.closed.append(root / "step-00000005" / "rank-00000.safetensors")
        first = checkpointer.save(5, state(1))
        assert first.wait_local(WAIT_S)
        wait_until((root / "step-00000005").exists)  # else the next save takes that name
        checkpointer.save(5, state(2), deadline_s=SOON_S).result(WAIT_S)
        assert not first.done()
        storage.open_doors()
        first.result(WAIT_S)
    assert directories(root) == ["step-00000005-again"]
    found = state(999)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(found) == 5
    assert_holds(found, 2)


@pytest.mark.parametrize(
    ("times_s", "goes_straight"),
    [
        (None, False),  # nothing is known
        ((1.0, 1.0), False),  # there is time for both
        ((SOON_S, 1.0), True),
        ((SOON_S, 0.9 * SOON_S), False),  # the root alone would take too long, too
    ],
)
def test_it_goes_straight_to_the_root_if_only_that_is_in_time(
    disk: Path, local: Path, times_s: tuple[float, float] | None, goes_straight: bool
) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        if times_s is not None:
            tier_of(checkpointer).drainer.note_times(*times_s)
        stats = checkpointer.save(1, state(1), deadline_s=SOON_S).result(WAIT_S)
        assert (stats.local_committed_s is None) == goes_straight
        assert ("the job ends in" in stats.local_why) == goes_straight
        assert checkpointer.restore(state(0)) == 1


def test_each_step_tells_how_long_it_took(disk: Path, local: Path) -> None:
    with Checkpointer(disk / "run", local=local) as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        known = tier_of(checkpointer).drainer._times_s
    assert known is not None and known[0] > 0.0 and known[1] > 0.0


@pytest.mark.multiprocess
def test_the_first_rank_decides_for_all(
    crew: Callable[[int], Crew], disk: Path, local: Path
) -> None:
    locals_ = [str(local / "a"), str(local / "b")]
    for name in locals_:
        Path(name).mkdir()
    for times_s, goes_straight in (((SOON_S, 1.0), True), ((1.0, 1.0), False)):
        known = [times_s, (1.0, 1.0) if goes_straight else (SOON_S, 1.0)]
        root = str(disk / f"run{goes_straight}")
        for when, why in crew(2)(bodies.save_soon, root, locals_, SOON_S, known):
            assert (when is None) == goes_straight == ("the job ends in" in why)


@pytest.mark.multiprocess
def test_a_rank_without_it_is_told(crew: Callable[[int], Crew], disk: Path) -> None:
    for error, latest in crew(2)(bodies.one_has_a_deadline, str(disk / "run")):
        assert isinstance(error, PeerFailed) and "before the job ends" in str(error), error
        assert latest is None
