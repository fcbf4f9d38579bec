"""The benchmark of healing: what it makes of its measurements, and one short run if torchft
is installed for it.

Must not judge times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import healing
from rivals.environment import ENVIRONMENTS

TIMES = {"fastckpt": 1.0, "HTTPTransport": 4.0, "PGTransport": 3.0, "PGTransport, in place": 2.5}


def rows(wrong: list[str]) -> list[dict[str, object]]:
    """Three rounds, in which our transport takes 1, 2 and 3 seconds and a socket 0.95 of that."""
    return [
        row
        for number in range(1, 4)
        for row in (
            {"name": "limit", "round": number, "socket_s": 0.95 * number},
            *(
                {"name": way, "round": number, "healed_s": time * number, "blocked_s": 0.1 / time}
                | {"wrong": wrong if way == "PGTransport" else []}
                for way, time in TIMES.items()
            ),
        )
    ]


def test_our_transport_is_held_against_the_best_of_the_others() -> None:
    healed, blocked, right = healing.lines_of(rows(wrong=[]))
    assert healed.passed and healed.measured == "2.000 s"
    assert healed.limit.startswith("0.95") and healed.rival.startswith("0.40 x (PGTransport, in")
    assert not blocked.passed and blocked.rival.startswith("4.00 x (HTTPTransport")
    assert right.passed and right.measured == "yes"


def test_a_tensor_that_came_as_another_one_is_told() -> None:
    assert [line.passed for line in healing.lines_of(rows(wrong=["w0"]))] == [True, False, False]


def test_the_table_has_a_row_for_each_way_and_the_limit() -> None:
    table = healing.table_of(rows(wrong=[]))
    for way, time in TIMES.items():
        assert f"| {way} | {2 * time:.3f} ({time:.3f} to {3 * time:.3f}) |" in table
    assert "| *limit:* a socket | 1.900 (0.950 to 2.850) |" in table


@pytest.mark.multiprocess
@pytest.mark.torture
def test_a_short_run(tmp_path: Path) -> None:
    if not (ENVIRONMENTS / "torchft_transport" / "stamp").exists():
        pytest.skip("torchft is not installed: `make bench-healing` does it once")
    command = [sys.executable, str(ROOT / "benchmarks" / "healing.py"), "--gib", "0.02"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--dir", str(tmp_path), "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode in (0, 1), done.stderr
    (file,) = tmp_path.glob("healing-*.json")
    (lines,) = json.loads(file.read_text())["lines"].values()
    assert lines[-1]["what"] == "every state came as it was sent"
    assert lines[-1]["measured"] == "yes", done.stdout
