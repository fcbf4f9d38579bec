"""The benchmark of torch.distributed.checkpoint, run as a developer runs it, with little to save.

Responsible for its coming to an end, and for what it says of what came back. Must not judge times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.torture]


def test_it_measures_and_finds_every_load_right(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "benchmarks" / "dcp.py"), "--size", "0.03", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "results")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "| every load gave back what was saved" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("| yes | yes | PASS |")
    (file,) = (tmp_path / "results").glob("dcp-*.json")
    record = json.loads(file.read_text())
    assert {row["round"] for row in record["results"]} == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
