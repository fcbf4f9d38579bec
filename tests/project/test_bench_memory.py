"""The benchmark of memory: one short run, which comes to an end and measures all that it names.

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
from tests.kit.tiers import local

__all__ = ["local"]


@pytest.mark.multiprocess
@pytest.mark.torture
def test_a_short_run(tmp_path: Path, local: Path) -> None:
    sizes = ("--gib", "0.03", "--step-gib", "0.03", "--peer-gib", "0.03", "--rounds", "1")
    places = ("--memory", local, "--out", tmp_path, "--dir", tmp_path)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "memory.py", *sizes, *places],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    (file,) = tmp_path.glob("memory-*.json")
    lines = json.loads(file.read_text())["lines"]
    assert {*lines} == {"steps", "training", "restores", "peers"}, done.stdout + done.stderr
    # Whether it is one copy is a matter of time, too: on a busy machine the files of removed steps
    # may not be there yet. That it can be one, test_one_copy.py checks.
    assert "| no second copy | yes |" in done.stdout
