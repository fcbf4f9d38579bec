"""Verified reading: a file that fastckpt wrote, as a readable object whose every byte was checked.

Responsible for recognising such a file, for feeding torch from parallel block reads and for saying
what is damaged. It must not know what torch makes of the bytes.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from fastckpt.engine.gds import Direct
from fastckpt.engine.gds_stream import Divided
from fastckpt.engine.shared_stream import Exchange
from fastckpt.engine.staging import ReadStream, Staging
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DeviceError,
    IncompatibleCheckpoint,
    PeerFailed,
    StorageError,
)
from fastckpt.formats import torch_zip, zip_contents
from fastckpt.plan.image import BLOCK_BYTES, Index, block_count
from fastckpt.storage.file_system import Storage, naming, reported

_SCRATCH_BYTES = 1 << 20
DEFERRED_BYTES = 1 << 20  # storages of this size and more
_MARK = bytes(range(1, 17))  # other bytes after swapping those of items of any size


class OtherByteOrder(Exception):
    """torch swapped bytes that were not there yet: the file has to be read without deferring."""


class VerifiedFile(io.RawIOBase):
    """A file of ours opened for reading; read errors and damage are raised and kept in `error`.

    Made by open_verified(). torch's zip reader fetches each record with one readinto() into the
    memory of the storage it made, so bytes are copied once, from the verified block.

    Attributes:
        error: what went wrong, if anything has.
        nbytes: of the file.
    """

    def __init__(
        self,
        storage: Storage,
        fd: int,
        path: str,
        index: Index,
        stream: ReadStream | Divided | Exchange,
    ) -> None:
        super().__init__()
        self.error: CheckpointError | None = None
        self._storage = storage
        self._fd = fd
        self._path = path
        self._index = index
        self._position = 0
        self._deferring_from: int | None = None
        self._deferred: dict[int, tuple[int, int]] = {}  # offset and size by address
        self.nbytes = index.body_nbytes + len(index.tail)
        self._stream = stream

    @property
    def closing_crc(self) -> int:
        """The CRC-32 that the file ends in, which tells this file from another."""
        return torch_zip.closing_crc(self._index.tail)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "seek before the beginning of the file")
        self._position = base + offset
        return self._position

    def defer(self) -> None:
        """From now on leaves large storages to be asked for by deferred() and fill()."""
        if not isinstance(self._stream, Exchange) or self._stream.device.type != "cpu":
            with naming(self._path):
                self._deferring_from = zip_contents.storages_offset(self._index)

    def stop_deferring(self) -> None:
        """Begins anew, reading all that is asked for when it is."""
        self._deferring_from, self._position = None, 0
        self._deferred.clear()

    def deferred(self, address: int, nbytes: int) -> int | None:
        """Where in the file the content of this memory is that was asked for and not yet read; None
        if it was read.

        Raises:
            OtherByteOrder: the memory was touched meanwhile, by swapping its bytes.
        """
        offset, length = self._deferred.pop(address, (0, 0))
        if not length:
            return None
        if length != nbytes or ctypes.string_at(address, len(_MARK)) != _MARK:
            raise OtherByteOrder
        return offset

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> None:
        """Reads a storage; from a GPU, if it is among `devices` (see Reads.ranges)."""
        if not isinstance(self._stream, Exchange):
            runs = array("Q", (offset, storage.data_ptr(), storage.nbytes(), 1, 0, 0))
            whole = self._stream.read_runs(runs, list(devices))
        else:
            octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            there = self._stream.device
            received = octets if octets.device == there else torch.empty_like(octets, device=there)
            whole = self._stream.read_to(received, offset)
            if received is not octets:
                octets.copy_(received)
        if not whole:
            self.error = self._failure()
            raise self.error

    def _defers(self, nbytes: int, body: int) -> bool:
        begin = self._deferring_from
        return begin is not None and self._position >= begin and nbytes == body >= DEFERRED_BYTES

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        nbytes = max(0, min(len(view), self.nbytes - self._position))
        body = max(0, min(nbytes, self._index.body_nbytes - self._position))
        if self._defers(nbytes, body):
            view[: len(_MARK)] = _MARK
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            self._deferred[address] = self._position, nbytes
        elif body and not self._stream.readinto(view[:body], self._position):
            self.error = self._failure()
            raise self.error
        if nbytes > body:
            begin = self._position + body - self._index.body_nbytes
            view[body:nbytes] = self._index.tail[begin : begin + nbytes - body]
        self._position += nbytes
        return nbytes

    def verify_all(self) -> None:
        """Reads and checks the whole file, keeping nothing of it."""
        scratch = bytearray(_SCRATCH_BYTES)
        self.seek(0)
        while self.readinto(scratch):
            pass

    def verify_end(self) -> None:
        """Checks the last block, which may hold nothing that torch asks for, and waits for what is
        on its way to devices.
        """
        self.seek(self._index.body_nbytes - 1)
        self.readinto(bytearray(1))
        self.arrive()

    def arrive(self) -> None:
        """Waits for what is on its way to devices."""
        if not isinstance(self._stream, Exchange) and not self._stream.arrive():
            self.error = self._failure()
            raise self.error

    def abandon(self) -> None:
        """Closes a file that is not read, with other ranks or without."""
        if not self.closed:
            self._stream.abandon()
        super().close()

    def close(self) -> None:
        try:
            if not self.closed:
                self._stream.close()
        finally:  # or the garbage collector would close what is another file's by then
            super().close()

    def _failure(self) -> CheckpointError:
        peer_failure = self._stream.peer_failure()
        if peer_failure is not None:
            what, ranks = peer_failure
            return PeerFailed(f"load of {self._path!r}: {what}; nothing was loaded", ranks)
        failure = self._stream.failure()
        if failure is not None:
            op, offset, number = failure
            if op == "copy" and not isinstance(self._stream, Exchange):
                return DeviceError(
                    f"copying {self._path!r} to a GPU, at offset {offset}, failed: "
                    f"{self._stream.device_text(number)}; nothing was loaded"
                )
            return StorageError(op, self._path, number, offset)
        begin = self._stream.corrupt_block() * self._index.block_bytes
        end = min(begin + self._index.block_bytes, self._index.body_nbytes)
        try:
            names = zip_contents.damaged_records(self._read_at, self._index, begin, end)
        except (OSError, CorruptCheckpoint):
            names = []  # a bad disk or a forged directory: the damage stands, only its name is lost
        what = f"record {', '.join(names[:5])}" if names else "a zip header or padding"
        if len(names) > 5:
            what += f" and {len(names) - 5} more"
        return CorruptCheckpoint(
            f"{self._path!r} is damaged: CRC-32 mismatch in bytes {begin} to {end}, in {what}; "
            "nothing was loaded: restore it from another checkpoint"
        )

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        return self._storage.read_at(self._fd, nbytes, offset)


def open_verified(
    storage: Storage,
    staging: Staging,
    fd: int,
    path: str,
    verify: bool,
    group: Any = None,
    direct: Direct | None = None,
) -> VerifiedFile | None:
    """The file behind fd for verified reading; None if fastckpt did not write it.

    Args:
        fd: stays the caller's, and open until the result is closed.
        path: for messages.
        verify: check the blocks of the body, and refuse a file whose end is missing or damaged;
            without it such a file is left to torch.
        group: a torch.distributed process group whose ranks all do the same: each reads a share of
            the blocks, and they exchange them.
        direct: reads what goes to its GPU; not with a group.

    Raises:
        CorruptCheckpoint: fastckpt wrote it, and its end is missing or damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
        StorageError: a read failed.
    """
    with reported("read", path):
        nbytes = storage.size(fd)
        marked = torch_zip.is_marked(storage.read_at(fd, torch_zip.HEAD_BYTES, 0))
        end = storage.read_at(fd, torch_zip.END_BYTES, max(0, nbytes - torch_zip.END_BYTES))
        offset = torch_zip.tail_offset(end, nbytes)
        if offset is not None:
            header_nbytes = min(offset, torch_zip.HEADER_BYTES_MAX)
            if not torch_zip.ends_body(storage.read_at(fd, header_nbytes, offset - header_nbytes)):
                offset = None
        if offset is None:
            if not marked or not verify:
                return None
            raise CorruptCheckpoint(
                f"{path!r} is truncated or damaged: fastckpt began it, but its {nbytes} bytes "
                "do not end in the closing record; nothing was loaded: restore it from another "
                "checkpoint"
            )
        tail = storage.read_at(fd, nbytes - offset, offset)
    try:
        index = torch_zip.parse(tail, offset)
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        if isinstance(error, CorruptCheckpoint) and not verify:
            return None
        raise type(error)(f"{path!r}: {error}") from None
    nbytes, block_bytes = index.body_nbytes, index.block_bytes
    crcs = index.block_crcs if verify else ()
    if group is None:

        def stream(wanted: Sequence[int] = (), direct: Direct | None = None) -> ReadStream:
            return staging.read(fd, path, nbytes, block_bytes, crcs, wanted, direct=direct)

        if direct is None or block_bytes != BLOCK_BYTES:
            return VerifiedFile(storage, fd, path, index, stream())
        with naming(path):
            large = zip_contents.blocks_of_large(index, DEFERRED_BYTES)
        blocks = range(block_count(nbytes, block_bytes))
        return VerifiedFile(
            storage, fd, path, index, Divided(stream, blocks, block_bytes, large, direct)
        )
    mine = list(Exchange.mine(group, nbytes, block_bytes)) or [0]
    exchange = Exchange(
        group,
        staging.read(fd, path, nbytes, block_bytes, crcs, mine),
        lambda wanted: staging.read(fd, path, nbytes, block_bytes, crcs, wanted),
        nbytes,
        block_bytes,
    )
    return VerifiedFile(storage, fd, path, index, exchange)
