"""Several ranks at one bucket: real processes over gloo. A step is whole or not there, another
number of ranks reads what it needs, and of two jobs one has the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastckpt import Checkpointer, PerRank
from tests.crews.group_crew import Crew, Member
from tests.kit.interpreters import LEAVE, Program
from tests.kit.objects.proxy import Proxy, Stall
from tests.kit.objects.states import blank, step_of
from tests.kit.objects.weed import Weed, environment, options
from tests.kit.storm import Storm

ROWS, COLUMNS = 1024, 8 << 10  # 32 MiB of float32
NEEDED_MAX = 1.1  # bytes that are read, of those that are needed
pytestmark = pytest.mark.multiprocess


def sharded(member: Member, step: int) -> dict[str, Any]:
    """Rows divided among the ranks, what all have, and what each has of its own."""
    mesh = DeviceMesh.from_group(member.group, "cpu")
    share = ROWS // member.world_size
    begin = share * member.rank
    numbers = torch.arange(begin, begin + share, dtype=torch.float32) * step
    local = numbers.unsqueeze(1).expand(share, COLUMNS).contiguous()
    return {
        "rows": DTensor.from_local(local, mesh, [Shard(0)]),
        "common": torch.full((1000,), step),
        "own": PerRank(member.rank * step),
    }


def save(member: Member, root: str, told: dict[str, Any], steps: list[int]) -> None:
    with Checkpointer(root, storage_options=told, group=member.group, keep_last=2) as saver:
        for step in steps:
            saver.save(step, sharded(member, step)).result()


def restore(member: Member, root: str, told: dict[str, Any]) -> int | None:
    state = sharded(member, 0)
    with Checkpointer(root, storage_options=told, group=member.group) as reader:
        step = reader.restore(state)
    assert step is not None
    expected = sharded(member, step)
    assert torch.equal(state["rows"].to_local(), expected["rows"].to_local())
    assert torch.equal(state["common"], expected["common"])
    return step


def test_two_ranks_save_and_four_restore(
    crew: Callable[[int], Crew], weed: Weed, root: str
) -> None:
    crew(4)(save, root, options(weed.port), [1, 3], ranks=2)
    assert crew(4)(restore, root, options(weed.port)) == [3, 3, 3, 3]


def test_another_number_of_ranks_reads_what_it_needs(
    crew: Callable[[int], Crew], weed: Weed, proxy: Proxy, root: str
) -> None:
    crew(4)(save, root, options(weed.port), [5])
    proxy.count()
    assert crew(4)(restore, root, options(proxy.port), ranks=2) == [5, 5]
    read = proxy.count().bytes_out.total()
    assert read <= NEEDED_MAX * 4 * ROWS * COLUMNS, read


JOB = """
import json, sys
import torch, fastckpt
from tests.kit.objects.states import state_of
root, number = sys.argv[1], int(sys.argv[2])
ended = None
with fastckpt.Checkpointer(root) as saver:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        saver.save(7, state_of(number, 9 << 18)).result()
    except fastckpt.CheckpointError as error:
        ended = f"{type(error).__name__}: {error}"
print(json.dumps(ended), flush=True)
"""


def job(root: str, number: int, port: int) -> Program:
    started = Program(JOB + LEAVE, root, number, variables={**environment(port)})
    assert started.stdout.readline() == "ready\n", started.communicate()
    return started


def outcome(program: Program) -> str | None:
    said, told = program.communicate("\n", timeout=100)
    assert program.returncode == 0, told
    error: str | None = json.loads(said)
    return error


def told_by(root: str, told: dict[str, Any]) -> int:
    """Which job's step a reader finds, all of which is of it."""
    into = blank(9 << 18)
    with Checkpointer(root, storage_options=told) as reader:
        assert reader.restore(into) == 7
    return step_of(into)


def test_two_jobs_save_one_step(weed: Weed, storm: Storm, root: str) -> None:
    """At the same moment: one of them has it and says so; the other is refused, or where it began
    when the first had ended, has saved it over.
    """
    for number, rng in enumerate(storm.rounds(1, 30)):
        at = f"{root}/{number}"
        jobs = [job(at, each, weed.port) for each in (1, 2)]
        for each in rng.sample(jobs, 2):
            each.stdin.write("\n")
            each.stdin.flush()
        errors = {each: outcome(jobs[each - 1]) for each in (1, 2)}
        winner = told_by(at, options(weed.port))
        assert errors[winner] is None, errors
        other = errors[3 - winner]
        assert other is None or other.startswith(("RootInUse", "CheckpointError")), errors


def test_a_job_that_was_taken_for_dead_leaves_no_mix(
    weed: Weed, proxy: Proxy, root: str, bare: Any, client: Any
) -> None:
    """It stands still before its manifest, while another one takes its root and saves the step,
    under a prefix of its own, and removes what was not committed: the first one is told.
    """
    stall = Stall(passes=True)
    proxy.on("create", stall, key="manifest.json")
    first = job(root, 1, proxy.port)
    first.stdin.write("\n")
    first.stdin.flush()
    assert stall.met.wait(60)
    client.delete(bare, root.partition("bucket/")[2] + "/lease.json")
    second = outcome(job(root, 2, weed.port))
    stall.over.set()
    assert second is None
    assert "another process considered this save dead" in str(outcome(first))
    assert told_by(root, options(weed.port)) == 2


def test_a_job_that_dies_as_it_takes_the_root(weed: Weed, proxy: Proxy, root: str) -> None:
    """What it leaves names it, from the first request on, so that nobody waits for it."""
    stall = Stall()
    proxy.on("put", stall, key="lease.json")
    first = job(root, 1, proxy.port)
    first.stdin.write("\n")
    first.stdin.flush()
    assert stall.met.wait(60)
    first.kill()
    first.wait(60)
    stall.over.set()
    assert outcome(job(root, 2, weed.port)) is None
    assert told_by(root, options(weed.port)) == 2
