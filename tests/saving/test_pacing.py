"""Saves at a pace: rate, start and turns, on real files, by one rank and by several.

Responsible for what is asked being kept, for staging and for other saves not waiting for it, and
for every such wait ending when the save does. How tokens are counted is tests/native/token_bucket's
business.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, _engine
from fastckpt.arguments.options import Pacing
from fastckpt.engine.save_stats import SaveStats
from fastckpt.engine.token_buckets import TokenBuckets, grain_bytes
from fastckpt.plan.image import BLOCK_BYTES, address_of
from fastckpt.saving import pipeline
from fastckpt.saving.pacing import Pace, chain_of, turns_before
from tests.crews import pacing_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit.options import gathered

RANKS_IMPORT = "tests.crews.pacing_bodies"

MIB = 1 << 20
GRACE_S = 20.0  # what a busy machine may add


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(nbytes // 4, dtype=torch.float32)}


# What may be asked


def test_nothing_asked_is_nothing_said() -> None:
    assert not Pacing() and Pacing().text() == ""
    assert Pacing(drain_rate=5e6) and Pacing(max_writers=2).text() == "max_writers 2"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64, 100])
@pytest.mark.parametrize("writers", [1, 2, 3, 8, 200])
def test_turns(size: int, writers: int) -> None:
    """At most so many begin at once, and each of a run waits for all before it."""
    before = [turns_before(rank, size, writers) for rank in range(size)]
    assert sum(not each for each in before) == min(size, writers)
    for rank, each in enumerate(before):
        run = [
            n for n in range(size) if chain_of(n, size, writers) == chain_of(rank, size, writers)
        ]
        assert [*each, rank] == run[: run.index(rank) + 1]
    counts = [0] * min(size, writers)
    for rank in range(size):
        counts[chain_of(rank, size, writers)] += 1
    assert max(counts) - min(counts) <= 1


def test_a_rank_that_waits_for_its_turn_gets_on_with_each_turn_of_others() -> None:
    """Else a process that exits would take it for one that hangs."""
    stats, seen = SaveStats(), list[float]()

    class Others:
        rank, world_size, timeout_s, raise_if_ended = 2, 3, 60.0, None

        def get(self, _name: str, _rank: int) -> bytes:
            seen.append(stats.paced_s)
            return b""

    others: Any = Others()
    Pace(Pacing(max_writers=1), others, TokenBuckets(), "/root", stats).begin(MIB)
    assert len(seen) == 2 and 0 == seen[0] < seen[1] < stats.paced_s


def test_a_drain_leaves_whole_blocks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bucket of the saves beside it, and could write parts of blocks itself."""
    grains: list[int] = []

    class Bucket:
        def __init__(self, _rate: float, _grain: int) -> None:
            pass

        def set(self, _rate: float, grain: int) -> None:
            grains.append(grain)

    monkeypatch.setattr(_engine, "TokenBucket", Bucket)
    buckets = TokenBuckets()
    assert buckets.bucket("run", 1e6, whole=True) is buckets.bucket("run", 1e6)
    buckets.bucket("other", 1e6)
    assert grains == [BLOCK_BYTES, BLOCK_BYTES, grain_bytes(1e6)]


@pytest.mark.parametrize("rate", [1.0, 1e6, 30e6, 123456789.0, 1e9, 1e12])
def test_grains_are_whole_pages_of_a_block(rate: float) -> None:
    assert grain_bytes(rate) % 4096 == 0 and 256 << 10 <= grain_bytes(rate) <= BLOCK_BYTES


# The engine


def test_cancelled_while_it_waits_for_tokens(tmp_path: Path) -> None:
    """All its blocks are given back at once, and the engine closes."""
    memory = bytearray(os.urandom(16 * 65536))
    engine, backend = _engine.Engine(32 * 65536, 65536, 2), _engine.threads_backend(2)
    bucket = _engine.TokenBucket(1000.0, 4096)  # for all of it a quarter of an hour
    with open(tmp_path / "a", "wb") as file:
        segments = array("Q", [0, len(memory), address_of(memory)])
        job = engine.stage(segments, array("Q"), _engine.Allowance(32), 2)
        job.write_to(file.fileno(), 0, backend, False, 0.0, bucket)
        assert job.wait_staged(GRACE_S) and not job.wait_written(0.2)
        other = engine.stage(
            segments, array("Q"), _engine.Allowance(16), 2
        )  # another job is not held up
        other.write_to(file.fileno(), 0, backend, False)
        assert other.wait_written(GRACE_S) and other.failure() is None
        assert not job.wait_written(0.0) and job.tokens_waited_s() >= 0.0
        job.cancel()
        assert job.wait_written(GRACE_S), "it waits for its tokens"
        assert job.failure()[2] == errno.ECANCELED
    del job, other
    engine.close()
    backend.close()


