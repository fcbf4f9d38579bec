"""Ranks that are killed while they save, one of them or all, from Checkpointer.save to the disk.

Responsible for the moments of the kills, for what the survivors must be told, and for
what must be found afterwards. Must not know in which steps a save proceeds; what ranks do in their
lives stands in crews/steps_lives.py.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer, PeerFailed
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.crews.steps_lives import (
    BEGUN,
    BORN,
    COMMITTED,
    FAILED,
    RESTORED,
    TIMEOUT_S,
    Clock,
    Reports,
    live,
)
from tests.crews.steps_states import COLUMNS, ROWS, numbers
from tests.kit.interpreters import let_go
from tests.kit.saves import wait_until
from tests.kit.storm import Storm

LANES = 8  # jobs that run beside each other: most of the time they wait for somebody who is dead
SAVES, OPERATIONS = 5, 90  # within which a kill comes
WAIT_S = 60.0
RANKS_IMPORT = "tests.crews.steps_imports"
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@dataclass
class Lane:
    """One root, and the jobs that save to it one after the other.

    Attributes:
        number: of the lane. It chooses who dies, and about when, so that all lanes together try
            each rank and each part of the time; `rng` chooses the rest.
        found: the step committed last when the job before had ended; None: none.
        whole: committed steps that were compared.
        debris: manifests, under their temporary names, of saves that came to no end.
        seen: how often what happened.
        jobs: the reports of each job, for messages.
    """

    number: int
    root: Path
    nursery: Nursery
    lock: threading.Lock  # of the nursery
    rng: random.Random
    found: int | None = None
    whole: set[int] = field(default_factory=set)
    debris: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    jobs: list[list[Reports]] = field(default_factory=list)

    @contextmanager
    def job(
        self, ranks: int, dying: dict[int, int] | None = None
    ) -> Iterator[tuple[Crew, list[Reports], Path]]:
        """A job of so many ranks, all of which have begun to save, and where their Clock looks."""
        directory = Path(tempfile.mkdtemp(dir=self.root.parent))
        reports = [Reports(directory, rank) for rank in range(ranks)]
        self.jobs.append(reports)
        order = {"fence": self.rng.choice(["call", "step"]), "dying": dying or {}}
        opened = self.nursery.crew(ranks)
        with self.lock:
            crew = opened.__enter__()
        try:
            crew.begin(live, str(self.root), directory, order)
            wait_until(lambda: all(map(is_saving, reports)), "all ranks save")
            if any(report.last(FAILED) is not None for report in reports):
                crew.end()  # raises what happened
            assert {report.last(RESTORED) for report in reports} == {self.found or 0}
            yield crew, reports, Clock.file(directory)
        finally:
            opened.__exit__(None, None, None)

    def look(self, what: str, reports: list[Reports]) -> set[int]:
        """Checks all that is in the root after a job has ended; returns which steps there are."""
        let_go(self.root)
        begun = [report.last(BEGUN) or 0 for report in reports]
        committed = [report.last(COMMITTED) for report in reports]
        steps = steps_in(self.root, self.whole)
        self.whole |= steps
        newest = max(steps, default=None)
        for step in committed:
            assert step is None or (newest is not None and newest >= step), (what, step, steps)
        assert newest == self.found or (self.found or 0) < newest <= min(begun), (
            what,
            steps,
            begun,
        )
        debris = {path.name for path in self.root.glob("*/.manifest.json.*.tmp")}
        if newest != self.found:
            assert not debris & self.debris, f"{what}: debris outlived a save"
        self.seen["debris"] += bool(debris)
        self.seen["commits"] += (newest or 0) - (self.found or 0)
        self.seen["fell back"] += newest is not None and newest < max(begun)
        self.found, self.debris = newest, debris
        return steps

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells with an error in the body all that is known of the lane."""
        try:
            yield
        except BaseException as error:
            told = traceback.format_exception(error)
            for number, reports in enumerate(self.jobs):
                told += [f"job {number}, {report.told()}\n" for report in reports]
            left = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))
            told.append(f"In the root are {left}, where {self.seen} was seen")
            raise AssertionError(f"lane {self.number}:\n{''.join(told)}") from None


def is_saving(report: Reports) -> bool:
    return report.last(RESTORED) is not None or report.last(FAILED) is not None


def steps_in(root: Path, compared: set[int]) -> set[int]:
    """The steps that are committed, after comparing every element of those that were not yet."""
    with Checkpointer(root) as checkpointer:
        steps = checkpointer.steps()
        for step in set(steps) - compared:
            loaded = checkpointer.load(step)
            assert loaded["note"] == {"step": step}
            assert torch.equal(loaded["same"], numbers(step)), step
            assert torch.equal(loaded["sharded"], numbers(step).view(ROWS, COLUMNS)), step
            assert loaded["own"].value == [0, step]
        assert checkpointer.latest() == max(steps, default=None)
    visible = [path.parent.name for path in root.glob("*/manifest.json")]
    assert sorted(visible) == [f"step-{step:08d}" for step in steps]
    return set(steps)


def check_survivor(what: str, told: dict[str, Any], victim: int, steps: set[int]) -> None:
    """Every save that was not committed has failed, in time, and says whose fault it was."""
    assert told["waited_s"] < 1.2 * TIMEOUT_S, (what, told)
    assert told["errors"], (what, told)
    for step, error in told["errors"].items():
        assert type(error) is PeerFailed and list(error.ranks) == [victim], (what, error)
        assert re.search(rf"step {step} of .*: .*rank {victim} ", str(error)), (what, error)
        assert error.visible == error.in_doubt == (not str(error).endswith("nothing was committed"))
        if not error.visible:
            assert step not in steps, (what, error)
        else:
            assert victim == 0 and str(error).endswith("may or may not be visible"), (what, error)
    last = max(told["saved"], default=None)
    assert last is None or last in steps, (what, told, steps)


