"""Agreement between the ranks of one group, over a c10d store; or nobody.

Responsible for the connection to the store, for rounds being begun in the same order on all ranks,
and for their keys being freed. Must not know files, tensors, formats, or what is agreed on; never
touches a process group, nor the training thread's connection to the store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fastckpt.arguments.environment import launched_rank
from fastckpt.errors import CheckpointError
from fastckpt.ranks.round import COMMITTED_NOTHING, LINGER_S, TIMEOUT_S, Round, pause
from fastckpt.ranks.session import Session
from fastckpt.ranks.store_client import c10d, own_client

log = logging.getLogger("fastckpt")

_UNFREED_ROUNDS = 64

# What a process has begun in a group stays known when a Coordinator is closed and the next one made
# for the same: the others count on.
_sessions: WeakKeyDictionary[Any, dict[str, Session]] = WeakKeyDictionary()
_sessions_lock = threading.Lock()
_has_warned = False  # of a job whose ranks do not know each other


class Coordinator:
    """Rounds of agreement in one group, begun in the same order on each of its ranks.

    Several may be opened one after another under one prefix, even by a later process on a store
    that persists, if every rank opens as many, or if they share a session. Two small keys for each
    rank stay in the store.

    Args:
        store: a torch.distributed store: TCPStore, FileStore, HashStore or PrefixStore of these.
        rank, world_size: this process's rank in the group, and the number of ranks.
        prefix: what the keys begin with; the same on every rank.
        session: of those before it; default: a new one.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, prefix: str, session: Session | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        # The store is kept: in the process that hosts its server, this is what owns it.
        self._store, self._prefix = store, prefix
        self._pid, self._closed = os.getpid(), False
        self.session = session or Session()
        self._lock = threading.RLock()  # of what follows, which only the background uses
        self._client: Any = None
        self._gone = ""
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
        with _sessions_lock:
            known = _sessions.setdefault(group, {}).get(name)
            session = known if known is not None and known.pid == os.getpid() else Session()
            _sessions[group][name] = session
        prefix = f"fastckpt/{group.group_name}/{ascii(name)[1:-1]}"
        return cls(store, rank, world_size, prefix, session)

    @property
    def is_gone(self) -> bool:
        """Whether the store has failed."""
        return bool(self._gone)

    def begin(
        self, label: str, timeout_s: float = TIMEOUT_S, consequence: str = COMMITTED_NOTHING
    ) -> Round:
        """Begins a round without a word to anybody: microseconds, for the training thread.

        Every rank begins rounds of the same labels in the same order. Each wait may take timeout_s
        seconds. What a failure means for the caller is its consequence, in words.

        ValueError: timeout_s is not positive, or this Coordinator is closed. CheckpointError: this
        process was forked from the one that is a rank.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be positive")
        if self.world_size == 1 and os.getpid() != self._pid:
            self.__dict__ = Coordinator.alone().__dict__  # a child is alone too, for itself
        self._check_usable()
        return Round(self, label, timeout_s, consequence)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Frees the connection, and within linger_s keys of failed rounds. Close all before.

        Ranks that have not left a failed round are waited for: they are yet to read why it failed.
        Those are not whose absence it failed for.
        """
        since = time.monotonic()
        try:
            if self._client is not None:
                self.free([])
                while self._is_awaited() and time.monotonic() < since + linger_s:
                    pause(since, since + linger_s)
                    self.free([])
                self.free([], failed_too=True)
                self.session.leave()
                self.call("set", f"last/{self.rank}", self.session.record())
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
            prefix = self.session.prefix if self._client is not None else self._opened()
            full = prefix + key if isinstance(key, str) else [prefix + each for each in key]
            return getattr(self._client, operation)(full, *values)
        except (RuntimeError, OSError) as error:
            self._gone = self._gone or f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConnectionError(self._gone) from error

    def _opened(self) -> str:
        with self._lock:
            if self._client is None:
                client = own_client(self._store)
                with self.session.lock:
                    if not self.session.prefix:
                        number = client.add(f"{self._prefix}/opened/{self.rank}", 1)
                        client.delete_key(f"{self._prefix}/{number - 1}/last/{self.rank}")
                        self.session.prefix = f"{self._prefix}/{number}/"
                self._client = client
            return self.session.prefix

    def _is_awaited(self) -> bool:
        """Whether ranks have yet to leave failed rounds."""
        with self._lock:
            return any(old.failed and old.is_awaited() for old in self._unfreed)

    def free(self, ended: list[Round], failed_too: bool = False) -> None:
        """Deletes this rank's keys of rounds all left, and of the oldest."""
        with self._lock:
            rounds, self._unfreed = [*ended, *self._unfreed], []  # newest first
            for age, old in enumerate(rounds):
                if old.is_over() or age >= _UNFREED_ROUNDS or (failed_too and old.failed):
                    old.delete()
                else:
                    self._unfreed.append(old)


def default_group() -> Any:
    """The group of all ranks; None where torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


def check_alone(what: str) -> None:
    """Makes sure that this process is the only rank of something that is of all ranks, but was made
    when torch.distributed was not initialised.

    Raises:
        ValueError: it was initialised since, with several ranks.
    """
    group = default_group()
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks > 1:
        raise ValueError(
            f"{what} was made before torch.distributed.init_process_group(), so it knows one rank, "
            f"but there are {ranks} now, which would replace each other's files: make it "
            "afterwards, on all ranks; or pass group=, for one rank alone a group of that rank "
            "(torch.distributed.new_subgroups(1)[0])"
        )
    warn_of_unknown_ranks(what)


def warn_of_unknown_ranks(what: str) -> None:
    """Says, once, that a launcher has started several ranks, but something that all of them should
    do together is done by this one alone, since torch.distributed is not initialised.

    The first rank is not told: that it saves alone may well be meant.
    """
    global _has_warned
    rank, ranks = launched_rank() or (0, 1)
    if _has_warned or rank == 0 or default_group() is not None:
        return
    _has_warned = True
    log.warning(
        "rank %d of %d: %s is of this rank alone, since torch.distributed is not initialised; "
        "ranks that save to one directory alone replace each other's files. To save together, call "
        "torch.distributed.init_process_group() first; or save on one rank, or to several "
        "directories",
        *(rank, ranks, what),
    )


def ranks_within(group: Any) -> dict[int, int] | None:
    """Rank in the group of each global rank; None where they are the same."""
    if group is None or group is default_group():
        return None
    return {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
