"""Zip records in torch's form: uncompressed, aligned by padding, with a descriptor after the data.

Responsible for the structures of the zip format (PKWARE's APPNOTE, sections 4.3 and 4.5). zip64
fields are used only if a value needs them, since torch's readers rely on this rule to compute
offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from fastckpt.errors import CorruptCheckpoint

_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_UTF8, _DESCRIPTOR_FOLLOWS = 0x0800, 0x0008

LOCAL_BYTES = _LOCAL.size
END_BYTES = _END.size
_CENTRAL_MAGIC = 0x02014B50
_END_MAGIC, _LOCATOR64_MAGIC = b"PK\x05\x06", b"PK\x06\x07"
DIRECTORY_BYTES_MAX = 1 << 30  # that is read of a file without checksums, which may claim any size
CRC_AT = 16  # in a central header
DESCRIPTOR_CRC_AT = 4
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<IIII"), struct.Struct("<IIQQ")
_PAIR, _PADDING = struct.Struct("<HH"), struct.Struct("<2sH")
# The bytes of a local header before the sizes of its name and of what follows that.
_OPENING, _OPENING_EMPTY = (
    _LOCAL.pack(0x04034B50, 0, _UTF8 | flag, 0, 0, 0, 0, 0, 0, 0, 0)[: -_PAIR.size]
    for flag in (_DESCRIPTOR_FOLLOWS, 0)
)


class Directory(NamedTuple):
    """The records of a zip's central directory, as one column per attribute.

    `offsets` are those of the local headers; `methods` are the compression methods, 0 in files of
    torch.
    """

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    crcs: list[int]
    methods: list[int]


def _padding(offset: int, name_nbytes: int, zip64_nbytes: int, alignment: int) -> int:
    return -(offset + _LOCAL.size + name_nbytes + zip64_nbytes + 4) % alignment


def _zip64_extra(offset: int, nbytes: int, stored_nbytes: int) -> bytes:
    if nbytes < _U32 and offset < _U32:  # mostly
        return b""
    values: list[int] = []
    if nbytes >= _U32:
        values += [nbytes, stored_nbytes]
    if offset >= _U32:
        values.append(offset)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def local_header(name: bytes, offset: int, nbytes: int, alignment: int, mark: bytes = b"") -> bytes:
    """Returns a local header like torch's, padded so that the record's data is aligned."""
    # torch writes the header before it knows the stored size, and leaves it zero.
    zip64 = _zip64_extra(offset, nbytes, 0)
    padding = _padding(offset, len(name), len(zip64), alignment)
    while padding < len(mark):
        padding += alignment
    opening = _OPENING if nbytes else _OPENING_EMPTY
    sizes = _PAIR.pack(len(name), len(zip64) + 4 + padding)
    its_padding = _PADDING.pack(b"FB", padding) + mark.ljust(padding, b"Z")
    return b"".join((opening, sizes, name, zip64, its_padding))


def descriptor(offset: int, nbytes: int, crc: int) -> bytes:
    """Returns a record's descriptor, from whose size torch computes the next record's offset."""
    if not nbytes:
        return b""
    form = _WIDE_DESCRIPTOR if offset >= _U32 or nbytes >= _U32 else _DESCRIPTOR
    return form.pack(0x08074B50, crc, nbytes, nbytes)


def descriptor_nbytes(offset: int, nbytes: int) -> int:
    """Returns the size of a record's descriptor."""
    if not nbytes:
        return 0
    return (_WIDE_DESCRIPTOR if offset >= _U32 or nbytes >= _U32 else _DESCRIPTOR).size


def central_header(name: bytes, offset: int, nbytes: int, crc: int) -> bytes:
    zip64 = _zip64_extra(offset, nbytes, nbytes)
    flags = _UTF8 | (_DESCRIPTOR_FOLLOWS if nbytes else 0)
    size = min(nbytes, _U32)
    return (
        _CENTRAL.pack(
            _CENTRAL_MAGIC,
            0,
            0,
            flags,
            0,
            0,
            0,
            crc,
            size,
            size,
            len(name),
            len(zip64),
            0,
            0,
            0,
            0,
            min(offset, _U32),
        )
        + name
        + zip64
    )


def central_nbytes(name: bytes, offset: int, nbytes: int) -> int:
    """Returns the size of a record's central header."""
    return _CENTRAL.size + len(name) + len(_zip64_extra(offset, nbytes, nbytes))


def end_offset(name: bytes, offset: int, nbytes: int, alignment: int) -> int:
    """Returns the end of a record (header, data and descriptor) that begins at `offset`."""
    zip64_nbytes = len(_zip64_extra(offset, nbytes, nbytes))
    header_nbytes = _LOCAL.size + len(name) + zip64_nbytes + 4
    header_nbytes += _padding(offset, len(name), zip64_nbytes, alignment)
    return offset + header_nbytes + nbytes + descriptor_nbytes(offset, nbytes)


def crc_of(central: bytes) -> int:
    return int.from_bytes(central[CRC_AT : CRC_AT + 4], "little")


