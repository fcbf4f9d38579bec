"""A torch zip, opened for random access: its pickle's tensors, and their records' offsets."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from itertools import compress, repeat
from operator import gt, itemgetter, le, lt, sub
from typing import NamedTuple

from fastckpt.engine.staging import Staging, crc32
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import torch_zip, zip_records
from fastckpt.formats.zip_records import Directory
from fastckpt.lazy.extents import ExtentsSource
from fastckpt.lazy.source import Rest
from fastckpt.lazy.torch_names import StoredView, names_of
from fastckpt.lazy.value_digests import digests_of
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums
from fastckpt.reading.kept_blocks import KeptBlocks
from fastckpt.reading.verified import Body, body_of
from fastckpt.state.tree import Stored
from fastckpt.storage.file_system import naming, reported
from fastckpt.storage.input_files import InputFile

_PICKLE, _BYTE_ORDER, _LITTLE = "data.pkl", "byteorder", b"little"
_READ_BYTES_MAX = 1 << 30  # of a pickle, which may claim any size


# A record of a zip: its size, its CRC-32, and where its data begins in a file of ours, or its local
# header in one of others.
Record = tuple[int, int, int]
_NONE: Record = -1, 0, 0


class TorchZip(NamedTuple):
    """An opened torch zip, whose pickle has been read.

    Attributes:
        body: the file.
        records: the records, by their names in the archive.
        begin_of: returns the offset of a record's data, or raises.
        tensors: the tensors that the pickle describes, by name; in a step's objects also
            placeholders.
        rest: the other values of the pickle.
    """

    body: Body
    records: Mapping[str, Record]
    begin_of: Callable[[str], int]
    tensors: Mapping[str, StoredView | Stored]
    rest: Rest

    def source(
        self, kind: str, close: Callable[[], None] = lambda: None, kept: KeptBlocks | None = None
    ) -> ExtentsSource:
        """Returns a Source of the tensors stored in this file; its close() calls `close`. For
        `kept`, see ExtentsSource.
        """
        with naming(self.body.path):
            views = self._placed()
        staging, rest = self.body.staging, self.rest
        return ExtentsSource(kind, staging, [self.body], views, close, rest, self.begin_of, kept)

    def _placed(self) -> dict[str, StoredView]:
        views = {n: view for n, view in self.tensors.items() if type(view) is StoredView}
        records = map(self.records.get, map(itemgetter(1), views.values()), repeat(_NONE))
        have, need = map(itemgetter(0), records), map(itemgetter(3), views.values())
        for name in compress(views, map(lt, have, need)):
            raise CorruptCheckpoint(f"tensor {name!r} reaches beyond record {views[name].record!r}")
        return views


def torch_file(staging: Staging, file: InputFile, close: Callable[[], None]) -> ExtentsSource:
    """Opens a torch zip written by fastckpt or by another program.

    Args:
        file: the file, which must stay open until `close` is called.

    Raises:
        CorruptCheckpoint: it is damaged or not a torch zip.
        IncompatibleCheckpoint: it has an older or newer version, or another byte order.
        StorageError: it cannot be read.
    """
    body = body_of(staging, file)
    if body is not None:
        return zip_of_ours(body).source("a torch file of fastckpt", close)
    with naming(file.path):
        others = _Others(staging, file)
        opened = _opened(others.body, others.records, others.begin_of, is_of_step=False)
    return opened.source("a torch file", close)


def zip_of_ours(body: Body, *, is_of_step: bool = False) -> TorchZip:
    """Opens a torch zip that fastckpt wrote; raises like torch_file().

    Args:
        body: the file.
        is_of_step: whether it is a step's file of objects, which has placeholders.
    """
    tail = body.index.tail
    with naming(body.path):
        directory = zip_records.directory(tail, len(tail) - torch_zip.END_BYTES)
        records = _records_of_ours(body, directory)
        return _opened(body, records, lambda name: records[name][2], is_of_step=is_of_step)


def _records_of_ours(body: Body, directory: Directory) -> dict[str, Record]:
    """Returns the records, which follow each other without gaps, each with header, data and
    descriptor. So the offsets of data follow from the verified directory, and no header has to be
    read.
    """
    body_nbytes, nbytes = body.index.body_nbytes, body.index.body_nbytes + len(body.index.tail)
    names, offsets, sizes, crcs, _methods = directory
    if any(map(gt, offsets, offsets[1:])):
        rows = sorted(zip(offsets, names, sizes, crcs, strict=True))
        offsets, names, sizes, crcs = (list(column) for column in zip(*rows, strict=True))
    ends = [*map(sub, offsets[1:], map(zip_records.descriptor_nbytes, offsets, sizes))]
    begins = [*map(sub, ends, sizes)]
    wrong = [*compress(names, map(le, begins, offsets))]
    if not wrong and ends:
        # The begins ascend, and so only the last record that begins in the body can leave it.
        in_body = bisect_left(begins, body_nbytes)
        if in_body and ends[in_body - 1] > body_nbytes:
            wrong = names[in_body - 1 :]
        elif ends[-1] > nbytes:
            wrong = names[len(ends) - 1 :]
    if wrong:
        raise CorruptCheckpoint(f"record {wrong[0]!r} has a wrong offset")
    shorts = [name.partition("/")[2] for name in names]
    return dict(zip(shorts, zip(sizes, crcs, begins, strict=False), strict=False))


class _Others:
    """The records of a file that has no checksums of blocks.

    Attributes:
        body: the open file, for reads of its bytes.
        records: a dict from each record's name in the archive to the record.
    """

    def __init__(self, staging: Staging, file: InputFile) -> None:
        with reported("read", file.path):
            nbytes = file.nbytes()
            directory = zip_records.directory_of(file.read_at, nbytes)
        if any(directory.methods):
            raise IncompatibleCheckpoint("its zip records are compressed: torch did not write it")
        self.body = Body(staging, file, BlockChecksums(nbytes, BLOCK_BYTES, (), b""))
        names = [name.partition("/")[2] for name in directory.names]
        rows = zip(directory.sizes, directory.crcs, directory.offsets, strict=True)
        self.records: dict[str, Record] = dict(zip(names, rows, strict=True))
        if len(self.records) < len(names):  # torch takes the first, others the last
            name = Counter(names).most_common(1)[0][0]
            raise CorruptCheckpoint(f"its zip directory names {name[:200]!r} more than once")
        self._begins: dict[str, int] = {}

    def begin_of(self, record: str) -> int:
        """Returns the offset of a record's data after its local header, which is read once."""
        if record not in self._begins:
            self._begins[record] = self._found(record)
        return self._begins[record]

    def _found(self, record: str) -> int:
        size, _crc, offset = self.records[record]
        at, header, nbytes = None, b"", self.body.index.body_nbytes
        if 0 <= offset <= nbytes - zip_records.LOCAL_BYTES:
            with reported("read", self.body.path):
                header = self.body.file.read_at(zip_records.LOCAL_BYTES, offset)
            at = zip_records.data_offset(header, offset)
        if at is None or header[:4] != b"PK\x03\x04" or at + size > nbytes:
            raise CorruptCheckpoint(f"{self.body.path!r}: record {record!r} has a wrong offset")
        return at


