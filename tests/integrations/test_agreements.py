"""While ranks agree on a save, no integration runs a collective or lets one rank decide: each one
saves where every collective raises, and where the disk fails one of two ranks at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crews import agreement_bodies as bodies
from tests.crews.group_crew import Nursery

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
NEEDS = {
    "dcp": "torch",
    "accelerate FSDP": "accelerate",
    "megatron": "megatron.core",
    "megatron strategy": "megatron.core",
}
# What ranks have imported before they are forked.
IMPORTS = {
    "dcp": "dcp_imports",
    "megatron": "megatron_imports",
    "megatron strategy": "megatron_imports",
    "transformers": "trainer_imports",
    "accelerate": "accelerate_imports",
    "accelerate FSDP": "accelerate_imports",
    "lightning": "lightning_imports",
    "deepspeed": "deepspeed_bodies",
    "torchtitan": "torchtitan_imports",
}

Save = Callable[..., list[bodies.Told]]


@pytest.fixture(scope="module", params=bodies.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of an integration; tests of one come together, since each has ranks of its own."""
    named = str(request.param)
    pytest.importorskip(NEEDS.get(named, named))
    return named


@pytest.fixture(scope="module")
def by(kind: str) -> Iterator[Callable[..., Any]]:
    nursery = Nursery(f"tests.crews.{IMPORTS[kind]}")
    with contextlib.closing(nursery), nursery.crew(2) as crew:
        yield crew


@pytest.fixture
def save(kind: str, by: Callable[..., Any], disk: Path) -> Save:
    """`save(...)`: what the ranks told that have saved, by bodies.save with these arguments."""

    def saved(*fails: Any) -> list[bodies.Told]:
        told: list[bodies.Told] = by(bodies.save, str(disk), kind, "there", *fails)
        return told

    return saved


def test_a_save_runs_no_collective(save: Save, disk: Path) -> None:
    assert save() == [("", [])] * 2
    assert os.listdir(disk / "there")


@pytest.mark.parametrize(("rank", "code"), [(0, errno.ESTALE), (1, errno.EDQUOT)])
def test_all_ranks_raise_what_fails_one(rank: int, code: int, save: Save) -> None:
    told = save(rank, code)
    assert [each.begun for each in told] == [[], []]
    assert all(os.strerror(code) in each.error for each in told), told
    assert f"rank {rank} failed" in told[1 - rank].error


def test_all_ranks_fail_where_one_can_write_no_file(save: Save) -> None:
    """Not even those that the framework writes by itself."""
    told = save(1, None)
    assert [each.begun for each in told] == [[], []]
    assert "rank 1 failed" in told[0].error and told[1].error


@pytest.mark.parametrize("kind", ["accelerate"], indirect=True)
def test_the_first_rank_says_whether_an_automatic_directory_is_there(
    by: Callable[..., Any], disk: Path
) -> None:
    assert by(bodies.save_where_one_rank_sees_it, str(disk)) == [None, None]
    (disk / "checkpoints" / "checkpoint_0" / "random_states_0.pkl").read_bytes()


@pytest.mark.parametrize("kind", ["transformers"], indirect=True)
def test_callbacks_of_all_ranks_are_called_in_the_same_steps(
    by: Callable[..., Any], disk: Path
) -> None:
    first, second = by(bodies.steps_of_calls, str(disk))
    assert first == second and len(first) == 3


@pytest.mark.parametrize("kind", ["transformers"], indirect=True)
def test_a_file_that_one_rank_of_a_trainer_cannot_write_ends_training_on_all(
    by: Callable[..., Any], disk: Path
) -> None:
    """At the same point, and not on that rank alone, for which others would wait in training."""
    told = by(bodies.file_that_a_trainer_cannot_write, str(disk))
    assert [saving for saving, _ in told] == ["None", "None"]
    for _, ended in told:
        assert "writes itself failed" in ended and str(disk / "checkpoint-1") in ended
