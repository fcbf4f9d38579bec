"""The benchmark on a GPU, run as a developer runs it, where there is none.

This file is responsible for two promises: without CUDA it says so and writes nothing, and its steps
run from end to end on the stand-in and leave a record of the agreed shape. What a GPU makes of
them it cannot know.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.jobs import SCRIPT
from tests.kit.paths import ROOT
from tests.kit.programs import run_python

PARTS = {"memory", "copy", "call", "commit", "load", "train", "fence"}
LINE_KEYS = {"what", "bar", "measured", "passed", "spread", "limit", "rival"}
OURS = {"fastckpt", "fastckpt-step"}
THEIRS = {"torch.save", "dcp-async-pinned"}
pytestmark = pytest.mark.multiprocess


def bench(*options: object, expected: int = 0) -> str:
    """What benchmarks/gpu.py prints, in a process that sees no GPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, options)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == expected, done.stderr
    return done.stdout


def test_without_cuda_it_says_so_and_writes_nothing(disk: Path) -> None:
    ended = run_python(
        SCRIPT,
        ROOT / "benchmarks" / "gpu.py",
        *("--dir", disk, "--out", disk / "results"),
        variables={"CUDA_VISIBLE_DEVICES": ""},
    )
    printed = ended.stdout
    assert printed.startswith("No GPU") and len(printed.splitlines()) == 1
    assert list(disk.iterdir()) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a tiny run on the stand-in printed, and the record it wrote."""
    directory = tmp_path_factory.mktemp("bench")
    out = directory / "results"
    sizes = ("--gib", 1 / 128, "--rounds", 1, "--every", 2)
    printed = bench("--device", "cpu", *sizes, "--dir", directory, "--out", out)
    assert [path.name for path in directory.iterdir()] == ["results"]
    (file,) = out.iterdir()
    assert file.name.startswith("gpu-") and file.suffix == ".json"
    return printed, json.loads(file.read_text())


@pytest.mark.torture
def test_record_has_its_shape(run: tuple[str, dict[str, Any]]) -> None:
    _printed, record = run
    assert not record["judged"] and record["failures"] == []
    assert {"name", "driver", "pcie"} <= set(record["gpu"])
    assert {"cpu", "kernel", "filesystem", "torch", "commit", "date"} <= set(record["environment"])
    assert "GDS" in record["missing"] or "gds" in str(record["results"]["memory"])
    assert set(record["lines"]) == set(record["tables"]) == set(record["results"]) == PARTS
    lines = [line for found in record["lines"].values() for line in found]
    assert all(set(line) == LINE_KEYS for line in lines)
    for name in ("commit", "train"):
        peers = {row["peer"] for row in record["results"][name]["rows"]}
        assert peers >= OURS | THEIRS
        assert "dcp-async-pinned" in record["tables"][name][0]
    loads = {row["peer"] for row in record["results"]["load"]["rows"]}
    assert loads == {"fastckpt.load", "fastckpt.load, gds", "torch.load", "safetensors"}


@pytest.mark.torture
def test_every_bar_has_its_line_and_no_number_is_judged(run: tuple[str, dict[str, Any]]) -> None:
    printed, record = run
    assert printed.startswith("Stand-in on the CPU") and "FAIL" not in printed
    lines = [line for found in record["lines"].values() for line in found]
    for line in lines:
        judged = "bit by bit" in line["what"]
        assert (line["bar"], line["passed"]) == (("yes", True) if judged else ("", None)), line
    told = " / ".join(line["what"] for line in lines)
    wanted = [
        "D2H into the arena, of a plain pinned copy",
        *(f"fence {fence}, save() returns" for fence in ("call", "step")),
        *(f"stall by {clock}, of the D2H" for clock in ("CUDA events", "wall time")),
        *(f"lost a save, of 2 steps, by {clock}" for clock in ("events", "wall time")),
        *(f"GPU memory added at most, host path, fence {fence}" for fence in ("call", "step")),
        *(f"load to the GPU, cold, of {other}" for other in ("torch.load", "safetensors")),
        *(f"{name}: comes back bit by bit" for name in (*OURS, "fastckpt.load")),
    ]
    limit = "fastckpt bench io" if "fio" in record["missing"] else "fio"
    wanted += [f"{name}: committed, of {limit}'s write" for name in OURS]
    wanted += [f"load to the GPU, cold, of min({limit} read, pinned H2D)"]
    assert [what for what in wanted if what not in told] == []


@pytest.mark.torture
def test_ended_by_a_signal_it_shows_what_is_finished(disk: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu"]
    command += ["--gib", "0.0078125", "--rounds", "1000", "--parts", "memory,call"]
    command += ["--dir", str(disk), "--out", str(disk / "results")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "call 3/1000" in line:
                process.send_signal(signal.SIGTERM)
                break
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "### GPU memory" in printed and "### The call" not in printed
    assert "ended by signal 15 before all was measured" in printed
    assert [path.name for path in disk.iterdir()] == ["results"]
