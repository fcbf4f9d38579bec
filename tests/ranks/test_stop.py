"""The agreement on the call at which all ranks stop: equal on every rank, in whatever order their
threads run, over every kind of store; and an error, never two answers, where ranks cannot agree.

Ranks are threads here, and run in an order that chance decides, one bytecode of their module at a
time.
Must not know signals: those are tests/ranks/test_stop_signals.py's business.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt.errors import PeerFailed
from fastckpt.ranks import stop_signals as module
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.ranks.stop_signals import StopAgreement
from tests.kit.coordinators import STORES
from tests.kit.storm import Chance, Storm

LONG_S = 600.0
CALLS_MAX = 20  # of each rank, which then ends
HELD_TURNS = 400  # enough for the other threads to get as far as they can


class Turns:
    """Lets one thread run at a time, and decides by chance which, before each bytecode of a module.

    Args:
        chance: decides.
        file_name: of the module.
        held: the number of a thread, in the order of their starts, and the function before whose
            n-th bytecode it has to let the others go on for a long time, and n.
    """

    def __init__(
        self, chance: random.Random, file_name: str, held: tuple[int, str, int] | None = None
    ) -> None:
        self._chance = chance
        self._file_name = file_name
        self._held, self._hold_in, self._hold_at = held or (-1, "", 0)
        self._hold_for = 0
        self._doors: dict[int, threading.Semaphore] = {}
        self._weights: dict[int, float] = {}
        self._threads: list[threading.Thread] = []
        self._started = 0
        self.errors: list[BaseException] = []

    def start(self, body: Callable[[], object], name: str = "") -> bool:
        """Starts a thread that takes part."""
        number, self._started = self._started, self._started + 1
        self._doors[number] = threading.Semaphore(0)
        self._weights[number] = self._chance.choice((0.02, 0.2, 1.0))  # threads have their paces

        def run() -> None:
            _here.turns, _here.number = self, number
            self._doors[number].acquire()
            sys.settrace(self._called)
            try:
                body()
            except BaseException as error:
                self.errors.append(error)
            finally:
                sys.settrace(None)
                del self._weights[number]
                self._open_any()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return True

    def run(self) -> None:
        """Lets the threads run until all have ended."""
        self._open_any()
        for thread in self._threads:  # which grows meanwhile
            thread.join(60.0)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.errors:
            raise self.errors[0]

    def next(self) -> None:
        """Gives the turn to any thread, be it this one."""
        chosen = self._choose()
        if chosen != _here.number:
            self._doors[chosen].release()
            self._doors[_here.number].acquire()

    def _choose(self) -> int:
        weights = self._weights
        if self._hold_for > 0:
            self._hold_for -= 1
            weights = {number: 1.0 for number in weights if number != self._held} or weights
        return self._chance.choices([*weights], [*weights.values()])[0]

    def _open_any(self) -> None:
        if self._weights:
            self._doors[self._choose()].release()

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename != self._file_name:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            if _here.number == self._held and frame.f_code.co_name == self._hold_in:
                self._hold_at -= 1
                self._hold_for = HELD_TURNS if self._hold_at == 0 else self._hold_for
            self.next()
        return self._traced


_here = threading.local()


class TurningLatch:
    """A Latch whose waits let other threads run; a short one may end at any time."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        for _ in range(100_000):
            _here.turns.next()
            if self._is_set or (timeout is not None and timeout <= module._LOOK_S):
                return self._is_set
        raise AssertionError("a wait does not end")


