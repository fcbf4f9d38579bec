"""DirectoryPlace: a directory whose checkpoint a save replaces atomically, while foreign files
stay.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain

from fastckpt.directories.draft import Draft
from fastckpt.directories.hidden_directory import (
    HiddenDirectory,
    explaining,
    make_directories_of,
    names_in,
    new_file,
)
from fastckpt.directories.verify import is_of_others, list_of
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
    is_visible,
)
from fastckpt.formats import file_list
from fastckpt.formats.file_list import File
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.lease import Lease, is_registered, lease_of
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Output, Place
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import Storage, is_directory, patiently, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")

_LOOKS_MAX = 10  # attempts to list a directory that other processes replace
_CLASHES_SHOWN = 5

Write = Callable[[str], tuple[int | None, list[str]]]


class DirectoryPlace(Place):
    """The directory of a checkpoint, for one rank of a save.

    The ranks assemble the checkpoint in a hidden directory, which is then exchanged with the
    directory. Files of the earlier checkpoint are replaced. Foreign files are first linked into the
    hidden directory; if the checkpoint needs the name of one of them, the save fails before
    anything is written.

    Some formats have a record: a file that names the checkpoint's other files. If the record is the
    only file name that the earlier and the new checkpoint share, ranks write to the directory
    itself, and replacing the record is the commit.

    Args:
        storage, path, agreement: access to the file system, the directory, and the save's round.
        durable: whether the checkpoint must survive a crash of the machine.
        draft: this rank's files; None: made() creates them one by one.
        record: the file names that every checkpoint has, beginning with the record's; if empty, the
            directory has a list of its files.
        is_part: whether a file of this name belongs to a checkpoint; None: the list names the
            files.
        is_broken: whether the existing checkpoint has lost files, so that it must not be read.
        per_node: whether each node may have its own disk; then one rank of each node commits there.
        pointer: the path of a file that names the newest checkpoint, and its new content.
        lease: the directory that only one job at a time may save to; "": no lease.
        retain, replaces: like save_directory's.

    Attributes:
        directory: the directory that files are written to.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        agreement: Round,
        durable: bool,
        *,
        draft: Draft | None = None,
        record: Sequence[str] = (),
        is_part: Callable[[str], bool] | None = None,
        is_broken: bool = False,
        per_node: bool = False,
        pointer: tuple[str, str] | None = None,
        lease: str = "",
        retain: Callable[[], None] | None = None,
        replaces: bool = True,
    ) -> None:
        self.storage = storage
        self.directory = path if draft is None else draft.directory
        self._given, self._path = path, os.path.realpath(path) if draft is None else path
        self._beside = os.path.dirname(self._path) if draft is None else draft.beside
        self._agreement, self._durable = agreement, durable
        self._draft, self._is_filled = draft, draft is not None and draft.is_own
        self._hidden: HiddenDirectory | None = draft if draft is not None and draft.is_own else None
        self._record, self._is_part, self._is_broken = record, is_part, is_broken
        self._per_node, self._pointer = per_node, pointer
        self._leased = lease
        self._lease: Lease | None = None
        self._retain, self._replaces = retain, replaces
        self._is_joined = agreement.rank == 0
        self._has_made_it = self._is_committed = False
        self._made: list[str] = []  # this rank's files outside a hidden directory
        self._replaced: int | None = None  # the replaced record, until the save ends
        self._unneeded: list[str] = []
        self._seen = set[str]()  # files in the replaced directory

    def awaited(self, previous: Sequence[InnerHandle], pipeline: Pipeline) -> Sequence[InnerHandle]:
        # Until saves to the same directory end, the files that they leave are unknown.
        return [each for each in previous if self._record and each.path == self._given]

    def begin(self) -> None:
        if self._agreement.rank != 0:
            return
        storage, draft = self.storage, self._draft
        if self._leased:
            self._make(self._leased)
            lease = lease_of(storage, self._leased, alone=self._leased == self._given)
            lease.take()
            self._lease = lease
        if draft is not None:
            if self._hidden is None:
                draft.make()
                self._hidden = draft
        elif len(self._record) > 1 and self._holds_one() and not self._breaks():
            self._hidden = hidden = HiddenDirectory(storage, self._path)
            self.directory = hidden.directory
        else:
            self._make(self._given)
        if not self._record or len(self._record) > 1:
            atomic.remove_dead_directories(storage, self._beside)
        if draft is None or self._per_node:
            self._tell()

    def _make(self, directory: str) -> None:
        with reported("make directory", directory):
            is_there = self.storage.status(directory) is not None
        if not is_there:
            atomic.make_directory(self.storage, directory, self._durable)
            self._has_made_it |= directory == self._given

    def _holds_one(self) -> bool:
        """Returns whether the directory has a checkpoint's record."""
        record = os.path.join(self._given, self._record[0])
        with reported("open", record):
            return self.storage.status(record) is not None

    def _breaks(self) -> bool:
        """Removes the record of a broken checkpoint; returns whether the checkpoint is broken."""
        if self._is_broken:
            record = os.path.join(self._given, self._record[0])
            with reported("remove", record):
                self.storage.remove(record)
                self.storage.sync_directory(self._path)
        return self._is_broken

    def _tell(self) -> None:
        """Sends the other ranks the name of the hidden directory, or ""."""
        name = "" if self._hidden is None else self._hidden.name
        self._agreement.put("hidden", os.fsencode(name))

    def _join(self) -> None:
        """Receives the directory for all ranks' files from the first rank."""
        if self._is_joined:
            return
        name = os.fsdecode(self._agreement.get("hidden"))
        self._is_joined = True
        if name and self._per_node:
            self._hidden = hidden = HiddenDirectory(self.storage, self._path, self._beside, name)
            self.directory = hidden.directory
            if hidden.is_own:
                atomic.remove_dead_directories(self.storage, self._beside)
        elif name:
            self.directory = os.path.join(self._beside, name, os.path.basename(self._path))

    def open(self, outputs: Sequence[Output], pace: Pace) -> None:
        if self._draft is not None and self._replaces:
            own = self._draft.directory
            names = {os.path.relpath(output.path, own) for output in outputs}
            if self._is_filled:
                with reported("list", own):
                    names.update(names_in(self.storage, own))
            with reported("open", self._path):
                self._parts_beside(names)
        elif self._agreement.rank == 0 and self._record:
            self._check_record()
        super().open(outputs, pace)
        if self._agreement.rank == 0 and self._draft is not None and not self._per_node:
            self._tell()  # now, so that of files with the same name the first rank's is used

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """Creates a file of the checkpoint, and yields (descriptor, path)."""
        with ExitStack() as making:
            with explaining(self._agreement):
                if self._hidden is None:
                    self._join()
                if self._hidden is not None:
                    file = making.enter_context(self._hidden.made(name, purpose))
                else:
                    file = self._made_here(name, purpose)
                    making.callback(close_quietly, self.storage, file[0])
            yield file

    def _made_here(self, name: str, purpose: Purpose) -> tuple[int, str]:
        path = os.path.join(self.directory, name)
        with reported("open", path):
            try:
                fd = new_file(self.storage, path, purpose)
            except FileNotFoundError:
                self._agreement.check()  # no directory is created for a failed save
                if self.directory != self._given:
                    raise
                atomic.make_directory(self.storage, self.directory, self._durable)
                self._has_made_it = True
                fd = new_file(self.storage, path, purpose)
        self._made = [path]
        return fd, path

    def joined(self, name: str) -> int:
        """Opens a file of the first rank for writing this rank's part.

        Raises:
            PeerFailed: another rank failed or is missing. StorageError: it cannot be opened.
        """
        path = os.path.join(self._first(), name)
        with explaining(self._agreement), reported("open", path):
            return self.storage.open(path, "write")

    def _first(self) -> str:
        """Waits until the first rank has opened its files, and returns its hidden directory."""
        name = os.fsdecode(self._agreement.get("hidden"))
        return os.path.join(self._beside, name, os.path.basename(self._path))

    def bring(self, files: Mapping[str, File]) -> Mapping[str, File]:
        """Moves this rank's files into the first rank's hidden directory, unless they exist there.
        Returns the files that are used.
        """
        storage, brought = self.storage, dict[str, File]()
        if self._per_node:
            self._arrive(files)
        if self._agreement.rank == 0 or self._per_node or not files:
            return files
        assert self._draft is not None
        target = self._first()
        for name, file in files.items():
            path = os.path.join(target, name)
            with explaining(self._agreement), reported("rename", path):
                if storage.status(path) is not None:
                    continue  # several ranks have written it: the first file is used
                make_directories_of(storage, target, name)
                storage.rename(os.path.join(self._draft.directory, name), path)
            brought[name] = file
        if self._durable and brought:
            with explaining(self._agreement), reported("list", target):
                atomic.sync_directories(storage, target)
        return brought

    def _arrive(self, files: Mapping[str, File]) -> None:
        """Reports to the first rank that this rank's files are durable. On a node whose disk the
        first rank does not see, commits the node's files when all ranks' files are durable.
        """
        agreement, hidden = self._agreement, self._hidden
        agreement.put("arrived", file_list.to_record(files))
        if agreement.rank == 0:
            records = map(file_list.from_record, agreement.gather("arrived"))
            merged = dict(chain.from_iterable(each.items() for each in records))
            agreement.put("all arrived", file_list.to_record(merged))
        elif hidden is not None and hidden.is_own:
            merged = file_list.from_record(agreement.get("all arrived"))
            with reported("list", hidden.directory):
                names = merged.keys() & {*names_in(self.storage, hidden.directory)}
            self.write_list({name: merged[name] for name in names}, hidden.directory)
            self._replace(hidden, names)

    def write_list(self, files: Mapping[str, File], directory: str) -> None:
        """Writes the list of a directory's files."""
        storage, path = self.storage, os.path.join(directory, file_list.NAME)
        with reported("write", path):
            with suppress(FileNotFoundError):  # exists only if fill() has copied an old list
                storage.remove(path)
            fd = storage.create(path, 0o666)
            try:
                content = file_list.to_bytes(files)
                patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
                settle(storage, fd, path, self._durable)
            finally:
                close_quietly(storage, fd)

    def publish_listed(self, files: Mapping[str, File]) -> None:
        """Commits these files, which are durable, on the first rank. If each node has its own disk
        and this rank has no files, commits only the pointer.
        """

        def write(directory: str) -> tuple[None, list[str]]:
            self.write_list(files, directory)
            return None, []

        self.publish(None if self._per_node and not files else write, files.keys())

    def publish(self, write: Write | None, names: Collection[str] = ()) -> None:
        """Commits on the first rank, when no rank can fail any more.

        Args:
            write: writes the last files to its argument, a directory. Returns a descriptor of the
                file that the last write replaced (or None), and the paths of files that are not
                needed any more. None: only the pointer is committed.
            names: all names of the checkpoint's files, if it has a list.
        """
        if self._lease is not None:
            self._lease.renew()
        if self._hidden is None and len(self._record) > 1 and self._holds_one():
            # The files that every checkpoint has now belong to another checkpoint.
            raise CheckpointError(
                f"another job saved to {self._path!r} during this save: its checkpoint stays, and "
                "this one was not committed. Give each job a separate directory"
            )
        if write is not None:
            self._replaced, self._unneeded = write(self.directory)
            if self._hidden is not None:
                self._replace(self._hidden, names)
        self._is_committed = True
        if self._pointer is not None:
            self._move(*self._pointer)

    def _replace(self, hidden: HiddenDirectory, names: Collection[str]) -> None:
        """Commits a hidden directory, after linking the foreign files of the old directory into
        it.
        """
        if self._replaces:
            with reported("list", self._path):
                others = self._others(names)
            with reported("link", self._path):
                hidden.link(others, self._durable)
        hidden.settle(self._durable)
        hidden.take_name(self._durable, replaces=self._replaces)

    def _others(self, names: Collection[str]) -> list[str]:
        """Returns the foreign files in the directory. Raises _parts_beside()'s errors.

        Another process may exchange the directory while it is read, and then the files of one
        directory are compared with the list of the other. Therefore a result is used only if the
        directory was the same before and after.
        """
        storage, path = self.storage, self._path
        for _ in range(_LOOKS_MAX):
            before = self._version()
            if before is None:
                return []
            try:
                is_part = self._parts_beside(names)
                self._seen = {*names_in(storage, path, links=True)}
            except FileNotFoundError:
                continue  # the old directory is gone
            except CheckpointError:
                if self._version() == before:
                    raise
                continue
            if self._version() == before:
                return sorted(name for name in self._seen if not is_part(name))
        detail = f"other processes replaced it {_LOOKS_MAX} times while it was being read"
        raise StorageError("list", path, errno.EBUSY, detail=detail)

    def _keep_late(self, hidden: HiddenDirectory) -> None:
        """Moves foreign files that were added to the old directory after it was listed."""
        storage, old = self.storage, hidden.directory
        if not is_directory(storage, old):
            old = os.path.join(hidden.root, atomic.REPLACED)
        for name in names_in(storage, old, links=True):
            if name not in self._seen and not self._is_there(name):
                make_directories_of(storage, self._path, name)
                storage.rename(os.path.join(old, name), os.path.join(self._path, name))

    def _version(self) -> tuple[int, int, int] | None:
        """Returns the identity of the directory that has the path; None if it is missing."""
        status = self.storage.status(self._path)
        return status and (status.st_dev, status.st_ino, status.st_ctime_ns)

    def _parts_beside(self, names: Collection[str]) -> Callable[[str], bool]:
        """Returns a function that returns whether a file name in the directory belongs to a
        checkpoint.

        Raises:
            CheckpointError: the path is a file; or a foreign file has one of `names`.
        """
        storage, path = self.storage, self._path
        if self._is_part is not None or storage.status(path, link=True) is None:
            return self._is_part or (lambda name: False)
        if not is_directory(storage, path):
            raise CheckpointError(
                f"{path!r} is a file, which a directory cannot replace: save to another path"
            )
        status = storage.status(os.path.join(path, file_list.NAME), link=True)
        if status is not None and not stat.S_ISREG(status.st_mode):
            self._refuse([file_list.NAME])
        try:
            parts: Collection[str] = list_of(path, storage).keys()
        except (CorruptCheckpoint, IncompatibleCheckpoint):
            parts = names  # a damaged checkpoint is also replaced
            if is_of_others(path, storage):
                self._refuse([file_list.NAME])
        self._refuse([name for name in names if name not in parts and self._is_there(name)])
        return lambda name: name in parts

    def _is_there(self, name: str) -> bool:
        try:
            return self.storage.status(os.path.join(self._path, name), link=True) is not None
        except NotADirectoryError:  # a file has the name of a needed directory
            return True

    def _check_record(self) -> None:
        """Raises CheckpointError if a name in `record` exists but is not a regular file."""
        clashes = []
        for name in self._record:
            path = os.path.join(self._given, name)
            with reported("open", path):
                status = self.storage.status(path)
            if status is not None and not stat.S_ISREG(status.st_mode):
                clashes.append(name)
        self._refuse(clashes)

    def _refuse(self, clashes: list[str]) -> None:
        if clashes:
            shown = ", ".join(sorted(clashes)[:_CLASHES_SHOWN])
            raise CheckpointError(
                f"{self._path!r} has files that fastckpt did not save but whose names the "
                f"checkpoint needs ({shown}): nothing was changed there. Move these files, or save "
                "to another directory"
            )

    def _move(self, path: str, content: str) -> None:
        """Updates the pointer to name the checkpoint, whose own name is durable."""
        try:
            replaced = atomic.replace_file(
                self.storage, path, content.encode(), self._durable, names_are_durable=True
            )
        except CheckpointError as error:
            if not is_visible(error):
                error.reword(f"{error}; {self._path!r} is committed, but {path!r} is unchanged")
                error.visible = True
            raise
        if replaced is not None:
            close_quietly(self.storage, replaced)

    def abandon(self) -> None:
        atomic.remove_files(self.storage, self._made)
        if self._has_made_it:
            if self._lease is not None and self._leased == self._given:
                self._lease.release()
            with suppress(OSError):  # it has files of other ranks or saves
                self.storage.remove_directory(self._given)
        if self._hidden is not None:
            self._hidden.discard()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            close_quietly(self.storage, replaced)
        atomic.remove_files(self.storage, self._unneeded)
        if (hidden := self._hidden) is not None:
            try:
                if self._is_committed and self._seen and not hidden.is_kept:
                    self._keep_late(hidden)
            except OSError as error:
                log.warning(
                    "files that were added to %r during the save may be lost: %s", self._path, error
                )
            finally:
                hidden.discard()
        if self._lease is not None and not is_registered(self._lease):
            self._lease.release()
        if self._is_committed and self._retain is not None:
            pipeline.retain(self._path, self._retain)