def wait_for_a_moment(lane: Lane, report: Reports) -> str:
    """Waits for some saves of a rank, and for a part of the time that one takes; says how long."""
    first = (lane.found or 0) + 1
    wait_until(lambda: (report.last(BEGUN) or 0) >= first, f"step {first} was begun")
    since, saves, part = time.monotonic(), lane.number % SAVES, lane.rng.random()
    last = first + saves
    wait_until(lambda: (report.last(BEGUN) or 0) >= last, f"step {last} was begun")
    waited_s = time.monotonic() - since
    time.sleep(part * max(waited_s / max(saves, 1), 0.01))
    return f"after {saves} + {part:.3f} saves"


def kill_one(lane: Lane, number: int, by_operation: bool) -> None:
    """The life of a job of two ranks, one of which is killed."""
    victim, part = (lane.number + number) % 2, lane.number // 2
    begin, end = (OPERATIONS * 2 * each // LANES for each in (part, part + 1))
    operations = lane.rng.randrange(begin, end)
    moment = f"before operation {operations}"
    with lane.job(2, {victim: operations} if by_operation else None) as (crew, reports, dead):
        if not by_operation:
            moment = wait_for_a_moment(lane, reports[victim])
            os.kill(reports[victim].last(BORN), signal.SIGKILL)
        crew.await_one(victim)
        dead.touch()
        results = crew.end()
    what = f"kill {number} in {lane.root.parent.name} of rank {victim} {moment}"
    assert isinstance(results[victim], RankDied), f"{what}: it failed by itself: {results}"
    check_survivor(what, results[1 - victim], victim, lane.look(what, reports))
    lane.seen[f"rank {victim}"] += 1


def run_lanes(
    nursery: Nursery,
    disk: Path,
    lives: int,
    rng: random.Random,
    life: Callable[[Lane, int], None],
    count: int = LANES,
) -> Counter[str]:
    """Runs so many lives in each lane, all lanes beside each other; then each root serves one more
    job.
    """
    lock, seen = threading.Lock(), Counter[str]()
    lanes = []
    for number in sorted(rng.sample(range(LANES), count)):
        root = disk / f"lane{number}-{rng.random()}" / "root"
        root.mkdir(parents=True)
        lanes.append(Lane(number, root, nursery, lock, random.Random(rng.random())))

    def run(lane: Lane) -> None:
        with lane.telling():
            for number in range(lives):
                life(lane, number)
            with Checkpointer(lane.root, keep_last=1) as checkpointer:
                checkpointer.save(10**6, {"step": 10**6}).result(WAIT_S)
            # On a busy machine close() returns before the lease is gone.
            left = ["step-01000000"]
            wait_until(lambda: os.listdir(lane.root) == left, f"only {left} is left")

    with ThreadPoolExecutor(count) as threads:
        ended = [threads.submit(run, lane) for lane in lanes]
    failures = [str(done.exception()) for done in ended if done.exception()]
    assert not failures, "\n\n".join(failures)
    for lane in lanes:
        seen += lane.seen
    print(dict(seen))
    return seen


@pytest.mark.torture
def test_a_kill_of_any_rank_at_any_moment(nursery: Nursery, disk: Path, storm: Storm) -> None:
    seen = Counter[str]()
    # Goes on until a kill has left debris, which is up to the clock.
    more = takewhile(lambda _: not seen["debris"], map(random.Random, itertools.count()))
    for rng in itertools.chain(storm.rounds(suite=1, torture=6), more):
        seen += run_lanes(nursery, disk, 2, rng, lambda lane, number: kill_one(lane, number, False))
    assert seen["commits"]  # there was one before the fourth save began


def test_a_kill_of_any_rank_at_any_operation(nursery: Nursery, disk: Path, storm: Storm) -> None:
    """As above, with the moment chosen by what the save was about to do instead of by the clock."""
    for number, rng in enumerate(storm.rounds(suite=1, torture=4)):
        count = LANES if number else LANES // 2  # fewer in `make test`
        seen = run_lanes(
            nursery, disk, 1, rng, lambda lane, number: kill_one(lane, number, True), count
        )
        assert seen["commits"] or seen["debris"]  # of whichever first rank was killed last


@pytest.mark.torture
def test_a_kill_of_a_whole_job(nursery: Nursery, disk: Path, storm: Storm) -> None:
    """And the next one, of another number of ranks, goes on from the step committed last."""

    def life(lane: Lane, number: int) -> None:
        ranks = (4, 2, 3, 1)[(number + lane.rng.randrange(2)) % 4]
        with lane.job(ranks) as (crew, reports, _dead):
            moment = wait_for_a_moment(lane, reports[0])
            what = f"kill {number} of {ranks} ranks in {lane.root.parent.name} {moment}"
            for report in lane.rng.sample(reports, ranks):
                os.kill(report.last(BORN), signal.SIGKILL)
            results = crew.end()
        assert all(isinstance(result, RankDied) for result in results), (what, results)
        lane.look(what, reports)

    for rng in storm.rounds(suite=1, torture=2):
        assert run_lanes(nursery, disk, 2, rng, life)["commits"]  # as above
