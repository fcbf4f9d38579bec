"""Ctrl-C in a terminal while a save is in flight: the first says at once what is awaited, a second
gives it up, and whenever and however often it is pressed, the process ends by it, and the
checkpoint before is whole. Must not know where the process waits.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer
from fastckpt.saving import ctrl_c
from fastckpt.saving.handle import InnerHandle
from tests.kit import interpreters
from tests.kit.programs import Interruption, run_python
from tests.kit.storm import Storm

LIMIT_S = 60.0
CTRL_C = b"\x03"
STAYS = "committed checkpoints stay"
# Python drops an interrupt that comes in a callback of its own, such as that of an import's lock.
DROPPED = re.compile("Exception ignored in.*?KeyboardInterrupt", re.DOTALL)
pytestmark = pytest.mark.multiprocess

# The session that the program leads gets the terminal, as a shell's child has it.
IN_TERMINAL = """
import faulthandler, fcntl, os, signal, sys, termios, threading
fcntl.ioctl(INHERITED[0], termios.TIOCSCTTY, 0)
for fd in range(3):
    os.dup2(INHERITED[0], fd)
faulthandler.register(signal.SIGUSR1)
import torch, fastckpt

def train(handle=None):
    while handle is not None and not handle.progress().written:
        threading.Event().wait(0.01)
    print("NOW", flush=True)
    while True:  # Python loses a signal that comes just before it begins to wait, until that ends
        threading.Event().wait(0.05)

folder, argument = sys.argv[1:]
path, root = folder + "/a.pt", folder + "/run"
state = {"w": torch.full((2 << 20,), 2.0)}
"""


class Terminal:
    """A program in a terminal of its own, and the person who sits there."""

    def __init__(self, program: str, folder: Path, argument: str = "") -> None:
        self._master, slave = pty.openpty()
        text = IN_TERMINAL + program
        self._program = interpreters.Program(text, folder, argument, fds=(slave,))
        os.close(slave)
        self.shown = ""
        self._dropped = 0
        self._pressed_s: float | None = None
        self.answer_s: float | None = None  # from the first Ctrl-C until it was answered

    def press(self, keys: bytes = CTRL_C) -> None:
        """Presses keys; nobody may be there any more who reads them."""
        self._pressed_s = self._pressed_s or time.monotonic()
        os.write(self._master, keys)

    def read(self, timeout_s: float = LIMIT_S) -> bool:
        """Reads what comes next; returns False if nothing came, or the program has ended."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            said = os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody has the terminal any more
            return False
        self.shown += said.decode(errors="replace").replace("\r\n", "\n")
        if self.answer_s is None and self._pressed_s is not None and STAYS in self.shown:
            self.answer_s = time.monotonic() - self._pressed_s
        if len(DROPPED.findall(self.shown)) > self._dropped:
            self._dropped += 1
            self.press()  # again, as anybody would
        return bool(said)

    def until(self, words: str) -> None:
        """Waits until these words are shown."""
        while words not in self.shown:
            assert self.read(), f"{words!r} was not shown: {self.shown}"

    def status(self) -> int:
        """Returns the exit status, as subprocess has it, when the program has ended."""
        while self.read():
            pass
        try:
            return self._program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._program.send_signal(signal.SIGUSR1)  # it says where its threads are
            while self.read(5.0):
                pass
            raise AssertionError(f"the process does not end: {self.shown}") from None

    def close(self) -> None:
        self._program.__exit__()
        os.close(self._master)


@contextmanager
def terminal(program: str, folder: Path, argument: str = "") -> Iterator[Terminal]:
    opened = Terminal(program, folder, argument)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def folder(disk: Path) -> Path:
    """Holds a file and a step: the checkpoints before."""
    fastckpt.save({"w": torch.ones(9)}, disk / "a.pt").result(LIMIT_S)
    with Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(9)})
    return disk


def newest(folder: Path) -> tuple[int, int]:
    """Returns the numbers that the file and the newest step are full of; both are whole."""
    with Checkpointer(folder / "run") as checkpointer:
        found = [fastckpt.load(folder / "a.pt")["w"], checkpointer.load()["w"]]
    assert all(bool((each.int() == each.int()[0]).all()) for each in found)
    return found[0][0].int().item(), found[1][0].int().item()