def _opened(
    body: Body, records: dict[str, Record], begin_of: Callable[[str], int], *, is_of_step: bool
) -> TorchZip:
    if _PICKLE not in records:
        raise CorruptCheckpoint(f"its zip has no record {_PICKLE!r}: torch did not write it")
    content = partial(_content, body, records, begin_of)
    if _BYTE_ORDER in records and (order := content(_BYTE_ORDER)) != _LITTLE:
        byte_order = bytes(order[:20])
        raise IncompatibleCheckpoint(f"its byte order is {byte_order!r}, must be {_LITTLE!r}")
    names = names_of(bytes(content(_PICKLE)), is_of_step=is_of_step)

    def digests() -> Mapping[str, str | None]:
        with naming(body.path):
            return digests_of(bytes(content(_PICKLE)), is_of_step=is_of_step)

    rest = names.rest._replace(digests=digests)
    return TorchZip(body, records, begin_of, names.tensors, rest)


def _content(
    body: Body, records: Mapping[str, Record], begin_of: Callable[[str], int], name: str
) -> bytes | bytearray:
    """Returns a record, verified by its own CRC-32. A CRC-32 of 0 is not compared, because torch
    may have been configured to compute none (torch.serialization.set_crc32_options).
    """
    nbytes, crc, _at = records[name]
    content = _bytes(body, begin_of(name), nbytes) if nbytes else b""
    if crc and crc32(content) != crc:
        raise CorruptCheckpoint(f"record {name!r} is damaged: its CRC-32 does not match")
    return content


def _bytes(body: Body, offset: int, nbytes: int) -> bytes | bytearray:
    """Returns a range of a file, verified if the file has checksums."""
    index = body.index
    if offset + nbytes > index.body_nbytes + len(index.tail) or nbytes > _READ_BYTES_MAX:
        raise CorruptCheckpoint(f"a record at {offset} claims an impossible size of {nbytes} bytes")
    if offset >= index.body_nbytes:
        begin = offset - index.body_nbytes
        return bytes(index.tail[begin : begin + nbytes])
    content = bytearray(nbytes)
    first, last = offset // index.block_bytes, (offset + nbytes - 1) // index.block_bytes
    with closing(body.stream(range(first, last + 1))) as stream:
        body.check(stream, stream.readinto(content, offset))
    return content
