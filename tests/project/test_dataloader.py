"""Data loaders across restarts on other numbers of ranks: each sample of an epoch leads to the
committed weights exactly once. By the Feed of the example, in jobs of it, and alone with chance.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import fastckpt
from tests.kit.jobs import Job
from tests.kit.paths import ROOT
from tests.kit.storm import Storm

pytest.importorskip("torchdata", reason="the example needs torchdata")

SAMPLES, BATCH, EVERY = 101, 3, 2
# Ranks; the steps at which a job begins, at which it is killed or ends, and its last saved one.
JOBS = ((2, 0, 5, 4), (2, 4, 9, 8), (1, 8, 15, 14), (3, 14, 30, 30))
LEFT_OUT_MAX = 12  # 3 ranks with batches of 4
TAKEN = 8 * 2 * BATCH + 6 * BATCH  # of the first epoch, before the last job


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "drop_last", [False, pytest.param(True, marks=pytest.mark.torture)], ids=["all", "drop_last"]
)
def test_each_sample_is_seen_once_by_jobs_of_2_1_and_3_ranks(drop_last: bool, disk: Path) -> None:
    """Each job but the last is killed in mid-epoch, after steps that it has not saved."""
    options = ["--preset", "tiny", "--batch", BATCH, "--samples", SAMPLES, "--every", EVERY]
    options += ["--steps", JOBS[-1][2], *(["--drop-last"] if drop_last else ["--workers", 1])]
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    lost: Counter[int] = Counter()
    for ranks, begin, end, saved in JOBS:
        script: tuple[Any, ...] = ("tests/crews/killed_feed.py", disk, end)
        if end == saved:
            script = ("examples/train_dataloader.py", disk)
        job = Job(
            *script,
            *options,
            *("--sample-log", f"from-{begin}"),
            ranks=ranks,
            imports="tests.crews.training_imports",
            variables={"OMP_WAIT_POLICY": "passive"},
        )
        with job:
            assert job.wait() == (0 if end == saved else -signal.SIGKILL), job.output
        assert not begin or f"restored step {begin} on {ranks} ranks" in job.output
        for rank in range(ranks):
            records = [*map(json.loads, (disk / f"from-{begin}.{rank}").open())]
            assert [each["step"] for each in records] == [*range(begin, end)]
            for each in records:
                (seen[each["epoch"]] if each["step"] < saved else lost).update(each["samples"])
    assert lost, "no job was killed behind its last save"
    for epoch, begun in enumerate((TAKEN, 0)):
        assert {*seen[epoch].values()} == {1}
        left_out = (SAMPLES - begun) % (3 * BATCH) if drop_last else 0
        assert SAMPLES - len(seen[epoch]) == left_out


class Jobs:
    """Jobs, one after the other, each on as many ranks as chance has it."""

    def __init__(self, kind: Any, chance: random.Random) -> None:
        self.kind, self.chance, self.saved = kind, chance, list[Any]()
        self.seen: dict[int, Counter[int]] = defaultdict(Counter)
        self.samples, self.drop_last = chance.randint(12, 90), chance.random() < 0.5

    def begin(self) -> list[Any]:
        """The feeds of the next job's ranks, restored from what the last one saved."""
        ranks, batch = self.chance.randint(1, 3), self.chance.randint(1, 4)
        made = [
            self.kind(range(self.samples), batch, rank, ranks, drop_last=self.drop_last)
            for rank in range(ranks)
        ]
        for rank, feed in enumerate(made if self.saved else []):
            own = feed.merged(self.saved, rank, ranks)
            if len(self.saved) == ranks and self.saved[0]["sizes"][0] == batch:
                own = self.saved[rank]
            feed.load_state_dict(own)
        return made

    def run(self) -> int:
        """Runs a job that ends somewhere in an epoch, or at its end; returns the epoch."""
        feeds = self.begin()
        is_whole = self.chance.random() < 0.3
        for feed in feeds:
            left = feed.steps - feed.step
            self.take(feed, left if is_whole else self.chance.randint(0, left))
        if all(feed.step == feed.steps for feed in feeds) and self.chance.random() < 0.5:
            for feed in feeds:
                self.take(feed, 1)  # of the next epoch
        self.saved = [feed.state_dict() for feed in feeds]
        (epoch,) = {each["epoch"] for each in self.saved}
        return epoch

    def take(self, feed: Any, steps: int) -> None:
        for _ in range(steps):
            batch = next(feed)
            self.seen[feed.epoch].update([] if batch is None else batch.tolist())


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the example."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from train_dataloader import Feed

    return Feed


def test_what_is_left_fits_other_batches_and_workers(kind: Any, disk: Path) -> None:
    """On as many ranks, too, where merge is not called."""
    with fastckpt.Checkpointer(disk) as checkpointer:
        feed = kind(range(10), 4, 0, 1)
        seen = next(feed).tolist()
        checkpointer.save(1, {"feed": fastckpt.PerRank(feed)}).result()
        own = fastckpt.PerRank()
        assert checkpointer.restore({"feed": own}) == 1
    for other in (kind(range(10), 3, 0, 1), kind(range(10), 4, 0, 1, num_workers=1)):
        with pytest.raises(ValueError, match=r"were \[4, 0\], are \[., .\]: use merged"):
            other.load_state_dict(own.value)
        other.load_state_dict(kind.merged(own.saved, 0, 1))
        others = [sample for _ in range(other.steps) for sample in next(other).tolist()]
        assert sorted(seen + others) == [*range(10)]


def test_what_ranks_have_left_is_dealt_to_others(kind: Any, storm: Storm) -> None:
    """Also where some ranks have taken more than others when the state is saved."""
    for chance in storm.rounds(40, 4000):
        jobs = Jobs(kind, chance)
        while jobs.run() < 2:
            pass
        for epoch in (0, 1):
            assert {*jobs.seen[epoch].values()} == {1}
            left_out = jobs.samples - len(jobs.seen[epoch])
            assert left_out < (LEFT_OUT_MAX if jobs.drop_last else 1)
