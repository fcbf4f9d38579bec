"""File images: a pure description of a file's bytes before they exist, and of one that does.

An Image says which memory goes to which offset of a file and where checksums are filled in; an
Index says how the bytes of a written file are verified. This module knows neither torch nor files:
formats make Images and Indexes, the pipeline carries them to the engine.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PAGE_BYTES = 4096
BLOCK_BYTES = 8 << 20


class Segment(NamedTuple):
    """A run of an image's bytes and the memory it is copied from."""

    offset: int
    nbytes: int
    address: int


class Slot(NamedTuple):
    """Four image bytes that receive the little-endian CRC-32 of the segment with that number."""

    offset: int
    segment: int


@dataclass
class Image:
    """The bytes of one file: a body copied from memory, and a tail that depends on its checksums.

    The body covers [0, body_nbytes) by segments in order and without gaps; where a tail follows,
    body_nbytes is a multiple of PAGE_BYTES, so that both can be written independently with
    O_DIRECT. Segments and slots are columns of uint64 (three and two a row): a checkpoint may
    have 10^5 of them.

    Attributes:
        segments: offset, nbytes, address of each segment.
        slots: offset, segment number of each checksum slot. The slots of segment i lie in segment
            i + 1 and follow each other.
        tail_nbytes: size of the tail, known beforehand so that the file can be allocated at once.
        tail: makes the tail from (CRC-32 of each block of the body, CRC-32 of each slot's segment).
        sources: objects that own the memory of the segments; kept until the body is staged.
        gathered: addresses of memory that the tail is made of, and what has to hold a copy of it
            before tail() is called.
    """

    tail_nbytes: int
    tail: Callable[[Sequence[int], Sequence[int]], bytes]
    segments: array[int] = field(default_factory=lambda: array("Q"))
    slots: array[int] = field(default_factory=lambda: array("Q"))
    sources: list[object] = field(default_factory=list)
    gathered: list[tuple[int, bytearray]] = field(default_factory=list)
    body_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.body_nbytes + self.tail_nbytes

    @classmethod
    def tailless(cls, *sources: object) -> Image:
        """An image to append to, as yet without a byte: a body of any size, no tail."""
        return cls(tail_nbytes=0, tail=lambda _blocks, _slots: b"", sources=[*sources])

    @classmethod
    def of_bytes(cls, content: bytearray) -> Image:
        """The image that is just these bytes."""
        image = cls.tailless(content)
        image.append(address_of(content), len(content))
        return image

    def append(self, address: int, nbytes: int) -> int:
        """Adds a segment at the end of the body and returns its number."""
        assert nbytes > 0 and address != 0
        number = len(self.segments) // 3
        self.segments.extend((self.body_nbytes, nbytes, address))
        self.body_nbytes += nbytes
        return number

    def rows(self) -> Iterator[Segment]:
        """The segments as tuples."""
        columns = iter(self.segments)
        return (Segment(*row) for row in zip(columns, columns, columns, strict=True))

    def slot_rows(self) -> Iterator[Slot]:
        """The slots as tuples."""
        columns = iter(self.slots)
        return (Slot(*row) for row in zip(columns, columns, strict=True))


@dataclass(frozen=True)
class Index:
    """How to verify a written file: the body by blocks, the tail as a whole (already verified).

    Attributes:
        body_nbytes: bytes covered by block_crcs.
        block_bytes: size of a block of the body; the last may be shorter.
        block_crcs: CRC-32 of each block.
        tail: the verified bytes from body_nbytes to the end of the file.
    """

    body_nbytes: int
    block_bytes: int
    block_crcs: tuple[int, ...]
    tail: bytes


def address_of(memory: bytearray) -> int:
    """Returns the address of a bytearray's content, valid while it is neither resized nor freed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def block_count(nbytes: int, block_bytes: int) -> int:
    """Number of blocks of block_bytes that cover nbytes."""
    return -(-nbytes // block_bytes)
