"""Intervals of an image: the bytes of a file that each rank writes, and the combination of the
ranks' checksums.

Responsible for cutting an Image along its blocks, and for the CRC-32s of segments that are cut. It
must not know records, processes or how files are written.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastckpt.errors import ensure
from fastckpt.plan.image import BLOCK_BYTES, Image, block_count

SLOT_BYTES = 4
Combine = Callable[[int, int, int], int]  # (crc of a, crc of b, len(b)) -> crc of a + b


class Patch(NamedTuple):
    """Bytes of a file that a rank can compute only from other ranks' checksums."""

    offset: int
    content: bytes


def bounds(
    body_nbytes: int,
    ranks: int,
    first_min: int = 0,
    elsewhere: int = 0,
    grain: int = BLOCK_BYTES,
) -> list[int]:
    """Cuts [0, body_nbytes) into one interval per rank, as evenly as multiples of `grain` allow.

    Args:
        body_nbytes: size of the image's body.
        ranks: number of intervals; some are empty if there are fewer grains.
        first_min: least size of the first interval.
        elsewhere: bytes that the first rank writes in addition to its interval.
        grain: unit of the cuts in bytes, a multiple of BLOCK_BYTES.

    Returns:
        ranks + 1 offsets; rank r writes [result[r], result[r + 1]).
    """
    ensure(grain > 0 and grain % BLOCK_BYTES == 0, "intervals must have complete blocks")
    if ranks == 1:
        return [0, body_nbytes]
    share = (body_nbytes + elsewhere) / ranks - elsewhere
    total = block_count(body_nbytes, grain)
    first = max(round(share / grain), block_count(first_min, grain))
    first = min(total, max(0, first))
    cuts = [first + (total - first) * i // (ranks - 1) for i in range(ranks)]
    return [0, *(min(body_nbytes, cut * grain) for cut in cuts)]


class Part:
    """One interval of an image, as a separate image.

    Attributes:
        begin, end: the interval.
        image: the interval's bytes, with offsets from `begin`; an empty interval has no segments.
        slots: numbers, in the complete image, of the slots whose segments have bytes in the
            interval. The engine reports the CRC-32s of the parts of these segments in the interval.
    """

    def __init__(self, whole: Image, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.image = Image(tail_nbytes=0, tail=whole.tail, sources=whole.sources)
        self.slots = range(0)
        if begin == end:
            return
        if (begin, end) == (0, whole.body_nbytes):  # as where one rank saves alone
            self.image.segments, self.image.slots = whole.segments, whole.slots
            self.image.body_nbytes, self.slots = end, range(len(whole.slots) // 2)
            return
        offsets = whole.segments[0::3]
        first = max(0, bisect_left(offsets, begin + 1) - 1)
        last = bisect_left(offsets, end)
        for number in range(first, last):
            offset, nbytes, address = whole.segments[3 * number : 3 * number + 3]
            cut = max(begin, offset)
            self.image.append(address + cut - offset, min(end, offset + nbytes) - cut)
        described = whole.slots[1::2]
        self.slots = range(bisect_left(described, first), bisect_left(described, last))
        for number in self.slots:
            offset, segment = whole.slots[2 * number : 2 * number + 2]
            # Beyond its image, the engine computes the CRC of a slot and does not fill it in.
            crosses = offset < end < offset + SLOT_BYTES
            self.image.slots.extend((end - begin if crosses else offset - begin, segment - first))


class Checksums:
    """The CRC-32s of a complete body, combined from those of its parts.

    Args:
        whole: the complete image; only its offsets are used.
        cuts: the result of bounds().
        combine: a function that combines the CRC-32s of two adjacent runs of bytes.
    """

    def __init__(self, whole: Image, cuts: Sequence[int], combine: Combine) -> None:
        self._body_nbytes = whole.body_nbytes
        self._begins, self._lengths = whole.segments[0::3], whole.segments[1::3]
        self._slots, self._described = whole.slots[0::2], whole.slots[1::2]
        self._cuts = cuts
        self._combine = combine
        self._parts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def add(self, rank: int, block_crcs: Sequence[int], slot_crcs: Sequence[int]) -> None:
        """Adds the CRC-32s that one rank's engine reported for its part."""
        self._parts[rank] = (block_crcs, slot_crcs)

    def ranks_needed(self, rank: int) -> list[int]:
        """Returns the ranks, ascending, whose checksums patches(rank) needs."""
        needed = {
            holder
            for number in self._cut_slots(rank)
            for holder, _first, _nbytes in self._holders(number)
        }
        return sorted(needed)

    def patches(self, rank: int) -> list[Patch]:
        """Returns the patches that this rank writes at the ends of its interval."""
        return [self._patch(rank, number) for number in self._cut_slots(rank)]

    def joined(self) -> tuple[list[int], list[int]]:
        """Returns the CRC-32s of all blocks and slots, after add() was called for every rank."""
        blocks = [crc for rank in sorted(self._parts) for crc in self._parts[rank][0]]
        for rank in sorted(self._parts):
            for number in self._cut_slots(rank):
                self._correct(blocks, rank, number)
        return blocks, [self._slot_crc(number) for number in range(len(self._slots))]

    def _correct(self, blocks: list[int], rank: int, number: int) -> None:
        """Updates a block's CRC-32 for a patch without the block's bytes, by CRC-32's linearity."""
        offset, new = self._patch(rank, number)
        # The engine fills in the CRC of the part it saw, if the slot lies wholly in that part.
        old = bytes(len(new))
        for holder, first, _nbytes in self._holders(number):
            if holder == rank and len(new) == SLOT_BYTES:
                old = self._parts[rank][1][number - first].to_bytes(SLOT_BYTES, "little")
        block = offset // BLOCK_BYTES
        block_end = min((block + 1) * BLOCK_BYTES, self._body_nbytes)
        change = zlib.crc32(old) ^ zlib.crc32(new)
        blocks[block] ^= self._combine(change, 0, block_end - offset - len(new))

    def _patch(self, rank: int, number: int) -> Patch:
        """Returns the bytes of a slot that are in a rank's interval."""
        at = self._slots[number]
        low, high = max(at, self._cuts[rank]), min(at + SLOT_BYTES, self._cuts[rank + 1])
        content = self._slot_crc(number).to_bytes(SLOT_BYTES, "little")
        return Patch(low, content[low - at : high - at])

    def _cut_slots(self, rank: int) -> list[int]:
        """Returns the slots with bytes in a rank's interval that its engine cannot fill in alone.

        These are only the slot of a segment that begins before the interval, and a slot that
        crosses an end of the interval; so only the interval's first and last slot can be among
        them.
        """
        begin, end = self._cuts[rank], self._cuts[rank + 1]
        first = bisect_left(self._slots, begin - SLOT_BYTES + 1)
        last = bisect_left(self._slots, end) - 1
        return [
            number
            for number in sorted({first, last})
            if first <= number <= last
            and not (
                begin <= self._begins[self._described[number]]
                and begin <= self._slots[number]
                and self._slots[number] + SLOT_BYTES <= end
            )
        ]

    def _holders(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, first slot of its part, bytes) of the ranks that share a slot's segment."""
        segment = self._described[number]
        begin = self._begins[segment]
        end = begin + self._lengths[segment]
        for rank in range(max(0, bisect_left(self._cuts, begin + 1) - 1), len(self._cuts) - 1):
            low, high = max(begin, self._cuts[rank]), min(end, self._cuts[rank + 1])
            if self._cuts[rank] >= end:
                return
            if low < high:
                yield rank, self._first_slot(rank), high - low

    def _first_slot(self, rank: int) -> int:
        """Returns the first slot whose segment has bytes in a rank's interval."""
        segment = max(0, bisect_left(self._begins, self._cuts[rank] + 1) - 1)
        return bisect_left(self._described, segment)

    def _slot_crc(self, number: int) -> int:
        crc, nbytes_read = 0, 0
        for rank, first, nbytes in self._holders(number):
            part = self._parts[rank][1][number - first]
            crc = part if not nbytes_read else self._combine(crc, part, nbytes)
            nbytes_read += nbytes
        return crc
