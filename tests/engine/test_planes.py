"""Frames of planes: any block comes back bit for bit, by our reader and by the one that stands in
docs/reference/format.md; what has no pattern costs no room; damage gives bytes that the checksum
refuses.

Knows fastckpt.engine.codec and planes; must not know formats or steps.
"""

from __future__ import annotations

import base64
import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.engine.codec import (
    GRAIN_BYTES,
    RUNS_MAX,
    PlanesEncoder,
    decode,
    encoder_of,
    padding_nbytes,
    stored_nbytes_max,
)
from fastckpt.errors import CorruptCheckpoint
from fastckpt.plan.image import ItemRun
from tests.kit.codecs import (
    BLOCK,
    PAGE,
    block_of,
    fd,
    header_of,
    opened,
    read,
    relaxed,
    split,
    write,
)

__all__ = ["fd"]  # the fixture
MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


def elements(dtype: torch.dtype, nbytes: int, seed: int) -> bytes:
    """As tensors have them, or nearly: what is left of nbytes is random."""
    generator = torch.Generator().manual_seed(seed)
    count, rest = divmod(nbytes, dtype.itemsize)
    values = torch.randn(count, generator=generator)
    values = values * (0.02 if dtype.is_floating_point else 99)
    content = values.to(dtype).view(torch.uint8).numpy().tobytes()
    return content + random.Random(seed).randbytes(rest)


def constant(dtype: torch.dtype, nbytes: int, seed: int) -> bytes:
    return bytes([seed % 2]) * nbytes


def run_of(dtype: torch.dtype, begin: int = 0) -> ItemRun:
    return ItemRun(begin, dtype.itemsize, dtype.is_floating_point)


def frame_of(content: bytes, runs: Sequence[ItemRun], offset: int = 0) -> bytes:
    target = memoryview(bytearray(stored_nbytes_max(len(content))))
    encoder = PlanesEncoder(runs, len(content))
    return bytes(target[: encoder.encode(memoryview(content), offset, target)])


def decoded(frame: bytes, nbytes: int) -> bytes | None:
    block = memoryview(bytearray(b"\xaa" * nbytes))
    return bytes(block) if decode(frame, block) else None


# ---- What is written comes back ----


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 511, 512, 513, 5000])
def test_planes_have_the_bytes_of_one_significance(width: int, count: int) -> None:
    content = random.Random(count).randbytes(count * width)
    items = [
        int.from_bytes(content[at : at + width], "little") for at in range(0, len(content), width)
    ]
    bits = 8 * width
    for turned in (False, True)[: 1 if width == 1 else 2]:
        planes = [bytearray(count) for _ in range(width)]
        _engine.split_planes(content, turned, planes)
        moved = [(n << 1 | n >> bits - 1) % (1 << bits) if turned else n for n in items]
        assert planes == [bytearray(n >> 8 * p & 255 for n in moved) for p in range(width)]
        joined = bytearray(len(content))
        _engine.join_planes(planes, turned, joined)
        assert joined == content


def test_planes_and_items_of_other_sizes_are_refused() -> None:
    for planes, nbytes in (([], 0), ([3], 4), ([4, 4], 9), ([4, 3], 8), ([2, 2, 2], 6)):
        buffers = [bytearray(size) for size in planes]
        with pytest.raises(ValueError, match="planes"):
            _engine.split_planes(bytes(nbytes), False, buffers)
        with pytest.raises(ValueError, match="planes"):
            _engine.join_planes(buffers, False, bytearray(nbytes))


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, list[ItemRun]]:
    """Parts of many dtypes in any order; items need not be aligned."""
    content, runs = b"", []
    sizes = st.integers(1, 99) | st.integers(1, 3 * GRAIN_BYTES)
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=6)):
        runs.append(run_of(dtype, len(content)))
        content += draw(st.sampled_from([elements, constant]))(dtype, draw(sizes), len(content))
    return content, runs


