"""The budget of staging memory minds the limit of the process's own memory cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt.engine import budget

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
            os.write(writing, str(budget.default_budget_bytes()).encode())
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
