"""What was acknowledged is there, whole, whichever of two jobs on one root is frozen at whichever
operation until its lease has run out, and then goes on; hosts do not see each other's locks.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.doubles import process_on
from tests.kit.frozen import Freezing, SecondJob, first_is_frozen, second_is_frozen
from tests.kit.hosts import needs_root

pytestmark = [pytest.mark.multiprocess, needs_root]
SOME = 9  # of so many operations one is tried in `make test`
# Where a job is frozen that another one finds: as it writes, before it looks at its lease, and when
# only the commit is left.
WHERE = ("write", "sync", "read_file", "rename")


@pytest.fixture
def other() -> Iterator[SecondJob]:
    with SecondJob() as job:
        yield job


def first_frozen(disk: Path, other: SecondJob, at: int) -> bool:
    root, storage = disk / str(at), Freezing()

    def freeze() -> Freezing:
        storage.at = len(storage.log) + at
        return storage

    with process_on(storage):
        is_frozen = first_is_frozen(str(root), other, freeze)
    shutil.rmtree(root)
    return is_frozen


@pytest.mark.parametrize("step", [SOME, pytest.param(1, marks=pytest.mark.torture)])
def test_a_job_that_is_frozen_in_a_save(disk: Path, other: SecondJob, step: int) -> None:
    for at in itertools.count(step // 2, step):
        if not first_frozen(disk, other, at):
            break
    assert at > 40, "a save and a removal have more operations"


def second_frozen(disk: Path, other: SecondJob, at: int, where: str) -> bool:
    root, storage = disk / f"{where}-{at}", Freezing()

    def freeze() -> Freezing:
        storage.at = at
        return storage

    _frozen, was_done = other.ask(f"freeze {root} {where}")
    with process_on(storage):
        is_frozen = second_is_frozen(str(root), other, was_done, freeze)
    shutil.rmtree(root)
    return is_frozen


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("write", 4 * SOME),
        ("rename", 4 * SOME),
        *(pytest.param(each, 1, marks=pytest.mark.torture) for each in WHERE),
    ],
)
def test_a_job_that_is_frozen_as_it_takes_over(
    disk: Path, other: SecondJob, where: str, step: int
) -> None:
    for at in itertools.count(step // 2, step):
        if not second_frozen(disk, other, at, where):
            break
    assert at > 80, "a restore, a save and a removal have more operations"
