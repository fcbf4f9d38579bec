"""The checksum: every kernel this CPU offers against zlib, and combination against arithmetic.

Knows CRC-32 and nothing else; that a copy is checksummed as it is made is tested by tests/native.
"""

from __future__ import annotations

import random
import zlib
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastckpt import _engine

KERNELS = _engine.crc32_kernels()
NOISE = memoryview(random.Random(1).randbytes(1 << 17))
POLYNOMIAL = 0xEDB88320
ONE, X = 1 << 31, 1 << 30  # bit-reflected: the highest bit is the coefficient of x^0

crcs = st.integers(0, 0xFFFFFFFF)
lengths = st.one_of(st.integers(0, 700), st.integers(0, 70_000))
starts = st.integers(0, 300)


def times(a: int, b: int) -> int:
    """Product of two polynomials modulo that of CRC-32, bit by bit."""
    product = 0
    for degree in range(32):
        if a >> (31 - degree) & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def x_to_the(exponent: int) -> int:
    result, base = ONE, X
    while exponent:
        if exponent & 1:
            result = times(result, base)
        base = times(base, base)
        exponent >>= 1
    return result


def test_kernels() -> None:
    assert "portable" in KERNELS
    assert _engine.crc32_kernel() in KERNELS


@pytest.mark.parametrize("kernel", KERNELS)
def test_known_values(kernel: str) -> None:
    assert KERNELS[kernel](b"") == 0
    assert KERNELS[kernel](b"123456789") == 0xCBF43926
    assert KERNELS[kernel](bytes(1 << 20)) == 0xA738EA1C


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_length_and_alignment_of_a_step(kernel: str) -> None:
    for nbytes in range(600):
        for start in (0, 1, 15, 63):
            piece = NOISE[start : start + nbytes]
            assert KERNELS[kernel](piece) == zlib.crc32(piece), (start, nbytes)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None)
@given(starts, lengths)
@example(0, 1 << 16)
@example(1, (1 << 16) - 1)
def test_kernel_equals_zlib(kernel: str, start: int, nbytes: int) -> None:
    piece = NOISE[start : start + nbytes]
    assert KERNELS[kernel](piece) == zlib.crc32(piece)


@settings(deadline=None)
@given(starts, lengths, crcs)
def test_checksum_is_continued_as_zlib_does(start: int, nbytes: int, crc: int) -> None:
    piece = NOISE[start : start + nbytes]
    assert _engine.crc32(piece, crc) == zlib.crc32(piece, crc)


@settings(deadline=None)
@given(st.lists(st.tuples(starts, st.integers(0, 5_000)), max_size=8))
def test_checksum_of_pieces_is_that_of_the_whole(pieces: list[tuple[int, int]]) -> None:
    chained = combined = 0
    whole = b""
    for start, nbytes in pieces:
        piece = NOISE[start : start + nbytes]
        chained = _engine.crc32(piece, chained)
        combined = _engine.crc32_combine(combined, _engine.crc32(piece), nbytes)
        whole += piece
    assert chained == combined == zlib.crc32(whole)


@settings(deadline=None)
@given(crcs, crcs, st.integers(0, (1 << 64) - 1))
@example(0xFFFFFFFF, 0, (1 << 32) - 1)
@example(0xFFFFFFFF, 0, 1 << 32)
@example(0x80000000, 1, (1 << 64) - 1)
@example(1, 2, 0)
def test_combination_is_a_product(first: int, second: int, nbytes: int) -> None:
    expected = times(x_to_the(8 * nbytes), first) ^ second
    assert _engine.crc32_combine(first, second, nbytes) == expected


@pytest.mark.parametrize(
    "content", [b"abc", bytearray(b"abc"), memoryview(b"abc"), array("Q", [7])]
)
def test_any_buffer_is_taken(content: bytes | bytearray | memoryview | array[int]) -> None:
    assert _engine.crc32(content) == zlib.crc32(content)
    assert all(kernel(content) == zlib.crc32(content) for kernel in KERNELS.values())
