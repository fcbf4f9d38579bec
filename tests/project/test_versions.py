"""Versions of frameworks: the table in the documents is that of the record, and the floors that
tests.versions tries are those that the integrations name.
"""

from __future__ import annotations

import re

import pytest

from tests import versions
from tests.kit.paths import ROOT

_REQUIRED = re.compile(r'^(?:\w+ = )?require\("([\w-]+)", "([\d.]+)"', re.MULTILINE)


def floors() -> dict[str, str]:
    """The floor of each distribution, as the integrations require it."""
    files = (ROOT / "fastckpt" / "integrations").rglob("*.py")
    return dict(found for file in files for found in _REQUIRED.findall(file.read_text()))


def test_the_table_is_that_of_the_record() -> None:
    records = versions.recorded()
    assert versions.PAGE.read_text() == versions.page(records)
    assert all(records[name]["failed"] == 0 for name in records)
    assert {name for name in records if name.endswith("-floor")} == {
        f"{framework}-floor" for framework in versions.FRAMEWORKS
    }


@pytest.mark.parametrize("framework", versions.FRAMEWORKS)
def test_the_floor_that_is_tried_is_the_one_that_is_required(framework: str) -> None:
    for asked in versions.wanted(f"{framework}-floor"):
        distribution, version = asked.split("==")
        floor = floors()[distribution]
        assert f"{version}.".startswith(f"{floor}."), f"{asked} is tried, {floor} is required"
    recorded = versions.recorded()[f"{framework}-floor"]["versions"]
    for asked in versions.wanted(f"{framework}-floor"):
        distribution, version = asked.split("==")
        assert recorded[distribution].partition("+")[0] == version


def test_an_outcome_is_read_as_pytest_tells_it() -> None:
    text = """..s
SKIPPED [2] tests/a.py:3: this torch has one format
SKIPPED [1] tests/b.py: this torch has one format
FAILED tests/a.py::test_b
1 failed, 7 passed, 3 skipped, 1 xfailed in 66.10s (0:01:06)
"""
    skipped = {"this torch has one format": 3}
    assert versions.outcome(text) == {"passed": 7, "failed": 1, "skipped": skipped}
    assert versions.outcome("2 errors in 1.98s")["failed"] == 1
    assert versions.outcome("")["failed"] == 1
