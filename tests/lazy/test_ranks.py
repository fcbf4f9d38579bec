"""fastckpt.open() of what several ranks wrote together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from tests.crews.group_crew import WAIT_S, Crew, Member, Nursery, Outcome, attempt

pytestmark = pytest.mark.multiprocess
RANKS = 3


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(RANKS)


def state() -> dict[str, Any]:
    base = torch.arange(3_000_000.0)
    return {
        "large": base,
        "view": base[5:2_000_005].view(1000, 2000).t(),
        "small": torch.arange(30).view(5, 6),
        "small view": torch.arange(30).view(5, 6).t()[1:],
        "tiny": torch.tensor(2.5),
        "complex": torch.randn(20, dtype=torch.complex64, generator=generator()).conj(),
        "empty": torch.empty(0, 3),
    }


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def save_file(member: Member, path: Path) -> Outcome:
    return attempt(lambda: fastckpt.save(state(), path, group=member.group).result(WAIT_S))


def save_step(member: Member, path: Path) -> Outcome:
    def save() -> None:
        with fastckpt.Checkpointer(path, group=member.group) as checkpointer:
            own = {**state(), "own": fastckpt.PerRank(torch.full((4,), member.rank))}
            checkpointer.save(5, own).result(WAIT_S)

    return attempt(save)


@pytest.mark.parametrize("save", [save_file, save_step])
def test_every_tensor_is_there(save: Any, crew: Crew, disk: Path) -> None:
    outcomes = crew(save, disk / "a")
    assert [outcome.error for outcome in outcomes] == [None] * RANKS
    expected = state()
    with fastckpt.open(disk / "a") as tensors:
        assert [*tensors] == [*expected] and tensors.is_verified
        for name, tensor in expected.items():
            assert torch.equal(tensors[name][...], tensor), name
            if tensor.ndim:
                assert torch.equal(tensors[name][1:3], tensor[1:3]), name
