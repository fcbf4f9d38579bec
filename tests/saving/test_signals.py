"""Signal handlers that raise, as Ctrl-C's does, in the midst of save() and of every wait: the
caller gets the exception, no save hangs, no slot is lost, and nothing half copied is committed.
Must not know which locks there are.
"""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt.saving import pipeline
from tests.kit.programs import LOOKS, Interruption, Signalled, run_python

WAIT_S = 60.0
if sys.version_info < (3, 11):
    LOOKS += ("POP_JUMP",)


def result(handle: fastckpt.SaveHandle) -> None:
    handle.result(WAIT_S)


def futures_wait(handle: fastckpt.SaveHandle) -> None:
    concurrent.futures.wait([handle], WAIT_S)


def completed(handle: fastckpt.SaveHandle) -> None:
    assert next(concurrent.futures.as_completed([handle], WAIT_S)) is handle


def callback(handle: fastckpt.SaveHandle) -> None:
    handle.add_done_callback(lambda _: None)
    handle.wait_staged(WAIT_S)


def assert_nothing_is_held() -> None:
    current = pipeline.current()
    current.drain()
    assert current._slots.qsize() == pipeline.IN_FLIGHT_MAX, "a slot was lost"
    assert not current._in_flight


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("wait", [result, futures_wait, completed, callback])
def test_a_handler_that_raises_at_any_moment(
    disk: Path, fence: str, wait: Callable[[fastckpt.SaveHandle], None]
) -> None:
    state, path = {"w": torch.ones(1000)}, disk / "a.pt"
    fastckpt.save(state, path).result(WAIT_S)
    at = moments = 0
    while at <= moments:
        at += 1 if wait is result else 3  # others have moments of save() in common with it
        interruption = Interruption(at)
        try:
            with interruption:
                wait(
                    fastckpt.save(
                        state, path, options=fastckpt.SaveOptions(fence=fence, durable=False)
                    )
                )
        except (Signalled, RuntimeError):
            # The latter by a Condition of concurrent.futures' own that is left in a wrong state.
            pass
        moments = max(moments, interruption.moments)
    assert moments > 50, "nothing was interrupted"
    assert_nothing_is_held()
    for turn in range(pipeline.IN_FLIGHT_MAX + 1):
        fastckpt.save(
            {"turn": turn}, path, options=fastckpt.SaveOptions(fence=fence, durable=False)
        )
    assert fastckpt.load(path) == {"turn": pipeline.IN_FLIGHT_MAX}


# The program's exit handler runs after fastckpt's, so its saves run on the thread that calls them.
ON_THE_CALLERS_THREAD = """
import atexit, os, pathlib, signal, sys

def handler(*_):
    raise Signalled

def late():
    folder, count = sys.argv[1], int(sys.argv[2])
    path, state = folder + "/a.pt", {"w": torch.ones(3 << 20), "n": 0}
    files = tuple(map(str, pathlib.Path(fastckpt.__file__).parent.rglob("*.py")))
    watched = (*files, "contextlib.py", "threading.py")
    signal.signal(signal.SIGUSR1, handler)

    def save(at):
        interruption, raised = Interruption(at, watched=watched, by=signal.SIGUSR1), False
        state["n"] += 1
        try:
            with interruption:
                fastckpt.save(
                    state, path, options=fastckpt.SaveOptions(durable=False, on_error="warn")
                )
        except Signalled:
            raised = True
        assert signal.getsignal(signal.SIGUSR1) is handler
        return interruption.moments, raised

    save(0)
    moments, _ = save(0)
    descriptors, raised = len(os.listdir("/proc/self/fd")), 0
    for turn in range(count):
        raised += save(1 + moments * turn // count)[1]
        assert fastckpt.load(path)["n"] in (state["n"], state["n"] - 1)
        assert os.listdir(folder) == ["a.pt"], "a temporary stayed"
        fastckpt.save(state, path, options=fastckpt.SaveOptions(durable=False))
        assert len(os.listdir("/proc/self/fd")) == descriptors, "a file stayed open"
    print(moments, raised, state["n"])

atexit.register(late)
import logging
import torch, fastckpt
from tests.kit.programs import Interruption, Signalled
logging.getLogger("fastckpt").setLevel("CRITICAL")
fastckpt.save(torch.ones(9), sys.argv[1] + "/a.pt").result()
"""


