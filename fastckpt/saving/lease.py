"""Lease: the file in a root, or in a node's directory, that says which job saves there, so that no
second one does meanwhile.

The module takes, renews and releases it, and decides whether a job that has it still lives. It must
not know what is saved.

What was committed does not depend on leases: an attempt at a step has a directory that no other one
ever has. A lease keeps two jobs from training on without knowing of each other.
"""

from __future__ import annotations

import _thread
import errno
import json
import math
import os
import shlex
import socket
import time
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

from fastckpt.arguments.environment import launched_job
from fastckpt.errors import RootInUse, StorageError
from fastckpt.latch import SERVER_S, start_thread, within
from fastckpt.saving import pipeline
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.calls import NotedLock
from fastckpt.storage.file_system import NEW_MODE, Storage, patiently, reported
from fastckpt.storage.machine import pid_space, started
from fastckpt.storage.vanishing import is_removed

LEASE_FILE = "lease.json"
VERSION = 1
_NUMBER_END = 1 << 63
NBYTES = 1024  # of every record, so that one is replaced by one write
_CHARS_MAX = {"nonce": 32, "host": 64, "space": 128, "job": 128, "began": 64, "renewed": 64}


class LeaseRecord(NamedTuple):
    """The process of a job that saves to a root.

    Attributes:
        nonce: tells this process from every other one.
        host: its host's name.
        space, pid, started: as machine.pid_space() and machine.started() have them.
        job, restarts: the launcher's name for the job, "" if it has none; and how often the
            scheduler has begun the job again.
        began, renewed: when the lease was taken and last renewed, in ISO 8601.
        lasts_s: for how long after that other hosts take it for held.
        is_over: whether the job has given it up.
    """

    nonce: str
    host: str
    space: str
    pid: int
    started: int
    job: str
    restarts: int
    began: str
    renewed: str
    lasts_s: int
    is_over: bool = False

    def to_bytes(self) -> bytes:
        members = {name: str(getattr(self, name))[:most] for name, most in _CHARS_MAX.items()}
        content = {"fastckpt-lease": VERSION, **self._asdict(), **members}
        return json.dumps(content, indent=1).encode().ljust(NBYTES - 1) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord | None:
        """Returns a record that was stored, by this version or a newer one; None if it is none."""
        try:
            value = json.loads(content)  # of NBYTES at most
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not {"fastckpt-lease", *cls._fields} <= value.keys():
            return None
        value = {name: value[name] for name in cls._fields}
        numbers = [value[name] for name in ("pid", "started", "restarts", "lasts_s")]
        if any(type(number) is not int or not 0 <= number < _NUMBER_END for number in numbers):
            return None
        if any(type(value[name]) is not str for name in _CHARS_MAX):
            return None
        return cls(**value) if type(value["is_over"]) is bool else None


