"""The path that a file is saved to: the file is written beside it under a temporary name, and takes
the path in one rename. It must not know what the file holds.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager

from fastckpt.arguments.environment import launched_rank
from fastckpt.errors import CheckpointError
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.place import Place
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")


_has_warned = False  # whether this process has warned of ranks that save to one path alone


def warn_of_ranks_alone(storage: Storage, path: str) -> None:
    """Warns once that ranks of a job save to one path at a time without knowing of each other, as
    when `group` is None by mistake, because group.WORLD is None before init_process_group(). The
    first rank does not look for others: in most jobs it saves alone.
    """
    global _has_warned
    rank, ranks = launched_rank() or (0, 1)
    if _has_warned or rank == 0:
        return
    others = atomic.others_at_work(storage, path)
    if others:
        _has_warned = True
        log.warning(
            "rank %d of %d saves alone to %r, and so does process %d at the same time: they "
            "replace each other's file. To save together, pass group=torch.distributed.group.WORLD "
            "(which is None before init_process_group()); or save on one rank, or to several paths",
            *(rank, ranks, path, others[0]),
        )


class FilePlace(Place):
    """A path, as one rank of those that write a file there sees it.

    Args:
        storage, path: the seam to the file system, and the path there.
        agreement: the save's round.
        durable: whether the rename is to outlast a crash of the machine.
    """

    def __init__(self, storage: Storage, path: str, agreement: Round, durable: bool) -> None:
        self.storage = storage
        self.path = path
        self.directory = os.path.dirname(path)
        self._agreement = agreement
        self._durable = durable
        self._name = ""  # the temporary name
        self._fd, self._nbytes = -1, 0
        self._replaced: int | None = None
        self._is_shared: bool | None = None

    def make(self, purpose: Purpose) -> AbstractContextManager[tuple[int, str]]:
        """Makes the file under a temporary name, as (descriptor, name); an error removes it."""
        return atomic.temporary(self.storage, self.path, purpose)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks can write to the file, too; else the first one writes all of it."""
        if self._is_shared is None:
            with reported("look at", self.path):
                self._is_shared = self.storage.shares(self.path)
        return self._is_shared

    def made(self, name: str) -> None:
        """Tells the other ranks the name of the file that this rank has made."""
        self._name = name
        self._agreement.put("file", os.fsencode(os.path.basename(name)))
        if self._agreement.world_size == 1:
            warn_of_ranks_alone(self.storage, self.path)

    def opened(self) -> int:
        """Waits until the first rank has made the file, and opens it.

        Raises:
            PeerFailed: another rank failed, or is missing. StorageError: it cannot be opened.
        """
        name = os.path.join(self.directory, os.fsdecode(self._agreement.get("file")))
        with reported("open", name):
            try:
                return self.storage.open(name, "write")
            except FileNotFoundError:
                self._agreement.check()  # if the save has failed meanwhile, its file is gone
                raise

    def take_permissions(self, fd: int) -> None:
        """Gives the file the permissions of the one that it replaces."""
        atomic.take_permissions(self.storage, fd, self._name, self.path)

    def complete(self, fd: int, nbytes: int) -> None:
        """Notes the finished file, which stays open until publish(), and its size."""
        self._fd, self._nbytes = fd, nbytes

    def publish(self) -> None:
        """Commits: the file, all of which has arrived, takes the path."""
        with reported("write", self.path):
            size = self.storage.fstat(self._fd).st_size
        if size != self._nbytes:
            raise CheckpointError(
                f"{self._name!r} has {size} bytes instead of {self._nbytes}, which were written: "
                "something else has changed it; nothing was committed"
            )
        self._replaced = atomic.publish(
            self.storage, self._name, self.path, self._durable, self._fd
        )

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:  # closed only now, since freeing its blocks may take long
            close_quietly(self.storage, replaced)
