"""Lease: the record in a root, or in a node's directory, of the job that saves there. It keeps a
second job from saving there at the same time.

The module takes, renews and releases leases, and decides whether the job of a lease is alive. It
must not know what is saved, or which kind of store holds the record.

Leases do not protect committed checkpoints, since each attempt at a step has a unique directory.
They keep two jobs from training at the same time without knowing of each other.
"""

from __future__ import annotations

import _thread
import errno
import math
import os
import shlex
import socket
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial

from fastckpt.arguments.environment import launched_job
from fastckpt.arguments.urls import is_mounted
from fastckpt.errors import RootInUse, StorageError
from fastckpt.latch import SERVER_S, start_thread, within
from fastckpt.saving import pipeline
from fastckpt.saving.lease_records import (
    LeaseEntry,
    LeaseFile,
    LeaseObject,
    LeaseRecord,
    RecordStore,
    own_nonce,
)
from fastckpt.storage.calls import NotedLock
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.machine import pid_space, started

LEASE_FILE = "lease.json"
BEATING = "fastckpt-lease"  # the name of a thread
TRIES_MAX = 50
# How often a job renews its lease, and for how long other hosts respect a lease after its renewal.
BEAT_S, LASTS_S = 60.0, 900.0
_UNWRITTEN_S = 60.0  # an empty file of at most this age may be a lease that is just being made

# The leases that this process holds and releases at exit. Changed and copied by single operations.
_leases: set[Lease] = set()
# One lock for all leases of a process on a record, because a release hands the record's file over
# to another of them. By process, storage and path.
_locks: weakref.WeakValueDictionary[tuple[int, int, str], NotedLock] = weakref.WeakValueDictionary()


