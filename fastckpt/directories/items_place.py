"""A directory in which each rank writes a file with a new name; one more
file then says which are valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fastckpt.directories.hidden_directory import HiddenDirectory
from fastckpt.errors import CheckpointError
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Place
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
        self._may_be_made = True  # the directory, by whichever rank comes first
        self._has_made_it = False
        self._made: list[str] = []

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        # Until those to the same directory end, nobody knows which files they leave.
        return [handle for handle in previous if handle.path == self.directory]

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """Makes a new file, as (descriptor, path), and the directory if that is missing."""
        path, storage = os.path.join(self.directory, name), self.storage
        with reported("open", path):
            try:
                fd = storage.create(path, 0o666, purpose)
            except FileNotFoundError:
                self._agreement.check()  # no directory is made for a save that has failed meanwhile
                if not self._may_be_made:
                    raise
                atomic.make_directory(storage, self.directory, self._durable)
                self._has_made_it = True
                fd = storage.create(path, 0o666, purpose)
            except FileExistsError:  # it was made once already, where there was no room for it
                storage.remove(path)
                fd = storage.create(path, 0o666, purpose)
        self._made = [path]
        try:
            yield fd, path
        finally:
            close_quietly(storage, fd)

    def publish(self, write: Callable[[str], tuple[int | None, list[str]]]) -> None:
        """Commits, on the first rank, by writing the last files.

        Args:
            write: does so, to the directory that it is given. Returns a descriptor of what the
                last one has replaced there, or None, and paths that nothing names any more.
        """
        self.replaced, self.unneeded = write(self.directory)

    def abandon(self) -> None:
        atomic.remove_files(self.storage, self._made)
        if self._has_made_it:
            with suppress(OSError):  # it has files of other ranks or saves
                self.storage.remove_directory(self.directory)

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self.replaced = self.replaced, None
        if replaced is not None:
            close_quietly(self.storage, replaced)
        atomic.remove_files(self.storage, self.unneeded)


class SwapItemsPlace(ItemsPlace):
    """A directory of items of which other files, too, have names that are always the same. Where
    it holds a checkpoint, the new one is put together in a hidden directory and takes its place.

    Args:
        storage, directory, agreement, durable: as ItemsPlace's.
        commit: the name of the file that is there if the directory holds a checkpoint.
        is_part: whether a file of this name is of a checkpoint; others stay in the directory.
        is_broken: whether the checkpoint there has lost files already, so that nobody may take it
            for one any more.
        retain: as save_directory's.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        agreement: Round,
        durable: bool,
        commit: str,
        is_part: Callable[[str], bool],
        is_broken: bool = False,
        retain: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(storage, directory, agreement, durable)
        self._path = os.path.realpath(directory)
        self._commit = os.path.join(directory, commit)
        self._is_part = is_part
        self._is_broken = is_broken
        self._retain, self._is_committed = retain, False
        self._hidden: HiddenDirectory | None = None  # on the first rank

    def begin(self) -> None:
        if self._agreement.rank != 0:
            return
        storage, name = self.storage, ""
        # Files that are left there may be of a save of another directory.
        atomic.remove_dead_directories(storage, os.path.dirname(self._path))
        with reported("open", self._commit):
            holds_one = storage.status(self._commit) is not None
        if holds_one and self._is_broken:
            with reported("remove", self._commit):
                storage.remove(self._commit)
                storage.sync_directory(self._path)
        elif holds_one:
            self._hidden = HiddenDirectory(storage, self._path)
            self.directory, name = self._hidden.directory, self._hidden.name
        self._agreement.put("hidden", os.fsencode(name))

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        if self._agreement.rank != 0:
            hidden = os.fsdecode(self._agreement.get("hidden"))
            if hidden:
                above, last = os.path.split(self._path)
                self.directory = os.path.join(above, hidden, last)
                self._may_be_made = False  # the first rank has made it
        with super().made(name, purpose) as file:
            yield file

    def publish(self, write: Callable[[str], tuple[int | None, list[str]]]) -> None:
        if self._hidden is None:
            with reported("open", self._commit):
                is_taken = self.storage.status(self._commit) is not None
            if is_taken:  # files that always have the same name are another checkpoint's now
                raise CheckpointError(
                    f"another job has saved to {self._path!r} meanwhile: its checkpoint stays, and "
                    "this one was not committed; give each job a directory of its own"
                )
        super().publish(write)
        if self._hidden is not None:
            self._hidden.replace(self._durable, self._is_part)
        self._is_committed = True

    def abandon(self) -> None:
        super().abandon()
        if self._hidden is not None:
            self._hidden.discard()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        super().end(pipeline, failure)
        if self._hidden is not None:
            self._hidden.discard()
        if self._is_committed and self._retain is not None:
            pipeline.retain(self._path, self._retain)