IN_BLOCK = """
with fastckpt.Checkpointer(root, drain_rate=1e5) as checkpointer:
    train(checkpointer.save(2, state))
"""
IN_LOOP = """
train(fastckpt.save(state, path, drain_rate=1e5))
"""
AT_THE_END = """
from fastckpt.saving.pipeline import Pipeline
drain = Pipeline.drain

def shown_drain(*args):
    os.write(1, b"WAITS")
    return drain(*args)

Pipeline.drain = shown_drain
fastckpt.save(state, path, drain_rate=1e5)
try:
    train()
except KeyboardInterrupt:  # as programs do that end in their own way
    sys.exit(3)
"""
ON_THE_NODE = """
with fastckpt.Checkpointer(root, local=argument, drain_rate=1e5) as checkpointer:
    checkpointer.save(2, state).wait_local()
    train()
"""


@pytest.mark.parametrize(
    ("program", "target"),
    [(IN_BLOCK, "run/step-00000002"), (IN_LOOP, "a.pt")],
    ids=["with", "loop"],
)
@pytest.mark.parametrize("more", [1, 4])
def test_the_first_says_what_is_awaited_and_the_second_gives_it_up(
    folder: Path, program: str, target: str, more: int
) -> None:
    with terminal(program, folder) as person:
        person.until("NOW")
        person.press()
        person.until(STAYS)
        person.press(CTRL_C * more)
        assert person.status() == -signal.SIGINT, person.shown
    (line,) = [line for line in person.shown.splitlines() if "waiting for" in line]
    assert f"waiting for the save to '{folder / target}': " in line
    assert re.search(r" (KiB|MiB|B) of 8\.\d+ MiB are written \(\d+ %\)", line)
    assert "Press Ctrl-C again to abandon it" in line
    # A later one may come when nothing is awaited any more, and then ends what Python does there.
    assert person.shown.count("Traceback") == 1 or more > 1
    assert "terminate" not in person.shown
    assert newest(folder) == (1, 1)
    assert sorted(os.listdir(folder)) == ["a.pt", "run"]
    assert sorted(os.listdir(folder / "run")) == ["step-00000001"]


# Of two blocks, the second has to wait for memory until the first is written.
IN_SAVE = """
from fastckpt.saving import pipeline

def watch():
    while not any(handle.progress().written for handle in pipeline.current().in_flight()):
        threading.Event().wait(0.01)
    print("NOW", flush=True)

threading.Thread(target=watch).start()
how = {"drain_rate": 2e4, "options": fastckpt.SaveOptions(staging_bytes=8 << 20)}
if argument == "with":
    with fastckpt.Checkpointer(root, **how) as checkpointer:
        checkpointer.save(2, {"w": torch.full((4 << 20,), 2.0)})
else:
    fastckpt.save({"w": torch.full((4 << 20,), 2.0)}, path, **how)
"""


@pytest.mark.parametrize("way", ["with", "loop"])
def test_one_in_the_midst_of_save_says_that_nothing_is_committed(folder: Path, way: str) -> None:
    """And the process ends at once, since it need not wait for what cannot be committed."""
    with terminal(IN_SAVE, folder, way) as person:
        person.until("NOW")
        person.press()
        person.until(STAYS)
        assert person.status() == -signal.SIGINT, person.shown
    (line,) = [line for line in person.shown.splitlines() if STAYS in line]
    target = folder / ("run/step-00000002" if way == "with" else "a.pt")
    told = "was interrupted before everything was copied: it is not committed"
    assert f"the save to '{target}' {told}" in line
    assert newest(folder) == (1, 1)


HELD = """
from tests.kit.saves import HeldTensor
held = HeldTensor(value=2.0)

def release():
    os.read(0, 1)
    held.release()

threading.Thread(target=release).start()
if argument == "with":
    with fastckpt.Checkpointer(root, options=fastckpt.SaveOptions(fence="step")) as checkpointer:
        checkpointer.save(2, {"w": held.tensor})
        train()
else:
    fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
    train()
"""


@pytest.mark.parametrize("way", ["with", "loop"])
def test_after_one_the_save_commits(folder: Path, way: str) -> None:
    with terminal(HELD, folder, way) as person:
        person.until("NOW")
        person.press()
        person.until(STAYS)
        person.press(b"\n")
        assert person.status() == -signal.SIGINT, person.shown
    assert newest(folder) == ((1, 2) if way == "with" else (2, 1))


def test_a_program_that_ends_in_its_own_way_is_told_by_the_next(folder: Path) -> None:
    with terminal(AT_THE_END, folder) as person:
        person.until("NOW")
        person.press()
        person.until("^CWAITS")
        assert STAYS not in person.shown
        person.press()
        person.until(STAYS)
        person.press()
        assert person.status() == 3, person.shown
    assert newest(folder)[0] == 1


