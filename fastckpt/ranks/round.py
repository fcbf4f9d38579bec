"""One agreement between the ranks of a group about one save or restore, over a c10d store.

The module manages the numbers of rounds and the records that ranks publish to each other. It ends a
round on all ranks with the first failure. No wait is endless: a rank counts as dead when its record
has not arrived within the timeout. The module must not know the contents of a record, and never
touches a process group.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fastckpt.errors import (
    IN_DOUBT,
    CheckpointError,
    PeerFailed,
    RootInUse,
    SaveCancelled,
    ensure,
    is_visible,
    mark_visible,
)

_REMEMBERED = 4096  # the last rounds, and labels, of a run that saves for ever


class RoundNumbers:
    """The numbers of one rank's rounds, during the life of its process.

    The training thread begins rounds without their final numbers. Rounds get final numbers in the
    background. There, a rank that missed a call skips the numbers that the other ranks have
    finished.

    Attributes:
        prefix: the prefix of the keys in the store; "" before the first connection determines it.
        lock: guards state that only the background uses.
        pid: the process's pid.
        stops: the numbers of agreements on a stop. They are not rounds, because no rank waits for
            another until a signal arrives.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.stops = itertools.count()
        # begin() takes no lock: after a fork, a thread that no longer exists could hold it.
        self._next: dict[str, int] = {}
        self._order: dict[str, tuple[int, int]] = {}  # earlier calls of leave(), and a number
        self._begun = itertools.count()
        self._last: str | None = None
        self._times_left, self._has_left, self._why = 0, False, ""
        self._under_way: set[str] = set()
        self._taken: dict[str, set[int]] = {}  # under lock

    def begin(self, label: str) -> int:
        """Returns a number for a new round with this label."""
        number = self._next.pop(label, 0)
        self._next[label] = number + 1  # taken out and put in again, so that it is the newest
        _forget_oldest(self._next)
        self._note(name_of(label, number))
        return number

    def _note(self, name: str) -> None:
        self._under_way.add(name)
        self._order[name] = self._times_left, next(self._begun)
        self._last, self._has_left = name, False
        _forget_oldest(self._order)

    def take(self, label: str, number: int) -> int:
        """Returns the final number of a round that was begun with the number `number`."""
        with self.lock:
            taken = self._taken[label] = self._taken.pop(label, set())
            _forget_oldest(self._taken)
            if number in taken:  # by an earlier round that skipped some
                number = max(taken) + 1
            self._keep(label, number)
            return number

    def move(self, label: str, number: int, later: int) -> None:
        """Changes the number of a round to a later one, because no rank waits at the present
        number.
        """
        with self.lock:
            self._under_way.discard(name_of(label, number))
            self._keep(label, later)

    def _keep(self, label: str, number: int) -> None:
        taken, name = self._taken.setdefault(label, set()), name_of(label, number)
        taken.add(number)
        taken.discard(min(taken) if len(taken) > _REMEMBERED else -1)
        self._next[label] = max(self._next.get(label, 0), number + 1)
        if name not in self._order:
            self._note(name)

    def is_taken(self, label: str, number: int) -> bool:
        """Returns whether this is the final number of one of this rank's rounds."""
        return number in self._taken.get(label, ())

    def end(self, label: str, number: int) -> None:
        """Records that a round has ended."""
        self._under_way.discard(name_of(label, number))

    def leave(self, why: str = "") -> None:
        """Records that no more rounds will follow, except if some are in progress. `why` is the
        reason, if the other ranks do not know it.
        """
        self._times_left += 1
        if not self._under_way:
            self._has_left, self._why = True, why

    def record(self) -> bytes:
        """Returns a record for the other ranks: the round begun last, the rounds in progress,
        whether no more will follow, and why.
        """
        last, has_left = self._last, self._has_left  # first: what began before is in the following
        return json.dumps([last, sorted(self._under_way.copy()), has_left, self._why]).encode()

    def is_past(self, name: str, other: str) -> bool:
        """Returns whether a rank whose last round is `other` has passed round `name`. Rounds that
        were not begun here count as later.
        """
        return self._order.get(other, _LATER) > self._order.get(name, _EARLIER)

    def is_before_leaving(self, name: str, other: str) -> bool:
        """Returns whether this rank left after round `other` and before round `name`. Another rank
        that left after `other` may therefore come back for `name`.
        """
        return self._order.get(other, _LATER)[0] < self._order.get(name, _EARLIER)[0]


