"""BucketLease: the lease of a root in a bucket, one object that is only ever replaced by a put on
the condition that it is still the version that was read. So of two jobs that find a dead one's
lease one has it, and nobody removes what became another job's.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from typing import Any

from fastckpt.errors import RootInUse
from fastckpt.saving.lease import (
    NBYTES,
    TRIES_MAX,
    Lease,
    LeaseRecord,
    is_of_same_job,
    lasts_s,
    loss,
    own_nonce,
    refusal,
)
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.machine import pid_space, started
from fastckpt.storage.objects import objects_of

# What a store says of a put whose condition does not hold.
_CHANGED = (errno.ESTALE, errno.EEXIST, errno.ENOENT)


class BucketLease(Lease):
    """The lease of a root in a bucket, which stays there when it is given up, as a record that says
    so. Arguments and attributes are Lease's.
    """

    def __init__(self, storage: Storage, root: str) -> None:
        super().__init__(storage, root)
        self._objects = objects_of(storage)
        self._version: Any = None  # what the store says of the own record

    def _found(self) -> tuple[LeaseRecord | None, Any] | None:
        """Returns the record that lies there, and what the store says of it; None if none does."""
        try:
            content, version = self._objects.get(self.path, NBYTES)
        except FileNotFoundError:
            return None
        return LeaseRecord.from_bytes(content), version

    def _was_made(self) -> bool:
        with reported("create", self.path):
            try:
                version = self._objects.put_new(self.path, self._record())
            except FileExistsError:
                return False
        self._hold(version)
        return True

    def _hold(self, version: Any) -> None:
        self._version = version
        self._keep(-1)

    def _clear_or_adopt(self) -> None:
        """Takes the lease that lies there if its job is gone, or if it is this process's own."""
        if (found := self._found()) is None:
            return
        record, version = found
        age_s = self._age_of(version)
        if _is_own(record):
            self._hold(version)
        elif self._takes_over or self._is_gone(record, age_s):
            try:
                version = self._objects.put_over(self.path, self._record(), version)
            except OSError as error:
                if error.errno not in _CHANGED:  # else another process was faster
                    raise
            else:
                self._hold(version)
        else:
            is_beside = record is not None and record.space == pid_space()
            raise RootInUse(refusal(self._root, record, age_s, ends_by_age=not is_beside))

    @staticmethod
    def _is_gone(record: LeaseRecord | None, age_s: float) -> bool:
        """Returns whether the job that has the lease is gone, or has given it up."""
        if record is not None and record.is_over:
            return True
        if record is not None and record.space == pid_space():
            return started(record.pid) != record.started
        return (record is not None and is_of_same_job(record)) or age_s >= lasts_s(record)

    def _age_of(self, version: Any) -> float:
        return max(0.0, time.time() - self._objects.made_at(self.path, version))

    def renew(self) -> None:
        with self._lock:
            for _ in range(TRIES_MAX):
                if not self.is_held:
                    break
                with reported("write", self.path):
                    if self._was_renewed(self._record()):
                        return
                    found = self._found()
                if found is None or found[0] is None:
                    self._let_go()  # somebody removed it by hand, or put what is no lease there
                elif _is_own(found[0]):  # another Checkpointer of this process has renewed it
                    self._version = found[1]
                else:
                    self._let_go()
                    raise RootInUse(loss(self._root, found[0]))
            self._take()

    def _was_renewed(self, content: bytes) -> bool:
        """Puts the record anew; returns False if what lies there is not the version known here. If
        no answer comes, it is enough that the lease is found to be this process's own.
        """
        try:
            self._version = self._objects.put_over(self.path, content, self._version)
            return True
        except OSError as error:
            if error.errno in _CHANGED:
                return False
            found = self._found()
            if found is None or not _is_own(found[0]):
                raise
            self._version = found[1]
            return True

    def _beat(self) -> None:
        if not self._was_renewed(self._record()):
            found = self._found()
            if found is not None and _is_own(found[0]):
                self._version = found[1]

    def _inherit(self) -> None:
        """Does nothing: there is no lock."""

    def _give_up(self) -> None:
        with suppress(OSError):  # it counts for nothing once this process has ended
            if not self._was_renewed(self._record(is_over=True)):
                found = self._found()
                if found is not None and _is_own(found[0]):
                    self._version = found[1]
                    self._was_renewed(self._record(is_over=True))
        self._let_go()

    def _is_others(self, alive: bool) -> bool:
        with suppress(OSError):  # it is not to be read
            if (found := self._found()) is None:
                return False
            record, version = found
            if (record is not None and record.is_over) or (alive and _is_own(record)):
                return False
            return self._is_gone(record, self._age_of(version)) != alive
        return False

    def remove_left(self) -> bool:
        """Gives such a lease up in the name of its job; returns whether it did."""
        with suppress(OSError):  # another process was faster, or it is not ours to change
            found = self._found()
            if found is not None and found[0] is not None and self.is_left():
                over = found[0]._replace(is_over=True)
                self._objects.put_over(self.path, over.to_bytes(), found[1])
                return True
        return False


def _is_own(record: LeaseRecord | None) -> bool:
    return record is not None and record.nonce == own_nonce() and not record.is_over
