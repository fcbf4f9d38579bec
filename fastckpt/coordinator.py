"""Agreement between the ranks of one group about one save or restore, over a c10d store; or nobody.

Responsible for records that ranks leave for each other, for one failure ending a round on all ranks
with the same cause, and for waits that end. Must not know files, tensors, formats, or what a record
says; never touches a process group, nor the training thread's connection to the store.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from fastckpt.errors import CheckpointError, PeerFailed
from fastckpt.store_client import c10d, own_client

log = logging.getLogger("fastckpt")

TIMEOUT_S, LINGER_S = 600.0, 5.0
_LOOK_S, _GRACE_S = 1.0, 2.0  # how often to look where a missing rank is; its time to return
_RANKS_LOOKED_AT, _RANKS_IN_BATCH, _UNFREED_ROUNDS, _CAUSE_CHARS = 16, 256, 64, 4000
_RECORD_BYTES = 8_000_000  # a TCPStore hangs up on more
_DECIDED, _ABSENT = b"decided", b"absent"  # the latter makes compare_set a get that does not wait
_IN_DOUBT = "the checkpoint may or may not be visible"


class Coordinator:
    """Rounds of agreement in one group, begun in the same order on each of its ranks.

    Several may be opened one after another under one prefix, even by a later process on a store
    that persists, if every rank opens as many. Two small keys for each rank stay in the store.

    Args:
        store: a torch.distributed store: TCPStore, FileStore, HashStore or PrefixStore of these.
        rank, world_size: this process's rank in the group, and the number of ranks.
        prefix: what the keys begin with; the same on every rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str) -> None:
        self.rank, self.world_size = rank, world_size
        # The store is kept: in the process that hosts its server, this is what owns it.
        self._store, self._prefix = store, prefix
        self._pid, self._closed = os.getpid(), False
        # What begin() changes needs no lock, which a thread that is gone after a fork could hold.
        self._times: dict[str, itertools.count[int]] = {}
        self._numbers: dict[str, int] = {}
        self._last: str | None = None
        self._under_way: WeakValueDictionary[str, Round] = WeakValueDictionary()
        self._lock = threading.RLock()  # of what follows, which only the background uses
        self._client: Any = None
        self._session = self._gone = ""
        self._unfreed: list[Round] = []

    @classmethod
    def alone(cls) -> Coordinator:
        """For a single process: rank 0 of 1, over a store in its own memory."""
        return cls(c10d.HashStore(), 0, 1, "alone")

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, name: str) -> Coordinator:
        """For a torch.distributed group, over the job's own store; for None, alone().

        `name` says for what. ValueError: no torch.distributed, or not a rank of the group.
        """
        if group is None:
            return cls.alone()
        if not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised in this process")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        store = c10d.distributed_c10d._get_default_store()  # the job's own: a private call
        return cls(store, rank, world_size, f"fastckpt/{group.group_name}/{ascii(name)[1:-1]}")

    def begin(self, label: str, timeout_s: float = TIMEOUT_S) -> Round:
        """Begins a round without a word to anybody: microseconds, for the training thread.

        Every rank begins rounds of the same labels in the same order. Each wait may take timeout_s
        seconds. ValueError: that is not positive, or this Coordinator is closed.
        CheckpointError: this process was forked from the one that is a rank.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be positive")
        if self.world_size == 1 and os.getpid() != self._pid:
            self.__dict__ = Coordinator.alone().__dict__  # a child is alone too, for itself
        self._check_usable()
        times = next(self._times.setdefault(label, itertools.count()))
        begun = Round(self, label, f"{label}#{times}", timeout_s)
        self._under_way[begun.name] = begun
        self._numbers[begun.name] = len(self._numbers)
        self._last = begun.name
        return begun

    def close(self, linger_s: float = LINGER_S) -> None:
        """Frees the connection, and within linger_s keys of failed rounds. Close all before."""
        since = time.monotonic()
        try:
            if self._session:
                while self.free([], failed_too=time.monotonic() >= since + linger_s):
                    _pause(since, since + linger_s)
                self._last = None
                self.announce()
        except (RuntimeError, ValueError, OSError) as error:
            log.debug("keys stay in the store: %s", error)
        self._closed, self._client = True, None

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError("this Coordinator is closed")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"forked from process {self._pid}, which is the rank: save and restore there"
            )

    def call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        """One operation of the store, for a round; ConnectionError once the store has failed."""
        self._check_usable()
        try:
            if self._gone:  # what its connection would say next is unknown
                raise ConnectionError(self._gone)
            session = self._session or self._opened()
            full = session + key if isinstance(key, str) else [session + each for each in key]
            return getattr(self._client, operation)(full, *values)
        except (RuntimeError, OSError) as error:
            self._gone = self._gone or f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConnectionError(self._gone) from error

    def _opened(self) -> str:
        with self._lock:
            if not self._session:
                self._client = own_client(self._store)
                number = self._client.add(f"{self._prefix}/opened/{self.rank}", 1)
                self._client.delete_key(f"{self._prefix}/{number - 1}/last/{self.rank}")
                self._session = f"{self._prefix}/{number}/"
            return self._session

    def announce(self) -> None:
        """Tells the others which round was begun last here, and which are under way."""
        with self._lock:
            last = self._last  # read first: rounds begun before it are among the following
            rounds = [reference() for reference in self._under_way.valuerefs()]
            record = [last, [begun.name for begun in rounds if begun is not None]]
            self.call("set", f"last/{self.rank}", json.dumps(record).encode())

    def free(self, ended: list[Round], failed_too: bool = False) -> bool:
        """Deletes this rank's keys of rounds all left, and of the oldest; are failed ones left?"""
        with self._lock:
            rounds, self._unfreed = [*ended, *self._unfreed], []  # newest first
            for age, old in enumerate(rounds):
                if old.is_over() or age >= _UNFREED_ROUNDS or (failed_too and old.failed):
                    old.delete()
                else:
                    self._unfreed.append(old)
            return any(old.failed for old in self._unfreed)


