"""A directory that is put together under a hidden name, and takes its name in exchange with one
that has it.

Responsible for the hidden name, for the one act that gives the directory its own, and for what is
left under the hidden name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fastckpt.errors import CheckpointError, Telling
from fastckpt.formats import file_list
from fastckpt.ranks.round import Round
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.calls import Call
from fastckpt.storage.file_system import Storage, is_directory, patiently, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.owners import divided

_REMOVALS_MAX = 3  # tries to remove a directory to which other ranks may still add files
_COPY_BYTES = 1 << 24  # of a file that cannot be linked, at a time


class HiddenDirectory:
    """A directory under a hidden name, which commits or is discarded as a whole.

    Args:
        storage: the seam to the file system.
        path: the path that the directory will have.
        beside: the directory to make the hidden one in; None: that of `path`.
        name: the name of the hidden one, which another rank has chosen. All ranks that see the
            directory put files into it; the one that was first commits or discards it.
        later: whether make() is called later; `path` and `beside` are without symbolic links then.

    Attributes:
        directory: the directory, which has the last name of `path`. Files may be written there at
            once, by any means.
        root, name: the hidden directory around it, and its name.
        beside: the directory in which that is.
        is_own: whether this rank has made it, and so commits or discards it.
        lock: a descriptor of the root, which claims it; None before the root could be opened.
        grown: directories other than `beside` that got an entry because of this one.
        is_kept: whether it holds what may be the only durable checkpoint, so that discard() leaves
            it to a later process.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        beside: str | None = None,
        name: str = "",
        *,
        later: bool = False,
    ) -> None:
        self._storage = storage
        self._path = path
        self.beside = beside or os.path.dirname(path)
        if not later:
            self.beside = os.path.realpath(self.beside)
        self.grown: list[str] = []
        self.is_kept = self.is_own = False
        last = os.path.basename(path)
        self.root = os.path.join(self.beside, name or atomic.temporary_path(last))
        self.name = os.path.basename(self.root)
        self.directory = os.path.join(self.root, last)
        self.lock: int | None = None
        if not later:
            self.make(joins=bool(name))

    def make(self, *, joins: bool = False) -> None:
        """Makes the hidden directory, and what is missing above it. Raises StorageError.

        Args:
            joins: whether another rank may have made it.
        """
        storage, path = self._storage, self._path
        for directory in {self.beside, os.path.dirname(path)}:
            with reported("make directory", directory):
                above = directory
                while storage.status(above) is None:
                    above = os.path.dirname(above)
                    self.grown.append(above)
                storage.make_directory(directory, parents=True)
        with reported("make directory", self.root):
            try:
                storage.make_directory(self.root)
                self.is_own = True
            except FileExistsError:
                if not joins:
                    raise
            try:
                if self.is_own:
                    self.lock = storage.open(self.root)
                    atomic.claim(storage, self.lock, self.root)
                with suppress(FileExistsError):  # another rank was faster
                    storage.make_directory(self.directory)
                    self._protect()
            except BaseException:
                self.discard()
                raise

    def _protect(self) -> None:
        """Gives the directory the permissions of the one that it will replace, before it has files
        that others might not be meant to read.
        """
        before = self._storage.status(self._path)
        if before is not None and stat.S_ISDIR(before.st_mode):
            fd = self._storage.open(self.directory)
            try:
                self._storage.set_permissions(fd, before)
            finally:
                close_quietly(self._storage, fd)

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """Makes a file of the directory, as (descriptor, path); an error removes it."""
        path, storage = os.path.join(self.directory, name), self._storage
        with reported("open", path):
            make_directories_of(storage, self.directory, name)
            fd = new_file(storage, path, purpose)
        try:
            yield fd, path
        except BaseException:
            with suppress(OSError):  # then it is removed with the directory
                storage.remove(path)
            raise
        finally:
            close_quietly(storage, fd)

    def link(self, names: Sequence[str], durable: bool) -> None:
        """Adds files of the directory that has the name, by links; copies those that cannot be
        linked.
        """
        storage = self._storage
        for name in names:
            old, new = os.path.join(self._path, name), os.path.join(self.directory, name)
            make_directories_of(storage, self.directory, name)
            try:
                storage.link(old, new)
            except FileNotFoundError:
                continue  # somebody has removed it
            except OSError:  # some file systems give no file two names, or none in two directories
                _copy(storage, old, new, durable)

    def settle(self, durable: bool) -> None:
        """Gives files the permissions of those that they replace, and makes all entries durable."""
        with reported("set mode", self.directory):
            _keep_permissions(self._storage, self._path, self.directory, durable)
        if durable:  # before the rename, which must not name what a crash can still take
            atomic.sync_directories(self._storage, self.directory)

    def take_name(self, durable: bool, *, replaces: bool = True) -> None:
        """THE commit: gives the directory, whose content is durable by now, its name.

        Args:
            durable: whether the name is to outlast a crash of the machine.
            replaces: whether a directory may have the name; if not, that is an error.

        Raises:
            StorageError: nothing has changed, unless it is `visible`.
        """
        storage, path, lock = self._storage, self._path, self.lock
        assert lock is not None, "it has not been discarded"
        changed = {os.path.dirname(path), self.beside, *self.grown}
        with atomic.naming_in(storage, changed if durable else (), path) as make_durable:
            with reported("rename", path):
                # The times of directories are to be in the order of their commits.
                patiently(storage, lock, lambda: storage.touch(self.directory))
                self.is_kept = True  # if this ends in doubt, it may hold the old directory
                try:
                    atomic.publish_directory(
                        storage, self.directory, path, self.root, lock, replaces=replaces
                    )
                except OSError:
                    with suppress(OSError):  # the old directory may have got its name back
                        replaced = os.path.join(self.root, atomic.REPLACED)
                        self.is_kept = is_directory(storage, replaced)
                    raise
            # Until the new name is durable, a crash may bring back the old directory.
            make_durable()
            self.is_kept = False

    def discard(self) -> None:
        """Removes what is left of it, once: everything, or after the commit what was replaced."""
        lock, self.lock = self.lock, None
        try:
            for _ in range(_REMOVALS_MAX if self.is_own and not self.is_kept else 0):
                try:
                    self._storage.remove_directory(self.root, content=True)
                except OSError as error:  # what cannot be removed is left to a later save
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        continue  # another rank, which has yet to hear of the failure, added a file
                break
        finally:
            self.is_own = False
            if lock is not None:
                close_quietly(self._storage, lock)