def end_records(offset: int, nbytes: int, entries: int, comment_nbytes: int) -> bytes:
    """Returns the end records of a zip whose directory is at `offset`; the comment follows them."""
    end = offset + nbytes
    end64 = _END64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, entries, entries, nbytes, offset)
    locator = _LOCATOR64.pack(0x07064B50, 0, end, 1)
    count = min(entries, _U16)
    return (
        end64
        + locator
        + _END.pack(
            0x06054B50, 0, 0, count, count, min(nbytes, _U32), min(offset, _U32), comment_nbytes
        )
    )


def directory(data: bytes, end: int) -> Directory:
    """Parses the central directory in verified bytes; the end record begins at `end`.

    Raises:
        CorruptCheckpoint: the directory is malformed, although its checksum is correct.
    """
    try:
        row = _END64.unpack_from(data, end - _LOCATOR64.size - _END64.size)
        begin = end - _LOCATOR64.size - _END64.size - row[8]
        return _entries(data[max(0, begin) : end], row[7])
    except (struct.error, ValueError):
        raise CorruptCheckpoint("its zip directory is malformed") from None


def _entries(data: bytes, count: int) -> Directory:
    """Returns the first `count` records of a directory, or all if it has fewer."""
    directory = Directory([], [], [], [], [])
    names, offsets, sizes, crcs, methods = directory
    at = 0
    while len(names) < count and at + _CENTRAL.size <= len(data):
        row = _CENTRAL.unpack_from(data, at)
        magic, method, crc, nbytes, offset = row[0], row[4], row[7], row[9], row[16]
        if magic != _CENTRAL_MAGIC:
            break
        extra = at + _CENTRAL.size + row[10]
        comment = extra + row[11]
        if comment + row[12] > len(data):
            raise ValueError("a record must end before the directory")
        if nbytes == _U32 or offset == _U32:
            nbytes, offset = _widened(nbytes, row[8], offset, data[extra:comment])
        names.append(data[at + _CENTRAL.size : extra].decode(errors="replace"))
        offsets.append(offset)
        sizes.append(nbytes)
        crcs.append(crc)
        methods.append(method)
        at = comment + row[12]
    return directory


def _widened(nbytes: int, stored_nbytes: int, offset: int, extra: bytes) -> tuple[int, int]:
    """Returns a record's size and offset, from zip64 fields if it has them. Raises struct.error if
    such a field is truncated.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            wide = [value == _U32 for value in (nbytes, stored_nbytes, offset)]
            values = struct.unpack(f"<{sum(wide)}Q", extra[at : at + length][: 8 * sum(wide)])
            nbytes = values[0] if wide[0] else nbytes
            return nbytes, values[-1] if wide[2] else offset
        at += length
    return nbytes, offset


def directory_of(read_at: Callable[[int, int], bytes], nbytes: int) -> Directory:
    """Reads the central directory of any zip file.

    Args:
        read_at: (nbytes, offset) -> bytes of the file, unverified.
        nbytes: the size of the file.

    Raises:
        CorruptCheckpoint: the file is not a zip file, or its directory is damaged.
    """
    begin = max(0, nbytes - _END.size - _U16)
    last = read_at(nbytes - begin, begin)
    try:
        at = last.rindex(_END_MAGIC, 0, len(last) - _END.size + len(_END_MAGIC))
        *_, count, size, offset, _comment = _END.unpack_from(last, at)
        end = begin + at
        if last[max(0, at - _LOCATOR64.size) : at].startswith(_LOCATOR64_MAGIC):
            end -= _LOCATOR64.size + _END64.size
            row = _END64.unpack(read_at(_END64.size, end) if end >= 0 else b"")
            *_, count, size, offset = row
        if size > DIRECTORY_BYTES_MAX or offset + size > end:
            raise ValueError(f"its directory claims {size} bytes at {offset}")
        directory = _entries(read_at(size, offset) if size else b"", size)
        if len(directory.names) != count:
            raise ValueError(f"its directory has {len(directory.names)} records, must have {count}")
        return directory
    except (ValueError, struct.error) as error:
        raise CorruptCheckpoint(
            f"it begins like a zip file, but is truncated or damaged: {error}"
        ) from None


def opening_padding(head: bytes) -> bytes:
    """Returns the padding in a file's first local header, as far as `head` contains it."""
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        return b""
    fields = _LOCAL.unpack_from(head)
    at = _LOCAL.size + int(fields[9])
    end = at + int(fields[10])
    while at + 4 <= min(end, len(head)):
        (nbytes,) = struct.unpack_from("<H", head, at + 2)
        if head[at : at + 2] == b"FB":
            return head[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""


def data_offset(header: bytes, offset: int) -> int | None:
    """Returns the offset of the data after this local header; None if the header is truncated."""
    if len(header) < _LOCAL.size:
        return None
    fields = _LOCAL.unpack(header)
    return offset + _LOCAL.size + int(fields[9]) + int(fields[10])