class Round:
    """One agreement as this rank takes part in it, on one thread at a time.

    Every call but fail() and close() raises PeerFailed: for the first failure of any rank, for
    ranks still missing when time is up, or for a store that is gone. All ranks that can be told
    raise the same text; it says what is known of the checkpoint.

    Attributes: rank and world_size as the Coordinator's; label as given to begin(); name, that with
    the number of earlier rounds of the label; operations, how many the store was asked for so far.
    """

    def __init__(self, coordinator: Coordinator, label: str, name: str, timeout_s: float) -> None:
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        self.label, self.name, self.operations = label, name, 0
        self._coordinator, self._timeout_s = coordinator, timeout_s
        # Rank 0, which knows best who is missing, has the first word.
        self._patience_s = timeout_s + (min(60.0, timeout_s / 10) if self.rank else 0.0)
        self._path = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
        self._keys: list[str] = []
        self._end = b""  # once known: _DECIDED, or the failure
        self._announced = self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """Leaves this rank's record under key, once; ValueError if it has more than 8 MB."""
        if len(value) > _RECORD_BYTES:
            raise ValueError(f"record {key!r} has {len(value)} bytes, at most {_RECORD_BYTES}")
        self._keys.append(self._at(key, self.rank))
        self._call("set", self._keys[-1], value)

    def get(self, key: str, rank: int = 0) -> bytes:
        """Waits for the record that `rank` puts under key, and returns it."""
        return self._records(key, [rank])[0]

    def gather(self, key: str) -> list[bytes]:
        """Waits for every rank's record under key; returns them in rank order."""
        return self._records(key, range(self.world_size))

    def poll(self, key: str, rank: int = 0) -> bytes | None:
        """The record that `rank` put under key, None if it is not there yet."""
        if self._call("check", [self._at(key, rank)]):
            return self.get(key, rank)
        self.check()
        return None

    def same(
        self, key: str, digest: bytes, detail: Callable[[], bytes]
    ) -> list[tuple[list[int], bytes]] | None:
        """Finds out whether all ranks have the same digest; all call it, with keys of their own.

        Returns None if so. Else, equal on every rank: for each digest the ranks that have it and
        what detail(), called on the lowest of these alone, returned; in the order of these.
        """
        self.put(f"{key}.digest", digest)
        if self.rank == 0:
            ranks_of: dict[bytes, list[int]] = {}
            for rank, record in enumerate(self.gather(f"{key}.digest")):
                ranks_of.setdefault(record, []).append(rank)
            unequal = [*ranks_of.values()] if len(ranks_of) > 1 else []
            self.put(f"{key}.unequal", json.dumps(unequal).encode())
        groups: list[list[int]] = json.loads(self.get(f"{key}.unequal"))
        if self.rank in [ranks[0] for ranks in groups]:
            self.put(f"{key}.detail", detail())
        if self.rank == 0:  # passes on what others may delete when they close
            for ranks in groups:
                self.put(f"{key}.detail of {ranks[0]}", self.get(f"{key}.detail", ranks[0]))
        return [(ranks, self.get(f"{key}.detail of {ranks[0]}")) for ranks in groups] or None

    def fail(self, error: BaseException) -> None:
        """Tells every rank that this one failed; without effect after decide(). Never raises."""
        if self.failed and isinstance(error, PeerFailed):
            return  # all know it
        try:
            self._post(f"rank {self.rank} failed: {type(error).__name__}: {error}", [self.rank])
        except Exception as unheard:
            log.warning("other ranks could not be told of %r: %s", error, unheard)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error in the body is this rank's, so that nobody waits for it; then it has left."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def decide(self) -> None:
        """On rank 0, before it commits: unless one came first, no failure counts from here on."""
        assert self.rank == 0, "rank 0 commits"
        self._end = self._call("compare_set", self._at("end"), b"", _DECIDED)
        self.check()

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if not self._end and self._call("check", [self._at("end")]):
            self._end = self._call("get", self._at("end"))
        if self.failed:
            text, ranks = json.loads(self._end)
            raise PeerFailed(text, tuple(ranks))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Leaves the round and frees its keys. Idempotent, never raises.

        Rank 0 waits, for linger_s seconds at most, until all have left, for its process may host
        the store; what is left then, its next close frees. The others delete their records here,
        so they close when rank 0 has told them that nobody needs these any more; or, after a
        failure, which may find others reading them, by a later close.
        """
        if self._closed:
            return
        self._closed = True
        self._coordinator._under_way.pop(self.name, None)
        try:
            if self.rank and not self.failed:
                self.delete()
            self._call("add", self._at("left"), 1)
            if self.rank == 0:
                since = time.monotonic()
                until = since if self.failed else since + linger_s
                while not self.is_over() and time.monotonic() < until:
                    _pause(since, until)
            if self.rank == 0 or self.failed:
                self._coordinator.free([self])
        except (RuntimeError, ValueError) as error:
            log.debug("keys of %s stay in the store: %s", self.name, error)

    @property
    def failed(self) -> bool:
        return self._end not in (b"", _DECIDED)

    def is_over(self) -> bool:
        """Whether every rank has closed this round; asked when this one has."""
        left = self._call("compare_set", self._at("left"), _ABSENT, _ABSENT)
        return left == _ABSENT or int(left) == self.world_size  # rank 0 deletes it after the last

    def delete(self) -> None:
        """Deletes this rank's records; on rank 0 also what all ranks share."""
        for key in self._keys + ([] if self.rank else [self._at("end"), self._at("left")]):
            self._call("delete_key", key)

    def _at(self, *names: object) -> str:
        return "/".join([self._path, *map(str, names)])

    def _call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        self.operations += 1 if self._announced else 2
        try:
            if not self._announced:
                self._announced = True
                self._coordinator.announce()
            return self._coordinator.call(operation, key, *values)
        except ConnectionError as error:
            undecided = self.rank == 0 and self._end != _DECIDED
            raise PeerFailed(
                f"{self.label}: the store that ranks agree through is unreachable ({error}): the "
                "process that hosts it, likely rank 0's or the launcher's agent, is gone; "
                + ("nothing was committed" if undecided else _IN_DOUBT)
            ) from None

    def _records(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        records: list[bytes] = []
        while missing := ranks[len(records) :]:
            keys = [self._at(key, rank) for rank in missing[:_RANKS_IN_BATCH]]
            self._wait(key, keys, missing)
            records += self._call("multi_get", keys)
        return records

    def _wait(self, key: str, keys: list[str], ranks: Sequence[int]) -> None:
        """Until `keys` are there, which are those of the first of `ranks`."""
        since = looked = time.monotonic()
        deadline = since + self._patience_s  # of this wait: what this rank did before is no wait
        strayed: dict[int, float] = {}
        while not self._call("check", keys):
            try:
                self.check()
            except PeerFailed:
                if not self._call("check", keys):  # what was there before the failure counts
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
                    if past and now - strayed.setdefault(rank, now) >= _GRACE_S:
                        order = "all ranks must save the same steps in the same order"
                        self._post(f"rank {rank} {did}: {order}", [rank])
            _pause(since, deadline)

    def _whereabouts(self, rank: int, key: str) -> tuple[bool, str]:
        """Whether a rank can no longer join this round, and what it did instead, in words."""
        told = self._call("compare_set", f"last/{rank}", _ABSENT, _ABSENT)
        if told == _ABSENT:
            return False, "did not join"
        last, under_way = json.loads(told)
        if self.name in under_way:
            return False, f"joined but did not send {key!r}"
        if last is None:
            return True, f"has closed and never joined {self.label!r}"
        numbers, label = self._coordinator._numbers, last.rpartition("#")[0]
        if numbers.get(last, len(numbers)) > numbers[self.name]:
            return True, f"is at {label!r} and never joined {self.label!r}"
        return False, f"did not join (its last was {label!r})"

    def _give_up(self, key: str, ranks: Sequence[int]) -> None:
        """Blames the missing, unless somebody was faster, or rank 0 has decided."""
        missing = [rank for rank in ranks if not self._call("check", [self._at(key, rank)])]
        did = [f"rank {rank} {self._whereabouts(rank, key)[1]}" for rank in missing[:8]]
        did += [f"{len(missing) - 8} more are missing"] if len(missing) > 8 else []
        if missing:
            self._post(f"{', '.join(did)} within {self._timeout_s:g} s", missing)
            self.check()
            lost = f"rank 0 was committing and did not say how that went for {self._timeout_s:g} s"
            raise PeerFailed(f"{self.label}: {lost}: {_IN_DOUBT}", (0,))

    def _post(self, why: str, ranks: Sequence[int]) -> None:
        failure = [f"{self.label}: {why[:_CAUSE_CHARS]}; nothing was committed", [*ranks]]
        self._end = self._call("compare_set", self._at("end"), b"", json.dumps(failure).encode())


def _pause(since: float, until: float) -> None:
    """Sleeps for 5% of the time waited, so that thousands who wait do not drown the store."""
    now = time.monotonic()
    time.sleep(max(0.0, min(max((now - since) / 20, 0.001), 1.0, until - now)))
