"""The torch zip format: a file of torch.save, laid out in advance, with block checksums.

Responsible for the bytes of the file (docs/reference/format.md).
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fastckpt.errors import CorruptCheckpoint, ensure
from fastckpt.formats import zip_records
from fastckpt.formats.image_builder import (
    CRC_DIGITS,
    ClosingLine,
    ImageBuilder,
    check_body,
    crcs_in,
    digits_of,
)
from fastckpt.formats.strict_json import refuse_other_version
from fastckpt.formats.torch_pickle import Capture, torch_save
from fastckpt.plan.image import BLOCK_BYTES, PAGE_BYTES, BlockChecksums, Image, block_count

# ---- The order of records in a torch zip that several ranks write together. Responsible for
# dividing records into those that all ranks hold alike, and those that only the first rank writes.

# Ranks share the writing of storages of this size and more; the first rank writes the rest. It puts
# small ones behind the checksum record, which a reader has in memory anyway, up to this sum; above
# it, the largest of them go to the front of the file.
SMALL_BYTES = 1 << 20
SMALL_SUM_BYTES_MAX = 64 << 20


@dataclass
class RecordDivision:
    """The order of the records in a file that several ranks write.

    Everything before the tail depends only on the names and sizes of the big storages, so each rank
    can lay it out independently, although data.pkl and other small records differ between ranks.

    Attributes:
        front: storages of any size that the first rank writes.
        shared: storages that are the same on all ranks.
        tail: all other records, which the first rank writes.
        small_nbytes: total size of the storages in the tail.
    """

    front: list[tuple[str, bytes | torch.UntypedStorage]]
    shared: list[tuple[str, torch.UntypedStorage]]
    tail: list[tuple[str, bytes | torch.UntypedStorage]]
    small_nbytes: int


def nbytes_of(content: bytes | torch.UntypedStorage) -> int:
    return content.nbytes() if isinstance(content, torch.UntypedStorage) else len(content)


# With these records, torch computes where storages lie, assuming that data.pkl comes first.
_COMPUTED_OFFSETS = frozenset({".format_version", ".storage_alignment"})


def arrange(captured: Capture, first_rank: Set[str]) -> RecordDivision:
    """Sorts the records of a capture for a file that several ranks write.

    Args:
        captured: the capture, whose storages have the same names, sizes and order on every rank.
        first_rank: names of the big storages that the first rank writes.
    """
    storages = [(name, c) for name, c in captured.records if name.startswith("data/")]
    small = {name: nbytes_of(c) for name, c in storages if nbytes_of(c) < SMALL_BYTES}
    largest = sorted(small, key=lambda name: (-small[name], name))
    rest = sum(small.values())
    while rest > SMALL_SUM_BYTES_MAX:
        rest -= small.pop(largest.pop(0))
    front: list[tuple[str, bytes | torch.UntypedStorage]] = []
    shared: list[tuple[str, torch.UntypedStorage]] = []
    for name, content in storages:
        if name in small:
            continue
        if isinstance(content, bytes) or content.nbytes() < SMALL_BYTES or name in first_rank:
            front.append((name, content))
        else:
            shared.append((name, content))
    placed = {name for name, _ in [*front, *shared]} | _COMPUTED_OFFSETS
    tail = [(name, c) for name, c in captured.records if name not in placed]
    return RecordDivision(front, shared, tail, rest)


VERSION = 1
ARCHIVE = "archive"
RECORD = ".data/fastckpt"
TORCH_ALIGNMENT = 64
PADDING_SHARE_MAX = 0.01

# In every file of ours, the first local header's alignment padding begins with this.
MARK = b"fastckpt1"
HEAD_BYTES = 128

_COMMENT = ClosingLine("fastckpt", VERSION)  # the end record's
END_BYTES, tail_offset = zip_records.END_BYTES + _COMMENT.nbytes, _COMMENT.tail_offset
HEADER_BYTES_MAX = 2 * PAGE_BYTES
_CRC_PLACES = (zip_records.DESCRIPTOR_CRC_AT,)


@cache
def container_version() -> bytes:
    """Returns the content of torch's `version` record, from a file written by torch.save."""
    buffer = io.BytesIO()
    torch_save(None, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(f"{ARCHIVE}/version")


def _end_offset(records: Iterable[tuple[str, Any]], alignment: int) -> int:
    """Returns the end offset of the last record if all records have this alignment."""
    offset = 0
    for name, content in records:
        full_name = f"{ARCHIVE}/{name}".encode()
        offset = zip_records.end_offset(full_name, offset, nbytes_of(content), alignment)
    return offset


def _choose_alignment(records: Sequence[tuple[str, Any]], sizes: Sequence[int]) -> int:
    """Returns the file's alignment: the user's, else 4096 if that costs under 1%, else 64."""
    recorded = [content for name, content in records if name == ".storage_alignment"]
    if not recorded:
        # This torch cannot record an alignment, and readers of its files compute offsets from 64.
        return TORCH_ALIGNMENT
    chosen = int(recorded[0])
    if chosen != TORCH_ALIGNMENT:
        return chosen
    # Mostly sizes alone tell: padding and zip64 fields add no more than this to any record.
    if len(sizes) * (PAGE_BYTES + TORCH_ALIGNMENT) < sum(sizes) * PADDING_SHARE_MAX:
        return PAGE_BYTES
    packed = _end_offset(records, TORCH_ALIGNMENT)
    padded = _end_offset(records, PAGE_BYTES)
    return PAGE_BYTES if padded - packed < packed * PADDING_SHARE_MAX else TORCH_ALIGNMENT


def layout(captured: Capture) -> Image:
    """Lays out the records like torch.save. Equal captures give equal images."""
    sizes = [nbytes_of(content) for _, content in captured.records]
    alignment = _choose_alignment(captured.records, sizes)
    builder = _Builder(alignment)
    for (name, content), nbytes in zip(captured.records, sizes, strict=True):
        if name == ".storage_alignment":
            content = str(alignment).encode()
            nbytes = len(content)
        builder.add(name, content, nbytes)
    # If pickling was told to leave this record out, torch's container writer adds it.
    has_byteorder = any(name == "byteorder" for name, _ in captured.records)
    return builder.finish([] if has_byteorder else [(b"byteorder", sys.byteorder.encode())])


def layout_shared(arrangement: RecordDivision) -> tuple[Image, int]:
    """Lays out records as one torch zip that several ranks write.

    Returns:
        The image, whose tail is valid on the first rank only, and how many bytes at the body's
            beginning the first rank must write.
    """
    builder = _Builder(PAGE_BYTES)
    for name, content in arrangement.front:
        builder.add(name, content, nbytes_of(content))
    front_nbytes = builder.offset
    for name, content in arrangement.shared:
        builder.add(name, content, nbytes_of(content))
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


class _Builder(ImageBuilder):
    """The state of one layout()."""

    def __init__(self, alignment: int) -> None:
        super().__init__()
        self.alignment = alignment
        # The arguments of central_header() for each record, and the size of all headers. They are
        # made when the CRCs are there: made before, they would delay the copies.
        self.rows: list[tuple[bytes, int, int, int]] = []
        self.directory_nbytes = 0
        # Numbers of the rows that wait for a CRC, in the order of the slots.
        self.awaiting: list[int] = []

    def add(self, name: str, content: bytes | torch.UntypedStorage, nbytes: int) -> None:
        begin, full_name = self.offset, f"{ARCHIVE}/{name}".encode()
        mark = b"" if begin else MARK
        front = zip_records.local_header(full_name, begin, nbytes, self.alignment, mark)
        crc = 0
        if isinstance(content, bytes):
            crc = zlib.crc32(content)
            self.put(front + content + zip_records.descriptor(begin, nbytes, crc))
        elif nbytes:
            self.awaiting.append(len(self.rows))
            back = zip_records.descriptor(begin, nbytes, 0)
            self.put_framed(front, content, content.data_ptr(), nbytes, back, _CRC_PLACES)
        else:
            self.put(front)
        self.rows.append((full_name, begin, nbytes, crc))
        self.directory_nbytes += zip_records.central_nbytes(full_name, begin, nbytes)

    def finish(self, closing: Sequence[tuple[bytes, bytes | bytearray]]) -> Image:
        record_offset = self.offset
        name = f"{ARCHIVE}/{RECORD}".encode()
        # The checksum record's data is where the tail begins, so it is always aligned to a page.
        mark = MARK if record_offset == 0 else b""
        self.put(zip_records.local_header(name, record_offset, 1, PAGE_BYTES, mark))
        tail = _Tail(record_offset, self.offset, self.rows, self.awaiting, closing)
        return self.image(tail.nbytes(self.directory_nbytes), tail.build)


class _Tail:
    """The bytes after the body: checksum record, torch's closing records and zip directory."""

    def __init__(
        self,
        record_offset: int,
        body_nbytes: int,
        rows: list[tuple[bytes, int, int, int]],
        awaiting: list[int],
        closing: Sequence[tuple[bytes, bytes | bytearray]],
    ) -> None:
        self.record_offset = record_offset
        self.body_nbytes = body_nbytes
        self.rows = rows
        self.awaiting = awaiting
        self.closing = [(b"version", container_version()), *closing]
        self._nbytes = 0

    def nbytes(self, directory_nbytes: int) -> int:
        """Returns the tail's size, given the size of the rows' entries in the directory."""
        blocks = block_count(self.body_nbytes, BLOCK_BYTES)
        self._nbytes = len(self._joined([0] * blocks, bytes(directory_nbytes))) + _COMMENT.nbytes
        return self._nbytes

    def build(self, block_crcs: Sequence[int], slot_crcs: Sequence[int]) -> bytes:
        ensure(len(slot_crcs) == len(self.awaiting), "each slot must have a checksum")
        rows = list(self.rows)
        for number, crc in zip(self.awaiting, slot_crcs, strict=True):
            rows[number] = (*rows[number][:3], crc)
        directory = b"".join(zip_records.central_header(*row) for row in rows)
        tail = _COMMENT.closed(self._joined(block_crcs, directory), self.body_nbytes)
        ensure(
            len(tail) == self._nbytes, f"the tail has {len(tail)} bytes, must have {self._nbytes}"
        )
        return tail

    def _opening(self, block_crcs: Sequence[int]) -> tuple[bytes, bytes]:
        """Returns the checksum record without its header, and its entry in the directory."""
        checksums = {
            "version": VERSION,
            "body_bytes": self.body_nbytes,
            "block_bytes": BLOCK_BYTES,
            "crc32": digits_of(block_crcs),
        }
        validate(checksums, self.body_nbytes)
        content = json.dumps(checksums).encode()
        name, crc = f"{ARCHIVE}/{RECORD}".encode(), zlib.crc32(content)
        entry = zip_records.central_header(name, self.record_offset, len(content), crc)
        return content + zip_records.descriptor(self.record_offset, len(content), crc), entry

    def _joined(self, block_crcs: Sequence[int], directory: bytes) -> bytes:
        """Returns the tail without the comment; `directory` is the rows' entries."""
        opening, entry = self._opening(block_crcs)
        parts, entries = [opening], [directory, entry]
        offset = self.body_nbytes + len(opening)
        for name, data in self.closing:
            record, its_entry = whole_record(name, data, offset)
            parts.append(record)
            entries.append(its_entry)
            offset += len(record)
        parts.append(self._closing(entries, _identity(zip_records.crc_of(entry)), offset))
        return b"".join(parts)

    def _closing(self, entries: Sequence[bytes], identity: bytes, offset: int) -> bytes:
        """Returns the bytes after the other records: the id, the directory and the end records."""
        identity, identity_entry = whole_record(b".data/serialization_id", identity, offset)
        entries = [*entries, identity_entry]
        directory, count = b"".join(entries), len(self.rows) + len(entries) - 1
        begin = offset + len(identity)
        end = zip_records.end_records(begin, len(directory), count, _COMMENT.nbytes)
        return b"".join((identity, directory, end))


def whole_record(short: bytes, data: bytes | bytearray, offset: int) -> tuple[bytes, bytes]:
    """Returns a complete record for this offset, and its entry in the directory."""
    name, crc = ARCHIVE.encode() + b"/" + short, zlib.crc32(data)
    header = zip_records.local_header(name, offset, len(data), TORCH_ALIGNMENT)
    entry = zip_records.central_header(name, offset, len(data), crc)
    return b"".join((header, data, zip_records.descriptor(offset, len(data), crc))), entry


def _identity(crc: int) -> bytes:
    """Returns 40 digits for torch's serialization id, computed from the content's checksums."""
    return f"{zlib.crc32(RECORD.encode()):020d}{crc:020d}".encode()


def validate(checksums: Any, body_nbytes: int) -> None:
    """Raises ValueError unless this is a checksum record; writers and readers use this check."""
    if not isinstance(checksums, dict):
        raise ValueError("the checksum record must be an object")
    expected = {"version": int, "body_bytes": int, "block_bytes": int, "crc32": str}
    for key, kind in expected.items():
        if type(checksums.get(key)) is not kind:
            raise ValueError(f"the checksum record must have the {kind.__name__} {key!r}")
    check_body(checksums, body_nbytes, VERSION)


def ends_body(before: bytes) -> bool:
    """Returns whether HEADER_BYTES_MAX bytes before a tail have the checksum record's header."""
    return f"{ARCHIVE}/{RECORD}".encode() in before


def is_marked(head: bytes) -> bool:
    """Returns whether fastckpt wrote the file with this head, of at least HEAD_BYTES."""
    return zip_records.opening_padding(head).startswith(MARK)


def parse(tail: bytes, body_nbytes: int) -> BlockChecksums:
    """Verifies a file's tail, which begins at body_nbytes, and returns the checksums of the body.

    Raises:
        CorruptCheckpoint: the tail is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
    """
    version = _COMMENT.version(tail)
    if version is None:
        raise CorruptCheckpoint("its closing records (checksums and zip directory) are damaged")
    try:
        checksums, _ = json.JSONDecoder().raw_decode(tail[: _json_end(tail)].decode())
        if isinstance(checksums, dict):
            refuse_other_version("the file", checksums.get("version"), VERSION)
        validate(checksums, body_nbytes)
        if checksums["version"] != version:
            raise ValueError(f"its version {checksums['version']} does not match the comment")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"its checksum record is malformed: {error}") from None
    crcs = crcs_in(checksums["crc32"])
    return BlockChecksums(body_nbytes, checksums["block_bytes"], crcs, tail)


def closing_crc(tail: bytes | bytearray) -> int:
    """Returns the CRC-32 in a tail's comment, which together with the size identifies a file."""
    return int(tail[-CRC_DIGITS:], 16)


def _json_end(tail: bytes) -> int:
    return tail.find(b"}") + 1
