"""Derived runs: bf16 items that are the rounding of fp32 items of the same image are not stored and
come back bit for bit; whatever else they are, they are stored; damage and forgery give bytes that
the checksum refuses.

Knows fastckpt.engine.codec, planes and roundings; must not know formats or steps.
"""

from __future__ import annotations

import errno
import os
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.engine.codec import FrameReader, FrameWriter, encoder_of, stored_nbytes_max
from fastckpt.engine.planes import FRAMES_MAX, PlanesEncoder
from fastckpt.engine.roundings import GRAIN_ITEMS, ITEMS_MIN, Roundings
from fastckpt.errors import StorageError
from fastckpt.plan.image import ItemRange, ItemRun
from fastckpt.storage.file_system import Storage
from tests.engine.test_codec import WAIT_S, fd, opened, read, relaxed, split, write
from tests.engine.test_planes import block_of, elements, forged, header_of
from tests.storm import Chance

__all__ = ["fd"]  # the fixture
PAGE, MIB = 4096, 1 << 20
DERIVED = 34


def rounded(content: bytes) -> bytes:
    """As torch rounds fp32 to bf16."""
    numbers = torch.frombuffer(bytearray(content), dtype=torch.float32)
    return numbers.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def rounded_here(content: bytes) -> bytes:
    target = bytearray(len(content) // 2)
    _engine.round_to_bf16(content, target)
    return bytes(target)


# ---- What they are made of ----


def test_rounding_is_that_of_torch() -> None:
    """For every upper half, with lower halves below, at and above the middle; but what is not a
    number becomes one thing here, and several in torch, by the processor.
    """
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten().to(torch.uint32)
    numbers = bits.view(torch.float32)
    found = torch.frombuffer(bytearray(rounded_here(numbers.numpy().tobytes())), dtype=torch.int16)
    wanted = numbers.to(torch.bfloat16).view(torch.int16)
    odd = numbers.isnan()
    assert torch.equal(found[~odd], wanted[~odd])
    assert odd.sum() > 1000 and found[odd].eq(-1).all()  # 0xFFFF


def test_items_of_other_numbers_are_refused() -> None:
    for items, nbytes in ((8, 2), (8, 5), (7, 2), (0, 2), (2, 0)):
        with pytest.raises(ValueError, match="number"):
            _engine.round_to_bf16(bytes(items), bytearray(nbytes))


def test_the_hash_is_that_of_the_best_kernel() -> None:
    kernel = _engine.polyval_kernels()[_engine.polyval_kernel()]
    key, content = bytes(range(16)), random.Random(1).randbytes(10_001)
    assert _engine.polyval(content, _engine.PolyvalKey(key)) == kernel(content, key)


# ---- What is written comes back ----


class Pairs:
    """An image of fp32 tensors and, behind them, bf16 tensors, of the same numbers of items.

    Args:
        pairs: for each, the number of items, and how many bytes of the rounding are changed.
        header_nbytes: bytes before all of them.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], header_nbytes: int = PAGE) -> None:
        content = bytearray(random.Random(7).randbytes(header_nbytes))
        self.masters: list[ItemRange] = []
        self.halves: list[ItemRange] = []
        halves = []
        for seed, (items, changes) in enumerate(pairs):
            master, half = elements(torch.float32, 4 * items, seed), bytearray()
            half += rounded(master)
            for at in random.Random(seed).sample(range(2 * items), changes):
                half[at] ^= 0x10
            self.masters.append(ItemRange(len(content), items))
            content += master
            halves.append(half)
        self.runs = [ItemRun(0, 1, False), ItemRun(header_nbytes, 4, True)]
        self.runs.append(ItemRun(len(content), 2, True))
        for half in halves:
            self.halves.append(ItemRange(len(content), len(half) // 2))
            content += half
        self.content = bytes(content)

    def write(self, fd: int, block_bytes: int, **how: int) -> tuple[tuple[int, ...], int]:
        """Writes it; returns the frames' sizes, and how many bytes were derived."""
        roundings = Roundings(self.masters, self.halves)
        encoder = encoder_of("planes", self.runs, block_bytes, roundings)
        frames = write(fd, self.content, block_bytes, encoder=encoder, **how)
        return frames, roundings.derived_nbytes


def by_the_document(fd: int, frames: Sequence[int]) -> bytes:
    """What the decoder of docs/format.md makes of a file."""
    at, found = 0, b""
    for nbytes in frames:
        found += block_of(os.pread(fd, nbytes, at), found)
        at += nbytes
    return found


def runs_of(fd: int, frames: Sequence[int]) -> list[tuple[int, int, int]]:
    """Block, size and source of each derived run."""
    at, found = 0, []
    for number, nbytes in enumerate(frames):
        for size, kind, words in header_of(os.pread(fd, nbytes, at)):
            if kind == DERIVED:
                found.append((number, size, words[0] + (words[1] << 32)))
        at += nbytes
    return found


sizes = st.integers(ITEMS_MIN, 3 * GRAIN_ITEMS) | st.sampled_from([ITEMS_MIN, 2 * GRAIN_ITEMS])


@settings(relaxed, max_examples=Chance.examples(10))
@given(
    pairs=st.lists(st.tuples(sizes, st.sampled_from([0, 0, 1, 3, 9999])), max_size=4),
    header_nbytes=st.sampled_from([PAGE, PAGE + 2, 7]),
    block_bytes=st.sampled_from([64 << 10, MIB // 2, MIB]),
)
def test_round_trip(
    tmp_path: Path, pairs: list[tuple[int, int]], header_nbytes: int, block_bytes: int
) -> None:
    image = Pairs(pairs, header_nbytes)
    with opened(tmp_path / "a.planes") as fd:
        frames, derived_nbytes = image.write(fd, block_bytes, seed=len(pairs))
        assert sum(size for _, size, _ in runs_of(fd, frames)) == derived_nbytes
        assert by_the_document(fd, frames) == image.content
        assert read(fd, len(image.content), frames, block_bytes, codec="planes") == image.content
        # In whatever order threads came, the same is derived.
        again = image.write(fd, block_bytes, threads=1)
        assert again == (frames, derived_nbytes)


def test_all_but_what_crosses_a_block_is_derived(fd: int) -> None:
    image = Pairs([(32 * GRAIN_ITEMS, 0)])
    frames, derived_nbytes = image.write(fd, 8 * MIB)
    assert len(frames) == 2 and derived_nbytes == 2 * (32 - 1) * GRAIN_ITEMS
    assert runs_of(fd, frames) == [(1, derived_nbytes, PAGE)]
    assert read(fd, len(image.content), frames, 8 * MIB, codec="planes") == image.content


def test_grains_that_differ_are_stored(fd: int) -> None:
    """One bit in a grain of five: the others are derived, as two runs."""
    image = Pairs([(5 * GRAIN_ITEMS, 0)])
    changed = bytearray(image.content)
    changed[image.halves[0].begin + 2 * 2 * GRAIN_ITEMS + 9] ^= 1
    image.content = bytes(changed)
    frames, derived_nbytes = image.write(fd, 8 * MIB)
    grain = 2 * GRAIN_ITEMS
    assert runs_of(fd, frames) == [(0, 2 * grain, PAGE), (0, 2 * grain, PAGE + 6 * grain)]
    assert derived_nbytes == 4 * grain
    assert read(fd, len(changed), frames, 8 * MIB, codec="planes") == changed


@pytest.mark.parametrize("nan", [0x7FC0, 0xFFFF, 0x7FFF, 0x7F81])
def test_what_is_not_a_number_comes_back_as_it_was(fd: int, nan: int) -> None:
    master = bytearray(elements(torch.float32, 4 * GRAIN_ITEMS, 1))
    master[400:404] = struct.pack("<I", 0xFFC12345)
    half = bytearray(rounded(bytes(master)))
    half[200:202] = struct.pack("<H", nan)
    image = Pairs([(GRAIN_ITEMS, 0)])
    image.content = image.content[:PAGE] + master + half
    frames, derived_nbytes = image.write(fd, 8 * MIB)
    assert derived_nbytes == (2 * GRAIN_ITEMS if nan == 0xFFFF else 0)
    assert read(fd, len(image.content), frames, 8 * MIB, codec="planes") == image.content


def test_equal_hashes_of_other_numbers_of_items_are_no_match(fd: int) -> None:
    """Zeros have the hash 0, however many they are."""
    items = GRAIN_ITEMS, GRAIN_ITEMS + 8
    masters = [ItemRange(PAGE, items[0])]
    halves = [ItemRange(PAGE + 4 * items[0], items[1])]
    content = bytes(PAGE + 4 * items[0] + 2 * items[1])
    roundings = Roundings(masters, halves)
    encoder = encoder_of("planes", [ItemRun(0, 4, True)], MIB, roundings)
    frames = write(fd, content, MIB, encoder=encoder)
    assert roundings.derived_nbytes == 0
    assert read(fd, len(content), frames, MIB, codec="planes") == content


# ---- Waits ----


class NoSpace(Storage):
    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space")


def test_a_block_that_waits_for_another_ends_when_that_fails(fd: int) -> None:
    image = Pairs([(2 * GRAIN_ITEMS, 0)], header_nbytes=MIB // 2)
    seen = threading.Event()

    class Encoder(PlanesEncoder):
        def see(self, block: memoryview, offset: int) -> bool:
            awaits = super().see(block, offset)
            assert awaits == (offset > 0)
            seen.set()
            return awaits

    roundings = Roundings(image.masters, image.halves)
    make = partial(Encoder, image.runs, MIB, roundings)
    writer = FrameWriter(NoSpace(), fd, "a.planes", len(image.content), MIB, make)
    (at, first), (behind, second) = split(image.content, MIB)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.transfer, "write", fd, second, behind)
        assert seen.wait(WAIT_S)
        for transfer in (lambda: writer.transfer("write", fd, first, at), waiting.result):
            with pytest.raises(StorageError) as caught:
                transfer()
            assert caught.value.errno == errno.ENOSPC


# ---- Damage ----


def test_every_flipped_bit_of_what_is_derived_is_noticed(fd: int) -> None:
    """In the derived run's header, and in the fp32 items that it is derived from."""
    image = Pairs([(ITEMS_MIN, 0)])
    frames, derived_nbytes = image.write(fd, MIB)
    assert derived_nbytes == 2 * ITEMS_MIN
    stored = os.pread(fd, frames[0], 0)
    header = header_of(stored)
    assert [kind for _, kind, _ in header] == [20, DERIVED]
    nbytes = 8 + sum(8 + 4 * len(words) for _, _, words in header)
    end = nbytes + sum(header[0][2])
    for bit in [*range(8 * (nbytes - 16), 8 * nbytes), *range(8 * nbytes, 8 * end, 9_991)]:
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        os.pwrite(fd, damaged, 0)
        found = read(fd, len(image.content), frames, MIB, codec="planes", threads=1)
        assert zlib.crc32(found) != zlib.crc32(image.content), bit


def frame_of(content: bytes) -> bytes:
    target = memoryview(bytearray(stored_nbytes_max(len(content))))
    encoder = PlanesEncoder([ItemRun(0, 4, True)], len(content))
    return bytes(target[: encoder.encode(memoryview(content), 0, target)])


def derived(nbytes: int, source: int) -> tuple[int, int, tuple[int, int]]:
    return nbytes, DERIVED, (source % (1 << 32), source >> 32)


def padded(frame: bytes) -> bytes:
    return frame.ljust(-(-len(frame) // PAGE) * PAGE, b"\0")


# Frames of the second block of a file, whose first one has fp32 items.
BLOCK = 2 * 2 * ITEMS_MIN
HALF = BLOCK // 2
FORGED = {
    "too small a run": forged((2, DERIVED, (0, 0)), (BLOCK - 2, 1, [BLOCK - 2])),
    "half an item": forged(derived(HALF + 1, 0), (HALF - 1, 1, [HALF - 1])),
    "items behind it": forged(derived(BLOCK, 2 * BLOCK)),
    "items from itself": forged(derived(BLOCK, 4)),
    "items that end in it": forged(derived(BLOCK, BLOCK)),
    "items far away": forged(derived(BLOCK, (1 << 64) - 4 * BLOCK)),
    "an offset of 2^63": forged(derived(BLOCK, 1 << 63)),
    "a run of 4 GiB": forged(derived(0xFFFFFFFE, 0)),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_runs_give_zeros(fd: int, name: str) -> None:
    master = elements(torch.float32, BLOCK, 1)
    stored = [padded(frame_of(master)), padded(FORGED[name] + bytes(HALF))]
    os.pwrite(fd, b"".join(stored), 0)
    found = read(fd, 2 * BLOCK, [*map(len, stored)], BLOCK, codec="planes", threads=1)
    assert found == master + bytes(BLOCK)


def test_what_is_derived_is_derived_from_nothing_that_is(fd: int) -> None:
    """Else a small file could make a reader decode without end."""
    master = elements(torch.float32, BLOCK, 1)
    stored = [frame_of(master)]
    stored += [forged(derived(HALF, 0), derived(HALF, 0)), forged(derived(BLOCK, 0))]
    stored += [forged(derived(HALF, BLOCK), (HALF, 1, [HALF]), rest=bytes(HALF))]
    stored = [*map(padded, stored)]
    os.pwrite(fd, b"".join(stored), 0)
    found = read(fd, 4 * BLOCK, [*map(len, stored)], BLOCK, codec="planes", threads=1)
    assert found[:BLOCK] == master
    assert found[BLOCK : 2 * BLOCK] == 2 * rounded(master), "a right frame was refused"
    assert found[2 * BLOCK :] == bytes(2 * BLOCK)


@pytest.mark.parametrize("count", [FRAMES_MAX, FRAMES_MAX + 1])
def test_no_block_is_derived_from_too_many_others(fd: int, count: int) -> None:
    """Else a small file could make a reader decode its blocks over and over."""
    block = count * HALF
    masters = [elements(torch.float32, block, seed) for seed in range(count)]
    runs = [derived(HALF, number * block) for number in range(count)]
    stored = [padded(frame) for frame in (*map(frame_of, masters), forged(*runs))]
    os.pwrite(fd, b"".join(stored), 0)
    content = b"".join(masters)
    nbytes = len(content) + block
    found = read(fd, nbytes, [*map(len, stored)], block, codec="planes", threads=1)
    assert found[:-block] == content
    wanted = b"".join(rounded(master[: 2 * HALF]) for master in masters)
    assert found[-block:] == (wanted if count == FRAMES_MAX else bytes(block))


def test_what_would_be_derived_from_too_many_blocks_is_stored(fd: int) -> None:
    """Weights in another order than their masters, so that each lies in another block."""
    count, half = 64, 2 * ITEMS_MIN
    image = Pairs([(ITEMS_MIN, 0)] * count)
    begin = image.halves[0].begin
    halves = [image.content[at : at + half] for at in range(begin, begin + count * half, half)]
    by_turns = [halves[16 * block + number] for number in range(16) for block in range(4)]
    image.content = image.content[:begin] + b"".join(by_turns)
    frames, derived_nbytes = image.write(fd, MIB)
    of_block = Counter(block for block, _size, _source in runs_of(fd, frames))
    assert max(of_block.values()) == FRAMES_MAX and len(of_block) == 2
    assert derived_nbytes == half * sum(of_block.values())
    assert read(fd, len(image.content), frames, MIB, codec="planes") == image.content


class Counted(Storage):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
        self.nbytes += nbytes
        return super().read_at(fd, nbytes, offset)


def test_only_what_is_needed_of_the_fp32_items_is_read(fd: int) -> None:
    """Of a block of 8 MiB that has others as well: not the planes' other parts."""
    image = Pairs([(GRAIN_ITEMS, 0), (29 * GRAIN_ITEMS, 99_999)])
    frames, derived_nbytes = image.write(fd, 8 * MIB)
    assert derived_nbytes == 2 * GRAIN_ITEMS and len(frames) == 2
    number = runs_of(fd, frames)[0][0]
    storage = Counted()
    reader = FrameReader(
        storage, fd, "a.planes", len(image.content), 8 * MIB, frames, codec="planes"
    )
    ((at, wanted),) = split(image.content, 8 * MIB)[number : number + 1]
    target = memoryview(bytearray(len(wanted)))
    reader.transfer("read", fd, target, at)
    assert target == wanted
    assert storage.nbytes < frames[number] + 3 * MIB
