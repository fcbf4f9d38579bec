"""One file of several ranks' parts: where each lies, and the file's checksums, made of theirs.

Responsible for that arithmetic. It must not know how ranks tell each other what they have, nor how
anything is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from fastckpt.engine.staging import combine_crcs
from fastckpt.formats import safetensors
from fastckpt.formats.shard_index import (
    PER_RANK,
    Piece,
    ShardIndex,
    entry_name,
    padding_key,
    per_rank_key,
)
from fastckpt.plan.boxes import Box
from fastckpt.plan.image import BLOCK_BYTES, Image

# Parts begin at multiples of it, so that no two ranks write to one page; and runs that have a
# checksum end there at the latest, so that those of the file's blocks can be made of them wherever
# a part begins.
GRAIN_BYTES = 256 << 10
assert BLOCK_BYTES % GRAIN_BYTES == 0


class Runs:
    """The CRC-32 of each block of a file, as far as they are covered, from those of runs.

    Args:
        begin: where the first run lies in the file.

    Attributes:
        blocks: bytes and CRC-32 of what is covered of each block.
    """

    def __init__(self, begin: int) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._begin = self._end = begin

    def append(self, nbytes: int, crc: int) -> None:
        """Adds what follows. No run crosses the end of a block."""
        assert self._end % BLOCK_BYTES + nbytes <= BLOCK_BYTES
        if self._end == self._begin or self._end % BLOCK_BYTES == 0:
            self.blocks.append((nbytes, crc))
        else:
            before, crc_before = self.blocks[-1]
            self.blocks[-1] = before + nbytes, combine_crcs(crc_before, crc, nbytes)
        self._end += nbytes

    def append_bytes(self, content: bytes) -> None:
        """The same for bytes that are at hand, and may cross blocks."""
        at = 0
        while at < len(content):
            size = min(len(content) - at, BLOCK_BYTES - self._end % BLOCK_BYTES)
            self.append(size, zlib.crc32(memoryview(content)[at : at + size]))
            at += size


def part_of(image: Image) -> Image:
    """What follows the header of a safetensors image, cut into segments whose checksums are
    reported: by slots beyond the end.
    """
    part = Image.tailless(*image.sources)
    for _offset, nbytes, address in islice(image.rows(), 1, None):
        end = address + nbytes
        while address < end:
            size = min(end - address, GRAIN_BYTES - part.body_nbytes % GRAIN_BYTES)
            part.append(address, size)
            address += size
    for number in range(len(part.segments) // 3):
        part.slots.extend((part.body_nbytes + 4 * number, number))
    return part


def runs_of(begin: int, part: Image, slot_crcs: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes and CRC-32 of what a part that begins there covers of each block of the file."""
    runs = Runs(begin)
    for (_offset, nbytes, _address), crc in zip(part.rows(), slot_crcs, strict=True):
        runs.append(nbytes, crc)
    return runs.blocks


class Entry(NamedTuple):
    """A tensor of the file, and which piece it is; None: the values of the rank that makes it."""

    begin: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece | None


class Part(NamedTuple):
    """One rank's part of the file, behind the header, from which `begin` and `end` are counted."""

    rank: int
    begin: int
    end: int
    entries: list[Entry]


def laid_out(index: ShardIndex, header_nbytes: int, rank: int, begin: int, host: int) -> Part:
    """The part of one rank, from `begin` on.

    Args:
        index: of its shard in a file of its own, with a header of so many bytes.
        rank, host: whose it is, and who makes the file.
    """
    shift, entries = begin - header_nbytes, list[Entry]()
    for piece in index.pieces:
        name = entry_name(piece.key, piece.shape, piece.box)
        entries.append(Entry(piece.begin + shift, name, piece.dtype, piece.box.sizes, piece))
    if index.per_rank is not None:
        at, nbytes = index.per_rank
        name, sizes = PER_RANK if rank == host else per_rank_key(rank), (nbytes,)
        values = None if rank == host else Piece(name, "U8", sizes, Box((0,), sizes), 0)
        entries.append(Entry(at + shift, name, "U8", sizes, values))
    entries.sort(key=lambda entry: entry.begin)
    return Part(rank, begin, index.nbytes + shift, entries)


def header_of(parts: Iterable[Part]) -> bytes:
    """That of a safetensors file of these parts; what is between them is a tensor, too."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    end = 0
    for part in parts:
        if part.begin > end:
            tensors.append((padding_key(part.rank), "U8", (part.begin - end,)))
        tensors += [(entry.name, entry.dtype, entry.shape) for entry in part.entries]
        end = part.end
    return safetensors.header(tensors, {"format": "pt"}, GRAIN_BYTES)
