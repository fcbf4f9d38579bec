"""A torch zip, opened for random access: the tensors of its pickle, and where their records lie.

It must not know how bytes are read, nor what the pickle's opcodes mean.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import torch_zip, zip_records
from fastckpt.formats.zip_records import Entry
from fastckpt.lazy.extents import ExtentsSource, Form, Place
from fastckpt.lazy.torch_names import StoredView, names_of
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums
from fastckpt.reading.verified import Body
from fastckpt.reading.verified_file import body_of
from fastckpt.state.tree import Stored
from fastckpt.storage.file_system import Storage, naming, reported

_PICKLE, _BYTE_ORDER, _LITTLE = "data.pkl", "byteorder", b"little"
_READ_BYTES_MAX = 1 << 30  # of a pickle or a zip directory, which may claim any size


class Record(NamedTuple):
    """A record of a zip: its size and CRC-32, and where its data begins, as Place has it."""

    nbytes: int
    crc: int
    begin: int | Callable[[], int]


class TorchZip(NamedTuple):
    """An opened torch zip, whose pickle has been read.

    Attributes:
        body: the file.
        records: by their names in the archive.
        tensors: by name, as the pickle describes them; in a step's objects also placeholders.
        others: how many objects were passed over, by what makes them.
    """

    body: Body
    records: Mapping[str, Record]
    tensors: Mapping[str, StoredView | Stored]
    others: Mapping[str, int]

    def source(self, kind: str, close: Callable[[], None] = lambda: None) -> ExtentsSource:
        """Returns a Source of the tensors that lie in this file; its close() calls `close`."""
        with naming(self.body.path):
            found = dict(self._placed())
        return ExtentsSource(kind, self.body.staging, [self.body], found, close, self.others)

    def _placed(self) -> Iterator[tuple[str, Place]]:
        for name, view in self.tensors.items():
            if isinstance(view, Stored):
                continue
            record = self.records.get(view.record)
            if record is None or record.nbytes < view.nbytes:
                raise CorruptCheckpoint(f"tensor {name!r} reaches beyond record {view.record!r}")
            begin, shift = record.begin, view.offset * view.dtype.itemsize
            begin = begin + shift if isinstance(begin, int) else partial(_shifted, begin, shift)
            yield name, (Form(0, *view[2:5], view.is_conj, view.is_neg), begin)


def torch_file(
    storage: Storage, staging: Staging, fd: int, path: str, close: Callable[[], None]
) -> ExtentsSource:
    """Opens a torch zip, ours or another's.

    Args:
        fd, path: the file, which stays open until `close` is called.

    Raises:
        CorruptCheckpoint: it is damaged, or no such file. IncompatibleCheckpoint: it is of an older
            or a newer version, or of a machine with another byte order. StorageError: it cannot be
            read.
    """
    body = body_of(storage, staging, fd, path)
    if body is not None:
        return zip_of_ours(body).source("a torch file of fastckpt", close)
    with naming(path):
        body, records = _of_others(storage, staging, fd, path)
        opened = _opened(body, records, is_of_step=False)
    return opened.source("a torch file", close)


def zip_of_ours(body: Body, *, is_of_step: bool = False) -> TorchZip:
    """Opens a torch zip that fastckpt wrote; raises as torch_file().

    Args:
        body: the file.
        is_of_step: whether it is a step's file of objects, which has placeholders.
    """
    tail = body.index.tail
    with naming(body.path):
        entries = [*zip_records.directory(tail, len(tail) - torch_zip.END_BYTES)]
        return _opened(body, _records_of_ours(body, entries), is_of_step=is_of_step)


def _records_of_ours(body: Body, entries: list[Entry]) -> dict[str, Record]:
    """Returns the records, which lie one behind the other: a header, its data, a descriptor. So the
    directory, which is verified, tells where data begin, and no header has to be read.
    """
    body_nbytes, nbytes = body.index.body_nbytes, body.index.body_nbytes + len(body.index.tail)
    entries = sorted(entries, key=attrgetter("offset"))
    records = {}
    for (name, offset, size, crc), following in pairwise(entries):
        end = following.offset - zip_records.descriptor_nbytes(offset, size)
        begin = end - size
        if begin <= offset or (size and end > (body_nbytes if begin < body_nbytes else nbytes)):
            raise CorruptCheckpoint(f"record {name!r} is not where it should be")
        records[name.partition("/")[2]] = Record(size, crc, begin)
    return records


def _of_others(
    storage: Storage, staging: Staging, fd: int, path: str
) -> tuple[Body, dict[str, Record]]:
    """Returns the body and the records of a file that has no checksums of blocks."""
    with reported("read", path):
        nbytes = storage.size(fd)
        body = Body(staging, fd, path, BlockChecksums(nbytes, BLOCK_BYTES, (), b""))
        try:
            with zipfile.ZipFile(_Unverified(partial(storage.read_at, fd), nbytes)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise CorruptCheckpoint(
                f"it begins as a zip file, but is none ({error}): it is truncated or damaged"
            ) from None
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise IncompatibleCheckpoint("its zip records are compressed: torch did not write it")
    records = {}
    for info in infos:
        entry = Entry(info.filename, info.header_offset, info.file_size, info.CRC)
        begin = _Once(partial(_data_at, storage, body, entry))
        records[entry.name.partition("/")[2]] = Record(entry.nbytes, entry.crc, begin)
    return body, records


class _Unverified(io.RawIOBase):
    """The bytes of a file, as zipfile reads them."""

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int) -> None:
        super().__init__()
        self._read_at, self._nbytes, self._at = read_at, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at += offset
        if self._at < 0:
            raise ValueError("it names a place before its beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        if nbytes > _READ_BYTES_MAX:
            raise ValueError(f"its directory claims {nbytes} bytes")
        content = self._read_at(nbytes, self._at) if nbytes else b""
        self._at += len(content)
        return content


def _opened(body: Body, records: dict[str, Record], *, is_of_step: bool) -> TorchZip:
    if _PICKLE not in records:
        raise CorruptCheckpoint(f"its zip has no record {_PICKLE!r}: torch did not write it")
    if _BYTE_ORDER in records and (order := _content(body, records, _BYTE_ORDER)) != _LITTLE:
        found = bytes(order[:20])
        raise IncompatibleCheckpoint(f"its byte order is {found!r}, must be {_LITTLE!r}")
    names = names_of(bytes(_content(body, records, _PICKLE)), is_of_step=is_of_step)
    return TorchZip(body, records, names.tensors, names.others)


def _content(body: Body, records: Mapping[str, Record], name: str) -> bytes | bytearray:
    """Returns a record, compared with its own CRC-32, unless that is 0: torch was told to compute
    none (torch.serialization.set_crc32_options).
    """
    record = records[name]
    begin = record.begin if isinstance(record.begin, int) else record.begin()
    content = _bytes(body, begin, record.nbytes) if record.nbytes else b""
    if record.crc and zlib.crc32(content) != record.crc:
        raise CorruptCheckpoint(f"record {name!r} is damaged: its CRC-32 is another")
    return content


def _bytes(body: Body, offset: int, nbytes: int) -> bytes | bytearray:
    """Returns a range of a file, verified if the file has checksums."""
    index = body.index
    if offset + nbytes > index.body_nbytes + len(index.tail) or nbytes > _READ_BYTES_MAX:
        raise CorruptCheckpoint(f"a record at {offset} claims {nbytes} bytes, which it cannot have")
    if offset >= index.body_nbytes:
        begin = offset - index.body_nbytes
        return bytes(index.tail[begin : begin + nbytes])
    content = bytearray(nbytes)
    first, last = offset // index.block_bytes, (offset + nbytes - 1) // index.block_bytes
    with closing(body.stream(range(first, last + 1))) as stream:
        body.check(stream, stream.readinto(content, offset))
    return content


def _data_at(storage: Storage, body: Body, entry: Entry) -> int:
    """Returns where a record's data begins in a file of others, behind its local header."""
    at, header = None, b""
    if 0 <= entry.offset <= body.index.body_nbytes - zip_records.LOCAL_BYTES:
        with reported("read", body.path):
            header = storage.read_at(body.fd, zip_records.LOCAL_BYTES, entry.offset)
        at = zip_records.data_offset(header, entry.offset)
    if at is None or header[:4] != b"PK\x03\x04" or at + entry.nbytes > body.index.body_nbytes:
        raise CorruptCheckpoint(f"{body.path!r}: record {entry.name!r} is not where it should be")
    return at


class _Once:
    """Calls a function at most once, when its result is first asked for."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find = find
        self._found: int | None = None

    def __call__(self) -> int:
        if self._found is None:
            self._found = self._find()
        return self._found


def _shifted(begin: Callable[[], int], nbytes: int) -> int:
    return begin() + nbytes