@contextmanager
def in_turns(seed: int, held: tuple[int, str, int] | None) -> Iterator[Turns]:
    """The module's threads run in an order that is chosen by chance, and wait in no time."""
    turns = Turns(random.Random(seed), module.__file__, held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Latch", TurningLatch)
        patch.setattr(module, "_AGREE_S", LONG_S)
        patch.setattr(module, "start_thread", turns.start)
        patch.setattr(module, "pause", lambda _since, _until: turns.next())
        yield turns


class Life:
    """One rank: it makes calls until it is told to stop, and ends.

    Args:
        agreement: the rank's.
        asked_at: before which of its calls it is asked; 0: never.

    Attributes:
        answers: what its calls returned.
    """

    def __init__(self, agreement: StopAgreement, asked_at: int) -> None:
        self._agreement = agreement
        self._asked_at = asked_at
        self.answers: list[bool] = []

    def __call__(self) -> None:
        while len(self.answers) < CALLS_MAX and True not in self.answers:
            if len(self.answers) + 1 == self._asked_at:
                self._agreement.ask()
            self.answers.append(self._agreement.is_reached())
        self._agreement.close()


def lives_in_turns(
    asked_at: list[int], seed: int, held: tuple[int, str, int] | None = None
) -> list[list[bool]]:
    """The answers of all ranks, which run in an order that is chosen by a seed. The keys are gone
    afterwards. Threads are numbered: first those of the agreements, then those that call.
    """
    store = dist.HashStore()
    with in_turns(seed, held) as turns:
        ranks = len(asked_at)
        lives = []
        for rank, at in enumerate(asked_at):
            coordinator = Coordinator(store, rank, ranks, "job")
            coordinator.call("check", ["any"])  # connects
            lives.append(Life(StopAgreement(coordinator, LONG_S), at))
        keys = store.num_keys()
        for life in lives:
            turns.start(life)
        turns.run()
        assert store.num_keys() == keys, "keys stay in the store"
    return [life.answers for life in lives]


@settings(max_examples=Chance.examples(6), deadline=None)
@given(st.lists(st.integers(0, CALLS_MAX), min_size=1, max_size=4), st.integers(0, 1 << 32))
def test_all_ranks_answer_the_same_in_any_order(asked_at: list[int], seed: int) -> None:
    answers = lives_in_turns(asked_at, seed)
    assert len({*map(tuple, answers)}) == 1, answers
    assert any(asked_at) or True not in answers[0]


@pytest.mark.parametrize(("thread", "function"), [(0, "_promise"), (2, "is_reached")])
def test_all_ranks_answer_the_same_wherever_one_thread_is_held_up(
    thread: int, function: str, storm: Storm
) -> None:
    """The other rank is asked; the held one is ahead of it, so that its promise decides."""
    for moment in storm.some(range(1, 18), 8):
        answers = lives_in_turns([0, 1], 1, (thread, function, moment))
        assert answers[0] == answers[1], f"held before bytecode {moment}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_stop_comes_soon(ranks: int) -> None:
    """The rank that is asked does not get ahead of the agreement; the others may be further."""
    for seed in range(8 // ranks):
        answers = lives_in_turns([2, *[0] * (ranks - 1)], seed)
        assert answers[0][-1] or len(answers[0]) == CALLS_MAX
    slow_alone = lives_in_turns([2], 0)
    assert slow_alone == [[False, True]], "one process stops at the first call after the request"


@pytest.mark.parametrize("kind", STORES)
def test_over_every_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads and waits; the stop is beyond what the fastest rank has been told."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    store = STORES[kind](tmp_path)
    started = threading.Barrier(3)

    def live(rank: int) -> list[bool]:
        coordinator = Coordinator(store, rank, 3, "job")
        agreement = StopAgreement(coordinator, LONG_S)
        started.wait()
        answers = [False]
        while not answers[-1]:
            if rank == 1 and len(answers) == 50:
                agreement.ask()
            answers.append(agreement.is_reached())
        agreement.close()
        coordinator.close()
        return answers

    for _ in range(3):  # one life after another, over the same store
        with ThreadPoolExecutor(3) as pool:
            lengths = {len(answers) for answers in pool.map(live, range(3))}
        assert len(lengths) == 1 and min(lengths) >= 50


@pytest.mark.parametrize("asked", [False, True])
def test_only_a_stop_that_was_asked_for_is_logged(
    caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    """The first rank is the last that leaves, and so the one that computes the stop."""
    caplog.set_level(logging.INFO, "fastckpt")
    store = dist.HashStore()
    first, other = (StopAgreement(Coordinator(store, r, 2, "stop"), LONG_S) for r in range(2))
    if asked:
        other.ask()
    other.close()
    first.close()
    assert caplog.messages == ["asked to stop: requested() is True from call 1 on"] * asked


def test_lives_of_one_session_do_not_mix() -> None:
    """A process makes a new Checkpointer for the same root, while another rank has the old one."""
    store = dist.HashStore()
    first = [Coordinator(store, rank, 2, "job") for rank in range(2)]
    old = [StopAgreement(coordinator, LONG_S) for coordinator in first]
    old[0].ask()
    old[0].close()
    again = Coordinator(store, 0, 2, "job", first[0].session)
    new = StopAgreement(again, LONG_S)
    assert not new.is_reached()
    for agreement in (new, old[1]):
        agreement.close()


def test_a_missing_rank_is_named_in_time() -> None:
    coordinator = Coordinator(dist.HashStore(), 0, 3, "job")
    agreement = StopAgreement(coordinator, timeout_s=2.0)
    assert not agreement.is_reached()
    agreement.ask()
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"rank 1, rank 2 did not agree within 2 s") as told:
            agreement.is_reached()
        assert told.value.ranks == (1, 2)
    agreement.close()


def test_a_missing_rank_is_not_waited_for_beyond_the_time_before_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert module._AGREE_S < 15.0, "torchrun kills ranks 30 s after its signal"
    monkeypatch.setattr(module, "_AGREE_S", 0.05)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    agreement = StopAgreement(Coordinator(dist.HashStore(), 0, 2, "job"), LONG_S)
    agreement.ask()
    with pytest.raises(PeerFailed, match=r"rank 1 did not agree within 0.06 s"):
        agreement.is_reached()
    agreement.close()


def test_a_store_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), threading.Event()
    coordinator = Coordinator(dist.HashStore(), 0, 2, "job")

    def hang(*_: object) -> None:
        asked.set()
        assert answers.wait(LONG_S)
        raise ConnectionError("at last")

    monkeypatch.setattr(coordinator, "call", hang)
    monkeypatch.setattr(module, "_PAUSES_S", ())
    agreement = StopAgreement(coordinator, 0.02)
    agreement.ask()
    assert asked.wait(LONG_S)
    with pytest.raises(PeerFailed, match="does not answer"):
        agreement.is_reached()
    answers.set()
    agreement.close()


def test_a_lost_store_does_not_matter_while_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank goes on: without its promise no other rank stops. It raises once it is asked."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_PAUSES_S", (0.0, 0.0))
    coordinator, tries, is_deaf = Coordinator(dist.HashStore(), 0, 2, "job"), [0], threading.Event()

    def refuse(*_: object) -> None:
        tries[0] += 1
        raise ConnectionError("it is gone")

    monkeypatch.setattr(coordinator, "call", refuse)
    keep = caplog.handler.emit

    def noted(record: logging.LogRecord) -> None:
        keep(record)
        is_deaf.set()

    monkeypatch.setattr(caplog.handler, "emit", noted)
    agreement = StopAgreement(coordinator, LONG_S)
    assert is_deaf.wait(LONG_S) and tries == [3]
    assert "it is gone" in caplog.text and len(caplog.records) == 1
    assert [agreement.is_reached() for _ in range(100)] == [False] * 100
    agreement.ask()
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"store .* is unreachable .it is gone.*when to stop"):
            agreement.is_reached()
    agreement.close()


