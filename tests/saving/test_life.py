"""The life of a save: what each event that may end it does in each state is what the table in
docs/project/design.md says, on the rank that it happens to and on the other one. Must not know how.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastckpt
from fastckpt import CheckpointError, StorageError
from fastckpt.engine import transfer
from fastckpt.saving import life as life_module
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.life import State
from fastckpt.saving.pipeline import Job
from tests.kit.lives import STATES, WAIT_S, Life
from tests.kit.paths import ROOT
from tests.kit.programs import run_python
from tests.kit.saves import interrupted_in


def table_of_the_document() -> dict[str, dict[str, str]]:
    """The table, as event -> state -> outcome."""
    text = (ROOT / "docs" / "project" / "design.md").read_text()
    _, _, section = text.partition("## The life of a save")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


TABLE = table_of_the_document()


def error_here(life: Life) -> None:
    life.begin()
    life.release(**{STATES[life.state][1]: errno.EIO})


def time_out_here(life: Life) -> None:
    life.begin()
    life.release(**{STATES[life.state][1]: errno.ETIMEDOUT})


def error_after_the_rename(life: Life) -> None:
    life.begin()
    life.release(sync_directory=errno.EIO)


def error_of_another_rank(life: Life) -> None:
    if life.state == "publishing":
        life.begin()
        life.second.rounds[0].fail(StorageError("write", "", errno.EIO))
    elif life.state == "agreeing":
        error_here(life)
    else:
        life.second.storage.release(**{STATES[life.state][1]: errno.EIO})
        life.begin()
        assert life.second.handle.exception(WAIT_S) is not None
    life.release()


def refusal(life: Life) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("the loss is nan")

    life.begin(before_commit=refuse)
    life.release()
    error = life.first.handle.exception(WAIT_S)
    assert error is not None and type(error.__cause__) is ValueError


def change(life: Life) -> None:
    life.begin()
    life.first.state["w"].fill_(7.0)
    life.release()


def cancellation(life: Life) -> None:
    life.begin()
    assert life.first.handle.cancel() and "cancel() was called" in repr(life.first.handle)
    life.release()
    assert (life.first.handle.exception(WAIT_S) is not None) == life.first.handle.cancel()


def cancellation_of_another_rank(life: Life) -> None:
    life.begin()
    assert life.second.handle.cancel()
    if life.state in ("staging", "writing"):  # else the first may decide before it is heard
        assert life.second.handle.exception(WAIT_S) is not None
    life.release()


def silence_of_another_rank(life: Life) -> None:
    how: dict[str, Any] = {"timeout_s": 0.5}
    if life.state == "staging":  # it has yet to say where the file is, which memory does not hold
        life.second.save(life.path, **how)
        (job,) = life.second.pipeline._in_flight.values()
        assert life.second.handle.exception(WAIT_S) is not None
        assert job.life._reached is State.STAGING
        life.release()
        life.first.save(life.path, **how)
    elif life.state == "writing":  # it has not begun
        life.first.save(life.path, **how)
        assert life.first.handle.exception(WAIT_S) is not None
        life.second.save(life.path, **how)
    elif life.state == "agreeing":  # it is in a function of its caller's, which has no bound
        over = threading.Event()
        life.release()
        life.first.save(life.path, **how)
        life.second.save(life.path, before_commit=lambda *_: over.wait(WAIT_S), **how)
        assert life.first.handle.exception(WAIT_S) is not None
        over.set()
    else:  # it has lost its connection

        def lost(*_: object) -> None:
            life.second.coordinator.call = call  # type: ignore[method-assign]
            raise ConnectionError("injected")

        life.begin()
        call = life.second.coordinator.call
        life.second.coordinator.call = lost  # type: ignore[method-assign]
        assert life.second.handle.exception(WAIT_S) is not None
        life.release()


def call_that_hangs(life: Life) -> None:
    life.begin(timeout_s=0.6)
    assert None not in life.outcomes()
    life.release()


def interrupt_in_save(life: Life) -> None:
    begin = life.first.pipeline.save

    def pass_fence() -> None:
        life.arrive()
        raise KeyboardInterrupt

    def save(job: Job) -> InnerHandle:
        life.first.handle = job.handle  # which an interrupted save() does not return
        if life.state != "staging":
            job.handle.pass_fence = pass_fence  # type: ignore[method-assign]
        return begin(job)

    life.first.pipeline.save = save  # type: ignore[method-assign]
    life.second.save(life.path)
    staging = life.state == "staging"
    with interrupted_in("pass_fence") if staging else pytest.raises(KeyboardInterrupt):
        life.first.save(life.path, fence="call")
    life.release()


def interrupt_in_a_wait(life: Life) -> None:
    life.begin()
    with interrupted_in("result"):
        life.first.handle.result(WAIT_S)
    assert not life.first.handle.done() and "continues: " in life.log.text
    life.release()


def second_interrupt(life: Life) -> None:
    life.begin()
    life.first.handle.give_up()
    life.release()


def second_interrupt_in_a_call(life: Life) -> None:
    life.begin()
    life.first.handle.give_up()
    assert life.first.handle.exception(WAIT_S) is not None
    life.release()


def second_interrupt_in_before_commit(life: Life) -> None:
    asked, over = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        asked.set()
        assert over.wait(2 * WAIT_S)

    life.begin(before_commit=hang)
    life.release()
    assert asked.wait(WAIT_S)
    life.first.handle.give_up()
    assert life.first.handle.exception(WAIT_S) is not None
    over.set()


def fork(life: Life) -> None:
    """The child is refused the result of its parent's save."""
    life.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            life.first.handle.result(WAIT_S)
        except CheckpointError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    life.release()


