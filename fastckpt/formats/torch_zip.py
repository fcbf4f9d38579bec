"""The torch zip format: what torch.save would write, laid out beforehand, plus block checksums.

Responsible for the bytes of the file (docs/format.md). It must not know files, threads or staging.
"""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import zip_records
from fastckpt.formats.record_order import RecordOrder, nbytes_of
from fastckpt.formats.strict_json import check_block_bytes
from fastckpt.formats.torch_pickle import Capture, torch_save
from fastckpt.plan.image import (
    BLOCK_BYTES,
    PAGE_BYTES,
    BlockChecksums,
    Image,
    address_of,
    block_count,
)

VERSION = 1
ARCHIVE = "archive"
RECORD = ".data/fastckpt"
TORCH_ALIGNMENT = 64
PADDING_SHARE_MAX = 0.01

# In every file of ours, the first local header's alignment padding begins with this.
MARK = b"fastckpt1"
HEAD_BYTES = 128

# The end record's comment: version, offset of the tail, CRC-32 of the tail but for these digits.
_COMMENT = re.compile(rb"fastckpt (\d{2}) ([0-9a-f]{16}) ([0-9a-f]{8})\Z")
_COMMENT_BYTES = len(f"fastckpt {1:02d} {0:016x} {0:08x}")
_CRC_DIGITS = 8
END_BYTES = zip_records.END_BYTES + _COMMENT_BYTES
TAIL_BYTES_MAX = 1 << 32
HEADER_BYTES_MAX = 2 * PAGE_BYTES