def now_text() -> str:
    """Returns the time as a record tells it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


BEATING = "fastckpt-lease"  # the name of a thread
TRIES_MAX, _PAUSE_S = 50, 0.01
# How often a job renews its lease, and how long after that other hosts take it for held.
BEAT_S, LASTS_S = 60.0, 900.0
_UNWRITTEN_S = 60.0  # what says nothing may be a lease that is just being made

# By this process, which releases them as it exits. Changed and copied by single operations.
_held: set[Lease] = set()
_process = (0, "")  # this process's pid, and the nonce of its leases


class Lease:
    """The lease of a root, as the first rank of a job sees it, or of a node.

    Args:
        storage, root: as StepStore's.
        of_node: there is none on what several machines see: each has its own steps there.

    Attributes:
        path: of the file.
    """

    def __init__(self, storage: Storage, root: str, of_node: bool = False) -> None:
        self.path = os.path.join(root, LEASE_FILE)
        self._user: weakref.ref[object] | None = None
        self._of_node = of_node
        self._takes_over = False
        self._storage, self._root = storage, root
        self._lock = NotedLock("lease", self.path)
        self._fd, self._has_it, self._pid, self._began = -1, False, 0, ""
        # Taken while the lease is held, by the thread that renews it: whoever releases it ends
        # that. A finalizer may, since it waits for nothing.
        self._holding: _thread.LockType | None = None
        self._may_come_back = False  # whether a job that had it before may still live
        self._is_of_use = True
        self._is_kept, self._passing = False, 0  # by whom take() was called
        self._takings = 0

    @property
    def is_held(self) -> bool:
        """Whether this process has it, or needs none since files are objects here."""
        return not self._is_of_use or (self._has_it and self._pid == os.getpid())

    @property
    def tenure(self) -> int:
        """A number that is another one whenever the lease was taken anew; 0 if it is not held."""
        return self._takings if self._is_of_use and self.is_held else 0

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
            if self.is_held or self._was_made():
                return
            with reported("open", self.path):
                self._clear_or_adopt()
        raise StorageError("open", self.path, errno.EEXIST)

    def take_over(self) -> None:
        """Takes the lease although a job may have it, and leaves it to whoever saves next. If that
        job lives after all, it sees that, and its save fails. Raises as take().
        """
        self._takes_over = True
        self.take()
        self.release()

    def _was_made(self) -> bool:
        """Makes the file; returns False if there is one, or if another job thought it dead."""
        self._began = now_text()
        storage, content = self._storage, self._record()
        with reported("open", self.path):
            try:
                fd = storage.create(self.path, NEW_MODE)
            except FileExistsError:
                return False
            try:
                policy = storage.policy(fd)[1]
                if not policy.renames_at_once or (self._of_node and policy.remote):
                    self._is_of_use = False
                elif policy.mandatory_locks or self._is_unlocked(fd):
                    self._keep(fd)
                    self._write(content)
                    if not is_removed(storage, fd, self.path):
                        return True
                    self._let_go()
                    return False
            except BaseException:
                if self._fd != fd:
                    close_quietly(storage, fd)
                self._let_go()
                with suppress(OSError):  # the error that led here counts
                    storage.remove(self.path)
                raise
        close_quietly(storage, fd)
        if not self._is_of_use:
            with suppress(OSError):  # it is in nobody's way
                storage.remove(self.path)
        return not self._is_of_use

    def _clear_or_adopt(self) -> None:
        """Removes the lease if its job is gone, and keeps it if it is this process's own. Raises
        RootInUse.
        """
        storage, kept = self._storage, False
        try:
            fd = storage.open(self.path, "lock")
        except FileNotFoundError:
            return
        try:
            record = LeaseRecord.from_bytes(storage.read_at(fd, NBYTES, 0))
            if record is not None and record.nonce == own_nonce() and not record.is_over:
                self._keep(fd)
                kept = True
            elif self._takes_over or self._is_over(record, fd):
                # Only who has its lock removes it: else it might be the lease of who was faster.
                if not (self._takes_over or self._is_unlocked(fd)):
                    time.sleep(_PAUSE_S)
                elif not is_removed(storage, fd, self.path):
                    self._may_come_back |= self._takes_over
                    storage.remove(self.path)
            else:
                is_beside = record is not None and record.space == pid_space()
                ends_by_age = self._storage.policy(fd)[1].remote and not is_beside
                raise RootInUse(refusal(self._root, record, self._age_s(), ends_by_age))
        except OSError as error:
            # Where there are no locks, somebody else may have removed or replaced it meanwhile.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        finally:
            if not kept:
                close_quietly(storage, fd)

    def _is_over(self, record: LeaseRecord | None, fd: int) -> bool:
        """Returns whether the job that has the lease, open as fd, is gone. May lock it."""
        if record is not None and record.is_over:
            self._may_come_back = True
            return True
        if record is not None and record.space == pid_space():
            return started(record.pid) != record.started
        policy = self._storage.policy(fd)[1]
        if not policy.mandatory_locks and not self._is_unlocked(fd):
            return False
        # On a local file system everybody's locks are known. Elsewhere each host may have its own.
        if not policy.remote or (record is not None and is_of_same_job(record)):
            return True
        is_old = self._age_s() >= lasts_s(record)
        self._may_come_back |= is_old
        return is_old

    def _age_s(self) -> float:
        status = self._storage.status(self.path)
        return 0.0 if status is None else max(0.0, time.time() - status.st_mtime)

    def _is_unlocked(self, fd: int) -> bool:
        """Locks the file; returns False if another process has."""
        with suppress(OSError):  # it is not known, and so tells nothing
            return self._storage.lock(fd)
        return True

    def renew(self) -> None:
        """Finds out, before a commit, that this process has the lease, and writes the time.

        Raises:
            RootInUse: another job has taken it over. StorageError: that cannot be found out.
        """
        if not self._is_of_use:
            return
        with self._lock, reported("read", self.path):
            try:
                record = LeaseRecord.from_bytes(self._storage.read_file(self.path, NBYTES))
            except FileNotFoundError:
                record = None
            if record is None and not self._is_there():
                self._let_go()  # somebody removed it by hand, or put what is no lease in its place
            if record is not None and record.nonce != own_nonce():
                self._let_go()
                raise RootInUse(loss(self._root, record))
            if self.is_held:
                self._write(self._record())
            self._take()

    def is_lost(self) -> bool:
        """Returns whether another job has taken it. Raises StorageError."""
        if not self._is_of_use:
            return False
        with reported("read", self.path):
            try:
                record = LeaseRecord.from_bytes(self._storage.read_file(self.path, NBYTES))
            except FileNotFoundError:
                return False
        return record is not None and record.nonce != own_nonce()

    def _keep_renewed(self, holding: _thread.LockType) -> None:
        """Renews it every BEAT_S, whether anything is saved or not, until it is given up. Once it
        is another job's, the next save finds that out.
        """
        while not holding.acquire(timeout=BEAT_S):
            with self._lock, suppress(OSError):  # it is renewed at the next beat, or the next save
                if self._holding is holding and self.is_held:
                    self._beat()
        with self._lock:
            if self._holding is holding:  # who used it was collected
                self._release()

    def _beat(self) -> None:
        if not self.is_lost():
            self._write(self._record())

    def _is_there(self) -> bool:
        """Returns whether the file that is open here has the lease's name."""
        status = self._storage.status(self.path)
        return (
            self._fd >= 0
            and status is not None
            and os.path.samestat(status, self._storage.fstat(self._fd))
        )

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
            if not self._is_of_use or not self.is_held:
                return
            heirs = [each for each in _held.copy() if each is not self and each._is_of(self)]
            if heirs:  # another Checkpointer of this process has it, too
                self._let_go()
                heirs[0]._inherit()
                return
            self._give_up()

    def _inherit(self) -> None:
        """Takes the lock, which another lease of this process had."""
        self._is_unlocked(self._fd)

    def _give_up(self) -> None:
        """Removes the lease; or leaves word, if a job that comes back has to see that it was taken
        over meanwhile.
        """
        try:
            record = LeaseRecord.from_bytes(self._storage.read_file(self.path, NBYTES))
            if record is not None and record.nonce == own_nonce():
                if self._may_come_back:
                    self._write(self._record(is_over=True))
                else:
                    self._storage.remove(self.path)
        except OSError:
            pass  # it counts for nothing once this process has ended
        finally:
            self._let_go()

    def _is_of(self, other: Lease) -> bool:
        return self.path == other.path and self._storage is other._storage

    def is_left(self) -> bool:
        """Returns whether a lease lies there whose job is gone, and did not give it up."""
        return self._is_others(alive=False)

    def is_of_another(self) -> bool:
        """Returns whether another job that lives has it."""
        return self._is_others(alive=True)

    def _is_others(self, alive: bool) -> bool:
        if not self._is_of_use:
            return False
        with suppress(OSError):  # there is none, or it is not to be read
            fd = self._storage.open(self.path, "lock")
            try:
                record = LeaseRecord.from_bytes(self._storage.read_at(fd, NBYTES, 0))
                if alive and record is None:  # it may be being made: it is not to be locked
                    return self._age_s() < _UNWRITTEN_S
                is_given_up = record is not None and record.is_over
                is_own = alive and record is not None and record.nonce == own_nonce()
                return not is_given_up and not is_own and self._is_over(record, fd) != alive
            finally:
                close_quietly(self._storage, fd)
        return False

    def remove_left(self) -> bool:
        """Removes such a lease; returns whether it did."""
        if self.is_left():
            with suppress(OSError):  # another process was faster, or it is not ours to remove
                self._storage.remove(self.path)
                return True
        return False

    def _keep(self, fd: int) -> None:
        self._fd, self._has_it, self._pid, self._began = fd, True, os.getpid(), now_text()
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
        fd, self._fd = self._fd, -1  # first: if it is not known how the call ends, it has no file
        if fd >= 0 and self._pid == os.getpid():  # a child of fork() has closed it
            close_quietly(self._storage, fd)

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

    def _write(self, content: bytes) -> None:
        storage, fd = self._storage, self._fd
        with reported("write", self.path):
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
            if storage.policy(fd)[1].remote:
                storage.flush(fd)  # so that other hosts see it


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
    if lease is not None and lease._storage is not storage:
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


