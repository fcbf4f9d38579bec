"""OpenRoot: the root of a Checkpointer that is open, and what this process knows of its steps.

The module must not know how a step is saved.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress

from fastckpt.errors import StorageError
from fastckpt.latch import SERVER_S, within
from fastckpt.steps.lease import Lease
from fastckpt.steps.no_steps import is_step
from fastckpt.steps.root import Steps
from fastckpt.storage.calls import real_path as real_path
from fastckpt.storage.file_system import Storage

log = logging.getLogger("fastckpt")

# Changed and copied by single operations, which need no lock: a fork may leave one taken.
_open: set[weakref.ref[OpenRoot]] = set()


class OpenRoot:
    """The root of a Checkpointer until that is closed or forgotten.

    Checkpointers of one process that have one root open at a time share what they know of it, and
    the lock under which directories are removed. Else one would make a directory that another one
    is about to empty, and its step would lack files.

    Args:
        storage, root: as Steps'.
        timeout_s: for how long at most it waits for a server.

    Raises:
        ValueError: the root is no directory.

    Attributes:
        steps: the steps under the root.
    """

    def __init__(self, storage: Storage, root: str, timeout_s: float) -> None:
        self._pid, self._wait_s = os.getpid(), min(SERVER_S, timeout_s)
        self._saves = self._has_warned = False
        known = [each.steps for each in _others(root) if each.steps.storage is storage]
        if not known:
            lease = Lease(storage, root)
            known = [Steps(storage, root, lease)]
            lease.join(known[0])
        self.steps: Steps = known[0]
        with suppress(StorageError):  # a save or restore will raise it again
            self.steps.is_step = is_step(root, timeout_s)
        _open.add(weakref.ref(self, _open.discard))

    def note_save(self, makes_root: bool) -> None:
        """Notes that the Checkpointer saves. The first time it makes the root, if it is to, so that
        the caller finds it. Warns once if another Checkpointer saves that is open.
        """
        if makes_root and not self._saves:
            with suppress(OSError):  # the save tries again, and fails if it has to
                within(self._wait_s, self.steps.make_root)
        self._saves = True
        if not self._has_warned and any(
            each._saves for each in _others(self.steps.root) if each is not self
        ):
            self._has_warned = True
            log.warning(
                "two open Checkpointers of this process save to %r, and each removes steps of the "
                "other by its own keep_last: close() the first one before another one saves",
                self.steps.root,
            )

    def close(self) -> None:
        """Ends that, and gives the root up unless another one saves there; idempotent."""
        self._saves = False
        lease = self.steps.lease
        if lease and not any(each._saves for each in _others(self.steps.root)):
            lease.release(self._wait_s)
        _open.difference_update([each for each in _open.copy() if each() is self])


def _others(root: str) -> list[OpenRoot]:
    """Returns what this process has open of a root."""
    known = [each() for each in _open.copy()]
    pid = os.getpid()  # what was open before a fork is another process's, and so are its locks
    return [each for each in known if each and each.steps.root == root and each._pid == pid]
