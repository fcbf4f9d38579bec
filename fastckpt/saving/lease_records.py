"""The record of a lease, and where it lies: in a file that its process keeps open and locked, or in
an object that only conditional puts replace.

Both kinds of stores read the record, make it, and replace one that was read unless it is another by
then. They must not know who may take a lease, nor when.
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
NBYTES = 1024  # of every record, so that one is replaced by one write
_CHARS_MAX = {"nonce": 32, "host": 64, "space": 128, "job": 128, "began": 64, "renewed": 64}
_PAUSE_S = 0.01
# What a store says of a put whose condition does not hold.
_CHANGED = (errno.ESTALE, errno.EEXIST, errno.ENOENT)

_process = (0, "")  # this process's pid, and the nonce of its leases


def own_nonce() -> str:
    """Returns what tells the leases of this process from all others."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), os.urandom(16).hex()
    return _process[1]


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


class Found(NamedTuple):
    """What lies at a lease's path.

    Attributes:
        record: None if it is no lease, or one that is just being made.
        version: what tells it from all that lay or will lie there.
    """

    record: LeaseRecord | None
    version: Any

    @property
    def is_own(self) -> bool:
        """Whether it is a lease that this process has taken, and has not given up."""
        record = self.record
        return record is not None and record.nonce == own_nonce() and not record.is_over


class RecordStore(Protocol):
    """Where the record of one lease lies. Methods raise OSError.

    Attributes:
        storage: the seam.
        is_needed: whether there is a lease at all; known once make() was called.
    """

    storage: Storage
    is_needed: bool

    def read(self) -> Found | None:
        """Returns what lies there; None if nothing does."""

    def make(self, content: bytes) -> bool:
        """Makes the record; returns False if there is one, or if there is to be none."""

    def replace(self, found: Found, content: bytes, by_force: bool = False) -> bool:
        """Puts this process's record in the place of what was read; returns False if that is
        another one by now, or if its process lives and it is not `by_force`.
        """

    def adopt(self, found: Found) -> bool:
        """Takes what was read for its own, as another lease of this process has made it; returns
        False if it is another one by now.
        """

    def renew(self, content: bytes) -> bool:
        """Writes its own record anew; returns False if what lies there is another one."""

    def remove(self) -> bool:
        """Removes its own record; returns False if nothing can be removed safely."""

    def let_go(self) -> None:
        """Has none from now on."""

    def age_s(self, found: Found) -> float:
        """Returns how long ago it was written."""

    def locks(self) -> tuple[bool, bool]:
        """Returns whether another process is seen to have locked it, and whether everybody's locks
        are seen from here.
        """


class LeaseFile:
    """The record in a file. Its process keeps it open and locked, which tells whether that lives.

    Args:
        storage, path: the seam to the file system, and the file.
        of_node: there is to be none on what several machines see.
    """

    def __init__(self, storage: Storage, path: str, of_node: bool) -> None:
        self.storage, self._path, self._of_node = storage, path, of_node
        self.is_needed, self._fd = True, -1

    def read(self) -> Found | None:
        if not self.is_needed:
            return None
        try:
            content = self.storage.read_file(self._path, NBYTES)
        except FileNotFoundError:
            return None
        return Found(LeaseRecord.from_bytes(content), content)

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
            with suppress(OSError):  # the error that led here counts
                storage.remove(self._path)
            raise
        if is_own:
            self._fd = fd
            return True
        close_quietly(storage, fd)
        if not self.is_needed:
            with suppress(OSError):  # it is in nobody's way
                storage.remove(self._path)
        return False

    def replace(self, found: Found, content: bytes, by_force: bool = False) -> bool:
        storage, fd = self.storage, self.storage.open(self._path, "lock")
        try:
            # Only who has its lock removes it: else it might be the lease of who was faster.
            if not (by_force or self._is_unlocked(fd)):
                time.sleep(_PAUSE_S)
                return False
            if self._is_another(fd, found) or is_removed(storage, fd, self._path):
                return False
            storage.remove(self._path)
        finally:
            close_quietly(storage, fd)
        return self.make(content)

    def adopt(self, found: Found) -> bool:
        fd = self.storage.open(self._path, "lock")
        if self._is_another(fd, found):
            close_quietly(self.storage, fd)
            return False
        self._fd = fd
        return True

    def _is_another(self, fd: int, found: Found) -> bool:
        return bool(self.storage.read_at(fd, NBYTES, 0) != found.version)

    def renew(self, content: bytes) -> bool:
        if (found := self.read()) is None:
            return False
        is_own = self._is_there() if found.record is None else found.is_own
        if is_own:
            self._write(self._fd, content)
        return is_own

    def _is_there(self) -> bool:
        """Returns whether the file that is open here has the lease's name."""
        status = self.storage.status(self._path)
        return status is not None and os.path.samestat(status, self.storage.fstat(self._fd))

    def remove(self) -> bool:
        if (found := self.read()) is not None and found.is_own:
            self.storage.remove(self._path)
        return True

    def let_go(self) -> None:
        fd, self._fd = self._fd, -1  # first: if it is not known how the call ends, it has no file
        if fd >= 0:
            close_quietly(self.storage, fd)

    def age_s(self, found: Found) -> float:
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
        """Locks the file; returns False if another process has."""
        with suppress(OSError):  # it is not known, and so tells nothing
            return self.storage.lock(fd)
        return True

    def _write(self, fd: int, content: bytes) -> None:
        storage = self.storage
        patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        if storage.policy(fd)[1].remote:
            storage.flush(fd)  # so that other hosts see it


class LeaseObject:
    """The record in an object, which stays there when the lease is given up, as a record that says
    so: no removal has a condition. So of two jobs that find a dead one's lease one has it, and
    nobody removes what became another job's. Arguments are LeaseFile's.
    """

    is_needed = True

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage, self._path, self._objects = storage, path, objects_of(storage)
        self._version: Any = None  # what the store says of the own record

    def read(self) -> Found | None:
        try:
            content, version = self._objects.get(self._path, NBYTES)
        except FileNotFoundError:
            return None
        return Found(LeaseRecord.from_bytes(content), version)

    def make(self, content: bytes) -> bool:
        try:
            self._version = self._objects.put_new(self._path, content)
        except FileExistsError:
            return False
        return True

    def replace(self, found: Found, content: bytes, by_force: bool = False) -> bool:
        try:
            self._version = self._objects.put_over(self._path, content, found.version)
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            return False
        return True

    def adopt(self, found: Found) -> bool:
        self._version = found.version
        return True

    def renew(self, content: bytes) -> bool:
        try:
            return self.replace(Found(None, self._version), content)
        except OSError:  # no answer came: it is enough that the lease is still this process's
            found = self.read()
            return found is not None and found.is_own and self.adopt(found)

    def remove(self) -> bool:
        return False

    def let_go(self) -> None:
        self._version = None

    def age_s(self, found: Found) -> float:
        return max(0.0, time.time() - self._objects.made_at(self._path, found.version))

    def locks(self) -> tuple[bool, bool]:
        return False, False