@cache
def container_version() -> bytes:
    """Returns the content of torch's `version` record, from a file that stock torch makes."""
    buffer = io.BytesIO()
    torch_save(None, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(f"{ARCHIVE}/version")


def _end_offset(records: Iterable[tuple[str, Any]], alignment: int) -> int:
    """Returns where the last record ends if all have this alignment."""
    offset = 0
    for name, content in records:
        full_name = f"{ARCHIVE}/{name}".encode()
        offset = zip_records.end_offset(full_name, offset, nbytes_of(content), alignment)
    return offset


def _choose_alignment(records: Sequence[tuple[str, Any]]) -> int:
    """Returns the file's alignment: the user's, else 4096 if that costs under 1%, else 64."""
    recorded = [content for name, content in records if name == ".storage_alignment"]
    if not recorded:
        # This torch cannot record an alignment, and readers of its files compute offsets from 64.
        return TORCH_ALIGNMENT
    chosen = int(recorded[0])
    if chosen != TORCH_ALIGNMENT:
        return chosen
    packed = _end_offset(records, TORCH_ALIGNMENT)
    padded = _end_offset(records, PAGE_BYTES)
    return PAGE_BYTES if padded - packed < packed * PADDING_SHARE_MAX else TORCH_ALIGNMENT


def layout(captured: Capture) -> Image:
    """Lays the records out as torch.save does. Pure: equal captures give equal images."""
    alignment = _choose_alignment(captured.records)
    builder = _Builder(alignment)
    for name, content in captured.records:
        if name == ".storage_alignment":
            content = str(alignment).encode()
        builder.add(name, content)
    # If pickling was told to leave this record out, torch's container writer adds it.
    has_byteorder = any(name == "byteorder" for name, _ in captured.records)
    return builder.finish([] if has_byteorder else [(b"byteorder", sys.byteorder.encode())])


def layout_shared(arrangement: RecordOrder) -> tuple[Image, int]:
    """Lays records out as one torch zip that several ranks write.

    Returns:
        The image, whose tail counts on the first rank only, and how many bytes at the body's
            beginning the first rank has to write.
    """
    builder = _Builder(PAGE_BYTES)
    for name, content in arrangement.front:
        builder.add(name, content)
    front_nbytes = builder.offset
    for name, content in arrangement.shared:
        builder.add(name, content)
    gathered: list[tuple[int, bytearray]] = []
    closing: list[tuple[bytes, bytes | bytearray]] = []
    for name, content in arrangement.tail:
        memory: bytes | bytearray
        if isinstance(content, torch.UntypedStorage):
            memory = bytearray(content.nbytes())
            gathered.append((content.data_ptr(), memory))
        else:
            memory = content
        closing.append((name.encode(), memory))
    if not any(name == b"byteorder" for name, _ in closing):
        closing.append((b"byteorder", sys.byteorder.encode()))
    image = builder.finish(closing)
    image.gathered = [(address, memory) for address, memory in gathered if memory]
    return image, front_nbytes


class _Builder:
    """The state of one layout(): the headers so far, and what refers to them."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.offset = 0
        self.headers = bytearray()
        # Segments in order: a storage, or a range of self.headers, which moves while it grows.
        self.parts: list[torch.UntypedStorage | tuple[int, int]] = []
        self.header_begin = 0
        self.slots: list[tuple[int, int]] = []
        self.central: list[bytes] = []
        # Numbers of the central headers that wait for a CRC, in the order of the slots.
        self.awaiting: list[int] = []

    def add(self, name: str, content: bytes | torch.UntypedStorage) -> None:
        nbytes = nbytes_of(content)
        begin, full_name = self.offset, f"{ARCHIVE}/{name}".encode()
        mark = MARK if begin == 0 else b""
        self._put(zip_records.local_header(full_name, begin, nbytes, self.alignment, mark))
        crc = 0
        if isinstance(content, torch.UntypedStorage) and nbytes:
            self._close_header()
            self.parts.append(content)
            self.offset += nbytes
            self.slots.append((self.offset + zip_records.DESCRIPTOR_CRC_AT, len(self.parts) - 1))
            self.awaiting.append(len(self.central))
        elif nbytes:
            assert isinstance(content, bytes)
            crc = zlib.crc32(content)
            self._put(content)
        self._put(zip_records.descriptor(begin, nbytes, crc))
        self.central.append(zip_records.central_header(full_name, begin, nbytes, crc))

    def _put(self, data: bytes) -> None:
        self.headers += data
        self.offset += len(data)

    def _close_header(self) -> None:
        if len(self.headers) > self.header_begin:
            self.parts.append((self.header_begin, len(self.headers)))
            self.header_begin = len(self.headers)

    def finish(self, closing: Sequence[tuple[bytes, bytes | bytearray]]) -> Image:
        record_offset = self.offset
        name = f"{ARCHIVE}/{RECORD}".encode()
        # The checksum record's data is where the tail begins, so it is always aligned to a page.
        mark = MARK if record_offset == 0 else b""
        self._put(zip_records.local_header(name, record_offset, 1, PAGE_BYTES, mark))
        self._close_header()
        tail = _Tail(record_offset, self.offset, self.central, self.awaiting, closing)
        image = Image(tail_nbytes=tail.nbytes, tail=tail.build)
        image.sources.append(self.headers)
        base = address_of(self.headers)
        for part in self.parts:
            if isinstance(part, tuple):
                image.append(base + part[0], part[1] - part[0])
            else:
                image.append(part.data_ptr(), part.nbytes())
                image.sources.append(part)
        for slot in self.slots:
            image.slots.extend(slot)
        assert image.body_nbytes == self.offset and self.offset % PAGE_BYTES == 0
        return image


class _Tail:
    """The bytes behind the body: checksum record, torch's closing records, zip directory."""

    def __init__(
        self,
        record_offset: int,
        body_nbytes: int,
        central: list[bytes],
        awaiting: list[int],
        closing: Sequence[tuple[bytes, bytes | bytearray]],
    ) -> None:
        self.record_offset = record_offset
        self.body_nbytes = body_nbytes
        self.central = central
        self.awaiting = awaiting
        blocks = block_count(body_nbytes, BLOCK_BYTES)
        self.closing = [(b"version", container_version()), *closing]
        self.nbytes = len(self._joined([0] * blocks, central)) + _CRC_DIGITS

    def build(self, block_crcs: Sequence[int], slot_crcs: Sequence[int]) -> bytes:
        assert len(slot_crcs) == len(self.awaiting)
        central = list(self.central)
        for number, crc in zip(self.awaiting, slot_crcs, strict=True):
            central[number] = zip_records.with_crc(central[number], crc)
        tail = self._joined(block_crcs, central)
        tail += f"{zlib.crc32(tail):08x}".encode()
        assert len(tail) == self.nbytes
        return tail

    def _opening(self, block_crcs: Sequence[int]) -> tuple[bytes, bytes]:
        """Returns the checksum record from its data on, and its entry in the directory."""
        checksums = {
            "version": VERSION,
            "body_bytes": self.body_nbytes,
            "block_bytes": BLOCK_BYTES,
            "crc32": "".join(f"{crc:08x}" for crc in block_crcs),
        }
        validate(checksums, self.body_nbytes)
        content = json.dumps(checksums).encode()
        name, crc = f"{ARCHIVE}/{RECORD}".encode(), zlib.crc32(content)
        entry = zip_records.central_header(name, self.record_offset, len(content), crc)
        return content + zip_records.descriptor(self.record_offset, len(content), crc), entry

    def _joined(self, block_crcs: Sequence[int], central: Sequence[bytes]) -> bytes:
        """Returns the tail without its own checksum."""
        opening, entry = self._opening(block_crcs)
        parts, entries = [opening], [*central, entry]
        offset = self.body_nbytes + len(opening)
        for name, data in self.closing:
            record, its_entry = whole_record(name, data, offset)
            parts.append(record)
            entries.append(its_entry)
            offset += len(record)
        parts.append(self._closing(entries, _identity(zip_records.crc_of(entry)), offset))
        parts.append(f"fastckpt {VERSION:02d} {self.body_nbytes:016x} ".encode())
        return b"".join(parts)

    def _closing(self, entries: Sequence[bytes], identity: bytes, offset: int) -> bytes:
        """Returns the bytes behind the other records: the id, the directory, the end records."""
        identity, identity_entry = whole_record(b".data/serialization_id", identity, offset)
        entries = [*entries, identity_entry]
        directory = b"".join(entries)
        return b"".join(
            (
                identity,
                directory,
                zip_records.end_records(
                    offset + len(identity), len(directory), len(entries), _COMMENT_BYTES
                ),
            )
        )


def whole_record(short: bytes, data: bytes | bytearray, offset: int) -> tuple[bytes, bytes]:
    """Returns a record for this offset, and its entry in the directory."""
    name, crc = ARCHIVE.encode() + b"/" + short, zlib.crc32(data)
    header = zip_records.local_header(name, offset, len(data), TORCH_ALIGNMENT)
    entry = zip_records.central_header(name, offset, len(data), crc)
    return b"".join((header, data, zip_records.descriptor(offset, len(data), crc))), entry


def _identity(crc: int) -> bytes:
    """Returns 40 digits as torch's serialization id; they depend on the content's checksums."""
    return f"{zlib.crc32(RECORD.encode()):020d}{crc:020d}".encode()


def validate(checksums: Any, body_nbytes: int) -> None:
    """Raises ValueError unless this is a checksum record: the one check of writers and readers."""
    if not isinstance(checksums, dict):
        raise ValueError("the checksum record is not an object")
    expected = {"version": int, "body_bytes": int, "block_bytes": int, "crc32": str}
    for key, kind in expected.items():
        if type(checksums.get(key)) is not kind:
            raise ValueError(f"the checksum record has no {kind.__name__} {key!r}")
    if checksums["version"] != VERSION:
        raise ValueError(f"version is {checksums['version']}, not {VERSION}")
    block_bytes = checksums["block_bytes"]
    check_block_bytes(block_bytes)
    if checksums["body_bytes"] != body_nbytes or body_nbytes <= 0 or body_nbytes % PAGE_BYTES:
        raise ValueError(f"body_bytes is {checksums['body_bytes']}, the body has {body_nbytes}")
    digits = checksums["crc32"]
    if len(digits) != _CRC_DIGITS * block_count(body_nbytes, block_bytes):
        raise ValueError(f"{len(digits)} hex digits of CRC-32 do not fit the number of blocks")
    if re.fullmatch("[0-9a-f]*", digits) is None:
        raise ValueError("a CRC-32 is not made of hex digits")


def ends_body(before: bytes) -> bool:
    """Tells whether the HEADER_BYTES_MAX bytes before a tail hold the checksum record's header."""
    return f"{ARCHIVE}/{RECORD}".encode() in before


def is_marked(head: bytes) -> bool:
    """Tells whether fastckpt made the file with this head, of HEAD_BYTES or more."""
    return zip_records.opening_padding(head).startswith(MARK)


def tail_offset(end: bytes, nbytes: int) -> int | None:
    """Returns where the tail of a file of nbytes begins; None if its end is not fastckpt's."""
    match = _COMMENT.search(end)
    if match is None:
        return None
    offset = int(match[2], 16)
    return offset if 0 < offset < nbytes and nbytes - offset <= TAIL_BYTES_MAX else None


def parse(tail: bytes, body_nbytes: int) -> BlockChecksums:
    """Verifies a file's tail, which begins at body_nbytes, and returns how to verify the body.

    Raises:
        CorruptCheckpoint: the tail is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
    """
    comment = _COMMENT.search(tail)
    if comment is None or zlib.crc32(tail[:-_CRC_DIGITS]) != int(comment[3], 16):
        raise CorruptCheckpoint("its closing records (checksums and zip directory) are damaged")
    _check_version(int(comment[1]))  # after the checksum: a damaged digit is damage
    try:
        checksums, _ = json.JSONDecoder().raw_decode(tail[: _json_end(tail)].decode())
        if isinstance(checksums, dict):
            _check_version(checksums.get("version"))
        validate(checksums, body_nbytes)
        if checksums["version"] != int(comment[1]):
            raise ValueError(f"its version {checksums['version']} is not that of the comment")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"its checksum record is malformed: {error}") from None
    digits = checksums["crc32"]
    crcs = tuple(int(digits[i : i + _CRC_DIGITS], 16) for i in range(0, len(digits), _CRC_DIGITS))
    return BlockChecksums(body_nbytes, checksums["block_bytes"], crcs, tail)


def closing_crc(tail: bytes | bytearray) -> int:
    """Returns the CRC-32 in a tail's comment, which with the size tells one file from another."""
    return int(tail[-_CRC_DIGITS:], 16)


def _check_version(version: Any) -> None:
    if type(version) is int and version > VERSION:
        raise IncompatibleCheckpoint(
            f"it has format version {version}, this fastckpt reads up to {VERSION}: update it"
        )


def _json_end(tail: bytes) -> int:
    return tail.find(b"}") + 1
