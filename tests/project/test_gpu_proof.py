"""benchmarks/gpu_proof.sh where there is no GPU: each stage says so, and its checks pass on the
doubles. What a GPU makes of them this file cannot know.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.interpreters import TRAINING
from tests.kit.jobs import Job
from tests.kit.paths import ROOT

NEED_A_GPU = "fence checks tests bench-ram probe gds sanitizer small-budget malloc-async "
NEED_A_GPU += "bench-disk bench-peers"
pytestmark = pytest.mark.multiprocess


def proof(disk: Path, **variables: str) -> tuple[list[str], str]:
    """Runs the script where torch sees no GPU. Returns the lines of its summary without times, and
    all that its checks printed.
    """
    for name in ("work", "ram"):
        (disk / name).mkdir()
    places = {"OUT": str(disk / "out"), "DISK_ROOT": str(disk / "work")}
    places |= {"RAM_ROOT": str(disk / "ram"), "PYTHON": sys.executable, "KIT": ""}
    # Threads of OpenMP spin while they wait for work, and others want the cores.
    places |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_proof.sh")],
        env=os.environ | places | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*(disk / "work").iterdir(), *(disk / "ram").iterdir()], "something stayed behind"
    summary = (disk / "out" / "summary.txt").read_text().splitlines()
    checks = disk / "out" / "checks.txt"
    printed = checks.read_text() if checks.exists() else ""
    return [line.split("] ", 1)[1] for line in summary[1:-1]], printed


def test_without_a_gpu_every_stage_says_so(disk: Path) -> None:
    told, _ = proof(disk, STAGES=NEED_A_GPU)
    assert told == [f"NO GPU: {name} was not run" for name in NEED_A_GPU.split()]


def test_checks_pass_on_the_doubles(disk: Path) -> None:
    """The script itself, in an interpreter that has imported torch: the stage is torture's."""
    options = ("full", disk, "--device", "stub", "--races", 1, "--mib", 4096)
    variables: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ""}
    job = Job(
        "benchmarks/gpu_proof.py", disk / "out", *options, imports=TRAINING, variables=variables
    )
    printed = job.finish()
    assert printed.count("\nPASS ") == 10 and "all passed" in printed
    assert printed.startswith("PASS "), printed


def test_the_fence_is_measured_first_and_the_answer_is_in_the_summary(disk: Path) -> None:
    stages = re.findall(
        r"^stage (\S+) (\d+)", (ROOT / "benchmarks" / "gpu_proof.sh").read_text(), re.M
    )
    assert stages[:2] == [("engine", "200"), ("fence", "150")]
    (told,), _ = proof(disk, PROOF_DEVICE="stub", STAGES="fence")
    assert told.startswith("PASS fence")
    assert "fence step, lost a save, less the noise, by events too few saves (1)" in told
    (record,) = (disk / "out" / "bench").glob("gpu-*.json")
    rows = json.loads(record.read_text())["results"]["fence"]["blocks"]
    kinds = [row["kind"] for row in rows]
    assert kinds == ["quiet", "step", "quiet", "call", "quiet", "nothing", "quiet"]
    for row in rows:
        assert len(row["steps"]) >= 2 and all(len(step) == 4 for step in row["steps"])
        assert ("copied_s" in row) == ("d2h_s" in row) == (row["kind"] in ("step", "call"))


@pytest.mark.torture
def test_all_stages_that_can_run_pass_on_the_doubles(disk: Path) -> None:
    told, printed = proof(disk, PROOF_DEVICE="stub", FACTS_MIB="16")
    verdicts = {line.replace("NO GPU: ", "NO-GPU ").split()[1].rstrip(":"): line for line in told}
    passing = "engine fence facts checks bench-ram gds bench-disk small-budget bench-peers"
    for name in passing.split():
        assert verdicts[name].startswith("PASS"), printed
    for name in ("tests", "sanitizer", "malloc-async"):
        assert verdicts[name].startswith("NO GPU")
    assert verdicts["probe"].startswith("SKIP probe: only a GPU")
