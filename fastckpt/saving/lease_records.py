"""The record of a lease and its two kinds of stores: a file that its process keeps open and locked,
and an object that is replaced only by conditional puts.

Both kinds read the record, create it, and replace it unless it has changed since it was read. They
must not know who may take a lease, or when.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import NEW_MODE, Storage, patiently
from fastckpt.storage.objects import objects_of
from fastckpt.storage.vanishing import is_removed

VERSION = 1
_NUMBER_END = 1 << 63
NBYTES = 1024  # the size of every record, so that one write replaces it
_CHARS_MAX = {"nonce": 32, "host": 64, "space": 128, "job": 128, "began": 64, "renewed": 64}
_PAUSE_S = 0.01
# A store's errors for a put whose condition does not hold.
_CHANGED = (errno.ESTALE, errno.EEXIST, errno.ENOENT)

_process = (0, "")  # this process's pid, and the nonce of its leases


def own_nonce() -> str:
    """Returns the nonce that identifies the leases of this process."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), os.urandom(16).hex()
    return _process[1]


class LeaseRecord(NamedTuple):
    """The record of the process that saves to a root for a job.

    Attributes:
        nonce: identifies this process among all others.
        host: its host's name.
        space, pid, started: the results of machine.pid_space(), getpid() and machine.started().
        job, restarts: the launcher's name for the job ("" if there is none), and how often the
            scheduler has restarted the job.
        began, renewed: when the lease was taken and last renewed, in ISO 8601.
        lasts_s: how long after `renewed` other hosts respect the lease.
        is_over: whether the job has released the lease.
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
        """Returns a record that this or a newer version stored; None if the bytes are no record."""
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


class LeaseEntry(NamedTuple):
    """The content of a lease's file or object at one moment.

    Attributes:
        record: the record; None if it is invalid, for example because it is just being written.
        version: a value that differs from that of every earlier and later content.
    """

    record: LeaseRecord | None
    version: Any

    @property
    def is_own(self) -> bool:
        """Whether this process has taken the lease and not released it."""
        record = self.record
        return record is not None and record.nonce == own_nonce() and not record.is_over


class RecordStore(Protocol):
    """The store of one lease's record. Methods raise OSError.

    Attributes:
        storage: the Storage that its methods use.
        is_needed: whether there must be a lease at all; valid after make().
    """

    storage: Storage
    is_needed: bool

    def read(self) -> LeaseEntry | None:
        """Returns the current entry; None if there is none."""

    def make(self, content: bytes) -> bool:
        """Creates the record; returns False if there already is one, or if none is needed."""

    def replace(self, entry: LeaseEntry, content: bytes, by_force: bool = False) -> bool:
        """Replaces an entry by this process's record. Returns False if the entry has changed, or if
        its process is alive and `by_force` is False.
        """

    def adopt(self, entry: LeaseEntry) -> bool:
        """Adopts an entry of another lease of this process; returns False if it has changed."""

    def renew(self, content: bytes) -> bool:
        """Rewrites its record; returns False if the lease now belongs to another process."""

    def remove(self) -> bool:
        """Removes its record; returns False if it cannot be removed safely."""

    def let_go(self) -> None:
        """Forgets its record, without a change in the store."""

    def age_s(self, entry: LeaseEntry) -> float:
        """Returns how long ago an entry was written."""

    def locks(self) -> tuple[bool, bool]:
        """Returns whether another process is seen to hold a lock on the record, and whether this
        machine sees the locks of all processes.
        """


class LeaseFile:
    """The record in a file, which its process keeps open and locked. The lock shows that the
    process is alive.

    Args:
        storage, path: the Storage, and the file's path.
        of_node: see Lease.
    """

    def __init__(self, storage: Storage, path: str, of_node: bool) -> None:
        self.storage, self._path, self._of_node = storage, path, of_node
        self.is_needed, self._fd = True, -1

    def read(self) -> LeaseEntry | None:
        if not self.is_needed:
            return None
        try:
            content = self.storage.read_file(self._path, NBYTES)
        except FileNotFoundError:
            return None
        return LeaseEntry(LeaseRecord.from_bytes(content), content)

    def make(self, content: bytes) -> bool:
        storage, is_own = self.storage, False
        try:
            fd = storage.create(self._path, NEW_MODE)
        except FileExistsError:
            return False
        try:
            policy = storage.policy(fd)[1]
            self.is_needed = policy.renames_at_once and not (self._of_node and policy.remote)
            if self.is_needed and (policy.mandatory_locks or self._is_unlocked(fd)):
                self._write(fd, content)
                is_own = not is_removed(storage, fd, self._path)
        except BaseException:
            close_quietly(storage, fd)
            with suppress(OSError):  # the original error counts
                storage.remove(self._path)
            raise
        if is_own:
            self._fd = fd
            return True
        close_quietly(storage, fd)
        if not self.is_needed:
            with suppress(OSError):  # a leftover does no harm
                storage.remove(self._path)
        return False

    def replace(self, entry: LeaseEntry, content: bytes, by_force: bool = False) -> bool:
        storage, fd = self.storage, self.storage.open(self._path, "lock")
        try:
            # Remove it only with its lock: otherwise it may be the new lease of a faster process.
            if not (by_force or self._is_unlocked(fd)):
                time.sleep(_PAUSE_S)
                return False
            if self._is_another(fd, entry) or is_removed(storage, fd, self._path):
                return False
            storage.remove(self._path)
        finally:
            close_quietly(storage, fd)
        return self.make(content)

    def adopt(self, entry: LeaseEntry) -> bool:
        fd = self.storage.open(self._path, "lock")
        if self._is_another(fd, entry):
            close_quietly(self.storage, fd)
            return False
        self._fd = fd
        return True

    def _is_another(self, fd: int, entry: LeaseEntry) -> bool:
        return bool(self.storage.read_at(fd, NBYTES, 0) != entry.version)

    def renew(self, content: bytes) -> bool:
        if (entry := self.read()) is None:
            return False
        is_own = self._is_there() if entry.record is None else entry.is_own
        if is_own:
            self._write(self._fd, content)
        return is_own

    def _is_there(self) -> bool:
        """Returns whether the file that this process has open still has the lease's name."""
        status = self.storage.status(self._path)
        return status is not None and os.path.samestat(status, self.storage.fstat(self._fd))

    def remove(self) -> bool:
        if (entry := self.read()) is not None and entry.is_own:
            self.storage.remove(self._path)
        return True

    def let_go(self) -> None:
        fd, self._fd = self._fd, -1  # first: however the call ends, there is no file any more
        if fd >= 0:
            close_quietly(self.storage, fd)

    def age_s(self, entry: LeaseEntry) -> float:
        status = self.storage.status(self._path)
        return 0.0 if status is None else max(0.0, time.time() - status.st_mtime)

    def locks(self) -> tuple[bool, bool]:
        fd = self.storage.open(self._path, "lock")
        try:
            policy = self.storage.policy(fd)[1]
            is_locked = not policy.mandatory_locks and not self._is_unlocked(fd)
            return is_locked, not policy.remote
        finally:
            close_quietly(self.storage, fd)

    def _is_unlocked(self, fd: int) -> bool:
        """Locks the file; returns False if another process has locked it."""
        with suppress(OSError):  # the lock's state is unknown and does not count
            return self.storage.lock(fd)
        return True

    def _write(self, fd: int, content: bytes) -> None:
        storage = self.storage
        patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        if storage.policy(fd)[1].remote:
            storage.flush(fd)  # so that other hosts see it


