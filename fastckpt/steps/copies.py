"""The files of one step are read from one directory, or from several that hold copies.

Responsible for opening a file at the nearest place that has it, for going on to the next one where
a copy is damaged or cannot be read, and for trying again what could not be read. It must not know
what is read of a file's content, nor why there are several.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from fastckpt.arguments.near_names import listed
from fastckpt.engine.codec import FrameReader
from fastckpt.engine.staging import Staging
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats.manifest import Manifest, Writer
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.plan.image import Index
from fastckpt.reading.verified import OVERWRITTEN, Body, opened_regular
from fastckpt.reading.verified_file import VerifiedFile, open_verified
from fastckpt.storage.file_system import Storage, naming, persistently, reported

log = logging.getLogger("fastckpt")

T = TypeVar("T")


class Copies:
    """The files of a step.

    Args:
        storage, staging: what reads.
        directories: the nearest first; all but the last may lack files.

    Attributes:
        taken: of each file that was read, by name, the path it was read from.
    """

    def __init__(self, storage: Storage, staging: Staging, directories: Sequence[str]) -> None:
        self._storage = storage
        self._staging = staging
        self._directories = directories
        self._number: dict[str, int] = {}  # of the directory that a file is read from
        self._damaged: set[tuple[str, int]] = set()  # copies, each by file and directory
        self.taken: dict[str, str] = {}

    def path(self, file: str) -> str:
        """Returns where a file is read from now."""
        if file not in self._number:
            self._number[file] = self._numbers(file)[0]
        return self._path(file, self._number[file])

    def _path(self, file: str, number: int) -> str:
        return os.path.join(self._directories[number], file)

    def _numbers(self, file: str) -> list[int]:
        """The directories to look for a file in: those that have an undamaged copy, nearest first,
        but first of all the one that it was last read from.
        """
        last = len(self._directories) - 1
        there = [number for number in range(last) if self._has(file, number)]
        numbers = [n for n in (*there, last) if (file, n) not in self._damaged] or [last]
        return sorted(numbers, key=lambda number: number < self._number.get(file, 0))

    def _has(self, file: str, number: int) -> bool:
        try:
            return self._storage.status(self._path(file, number)) is not None
        except OSError:  # a disk that is gone has no copy
            return False

    def whole(self, file: str, read: Callable[[], T]) -> T:
        """What `read`, which opens a file here, makes of the first copy that is whole.

        Raises:
            CorruptCheckpoint: every copy was read and found damaged; what was wrong with the last.
            StorageError: none is whole, and one could not be read, however often it was tried.
        """
        return persistently(lambda: self._first_whole(file, read), file)

    def _first_whole(self, file: str, read: Callable[[], T]) -> T:
        """One try at each copy."""
        numbers = self._numbers(file)
        unread: StorageError | MemoryError | None = None
        for number, later in zip(numbers, [*numbers[1:], None], strict=True):
            self._number[file] = number
            failure: CheckpointError | MemoryError
            try:
                found = read()
            except CorruptCheckpoint as error:
                failure = error
                self._damaged.add((file, number))
            except (StorageError, MemoryError) as error:
                failure = unread = error
            else:
                self.taken[file] = self._path(file, number)
                return found
            if later is not None:
                log.warning("%s; %r is read instead", failure, self._path(file, later))
        raise unread or failure

    @contextmanager
    def opened(self, file: str, nbytes: int) -> Iterator[int]:
        """A file of the step, which is regular and of the size that the manifest says."""
        path = self.path(file)
        missing = f"{path!r} is missing: the step is not whole"
        with opened_regular(self._storage, path, missing) as fd:
            with reported("open", path):
                found = self._storage.size(fd)
            if found != nbytes:
                raise CorruptCheckpoint(f"{path!r} has {found} bytes, must have {nbytes}")
            yield fd

    def index(self, writer: Writer, nonce: str) -> tuple[ShardIndex, bytes]:
        """The index of a writer, verified against what the manifest says of it; and its bytes."""
        path = self.path(writer.index)
        with self.opened(writer.index, writer.index_nbytes) as fd, reported("read", path):
            content = self._storage.read_at(fd, writer.index_nbytes, 0)
        with naming(path):
            return writer.parse_index(content, nonce), content

    @contextmanager
    def shard(self, index: ShardIndex, frames: dict[int, bytes] | None = None) -> Iterator[Body]:
        """Opens what a writer has stored, as it was before a codec compressed it.

        Args:
            index: of the writer.
            frames: with a codec, receives what the file has of each block that is read.
        """
        path, route = self.path(index.file), None
        sizes = (index.nbytes, index.block_bytes)

        def damaged(begin: int, end: int) -> str:
            return listed(map(repr, index.keys_in(begin, end))) or "its header"

        with self.opened(index.file, index.file_nbytes) as fd, ExitStack() as reading:
            if index.codec is not None:
                reader = FrameReader(self._storage, fd, path, *sizes, index.frames, kept=frames)
                route = reading.enter_context(self._staging.through(fd, reader.transfer))
            blocks = Index(*sizes, index.block_crcs, b"")
            yield Body(self._staging, fd, path, blocks, damaged, OVERWRITTEN, route)

    @contextmanager
    def objects(self, manifest: Manifest) -> Iterator[VerifiedFile]:
        """The file of what is not in shards, which is the one that the manifest means."""
        file, nbytes, crc = manifest.objects
        path = self.path(file)
        with self.opened(file, nbytes) as fd:
            opened = open_verified(self._storage, self._staging, fd, path, True)
            if opened is None:
                raise CorruptCheckpoint(f"{path!r} was not written by fastckpt")
            with opened:
                if opened.closing_crc != crc:
                    raise CorruptCheckpoint(f"{path!r} is of another save than the manifest")
                yield opened
