"""A kind of checkpoint: how it is recognised at a path, opened and verified, and what its saves
leave behind. The list of all kinds is in lazy/kinds.py.
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
    """A directory that a save began to fill: neither a step nor damage."""


class LeftOver(CheckpointError):
    """A file that belongs to no checkpoint: what a save wrote that did not commit."""


class WithoutChecksums(CheckpointError):
    """A file that may be whole, and that holds nothing to tell it by."""


class Part(NamedTuple):
    """A part of a checkpoint: its path, and what verifies it and returns its size."""

    path: str
    check: Callable[[], int]


class Debris(NamedTuple):
    """A file or directory that a save left.

    Attributes:
        path, nbytes: its path and size.
        what: what it is, in words.
        age_s: how many seconds ago something of it last changed.
        is_dead: whether its process was of this host, and is gone.
        remove: removes it unless somebody is seen to use it, and returns whether it did.
    """

    path: str
    nbytes: int
    what: str
    age_s: float
    is_dead: bool
    remove: Callable[[], bool]


class Place:
    """A path at which something lies, without symbolic links.

    Attributes:
        storage, staging, path: what reads it, and the path.
    """

    def __init__(self, storage: Storage, staging: Staging, path: str) -> None:
        self.storage, self.staging, self.path = storage, staging, path

    @cached_property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        status = self.status()
        return status is not None and stat.S_ISDIR(status.st_mode)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in the directory, as they were listed first."""
        with reported("list", self.path):
            return frozenset(self.storage.names(self.path))

    @cached_property
    def files(self) -> list[str]:
        """The names in the directory; of a bucket, where a look at each would take requests, those
        of objects alone.
        """
        is_bucket = is_mounted(self.path)
        others = self.storage.names(self.path, directories=True) if is_bucket else ()
        return sorted(self.names.difference(others))

    def inside(self, name: str) -> str:
        """Returns the path of a name in the directory."""
        return os.path.join(self.path, name) if name else self.path

    def below(self, name: str) -> Place:
        """Returns the place of a name in the directory."""
        return Place(self.storage, self.staging, self.inside(name))

    def status(self, name: str = "", *, link: bool = False) -> os.stat_result | None:
        """Returns what lies here, or in the directory under a name, as known_status() does."""
        return known_status(self.storage, self.inside(name), link=link)

    def has(self, name: str, *, link: bool = False) -> bool:
        """Returns whether something has this name in the directory, be it a link if `link`."""
        return self.status(name, link=link) is not None

    def version(self, name: str = "") -> tuple[int, int, int] | None:
        """Returns what tells files that have had a name apart; None if none has it now."""
        status = self.status(name)
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)

    def debris(
        self, names: list[str], path: str, what: str, is_dead: bool, remove: Callable[[], bool]
    ) -> Debris:
        """Returns the debris that these files or directories are, with all that is in them."""
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
    """A kind of checkpoint. What it does not tell of itself is told by another kind.

    Attributes:
        hint: which call loads it, with the path as {path!r}.
    """

    hint = ""

    def recognise(self, place: Place) -> bool:
        """Returns whether what lies there is opened as this kind, if it is none before it in the
        list. Raises StorageError if it cannot be listed.
        """
        raise NotImplementedError

    def open(self, place: Place) -> tuple[str, Source]:
        """Opens what it recognises, and returns also the path of what was opened. Raises as
        lazy/open's opened().
        """
        raise NotImplementedError

    def verify(self, place: Place) -> Iterator[Part]:
        """Yields the parts of this kind that lie directly there; there may be others beside them.
        Raises StorageError or OSError if it cannot be listed.
        """
        yield from ()

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields what saves of this kind have left in a directory. Raises as verify()."""
        yield from ()


def bounded(path: str, names: list[str]) -> tuple[list[str], list[Part]]:
    """Returns which of the names in a directory are looked into: of a bucket not all, since each
    takes requests. And the part that says so.
    """
    rest = len(names) - _BESIDE_MAX
    if not is_mounted(path) or rest <= 0:
        return sorted(names), []

    def pass_over() -> int:
        raise WithoutChecksums(
            f"{rest} more names beside the steps were not examined, since each takes requests: "
            "verify the checkpoints among them by URL"
        )

    return sorted(names)[:_BESIDE_MAX], [Part(path, pass_over)]


def refused(path: str, why: str) -> Part:
    """Returns the part that fails with this reason."""

    def check() -> int:
        raise CheckpointError(why)

    return Part(path, check)
