"""Lease: the record in a root, or in a node's directory, that says which job saves there, so that
no second one does meanwhile.

The module takes, renews and releases it, and decides whether a job that has it still lives. It must
not know what is saved, nor in what kind of store the record lies.

What was committed does not depend on leases: an attempt at a step has a directory that no other one
ever has. A lease keeps two jobs from training on without knowing of each other.
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
    Found,
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
# How often a job renews its lease, and how long after that other hosts take it for held.
BEAT_S, LASTS_S = 60.0, 900.0
_UNWRITTEN_S = 60.0  # what says nothing may be a lease that is just being made

# By this process, which releases them as it exits. Changed and copied by single operations.
_held: set[Lease] = set()


def now_text() -> str:
    """Returns the time as a record tells it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Lease:
    """The lease of a root, as the first rank of a job sees it, or of a node.

    Args:
        storage, root: as StepStore's.
        of_node: there is none on what several machines see: each has its own steps there.

    Attributes:
        path: of the record.
        records: what reads and writes it.
    """

    def __init__(self, storage: Storage, root: str, of_node: bool = False) -> None:
        self.path = path = os.path.join(root, LEASE_FILE)
        self.records: RecordStore = (
            LeaseObject(storage, path) if is_mounted(root) else LeaseFile(storage, path, of_node)
        )
        self._root = root
        self._user: weakref.ref[object] | None = None
        self._takes_over = False
        self._lock = NotedLock("lease", path)
        self._has_it, self._pid, self._began = False, 0, ""
        # Taken while the lease is held, by the thread that renews it: whoever releases it ends
        # that. A finalizer may, since it waits for nothing.
        self._holding: _thread.LockType | None = None
        self._may_come_back = False  # whether a job that had it before may still live
        self._is_kept, self._passing = False, 0  # by whom take() was called
        self._takings = 0

    @property
    def is_held(self) -> bool:
        """Whether this process has it, or needs none since files are objects here."""
        return not self.records.is_needed or (self._has_it and self._pid == os.getpid())

    @property
    def tenure(self) -> int:
        """A number that is another one whenever the lease was taken anew; 0 if it is not held."""
        return self._takings if self.records.is_needed and self.is_held else 0

    def take(self, passing: bool = False) -> None:
        """Takes the lease, if this process does not have it.

        Args:
            passing: until give_back(), unless somebody takes it for longer.

        Raises:
            RootInUse: another job has it. StorageError: that cannot be found out.
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
        """Takes the lease that lies there, if its job is gone or if it is this process's own;
        returns False if it is another one by now. Raises RootInUse.
        """
        try:
            if (found := self.records.read()) is None:
                return False
            if found.is_own:
                return self.records.adopt(found)
            if not self._takes_over and not self._is_over(found):
                is_beside = found.record is not None and found.record.space == pid_space()
                ends_by_age = not is_beside and not self.records.locks()[1]
                age_s = self.records.age_s(found)
                raise RootInUse(refusal(self._root, found.record, age_s, ends_by_age))
            self._may_come_back |= self._takes_over
            return self.records.replace(found, self._record(), by_force=self._takes_over)
        except OSError as error:
            # Where there are no locks, somebody else may have removed or replaced it meanwhile.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return False

    def take_over(self) -> None:
        """Takes the lease although a job may have it, and leaves it to whoever saves next. If that
        job lives after all, it sees that, and its save fails. Raises as take().
        """
        self._takes_over = True
        self.take()
        self.release()

    def _is_over(self, found: Found) -> bool:
        """Returns whether the job that has the lease is gone, or has given it up."""
        record, records = found.record, self.records
        if record is not None and record.is_over:
            self._may_come_back = True
            return True
        if record is not None and record.space == pid_space():
            return started(record.pid) != record.started
        is_locked, are_all_seen = records.locks()
        if is_locked:
            return False
        # On a local file system everybody's locks are known. Elsewhere each host may have its own.
        if are_all_seen or (record is not None and is_of_same_job(record)):
            return True
        is_old = records.age_s(found) >= lasts_s(record)
        self._may_come_back |= is_old
        return is_old

    def renew(self) -> None:
        """Finds out, before a commit, that this process has the lease, and writes the time.

        Raises:
            RootInUse: another job has taken it over. StorageError: that cannot be found out.
        """
        if not self.records.is_needed:
            return
        with self._lock, reported("write", self.path):
            if self.is_held and not self._is_renewed():
                self._let_go()
                record = self._others_record()
                if record is not None:
                    raise RootInUse(loss(self._root, record))
            self._take()  # if somebody removed it by hand, or put what is no lease in its place

    def _is_renewed(self, *, is_over: bool = False) -> bool:
        """Writes the record anew; returns False if what lies there is not this process's."""
        records, content = self.records, self._record(is_over=is_over)
        if records.renew(content):
            return True
        found = records.read()  # another lease of this process may have renewed it
        is_own = found is not None and found.is_own and records.adopt(found)
        return is_own and records.renew(content)

    def is_lost(self) -> bool:
        """Returns whether another job has taken it. Raises StorageError."""
        with reported("read", self.path):
            return self._others_record() is not None

    def _others_record(self) -> LeaseRecord | None:
        """Returns the record of another process, if that is what lies there."""
        found = self.records.read()
        record = None if found is None else found.record
        return None if record is None or record.nonce == own_nonce() else record

    def _keep_renewed(self, holding: _thread.LockType) -> None:
        """Renews it every BEAT_S, whether anything is saved or not, until it is given up. Once it
        is another job's, the next save finds that out.
        """
        while not holding.acquire(timeout=BEAT_S):
            with self._lock, suppress(OSError):  # it is renewed at the next beat, or the next save
                if self._holding is holding and self.is_held:
                    self._is_renewed()
        with self._lock:
            if self._holding is holding:  # who used it was collected
                self._release()

    def give_back(self) -> None:
        """Ends what take() in passing began: gives the lease up if nobody else has taken it."""
        with self._lock:
            self._passing -= 1
        with suppress(OSError):  # as release() does
            within(SERVER_S, partial(self._release, only_unwanted=True))

    def release_with(self, user: object) -> None:
        """Has the thread that renews the lease give it up when `user` is collected, unless that is
        done before.
        """
        self._user = weakref.ref(user, lambda _user: self._end_beats())

    def release(self, timeout_s: float = math.inf) -> None:
        """Gives the lease up, if this process has it and the server answers soon, within timeout_s
        at most. Idempotent.
        """
        with suppress(OSError):  # it counts for nothing once this process has ended
            within(min(SERVER_S, timeout_s), self._release)

    def _release(self, only_unwanted: bool = False) -> None:
        with self._lock:
            if only_unwanted and (self._is_kept or self._passing):
                return
            self._is_kept = False
            if not self.records.is_needed or not self.is_held:
                return
            heirs = [each for each in _held.copy() if each is not self and each._is_of(self)]
            if heirs:  # another Checkpointer of this process has it, too
                heirs[0].records, self.records = self.records, heirs[0].records
                self._let_go()
            else:
                self._give_up()

    def _give_up(self) -> None:
        """Removes the lease; or leaves word, if a job that comes back has to see that it was taken
        over meanwhile.
        """
        with suppress(OSError):  # it counts for nothing once this process has ended
            if self._may_come_back or not self.records.remove():
                self._is_renewed(is_over=True)
        self._let_go()

    def _is_of(self, other: Lease) -> bool:
        return self.path == other.path and self.records.storage is other.records.storage

    def is_left(self) -> bool:
        """Returns whether a lease lies there whose job is gone, and did not give it up."""
        return self._is_others(alive=False)

    def is_of_another(self) -> bool:
        """Returns whether another job that lives has it."""
        return self._is_others(alive=True)

    def _is_others(self, alive: bool) -> bool:
        with suppress(OSError):  # it is not to be read
            if (found := self.records.read()) is None:
                return False
            record = found.record
            if alive and record is None:  # it may be being made: it is not to be locked
                return self.records.age_s(found) < _UNWRITTEN_S
            if (record is not None and record.is_over) or (alive and found.is_own):
                return False
            return self._is_over(found) != alive
        return False

    def remove_left(self) -> bool:
        """Removes such a lease; returns whether it did."""
        with suppress(RootInUse, OSError):  # another process was faster, or it is not ours
            if self.is_left():
                self.take()
                self.release()
                return True
        return False

    def _keep(self) -> None:
        self._has_it, self._pid = True, os.getpid()
        self._takings += 1
        _held.add(self)
        self._holding = holding = _thread.allocate_lock()
        holding.acquire()
        # Without a thread it is renewed by saves alone.
        start_thread(partial(self._keep_renewed, holding), BEATING, daemon=True)

    def _end_beats(self) -> None:
        if (holding := self._holding) is not None:
            with suppress(RuntimeError):  # it was ended before
                holding.release()

    def _let_go(self) -> None:
        _held.discard(self)
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


