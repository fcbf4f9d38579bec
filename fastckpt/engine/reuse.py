"""Compares the blocks of a file with another file before the engine writes them: what that has in
the same place is cloned, so that both files share it on the disk, and the rest is left to write.

They are compared by hashes of their chunks. This module must not know what blocks contain, which
file the other one is, or the blocks' checksums.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from fastckpt import _engine
from fastckpt.errors import StorageError
from fastckpt.formats.shard_index import HASH_BYTES, ChunkHashes
from fastckpt.plan.image import BLOCK_BYTES, block_count
from fastckpt.storage.file_system import Storage, reported

# What is cloned or written as a whole: a multiple of the blocks of all file systems that clone, and
# small beside what changes together, so that little is written that has not changed.
CHUNK_BYTES = 128 << 10


class OtherFile(NamedTuple):
    """A file to clone from: open for reading, of `nbytes`, and the hashes of its chunks, which have
    CHUNK_BYTES.
    """

    fd: int
    path: str
    nbytes: int
    hashes: ChunkHashes


def refusal_to_clone(storage: Storage, fd: int, path: str) -> StorageError | None:
    """Returns the error that says why an open file cannot share ranges with others; None if it can,
    as far as a range of no bytes tells.
    """
    try:
        with reported("clone", path):
            storage.clone_range(fd, fd, storage.size(fd), 0)  # at its end, where there are none
    except StorageError as error:
        return error
    return None


class Cloner:
    """Clones those chunks of one file that another file has in the same place, block by block.

    Several threads may call rest() at once, each with its own block.

    Args:
        fd: the file. Where another one is given, it has its size already, so that a range at its
            end can be cloned.
        path: its path, for messages.
        nbytes: the size of its content.
        key: the key of the hashes; it is `other`'s, if there is one.
        other: the file to clone from, which stays open; None if all is to be written.

    Attributes:
        refusal: the error of a clone after which everything was written, or None.
    """

    def __init__(
        self,
        storage: Storage,
        fd: int,
        path: str,
        nbytes: int,
        key: bytes,
        other: OtherFile | None,
    ) -> None:
        assert other is None or other.hashes.key == key
        self._storage = storage
        self._fd = fd
        self._path = path
        self._nbytes = nbytes
        self._key = key
        self._values = bytearray(HASH_BYTES * block_count(nbytes, CHUNK_BYTES))
        self._old = b"" if other is None else _comparable(other, nbytes)
        self._cloned: dict[int, int] = {}  # bytes of each block, by its offset
        self._other = other
        self.refusal: StorageError | None = None

    def rest(self, memory: memoryview, offset: int) -> list[tuple[int, int]]:
        """Clones what it can of a block; returns the parts that are left to be written.

        Args:
            memory: the whole block, and its padding for O_DIRECT.
            offset: its offset in the file, a multiple of BLOCK_BYTES.

        Returns:
            Begin and end of each part in `memory`, ascending; the last may have the padding.
        """
        assert offset % BLOCK_BYTES == 0
        nbytes = min(len(memory), self._nbytes - offset)
        values = _engine.polyval(memory[:nbytes], self._key, CHUNK_BYTES)
        first = offset // CHUNK_BYTES * HASH_BYTES
        self._values[first : first + len(values)] = values
        old = self._old[first : first + len(values)]
        cloned, rest = 0, []
        for begin, end, is_equal in _runs(values, old):
            end = min(end, nbytes)
            if is_equal and self._clone(offset + begin, end - begin):
                cloned += end - begin
            else:
                rest.append((begin, len(memory) if end == nbytes else end))
        self._cloned[offset] = cloned
        return rest

    @property
    def hashes(self) -> ChunkHashes:
        """The hashes of the file's chunks, after the last block."""
        return ChunkHashes(self._key, CHUNK_BYTES, bytes(self._values))

    @property
    def cloned_nbytes(self) -> int:
        """The bytes that were cloned and not written."""
        return sum(self._cloned.values())

    def cloned_blocks(self) -> list[int]:
        """Returns the numbers of the blocks that were cloned whole, after the last block."""
        return [
            offset // BLOCK_BYTES
            for offset, cloned in sorted(self._cloned.items())
            if cloned == min(BLOCK_BYTES, self._nbytes - offset)
        ]

    def _clone(self, offset: int, nbytes: int) -> bool:
        """Clones a range from the other file; returns False if it has to be written."""
        other = self._other
        if other is None or self.refusal is not None:
            return False
        try:
            with reported("clone", self._path, offset):
                self._storage.clone_range(self._fd, other.fd, offset, nbytes)
        except StorageError as error:
            self.refusal = error  # whatever it is: the bytes are in memory, and can be written
            return False
        return True


def _comparable(other: OtherFile, nbytes: int) -> bytes:
    """Returns the hashes of those chunks of the other file that a file of nbytes can share: whole
    ones, and the last one if both end at the same byte.
    """
    values = other.hashes.values
    return values if other.nbytes == nbytes else values[: other.nbytes // CHUNK_BYTES * HASH_BYTES]


def _runs(values: bytes, old: bytes) -> list[tuple[int, int, bool]]:
    """Returns begin and end, in bytes of a block, of its longest runs of chunks that are all equal
    to the old ones or all different, and which they are.
    """
    equal = [
        values[at : at + HASH_BYTES] == old[at : at + HASH_BYTES]
        for at in range(0, len(values), HASH_BYTES)
    ]
    runs, end = [], 0
    for is_equal, run in groupby(equal):
        begin, end = end, end + CHUNK_BYTES * len(list(run))
        runs.append((begin, end, is_equal))
    return runs
