"""A directory that takes its name when all files are there, by exchange with the one before."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain

from fastckpt.directories.draft import Draft
from fastckpt.directories.hidden_directory import explaining, make_directories_of
from fastckpt.directories.verify import list_of
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats import file_list
from fastckpt.formats.file_list import File
from fastckpt.ranks.round import Round
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Output, Place
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.calls import Call
from fastckpt.storage.file_system import Storage, is_directory, patiently, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")

_LOOKS_MAX = 10  # at a directory that other processes replace meanwhile


class SwapPlace(Place):
    """The directory's name, and the draft that takes it, as one rank of a save sees them.

    Args:
        storage, path: the seam to the file system, and the directory's path there.
        agreement: the save's round.
        draft: the files of this rank.
        durable: whether the directory is to outlast a crash of the machine.
        retain, replaces: as save_directory's.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        agreement: Round,
        draft: Draft,
        durable: bool,
        retain: Callable[[], None] | None,
        replaces: bool = True,
    ) -> None:
        self.storage = storage
        self.directory = draft.beside
        self._path = path
        self._agreement = agreement
        self._draft = draft
        self._durable = durable
        self._retain = retain
        self._replaces = replaces
        self._is_committed = False
        self._shared = ""  # the first rank's draft, once its shared files are there

    def made(self, name: str, purpose: Purpose) -> AbstractContextManager[tuple[int, str]]:
        """Makes a file of the draft, as (descriptor, path); an error removes it."""
        return self._draft.made(name, purpose)

    def begin(self) -> None:
        if not self._draft.is_own:
            self._draft.make()
        atomic.remove_dead_directories(self.storage, self._draft.beside)

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        super().open(outputs, pace)
        if self._agreement.rank == 0 and self._draft.shared is not None:
            self._agreement.put("shared", os.fsencode(self._draft.name))

    def joined(self, name: str) -> int:
        """Opens a file of the first rank's draft to write this rank's part of it.

        Raises:
            PeerFailed: another rank failed, or is missing. StorageError: it cannot be opened.
        """
        if not self._shared:
            self._shared = self._first_draft("shared")
        path = os.path.join(self._shared, name)
        with explaining(self._agreement), reported("open", path):
            return self.storage.open(path, "write")

    def _first_draft(self, key: str) -> str:
        """Returns the first rank's draft, when that has told of it under this key."""
        name, inner = os.fsdecode(self._agreement.get(key)), os.path.basename(self._draft.directory)
        return os.path.join(self._draft.beside, name, inner)

    def bring(self, files: Mapping[str, File]) -> Mapping[str, File]:
        """Moves this rank's files into the first rank's draft; returns those that count."""
        if self._agreement.rank == 0:
            self._agreement.put("place", os.fsencode(self._draft.name))
            return files
        storage, target, brought = self.storage, self._first_draft("place"), {}
        for name, file in files.items():
            path = os.path.join(target, name)
            with explaining(self._agreement), reported("rename", path):
                if storage.status(path) is not None:
                    continue  # several ranks have written this file: the first one counts
                make_directories_of(storage, target, name)
                storage.rename(os.path.join(self._draft.directory, name), path)
            brought[name] = file
        if self._durable and brought:
            with explaining(self._agreement), reported("list", target):
                atomic.sync_directories(storage, target)
        return brought

    def publish(self, files: Mapping[str, File], brought: Sequence[Mapping[str, File]]) -> None:
        """Commits: the directory, whose files are durable by now, gets its name.

        Args:
            files: the first rank's files.
            brought: the files of the others, in the order of the ranks.
        """
        storage, directory = self.storage, self._draft.directory
        merged = dict(chain(*(found.items() for found in [*reversed(brought), files])))
        listed = os.path.join(directory, file_list.NAME)
        with reported("write", listed):
            with suppress(FileNotFoundError):  # there is one only if fill() has copied an old list
                storage.remove(listed)
            fd = storage.create(listed, 0o666)
            try:
                content = file_list.to_bytes(merged)
                patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
                settle(storage, fd, listed, self._durable)
            finally:
                close_quietly(storage, fd)
        self._draft.settle(self._durable)
        if self._replaces:
            with reported("list", self._path):
                self._refuse_others(merged)
        self._draft.take_name(self._durable, replaces=self._replaces)
        self._is_committed = True

    def _refuse_others(self, files: Mapping[str, File]) -> None:
        """Raises CheckpointError if the old directory holds other files, which would be lost.

        Another process may exchange the directory while it is looked at: then files of the one are
        not in the list of the other. So it has to be the same before and after a look that counts.
        """
        storage, path = self.storage, self._path
        before: tuple[int, ...] | None = ()
        for _ in range(_LOOKS_MAX):
            if not is_directory(storage, path):
                if storage.status(path) is None:
                    return
                raise CheckpointError(
                    f"{path!r} is a file, and is not replaced by a directory: save to another path"
                )
            try:
                others = self._others(files)
            except FileNotFoundError:
                continue  # a directory in the one before is gone
            if not others:
                return
            if (now := self._version()) == before:
                raise CheckpointError(
                    f"{path!r} holds files that are of no checkpoint "
                    f"({', '.join(sorted(others)[:5])}) and is not replaced: save to a directory "
                    "of its own"
                )
            before = now
        detail = f"other processes have replaced it {_LOOKS_MAX} times while it was looked at"
        raise StorageError("list", path, errno.EBUSY, detail=detail)

    def _others(self, files: Mapping[str, File]) -> set[str]:
        """Returns the files in the old directory that are neither in its list nor in `files`."""
        others = {*names_in(self.storage, self._path, links=True)} - files.keys()
        if others:
            with suppress(CheckpointError):  # a damaged list tells nothing
                others -= list_of(self._path, self.storage).keys()
        return others

    def _version(self) -> tuple[int, int, int] | None:
        """Returns what tells directories that have had the name apart; None if none has it now."""
        status = self.storage.status(self._path)
        return status and (status.st_dev, status.st_ino, status.st_ctime_ns)

    def abandon(self) -> None:
        self._draft.discard()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        self._draft.discard()
        if self._is_committed and self._retain is not None:
            pipeline.retain(self._path, self._retain)


def names_in(
    storage: Storage, directory: str, under: str = "", *, links: bool = False
) -> Iterator[str]:
    """Yields the files of a directory and below, by relative names; with `links` symlinks, too."""
    for name in sorted(storage.names(os.path.join(directory, under))):
        relative = f"{under}/{name}" if under else name
        path = os.path.join(directory, relative)
        if is_directory(storage, path):
            yield from names_in(storage, directory, relative, links=links)
        elif relative != file_list.NAME and (links or not _is_link(path)):
            yield relative


def _is_link(path: str) -> bool:
    with Call("status", path):
        return os.path.islink(path)