def now_text() -> str:
    """Returns the current time in the format of the records."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Lease:
    """The lease of a root, for the first rank of a job, or of a node's directory.

    Args:
        storage, root: see StepStore.
        of_node: whether the root is a node's directory. If several machines see this directory, it
            has no lease, since each machine has its own steps there.

    Attributes:
        path: the path of the record.
        records: reads and writes the record.
    """

    def __init__(self, storage: Storage, root: str, of_node: bool = False) -> None:
        self.path = path = os.path.join(root, LEASE_FILE)
        self.records: RecordStore = (
            LeaseObject(storage, path) if is_mounted(root) else LeaseFile(storage, path, of_node)
        )
        self._root = root
        self._user: weakref.ref[object] | None = None
        self._takes_over = False
        self._lock = _locks.setdefault((os.getpid(), id(storage), path), NotedLock("lease", path))
        self._has_it, self._pid, self._began = False, 0, ""
        # Locked while the lease is held. Its release ends the thread that renews the lease. A
        # finalizer may release it, since that does not wait.
        self._holding: _thread.LockType | None = None
        self._may_come_back = False  # whether an earlier holder may still be alive
        self._is_kept, self._passing = False, 0  # the callers of take()
        self._takings = 0

    @property
    def is_held(self) -> bool:
        """Whether this process has the lease, or needs none because the files are objects."""
        return not self.records.is_needed or (self._has_it and self._pid == os.getpid())

    @property
    def tenure(self) -> int:
        """A number that changes whenever the lease is taken again; 0 if it is not held."""
        return self._takings if self.records.is_needed and self.is_held else 0

    def take(self, passing: bool = False) -> None:
        """Takes the lease, if this process does not have it.

        Args:
            passing: take it only until give_back(), unless another caller takes it for longer.

        Raises:
            RootInUse: another job has the lease.
            StorageError: it is unknown whether another job has it.
        """
        with self._lock:
            self._take()
            if passing:
                self._passing += 1
            else:
                self._is_kept = True

    def _take(self) -> None:
        for _ in range(TRIES_MAX):
            if self.is_held:
                return
            self._began = now_text()
            with reported("open", self.path):
                if self.records.make(self._record()) or self._has_replaced():
                    self._keep()
        raise StorageError("open", self.path, errno.EEXIST)

    def _has_replaced(self) -> bool:
        """Takes the existing lease if its job is gone or it belongs to this process; returns False
        if the lease has changed in the meantime. Raises RootInUse.
        """
        try:
            if (entry := self.records.read()) is None:
                return False
            if entry.is_own:
                return self.records.adopt(entry)
            if not self._takes_over and not self._is_over(entry):
                is_beside = entry.record is not None and entry.record.space == pid_space()
                ends_by_age = not is_beside and not self.records.locks()[1]
                age_s = self.records.age_s(entry)
                raise RootInUse(refusal(self._root, entry.record, age_s, ends_by_age))
            self._may_come_back |= self._takes_over
            return self.records.replace(entry, self._record(), by_force=self._takes_over)
        except OSError as error:
            # Without locks, another process may have removed or replaced it in the meantime.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return False

    def take_over(self) -> None:
        """Takes the lease even if a job may have it, and releases it for the next job. If the
        earlier job is still alive, it detects this, and its next save fails. Raises like take().
        """
        self._takes_over = True
        self.take()
        self.release()

    def _is_over(self, entry: LeaseEntry) -> bool:
        """Returns whether the job of the lease is gone or has released the lease."""
        record, records = entry.record, self.records
        if record is not None and record.is_over:
            self._may_come_back = True
            return True
        if record is not None and record.space == pid_space():
            return started(record.pid) != record.started
        is_locked, are_all_seen = records.locks()
        if is_locked:
            return False
        # A local file system shows the locks of all processes. Others may keep locks in each host.
        if are_all_seen or (record is not None and is_of_same_job(record)):
            return True
        is_old = records.age_s(entry) >= lasts_s(record)
        self._may_come_back |= is_old
        return is_old

    def renew(self) -> None:
        """Checks before a commit that this process has the lease, and writes the time.

        Raises:
            RootInUse: another job has taken the lease over.
            StorageError: it is unknown whether a job has.
        """
        if not self.records.is_needed:
            return
        with self._lock, reported("write", self.path):
            if self.is_held and not self._is_renewed():
                self._let_go()
                record = self._others_record()
                if record is not None:
                    raise RootInUse(loss(self._root, record))
            self._take()  # in case it was removed or overwritten by hand

    def _is_renewed(self, *, is_over: bool = False) -> bool:
        """Rewrites the record; returns False if the lease belongs to another process."""
        records, content = self.records, self._record(is_over=is_over)
        if records.renew(content):
            return True
        entry = records.read()  # another lease of this process may have renewed it
        is_own = entry is not None and entry.is_own and records.adopt(entry)
        return is_own and records.renew(content)

    def is_lost(self) -> bool:
        """Returns whether another job has taken the lease. Raises StorageError."""
        with reported("read", self.path):
            return self._others_record() is not None

    def _others_record(self) -> LeaseRecord | None:
        """Returns the record if it belongs to another process, otherwise None."""
        entry = self.records.read()
        record = None if entry is None else entry.record
        return None if record is None or record.nonce == own_nonce() else record

    def _keep_renewed(self, holding: _thread.LockType) -> None:
        """Renews the lease every BEAT_S, even if nothing is saved, until it is released. If another
        job takes the lease, the next save fails.
        """
        while not holding.acquire(timeout=BEAT_S):
            with self._lock, suppress(OSError):  # it is renewed at the next beat, or the next save
                if self._holding is holding and self.is_held:
                    self._is_renewed()
        with self._lock:
            if self._holding is holding:  # its user was garbage-collected
                self._release()

    def give_back(self) -> None:
        """Ends a take(passing=True): releases the lease if no other caller has taken it."""
        with self._lock:
            self._passing -= 1
        with suppress(OSError):  # as release() does
            within(SERVER_S, partial(self._release, only_unwanted=True))

    def release_with(self, user: object) -> None:
        """Makes the thread that renews the lease release it when `user` is garbage-collected, if it
        was not released before.
        """
        self._user = weakref.ref(user, lambda _user: self._end_beats())

    def release(self, timeout_s: float = math.inf) -> None:
        """Releases the lease, if held; waits at most timeout_s for the server. Idempotent."""
        with suppress(OSError):  # the lease becomes void at the end of this process
            within(min(SERVER_S, timeout_s), self._release)

    def _release(self, only_unwanted: bool = False) -> None:
        with self._lock:
            if only_unwanted and (self._is_kept or self._passing):
                return
            self._is_kept = False
            if not self.records.is_needed or not self.is_held:
                return
            heirs = [each for each in _leases.copy() if each is not self and each._is_of(self)]
            if heirs:  # another Checkpointer of this process also has it
                heirs[0].records, self.records = self.records, heirs[0].records
                self._let_go()
            else:
                self._give_up()

    def _give_up(self) -> None:
        """Removes the lease. If an earlier holder may come back, leaves a record instead, so that
        this job sees that the lease was taken over.
        """
        with suppress(OSError):  # the lease becomes void at the end of this process
            if self._may_come_back or not self.records.remove():
                self._is_renewed(is_over=True)
        self._let_go()

    def _is_of(self, other: Lease) -> bool:
        return self.path == other.path and self.records.storage is other.records.storage

    def is_left(self) -> bool:
        """Returns whether there is a lease whose job is gone and did not release it."""
        return self._is_others(alive=False)

    def is_of_another(self) -> bool:
        """Returns whether another job that is alive has it."""
        return self._is_others(alive=True)

    def _is_others(self, alive: bool) -> bool:
        with suppress(OSError):  # it cannot be read
            if (entry := self.records.read()) is None:
                return False
            record = entry.record
            if alive and record is None:  # it may just be made: do not lock it
                return self.records.age_s(entry) < _UNWRITTEN_S
            if (record is not None and record.is_over) or (alive and entry.is_own):
                return False
            return self._is_over(entry) != alive
        return False

    def remove_left(self) -> bool:
        """Removes the lease if is_left(); returns whether it did."""
        with suppress(RootInUse, OSError):  # another process was faster, or access is denied
            if self.is_left():
                self.take()
                self.release()
                return True
        return False

    def _keep(self) -> None:
        self._has_it, self._pid = True, os.getpid()
        self._takings += 1
        _leases.add(self)
        self._holding = holding = _thread.allocate_lock()
        holding.acquire()
        # If no thread can be started, only saves renew the lease.
        start_thread(partial(self._keep_renewed, holding), BEATING, daemon=True)
        if self._user is not None and self._user() is None:
            self._end_beats()  # a save that outlives its Checkpointer holds it for its commit alone

    def _end_beats(self) -> None:
        if (holding := self._holding) is not None:
            with suppress(RuntimeError):  # it has already ended
                holding.release()

    def _let_go(self) -> None:
        _leases.discard(self)
        self._end_beats()
        self._holding = None
        self._has_it = False
        if self._pid == os.getpid():  # a child of fork() has closed it
            self.records.let_go()

    def _record(self, *, is_over: bool = False) -> bytes:
        return LeaseRecord(
            own_nonce(),
            socket.gethostname(),
            pid_space(),
            os.getpid(),
            started(os.getpid()) or 0,
            *launched_job(),
            self._began,
            now_text(),
            int(LASTS_S),
            is_over,
        ).to_bytes()


# Leases of directories for which the process has no Checkpointer, by path; and the path of the last
# one that was requested with `alone`.
_of_directories: dict[str, Lease] = {}
_last = ""


def lease_of(storage: Storage, directory: str, *, alone: bool = False) -> Lease:
    """Returns this process's lease of a directory; the lease may not be taken yet. The process
    keeps it until it exits or calls give_up().

    Args:
        alone: whether the directory is one of many. If so, the lease of the previous one is
            released, so that at most one lease file is open.
    """
    global _last
    if alone and _last != directory:
        give_up(_last)
        _last = directory
    lease = _of_directories.get(directory)
    if lease is not None and lease.records.storage is not storage:
        give_up(directory)
        lease = None
    return lease or _of_directories.setdefault(directory, Lease(storage, directory))


def is_registered(lease: Lease) -> bool:
    """Whether lease_of() returns this lease; if not, the caller that took it releases it."""
    return lease in _of_directories.values()


def give_up(directory: str) -> None:
    """Releases the directory's lease of lease_of(), if there is one, because this process is not
    expected to save there again. A running or later save takes the lease again.
    """
    if (lease := _of_directories.pop(directory, None)) is not None:
        lease.release()


def is_of_same_job(record: LeaseRecord) -> bool:
    """Returns whether the scheduler has restarted the job, so that the earlier run has ended."""
    job, restarts = launched_job()
    return record.job == job != "" and record.restarts < restarts


def lasts_s(record: LeaseRecord | None) -> float:
    """Returns how long a lease is valid after its renewal; a short time if there is no record,
    since one may just be being written.
    """
    return _UNWRITTEN_S if record is None else record.lasts_s


def _holder(record: LeaseRecord | None) -> str:
    if record is None:
        return f"an unknown process ({LEASE_FILE} there is damaged or just being written)"
    job = f" (job {record.job})" if record.job else ""
    return f"process {record.pid} on host {record.host!r}{job}"


def refusal(root: str, record: LeaseRecord | None, age_s: float, ends_by_age: bool) -> str:
    since = "" if record is None else f", since {record.began}"
    command = f"`fastckpt repair {shlex.quote(root)} --takeover`"
    advice = f"If it hangs and cannot be ended, run {command}"
    if ends_by_age:
        advice = (
            f"If it is dead, because its host crashed or is disconnected, run {command}, or wait: "
            f"its lease expires {lasts_s(record):.0f} s after the last renewal"
        )
    return (
        f"{root!r} is in use by another job: {_holder(record)} saves there{since}, and renewed its "
        f"lease {age_s:.0f} s ago; nothing was committed. Only one job at a time may save to a "
        f"root: end the other job, or save to another root. {advice}"
    )


def loss(root: str, record: LeaseRecord) -> str:
    if record.is_over:
        return (
            f"{root!r} was taken over by another job or by `fastckpt repair --takeover` "
            f"({_holder(record)}), and is free again; nothing was committed. The next save "
            "succeeds unless another job saves there first"
        )
    return (
        f"{root!r} was taken over by another job: {_holder(record)} has held its lease since "
        f"{record.began}; nothing was committed. End one of the two jobs: after the other one has "
        "ended, saves of this one succeed again"
    )


def _release_all() -> None:
    for lease in [*_leases]:
        lease.release()


def _forget_all() -> None:
    """Forgets the leases in a forked child, because they belong to the parent. Replaces the locks,
    which threads of the parent may have held.
    """
    for lease in _leases:
        lease._lock, lease._holding = NotedLock("lease", lease.path), None
        lease._has_it = False
    _leases.clear()


os.register_at_fork(after_in_child=_forget_all)
pipeline.when_drained.append(_release_all)
