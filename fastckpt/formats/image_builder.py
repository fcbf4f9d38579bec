"""What torch zips and `.distcp` files have in common: an image in which headers and others' memory
take turns, and a tail of checksums that ends in a line of its own. It must not know what they say.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastckpt.errors import ensure
from fastckpt.formats.strict_json import check_block_bytes, refuse_newer
from fastckpt.plan.image import PAGE_BYTES, Image, address_of, block_count

TAIL_BYTES_MAX = 1 << 32
CRC_DIGITS = 8


class ImageBuilder:
    """The state of one layout. Its attribute `offset` is where the next byte goes."""

    def __init__(self) -> None:
        self.offset = 0
        self._headers = bytearray()
        self._header_begin = 0
        # Segments in order: address, or None for headers, which move as they grow; and size.
        self._parts: list[tuple[int | None, int]] = []
        self._sources: list[object] = []
        self._slots: list[tuple[int, int]] = []

    def put(self, data: bytes) -> None:
        """Adds bytes, which are copied."""
        self._headers += data
        self.offset += len(data)

    def put_memory(self, source: object, address: int, nbytes: int) -> None:
        """Adds bytes, at least one, that lie at an address for as long as `source` exists."""
        self._close_header()
        self._sources.append(source)
        self._parts.append((address, nbytes))
        self.offset += nbytes

    def put_slot(self, offset: int) -> int:
        """Has the CRC-32 of the memory that was added last written to an offset behind it; returns
        the number of this slot.
        """
        self._slots.append((offset, len(self._parts) - 1))
        return len(self._slots) - 1

    def _close_header(self) -> None:
        nbytes = len(self._headers) - self._header_begin
        if nbytes:
            self._parts.append((None, nbytes))
            self._header_begin += nbytes

    def image(self, nbytes: int, tail: Callable[[Sequence[int], Sequence[int]], bytes]) -> Image:
        """Returns the image, with a tail of so many bytes; the body ends at the end of a page."""
        self._close_header()
        image = Image(nbytes, tail, sources=[self._headers, *self._sources])
        header = address_of(self._headers)
        for address, size in self._parts:
            if address is None:
                address, header = header, header + size
            image.append(address, size)
        for slot in self._slots:
            image.slots.extend(slot)
        is_page = image.body_nbytes == self.offset and self.offset % PAGE_BYTES == 0
        ensure(is_page, f"the body ends at {image.body_nbytes}, the tail begins at {self.offset}")
        return image


class ClosingLine:
    """The last bytes of a file: a name, the format's version, the offset of the tail, and the
    CRC-32 of all of the tail before these last digits. `nbytes` is their number.
    """

    def __init__(self, name: str, version: int) -> None:
        self._begin, self._version = f"{name} {version:02d} ", version
        self._pattern = re.compile(rf"{name} (\d{{2}}) ([0-9a-f]{{16}}) ([0-9a-f]{{8}})\Z".encode())
        self.nbytes = len(self.closed(b"", 0))

    def closed(self, tail: bytes, offset: int) -> bytes:
        """Returns a tail that begins at the offset, with this line behind it."""
        tail += f"{self._begin}{offset:016x} ".encode()
        return tail + f"{zlib.crc32(tail):08x}".encode()

    def tail_offset(self, end: bytes, nbytes: int) -> int | None:
        """Returns where the tail of a file of nbytes begins; None if its end is not fastckpt's."""
        match = self._pattern.search(end)
        offset = 0 if match is None else int(match[2], 16)
        return offset if 0 < offset < nbytes <= offset + TAIL_BYTES_MAX else None

    def version(self, tail: bytes) -> int | None:
        """Returns the version of a tail that is whole, None of a damaged one; raises as
        refuse_newer().
        """
        match = self._pattern.search(tail)
        if match is None or zlib.crc32(tail[:-CRC_DIGITS]) != int(match[3], 16):
            return None
        refuse_newer("the file", int(match[1]), self._version)
        return int(match[1])


def digits_of(crcs: Sequence[int]) -> str:
    return "".join(f"{crc:08x}" for crc in crcs)


def crcs_in(digits: str) -> tuple[int, ...]:
    return tuple(int(digits[i : i + CRC_DIGITS], 16) for i in range(0, len(digits), CRC_DIGITS))


def check_digits(key: str, digits: str, count: int) -> None:
    """Raises ValueError unless digits_of() may have made this of so many checksums."""
    if len(digits) != CRC_DIGITS * count or re.fullmatch("[0-9a-f]*", digits) is None:
        raise ValueError(f"{key} is not {count} CRC-32s in hex digits")


def check_body(described: Mapping[str, Any], body_nbytes: int, version: int) -> None:
    """Raises ValueError unless the version, body_bytes, block_bytes and crc32 of a tail, which have
    the right types, are of this version and fit a body of this size.
    """
    if described["version"] != version:
        raise ValueError(f"version is {described['version']}, not {version}")
    check_block_bytes(described["block_bytes"])
    if described["body_bytes"] != body_nbytes or body_nbytes <= 0 or body_nbytes % PAGE_BYTES:
        raise ValueError(f"body_bytes is {described['body_bytes']}, the body has {body_nbytes}")
    blocks = block_count(body_nbytes, described["block_bytes"])
    check_digits("crc32", described["crc32"], blocks)