_LATER, _EARLIER = (1 << 62, 0), (-1, 0)  # rounds that are not known


def _forget_oldest(known: dict[str, Any]) -> None:
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)))


def name_of(label: str, number: int) -> str:
    """Returns a round's name, which is the same on all ranks."""
    return f"{label}#{number}"


def numbers_in(record: bytes, label: str) -> list[int]:
    """Returns the numbers of the rounds with this label in a record(), ascending."""
    last, under_way, has_left, _why = json.loads(record)
    begun = {*under_way} if has_left or last is None else {last, *under_way}
    parted = (name.rpartition("#") for name in begun)
    return sorted(int(number) for its, _, number in parted if its == label)


log = logging.getLogger("fastckpt")

TIMEOUT_S = 600.0  # the default of every timeout_s, as of SaveOptions
LINGER_S = 5.0
CANCEL_LOOK_S = 0.5  # how often waits for anything but ranks look whether the caller has cancelled
_BEHIND_S = 3.0  # how far rank 0 may be behind the others, however short the timeout
_LOOK_S, _GRACE_S = 1.0, 2.0  # how often to look where a missing rank is; its time to return
_REJOIN_S, _REJOIN_POLL_S = 10.0, 0.05  # how long, how often a late rank looks for the others
_RANKS_LOOKED_AT, _RANKS_IN_BATCH, _CAUSE_CHARS = 16, 256, 4000
_PART_BYTES = 4_000_000  # a TCPStore closes the connection on more than 8 MB
_COUNT_BYTES = 4  # at the beginning of a record: how many more parts it has
_DECIDED, _ABSENT = b"decided", b"absent"  # the latter makes compare_set a get that does not wait
_SAME_CALLS = "all ranks must make the same calls in the same order"
_IN_DOUBT = f"the checkpoint {IN_DOUBT}"
_COMMITTED = "the checkpoint was committed, but not all ranks may know that"
COMMITTED_NOTHING = "nothing was committed"


# The errors that all ranks raise as the first one did; all others become PeerFailed elsewhere.
_KINDS: dict[str, type[SaveCancelled | RootInUse]] = {
    kind.__name__: kind for kind in (SaveCancelled, RootInUse)
}


class Connection(Protocol):
    """The part of a Coordinator's interface that its rounds need."""

    rank: int
    world_size: int
    session: RoundNumbers

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the store is lost."""

    def call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        """Calls an operation of the store; raises ConnectionError if the connection is lost."""

    def renew(self) -> None:
        """Makes the next call open a new connection, if the last connection was lost."""

    def differing(self, rank: int) -> str:
        """Returns how the terms of a rank that has published no record differ; "" if it may take
        part.
        """

    def free(self, ended: list[Round]) -> None:
        """Deletes this rank's keys of rounds that all ranks have left."""


