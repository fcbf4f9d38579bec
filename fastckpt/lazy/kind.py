"""Kind: how one format of checkpoint is recognised at a path, opened and verified, and how remains
of its saves are found. The list of all kinds is in lazy/kinds.py.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from fastckpt.arguments.urls import is_mounted
from fastckpt.engine.staging import Staging
from fastckpt.errors import CheckpointError
from fastckpt.lazy.source import Source
from fastckpt.storage.file_system import Storage, known_status, reported

OF_ANOTHER = ", from another host"
_BESIDE_MAX = 100  # names in a bucket that are looked into


class NotCommitted(CheckpointError):
    """A directory that a save did not commit: it is neither a step nor damaged."""


class LeftOver(CheckpointError):
    """A file that belongs to no checkpoint, since its save did not commit."""


class WithoutChecksums(CheckpointError):
    """A file that cannot be verified, because it contains no checksums."""


class Part(NamedTuple):
    """A part of a checkpoint: its path, and a function that verifies it and returns its size."""

    path: str
    check: Callable[[], int]


class Debris(NamedTuple):
    """A file or directory that an ended save has left.

    Attributes:
        path, nbytes: its path and size.
        what: a description.
        age_s: the number of seconds since its last change.
        is_dead: whether its process ran on this host and is dead.
        remove: removes it unless it is found to be in use; returns whether it did.
    """

    path: str
    nbytes: int
    what: str
    age_s: float
    is_dead: bool
    remove: Callable[[], bool]


class Place:
    """A path to examine, with symbolic links resolved.

    Attributes:
        storage, staging, path: the objects that read the path, and the path.
    """

    def __init__(self, storage: Storage, staging: Staging, path: str) -> None:
        self.storage, self.staging, self.path = storage, staging, path

    @cached_property
    def is_directory(self) -> bool:
        """Whether the path is a directory."""
        status = self.status()
        return status is not None and stat.S_ISDIR(status.st_mode)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in the directory, which is listed once, at the first use."""
        with reported("list", self.path):
            return frozenset(self.storage.names(self.path))

    @cached_property
    def files(self) -> list[str]:
        """The names in the directory; in a bucket only those of objects, since an examination of
        each name would take requests.
        """
        is_bucket = is_mounted(self.path)
        others = self.storage.names(self.path, directories=True) if is_bucket else ()
        return sorted(self.names.difference(others))

    def inside(self, name: str) -> str:
        """Returns the path of a name in the directory."""
        return os.path.join(self.path, name) if name else self.path

    def below(self, name: str) -> Place:
        """Returns the Place of the entry `name` in this directory."""
        return Place(self.storage, self.staging, self.inside(name))

    def status(self, name: str = "", *, link: bool = False) -> os.stat_result | None:
        """Returns the status of this path, or of a name in the directory, like known_status()."""
        return known_status(self.storage, self.inside(name), link=link)

    def has(self, name: str, *, link: bool = False) -> bool:
        """Returns whether the directory has this name; if `link`, a broken link also counts."""
        return self.status(name, link=link) is not None

    def version(self, name: str = "") -> tuple[int, int, int] | None:
        """Returns a value that distinguishes successive files of one name; None without a file."""
        status = self.status(name)
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)

    def debris(
        self, names: list[str], path: str, what: str, is_dead: bool, remove: Callable[[], bool]
    ) -> Debris:
        """Returns Debris that consists of these files or directories with their contents."""
        statuses = [status for name in names for status in self._statuses(name)]
        nbytes = sum(each.st_size for each in statuses if not stat.S_ISDIR(each.st_mode))
        changed = max((each.st_mtime for each in statuses), default=0.0)
        return Debris(path, nbytes, what, max(0.0, time.time() - changed), is_dead, remove)

    def _statuses(self, name: str) -> Iterator[os.stat_result]:
        status = self.status(name, link=True)
        if status is None:
            return
        yield status
        if stat.S_ISDIR(status.st_mode):
            with suppress(OSError):  # it is only told
                for inner in self.storage.names(self.inside(name)):
                    yield from self._statuses(os.path.join(name, inner))


class Kind:
    """A kind of checkpoint. If it does not override a method, another kind covers that function.

    Attributes:
        hint: a text that names the call to load it, with the path as {path!r}.
    """

    hint = ""

    def recognise(self, place: Place) -> bool:
        """Returns whether the place is of this kind, provided that no kind before it in the list
        matches. Raises StorageError if it cannot be listed.
        """
        raise NotImplementedError

    def open(self, place: Place) -> tuple[str, Source]:
        """Opens the checkpoint; returns its path and Source. Raises like lazy.open.opened()."""
        raise NotImplementedError

    def verify(self, place: Place) -> Iterator[Part]:
        """Yields the parts of this kind that are directly in the place, which may also have parts
        of other kinds. Raises StorageError or OSError if it cannot be listed.
        """
        yield from ()

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields the remains of this kind's saves in a directory. Raises like verify()."""
        yield from ()


def bounded(path: str, names: list[str]) -> tuple[list[str], list[Part]]:
    """Returns the names in a directory to examine, and a Part that reports omitted names. In a
    bucket some are omitted, since each takes requests.
    """
    rest = len(names) - _BESIDE_MAX
    if not is_mounted(path) or rest <= 0:
        return sorted(names), []

    def pass_over() -> int:
        raise WithoutChecksums(
            f"{rest} more names next to the steps were not examined, since each takes requests: "
            "verify the checkpoints among them by URL"
        )

    return sorted(names)[:_BESIDE_MAX], [Part(path, pass_over)]


def refused(path: str, why: str) -> Part:
    """Returns a part whose verification fails with this reason."""

    def check() -> int:
        raise CheckpointError(why)

    return Part(path, check)
