"""Ranks that agree on a save, or fail together, over every kind of c10d store.

Ranks are threads with a Coordinator each where that is enough, and processes where one is killed,
hosts the store, or belongs to a process group. Responsible for the rules of rounds; must not know
what ranks agree on.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt.errors import CheckpointError, PeerFailed, StorageError, fate, is_visible
from fastckpt.ranks import round as module
from fastckpt.ranks.coordinator import Coordinator, own_client
from fastckpt.ranks.round import Round, RoundNumbers
from fastckpt.ranks.same_state import same
from tests.kit.coordinators import (
    LONG_S,
    PREFIX,
    STORES,
    Died,
    on_each,
    opened,
    tcp_store,
    together,
)
from tests.kit.interpreters import Program
from tests.kit.jobs import held_port
from tests.kit.storm import Chance


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    return STORES[request.param](tmp_path)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks where missing ranks are more often, and gives them less time."""
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    monkeypatch.setattr(module, "_GRACE_S", 0.15)


def commit(begun: Round) -> str:
    """What a save does: records, one decision, one outcome."""
    begun.put("done", b"%d" % begun.rank)
    if begun.rank == 0:
        records = begun.gather("done")
        begun.decide()
        begun.put("outcome", b",".join(records))
    return begun.get("outcome").decode()


def assert_same_failure(outcomes: list[Any], *words: str) -> PeerFailed:
    assert {type(outcome) for outcome in outcomes} == {PeerFailed}, outcomes
    assert len({(str(outcome), outcome.ranks) for outcome in outcomes}) == 1, outcomes
    for word in words:
        assert word in str(outcomes[0])
    return outcomes[0]


# --- rounds that succeed


def test_records_reach_every_rank(store: dist.Store) -> None:
    def body(begun: Round) -> Any:
        begun.put("a", bytes([begun.rank]) * 3 + b"\x00\xff")
        begun.put("empty", b"")
        seen = begun.gather("a"), begun.get("a", 2), begun.get("empty", 1)
        begun.put("seen", b"")
        if begun.rank == 0:
            begun.gather("seen")
            begun.put("all seen", b"")
        begun.get("all seen")
        return seen

    records = [bytes([rank]) * 3 + b"\x00\xff" for rank in range(3)]
    assert on_each(opened(store, 3), body) == [(records, records[2], b"")] * 3


def test_alone_needs_nobody() -> None:
    alone = Coordinator.alone()
    assert (alone.rank, alone.world_size) == (0, 1)
    with_nobody = alone.begin("save")
    assert commit(with_nobody) == "0"
    assert same(with_nobody, "state", b"digest", pytest.fail) is None
    with_nobody.close()
    failing = alone.begin("save")
    failing.fail(Died("of me"))
    with pytest.raises(PeerFailed, match="of me"):
        failing.decide()
    failing.close()
    alone.close()


def test_name_is_equal_on_ranks_and_new_each_time() -> None:
    coordinators = opened(dist.HashStore(), 2)
    names = [[c.begin(label).name for label in ("a", "b", "a", "a")] for c in coordinators]
    assert names[0] == names[1]
    assert len(set(names[0])) == 4


def test_rounds_in_flight_do_not_mix(store: dist.Store) -> None:
    coordinators = opened(store, 2)
    rounds = [[c.begin(label) for label in ("step 1", "step 2", "step 1")] for c in coordinators]

    def run(rank: int, number: int) -> str:
        begun = rounds[rank][number]
        if (rank, number) == (1, 0):
            time.sleep(0.3)  # the later rounds end before the first
        begun.put("done", b"%d of %d" % (number, rank))
        if rank == 0:
            begun.put("outcome", b" ".join(begun.gather("done")))
        outcome = begun.get("outcome").decode()
        begun.close()
        return outcome

    outcomes = together(*[lambda r=r, n=n: run(r, n) for r in (0, 1) for n in (0, 1, 2)])
    assert outcomes == [f"{n} of 0 {n} of 1" for n in (0, 1, 2)] * 2


def test_own_connection_does_not_wait_for_the_training_thread() -> None:
    store = tcp_store()
    blocked = threading.Thread(target=lambda: store.wait(["released"], timedelta(seconds=50)))
    coordinators = opened(store, 2)
    blocked.start()
    try:
        assert on_each(coordinators, commit) == ["0,1", "0,1"]
        assert blocked.is_alive(), "nothing held the store's connection meanwhile"
    finally:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        client.set("released", "now")
        blocked.join()


# --- same()


def test_equal_digests_need_no_detail() -> None:
    outcome = on_each(opened(dist.HashStore(), 4), lambda r: same(r, "s", b"equal", pytest.fail))
    assert outcome == [None] * 4


def test_cost_of_equality_does_not_grow_with_the_group() -> None:
    costs = []
    for world_size in (2, 200):
        rounds = [c.begin("step 1") for c in opened(dist.HashStore(), world_size)]
        for begun in rounds[1:]:
            begun.put("state.digest", b"equal")
        assert same(rounds[0], "state", b"equal", pytest.fail) is None
        assert same(rounds[1], "state", b"equal", pytest.fail) is None
        costs.append([begun.operations for begun in rounds[:2]])
    assert costs[0] == costs[1]
    assert max(costs[0]) < 10


def test_groups_of_digests_are_equal_on_every_rank() -> None:
    asked: list[int] = []

    def body(begun: Round) -> Any:
        def detail() -> bytes:
            asked.append(begun.rank)
            return b"detail\n of %d" % begun.rank

        return same(begun, "state", b"abcab"[begun.rank : begun.rank + 1], detail)

    expected = [
        ([0, 3], b"detail\n of 0"),
        ([1, 4], b"detail\n of 1"),
        ([2], b"detail\n of 2"),
    ]
    assert on_each(opened(dist.HashStore(), 5), body) == [expected] * 5
    assert sorted(asked) == [0, 1, 2]


