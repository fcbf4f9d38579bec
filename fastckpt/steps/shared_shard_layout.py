"""The arithmetic of one file of several ranks' parts: where each part lies, and the checksums of
the file's blocks, combined from those of the parts.

The module must not know how ranks exchange these numbers, nor how anything is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from fastckpt.engine.staging import combine_crcs
from fastckpt.errors import ensure
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

# Parts begin at multiples of this, so that no two ranks write to one page. Runs that have a
# checksum do not cross a multiple, so the checksums of the file's blocks can be combined from
# theirs wherever a part begins.
GRAIN_BYTES = 256 << 10
ensure(BLOCK_BYTES % GRAIN_BYTES == 0, "blocks have whole grains")


class BlockCrcs:
    """The CRC-32 of a file's blocks, combined from those of consecutive runs from `begin` on.

    Attributes:
        blocks: for each block, how many bytes of it the runs cover, and the CRC-32 of these.
    """

    def __init__(self, begin: int) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._begin = self._end = begin

    def append(self, nbytes: int, crc: int) -> None:
        """Adds the next run, which must not cross the end of a block."""
        ensure(self._end % BLOCK_BYTES + nbytes <= BLOCK_BYTES, "a run lies in one block")
        if self._end == self._begin or self._end % BLOCK_BYTES == 0:
            self.blocks.append((nbytes, crc))
        else:
            before, crc_before = self.blocks[-1]
            self.blocks[-1] = before + nbytes, combine_crcs(crc_before, crc, nbytes)
        self._end += nbytes

    def append_bytes(self, content: bytes) -> None:
        """Adds bytes that are at hand and may cross blocks."""
        at = 0
        while at < len(content):
            size = min(len(content) - at, BLOCK_BYTES - self._end % BLOCK_BYTES)
            self.append(size, zlib.crc32(memoryview(content)[at : at + size]))
            at += size


def part_of(image: Image) -> Image:
    """Returns the body of a safetensors image after its header, cut into segments that do not cross
    a grain. Slots beyond its end make the engine report each segment's checksum.
    """
    part, header_nbytes = Image.tailless(*image.sources), image.segments[1]
    for number, value in enumerate(image.numbers):  # begin, end, width, mask
        part.numbers.append(value - header_nbytes if number % 4 < 2 else value)
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
    """Returns BlockCrcs.blocks of a part that begins at `begin` in the file."""
    runs = BlockCrcs(begin)
    for (_offset, nbytes, _address), crc in zip(part.rows(), slot_crcs, strict=True):
        runs.append(nbytes, crc)
    return runs.blocks


class TensorEntry(NamedTuple):
    """A tensor of the file and its piece, which is None for the own values of the file's maker."""

    begin: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece | None


class RankPart(NamedTuple):
    """One rank's part of the file; `begin` and `end` are counted from the end of the header."""

    rank: int
    begin: int
    end: int
    entries: list[TensorEntry]


def laid_out(index: ShardIndex, header_nbytes: int, rank: int, begin: int, host: int) -> RankPart:
    """Returns the part of `rank`, from `begin` on, in the file that `host` makes; `index` is that
    of its shard as a file of its own, whose header has `header_nbytes`.
    """
    shift, entries = begin - header_nbytes, list[TensorEntry]()
    for piece in index.pieces:
        name = entry_name(piece.key, piece.shape, piece.box)
        entries.append(TensorEntry(piece.begin + shift, name, piece.dtype, piece.box.sizes, piece))
    if index.per_rank is not None:
        at, nbytes = index.per_rank
        name, sizes = PER_RANK if rank == host else per_rank_key(rank), (nbytes,)
        values = None if rank == host else Piece(name, "U8", sizes, Box((0,), sizes), 0)
        entries.append(TensorEntry(at + shift, name, "U8", sizes, values))
    entries.sort(key=lambda entry: entry.begin)
    return RankPart(rank, begin, index.nbytes + shift, entries)


def header_of(parts: Iterable[RankPart]) -> bytes:
    """Returns the header of a safetensors file of these parts; padding between them is a tensor."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    end = 0
    for part in parts:
        if part.begin > end:
            tensors.append((padding_key(part.rank), "U8", (part.begin - end,)))
        tensors += [(entry.name, entry.dtype, entry.shape) for entry in part.entries]
        end = part.end
    return safetensors.header(tensors, {"format": "pt"}, GRAIN_BYTES)
