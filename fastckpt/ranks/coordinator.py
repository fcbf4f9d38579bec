"""Coordinator: agreement between the ranks of one group over a c10d store, or within one process.

The module connects to the store, begins rounds and frees their keys. It never touches a process
group or the training thread's connection to the store.
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
    """The part of a c10d store's interface that agreements need, for one process alone: a dict.

    torch's HashStore would be enough. However, a thread inside one of its calls at the
    interpreter's exit ends the process by std::terminate (before Python 3.14, which hangs such
    threads).
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def clone(self) -> MemoryStore:
        """Returns this store, because its calls do not block each other."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value under a key."""
        self._values[key] = _in_bytes(value)

    def get(self, key: str) -> bytes:
        """Returns a value. Raises KeyError at once if there is none, because no other process could
        set it.
        """
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys. Raises KeyError, like get()."""
        return [self._values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Returns whether every key has a value."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Stores a value if the present one is `expected`; "" means no value. Returns the value
        stored afterwards, or `expected` if there is none.
        """
        with self._lock:
            present = self._values.get(key)
            if (present or b"") == _in_bytes(expected):
                self._values[key] = present = _in_bytes(value)
            return _in_bytes(expected) if present is None else present

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under a key, which is 0 if missing, and returns the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            return total

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it existed."""
        return self._values.pop(key, None) is not None


def _in_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def own_client(store: Any) -> Any:
    """Returns a client whose calls do not block those of `store`, which belongs to the training
    thread.
    """
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
    """Calls store.clone() on a separate thread, with a time limit. If the server dies just before,
    torch's client retries for the store's own timeout of minutes, and cannot be stopped.
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
    """The terms of this process for one purpose in one group, each with its session, and the terms
    that other ranks published.

    Args:
        prefix: the prefix of the keys that publish terms; the same on every rank.

    Attributes:
        pid: the process's pid.
    """

    def __init__(self, prefix: str) -> None:
        self.pid = os.getpid()
        self._begin, self._prefix = prefix, ""
        self._lock = threading.Lock()
        self._sessions: dict[str, RoundNumbers] = {}
        self._used = list[Terms]()  # those that were told; under _lock

    def session(self, terms: Terms) -> RoundNumbers:
        """Returns the session for these terms. From now on this process is ready to take part on
        them.
        """
        return self._sessions.setdefault(json.dumps(terms), RoundNumbers())

    def _made(self) -> list[Terms]:
        return [json.loads(text) for text in self._sessions.copy()]

    def tell(self, client: Any, rank: int, terms: Terms, why: str) -> None:
        """Publishes to the other ranks that this rank takes part on these terms; or, with `why`,
        the reason why it does not.
        """
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
        """Returns why another rank does not take part on this rank's terms; "" if it may take part,
        as far as known.
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
    """The rounds of agreement in one group. Every rank of the group begins them in the same order.

    Several Coordinators may use one prefix, one after the other. Later ones may even be in a later
    process, on a persistent store. The condition is that every rank creates equally many, or that
    they share a session. Two small keys for each rank stay in the store, and one for each round
    that a rank missed.

    Args:
        store: a torch.distributed store: TCPStore, FileStore, HashStore or PrefixStore of these.
        rank, world_size: this process's rank in the group, and the number of ranks.
        prefix: the prefix of all keys; the same on every rank.
        session: the session of the previous Coordinator; None: a new session.
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
        """Creates a Coordinator for a single process: rank 0 of 1, with a store in its own
        memory.
        """
        return cls(MemoryStore(), 0, 1, "alone")

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None, name: str, terms: Terms | None = None
    ) -> Coordinator:
        """Creates a Coordinator for a torch.distributed group, over the job's own store; for None,
        see alone().

        `name` separates the keys of different purposes. `terms` must be the same on all ranks; if a
        rank waits for another with different terms, its error names the terms that differ. Raises
        ValueError if this process is not a rank of the group, or torch.distributed is not
        initialised.
        """
        if group is None:
            return cls.alone()
        if not dist.is_initialized():
            raise ValueError(
                "group is given, but torch.distributed is not initialised in this process"
            )
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group must include this process, which is not one of its ranks")
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
        """Returns the address from which this process reaches the store, or the loopback address if
        the store is not reached over TCP. Raises OSError.
        """
        base = self._store
        while isinstance(base, c10d.PrefixStore):
            base = base.underlying_store
        if not isinstance(base, c10d.TCPStore):
            return "127.0.0.1"
        return address_towards(base.host, base.port)

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the store is lost; see renew()."""
        return bool(self._gone)

    def begin(
        self, label: str, timeout_s: float = TIMEOUT_S, consequence: str = COMMITTED_NOTHING
    ) -> Round:
        """Begins a round on the training thread, in microseconds, without communication.

        Every rank must begin rounds of the same labels in the same order. Each wait may take
        timeout_s seconds. `consequence` is the part of messages that states the result of a failure
        for the caller.

        Raises ValueError if timeout_s is not positive or this Coordinator is closed, and
        CheckpointError if this process was forked from the process of the rank.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be above 0 seconds")
        if self.world_size == 1 and os.getpid() != self._pid:
            self.__dict__ = Coordinator.alone().__dict__  # a forked child is alone by itself
        self._check_usable()
        return Round(self, label, timeout_s, consequence)

    def give_up(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Closes the Coordinator at the exit of a context. If the body raised an error, which may
        not have happened on other ranks, publishes why this rank takes part in no round.
        """
        why = "" if error is None else f"could not begin ({type(error).__name__}: {error})"
        self.close(why=why.encode(errors="replace").decode()[:_WHY_CHARS])

    def close(self, linger_s: float = LINGER_S, why: str = "") -> None:
        """Closes the connection and frees this rank's keys. All rounds must be closed before. `why`
        is published to other ranks that wait for this rank.

        Waits at most linger_s seconds for ranks that have not left a failed round, because they
        still have to read why it failed. Ranks whose absence made the round fail are not waited
        for.
        """
        since, self._why = time.monotonic(), why
        try:
            if self._client is not None or (why and self.world_size > 1):
                self.session.leave(why)  # first, since the store may be unreachable
                self.free([])
                while self._is_awaited() and time.monotonic() < since + linger_s:
                    pause(since, since + linger_s)
                    self.free([])
                self.free([], failed_too=True)
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
        """Calls an operation of the store. Raises ConnectionError if the connection is lost, and on
        every later call. In this case it is unknown whether the store has carried out the
        operation.
        """

        def ask(client: Any) -> Any:
            prefix = self.session.prefix
            full = prefix + key if isinstance(key, str) else [prefix + each for each in key]
            return getattr(client, operation)(full, *values)

        return self._ask(ask)

    def differing(self, rank: int) -> str:
        """Returns how the terms of a rank that has published no record differ, so that it takes
        part in no round; "" if it may take part. For errors see call().
        """
        known = self._known
        if known is None:
            return ""
        return self._ask(lambda client: known.differing(client, rank, self._terms, self.rank))

    def _ask(self, ask: Callable[[Any], T]) -> T:
        """Calls a function with the connection to the store, and returns its result. For errors see
        call().
        """
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
        """Makes the next call open a new connection if the last connection was lost. Only for a
        caller that has sent no operation yet, or only operations that may be repeated. A lost first
        connection is not renewed: the store may have counted it, and the next one would have
        another prefix.
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
        """Returns whether some ranks have not left failed rounds yet."""
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
    """Returns the group of all ranks; None if torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


def check_alone(what: str, launched: tuple[int, int] | None) -> None:
    """Raises ValueError if there are several ranks now, but `what` was created before
    torch.distributed was initialised, and therefore covers only this rank. Otherwise calls
    warn_of_unknown_ranks().
    """
    group = default_group()
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks > 1:
        raise ValueError(
            f"{what} was created before torch.distributed.init_process_group(), so it is for one "
            f"rank only, but there are {ranks} ranks now, which would replace each other's files: "
            "create it after init_process_group(), on all ranks; or pass group=, for example "
            "a group of this rank alone (torch.distributed.new_subgroups(1)[0])"
        )
    warn_of_unknown_ranks(what, launched)


def warn_of_unknown_ranks(what: str, launched: tuple[int, int] | None) -> None:
    """Warns once, if a launcher has started several ranks, that this rank does alone what all ranks
    should do together. The first rank does not warn, because it may save alone on purpose.

    Args:
        what: the object that belongs to this rank alone, for the message.
        launched: this process's rank and the number of ranks, if a launcher has set them.
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
    """Returns a map from global ranks to ranks in the group; None if they are the same."""
    if group is None or group is default_group():
        return None
    return {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