@settings(max_examples=Chance.examples(10), deadline=None)
@given(st.lists(st.sampled_from([b"w", b"x", b"y", b"z"]), min_size=1, max_size=6))
def test_groups_partition_the_ranks(digests: list[bytes]) -> None:
    coordinators = opened(dist.HashStore(), len(digests))
    found = on_each(coordinators, lambda r: same(r, "s", digests[r.rank], lambda: digests[r.rank]))
    by_digest = {digest: [r for r, d in enumerate(digests) if d == digest] for digest in digests}
    expected = sorted((ranks, digest) for digest, ranks in by_digest.items())
    assert found == [expected if len(expected) > 1 else None] * len(digests)


# --- failures


def test_failure_ends_every_wait_with_one_cause(store: dist.Store) -> None:
    def body(begun: Round) -> Any:
        if begun.rank == 2:
            raise Died("disk on fire")
        return commit(begun)

    *others, own = on_each(opened(store, 3), body)
    failure = assert_same_failure(
        others, "step 100", "rank 2 failed: Died: disk on fire", "nothing was committed"
    )
    assert failure.ranks == (2,)
    assert type(own) is Died


def test_text_of_an_error_of_the_file_system_arrives_whole() -> None:
    rounds = [c.begin("step 1") for c in opened(dist.HashStore(), 2)]
    error = StorageError("write", "/data/caf\udce9", 28, 4096)
    rounds[1].fail(error)
    with pytest.raises(PeerFailed) as caught:
        rounds[0].get("anything", 1)
    assert f"StorageError: {error}" in str(caught.value)


def test_first_of_many_failures_is_everybodys() -> None:
    coordinators = opened(dist.HashStore(), 8)
    barrier = threading.Barrier(8)

    def body(begun: Round) -> Any:
        barrier.wait()
        if begun.rank % 2:
            begun.fail(Died(f"of {begun.rank}"))
        begun.get("never", 7)

    failure = assert_same_failure(on_each(coordinators, body))
    assert str(failure).count("failed") == 1


def test_report_of_anothers_failure_is_not_a_failure() -> None:
    rounds = [c.begin("step 1") for c in opened(dist.HashStore(), 3)]
    rounds[1].fail(Died("first"))
    with pytest.raises(PeerFailed) as caught:
        rounds[0].check()
    before = rounds[0].operations
    rounds[0].fail(caught.value)
    assert rounds[0].operations == before
    with pytest.raises(PeerFailed, match="rank 1 failed: Died: first"):
        rounds[2].check()


def test_peer_failed_of_something_else_is_a_failure() -> None:
    rounds = [c.begin("step 1") for c in opened(dist.HashStore(), 2)]
    rounds[0].fail(PeerFailed("another round's", (5,)))
    with pytest.raises(PeerFailed, match="rank 0 failed: PeerFailed: another round's") as caught:
        rounds[1].check()
    assert caught.value.ranks == (0,)


