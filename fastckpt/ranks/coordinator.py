"""Agreement between the ranks of one group, over a c10d store, or of one process with itself.

Responsible for the connection to the store, for beginning rounds and for freeing their keys. It
never touches a process group or the training thread's connection to the store.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fastckpt.errors import CheckpointError
from fastckpt.ranks.peer_link import address_towards
from fastckpt.ranks.round import COMMITTED_NOTHING, LINGER_S, TIMEOUT_S, Round, RoundNumbers, pause

c10d: Any = dist  # stores, of which torch's type hints say too little

OPERATION_S = 30.0  # bounds one operation of the store, none of which waits for another rank


class MemoryStore:
    """The part of a c10d store that agreements need, for one process alone: a dict.

    torch's HashStore would serve, but a thread that is in a call of it when the interpreter ends
    takes the process down by std::terminate (before Python 3.14, which hangs such threads).
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def clone(self) -> MemoryStore:
        """Returns this store: no call of it holds up another one."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value under a key."""
        self._values[key] = _in_bytes(value)

    def get(self, key: str) -> bytes:
        """Returns a value; raises KeyError at once if there is none, since nobody else sets it."""
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys; raises as get()."""
        return [self._values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Returns whether all of the keys have values."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Stores a value if the present one, or "" for none, is `expected`. Returns the value that
        is stored then; `expected` if there is none.
        """
        with self._lock:
            present = self._values.get(key)
            if (present or b"") == _in_bytes(expected):
                self._values[key] = present = _in_bytes(value)
            return _in_bytes(expected) if present is None else present

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under a key, at first 0, and returns the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            return total

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether there was one."""
        return self._values.pop(key, None) is not None


def _in_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def own_client(store: Any) -> Any:
    """Returns a client whose calls do not hold up those of the given one, the training's."""
    base, timeout = store, timedelta(seconds=OPERATION_S)
    while isinstance(base, c10d.PrefixStore):
        base = base.underlying_store
    if isinstance(base, c10d.TCPStore):
        # A dead server refuses this at once; torch's client would try for the store's own timeout.
        socket.create_connection((base.host, base.port), OPERATION_S).close()
    if hasattr(store, "clone"):  # torch 2.8 and later
        client = _cloned(store) if isinstance(base, c10d.TCPStore) else store.clone()
        if isinstance(base, c10d.TCPStore | c10d.FileStore):
            client.set_timeout(timeout)
        return client
    # In older torch, two FileStores of a file end the process when both of their destructors remove
    # the file. No call of ours waits, so the training's own client serves.
    client = base
    if isinstance(base, c10d.TCPStore):
        client = c10d.TCPStore(base.host, base.port, timeout=timeout, wait_for_workers=False)
    if base is not store:  # its prefix cannot be read: clients that share it agree on another one
        prefix = store.compare_set("fastckpt/prefix", "", os.urandom(16).hex())
        client = c10d.PrefixStore(prefix.decode(), client)
    return client


