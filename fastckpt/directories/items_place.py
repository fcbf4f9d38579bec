"""A directory in which each rank writes a file with a new name; one file, of whose content this
module must not know, then says which are valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastckpt.handle import SaveHandle
from fastckpt.ranks.round import Round
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.place import Place
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose


class ItemsPlace(Place):
    """The directory, as one rank of a save sees it.

    Args:
        storage, directory: the seam to the file system, and the directory's path there.
        agreement: the save's round.
        durable: whether the directory, if it is made, is to outlast a crash of the machine.

    Attributes:
        replaced: a descriptor that keeps what the commit replaced, until the save ends.
        unneeded: paths that nothing names any more after the commit.
    """

    def __init__(self, storage: Storage, directory: str, agreement: Round, durable: bool) -> None:
        self.storage = storage
        self.directory = directory
        self.replaced: int | None = None
        self.unneeded: list[str] = []
        self._agreement = agreement
        self._durable = durable
        self._made: list[str] = []

    def awaited(self, previous: Sequence[SaveHandle], pipeline: Pipeline) -> Sequence[SaveHandle]:
        return previous  # until they end, nobody knows which files they leave

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """Makes a new file, as (descriptor, path), and the directory if that is missing."""
        path, storage = os.path.join(self.directory, name), self.storage
        with reported("open", path):
            try:
                fd = storage.create(path, 0o666, purpose)
            except FileNotFoundError:
                self._agreement.check()  # no directory is made for a save that has failed meanwhile
                atomic.make_directory(storage, self.directory, self._durable)
                fd = storage.create(path, 0o666, purpose)
            except FileExistsError:  # it was made once already, where there was no room for it
                storage.remove(path)
                fd = storage.create(path, 0o666, purpose)
        self._made = [path]
        try:
            yield fd, path
        finally:
            close_quietly(storage, fd)

    def abandon(self) -> None:
        atomic.remove_files(self.storage, self._made)

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self.replaced = self.replaced, None
        if replaced is not None:
            close_quietly(self.storage, replaced)
        atomic.remove_files(self.storage, self.unneeded)
