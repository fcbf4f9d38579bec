"""A file in torch's format that fastckpt wrote, as a file object of verified bytes.

Responsible for recognising such a file, for feeding torch from parallel block reads and for telling
which record is damaged. It must not know what torch makes of the bytes.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fastckpt.arguments.near_names import listed
from fastckpt.engine.broadcast_read_stream import BroadcastReadStream
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.read_stream import ReadStream
from fastckpt.engine.staging import Staging
from fastckpt.errors import CheckpointError, CorruptCheckpoint
from fastckpt.formats import record_locations, torch_zip
from fastckpt.reading.verified import Body
from fastckpt.storage.file_system import Storage, naming, reported

T = TypeVar("T")

DEFERRED_BYTES = 1 << 20  # storages of this size and more
_MARK = bytes(range(1, 17))  # differs once items of any size have had their bytes swapped


class OtherByteOrder(Exception):
    """torch has swapped bytes that were not read yet: the file must be read without deferring."""


class VerifiedFile(io.RawIOBase):
    """A file of ours, opened for reading by open_verified().

    torch's zip reader fetches each record by one readinto() to the memory of the storage that it
    made, so bytes are copied once, from the verified block, or read and verified there.

    Attributes:
        error: the first read error or damage, which was raised, too; torch may have replaced it.
        nbytes: the size of the file.
    """

    def __init__(self, body: Body, stream: ReadStream) -> None:
        super().__init__()
        self.error: CheckpointError | None = None
        self._index = index = body.index
        self._body = body
        self._stream = stream
        self._position = 0
        self._deferring_from: int | None = None
        self._deferred: dict[int, tuple[int, int]] = {}  # offset and size by address
        self.nbytes = index.body_nbytes + len(index.tail)

    @property
    def closing_crc(self) -> int:
        """The CRC-32 at the end of the file, which tells this file from another."""
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
        """Leaves large storages unread from now on, until deferred() and fill() ask for them."""
        if self._stream.defers:
            with naming(self._body.path):
                self._deferring_from = record_locations.storages_offset(self._index)

    def stop_deferring(self) -> None:
        """Begins anew, and reads everything as soon as it is asked for."""
        self._deferring_from, self._position = None, 0
        self._deferred.clear()

    def deferred(self, address: int, nbytes: int) -> int | None:
        """Returns the offset in the file of what was deferred for this memory; None if it was read.

        Raises:
            OtherByteOrder: torch has swapped the bytes of this memory meanwhile.
        """
        offset, length = self._deferred.pop(address, (0, 0))
        if not length:
            return None
        if length != nbytes or ctypes.string_at(address, len(_MARK)) != _MARK:
            raise OtherByteOrder
        return offset

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> None:
        """Reads into a storage, which is on a GPU if it is among `devices` (see Reads.ranges)."""
        self._check(self._stream.fill(storage, offset, devices))

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
        elif body:
            self._check(self._stream.readinto(view[:body], self._position))
        if nbytes > body:
            begin = self._position + body - self._index.body_nbytes
            view[body:nbytes] = self._index.tail[begin : begin + nbytes - body]
        self._position += nbytes
        return nbytes

    def verify_all(self) -> None:
        """Reads and checks the whole file, and keeps nothing."""
        self._body.read_all(self._stream)

    def read_by(self, load: Callable[[VerifiedFile], T]) -> T:
        """Returns what `load`, which calls torch, makes of the file, if all that it read was whole.
        Checks the last block, too, which may hold nothing that torch asks for.
        """
        try:
            loaded = load(self)
        except Exception:
            if self.error is not None:  # torch's reader may have put another error in its place
                raise self.error from None
            raise
        if self.error is not None:
            raise self.error
        self._check(self._stream.readinto(bytearray(1), self._index.body_nbytes - 1))
        self.arrive()
        return loaded

    def arrive(self) -> None:
        """Waits until everything has arrived on devices."""
        self._check(self._stream.arrive())

    def abandon(self) -> None:
        """Closes a file that nobody has read from, whether other ranks take part or not."""
        if not self.closed:
            self._stream.abandon()
        super().close()

    def close(self) -> None:
        try:
            if not self.closed:
                self._stream.close()
        finally:  # else the garbage collector closes a descriptor that is another file's by then
            super().close()

    def _check(self, done: bool) -> None:
        try:
            self._body.check(self._stream, done)
        except CheckpointError as error:
            self.error = error
            raise


def open_verified(
    storage: Storage,
    staging: Staging,
    fd: int,
    path: str,
    verify: bool,
    group: Any = None,
    direct: GdsDevice | None = None,
) -> VerifiedFile | None:
    """Opens the file behind fd for verified reading; returns None if fastckpt did not write it.

    Args:
        fd: the caller's descriptor, which stays open until the result is closed.
        path: the file's path, for messages.
        verify: whether to check the blocks of the body, and to refuse a file whose end is missing
            or damaged; if not, such a file is left to torch.
        group: a torch.distributed process group whose ranks all make this call: each reads a share
            of the blocks, and they exchange them.
        direct: reads what goes to its GPU; not with a group.

    Raises:
        CorruptCheckpoint, IncompatibleCheckpoint, StorageError: as body_of().
    """
    body = body_of(storage, staging, fd, path, verify, "nothing was loaded")
    if body is None:
        return None
    if group is not None:
        index = body.index
        shared = BroadcastReadStream(group, body.stream, index.body_nbytes, index.block_bytes)
        return VerifiedFile(body, shared)
    with naming(path):
        large = record_locations.blocks_of_large(body.index, DEFERRED_BYTES) if direct else ()
    return VerifiedFile(body, body.divided((), direct, large))


def body_of(
    storage: Storage, staging: Staging, fd: int, path: str, verify: bool = True, outcome: str = ""
) -> Body | None:
    """Returns the body of the file behind fd, whose end is verified already; None if fastckpt did
    not write the file.

    Args:
        storage, staging, fd, path, verify: as open_verified()'s.
        outcome: the Body's, also for damage.

    Raises:
        CorruptCheckpoint: fastckpt wrote it, and its end is missing or damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it. StorageError: a read failed.
    """
    advice = f"{outcome}: " * bool(outcome) + "restore it from another checkpoint"
    with reported("read", path):
        nbytes = storage.fstat(fd).st_size
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
                f"do not end in the closing record; {advice}"
            )
        tail = storage.read_at(fd, nbytes - offset, offset)
    try:
        with naming(path):
            index = torch_zip.parse(tail, offset)
    except CorruptCheckpoint:
        if not verify:
            return None
        raise

    def damaged(begin: int, end: int) -> str:
        try:
            names = record_locations.damaged_records(
                lambda at, size: storage.read_at(fd, size, at), index, begin, end
            )
        except (OSError, CorruptCheckpoint):
            names = []  # a bad disk or a forged zip directory: damage is still told, without a name
        what = f"record {listed(names)}" if names else "a zip header or padding"
        return f"{what}; {advice}"

    checked = index if verify else replace(index, block_crcs=())
    return Body(staging, fd, path, checked, damaged, outcome)
