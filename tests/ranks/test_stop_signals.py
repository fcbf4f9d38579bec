"""StopSignals with real signals in real processes: every rank stops at the same
call, and everything else about signals is as it would be without them.

How ranks agree, in any order of their threads, is tests/ranks/test_stop.py's business.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastckpt import StopSignals
from fastckpt.errors import CheckpointError
from fastckpt.ranks import stop_signals
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.signal_handlers import checked_signals
from fastckpt.ranks.stop_signals import StopAgreement
from tests.crews import stop_bodies as bodies
from tests.crews.group_crew import Crew
from tests.kit.interpreters import Program, run

RANKS_IMPORT = "tests.crews.stop_bodies"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_ranks_of_different_paces_stop_at_the_same_call(
    crew: Callable[[int], Crew], disk: Path, sender: int, receiver: int
) -> None:
    """The signal comes to one rank only."""
    told = crew(2)(bodies.loop_until_stopped, str(disk / "run"), sender, receiver)
    assert told[0] == told[1]
    steps, committed = told[0]
    assert 20 < steps < bodies.CALLS_MAX and committed == steps


TRAINING = """
import itertools, sys
import torch, fastckpt

state = {"step": torch.zeros(1)}
with fastckpt.StopSignals() as signals, fastckpt.Checkpointer(sys.argv[1]) as checkpointer:
    first = checkpointer.restore(state) or 0
    for step in itertools.count(first):
        state["step"] += 1
        stop = signals.requested()
        if step == first + 5:
            print("trains", flush=True)
        if stop:
            checkpointer.save(step + 1, state)
            break
print(first, int(state["step"]))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_told_to_stop_saves_and_goes_on_later(disk: Path, number: int) -> None:
    reached = 0
    for _ in range(2):
        with Program(TRAINING, disk / "run") as program:
            assert program.stdout.readline() == "trains\n"
            program.send_signal(number)
            stdout, stderr = program.communicate(timeout=60)
            assert program.returncode == 0, stderr
        first, last = map(int, stdout.split())
        assert first == reached < last
        reached = last


MANNERS = """
import os, signal, sys, threading, time
import fastckpt

heard = []
def own(number, _frame):
    heard.append(number)

def made(*names):
    return fastckpt.StopSignals(None, names)

# A handler that was there before is called, too, and put back.
signal.signal(signal.SIGUSR1, own)
signals = made("SIGUSR1", signal.SIGTERM)
assert not signals.requested()
signal.raise_signal(signal.SIGUSR1)
assert heard == [signal.SIGUSR1]
assert signals.requested() and signals.requested()
signal.raise_signal(signal.SIGTERM)
signals.close()
assert signal.getsignal(signal.SIGUSR1) is own
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
until = time.monotonic() + 30  # a thread whose work is done is there for another moment
while threading.active_count() > 1 and time.monotonic() < until:
    time.sleep(0.01)
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
try:
    signals.requested()
except ValueError as error:
    assert "closed" in str(error)
else:
    raise AssertionError

# Handlers that were installed later stay, and their own call of ours does no harm.
one = made("SIGUSR1")
two = made("SIGUSR1")
one.close()
signal.raise_signal(signal.SIGUSR1)
assert heard == [signal.SIGUSR1] * 2 and two.requested()
two.close()
signal.raise_signal(signal.SIGUSR1)
assert heard == [signal.SIGUSR1] * 3

# One that is closed first passes nothing on that the later one is told of.
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
older, newer = made("SIGUSR1"), made("SIGUSR1")
older.close()
signal.raise_signal(signal.SIGUSR1)
assert newer.requested()
newer.close()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

# A worker that was forked ends by SIGTERM, as ever, and by nothing else.
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
three = made("SIGUSR1", "SIGTERM")
said, says = os.pipe()
worker = os.fork()
if worker == 0:
    signal.raise_signal(signal.SIGUSR1)
    os.write(says, b"lives")
    signal.raise_signal(signal.SIGTERM)
    os._exit(7)
assert os.read(said, 5) == b"lives"
assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
assert not three.requested()

# A handler that somebody else put in front stays; the default action counts again behind it.
behind = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: behind(number, frame))
three.close()
print("ends", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.multiprocess
def test_signals_are_as_without_them() -> None:
    ended = run(MANNERS)
    assert ended.stdout == "ends\n", ended.stderr
    assert ended.returncode == -signal.SIGTERM


UNCLOSED = """
import fastckpt
signals = fastckpt.StopSignals(None, ("SIGTERM",))
assert not signals.requested()
"""


@pytest.mark.multiprocess
def test_a_process_ends_without_close() -> None:
    assert run(UNCLOSED, frees=True).returncode == 0


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("SIGTERM", TypeError, "must be a tuple of names of signals, such as"),
        (15, TypeError, "must be a tuple of names of signals, such as"),
        (("SIGTERN",), ValueError, "signals has 'SIGTERN', must have names of signals"),
        ((4711,), ValueError, "signals has 4711"),
        ((True,), ValueError, "signals has True, must have names of signals"),
        ((None,), ValueError, "signals has None"),
        (("SIGKILL",), ValueError, "SIGKILL, which no process can handle"),
        (("STOP",), ValueError, "SIGSTOP, which no process can handle"),
        ((signal.SIGSEGV,), ValueError, "SIGSEGV, which reports a fault"),
        ((int(signal.SIGFPE),), ValueError, "SIGFPE, which reports a fault"),
        (("SIGBUS",), ValueError, "SIGBUS, which reports a fault"),
        (("ILL",), ValueError, "SIGILL, which reports a fault"),
        (("SIGCHLD",), ValueError, "SIGCHLD, which reports the end of a child process"),
    ],
)
def test_wrong_signals(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        StopSignals(None, given)  # type: ignore[arg-type]


def test_what_is_open_is_closed_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = told_of_closing(monkeypatch)
    monkeypatch.setattr(stop_signals, "start_thread", lambda *_: False)
    with pytest.raises(CheckpointError, match="cannot start the thread"):
        StopSignals(None, ("SIGUSR1",))
    assert closed == [Coordinator]


def test_what_is_open_is_closed_where_a_handler_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, before, install = told_of_closing(monkeypatch), signal.getsignal(2), signal.signal

    def refuse(number: int, handler: Any) -> Any:
        if number == signal.SIGUSR2:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return install(number, handler)

    monkeypatch.setattr(signal, "signal", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        StopSignals(None, ("SIGINT", "SIGUSR2"))
    assert closed == [StopAgreement, Coordinator] and signal.getsignal(2) == before


def told_of_closing(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Returns a list that gets the kind of what is closed."""
    closed: list[type] = []
    for kind in (Coordinator, StopAgreement):

        def close(self: Any, kind: Any = kind, real: Any = kind.close, **how: str) -> None:
            closed.append(kind)
            real(self, **how)

        monkeypatch.setattr(kind, "close", close)
    return closed


def test_signals_by_their_names_and_numbers() -> None:
    given = ["USR1", "SIGUSR1", signal.SIGUSR1, int(signal.SIGTERM), "TERM", "HUP"]
    assert checked_signals(given) == (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)


def test_a_rank_may_handle_none() -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with StopSignals(None, ()) as signals:
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        assert not signals.requested()


def test_another_thread_is_told_of_the_main_one() -> None:
    said = []

    def make() -> None:
        try:
            StopSignals(None, ("SIGUSR1",))
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=make, name="trainer")
    thread.start()
    thread.join()
    assert "SIGUSR1 can be handled only on the main thread" in said[0] and "'trainer'" in said[0]
    assert "fastckpt-stop" not in [each.name for each in threading.enumerate()]