# One rank


def test_rate_is_kept_and_staging_is_not_delayed(disk: Path) -> None:
    nbytes, rate = 24 * MIB, 30e6
    state = state_of(nbytes)
    with Checkpointer(disk, drain_rate=rate) as checkpointer:
        handle = checkpointer.save(1, state)
        stats = handle.result()
        restored = {"w": torch.zeros_like(state["w"])}
        assert checkpointer.restore(restored) == 1
    assert torch.equal(restored["w"], state["w"])
    wanted_s = nbytes / rate
    assert stats.written_s > 0.9 * wanted_s
    assert stats.staged_s < stats.written_s, "staging waited for the pace"
    assert stats.paced_s > 0
    assert stats.pacing == "drain_rate 30 MB/s a node; 30 MB/s on this rank"


def test_files_at_once_share_the_rate_of_the_process(disk: Path) -> None:
    state, rate, count = state_of(4 * MIB), 20e6, 4
    rates = pipeline.current().rates
    fastckpt.save(state, disk / "first.pt", drain_rate=rate).result()
    owners = {*rates._buckets}
    began = time.monotonic()
    handles = [fastckpt.save(state, disk / f"{n}.pt", drain_rate=rate) for n in range(count)]
    for handle in handles:
        handle.result()
    assert time.monotonic() - began > 0.9 * count * 4 * MIB / rate
    assert {*rates._buckets} == owners, "the buckets grow with the paths"


def test_a_closed_checkpointer_leaves_no_bucket(disk: Path) -> None:
    rates = pipeline.current().rates
    owners = {*rates._buckets}
    with Checkpointer(disk, drain_rate=1e9) as checkpointer:
        checkpointer.save(1, state_of(MIB)).result()
        assert {*rates._buckets} == owners | {checkpointer.root}
    assert {*rates._buckets} == owners


def test_file_at_a_rate(disk: Path) -> None:
    state = state_of(12 * MIB)
    began = time.monotonic()
    paced = fastckpt.save(state, disk / "slow.pt", drain_rate=20e6)
    swift = fastckpt.save(state, disk / "swift.pt")
    swift.result()
    stats = paced.result()
    assert time.monotonic() - began > 0.9 * 12 * MIB / 20e6
    assert stats.pacing and stats.paced_s > 0
    assert swift.stats.paced_s == 0.0, "what was not asked for a pace was held up"
    for name in ("slow.pt", "swift.pt"):
        assert torch.equal(torch.load(disk / name)["w"], state["w"])
    assert (disk / "slow.pt").read_bytes() == (disk / "swift.pt").read_bytes()


@pytest.mark.parametrize(
    "options", [{"staging_bytes": BLOCK_BYTES}, {"codec": "zstd"}, {"backend": "threads"}], ids=str
)
def test_pace_with_other_options(disk: Path, options: dict[str, Any]) -> None:
    state = state_of(20 * MIB)
    with Checkpointer(disk, drain_rate=60e6, **gathered(**options)) as checkpointer:
        stats = checkpointer.save(1, state).result()
        restored = {"w": torch.zeros_like(state["w"])}
        assert checkpointer.restore(restored) == 1
    assert torch.equal(restored["w"], state["w"]) and stats.written_s > 0.15


def test_saves_share_the_rate(disk: Path) -> None:
    """Two in flight of one Checkpointer have it together."""
    state = state_of(10 * MIB)
    with Checkpointer(disk, drain_rate=40e6) as checkpointer:
        began = time.monotonic()
        handles = [checkpointer.save(step, state) for step in (1, 2)]
        for handle in handles:
            handle.result()
        assert time.monotonic() - began > 0.9 * 20 * MIB / 40e6


def test_close_while_a_save_waits_for_tokens(disk: Path) -> None:
    """It waits: what was begun is committed, at its pace."""
    checkpointer = Checkpointer(disk, drain_rate=20e6)
    handle = checkpointer.save(1, state_of(12 * MIB))
    checkpointer.close()
    assert handle.done() and handle.failure() is None
    assert handle.stats.written_s > 0.5


