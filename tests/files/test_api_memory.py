"""How much memory a save and a load take, by the peak of the resident set of a process.

Knows the public API and proc(5); must not know how staging divides its budget.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit import interpreters

MIB = 1 << 20
STATE_MIB = 240
BLOCK_MIB = 8
LOAD_WINDOW_MIB = 16 * BLOCK_MIB
# Threads, allocator, code paged in at their first use; a copy of the state would show beside it.
SLACK_MIB = 100

PROGRAM = """
import json, sys
import torch
import fastckpt

path, options = sys.argv[1], json.loads(sys.argv[2])
TENSORS, STATE_MIB = 5, int(sys.argv[3])

def status_mib(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) / 1024

def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def state_of(seed):
    # Each tensor alone is larger than what staging or reading may take beside the state.
    numel = (STATE_MIB << 20) // TENSORS // 4
    return {str(i): torch.full((numel,), float(seed + i)) for i in range(TENSORS)}

def report(**measured):
    print(json.dumps(measured))
"""

SAVE = """
state = state_of(1)
saved = []
for number in range(2):
    before = status_mib("VmRSS")
    reset_peak()
    stats = fastckpt.save(state, path, options=fastckpt.SaveOptions(**options)).result()
    saved.append({
        "before": before,
        "peak": status_mib("VmHWM"),
        "staged": stats.staged_bytes_max / (1 << 20),
    })
report(saved=saved)
"""

LOAD = """
before = status_mib("VmRSS")
reset_peak()
state = fastckpt.load(path, **options)
peak, after = status_mib("VmHWM"), status_mib("VmRSS")
sound = all(bool((state[str(i)] == float(1 + i)).all()) for i in range(TENSORS))
report(before=before, peak=peak, after=after, sound=sound)
"""


def measure(
    action: str, path: Path, options: dict[str, Any], budget_mib: int | None = None
) -> dict[str, Any]:
    """Runs an action in a process of its own; returns what it measured, in MiB."""
    budget = None if budget_mib is None else str(budget_mib * MIB)
    result = interpreters.run(
        PROGRAM + action,
        path,
        json.dumps(options),
        STATE_MIB,
        variables={"FASTCKPT_STAGING_BYTES": budget},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


@pytest.fixture(scope="module")
def checkpoint(real_disk: Path) -> Path:
    path = real_disk / "memory.pt"
    measure(SAVE, path, {}, budget_mib=64)
    return path


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("options", "budget_mib", "limit_mib"),
    [
        pytest.param({}, 64, 64, marks=pytest.mark.torture),
        ({}, BLOCK_MIB, BLOCK_MIB),
        pytest.param(
            {"staging_bytes": 4 * BLOCK_MIB * MIB}, 160, 4 * BLOCK_MIB, marks=pytest.mark.torture
        ),
        ({"staging_bytes": 4 * BLOCK_MIB * MIB, "backend": "threads"}, 160, 4 * BLOCK_MIB),
        ({}, None, STATE_MIB + 2 * BLOCK_MIB),
    ],
    ids=["budget", "one block", "limit", "limit, threads", "default"],
)
def test_save_takes_what_it_stages_and_no_more(
    disk: Path, options: dict[str, Any], budget_mib: int | None, limit_mib: int
) -> None:
    measured = measure(SAVE, disk / "state.pt", options, budget_mib)["saved"]
    first_mib = measured[0]["before"]
    for save in measured:
        assert 0 < save["staged"] <= limit_mib
        # Later saves find the arena of the earlier ones in memory: it counts once.
        assert save["peak"] - first_mib <= limit_mib + SLACK_MIB


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("options", "budget_mib"),
    [
        pytest.param({}, None, marks=pytest.mark.torture),
        ({}, 64),
        ({"verify": False}, 64),
        ({"mmap": True}, 64),
    ],
    ids=["default", "budget", "unverified", "mapped"],
)
def test_load_takes_the_object_and_a_window(
    checkpoint: Path, options: dict[str, Any], budget_mib: int | None
) -> None:
    measured = measure(LOAD, checkpoint, options, budget_mib)
    assert measured["sound"]
    window_mib = min(LOAD_WINDOW_MIB, budget_mib or LOAD_WINDOW_MIB)
    assert measured["peak"] - measured["before"] <= STATE_MIB + window_mib + SLACK_MIB
    if not options.get("mmap"):
        assert measured["after"] - measured["before"] >= STATE_MIB
