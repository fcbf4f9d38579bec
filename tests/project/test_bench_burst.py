"""The benchmark of bursts: what it makes of its measurements, and one short run where it can.

Responsible for its coming to an end, for what it says, and for devices that are gone afterwards.
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

import burst
from burst_targets import reason_missing


def rows() -> list[dict[str, object]]:
    times = {"stall_s": 0.1, "committed_s": 2.0, "drained_s": 2.5, "p50_s": 0.001}
    return [
        times | {"way": way, "round": number, "p99_s": p99 * (1 + number), "idle_p99_s": 0.004}
        for number in range(3)
        for way, p99 in (("sync", 0.1), ("async", 0.2), ("async, paced", 0.0025))
    ]


def test_medians_and_the_bar() -> None:
    found = burst.summary(rows())
    assert found["async"]["p99_s"] == pytest.approx(0.4)
    assert found["async, paced"]["p99_ratio"] == pytest.approx(1.25)
    *_, bar = burst.lines(found)
    assert bar.passed and bar.bar == "<= 1.5"


@pytest.mark.multiprocess
@pytest.mark.torture
def test_a_short_run(tmp_path: Path) -> None:
    missing = reason_missing()
    if missing is not None:
        pytest.skip(missing)
    command = [sys.executable, str(ROOT / "benchmarks" / "burst.py"), "--size", "8"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "| async, paced |" in done.stdout, done.stdout + done.stderr
    (file,) = tmp_path.glob("burst-*.json")
    assert len(json.loads(file.read_text())["results"]) == 5
    attached = subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    assert "burst-" not in attached