EXIT = """
import pathlib, sys, threading
from fastckpt.saving import pipeline
from fastckpt.saving import life as life_module
from tests.kit.lives import Life
from tests.kit.saves import stands_in, wait_until

life = Life(pathlib.Path(sys.argv[1]), sys.argv[2])
life.begin()
pipeline._current = life.first.pipeline
main = threading.main_thread()

def release():
    wait_until(lambda: stands_in(main, "wait_at_exit"), "the process waits for its save")
    life.release()

threading.Thread(target=release).start()
"""

EVENTS: dict[str, list[Callable[[Life], None]]] = {
    "an error here": [error_here],
    "an error ETIMEDOUT here": [time_out_here],
    "an error after the rename": [error_after_the_rename],
    "an error of another rank": [error_of_another_rank],
    "`before_commit` raises": [refusal],
    "a tensor changes (`step` fence)": [change],
    "`cancel()` on any rank": [cancellation, cancellation_of_another_rank],
    "another rank is silent": [silence_of_another_rank],
    "a call hangs": [call_that_hangs],
    "Ctrl-C in `save()`": [interrupt_in_save],
    "Ctrl-C in a wait": [interrupt_in_a_wait],
    "a second Ctrl-C": [second_interrupt],
    "a second Ctrl-C, and a call hangs": [second_interrupt_in_a_call],
    "a second Ctrl-C, and `before_commit` hangs": [second_interrupt_in_before_commit],
    "the process forks": [fork],
}
CASES = [
    (event, state, happens)
    for event, each in EVENTS.items()
    for state in STATES
    for happens in each
    if TABLE[event][state] != "-"
]


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """What became of the checkpoint, and the kind of the error, as the table calls them."""
    if error is None:
        return "committed", ""
    assert isinstance(error, CheckpointError), error
    fate = "in doubt" if error.in_doubt else "visible" if error.visible else "failed"
    return fate, type(error).__name__


@pytest.fixture
def living(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[str], Life]]:
    # The writes that are stopped are not waited for.
    monkeypatch.setattr(transfer, "PARTING_S", 0.1)
    lives = []

    def live(state: str) -> Life:
        lives.append(Life(memory / "a.pt", state))
        lives[-1].log = caplog
        return lives[-1]

    yield live
    for life in lives:
        life.close()


@pytest.mark.parametrize(
    ("event", "state", "happens"), CASES, ids=[f"{e}-{s}-{h.__name__}" for e, s, h in CASES]
)
def test_each_event_in_each_state(
    living: Callable[[str], Life],
    event: str,
    state: str,
    happens: Callable[[Life], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if event.endswith(" hangs"):
        monkeypatch.setattr(life_module, "GIVEN_UP_S", 2.0)
    fate, _, kind = TABLE[event][state].partition(": ")
    life = living(state)
    happens(life)
    here, there = map(outcome_of, life.outcomes())
    assert here == (fate, kind)
    if (event, state) == ("another rank is silent", "publishing"):
        assert there == ("in doubt", "PeerFailed"), "it has not heard"
    else:
        assert there[0] == fate
        assert "PeerFailed" in (here[1], there[1]) or here == there
    life.close()
    found = set(fastckpt.load(life.path)["w"].tolist())
    assert found == ({1.0} if fate == "failed" else {2.0})
    assert os.listdir(life.path.parent) == ["a.pt"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("state", STATES)
def test_a_process_that_exits_waits(memory: Path, state: str) -> None:
    assert TABLE["the process exits"][state] == "committed"
    assert run_python(EXIT, memory / "a.pt", state, frees=True).stderr == ""
    assert set(fastckpt.load(memory / "a.pt")["w"].tolist()) == {2.0}


def test_the_document_names_all_events_and_states() -> None:
    assert {*TABLE} == {*EVENTS, "the process exits"}
    assert all([*states] == [*STATES] for states in TABLE.values())
