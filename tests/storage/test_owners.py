"""Whose a temporary is, as its name says: hosts with long names that begin alike, other pid
namespaces, and boots before. What becomes of debris is test_crash.py's.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from fastckpt.storage import atomic, owners
from fastckpt.storage.file_system import Storage
from tests.kit.doubles import dead_pid
from tests.kit.hosts import needs_root
from tests.kit.network_double import NetworkClient
from tests.kit.programs import run_python

LONG = "trainer-of-a-project-with-a-long-name-in-zone-b-"

MAKES = """
import sys
from pathlib import Path
from fastckpt.storage import atomic
from tests.kit.hosts import become
become(sys.argv[2], own_pids="own pids" in sys.argv)
name = atomic.temporary_path(sys.argv[1])
Path(name).write_bytes(b"begun")  # without a lock, as where locks are each client's own
print(name)
"""

REMOVES = """
import sys
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage
from tests.kit.hosts import become
become(sys.argv[2], own_pids="own pids" in sys.argv)
print(atomic.remove_debris(Storage(), sys.argv[1]))
"""


def lines(program: str, *arguments: object) -> str:
    return run_python(program, *arguments).stdout.strip()


@needs_root
def test_hosts_whose_long_names_begin_alike_are_two(disk: Path) -> None:
    path = disk / "ckpt.pt"
    left = lines(MAKES, path, LONG + "0")
    assert lines(REMOVES, path, LONG + "1") == "[]"
    assert lines(REMOVES, path, LONG + "0") == f"[{left!r}]"


@needs_root
def test_in_another_pid_namespace_the_lock_tells(disk: Path) -> None:
    """As after the restart of a container: pids begin anew, and say nothing of those before."""
    path, storage = disk / "ckpt.pt", Storage()
    left = lines(MAKES, path, "pod", "own pids")
    fd = storage.open(left)
    assert storage.lock(fd)
    assert lines(REMOVES, path, "pod") == "[]"
    storage.close(fd)
    assert lines(REMOVES, path, "pod") == f"[{left!r}]"


def aged(path: str, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def test_a_free_lock_of_a_remote_file_system_tells_nothing_for_a_day(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients may each have locks of their own, and hosts may have one name."""
    path, double = str(disk / "ckpt.pt"), NetworkClient()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(owners, "pid_space", lambda: "of another machine with this name")
        left = atomic.temporary_path(path)
    Path(left).write_bytes(b"begun")
    with double.mounted():
        aged(left, atomic.DEAD_AFTER_S - 60)
        assert atomic.remove_debris(double, path) == []
        aged(left, atomic.DEAD_AFTER_S + 60)
        assert atomic.remove_debris(double, path) == [left]


def test_a_token_tells_whether_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In names that may hold nothing but digits; nothing is told of processes elsewhere."""
    token = owners.new_token()
    assert re.fullmatch(owners.TOKEN, token) and token != owners.new_token()
    assert owners.is_token_of_dead(token) is False
    assert owners.is_token_of_dead(f"{token[:12]}{dead_pid():06x}{token[18:]}") is True
    assert owners.is_token_of_dead(token[:16]) is None
    monkeypatch.setattr(owners, "pid_space", lambda: "another")
    assert owners.is_token_of_dead(token) is None
