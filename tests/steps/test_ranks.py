"""Checkpointer by several ranks: real processes over gloo, from the first save to the last restore.

Responsible for what must come of it: values that are exactly those that were saved, on any number
of ranks and in any placement; bytes divided evenly; and if anything is wrong on one rank, a clear
error on all of them in time, no step that is half there, and a next save that works. What the ranks
do stands in crews/steps_*.py; ranks that are killed are test_ranks_kill.py's business.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zstandard

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import PeerFailed, RootInUse, StorageError
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.saving.lease_records import LeaseRecord
from fastckpt.storage.machine import pid_space, started
from tests.crews import steps_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, Outcome
from tests.crews.steps_states import numbers, spreads
from tests.kit.noise import flip
from tests.kit.storm import Storm
from tests.kit.torches import needs_fsdp2

RANKS_IMPORT = "tests.crews.steps_imports"
SEED = 20261121
MIB = 1 << 20
TIMEOUT_S = 6.0  # of saves that miss a rank
pytestmark = pytest.mark.multiprocess


def restored(crew: Crew, root: Path, step: int | None = None) -> Any:
    """What every rank finds, having looked whether it is whole; the same on all."""
    found = [value_of(outcome) for outcome in crew(bodies.restore, str(root), step)]
    assert len(set(found)) == 1, f"ranks are at {found}"
    return found[0]


def value_of(outcome: Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def shards(root: Path, step: int) -> list[Path]:
    return sorted(root.glob(f"step-{step:08d}/rank-*.safetensors*"))


def test_the_first_rank_says_which_steps_stay(crew: Callable[[int], Crew], disk: Path) -> None:
    assert crew(2)(bodies.mark_steps, str(disk / "run")) == [[3, 2, 3]] * 2
    shutil.copytree(disk / "run" / "step-00000003", disk / "best")
    assert [restored(crew(n), disk / "best") for n in (2, 1)] == [3, 3]


# Placements


@pytest.mark.parametrize(
    "saving", [4, *(pytest.param(each, marks=pytest.mark.torture) for each in (3, 2, 1))]
)
def test_any_placement_restores_into_any_other(
    crew: Callable[[int], Crew], disk: Path, saving: int, storm: Storm
) -> None:
    """Every tensor is saved in every way of spreading it, and goes into every other in turn."""
    variations = len(spreads(saving))
    crew(saving)(bodies.save_arranged, str(disk), list(range(variations)))
    rng = random.Random(SEED)
    for restoring in storm.some((1, 2, 3, 4), 3):
        pairs = [
            (step, into)
            for step in range(variations)
            for into in rng.sample(range(len(spreads(restoring))), k=1)
        ]
        assert crew(restoring)(bodies.restore_arranged, str(disk), pairs) == [[]] * restoring


LAYOUTS = [  # saved by so many ranks in a layout, restored by so many in another
    (4, "fsdp", [(4, "fsdp"), (1, "plain"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp"), (2, "ddp")]),
    (4, "hsdp", [(4, "hsdp"), (3, "fsdp"), (1, "plain")]),
    (2, "ddp", [(2, "ddp"), (4, "fsdp"), (4, "hsdp"), (1, "plain")]),
    (3, "fsdp", [(3, "fsdp"), (4, "hsdp")]),
    (1, "plain", [(1, "plain"), (4, "fsdp")]),
    (4, "fsdp over tp", [(4, "fsdp over tp"), (4, "fsdp"), (2, "tp"), (1, "plain")]),
    (2, "tp", [(2, "tp"), (4, "fsdp over tp"), (3, "fsdp"), (2, "ddp")]),
]
# Of those, what `make test` takes: each layout is saved in or restored into, and one is both.
SOME_LAYOUTS = [
    (4, "fsdp", [(4, "fsdp"), (3, "fsdp"), (1, "plain")]),
    (4, "fsdp over tp", [(4, "fsdp over tp"), (2, "tp")]),
    (2, "ddp", [(4, "hsdp")]),
]


@needs_fsdp2
@pytest.mark.parametrize(
    ("ranks", "layout", "others"),
    [*SOME_LAYOUTS, *(pytest.param(*each, marks=pytest.mark.torture) for each in LAYOUTS)],
    ids=lambda value: str(value)[:12],
)
def test_training_goes_on(
    crew: Callable[[int], Crew],
    disk: Path,
    ranks: int,
    layout: str,
    others: list[tuple[int, str]],
) -> None:
    """Bit by bit where the layout is the same; from exactly the same weights where it is not."""
    scaled = "tp" not in layout
    losses = crew(ranks)(bodies.train_and_save, str(disk), layout, scaled)
    for number, other in others:
        results = crew(number)(bodies.restore_and_train, str(disk), other, scaled)
        for rank, (step, faults, again) in enumerate(results):
            assert step == 2 and faults == [], (other, rank)
            if (number, other) == (ranks, layout):
                assert again == losses[rank], (other, rank)
            else:
                assert all(float.fromhex(loss) < 10 for loss in again), (other, rank)


@needs_fsdp2
@pytest.mark.parametrize("fence", ["call", "step"])
def test_saves_while_fsdp2_trains(crew: Callable[[int], Crew], disk: Path, fence: str) -> None:
    assert crew(2)(bodies.train_behind_the_step_fence, str(disk), fence) == [[]] * 2


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2]])
def test_partial_is_refused(crew: Callable[[int], Crew], disk: Path, ranks: list[int]) -> None:
    for rank, (outcome, found) in enumerate(crew(4)(bodies.save_partial, str(disk), ranks)):
        if rank in ranks:
            assert type(outcome.error) is TypeError
            assert re.search(r"'gradient' .*Partial.*reduce", str(outcome.error))
        else:
            assert_peer_failed(outcome, [2], r"TypeError: 'gradient' .*Partial")
        assert found == 2
    assert [path.name for path in disk.iterdir()] == ["step-00000002"]


# What is written and read


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize(
    "sizes",
    [[10_000_019], [300_007] * 30 + [3_000_017], [5_000_000, 262_144, 70_001, 4_194_304]],
    ids=["one", "many", "mixed"],
)
def test_replicated_bytes_are_divided_evenly(
    crew: Callable[[int], Crew], disk: Path, ranks: int, sizes: list[int]
) -> None:
    crew(ranks)(bodies.save_replicated, str(disk), sizes)
    nbytes = [path.stat().st_size for path in shards(disk, 1)]
    mean = 4 * sum(sizes) / ranks
    assert len(nbytes) == ranks and max(nbytes) <= 1.01 * mean < 1.01 * sum(nbytes) / ranks * 1.01
    with fastckpt.Checkpointer(disk) as checkpointer:
        loaded = checkpointer.load()
    assert all(torch.equal(loaded[str(n)], numbers(n, size)) for n, size in enumerate(sizes))


@pytest.mark.parametrize("restoring", [1, 4])
def test_a_rank_reads_what_it_needs(
    crew: Callable[[int], Crew], disk: Path, restoring: int
) -> None:
    crew(4)(bodies.save_rows, str(disk), 16)
    for calls in crew(restoring)(bodies.restore_rows, str(disk), 16):
        ((needed, nbytes_read),) = calls
        assert needed == 16 * 512 * 1035 * 4 / restoring
        assert nbytes_read <= 1.1 * needed


def test_values_of_one_rank_come_back_to_that_rank(crew: Callable[[int], Crew], disk: Path) -> None:
    def wanted(rank: int, holding: int) -> list[tuple[bool, Any, Any]]:
        own = values(rank if rank < holding else 1000 + rank)
        if rank < holding:
            return [(True, value, value) for value in own]
        own[2] = own[2][:1]
        return [(False, value, None) for value in own]

    def values(number: int) -> list[Any]:
        rng = torch.Generator().manual_seed(number).get_state()
        return [{"rank": number}, rng.tolist()[:20], [float(number)] * 20]

    saving = 2
    crew(saving)(bodies.save_own_values, str(disk))
    for restoring in (1, 2, 4):
        for rank, found in enumerate(crew(restoring)(bodies.restore_own_values, str(disk))):
            assert found == wanted(rank, saving), (restoring, rank)


@pytest.mark.parametrize("restoring", [1, 2, 3])
def test_values_of_ranks_on_other_numbers_of_ranks(
    crew: Callable[[int], Crew], disk: Path, restoring: int
) -> None:
    crew(2)(bodies.save_counts, str(disk / "run"))
    saved = [{"samples": 100}, {"samples": 101}]
    for rank, found in enumerate(crew(restoring)(bodies.restore_counts, str(disk / "run"))):
        own, was_found, merged, is_merged, of_all, told = found
        assert of_all == saved and is_merged
        assert (own, was_found) == ((saved[rank], True) if rank < 2 else (None, False))
        if restoring == 2:
            assert merged == saved[rank] and told == []
            continue
        assert merged == {"samples": 201 // restoring + rank}
        assert len(told) == (1 if rank == 0 else 0)
        assert all("of 'own', 'epoch', each rank gets" in line for line in told)


def test_values_that_differ_are_told_once(crew: Callable[[int], Crew], disk: Path) -> None:
    first, *others = crew(3)(bodies.save_values_of_each_rank, str(disk / "run"))
    assert others == [[], []]
    told = "\n".join(line for line in first if "PerRank" in line)
    found = re.findall(
        r"rank 0's values of (.*), but rank [12] has other values or keys there", told
    )
    assert found == ["'seen', 'python/1', 'numpy', 'set', 'object/1', 'rng'", "'late'"]


def test_containers_that_differ_are_told(crew: Callable[[int], Crew], disk: Path) -> None:
    first, other = crew(2)(bodies.save_containers_of_each_rank, str(disk / "run"))
    found = re.findall(r"rank 0's values of (.*), but rank 1 has other", "\n".join(first))
    names = [
        "other",
        "fewer/0",
        "more/in",
        "none",
        "empty",
        "list",
        "dicts",
        "number",
        "text",
        "long",
    ]
    assert other == [] and found == [", ".join(map(repr, names)), "the whole state"]


# Saves that meet no fault


def test_all_ranks_hear_that_another_job_has_the_root(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    pid, space = os.getpid(), pid_space()
    lease = LeaseRecord("ab" * 16, "h", space, pid, started(pid) or 0, "", 0, "then", "then", 60)
    (disk / "run").mkdir()
    (disk / "run" / "lease.json").write_bytes(lease.to_bytes())
    for outcomes in crew(2)(bodies.save_as_second_job, str(disk / "run"), str(disk / "other")):
        assert [type(each.error) for each in outcomes] == [RootInUse, RootInUse]
        for each, what in zip(outcomes, ("is in use", "was taken over"), strict=True):
            assert f"{what} by another job: process {pid} on host 'h'" in str(each.error)
    assert [path.name for path in (disk / "run").iterdir()] == ["lease.json"]
    assert [path.name for path in (disk / "other").glob("step-*")] == ["step-00000001"]


def test_zstd_on_several_ranks(crew: Callable[[int], Crew], disk: Path) -> None:
    crew(4)(bodies.save_steps, str(disk), [1, 2], {"codec": "zstd"})
    for ranks in (1, 4):
        assert restored(crew(ranks), disk) == 2
    compressed = shards(disk, 2)
    assert [path.suffix for path in compressed] == [".zst"] * 4
    nbytes = 0
    for path in compressed:
        content = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        tensors = safetensors.torch.load(content.decompress(path.read_bytes())).values()
        nbytes += sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.float32)
    assert nbytes == 2 * numbers(0).nbytes
    flip(compressed[1], 0.5)
    assert restored(crew(4), disk) == 1


@pytest.mark.parametrize(
    "options", [{}, {"staging_bytes": BLOCK_BYTES}, {"codec": "zstd"}], ids=str
)
def test_saves_overlap(crew: Callable[[int], Crew], disk: Path, options: dict[str, Any]) -> None:
    """And are committed in the order in which they were begun."""
    steps = 5
    crew(4)(bodies.save_overlapping, str(disk), steps, options)
    manifests = [json.loads(path.read_text()) for path in disk.glob("step-*/manifest.json")]
    committed = sorted(manifests, key=lambda manifest: manifest["sequence"])
    assert [manifest["step"] for manifest in committed] == list(range(steps))


@pytest.mark.parametrize("small", [0, 2])
def test_one_rank_has_little_staging_memory(
    crew: Callable[[int], Crew], disk: Path, small: int
) -> None:
    results = crew(4)(bodies.save_with_budgets, str(disk), {small: BLOCK_BYTES})
    assert [found for _nbytes, found in results] == [1] * 4
    used = [nbytes for nbytes, _found in results]
    assert used.pop(small) <= BLOCK_BYTES < min(used)


def test_a_late_rank_harms_no_later_save(crew: Callable[[int], Crew], disk: Path) -> None:
    """What it still does for a save that was given up does not reach what was committed since."""
    for second, late, step, found in crew(2)(bodies.save_again_before_a_late_rank_wakes, str(disk)):
        assert second is None and isinstance(late, fastckpt.PeerFailed)
        assert (step, found) == (5, 2)


def test_the_first_rank_tells_the_size_of_the_whole(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """The others know their own share, and say that it is one."""
    told = crew(2)(bodies.save_and_tell, str(disk))
    step = sum(
        path.stat().st_size for path in [*shards(disk / "run", 1), *disk.rglob("objects.pt")]
    )
    for (first, other), nbytes in zip(
        zip(*told, strict=True), [step, (disk / "a.pt").stat().st_size], strict=True
    ):
        assert first.total_nbytes == nbytes == first.nbytes + other.nbytes
        assert str(first).startswith(f"{shown_size(nbytes)} by 2 ranks in ")
        assert other.total_nbytes is None
        assert str(other).startswith(f"{shown_size(other.nbytes)} by this rank of 2 in ")


def test_one_made_before_the_ranks_know_each_other_is_refused(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """It would save alone, on every rank. A group of one rank is for those who mean that."""
    told = "created before .*init_process_group.* there are 2 ranks now.* pass group="
    for rank, (outcomes, steps) in enumerate(
        crew(2)(bodies.save_by_one_made_too_early, str(disk / "run"))
    ):
        assert len(outcomes) == 3 and steps == [rank]
        for outcome in outcomes:
            assert type(outcome.error) is ValueError and re.search(told, str(outcome.error))


def test_training_threads_do_not_talk(crew: Callable[[int], Crew], disk: Path) -> None:
    """No operation of a store on the thread that calls save(), and no collective on any."""
    for counted in crew(4)(bodies.count_operations, str(disk), 5):
        assert counted["training"] == [] and counted["collectives"] == 0
        assert counted["others"] > 5, "nothing was counted"


# Saves that do


def assert_peer_failed(outcome: Outcome, ranks: list[int], pattern: str) -> None:
    assert type(outcome.error) is fastckpt.PeerFailed, outcome
    assert list(outcome.error.ranks) == ranks, outcome
    assert re.search(pattern, str(outcome.error)), outcome
    assert str(outcome.error).endswith("nothing was committed"), outcome


def after_failures(results: list[Any], root: Path, count: int) -> Iterator[list[Outcome]]:
    """What came of each wrong save on every rank; each left nothing, and the next one worked."""
    for number in range(count):
        for ended in results:
            first, second, found = ended[number]
            assert second.error is None and found == 10 * number + 14, (first, second, found)
        yield [ended[number][0] for ended in results]
    steps = [f"step-{10 * number + 14:08d}" for number in range(count)]
    assert sorted(path.name for path in root.iterdir()) == steps


@pytest.mark.parametrize(
    ("ranks", "wrongs"),
    [
        pytest.param(2, [{1: "nothing"}, {1: "no step"}], marks=pytest.mark.torture),
        (4, [{0: "nothing"}, {2: "another step"}, {1: "no step"}]),
    ],
)
def test_a_rank_that_saves_nothing_or_another_step(
    crew: Callable[[int], Crew], disk: Path, ranks: int, wrongs: list[dict[int, str]]
) -> None:
    results = crew(ranks)(bodies.save_wrongly, str(disk), wrongs, TIMEOUT_S)
    for number, outcomes in enumerate(after_failures(results, disk, len(wrongs))):
        (absent,), (wrong,), step = wrongs[number], wrongs[number].values(), 10 * number + 10
        for rank, outcome in enumerate(outcomes):
            if wrong == "no step":
                if rank == absent:
                    assert type(outcome.error) is ValueError, outcome
                else:
                    pattern = (
                        rf"rank {absent} is at .step -1 of .* and took no part in .step {step} "
                    )
                    assert_peer_failed(outcome, [absent], pattern)
            elif wrong == "another step":
                pattern = rf"step {step + (rank == absent)} of .*: rank \d.* .step {step} of"
                assert type(outcome.error) is fastckpt.PeerFailed, outcome
                assert re.search(pattern, str(outcome.error)), outcome
            elif rank != absent:
                pattern = rf"step {step} of .*: rank {absent} did not join .*within {TIMEOUT_S:g} s"
                assert_peer_failed(outcome, [absent], pattern)


def test_ranks_hear_why_one_has_no_checkpointer(crew: Callable[[int], Crew], disk: Path) -> None:
    (own, then), (other, its) = crew(2)(bodies.make_wrongly, str(disk / "run"))
    assert type(own.error) is ValueError and "keep_last is 0" in str(own.error)
    pattern = r"step 1 of .*: rank 0 could not begin \(ValueError: keep_last is 0.* takes no part"
    assert_peer_failed(other, [0], pattern)
    assert then.error is its.error is None


def test_ranks_with_different_arguments_hear_which_ones(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """Within seconds, and not as of a rank that is dead: `timeout_s` is longer than the test."""
    memory, none = "Memory(keep=3)", "None"
    wrongs: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("root", str(disk / "a"), str(disk / "b"), {}),
        ("keep_last", 2, None, {}),
        ("codec", "zstd", None, {}),
        ("keep_parts", {"w": 2}, None, {"keep_last": 1}),
        ("keep_parts", {"w": 2}, {"w": 3}, {"keep_last": 1}),
        ("local", "memory", None, {}),
        ("local", "memory", None, {"restores": True}),
        ("root", str(disk / "a"), str(disk / "b"), {"restores": True}),  # neither has any step
    ]
    terms = [{-1: {name: its} | how, 1: {name: other} | how} for name, its, other, how in wrongs]
    results = crew(3)(bodies.save_on_other_terms, str(disk), terms)
    for number, (name, its, other, _how) in enumerate(wrongs):
        shown = [memory, none] if name == "local" else [repr(its), repr(other)]
        for rank, ended in enumerate(results):
            error = ended[number].error
            assert type(error) is fastckpt.PeerFailed, ended[number]
            assert all(f"{name}={each}" in str(error) for each in shown), error
            assert "within" not in str(error)
            assert list(error.ranks) in ([[0], [2]] if rank == 1 else [[1]])
    assert not [*disk.rglob("manifest.json")]


DISAGREEMENTS = {
    "another key": r"same is missing on rank {}; other is on rank {} but not on rank 0",
    "another shape": r"same is float32 \[529933\].* on rank {} but float32 \[529934\].* on rank 0",
    "another type": r"same is float64 .* on rank {} but float32 .* on rank 0",
    "another placement": r"sharded is .*\[512, 1024\].*Replicate.* on rank {} but .*Shard.*rank 0",
    "another content": r"content of same differs: one on ranks? 0.*, another on rank {}",
}


@pytest.mark.parametrize(("ranks", "wrong"), [(2, 1), (3, 2)])
def test_ranks_that_save_different_states(
    crew: Callable[[int], Crew], disk: Path, ranks: int, wrong: int
) -> None:
    """All raise the same. Content that differs is the first rank's from the next save on."""
    wrongs = [{wrong: what} for what in DISAGREEMENTS]
    results = crew(ranks)(bodies.save_wrongly, str(disk), wrongs, TIMEOUT_S)
    patterns = [pattern.replace("{}", str(wrong)) for pattern in DISAGREEMENTS.values()]
    ended = after_failures(results, disk, len(wrongs))
    for pattern, outcomes in zip(patterns, ended, strict=True):
        for outcome in outcomes:
            assert type(outcome.error) is fastckpt.RanksDisagree, outcome
            assert re.search(pattern, str(outcome.error)), outcome
            assert "nothing was committed" in str(outcome.error)
            assert str(outcome.error) == str(outcomes[0].error)


