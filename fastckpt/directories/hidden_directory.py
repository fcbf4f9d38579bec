"""A directory that is assembled under a hidden name, and then renamed, or exchanged with an
existing directory.

Responsible for the hidden name, for the rename that commits the directory, and for removing remains
under the hidden name.
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

_REMOVALS_MAX = 3  # attempts to remove a directory while other ranks may add files to it
_COPY_BYTES = 1 << 24  # copied at a time from a file that cannot be linked


class HiddenDirectory:
    """A directory under a hidden name, which is committed or discarded as a whole.

    Args:
        storage: access to the file system.
        path: the path that the directory will have.
        beside: the directory to create the hidden directory in; None: the parent of `path`.
        name: the name of the hidden directory, which another rank has chosen. All ranks that see
            the directory put files into it; the rank that created it commits or discards it.
        later: whether make() is called later; then `path` and `beside` must not have symbolic
            links.

    Attributes:
        directory: the directory, with the base name of `path`. Any code may write files there at
            once.
        root, name: the hidden directory that contains it, and the hidden directory's name.
        beside: the parent of `root`.
        is_own: whether this rank has created it, and therefore commits or discards it.
        lock: a descriptor of `root`, which claims it; None before `root` is opened.
        grown: directories other than `beside` that got a new entry.
        is_kept: whether it may hold the only durable checkpoint, so that discard() leaves it for a
            later process.

    Raises:
        StorageError: the directory cannot be created.
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
        """Makes the hidden directory and its missing parents. Raises StorageError.

        Args:
            joins: whether another rank may have created it.
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
                with suppress(FileExistsError):  # another rank has created it
                    storage.make_directory(self.directory)
                    self._protect()
            except BaseException:
                self.discard()
                raise

    def _protect(self) -> None:
        """Copies the permissions of the directory that will be replaced, before there are files
        that other users may not be allowed to read.
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
        """Creates a file in the directory, and yields (descriptor, path); an error removes the
        file.
        """
        path, storage = os.path.join(self.directory, name), self._storage
        with reported("open", path):
            make_directories_of(storage, self.directory, name)
            fd = new_file(storage, path, purpose)
        try:
            yield fd, path
        except BaseException:
            with suppress(OSError):  # the file is then removed with the directory
                storage.remove(path)
            raise
        finally:
            close_quietly(storage, fd)

    def link(self, names: Sequence[str], durable: bool) -> None:
        """Links files of the existing directory into this one, or copies them if necessary."""
        storage = self._storage
        for name in names:
            old, new = os.path.join(self._path, name), os.path.join(self.directory, name)
            make_directories_of(storage, self.directory, name)
            try:
                storage.link(old, new)
            except FileNotFoundError:
                continue  # the file was removed
            except OSError:  # some file systems support no hard links, or none between directories
                _copy(storage, old, new, durable)

    def settle(self, durable: bool) -> None:
        """Copies the permissions of replaced files to their replacements, and makes all entries
        durable.
        """
        with reported("set mode", self.directory):
            _keep_permissions(self._storage, self._path, self.directory, durable)
        if durable:  # before the rename, which must only name durable files
            atomic.sync_directories(self._storage, self.directory)

    def take_name(self, durable: bool, *, replaces: bool = True) -> None:
        """THE commit: renames the directory, whose content is durable, to its final name.

        Args:
            durable: whether the name must survive a crash of the machine.
            replaces: whether an existing directory is replaced; if not, an existing one is an
                error.

        Raises:
            StorageError: nothing has changed, unless the error is `visible`.
        """
        storage, path, lock = self._storage, self._path, self.lock
        assert lock is not None, "it has not been discarded"
        changed = {os.path.dirname(path), self.beside, *self.grown}
        with atomic.naming_in(storage, changed if durable else (), path) as make_durable:
            with reported("rename", path):
                # The times of directories must be in the order of their commits.
                patiently(storage, lock, lambda: storage.touch(self.directory))
                self.is_kept = True  # if the outcome is unknown, it may hold the old directory
                try:
                    atomic.publish_directory(
                        storage, self.directory, path, self.root, lock, replaces=replaces
                    )
                except OSError:
                    with suppress(OSError):  # the old directory may have its name again
                        replaced = os.path.join(self.root, atomic.REPLACED)
                        self.is_kept = is_directory(storage, replaced)
                    raise
            # Until the new name is durable, a crash may restore the old directory.
            make_durable()
            self.is_kept = False

    def discard(self) -> None:
        """Removes the hidden directory, or after the commit the replaced directory; once only."""
        lock, self.lock = self.lock, None
        try:
            for _ in range(_REMOVALS_MAX if self.is_own and not self.is_kept else 0):
                try:
                    self._storage.remove_directory(self.root, content=True)
                except OSError as error:  # a later save removes the rest
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        continue  # another rank added a file
                break
        finally:
            self.is_own = False
            if lock is not None:
                close_quietly(self._storage, lock)


def explaining(agreement: Round) -> Telling:
    """Raises the save's failure instead of the body's error if the save has failed: the body may
    have failed only because another rank's hidden directory is gone.
    """
    check = agreement.check
    return Telling(lambda error: check() if isinstance(error, CheckpointError) else None)


def make_directories_of(storage: Storage, directory: str, name: str) -> None:
    """Makes the missing directories of a relative name. It fails if `directory` itself is missing,
    because a discarded directory must not be created again.
    """
    above = os.path.dirname(name)
    if above and storage.status(os.path.join(directory, above)) is None:
        make_directories_of(storage, directory, above)
        with suppress(FileExistsError):  # another rank has created it
            storage.make_directory(os.path.join(directory, above))


def new_file(storage: Storage, path: str, purpose: Purpose) -> int:
    """Creates a file, and replaces an existing one. The existing file was left by an earlier
    attempt that ran out of space, or is another rank's file of the same name; only one of these is
    used.
    """
    try:
        return storage.create(path, 0o666, purpose)
    except FileExistsError:
        storage.remove(path)
        return storage.create(path, 0o666, purpose)


def names_in(
    storage: Storage, directory: str, under: str = "", *, links: bool = False
) -> Iterator[str]:
    """Yields the relative names of the files in a directory and its subdirectories, except the list
    and temporary files. With `links`, it also yields symbolic links.
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
    """Whether this is the name of a temporary, or of a removed file that an NFS client still
    keeps.
    """
    return name.startswith(".nfs") or divided(name)[1] is not None


def _is_link(path: str) -> bool:
    with Call("status", path):
        return os.path.islink(path)


def _keep_permissions(storage: Storage, before: str, directory: str, durable: bool) -> None:
    """Copies permissions from the files below a directory to the files with the same names below
    another.
    """
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