def _cloned(store: Any) -> Any:
    """Returns store.clone(), on a thread of its own: if the server dies just before, torch's client
    tries for the store's own timeout, of minutes, and nothing can end it.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def clone() -> None:
        try:
            answers.put((store.clone(), None))
        except (RuntimeError, OSError) as error:
            answers.put((None, error))

    try:
        threading.Thread(target=clone, name="fastckpt-store", daemon=True).start()
    except RuntimeError:  # no thread can be started
        clone()
    try:
        client, error = answers.get(timeout=OPERATION_S)
    except Empty:
        raise ConnectionError(f"no connection within {OPERATION_S:g} s") from None
    if error is not None:
        raise error
    return client


Terms: TypeAlias = Mapping[str, str]

_ABSENT = b"absent"  # makes compare_set a get that does not wait
_TOLD_MAX = 256  # of a process that has more, nothing is told


class KnownTerms:
    """The terms of this process for one purpose in one group, each with its session, and what other
    ranks have told of theirs.

    Args:
        prefix: the beginning of the keys that tell of terms; the same on every rank.

    Attributes:
        pid: the number of the process.
    """

    def __init__(self, prefix: str) -> None:
        self.pid = os.getpid()
        self._begin, self._prefix = prefix, ""
        self._lock = threading.Lock()
        self._sessions: dict[str, RoundNumbers] = {}
        self._used = list[Terms]()  # those that were told; under _lock

    def session(self, terms: Terms) -> RoundNumbers:
        """Returns the session on these terms, on which this process is ready to take part now."""
        return self._sessions.setdefault(json.dumps(terms), RoundNumbers())

    def _made(self) -> list[Terms]:
        return [json.loads(text) for text in self._sessions.copy()]

    def tell(self, client: Any, rank: int, terms: Terms, why: str) -> None:
        """Tells the others that this rank takes part on these terms; or `why` it does not."""
        with self._lock:
            if not self._prefix:  # each life of a job has its own, on a store that outlives it
                number = client.add(f"{self._begin}/opened/{rank}", 1)
                client.delete_key(f"{self._begin}/{number - 1}/{rank}")
                self._prefix = f"{self._begin}/{number}"
            made = self._made()
            if len(made) > _TOLD_MAX:
                client.delete_key(f"{self._prefix}/{rank}")
                return
            self._used = [*(each for each in self._used if each != terms), terms]
            client.set(f"{self._prefix}/{rank}", json.dumps([made, self._used, why]).encode())

    def differing(self, client: Any, rank: int, own: Terms, own_rank: int) -> str:
        """Returns why another rank does not take part on these terms of this one, in words; "" if
        it may, as far as is known.
        """
        answer = client.compare_set(f"{self._prefix}/{rank}", _ABSENT, _ABSENT)
        if answer == _ABSENT:
            return ""
        made, used, why = json.loads(answer)
        mine = self._made()
        others = [terms for terms in used if terms not in mine]
        if own in made or not (why or others):
            return ""
        if why:
            return str(why)
        # Of equally near ones, those that were told last.
        nearest = max(others[::-1], key=lambda its: sum(its.get(name) == own[name] for name in own))
        names = [name for name in own if nearest.get(name) != own[name]]
        its, ours = (", ".join(f"{n}={of.get(n)}" for n in names) for of in (nearest, own))
        return f"has {its}, where rank {own_rank} has {ours},"


log = logging.getLogger("fastckpt")
T = TypeVar("T")

_UNFREED_ROUNDS = 64
_WHY_CHARS = 1000

# Sessions outlive their Coordinators: the other ranks go on counting rounds where a process makes a
# new Coordinator for the same group.
_known: WeakKeyDictionary[Any, dict[str, KnownTerms]] = WeakKeyDictionary()
_known_lock = threading.Lock()
_has_warned = False  # whether this process has warned of ranks that do not know each other


class Coordinator:
    """Rounds of agreement in one group, begun in the same order on each of its ranks.

    Several Coordinators may follow each other under one prefix, even in a later process on a store
    that persists, if every rank makes as many, or if they share a session. Two small keys for each
    rank stay in the store.

    Args:
        store: a torch.distributed store: TCPStore, FileStore, HashStore or PrefixStore of these.
        rank, world_size: this process's rank in the group, and the number of ranks.
        prefix: the beginning of all keys; the same on every rank.
        session: the session of the Coordinator before this one; None: a new one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        prefix: str,
        session: RoundNumbers | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        # The store is kept, because in the process that hosts its server this object owns that.
        self._store, self._prefix = store, prefix
        self._pid, self._closed = os.getpid(), False
        self.session = session or RoundNumbers()
        self._lock = threading.RLock()  # guards the following, which only the background uses
        self._client: Any = None
        self._gone = self._why = ""
        self._unfreed: list[Round] = []
        self._known: KnownTerms | None = None
        self._terms: Terms = {}

    @classmethod
    def alone(cls) -> Coordinator:
        """Makes one for a single process: rank 0 of 1, over a store in its own memory."""
        return cls(MemoryStore(), 0, 1, "alone")

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None, name: str, terms: Terms | None = None
    ) -> Coordinator:
        """Makes one for a torch.distributed group, over the job's own store; for None, alone().

        `name` tells the keys of one purpose from those of another. `terms` have to be the same on
        all ranks: a rank that waits for one with other terms says in which ones they differ. Raises
        ValueError if this process is not a rank of the group, or torch.distributed is not
        initialised.
        """
        if group is None:
            return cls.alone()
        if not dist.is_initialized():
            raise ValueError("group is given, but torch.distributed is not initialised here")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        store = c10d.distributed_c10d._get_default_store()  # the job's own: a private call
        prefix = f"fastckpt/{group.group_name}/{ascii(name)[1:-1]}"
        with _known_lock:
            known = _known.setdefault(group, {}).get(name)
            if known is None or known.pid != os.getpid():
                known = _known[group][name] = KnownTerms(f"{prefix}/terms")
            session = known.session(terms or {})
        if terms is None:
            return cls(store, rank, world_size, prefix, session)
        made = cls(store, rank, world_size, f"{prefix} {json.dumps(terms)}", session)
        made._known, made._terms = known, terms
        return made

    def own_address(self) -> str:
        """Returns the address from which this process reaches the store; the loopback's, if that is
        not reached over TCP. Raises OSError.
        """
        base = self._store
        while isinstance(base, c10d.PrefixStore):
            base = base.underlying_store
        if not isinstance(base, c10d.TCPStore):
            return "127.0.0.1"
        return address_towards(base.host, base.port)

    @property
    def is_gone(self) -> bool:
        """True while the connection to the store is lost; see renew()."""
        return bool(self._gone)

    def begin(
        self, label: str, timeout_s: float = TIMEOUT_S, consequence: str = COMMITTED_NOTHING
    ) -> Round:
        """Begins a round in microseconds, without a word to other ranks, on the training thread.

        Every rank begins rounds of the same labels in the same order. Each wait may take timeout_s
        seconds. `consequence` says in messages what a failure means for the caller.

        Raises ValueError if timeout_s is not positive or this Coordinator is closed, and
        CheckpointError if this process was forked from the one that is a rank.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be above 0 seconds")
        if self.world_size == 1 and os.getpid() != self._pid:
            self.__dict__ = Coordinator.alone().__dict__  # a forked child is alone by itself
        self._check_usable()
        return Round(self, label, timeout_s, consequence)

    def give_up(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Closes as the exit of a context; if its body has raised, which other ranks need not have
        done, tells them why this rank takes part in no round.
        """
        why = "" if error is None else f"could not begin ({type(error).__name__}: {error})"
        self.close(why=why.encode(errors="replace").decode()[:_WHY_CHARS])

    def close(self, linger_s: float = LINGER_S, why: str = "") -> None:
        """Closes the connection and frees this rank's keys; all rounds have been closed before.
        `why` is told to other ranks that wait for this one.

        Waits linger_s seconds at most for ranks that have not left a failed round, since they have
        yet to read why it failed; but not for those whose absence it failed for.
        """
        since, self._why = time.monotonic(), why
        try:
            if self._client is not None or (why and self.world_size > 1):
                self.free([])
                while self._is_awaited() and time.monotonic() < since + linger_s:
                    pause(since, since + linger_s)
                    self.free([])
                self.free([], failed_too=True)
                self.session.leave(why)
                self.call("set", f"last/{self.rank}", self.session.record())
        except (RuntimeError, ValueError, OSError) as error:
            log.debug("keys stay in the store: %s", error)
        self._closed, self._client = True, None

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError("this Coordinator is closed")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"this process was forked from process {self._pid}, which is the rank: save and "
                "restore there"
            )

    def call(self, operation: str, key: str | list[str], *values: Any) -> Any:
        """Calls an operation of the store; raises ConnectionError if the connection is lost, as it
        is from then on: whether the store has carried out this operation, nobody knows.
        """

        def ask(client: Any) -> Any:
            prefix = self.session.prefix
            full = prefix + key if isinstance(key, str) else [prefix + each for each in key]
            return getattr(client, operation)(full, *values)

        return self._ask(ask)

    def differing(self, rank: int) -> str:
        """Returns why a rank that has told nothing takes part in no round, in words: its terms
        differ; "" if it may take part. Raises as call().
        """
        known = self._known
        if known is None:
            return ""
        return self._ask(lambda client: known.differing(client, rank, self._terms, self.rank))

    def _ask(self, ask: Callable[[Any], T]) -> T:
        """Returns what a function makes of the connection to the store; raises as call()."""
        self._check_usable()
        client = self._client
        try:
            if self._gone:  # the connection may be in the midst of an answer: it is not used again
                raise ConnectionError(self._gone)
            client = self._opened() if client is None else client
            return ask(client)
        except (RuntimeError, OSError) as error:
            why = self._gone or f"{type(error).__name__}: {error}".partition("\n")[0]
            if client is self._client:  # else it was renewed meanwhile
                self._gone = why
            raise ConnectionError(why) from error

    def renew(self) -> None:
        """Has the next call open a new connection, if the last one was lost. For a caller that has
        asked for nothing yet, or for nothing that must not be done twice. A first connection stays
        lost: it may have been counted, and the next one would have another prefix.
        """
        with self._lock:
            if self._gone and self.session.prefix:
                self._client, self._gone = None, ""

    def _opened(self) -> Any:
        with self._lock:
            if self._client is None:
                client = own_client(self._store)
                with self.session.lock:
                    if not self.session.prefix:
                        number = client.add(f"{self._prefix}/opened/{self.rank}", 1)
                        client.delete_key(f"{self._prefix}/{number - 1}/last/{self.rank}")
                        self.session.prefix = f"{self._prefix}/{number}/"
                if self._known is not None:
                    self._known.tell(client, self.rank, self._terms, self._why)
                self._client = client
            return self._client

    def _is_awaited(self) -> bool:
        """Returns whether ranks have yet to leave failed rounds."""
        with self._lock:
            return any(old.failed and not old.is_over(True) for old in self._unfreed)

    def free(self, ended: list[Round], failed_too: bool = False) -> None:
        """Deletes this rank's keys of rounds that all ranks have left, and of the oldest rounds."""
        with self._lock:
            rounds, self._unfreed = [*ended, *self._unfreed], []  # newest first
            for age, old in enumerate(rounds):
                if old.is_over() or age >= _UNFREED_ROUNDS or (failed_too and old.failed):
                    old.delete()
                else:
                    self._unfreed.append(old)


