"""The comparison of two benchmarks calls slower what is, and nothing that may be chance."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import compare


def result(path: Path, seconds: list[float], clock: str = "durable_s") -> str:
    rows = [{"peer": "p", clock: each, "load_s": None} for each in seconds]
    path.write_text(json.dumps({"results": {"saves": {"rows": rows}}}))
    return str(path)


@pytest.mark.parametrize(
    ("after", "status", "word"),
    [
        ([1.1, 1.11, 1.09, 1.1, 1.1], 1, "slower"),
        ([0.8, 0.81, 0.79, 0.8, 0.8], 0, "faster"),
        ([1.02, 1.01, 1.02, 1.02, 1.03], 0, ""),
        ([0.7, 1.9, 1.3, 0.9, 1.5], 0, ""),
        ([9.0, 9.0], 0, ""),
    ],
)
def test_what_is_slower(
    after: list[float], status: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = result(tmp_path / "a.json", [1.0, 1.01, 0.99, 1.0, 1.02])
    b = result(tmp_path / "b.json", after)
    assert compare.main([a, b]) == status
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:2] == ["p", "durable_s"]
    assert line.endswith(word) and (word or line[-1].isdigit() or line.endswith("inf"))


def test_chance_is_seldom_called_slower(tmp_path: Path) -> None:
    source = random.Random(5)
    slower = 0
    for _ in range(400):
        sides = [{("p", "c"): [source.gauss(1, 0.1) for _ in range(9)]} for _ in range(2)]
        (change,) = compare.changes(*sides)
        slower += change.verdict(0.03) == "slower"
    assert slower < 40


def test_files_of_a_side_are_pooled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [result(tmp_path / f"{n}.json", [1 + 4 * (n > 2) + n / 100]) for n in range(6)]
    assert compare.main(["--before", *files[:3], "--after", *files[3:]]) == 1
    assert "5.0400s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main([files[0]])
    other = result(tmp_path / "x.json", [1.0], "stall_s")
    with pytest.raises(SystemExit, match="no clock in common"):
        compare.main([files[0], other])
