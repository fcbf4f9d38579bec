"""The path that a file is saved to: beside it the file is written under a temporary name, which is
replaced by the path's in one rename.

It must not know what the file holds.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager

from fastckpt.arguments.environment import launched_rank
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.save import Place
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")


_has_warned = False  # of ranks that save to one path alone


def warn_of_ranks_alone(storage: Storage, path: str) -> None:
    """Says, once, that ranks of a job save to one path at the same time without knowing of each
    other: what happens when `group` is None by mistake, as group.WORLD is before
    init_process_group().

    The first rank looks for nobody: that it saves alone is what most jobs do.
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
    """A path, as one rank of those that write one file there sees it.

    Args:
        storage: the seam to the file system.
        path: of the file.
        agreement: the save's round.
        durable: the rename is to outlast a crash of the machine.

    Attributes:
        storage, path: as the arguments.
    """

    def __init__(self, storage: Storage, path: str, agreement: Round, durable: bool) -> None:
        self.storage = storage
        self.path = path
        self.directory = os.path.dirname(path)
        self._agreement = agreement
        self._durable = durable
        self._name = ""  # of the file, until the commit
        self._fd, self._nbytes = -1, 0
        self._replaced: int | None = None

    def make(self, purpose: Purpose) -> AbstractContextManager[tuple[int, str]]:
        """The file under a temporary name, as (descriptor, name); an error removes it."""
        return atomic.temporary(self.storage, self.path, purpose)

    def made(self, name: str) -> None:
        """Tells the other ranks the name of the file that this one has made."""
        self._name = name
        self._agreement.put("file", os.fsencode(os.path.basename(name)))
        if self._agreement.world_size == 1:
            warn_of_ranks_alone(self.storage, self.path)

    def opened(self) -> int:
        """The file that the first rank makes, once it is there.

        Raises:
            PeerFailed: another rank failed, or is missing. StorageError.
        """
        name = os.path.join(self.directory, os.fsdecode(self._agreement.get("file")))
        with reported("open", name):
            try:
                return self.storage.open_to_write(name)
            except FileNotFoundError:
                self._agreement.check()  # if the save has failed meanwhile, that is why
                raise

    def take_permissions(self, fd: int) -> None:
        """Gives the file those of the one that it replaces."""
        atomic.take_permissions(self.storage, fd, self._name, self.path)

    def complete(self, fd: int, nbytes: int) -> None:
        """Notes the file, which is open until it is published, and its size."""
        self._fd, self._nbytes = fd, nbytes

    def publish(self) -> None:
        """THE commit: the file, which has arrived as a whole, takes the path."""
        with reported("write", self.path):
            size = self.storage.size(self._fd)
            assert size == self._nbytes, "the file is not as long as its image"
        self._replaced = atomic.publish(
            self.storage, self._name, self.path, self._durable, self._fd
        )

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:  # whose blocks the file system frees now, which may take long
            close_quietly(self.storage, replaced)