@relaxed
@given(image=images(), block_bytes=st.sampled_from([1000, PAGE, BLOCK, 5 * BLOCK]))
def test_round_trip(tmp_path: Path, image: tuple[bytes, list[ItemRun]], block_bytes: int) -> None:
    content, runs = image
    encoder = encoder_of("planes", runs, block_bytes)
    with opened(tmp_path / "a.planes") as fd:
        frames = write(fd, content, block_bytes, encoder=encoder)
        assert sum(frames) == os.fstat(fd).st_size
        at = 0
        for (_, block), stored in zip(split(content, block_bytes), frames, strict=True):
            assert stored % PAGE == 0 and stored <= stored_nbytes_max(len(block))
            assert block_of(os.pread(fd, stored, at)) == block
            at += stored
        assert read(fd, len(content), frames, block_bytes, codec="planes") == content


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_size_blocks(fd: int, dtype: torch.dtype) -> None:
    content = elements(dtype, 9 * MIB + 3, 1)
    frames = write(fd, content, 8 * MIB, encoder=encoder_of("planes", [run_of(dtype)], 8 * MIB))
    assert read(fd, len(content), frames, 8 * MIB, codec="planes") == content


# ---- Sizes ----


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 0.84), (torch.bfloat16, 0.67), (torch.float16, 0.86)]
)
def test_weights_become_smaller(dtype: torch.dtype, most: float) -> None:
    content = elements(dtype, 8 * MIB, 1)
    frame = frame_of(content, [run_of(dtype)])
    assert len(frame) < most * len(content)
    ((nbytes, kind, sizes),) = header_of(frame)
    assert (nbytes, kind) == (len(content), dtype.itemsize + 16)
    assert sizes[:-1] == [nbytes // dtype.itemsize] * (dtype.itemsize - 1), "mantissas stay raw"


@pytest.mark.parametrize("nbytes", [1, 7, 8, 1000, GRAIN_BYTES, 8 * MIB])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_is_stored_as_it_is(dtype: torch.dtype, nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    frame = frame_of(content, [run_of(dtype)])
    assert frame == struct.pack("<4s4I", b"PLN1", 1, nbytes, 1, nbytes) + content


def test_a_sample_that_promised_too_much() -> None:
    """Zeros where the samples lie, and noise elsewhere but for as much as makes a frame larger."""
    content = bytearray(random.Random(1).randbytes(MIB))
    for at in range(0, MIB, MIB // 8):
        content[at : at + 2048] = bytes(2048)
    frame = frame_of(bytes(content), [ItemRun(0, 1, False)])
    assert decoded(frame, MIB) == block_of(frame) == content


def test_small_runs_do_not_make_a_large_header() -> None:
    """A block has a run for each of its grains at most, however many the image has in it."""
    kinds = [(4, True), (4, False), (2, True), (8, False), (1, False)]
    runs = [ItemRun(at, *kinds[at // 64 % 5]) for at in range(0, 8 * MIB, 64)]
    content = elements(torch.float32, 8 * MIB - 3, 1)
    frame = frame_of(content, runs)
    header = header_of(frame)
    assert len(header) <= 8 * MIB // GRAIN_BYTES + 1 < RUNS_MAX
    assert block_of(frame) == decoded(frame, len(content)) == content


def test_runs_of_a_kind_are_one() -> None:
    runs = [ItemRun(0, 1, False), *(ItemRun(at, 4, True) for at in range(PAGE, MIB, PAGE))]
    frame = frame_of(elements(torch.float32, MIB, 1), runs)
    assert [run[:2] for run in header_of(frame)] == [(MIB, 20)]


def test_runs_are_of_the_image_and_not_of_the_block() -> None:
    runs = [ItemRun(0, 4, True), ItemRun(MIB, 2, True), ItemRun(MIB + 3 * GRAIN_BYTES, 8, False)]
    content = elements(torch.bfloat16, MIB, 1)
    frame = frame_of(content, runs, offset=MIB - GRAIN_BYTES)
    kinds = [(GRAIN_BYTES, 20), (3 * GRAIN_BYTES, 18), (MIB - 4 * GRAIN_BYTES, 8)]
    assert [run[:2] for run in header_of(frame)] == kinds
    assert decoded(frame, MIB) == content


# ---- Damage ----


def several() -> tuple[bytes, list[ItemRun]]:
    """Three grains of different kinds and an odd rest, none of which is constant."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    content = b"".join(elements(dtype, GRAIN_BYTES, 1) for dtype in dtypes) + b"\x05\x06\x07"
    return content, [run_of(dtype, n * GRAIN_BYTES) for n, dtype in enumerate(dtypes)]


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    content, runs = several()
    frame = frame_of(content, runs)
    header = header_of(frame)
    assert [kind for _, kind, _ in header] == [20, 18, 8, 1]
    nbytes = 8 + sum(8 + 4 * len(sizes) for _, _, sizes in header)
    refused = 0
    for bit in range(8 * nbytes):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        found = decoded(bytes(damaged), len(content))
        assert found is None or zlib.crc32(found) != zlib.crc32(content), bit
        refused += found is None
    assert refused > 4 * nbytes, "few damages were noticed before the checksum"


def test_every_flipped_byte_of_a_frame_gives_bytes_that_the_checksum_judges() -> None:
    content, runs = elements(torch.float32, 2000, 1) + b"odd", [run_of(torch.float32)]
    frame = frame_of(content, runs)
    assert len(frame) < len(content)
    for at in range(len(frame)):
        for change in (1, 0x80, 0xFF):
            damaged = frame[:at] + bytes([frame[at] ^ change]) + frame[at + 1 :]
            found = decoded(damaged, len(content))
            assert found is None or found == content or zlib.crc32(found) != zlib.crc32(content)


def test_a_frame_that_was_cut_is_refused_at_every_length() -> None:
    content, runs = several()
    frame = frame_of(content, runs)
    for length in [*range(200), *range(200, len(frame), 997), len(frame) - 1]:
        assert decoded(frame[:length], len(content)) is None, length
    assert decoded(frame + bytes(padding_nbytes(len(frame))), len(content)) == content


def forged(*runs: tuple[int, int, Sequence[int]], rest: bytes = b"", count: int = -1) -> bytes:
    words = [word for nbytes, kind, sizes in runs for word in (nbytes, kind, *sizes)]
    head = struct.pack("<4sI", b"PLN1", len(runs) if count < 0 else count)
    return head + struct.pack(f"<{len(words)}I", *words) + rest


PLANE = zstandard.ZstdCompressor(level=1).compress(bytes(1000))
BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(64 * MIB))
SIZELESS = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1000))
LARGE = b"\x28\xb5\x2f\xfd\x40\xf8" + (744).to_bytes(2, "little") + b"\xff" * 91
FORGED = {
    "nothing": b"",
    "another magic": b"PLN2" + forged((1000, 1, [1000]), rest=bytes(1000))[4:],
    "no run": forged(rest=bytes(1000)),
    "runs without end": forged((1000, 1, [1000]), rest=bytes(1000), count=0xFFFFFFFF),
    "too many runs": forged(*[(1, 1, [1])] * (RUNS_MAX + 1), rest=bytes(RUNS_MAX + 1)),
    "a run without bytes": forged((1000, 1, [1000]), (0, 1, [0]), rest=bytes(1000)),
    "a run of 4 GiB": forged((0xFFFFFFFF, 1, [0xFFFFFFFF]), rest=bytes(1000)),
    "runs that add up to more": forged((1000, 1, [1000]), (1, 1, [1]), rest=bytes(1001)),
    "runs that add up to less": forged((999, 1, [999]), rest=bytes(1000)),
    "no whole items": forged((999, 2, [499, 499]), (1, 1, [1]), rest=bytes(1000)),
    "a width of 3": forged((999, 3, [333] * 3), (1, 1, [1]), rest=bytes(1000)),
    "a width of 16": forged((992, 16, []), (8, 1, [8]), rest=bytes(1000)),
    "items of a kind that is not known": forged((1000, 34, [0, 0]), rest=bytes(1000)),
    "turned bytes": forged((1000, 17, [1000]), rest=bytes(1000)),
    "a plane that is too long": forged((1000, 1, [1001]), rest=bytes(1001)),
    "a plane without bytes": forged((1000, 1, [0]), rest=bytes(1000)),
    "a plane that is no frame": forged((1000, 1, [999]), rest=bytes(1000)),
    "a frame of 64 MiB": forged((1000, 1, [len(BOMB)]), rest=BOMB + bytes(1000)),
    "a frame without its size": forged((1000, 1, [len(SIZELESS)]), rest=SIZELESS),
    "a frame of another plane": forged((1000, 2, [len(PLANE), 500]), rest=PLANE + bytes(500)),
    "a frame of a large window": forged((1000, 1, [99]), rest=LARGE),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_headers_give_zeros_and_take_no_memory(fd: int, name: str) -> None:
    content = FORGED[name].ljust(4 * PAGE if len(FORGED[name]) <= 4 * PAGE else 32 * PAGE, b"\0")
    os.pwrite(fd, content, 0)
    tracemalloc.start()
    try:
        assert decoded(FORGED[name], 1000) is None
        assert read(fd, 1000, (2 * PAGE,), PAGE, codec="planes", threads=1) == bytes(1000)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_frame_that_is_right_is_no_forgery() -> None:
    for frame in (
        forged((1000, 1, [len(PLANE)]), rest=PLANE),
        forged((2000, 2, [len(PLANE), 1000]), rest=PLANE + bytes(1000)),
        forged(*[(1, 1, [1])] * RUNS_MAX, rest=bytes(RUNS_MAX)),
    ):
        nbytes = sum(run[0] for run in header_of(frame))
        assert decoded(frame, nbytes) == block_of(frame) == bytes(nbytes)


def test_sizes_of_frames_that_cannot_be(fd: int) -> None:
    with pytest.raises(CorruptCheckpoint, match="frame"):
        read(fd, PAGE, (4 * PAGE,), PAGE, codec="planes")


# A frame that the first version with planes wrote.
GOLDEN = base64.b64decode(
    "UExOMQIAAABYAgAAFAAAAG4AAABZAAAAlgAAABcAAAADAAAAAQAAAAMAAAAotS/9IJYtAwBkBQAKFB4oND5IUlxmcHyE"
    "kJqkrrjiZuxw9nwAhAqQFJogpCiuNLg+xEjMUthchiquNLg+4KRoKOyucDT2uHw+AMSESArMkFIU2JpcHuKkZirChkgK"
    "ziAgBQABEQBrgfJgXHI2yyi1L/0gloUCAGQEANeuhVwzCuG4j2Y9FOvCmXBHHnpmUT0oFADr18KumYVwXEczHgr14cy4"
    "o496cGZcUUc9MygeFAoA9evh18zCuK6jmY+FhQIACUiDnEw9ICs3Q09bZ3J+ipairrnF0d3p9QAGDBIYHiQpLzU7QUdN"
    "U1lfZWtwdnyCiI6UmqCmrLK4vcPJz9Xb4eft8/n/AgUICw4RFBcaHSAjJigrLjE0Nzo9QENGSUxPUlVYW15hZGdqbXBy"
    "dXh7foGEh4qNkJOWmZyfoqWoq66xtLe6vL/CxcjLztHU19rd4OPm6ezv8vX4+/4AKLUv/SCWdQAAKIKCg4SFAxAAMgnm"
    "nbFlbmQ="
)


def golden_content() -> bytes:
    floats = (torch.arange(150) * 0.37 + 9).view(torch.uint8).numpy().tobytes()
    return floats + b"end"


def test_frames_of_the_first_version_are_read() -> None:
    content = golden_content()
    assert decoded(GOLDEN, len(content)) == block_of(GOLDEN) == content
