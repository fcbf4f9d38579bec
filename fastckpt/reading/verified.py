"""The verified read, which copies ranges of a file to memory and checks the blocks that cover them.

Responsible for streams over a file's body, for their errors, and for the choice of files and memory
that can be read this way. The engine compares the checksums (ReadStream::verify). It must not know
formats: the code that opened the file describes the contents of a damaged range.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fastckpt.engine.broadcast_read_stream import BroadcastReadStream
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.read_stream import (
    DAMAGE,
    PEERS,
    EngineReadStream,
    Fault,
    ReadStream,
    StridedReadStream,
)
from fastckpt.engine.staging import Route, Staging
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DeviceError,
    PeerFailed,
    StorageError,
    ensure,
)
from fastckpt.formats import torch_zip, zip_records
from fastckpt.plan.boxes import CopyRow
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums, block_count
from fastckpt.storage.file_system import NoRegularFile, Storage, naming, reported
from fastckpt.storage.input_files import InputFile, PosixFile, input_file

# ---- Divides the reads of a file: blocks that go to a GPU as a whole come by GPUDirect Storage,
# all others through the host.

_RUN = 6


class GdsReadStream(StridedReadStream):
    """Streams of one file, each of which is opened when first needed; close() closes all.

    Args:
        open_stream: opens a stream of the blocks with these numbers, by GPUDirect or through the
            host.
        blocks: the numbers of the blocks that may be requested, ascending.
        whole: the numbers of the blocks that go to the GPU completely, as far as known.
        direct: the GPU to which these blocks are read.
    """

    def __init__(
        self,
        open_stream: Callable[[Sequence[int], GdsDevice | None], EngineReadStream],
        blocks: Sequence[int],
        block_bytes: int,
        whole: Collection[int],
        direct: GdsDevice,
    ) -> None:
        self._open = open_stream
        self._block_bytes = block_bytes
        self._whole = frozenset(whole)
        self._direct = direct
        self._rest = [number for number in blocks if number not in self._whole]
        self._streams: dict[tuple[bool, bool], EngineReadStream] = {}

    def _stream(self, whole: bool, to_gpu: bool) -> EngineReadStream:
        key = whole, to_gpu
        if key not in self._streams:
            blocks = sorted(self._whole) if whole else self._rest
            stream = self._open(blocks, self._direct if to_gpu else None)
            others, self._streams[key] = [*self._streams.values()], stream
            for other in others:
                stream.beside(other)
        return self._streams[key]

    def _pieces(self, offset: int, nbytes: int) -> Iterator[tuple[bool, int, int]]:
        """Divides a range into runs that are in `whole` blocks (True) or in others (False); yields
        each with its offset and size.
        """
        end = offset + nbytes
        while offset < end:
            number = offset // self._block_bytes
            whole = number in self._whole
            while number * self._block_bytes < end and (number in self._whole) == whole:
                number += 1
            until = min(end, number * self._block_bytes)
            yield whole, offset, until - offset
            offset = until

    def readinto(self, target: Any, offset: int) -> bool:
        view, begin = memoryview(target), offset
        return all(
            self._stream(whole, False).readinto(view[at - begin : at - begin + nbytes], at)
            for whole, at, nbytes in self._pieces(offset, len(view))
        )

    def read_runs(self, runs: Any, devices: list[Any], xors: bool = False) -> bool:
        ensure(not xors, "GPUs receive copies")
        divided: dict[tuple[bool, bool], array[int]] = {}
        columns = memoryview(runs).cast("B").cast("Q")
        for first in range(0, len(columns), _RUN):
            offset, address, nbytes, count, _, _ = row = columns[first : first + _RUN].tolist()
            if count != 1:
                divided.setdefault((False, False), array("Q")).extend(row)
                continue
            of_gpu = goes_to(self._direct.queue, address, devices)
            for whole, at, size in self._pieces(offset, nbytes):
                rows = divided.setdefault((whole, whole and of_gpu), array("Q"))
                rows.extend((at, address + at - offset, size, 1, 0, 0))
        return all(self._stream(*key).read_runs(rows, devices) for key, rows in divided.items())

    def arrive(self) -> bool:
        return all([stream.arrive() for stream in self._streams.values()])

    def nbytes_read(self) -> int:
        return sum(stream.nbytes_read() for stream in self._streams.values())

    def fault(self) -> Fault | None:
        faults = [fault for s in self._streams.values() if (fault := s.fault()) is not None]
        return min(faults, key=lambda fault: fault.op == DAMAGE, default=None)

    def close(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.close()


def goes_to(queue: Any, address: int, devices: Sequence[Any]) -> bool:
    """Whether an address is in a range of `devices` that the queue serves."""
    number = bisect_right(devices, address, key=lambda kept: kept.begin) - 1
    return number >= 0 and address < devices[number].end and devices[number].queue is queue


def whole_blocks(
    rows: Sequence[CopyRow], block_bytes: int, queue: Any, devices: Sequence[Any]
) -> set[int]:
    """Returns the numbers of the blocks whose requested rows all go to one device, each in one run.

    Args:
        rows: the requested rows of the file.
        queue: the device's queue.
        devices: ascending ranges of addresses, see DeviceSources.ranges.
    """
    whole: set[int] = set()
    others: set[int] = set()
    for offset, address, nbytes, count, stride, _ in rows:
        last = offset + (count - 1) * stride + nbytes - 1
        touched = range(offset // block_bytes, last // block_bytes + 1)
        goes = count == 1 and goes_to(queue, address, devices)
        (whole if goes else others).update(touched)
    return whole - others


_HEADER_BYTES_MAX = 1 << 16  # a record's header and what aligns its data


def damaged_records(
    read_at: Callable[[int, int], bytes], index: BlockChecksums, begin: int, end: int
) -> list[str]:
    """Returns the names of the records in a damaged range of a file whose own CRC-32s are wrong.

    Args:
        read_at: (offset, nbytes) -> bytes of the file, unverified.
        index: the file's index.
        begin, end: the range whose block checksum is wrong.

    Returns:
        Names such as "data/3"; none if the damage is in a zip header or in padding.
    """
    names = []
    directory = _directory(index)
    for name, offset, nbytes, expected in zip(
        directory.names, directory.offsets, directory.sizes, directory.crcs, strict=True
    ):
        if offset >= end or nbytes > index.body_nbytes:
            continue
        data = zip_records.data_offset(read_at(offset, zip_records.LOCAL_BYTES), offset)
        if data is None or data >= end or data + nbytes <= begin:
            continue
        crc = 0
        for at in range(data, data + nbytes, BLOCK_BYTES):
            crc = zlib.crc32(read_at(at, min(BLOCK_BYTES, data + nbytes - at)), crc)
        if crc != expected:
            names.append(name.split("/", 1)[-1])
    return names


def _directory(index: BlockChecksums) -> zip_records.Directory:
    return zip_records.directory(index.tail, len(index.tail) - torch_zip.END_BYTES)


def storages_offset(index: BlockChecksums) -> int:
    """Returns the offset of the storages after data.pkl; 0 if data.pkl is not the first record."""
    names, offsets = _directory(index)[:2]
    return offsets[1] if len(names) >= 2 and names[0].endswith("data.pkl") else 0


def blocks_of_large(index: BlockChecksums, nbytes_min: int) -> set[int]:
    """Returns the numbers of blocks that contain only data of one record of at least this size.

    Blocks near a header are left out.
    """
    blocks: set[int] = set()
    size = index.block_bytes
    directory = _directory(index)
    for offset, nbytes in zip(directory.offsets, directory.sizes, strict=True):
        if nbytes_min <= nbytes <= index.body_nbytes - offset:
            first = -(-(offset + _HEADER_BYTES_MAX) // size)
            blocks.update(range(first, (offset + nbytes) // size))
    return blocks


T = TypeVar("T")

DEFERRED_BYTES = 1 << 20  # storages of this size and more
_MARK = bytes(range(1, 17))  # differs once items of any size have had their bytes swapped


class OtherByteOrder(Exception):
    """torch has swapped bytes before they were read, so no read of the file may be deferred."""


class VerifiedFile(io.RawIOBase):
    """A file written by fastckpt, opened for reading by open_verified().

    torch's zip reader reads each record by one readinto() into the memory of the storage that it
    made, so bytes are either copied once from the verified block or read and verified in place.

    Attributes:
        error: the first read error or damage. It was also raised, but torch may have replaced it.
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
        """The CRC-32 at the end of the file, which distinguishes this file from others."""
        return torch_zip.closing_crc(self._index.tail)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET:
            offset += {os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence]
        if offset < 0:
            raise OSError(errno.EINVAL, "seek before the beginning of the file")
        self._position = offset
        return offset

    def defer(self) -> None:
        """Stops reading large storages in readinto(); fill() reads them later."""
        if self._stream.defers:
            with naming(self._body.path):
                self._deferring_from = storages_offset(self._index)

    def stop_deferring(self) -> None:
        """Rewinds the file, and from now on reads everything when it is requested."""
        self._deferring_from, self._position = None, 0
        self._deferred.clear()

    def deferred(self, address: int, nbytes: int) -> int | None:
        """Returns the offset in the file of a deferred read into this memory; None if it was read.

        Raises:
            OtherByteOrder: torch has swapped the bytes of this memory.
        """
        offset, length = self._deferred.pop(address, (0, 0))
        if not length:
            return None
        if length != nbytes or ctypes.string_at(address, len(_MARK)) != _MARK:
            raise OtherByteOrder
        return offset

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> None:
        """Reads into a storage, which is on a GPU if it is in `devices` (see
        DeviceSources.ranges).
        """
        self._check(self._stream.fill(storage, offset, devices))

    def _defers(self, nbytes: int, body: int) -> bool:
        begin = self._deferring_from
        return begin is not None and self._position >= begin and nbytes == body >= DEFERRED_BYTES

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        position, body_end = self._position, self._index.body_nbytes
        nbytes = body = len(view)
        if position + nbytes > body_end:
            nbytes = max(0, min(nbytes, self.nbytes - position))
            body = max(0, min(nbytes, body_end - position))
        if self._defers(nbytes, body):
            view[: len(_MARK)] = _MARK
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            self._deferred[address] = position, nbytes
        elif body and not self._stream.readinto(view[:body], position):
            self._check(False)
        if nbytes > body:
            begin = position + body - body_end
            view[body:nbytes] = self._index.tail[begin : begin + nbytes - body]
        self._position = position + nbytes
        return nbytes

    def verify_all(self) -> None:
        """Reads and verifies the complete file without keeping its bytes."""
        self._body.read_all(self._stream)

    def read_by(self, load: Callable[[VerifiedFile], T]) -> T:
        """Returns the result of `load`, which calls torch, if all bytes that it read were intact.
        Also checks the last block, which torch may not read.
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
        """Waits until all copies to devices have ended."""
        self._check(self._stream.arrive())

    def abandon(self) -> None:
        """Closes a file that was not read from, without waiting for other ranks."""
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
    staging: Staging,
    file: InputFile,
    verify: bool,
    group: Any = None,
    direct: GdsDevice | None = None,
    outcome: str = "nothing was loaded",
) -> VerifiedFile | None:
    """Opens a file for verified reading; returns None if fastckpt did not write it.

    Args:
        file: the file, which must stay open until the result is closed.
        verify: whether to check the blocks of the body, and to refuse a file whose end is missing
            or damaged; if False, such a file is left to torch.
        group: a torch.distributed process group whose ranks all make this call. Each rank reads a
            share of the blocks and sends them to the others.
        direct: the GPU whose storages are read by GPUDirect; not with a group.
        outcome: see body_of().

    Raises:
        CorruptCheckpoint, IncompatibleCheckpoint, StorageError: see body_of().
    """
    body = body_of(staging, file, verify, outcome)
    if body is None:
        return None
    if group is not None:
        index = body.index
        shared = BroadcastReadStream(group, body.stream, index.body_nbytes, index.block_bytes)
        return VerifiedFile(body, shared)
    with naming(file.path):
        large = blocks_of_large(body.index, DEFERRED_BYTES) if direct else ()
    return VerifiedFile(body, body.divided((), direct, large))


def body_of(
    staging: Staging, file: InputFile, verify: bool = True, outcome: str = ""
) -> Body | None:
    """Verifies the end of a file and returns its body; returns None if fastckpt did not write it.

    Args:
        staging, file, verify: see open_verified().
        outcome: see Body; also used for damage.

    Raises:
        CorruptCheckpoint: fastckpt wrote the file, but its end is missing or damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
        StorageError: a read failed.
    """
    advice = f"{outcome}: " * bool(outcome) + "restore it from another checkpoint"
    path = file.path
    with reported("read", path):
        nbytes = file.nbytes()
        marked = torch_zip.is_marked(file.read_at(torch_zip.HEAD_BYTES, 0))
        end = file.read_at(torch_zip.END_BYTES, max(0, nbytes - torch_zip.END_BYTES))
        offset = torch_zip.tail_offset(end, nbytes)
        if offset is not None:
            header_nbytes = min(offset, torch_zip.HEADER_BYTES_MAX)
            if not torch_zip.ends_body(file.read_at(header_nbytes, offset - header_nbytes)):
                offset = None
        if offset is None:
            if not marked or not verify:
                return None
            raise CorruptCheckpoint(
                f"{path!r} is truncated or damaged: it begins like a file of fastckpt, but its "
                f"{nbytes} bytes do not end in the closing record; {advice}"
            )
        tail = file.read_at(nbytes - offset, offset)
    try:
        with naming(path):
            index = torch_zip.parse(tail, offset)
    except CorruptCheckpoint:
        if not verify:
            return None
        raise

    def damaged(begin: int, end: int) -> str:
        try:
            names = damaged_records(lambda at, size: file.read_at(size, at), index, begin, end)
        except (OSError, CorruptCheckpoint):
            names = []  # a bad disk or a forged zip directory: damage is still told, without a name
        more = f" and {len(names) - _NAMED_MAX} more" if names[_NAMED_MAX:] else ""
        named = ", ".join(names[:_NAMED_MAX]) + more
        what = f"record {named}" if names else "a zip header or padding"
        return f"{what}; {advice}"

    checked = index if verify else replace(index, block_crcs=())
    return Body(staging, file, checked, damaged, outcome)


OVERWRITTEN = "the state may have been partly overwritten"  # a Body.outcome
_NAMED_MAX = 5  # damaged records in a message
_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Body:
    """The part of an open file that is verified block by block.

    Attributes:
        staging: reads the blocks.
        file: the file, which must stay open.
        index: the body's size, its blocks and their checksums; without checksums, nothing is
            verified.
        damaged: a function that describes the contents of a damaged range of bytes (begin, end) and
            the remedy.
        outcome: a text about the state after a failure of a device or another rank.
        route: the route of the reads; None: chosen for each stream.
    """

    staging: Staging
    file: InputFile
    index: BlockChecksums
    damaged: Callable[[int, int], str] | None = None
    outcome: str = ""
    route: Route | None = None

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    def stream(
        self, wanted: Sequence[int] = (), direct: GdsDevice | None = None
    ) -> EngineReadStream:
        """Begins to read these blocks, in ascending order, or all; with `direct`, to its GPU."""
        index = self.index
        return self.staging.read(
            self.file,
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
        """Like stream(), for reads into host and device memory.

        Args:
            wanted: see stream().
            direct: the GPU that blocks are read to directly, where possible; None: all blocks go
                through the host.
            whole: the numbers of the blocks that are likely to go to this GPU completely.
        """
        block_bytes = self.index.block_bytes
        is_file = isinstance(self.file, PosixFile)
        if direct is None or self.route is not None or block_bytes != BLOCK_BYTES or not is_file:
            return self.stream(wanted)
        blocks = wanted or range(block_count(self.index.body_nbytes, block_bytes))
        return GdsReadStream(self.stream, blocks, block_bytes, whole, direct)

    def move(
        self,
        stream: StridedReadStream,
        rows: Iterable[CopyRow],
        devices: Sequence[Any] = (),
        xors: bool = False,
    ) -> None:
        """Copies rows to memory; copies to `devices` may still be in flight when this returns. See
        read_runs() for `xors`.

        Raises:
            CorruptCheckpoint, StorageError, DeviceError: see check().
        """
        columns = array("Q", [value for row in rows for value in row])
        self.check(stream, stream.read_runs(columns, list(devices), xors))

    def read_all(self, stream: ReadStream) -> None:
        """Reads and verifies the complete body without keeping its bytes; raises like check()."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        for at in range(0, self.index.body_nbytes, _SCRATCH_BYTES):
            self.check(stream, stream.readinto(scratch[: self.index.body_nbytes - at], at))

    def verify(self) -> None:
        """Reads and verifies the complete body by a separate stream."""
        with closing(self.stream()) as stream:
            self.read_all(stream)

    def check(self, stream: ReadStream, done: bool) -> None:
        """Raises the error of a stream's failed operation; does nothing if `done`.

        Raises:
            CorruptCheckpoint: a block is damaged.
            StorageError: a read failed.
            DeviceError: a copy to a GPU failed.
            PeerFailed: another rank failed.
        """
        if done:
            return
        fault, path, outcome = stream.fault(), repr(self.path), self.outcome and f"; {self.outcome}"
        assert fault is not None
        if fault.op == PEERS:
            raise PeerFailed(f"the load of {path} failed: {fault.text}{outcome}", fault.ranks)
        if fault.op == "copy":
            what = f"copying {path} to a GPU, at offset {fault.at}"
            raise DeviceError(f"{what}, failed: {fault.text}{outcome}")
        if fault.op != DAMAGE:
            raise StorageError(fault.op, self.path, fault.errno, fault.at)
        begin = fault.at * self.index.block_bytes
        end = min(begin + self.index.block_bytes, self.index.body_nbytes)
        where = "" if self.damaged is None else f", in {self.damaged(begin, end)}"
        raise CorruptCheckpoint(
            f"{path} is damaged: CRC-32 mismatch in bytes {begin} to {end}{where}"
        )