# Several ranks


multiprocess = pytest.mark.multiprocess


@multiprocess
def test_ranks_of_a_node_share_its_rate(crew: Callable[[int], Crew], disk: Path) -> None:
    """In proportion to what they write: here evenly."""
    nbytes, rate = 8 * MIB, 10e6
    for stats, stalled, whole in crew(3)(
        bodies.save_paced, str(disk), nbytes, {"drain_rate": rate}
    ):
        assert whole and stalled < stats.written_s, "staging waited for the pace"
        assert stats.written_s > 0.85 * 3 * nbytes / rate
        assert "drain_rate 10 MB/s a node; 3.3" in stats.pacing


@multiprocess
@pytest.mark.parametrize("most", [1, 2])
def test_turns_are_taken(crew: Callable[[int], Crew], disk: Path, most: int) -> None:
    """With a rate beside it, so that a turn takes long; what a node's writers at a time share is
    all of that.
    """
    nbytes, rate = 8 * MIB, 40e6
    options = {"max_writers": most, "drain_rate": rate}
    results = crew(4)(bodies.save_paced, str(disk), nbytes, options)
    turn_s = nbytes / rate * most
    for rank, (stats, _stalled, whole) in enumerate(results):
        turns_before = rank % (4 // most)
        assert whole
        assert stats.written_s > 0.85 * turn_s * (turns_before + 1), (rank, stats)
        assert stats.paced_s > 0 or not turns_before, (rank, stats)
        assert f"max_writers {most}" in stats.pacing


@multiprocess
@pytest.mark.parametrize(
    ("options", "after_s"),
    [({"drain_rate": 30e3}, 0), ({"drain_rate": 30e3}, 3), ({"max_writers": 1}, 0)],
    ids=str,
)
def test_a_failure_elsewhere_ends_the_wait(
    crew: Callable[[int], Crew], disk: Path, options: dict[str, Any], after_s: float
) -> None:
    """Long before what is left was written at that pace, which takes longer than the crew waits,
    whatever of it is being waited for.
    """
    order = (str(disk), 4 * MIB, 1, options, after_s)
    results = crew(2)(bodies.save_and_fail_elsewhere, *order)
    for rank, (outcome, found) in enumerate(results):
        wanted = fastckpt.StorageError if rank == 1 else fastckpt.PeerFailed
        assert type(outcome.error) is wanted, outcome
        assert found == 2
    assert [path.name for path in disk.iterdir()] == ["step-00000002"]


@multiprocess
def test_rate_that_takes_longer_than_ranks_wait(crew: Callable[[int], Crew], disk: Path) -> None:
    results = crew(2)(bodies.save_and_fail_elsewhere, str(disk), 4 * MIB, 5, {"drain_rate": 1000.0})
    errors = [outcome.error for outcome, _found in results]
    assert any("at most timeout_s (600 s)" in str(error) for error in errors), errors


@multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_writers": 1, "drain_rate": 4e6},
        pytest.param({"drain_rate": 4e6}, marks=pytest.mark.torture),
    ],
    ids=str,
)
def test_a_killed_rank_holds_nobody_up(
    nursery: Nursery, crew: Callable[[int], Crew], disk: Path, options: dict[str, Any]
) -> None:
    """The one whose turn it is dies in the midst of it: the others are told."""
    timeout_s = 6.0
    with nursery.crew(3) as doomed:
        order = (str(disk), 4 * MIB, 0, options | {"timeout_s": timeout_s})
        results = doomed(bodies.save_and_die, *order)
        assert isinstance(results[0], RankDied)
        for outcome in results[1:]:
            assert type(outcome.error) is fastckpt.PeerFailed, outcome
            assert "rank 0" in str(outcome.error), outcome
    for _stats, _stalled, whole in crew(3)(bodies.save_paced, str(disk), MIB, {}):
        assert whole
    assert [json.loads(p.read_text())["step"] for p in disk.glob("step-*/manifest.json")] == [1]


@multiprocess
def test_one_file_by_several_ranks_at_a_rate(crew: Callable[[int], Crew], disk: Path) -> None:
    nbytes, rate = 32 * MIB, 80e6
    for stats in crew(2)(bodies.save_file_paced, str(disk / "a.pt"), nbytes, rate):
        assert stats.written_s > 0.85 * nbytes / rate
        assert re.search(r"; (39\.9|40)\S* MB/s on this rank", stats.pacing)
