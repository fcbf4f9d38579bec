"""StepCopies: the files of one step, in one directory or in several directories with copies.

The module reads a file from the nearest directory that has the file. If that copy is damaged or
cannot be read, the file is read from the next directory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastckpt.arguments.names import listed
from fastckpt.engine.codec import FrameReader
from fastckpt.engine.staging import Staging, crc32
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, as_url
from fastckpt.formats import torch_zip
from fastckpt.formats.manifest import Manifest, Writer
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.latch import SignalSafeFuture, call_aside
from fastckpt.plan.image import BLOCK_BYTES, PORTION_BYTES, BlockChecksums, block_count
from fastckpt.reading.kept_blocks import KeptBlocks
from fastckpt.reading.verified import OVERWRITTEN, Body, VerifiedFile, body_of, opened_regular
from fastckpt.storage.file_system import Storage, naming, persistently, reported
from fastckpt.storage.input_files import InputFile

log = logging.getLogger("fastckpt")

T = TypeVar("T")
Fetch = Callable[[str, bool], str]
_FETCHES = 2  # files fetched at a time, since each takes one core here and one at the neighbour


class StepCopies:
    """The files of a step, each read from the nearest undamaged copy.

    Args:
        storage, staging: read the files.
        directories: the directories with copies, the nearest first. Only the last must have all
            files.
        fetch: copies a file to the first directory. The second argument is False if the file is
            missing there and True if it is damaged. Returns the source of the copy, or "" if no
            other copy is intact. Raises StorageError if another copy may be intact but could not be
            transferred.
        open_shards: keeps the shards and their read routes open until the stack is closed. None:
            each shard is opened for one read.
        kept: keeps blocks of the shards that stay open.

    Attributes:
        kept: the argument.
        sources: maps each file's name to the path that the file was read from.
    """

    def __init__(
        self,
        storage: Storage,
        staging: Staging,
        directories: Sequence[str],
        open_shards: ExitStack | None = None,
        fetch: Fetch | None = None,
        kept: KeptBlocks | None = None,
    ) -> None:
        self._storage = storage
        self._staging = staging
        self._directories = directories
        self._fetch, self._fetched = fetch, dict[str, str]()
        self._coming = dict[str, SignalSafeFuture[bool]]()  # fetches that ahead() has begun
        self._unbrought = set[str]()  # files whose failed fetch was reported
        self._open_shards, self._bodies = open_shards, dict[str, Body]()
        self.kept = kept
        self._lock = threading.Lock()
        self._number: dict[str, int] = {}  # the number of the directory that a file is read from
        self._damaged: set[tuple[str, int]] = set()  # copies, each by file and directory number
        self.sources: dict[str, str] = {}

    def path(self, file: str) -> str:
        """Returns the path from which a file is currently read."""
        if file not in self._number:
            self._number[file] = self._numbers(file)[0]
        return self._path(file, self._number[file])

    def _path(self, file: str, number: int) -> str:
        return os.path.join(self._directories[number], file)

    def _numbers(self, file: str) -> list[int]:
        """Returns the numbers of the directories with an undamaged copy of a file. The directory of
        the last read comes first, then those after it, then the nearer ones.
        """
        last = len(self._directories) - 1
        there = [number for number in range(last) if self._has(file, number)]
        numbers = [n for n in (*there, last) if (file, n) not in self._damaged] or [last]
        return sorted(numbers, key=lambda number: number < self._number.get(file, 0))

    def _has(self, file: str, number: int) -> bool:
        try:
            return self._storage.status(self._path(file, number)) is not None
        except OSError:  # a disk that has failed has no copy
            return False

    def whole(self, file: str, read: Callable[[], T]) -> T:
        """Calls `read`, which opens the file here, for each copy; returns the result of the first
        undamaged copy.

        Raises:
            CorruptCheckpoint: every copy is damaged; the error is that of the last copy.
            StorageError: no readable copy is intact, and another copy could not be read or fetched
                in several attempts.
        """
        return persistently(lambda: self._first_whole(file, read), file)

    def _brought(self, file: str, is_damaged: bool) -> bool:
        """Fetches a file into the first directory; returns whether the file is there now."""
        if self._fetch is None or file in self._fetched:
            return False
        self._fetched[file] = self._fetch(file, is_damaged)  # called again if it raises
        if self._fetched[file]:
            self._damaged -= {(file, number) for number, _ in enumerate(self._directories)}
            self._number[file] = 0
        return self._fetched[file] != ""

    @contextmanager
    def ahead(
        self, shards: Iterable[tuple[ShardIndex, T]]
    ) -> Iterator[Iterator[tuple[ShardIndex, T]]]:
        """Yields an iterator of the same pairs, which fetches missing shards of the next ones
        meanwhile.

        At the end, waits for the fetches that have begun, except after an interrupt: a neighbour
        that hangs would hold it up. Their threads then end in the time that a fetch may take.
        """
        is_interrupted = True
        try:
            yield self._fetched_ahead(shards)
            is_interrupted = False
        except Exception:
            is_interrupted = False
            raise
        finally:
            for fetch in () if is_interrupted else self._coming.values():
                if (error := fetch.exception()) is not None:
                    log.warning("%s", error)
            self._coming.clear()

    def _fetched_ahead(
        self, shards: Iterable[tuple[ShardIndex, T]]
    ) -> Iterator[tuple[ShardIndex, T]]:
        if self._fetch is None:  # without a need to hold two of them at a time
            yield from shards
            return
        waiting = deque[tuple[ShardIndex, T]]()
        for index, value in shards:
            if not self._has(index.file, 0):
                fetch = partial(self._brought, index.file, is_damaged=False)
                self._coming[index.file] = call_aside(fetch)
            waiting.append((index, value))
            if len(waiting) == _FETCHES:
                yield waiting.popleft()
        yield from waiting

    def _first_whole(self, file: str, read: Callable[[], T]) -> T:
        unread: StorageError | MemoryError | None = None
        coming = self._coming.pop(file, None)
        if self._fetch is not None and (coming is not None or not self._has(file, 0)):
            try:
                if coming is None:
                    self._brought(file, is_damaged=False)
                else:
                    coming.result()
            except StorageError as error:
                unread = error
                if file not in self._unbrought:
                    log.warning("%s", error)
                self._unbrought.add(file)
        numbers = self._numbers(file)
        for number, later in zip(numbers, [*numbers[1:], None], strict=True):
            self._number[file] = number
            failure: CheckpointError | MemoryError
            try:
                result = read()
            except CorruptCheckpoint as error:
                failure = error
                self._damaged.add((file, number))
            except (StorageError, MemoryError) as error:
                failure = unread = error
            else:
                path = as_url(self._path(file, number))
                self.sources[file] = path if number else self._fetched.get(file) or path
                return result
            if later is not None:
                log.warning("%s; reading %r instead", failure, self._path(file, later))
        if unread is None and self._brought(file, is_damaged=True):
            log.warning("%s; reading the copy at %s instead", failure, self._fetched[file])
            return self._first_whole(file, read)
        raise unread or failure

    @contextmanager
    def opened(self, file: str, nbytes: int) -> Iterator[InputFile]:
        """Opens a file of the step, which must be a regular file of the size in the manifest."""
        path = self.path(file)
        missing = f"{path!r} is missing: the step is incomplete"
        with opened_regular(self._storage, path, missing) as opened:
            with reported("open", path):
                size = opened.nbytes()
            if size != nbytes:
                raise CorruptCheckpoint(f"{path!r} has {size} bytes, must have {nbytes}")
            yield opened

    def index(self, writer: Writer, nonce: str) -> tuple[ShardIndex, bytes]:
        """Returns a writer's index, checked against the manifest's record of it, and the bytes of
        the index.
        """
        path = self.path(writer.index)
        with self.opened(writer.index, writer.index_nbytes) as opened, reported("read", path):
            content = opened.read_at(writer.index_nbytes, 0)
        with naming(path):
            return writer.parse_index(content, nonce), content

    @contextmanager
    def shard(
        self,
        index: ShardIndex,
        unpadded: list[int] | None = None,
    ) -> Iterator[Body]:
        """Opens a writer's shard for reading, decompressed if it was written with a codec.

        Args:
            index: the writer's index.
            unpadded: see FrameReader; only used with a codec.
        """
        if self._open_shards is None:
            with self._shard(index, unpadded=unpadded) as body:
                yield body
            return
        with self._lock:
            if index.file not in self._bodies:
                body = self._open_shards.enter_context(self._shard(index))
                if body.route is None:
                    body = replace(body, route=self._staging.input_route(body.file))
                self._bodies[index.file] = body
        yield self._bodies[index.file]

    @contextmanager
    def _shard(
        self,
        index: ShardIndex,
        frames: dict[int, bytes] | None = None,
        unpadded: list[int] | None = None,
    ) -> Iterator[Body]:
        route = None

        def damaged(begin: int, end: int) -> str:
            return listed(map(repr, index.keys_in(begin, end))) or "its header"

        with self.opened(index.file, index.file_nbytes) as opened:
            if index.codec is not None:
                reader = FrameReader(
                    opened,
                    index.nbytes,
                    index.block_bytes,
                    index.frames,
                    index.codec,
                    kept=frames,
                    unpadded=unpadded,
                )
                route = self._staging.through(opened.fd, reader.transfer)
            blocks = BlockChecksums(index.nbytes, index.block_bytes, index.block_crcs, b"")
            yield Body(self._staging, opened, blocks, damaged, OVERWRITTEN, route)

    @contextmanager
    def body(self, manifest: Manifest) -> Iterator[Body]:
        """Opens the file of objects and checks that the manifest names this very file."""
        file, nbytes, crc = manifest.objects
        path = self.path(file)
        with self.opened(file, nbytes) as opened:
            body = body_of(self._staging, opened)
            if body is None:
                raise CorruptCheckpoint(f"{path!r} was not written by fastckpt")
            if torch_zip.closing_crc(body.index.tail) != crc:
                raise CorruptCheckpoint(f"{path!r} and the manifest belong to different saves")
            yield body

    @contextmanager
    def objects(self, manifest: Manifest) -> Iterator[VerifiedFile]:
        """Opens the file of objects, checked like in body(), for torch to read."""
        with self.body(manifest) as body, VerifiedFile(body, body.stream()) as file:
            yield file

    @contextmanager
    def stored_shard(self, index: ShardIndex) -> Iterator[Iterator[bytearray]]:
        """Opens a writer's shard as it is stored; yields an iterator over its verified bytes, in
        portions.
        """
        frames = None if index.codec is None else dict[int, bytes]()
        with self._shard(index, frames) as body:
            yield _stored(body, frames)

    @contextmanager
    def stored_objects(self, manifest: Manifest) -> Iterator[Iterator[bytearray]]:
        """Opens the file of objects to be copied; yields the same kind of iterator as
        stored_shard().
        """
        with self.objects(manifest) as file:
            yield _octets(file)


def _portions(nbytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[bytearray]:
    """Yields memory for each portion of a file, alternating between two buffers."""
    size = max(1, PORTION_BYTES // block_bytes) * block_bytes
    turns = [bytearray(size) for _ in range(min(2, nbytes // size))]
    for number in range(nbytes // size):
        yield turns[number % 2]
    if nbytes % size:
        yield bytearray(nbytes % size)


def _octets(file: VerifiedFile) -> Iterator[bytearray]:
    for portion in _portions(file.nbytes):
        file.readinto(portion)
        yield portion


def _stored(body: Body, frames: dict[int, bytes] | None) -> Iterator[bytearray]:
    """Yields the bytes of a shard. If the shard is compressed, yields its frames, which the reader
    adds to `frames` as it reads blocks.
    """
    # A stream for each portion, so that no more is read ahead: later saves may need the memory.
    index, begin, number = body.index, 0, 0
    for portion in _portions(index.body_nbytes, index.block_bytes):
        numbers = range(number, number + block_count(len(portion), index.block_bytes))
        with closing(body.stream(numbers)) as stream:
            body.check(stream, stream.readinto(portion, begin))
        begin, number = begin + len(portion), numbers.stop
        yield portion if frames is None else bytearray().join(map(frames.pop, numbers))


def write_parts(storage: Storage, fd: int, path: str, parts: Iterable[memoryview]) -> list[int]:
    """Writes a file in parts, several of which may make up a block; returns the CRC-32 of each
    block. Raises StorageError, and any error that `parts` raises.
    """
    at, crcs = 0, list[int]()
    for part in parts:
        crc = crcs.pop() if at % BLOCK_BYTES else 0
        crcs.append(crc32(part, crc))
        with reported("write", path):
            storage.write_at(fd, part, at)
        at += len(part)
    return crcs