class Round:
    """One agreement, as one rank takes part in it, on one thread at a time.

    Every call except fail() and close() raises PeerFailed for the first failure of any rank, for
    ranks that are missing at the timeout, or if the store is unreachable. It raises SaveCancelled
    if a rank has cancelled. All ranks that can be reached raise the same text, which includes the
    state of the checkpoint as far as known.

    Attributes:
        rank, world_size: the Coordinator's.
        label, timeout_s: the arguments of begin().
        name: the label with the number of earlier rounds with that label.
        operations: the number of operations of the store so far.
        may_be_visible: whether the checkpoint may be visible, as far as this rank knows.
        is_cancelled: a function that returns whether this rank's caller has cancelled the save or
            restore.
    """

    def __init__(
        self, coordinator: Connection, label: str, timeout_s: float, consequence: str
    ) -> None:
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        self.label, self.operations = label, 0
        self._coordinator, self._session = coordinator, coordinator.session
        self.timeout_s, self._consequence = timeout_s, consequence
        # The others wait a little longer: rank 0 knows best who is missing, and is to say so first.
        # Its wait begins later than theirs where it had more to do, or a busy processor.
        longer_s = min(60.0, _BEHIND_S + timeout_s / 10)
        self._patience_s = timeout_s + (longer_s if self.rank else 0.0)
        self._set_number(self._session.begin(label))
        self._keys: list[str] = []
        self._end = b""  # how the round ended, once known: _DECIDED, or the failure
        self._joined = self._closed = self.may_be_visible = self._is_committed = False
        self._has_told = False
        self.is_cancelled: Callable[[], bool] = lambda: False

    def _set_number(self, number: int) -> None:
        self._number, self.name = number, name_of(self.label, number)
        self._path = hashlib.sha256(self.name.encode(errors="surrogatepass")).hexdigest()

    def put(self, key: str, value: bytes) -> None:
        """Publishes this rank's record, of any size, under a key. Each key is used once."""
        parts = [value[at : at + _PART_BYTES] for at in range(_PART_BYTES, len(value), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._set(f"{key}.{number}", part)
        # Comes last: whoever finds it finds the others.
        self._set(key, len(parts).to_bytes(_COUNT_BYTES, "little") + value[:_PART_BYTES])

    def _set(self, key: str, value: bytes) -> None:
        self._keys.append(self._at(key, self.rank))
        self._call("set", self._keys[-1], value)

    def get(self, key: str, rank: int = 0) -> bytes:
        """Waits for the record that `rank` publishes under a key, and returns it."""
        return self._records(key, [rank])[0]

    def gather(self, key: str) -> list[bytes]:
        """Waits for every rank's record under a key; returns the records in rank order."""
        return self._records(key, range(self.world_size))

    def fail(self, error: BaseException) -> None:
        """Publishes to all ranks that this rank failed. After decide(), this has no effect on other
        ranks; instead the error is marked as visible or in doubt. Never raises.
        """
        if self._closed:  # by who has given up this thread
            return
        known = isinstance(error, PeerFailed | SaveCancelled)
        if not (known and (self.failed or self._coordinator.is_gone)):
            self._tell_failure(error)  # else all ranks know it, or none can be told
        if self.failed:  # the first rank has not decided, and never will
            self.may_be_visible = False
        elif self.may_be_visible and not is_visible(error):
            mark_visible(error, in_doubt=not self._is_committed)
        if self.rank == 0 and self._end == _DECIDED and not self._is_committed:
            self._tell_outcome(error)

    def _tell_failure(self, error: BaseException) -> None:
        try:
            self._join(0.0)
            # That of another save, which the state may have asked for, is a failure of this one.
            if isinstance(error, SaveCancelled) and self.is_cancelled():
                self._post(self._cancelled(), [self.rank], kind=SaveCancelled)
            elif isinstance(error, RootInUse):
                self._post(str(error), [self.rank], kind=RootInUse)
            else:
                self._post(f"rank {self.rank} failed: {type(error).__name__}: {error}", [self.rank])
        except Exception as unheard:
            log.warning("could not report %r to the other ranks: %s", error, unheard)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Publishes an error of the body as this rank's failure, so that no rank waits, and closes
        the round.
        """
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def decide(self) -> None:
        """On rank 0, decides to commit: later failures have no effect. Raises an earlier
        failure.
        """
        ensure(self.rank == 0, "rank 0 commits")
        self.raise_if_ended()
        # fail() sets the same key by compare-and-set, so exactly one of the two comes first.
        self._end = self._call("compare_set", self._at("end"), b"", _DECIDED)
        self.check()

    def conclude(
        self,
        record: bytes,
        publish: Callable[[list[bytes]], None],
        *,
        turn: Callable[[], None] = lambda: None,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        """Commits once every rank is done, or does not commit at all. The outcome is the same on
        all ranks.

        Args:
            record: this rank's record for the first rank. Everything that this rank wrote must be
                durable.
            publish: makes the checkpoint visible; called on the first rank with the records of all
                ranks.
            turn: called on the first rank; returns when that rank may publish.
            follow: called on the other ranks while the first rank publishes.

        Raises:
            PeerFailed: another rank failed or is missing. The error is `visible` if rank 0's error
                is, or if it is unknown whether rank 0 has published.
            SaveCancelled: a rank cancelled before the first rank began to publish.
            Exception: on the first rank, any error of publish().
        """
        self.raise_if_ended()
        # With the record of the last other rank the first one may publish, even if that rank never
        # learns that its record has arrived.
        self.may_be_visible = self.rank != 0
        self.put("done", record)
        if self.rank != 0:
            follow()
            self._hear_outcome()
            return
        records = self.gather("done")
        turn()
        self.decide()
        self.may_be_visible = True
        try:
            publish(records)
        except BaseException as error:
            # publish() marks its errors, but Ctrl-C comes before the rename or after it, and a
            # server that has not answered in time may do what it was asked.
            timed_out = isinstance(error, OSError) and error.errno == errno.ETIMEDOUT
            if not is_visible(error) and (timed_out or not isinstance(error, Exception)):
                mark_visible(error, in_doubt=True)
            self.may_be_visible = is_visible(error)
            self._tell_outcome(error)
            raise
        self._is_committed = True
        self._tell_outcome(None)

    def _tell_outcome(self, error: BaseException | None) -> None:
        """On rank 0, publishes the outcome of its commit once. If the commit failed, no further
        error is raised.
        """
        if self._has_told:
            return
        self._has_told, outcome = True, list[object]()
        if error is not None:
            text = f"rank 0 failed to commit: {type(error).__name__}: {error}"
            in_doubt = bool(getattr(error, "in_doubt", False))
            kind = type(error).__name__
            # Of another node's rank, if that had to publish, too.
            ranks = getattr(error, "ranks", ()) or (self.rank,)
            text = text.encode(errors="replace").decode()
            outcome = [text, is_visible(error), in_doubt, kind, ranks]
        try:
            self.put("outcome", json.dumps(outcome).encode())
        except PeerFailed as unheard:
            if error is None:
                raise
            # The other ranks are in doubt.
            log.warning("could not report %r to the other ranks: %s", error, unheard)

    def _hear_outcome(self) -> None:
        """Waits for rank 0's outcome; raises an error if the commit failed."""
        outcome = json.loads(self.get("outcome"))
        if outcome:
            text, self.may_be_visible, in_doubt, kind, ranks = outcome
            if kind == RootInUse.__name__:
                raise RootInUse(self._text(text), tuple(ranks))
            raise PeerFailed(text, tuple(ranks), self.may_be_visible, in_doubt)
        self._is_committed = True

    def raise_if_ended(self) -> None:
        """Raises SaveCancelled if this rank's caller has cancelled. The method does not use the
        store, so any thread may call it until this rank publishes its record of conclude().
        """
        if self.is_cancelled():
            raise SaveCancelled(self._text(self._cancelled()), (self.rank,))

    def _cancelled(self) -> str:
        return "it was cancelled" if self.world_size == 1 else f"rank {self.rank} cancelled it"

    def _text(self, why: str) -> str:
        why = why[:_CAUSE_CHARS]
        if self._consequence in why:  # the rank's own error says so
            return f"{self.label}: {why}"
        return f"{self.label}: {why}; {self._consequence}"

    def check(self) -> None:
        """Raises the failure of the round, if there is one. Otherwise cancels the round if the
        caller has cancelled.
        """
        if not self._end and self._call("check", [self._at("end")]):
            self._end = self._call("get", self._at("end"))
        if not self._end and self.is_cancelled():
            self._post(self._cancelled(), [self.rank], kind=SaveCancelled)
        if self.failed:
            text, ranks, missing, time_was_up, kind = json.loads(self._end)
            if time_was_up and self.rank in missing:
                text = self._text(_late(self.rank, self.timeout_s, missing))
            raise _KINDS.get(kind, PeerFailed)(text, tuple(ranks))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Leaves the round and frees its keys. Idempotent, never raises.

        Rank 0, whose process may host the store, waits at most linger_s seconds until all ranks
        have left; a later close frees the remaining keys. The other ranks delete their records
        here, after rank 0 has published the outcome, because no rank reads them any more. After a
        failure, other ranks may still read them, so a later close deletes them.
        """
        if self._closed:
            return
        self._closed = True
        self.is_cancelled = lambda: False  # a round may be kept for long after its save
        self._session.end(self.label, self._number)
        try:
            if self.rank and not self.failed:
                self.delete()
            self._call("add", self._at("left"), 1)
            if self.rank == 0:
                since = time.monotonic()
                until = since if self.failed else since + linger_s
                while not self.is_over() and time.monotonic() < until:
                    pause(since, until)
            if self.rank == 0 or self.failed:
                self._coordinator.free([self])
        except (RuntimeError, ValueError) as error:
            log.debug("keys of %s stay in the store: %s", self.name, error)

    @property
    def failed(self) -> bool:
        return self._end not in (b"", _DECIDED)

    def is_over(self, without_missing: bool = False) -> bool:
        """Returns whether every rank has closed this round. With `without_missing`, ranks whose
        absence made the round fail need not have closed it, because they may be dead.
        """
        count = self._call("compare_set", self._at("left"), _ABSENT, _ABSENT)
        if count == _ABSENT:  # rank 0 deletes the key after the last has left
            return True
        missing = json.loads(self._end)[2] if without_missing and self.failed else ()
        return int(count) + len(missing) >= self.world_size

    def delete(self) -> None:
        """Deletes this rank's records. On rank 0, also deletes the keys that all ranks share, but
        not the failure of a round that ranks missed: it leads them to the others' next round.
        """
        missed = self.failed and bool(json.loads(self._end)[2])
        shared = [self._at("left")] if missed else [self._at("end"), self._at("left")]
        for key in self._keys + ([] if self.rank else shared):
            self._call("delete_key", key)

    def _at(self, *names: object) -> str:
        self._join(min(_REJOIN_S, self.timeout_s))
        return "/".join([self._path, *map(str, names)])

    def _call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        self.operations += 1
        try:
            return self._coordinator.call(operation, key, *values)
        except ConnectionError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: ConnectionError) -> PeerFailed:
        consequence = _COMMITTED if self._is_committed else _IN_DOUBT
        may_be_visible = self.may_be_visible and not self.failed  # then rank 0 never decides
        return PeerFailed(
            f"{self.label}: the store that ranks agree through is unreachable ({error}): the "
            "process that hosts it, likely rank 0's or the launcher's agent, is gone; "
            + (consequence if may_be_visible else self._consequence),
            visible=may_be_visible,
            in_doubt=may_be_visible and not self._is_committed,
        )

    def _join(self, patience_s: float) -> None:
        """Joins the round before this rank's first operation, and determines the round's final
        number.

        The other ranks may have given up on this rank in this round, because it missed one of their
        calls or is very late. If they are now in a later round with this label, this rank moves to
        that round. Otherwise it raises their failure, and its next call is in step with theirs.
        """
        if self._joined:
            return
        self._joined = True
        self._coordinator.renew()  # an earlier round may have lost it
        self._set_number(self._session.take(self.label, self._number))
        self._call("set", f"last/{self.rank}", self._session.record())
        until = time.monotonic() + patience_s
        while self._is_missed():
            later = self._later()
            if later is not None:
                self._session.move(self.label, self._number, later)
                self._set_number(later)
                self._end = b""
                self._call("set", f"last/{self.rank}", self._session.record())
            elif time.monotonic() >= until:
                return
            else:
                time.sleep(_REJOIN_POLL_S)

    def _is_missed(self) -> bool:
        """Returns whether the other ranks gave up on this rank, which has not sent anything yet.

        If their timeout passed, they gave up on this rank even if they name others, because each
        rank names only those that it waited for.
        """
        if self.world_size == 1:
            return False
        if not self._end and self._call("check", [self._at("end")]):
            self._end = self._call("get", self._at("end"))
        if not self.failed:
            return False
        _text, ranks, _missing, time_was_up, _kind = json.loads(self._end)
        return self.rank in ranks or time_was_up

    def _later(self) -> int | None:
        """Returns the number of the next round that another rank has begun and this rank has
        not.
        """
        others = set(range(self.world_size)) - {self.rank, *json.loads(self._end)[1]}
        record = (
            self._call("compare_set", f"last/{min(others)}", _ABSENT, _ABSENT) if others else b""
        )
        if record in (b"", _ABSENT):
            return None
        for number in numbers_in(record, self.label):
            if number > self._number and not self._session.is_taken(self.label, number):
                return number
        return None

    def _records(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        records: list[bytes] = []
        while missing := ranks[len(records) :]:
            keys = [self._at(key, rank) for rank in missing[:_RANKS_IN_BATCH]]
            self._wait(key, keys, missing)
            first = self._call("multi_get", keys)
            records += [self._whole(key, *each) for each in zip(missing, first, strict=False)]
        return records

    def _whole(self, key: str, rank: int, record: bytes) -> bytes:
        """Returns a rank's record, joined with its further parts, which were published before
        it.
        """
        count = int.from_bytes(record[:_COUNT_BYTES], "little")
        others = [self._at(f"{key}.{number}", rank) for number in range(count)]
        parts = [self._call("get", other) for other in others]
        return b"".join((record[_COUNT_BYTES:], *parts))

    def _wait(self, key: str, keys: list[str], ranks: Sequence[int]) -> None:
        """Waits for `keys`, which belong to the first of `ranks`; ends the round if a rank is
        lost.
        """
        since = looked = time.monotonic()
        deadline = since + self._patience_s  # each wait has its own: work in between is no wait
        strayed: dict[int, float] = {}
        has_warned = False
        while not self._call("check", keys):
            try:
                self.check()
            except (PeerFailed, *_KINDS.values()):
                if not self._call("check", keys):  # records from before the failure still count
                    raise
            now = time.monotonic()
            if now >= deadline:
                self._give_up(key, ranks)
            elif now - looked >= _LOOK_S:
                looked = now
                paired = zip(ranks, keys, strict=False)
                missing = (rank for rank, its in paired if not self._call("check", [its]))
                for rank in itertools.islice(missing, _RANKS_LOOKED_AT):
                    past, did = self._whereabouts(rank, key)
                    if past is False or now - strayed.setdefault(rank, now) < _GRACE_S:
                        continue
                    if past:
                        self._post(f"rank {rank} {did}: {_SAME_CALLS}", [rank], [rank])
                    elif not has_warned:
                        has_warned = True
                        text = "rank %d %s: this rank waits up to %g s for it, since %s"
                        log.warning(text, rank, did, self.timeout_s, _SAME_CALLS)
            pause(since, deadline)

    def _whereabouts(self, rank: int, key: str) -> tuple[bool | None, str]:
        """Returns whether a rank can no longer join this round, and its last known action, for
        messages. The former is None for a rank that has left, as this one had, and may return.
        """
        record = self._call("compare_set", f"last/{rank}", _ABSENT, _ABSENT)
        if record == _ABSENT:
            differing = self._differing(rank)
            return bool(differing), differing or "did not join"
        last, under_way, has_left, why = json.loads(record)
        if self.name in under_way:
            return False, f"joined but did not send {key!r}"
        if has_left:
            if last and not why and self._session.is_before_leaving(self.name, last):
                return None, f"has closed and has not begun {self.label!r} yet"
            return True, f"{why or 'has closed'} and took no part in {self.label!r}"
        label = last.rpartition("#")[0]
        if self._session.is_past(self.name, last):
            return True, f"is at {label!r} and took no part in {self.label!r}"
        return False, f"did not join (its last was {label!r})"

    def _differing(self, rank: int) -> str:
        """Returns the terms by which a rank differs and therefore never joins this round; "" if
        none.
        """
        try:
            why = self._coordinator.differing(rank)
        except ConnectionError as error:
            raise self._unreachable(error) from None
        return f"{why} and takes no part in {self.label!r}" if why else ""

    def _give_up(self, key: str, ranks: Sequence[int]) -> None:
        """Ends the round because ranks are missing, and raises an error."""
        missing = [rank for rank in ranks if not self._call("check", [self._at(key, rank)])]
        did = [f"rank {rank} {self._whereabouts(rank, key)[1]}" for rank in missing[:8]]
        did += [f"{len(missing) - 8} more are missing"] if len(missing) > 8 else []
        if missing:
            which = "it is" if len(missing) == 1 else "they are"
            why = f"{', '.join(did)} within {self.timeout_s:g} s: {which} dead, hung, or slower "
            why += "than timeout_s (see the logs of missing ranks)"
            self._post(why, missing, missing, time_was_up=True)
            self.check()
            if self.rank:
                lost = "rank 0 was committing and did not report the outcome"
                why = f"{lost} within {self.timeout_s:g} s"
            raise PeerFailed(f"{self.label}: {why}; {_IN_DOUBT}", tuple(missing), True, True)

    def _post(
        self,
        why: str,
        ranks: Sequence[int],
        missing: Sequence[int] = (),
        time_was_up: bool = False,
        kind: type[CheckpointError] = PeerFailed,
    ) -> None:
        """Ends the round, if it has not ended, with a failure of `ranks`; all ranks raise an error
        of type `kind`. Ranks in `missing` have not joined the round, and may never leave it.
        """
        end = [self._text(why), [*ranks], [*missing], time_was_up, kind.__name__]
        self._end = self._call("compare_set", self._at("end"), b"", json.dumps(end).encode())


def _late(rank: int, timeout_s: float, missing: list[int]) -> str:
    """Returns the message for a rank that joins after the other ranks gave up on it and on
    `missing`.
    """
    why = f"this rank, {rank}, arrived after the timeout_s of {timeout_s:g} s"
    others = [other for other in missing if other != rank]
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        named = ", ".join(map(str, others[:8])) + more
        plural = "s" * (len(others) > 1)
        why += f"; the other ranks also waited without result for rank{plural} {named}"
    return why


def pause(since: float, until: float) -> None:
    """Sleeps for 5 % of the time waited so far, so that thousands of ranks do not overload the
    store.
    """
    now = time.monotonic()
    time.sleep(max(0.0, min(max((now - since) / 20, 0.001), 1.0, until - now)))
