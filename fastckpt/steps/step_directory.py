"""The directory of one step that is being written, as one rank sees it.

Responsible for beginning it, for the files that this rank makes there, for the directory itself
where this rank sees another file system than the first, and for removing what was made for nothing.
It must not know what the files hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.steps.root import Begun, Steps
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import patiently, reported
from fastckpt.storage.lustre_layout import Purpose


class StepDirectory:
    """One rank writes its files of a step here; they are a step once a manifest says so.

    Args:
        steps: under whose root the directory is.
        agreement: the save's round, asked why if the directory is gone.

    Attributes:
        steps: as the argument.
        name: of the directory; "" until it is known.
        is_begun: this rank has made the directory, and publishes it.
    """

    def __init__(self, steps: Steps, agreement: Round) -> None:
        self.steps = steps
        self.name = ""
        self._storage = steps.storage
        self._agreement = agreement
        self._begun: Begun | None = None
        self._made: list[tuple[str, tuple[int, int]]] = []  # paths, and identities of the files
        self._has_own_directory = False

    @property
    def is_begun(self) -> bool:
        return self._begun is not None

    def begin(self, step: int) -> str:
        """Makes the directory for a save of this step; returns its name.

        Raises:
            StorageError: it cannot be made.
        """
        self._begun = self.steps.begin(step)
        self.name = self._begun.name
        return self.name

    def publish(self, manifest: Manifest, durable: bool) -> None:
        """THE commit; see Steps.publish. On the rank that has begun."""
        assert self._begun is not None
        self.steps.publish(self._begun, manifest, durable)
        self.keep()

    def abandon(self) -> None:
        """Removes what this rank has made."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.steps.abandon(begun)
        for path, identity in self._made:
            with suppress(OSError):  # removed with its directory, or left to remove_dead()
                # On a rank that was late, another save may have made what has this name by now.
                status = self._storage.status(path)
                if status is not None and (status.st_dev, status.st_ino) == identity:
                    self._storage.remove(path)

    def close(self) -> None:
        """Closes what tells others that the save is alive."""
        if self._begun is not None:
            close_quietly(self._storage, self._begun.manifest_fd)

    def path(self, *names: str) -> str:
        """Of the directory, or of what is in it."""
        return self.steps.path(self.name, *names)

    def create(self, name: str, purpose: Purpose | None = None) -> int:
        """Makes a file in the directory, and on a file system of this rank alone, that too."""
        path, storage = self.path(name), self._storage
        with reported("open", path):
            try:
                fd = storage.create(path, 0o666, purpose)
            except FileNotFoundError:
                self._agreement.check()  # if the save has failed meanwhile, that is why
                storage.make_directories(os.path.dirname(path))
                self._has_own_directory = True
                fd = storage.create(path, 0o666, purpose)
            except FileExistsError:
                # The directory was made for this save alone: a rank that was late for a failed one
                # found it under the same name; or there was no room for it.
                storage.remove(path)
                fd = storage.create(path, 0o666, purpose)
            try:
                self._made.append((path, storage.identity(fd)))
            except BaseException:
                close_quietly(storage, fd)
                raise
        return fd

    @contextmanager
    def made(self, name: str, purpose: Purpose | None = None) -> Iterator[tuple[int, str]]:
        """A new file, as (descriptor, path), open while the body runs."""
        fd = self.create(name, purpose)
        try:
            yield fd, self.path(name)
        finally:
            close_quietly(self._storage, fd)

    def write(self, name: str, content: bytes, beside: int, durable: bool) -> None:
        """Makes a small file with this content.

        Args:
            name, content: of the file.
            beside: an open file of the same file system.
            durable: synced.
        """
        path, storage = self.path(name), self._storage
        fd = patiently(storage, beside, lambda: self.create(name))
        try:
            with reported("write", path):
                patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
            settle(storage, fd, path, durable)
        finally:
            close_quietly(storage, fd)

    def sync_own_directory(self) -> None:
        """Makes the names durable on a file system that the first rank does not see."""
        if self._has_own_directory:
            for path in (self.path(), self.steps.root):
                with reported("sync directory", path):
                    self._storage.sync_directory(path)

    def keep(self) -> None:
        """From now on they are the step's."""
        self._made.clear()
