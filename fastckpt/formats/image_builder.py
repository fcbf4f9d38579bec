"""The common parts of torch zips and `.distcp` files: an image of alternating headers and foreign
memory, and a tail of checksums that ends in a closing line.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastckpt.errors import ensure
from fastckpt.formats.strict_json import check_block_bytes, refuse_other_version
from fastckpt.plan.image import PAGE_BYTES, Image, address_of, block_count

TAIL_BYTES_MAX = 1 << 32
CRC_DIGITS = 8


class ImageBuilder:
    """The state of one layout. The attribute `offset` is that of the next byte."""

    def __init__(self) -> None:
        self.offset = 0
        self._headers = bytearray()
        self._header_begin = 0
        # Offset, size and address of each segment. Headers move as they grow: at the places in
        # _own, addresses count from their first byte.
        self._segments: list[int] = []
        self._own: list[int] = []
        self._slots: list[int] = []
        self._sources: list[object] = []

    def put(self, data: bytes) -> None:
        """Adds a copy of these bytes."""
        self._headers += data
        self.offset += len(data)

    def put_memory(self, source: object, address: int, nbytes: int) -> None:
        """Adds the bytes at an address, at least one, which must be valid while `source` exists."""
        ensure(nbytes > 0 and address != 0, "a segment must have bytes and an address")
        self._close_header()
        self._sources.append(source)
        self._segments += (self.offset, nbytes, address)
        self.offset += nbytes

    def put_framed(
        self,
        front: bytes,
        source: object,
        address: int,
        nbytes: int,
        back: bytes,
        crc_places: Sequence[int],
    ) -> int:
        """Adds memory like put_memory() between two runs of bytes, with slots for its CRC-32 at
        offsets in the second run. Returns the number of the first slot.
        """
        first, number = len(self._slots) // 2, len(self._segments) // 3 + 1
        self.put(front)
        self.put_memory(source, address, nbytes)
        for place in crc_places:
            self._slots += (self.offset + place, number)
        self.put(back)
        return first

    def _close_header(self) -> None:
        nbytes = len(self._headers) - self._header_begin
        if nbytes:
            self._own.append(len(self._segments) + 2)
            self._segments += (self.offset - nbytes, nbytes, self._header_begin)
            self._header_begin += nbytes

    def image(self, nbytes: int, tail: Callable[[Sequence[int], Sequence[int]], bytes]) -> Image:
        """Returns the image with a tail of nbytes; the body ends at the end of a page."""
        self._close_header()
        ensure(
            self.offset % PAGE_BYTES == 0, f"the tail begins at {self.offset}, must begin at a page"
        )
        begin = address_of(self._headers)
        for place in self._own:
            self._segments[place] += begin
        image = Image(nbytes, tail, sources=[self._headers, *self._sources])
        image.segments, image.slots = array("Q", self._segments), array("Q", self._slots)
        image.body_nbytes = self.offset
        return image


class ClosingLine:
    """The last bytes of a file: a name, the format's version, the offset of the tail, and the
    CRC-32 of all earlier bytes of the tail. `nbytes` is the line's size.
    """

    def __init__(self, name: str, version: int) -> None:
        self._begin, self._version = f"{name} {version:02d} ", version
        self._pattern = re.compile(rf"{name} (\d{{2}}) ([0-9a-f]{{16}}) ([0-9a-f]{{8}})\Z".encode())
        self.nbytes = len(self.closed(b"", 0))

    def closed(self, tail: bytes, offset: int) -> bytes:
        """Returns the tail that begins at this offset, with the closing line appended."""
        tail += f"{self._begin}{offset:016x} ".encode()
        return tail + f"{zlib.crc32(tail):08x}".encode()

    def tail_offset(self, end: bytes, nbytes: int) -> int | None:
        """Returns the tail's offset in a file of nbytes; None if fastckpt did not write its end."""
        match = self._pattern.search(end)
        offset = 0 if match is None else int(match[2], 16)
        return offset if 0 < offset < nbytes <= offset + TAIL_BYTES_MAX else None

    def version(self, tail: bytes) -> int | None:
        """Returns the version of an intact tail, or None if the tail is damaged; raises like
        refuse_other_version().
        """
        match = self._pattern.search(tail)
        if match is None or zlib.crc32(tail[:-CRC_DIGITS]) != int(match[3], 16):
            return None
        refuse_other_version("the file", int(match[1]), self._version)
        return int(match[1])


def digits_of(crcs: Sequence[int]) -> str:
    return "".join(f"{crc:08x}" for crc in crcs)


def crcs_in(digits: str) -> tuple[int, ...]:
    return tuple(int(digits[i : i + CRC_DIGITS], 16) for i in range(0, len(digits), CRC_DIGITS))


def check_digits(key: str, digits: str, count: int) -> None:
    """Raises ValueError unless this is a valid result of digits_of() for `count` checksums."""
    if len(digits) != CRC_DIGITS * count or re.fullmatch("[0-9a-f]*", digits) is None:
        raise ValueError(f"{key} must be {count} CRC-32s in hex digits")


def check_body(described: Mapping[str, Any], body_nbytes: int, version: int) -> None:
    """Raises ValueError if a tail's version is not this one, or if its body_bytes, block_bytes or
    crc32 do not fit a body of this size. Their types must have been checked.
    """
    if described["version"] != version:
        raise ValueError(f"version is {described['version']}, must be {version}")
    check_block_bytes(described["block_bytes"])
    if described["body_bytes"] != body_nbytes or body_nbytes <= 0 or body_nbytes % PAGE_BYTES:
        raise ValueError(f"body_bytes is {described['body_bytes']}, but the body has {body_nbytes}")
    blocks = block_count(body_nbytes, described["block_bytes"])
    check_digits("crc32", described["crc32"], blocks)