@pytest.mark.timeout(600)
@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [16, pytest.param(3000, marks=pytest.mark.torture)])
def test_a_handler_that_raises_while_the_callers_thread_saves(disk: Path, count: int) -> None:
    ended = run_python(ON_THE_CALLERS_THREAD, disk, count, started=True, limit_s=600, returncode=1)
    moments, raised, number = map(int, ended.stdout.split())
    assert moments > 1000 and raised > count - 5, "handlers have raised in the midst of saves"
    assert fastckpt.load(disk / "a.pt")["n"] == number


STORM = """
import concurrent.futures, faulthandler, random, signal, sys, threading, time
import torch, fastckpt
from fastckpt.saving import pipeline

folder, signals, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
faulthandler.dump_traceback_later(60 + signals / 20, exit=True)
chosen, raised, armed = random.Random(seed), 0, False

class Signalled(Exception):
    pass

def handler(*_):
    global raised
    if raised < signals:
        pause_s = chosen.choice((1e-5, 1e-4, 1e-3, 1e-2, 5e-2)) * chosen.random()
        signal.setitimer(signal.ITIMER_REAL, pause_s + 1e-6)
        if armed:
            raised += 1
            raise Signalled

def turn(number):
    how = chosen.randrange(7)
    handle = fastckpt.save(
        state,
        f"{folder}/{number % 3}.pt",
        options=fastckpt.SaveOptions(fence=("call", "step")[number % 2], durable=False),
    )
    if how == 0:
        handle.result()
    elif how == 1:
        handle.wait_staged()
        handle.exception()
    elif how == 2:
        concurrent.futures.wait([handle])
    elif how == 3:
        next(concurrent.futures.as_completed([handle]))
    elif how == 4:
        handle.add_done_callback(lambda _: None)
    elif how == 5:
        fastckpt.load(handle.path)
    optimizer.step()

state = {"w": torch.ones(50_000), "n": 1}
weight = torch.nn.Parameter(torch.ones(10))
weight.grad = torch.ones(10)
optimizer = torch.optim.SGD([weight], lr=0.1)
turn(0)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1e-3)
number = done = 0
while raised < signals:
    try:
        while raised < signals:
            try:
                number += 1
                armed = True
                turn(number)
                done += 1
            except Exception:  # Signalled, or what torch and concurrent.futures make of it
                pass
            armed = False
    except Signalled:  # it came before the handler above was reached again
        pass
armed = False
for number in range(3 * pipeline.IN_FLIGHT_MAX):
    while True:
        try:
            handle = fastckpt.save(
                {"n": number},
                f"{folder}/after.pt",
                options=fastckpt.SaveOptions(fence="step", durable=False),
            )
            break
        except fastckpt.CheckpointError:  # of a save that was begun when the handler raised
            pass
optimizer.step()
handle.result(60)
pipeline.current().drain()
assert pipeline.current()._slots.qsize() == pipeline.IN_FLIGHT_MAX, "a slot was lost"
until = time.monotonic() + 30  # a thread whose work is done is there for another moment
while threading.active_count() > 1 and time.monotonic() < until:
    time.sleep(0.01)
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
print(raised, done)
"""


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.multiprocess
def test_storm_of_handlers_that_raise(disk: Path, pytestconfig: pytest.Config) -> None:
    signals, seed = 5000, pytestconfig.getoption("--seed")
    program = run_python(STORM, disk, signals, seed, limit_s=600)
    raised, done = map(int, program.stdout.split())
    assert raised == signals and done > 0
    assert fastckpt.load(disk / "after.pt") == {"n": 3 * pipeline.IN_FLIGHT_MAX - 1}