def test_decision_and_failure_exclude_each_other() -> None:
    coordinators = opened(tcp_store(), 2)
    ends = set()
    for number in range(60):
        first, second = (c.begin(f"step {number}") for c in coordinators)
        barrier = threading.Barrier(2)

        def decide(first: Round = first, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            first.decide()

        def fail(
            second: Round = second, barrier: threading.Barrier = barrier, number: int = number
        ) -> None:
            barrier.wait()
            time.sleep(number % 3 * 1e-5)
            second.fail(Died("now"))
            second.check()

        decided, failed = together(decide, fail)
        assert type(decided) is type(failed)
        ends.add(type(decided))
        second.close()
        first.close()
    assert ends <= {type(None), PeerFailed}


@settings(max_examples=Chance.examples(10), deadline=None)
@given(st.lists(st.sampled_from(["well", "slow", "fails", "fails late"]), min_size=2, max_size=5))
def test_all_commit_or_none(fates: list[str]) -> None:
    def body(begun: Round) -> Any:
        fate = fates[begun.rank]
        if fate == "slow":
            time.sleep(0.02)
        if fate == "fails":
            raise Died(str(begun.rank))
        if same(begun, "state", b"", pytest.fail) is not None:
            raise AssertionError
        if fate == "fails late":
            raise Died(str(begun.rank))
        return commit(begun)

    outcomes = on_each(opened(dist.HashStore(), len(fates)), body)
    failing = {rank for rank, fate in enumerate(fates) if fate.startswith("fails")}
    if not failing:
        assert outcomes == [",".join(map(str, range(len(fates))))] * len(fates)
        return
    innocent = [o for rank, o in enumerate(outcomes) if rank not in failing]
    assert all(isinstance(outcomes[rank], Died | PeerFailed) for rank in failing)
    if innocent:
        assert set(assert_same_failure(innocent).ranks) <= failing


def test_late_joiner_learns_at_once_and_is_back_in_step() -> None:
    coordinators = opened(dist.HashStore(), 3)
    first, second = (c.begin("step 1") for c in coordinators[:2])
    second.fail(Died("while rank 2 was away"))
    with pytest.raises(PeerFailed):
        first.gather("done")
    first.close()
    second.close()
    late = coordinators[2].begin("step 1", LONG_S)
    late.put("done", b"")
    with pytest.raises(PeerFailed, match="while rank 2 was away"):
        late.check()
    with pytest.raises(PeerFailed, match="while rank 2 was away"):
        late.get("outcome")
    late.close()
    assert on_each(coordinators, commit, "step 1") == ["0,1,2"] * 3


def test_fail_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(dist.HashStore(), 0, 2, PREFIX)
    begun = coordinator.begin("step 1")
    coordinator.close()
    begun.fail(Died("too late to tell"))
    begun.close()
    assert "too late to tell" in caplog.text


# --- timeouts


def test_timeout_names_the_missing_and_what_they_did() -> None:
    coordinators = opened(dist.HashStore(), 5)
    for coordinator in coordinators[:4]:  # rank 4 never shows up
        coordinator.begin("step 1").put("done", b"")
    rounds = [c.begin("step 2", 1.5) for c in reversed(coordinators[:3])][::-1]
    rounds[2].put("other", b"")
    for begun in rounds[:2]:  # before rank 0 begins to wait, however late the threads are
        begun.put("done", b"")
    failure = assert_same_failure(
        # Rank 1 has waited for longer when rank 0 says whom all are waiting for.
        together(lambda: rounds[0].gather("done"), lambda: rounds[1].get("outcome")),
        "step 2: rank 2 joined but did not send 'done'",
        "rank 3 did not join (its last was 'step 1')",
        "rank 4 did not join within 1.5 s",
        "nothing was committed",
    )
    assert failure.ranks == (2, 3, 4)
    late = "this rank, 2, arrived after the timeout_s of 1.5 s; .* for ranks 3, 4; nothing"
    with pytest.raises(PeerFailed, match=late):
        rounds[2].check()


def test_timeout_of_a_large_group_stays_short() -> None:
    begun = Coordinator(dist.HashStore(), 0, 1000, PREFIX).begin("step 1", 0.05)
    begun.put("done", b"")
    with pytest.raises(PeerFailed, match="991 more") as caught:
        begun.gather("done")
    assert caught.value.ranks == tuple(range(1, 1000))
    assert len(str(caught.value)) < 1000


def test_timeout_is_of_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (c.begin("step 1", 3.0) for c in opened(dist.HashStore(), 2))
    now, meanwhile = [0.0], [lambda: second.put("done", b"late")]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        while meanwhile and now[0] > 3.3:
            meanwhile.pop()()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(module, "time", clock)
    now[0] += 3.1  # what a rank does before it waits takes nothing from its patience
    assert first.get("done", 1) == b"late"
    with pytest.raises(PeerFailed, match=r"rank 1 joined but did not send 'more' within 3 s"):
        first.get("more", 1)


def test_rank_0_lost_while_committing_leaves_a_doubt() -> None:
    first, second = (c.begin("step 1", 0.3) for c in opened(dist.HashStore(), 2))
    first.decide()
    with pytest.raises(PeerFailed, match="may or may not be visible") as caught:
        second.get("outcome")
    assert caught.value.ranks == (0,)
    assert "nothing was committed" not in str(caught.value)
    assert caught.value.visible and caught.value.in_doubt


# --- ranks that do not do the same


def test_rank_at_another_step_is_found(brisk: None) -> None:
    """Both see it: rank 0 awaits step 200, which rank 1 has left out, and rank 1 step 300."""
    coordinators = opened(dist.HashStore(), 2)
    on_each(coordinators, commit, "step 100")
    mine, its = coordinators[0].begin("step 200"), coordinators[1].begin("step 300")
    here, there = together(lambda: commit(mine), lambda: commit(its))
    assert_same_failure(
        [here], "rank 1 is at 'step 300' and took no part in 'step 200'", "same order"
    )
    assert_same_failure([there], "rank 0 is at 'step 200' and took no part in 'step 300'")
    assert (here.ranks, there.ranks) == ((1,), (0,))


def test_rank_that_left_out_a_step_begun_here_is_found(brisk: None) -> None:
    """Rank 0 has begun the other step itself, after the awaited one."""
    coordinators = opened(dist.HashStore(), 2)
    both = [coordinators[0].begin("step 1"), coordinators[0].begin("step 2")]
    only = coordinators[1].begin("step 2")
    outcomes = together(*[lambda r=r: commit(r) for r in (*both, only)])
    assert_same_failure(outcomes[:1], "rank 1 is at 'step 2' and took no part in 'step 1'")
    assert outcomes[1:] == ["0,1", "0,1"]


def test_rank_that_has_closed_is_found(brisk: None) -> None:
    coordinators = opened(dist.HashStore(), 2)
    on_each(coordinators, commit, "step 1")
    coordinators[1].close()
    with pytest.raises(PeerFailed, match="rank 1 has closed and took no part in 'step 2'"):
        commit(coordinators[0].begin("step 2"))


def test_rank_that_has_closed_as_this_one_did_may_come_late(
    brisk: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job may use one Checkpointer after another, and one rank may do more in between."""
    store = dist.HashStore()
    before = opened(store, 2)
    on_each(before, commit, "step 1")
    for each in before:
        each.close()
    after = [Coordinator(store, rank, 2, PREFIX, before[rank].session) for rank in range(2)]
    looked: list[float] = []
    is_late = threading.Event()
    ask = after[0].call

    def call(operation: str, key: Any, *values: Any) -> Any:
        if key == "last/1":
            looked.append(time.monotonic())
            if looked[-1] - looked[0] > 2 * module._GRACE_S:
                is_late.set()
        return ask(operation, key, *values)

    def come_late(begun: Round) -> str:
        assert begun.rank == 0 or is_late.wait(20)
        return commit(begun)

    monkeypatch.setattr(after[0], "call", call)
    assert on_each(after, come_late, "step 2") == ["0,1", "0,1"]
    (warning,) = caplog.messages
    assert "rank 1 has closed and has not begun 'step 2' yet: this rank waits up to" in warning
    after[1].close()
    with pytest.raises(PeerFailed, match="rank 1 has closed and took no part in 'step 3'"):
        commit(after[0].begin("step 3"))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_rank_that_missed_a_round_is_in_step_when_all_begin_anew(brisk: None, missing: int) -> None:
    store = dist.HashStore()
    before = opened(store, 3)
    on_each(before, commit, "restore")
    before[missing].close()
    others = [each for each in before if each.rank != missing]
    caught = together(*[partial(attempt, each, "restore") for each in others])
    assert {type(each) for each in caught} == {PeerFailed}
    for each in others:
        each.close()
    for _ in range(2):
        after = [Coordinator(store, each.rank, 3, PREFIX, each.session) for each in before]
        assert on_each(after, commit, "restore") == ["0,1,2"] * 3
        for each in after:
            each.close()


def attempt(coordinator: Coordinator, label: str) -> str:
    begun = coordinator.begin(label)
    try:
        return commit(begun)
    finally:
        begun.close()


def test_rank_that_could_not_begin_says_why(brisk: None) -> None:
    """It has never said a word before; when it has begun after all, that is forgotten."""
    coordinators = opened(dist.HashStore(), 2)
    with pytest.raises(Died), ExitStack() as begun:
        begun.push(coordinators[1].give_up)
        raise Died("no such file")
    why = r"rank 1 could not begin \(Died: no such file\) and took no part in 'step 1'"
    with pytest.raises(PeerFailed, match=why) as caught:
        commit(coordinators[0].begin("step 1"))
    assert caught.value.ranks == (1,)
    store, session = coordinators[1]._store, coordinators[1].session
    again = [coordinators[0], Coordinator(store, 1, 2, PREFIX, session)]
    on_each(again, commit, "step 1")
    assert on_each(again, commit, "step 2") == ["0,1", "0,1"]
    again[1].close()
    with pytest.raises(PeerFailed, match="rank 1 has closed and took no part in 'step 3'"):
        commit(again[0].begin("step 3"))


# --- what an error says of the checkpoint


class LosesStore:
    """A store whose connection is lost at the k-th operation that is another one than before: the
    server has never heard of it, or has carried it out and its answer is lost.
    """

    def __init__(self, store: dist.Store, losing: int, *, is_heard: bool) -> None:
        self._store, self._losing, self._is_heard = store, losing, is_heard
        self.asked: list[tuple[str, str]] = []
        self.lost = ""

    def clone(self) -> LosesStore:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: Any, *values: Any) -> Any:
            if (name, str(key)) not in self.asked:  # or it polls
                self.asked.append((name, str(key)))
            if not self.lost and len(self.asked) > self._losing:
                self.lost = f"{name} {key}"
                if self._is_heard:
                    getattr(self._store, name)(key, *values)
            if self.lost:
                raise ConnectionError(f"{name} of {key}")
            return getattr(self._store, name)(key, *values)

        return call


def save_through(
    ranks: list[Any], publish: Callable[[], None], timeout_s: float = LONG_S
) -> list[BaseException | None]:
    """A save of all ranks, each with its own client of the store: what each raises."""

    def take_part(rank: int) -> None:
        begun = Coordinator(ranks[rank], rank, len(ranks), PREFIX).begin("step 1", timeout_s)
        try:
            begun.get("place") if rank else begun.put("place", b"here")
            begun.conclude(b"", lambda _records: publish())
        except BaseException as error:
            begun.fail(error)
            assert begun.may_be_visible == is_visible(error)
            raise
        finally:
            begun.close(0.1)

    return together(*[partial(take_part, rank) for rank in range(len(ranks))])


def check_told(errors: list[BaseException | None], path: Path, what: object) -> None:
    """Compares what the errors of all ranks say with the truth on the disk."""
    for rank, error in enumerate(errors):
        doubted = getattr(error, "in_doubt", False)
        assert doubted == ("may or may not be visible" in str(error)), (what, rank, error)
        if doubted:
            assert is_visible(error), (what, rank, error)
        else:
            assert path.exists() == (error is None or is_visible(error)), (what, rank, error)
        if error is not None:
            copied = pickle.loads(pickle.dumps(error))
            assert (is_visible(copied), copied.in_doubt) == (is_visible(error), doubted)
            assert ("nothing was committed" in str(error)) == (not is_visible(error))


@pytest.mark.parametrize("is_heard", [False, True], ids=["unheard", "unanswered"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_what_errors_say_is_true_wherever_a_rank_loses_the_store(
    victim: int, is_heard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BEHIND_S", 0.2)

    def save(losing: int) -> tuple[str, list[BaseException | None]]:
        for timeout_s in (0.4, 30.0):  # again if nothing was lost, as a rank may just be slow
            store, path = dist.HashStore(), tmp_path / f"{losing} within {timeout_s}"
            loses = LosesStore(store, losing, is_heard=is_heard)
            ranks = [loses if rank == victim else store for rank in range(3)]
            errors = save_through(ranks, path.touch, timeout_s)
            check_told(errors, path, (loses.lost, errors))
            if loses.lost:
                break
        return loses.lost.partition(" ")[2].partition("/")[2], errors

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(save, range(24))]
    assert not found[-1][0], "there are more operations than this"
    assert {error for lost, errors in found for error in errors if not lost} == {None}
    doubts = [getattr(error, "in_doubt", False) for _, errors in found for error in errors]
    assert any(doubts) and not any(doubts[0::3]), "only the first rank always knows"
    assert any(errors[victim] is not None and not is_visible(errors[victim]) for _, errors in found)


@pytest.mark.parametrize("is_heard", [False, True], ids=["unheard", "unanswered"])
def test_a_late_rank_that_loses_the_store_knows_that_nothing_was_committed(
    is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have given up on it. It cannot doubt what it has heard of that."""
    monkeypatch.setattr(module, "_BEHIND_S", 0.0)
    lost, doubts = list[str](), list[str]()
    for losing in range(20):
        store = dist.HashStore()
        loses = LosesStore(store, losing, is_heard=is_heard)
        first, late = (
            Coordinator(each, rank, 2, PREFIX) for rank, each in enumerate((store, loses))
        )
        begun = first.begin("step 1", 0.01)
        begun.put("place", b"here")
        with pytest.raises(PeerFailed, match="rank 1 did not join"):
            begun.conclude(b"", lambda _records: None)
        begun = late.begin("step 1", 0.01)
        with pytest.raises(PeerFailed) as caught:
            begun.get("place")
            begun.conclude(b"", lambda _records: None)
        error, is_known = caught.value, begun.failed
        begun.fail(error)
        if is_known:
            assert not is_visible(error) and "nothing was committed" in str(error), loses.lost
        assert begun.may_be_visible == is_visible(error)
        lost.append(loses.lost)
        doubts += [loses.lost] * is_known
    assert not lost[-1], "there are more operations than this"
    assert any("done/1" in operation for operation in doubts)


def test_a_lost_connection_is_opened_anew_by_the_next_round() -> None:
    store = dist.HashStore()
    loses = LosesStore(store, 6, is_heard=False)
    coordinators = [Coordinator(each, rank, 2, PREFIX) for rank, each in enumerate((store, loses))]

    def save(coordinator: Coordinator, timeout_s: float) -> None:
        begun = coordinator.begin("step 1", timeout_s)
        try:
            begun.conclude(b"", lambda _records: None)
        finally:
            begun.close(0.0)

    with pytest.raises(PeerFailed, match="unreachable"):
        save(coordinators[1], LONG_S)
    assert loses.lost and coordinators[1].is_gone
    loses.lost, loses._losing = "", 1 << 30
    together(partial(save, coordinators[0], 0.05))  # whatever it has heard of rank 1
    told = together(*[partial(save, each, LONG_S) for each in coordinators])
    assert told == [None, None] and not coordinators[1].is_gone


class Publishing:
    """A commit that makes a file, or fails before or after that."""

    def __init__(self, path: Path, before: BaseException | None, after: BaseException | None):
        self._path, self._before, self._after = path, before, after

    def __call__(self) -> None:
        if self._before is not None:
            raise self._before
        self._path.touch()
        if self._after is not None:
            raise self._after


def test_what_errors_say_is_true_if_the_commit_fails(tmp_path: Path) -> None:
    synced = StorageError("sync directory", str(tmp_path), 5, visible=True)
    cases = {
        "before": Publishing(tmp_path / "before", StorageError("rename", "x", 5), None),
        "after": Publishing(tmp_path / "after", None, synced),
        "raw": Publishing(tmp_path / "raw", OSError(5, "x"), None),
        # Ctrl-C, at exit: whether it came before the rename or after it, nobody knows.
        "broken off": Publishing(tmp_path / "broken off", KeyboardInterrupt(), None),
        # A server that was too late may still do it.
        "late": Publishing(tmp_path / "late", StorageError("rename", "x", errno.ETIMEDOUT), None),
    }
    doubtful = ("broken off", "late")
    for name, publishing in cases.items():
        store = dist.HashStore()
        errors = save_through([store] * 3, publishing)
        assert [type(error) for error in errors[1:]] == [PeerFailed] * 2
        assert [is_visible(error) for error in errors] == [name in ("after", *doubtful)] * 3
        doubted = [getattr(error, "in_doubt", False) for error in errors]
        assert doubted == [name in doubtful] * 3
        assert (tmp_path / name).exists() == (name == "after")


@pytest.mark.parametrize("error", [StorageError("read", "x", 5), RuntimeError("x")])
def test_failure_behind_the_decision_of_the_first_rank_is_in_doubt(error: Exception) -> None:
    store, decided = dist.HashStore(), threading.Event()
    first, second = (c.begin("step 1") for c in opened(store, 2))

    def fail_late() -> None:
        assert decided.wait(LONG_S)
        raise error

    def other() -> None:
        try:
            second.conclude(b"", lambda _records: None, follow=fail_late)
        except Exception as its:
            second.fail(its)
            raise

    told = together(lambda: first.conclude(b"", lambda _records: decided.set()), other)
    assert told == [None, error]
    assert second.may_be_visible and is_visible(error) and error.in_doubt
    assert fate(error) == "may or may not be visible"


def test_others_hear_of_a_first_rank_that_hangs_as_it_publishes() -> None:
    first, second = (c.begin("step 1") for c in opened(dist.HashStore(), 2))
    publishing, heard = threading.Event(), threading.Event()
    error = StorageError("rename", "x", errno.ETIMEDOUT)

    def publish(_records: list[bytes]) -> None:
        publishing.set()
        assert heard.wait(LONG_S)
        raise Died

    def give_up() -> None:
        assert publishing.wait(LONG_S)
        first.fail(error)

    def other() -> None:
        try:
            second.conclude(b"", pytest.fail)
        finally:
            heard.set()

    hung, _, told = together(lambda: first.conclude(b"", publish), give_up, other)
    assert isinstance(hung, Died) and isinstance(told, PeerFailed)
    assert told.in_doubt and error.in_doubt and "rename of 'x'" in str(told)


def test_failure_behind_its_own_record_prevents_the_commit() -> None:
    first, second = (c.begin("step 1") for c in opened(dist.HashStore(), 2))
    error = StorageError("read", "x", 5)

    def follow() -> None:
        raise error

    with pytest.raises(StorageError):
        second.conclude(b"", lambda _records: None, follow=follow)
    second.fail(error)
    with pytest.raises(PeerFailed, match="nothing was committed") as caught:
        first.conclude(b"", pytest.fail)
    first.fail(caught.value)
    for begun, its in ((first, caught.value), (second, error)):
        assert not begun.may_be_visible and not is_visible(its) and not its.in_doubt


# --- stores that go away, processes that die


def speak(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def lone_rank(host: str, rank: str) -> None:
    """A rank of two that does its part of a round and never ends it; to be killed."""
    is_host = host == "0"
    store = dist.TCPStore("127.0.0.1", int(host), is_master=is_host, wait_for_workers=False)
    begun = Coordinator(store, int(rank), 2, PREFIX).begin("step 1")
    begun.put("begun", b"")
    speak(store.port)
    time.sleep(100)


def member(method: str, rank: str, world_size: str) -> None:
    """A rank of a process group, and of a subgroup that leaves out rank 0."""
    size = int(world_size)
    dist.init_process_group("gloo", init_method=method, rank=int(rank), world_size=size)
    subgroup = dist.new_group([*range(1, size)])
    whole = Coordinator.of_group(dist.group.WORLD, "steps")
    files = Coordinator.of_group(dist.group.WORLD, "files")
    assert commit(files.begin("same label")) == ",".join(map(str, range(size)))
    said = []
    try:
        part = Coordinator.of_group(subgroup, "steps")
        begun = part.begin("same label")
        said += [commit(begun), part.rank]
        begun.close()
        part.close()
    except ValueError as error:
        said += [str(error)]
    begun = whole.begin("same label")
    dist.destroy_process_group()
    said += [commit(begun)]
    begun.close()
    whole.close()
    speak(said)


def start(body: Callable[..., None], *arguments: Any) -> Program:
    text = f"import sys\nfrom {__name__} import {body.__name__}\n{body.__name__}(*sys.argv[1:])"
    return Program(text, *arguments, variables={"GLOO_SOCKET_IFNAME": "lo"}, inherit_stderr=True)


def said_by(process: Program) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@contextmanager
def running(*processes: Program) -> Iterator[None]:
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
        yield


@pytest.mark.multiprocess
def test_killed_rank_is_missed() -> None:
    store = tcp_store()
    peer = start(lone_rank, store.port, 1)
    with running(peer):
        assert said_by(peer) == store.port
        begun = Coordinator(store, 0, 2, PREFIX).begin("step 1", 0.5)
        assert begun.get("begun", 1) == b""
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(PeerFailed, match="rank 1 joined but did not send 'done'") as caught:
            begun.get("done", 1)
    assert caught.value.ranks == (1,)


@pytest.mark.multiprocess
def test_store_that_died_with_its_process_is_noticed() -> None:
    """By a rank that waits, by its next round, and by one that was never connected."""
    host = start(lone_rank, 0, 0)
    with running(host):
        store = dist.TCPStore("127.0.0.1", said_by(host), is_master=False, wait_for_workers=False)
        coordinator, unconnected = (Coordinator(store, 1, 2, name) for name in (PREFIX, "other"))
        begun = coordinator.begin("step 1")
        assert begun.get("begun") == b""
        threading.Timer(0.2, os.kill, (host.pid, signal.SIGKILL)).start()
        with pytest.raises(PeerFailed, match=r"step 1: the store .* is unreachable") as caught:
            begun.conclude(b"", pytest.fail)
        assert "rank 0's" in str(caught.value)
        assert "may or may not be visible" in str(caught.value)
        assert caught.value.visible and caught.value.in_doubt
        begun.fail(caught.value)
        begun.close()
        for opened_or_not in (coordinator, unconnected):
            begun = opened_or_not.begin("step 2")
            with pytest.raises(PeerFailed, match=r"unreachable .* nothing was committed") as caught:
                begun.put("started", b"")
            assert not caught.value.visible
            opened_or_not.close()


@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="torch has no clone() yet")
def test_store_that_dies_behind_its_last_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's client would try to connect for as long as the training's store waits."""
    monkeypatch.setattr("fastckpt.ranks.coordinator.OPERATION_S", 0.5)
    host = start(lone_rank, 0, 0)
    with running(host):
        port, timeout = said_by(host), timedelta(seconds=5)
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", port)) as last:
        threading.Thread(target=lambda: (last.accept(), last.close())).start()
        with pytest.raises(ConnectionError, match=r"no connection within 0\.5 s"):
            own_client(store)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("method", "world_size"), [("tcp", 3), ("file", 2)])
def test_ranks_of_process_groups(method: str, world_size: int, tmp_path: Path) -> None:
    """Also: the host of the store and all others go on after destroy_process_group()."""
    with held_port() as held, ExitStack() as stack:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        url = address if method == "tcp" else f"file://{tmp_path}/store"
        members = [start(member, url, rank, world_size) for rank in range(world_size)]
        stack.enter_context(running(*members))
        said = [said_by(process) for process in members]
        assert [process.wait() for process in members] == [0] * world_size
    everybody, subgroup = (",".join(map(str, range(n))) for n in (world_size, world_size - 1))
    assert said[0] == ["group must include this process, which is not one of its ranks", everybody]
    assert said[1:] == [[subgroup, rank, everybody] for rank in range(world_size - 1)]


def test_group_has_to_exist() -> None:
    assert Coordinator.of_group(None, "files").world_size == 1
    with pytest.raises(ValueError, match="not initialised"):
        Coordinator.of_group(object(), "files")  # type: ignore[arg-type]


# --- keys, sessions, connections


def test_successful_rounds_leave_no_keys(store: dist.Store) -> None:
    coordinators = opened(store, 3)
    count = 200 if isinstance(store, dist.HashStore) else 20
    on_each(coordinators, commit, "first")
    before = store.num_keys()
    for number in range(count):
        on_each(coordinators, commit, f"step {number}")
    assert store.num_keys() == before
    for coordinator in coordinators:
        coordinator.close()
    counters_of_its_own = 1 if isinstance(store, dist.FileStore) else 0
    assert store.num_keys() <= before + counters_of_its_own


def test_keys_wait_for_the_last_to_leave() -> None:
    store = dist.HashStore()
    coordinators = opened(store, 2)
    on_each(coordinators, commit, "first")
    before = store.num_keys()
    first, slow = (c.begin("step 1") for c in coordinators)
    first.put("outcome", b"committed")
    first.close(linger_s=0.05)
    assert slow.get("outcome") == b"committed"
    slow.close()
    on_each(coordinators, commit, "step 2")
    assert store.num_keys() == before


def test_records_of_a_rank_that_fails_can_be_read_while_it_closes(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators = opened(store, 2)
    first, second = (c.begin("step 1") for c in coordinators)
    first.put("checksums", b"0")
    second.put("checksums", b"1")
    call = coordinators[0].call

    def after_the_other_has_left(operation: str, key: Any, *values: Any) -> Any:
        if operation == "multi_get":
            second.fail(Died("by now"))
            second.close()
        return call(operation, key, *values)

    monkeypatch.setattr(coordinators[0], "call", after_the_other_has_left)
    assert first.gather("checksums") == [b"0", b"1"]
    with pytest.raises(PeerFailed, match="by now"):
        first.check()
    before = store.num_keys()
    first.close()
    for c in coordinators:
        c.close()
    assert store.num_keys() < before, "they do not stay for ever"


def test_slow_rank_finds_its_keys_after_close() -> None:
    first, second = opened(dist.HashStore(), 2)
    begun, slow = first.begin("step 1"), second.begin("step 1")
    begun.put("outcome", b"committed")
    begun.close(linger_s=0)
    first.close()
    assert slow.get("outcome") == b"committed"


def test_rank_0_lingers_until_all_have_left() -> None:
    first, second = (c.begin("step 1") for c in opened(dist.HashStore(), 2))
    left = threading.Event()

    def leave() -> None:
        time.sleep(0.3)
        left.set()
        second.close()

    def linger() -> bool:
        first.close(linger_s=50)
        return left.is_set()

    assert together(linger, leave) == [True, None]


def test_keys_of_failed_rounds_go_with_the_coordinator() -> None:
    store = dist.HashStore()
    coordinators = opened(store, 3)
    on_each(coordinators, commit, "first")
    before = store.num_keys()
    for number in range(100):  # one rank never comes
        rounds = [c.begin(f"step {number}") for c in coordinators[:2]]
        rounds[0].put("name", b"")
        rounds[1].fail(Died("always"))
        with pytest.raises(PeerFailed):
            rounds[0].check()
        for begun in reversed(rounds):
            begun.close()
    assert before < store.num_keys() < before + 300, "bounded, too"
    coordinators[0].close(linger_s=0.2)  # for the rank that never comes
    assert store.num_keys() == before


def test_a_rank_that_was_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round failed for its absence: it may be dead, and closing takes no longer for that."""
    store = dist.HashStore()
    coordinators = opened(store, 3)
    on_each(coordinators, commit, "first")
    before = store.num_keys()
    rounds = [c.begin("step 1", timeout_s=0.05) for c in coordinators[:2]]
    for begun in rounds:
        begun.put("name", b"")
    with pytest.raises(PeerFailed, match="rank 2 did not join"):
        rounds[0].gather("name")
    with pytest.raises(PeerFailed, match="rank 2 did not join"):
        rounds[1].get("name", 2)
    for begun in reversed(rounds):
        begun.close()

    def lingers(*_: float) -> None:
        raise AssertionError("it lingers")

    monkeypatch.setattr("fastckpt.ranks.coordinator.pause", lingers)
    for coordinator in coordinators[:2]:
        coordinator.close(linger_s=3600)
    assert store.num_keys() <= before + 1  # the failure, for a rank that is only late


def test_coordinators_follow_each_other_on_one_store(store: dist.Store) -> None:
    """Labels, failures and whereabouts of those before mean nothing to those after."""
    keys = []
    for session in range(3):
        coordinators = opened(store, 2)
        assert on_each(coordinators, commit, "step 1") == ["0,1"] * 2
        failing = [c.begin("step 2") for c in coordinators]
        failing[0].fail(Died(f"in {session}"))
        with pytest.raises(PeerFailed, match=f"in {session}"):
            failing[1].get("anything")
        for begun in reversed(failing):
            begun.close()
        assert on_each(coordinators, commit, "step 2") == ["0,1"] * 2
        for coordinator in coordinators:
            coordinator.close()
        keys.append(store.num_keys())
    assert keys[2] == keys[1], "sessions do not pile up"


def test_later_process_on_a_persistent_store(tmp_path: Path) -> None:
    for run in ("killed", "whole"):
        stores = [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(2)]
        coordinators = [Coordinator(s, rank, 2, PREFIX) for rank, s in enumerate(stores)]
        rounds = [c.begin("step 1") for c in coordinators]
        if run == "killed":
            for begun in rounds:
                begun.put("done", b"of a process that is no more")
        else:
            assert together(*[lambda r=r: commit(r) for r in rounds]) == ["0,1"] * 2


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix", "hash"])
def test_torch_without_clone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(dist.HashStore()).__mro__[1], "clone", raising=False)
    inner = STORES[kind](tmp_path)
    assert not hasattr(inner, "clone")
    outers = [dist.PrefixStore(f"attempt {number}", inner) for number in range(2)]
    stale = Coordinator(outers[0], 1, 2, PREFIX).begin("step 1")
    stale.put("done", b"of another attempt")
    for store in (outers[1], inner):
        assert on_each(opened(store, 2), commit, "step 1") == ["0,1"] * 2


# --- calls that one rank missed


def missed(coordinators: list[Coordinator], *ranks: int, label: str = "step 100") -> None:
    """A round that only some ranks begin, and give up on."""
    present = [c for c in coordinators if c.rank not in ranks]
    outcomes = on_each(present, commit, label, timeout_s=0.3)
    # Of whom they say so is a matter of time: of those that are absent, or of one that waits for
    # them and is slow to say that it has given up.
    assert all(isinstance(outcome, PeerFailed) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((1,), marks=pytest.mark.torture),
        pytest.param((0,), marks=pytest.mark.torture),
        (1, 2),
    ],
)
def test_a_missed_call_is_not_missed_for_ever(
    store: dist.Store, brisk: None, ranks: tuple[int, ...]
) -> None:
    """Those who missed it take part in the next one, whoever is there first."""
    coordinators = opened(store, 3)
    assert on_each(coordinators, commit) == ["0,1,2"] * 3
    for times in (1, 2):
        for _ in range(times):
            missed(coordinators, *ranks)
        assert on_each(coordinators, commit) == ["0,1,2"] * 3
    assert on_each(coordinators[::-1], commit) == ["2,1,0"[::-1]] * 3
    assert on_each(coordinators, commit, "step 200") == ["0,1,2"] * 3


