"""Each kind of save and restore asks of the file system what it asked when it was recorded.

Responsible for the comparison, and for recordings that would notice: in which order things are
done, what is done once and what twice. What is recorded stands in scenes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crews.group_crew import Nursery
from tests.kit.doubles import Operation
from tests.recordings.golden import AGAIN, FOLDER, RANKS_IMPORT, Golden
from tests.recordings.recorder import Naming, StageStorage, difference, lines_of, masked

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    nursery = Nursery(RANKS_IMPORT)
    yield Golden(nursery)
    nursery.close()


@pytest.mark.parametrize("name", Golden.names())
def test_what_is_done_is_what_was_recorded(golden: Golden, name: str) -> None:
    told = golden.difference(name)
    assert not told, f"if this is better, `{AGAIN} {name}`, and say why in the commit:\n{told}"


def test_every_recording_is_of_a_scene() -> None:
    assert Golden.kept() == {*Golden.names()}


def text_of(log: list[Operation], engines: set[int]) -> str:
    storage = StageStorage("/apart")
    storage.log = log
    storage.is_engines = dict.fromkeys(engines, True)
    return "\n".join(lines_of(storage, Naming({"/tmp/x": "root"}))) + "\n"


def operations(*names: Any) -> list[Operation]:
    return [Operation(name, f"/tmp/x/{path}", args) for name, path, *args in names]


def test_an_order_that_is_none_makes_no_difference() -> None:
    one = operations(("create", "a", 0o600), ("create", "b", 0o600), ("write", "a", 8, 8))
    one += operations(("write", "a", 0, 8), ("sync", "a"), ("sync", "b"))
    other = operations(("create", "a", 0o600), ("write", "a", 0, 8), ("create", "b", 0o600))
    other += operations(("write", "a", 8, 8), ("sync", "a"), ("sync", "b"))
    assert text_of(one, set()) == text_of(other, set())


def test_a_rename_before_the_sync_is_seen() -> None:
    name = "save-step-by-2"
    before = Path(FOLDER, f"{name}.txt").read_text()
    lines = before.splitlines(keepends=True)
    (renamed,) = (number for number, line in enumerate(lines) if line.startswith("rename"))
    moved = lines.pop(renamed)
    (synced,) = (n for n, line in enumerate(lines) if "sync " in line and "manifest.json" in line)
    lines.insert(synced, moved)
    told = difference(before, "".join(lines), name)
    assert told.count("\n+rename") == told.count("\n-rename") == 1


def test_sizes_that_torch_decides_on_are_left_out_for_another_torch() -> None:
    one = "write  root/a.pt  8388608 bytes at 0\nroot/a.pt  9000000 bytes  crc32 0123abcd\n"
    other = one.replace("9000000", "9000100").replace("0123abcd", "f123abcd")
    assert masked(one) == masked(other) and masked(one) != masked(one.replace("write", "read"))
