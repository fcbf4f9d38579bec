"""Image describes a file's bytes before they exist; BlockChecksums serves to verify them.

Formats create both, and the engine executes them. This module uses neither torch nor files.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastckpt.errors import ensure

PAGE_BYTES = 4096
BLOCK_BYTES = 8 << 20
PORTION_BYTES = 32 << 20  # of a file that is copied: one is read while another is written
# Of a save with a late fence: a storage of at most so many bytes is captured by value.
BY_VALUE_BYTES = 64 << 10


class Segment(NamedTuple):
    """A run of an image's bytes, and the address from which they are copied."""

    offset: int
    nbytes: int
    address: int


class ItemRun(NamedTuple):
    """The begin of a run of items of one size in an image; the run ends at the next one."""

    begin: int
    width: int
    is_float: bool


@dataclass
class Image:
    """The bytes of one file: a body copied from memory, and a tail that depends on its checksums.

    The segments cover [0, body_nbytes) in order and without gaps. If there is a tail, body_nbytes
    is a multiple of PAGE_BYTES, so that body and tail can be written independently with O_DIRECT.
    Segments and slots are flat arrays instead of objects, since a checkpoint may have 10^5 of them.

    Attributes:
        segments: offset, nbytes and address of each segment.
        slots: offset and segment number of each slot, ascending. A slot is four bytes that receive
            the little-endian CRC-32 of that segment. The slots of segment i are in segment i + 1.
        numbers: begin, end, width and mask of each run of floating-point numbers that the engine
            checks, ascending. Numbers with all bits of the mask set are not finite. Begin and end
            are in bytes, and multiples of the width. Usually there are no runs.
        tail_nbytes: size of the tail, known beforehand so that the file can be allocated at once.
        tail: a function that makes the tail from the CRC-32s of the body's blocks and of the slots'
            segments.
        conversions: for each segment whose dtype in memory differs from that in the image: the
            segment's number, and the engine's numbers of the dtypes in memory and in the image.
        base: the address of body_nbytes of memory that hold an earlier image with the same layout;
            0 if there is none. If it is set, the engine stages the XOR of both images, and copies
            this image to that memory.
        sources: objects that own the segments' memory; they are kept until the body is staged.
        gathered: addresses of memory that the tail contains, each with the bytearray to which it
            must be copied before tail() is called.
    """

    tail_nbytes: int
    tail: Callable[[Sequence[int], Sequence[int]], bytes]
    segments: array[int] = field(default_factory=lambda: array("Q"))
    slots: array[int] = field(default_factory=lambda: array("Q"))
    numbers: array[int] = field(default_factory=lambda: array("Q"))
    conversions: array[int] = field(default_factory=lambda: array("Q"))
    base: int = 0
    sources: list[object] = field(default_factory=list)
    gathered: list[tuple[int, bytearray]] = field(default_factory=list)
    body_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.body_nbytes + self.tail_nbytes

    @classmethod
    def tailless(cls, *sources: object) -> Image:
        """Returns an empty image without a tail, whose body may be of any size."""
        return cls(tail_nbytes=0, tail=lambda _blocks, _slots: b"", sources=[*sources])

    @classmethod
    def of_bytes(cls, content: bytearray) -> Image:
        image = cls.tailless(content)
        image.append(address_of(content), len(content))
        return image

    def append(self, address: int, nbytes: int) -> int:
        """Adds a segment at the end of the body and returns its number."""
        ensure(nbytes > 0 and address != 0, "a segment must have bytes and an address")
        number = len(self.segments) // 3
        self.segments.extend((self.body_nbytes, nbytes, address))
        self.body_nbytes += nbytes
        return number

    def rows(self) -> Iterator[Segment]:
        columns = iter(self.segments)
        return (Segment(*row) for row in zip(columns, columns, columns, strict=True))


@dataclass(frozen=True)
class BlockChecksums:
    """The checksums of a written file's body, and the file's tail, which is already verified.

    Attributes:
        body_nbytes: size of the body, which the block_crcs cover.
        block_bytes: size of a block; the last may be shorter.
        block_crcs: CRC-32 of each block.
        tail: the bytes from body_nbytes to the end of the file.
    """

    body_nbytes: int
    block_bytes: int
    block_crcs: tuple[int, ...]
    tail: bytes


def address_of(memory: bytearray) -> int:
    """Returns the address of a bytearray's content, valid while it is neither resized nor freed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def block_count(nbytes: int, block_bytes: int) -> int:
    """Returns how many blocks of block_bytes cover nbytes."""
    return -(-nbytes // block_bytes)