def default_group() -> Any:
    """Returns the group of all ranks; None where torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


def check_alone(what: str, launched: tuple[int, int] | None) -> None:
    """Raises ValueError if there are several ranks by now, but `what` was made for all ranks before
    torch.distributed was initialised, and so for this rank alone. Else warns of unknown ranks.
    """
    group = default_group()
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks > 1:
        raise ValueError(
            f"{what} was created before torch.distributed.init_process_group(), so it knows only "
            f"one rank, but there are {ranks} ranks now, which would replace each other's files: "
            "create it afterwards, on all ranks; or pass group=, for a single rank a group of "
            "that rank alone (torch.distributed.new_subgroups(1)[0])"
        )
    warn_of_unknown_ranks(what, launched)


def warn_of_unknown_ranks(what: str, launched: tuple[int, int] | None) -> None:
    """Warns once, where a launcher has started several ranks, that this one does alone what all
    should do together. The first rank is not warned: that it saves alone may well be meant.

    Args:
        what: what is done alone.
        launched: this process's rank and the number of ranks, if a launcher has told them.
    """
    global _has_warned
    rank, ranks = launched or (0, 1)
    if _has_warned or rank == 0 or default_group() is not None:
        return
    _has_warned = True
    log.warning(
        "rank %d of %d: %s belongs to this rank alone, since torch.distributed is not "
        "initialised; ranks that save to one directory separately replace each other's files. To "
        "save together, call torch.distributed.init_process_group() first; or save on one rank, "
        "or to several directories",
        *(rank, ranks, what),
    )


def ranks_within(group: Any) -> dict[int, int] | None:
    """Returns the rank in the group of each global rank; None where they are the same."""
    if group is None or group is default_group():
        return None
    return {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
