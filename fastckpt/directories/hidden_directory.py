"""A directory that is put together under a hidden name, and takes its name in exchange with one
that has it.

Responsible for the hidden name, for the one act that gives the directory its own, and for what is
left under the hidden name. It must not know what the files mean, nor how they are written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress

from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, patiently, reported

_REMOVALS_MAX = 3  # tries to remove a directory to which other ranks may still add files


class HiddenDirectory:
    """A directory under a hidden name, which commits or is discarded as a whole.

    Args:
        storage: the seam to the file system.
        path: the path that the directory will have.
        beside: the directory to make the hidden one in; None: that of `path`.

    Attributes:
        directory: the directory, which has the last name of `path`. Files may be written there at
            once, by any means.
        root, name: the hidden directory around it, and its name.
        beside: the directory in which that is.
        lock: a descriptor of the root, which claims it; None before the root could be opened.
        grown: directories other than `beside` that got an entry because of this one.
        is_kept: whether it holds what may be the only durable checkpoint, so that discard() leaves
            it to a later process.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(self, storage: Storage, path: str, beside: str | None = None) -> None:
        self._storage = storage
        self._path = path
        self.beside = os.path.realpath(beside or os.path.dirname(path))
        self.grown: list[str] = []
        self.is_kept = False
        for directory in {self.beside, os.path.dirname(path)}:
            with reported("make directory", directory):
                above = directory
                while storage.status(above) is None:
                    above = os.path.dirname(above)
                    self.grown.append(above)
                storage.make_directories(directory)
        self.root = atomic.temporary_path(os.path.join(self.beside, os.path.basename(path)))
        self.name = os.path.basename(self.root)
        self.directory = os.path.join(self.root, os.path.basename(path))
        with reported("make directory", self.root):
            storage.make_directory(self.root)
            self.lock: int | None = None
            try:
                self.lock = storage.open(self.root)
                atomic.claim(storage, self.lock, self.root)
                storage.make_directory(self.directory)
            except BaseException:
                self.discard()
                raise

    def take_over(self, is_replaced: Callable[[str], bool]) -> None:
        """Links here what else there is in the directory that this one is to replace, and gives
        this one its permissions. Hidden files stay where they are.

        Args:
            is_replaced: whether a file of this name there is not needed any more.
        """
        storage, path = self._storage, self._path
        with reported("open", path):
            before = storage.status(path)
        if before is None:
            return
        with reported("link", path):
            link_others(storage, path, self.directory, is_replaced)
        with reported("set mode", self.directory):
            fd = storage.open(self.directory)
            try:
                storage.set_owner_and_mode(fd, before)
            finally:
                atomic.close_quietly(storage, fd)

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
                try:
                    atomic.publish_directory(
                        storage, self.directory, path, self.root, lock, replaces=replaces
                    )
                except OSError:
                    self.is_kept = True
                    with suppress(OSError):  # the old directory may have got its name back
                        replaced = os.path.join(self.root, atomic.REPLACED)
                        self.is_kept = storage.is_directory(replaced)
                    raise
            # Until the new name is durable, a crash may bring back the old directory.
            self.is_kept = True
            make_durable()
            self.is_kept = False

    def discard(self) -> None:
        """Removes what is left of it: everything, or after the commit what was replaced."""
        for _ in range(0 if self.is_kept else _REMOVALS_MAX):
            try:
                self._storage.remove_tree(self.root)
            except OSError as error:  # what cannot be removed is left to a later save
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue  # another rank, which has yet to hear of the failure, added a file
            break
        if self.lock is not None:
            atomic.close_quietly(self._storage, self.lock)
            self.lock = None


def link_others(
    storage: Storage, source: str, target: str, is_replaced: Callable[[str], bool]
) -> None:
    """Links the files below one directory into another, but for hidden, replaced and existing
    ones.
    """
    for name in storage.names(source):
        old, new = os.path.join(source, name), os.path.join(target, name)
        if storage.is_directory(old):
            storage.make_directories(new)
            link_others(storage, old, new, is_replaced)
        elif name[0] != "." and not is_replaced(name) and storage.status(new) is None:
            storage.link(old, new)
