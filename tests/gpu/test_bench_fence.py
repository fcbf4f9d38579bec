"""What a save costs training on a GPU is told from the machine's noise, or that it cannot be: the
analysis on made-up rows, and the blocks of the measurement on a device whose clock is its own.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.accelerator import KIND
from tests.kit.cuda_stub import CudaStub
from tests.kit.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import gpu_fence
from gpu_device import StandIn, wait_for_copies
from gpu_fence import NOTHING, PEERS, QUIET, answer, fence_lines, interval, losses, run_fence

STEPS, STEP_S = 10, 0.1


def made_up(
    saves: int, cost_s: float, noise: Callable[[int], float], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Blocks whose steps take STEP_S and the noise of their number; the first step behind a save
    under the step fence takes cost_s more, and that under the call fence twice as much more.
    """
    chance, number, blocks = random.Random(seed), 0, list[dict[str, Any]]()

    def block(kind: str, count: int) -> None:
        nonlocal number
        steps = []
        for step in range(STEPS):
            extra = {"step": cost_s, "call": 2 * cost_s}.get(kind, 0.0) if step == 0 else 0.0
            device_s = (STEP_S + extra) * (1 + noise(number) * chance.uniform(-1, 1))
            steps.append([device_s, 0.02, 0.001, 0.08])
            number += 1
        row = {"kind": kind, "round": count, "steps": steps}
        row["wall_s"] = row["cpu_s"] = sum(step[0] for step in steps)
        saved = ("returned_s", "copied_s", "durable_s")
        blocks.append(row | dict.fromkeys(saved if kind in PEERS else (), 0.01))

    block(QUIET, 0)
    for count in range(saves):
        for kind in (*PEERS, NOTHING):
            block(kind, count)
            block(QUIET, count)
    return blocks


def told(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    lines, tables = fence_lines(losses(blocks, STEPS), blocks)
    assert "| 10 |" in tables[1]
    return {line.what: line for line in lines}


STEP, CALL = (f"fence {kind}, lost a save, less the noise, by events" for kind in PEERS)


@pytest.mark.parametrize(
    ("cost_s", "verdict", "estimate"),
    [(0.01, True, 1.0), (0.06, False, 6.0), (0.0, True, 0.0)],
)
def test_a_cost_above_the_noise_is_answered(cost_s: float, verdict: bool, estimate: float) -> None:
    line = told(made_up(20, cost_s, lambda _number: 0.02))[STEP]
    assert line.passed is verdict and line.measured.startswith("answered: ")
    assert float(line.measured[10:-1]) == pytest.approx(estimate, abs=1)


def test_each_fence_and_clock_has_its_answer() -> None:
    found = told(made_up(20, 0.02, lambda _number: 0.0))
    assert (found[STEP].measured, found[CALL].measured) == ("answered: 2.00%", "answered: 4.00%")
    assert found[STEP].passed is True and found[CALL].passed is False
    assert found[STEP.replace("events", "wall time")].measured == "answered: 2.00%"
    assert found["share of it that the host waits for the device"].measured == "80%"


def test_a_machine_that_is_too_noisy_gives_no_answer() -> None:
    line = told(made_up(20, 0.03, lambda _number: 0.6))[STEP]
    assert line.passed is None and line.measured.startswith("too noisy: ")


def test_a_machine_that_gets_slower_all_the_time_does_not_look_like_a_cost() -> None:
    blocks = made_up(20, 0.01, lambda _number: 0.0)
    for number, row in enumerate(blocks):  # at the end everything takes twice as long
        row["steps"] = [[step[0] * (1 + number / len(blocks)), *step[1:]] for step in row["steps"]]
        row["wall_s"] = sum(step[0] for step in row["steps"])
    line = told(blocks)[STEP]
    assert line.passed is True and float(line.measured[10:-1]) == pytest.approx(1, abs=0.2)


def test_a_stall_of_the_machine_in_some_saves_decides_nothing() -> None:
    stalled = {25 + 60 * count for count in range(6)}
    line = told(made_up(20, 0.01, lambda number: 9.0 if number in stalled else 0.0))[STEP]
    assert line.passed is True


@pytest.mark.parametrize("saves", [0, 1, 5])
def test_too_few_saves_give_no_answer(saves: int) -> None:
    found = told(made_up(saves, 0.5, lambda _number: 0.0)) if saves else {}
    line = found.get(STEP) or answer(STEP, [], 3.0)
    assert line.passed is None and line.measured == f"too few saves ({saves})"


def test_an_interval_has_the_median_in_95_of_100_cases() -> None:
    assert interval([*range(20)]) == (5, 14) and interval([*range(6)]) == (0, 5)
    assert interval([1.0] * 5) == (-math.inf, math.inf)
    chance, hits, rounds = random.Random(7), 0, 2000
    for _ in range(rounds):
        low, high = interval([chance.gauss(0, 1) ** 3 for _ in range(20)])
        hits += low <= 0 <= high
    assert 0.94 < hits / rounds < 0.98


class Device(StandIn):
    """The device of the tests, whose clock is that of its current stream."""

    def __init__(self, driver: CudaStub, beside: int) -> None:
        self.device, self.driver, self.beside = torch.device(KIND, 0), driver, beside

    def mark(self) -> float:
        return self.driver.synchronize() / 1e6

    def mark_of_copies(self) -> float:
        wait_for_copies(self.device, self.beside)
        return self.driver.synchronize(self.beside) / 1e6


class Training:
    """A loop of steps that take a second of the device, whose optimizer has torch's hooks."""

    clocks = (0.0, 0.0, 0.0)

    def __init__(self, device: Device) -> None:
        self.device, self.kernel = device, bytearray(1)
        self.weight = torch.nn.Parameter(torch.randn(1 << 20).to(KIND))
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def step(self) -> float:
        self.device.driver.kernel(self.kernel, 1, 1e6)
        self.optimizer.step()
        return self.device.mark()


def test_events_of_both_streams_tell_the_copies_and_the_steps(gpu: CudaStub, disk: Path) -> None:
    gpu.configure(bytes_per_us=1)  # 4 MiB take 4.2 s
    with gpu.streams(1) as [beside]:
        device = Device(gpu, beside)
        here: Any = SimpleNamespace(device=device, every=3, directory=disk)
        blocks = gpu_fence.Blocks(here, Training(device))  # type: ignore[arg-type]
        peer = PEERS["step"]()
        peer.load_modules()
        peer.open()
        blocks.run(QUIET, 3)
        blocks.run("step", 3, peer)
        quiet, saved = blocks.resolved()
    nbytes = 4 << 20
    assert [step[0] for step in quiet["steps"]] == pytest.approx([1.0] * 3)
    assert saved["copied_s"] == pytest.approx(nbytes / 1e6, rel=0.01)
    assert saved["d2h_s"] == pytest.approx(nbytes / 1e6, rel=0.01)
    # The optimizer of the first step waits for them on the device.
    assert saved["steps"][0][0] == pytest.approx(nbytes / 1e6, rel=0.01)
    assert [step[0] for step in saved["steps"][1:3]] == pytest.approx([1.0] * 2)
    assert not (disk / "fence").exists()


def test_no_round_begins_when_the_time_is_over(disk: Path) -> None:
    sizes = {"nbytes": 1 << 20, "rounds": 20, "every": 2, "release": lambda: None, "seconds": 0.0}
    here: Any = SimpleNamespace(device=StandIn(), directory=disk, **sizes)
    found = run_fence(here)
    assert found.lines == [] and found.tables[1] == "No round was finished in time."
    assert [row["kind"] for row in found.rows["blocks"]] == [QUIET]
