"""Training processes that are killed while they save, by the real path from fastckpt.save to the
disk. Responsible for the moments of the kills and for what must be found afterwards. It must not
know in which steps a save proceeds; power cuts are test_crash.py's business.

The nursery is a process that has imported everything and forks the processes to be killed, since
starting Python takes longer than a run. It never saves itself, so what it forks has no engine yet.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import fastckpt
from fastckpt.saving.pipeline import Pipeline
from tests.kit.doubles import Deadly, Recorder, process_on, save_through
from tests.kit.interpreters import LEAVE, Program, let_go
from tests.kit.storm import Storm

WAIT_S = 60.0
BUDGET_BYTES = 128 << 20
SIZES = (3_000_000, 17, 1_500_000, 700_000)  # elements of float32: 21 MB
FENCES = ("call", "step")
NEVER = 1 << 30  # an operation that no save gets to
BEGUN, COMMITTED = b"b", b"c"
REPORT = struct.Struct("<cI")

T = TypeVar("T")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def fill(weights: list[torch.Tensor], step: int) -> None:
    """Makes every element tell its place and the step, exactly as long as both are below 2**23."""
    for weight in weights:
        torch.arange(step, step + len(weight), out=weight)


class Advance(torch.optim.Optimizer):
    """An optimizer whose step() fills the weights with the next step's content."""

    def __init__(self, weights: list[torch.Tensor], step: int) -> None:
        super().__init__(weights, {})
        self._weights = weights
        self._step = step

    def step(self, closure: Any = None) -> None:
        self._step += 1
        fill(self._weights, self._step)


def train(path: str, first: int, report: Callable[[bytes, int], None]) -> None:
    """Saves step after step to one path, without end, a save or two in flight at any time.

    After a save with the step fence only an optimizer may change the weights, and does; otherwise
    they are changed as soon as save() has returned.
    """
    weights = [torch.empty(size) for size in SIZES]
    optimizer = Advance(weights, first)
    fill(weights, first)
    previous: tuple[int, fastckpt.SaveHandle] | None = None
    for step in itertools.count(first):
        report(BEGUN, step)
        fence = FENCES[step % 2]
        handle = fastckpt.save(
            {"step": step, "weights": weights}, path, options=fastckpt.SaveOptions(fence=fence)
        )
        if previous is not None:
            previous[1].result()
            report(COMMITTED, previous[0])
        previous = step, handle
        if fence == "call":
            fill(weights, step + 1)
        optimizer.step()


def save_and_die(path: str, step: int, number: int, report: Callable[[bytes, int], None]) -> None:
    """Saves one step; dies at operation `number` unless there are fewer."""
    weights = [torch.empty(size) for size in SIZES]
    fill(weights, step)
    pipeline = Pipeline(Deadly(lambda done, _: done == number), BUDGET_BYTES)
    report(BEGUN, step)
    save_through(pipeline, {"step": step, "weights": weights}, path).result()
    report(COMMITTED, step)
    pipeline.close()


def child(order: dict[str, Any], pipe: int) -> None:
    def report(kind: bytes, step: int) -> None:
        os.write(pipe, REPORT.pack(kind, step))

    if order["number"] is None:
        train(order["path"], order["step"], report)
    else:
        save_and_die(order["path"], order["step"], order["number"], report)


def run_to_death(order: dict[str, Any]) -> dict[str, Any]:
    """Forks a child, kills it `after_s` after its first report; returns what it had reported."""
    pipe, pipe_of_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(order, pipe_of_child)
            status = 0
        finally:
            os._exit(status)
    os.close(pipe_of_child)
    reports, deadline = b"", None
    while True:
        left = WAIT_S if deadline is None else deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        arrived = os.read(pipe, 65536)
        if not arrived:
            break
        reports += arrived
        if deadline is None and order["after_s"] is not None:
            deadline = time.monotonic() + order["after_s"]
    # A child that has ended is a zombie until it is waited for: the number is still its own.
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    while arrived := os.read(pipe, 65536):
        reports += arrived
    os.close(pipe)
    last: dict[bytes, int | None] = {BEGUN: None, COMMITTED: None}
    for kind, step in REPORT.iter_unpack(reports):
        last[kind] = step
    code = os.waitstatus_to_exitcode(status)
    return {"begun": last[BEGUN], "committed": last[COMMITTED], "exit": code}


def nursery() -> None:
    """Reads orders from stdin, one JSON line each, and answers each with one on stdout."""
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    Advance([torch.zeros(1)], 0).step()  # the first use of an optimizer imports a lot
    for line in sys.stdin:
        print(json.dumps(run_to_death(json.loads(line))), flush=True)


