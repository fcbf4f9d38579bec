"""The benchmarks that torchrun starts, run as a developer runs them, with little to save.

Responsible for their coming to an end, and for what they say of what came back. Must not judge
times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.torture]


@pytest.mark.parametrize(("kind", "ranks"), [("dcp", 2), ("export", 4)])
def test_it_measures_and_finds_all_right(kind: str, ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(ROOT / "benchmarks" / f"{kind}.py")]
    command += ["--size", "0.03", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "results")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].endswith("| yes | yes |  | - | - | PASS |")
    (file,) = (tmp_path / "results").glob(f"{kind}-*.json")
    record = json.loads(file.read_text())
    assert {row["round"] for row in record["results"]} == {1}
    held = [line for line in record["lines"].popitem()[1] if line["what"].endswith("committed")]
    assert held and all("fio write" in line["limit"] and line["rival"] for line in held)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