class LosesOnce:
    """A store of which one client loses its connection, once: at the next operation named
    `losing`, of which the server has heard or not. A new connection works.
    """

    def __init__(self, store: dist.Store, *, is_heard: bool) -> None:
        self._store, self.losing, self._is_heard = store, "", is_heard
        self.was_lost = False

    def clone(self) -> LosesOnce:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: Any, *values: Any) -> Any:
            if name != self.losing:
                return getattr(self._store, name)(key, *values)
            self.losing, self.was_lost = "", True
            if self._is_heard:
                getattr(self._store, name)(key, *values)
            raise ConnectionError(f"{name} of {key}")

        return call


@pytest.mark.parametrize("is_heard", [False, True], ids=["unheard", "unanswered"])
@pytest.mark.parametrize("losing", ["check", "set", "add", "get"])
def test_ranks_agree_although_one_loses_its_connection(
    losing: str, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.005)
    monkeypatch.setattr(module, "_PAUSES_S", (0.0, 0.0))

    def stops(asked: int) -> tuple[bool, set[int]]:
        store = dist.HashStore()
        loses = LosesOnce(store, is_heard=is_heard)
        clients = [store, loses, store]

        def live(rank: int) -> int:
            coordinator = Coordinator(clients[rank], rank, 3, "job")
            coordinator.call("check", ["any"])
            if rank == 1:
                loses.losing = losing
            agreement = StopAgreement(coordinator, LONG_S)
            calls = 1
            while not agreement.is_reached() and calls < 50_000:
                calls += 1
                if rank == asked and calls == 5:
                    agreement.ask()
                time.sleep(0.0002)
            agreement.close()
            return calls

        with ThreadPoolExecutor(3) as pool:
            calls = {*pool.map(live, range(3))}
        return loses.was_lost, calls

    for asked in range(3):
        was_lost, calls = stops(asked)
        assert was_lost and len(calls) == 1, f"rank {asked} was asked"


def test_many_ranks_spare_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of 12,000 looks every fourth second, in turn with the others."""
    looks: dict[int, list[int]] = {}
    for rank in (0, 1, 2, 3):
        waits = [0]
        coordinator = Coordinator(dist.HashStore(), rank, 12_000, "job")

        class Counting(TurningLatch):
            def wait(self, timeout: float | None = None, waits: list[int] = waits) -> bool:
                waits[0] += 1
                return waits[0] > 12

        def call(operation: str, *_: object, waits: list[int] = waits, rank: int = rank) -> object:
            if waits[0] <= 12:
                looks.setdefault(rank, []).append(waits[0])
                return False
            raise ConnectionError(operation)

        monkeypatch.setattr(module, "Latch", Counting)
        monkeypatch.setattr(module, "start_thread", lambda body, _name: body() or True)
        monkeypatch.setattr(module, "_PAUSES_S", ())
        monkeypatch.setattr(coordinator, "call", call)
        StopAgreement(coordinator, LONG_S)
    assert looks == {0: [4, 8, 12], 1: [3, 7, 11], 2: [2, 6, 10], 3: [1, 5, 9]}