def own_nonce() -> str:
    """Returns what tells the leases of this process from all others."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), os.urandom(16).hex()
    return _process[1]


def _holder(record: LeaseRecord | None) -> str:
    if record is None:
        return f"a process that {LEASE_FILE} there does not name, so it is damaged or being made,"
    job = f" (job {record.job})" if record.job else ""
    return f"process {record.pid} on host {record.host!r}{job}"


def refusal(root: str, record: LeaseRecord | None, age_s: float, ends_by_age: bool) -> str:
    since = "" if record is None else f", since {record.began}"
    command = f"`fastckpt repair {shlex.quote(root)} --takeover`"
    advice = f"If it hangs and cannot be ended, run {command}"
    if ends_by_age:
        advice = (
            f"If it is gone, because its host crashed or is cut off, run {command}, or wait: "
            f"{lasts_s(record):.0f} s after the last renewal its lease counts as dead"
        )
    return (
        f"{root!r} is in use by another job: {_holder(record)} saves there{since}, and renewed its "
        f"lease {age_s:.0f} s ago; nothing was committed. Only one job at a time may save to a "
        f"root: end that one, or save to another root. {advice}"
    )


def loss(root: str, record: LeaseRecord) -> str:
    if record.is_over:
        return (
            f"{root!r} was taken over by another job or by `fastckpt repair --takeover`, "
            f"{_holder(record)}, which has given it up; nothing was committed. The next save "
            "succeeds unless another job saves there by then"
        )
    return (
        f"{root!r} was taken over by another job: {_holder(record)} has its lease since "
        f"{record.began}; nothing was committed. End one of the two jobs; once the other one has "
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
        lease._lock, lease._fd, lease._holding = NotedLock("lease", lease.path), -1, None
        lease._has_it = False
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
pipeline.when_drained.append(_release_all)