def test_a_rank_that_nobody_named_has_missed_the_call_too(store: dist.Store, brisk: None) -> None:
    """Rank 2 waited for rank 0 alone, which was late, and could not know that rank 1 missed it."""
    coordinators = opened(store, 3)
    assert on_each(coordinators, commit) == ["0,1,2"] * 3
    missed(coordinators, 0, 1)
    (late,) = on_each(coordinators[:1], commit, timeout_s=0.3)
    assert isinstance(late, PeerFailed) and "this rank, 0, arrived after" in str(late)
    assert on_each(coordinators, commit, timeout_s=30) == ["0,1,2"] * 3


def test_a_rank_that_missed_a_call_is_there_first(store: dist.Store, brisk: None) -> None:
    coordinators = opened(store, 2)
    missed(coordinators, 1)
    early = coordinators[1].begin("step 100", LONG_S)
    late: list[Round] = []

    def come_late() -> str:
        time.sleep(0.3)
        late.append(coordinators[0].begin("step 100", LONG_S))
        return commit(late[0])

    assert together(lambda: commit(early), come_late) == ["0,1"] * 2
    for begun in (early, *late):
        begun.close()


def test_a_rank_that_is_too_late_hears_why_and_is_in_step_again(
    store: dist.Store, brisk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REJOIN_S", 0.2)
    coordinators = opened(store, 2)
    missed(coordinators, 1)
    (outcome,) = on_each(coordinators[1:], commit)
    assert isinstance(outcome, PeerFailed)
    assert "this rank, 1, arrived after the timeout_s" in str(outcome)
    assert "waited without result" not in str(outcome)
    assert on_each(coordinators, commit) == ["0,1"] * 2


def test_overlapping_rounds_after_a_missed_call(store: dist.Store, brisk: None) -> None:
    coordinators = opened(store, 2)
    missed(coordinators, 1)
    rounds = [[c.begin("step 100", LONG_S) for c in coordinators] for _ in range(3)]
    names = []
    for first, second in rounds:
        assert together(lambda f=first: commit(f), lambda s=second: commit(s)) == ["0,1"] * 2
        assert first.name == second.name
        names.append(first.name)
    assert len({*names}) == 3
    for first, second in rounds:
        second.close()
        first.close()


def test_an_error_before_the_first_word_ends_the_round_that_is_meant(
    store: dist.Store, brisk: None
) -> None:
    """fail() waits for nobody, but finds the round that the others are in."""
    coordinators = opened(store, 2)
    missed(coordinators, 1)
    waiting, failing = (c.begin("step 100", LONG_S) for c in coordinators)
    waiting.put("done", b"")
    failing.fail(Died("of it"))
    with pytest.raises(PeerFailed, match="of it"):
        waiting.get("done", 1)
    failing.close()
    waiting.close()


def test_coordinators_of_one_group_count_on(tmp_path: Path) -> None:
    """Where one rank did not use the one before, they meet all the same."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/pg", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        first = Coordinator.of_group(group, "steps")
        first.begin("step 1").close()
        first.close()
        second, other = (Coordinator.of_group(group, name) for name in ("steps", "files"))
        assert second.session is first.session and other.session is not first.session
        assert second.begin("step 1").name == "step 1#1"
    finally:
        dist.destroy_process_group()


def test_what_a_session_remembers_has_a_bound() -> None:
    session = RoundNumbers()
    for step in range(9000):
        session.take("save", session.begin("save"))
        label = f"step {step}"
        session.end(label, session.take(label, session.begin(label)))
        session.end("save", step)
    assert session.begin("save") == 9000
    assert len(session.record()) < 200
    sizes = {k: len(v) for k, v in vars(session).items() if isinstance(v, dict | set)}
    assert max(sizes.values()) <= 4096, sizes
    assert len(session._taken["save"]) <= 4096


def test_closed_coordinator_is_refused() -> None:
    coordinator = Coordinator(dist.HashStore(), 0, 1, PREFIX)
    begun = coordinator.begin("step 1")
    coordinator.close()
    coordinator.close()
    for use in (lambda: coordinator.begin("step 2"), lambda: begun.put("a", b"")):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_arguments_are_checked() -> None:
    coordinator = Coordinator.alone()
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            coordinator.begin("step 1", timeout_s)


def test_label_may_be_any_path() -> None:
    rounds = [c.begin("save to /data/caf\udce9 \N{SNOWMAN}#0/x") for c in opened(tcp_store(), 2)]
    rounds[0].fail(Died("\udce9"))
    with pytest.raises(PeerFailed) as caught:
        rounds[1].get("outcome")
    assert str(caught.value).startswith(rounds[0].label + ": rank 0 failed: Died: \udce9")


def test_large_record_passes_through_a_server() -> None:
    begun, other = (c.begin("x" * 5000) for c in opened(tcp_store(), 2))
    begun.put("big", bytes(range(250)) * 64_000)  # a server closes the connection on 8 MB
    assert other.get("big") == bytes(range(250)) * 64_000


# --- begin(), on the training thread


def test_begin_asks_nobody() -> None:
    nowhere = dist.PrefixStore("a", dist.HashStore())
    coordinator = Coordinator(nowhere, 0, 2, PREFIX)
    for number in range(100):
        coordinator.begin(f"step {number}")
    assert nowhere.num_keys() == 0


def test_begin_on_many_threads_counts_each_round_once() -> None:
    coordinator = Coordinator.alone()
    barrier = threading.Barrier(8)

    def body() -> list[str]:
        barrier.wait()
        return [commit_alone(coordinator) for _ in range(200)]

    names = [name for outcome in together(*[body] * 8) for name in outcome]
    assert sorted(names) == sorted(f"step 1#{number}" for number in range(1600))


def commit_alone(coordinator: Coordinator) -> str:
    begun = coordinator.begin("step 1")
    assert commit(begun) == "0"
    begun.close()
    return begun.name


def forked(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.multiprocess
def test_child_of_a_lone_process_saves_for_itself() -> None:
    """Though a thread that does not come along was in the midst of something."""
    coordinator = Coordinator.alone()
    commit_alone(coordinator)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with coordinator._lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert forked(lambda: commit_alone(coordinator) and None) == 0
    finally:
        over.set()
        holder.join()


@pytest.mark.multiprocess
def test_child_of_a_rank_is_no_rank() -> None:
    store = tcp_store()
    coordinators = opened(store, 2)
    on_each(coordinators, commit, "step 1")
    begun = coordinators[0].begin("step 2")

    def body() -> None:
        for use in (lambda: coordinators[0].begin("step 3"), lambda: begun.put("done", b"")):
            with pytest.raises(CheckpointError, match="forked"):
                use()

    assert forked(body) == 0
    other = coordinators[1].begin("step 2")
    assert together(lambda: commit(begun), lambda: commit(other)) == ["0,1"] * 2