def test_a_rank_that_is_told_of_an_earlier_error(crew: Callable[[int], Crew], disk: Path) -> None:
    """Its save() raises what nobody asked for; the others hear of it and wait for nothing."""
    wrongs = [{0: "an error of before"}, {3: "an error of before"}]
    results = crew(4)(bodies.save_wrongly, str(disk), wrongs, 10 * TIMEOUT_S)
    for rank, outcomes in zip((0, 3), after_failures(results, disk, 2), strict=True):
        own = outcomes.pop(rank)
        assert type(own.error) is fastckpt.StorageError and "ENAMETOOLONG" in str(own.error)
        for outcome in outcomes:
            assert_peer_failed(outcome, [rank], rf"rank {rank} failed: StorageError: ")


def check_disk_failure(results: list[Any], failing: int, code: str) -> None:
    """All ranks know what failed where, and nothing of step 2 is left."""
    for rank, (outcome, names, second, found) in enumerate(results):
        if rank == failing:
            assert isinstance(outcome.error, fastckpt.StorageError)
            assert code in str(outcome.error) and "step-00000002" in outcome.error.path
        else:
            assert_peer_failed(outcome, [failing], rf"rank {failing} failed: StorageError.*{code}")
        assert names == ["step-00000001"]  # those with a manifest
        assert second.error is None and found == 3


