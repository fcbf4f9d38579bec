"""Intervals of an image: parts cover it, and checksums joined from parts are those of the whole.

Everything is compared with the plain computation over the bytes. Block boundaries are made to fall
everywhere (in data, in headers, across a slot) by choosing sizes near multiples of a block.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.plan import rank_intervals
from fastckpt.plan.image import BLOCK_BYTES, Image, address_of
from tests.kit.slots import slots_of
from tests.kit.storm import Chance

MEMORY = bytearray(random.Random(0).randbytes(1 << 20)) * 40
SLOT = rank_intervals.SLOT_BYTES


def image_of(records: list[tuple[int, int]]) -> Image:
    """Records of (header bytes, data bytes); each data's slot lies 4 bytes into the next header."""
    image = Image(tail_nbytes=0, tail=lambda _b, _s: b"", sources=[MEMORY])
    base, headers = address_of(MEMORY), bytearray(64 << 10)
    image.sources.append(headers)
    for header, data in records:
        image.append(address_of(headers), header)
        number = image.append(base + 7, data)
        image.slots.extend((image.body_nbytes + 4, number))
    image.append(address_of(headers), 4096 + -image.body_nbytes % 4096)
    return image


def content_of(image: Image) -> bytearray:
    """The bytes of an image with its slots filled in."""
    whole = bytearray()
    crcs = []
    for segment in image.rows():
        data = ctypes.string_at(segment.address, segment.nbytes)
        crcs.append(zlib.crc32(data))
        whole += data
    for slot in slots_of(image):
        whole[slot.offset : slot.offset + SLOT] = crcs[slot.segment].to_bytes(SLOT, "little")
    return whole


def staged(part: rank_intervals.Part) -> tuple[bytearray, list[int], list[int]]:
    """What the engine makes of a part: its bytes, block CRCs, slot CRCs."""
    content, crcs = bytearray(), []
    for segment in part.image.rows():
        content += ctypes.string_at(segment.address, segment.nbytes)
    rows = list(part.image.rows())
    for slot in slots_of(part.image):
        segment = rows[slot.segment]
        crcs.append(zlib.crc32(content[segment.offset : segment.offset + segment.nbytes]))
    for slot, crc in zip(slots_of(part.image), crcs, strict=True):
        if slot.offset < len(content):
            content[slot.offset : slot.offset + SLOT] = crc.to_bytes(SLOT, "little")
    blocks = range(0, len(content), BLOCK_BYTES)
    return content, [zlib.crc32(content[b : b + BLOCK_BYTES]) for b in blocks], crcs


def check(image: Image, cuts: list[int]) -> None:
    whole = content_of(image)
    checksums = rank_intervals.Checksums(image, cuts, _engine.crc32_combine)
    assembled = bytearray()
    for rank in range(len(cuts) - 1):
        part = rank_intervals.Part(image, cuts[rank], cuts[rank + 1])
        content, block_crcs, slot_crcs = staged(part)
        assert len(slot_crcs) == len(part.slots)
        checksums.add(rank, block_crcs, slot_crcs)
        assembled += content
    for rank in range(len(cuts) - 1):
        patches = checksums.patches(rank)
        assert len(patches) <= 2 and bool(checksums.ranks_needed(rank)) == bool(patches)
        for offset, data in patches:
            assert cuts[rank] <= offset and offset + len(data) <= cuts[rank + 1]
            assembled[offset : offset + len(data)] = data
    assert assembled == whole
    blocks, slots = checksums.joined()
    begins = range(0, len(whole), BLOCK_BYTES)
    assert blocks == [zlib.crc32(whole[b : b + BLOCK_BYTES]) for b in begins]
    rows = list(image.rows())
    assert slots == [
        zlib.crc32(whole[rows[s.segment].offset :][: rows[s.segment].nbytes])
        for s in slots_of(image)
    ]


near = st.builds(
    lambda blocks, off: max(1, blocks * BLOCK_BYTES + off),
    st.integers(0, 2),
    st.integers(-300, 300) | st.integers(1, 1 << 20),
)


@settings(max_examples=Chance.examples(8), deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 300), near), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_parts_join_to_the_whole(records: list[tuple[int, int]], ranks: int) -> None:
    image = image_of(records)
    check(image, rank_intervals.bounds(image.body_nbytes, ranks))


@pytest.mark.parametrize(
    "shift",
    [
        pytest.param(shift, marks=[] if shift in (-8, -1, 0, 1, 8) else pytest.mark.torture)
        for shift in range(-10, 11)
    ],
)
def test_a_block_edge_anywhere_around_a_slot(shift: int) -> None:
    image = image_of([(64, BLOCK_BYTES - 64 + shift), (64, BLOCK_BYTES), (20, 100)])
    check(image, rank_intervals.bounds(image.body_nbytes, 2))
    check(image, rank_intervals.bounds(image.body_nbytes, 4))
    check(image, [0, BLOCK_BYTES, BLOCK_BYTES, image.body_nbytes])


def test_one_segment_over_many_ranks() -> None:
    image = image_of([(50, 4 * BLOCK_BYTES + 123)])
    check(image, rank_intervals.bounds(image.body_nbytes, 5))


@given(
    st.integers(1, 10**13),
    st.integers(1, 10_000),
    st.integers(0, 10**10),
    st.integers(0, 1 << 26),
)
def test_bounds_are_even(nbytes: int, ranks: int, first_min: int, elsewhere: int) -> None:
    first_min = min(first_min, nbytes)
    cuts = rank_intervals.bounds(nbytes, ranks, first_min, elsewhere)
    assert cuts[0] == 0 and cuts[-1] == nbytes and cuts == sorted(cuts) and len(cuts) == ranks + 1
    assert all(cut % BLOCK_BYTES == 0 or cut == nbytes for cut in cuts)
    assert cuts[1] >= first_min
    if ranks > 1:
        others = [end - begin for begin, end in itertools.pairwise(cuts[1:])]
        assert max(others) - min(others) <= 2 * BLOCK_BYTES
        mean = (nbytes + elsewhere) / ranks
        if first_min <= mean - elsewhere:
            assert abs(cuts[1] + elsewhere - mean) <= BLOCK_BYTES