def test_the_way_to_the_root_is_given_up_and_the_step_stays_on_the_node(
    folder: Path, memory: Path
) -> None:
    if os.stat(folder).st_dev == os.stat(memory).st_dev:
        pytest.skip("there is only one file system here")
    with terminal(ON_THE_NODE, folder, str(memory)) as person:
        person.until("NOW")
        person.press()
        person.until("it is committed on the nodes and is being copied to the root. Press Ctrl-C")
        person.press()
        assert person.status() == -signal.SIGINT, person.shown
    with Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.steps() == [1]
    with Checkpointer(folder / "run", local=memory) as checkpointer:
        assert bool((checkpointer.load()["w"] == 2).all())


LOGS = """
import logging

class Handler(logging.StreamHandler):
    presses = 1

    def acquire(self):
        super().acquire()
        if self.presses:
            self.presses = 0
            os.kill(os.getpid(), signal.SIGINT)

logging.getLogger().addHandler(Handler())
with fastckpt.Checkpointer(root, drain_rate=1e5) as checkpointer:
    checkpointer.save(2, state)
    train()
"""


def test_the_second_may_come_while_the_line_about_the_first_is_logged(folder: Path) -> None:
    with terminal(LOGS, folder) as person:
        person.until("NOW")
        person.press()
        assert person.status() == -signal.SIGINT, person.shown
    assert STAYS in person.shown
    assert newest(folder) == (1, 1)


HANGS = """
from fastckpt.saving import life, pipeline
from fastckpt.storage import calls
life.GIVEN_UP_S = 0.5

def hang(*_):
    threading.Event().wait()

if argument == "in a call":
    Storage = type(pipeline.current().storage)
    Storage.sync = calls.as_call("sync", hang)
fastckpt.save(state, path, before_commit=hang)
train()
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [("in a call", "sync of "), ("elsewhere", "was abandoned, but did not end within 0.5 s")],
)
def test_a_save_that_hangs_does_not_keep_the_process(folder: Path, where: str, said: str) -> None:
    with terminal(HANGS, folder, where) as person:
        person.until("NOW")
        person.press()
        person.until("Press Ctrl-C again")
        person.press()
        assert person.status() == -signal.SIGINT, person.shown
    assert said in person.shown.partition("FAILED and was not committed: ")[2]
    assert newest(folder)[0] == 1
    fastckpt.save({"w": torch.ones(9)}, folder / "a.pt").result(LIMIT_S)  # removes what is left


def test_one_more_at_any_moment_does_nothing() -> None:
    """Also if it comes as another one is being caught."""
    second: list[int] = []
    third: list[int] = []

    def press(_: object) -> None:
        if not handle.is_given_up():
            second.append(at)
            raise KeyboardInterrupt
        if at not in third:
            third.append(at)
            raise KeyboardInterrupt
        if not handle.done():
            handle.set_exception(fastckpt.SaveCancelled(handle.path))

    at = moments = 0
    while at <= moments:
        at += 1
        handle, interruption = (
            InnerHandle("a", 0.0),
            Interruption(at, KeyboardInterrupt, "ctrl_c.py"),
        )
        try:
            with interruption:
                assert ctrl_c.wait_or_give_up([handle], pressed=True, wait=press)
            assert handle.is_given_up()
        except KeyboardInterrupt:  # it came before the wait, or when nothing was awaited any more
            assert at not in second or handle.done()
        moments = max(moments, interruption.moments)
    assert len(second) > 10


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_after_the_end_of_a_save_does_not_end_the_wait_at_exit(presses: int) -> None:
    handle = InnerHandle("a", 0.0)
    handle.set_exception(fastckpt.SaveCancelled(handle.path))
    left = presses

    def drain(_still_s: float, handles: Sequence[InnerHandle]) -> list[InnerHandle]:
        """Work that follows the end of the save, such as retention."""
        nonlocal left
        left -= len(handles)
        if handles and left >= 0:
            raise KeyboardInterrupt
        return []

    ctrl_c.wait_at_exit([handle], drain, 10.0)
    assert left < 0


DAEMON = """
import threading
from fastckpt import _engine
begun, content = threading.Event(), bytes(64 << 20)

def run():
    while True:
        begun.set()
        _engine.crc32(content)

threading.Thread(target=run, daemon=True).start()
begun.wait()
"""


def test_a_thread_in_the_engine_does_not_abort_an_interpreter_that_ends() -> None:
    run_python(DAEMON, frees=True)


# ---- at any moment, any number of times

MOMENTS = {
    "as save() begins": """
print("NOW", flush=True)
fastckpt.save(state, path, drain_rate=rate)
train()""",
    "in a loop": """
fastckpt.save(state, path, drain_rate=rate)
train()""",
    "in a block": """