class Nursery:
    """The nursery's process, seen from the test."""

    def __init__(self) -> None:
        self._process = Program("from tests.files.test_kill import nursery\nnursery()" + LEAVE)

    def run(
        self, path: Path, step: int, *, after_s: float | None = None, number: int | None = None
    ) -> dict[str, Any]:
        order = {"path": os.fspath(path), "step": step, "after_s": after_s, "number": number}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery ended"
        return json.loads(answer)

    def close(self) -> None:
        with self._process:
            self._process.communicate(timeout=WAIT_S)
            assert self._process.returncode == 0


@pytest.fixture(scope="module")
def started() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def step_found(path: Path) -> int | None:
    """The step under path, after comparing every element as fastckpt and as torch load it."""
    steps = set()
    for load in (fastckpt.load, torch.load):
        try:
            loaded = load(path)
        except FileNotFoundError:
            steps.add(None)
            continue
        step = loaded["step"]
        wanted = torch.arange(step, step + max(SIZES), dtype=torch.float32)
        assert [len(weight) for weight in loaded["weights"]] == list(SIZES)
        for number, weight in enumerate(loaded["weights"]):
            assert torch.equal(weight, wanted[: len(weight)]), f"weight {number} of step {step}"
        steps.add(step)
    (step,) = steps
    return step


def life_s(path: Path, started: Nursery) -> float:
    """How long a process that saves once lives here: on a slow disk kills have to come later."""
    times = []
    for step in range(3):
        begin = time.monotonic()
        assert started.run(path, step, number=NEVER)["committed"] == step
        times.append(time.monotonic() - begin)
    path.unlink()
    return statistics.median(times)  # one may have been lucky


def temporaries(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if name != "ckpt.pt"}


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    disk: Path, started: Nursery, storm: Storm
) -> None:
    path = disk / "ckpt.pt"
    latest_s = 2 * life_s(path, started)
    print(f"kills within {latest_s:.3f} s")
    found, debris, commits, with_debris, overlapped = None, set(), 0, 0, 0
    # Goes on until there was one of either, which is up to the clock.
    more = takewhile(lambda _: not (commits and with_debris), map(random.Random, itertools.count()))
    for kill, rng in enumerate(itertools.chain(storm.rounds(suite=10, torture=200), more)):
        after_s = rng.random() * latest_s
        what = f"kill {kill} after {after_s:.4f} s"
        first = 0 if found is None else found + 1
        run = started.run(path, first, after_s=after_s)
        assert run["exit"] == -signal.SIGKILL and run["begun"] is not None, (what, run)
        let_go(disk)
        before, found = found, step_found(path)
        if run["committed"] is not None:
            assert found is not None and found >= run["committed"], (what, run, found)
            commits += run["committed"] - first + 1
            assert not debris & temporaries(disk), f"{what}: debris outlived a save"
        if kill >= 5 and not commits:
            latest_s *= 1.5  # the disk has become slower since it was measured
        assert found == before or first <= found <= run["begun"], (what, run, found)
        debris = temporaries(disk)
        with_debris += bool(debris)
        overlapped += len(debris) > 1
    print(f"{commits} commits reported, {with_debris} kills left temporaries, {overlapped} several")
    fastckpt.save({"step": 0}, path).result(WAIT_S)
    assert os.listdir(disk) == [path.name]


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(
    disk: Path, started: Nursery, storm: Storm
) -> None:
    """As above, with the moment chosen by what the save was about to do instead of by the clock:
    at each operation in `make torture`; in `make test` about the commit, and at some others.
    """
    path = disk / "ckpt.pt"
    fastckpt.save({"step": 1, "weights": weights_of(1)}, path).result(WAIT_S)
    old = path.read_bytes()
    recorder = Recorder(by_engine=True)
    with process_on(recorder):
        fastckpt.save({"step": 2, "weights": weights_of(2)}, path).result(WAIT_S)
    (renamed,), count = recorder.numbers_of("rename"), len(recorder.log)
    assert count > 10, "a save has more operations"
    for number in sorted({*range(renamed - 1, count), *storm.some(range(count), 6)}):
        path.write_bytes(old)
        run = started.run(path, 2, number=number)
        assert run["exit"] == -signal.SIGKILL, run
        let_go(disk)
        found = step_found(path)
        assert found == 2 or (found == 1 and run["committed"] is None), (number, run, found)
        assert len(temporaries(disk)) <= 1, "the one before was not removed"
    run = started.run(path, 2, number=NEVER)
    assert run["exit"] == 0 and run["committed"] == 2 and step_found(path) == 2
    assert temporaries(disk) == set()


def weights_of(step: int) -> list[torch.Tensor]:
    weights = [torch.empty(size) for size in SIZES]
    fill(weights, step)
    return weights