@pytest.mark.filesystem
@pytest.mark.parametrize(("ranks", "small"), [(4, 1)])
def test_the_disk_of_one_rank_is_full(nursery: Nursery, disk: Path, ranks: int, small: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    with nursery.crew(ranks) as crew:
        results = crew(bodies.save_onto_a_small_disk, str(disk), small, MIB // 2)
    check_disk_failure(results, small, "ENOSPC")


# Damage that one rank meets


def remove_middle(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "byte of a shard": lambda step: flip(step / "rank-00003.safetensors", 0.6),
    "values of a rank": lambda step: flip(step / "rank-00003.safetensors", 1 - 1e-4),
    "half a shard": lambda step: remove_middle(step / "rank-00003.safetensors"),
    "shard": lambda step: (step / "rank-00003.safetensors").unlink(),
    "index": lambda step: flip(step / "rank-00003.json", 0.5),
    "no index": lambda step: (step / "rank-00003.json").unlink(),
    "objects": lambda step: flip(step / "objects.pt", 0.4),
    "manifest": lambda step: flip(step / "manifest.json", 0.5),
    "shard of an earlier step": lambda step: os.replace(
        step.with_name("step-00000002") / "rank-00003.safetensors", step / "rank-00003.safetensors"
    ),
}


def test_a_rank_that_finds_the_directory_gone_tells_why(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """Another rank has failed, and the first one has removed what there was."""
    first, other = crew(2)(bodies.save_in_a_directory_that_goes, str(disk / "run"))
    assert isinstance(first.error, StorageError) and first.error.errno == errno.EIO
    assert isinstance(other.error, PeerFailed), other.error
    assert "rank 0 failed: StorageError" in str(other.error)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(each, marks=[pytest.mark.torture] if each in ("half a shard", "index") else [])
        for each in DAMAGES
    ],
)
def test_ranks_fall_back_together(crew: Callable[[int], Crew], disk: Path, damage: str) -> None:
    """Even if only one of them reads what is damaged; and asked for that very step, all raise."""
    crew(4)(bodies.save_steps, str(disk), [1, 2, 3], {})
    assert restored(crew(4), disk) == 3
    DAMAGES[damage](disk / "step-00000003")
    wanted = 1 if damage == "shard of an earlier step" else 2
    assert restored(crew(4), disk) == wanted
    for outcome in crew(4)(bodies.restore, str(disk), 3):
        assert type(outcome.error) is fastckpt.CorruptCheckpoint, outcome
        if damage == "manifest":
            assert "holds no committed step 3: the newest steps are [1, 2]; " in str(outcome.error)
        assert "step-00000003" in str(outcome.error), outcome
    assert restored(crew(2), disk) == wanted


def test_no_rank_keeps_what_a_damaged_step_was_read_into(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """Even if only one of them has met the damage."""
    crew(2)(bodies.save_more_rows, str(disk))
    flip(disk / "step-00000002" / "rank-00001.safetensors", 0.75)
    for outcome in crew(2)(bodies.keep_rows, str(disk)):
        assert isinstance(outcome.error, fastckpt.CorruptCheckpoint | fastckpt.PeerFailed), outcome
        assert "step-00000001' does not fit: '1' is missing in the checkpoint, and" in str(
            outcome.error
        )


def test_no_step_is_whole(crew: Callable[[int], Crew], disk: Path) -> None:
    assert restored(crew(2), disk / "none") is None
    crew(2)(bodies.save_steps, str(disk), [1, 2], {})
    for step in (1, 2):
        flip(disk / f"step-{step:08d}" / "rank-00001.safetensors", 0.5)
    for outcome in crew(2)(bodies.restore, str(disk)):
        assert type(outcome.error) is fastckpt.CorruptCheckpoint
        assert "rank-00001.safetensors" in str(outcome.error)
        assert str(outcome.error).endswith(
            "; a state that was being restored may have been partly overwritten"
        )
    crew(2)(bodies.save_steps, str(disk), [3], {})
    assert restored(crew(2), disk) == 3


def test_a_manifest_names_every_file(crew: Callable[[int], Crew], disk: Path) -> None:
    """What a step's directory holds, and nothing else is in it."""
    crew(4)(bodies.save_steps, str(disk), [7], {})
    (step,) = disk.iterdir()
    manifest = json.loads((step / "manifest.json").read_text())
    names = {path.name for path in step.iterdir()} - {"manifest.json"}
    assert names == {
        f"rank-{n:05d}.{kind}" for n in range(4) for kind in ("safetensors", "json")
    } | {"objects.pt"}
    assert all(name in json.dumps(manifest) for name in names if not name.endswith("safetensors"))
