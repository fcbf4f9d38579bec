"""The directory of one step that is being written, as one rank sees it.

The module makes this rank's files there, and the directory too if this rank sees another file
system than the first; it removes them if the save fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from fastckpt.formats.manifest import Manifest
from fastckpt.ranks.round import Round
from fastckpt.steps.known import Begun
from fastckpt.steps.root import ALONE_S, Steps
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import patiently, reported
from fastckpt.storage.lustre_layout import Purpose


class UncommittedStep:
    """The directory that one rank writes its files of a step to, before a manifest commits it.

    Attributes:
        steps: the steps of the root that the directory is in.
        name: the directory's name; "" until it is known.
        is_begun: whether this rank has made the directory, and so publishes it.
    """

    def __init__(self, steps: Steps, agreement: Round) -> None:
        self.steps = steps
        self.name = ""
        self._storage = steps.storage
        self._agreement = agreement
        self._begun: Begun | None = None
        self._made: list[str] = []  # paths of files
        # The directory, open where its name may be taken again: then that proves whose it is.
        self._directory = -1
        self._has_own_directory = False

    @property
    def is_begun(self) -> bool:
        return self._begun is not None

    def begin(self, step: int, passing: bool = False) -> str:
        """Makes the directory for a save of this step; returns its name. As Steps.begin()."""
        self._begun = self.steps.begin(step, passing)
        self.name = self._begun.name
        return self.name

    def join(self, name: str) -> None:
        """Learns the directory's name from the rank that has made it."""
        if not self.is_begun and name:
            self.steps.take(name)
        self.name = name

    def publish(self, manifest: Manifest, durable: bool) -> None:
        """Commits the step by Steps.publish(), on the rank that has begun it."""
        assert self._begun is not None
        self.steps.publish(self._begun, manifest, durable)
        self.keep()

    def abandon(self) -> None:
        """Removes the files, and the directory, that this rank has made."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.steps.abandon(begun)
        elif self._made:
            with suppress(OSError):  # it is gone, or left to remove_dead()
                self._remove_made()

    def _remove_made(self) -> None:
        """Removes this rank's files. It may be late, and the directory another save's by now."""
        with self.steps.alone(self.name, ALONE_S) as is_alone:
            if is_alone and (self._directory < 0 or self._is_own_directory()):
                self._storage.remove_all(self.path(), [*map(os.path.basename, self._made)])
                # It has a file that another rank is to remove, or the first rank could not remove
                # it since it had one of these.
                self._storage.remove_directory(self.path())

    def _is_own_directory(self) -> bool:
        status = self._storage.status(self.path())
        return status is not None and os.path.samestat(status, self._storage.fstat(self._directory))

    def close(self) -> None:
        """Closes the temporary manifest, whose lock tells others that the save is alive."""
        if self._begun is not None:
            close_quietly(self._storage, self._begun.manifest_fd)
        directory, self._directory = self._directory, -1
        if directory >= 0:
            close_quietly(self._storage, directory)

    def share(self) -> None:
        """Lets others read the step from now on, which is committed; it is not removed before
        close().
        """
        if self._begun is not None:
            with suppress(OSError):  # as when it was claimed
                self._storage.lock(self._begun.manifest_fd, shared=True)

    def path(self, *names: str) -> str:
        return self.steps.path(self.name, *names)

    def create(self, name: str, purpose: Purpose | None = None) -> int:
        """Makes a file; and the directory, if this rank sees another file system than the first."""
        path, storage = self.path(name), self._storage
        with reported("open", path):
            try:
                fd = storage.create(path, 0o666, purpose)
            except FileNotFoundError:
                self._agreement.check()  # the directory is gone if the save has failed meanwhile
                storage.make_directory(os.path.dirname(path), parents=True)
                self._has_own_directory = True
                fd = storage.create(path, 0o666, purpose)
            except FileExistsError:
                if path not in self._made:  # it is a rank's that was late for an earlier save
                    raise
                storage.remove(path)  # of a first try, for which there was no room
                fd = storage.create(path, 0o666, purpose)
            return self._noted(path, fd)

    def _noted(self, path: str, fd: int) -> int:
        """Notes a file as made here; returns its descriptor."""
        try:
            proves_it = self._directory >= 0 or self.is_begun
            if not proves_it and self.steps.may_be_taken_again(self.name):
                self._directory = self._storage.open(self.path(), "directory")
            self._made.append(path)
        except BaseException:
            close_quietly(self._storage, fd)
            raise
        return fd

    def has_beside(self, path: str) -> bool:
        """Returns whether a file lies in the directory of the steps, and not of others."""
        return path.startswith(os.path.join(self.steps.root, ""))

    def adopt(self, name: str, source: str) -> int:
        """Makes a file of what lies beside the step's directory; returns a new descriptor."""
        path, storage = self.path(name), self._storage
        with reported("rename", path):
            if path in self._made:
                storage.remove(path)
            storage.rename(source, path, replaces=False)
        with reported("open", path):
            return self._noted(path, storage.open(path, "write"))

    @contextmanager
    def made(self, name: str, purpose: Purpose | None = None) -> Iterator[tuple[int, str]]:
        """Makes a file and yields (descriptor, path); the file is open while the body runs."""
        fd = self.create(name, purpose)
        try:
            yield fd, self.path(name)
        finally:
            close_quietly(self._storage, fd)

    def write(self, name: str, content: bytes, beside: int | None, durable: bool) -> None:
        """Makes a small file with this content, synced if `durable`; `beside` is an open file of
        the same file system, by which that tells whether to try again.
        """
        path, storage = self.path(name), self._storage
        small = Purpose(0, stripe="keep", directory=self.steps.root)
        create = partial(self.create, name, small)
        fd = create() if beside is None else patiently(storage, beside, create)
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
        """Keeps the files from being removed by abandon(): they are the step's now."""
        self._made.clear()