# Leases of directories to which a process saves with no object that stands for them, by path; and
# the last of those that were asked for alone.
_of_directories: dict[str, Lease] = {}
_last = ""


def lease_of(storage: Storage, directory: str, *, alone: bool = False) -> Lease:
    """Returns the lease that this process has of a directory, or is to take, until it exits or
    give_up() is called.

    Args:
        alone: whether the directory is one of many: then the last one of these is given up, so that
            no more than one has a file that is open.
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
    """Whether lease_of() returns this lease; else whoever has taken it gives it up."""
    return lease in _of_directories.values()


def give_up(directory: str) -> None:
    """Gives up the lease that lease_of() has returned, if there is one: no more saves of this
    process are expected there. One that is still running, or comes later, takes it anew.
    """
    if (lease := _of_directories.pop(directory, None)) is not None:
        lease.release()


def is_of_same_job(record: LeaseRecord) -> bool:
    """Returns whether the scheduler has begun the job again, and so has ended it before."""
    job, restarts = launched_job()
    return record.job == job != "" and record.restarts < restarts


def lasts_s(record: LeaseRecord | None) -> float:
    """Returns for how long a lease counts after it was written; without a record, which may just
    be coming, for a short while.
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
    for lease in [*_held]:
        lease.release()


def _forget_all() -> None:
    """Leaves the leases to the parent of a forked child, where their threads may have been amid
    anything.
    """
    for lease in _held:
        lease._lock, lease._holding = NotedLock("lease", lease.path), None
        lease._has_it = False
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
pipeline.when_drained.append(_release_all)
