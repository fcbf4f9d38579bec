"""Shards of several ranks in one file, from the save to restores by any number of ranks.

Responsible for values that are exactly those that were saved, for one file where there were four,
and for what is told and left when a rank dies in the exchange, memory lies, or the disk is full.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastckpt
from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.nodes import Neighbour, groups
from fastckpt.steps.shared_shard_layout import GRAIN_BYTES, BlockCrcs
from tests.crews import gathering_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied

MIB = 1 << 20
multiprocess = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery("tests.crews.gathering_bodies")
    yield started
    started.close()


@pytest.fixture(scope="module")
def crew(nursery: Nursery) -> Callable[[int], Crew]:
    """`crew(n)`: a job of n ranks, the same one for all tests."""
    return nursery.lasting_crew


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_groups(count: int) -> None:
    """Every rank is in one; none mixes processes that do not see each other."""
    neighbours = [Neighbour(rank, 1, "a" if rank % 3 else "b") for rank in range(3, 13)]
    found = groups(neighbours, count)
    assert sorted(chain.from_iterable(found)) == [*range(3, 13)]
    for ranks in found:
        assert ranks == sorted(ranks) and len({rank % 3 == 0 for rank in ranks}) == 1
    assert len(found) == min(count, 6) + min(count, 4)


@pytest.mark.parametrize("wrong", [0, -1])
def test_wrong_counts_are_refused(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"writers_per_node is {wrong}, must be at least 1"):
        Checkpointer(tmp_path, writers_per_node=wrong)


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="writers_per_node with codec"):
        Checkpointer(tmp_path, writers_per_node=1, codec="zstd")


@given(
    begin=st.integers(0, 3 * BLOCK_BYTES // GRAIN_BYTES),
    sizes=st.lists(st.integers(1, GRAIN_BYTES), max_size=40),
    gap=st.integers(0, 2 * BLOCK_BYTES),
)
def test_checksums_of_blocks_are_made_of_those_of_runs(
    begin: int, sizes: list[int], gap: int
) -> None:
    """Whatever lies before, and wherever in a block it begins."""
    at = begin * GRAIN_BYTES
    content = os.urandom(1 << 10) * (-(-sum(sizes) // (1 << 10)) + 1)
    runs, end = BlockCrcs(at), 0
    for size in sizes:  # as part_of() cuts: at every multiple of the grain
        while size:
            cut = min(size, GRAIN_BYTES - end % GRAIN_BYTES)
            runs.append(cut, zlib.crc32(content[end : end + cut]))
            end, size = end + cut, size - cut
    own = bytes(at) + content[:end]
    wanted = [own[b : b + BLOCK_BYTES] for b in range(0, len(own), BLOCK_BYTES)]
    whole = BlockCrcs(0)
    whole.append_bytes(bytes(at))
    for nbytes, crc in runs.blocks:
        whole.append(nbytes, crc)
    assert whole.blocks == [(len(block), zlib.crc32(block)) for block in wanted]
    whole.append_bytes(bytes(gap))
    assert sum(nbytes for nbytes, _crc in whole.blocks) == len(own) + gap


def test_one_rank_writes_its_own(disk: Path) -> None:
    with Checkpointer(disk, writers_per_node=1) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(300_000.0)}).result()
        assert torch.equal(checkpointer.load()["w"], torch.arange(300_000.0))


@multiprocess
@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"writers_per_node": 1}, 1),
        ({"writers_per_node": 2}, 2),
        ({"writers_per_node": 9}, 4),
        ({"writers_per_node": 1, "staging_bytes": BLOCK_BYTES}, 1),
        ({"writers_per_node": 1, "drain_rate": 30e6, "max_writers": 1, "start_jitter_s": 0.1}, 1),
        ({"writers_per_node": 1, "fence": "step"}, 1),
    ],
    ids=str,
)
def test_four_ranks_in_fewer_files(
    crew: Callable[[int], Crew], disk: Path, options: dict[str, Any], files: int
) -> None:
    """Of every placement, and values of each rank; read on as many ranks and on others."""
    assert crew(4)(bodies.save_arranged, str(disk), options) == [[]] * 4
    assert len(bodies.shards(str(disk), 2)) == files
    for ranks in (4, 2):
        assert crew(ranks)(bodies.restore_arranged, str(disk)) == [[]] * ranks
    assert main(["verify", str(disk)]) == 0


@multiprocess
def test_the_file_is_a_safetensors_file(crew: Callable[[int], Crew], disk: Path) -> None:
    """And its index says that it takes a reader who knows whose values are whose."""
    crew(4)(bodies.save_own_values, str(disk / "plain"))
    crew(4)(bodies.save_arranged, str(disk), {"writers_per_node": 1})
    directory = disk / "step-00000002"
    tensors = safetensors.torch.load((directory / "rank-00000.safetensors").read_bytes())
    assert {f"fastckpt.per_rank~rank{n}" for n in (1, 2, 3)} | {"fastckpt.per_rank"} <= {*tensors}
    paddings = [tensors[f"fastckpt.padding~rank{n}"] for n in (1, 2, 3)]
    assert all(padding.numel() < GRAIN_BYTES and not padding.any() for padding in paddings)
    content = (directory / "rank-00000.json").read_bytes()
    assert json.loads(content)["version"] == 2
    index = ShardIndex.from_bytes(content)
    assert all(index.values_of(rank) for rank in range(4)) and index.values_of(4) is None
    assert index.to_bytes() == content
    plain = (disk / "plain" / "step-00000001" / "rank-00000.json").read_bytes()
    assert json.loads(plain)["version"] == 1


@multiprocess
def test_memory_is_used_again_and_freed(crew: Callable[[int], Crew], disk: Path) -> None:
    results = crew(4)(bodies.stats_and_memory, str(disk), MIB, {"writers_per_node": 1})
    for rank, (stats, held, left) in enumerate(results):
        assert 1 <= held <= 4, "more files in memory than saves that overlap"
        assert left == 0
        assert stats.pacing == "writers_per_node 1"
        header = GRAIN_BYTES if rank == 0 else 0
        assert 0 <= stats.nbytes - MIB - header < 10_000, "each rank writes its own, and no more"


@multiprocess
def test_memory_of_one_that_nobody_closed_is_freed(crew: Callable[[int], Crew], disk: Path) -> None:
    assert crew(2)(bodies.memory_of_a_forgotten_one, str(disk)) == [(1, 0)] * 2


@multiprocess
@pytest.mark.parametrize("damaging", [0, 2])
def test_what_is_said_of_shards_and_changes_is_found_out(
    crew: Callable[[int], Crew], disk: Path, damaging: int
) -> None:
    for rank, (outcome, found) in enumerate(crew(4)(bodies.save_damaged, str(disk), damaging)):
        wanted = fastckpt.CheckpointError if rank == 0 else fastckpt.PeerFailed
        assert type(outcome.error) is wanted, outcome
        assert "its CRC-32 differs" in str(outcome.error)
        assert found == 3
    assert sorted(os.listdir(disk)) == ["step-00000001", "step-00000003"]


@multiprocess
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_rank_that_comes_when_the_save_has_failed(
    crew: Callable[[int], Crew], disk: Path, is_taken: bool
) -> None:
    """It is told why, and writes nothing to what has the descriptor's number by then."""
    root = disk / "root"
    results = crew(3)(bodies.save_late, str(root), is_taken)
    for rank, (outcome, content, found) in enumerate(results):
        wanted = fastckpt.StorageError if rank == 0 else fastckpt.PeerFailed
        assert type(outcome.error) is wanted, outcome
        assert "rank 0 failed: StorageError" in str(outcome.error) or rank == 0, outcome
        assert "Input/output error" in str(outcome.error)
        assert content == b""
        assert found == 3


@multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "moment"),
    [
        pytest.param(2, "before it lends", marks=pytest.mark.torture),
        (0, "before it makes the file"),
        (2, "before it writes"),
        pytest.param(2, "when it has written", marks=pytest.mark.torture),
        pytest.param(0, "when it has written", marks=pytest.mark.torture),
    ],
)
def test_a_killed_rank(
    nursery: Nursery, crew: Callable[[int], Crew], disk: Path, dying: int, moment: str
) -> None:
    """Nobody commits, all are told whom they miss, nothing is left, and the next job goes on."""
    with nursery.crew(4) as doomed:
        results = doomed(bodies.save_and_die, str(disk), dying, moment)
        for rank, outcome in enumerate(results):
            if rank == dying:
                assert isinstance(outcome, RankDied)
            else:
                assert type(outcome.error) is fastckpt.PeerFailed, outcome
                assert f"rank {dying}" in str(outcome.error), outcome
    assert [path.parent.name for path in disk.glob("*/manifest.json")] == ["step-00000001"]
    crew(4)(bodies.save_steps, str(disk), [3], {"writers_per_node": 1})
    for outcome in crew(4)(bodies.restore, str(disk)):
        assert outcome.error is None and outcome.value == 3


@multiprocess
def test_a_full_disk(nursery: Nursery, disk: Path) -> None:
    """Of the rank that writes for all: they all fail for that reason, and the next save works."""
    with nursery.crew(4) as own:
        try:
            results = own(bodies.save_onto_a_full_disk, str(disk), 2 * MIB)
        except AssertionError as error:
            if "PermissionError" in str(error):
                pytest.skip("mounting is not allowed here")
            raise
    for rank, (outcome, found) in enumerate(results):
        wanted = fastckpt.StorageError if rank == 0 else fastckpt.PeerFailed
        assert type(outcome.error) is wanted, outcome
        assert "No space left" in str(outcome.error)
        assert found == 3
