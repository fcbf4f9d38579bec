"""The comparison of a file with another one, by hashes of chunks, while the engine writes it: what
both have in the same place is cloned, so that they share it on the disk.

The module must not know what blocks contain, which file the other one is, or checksums.
"""

from __future__ import annotations

from typing import NamedTuple

from fastckpt import _engine
from fastckpt.errors import CorruptCheckpoint, StorageError, ensure
from fastckpt.plan.chunk_hashes import HASH_BYTES, ChunkHashes
from fastckpt.plan.image import BLOCK_BYTES
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
            storage.clone_range(
                fd, fd, storage.fstat(fd).st_size, 0
            )  # at its end, where there are none
    except StorageError as error:
        return error
    return None


class Cloner:
    """Clones those chunks of one file that another file has in the same place, block by block.
    Where another file is given, the file has its size before the first block, so that a range at
    its end can be cloned.

    Args:
        nbytes: the size of the file's content.
        key: the key of the hashes; it is `other`'s, if there is one.
        other: the file to clone from, which stays open; None if all is to be written.

    Attributes:
        of_engine: the engine's part, which sees each block before it is written; and before it is
            staged, if it is told of there.
    """

    def __init__(self, storage: Storage, nbytes: int, key: bytes, other: OtherFile | None) -> None:
        ensure(other is None or other.hashes.key == key, "the keys of the hashes differ")
        self._nbytes = nbytes
        self._other = other
        self._key = key
        self.of_engine = _engine.Cloner(
            nbytes,
            BLOCK_BYTES,
            CHUNK_BYTES,
            key,
            -1 if other is None else other.fd,
            b"" if other is None else _comparable(other, nbytes),
            None if storage.transfer is None else storage.clone_range,
            storage.transfer,
        )

    # The properties below are known after the last block.

    @property
    def hashes(self) -> ChunkHashes:
        """The hashes of the file's chunks."""
        return ChunkHashes(self._key, CHUNK_BYTES, self.of_engine.hashes())

    @property
    def cloned_nbytes(self) -> int:
        """The bytes that were cloned and not written."""
        return sum(self.of_engine.cloned())

    @property
    def shared_blocks(self) -> list[int]:
        """The numbers of the blocks all bytes of which are the other file's, cloned or read, and
        that end there in both files.
        """
        other_nbytes = 0 if self._other is None else self._other.nbytes
        return [
            number
            for number, nbytes in enumerate(self.of_engine.taken())
            if nbytes == _block_nbytes(self._nbytes, number)
            and nbytes == _block_nbytes(other_nbytes, number)
        ]

    def refusal(self, path: str) -> StorageError | None:
        """Returns the error of the clone to this path after which everything was written, if one
        failed. Whatever it was, the bytes were in memory or in the other file.
        """
        number, offset = self.of_engine.refusal()
        return StorageError("clone", path, number, offset) if number else None

    def loss(self) -> StorageError | CorruptCheckpoint | None:
        """Returns why bytes that only the other file had, and that could not be cloned, are not in
        this file either; None if all are.
        """
        loss, other = self.of_engine.loss(), self._other
        if loss is None or other is None:
            return None
        number, offset = loss
        if number:
            return StorageError("read", other.path, number, offset)
        end = min(other.nbytes, offset + CHUNK_BYTES)
        return CorruptCheckpoint(
            f"bytes [{offset}, {end}) of {other.path!r} do not have the hash that its index says"
        )


def _block_nbytes(nbytes: int, number: int) -> int:
    """Returns the size of a block in a file of nbytes."""
    return min(BLOCK_BYTES, nbytes - number * BLOCK_BYTES)


def _comparable(other: OtherFile, nbytes: int) -> bytes:
    """Returns the hashes of those chunks of the other file that a file of nbytes can share: whole
    ones, and the last one if both end at the same byte.
    """
    values, whole = other.hashes.values, min(other.nbytes, nbytes) // CHUNK_BYTES
    return values if other.nbytes == nbytes else values[: whole * HASH_BYTES]