def _is_listed(storage: Storage, path: str) -> bool:
    """Returns whether the path's directory lists this file."""
    directory, name = os.path.split(path)
    with reported("list", directory):
        try:
            return name in storage.names(directory)
        except FileNotFoundError:
            return False


def read_small(storage: Storage, path: str, nbytes_max: int) -> bytes:
    """Returns the content of a small file, at most nbytes_max bytes.

    Raises:
        CorruptCheckpoint: it is not a regular file.
        StorageError: it is missing (ENOENT) or cannot be read.
    """
    try:
        with reported("read", path):
            return storage.read_file(path, nbytes_max)
    except StorageError as error:
        if isinstance(error.__cause__, NoRegularFile):
            raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
        raise


@contextmanager
def opened_regular(storage: Storage, path: str, missing: str = "") -> Iterator[InputFile]:
    """Opens a regular file for reading; closes it when the context is left.

    Args:
        storage, path: the file.
        missing: the message of the CorruptCheckpoint for a missing file; "": a missing file raises
            StorageError.

    Raises:
        CorruptCheckpoint: it is not a regular file, or it is missing.
        StorageError: it cannot be opened.
    """
    try:
        file = input_file(storage, path, "regular")
    except NoRegularFile:
        raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and missing:
            if not _is_listed(storage, path):
                raise CorruptCheckpoint(missing) from None
            detail = "it cannot be found, but its directory lists it"
            raise StorageError("open", path, errno.ESTALE, detail=detail) from error
        raise StorageError("open", path, error.errno or errno.EIO) from error
    with closing(file):
        yield file