with fastckpt.Checkpointer(root, drain_rate=rate) as checkpointer:
    checkpointer.save(2, state)
    train()""",
    "with two in flight": """
with fastckpt.Checkpointer(root, drain_rate=rate, keep_last=1) as checkpointer:
    checkpointer.save(2, state)
    checkpointer.save(3, state)
    train()""",
    "in result()": """
handle = fastckpt.save(state, path, drain_rate=rate)
print("NOW", flush=True)
handle.result()""",
    "in result() in a block": """
with fastckpt.Checkpointer(root, drain_rate=rate) as checkpointer:
    handle = checkpointer.save(2, state)
    print("NOW", flush=True)
    handle.result()""",
    "in close()": """
checkpointer = fastckpt.Checkpointer(root, drain_rate=rate)
checkpointer.save(2, state)
print("NOW", flush=True)
checkpointer.close()""",
    "at a fence": """
weight = torch.nn.Parameter(torch.ones(9))
weight.grad = torch.ones(9)
with fastckpt.Checkpointer(
    root, drain_rate=rate, options=fastckpt.SaveOptions(fence="step")
) as checkpointer:
    checkpointer.save(2, state)
    print("NOW", flush=True)
    torch.optim.SGD([weight]).step()
    train()""",
    "in a restore": """
with fastckpt.Checkpointer(root, drain_rate=rate) as checkpointer:
    checkpointer.save(2, state)
    print("NOW", flush=True)
    checkpointer.restore(state)
    train()""",
    "at exit": """
fastckpt.save(state, path, drain_rate=rate)
print("NOW", flush=True)""",
    "in an exit handler": """
import atexit
atexit.register(lambda: (print("NOW", flush=True), fastckpt.save(state, path, drain_rate=rate)))""",
    "with a codec": """
with fastckpt.Checkpointer(root, drain_rate=rate, codec="zstd") as checkpointer:
    checkpointer.save(2, {"w": 2 + torch.rand(2 << 20) / 2})  # 2 + 0.9999999 would round to 3
    train()""",
    "as it commits": """
with fastckpt.Checkpointer(root, options=fastckpt.SaveOptions(durable=False)) as checkpointer:
    print("NOW", flush=True)
    for step in range(2, 1000):
        checkpointer.save(step, {"w": torch.full((9,), 2.0)}).result()""",
}
FAILED = ("terminate called", "Fatal Python error", "core dumped")
PRESSED_AT_EXIT = """
import atexit, sys
atexit.register(lambda: print("abandoned:", pipeline.current().staging._abandoned))
import torch, fastckpt
from fastckpt.saving import pipeline

def press(*_):
    raise KeyboardInterrupt

pipeline.wait_at_exit = press
handle = fastckpt.save({"w": torch.ones(10 << 20)}, sys.argv[1], drain_rate=8e6)
while not handle.progress().written:  # before and after, it may be in calls of torch's store
    handle.wait_done(0.01)"""


def test_a_press_at_every_wait_as_the_process_ends(folder: Path) -> None:
    """Its threads are left to the kernel: their destructors would end the process by SIGABRT."""
    ended = run_python(PRESSED_AT_EXIT, folder / "a.pt", started=True)
    assert "abandoned: True" in ended.stdout, ended
    next_save(folder / "a.pt")
    assert not list(folder.glob(".a.pt.*"))


def next_save(path: Path) -> None:
    """Removes what a process has abandoned at its end, once the kernel has let go of its ring."""
    interpreters.let_go(path.parent)
    fastckpt.save(0, path).result(LIMIT_S)


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_any_number_at_any_moment(folder: Path, moment: str, storm: Storm) -> None:
    answers = []
    for chance in storm.rounds(5, 20):
        rate, presses = chance.choice((2e6, 8e6, 40e6)), chance.randint(1, 5)
        with terminal(f"rate = {rate}\n{MOMENTS[moment]}", folder) as person:
            person.until("NOW")
            until = time.monotonic() + chance.choice((0.0, 0.01, 0.1, 0.5)) * chance.random()
            for _ in range(presses):
                while (left_s := until - time.monotonic()) > 0:
                    person.read(left_s)
                person.press()
                until = time.monotonic() + chance.choice((0.0, 0.001, 0.05, 1.0)) * chance.random()
            status = person.status()
        assert status in (0, 1, -signal.SIGINT), f"{status}: {person.shown}"
        assert not any(words in person.shown for words in FAILED), person.shown
        assert set(newest(folder)) <= {1, 2}
        answers += [] if person.answer_s is None else [person.answer_s]
    print(f"{moment}: {len(answers)} answers, the slowest after {max(answers, default=0):.3f} s")
    next_save(folder / "a.pt")
