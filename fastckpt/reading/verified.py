"""The one verified read: it brings ranges of a file to memory, by the blocks that cover them.

Responsible for streams over a file's body, for the errors of these streams, and for which files and
which memory are fit for it. The engine compares the checksums (ReadStream::verify). It must not
know formats: whoever opened the file tells what lies in a damaged range.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.gds_read_stream import GdsReadStream
from fastckpt.engine.read_stream import (
    DAMAGE,
    PEERS,
    EngineReadStream,
    ReadStream,
    StridedReadStream,
)
from fastckpt.engine.staging import Route, Staging
from fastckpt.errors import CorruptCheckpoint, DeviceError, PeerFailed, StorageError
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums, block_count
from fastckpt.plan.runs import CopyRow
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import NoRegularFile, Storage, reported

OVERWRITTEN = "the state may have been partly overwritten"  # a Body.outcome
_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Body:
    """The part of an open file that is verified block by block.

    Attributes:
        staging: reads the blocks.
        fd, path: the file, which stays open meanwhile; path is for messages.
        index: its size and its blocks, with the checksum of each; without any, nothing is checked.
        damaged: tells what lies in a damaged range of bytes (begin, end), and what to do.
        outcome: the state that a failure of a device or another rank leaves behind, in words.
        route: how blocks are read; None: decided for each stream.
    """

    staging: Staging
    fd: int
    path: str
    index: BlockChecksums
    damaged: Callable[[int, int], str] | None = None
    outcome: str = ""
    route: Route | None = None

    def stream(
        self, wanted: Sequence[int] = (), direct: GdsDevice | None = None
    ) -> EngineReadStream:
        """Begins to read blocks by their numbers, ascending, or all; with `direct` to its GPU."""
        index = self.index
        return self.staging.read(
            self.fd,
            self.path,
            index.body_nbytes,
            index.block_bytes,
            index.block_crcs,
            wanted,
            self.route,
            direct,
        )

    def divided(
        self, wanted: Sequence[int], direct: GdsDevice | None, whole: Collection[int]
    ) -> StridedReadStream:
        """As stream(), for memory of the host and of devices.

        Args:
            wanted: as stream()'s.
            direct: reads what it can straight to its GPU; None: all blocks go through the host.
            whole: the numbers of blocks that are likely to go to this GPU as a whole.
        """
        block_bytes = self.index.block_bytes
        if direct is None or self.route is not None or block_bytes != BLOCK_BYTES:
            return self.stream(wanted)
        blocks = wanted or range(block_count(self.index.body_nbytes, block_bytes))
        return GdsReadStream(self.stream, blocks, block_bytes, whole, direct)

    def move(
        self, stream: StridedReadStream, rows: Iterable[CopyRow], devices: Sequence[Any] = ()
    ) -> None:
        """Moves rows to memory; those of `devices` may still be under way when this returns.

        Raises:
            CorruptCheckpoint, StorageError, DeviceError: as check().
        """
        columns = array("Q", [value for row in rows for value in row])
        self.check(stream, stream.read_runs(columns, list(devices)))

    def read_all(self, stream: ReadStream) -> None:
        """Reads and checks the whole body, and keeps nothing; raises as check()."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        for at in range(0, self.index.body_nbytes, _SCRATCH_BYTES):
            self.check(stream, stream.readinto(scratch[: self.index.body_nbytes - at], at))

    def verify(self) -> None:
        """Reads and checks the whole body by a stream of its own."""
        with closing(self.stream()) as stream:
            self.read_all(stream)

    def check(self, stream: ReadStream, done: bool) -> None:
        """Raises the error that kept a stream from doing something, unless it is done.

        Raises:
            CorruptCheckpoint: a block is damaged. StorageError: a read failed. DeviceError: a copy
                to a GPU failed. PeerFailed: another rank failed.
        """
        if done:
            return
        fault, path, left = stream.fault(), repr(self.path), self.outcome and f"; {self.outcome}"
        assert fault is not None
        if fault.op == PEERS:
            raise PeerFailed(f"the load of {path} failed: {fault.text}{left}", fault.ranks)
        if fault.op == "copy":
            what = f"copying {path} to a GPU, at offset {fault.at}"
            raise DeviceError(f"{what}, failed: {fault.text}{left}")
        if fault.op != DAMAGE:
            raise StorageError(fault.op, self.path, fault.errno, fault.at)
        begin = fault.at * self.index.block_bytes
        end = min(begin + self.index.block_bytes, self.index.body_nbytes)
        where = "" if self.damaged is None else f", in {self.damaged(begin, end)}"
        raise CorruptCheckpoint(
            f"{path} is damaged: CRC-32 mismatch in bytes {begin} to {end}{where}"
        )


def _is_listed(storage: Storage, path: str) -> bool:
    """Returns whether the path's directory has a file of this name."""
    directory, name = os.path.split(path)
    with reported("list", directory):
        try:
            return name in storage.names(directory)
        except FileNotFoundError:
            return False


def read_small(storage: Storage, path: str, nbytes_max: int) -> bytes:
    """Returns the content of a small file, nbytes_max of it at most.

    Raises:
        CorruptCheckpoint: it is not a regular file. StorageError: it is missing (ENOENT), or cannot
            be read.
    """
    try:
        with reported("read", path):
            return storage.read_file(path, nbytes_max)
    except StorageError as error:
        if isinstance(error.__cause__, NoRegularFile):
            raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
        raise


@contextmanager
def opened_regular(storage: Storage, path: str, missing: str = "") -> Iterator[int]:
    """Opens a regular file for reading, and closes it.

    Args:
        storage, path: the file.
        missing: the message if the file is missing and that is damage; "": it is a StorageError.

    Raises:
        CorruptCheckpoint: it is not a regular file, or missing. StorageError: it cannot be opened.
    """
    try:
        fd = storage.open(path, "regular")
    except NoRegularFile:
        raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and missing:
            if not _is_listed(storage, path):
                raise CorruptCheckpoint(missing) from None
            detail = "it cannot be found, but its directory lists it"
            raise StorageError("open", path, errno.ESTALE, detail=detail) from error
        raise StorageError("open", path, error.errno or errno.EIO) from error
    try:
        yield fd
    finally:
        close_quietly(storage, fd)
