"""Restores whose reads ranks share: who reads what, and that everybody has all of it afterwards.

Over gloo and tensors of the CPU, which stand for NCCL and GPUs: what is broadcast is the same. Must
not know how a step is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.errors import CorruptCheckpoint
from fastckpt.steps import newest_whole, shared_reads
from fastckpt.steps.load import StepReader
from tests.crews.group_crew import WAIT_S, Crew, Member, Nursery, Outcome, attempt

pytestmark = pytest.mark.multiprocess
RANKS = 3


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(RANKS)


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model and optimizer as they are on every rank; big, small, and of other kinds."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(800, 900), torch.nn.Linear(900, 3)).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "module": module,
        "optimizer": optimizer,
        "turned": torch.randn(600, 700).T,
        "empty": torch.empty(0, 5),
        "own": fastckpt.PerRank(torch.randn(7)),
        "step": seed,
    }


def values(held: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [*held["module"].state_dict().values(), held["turned"]]
    for item in held["optimizer"].state_dict()["state"].values():
        tensors += [item[name] for name in sorted(item)]
    return [tensor.detach().clone() for tensor in tensors]


def go(member: Member, root: Path, make: Callable[[int], Any], shared: bool) -> Outcome:
    """Saves a state, restores another one like it; returns what was read, and whether all of it is
    as it was saved.
    """
    read: list[int] = []

    class Counting(StepReader):
        def read(self, targets: Any, staging: str = "host") -> int:
            read.append(super().read(targets, staging))
            return read[-1]

    def run() -> tuple[int, bool, bool]:
        with fastckpt.Checkpointer(root, group=member.group) as checkpointer:
            saved = state(1)
            checkpointer.save(1, saved).result(WAIT_S)
            other = make(member.rank)
            versions = [tensor._version for tensor in other["module"].parameters()]
            assert checkpointer.restore(other) == 1
        same = all(map(torch.equal, values(other), values(saved)))
        now = [tensor._version for tensor in other["module"].parameters()]
        return read[-1], same, all(a < b for a, b in zip(versions, now, strict=True))

    kept = shared_reads.kind_of, newest_whole.StepReader
    newest_whole.StepReader = Counting
    if shared:
        shared_reads.kind_of = lambda _group: "cpu"
    try:
        return attempt(run)
    finally:
        shared_reads.kind_of, newest_whole.StepReader = kept


def like(_rank: int) -> Any:
    return state(2)


def one_has_more(rank: int) -> Any:
    other = state(2)
    if rank == 1:
        other["optimizer"].state.clear()
    return other


def other_dtype(_rank: int) -> Any:
    return state(2, torch.float64)


def outcomes(crew: Crew, root: Path, make: Callable[[int], Any], shared: bool) -> list[Any]:
    found = crew(go, root, make, shared)
    assert [outcome.error for outcome in found] == [None] * RANKS
    return [outcome.value for outcome in found]


def test_each_rank_reads_its_share(crew: Crew, disk: Path) -> None:
    everything = outcomes(crew, disk / "a", like, False)
    shares = outcomes(crew, disk / "b", like, True)
    whole = everything[0][0]
    assert all(value == (whole, True, True) for value in everything)
    assert all(same and bumped for _, same, bumped in shares)
    # What is not contiguous is read by everybody, and so is what is in no shard.
    turned = 600 * 700 * 4
    assert sum(nbytes for nbytes, _, _ in shares) == whole - turned + RANKS * turned
    assert max(nbytes for nbytes, _, _ in shares) - turned < (whole - turned) * 0.4


def test_states_that_differ_are_not_shared(crew: Crew, disk: Path) -> None:
    found = outcomes(crew, disk / "a", one_has_more, True)
    assert all(same for _, same, _ in found) and len({nbytes for nbytes, _, _ in found}) == 1


def test_what_is_converted_is_not_shared(crew: Crew, disk: Path) -> None:
    shared = crew(go, disk / "a", other_dtype, True)
    alone = crew(go, disk / "b", other_dtype, False)
    assert [outcome.error for outcome in [*shared, *alone]] == [None] * (2 * RANKS)
    assert [outcome.value[0] for outcome in shared] == [outcome.value[0] for outcome in alone]


def damaged(member: Member, root: Path) -> Outcome:
    """Restores a step of which one rank's share is damaged."""

    def run() -> int | None:
        with fastckpt.Checkpointer(root, group=member.group) as checkpointer:
            checkpointer.save(1, state(1)).result(WAIT_S)
            if member.rank == 0:
                shard = root / "step-00000001" / "rank-00001.safetensors"
                content = bytearray(shard.read_bytes())
                content[-100] ^= 1
                shard.write_bytes(content)
            return checkpointer.restore(state(2), step=1)

    kept, shared_reads.kind_of = shared_reads.kind_of, lambda _group: "cpu"
    try:
        return attempt(run)
    finally:
        shared_reads.kind_of = kept


def test_damage_that_one_rank_meets_is_everybodys(crew: Crew, disk: Path) -> None:
    found = crew(damaged, disk)
    assert {type(outcome.error) for outcome in found} == {CorruptCheckpoint}, found
