"""The budget of staging memory minds the limit of the process's own memory cgroup, and is shared
among the ranks that a launcher has started on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt.arguments import environment
from fastckpt.engine.staging import default_budget_bytes

LIMIT = 900 << 20
MOUNTED = Path("/sys/fs/cgroup/memory")  # version 1


@pytest.fixture
def inner() -> Iterator[Path]:
    """A cgroup without a limit, inside of one with LIMIT."""
    own = [line for line in Path("/proc/self/cgroup").read_text().split() if ":memory:" in line]
    if not own or not os.access(MOUNTED / "cgroup.procs", os.W_OK):
        pytest.skip("no memory cgroups of version 1 that this user may make")
    outer = MOUNTED / f"fastckpt-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    try:
        (outer / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield inner
    finally:
        inner.rmdir()
        outer.rmdir()


def budget_in(cgroup: Path) -> int:
    """Returns the budget of a forked process in a cgroup."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            os.write(writing, str(default_budget_bytes()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        found = told.read()
    os.waitpid(pid, 0)
    return int(found)


def test_a_limit_around_the_own_cgroup_counts(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCKPT_STAGING_BYTES", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert 0.8 * LIMIT / 2 < budget_in(inner) <= LIMIT / 2


SHARES: list[tuple[dict[str, str], int]] = [
    ({}, 1),
    ({"LOCAL_WORLD_SIZE": "8"}, 8),
    ({"LOCAL_SIZE": "4"}, 4),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "6"}, 6),
    ({"MPI_LOCALNRANKS": "3"}, 3),
    ({"SLURM_NTASKS_PER_NODE": "5"}, 5),
    ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
    ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
    ({"SLURM_TASKS_PER_NODE": "2,4(x2)", "SLURM_NODEID": "3"}, 4),
    ({"SLURM_TASKS_PER_NODE": "2,4(x2)"}, 4),
    ({"SLURM_TASKS_PER_NODE": "2,4(x999999999)", "SLURM_NODEID": "999999"}, 4),
    # The processes of the one are started in a job of the other.
    ({"LOCAL_WORLD_SIZE": "8", "SLURM_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"}, 2),
    # What is no number of ranks is passed over.
    ({"LOCAL_WORLD_SIZE": "0", "LOCAL_SIZE": "-4", "MPI_LOCALNRANKS": "3"}, 3),
    ({"LOCAL_WORLD_SIZE": "\u00b2"}, 1),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "9" * 5000}, 1),
    ({"SLURM_TASKS_PER_NODE": "4(x2),", "SLURM_NTASKS_PER_NODE": "four"}, 1),
    ({"SLURM_TASKS_PER_NODE": "0(x2)", "SLURM_NODEID": "here"}, 1),
]


@pytest.mark.parametrize(("told", "ranks"), SHARES, ids=repr)
def test_ranks_that_a_launcher_has_started_share_the_memory(
    told: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith(("LOCAL_", "OMPI_", "MPI_", "SLURM_", "FASTCKPT_")):
            monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert environment.launched_on_machine() == ranks
    monkeypatch.setattr("fastckpt.engine.staging.memory_left_bytes", lambda: 48 << 30)
    assert default_budget_bytes() == (24 << 30) // ranks
