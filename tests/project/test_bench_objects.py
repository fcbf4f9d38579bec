"""The benchmark of object stores: what it makes of its measurements, and one short run.

Responsible for its coming to an end and for what it says. Must not judge times.
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

import objects

pytest.importorskip("obstore", reason="obstore is not installed")


def rows(ways: list[str], obstore: float = 0.5, dcp: float = 3.0) -> list[dict[str, object]]:
    clocks = {"stall_s": 0.5, "committed_s": 2.0, "cpu_s": 1.0}
    times = {"fastckpt": 1.0, "obstore": obstore, "fastckpt, directory": 1.0}
    return [
        {"way": way, "round": number}
        | {key: value * times.get(way, dcp) * (1 + number) for key, value in clocks.items()}
        for number in range(3)
        for way in ways
    ]


def test_medians_and_the_bars() -> None:
    lines = objects.lines_of(rows(["fastckpt", "obstore", "fastckpt, directory"]), 4.0)
    assert [line.passed for line in lines] == [True, False, True]
    assert lines[0].measured == "0.50 s" and lines[1].limit.startswith("0.50 (obstore")


def test_a_client_alone_or_a_rival_of_twice_the_time_is_enough() -> None:
    ways = ["fastckpt", "obstore", "dcp, s3torchconnector", "fastckpt, directory"]
    for obstore, dcp, passed in ((0.5, 3.0, True), (0.95, 1.5, True), (0.5, 1.5, False)):
        line = objects.lines_of(rows(ways, obstore, dcp), 4.0)[1]
        assert line.passed is passed
        assert (line.limit[:4], line.rival[:4]) == (f"{obstore:.2f}", f"{1 / dcp:.2f}")


@pytest.mark.multiprocess
@pytest.mark.torture
def test_a_short_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "objects.py"), "--servers", "drain"]
    done = subprocess.run(
        [
            *command,
            "--gib",
            "0.03",
            "--rounds",
            "1",
            "--out",
            str(tmp_path),
            "--dir",
            str(tmp_path),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "| fastckpt, directory |" in done.stdout, done.stdout + done.stderr
    (file,) = tmp_path.glob("objects-*.json")
    ways = {row["way"] for row in json.loads(file.read_text())["results"]["drain"]}
    assert {"fastckpt", "obstore", "fastckpt, directory"} <= ways