def explaining(agreement: Round) -> Telling:
    """Raises the save's failure instead of the body's error, if the save has failed meanwhile: then
    the hidden directory of another rank is gone.
    """
    check = agreement.check
    return Telling(lambda error: check() if isinstance(error, CheckpointError) else None)


def make_directories_of(storage: Storage, directory: str, name: str) -> None:
    """Makes the missing directories of a relative name. It fails if `directory` itself is missing:
    one that was discarded must not be there again.
    """
    above = os.path.dirname(name)
    if above and storage.status(os.path.join(directory, above)) is None:
        make_directories_of(storage, directory, above)
        with suppress(FileExistsError):  # another rank was faster
            storage.make_directory(os.path.join(directory, above))


def new_file(storage: Storage, path: str, purpose: Purpose) -> int:
    """Makes a file, in the place of one that has the path: it was made before, where there was no
    room for it, or by another rank, and one of them counts.
    """
    try:
        return storage.create(path, 0o666, purpose)
    except FileExistsError:
        storage.remove(path)
        return storage.create(path, 0o666, purpose)


def names_in(
    storage: Storage, directory: str, under: str = "", *, links: bool = False
) -> Iterator[str]:
    """Yields the files of a directory and below, by relative names, but for the list, and for what
    processes have made for a moment; with `links` symbolic links, too.
    """
    for name in sorted(storage.names(os.path.join(directory, under))):
        relative = f"{under}/{name}" if under else name
        path = os.path.join(directory, relative)
        if is_directory(storage, path):
            yield from names_in(storage, directory, relative, links=links)
        elif not (relative == file_list.NAME or _is_passing(name)) and (
            links or not _is_link(path)
        ):
            yield relative


def _is_passing(name: str) -> bool:
    """Whether a name is that of a temporary, or of what a client of NFS has yet to remove."""
    return name.startswith(".nfs") or divided(name)[1] is not None


def _is_link(path: str) -> bool:
    with Call("status", path):
        return os.path.islink(path)


def _keep_permissions(storage: Storage, before: str, directory: str, durable: bool) -> None:
    """Gives what lies below a directory the permissions of what has the same name below another."""
    if not is_directory(storage, before):
        return
    for name in sorted({*storage.names(directory)}.intersection(storage.names(before))):
        old, new = os.path.join(before, name), os.path.join(directory, name)
        likes, its = storage.status(old, link=True), storage.status(new, link=True)
        if likes is None or its is None or stat.S_IFMT(likes.st_mode) != stat.S_IFMT(its.st_mode):
            continue
        if stat.S_ISDIR(its.st_mode):
            _keep_permissions(storage, old, new, durable)
        same = (likes.st_mode, likes.st_uid, likes.st_gid) == (its.st_mode, its.st_uid, its.st_gid)
        if same or stat.S_ISLNK(its.st_mode):
            continue
        fd = storage.open(new)
        try:
            storage.set_permissions(fd, likes)
            if stat.S_ISREG(its.st_mode):
                atomic.settle(storage, fd, new, durable)
        finally:
            close_quietly(storage, fd)


def _copy(storage: Storage, source: str, target: str, durable: bool) -> None:
    """Copies a file with its permissions."""
    fd = storage.open(source, "regular")
    try:
        copy = storage.create(target, 0o600)
        try:
            for offset in range(0, nbytes := storage.fstat(fd).st_size, _COPY_BYTES):
                content = storage.read_at(fd, min(_COPY_BYTES, nbytes - offset), offset)
                storage.write_at(copy, content, offset)
            storage.set_permissions(copy, storage.fstat(fd))
            atomic.settle(storage, copy, target, durable)
        finally:
            close_quietly(storage, copy)
    finally:
        close_quietly(storage, fd)
