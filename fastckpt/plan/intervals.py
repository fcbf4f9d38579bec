"""Intervals of an image: which bytes of one file each rank writes, and how checksums of parts join.

Responsible for cutting an Image along its blocks and for the CRC-32s of what a cut goes through. It
must not know what a record is, who the ranks are, or how anything is written.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastckpt.plan.image import BLOCK_BYTES, Image, block_count

SLOT_BYTES = 4
Combine = Callable[[int, int, int], int]  # (crc of a, crc of b, len(b)) -> crc of a + b


class Patch(NamedTuple):
    """Bytes of a file that are known only when every rank's checksums are."""

    offset: int
    content: bytes


def bounds(
    body_nbytes: int,
    ranks: int,
    first_min: int = 0,
    elsewhere: int = 0,
    grain: int = BLOCK_BYTES,
) -> list[int]:
    """Cuts [0, body_nbytes) into one interval per rank, along grains, as even as those allow.

    Args:
        body_nbytes: of the image.
        ranks: number of intervals; some are empty if there are fewer grains.
        first_min: the first interval is at least so long.
        elsewhere: bytes that the first rank writes besides its interval.
        grain: along multiples of what to cut; a multiple of BLOCK_BYTES.

    Returns:
        ranks + 1 offsets; rank r writes [result[r], result[r + 1]).
    """
    assert grain > 0 and grain % BLOCK_BYTES == 0
    if ranks == 1:
        return [0, body_nbytes]
    share = (body_nbytes + elsewhere) / ranks - elsewhere
    total = block_count(body_nbytes, grain)
    first = max(round(share / grain), block_count(first_min, grain))
    first = min(total, max(0, first))
    cuts = [first + (total - first) * i // (ranks - 1) for i in range(ranks)]
    return [0, *(min(body_nbytes, cut * grain) for cut in cuts)]


class Part:
    """One interval of an image as an image of its own.

    Attributes:
        begin, end: the interval.
        image: its bytes; offsets count from begin. Empty intervals have no segments.
        slots: numbers of the slots of the whole image whose segment has bytes in here; the image's
            own slots are these, and what the engine reports for them are CRC-32s of the segments'
            parts.
    """

    def __init__(self, whole: Image, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.image = Image(tail_nbytes=0, tail=whole.tail, sources=whole.sources)
        self.slots = range(0)
        if begin == end:
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
            crosses = offset < end < offset + SLOT_BYTES
            self.image.slots.extend((end - begin if crosses else offset - begin, segment - first))


class Checksums:
    """The CRC-32s of a whole body, joined from those of its parts.

    Args:
        whole: the image; only offsets are looked at.
        cuts: as from bounds().
        combine: CRC-32 of two runs of bytes, one after the other.
    """

    def __init__(self, whole: Image, cuts: Sequence[int], combine: Combine) -> None:
        self._body_nbytes = whole.body_nbytes
        self._begins, self._lengths = whole.segments[0::3], whole.segments[1::3]
        self._slots, self._described = whole.slots[0::2], whole.slots[1::2]
        self._cuts = cuts
        self._combine = combine
        self._parts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def add(self, rank: int, block_crcs: Sequence[int], slot_crcs: Sequence[int]) -> None:
        """Takes what the engine of one rank reported for its part."""
        self._parts[rank] = (block_crcs, slot_crcs)

    def ranks_needed(self, rank: int) -> list[int]:
        """Ranks whose checksums patches(rank) needs, ascending; empty if nothing is patched."""
        needed = {
            holder
            for number in self._cut_slots(rank)
            for holder, _first, _nbytes in self._holders(number)
        }
        return sorted(needed)

    def patches(self, rank: int) -> list[Patch]:
        """Yields what this rank fills in at the edges of its interval when checksums are known."""
        return [self._patch(rank, number) for number in self._cut_slots(rank)]

    def joined(self) -> tuple[list[int], list[int]]:
        """CRC-32 of each block and of each slot's segment, as if one rank had staged the image.

        Needs the checksums of all ranks.
        """
        blocks = [crc for rank in sorted(self._parts) for crc in self._parts[rank][0]]
        for rank in sorted(self._parts):
            for number in self._cut_slots(rank):
                self._correct(blocks, rank, number)
        return blocks, [self._slot_crc(number) for number in range(len(self._slots))]

    def _correct(self, blocks: list[int], rank: int, number: int) -> None:
        """Makes a block's CRC that of the block after its patch: CRC-32 is linear."""
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
        """The bytes of a slot that lie in a rank's interval."""
        at = self._slots[number]
        low, high = max(at, self._cuts[rank]), min(at + SLOT_BYTES, self._cuts[rank + 1])
        content = self._slot_crc(number).to_bytes(SLOT_BYTES, "little")
        return Patch(low, content[low - at : high - at])

    def _cut_slots(self, rank: int) -> list[int]:
        """Slots with bytes in a rank's interval that its engine cannot fill in alone.

        These are the slot of a segment that was open where the interval begins, and slots that lie
        across one of its ends: of the slots in the interval, the first and the last at most.
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
        """Ranks with parts of a slot's segment: (rank, first slot of that rank's part, bytes)."""
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
        """Number of the first slot whose segment has bytes in a rank's interval."""
        segment = max(0, bisect_left(self._begins, self._cuts[rank] + 1) - 1)
        return bisect_left(self._described, segment)

    def _slot_crc(self, number: int) -> int:
        crc, seen = 0, 0
        for rank, first, nbytes in self._holders(number):
            part = self._parts[rank][1][number - first]
            crc = part if not seen else self._combine(crc, part, nbytes)
            seen += nbytes
        return crc