class LeaseObject:
    """The record in an object. A released lease remains as a record with is_over set, because the
    removal of an object cannot be conditional. So if two jobs see the lease of a dead job, only one
    of them gets it, and no job removes another job's lease. For Args see LeaseFile.
    """

    is_needed = True

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage, self._path, self._objects = storage, path, objects_of(storage)
        self._version: Any = None  # the store's metadata of this process's record

    def read(self) -> LeaseEntry | None:
        try:
            content, version = self._objects.get(self._path, NBYTES)
        except FileNotFoundError:
            return None
        return LeaseEntry(LeaseRecord.from_bytes(content), version)

    def make(self, content: bytes) -> bool:
        try:
            self._version = self._objects.put_new(self._path, content)
        except FileExistsError:
            return False
        return True

    def replace(self, entry: LeaseEntry, content: bytes, by_force: bool = False) -> bool:
        try:
            self._version = self._objects.put_over(self._path, content, entry.version)
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            return False
        return True

    def adopt(self, entry: LeaseEntry) -> bool:
        self._version = entry.version
        return True

    def renew(self, content: bytes) -> bool:
        try:
            return self.replace(LeaseEntry(None, self._version), content)
        except OSError:  # no answer: it is enough if the lease still belongs to this process
            entry = self.read()
            return entry is not None and entry.is_own and self.adopt(entry)

    def remove(self) -> bool:
        return False

    def let_go(self) -> None:
        self._version = None

    def age_s(self, entry: LeaseEntry) -> float:
        return max(0.0, time.time() - self._objects.made_at(self._path, entry.version))

    def locks(self) -> tuple[bool, bool]:
        return False, False
