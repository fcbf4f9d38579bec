"""Promise: what memory has acknowledged is restored as long as a copy of each part is left: the
newest such step or a newer one, or an error, and never an older step as a success.

Sequences of acts are drawn by chance: jobs save on some of three nodes, wait for some promises, are
killed at any moment, lose a node, have no links or no room, and others restore beside them. The
oracle knows which node was given which part of each step that somebody was told of.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.crews import memory_bodies as bodies
from tests.crews.group_crew import Crew, Nursery
from tests.kit.storm import Storm
from tests.kit.tiers import local

RANKS_IMPORT = "tests.crews.memory_imports"
OBJECTS = -1
NODES = "abc"

__all__ = ["local"]
pytestmark = pytest.mark.multiprocess


class World:
    """Three nodes, a root, and what was acknowledged there.

    Args:
        directory, memory: on a disk and on a tmpfs; empty.
        rng: the chance.
    """

    def __init__(self, directory: Path, memory: Path, rng: random.Random) -> None:
        self._rng, self._directory, self._memory = rng, directory, memory
        self.root = directory / "run"
        self._lives = dict.fromkeys(NODES, 0)  # how often another machine took a node's place
        # Of each acknowledged step, for each part, the nodes that have it, with their lives; None:
        # the root has the step.
        self._placed: dict[int, dict[int, set[tuple[str, int]]] | None] = {}
        self._last = self._jobs = 0
        self.story: list[str] = []
        self.counts = {"acknowledged": 0, "restored": 0, "refused": 0}
        self._options = {"keep": rng.choice([1, 1, 2]), "root_every": rng.choice([1, 4, 1000])}
        for name in NODES:
            (memory / name).mkdir()

    def lose(self, name: str) -> None:
        """Another machine takes the place of a node."""
        self.story.append(f"node {name} is lost")
        self._lives[name] += 1
        shutil.rmtree(self._memory / name)
        (self._memory / name).mkdir()

    def acknowledge(self, nodes: str, what: str, step: int) -> None:
        """Somebody was told that a step is safe, as a rank of a job on these nodes."""
        self.counts["acknowledged"] += step not in self._placed
        at = [(name, self._lives[name]) for name in nodes]
        if what == "root" or self._placed.get(step, {}) is None:
            self._placed[step] = None
            return
        placed = self._placed.setdefault(step, {rank: {at[rank]} for rank in range(len(at))})
        assert placed is not None
        placed.setdefault(OBJECTS, {at[0]})
        if what == "memory":
            for part, its in placed.items():
                its.add(at[(max(part, 0) + 1) % len(at)])

    def newest(self, nodes: str) -> int:
        """The newest acknowledged step of which a job on these nodes can have each part."""
        here = {(name, self._lives[name]) for name in nodes}
        whole = (
            step
            for step, placed in self._placed.items()
            if placed is None or all(its & here for its in placed.values())
        )
        return max(whole, default=0)

    # ---- jobs

    def job(self, nursery: Nursery, is_last: bool) -> None:
        """One job on some nodes, which is killed or ends, and perhaps others beside it."""
        rng = self._rng
        nodes = "".join(rng.sample(NODES, rng.choice([3, 3, 3, 2, 2, 1])))
        trouble = rng.choice(["", "", "", "", "refused", "refused", "refused", "full", "budget"])
        trouble = "hung" if rng.random() < 0.06 else trouble
        if is_last:
            nodes, trouble = "".join(rng.sample(NODES, 3)), ""
        saves = []
        for _ in range(0 if is_last else rng.randrange(5)):
            self._last += rng.choice([1, 1, 1, 3])
            saves.append((self._last, rng.choice(["local", "local", "memory", "memory", "result"])))
        bad, ends = rng.randrange(len(nodes)), is_last or rng.random() < 0.25
        self.story.append(f"a job on {nodes} with {trouble or 'no'} trouble ({bad}): {saves}")
        with nursery.crew(len(nodes)) as crew:
            crew.begin(bodies.live, *self._arguments(nodes, (trouble, bad), saves, ends))
            least = self.newest(nodes)
            told = self._watched(crew, nodes, least, must=not trouble, nursery=nursery)
            if not ends:
                self.story.append(f"it is killed after {told}")
                for pid in crew._pids:
                    with suppress(ProcessLookupError):  # it has died
                        os.kill(pid, signal.SIGKILL)
            crew.end()
        self._reported(nodes, least, must=not trouble)

    def _arguments(
        self, nodes: str, trouble: tuple[str, int], saves: list[tuple[int, str]], ends: bool
    ) -> list[Any]:
        self._jobs += 1
        self._report = str(self._directory / f"report-{self._jobs}")
        self._lines: list[list[str]] = [[] for _ in nodes]  # that each rank has reported
        locals_ = [str(self._memory / name) for name in nodes]
        return [str(self.root), locals_, self._options, trouble, saves, self._report, ends]

    def _watched(self, crew: Crew, nodes: str, least: int, must: bool, nursery: Nursery) -> int:
        """Waits until as much was reported as chance says, or the job is over."""
        rng, until = self._rng, time.monotonic() + 90
        wanted = rng.choice([1000, rng.randrange(1, 12) * len(nodes)])
        beside = rng.randrange(1, 8) * len(nodes) if rng.random() < 0.3 else None
        while True:
            lines, over = self._reported(nodes, least, must)
            if beside is not None and lines >= beside:
                beside = None
                self._restored_beside(nursery, nodes)
            if lines >= wanted or over == len(nodes):
                return lines
            assert time.monotonic() < until, "\n".join(self.story)
            time.sleep(0.005)

    def _reported(self, nodes: str, least: int, must: bool) -> tuple[int, int]:
        """Looks at what the ranks report; returns how many lines, and how many ranks are over."""
        for rank, known in enumerate(self._lines):
            with suppress(FileNotFoundError):  # it has not begun
                text = Path(f"{self._report}-{rank}").read_text("utf-8")
                for line in text.splitlines()[len(known) :]:
                    known.append(line)
                    what, _, rest = line.partition(" ")
                    self._judge(what, rest, nodes, least, must)
        return sum(map(len, self._lines)), sum("over" in known for known in self._lines)

    def _judge(self, what: str, rest: str, nodes: str, least: int, must: bool) -> None:
        """Holds what a rank reports against what is known; `must` it restore what it can?"""
        told = "\n".join([*self.story, f"{what} {rest}, where the newest was {least}"])
        assert what != "broken", told
        if what == "refused":
            assert not (must and least), told
            self.counts["refused"] += 1
        elif what == "restored":
            assert int(rest) >= least, told
            self.counts["restored"] += 1
        elif what != "over":
            self.acknowledge(nodes, what, int(rest))

    def _restored_beside(self, nursery: Nursery, nodes: str) -> None:
        """Another job restores on the same nodes while this one lives."""
        least = self.newest(nodes)
        with nursery.crew(len(nodes)) as crew:
            locals_ = [str(self._memory / name) for name in nodes]
            results = crew(bodies.restore, str(self.root), locals_, self._options)
        steps = [outcome.value for outcome, *_ in results if outcome.error is None]
        self.story.append(f"beside it {steps} was restored")
        assert all((step or 0) >= least for step in steps), "\n".join([*self.story, str(least)])
        self.counts["restored" if steps else "refused"] += 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(each, marks=pytest.mark.torture) for each in (2, 3))]
)
def test_what_was_acknowledged_is_restored_or_refused(
    nursery: Nursery, disk: Path, local: Path, storm: Storm, part: int
) -> None:
    counts: dict[str, int] = {}
    for number, rng in enumerate(storm.rounds(suite=1, torture=80)):
        directory, memory = disk / f"{number}", local / f"{number}"
        directory.mkdir()
        memory.mkdir()
        world, jobs = World(directory, memory, rng), rng.randrange(2, 5)
        for job in range(jobs):
            world.job(nursery, is_last=job == jobs - 1)
            if rng.random() < 0.5 and job < jobs - 1:
                world.lose(rng.choice(NODES))
        counts = {key: counts.get(key, 0) + value for key, value in world.counts.items()}
        shutil.rmtree(directory)
        shutil.rmtree(memory)
    print(f"part {part}: {counts}")
