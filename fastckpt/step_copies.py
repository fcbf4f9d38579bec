"""Where the files of one step are read from: one directory, or several that hold copies.

Responsible for opening a file at the nearest place that has it, and for going on to the next one
where a copy is damaged. It must not know what is read of a file, nor why there are several.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from fastckpt.commit import close_quietly
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.formats.manifest import Writer
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.storage import Storage, naming, reported

log = logging.getLogger("fastckpt")

T = TypeVar("T")


class Copies:
    """The files of a step.

    Args:
        storage: the seam to the file system.
        directories: the nearest first; all but the last may lack files.

    Attributes:
        taken: of each file that was read, by name, the path it was read from.
    """

    def __init__(self, storage: Storage, directories: Sequence[str]) -> None:
        self._storage = storage
        self._directories = directories
        self._number: dict[str, int] = {}  # of the directory that a file is read from
        self.taken: dict[str, str] = {}

    def path(self, file: str) -> str:
        """Where a file is read from now."""
        if file not in self._number:
            self._number[file] = self._next(file, 0)
        return os.path.join(self._directories[self._number[file]], file)

    def _next(self, file: str, begin: int) -> int:
        """The first directory from number `begin` on that has a file, or else the last."""
        last = len(self._directories) - 1
        for number in range(begin, last):
            try:
                if self._storage.status(os.path.join(self._directories[number], file)) is not None:
                    return number
            except OSError:  # a disk that is gone has no copy
                continue
        return last

    def whole(self, file: str, read: Callable[[], T]) -> T:
        """What `read`, which opens a file here, makes of the first copy that is not damaged.

        Raises:
            CorruptCheckpoint, StorageError: what was wrong with the last one.
        """
        while True:
            path = self.path(file)
            try:
                found = read()
            except (CorruptCheckpoint, StorageError) as error:
                number = self._number[file] + 1
                if number == len(self._directories):
                    raise
                self._number[file] = self._next(file, number)
                log.warning("%s; %r is read instead", error, self.path(file))
                continue
            self.taken[file] = path
            return found

    @contextmanager
    def opened(self, file: str, nbytes: int) -> Iterator[int]:
        """A file of the step, which is regular and of the size that the manifest says."""
        path = self.path(file)
        try:
            fd = self._storage.open_regular(path)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path!r} is missing: the step is not whole") from None
        except OSError as error:
            raise StorageError("open", path, error.errno or errno.EIO) from error
        try:
            with reported("open", path):
                found = self._storage.size(fd)
            if found != nbytes:
                raise CorruptCheckpoint(f"{path!r} has {found} bytes, must have {nbytes}")
            yield fd
        finally:
            close_quietly(self._storage, fd)

    def index(self, writer: Writer, nonce: str) -> tuple[ShardIndex, bytes]:
        """The index of a writer, verified against what the manifest says of it; and its bytes."""
        path = self.path(writer.index)
        with self.opened(writer.index, writer.index_nbytes) as fd, reported("read", path):
            content = self._storage.read_at(fd, writer.index_nbytes, 0)
        with naming(path):
            return writer.parse_index(content, nonce), content
